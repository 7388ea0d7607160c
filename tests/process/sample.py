"""Small versions with everything that makes a publish take different paths, and the checks that a store must pass."""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np

from weightcast import Store
from weightcast.errors import StoreNotFound, VersionNotSet, WeightcastError
from weightcast.store.publishing import Mode

PART_NBYTES = 65_536 + 5_200  # the room for the header, and one or two of the tensors below
FILES = ("config.json", "tokenizer.json")


def tensors(version: str) -> dict[str, np.ndarray]:
    """The tensors of a version: several parts, tied names, sizes that are no multiple of 8, an empty and a scalar one.

    Versions named `near_…` differ from one another in a few elements, all others in all.
    """
    if not version.startswith("near_"):
        return _random_tensors(version)
    state = _random_tensors("near")
    random = np.random.default_rng(zlib.crc32(version.encode()))
    for name in sorted(state.keys() - {"nothing", "count", "head.weight"}):
        flat = state[name].reshape(-1) if state[name].flags.c_contiguous else state[name].T.reshape(-1)
        flat[random.integers(0, flat.size, 3)] *= 3
    return state


def _random_tensors(version: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(zlib.crc32(version.encode()))

    def floats(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    embed = floats(40, 16)
    return {
        "embed.weight": embed,
        "norm.scale": floats(7).astype(np.float16),
        **{f"block.{index}.weight": floats(32, 24) for index in range(3)},
        "block.flags": random.integers(0, 255, 13, dtype=np.uint8),
        "block.half": floats(16, 48).astype(ml_dtypes.bfloat16),
        "block.turned": floats(24, 30).T,
        "nothing": np.empty((0, 4), dtype=np.float32),
        "count": np.array(random.integers(1 << 30), dtype=np.int64),
        "head.weight": embed,
    }


def publish(path: Path, version: str) -> None:
    """Publish the version of that name; never waits long for a lock.

    Versions named `near_…` become deltas wherever there is a base, those named `far_…` are tried as deltas and turn out too
    large, and all others are full versions from the start.
    """
    files = {name: f"{name} of {version}".encode() for name in FILES}
    mode: Mode = "auto" if version.startswith(("near_", "far_")) else "full"
    Store(path, lock_timeout=5).publish(version, tensors(version), mode, files=files, part_nbytes=PART_NBYTES)


def find_problems(path: Path, allowed: list[list[str]], newest: list[str]) -> tuple[list[str], list[str]]:
    """The versions that the store lists, and everything that is wrong with it.

    `allowed` are the lists of versions it may have, `newest` the versions that may be the newest one. An empty `newest`
    allows a store that is not there yet, or names none.
    """
    problems: list[str] = []
    store = Store(path)
    try:
        listings = store.listings()
    except StoreNotFound:
        return [], ([] if [] in allowed else ["the store is gone"])
    problems += [f"{listing.version} has a broken manifest: {listing.error}" for listing in listings if listing.error]
    versions = store.versions()
    if versions not in allowed:
        problems.append(f"lists {versions}, not one of {allowed}")
    for version in versions:
        problems += store.verify(version).problems
        problems += _differences(store, version)
    try:
        named = store.newest()
    except VersionNotSet as error:
        problems += [str(error)] if newest else []
    except WeightcastError as error:
        problems.append(f"{type(error).__name__}: {error}")
    else:
        if named not in versions:
            problems.append(f"the newest version is said to be {named}, which is not listed in {versions}")
        if newest and named not in newest:
            problems.append(f"the newest version is said to be {named}, not one of {newest}")
    return versions, problems


def _differences(store: Store, version: str) -> list[str]:
    expected = tensors(version)
    try:
        loaded = store.load(version)
    except Exception as error:
        return [f"{version} cannot be loaded: {type(error).__name__}: {error}"]
    if loaded.keys() != expected.keys():
        return [f"{version} has the tensors {sorted(loaded)}"]
    return [
        f"{version}: tensor {name} has other bits than were published"
        for name, array in expected.items()
        if (array.dtype, array.shape, array.tobytes()) != (loaded[name].dtype, loaded[name].shape, loaded[name].tobytes())
    ]


def find_strays(path: Path) -> list[str]:
    """Files and directories in a store that belong to no listed version."""
    store = Store(path)
    belongs = {".lock", "version.yaml", "versions"}
    for version in store.versions():
        manifest = store.manifest(version)
        payload = manifest.payloads
        inside = ("manifest.json", *(file.file for file in (*manifest.parts, *manifest.files, *payload)))
        belongs |= {f"versions/{version}", *(f"versions/{version}/{name}" for name in inside)}
    present = {str(entry.relative_to(path)) for entry in path.rglob("*")}
    missing = [f"{entry} is missing" for entry in sorted(belongs - present - {".lock", "version.yaml", "versions"})]
    return [f"{entry} is garbage" for entry in sorted(present - belongs)] + missing


def find_recovery_problems(path: Path, versions: list[str], new: str, later: str) -> list[str]:
    """What goes wrong when life goes on after an accident: a gc on a copy, and publishing again on the store itself."""
    problems: list[str] = []
    if path.exists():
        copy = path.with_name(path.name + ".copy")
        shutil.copytree(path, copy)
        Store(copy, lock_timeout=5).gc(keep_last=10)
        problems += [f"after gc: {stray}" for stray in find_strays(copy)]
        shutil.rmtree(copy)
    following = later if new in versions else new
    publish(path, following)
    store = Store(path, lock_timeout=5)
    if (store.versions(), store.newest()) != ([*versions, following], following):
        problems.append(f"after publishing {following}: lists {store.versions()}, newest {store.newest()}")
    problems += [*store.verify(following).problems, *_differences(store, following)]
    store.gc(keep_last=10)
    return problems + [f"after publishing {following} and gc: {stray}" for stray in find_strays(path)]
