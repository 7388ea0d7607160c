"""Does a source answer, and with what?"""

from __future__ import annotations

import contextlib

from weightcast.clock import Deadline
from weightcast.doctor.finding import Finding, ok, problem
from weightcast.errors import WeightcastError
from weightcast.transports.registry import open_receiver


def source_finding(source: str, deadline: Deadline) -> Finding:
    """Ask a source for its newest version and what that is. Not a byte of weights is fetched."""
    try:
        with contextlib.closing(open_receiver(source, rank=0)) as receiver:
            manifest = receiver.manifest(receiver.newest(), deadline=deadline)
    except WeightcastError as error:
        meaning = f"engines cannot be updated from it ({error.code})"
        return problem("source", str(error), meaning, "`weightcast docs errors` has the cause and the cure of each error")
    return ok(
        "source",
        f"{source}: newest {manifest.version}, {manifest.kind}, {len(manifest.tensors)} tensors",
        manifest.root_digest,
    )
