"""Run by the tests in a mount namespace of its own: stores on real file systems that are small or read-only.

unshare -m python -m process.small_disk full DIRECTORY --limit size [--every 3]
unshare -m python -m process.small_disk read_only DIRECTORY
"""

from __future__ import annotations

import argparse
import errno
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weightcast import LiveModel, Store
from weightcast.errors import StorageFailed

from .power_cut import read_tree
from .sample import find_problems, find_strays, publish, tensors

LIMITS = {
    "size": [f"size={kibibytes}k" for kibibytes in range(40, 1800, 44)],  # one version takes about 430 KiB
    "nr_inodes": [f"size=8m,nr_inodes={count}" for count in range(3, 48)],
}


@contextmanager
def mounted(path: Path, options: str) -> Iterator[None]:
    """A fresh tmpfs."""
    _mount("-t", "tmpfs", "-o", options, "tmpfs", path)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True, timeout=20)  # fails if a file is still open


def _mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, timeout=20)


def refusal(act: Callable[[], object], code: int) -> list[str]:
    """What is wrong with how an act is refused."""
    try:
        act()
    except StorageFailed as error:
        return [] if error.errno == code and error.path in str(error) else [f"refused with: {error}"]
    except Exception as error:
        return [f"raised {type(error).__name__}: {error}"]
    return ["was not refused"]


def fill(path: Path) -> tuple[list[str], bool]:
    """Publish until the disk is full. Returns all problems, and whether there was room for more after a gc."""
    store = Store(path)
    published: list[str] = []
    while len(published) < 20:
        following = f"step_{len(published) + 1}"
        try:
            publish(path, following)
        except StorageFailed as error:
            if error.errno != errno.ENOSPC:
                return [f"publishing {following}: {error}"], False
            break
        published.append(following)
    if not path.is_dir():
        return [], False
    problems = refusal(lambda: publish(path, following), errno.ENOSPC)  # nothing was left that fills the disk further
    problems += find_problems(path, [published], published[-1:])[1] + find_strays(path)
    if len(published) < 2:
        return problems, False
    report = store.gc(keep_last=1)
    if report.removed != published[:-1] or report.garbage:
        problems.append(f"gc removed {report}")
    publish(path, following)
    return problems + find_problems(path, [[published[-1], following]], [following])[1] + find_strays(path), True


def full(directory: Path, limit: str, every: int) -> dict[str, Any]:
    """Disks of many sizes, or of some of them, so that they are full at many moments of a publish."""
    problems: list[str] = []
    went_on = 0
    disks = LIMITS[limit][::every]
    for options in disks:
        with mounted(directory, options):
            try:
                found, more = fill(directory / "store")
            except Exception as error:
                found, more = [f"{type(error).__name__}: {error}"], False
        problems += [f"{options}: {problem}" for problem in found]
        went_on += more
    summary = f"{len(disks)} disks, {went_on} took another version after gc"
    return {"problems": problems, "went_on": went_on, "summary": summary}


def read_only(directory: Path) -> dict[str, Any]:
    """A store on a mount that becomes read-only, and one with a legacy version file."""
    path, legacy = directory / "store", directory / "legacy"
    with mounted(directory, "size=8m"):
        for store in (path, legacy):
            publish(store, "step_1")
            publish(store, "step_2")
        (legacy / "version.yaml").unlink()
        (legacy / "version.txt").write_text("step_2\n")
        _mount("-o", "remount,ro", directory)
        before = read_tree(directory)
        acts: dict[str, Callable[[], object]] = {
            "publish": lambda: publish(path, "step_3"),
            "publish to a new store": lambda: publish(directory / "other", "step_1"),
            "gc": lambda: Store(path).gc(keep_last=1),
            "announce": lambda: Store(path).announce("step_1"),
            "migrate": lambda: Store(legacy).migrate(),
        }
        problems = [f"{name} {problem}" for name, act in acts.items() for problem in refusal(act, errno.EROFS)]
        if read_tree(directory) != before:
            problems.append("files changed")
        for store in (path, legacy):
            problems += find_problems(store, [["step_1", "step_2"]], ["step_2"])[1]
        model = {name: array.copy() for name, array in tensors("step_1").items()}
        if LiveModel(model, source=path).update().version != "step_2":
            problems.append("a model could not be updated")
        _mount("-o", "remount,rw", directory)
        publish(path, "step_3")
        Store(legacy).migrate()
        problems += find_problems(path, [["step_1", "step_2", "step_3"]], ["step_3"])[1]
    return {"problems": problems}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("full", "read_only"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--limit", choices=LIMITS)
    parser.add_argument("--every", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.kind == "full":
        print(json.dumps(full(arguments.directory, arguments.limit, arguments.every)))
    else:
        print(json.dumps(read_only(arguments.directory)))


if __name__ == "__main__":
    main()
