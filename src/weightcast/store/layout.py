"""Where things lie in a store. Nothing else builds these paths."""

from __future__ import annotations

import re
from pathlib import Path

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
RECEIVERS = "receivers.json"

_PAYLOAD = re.compile(r"delta-(\d{5,})\.bin")
_OWN = re.compile(r"(delta|share)-\d{5,}\.bin")


def versions_dir(store: Path) -> Path:
    """The directory that holds one directory per version."""
    return store / "versions"


def version_dir(store: Path, version: str) -> Path:
    """The directory of one version, sealed or not."""
    return versions_dir(store) / version


def manifest_path(store: Path, version: str) -> Path:
    """The file whose presence makes a version exist."""
    return version_dir(store, version) / MANIFEST


def lock_path(store: Path) -> Path:
    """The file that writers lock."""
    return store / ".lock"


def part_name(index: int, count: int) -> str:
    """The name of a sealed part; `index` counts from 0, the name from 1, as checkpoints do."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def unsealed_part_name(index: int) -> str:
    """The name of a part while the number of parts is not known yet."""
    return f".part-{index + 1:05d}.tmp"


def payload_name(number: int) -> str:
    """The name of a packed delta. A version is published with number 1; each fold writes the next."""
    return f"delta-{number:05d}.bin"


def unsealed_payload_name() -> str:
    """The name of a packed delta while it is not sure that the version becomes one."""
    return ".delta.tmp"


def next_payload_names(directory: Path, count: int) -> list[str]:
    """Names that no packed delta in a version's directory has, referenced or not."""
    taken = [int(match[1]) for path in directory.iterdir() if (match := _PAYLOAD.fullmatch(path.name))]
    return [payload_name(1 + max(taken, default=0) + number) for number in range(count)]


def is_reserved(name: str) -> bool:
    """Whether a version may write a file of this name itself."""
    return name in (MANIFEST, INDEX) or name.endswith(".safetensors") or _OWN.fullmatch(name) is not None
