"""A commit in steps: what is entered counts when it is settled, and until then every bit of it can be taken back."""

import threading

import numpy as np
import pytest
import torch
from live_cases import KINDS, Case, Writes, trained, writes_of
from test_live_delta import MemorySource
from test_live_model import bits, make

from weightcast import LiveModel, State
from weightcast.clock import Deadline
from weightcast.errors import (
    CommitFailed,
    DeadlineExceeded,
    DigestMismatch,
    InvalidInput,
    UpdateCancelled,
    UpdateInProgress,
    WrongState,
)
from weightcast.tensors.flat import Piece
from weightcast.transports import registry


@pytest.fixture(params=KINDS)
def case(request):
    return Case(request.param)


# -- the ways through ---------------------------------------------------------------------------------------------------


def test_what_is_entered_and_reverted_leaves_every_bit_as_it_was(case):
    staged = case.stage()
    case.live.enter(staged)
    assert bits(case.net) == case.new
    assert (case.live.version, case.live.state) == ("v1", State.COMMITTING)
    case.live.revert()
    case.check_old()
    case.live.commit(case.stage())
    case.check_new()


def test_what_is_proved_may_be_reverted_too(case):
    case.live.enter(case.stage())
    case.live.prove()
    case.live.revert()
    case.check_old()


def test_what_is_entered_proved_and_settled_counts(case):
    staged = case.stage()
    case.live.enter(staged)
    case.live.prove()
    assert case.live.version == "v1"
    result = case.live.settle()
    case.check_new()
    assert case.live.served_manifest == case.source.manifests["v2"]
    assert result.version == "v2"
    assert result.mode == {"copy": "copy", "swap": "swap", "delta": "delta", "inplace": "inplace"}.get(case.kind, "swap")
    assert result.commit_s > 0
    assert result.verify_s >= staged.verify_s
    case.live.update("v3", commit=case.mode)
    assert bits(case.net) == case.newer


def test_the_steps_come_in_their_order_or_are_refused(case):
    for call in (case.live.prove, case.live.settle, case.live.revert):
        with pytest.raises(WrongState, match="after enter"):
            call()
    staged = case.stage()
    for call in (case.live.prove, case.live.settle, case.live.revert):
        with pytest.raises(WrongState, match="STAGED"):
            call()
    case.live.enter(staged)
    for call in (case.live.enter, case.live.commit, case.live.abandon):
        with pytest.raises(InvalidInput, match="already"):
            call(staged)
    with pytest.raises(InvalidInput, match="not proved"):
        case.live.settle()
    for call in (case.stage, case.live.clear, case.live.rollback, lambda: case.live.update("v3")):
        with pytest.raises(UpdateInProgress):
            call()
    with pytest.raises(WrongState):
        case.live.root_digest()
    case.live.prove()
    case.live.settle()
    with pytest.raises(WrongState):
        case.live.revert()
    case.check_new()


def test_post_load_runs_once_when_entering_and_once_more_when_that_is_taken_back():
    for kind in KINDS:
        seen = []
        case = Case(kind, post_load=lambda seen=seen: seen.append(1))
        seen.clear()
        case.live.enter(case.stage())
        assert len(seen) == 1
        case.live.prove()
        assert len(seen) == 1
        case.live.revert()
        assert len(seen) == 2
        case.live.commit(case.stage())
        assert len(seen) == 3


def test_a_model_without_weights_goes_back_to_having_none():
    for kind in ("copy", "swap", "inplace"):
        case = Case(kind)
        case.live.clear()
        case.live.enter(case.stage())
        assert bits(case.net) == case.new
        case.live.revert()
        assert case.live.state is State.CLEARED
        assert not any(slot.resident for slot in case.live._slots())
        case.live.clear()
        case.live.update("v2", commit=case.mode)
        case.check_new()


# -- proving ------------------------------------------------------------------------------------------------------------


def first_change(case, name="embed.weight"):
    """The first byte of a tensor that is another in the new version."""
    return next(at for at, (old, new) in enumerate(zip(case.old[name], case.new[name], strict=True)) if old != new)


@pytest.mark.parametrize("kind", ["copy", "delta"])
def test_a_wrong_bit_in_what_was_written_is_noticed_by_the_proof_and_the_caller_goes_back(kind):
    case = Case(kind)
    case.live.enter(case.stage())
    spoiled, at = case.net.embed.weight.data.view(torch.uint8).view(-1), first_change(case)
    spoiled[at] ^= 1
    with pytest.raises(DigestMismatch) as caught:
        case.live.prove()
    assert caught.value.tensors == ("embed.weight",)
    with pytest.raises(InvalidInput, match="not proved"):
        case.live.settle()
    spoiled[at] ^= 1
    case.live.revert()
    case.check_old()


@pytest.mark.parametrize("kind", ["swap", "delta-swap", "delta-swap-spare"])
def test_memory_that_was_not_installed_is_noticed_by_the_proof_and_the_caller_goes_back(kind):
    case = Case(kind)
    case.live.enter(case.stage())
    case.net.norm.bias.data = case.net.norm.bias.data + 1
    with pytest.raises(DigestMismatch) as caught:
        case.live.prove()
    assert caught.value.tensors == ("norm.bias",)
    with pytest.raises(InvalidInput, match="not proved"):
        case.live.settle()
    case.live.revert()
    case.check_old()


@pytest.mark.parametrize("kind", ["delta", "delta-swap", "delta-swap-spare"])
def test_a_wrong_bit_where_nothing_was_written_is_not_for_the_proof_but_for_the_root_digest(kind):
    case = Case(kind)
    case.live.enter(case.stage())
    spoiled = case.net.norm.bias.data.view(torch.uint8)  # untouched by every delta
    spoiled[3] ^= 1
    case.live.prove()
    case.live.settle()
    assert case.live.root_digest() != case.root("v2")
    spoiled[3] ^= 1
    case.check_new()


MIB, PAGE = 1 << 20, 4 << 10
LARGE = 2 * MIB + 3 * PAGE


@pytest.mark.parametrize(
    ("at", "noticed"),
    [
        (0, True), (PAGE - 1, True), (PAGE, False), (MIB - 1, False), (MIB, True), (MIB + PAGE - 1, True),
        (MIB + PAGE, False), (2 * MIB, True), (2 * MIB + PAGE, False), (LARGE - PAGE - 1, False), (LARGE - PAGE, True),
        (LARGE - 1, True),
    ],
)  # fmt: skip
def test_a_copy_is_read_back_at_both_ends_and_at_a_page_of_every_mebibyte(at, noticed, rng):
    source = MemorySource()
    states = [{"large": rng.integers(0, 255, LARGE, dtype=np.uint8), "small": rng.standard_normal(9)} for _ in range(2)]
    for number, state in enumerate(states):
        source.add(f"v{number}", state)
    source.pieces = lambda manifest, **_: (
        Piece(entry.name, 0, memoryview(source.bytes[manifest.version, entry.name])) for entry in manifest.tensors
    )
    target = {"large": np.zeros(LARGE, np.uint8), "small": np.zeros(9)}
    live = LiveModel(target, source=source)
    live.update("v0")
    live.enter(live.stage("v1"))
    target["large"][at] ^= 1
    if noticed:
        with pytest.raises(DigestMismatch) as caught:
            live.prove()
        assert caught.value.tensors == ("large",)
        live.revert()
        assert live.root_digest() == source.manifests["v0"].root_digest
        return
    live.prove()
    live.settle()
    assert live.root_digest() != source.manifests["v1"].root_digest
    target["large"][at] ^= 1
    assert live.root_digest() == source.manifests["v1"].root_digest


def test_the_proof_may_run_in_another_thread_while_the_model_is_read(case):
    case.live.enter(case.stage())
    outcome = []

    def prove():
        case.live.prove()
        outcome.append("proved")

    thread = threading.Thread(target=prove)
    thread.start()
    while thread.is_alive():
        assert torch.isfinite(case.net.embed.weight.float()).all()
    thread.join(10)
    assert outcome == ["proved"]
    case.live.settle()
    case.check_new()


# -- failing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_that_fails_anywhere_is_taken_back(kind):
    total = writes_of(kind)
    assert total >= (1 if kind == "inplace" else 5)
    case = Case(kind)
    for fails in range(1, total + 1):
        for error in (OSError("device lost"), KeyboardInterrupt()):
            if kind == "delta-swap-spare" and fails > 1:
                case = Case(kind)  # the spare is used up by the first try
            staged = case.stage()
            with pytest.MonkeyPatch.context() as patch:
                Writes(patch, {fails}, error)
                with pytest.raises(CommitFailed if isinstance(error, Exception) else KeyboardInterrupt) as caught:
                    case.live.enter(staged)
            case.check_old()
            if isinstance(error, Exception):
                assert caught.value.__cause__ is error
                assert ("v1 was restored from memory://" if kind == "inplace" else "holds v1 as before") in str(caught.value)
    case.live.commit(case.stage())
    case.check_new()


@pytest.mark.parametrize("kind", KINDS)
def test_undoing_that_fails_anywhere_says_failed_and_can_be_tried_again(kind):
    total = writes_of(kind)
    for fails in range(1, total + 1):
        case = Case(kind)
        staged = case.stage()
        with pytest.MonkeyPatch.context() as patch:
            writes = Writes(patch)
            case.live.enter(staged)
            writes.fails = {writes.count + fails, writes.count + fails + 1}
            with pytest.raises(CommitFailed, match=r"v2 could not be undone .*recover") as caught:
                case.live.revert()
            assert "device lost" in str(caught.value)
            assert (case.live.version, case.live.state) == (None, State.FAILED)
            assert not case.live.recover()
            assert case.live.state is State.FAILED
            assert case.live.recover()
        case.check_old()
        assert case.live.recover()
        case.live.update("v2", commit=case.mode)
        case.check_new()


@pytest.mark.parametrize("kind", KINDS)
def test_entering_that_fails_and_cannot_be_undone_keeps_the_way_back(kind):
    total = writes_of(kind)
    for fails in range(1, total + 1):
        case = Case(kind)
        staged = case.stage()
        with pytest.MonkeyPatch.context() as patch:
            Writes(patch, {fails, fails + 1})
            with pytest.raises(CommitFailed, match="could not be undone"):
                case.live.enter(staged)
        assert (case.live.version, case.live.state) == (None, State.FAILED)
        with pytest.raises(WrongState):
            case.live.revert()
        assert case.live.recover()
        case.check_old()


def test_two_commits_that_could_not_be_undone_are_undone_one_after_the_other():
    case = Case("copy")
    case.live.enter(case.stage())
    with pytest.MonkeyPatch.context() as patch:
        writes = Writes(patch, range(2, 100))
        with pytest.raises(CommitFailed):
            case.live.revert()
        staged = case.stage("v3")  # which tries to recover first, in vain
        writes.fails = {writes.count + 3, writes.count + 4}
        with pytest.raises(CommitFailed, match="could not be undone"):
            case.live.enter(staged)
    assert case.live.recover()
    case.check_old()


def test_a_post_load_that_fails_once_is_followed_by_one_for_the_old_weights():
    for kind in KINDS:
        seen = []
        case = Case(kind)

        def post_load(seen=seen, case=case):
            seen.append(bits(case.net))
            if len(seen) == 1:
                raise RuntimeError("repacking")

        case.live._holding._post_load = post_load
        with pytest.raises(CommitFailed, match="repacking"):
            case.live.enter(case.stage())
        assert seen == [case.new, case.old]
        case.check_old()


def test_a_post_load_that_fails_when_reverting_is_run_again_by_recover(case):
    calls = []

    def post_load():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("repacking")

    case.live._holding._post_load = post_load
    case.live.enter(case.stage())
    with pytest.raises(CommitFailed, match="repacking"):
        case.live.revert()
    assert case.live.state is State.FAILED
    assert case.live.recover()
    assert len(calls) == 3
    case.check_old()


# -- deadlines and cancelling -------------------------------------------------------------------------------------------


def test_a_deadline_of_ones_own_goes_before_the_timeout(case):
    with pytest.raises(DeadlineExceeded):
        case.stage(deadline=Deadline.after(0), timeout=60)
    case.live.abandon(case.stage(deadline=Deadline.after(60), timeout=0))
    case.check_old()


def test_what_was_cancelled_or_is_late_is_abandoned_instead_of_entered(case):
    stop = threading.Event()
    staged = case.stage(deadline=Deadline.after(60, cancelled=stop))
    stop.set()
    with pytest.raises(UpdateCancelled):
        case.live.enter(staged)
    case.check_old()
    staged = case.stage()
    staged.deadline = Deadline.after(0)
    with pytest.raises(DeadlineExceeded):
        case.live.enter(staged)
    case.check_old()


def cancelling(source, stop, after):
    """Let a source say stop when so many pieces of v2 were sent."""
    real, sent = source.pieces, []

    def pieces(manifest, *, deadline, names=None):
        for piece in real(manifest, deadline=deadline, names=names):
            if manifest.version == "v2":
                sent.append(piece)
                if len(sent) == after:
                    stop.set()
            yield piece

    source.pieces = pieces
    return sent


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "inplace"])
def test_staging_that_is_cancelled_at_any_piece_leaves_the_model_ready(kind):
    case = Case(kind)
    sent = cancelling(case.source, threading.Event(), 0)
    case.live.abandon(case.stage())
    count = len(sent)
    assert count > 3
    for after in {1, 2, count // 2, count}:
        case = Case(kind)
        stop = threading.Event()
        cancelling(case.source, stop, after)
        with pytest.raises(UpdateCancelled):
            case.stage(deadline=Deadline.after(60, cancelled=stop))
        case.check_old()
        case.live.update("v2", commit=case.mode)
        case.check_new()


def test_a_stream_that_is_cancelled_is_taken_back_with_time_of_its_own():
    case = Case("inplace")
    stop = threading.Event()
    staged = case.stage(deadline=Deadline.after(60, cancelled=stop))
    cancelling(case.source, stop, 7)
    with pytest.raises(CommitFailed, match=r"cancelled.*v1 was restored"):
        case.live.enter(staged)
    case.check_old()


def test_verifying_and_preparing_notice_a_cancellation_too():
    for kind in ("copy", "swap", "delta", "delta-swap-spare"):
        case = Case(kind)
        checks = []

        class Counted(Deadline):
            def check(self, what, checks=checks):
                checks.append(what)

        staged = case.stage(deadline=Counted.after(60))
        case.live.abandon(staged)
        wanted = {"copy": "keeping", "swap": "laying out", "delta": "working out"}.get(kind, "spare buffers")
        assert sum(wanted in what for what in checks) >= 7, checks
        assert any("verifying" in what for what in checks)


# -- showing life -------------------------------------------------------------------------------------------------------


def test_every_slot_and_every_streamed_piece_ticks():
    for kind in KINDS:
        ticks = []
        case = Case(kind, tick=lambda ticks=ticks: ticks.append(1))
        slots = len(case.live._slots())
        staged = case.stage()
        ticks.clear()
        case.live.enter(staged)
        written = len(ticks)
        assert written >= (5 if kind == "delta" else slots), kind  # a delta leaves some tensors alone
        if kind == "inplace":
            pieces = sum(-(-entry.nbytes // 100) for entry in case.source.manifests["v2"].tensors)
            assert written >= pieces
        case.live.prove()
        if kind in ("copy", "delta"):
            assert len(ticks) == written + (slots if kind == "copy" else written), "a delta reads back what it wrote"
        ticks.clear()
        case.live.revert()
        assert len(ticks) >= written, kind


# -- the source ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["abandon", "revert", "settle", "fail", "stage-fails", "tear"])
@pytest.mark.parametrize("mode", ["inplace", "copy"])
def test_a_source_that_was_opened_stays_open_while_it_is_needed_and_is_closed_once(monkeypatch, end, mode):
    source, closed = MemorySource(), []
    for number, net in enumerate(trained()[:3]):
        source.add(f"v{number}", net.state_dict())
    source.close = lambda: closed.append(1)
    monkeypatch.setitem(registry._SCHEMES, "memory", lambda *_: source)
    live = LiveModel(make(0), source="memory:///x")
    live.update("v0")
    assert closed == [1]
    del closed[:]
    if end == "stage-fails":
        with pytest.raises(InvalidInput):
            live.stage("no version id: this", commit=mode)
        assert closed == [1]
        return
    staged = live.stage("v1", commit=mode)
    assert closed == ([] if mode == "inplace" else [1])
    if end == "abandon":
        live.abandon(staged)
    elif end == "fail":
        outcomes = iter([OSError("repacking"), None])

        def post_load():
            if error := next(outcomes):
                raise error

        live._holding._post_load = post_load
        with pytest.raises(CommitFailed, match="repacking"):
            live.enter(staged)
    elif end == "tear":
        live.enter(staged)
        with pytest.MonkeyPatch.context() as patch:
            Writes(patch, range(1, 100))
            with pytest.raises(CommitFailed):
                live.revert()
        assert closed == ([] if mode == "inplace" else [1])  # recover() needs it
        assert live.recover()
    else:
        live.enter(staged)
        assert closed == ([] if mode == "inplace" else [1])
        live.prove()
        getattr(live, end)()
    assert closed == [1]
    assert live.version == ("v1" if end == "settle" else "v0")


def test_an_update_after_a_torn_stream_does_not_wait_for_the_source_that_failed():
    case = Case("inplace")
    case.live.enter(case.stage())
    del case.source.manifests["v1"]
    with pytest.raises(CommitFailed, match="could not be restored"):
        case.live.revert()
    assert case.live.state is State.FAILED
    assert not case.live.recover()
    asked = []
    case.source.manifest = lambda version, **_: asked.append(version)
    other = MemorySource()
    other.add("w", trained()[3].state_dict())
    case.live.update("w", source=other)
    assert not asked
    assert bits(case.net) == case.newer
    assert case.live.recover()


def test_a_stream_that_failed_before_it_touched_anything_says_what_happened():
    case = Case("inplace")
    staged = case.stage()
    real = case.source.pieces

    def broken(manifest, *, deadline, names=None):
        raise DeadlineExceeded("waiting for a peer", 1.0)
        yield from real(manifest, deadline=deadline, names=names)

    case.source.pieces = broken
    with pytest.raises(DeadlineExceeded):
        case.live.enter(staged)
    case.check_old()


def test_an_undecodable_stream_is_refused_when_it_is_staged():
    source = MemorySource()
    for number, net in enumerate(trained()[:2]):
        state = net.state_dict() | {"extra": torch.full((50,), float(number))}
        source.add(f"v{number}", state, base="v0" if number else None)
    live = LiveModel(make(0), source=source, ignore=["extra"])
    with pytest.raises(InvalidInput, match="gaps"):
        live.stage("v1", commit="inplace")
    assert live.state is State.READY


def test_a_stream_through_deltas_is_taken_back_too():
    source = MemorySource()
    for number, net in enumerate(trained()[:3]):
        source.add(f"v{number}", net.state_dict(), base=f"v{number - 1}" if number else None)
    source.add("w0", make(9).state_dict())
    net = make(0)
    live = LiveModel(net, source=source)
    live.update("w0")
    staged = live.stage("v2", commit="inplace")
    assert staged.nbytes == source.manifests["v0"].nbytes + sum(source.manifests[v].payloads[0].nbytes for v in ("v1", "v2"))
    live.enter(staged)
    assert bits(net) == bits(trained()[2])
    live.revert()
    assert bits(net) == bits(make(9))
    live.update("v2", commit="inplace")
    assert live.root_digest() == source.manifests["v2"].root_digest


def test_nothing_that_is_over_holds_on_to_memory():
    for kind in KINDS:
        case = Case(kind)
        kept = [case.stage()]
        case.live.abandon(kept[0])
        kept.append(case.stage())
        case.live.enter(kept[1])
        case.live.revert()
        kept.append(case.stage())
        case.live.commit(kept[2])
        case.live.clear()  # raises if anything still refers to the weights
        assert case.live.state is State.CLEARED


def test_numpy_models_go_both_ways(rng):
    source = MemorySource()
    states = [{"a": rng.integers(0, 255, (40, 30), dtype=np.uint8), "s": np.array(float(number))} for number in range(2)]
    for number, state in enumerate(states):
        source.add(f"v{number}", state)
    for mode in ("copy", "swap", "inplace"):
        target = {"a": np.zeros((30, 40), dtype=np.uint8).T, "s": np.array(0.0)}
        live = LiveModel(target, source=source)
        live.update("v0")
        live.enter(live.stage("v1", commit=mode))
        assert (target["a"] == states[1]["a"]).all()
        live.revert()
        assert (target["a"] == states[0]["a"]).all()
        assert target["s"] == 0
        with pytest.raises(WrongState):
            live.revert()
        assert live.root_digest() == source.manifests["v0"].root_digest
