"""A live model takes a version whole or not at all."""

import logging
import threading
import time
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch

from weightcast import LiveModel, State, Store, logs
from weightcast.clock import Deadline
from weightcast.errors import (
    ClearIncomplete,
    CommitFailed,
    DeadlineExceeded,
    DigestMismatch,
    InvalidInput,
    SourceFailed,
    UnknownSource,
    UpdateFailed,
    UpdateInProgress,
    VersionNotFound,
    VersionNotSet,
    WeightcastError,
    WrongState,
)
from weightcast.store import layout
from weightcast.transports.file import FileReceiver
from weightcast.worker.result import PHASES

MODES = ("copy", "swap", "inplace")


class Net(torch.nn.Module):
    """Tied, transposed, BF16, FP8, integer and scalar state; a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(16, 32, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(16)
        self.transposed = torch.nn.Parameter(torch.randn(24, 16).t())
        self.packed = torch.nn.Parameter(torch.randint(0, 255, (5, 3), dtype=torch.uint8), requires_grad=False)
        self.f8 = torch.nn.Parameter(torch.randn(7).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("cache", torch.zeros(4), persistent=False)


def make(seed: int, device: str = "cpu") -> Net:
    with torch.device(device), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net()


def bits(model) -> dict[str, bytes]:
    return {
        name: tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in model.state_dict().items()
    }


@pytest.fixture
def versions(store):
    for seed in (1, 2):
        store.publish(f"step_{seed}", make(seed).state_dict(), part_nbytes=66_500)
    assert len(store.manifest("step_1").parts) > 1
    return store


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_brings_every_bit_and_proves_it(versions, mode):
    net = make(0)
    live = LiveModel(net, source=versions)
    for version in ("step_1", "step_2", "step_1"):  # twice and back: layouts and attributes must survive
        result = live.update(version, commit=mode)
        assert bits(net) == bits(make(int(version[-1])))
        assert live.root_digest() == versions.manifest(version).root_digest
        assert (live.version, live.state) == (version, State.READY)
        assert (result.version, result.rank, result.mode, result.tensors) == (version, 0, mode, 7)
        assert result.bytes == versions.manifest(version).nbytes
        assert net.head.weight is net.embed.weight
        assert net.transposed.stride() == (1, 16)


def test_the_result_has_one_form_with_the_legacy_names(versions):
    result = LiveModel(make(0), source=versions).update("step_1")
    fields = result.as_dict()
    assert {"sync_cost", "update_cost", "total_cost", "stage_s", "verify_s", "commit_s", "total_s"} <= fields.keys()
    assert fields["total_cost"] == result.total_s == pytest.approx(fields["sync_cost"] + fields["update_cost"])
    assert fields["source"] == f"file://{versions.path}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slow", ["manifest", "pieces", "post_load"])
def test_the_phases_of_an_update_add_up_to_its_time_wherever_that_went(versions, mode, slow, monkeypatch, caplog):
    """A source or a model that is slow somewhere shows in exactly one phase, and in the log as in the result."""

    def slowly(function):
        return lambda *args, **kwargs: (time.sleep(0.05), function(*args, **kwargs))[1]

    receiver = FileReceiver(versions)
    if slow != "post_load":
        monkeypatch.setattr(receiver, slow, slowly(getattr(receiver, slow)))
    caplog.set_level(logging.INFO, "weightcast.worker.result")
    live = LiveModel(make(0), source=receiver, post_load=slowly(lambda: None) if slow == "post_load" else None)
    for version in ("step_1", "step_2", "step_2"):
        began = time.monotonic()
        result = live.update(version, commit=mode)
        taken_s = time.monotonic() - began
        fields = result.as_dict()
        assert sum(fields[f"{phase}_s"] for phase in PHASES) == pytest.approx(result.total_s)
        assert result.total_s <= taken_s
        line = caplog.records[-1].msg.fields
        assert {phase: line[f"{phase}_ms"] for phase in (*PHASES, "total")} == {
            phase: logs.ms(fields[f"{phase}_s"]) for phase in (*PHASES, "total")
        }
        if result.mode != "none":
            phase = {"manifest": "lookup_s", "pieces": "commit_s" if mode == "inplace" else "stage_s"}.get(slow, "commit_s")
            assert fields[phase] >= 0.05


def test_time_between_the_steps_of_a_commit_is_waiting(versions):
    live = LiveModel(make(0), source=versions)
    staged = live.stage("step_1")
    time.sleep(0.03)
    live.enter(staged)
    time.sleep(0.03)
    live.prove()
    result = live.settle()
    assert result.wait_s >= 0.06
    assert sum(result.as_dict()[f"{phase}_s"] for phase in PHASES) == pytest.approx(result.total_s)


@pytest.mark.parametrize(("mode", "stays"), [("copy", True), ("inplace", True), ("swap", False)])
def test_addresses_stay_except_in_swap_and_parameter_objects_always(versions, mode, stays):
    net = make(0)
    live = LiveModel(net, source=versions)
    objects = {name: id(parameter) for name, parameter in net.named_parameters()}
    pointers = {name: parameter.data_ptr() for name, parameter in net.named_parameters()}
    live.update("step_1", commit=mode)
    assert {name: id(parameter) for name, parameter in net.named_parameters()} == objects
    same = [parameter.data_ptr() == pointers[name] for name, parameter in net.named_parameters()]
    assert all(same) if stays else not any(same)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["C", "F", "view"])
def test_a_mapping_of_arrays_of_any_layout(store, rng, mode, order):
    new = rng.integers(0, 2**16, (6, 4), dtype=np.uint16).view(ml_dtypes.bfloat16)
    store.publish("v", {"w": new, "s": np.array(7, np.int64)})
    base = np.zeros((12, 8), ml_dtypes.bfloat16)
    array = {"C": np.zeros((6, 4), base.dtype), "F": np.zeros((6, 4), base.dtype, order="F"), "view": base[::2, ::2]}[order]
    model = {"w": array, "s": np.array(0)}
    live = LiveModel(model, source=store)
    if (mode, order) == ("swap", "view"):
        with pytest.raises(WeightcastError, match="not swappable"):
            live.update("v", commit=mode)
        return
    live.update("v", commit=mode)
    assert model["w"].tobytes() == new.tobytes()
    assert model["w"].flags.f_contiguous == (order == "F")
    assert (model["w"] is array) == (mode != "swap")
    assert model["s"] == 7


@pytest.mark.parametrize("mode", MODES)
def test_tensors_larger_than_a_piece_and_tensors_without_elements(store, rng, mode):
    new = {
        "big": rng.standard_normal((1100, 1000)),
        "turned": rng.standard_normal((1000, 600)).T,
        "empty": np.empty((0, 7), np.float32),
    }
    assert new["big"].nbytes > 2 * (4 << 20)
    store.publish("v", new)
    model = {"big": np.zeros((1100, 1000)), "turned": np.zeros((1000, 600)).T, "empty": np.empty((0, 7), np.float32)}
    live = LiveModel(model, source=store)
    for _ in range(2):
        assert live.update("v", commit=mode).tensors == 3
        assert all((model[name] == array).all() for name, array in new.items())
        assert not model["turned"].flags.c_contiguous
        assert live.root_digest() == store.manifest("v").root_digest
        live.clear()


# --- adopt or copy: docs/adopt-or-copy.md, one test per cell -------------------------------------------------------


@pytest.mark.parametrize("given", [True, False], ids=["version-given", "version-from-yaml"])
@pytest.mark.parametrize("storage", [True, False], ids=["storage", "no-storage"])
@pytest.mark.parametrize("situation", ["first-load", "live", "cleared"])
def test_adopt_or_copy_follows_from_storage_alone(versions, situation, storage, given):
    net = torch.nn.Module()
    source = make(0)
    for name in ("a", "b"):
        net.register_parameter(name, torch.nn.Parameter(source.norm.weight.detach().clone()))
    versions.publish("step_9", {"a": torch.full((16,), 3.0), "b": torch.full((16,), 4.0)})
    versions.publish("step_10", {"a": torch.full((16,), 5.0), "b": torch.full((16,), 6.0)})
    if situation == "first-load" and not storage:
        net.b = torch.nn.Parameter(torch.empty(16, device="meta"))
    live = LiveModel(net, source=versions)
    if situation != "first-load":
        live.update("step_9")
    if situation == "cleared":
        live.clear()
        if storage:  # somebody gave the parameter memory again before the update
            net.b.data = torch.zeros(16)
    elif situation == "live" and not storage:
        net.b.data = torch.empty(0)
    pointer = net.b.data_ptr() if storage else None
    live.update("step_10" if given else None)
    assert (net.a.tolist(), net.b.tolist()) == ([5.0] * 16, [6.0] * 16)
    assert live.state is State.READY
    assert live.version == "step_10"
    if storage:
        assert net.b.data_ptr() == pointer  # copied into


def test_a_meta_model_adopts_the_staged_memory_and_keeps_its_attributes(versions):
    net = make(0, device="meta")
    net.norm.weight.weight_loader = "hook"
    live = LiveModel(net, source=versions)
    assert live.state is State.CLEARED
    assert live.version is None
    with pytest.raises(WrongState):
        live.root_digest()
    live.update("step_1")
    assert bits(net) == bits(make(1))
    assert net.norm.weight.weight_loader == "hook"
    assert isinstance(net.norm.weight, torch.nn.Parameter)
    assert net.norm.weight.requires_grad
    assert not net.packed.requires_grad
    assert net.head.weight is net.embed.weight
    live.update("step_2")
    assert net.norm.weight.weight_loader == "hook"


def test_a_parameter_subclass_on_meta_keeps_its_class(store):
    class Special(torch.nn.Parameter):
        pass

    net = torch.nn.Module()
    net.w = Special(torch.empty(4, device="meta"))
    net.w.output_dim = 1
    store.publish("v", {"w": torch.ones(4)})
    LiveModel(net, source=store).update("v")
    assert type(net.w) is Special
    assert net.w.output_dim == 1
    assert net.w.tolist() == [1.0] * 4


# --- clearing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_clear_frees_the_memory_and_any_mode_loads_again(versions, mode):
    net = make(0)
    live = LiveModel(net, source=versions)
    live.update("step_1")
    live.clear()
    assert live.state is State.CLEARED
    assert live.version is None
    assert sum(parameter.untyped_storage().nbytes() for parameter in net.parameters()) == 0
    live.clear()
    live.update("step_1", commit=mode)
    assert bits(net) == bits(make(1))
    assert net.transposed.stride() == (1, 16)


def test_clear_of_a_mapping_takes_the_arrays_out(store):
    model = {"w": np.ones(8)}
    gone = weakref.ref(model["w"])
    store.publish("v", {"w": np.full(8, 2.0)})
    live = LiveModel(model, source=store)
    live.clear()
    assert gone() is None
    assert model == {}
    live.update("v")
    assert model["w"].tolist() == [2.0] * 8


def test_clear_names_what_others_still_hold(versions):
    net = make(0)
    live = LiveModel(net, source=versions)
    held = net.norm.weight.detach()
    with pytest.raises(ClearIncomplete) as caught:
        live.clear()
    assert caught.value.names == ("norm.weight",)
    assert live.state is State.CLEARED
    del held
    live.update("step_1")
    assert bits(net) == bits(make(1))


def test_clear_is_not_fooled_by_garbage_that_refers_to_itself(versions):
    net = make(0)
    live = LiveModel(net, source=versions)
    cycle = [net.norm.weight.detach()]
    cycle.append(cycle)
    del cycle
    live.clear()


# --- failures ------------------------------------------------------------------------------------------------------


def flip(store, version, tensor=None):
    """Damage one byte of a version: of a tensor, or of the last one in its last part."""
    manifest = store.manifest(version)
    entry = manifest.by_name()[tensor] if tensor else manifest.tensors[-1]
    path = layout.version_dir(store.path, version) / manifest.parts[entry.part].file
    data = bytearray(path.read_bytes())
    data[entry.offset] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("mode", ["copy", "swap"])
@pytest.mark.parametrize("start", ["fresh", "served", "meta"])
def test_a_damaged_version_changes_nothing(versions, mode, start):
    net = make(0, device="meta" if start == "meta" else "cpu")
    live = LiveModel(net, source=versions)
    if start == "served":
        live.update("step_1")
    before = bits(net) if start != "meta" else None
    state, version = live.state, live.version
    flip(versions, "step_2", "norm.bias")
    flip(versions, "step_2", "transposed")
    with pytest.raises(DigestMismatch) as caught:
        live.update("step_2", commit=mode)
    assert set(caught.value.tensors) == {"norm.bias", "transposed"}
    assert (live.state, live.version) == (state, version)
    if start == "meta":
        assert all(parameter.device.type == "meta" for parameter in net.parameters())
    else:
        assert bits(net) == before
    live.update("step_1", commit=mode)
    assert bits(net) == bits(make(1))


def test_flipping_any_byte_of_a_version_is_caught_by_update(versions, rng):
    net = make(0)
    live = LiveModel(net, source=versions)
    live.update("step_1")
    before = bits(net)
    manifest = versions.manifest("step_2")
    directory = layout.version_dir(versions.path, "step_2")
    for file in (*(part.file for part in manifest.parts), layout.MANIFEST):
        data = bytearray((directory / file).read_bytes())
        quiet = max(0, data.find(b'"pt"')) + 1  # a byte of a header that means nothing to a reader
        for position in {0, 8, quiet, len(data) - 1, *rng.integers(0, len(data), 20).tolist()}:
            data[position] ^= 0x04
            (directory / file).write_bytes(data)
            with pytest.raises(WeightcastError):
                live.update("step_2")
            assert (live.state, live.version) == (State.READY, "step_1")
            data[position] ^= 0x04
        (directory / file).write_bytes(data)
    assert bits(net) == before
    live.update("step_2")


def test_declining_the_checksum_skips_the_payload_and_nothing_else(versions):
    net = make(0)
    live = LiveModel(net, source=versions)
    flip(versions, "step_2", "norm.bias")
    live.update("step_2", verify_checksum=False)
    assert live.version == "step_2"
    assert live.root_digest() != versions.manifest("step_2").root_digest
    with pytest.raises(DigestMismatch):  # a version that was not proved does not count as served
        live.update("step_2")
    with pytest.raises(WeightcastError, match="does not fit"):
        LiveModel({"other": np.zeros(3)}, source=versions).update("step_2", verify_checksum=False)


@pytest.mark.parametrize("served", [True, False], ids=["came-from-a-version", "came-from-elsewhere"])
def test_inplace_restores_what_was_served_or_says_failed(versions, served):
    net = make(0)
    live = LiveModel(net, source=versions)
    if served:
        live.update("step_1")
    flip(versions, "step_2")
    with pytest.raises(CommitFailed, match="step_2") as caught:
        live.update("step_2", commit="inplace")
    assert isinstance(caught.value.__cause__, DigestMismatch)
    if served:
        assert (live.state, live.version) == (State.READY, "step_1")
        assert bits(net) == bits(make(1))
        assert "step_1 was restored" in str(caught.value)
    else:
        assert (live.state, live.version) == (State.FAILED, None)
        assert live.legacy_status == 2
        with pytest.raises(WrongState):
            live.root_digest()


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_model_recovers_by_the_next_update(versions, mode):
    net = make(0)
    live = LiveModel(net, source=versions)
    flip(versions, "step_2")
    with pytest.raises(CommitFailed):
        live.update("step_2", commit="inplace")
    with pytest.raises(WeightcastError):
        live.update("step_2", commit=mode)
    assert live.state is State.FAILED
    live.update("step_1", commit=mode)
    assert live.state is State.READY
    assert bits(net) == bits(make(1))


def test_inplace_into_a_cleared_model_that_fails_leaves_it_cleared(versions):
    net = make(0, device="meta")
    live = LiveModel(net, source=versions)
    flip(versions, "step_2")
    with pytest.raises(DigestMismatch):
        live.update("step_2", commit="inplace")
    assert live.state is State.CLEARED
    assert not any(slot.resident for slot in live._slots())
    live.update("step_1", commit="inplace")
    assert bits(net) == bits(make(1))


class DyingReceiver(FileReceiver):
    """A source that dies after so many pieces, in a way that is not ours."""

    def __init__(self, store, pieces, error):
        super().__init__(store)
        self._left, self._error = pieces, error

    def pieces(self, manifest, *, deadline, names=None):
        for piece in super().pieces(manifest, deadline=deadline, names=names):
            if self._left == 0 and manifest.version == "step_2":
                raise self._error
            self._left -= 1
            yield piece


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "error", [OSError("cable cut"), SourceFailed("peer died"), MemoryError(), KeyboardInterrupt()], ids=repr
)
def test_a_source_that_dies_at_any_piece_leaves_the_old_version(versions, mode, error):
    net = make(0)
    live = LiveModel(net, source=versions)
    live.update("step_1")
    count = len(versions.manifest("step_2").tensors)
    for pieces in range(count):
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            live.update("step_2", source=DyingReceiver(versions, pieces, error), commit=mode)
        assert isinstance(caught.value, WeightcastError | KeyboardInterrupt)
        assert (live.state, live.version) == (State.READY, "step_1")
        assert bits(net) == bits(make(1)), f"after {pieces} pieces"
    live.update("step_2", source=DyingReceiver(versions, -1, error), commit=mode)
    assert bits(net) == bits(make(2))


def test_a_write_that_fails_in_the_middle_of_a_stream_stops_the_transport_at_once(store, rng):
    new = {f"w{i}": rng.standard_normal(1 << 20) for i in range(8)}
    store.publish("v", new)
    live = LiveModel({name: np.zeros_like(array) for name, array in new.items()}, source=store)
    live._slots()[1].live = None  # calling it fails
    with pytest.raises(CommitFailed, match="TypeError") as caught:
        live.update("v", commit="inplace")
    assert caught.value.__traceback__  # which refers to every frame, and must not keep the transport alive
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_foreign_errors_are_named_and_keep_their_cause(versions):
    live = LiveModel(make(0), source=versions)
    with pytest.raises(UpdateFailed, match="OSError: cable cut") as caught:
        live.update("step_2", source=DyingReceiver(versions, 0, OSError("cable cut")))
    assert isinstance(caught.value.__cause__, OSError)


def fail_at(slots, index, error):
    """Let the write or install of slot number `index` fail once, as a device error would."""
    slot = slots[index]

    def once(original):
        def call(*args):
            slot.write, slot.install = slot_write, slot_install
            if original is slot_install:
                original(*args)  # half done is the worst case
            raise error

        return call

    slot_write, slot_install = slot.write, slot.install
    slot.write, slot.install = once(slot_write), once(slot_install)


@pytest.mark.parametrize("mode", ["copy", "swap"])
@pytest.mark.parametrize("start", ["served", "cleared"])
def test_a_commit_that_fails_at_any_slot_is_undone(versions, mode, start):
    net = make(0)
    live = LiveModel(net, source=versions)
    live.update("step_1")
    slots = live._slots()
    for index in range(len(slots)):
        for error in (RuntimeError("device lost"), KeyboardInterrupt()):
            if start == "cleared":
                live.clear()
            fail_at(slots, index, error)
            with pytest.raises((CommitFailed, KeyboardInterrupt)):
                live.update("step_2", commit=mode)
            if start == "served":
                assert (live.state, live.version) == (State.READY, "step_1")
                assert bits(net) == bits(make(1)), f"{mode} {index} {error!r}"
            else:
                assert (live.state, live.version) == (State.CLEARED, None)
                assert not any(slot.resident for slot in slots if slot.spec.nbytes)
    live.update("step_2", commit=mode)
    assert bits(net) == bits(make(2))


def test_a_commit_that_cannot_be_undone_says_failed_and_recovers(versions):
    net = make(0)
    live = LiveModel(net, source=versions)
    live.update("step_1")
    slot = live._slots()[2]
    original = slot.write

    def broken(data):
        raise RuntimeError("device lost")

    slot.write = broken
    with pytest.raises(CommitFailed, match="could not be undone"):
        live.update("step_2")
    assert (live.state, live.version) == (State.FAILED, None)
    slot.write = original
    live.update("step_2")
    assert bits(net) == bits(make(2))


def test_live_bytes_that_differ_from_what_was_staged_are_noticed_and_undone(versions):
    net = make(0)
    live = LiveModel(net, source=versions)
    live.update("step_1")
    slot = live._slots()[1]
    original, calls = slot.write, []

    def bad_memory(data):
        calls.append(1)
        original(data)
        if len(calls) == 1:
            slot.live().view(np.uint8).reshape(-1)[3] ^= 1

    slot.write = bad_memory
    with pytest.raises(CommitFailed, match="differ from their digests"):
        live.update("step_2")
    assert bits(net) == bits(make(1))
    assert live.version == "step_1"


def test_post_load_runs_once_per_commit_and_again_after_an_undo(versions):
    net, seen = make(0), []

    def post_load():
        seen.append(net.norm.weight.detach()[0].item())
        if len(seen) == 2:
            raise RuntimeError("repacking failed")

    with torch.no_grad():
        net.norm.weight.fill_(5.0)
    versions.publish("fives", net.state_dict())
    with torch.no_grad():
        net.norm.weight.fill_(6.0)
    versions.publish("sixes", net.state_dict())
    live = LiveModel(net, source=versions, post_load=post_load)
    live.update("fives")
    assert seen == [5.0]
    with pytest.raises(CommitFailed, match="repacking failed"):
        live.update("sixes")
    assert seen == [5.0, 6.0, 5.0]
    assert live.version == "fives"
    for mode in MODES:
        del seen[:]
        live.update("sixes", commit=mode)
        assert seen == [6.0]
        live.clear()


def test_a_deadline_leaves_the_old_version(versions):
    net = make(0)
    live = LiveModel(net, source=versions)
    live.update("step_1")
    for mode in MODES:
        with pytest.raises(DeadlineExceeded):
            live.update("step_2", commit=mode, timeout=0)
        assert (live.state, live.version) == (State.READY, "step_1")
    assert bits(net) == bits(make(1))


# --- two phases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_staging_touches_nothing_and_commit_or_abandon_ends_it(versions, mode):
    net = make(0)
    live = LiveModel(net, source=versions)
    live.update("step_1")
    staged = live.stage("step_2", commit=mode)
    assert (live.state, live.version) == (State.STAGED, "step_1")
    assert bits(net) == bits(make(1))
    assert live.root_digest() == versions.manifest("step_1").root_digest
    with pytest.raises(UpdateInProgress):
        live.update("step_2")
    with pytest.raises(UpdateInProgress):
        live.clear()
    live.abandon(staged)
    assert live.state is State.READY
    with pytest.raises(InvalidInput, match="already"):
        live.commit(staged)
    staged = live.stage("step_2", commit=mode)
    live.commit(staged)
    assert bits(net) == bits(make(2))
    with pytest.raises(InvalidInput, match="already"):
        live.abandon(staged)


def test_a_staged_version_whose_deadline_passed_is_not_committed(versions):
    net = make(0)
    live = LiveModel(net, source=versions)
    staged = live.stage("step_1")
    before = bits(net)
    staged.deadline = Deadline.after(0)
    with pytest.raises(DeadlineExceeded):
        live.commit(staged)
    assert live.state is State.READY
    assert bits(net) == before


def test_a_second_update_from_another_thread_is_refused(versions):
    net, entered, leave = make(0), threading.Event(), threading.Event()

    def hold():
        entered.set()
        leave.wait(10)

    live = LiveModel(net, source=versions, post_load=hold)
    first = threading.Thread(target=live.update, args=("step_1",))
    first.start()
    assert entered.wait(10)
    try:
        with pytest.raises(UpdateInProgress, match="COMMITTING"):
            live.update("step_2")
    finally:
        leave.set()
        first.join(10)
    assert live.version == "step_1"


# --- choosing ------------------------------------------------------------------------------------------------------


def test_the_newest_is_taken_where_no_version_is_asked_for(versions):
    live = LiveModel(make(0), source=versions)
    assert live.update().version == "step_2"
    assert live.update("").version == "step_2"  # legacy callers pass an empty text
    (versions.path / "version.yaml").unlink()
    with pytest.raises(VersionNotSet):
        live.update()


def test_a_version_that_is_served_moves_nothing(versions):
    live = LiveModel(make(0), source=versions)
    live.update("step_1")
    result = live.update("step_1")
    assert (result.mode, result.tensors, result.bytes) == ("none", 0, 0)


def test_the_same_name_with_other_bytes_is_not_taken_for_served(versions, tmp_path):
    other = Store(tmp_path / "other")
    other.publish("step_1", make(7).state_dict())
    net = make(0)
    live = LiveModel(net, source=versions)
    live.update("step_1")
    live.update("step_1", source=other)
    assert bits(net) == bits(make(7))


def test_inplace_does_not_restore_from_a_source_that_has_other_bytes_under_the_name(versions, tmp_path):
    other = Store(tmp_path / "other")
    other.publish("step_1", make(7).state_dict())
    other.publish("step_2", make(8).state_dict())
    flip(other, "step_2")
    live = LiveModel(make(0), source=versions)
    live.update("step_1")
    with pytest.raises(CommitFailed, match="other bytes under the name step_1"):
        live.update("step_2", source=other, commit="inplace")
    assert live.state is State.FAILED
    live.update("step_1")
    assert live.state is State.READY


@pytest.mark.parametrize("form", ["path", "text", "url", "store", "receiver"])
def test_a_source_has_many_spellings(versions, form):
    spelled = {
        "path": versions.path, "text": str(versions.path), "url": f"file://{versions.path}",
        "store": versions, "receiver": FileReceiver(versions),
    }[form]  # fmt: skip
    live = LiveModel(make(0))
    assert live.update("step_1", source=spelled).source == f"file://{versions.path}"


def test_a_receiver_that_was_passed_in_stays_open_and_one_that_was_made_is_closed(versions, monkeypatch):
    closed = []

    def close(receiver):
        closed.append(receiver)

    monkeypatch.setattr(FileReceiver, "close", close)
    live = LiveModel(make(0))
    mine = FileReceiver(versions)
    live.update("step_1", source=mine)
    assert not closed
    live.update("step_2", source=versions)
    with pytest.raises(VersionNotFound):
        live.update("step_7", source=versions)
    assert len(closed) == 2


def test_the_root_digest_sees_every_place_a_tensor_landed_in(store):
    main, draft = {"embed": np.zeros(4)}, {"embed": np.zeros(4)}
    store.publish("v", {"embed": np.ones(4)})
    live = LiveModel([main, draft], source=store)
    live.update("v")
    assert live.root_digest() == store.manifest("v").root_digest
    for damaged in (main, draft):
        damaged["embed"][0] = 7
        assert live.root_digest() != store.manifest("v").root_digest
        damaged["embed"][0] = 1


def test_wrong_calls_are_refused_with_the_choices(versions):
    live = LiveModel(make(0))
    with pytest.raises(InvalidInput, match="no source"):
        live.update("step_1")
    with pytest.raises(UnknownSource, match="file://"):
        live.update("step_1", source="ftp://host/x")
    with pytest.raises(InvalidInput, match="on this host"):
        live.update("step_1", source="file://elsewhere/x")
    with pytest.raises(InvalidInput, match="unknown option"):
        live.update("step_1", source=f"file://{versions.path}?speed=11")
    with pytest.raises(InvalidInput, match="copy, swap, inplace or delta"):
        live.update("step_1", source=versions, commit="magic")
    with pytest.raises(InvalidInput, match="copy, swap, inplace or delta"):
        live.stage("step_1", source=versions, commit="magic")
    with pytest.raises(VersionNotFound, match="step_1, step_2"):
        live.update("step_7", source=versions)
    assert live.state is State.READY


def test_capturing_reads_shapes_only():
    with torch.device("meta"):
        huge = torch.nn.Linear(1 << 20, 1 << 20, dtype=torch.bfloat16)
    live = LiveModel(huge)
    assert live.state is State.CLEARED
    assert huge.weight.device.type == "meta"
