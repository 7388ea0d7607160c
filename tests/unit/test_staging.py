"""Every byte exactly once, whatever order a source sends it in."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.clock import Deadline
from weightcast.errors import DeadlineExceeded, DigestMismatch, SourceFailed
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import Piece
from weightcast.wire.manifest import TensorEntry
from weightcast.worker.staging import Coverage, Staging


class ListReceiver:
    """A source that sends exactly the pieces it was given."""

    url = "list://"

    def __init__(self, manifest, pieces):
        self._manifest, self._pieces = manifest, pieces

    def newest(self):
        return self._manifest.version

    def manifest(self, version, *, deadline):
        return self._manifest

    def pieces(self, manifest, *, deadline, names=None):
        yield from self._pieces

    def close(self):
        pass


@pytest.fixture
def version(store, rng):
    tensors = {"a": rng.standard_normal(100), "b": rng.integers(0, 9, 7, dtype=np.uint8), "none": np.zeros((0, 3))}
    return store.publish("v", tensors), tensors


def cut(tensors, size=64):
    for name, array in tensors.items():
        data = array.tobytes()
        for start in range(0, len(data), size):
            yield Piece(name, start, memoryview(data[start : start + size]))


def stage(manifest, pieces, timeout=10):
    staging = Staging({entry.name: entry for entry in manifest.tensors})
    staging.fill(ListReceiver(manifest, list(pieces)), manifest, Deadline.after(timeout))
    return staging


def test_pieces_in_any_order_give_the_tensors(version, rng):
    manifest, tensors = version
    pieces = list(cut(tensors))
    rng.shuffle(pieces)
    pieces = [Piece(*piece) for piece in pieces]
    verified = stage(manifest, [Piece(p.tensor, int(p.offset), p.data) for p in pieces]).verify(manifest, checksum=True)
    assert all(verified.arrays[name].tobytes() == array.tobytes() for name, array in tensors.items())
    assert verified.digests == {entry.name: entry.digest for entry in manifest.tensors}


def test_a_source_that_ends_early_is_told_everything_that_is_missing(version):
    manifest, tensors = version
    with pytest.raises(SourceFailed, match=r"a \(64 of 800 bytes\), b \(0 of 7 bytes\)"):
        stage(manifest, [next(cut(tensors))])


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (Piece("a", 32, memoryview(bytes(8))), "twice"),
        (Piece("a", 796, memoryview(bytes(8))), "which has 800"),
        (Piece("a", -4, memoryview(bytes(8))), "which has 800"),
        (Piece("c", 0, memoryview(bytes(8))), "nobody asked for"),
    ],
)
def test_a_source_that_sends_too_much_is_refused(version, piece, said):
    manifest, tensors = version
    with pytest.raises(SourceFailed, match=said):
        stage(manifest, [*cut(tensors), piece])


def test_all_wrong_tensors_are_listed_and_only_a_declined_checksum_lets_them_pass(version):
    manifest, tensors = version
    changed = {name: array.copy() for name, array in tensors.items()}
    changed["a"][0] += 1
    changed["b"][0] ^= 1
    staging = stage(manifest, cut(changed))
    with pytest.raises(DigestMismatch) as caught:
        staging.verify(manifest, checksum=True)
    assert caught.value.tensors == ("a", "b")
    assert staging.verify(manifest, checksum=False).digests["a"] != manifest.by_name()["a"].digest


def test_the_deadline_ends_a_slow_source(version):
    manifest, tensors = version
    with pytest.raises(DeadlineExceeded, match="receiving v from list://"):
        stage(manifest, cut(tensors), timeout=0)


def test_a_sender_that_reuses_its_buffer_cannot_change_what_was_staged(version):
    manifest, tensors = version
    buffer = bytearray(64)

    def pieces():
        for piece in cut(tensors):
            buffer[: len(piece.data)] = piece.data
            yield Piece(piece.tensor, piece.offset, memoryview(buffer)[: len(piece.data)])

    staging = Staging({entry.name: entry for entry in manifest.tensors})
    staging.fill(ListReceiver(manifest, pieces()), manifest, Deadline.after(10))
    buffer[:] = b"\xee" * 64
    staging.verify(manifest, checksum=True)


@given(st.lists(st.integers(1, 99), max_size=12), st.randoms())
def test_coverage_is_complete_exactly_when_every_byte_came(cuts, random):
    entry = TensorEntry(name="t", dtype=DType.U8, shape=(100,), part=0, offset=0, nbytes=100, digest="")
    edges = sorted({0, 100, *cuts})
    spans = list(itertools.pairwise(edges))
    random.shuffle(spans)
    coverage = Coverage({"t": entry})
    complete = [coverage.add("t", start, end - start) for start, end in spans]
    assert complete == [False] * (len(spans) - 1) + [True]
    coverage.check_complete()
    start, end = random.choice(spans)
    with pytest.raises(SourceFailed, match="twice"):
        coverage.add("t", start, end - start)
