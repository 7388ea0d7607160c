"""Snapshots in the legacy layout: find, open, write and list them. The file names are those of names.py."""

from __future__ import annotations

from weightcast.store.snapshot.lookup import (
    DEFAULT_SHARED_DIR,
    ListedFile,
    ListedSnapshot,
    Located,
    LocatedFile,
    SnapshotList,
    list_snapshots,
    locate,
)
from weightcast.store.snapshot.reader import Snapshot, open_snapshot
from weightcast.store.snapshot.writer import write_snapshot

__all__ = [
    "DEFAULT_SHARED_DIR",
    "ListedFile",
    "ListedSnapshot",
    "Located",
    "LocatedFile",
    "Snapshot",
    "SnapshotList",
    "list_snapshots",
    "locate",
    "open_snapshot",
    "write_snapshot",
]
