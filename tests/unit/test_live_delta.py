"""A live model follows deltas: from what it holds or from a full version, in every commit mode, whole or not at all."""

import dataclasses
from collections import Counter
from contextlib import closing, contextmanager
from functools import partial

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from delta_samples import same
from served_depots import depot_over
from test_live_model import bits, make
from test_live_provider import Prepared

from weightcast import LiveModel, ModelPart, State, delta
from weightcast.delta.memory import HostMemory
from weightcast.errors import (
    BaseVersionMismatch,
    CommitFailed,
    Conflict,
    Corrupt,
    DigestMismatch,
    InvalidInput,
    VersionDoesNotFit,
    VersionNotFound,
)
from weightcast.tensors.bridges import host_array, spec_of
from weightcast.tensors.digest import array_digest, bytes_digest
from weightcast.tensors.flat import Piece, flat_bytes
from weightcast.tensors.sums import array_sum
from weightcast.transports.base import delta_use
from weightcast.transports.registry import open_receiver
from weightcast.wire.manifest import FORMAT, BaseRef, Manifest, PayloadEntry, TensorEntry, compute_root, summed_names
from weightcast.worker.targets.numpy_target import NumpySlot

MODES = ("copy", "swap", "inplace", "delta")
PAYLOAD = "delta-00001.bin"


class MemorySource:
    """A transport of its own: versions in memory, full or as deltas on the version before.

    Those of `format` 1 have digests of bytes and no sums, also where they are deltas.
    """

    url = "memory://"

    def __init__(self):
        self.format = FORMAT
        self.manifests: dict[str, Manifest] = {}
        self.bytes: dict[tuple[str, str], bytearray] = {}
        self.fetched: list[str] = []

    def add(self, version, state, *, base=None, packing="classes"):
        arrays = {name: host_array(name, tensor) for name, tensor in state.items()}
        seen: dict[tuple, str] = {}
        tied = {}
        for name, array in arrays.items():
            holder = seen.setdefault((array.__array_interface__["data"][0], array.shape) if array.nbytes else name, name)
            if holder != name:
                tied[name] = holder
        arrays = {name: array.copy(order="C") for name, array in arrays.items() if name not in tied}
        summed_as = summed_names(tied) if self.format > 1 else {}
        entries = tuple(
            self.entry(name, array, summed_as.get(name, ""), placed=base is None) for name, array in arrays.items()
        )
        manifest = Manifest(
            version=version, sequence=len(self.manifests) + 1, step=0, kind="full", created_s=0.0, algorithm="xxh3-128",
            root_digest=compute_root(entries, "xxh3-128"), parts=(), tensors=entries, tied=tied, format=self.format,
        )  # fmt: skip
        for name, array in arrays.items():
            self.bytes[version, name] = bytearray(flat_bytes(array).tobytes())
        if base is not None:
            before = self.manifests[base]
            old = {
                entry.name: np.frombuffer(self.bytes[base, entry.name], dtype=entry.dtype.numpy).reshape(entry.shape)
                for entry in before.tensors
            }
            payload = delta.encode(old, arrays, packing=packing)
            file = PayloadEntry(file=PAYLOAD, nbytes=len(payload), digest=bytes_digest(payload))
            ref = BaseRef(version=base, root_digest=before.root_digest)
            manifest = msgspec.structs.replace(manifest, kind="delta", base=ref, payloads=(file,))
            self.bytes[version, file.file] = bytearray(payload)
        self.manifests[version] = manifest
        return manifest

    def entry(self, name, array, summed_as, *, placed):
        """The entry of a tensor; the bytes of one that is not `placed` in a file have no digest."""
        spec = spec_of(name, array)
        entry = TensorEntry(
            name=name, dtype=spec.dtype, shape=spec.shape, part=0, offset=0, nbytes=array.nbytes, digest="",
            summed_as=summed_as,
        )  # fmt: skip
        if placed or self.format == 1:
            entry = msgspec.structs.replace(entry, digest=array_digest(array))
        if self.format > 1:
            entry = msgspec.structs.replace(entry, sum=str(array_sum(entry.sum_spec, array)))
        return entry

    def newest(self):
        return list(self.manifests)[-1]

    def manifest(self, version, *, deadline):
        if version not in self.manifests:
            raise VersionNotFound(version, self.url, list(self.manifests))
        return self.manifests[version]

    def pieces(self, manifest, *, deadline, names=None):
        for name, entry in manifest.transfers().items():
            if names is None or name in names:
                self.fetched.append(f"{manifest.version}/{name}")
                data = memoryview(self.bytes[manifest.version, name])
                for start in range(0, entry.nbytes, 100):
                    yield Piece(name, start, data[start : start + 100])

    def close(self):
        pass


def stepped(net: torch.nn.Module, seed: int) -> torch.nn.Module:
    """The same model a little further: about one element in ten changed, by little; tensor `norm.bias` never."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        new = make(0)
        new.load_state_dict(net.state_dict())
        for name, parameter in new.named_parameters():
            if name != "norm.bias":
                carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[parameter.element_size()]
                raw = parameter.data.view(carrier)
                raw += (torch.rand(raw.shape) < 0.1).to(carrier)
                raw[(0,) * raw.ndim] += 1
        return new


@pytest.fixture
def nets():
    found = [make(1)]
    for seed in range(5):
        found.append(stepped(found[-1], seed))
    return found


@pytest.fixture
def source(nets):
    """v0 is full, v1 … v5 are deltas, each on the one before."""
    made = MemorySource()
    for number, net in enumerate(nets):
        made.add(f"v{number}", net.state_dict(), base=f"v{number - 1}" if number else None)
    return made


@pytest.fixture
def live(source):
    net = make(0)
    model = LiveModel(net, source=source)
    model.update("v0")
    model.net = net
    return model


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_follows_a_delta_on_what_the_model_holds(source, nets, live, mode):
    for number in (1, 2, 3):
        source.fetched.clear()
        result = live.update(f"v{number}", commit=mode)
        assert bits(live.net) == bits(nets[number])
        assert live.root_digest() == source.manifests[f"v{number}"].root_digest
        assert result.mode == ("swap" if mode == "swap" else "delta")
        assert source.fetched == [f"v{number}/delta-00001.bin"]
        assert result.bytes == source.manifests[f"v{number}"].payloads[0].nbytes
        assert live.net.head.weight is live.net.embed.weight
        assert live.net.transposed.stride() == (1, 16)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_is_several_versions_behind_takes_them_folded(source, nets, live, mode):
    result = live.update("v4", commit=mode)
    assert bits(live.net) == bits(nets[4])
    assert result.bytes == sum(source.manifests[f"v{number}"].payloads[0].nbytes for number in (1, 2, 3, 4))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_holds_no_base_starts_at_the_nearest_full_version(source, nets, mode, device):
    net = make(7, device)
    live = LiveModel(net, source=source)
    result = live.update("v3", commit=mode)
    assert bits(net) == bits(nets[3])
    assert live.root_digest() == source.manifests["v3"].root_digest
    assert result.mode == ("copy" if mode == "delta" else mode)
    assert result.bytes > source.manifests["v0"].nbytes
    live.update("v4", commit=mode)
    assert bits(net) == bits(nets[4])


@pytest.mark.parametrize("mode", ["copy", "inplace", "delta"])
def test_addresses_stay_when_a_delta_is_scattered(live, mode):
    pointers = [parameter.data_ptr() for parameter in live.net.parameters()]
    live.update("v2", commit=mode)
    assert [parameter.data_ptr() for parameter in live.net.parameters()] == pointers


def test_swapping_moves_between_two_sets_of_buffers_and_makes_no_third(source, nets, live):
    def pointers():
        return [parameter.data_ptr() for parameter in live.net.parameters()]

    seen = [pointers()]
    for number in (1, 2, 3, 4, 5):
        live.update(f"v{number}", commit="swap")
        assert bits(live.net) == bits(nets[number])
        seen.append(pointers())
    assert seen[0] == seen[2] == seen[4]
    assert seen[1] == seen[3] == seen[5]
    assert not set(seen[0]) & set(seen[1])


def test_spare_buffers_follow_also_over_several_versions_and_are_dropped_by_other_commits(source, nets, live):
    live.update("v1", commit="swap")
    live.update("v4", commit="swap")
    assert bits(live.net) == bits(nets[4])
    live.update("v5", commit="delta")
    assert bits(live.net) == bits(nets[5])
    source.add("v6", stepped(nets[5], 9).state_dict(), base="v5")
    live.update("v6", commit="swap")
    assert bits(live.net) == bits(stepped(nets[5], 9))


def test_clear_drops_the_spare_buffers_too(source, nets, live):
    live.update("v1", commit="swap")
    live.clear()
    assert live._holding.take_spare() is None
    live.update("v2")
    assert bits(live.net) == bits(nets[2])


def test_an_abandoned_swap_leaves_nothing_that_the_next_could_trip_over(nets, live):
    live.update("v1", commit="swap")
    live.abandon(live.stage("v3", commit="swap"))
    assert bits(live.net) == bits(nets[1])
    live.update("v2", commit="swap")
    assert bits(live.net) == bits(nets[2])


def test_nothing_live_is_touched_before_the_commit(nets, live):
    for mode in ("delta", "swap"):
        staged = live.stage("v3", commit=mode)
        assert bits(live.net) == bits(nets[0])
        live.abandon(staged)
    assert (live.version, live.state) == ("v0", State.READY)


@pytest.mark.parametrize("mode", MODES)
def test_a_delta_whose_base_is_not_to_be_had_is_refused_with_what_is_there_and_what_is_needed(source, nets, live, mode):
    live.update("v1", commit=mode)
    del source.manifests["v2"]
    with pytest.raises(BaseVersionMismatch) as caught:
        live.update("v3", commit=mode)
    wanted = source.manifests["v3"].base
    for text in ("v3", "v2", "v1", wanted.root_digest, source.manifests["v1"].root_digest):
        assert text in str(caught.value)
    assert (bits(live.net), live.version, live.state) == (bits(nets[1]), "v1", State.READY)


def test_a_base_with_other_bytes_under_its_name_is_refused(source, nets, live):
    v2 = source.manifests["v2"]
    source.manifests["v2"] = msgspec.structs.replace(v2, root_digest="xxh3-128:" + "0" * 32)
    with pytest.raises(BaseVersionMismatch):
        live.update("v3")
    assert bits(live.net) == bits(nets[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_damaged_payload_is_refused_and_changes_nothing(source, nets, live, mode):
    source.bytes["v1", PAYLOAD][200] ^= 1
    with pytest.raises(DigestMismatch):
        live.update("v1", commit=mode)
    with pytest.raises(Corrupt):
        live.update("v1", commit=mode, verify_checksum=False)
    assert (bits(live.net), live.version, live.state) == (bits(nets[0]), "v0", State.READY)


def chain_of(nets, formats, *, packing="classes"):
    """Versions of these formats: v0 is full, v1 … are deltas, each on the one before."""
    source = MemorySource()
    for number, form in enumerate(formats):
        source.format = form
        source.add(f"v{number}", nets[number].state_dict(), base=f"v{number - 1}" if number else None, packing=packing)
    return source


def serving(source):
    net = make(0)
    live = LiveModel(net, source=source)
    live.update("v0")
    return live, net


def changed_elements(before, after):
    """The elements of `embed.weight` that a step changes, and those that it does not."""
    differ = before.embed.weight.view(torch.int16) != after.embed.weight.view(torch.int16)
    return differ.nonzero().tolist(), (~differ).nonzero().tolist()


@pytest.mark.parametrize("packing", ["gaps", "classes"])
@pytest.mark.parametrize("mode", MODES)
def test_weights_that_were_changed_from_outside_are_noticed_where_a_delta_changes_them_too(nets, mode, packing):
    live, net = serving(chain_of(nets, (2, 2), packing=packing))
    with torch.no_grad():
        net.embed.weight[tuple(changed_elements(nets[0], nets[1])[0][-1])] += 1
    before = bits(net)
    with pytest.raises(Corrupt):
        live.update("v1", commit=mode)
    assert bits(net) == before
    assert (live.version, live.state) == ("v0", State.READY)


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_were_changed_from_outside_where_a_delta_does_not_are_found_by_the_root_digest(nets, mode):
    source = chain_of(nets, (2, 2), packing="gaps")
    live, net = serving(source)
    place = tuple(changed_elements(nets[0], nets[1])[1][0])
    with torch.no_grad():
        net.embed.weight[place] += 1
        damaged = net.embed.weight[place].clone()
    live.update("v1", commit=mode)
    assert live.version == "v1"
    assert net.embed.weight[place] == damaged
    assert live.root_digest() != source.manifests["v1"].root_digest
    with torch.no_grad():
        net.embed.weight[place] = nets[1].embed.weight[place]
    assert live.root_digest() == source.manifests["v1"].root_digest


def test_weights_that_are_damaged_while_a_delta_is_staged_are_found_by_the_root_digest(source, nets, live):
    staged = live.stage("v1", commit="delta")
    with torch.no_grad():
        live.net.norm.bias[0] += 1  # untouched by every delta
    live.commit(staged)
    assert live.version == "v1"
    assert live.root_digest() != source.manifests["v1"].root_digest
    with torch.no_grad():
        live.net.norm.bias[0] = nets[1].norm.bias[0]
    assert live.root_digest() == source.manifests["v1"].root_digest


def test_elements_that_a_delta_writes_are_right_whatever_was_there_when_it_is_committed(source, nets, live):
    staged = live.stage("v1", commit="delta")
    with torch.no_grad():
        live.net.embed.weight[tuple(changed_elements(nets[0], nets[1])[0][0])] += 1
    live.commit(staged)
    assert bits(live.net) == bits(nets[1])


def test_values_that_were_written_wrong_are_noticed_and_taken_back(nets, live, monkeypatch):
    real, broken = HostMemory.write, []

    def write(memory, indices, values):
        wrong = values.copy()
        if memory.spec.name == "transposed" and not broken:
            wrong[-1] ^= 1
            broken.append(True)
        real(memory, indices, wrong)

    monkeypatch.setattr(HostMemory, "write", write)
    with pytest.raises(CommitFailed, match="transposed: expected the values that were written"):
        live.update("v1", commit="delta")
    assert broken
    assert (bits(live.net), live.version, live.state) == (bits(nets[0]), "v0", State.READY)
    live.update("v1", commit="delta")
    assert bits(live.net) == bits(nets[1])


# -- deltas that lead elsewhere ----------------------------------------------------------------------------------------


def some_states(rng):
    """Three versions of a model with two tensors alike, a small one of which all changes, and one that never changes."""
    first = {
        "a": rng.standard_normal((60, 50)).astype(np.float32),
        "b": rng.standard_normal((60, 50)).astype(np.float32),
        "bf16": rng.standard_normal(400).astype(ml_dtypes.bfloat16),
        "whole": rng.standard_normal(7),
        "still": rng.integers(0, 255, 33, dtype=np.uint8),
    }
    states = [first]
    for _ in range(2):
        after = {name: array.copy() for name, array in states[-1].items()}
        for name, count in (("a", 150), ("b", 1), ("bf16", 40), ("whole", 7)):
            lanes = after[name].reshape(-1).view(f"u{after[name].itemsize}")
            lanes[rng.choice(len(lanes), count, replace=False)] += np.arange(1, count + 1, dtype=lanes.dtype)
        states.append(after)
    return states


def with_steps(sparse, name, indices, steps):
    """The same delta with another change of one tensor."""
    changed = dataclasses.replace(sparse.tensors[name], indices=indices, steps=steps)
    return dataclasses.replace(sparse, tensors={**sparse.tensors, name: changed})


def with_wrong_element(sparse, name="a"):
    steps = sparse.tensors[name].steps.copy()
    steps[len(steps) // 2] += 1
    return with_steps(sparse, name, sparse.tensors[name].indices, steps)


def with_two_swapped(sparse, name="a"):
    steps = sparse.tensors[name].steps.copy()
    assert steps[0] != steps[-1]
    steps[[0, -1]] = steps[[-1, 0]]
    return with_steps(sparse, name, sparse.tensors[name].indices, steps)


def with_change_dropped(sparse):
    found = sparse.tensors["a"]
    return with_steps(sparse, "a", np.delete(found.indices, 70), np.delete(found.steps, 70))


def with_change_elsewhere(sparse):
    found = sparse.tensors["a"]
    free = next(index for index in range(3000) if index not in found.indices)
    indices = np.append(found.indices[1:], found.indices.dtype.type(free))
    order = np.argsort(indices)
    return with_steps(sparse, "a", indices[order], np.append(found.steps[1:], found.steps[0])[order])


def with_tensor_dropped(sparse):
    return dataclasses.replace(sparse, tensors={name: one for name, one in sparse.tensors.items() if name != "bf16"})


def with_changes_of_another_tensor(sparse):
    a, b = (sparse.tensors[name] for name in "ab")
    exchanged = {"a": dataclasses.replace(b, spec=a.spec), "b": dataclasses.replace(a, spec=b.spec)}
    return dataclasses.replace(sparse, tensors={**sparse.tensors, **exchanged})


WRONG = {
    "one element is wrong": (with_wrong_element, {"a"}),
    "one element of a small tensor is wrong": (partial(with_wrong_element, name="whole"), {"whole"}),
    "one element of 16 bits is wrong": (partial(with_wrong_element, name="bf16"), {"bf16"}),
    "two are swapped": (with_two_swapped, {"a"}),
    "two of a small tensor are swapped": (partial(with_two_swapped, name="whole"), {"whole"}),
    "a change was dropped": (with_change_dropped, {"a"}),
    "a change is at another place": (with_change_elsewhere, {"a"}),
    "a tensor was dropped": (with_tensor_dropped, {"bf16"}),
    "changes are those of another tensor": (with_changes_of_another_tensor, {"a", "b"}),
}


def tampered_source(states, tamper, *, at=1, packing="gaps"):
    """v0 is full, v1 and v2 are deltas. The payload of one leads elsewhere than its manifest says, and is whole as such."""
    source = MemorySource()
    for number, state in enumerate(states):
        source.add(f"v{number}", state, base=f"v{number - 1}" if number else None, packing=packing)
    version, base = f"v{at}", states[at - 1]
    sparse = delta.decode(bytes(source.bytes[version, PAYLOAD]), base)
    payload = delta.pack(tamper(sparse), packing=packing, base=base)
    source.bytes[version, PAYLOAD] = bytearray(payload)
    file = PayloadEntry(file=PAYLOAD, nbytes=len(payload), digest=bytes_digest(payload))
    source.manifests[version] = msgspec.structs.replace(source.manifests[version], payloads=(file,))
    return source


def copies_of(state):
    return {name: array.copy() for name, array in state.items()}


@contextmanager
def untouched(target):
    """Nothing is written to the live arrays meanwhile, nor are others put in their place."""
    before, written = dict(target), []
    write = HostMemory.write

    def watched(memory, indices, values):
        lanes = memory._flat if memory._flat is not None else memory._strided
        written.extend(name for name, array in before.items() if np.may_share_memory(lanes, array))
        write(memory, indices, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostMemory, "write", watched)
        for name in ("write", "install"):
            real = getattr(NumpySlot, name)
            patch.setattr(NumpySlot, name, lambda slot, data, real=real: (written.append(slot), real(slot, data)))
        yield
    assert not written
    assert all(target[name] is array for name, array in before.items())


@pytest.mark.parametrize("packing", ["gaps", "classes"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tamper", "names"), WRONG.values(), ids=WRONG)
def test_a_delta_that_leads_elsewhere_is_refused_before_anything_is_touched(mode, packing, tamper, names, rng):
    states = some_states(rng)
    source = tampered_source(states, tamper, packing=packing)
    target = copies_of(states[1])
    live = LiveModel(target, source=source)
    live.update("v0")
    with untouched(target), pytest.raises(DigestMismatch) as caught:
        live.update("v1", commit=mode)
    assert set(caught.value.tensors) == names
    assert same(target, states[0])
    assert (live.version, live.state) == ("v0", State.READY)
    assert live.root_digest() == source.manifests["v0"].root_digest


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tamper", "names"), WRONG.values(), ids=WRONG)
def test_changes_of_a_provider_that_lead_elsewhere_are_refused_before_anything_is_touched(mode, tamper, names, rng):
    states = some_states(rng)
    target = copies_of(states[1])
    live = LiveModel(target)
    live.update(source=Prepared(states[0]))
    lying = Prepared(states[1], base=Prepared(states[0]))
    lying.delta = tamper(lying.delta)
    with untouched(target), pytest.raises(DigestMismatch) as caught:
        live.update(source=lying, commit=mode)
    assert set(caught.value.tensors) == names
    assert same(target, states[0])
    assert live.state is State.READY


@pytest.mark.parametrize("mode", ["copy", "swap", "delta"])
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("at", [1, 2])
def test_a_chain_with_a_delta_that_leads_elsewhere_is_refused_before_anything_is_touched(mode, held, at, rng):
    states = some_states(rng)
    source = tampered_source(states, with_wrong_element, at=at)
    target = copies_of(states[0])
    live = LiveModel(target, source=source)
    if held:
        live.update("v0")
    with untouched(target), pytest.raises(DigestMismatch) as caught:
        live.update("v2", commit=mode)
    assert caught.value.tensors == ("a",)
    assert same(target, states[0])
    assert live.state is State.READY


def test_spare_buffers_that_a_wrong_delta_has_reached_are_not_used_again(rng):
    states = some_states(rng)
    source = tampered_source(states, with_wrong_element, at=2)
    target = copies_of(states[0])
    live = LiveModel(target, source=source)
    live.update("v0")
    live.update("v1", commit="swap")
    with pytest.raises(DigestMismatch):
        live.update("v2", commit="swap")
    assert same(target, states[1])
    source.add("v2", states[2], base="v1")
    live.update("v2", commit="swap")
    assert same(target, states[2])
    assert live.root_digest() == source.manifests["v2"].root_digest


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changed", [("a", "b"), ("a",), ("b",)])
def test_names_that_the_model_ties_must_get_the_same_changes(mode, changed, rng):
    source, one = MemorySource(), rng.standard_normal(40).astype(np.float32)
    before = {"a": one, "b": one.copy()}
    after = copies_of(before)
    for name in changed:
        after[name][[3, 17]] += 1
    source.add("v0", before)
    source.add("v1", after, base="v0", packing="gaps")
    memory = np.zeros(40, np.float32)
    target = {"a": memory, "b": memory}
    live = LiveModel(target, source=source)
    live.update("v0")
    if len(changed) == 2:
        live.update("v1", commit=mode)
        assert target["a"] is target["b"]
        assert same(target, after)
        assert live.root_digest() == source.manifests["v1"].root_digest
        return
    with untouched(target), pytest.raises((DigestMismatch, VersionDoesNotFit)):
        live.update("v1", commit=mode)
    assert same(target, before)
    assert (live.version, live.state) == ("v0", State.READY)


# -- versions without sums ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("formats", [(1, 1, 1, 1), (1, 2, 2, 2), (1, 1, 2, 2)], ids=str)
def test_deltas_on_versions_without_sums_are_followed_and_proved(nets, mode, formats):
    source = chain_of(nets, formats)
    assert not any(entry.sum for entry in source.manifests["v0"].tensors)
    live, net = serving(source)
    for number in (1, 2, 3):
        source.fetched.clear()
        result = live.update(f"v{number}", commit=mode)
        assert result.mode == ("swap" if mode == "swap" else "delta")
        assert source.fetched == [f"v{number}/{PAYLOAD}"]
        assert bits(net) == bits(nets[number])
        assert live.served_manifest == source.manifests[f"v{number}"]
        assert live.root_digest() == source.manifests[f"v{number}"].root_digest
        assert live.root_digest().startswith("xxh3-128:" if formats[number] == 1 else "sums:")
    assert live.rollback() == "v2"
    assert bits(net) == bits(nets[2])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("formats", [(1, 1, 1), (1, 2, 2), (1, 1, 2)], ids=str)
def test_several_deltas_on_a_version_without_sums_are_taken_folded_and_by_a_model_that_holds_none(nets, mode, formats):
    source = chain_of(nets, formats)
    live, net = serving(source)
    live.update("v2", commit=mode)
    assert bits(net) == bits(nets[2])
    assert live.root_digest() == source.manifests["v2"].root_digest
    late = make(7)
    LiveModel(late, source=source).update("v2", commit=mode)
    assert bits(late) == bits(nets[2])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("formats", [(1, 1), (1, 2)], ids=str)
def test_on_a_version_without_sums_a_change_from_outside_is_noticed_wherever_it_is(nets, mode, formats):
    live, net = serving(chain_of(nets, formats, packing="gaps"))
    with torch.no_grad():
        net.embed.weight[tuple(changed_elements(nets[0], nets[1])[1][0])] += 1
        net.norm.bias[0] += 1
    before = bits(net)
    with pytest.raises(DigestMismatch) as caught:
        live.update("v1", commit=mode)
    assert set(caught.value.tensors) == {"embed.weight", "norm.bias"}
    assert bits(net) == before
    assert (live.version, live.state) == ("v0", State.READY)


def test_a_version_that_was_taken_on_trust_is_no_base(source, nets, live):
    live.update("v1", verify_checksum=False)
    source.fetched.clear()
    live.update("v2")
    assert any(name.startswith("v0/") for name in source.fetched)
    assert bits(live.net) == bits(nets[2])


@pytest.mark.parametrize("mode", MODES)
def test_deltas_without_a_checksum_still_arrive_whole(nets, live, mode):
    live.update("v2", commit=mode, verify_checksum=False)
    assert bits(live.net) == bits(nets[2])


@pytest.mark.parametrize(("packing", "from_held"), [("gaps", True), ("classes", False)])
def test_a_model_that_ignores_tensors_follows_what_it_can_decode(nets, packing, from_held):
    source = MemorySource()
    states = [net.state_dict() | {"extra": torch.full((50,), float(number))} for number, net in enumerate(nets[:3])]
    for number, state in enumerate(states):
        source.add(f"v{number}", state, base=f"v{number - 1}" if number else None, packing=packing)
    net = make(0)
    live = LiveModel(net, source=source, ignore=["extra"])
    live.update("v0")
    source.fetched.clear()
    assert live.update("v2").mode == ("delta" if from_held else "copy")
    assert bits(net) == bits(nets[2])
    assert (source.fetched == ["v1/delta-00001.bin", "v2/delta-00001.bin"]) is from_held
    fresh = LiveModel(make(0), source=source, ignore=["extra"])
    if from_held:
        fresh.update("v1", commit="inplace")
    else:
        with pytest.raises(InvalidInput, match="gaps"):
            fresh.update("v1", commit="inplace")
        assert (fresh.version, fresh.state) == (None, State.READY)


def test_main_and_draft_model_both_take_their_share(nets):
    source = MemorySource()
    main, draft = make(0), torch.nn.Linear(8, 8)
    states = []
    for number in range(3):
        head = {"mtp.weight": torch.full((8, 8), 1.0 + number), "mtp.bias": torch.zeros(8)}
        states.append({f"model.{name}": tensor for name, tensor in nets[number].state_dict().items()} | head)
        source.add(f"v{number}", states[-1], base=f"v{number - 1}" if number else None)
    parts = [
        ModelPart(main, names=["model.*"], rename=lambda name: name.removeprefix("model.")),
        ModelPart(draft, names=["mtp.*"], rename=lambda name: name.removeprefix("mtp.")),
    ]
    live = LiveModel(parts, source=source)
    for version in ("v0", "v1", "v2"):
        live.update(version)
    assert bits(main) == bits(nets[2])
    assert (draft.weight == 3).all()


def test_mappings_of_arrays_follow_deltas(rng):
    source = MemorySource()
    states = [{"a": rng.integers(0, 255, (40, 30), dtype=np.uint8), "scalar": np.array(1.5), "empty": np.zeros((0, 3))}]
    states.append({name: array.copy() for name, array in states[0].items()})
    states[1]["a"][3, 4] += 1
    states[1]["scalar"][...] = -0.0
    for number, state in enumerate(states):
        source.add(f"v{number}", state, base="v0" if number else None)
    target = {"a": np.zeros((30, 40), dtype=np.uint8).T, "scalar": np.array(0.0), "empty": np.zeros((0, 3))}
    live = LiveModel(target, source=source)
    for version in ("v0", "v1"):
        live.update(version)
    assert (target["a"] == states[1]["a"]).all()
    assert np.signbit(target["scalar"])


@pytest.mark.parametrize("mode", MODES)
def test_a_model_follows_a_real_store_through_deltas_full_versions_and_folds(store, nets, mode):
    net = make(0)
    live = LiveModel(net, source=store)
    for number, trained in enumerate(nets):
        # tensors this small are hardly larger than the description of a delta, so its size must not decide
        store.publish(f"v{number}", trained.state_dict(), mode="full" if number in (0, 3) else "delta")
        if number != 1:  # misses one version
            live.update(commit=mode)
            assert bits(net) == bits(trained)
            assert live.root_digest() == store.manifest(f"v{number}").root_digest
    assert [store.manifest(f"v{number}").kind for number in range(6)] == ["full", "delta", "delta", "full", "delta", "delta"]
    store.fold("v5")
    late = make(8)
    LiveModel(late, source=store).update("v5", commit=mode)
    assert bits(late) == bits(nets[5])


# -- failing in the middle ---------------------------------------------------------------------------------------------


class Flaky:
    """Makes writes into live lanes fail, in the middle, at these numbers."""

    def __init__(self, monkeypatch, fails, error=None):
        self.count, self.fails, self.error = 0, set(fails), error or OSError("device lost")
        real = HostMemory.write

        def write(memory, indices, values):
            self.count += 1
            if self.count in self.fails:
                if indices is not None and len(indices) > 1:
                    real(memory, indices[: len(indices) // 2], values[: len(values) // 2])  # half of it is there
                raise self.error
            real(memory, indices, values)

        monkeypatch.setattr(HostMemory, "write", write)


def writes_of_one_commit(source) -> int:
    """How many tensors a commit of v1 writes."""
    net = make(0)
    live = LiveModel(net, source=source)
    live.update("v0")
    with pytest.MonkeyPatch.context() as patch:
        counter = Flaky(patch, ())
        live.update("v1", commit="delta")
        return counter.count


def test_a_commit_that_fails_at_any_tensor_is_undone_and_succeeds_when_repeated(source, nets, monkeypatch):
    total = writes_of_one_commit(source)
    assert total >= 5
    for fails in range(1, total + 1):
        for error in (OSError("device lost"), KeyboardInterrupt()):
            net = make(0)
            live = LiveModel(net, source=source)
            live.update("v0")
            with monkeypatch.context() as patch:
                Flaky(patch, {fails}, error)
                with pytest.raises(CommitFailed if isinstance(error, Exception) else KeyboardInterrupt):
                    live.update("v1", commit="delta")
            assert bits(net) == bits(nets[0])
            assert (live.version, live.state) == ("v0", State.READY)
            live.update("v1", commit="delta")
            assert bits(net) == bits(nets[1])


def test_a_commit_whose_undoing_fails_too_can_be_undone_on_any_later_try(source, nets, monkeypatch):
    total = writes_of_one_commit(source)
    for fails in range(1, total + 1):
        for undo_fails in range(1, fails + 1):
            net = make(0)
            live = LiveModel(net, source=source)
            live.update("v0")
            with monkeypatch.context() as patch:
                # the commit fails, then its undoing, then recover() twice more at other tensors
                Flaky(patch, {fails, fails + undo_fails, fails + undo_fails + 1, fails + undo_fails + 2})
                with pytest.raises(CommitFailed, match="could not be undone"):
                    live.update("v1", commit="delta")
                assert (live.version, live.state) == (None, State.FAILED)
                assert not live.recover()
                assert not live.recover()
                assert live.state is State.FAILED
                assert live.recover()
            assert bits(net) == bits(nets[0])
            assert (live.version, live.state) == ("v0", State.READY)
            assert live.recover()
            live.update("v1", commit="delta")
            assert bits(net) == bits(nets[1])


def test_an_update_after_a_torn_commit_recovers_by_itself(source, nets, live, monkeypatch):
    with monkeypatch.context() as patch:
        Flaky(patch, {3, 4})
        with pytest.raises(CommitFailed, match="recover"):
            live.update("v1", commit="delta")
    assert live.state is State.FAILED
    source.fetched.clear()
    assert live.update("v2", commit="delta").mode == "delta"
    assert source.fetched == ["v1/delta-00001.bin", "v2/delta-00001.bin"]
    assert bits(live.net) == bits(nets[2])


def test_a_torn_model_that_cannot_be_put_back_takes_the_next_full_version(source, nets, live, monkeypatch):
    with monkeypatch.context() as patch:
        Flaky(patch, range(3, 100))
        with pytest.raises(CommitFailed):
            live.update("v1", commit="delta")
    live.update("v2", commit="swap")  # tries to put v0 back first: in vain, the memory of that commit stays broken
    assert bits(live.net) == bits(nets[2])
    assert live.recover()
    assert live.version == "v2"


def test_an_interrupted_recovery_leaves_the_model_failed_and_recoverable(nets, live, monkeypatch):
    flaky = Flaky(monkeypatch, {2, 3})
    with pytest.raises(CommitFailed):
        live.update("v1", commit="delta")
    flaky.fails, flaky.error = {4}, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        live.recover()
    assert live.state is State.FAILED
    assert live.recover()
    assert bits(live.net) == bits(nets[0])


@pytest.mark.parametrize("mode", ["delta", "swap"])
def test_a_post_load_step_that_fails_takes_the_delta_back(source, nets, mode):
    calls = []

    def post_load():
        calls.append(len(calls))
        if len(calls) == 2:
            raise RuntimeError("derived weights")

    net = make(0)
    live = LiveModel(net, source=source, post_load=post_load)
    live.update("v0")
    with pytest.raises(CommitFailed, match="was undone"):
        live.update("v1", commit=mode)
    assert bits(net) == bits(nets[0])
    live.update("v1", commit=mode)
    assert bits(net) == bits(nets[1])


def test_a_stream_that_breaks_restores_a_version_that_is_itself_a_delta(source, nets, live, monkeypatch):
    live.update("v2")
    other = MemorySource()
    other.manifests, other.bytes = dict(source.manifests), source.bytes
    other.add("w", make(9).state_dict())
    real, broken = other.pieces, []

    def pieces(manifest, *, deadline, names=None):
        for number, piece in enumerate(real(manifest, deadline=deadline, names=names)):
            if manifest.version == "w" and number == 5 and not broken:
                broken.append(True)
                raise OSError("the wire")
            yield piece

    other.pieces = pieces
    with pytest.raises(CommitFailed, match="v2 was restored"):
        live.update("w", source=other, commit="inplace")
    assert bits(live.net) == bits(nets[2])
    assert (live.version, live.state) == ("v2", State.READY)


# -- whether deltas are used at all -----------------------------------------------------------------------------------


def published(store, nets, modes):
    for number, mode in enumerate(modes):
        store.publish(f"v{number}", nets[number].state_dict(), mode)


@contextmanager
def source_of(scheme, store):
    """The URL of a store, read or asked of a depot."""
    if scheme == "file":
        yield f"file://{store.path}"
    else:
        with depot_over(store.path) as served:
            yield served.depot.url


@pytest.mark.parametrize("scheme", ["file", "http"])
def test_a_receiver_chooses_whether_deltas_are_used(store, nets, scheme):
    published(store, nets, ["full", "delta", "delta"])
    full_nbytes = store.manifest("v0").nbytes
    with source_of(scheme, store) as url:
        for deltas, mode in (("never", "copy"), ("auto", "delta"), ("always", "delta")):
            net = make(0)
            with LiveModel(net, source=f"{url}?deltas={deltas}") as live:
                live.update("v0")  # a model that holds nothing takes a full version, whatever was chosen
                result = live.update("v2")
                assert (result.mode, result.bytes > full_nbytes) == (mode, deltas == "never")
                assert bits(net) == bits(nets[2])


@pytest.mark.parametrize("scheme", ["file", "http"])
def test_a_receiver_that_insists_on_deltas_refuses_a_full_version_and_keeps_what_it_serves(store, nets, scheme):
    published(store, nets, ["full", "delta", "full"])
    with source_of(scheme, store) as url:
        net = make(0)
        with LiveModel(net, source=f"{url}?deltas=always") as live:
            live.update("v1")
            with pytest.raises(Conflict, match=r"v2 .* by deltas from v1: .*deltas=auto"):
                live.update("v2")
            assert (live.version, live.state, bits(net)) == ("v1", State.READY, bits(nets[1]))
            live.update("v2", source=f"{url}?deltas=auto")
            assert bits(net) == bits(nets[2])


@pytest.mark.parametrize("url", ["file:///s", "http://h:1", "https://h:1", "shares+http://h:1", "nixl://h:1"])
def test_an_unknown_use_of_deltas_is_refused_by_every_source_that_brings_them(url):
    with pytest.raises(InvalidInput, match=r"deltas=sometimes .*never, auto, always"):
        open_receiver(f"{url}?deltas=sometimes", rank=0)
    for deltas in ("never", "auto", "always"):
        with closing(open_receiver(f"{url}?deltas={deltas}", rank=0)) as receiver:
            assert delta_use(receiver) == deltas
    with pytest.raises(InvalidInput, match=r"speed.*deltas"):
        open_receiver(f"{url}?speed=11", rank=0)


class CountedArrays(dict):
    """A model that counts how often each of its arrays is asked for."""

    def __init__(self, arrays):
        super().__init__(arrays)
        self.reads = Counter()

    def __getitem__(self, name):
        self.reads[name] += 1
        return super().__getitem__(name)


def test_a_delta_that_needs_no_base_is_decoded_without_reading_the_model(store):
    arrays = {f"t{number}": np.ones((8, 8), np.float32) for number in range(5)}
    store.publish("step_1", arrays)
    model = CountedArrays({name: np.zeros_like(array) for name, array in arrays.items()})
    live = LiveModel(model, source=store)
    live.update()
    arrays["t3"][0, 0] = 2
    store.publish("step_2", arrays, mode="delta")
    model.reads.clear()
    live.abandon(live.stage("step_2", commit="delta"))
    assert set(model.reads) == {"t3"}
