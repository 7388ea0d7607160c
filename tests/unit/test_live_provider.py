"""A source that has worked everything out in memory: the model takes what it is handed, and proves it all the same."""

import numpy as np
import pytest

from weightcast import LiveModel, State, delta
from weightcast.errors import (
    BaseVersionMismatch,
    DeltaDoesNotFit,
    DigestMismatch,
    InvalidInput,
    SourceFailed,
    UpdateFailed,
    VersionNotFound,
)
from weightcast.tensors.bridges import spec_of
from weightcast.tensors.flat import Piece, flat_bytes
from weightcast.tensors.sums import array_sum
from weightcast.transports.base import Provider
from weightcast.wire.manifest import BaseRef, Manifest, TensorEntry, compute_root


class Prepared:
    """One version in memory, called by its root digest: whole, or as changes on another."""

    url = "prepared://"

    def __init__(self, state, *, base=None, version=None):
        self.state = {name: array.copy() for name, array in state.items()}
        specs = {name: spec_of(name, array) for name, array in state.items()}
        entries = tuple(
            TensorEntry(
                name=name, dtype=spec.dtype, shape=spec.shape, part=0, offset=0, nbytes=spec.nbytes, digest="",
                sum=str(array_sum(spec, state[name])),
            )
            for name, spec in specs.items()
        )  # fmt: skip
        root = compute_root(entries, "xxh3-128")
        before = base.described if base else None
        self.described = Manifest(
            version=version or root, sequence=0, step=0, kind="delta" if base else "full", created_s=0.0,
            algorithm="xxh3-128", root_digest=root, parts=(), tensors=entries,
            base=BaseRef(version=before.version, root_digest=before.root_digest) if before else None,
        )  # fmt: skip
        self.delta = delta.decode(delta.encode(base.state, state, packing="gaps"), base.state) if base else None
        self.asked = []

    def newest(self):
        return self.described.version

    def manifest(self, version, *, deadline):
        if version != self.described.version:
            raise VersionNotFound(version, self.url, [self.described.version])
        return self.described

    def pieces(self, manifest, *, deadline, names=None):
        self.asked.append("pieces")
        for name, array in self.state.items():
            yield Piece(name, 0, flat_bytes(array).data)

    def arrays(self, manifest):
        self.asked.append("arrays")
        return self.state

    def changes(self, manifest):
        self.asked.append("changes")
        return self.delta

    def close(self):
        self.asked.append("closed")


@pytest.fixture
def states(rng):
    first = {"a": rng.integers(0, 200, (40, 30), dtype=np.uint8), "b": rng.standard_normal(50)}
    second = {name: array.copy() for name, array in first.items()}
    second["a"][3, 4] += 1
    second["b"][7] = -0.0
    third = {name: array.copy() for name, array in second.items()}
    third["a"][0, 0] += 5
    return first, second, third


def model():
    return {"a": np.zeros((30, 40), dtype=np.uint8).T, "b": np.zeros(50)}


def same(target, state):
    return all(target[name].tobytes() == array.tobytes() for name, array in state.items())


@pytest.mark.parametrize("mode", ["copy", "swap", "delta"])
def test_whole_tensors_are_taken_as_they_are_and_moved_nowhere(states, mode):
    source, target = Prepared(states[0]), model()
    assert isinstance(source, Provider)
    live = LiveModel(target)
    result = live.update(source=source, commit=mode)
    assert same(target, states[0])
    assert live.version == source.described.root_digest
    assert ":" in live.version
    assert live.root_digest() == source.described.root_digest
    assert source.asked == ["arrays"]
    assert (result.bytes, result.tensors) == (0, 2)
    if mode == "swap":
        assert target["b"] is source.state["b"]


@pytest.mark.parametrize("mode", ["copy", "swap", "delta", "inplace"])
def test_changes_are_applied_without_fetching_or_decoding_anything(states, mode):
    base, source, target = Prepared(states[0]), None, model()
    live = LiveModel(target)
    live.update(source=base)
    for before, after in ((states[0], states[1]), (states[1], states[2])):
        source = Prepared(after, base=Prepared(before))
        result = live.update(source=source, commit=mode)
        assert same(target, after)
        assert source.asked == ["changes"]
        assert result.bytes == 0
        assert result.mode == ("swap" if mode == "swap" else "delta")
        assert live.root_digest() == source.described.root_digest
    live.rollback()
    assert same(target, states[1])


def test_a_stream_comes_piece_by_piece_also_from_a_provider(states):
    source, target = Prepared(states[0]), model()
    live = LiveModel(target)
    assert live.update(source=source, commit="inplace").bytes == source.described.nbytes
    assert source.asked == ["pieces"]
    assert same(target, states[0])


def test_the_same_state_under_another_name_is_the_base(states, store):
    store.publish("start", states[0])
    target = model()
    live = LiveModel(target, source=store)
    live.update("start")
    source = Prepared(states[1], base=Prepared(states[0], version="called otherwise"))
    assert live.update(source=source).mode == "delta"
    assert same(target, states[1])


def test_another_state_is_no_base_whatever_its_name(states, store):
    store.publish("start", states[2])
    live = LiveModel(model(), source=store)
    live.update("start")
    with pytest.raises(BaseVersionMismatch):
        live.update(source=Prepared(states[1], base=Prepared(states[0], version="start")))
    assert (live.version, live.state) == ("start", State.READY)


def test_names_that_are_no_version_ids_are_for_providers_alone(states, store):
    store.publish("v", states[0])
    live = LiveModel(model(), source=store)
    with pytest.raises(InvalidInput, match="version id"):
        live.update("xxh3-128:00")
    with pytest.raises(VersionNotFound):
        live.update("xxh3-128:00", source=Prepared(states[0]))


def test_what_a_provider_hands_over_is_proved_like_everything_else(states):
    target = model()
    live = LiveModel(target)
    live.update(source=Prepared(states[0]))
    wrong = Prepared(states[1])
    wrong.state["b"][3] += 1
    with pytest.raises(DigestMismatch):
        live.update(source=wrong)
    for mode in ("copy", "swap"):
        lying = Prepared(states[1], base=Prepared(states[0]))
        lying.delta = delta.decode(delta.encode(states[0], states[2]), states[0])
        with pytest.raises(DigestMismatch):
            live.update(source=lying, commit=mode)
    assert same(target, states[0])
    assert live.state is State.READY


def test_all_tensors_that_are_not_what_the_manifest_says_are_listed(states):
    live = LiveModel(model())
    source = Prepared(states[0])
    source.state["a"] = source.state["a"].T
    del source.state["b"]
    with pytest.raises(SourceFailed, match=r"a is uint8\[30, 40\], not U8\[40, 30\]; b is missing"):
        live.update(source=source)
    source = Prepared(states[0])
    source.state["a"] = np.asfortranarray(source.state["a"])
    source.state["b"] = source.state["b"].astype(np.float32)
    with pytest.raises(SourceFailed, match=r"a is not contiguous.*; b is float32"):
        live.update(source=source)
    assert live.state is State.READY


def test_changes_of_another_shape_are_refused(states):
    live = LiveModel(model())
    live.update(source=Prepared(states[0]))
    source = Prepared(states[1], base=Prepared(states[0]))
    grown = {"a": np.zeros((80, 30), np.uint8), "b": states[0]["b"]}
    changed = {"a": np.ones((80, 30), np.uint8), "b": states[0]["b"]}
    source.delta = delta.decode(delta.encode(grown, changed), grown)
    for mode in ("copy", "swap"):
        with pytest.raises(DeltaDoesNotFit):
            live.update(source=source, commit=mode)
    assert live.root_digest() == Prepared(states[0]).described.root_digest


def test_a_provider_that_fails_changes_nothing(states):
    live = LiveModel(model())
    source = Prepared(states[0])
    source.arrays = lambda _: 1 // 0
    with pytest.raises(UpdateFailed, match="ZeroDivisionError"):
        live.update(source=source)
    assert live.state is State.READY
