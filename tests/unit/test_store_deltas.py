"""Publishing deltas: when a version becomes one, and that it says the same as a full one."""

import logging
import re

import ml_dtypes
import numpy as np
import pytest

from weightcast import LiveModel, Store, delta
from weightcast.delta import encoder
from weightcast.errors import Conflict, DigestMismatch, InvalidInput, StorageFailed
from weightcast.store import chain, delta_policy, delta_writer, layout, replay
from weightcast.store.delta_policy import DeltaPolicy, estimate_changes
from weightcast.store.part_state import PartState
from weightcast.tensors.bridges import Converted

KINDS = {
    "bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32, "f64": np.float64, "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2, "i64": np.int64, "u8": np.uint8, "c64": np.complex64,
}  # fmt: skip


def bits_of(array):
    return array.reshape(-1).view(np.uint8)


def many_kinds(rng):
    """Tensors of every kind that takes a path of its own; random bits, so NaNs with payloads and infinities too."""
    state = {
        name: rng.integers(0, 256, 4096 * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype).reshape(64, 64)
        for name, dtype in KINDS.items()
    }
    return state | {
        "every": np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16),
        "bool": rng.integers(0, 2, 777).astype(bool),
        "scalar": np.array(2.5, np.float32),
        "count": np.array(7, np.int64),
        "empty": np.empty((0, 4), np.float16),
        "turned": rng.standard_normal((48, 20)).astype(np.float32).T,
        "still": rng.standard_normal(500),
    }


def step_on(state, rng):
    """A later state: a few elements of each tensor have other bits, among them NaNs, zeros of both signs, and wide jumps."""
    later = {name: array.copy() for name, array in state.items()}
    for name in KINDS:
        flat = bits_of(later[name])
        flat[rng.integers(0, len(flat), 40)] = rng.integers(0, 256, 40)
    every = later["every"].view(np.uint16)
    every[rng.integers(0, len(every), 300)] = rng.choice([0x7FC1, 0xFFFF, 0x8000, 0x0000, 0x7F80, 0x0001], 300)
    later["bool"][rng.integers(0, 777, 5)] ^= True
    later["scalar"][...] = rng.standard_normal()
    later["count"][...] += 1 << 40
    later["turned"][3, 5] = -0.0
    return later


def chain_of(rng, count):
    states = [many_kinds(rng)]
    while len(states) < count:
        states.append(step_on(states[-1], rng))
    return states


def same_state(a, b) -> bool:
    return a.keys() == b.keys() and all(
        (a[name].dtype, a[name].shape, a[name].tobytes()) == (b[name].dtype, b[name].shape, b[name].tobytes()) for name in a
    )


def reused(state):
    """The tensors of a state, once, all of one dtype out of the same memory."""
    memory = {}
    for name, array in state.items():
        buffer = memory.setdefault(array.dtype, np.empty(1 << 16, array.dtype))
        borrowed = buffer[: array.size].reshape(array.shape)
        bits_of(borrowed)[:] = np.frombuffer(array.tobytes(), np.uint8)
        yield name, borrowed
    for buffer in memory.values():
        bits_of(buffer)[:] = 0xA5


def files_of(store, version):
    return sorted(path.name for path in layout.version_dir(store.path, version).iterdir())


def kinds_of(store):
    return [store.manifest(version).kind for version in store.versions()]


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks so small that tensors are cut and a payload grows while tensors come."""
    monkeypatch.setattr(encoder, "CHUNK_LANES", 5000)


@pytest.fixture
def reasons(caplog):
    """Why full versions were chosen."""
    caplog.set_level(logging.INFO, logger="weightcast.store.publishing")
    return lambda: [record.msg.fields["why"] for record in caplog.records if record.msg.name == "full version chosen"]


def test_auto_publishes_a_full_version_then_deltas_and_a_full_one_again_in_time(tmp_path, rng, reasons):
    store = Store(tmp_path / "s", delta=DeltaPolicy(full_every=3))
    for number, state in enumerate(chain_of(rng, 7)):
        store.publish(f"step_{number}", state)
    assert kinds_of(store) == ["full", "delta", "delta", "full", "delta", "delta", "full"]
    assert [store.manifest(f"step_{n}").base.version for n in (1, 2, 4, 5)] == ["step_0", "step_1", "step_3", "step_4"]
    assert ["no newest version" in reasons()[0], *("full_every" in reason for reason in reasons()[1:])] == [True] * 3


def test_full_every_one_means_all_are_full(tmp_path, rng):
    store = Store(tmp_path / "s", delta=DeltaPolicy(full_every=1))
    for number, state in enumerate(chain_of(rng, 3)):
        store.publish(f"step_{number}", state)
    assert kinds_of(store) == ["full"] * 3


def test_a_delta_version_has_a_payload_and_no_parts_and_proves_the_whole_state(store, rng):
    states = chain_of(rng, 2)
    full = store.publish("step_100", states[0], files={"config.json": b"{}"})
    manifest = store.publish("step_101", states[1], files={"config.json": b"{}"}, metadata={"run": "x"})
    assert files_of(store, "step_101") == ["config.json", "delta-00001.bin", "manifest.json"]
    assert (manifest.kind, manifest.step, manifest.sequence, manifest.parts) == ("delta", 101, 2, ())
    assert (manifest.base.version, manifest.base.root_digest) == ("step_100", full.root_digest)
    assert [entry.name for entry in manifest.tensors] == list(states[1])
    assert {(entry.part, entry.offset) for entry in manifest.tensors} == {(0, 0)}
    assert all(entry.digest == "" and entry.proof == entry.sum != "" for entry in manifest.tensors)
    assert manifest.root_digest == Store(store.path.with_name("other")).publish("v", states[1]).root_digest
    payload = (layout.version_dir(store.path, "step_101") / "delta-00001.bin").read_bytes()
    assert len(payload) == manifest.payloads[0].nbytes < manifest.nbytes / 10
    packed = delta.inspect(payload)
    assert (packed.base_root, packed.new_root) == (full.root_digest, manifest.root_digest)
    assert (store.newest(), store.manifest("step_101")) == ("step_101", manifest)


@pytest.mark.parametrize("as_given", [dict, reused], ids=["mapping", "iterator"])
@pytest.mark.parametrize("packing", ["classes", "gaps"])
@pytest.mark.parametrize("keep", ["store", "memory"])
def test_every_state_of_a_chain_loads_back_bit_for_bit(tmp_path, rng, keep, packing, as_given):
    store = Store(tmp_path / "s", delta=DeltaPolicy(keep=keep, packing=packing))
    states = chain_of(rng, 5)
    for number, state in enumerate(states):
        store.publish(f"step_{number}", as_given(state))
    assert kinds_of(store) == ["full", *["delta"] * 4]
    assert all(same_state(store.load(f"step_{number}"), state) for number, state in enumerate(states))
    assert all(store.verify(version).ok for version in store.versions())


def test_both_ways_of_keeping_the_last_state_write_the_same_payloads(tmp_path, rng):
    stores = [Store(tmp_path / keep, delta=DeltaPolicy(keep=keep)) for keep in ("store", "memory")]
    for number, state in enumerate(chain_of(rng, 4)):
        manifests = [store.publish(f"step_{number}", state) for store in stores]
        assert manifests[0].payloads == manifests[1].payloads
    assert kinds_of(stores[0]) == ["full", "delta", "delta", "delta"]


@pytest.mark.parametrize("keep", ["store", "memory"])
def test_a_trainer_that_changes_its_tensors_in_place_publishes_what_they_were(tmp_path, rng, keep):
    store = Store(tmp_path / "s", delta=DeltaPolicy(keep=keep))
    live, wanted = many_kinds(rng), []
    for number in range(4):
        store.publish(f"step_{number}", live)
        wanted.append({name: array.copy() for name, array in live.items()})
        for name, array in step_on(live, rng).items():
            live[name][...] = array
    assert kinds_of(store) == ["full", "delta", "delta", "delta"]
    assert all(same_state(store.load(f"step_{number}"), state) for number, state in enumerate(wanted))


@pytest.mark.parametrize(("head", "summed_as"), [("head", ""), ("a_head", "a_head")])
def test_tied_names_stay_tied_in_a_delta_and_are_summed_under_the_smallest(store, rng, head, summed_as):
    states = chain_of(rng, 3)
    for number, state in enumerate(states):
        manifest = store.publish(f"step_{number}", state | {head: state["bf16"]})
        assert manifest.tied == {head: "bf16"}
        assert manifest.by_name()[head].summed_as == summed_as
        assert store.verify().ok
    assert kinds_of(store) == ["full", "delta", "delta"]
    loaded = store.load()
    assert loaded[head] is loaded["bf16"]
    assert same_state(loaded, states[2] | {head: states[2]["bf16"]})
    whole = Store(store.path.with_name("other")).publish("v", states[2] | {head: states[2]["bf16"]})
    assert whole.root_digest == manifest.root_digest
    assert {entry.name: entry.sum for entry in whole.tensors} == {entry.name: entry.sum for entry in manifest.tensors}


def test_a_fresh_store_object_continues_the_chain(store, rng):
    states = chain_of(rng, 4)
    for number, state in enumerate(states):
        keep = ("store", "memory")[number % 2]
        Store(store.path, delta=DeltaPolicy(keep=keep)).publish(f"step_{number}", state)
    assert kinds_of(store) == ["full", "delta", "delta", "delta"]
    assert same_state(store.load(), states[3])
    assert store.verify().ok


@pytest.mark.parametrize("keep", ["store", "memory"])
def test_what_another_process_published_in_between_becomes_the_base(tmp_path, rng, keep):
    ours, theirs = (Store(tmp_path / "s", delta=DeltaPolicy(keep=keep)) for _ in range(2))
    states = chain_of(rng, 8)
    turns = [ours, ours, theirs, ours, theirs, theirs, theirs, ours]
    for number, (who, state) in enumerate(zip(turns, states, strict=True)):
        who.publish(f"step_{number}", state, mode="full" if number == 5 else "auto")
    assert kinds_of(ours) == ["full", *["delta"] * 4, "full", "delta", "delta"]
    assert [ours.manifest(f"step_{n}").base.version for n in (3, 4, 7)] == ["step_2", "step_3", "step_6"]
    assert all(same_state(ours.load(f"step_{number}"), state) for number, state in enumerate(states))


@pytest.mark.parametrize("keep", ["store", "memory"])
def test_an_older_version_that_was_announced_again_becomes_the_base(tmp_path, rng, keep):
    store = Store(tmp_path / "s", delta=DeltaPolicy(keep=keep))
    states = chain_of(rng, 3)
    for number, state in enumerate(states):
        store.publish(f"step_{number}", state)
    store.announce("step_1")
    other = step_on(states[1], rng)
    manifest = store.publish("fork", other)
    assert (manifest.kind, manifest.base.version) == ("delta", "step_1")
    assert same_state(store.load("fork"), other)
    assert same_state(store.load("step_2"), states[2])


@pytest.mark.parametrize("keep", ["store", "memory"])
def test_a_publish_that_fails_leaves_nothing_and_the_next_delta_is_right(tmp_path, rng, keep):
    store = Store(tmp_path / "s", delta=DeltaPolicy(keep=keep))
    states = chain_of(rng, 3)
    store.publish("step_0", states[0])
    store.publish("step_1", states[1])

    def dies():
        yield from list(states[2].items())[:5]
        raise RuntimeError("trainer died")

    with pytest.raises(RuntimeError, match="trainer died"):
        store.publish("step_2", dies())
    assert sorted(path.name for path in layout.versions_dir(store.path).iterdir()) == ["step_0", "step_1"]
    manifest = store.publish("step_2", states[2])
    assert (manifest.kind, manifest.base.version) == ("delta", "step_1")
    assert same_state(store.load(), states[2])


def test_a_tensor_given_twice_is_refused_in_a_delta_too(store, rng):
    state = many_kinds(rng)
    store.publish("step_0", state)
    with pytest.raises(InvalidInput, match="'bf16' was given twice"):
        store.publish("step_1", [*state.items(), ("bf16", state["bf16"])])
    assert store.versions() == ["step_0"]


# -- whether a delta pays ---------------------------------------------------------------------------------------------

LARGE = 1 << 20  # elements: so many that the share of changes counts


def moved(array, share, rng, *, first=0.0):
    """A copy in which this share of the elements has another last bit, none of them in the first part."""
    later = array.copy()
    bits = later.reshape(-1).view(f"u{array.itemsize}")
    bits ^= (rng.random(bits.size) < share) & (np.arange(bits.size) >= first * bits.size)
    return later


def large_state(rng, dtype):
    return {name: rng.standard_normal((1024, LARGE // 2048)).astype(dtype) for name in ("a", "b")}


@pytest.mark.parametrize("as_given", [dict, dict.items], ids=["mapping", "iterator"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize(("share", "kind"), [(0, "delta"), (0.001, "delta"), (0.5, "full"), (1, "full")])
def test_auto_publishes_a_delta_only_where_it_pays(store, rng, reasons, as_given, dtype, share, kind):
    state = large_state(rng, dtype)
    later = {name: moved(array, share, rng) for name, array in state.items()}
    store.publish("step_0", state)
    assert store.publish("step_1", as_given(later)).kind == kind
    assert ("a full version is served sooner" in reasons()[-1]) == (kind == "full")
    assert any("delta" in name for name in files_of(store, "step_1")) == (kind == "delta")
    assert same_state(store.load(), later)


def test_a_delta_that_does_not_pay_is_written_where_it_is_asked_for(store, rng):
    state = large_state(rng, ml_dtypes.bfloat16)
    store.publish("step_0", state)
    assert store.publish("step_1", {name: moved(one, 1, rng) for name, one in state.items()}, mode="delta").kind == "delta"


def test_a_slow_link_makes_deltas_pay_that_would_not_pay_on_a_fast_one(tmp_path, rng):
    state = large_state(rng, ml_dtypes.bfloat16)
    later = {name: moved(array, 0.3, rng) for name, array in state.items()}
    kinds = []
    for link in (None, 1e10, 1e7):
        store = Store(tmp_path / str(link), delta=DeltaPolicy(link_nbytes_per_s=link))
        store.publish("step_0", state)
        kinds.append(store.publish("step_1", later).kind)
    assert kinds == ["full", "full", "delta"]


def test_a_version_that_does_not_pay_is_not_encoded_at_all(store, rng, monkeypatch):
    state = large_state(rng, np.float32)
    store.publish("step_0", state)
    monkeypatch.setattr(encoder.Encoder, "add", lambda *_, **__: pytest.fail("it was encoded"))
    assert store.publish("step_1", {name: moved(array, 1, rng) for name, array in state.items()}).kind == "full"


@pytest.mark.parametrize(
    ("share", "kind", "least", "most"),
    [(0.05, "full", 1, 3), (0.015, "delta", 32, 32)],
    ids=["far too many", "a few too many"],
)
def test_tensors_that_come_one_by_one_are_judged_by_the_first_ones(store, rng, monkeypatch, share, kind, least, most):
    """A delta pays up to 1.25 %. With a few more, finishing it is cheaper than taking most of it back."""
    for module in (delta_policy, delta_writer):
        monkeypatch.setattr(module, "FEW_CHANGES", 1000)
    state = {f"layers.{layer}": rng.standard_normal(1 << 14).astype(np.float32) for layer in range(32)}
    later = {name: moved(array, share, rng) for name, array in state.items()}
    store.publish("step_0", state)
    encoded = []
    add = encoder.Encoder.add
    monkeypatch.setattr(encoder.Encoder, "add", lambda *given, **how: encoded.append(given) or add(*given, **how))
    assert store.publish("step_1", iter(later.items())).kind == kind
    assert least <= len(encoded) <= most
    assert same_state(store.load(), later)


def test_few_changes_are_a_delta_also_if_all_come_first(store, rng):
    state = {f"layers.{layer}": rng.standard_normal(1 << 14).astype(np.float32) for layer in range(8)}
    later = state | {"layers.0": state["layers.0"] + 1}
    store.publish("step_0", state)
    assert store.publish("step_1", iter(later.items())).kind == "delta"


@pytest.mark.parametrize("as_given", [dict, dict.items], ids=["mapping", "iterator"])
def test_encoding_stops_where_the_sample_was_wrong_and_leaves_nothing(store, rng, reasons, monkeypatch, as_given):
    state = {f"{number}": rng.standard_normal((1024, 128)).astype(np.float32) for number in range(32)}
    later = {name: moved(array, 1, rng) for name, array in state.items()}
    store.publish("step_0", state)
    monkeypatch.setattr(delta_writer, "estimate_changes", lambda *_: 0.0)
    monkeypatch.setattr(encoder, "CHUNK_LANES", 1 << 16)
    scanned, scan = [], encoder._scanned
    monkeypatch.setattr(encoder, "_scanned", lambda *arguments: scanned.append(1) or scan(*arguments))
    assert store.publish("step_1", as_given(later)).kind == "full"
    assert "a full version is served sooner" in reasons()[-1]
    assert len(scanned) < 16
    assert not [name for name in files_of(store, "step_1") if "delta" in name]
    assert same_state(store.load(), later)
    assert store.publish("step_2", later).kind == "delta"


def test_a_tensor_that_is_converted_is_converted_once_for_a_delta(store, rng, monkeypatch):
    state = large_state(rng, np.float32)
    store.publish("step_0", state, dtype="BF16")
    made, host = [], Converted.host
    monkeypatch.setattr(Converted, "host", lambda self: made.append(self.spec.name) or host(self))
    assert (
        store.publish("step_1", {name: moved(one, 0.001, rng) for name, one in state.items()}, dtype="BF16").kind == "delta"
    )
    assert made == ["a", "b"]


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.2])
@pytest.mark.parametrize("lanes", [1, 500, 70_000, 10_000_000])
def test_the_estimate_is_near_the_truth_and_always_the_same(rng, lanes, share):
    old = np.zeros(lanes, np.uint16)
    new = (rng.random(lanes) < share).astype(np.uint16)
    found = [estimate_changes(lanes, lambda a, b: old[a:b], lambda a, b: new[a:b]) for _ in range(2)]
    assert found[0] == found[1]
    seen = min(lanes, 512 * max(1, int((lanes / 65536) ** 0.5)))
    assert abs(found[0] - np.count_nonzero(new)) <= lanes / seen * (4 * (share * seen) ** 0.5 + 4)


# -- versions that cannot be deltas -----------------------------------------------------------------------------------


@pytest.mark.parametrize("as_given", [dict, reused], ids=["mapping", "iterator"])
def test_a_payload_that_grows_too_large_becomes_a_full_version(store, rng, reasons, small_chunks, as_given):
    store.publish("step_0", many_kinds(rng))
    other = many_kinds(rng)
    store.publish("step_1", as_given(other), part_nbytes=70_000)
    assert kinds_of(store) == ["full", "full"]
    assert "max_share" in reasons()[-1]
    assert same_state(store.load("step_1"), other)
    assert store.verify("step_1").ok
    assert not [name for name in files_of(store, "step_1") if "delta" in name]
    assert len(store.manifest("step_1").parts) > 2


@pytest.mark.parametrize("share", [1e-6, 0.002, 0.004, 0.01])
@pytest.mark.parametrize("keep", ["store", "memory"])
def test_an_iterator_is_given_back_bit_for_bit_wherever_its_payload_grew_too_large(tmp_path, rng, small_chunks, keep, share):
    store = Store(tmp_path / "s", delta=DeltaPolicy(max_share=share, keep=keep))
    states = chain_of(rng, 2)
    store.publish("step_0", states[0])
    taken = []

    def counted():
        for name, array in reused(states[1]):
            taken.append(name)
            yield name, array

    store.publish("step_1", counted())
    assert kinds_of(store) == ["full", "full"]
    assert taken == list(states[1])  # each was asked for once, and all of them
    assert same_state(store.load("step_1"), states[1])


def without(state, name):
    return {key: array for key, array in state.items() if key != name}


def renamed(state):
    return {("other" if name == "e4m3" else name): array for name, array in state.items()}


def reshaped(state):
    return state | {"e5m2": state["e5m2"].reshape(32, 128)}


def retyped(state):
    return state | {"i64": state["i64"].view(np.uint64)}


@pytest.mark.parametrize("as_given", [dict, reused], ids=["mapping", "iterator"])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda state: state | {"new": np.ones(3)}, "has no tensor new"),
        (lambda state: {"new": np.ones(3)} | state, "has no tensor new"),
        (lambda state: without(state, "every"), "every"),
        (renamed, "has no tensor other"),
        (reshaped, "F8_E5M2[32, 128], in step_0 it is F8_E5M2[64, 64]"),
        (retyped, "U64"),
    ],
    ids=["one more at the end", "one more at the beginning", "one less", "another name", "another shape", "another dtype"],
)
def test_another_set_of_tensors_becomes_a_full_version(store, rng, reasons, small_chunks, as_given, changed, said):
    states = chain_of(rng, 2)
    store.publish("step_0", states[0])
    other = changed(states[1])
    with pytest.raises(Conflict, match=re.escape(said)):
        store.publish("step_1", as_given(other), mode="delta")
    assert store.versions() == ["step_0"]
    store.publish("step_1", as_given(other))
    assert kinds_of(store) == ["full", "full"]
    assert said in reasons()[-1]
    assert same_state(store.load("step_1"), other)
    assert not [name for name in files_of(store, "step_1") if "delta" in name]


def test_other_ties_become_a_full_version(store, rng, reasons):
    state = many_kinds(rng)
    store.publish("step_0", state | {"head": state["bf16"]})
    store.publish("step_1", state | {"head": state["bf16"].copy()})
    store.publish("step_2", state | {"head": state["bf16"]})
    store.publish("step_3", iter(state.items()))
    assert kinds_of(store) == ["full"] * 4
    assert [reason for reason in reasons()[1:] if "tied" in reason or "tensor" in reason] == reasons()[1:]
    assert same_state(store.load("step_3"), state)


def test_a_name_that_is_tied_to_another_tensor_becomes_a_full_version(store, rng, reasons):
    state = many_kinds(rng) | {"twin": rng.standard_normal((64, 64)).astype(np.float16)}
    store.publish("step_0", state | {"head": state["f16"]})
    manifest = store.publish("step_1", state | {"head": state["twin"]})
    assert (manifest.kind, manifest.tied) == ("full", {"head": "twin"})
    assert "tied names" in reasons()[-1]


def test_tensors_that_come_back_changed_from_an_unfinished_delta_are_not_published(store, rng, monkeypatch):
    states = chain_of(rng, 2)
    store.publish("step_0", states[0])

    def flipped(*arguments, original=replay.replayed):
        for name, array in original(*arguments):
            bits_of(array)[:1] ^= 1
            yield name, array

    monkeypatch.setattr(delta_writer, "replayed", flipped)
    with pytest.raises(DigestMismatch, match="taken back"):
        store.publish("step_1", reused(without(states[1], "still")))
    assert [path.name for path in layout.versions_dir(store.path).iterdir()] == ["step_0"]


@pytest.mark.parametrize("keep", ["store", "memory"])
def test_another_digest_becomes_a_full_version_and_its_successors_deltas(tmp_path, rng, reasons, keep):
    store = Store(tmp_path / "s", delta=DeltaPolicy(keep=keep))
    states = chain_of(rng, 4)
    store.publish("step_0", states[0])
    store.publish("step_1", states[1], algorithm="blake3")
    store.publish("step_2", states[2], algorithm="blake3")
    manifest = store.publish("step_3", states[3], algorithm="blake3")
    assert kinds_of(store) == ["full", "full", "delta", "delta"]
    assert "blake3" in reasons()[-1]
    assert manifest.root_digest.startswith("sums:")
    assert manifest.payloads[0].digest.startswith("blake3:")
    assert all(entry.digest.startswith("blake3:") for entry in store.manifest("step_1").tensors)
    assert same_state(store.load(), states[3])


@pytest.mark.parametrize("keep", ["store", "memory"])
@pytest.mark.parametrize("damaged", ["step_0", "step_1"])
def test_a_damaged_base_is_not_built_on(tmp_path, rng, reasons, keep, damaged):
    states = chain_of(rng, 3)
    store = Store(tmp_path / "s")
    store.publish("step_0", states[0])
    store.publish("step_1", states[1])
    manifest = store.manifest(damaged)
    file = manifest.payloads[0].file if manifest.payloads else manifest.parts[0].file
    path = layout.version_dir(store.path, damaged) / file
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    fresh = Store(store.path, delta=DeltaPolicy(keep=keep))
    with pytest.raises(Conflict, match="cannot be published as a delta"):
        fresh.publish("step_2", states[2], mode="delta")
    assert fresh.publish("step_2", states[2]).kind == "full"
    assert reasons()
    assert same_state(fresh.load("step_2"), states[2])


@pytest.mark.parametrize("as_given", [dict, reused], ids=["mapping", "iterator"])
@pytest.mark.parametrize("where", ["in an element that changes", "in one that stays", "back to what is published now"])
def test_damage_of_a_base_is_found_by_its_sum_wherever_it_lies(store, rng, reasons, as_given, where):
    states = [many_kinds(rng)]
    states.append({name: array.copy() for name, array in states[0].items()})
    states[1]["f32"].reshape(-1)[100] = 1.5
    full = store.publish("step_0", states[0])
    entry = full.by_name()["f32"]
    path = layout.version_dir(store.path, "step_0") / full.parts[entry.part].file
    data = bytearray(path.read_bytes())
    at = entry.offset + 4 * (200 if where == "in one that stays" else 100)
    if where == "back to what is published now":
        data[at : at + 4] = states[1]["f32"].reshape(-1)[100].tobytes()
    else:
        data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(Conflict, match="tensor f32 of step_0 is damaged"):
        Store(store.path).publish("step_1", as_given(states[1]), mode="delta")
    manifest = Store(store.path).publish("step_1", as_given(states[1]))
    assert manifest.kind == "full"
    assert "tensor f32 of step_0 is damaged in the store" in reasons()[-1]
    assert same_state(store.load("step_1"), states[1])
    assert store.verify("step_1").ok


def test_a_base_that_breaks_while_it_is_read_fails_the_publish_and_leaves_nothing(store, rng, monkeypatch):
    states = chain_of(rng, 2)
    store.publish("step_0", states[0])
    reads, original = [], PartState.lanes

    def break_late(self, name, start, stop):
        reads.append(name)
        if len(reads) > 25:  # some tensors are encoded by then
            raise StorageFailed("read", store.path, OSError(5, "Input/output error"))
        return original(self, name, start, stop)

    monkeypatch.setattr(PartState, "lanes", break_late)
    with pytest.raises(StorageFailed):
        store.publish("step_1", reused(states[1]))
    monkeypatch.undo()
    assert [path.name for path in layout.versions_dir(store.path).iterdir()] == ["step_0"]
    assert store.publish("step_1", reused(states[1])).kind == "delta"
    assert same_state(store.load(), states[1])


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        (DeltaPolicy(max_share=1e-6), {}, "max_share"),
        (DeltaPolicy(full_every=2), {}, "full_every"),
        (DeltaPolicy(), {"algorithm": "md5"}, "digests by xxh3-128, not by md5"),
    ],
)
def test_delta_mode_is_refused_where_the_policy_wants_a_full_version(tmp_path, rng, policy, options, said):
    states = chain_of(rng, 3)
    store = Store(tmp_path / "s", delta=policy)
    Store(store.path).publish("step_0", states[0])
    Store(store.path).publish("step_1", states[1])
    with pytest.raises(Conflict, match=f"{said}.*mode 'full', or 'auto'"):
        store.publish("step_2", states[2], mode="delta", **options)
    assert (store.versions(), store.newest()) == (["step_0", "step_1"], "step_1")
    assert sorted(path.name for path in layout.versions_dir(store.path).iterdir()) == ["step_0", "step_1"]


def test_delta_mode_is_refused_in_an_empty_store(store, rng):
    with pytest.raises(Conflict, match="no newest version to build on"):
        store.publish("step_0", many_kinds(rng), mode="delta")
    assert store.versions() == []


def test_an_equal_state_is_a_delta_of_a_few_bytes(store, rng):
    state = many_kinds(rng)
    store.publish("step_0", state)
    manifest = store.publish("step_1", state, mode="delta")
    assert manifest.payloads[0].nbytes < 1000
    assert manifest.root_digest == store.manifest("step_0").root_digest
    later = step_on(state, rng)
    assert store.publish("step_2", later).base.version == "step_1"
    assert same_state(store.load(), later)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_share": 0}, {"max_share": 1.1}, {"max_share": float("nan")}, {"max_share": "half"}, {"full_every": 0},
        {"full_every": 2.5}, {"full_every": True}, {"packing": "zip"}, {"keep": "disk"}, {"threads": 0}, {"threads": 1.5},
        {"link_nbytes_per_s": 0}, {"link_nbytes_per_s": "fast"},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(InvalidInput, match=next(iter(settings))):
        DeltaPolicy(**settings)


def test_an_unknown_mode_is_refused(store):
    with pytest.raises(InvalidInput, match="full, delta, auto"):
        store.publish("v", {"w": np.zeros(3)}, mode="magic")
    assert not store.path.exists()


def test_the_log_tells_kind_size_and_density(store, rng, caplog):
    caplog.set_level(logging.INFO, logger="weightcast.store")
    states = chain_of(rng, 2)
    store.publish("step_0", states[0])
    manifest = store.publish("step_1", states[1])
    (line,) = [record.getMessage() for record in caplog.records if "version=step_1 kind=" in record.getMessage()]
    assert f"kind=delta tensors={len(states[1])}" in line
    assert f"payload_nbytes={manifest.payloads[0].nbytes} density=0.0" in line


@pytest.mark.parametrize("keep", ["store", "memory"])
def test_what_was_published_is_followed_without_reading_it_back(tmp_path, rng, keep, monkeypatch):
    store = Store(tmp_path / "s", delta=DeltaPolicy(keep=keep))
    states = chain_of(rng, 5)
    for number, state in enumerate(states[:2]):
        store.publish(f"step_{number}", state)
    read = []
    real = chain.read_payloads
    monkeypatch.setattr(chain, "read_payloads", lambda *args: read.append(args) or real(*args))
    for number, state in enumerate(states[2:], start=2):
        assert store.publish(f"step_{number}", state).kind == "delta"
    assert not read
    for number, state in enumerate(states):
        assert same_state(store.load(f"step_{number}"), state)
    monkeypatch.setattr(delta_writer, "_COLLECTED_SHARE", 1 << 40)  # no room to hand changes on: they are read back
    store.publish("step_5", step_on(states[-1], rng))
    read.clear()
    store.publish("step_6", states[0])
    assert len(read) == 1
    assert same_state(store.load(), states[0])


def test_both_packings_lie_side_by_side_and_a_receiver_chooses(tmp_path, rng):
    store = Store(tmp_path / "s", delta=DeltaPolicy(packing="both"))
    states = [{"w": rng.normal(0, 0.02, (400, 500)).astype(np.float32)}]
    for _ in range(3):
        new = states[-1]["w"].copy()
        new.reshape(-1)[rng.choice(new.size, 2000, replace=False)] *= np.float32(1.0001)
        states.append({"w": new})
    for number, state in enumerate(states):
        manifest = store.publish(f"step_{number}", state, mode="full" if number == 0 else "delta")
    by_packing = {payload.packing: payload for payload in manifest.payloads}
    assert list(by_packing) == ["gaps", "classes"]
    assert by_packing["classes"].nbytes != by_packing["gaps"].nbytes
    for packing, payload in by_packing.items():
        target = {"w": states[2]["w"].copy()}
        live = LiveModel(target, source=f"file://{store.path}?packing={packing}")
        live.update("step_2")
        assert live.update("step_3").bytes == payload.nbytes
        assert same_state(target, states[3])
    with pytest.raises(InvalidInput, match="packing=small"):
        LiveModel({"w": states[0]["w"]}, source=f"file://{store.path}?packing=small").update()
    assert [payload.packing for payload in store.fold("step_3", onto="step_1").payloads] == ["gaps", "classes"]
    assert same_state(store.load("step_3"), states[3])
    store.gc()
    assert store.verify("step_3").ok


def test_the_packing_follows_the_link():
    assert DeltaPolicy().packings == DeltaPolicy(link_nbytes_per_s=1e9).packings == ("gaps",)
    assert DeltaPolicy(link_nbytes_per_s=1e6).packings == ("classes",)
    assert DeltaPolicy(packing="classes", link_nbytes_per_s=1e9).packings == ("classes",)
    with pytest.raises(InvalidInput, match="packing"):
        DeltaPolicy(packing="small")
