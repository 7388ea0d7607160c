"""The bookkeeping of what a relay fetches, and who mirrors whom: without any I/O."""

import random

import pytest
from msgspec.structs import replace

from weightcast.depot.mirror_upstreams import upstreams_for
from weightcast.depot.partial_pieces import Pieces
from weightcast.errors import InvalidInput
from weightcast.tensors.digest import PIECE_NBYTES
from weightcast.wire.manifest import FileEntry, Manifest

SIZE = PIECE_NBYTES
NOTHING = Manifest(
    version="v", sequence=1, step=1, kind="full", created_s=0, algorithm="xxh3-128", root_digest="", parts=(), tensors=(),
    piece_nbytes=SIZE,
)  # fmt: skip


def made_of(files: dict[str, int]) -> Pieces:
    """The pieces of a version with these files, all of which can be fetched."""
    entries = tuple(
        FileEntry(file=file, nbytes=nbytes, digest="", pieces=bytes(16 * -(-nbytes // SIZE)))
        for file, nbytes in files.items()
    )
    pieces = Pieces(replace(NOTHING, files=entries))
    for file in files:
        pieces.begin(file)
    return pieces


# -- who mirrors whom ----------------------------------------------------------------------------------------------------


def test_hosts_form_a_chain_below_the_publisher():
    hosts = ["http://a", "http://b", "http://c"]
    assert [upstreams_for(index, hosts, "http://p") for index in range(3)] == [
        ["http://p"],
        ["http://a", "http://p"],
        ["http://b", "http://a", "http://p"],
    ]


@pytest.mark.parametrize("fanout", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 2, 8, 31])
def test_every_line_leads_to_the_publisher_and_never_in_a_circle(fanout, count):
    hosts = [f"http://host-{index}" for index in range(count)]
    lists = [upstreams_for(index, hosts, "http://publisher", fanout=fanout) for index in range(count)]
    children = dict.fromkeys([*hosts, "http://publisher"], 0)
    for index, urls in enumerate(lists):
        assert urls[-1] == "http://publisher"
        assert len(set(urls)) == len(urls)
        assert all(hosts.index(url) < index for url in urls[:-1])
        parent = urls[0]
        if parent != "http://publisher":
            assert urls[1:] == lists[hosts.index(parent)]
        children[parent] += 1
    assert max(children.values()) <= fanout


@pytest.mark.parametrize(
    ("index", "hosts", "fanout"),
    [(-1, ["a"], 1), (1, ["a"], 1), (0, [], 1), (0, ["a"], 0), (0, ["a", "a"], 1), (0, ["p"], 1)],
)
def test_a_tree_that_cannot_be_is_refused(index, hosts, fanout):
    with pytest.raises(InvalidInput):
        upstreams_for(index, hosts, "p", fanout=fanout)


# -- pieces --------------------------------------------------------------------------------------------------------------


def test_nothing_is_fetched_of_a_file_before_it_was_looked_at_and_an_empty_one_is_there():
    whole = made_of({"empty": 0, "a": 3 * SIZE - 5, "b": 10})
    pieces = Pieces(replace(NOTHING, files=tuple(FileEntry(file=f, nbytes=len(d), digest="", pieces=p) for f, d, p in [
        ("empty", b"", b""), ("a", bytes(3 * SIZE - 5), bytes(48)), ("b", bytes(10), bytes(16)),
    ])))  # fmt: skip
    assert pieces.take(lambda _: 0) is None
    assert not pieces.whole
    assert pieces.reach("empty", 0, 0) == 0
    pieces.begin("b")
    assert pieces.take(lambda _: 0).file == "b"
    pieces.begin("a")
    run = pieces.take(lambda _: 0, most_nbytes=9 * SIZE)
    assert (run.file, run.start, run.stop, len(run.pieces)) == ("a", 0, 3 * SIZE - 5, 3)
    assert pieces.take(lambda _: 0) is None
    assert whole.take(lambda _: 0, most_nbytes=2 * SIZE).stop == 2 * SIZE


def test_a_run_ends_before_what_is_there_or_taken_or_must_come_from_elsewhere():
    pieces = made_of({"a": 8 * SIZE})
    every, most = pieces.of("a"), 8 * SIZE
    pieces.right(every[2])
    assert [piece.index for piece in pieces.take(lambda _: 0, most_nbytes=most).pieces] == [0, 1]
    every[5].wrong[0] += 1
    run = pieces.take(lambda piece: 1 if piece.wrong else 0, most_nbytes=most)
    assert (run.source, [piece.index for piece in run.pieces]) == (0, [3, 4])
    run = pieces.take(lambda piece: 1 if piece.wrong else 0)
    assert (run.source, [piece.index for piece in run.pieces]) == (1, [5])
    assert [piece.index for piece in pieces.take(lambda _: 0, most_nbytes=most).pieces] == [6, 7]


def test_pieces_that_were_dropped_or_wrong_are_taken_again():
    pieces, most = made_of({"a": 3 * SIZE}), 3 * SIZE
    run = pieces.take(lambda _: 3, most_nbytes=most)
    pieces.right(run.pieces[0])
    pieces.wrong(run.pieces[1], run.source)
    pieces.dropped(run.pieces[2:])
    assert pieces.missing() == list(run.pieces[1:])
    assert [pieces.reach("a", *one) for one in ((0, SIZE), (0, SIZE + 1), (5, 3 * SIZE), (SIZE, 3 * SIZE))] == [SIZE] * 4
    again = pieces.take(lambda piece: None if piece.wrong[3] else 3, most_nbytes=most)
    assert again.pieces == [run.pieces[2]]
    assert pieces.take(lambda piece: None if piece.wrong[3] else 3) is None
    assert pieces.take(lambda _: 4).pieces == [run.pieces[1]]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_fails_no_piece_is_handed_out_twice_and_all_of_them_come(seed):
    chance = random.Random(seed)
    files = {f"f{index}": chance.choice([0, 1, SIZE - 1, SIZE, 5 * SIZE + 3]) for index in range(4)}
    pieces = made_of(files)
    out, written = [], {}
    for _ in range(20_000):
        run = (
            pieces.take(lambda _: chance.choice([0, 1, None]), most_nbytes=chance.randint(1, 4) * SIZE)
            if chance.random() < 0.6
            else None
        )
        if run is not None:
            assert not {piece for _, piece in out} & set(run.pieces)
            assert not any(piece.there for piece in run.pieces)
            out += [(run.source, piece) for piece in run.pieces]
        elif out:
            source, piece = out.pop(chance.randrange(len(out)))
            came = chance.random()
            if came < 0.2:
                pieces.dropped([piece])
            elif came < 0.4:
                pieces.wrong(piece, source)
            else:
                pieces.right(piece)
                written[piece.file] = written.get(piece.file, 0) + piece.stop - piece.start
        if pieces.whole:
            break
    assert pieces.whole
    assert written == {file: nbytes for file, nbytes in files.items() if nbytes}
    assert all(pieces.reach(file, 0, nbytes) == nbytes for file, nbytes in files.items())
