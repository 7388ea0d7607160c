"""The pieces of a version that is on its way here: which are there, and who fetches the others from where. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from weightcast.wire.manifest import Manifest


@dataclass(eq=False)
class Piece:
    """One piece of a file, from byte `start` to before `stop`. One that is `taken` is being fetched by somebody.

    `wrong` counts, by source, how often the bytes did not have the digest.
    """

    file: str
    index: int
    start: int
    stop: int
    digest: str
    there: bool = False
    taken: bool = False
    wrong: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class Run:
    """Pieces of a file that follow one another, to be fetched in one go from one source."""

    source: int
    pieces: Sequence[Piece]

    @property
    def file(self) -> str:
        """Whose pieces they are."""
        return self.pieces[0].file

    @property
    def start(self) -> int:
        """Where the first begins."""
        return self.pieces[0].start

    @property
    def stop(self) -> int:
        """Where the last ends."""
        return self.pieces[-1].stop


class Pieces:
    """All pieces of a version, in the order in which they are fetched: file by file, front to back.

    Nothing of a file is fetched before it is known what an earlier try left of it: `begin`. Whoever has this locks: it is
    not for several threads at once.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._of = {
            file: [Piece(file, index, *piece) for index, piece in enumerate(manifest.pieces(file))]
            for file in manifest.listed_files
        }
        self._starts = {file: [piece.start for piece in pieces] for file, pieces in self._of.items()}
        self._count = sum(map(len, self._of.values()))
        self._begin: dict[str, int] = {}  # pieces at the start of a file that are there
        self._there = 0

    def of(self, file: str) -> Sequence[Piece]:
        """The pieces of a file."""
        return self._of[file]

    def begin(self, file: str) -> None:
        """The pieces of a file that are not there may be fetched."""
        self._begin.setdefault(file, 0)

    # -- fetching --------------------------------------------------------------------------------------------------------

    def take(self, choose: Callable[[Piece], int | None], *, most_nbytes: int = 0) -> Run | None:
        """What to fetch next, up to `most_nbytes` or one piece, and from which source; `choose` says that for a piece, or
        None: not now.

        Of all that are taken, the caller says what became of them: `right`, `wrong` or `dropped`.
        """
        for file in self._of:
            for piece in self._from_front(file):
                if piece.there or piece.taken:
                    continue
                source = choose(piece)
                if source is not None:
                    return self._run(piece, source, most_nbytes, choose)
                if not piece.wrong:  # nobody to ask, for this piece or any other
                    return None
        return None

    def _run(self, first: Piece, source: int, most_nbytes: int, choose: Callable[[Piece], int | None]) -> Run:
        pieces: list[Piece] = []
        for piece in islice(self._of[first.file], first.index, None):
            if piece.there or piece.taken or (piece.wrong and choose(piece) != source):
                break
            if pieces and piece.stop - first.start > most_nbytes:
                break
            piece.taken = True
            pieces.append(piece)
        return Run(source, pieces)

    def right(self, piece: Piece) -> None:
        """A piece has its digest."""
        piece.there, piece.taken = True, False
        self._there += 1

    def wrong(self, piece: Piece, source: int) -> None:
        """A piece that came does not have its digest."""
        piece.wrong[source] += 1
        piece.taken = False

    def dropped(self, pieces: Sequence[Piece]) -> None:
        """Pieces did not come."""
        for piece in pieces:
            piece.taken = False

    # -- what there is ---------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many pieces are there."""
        return self._there

    @property
    def whole(self) -> bool:
        """Whether everything is there."""
        return self._there == self._count

    def reach(self, file: str, start: int, stop: int) -> int:
        """Up to where the bytes of a range are there."""
        for piece in islice(self._of[file], max(0, bisect_right(self._starts[file], start) - 1), None):
            if start >= stop or not piece.there:
                break
            start = min(piece.stop, stop)
        return start

    def missing(self) -> list[Piece]:
        """Pieces that can be fetched."""
        return [piece for file in self._of for piece in self._from_front(file) if not piece.there]

    def _from_front(self, file: str) -> Iterator[Piece]:
        if file not in self._begin:
            return
        pieces, begin = self._of[file], self._begin[file]
        while begin < len(pieces) and pieces[begin].there:
            begin += 1
        self._begin[file] = begin
        yield from islice(pieces, begin, None)
