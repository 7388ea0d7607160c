"""What a depot can be asked beside files: boxes of tensors, digests of a rank's parameters, deltas from what is held."""

from __future__ import annotations

from pathlib import Path

from weightcast.depot.boxes import Boxes
from weightcast.depot.catching_up import CatchUps, WithPayloads
from weightcast.depot.exchange import Route
from weightcast.depot.holding import Shelf
from weightcast.depot.reading import Reading
from weightcast.depot.slices import Slices
from weightcast.wire.depot import PREFIX

KEEP_NBYTES = 512 << 20


class Questions:
    """Answers from the versions of a shelf. Any thread may ask.

    `store` is the directory where the shelf's versions lie, if they do: their deltas are folded for receivers that are
    behind. `threads` are those that work on one delta. Deltas are kept up to `keep_nbytes` in all; a single one that is
    larger is refused. They are sent as files: give `shelf` of this object to whatever sends files.
    """

    def __init__(self, shelf: Shelf, store: Path | None, *, threads: int | None = 1, keep_nbytes: int = KEEP_NBYTES) -> None:
        reading = Reading(shelf, store, threads=threads)
        self._boxes, self._slices = Boxes(shelf, reading), Slices(shelf, reading)
        self._catch_ups = CatchUps(shelf, store, threads=threads, keep_nbytes=keep_nbytes)
        self.shelf: Shelf = WithPayloads(shelf, self._catch_ups)

    def routes(self) -> list[Route]:
        """What is answered here."""
        version = f"{PREFIX}/versions/{{version}}"
        return [
            Route("POST", f"{version}/boxes", self._boxes.answer),
            Route("POST", f"{version}/digests", self._slices.answer),
            Route("GET", f"{version}/delta", self._catch_ups.answer),
        ]
