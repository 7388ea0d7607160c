"""Any boxes of any tensors, fetched as ranges of files and proved by pieces, are what slicing by hand gives."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relays import in_pieces
from weightcast import Store
from weightcast.clock import Deadline
from weightcast.errors import SourceFailed
from weightcast.tensors.boxes import Box, box_of
from weightcast.tensors.flat import flat_bytes
from weightcast.transports import boxes as box_fetching
from weightcast.transports.base import Range
from weightcast.transports.boxes import MemoryTaker, fetch_boxes
from weightcast.transports.file import FileReceiver
from weightcast.transports.pieces import WrongPieces, mend, proved_ranges

FORMAT_1 = Path(__file__).parents[1] / "golden" / "format1" / "store"
SHAPES = {"a": (37, 50), "b": (5, 6, 70), "c": (4001,), "d": (), "e": (3, 0, 2)}


def soon():
    return Deadline.after(60)


def tensors(seed=1):
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 1 << 16, shape, dtype=np.uint16) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module", autouse=True)
def _pieces_may_be_small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weightcast.wire.manifest.MIN_PIECE_NBYTES", 1)
        yield


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The same tensors in pieces of several sizes, in one part and in many."""
    made = {}
    for size in (100, 4096, 1 << 20):
        for part_nbytes in (500, 1 << 20):
            store = made[size, part_nbytes] = Store(tmp_path_factory.mktemp("pieces") / "store")
            store.publish("v", tensors(), part_nbytes=part_nbytes)
            in_pieces(store.path / "versions" / "v", size)
    return made


@st.composite
def wanted(draw):
    name = draw(st.sampled_from(sorted(SHAPES)))
    start = tuple(draw(st.integers(0, size)) for size in SHAPES[name])
    shape = tuple(draw(st.integers(0, size - at)) for at, size in zip(start, SHAPES[name], strict=True))
    return name, Box(start, shape)


def fetched(receiver, manifest, boxes, **options):
    entries = manifest.by_name()
    arrays = [np.zeros(box.shape, entries[name].dtype.numpy) for name, box in boxes]
    takers = [MemoryTaker(entries[name], box, flat_bytes(array)) for (name, box), array in zip(boxes, arrays, strict=True)]
    told = list(fetch_boxes(receiver, manifest, takers, deadline=soon(), **options))
    assert sorted(told) == list(range(len(boxes)))
    return arrays


@settings(max_examples=80, deadline=None)
@given(
    boxes=st.lists(wanted(), min_size=1, max_size=8),
    kind=st.sampled_from([(size, part) for size in (100, 4096, 1 << 20) for part in (500, 1 << 20)]),
    block=st.sampled_from([1, 300, 8 << 20]),
    hole=st.sampled_from([0, 40, 1 << 20]),
    window=st.sampled_from([1, 2000, 64 << 20]),
    proved=st.booleans(),
)
def test_boxes_are_what_slicing_gives_whatever_the_pieces_blocks_and_windows_are(
    stores, boxes, kind, block, hole, window, proved
):
    receiver, right = FileReceiver(stores[kind]), tensors()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("BLOCK_NBYTES", block), ("_HOLE_NBYTES", hole), ("WINDOW_NBYTES", window)):
            patch.setattr(box_fetching, name, value)
        found = fetched(receiver, receiver.manifest("v", deadline=soon()), boxes, proved=proved)
    assert all(np.array_equal(array, box_of(right[name], box)) for (name, box), array in zip(boxes, found, strict=True))


def test_boxes_of_a_version_of_format_1_are_proved_by_the_digests_of_tensors(tmp_path):
    store, rng = Store(FORMAT_1), np.random.default_rng(4)
    receiver = FileReceiver(store)
    for version in store.versions():
        manifest = receiver.manifest(version, deadline=soon())
        if manifest.kind == "full":
            loaded, boxes = store.load(version), []
            for entry in manifest.tensors:
                ends = [np.sort(rng.integers(0, size + 1, 2)).tolist() for size in entry.shape]
                boxes.append((entry.name, Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))))
            for (name, box), array in zip(boxes, fetched(receiver, manifest, boxes, proved=True), strict=True):
                assert array.tobytes() == np.ascontiguousarray(box_of(loaded[name], box)).tobytes()


def test_any_flipped_byte_of_a_piece_is_found_and_no_other_piece_is_doubted(tmp_path):
    store = Store(tmp_path / "store")
    store.publish("v", tensors())
    directory = store.path / "versions" / "v"
    in_pieces(directory, 1000)
    receiver, manifest = FileReceiver(store), store.manifest("v")
    part = manifest.parts[0]
    path = directory / part.file
    right = path.read_bytes()
    for at in range(0, len(right), 1777):
        path.write_bytes(right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :])
        first = at // 1000 * 1000
        with pytest.raises(WrongPieces, match=f"bytes {first} to {min(first + 1000, len(right))} of {part.file}"):
            list(proved_ranges(receiver, manifest, [Range(part.file, at, np.zeros(1, np.uint8))], deadline=soon()))
        if first:
            others = Range(part.file, 0, np.zeros(first, np.uint8))
            assert list(proved_ranges(receiver, manifest, [others], deadline=soon())) == [0]
    path.write_bytes(right)
    whole = Range(part.file, 500, np.frombuffer(bytearray(right[500:-500]), np.uint8))
    whole.memory[4321] ^= 1
    assert mend(receiver, manifest, whole, deadline=soon()) == 1000 + 500 + (len(right) - 500) % 1000
    assert whole.memory.tobytes() == right[500:-500]


@pytest.mark.parametrize("proved", [True, False])
def test_a_source_that_ends_early_is_refused(tmp_path, proved):
    class Short(FileReceiver):
        def ranges(self, manifest, wanted, *, deadline):
            yield from super().ranges(manifest, wanted[:-1], deadline=deadline)

    store = Store(tmp_path / "store")
    manifest = store.publish("v", tensors())
    with pytest.raises(SourceFailed, match="ended early"):
        fetched(Short(store), manifest, [("a", Box.whole(SHAPES["a"]))], proved=proved)
