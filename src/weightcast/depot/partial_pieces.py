"""The pieces of a version that is on its way here: which are there, and who fetches the others from where. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weightcast.errors import InvalidInput, SourceFailed
from weightcast.tensors.digest import Algorithm, algorithm_of
from weightcast.wire.depot import PIECE_NBYTES, PieceDigests

MAX_PIECE_NBYTES = 64 << 20  # what a reader waits for, and what is fetched again if a byte of it is wrong


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

    Nothing is known of a file before its digests are. Whoever has this locks: it is not for several threads at once.
    """

    def __init__(self, files: Mapping[str, int]) -> None:
        self._files = dict(files)
        self._of: dict[str, list[Piece]] = {file: [] for file, nbytes in self._files.items() if nbytes == 0}
        self.digests: dict[str, PieceDigests] = {}
        self._begin: dict[str, int] = {}  # pieces at the start of a file that are there
        self._there = 0

    def expect(self, file: str, digests: PieceDigests) -> list[Piece]:
        """The digests that the pieces of a file must have, and the pieces that are not known to have them.

        Other digests than before, while nothing is fetched: pieces that now have another one are not there any more.
        """
        nbytes, size = self._files[file], digests.piece_nbytes
        check_digests(file, nbytes, digests)
        before, known = self._of.get(file, []), self.digests.get(file)
        same_size = known is not None and known.piece_nbytes == size
        kept = {piece.index: piece for piece in before if same_size and piece.digest == digests.digests[piece.index]}
        self._of[file] = [
            kept.get(index) or Piece(file, index, index * size, min((index + 1) * size, nbytes), digest)
            for index, digest in enumerate(digests.digests)
        ]
        self.digests[file] = digests
        self._begin[file] = 0
        self._there += sum(piece.there for piece in self._of[file]) - sum(piece.there for piece in before)
        return [piece for piece in self._of[file] if not piece.there]

    # -- fetching --------------------------------------------------------------------------------------------------------

    def take(self, choose: Callable[[Piece], int | None], *, most: int = 1) -> Run | None:
        """What to fetch next, up to `most` pieces, and from which source; `choose` says that for a piece, or None: not now.

        Of all that are taken, the caller says what became of them: `right`, `wrong` or `dropped`.
        """
        for file in self._files:
            for piece in self._from_front(file):
                if piece.there or piece.taken:
                    continue
                source = choose(piece)
                if source is not None:
                    return self._run(piece, source, most, choose)
                if not piece.wrong:  # nobody to ask, for this piece or any other
                    return None
        return None

    def _run(self, first: Piece, source: int, most: int, choose: Callable[[Piece], int | None]) -> Run:
        # A depot gives out so much at once: of smaller pieces, the first would wait there for those behind it.
        count = most if self.digests[first.file].piece_nbytes >= PIECE_NBYTES else 1
        pieces: list[Piece] = []
        for piece in self._of[first.file][first.index : first.index + count]:
            if piece.there or piece.taken or (piece.wrong and choose(piece) != source):
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
        return len(self._of) == len(self._files) and self._there == sum(map(len, self._of.values()))

    def there(self, file: str, start: int, stop: int) -> bool:
        """Whether all bytes of a range are there."""
        if start >= stop:
            return True
        if file not in self.digests:
            return False
        nbytes = self.digests[file].piece_nbytes
        return all(piece.there for piece in self._of[file][start // nbytes : -(-stop // nbytes)])

    def front(self, file: str) -> int:
        """How many bytes are there from the start of a file on, without a gap."""
        pieces = self._of.get(file, [])
        first = next(self._from_front(file), None)
        return first.start if first is not None else (pieces[-1].stop if pieces else 0)

    def missing(self) -> list[Piece]:
        """Pieces of files whose digests are known that are not there."""
        return [piece for file in self._files for piece in self._from_front(file) if not piece.there]

    def _from_front(self, file: str) -> Iterator[Piece]:
        pieces = self._of.get(file, [])
        begin = self._begin.get(file, 0)
        while begin < len(pieces) and pieces[begin].there:
            begin += 1
        self._begin[file] = begin
        return (pieces[index] for index in range(begin, len(pieces)))


def check_digests(file: str, nbytes: int, digests: PieceDigests) -> Algorithm:
    """Refuse digests that cannot be those of the pieces of a file of this size. The algorithm that they are by."""
    size = digests.piece_nbytes
    if not 0 < size <= MAX_PIECE_NBYTES or len(digests.digests) != -(-nbytes // size):
        raise SourceFailed(
            f"{file} has {nbytes} bytes, and {len(digests.digests)} digests of pieces of {size} bytes were told for it: "
            f"there must be one for each piece, and a piece must have between 1 and {MAX_PIECE_NBYTES} bytes."
        )
    try:
        algorithms = {algorithm_of(digest) for digest in (f"{digests.algorithm}:", *digests.digests)}
    except InvalidInput as error:
        raise SourceFailed(f"what was told for the pieces of {file} are no digests: {error}") from error
    if len(algorithms) != 1:
        raise SourceFailed(f"the digests told for the pieces of {file} are by {', '.join(sorted(algorithms))}, not by one.")
    return algorithms.pop()
