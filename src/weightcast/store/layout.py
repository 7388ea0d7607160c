"""Where things lie in a store. Nothing else builds these paths."""

from __future__ import annotations

from pathlib import Path

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
RESERVED = (MANIFEST, INDEX)


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
