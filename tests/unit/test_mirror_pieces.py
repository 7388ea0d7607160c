"""The bookkeeping of what a relay fetches, the order in which it is proved, and who mirrors whom: without any I/O."""

import random

import pytest

from relays import tensors
from weightcast import Store
from weightcast.depot.mirror_upstreams import upstreams_for
from weightcast.depot.partial_pieces import MAX_PIECE_NBYTES, Pieces
from weightcast.depot.partial_proof import FileProof, files_of, stretches_of
from weightcast.errors import InvalidInput, SourceFailed
from weightcast.tensors.digest import bytes_digest
from weightcast.wire.depot import PIECE_NBYTES, PieceDigests

SIZE = PIECE_NBYTES


def told(count: int, mark: str = "0", size: int = SIZE) -> PieceDigests:
    return PieceDigests("xxh3-128", size, tuple(f"xxh3-128:{mark}{index:031x}" for index in range(count)))


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


def test_nothing_is_fetched_of_a_file_before_its_digests_are_known_and_an_empty_one_is_there():
    pieces = Pieces({"empty": 0, "a": 3 * SIZE - 5, "b": 10})
    assert pieces.take(lambda _: 0) is None
    assert not pieces.whole
    assert pieces.there("empty", 0, 0)
    pieces.expect("b", told(1))
    assert pieces.take(lambda _: 0).file == "b"
    pieces.expect("a", told(3))
    run = pieces.take(lambda _: 0, most=9)
    assert (run.file, run.start, run.stop, len(run.pieces)) == ("a", 0, 3 * SIZE - 5, 3)
    assert pieces.take(lambda _: 0) is None


def test_a_run_ends_before_what_is_there_or_taken_or_must_come_from_elsewhere():
    pieces = Pieces({"a": 8 * SIZE})
    every = pieces.expect("a", told(8))
    pieces.right(every[2])
    assert [piece.index for piece in pieces.take(lambda _: 0, most=8).pieces] == [0, 1]
    every[5].wrong[0] += 1
    run = pieces.take(lambda piece: 1 if piece.wrong else 0, most=8)
    assert (run.source, [piece.index for piece in run.pieces]) == (0, [3, 4])
    run = pieces.take(lambda piece: 1 if piece.wrong else 0, most=1)
    assert (run.source, [piece.index for piece in run.pieces]) == (1, [5])
    assert [piece.index for piece in pieces.take(lambda _: 0, most=8).pieces] == [6, 7]


def test_pieces_smaller_than_what_a_depot_gives_out_at_once_are_taken_one_by_one():
    pieces = Pieces({"a": 8 * SIZE})
    pieces.expect("a", told(16, size=SIZE // 2))
    assert len(pieces.take(lambda _: 0, most=8).pieces) == 1


def test_pieces_that_were_dropped_or_wrong_are_taken_again():
    pieces = Pieces({"a": 3 * SIZE})
    pieces.expect("a", told(3))
    run = pieces.take(lambda _: 3, most=3)
    pieces.right(run.pieces[0])
    pieces.wrong(run.pieces[1], run.source)
    pieces.dropped(run.pieces[2:])
    assert pieces.missing() == list(run.pieces[1:])
    assert (pieces.front("a"), pieces.there("a", 0, SIZE), pieces.there("a", 0, SIZE + 1)) == (SIZE, True, False)
    again = pieces.take(lambda piece: None if piece.wrong[3] else 3, most=3)
    assert again.pieces == [run.pieces[2]]
    assert pieces.take(lambda piece: None if piece.wrong[3] else 3) is None
    assert pieces.take(lambda _: 4).pieces == [run.pieces[1]]


def test_other_digests_keep_the_pieces_that_they_agree_on():
    pieces = Pieces({"a": 3 * SIZE})
    for piece in pieces.expect("a", told(3)):
        pieces.right(piece)
    assert pieces.whole
    digests = told(3).digests
    other = PieceDigests("xxh3-128", SIZE, (digests[0], f"xxh3-128:{'f' * 32}", digests[2]))
    assert [piece.index for piece in pieces.expect("a", other)] == [1]
    assert (pieces.count, pieces.whole, pieces.front("a")) == (2, False, SIZE)
    assert pieces.there("a", 2 * SIZE, 3 * SIZE)
    assert not pieces.there("a", SIZE - 1, SIZE + 1)
    assert len(pieces.expect("a", told(6, size=SIZE // 2))) == 6
    assert (pieces.count, pieces.front("a")) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_fails_no_piece_is_handed_out_twice_and_all_of_them_come(seed):
    chance = random.Random(seed)
    files = {f"f{index}": chance.choice([0, 1, SIZE - 1, SIZE, 5 * SIZE + 3]) for index in range(4)}
    pieces = Pieces(files)
    for file, nbytes in files.items():
        if nbytes:
            pieces.expect(file, told(-(-nbytes // SIZE)))
    out, written = [], {}
    for _ in range(20_000):
        run = (
            pieces.take(lambda _: chance.choice([0, 1, None]), most=chance.randint(1, 4)) if chance.random() < 0.6 else None
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
    assert all(pieces.front(file) == nbytes for file, nbytes in files.items())


@pytest.mark.parametrize(
    "digests",
    [
        told(2),
        told(0),
        PieceDigests("xxh3-128", 0, ()),
        PieceDigests("xxh3-128", -1, ("xxh3-128:00",)),
        PieceDigests("xxh3-128", MAX_PIECE_NBYTES + 1, ("xxh3-128:00",)),
        PieceDigests("xxh3-128", SIZE, ("",)),
        PieceDigests("crc32", SIZE, ("crc32:00",)),
        PieceDigests("xxh3-128", SIZE, ("md5:00",)),
    ],
)
def test_digests_that_cannot_be_those_of_a_file_are_refused(digests):
    with pytest.raises(SourceFailed, match="a"):
        Pieces({"a": SIZE}).expect("a", digests)


# -- proving -------------------------------------------------------------------------------------------------------------


def reading(data):
    return lambda start, stop: memoryview(data)[start:stop]


@pytest.mark.parametrize("step", [1 << 30, 70_001, 65_536, 997])
def test_every_digest_of_a_manifest_is_compared_however_the_bytes_come(tmp_path, step):
    store = Store(tmp_path)
    store.publish(
        "v1", {**tensors(1, count=3), "none": tensors(2, nbytes=0)["layer.0"]}, files={"a.txt": b"", "b.txt": b"b"}
    )
    manifest, compared = store.manifest("v1"), set()
    for file, stretches in stretches_of(manifest).items():
        assert [stretch.start for stretch in stretches[1:]] == [stretch.stop for stretch in stretches[:-1]]
        data = bytearray((tmp_path / "versions" / "v1" / file).read_bytes())
        assert stretches[-1].stop == len(data) == files_of(manifest)[file]
        proof = FileProof(stretches, reading(data), "xxh3-128")
        for front in [*range(0, len(data), step), len(data)]:
            proof.advance(front)
        assert (proof.done, proof.wrong) == (True, [])
        compared |= {stretch.name for stretch in stretches}
        if data:
            data[-1] ^= 1
            proof = FileProof(stretches, reading(data), "xxh3-128")
            proof.advance(len(data))
            (wrong,) = proof.wrong
            last = [stretch for stretch in stretches if stretch.stop > stretch.start][-1]
            assert (wrong.stretch, wrong.found) == (last, bytes_digest(data[last.start :]))
    assert {entry.name for entry in manifest.tensors} < compared


def test_what_has_not_come_is_not_hashed(tmp_path):
    store = Store(tmp_path)
    store.publish("v1", tensors(1))
    manifest = store.manifest("v1")
    (part,) = manifest.parts
    data, memory = (tmp_path / "versions" / "v1" / part.file).read_bytes(), memoryview(bytearray(part.nbytes))
    proof = FileProof(stretches_of(manifest)[part.file], reading(memory), "xxh3-128")
    come = 0
    for front in (0, 1, part.header_nbytes - 1, part.header_nbytes, part.nbytes - 1, part.nbytes):
        memory[come:front] = data[come:front]
        come = front
        proof.advance(front)
        assert proof.done == (front == part.nbytes)
    assert proof.wrong == []
