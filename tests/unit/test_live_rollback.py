"""Going back to the version before: what it leads to, how long it can be done, and what happens if it fails."""

import numpy as np
import pytest
import torch
from live_cases import KINDS, Case, Writes, writes_of
from test_live_delta import MemorySource
from test_live_model import bits, make

from weightcast import LiveModel, State
from weightcast.errors import CommitFailed, DigestMismatch, NotFound, UpdateInProgress, VersionNotFound, WeightcastError

HELD = tuple(kind for kind in KINDS if kind != "inplace")


@pytest.fixture(params=HELD)
def case(request):
    return Case(request.param)


def test_a_rollback_brings_back_every_bit_of_the_version_before_and_proves_it(case):
    case.live.update("v2", commit=case.mode)
    assert case.live.previous == "v1"
    assert case.live.rollback() == "v1"
    case.check_old()
    assert case.live.previous is None
    with pytest.raises(NotFound, match="update to it"):
        case.live.rollback()
    for version, wanted in (("v2", case.new), ("v3", case.newer)):
        case.live.update(version, commit=case.mode)
        assert bits(case.net) == wanted
        assert case.live.root_digest() == case.root(version)


def test_after_several_updates_only_the_last_can_be_taken_back(case):
    case.live.update("v2", commit=case.mode)
    case.live.update("v3", commit=case.mode)
    assert case.live.previous == "v2"
    assert case.live.rollback() == "v2"
    case.check_new()
    with pytest.raises(NotFound):
        case.live.rollback()
    case.live.update("v3", commit=case.mode)
    assert case.live.rollback() == "v2"
    case.check_new()


def test_what_comes_after_a_rollback_may_be_of_any_kind():
    for kind in HELD:
        for mode in ("copy", "swap", "delta", "inplace"):
            case = Case(kind)
            case.live.update("v2", commit=case.mode)
            case.live.rollback()
            case.live.update("v3", commit=mode)
            assert bits(case.net) == case.newer, (kind, mode)
            assert case.live.root_digest() == case.root("v3")


def test_swapping_by_deltas_goes_on_with_two_sets_of_buffers_after_a_rollback():
    case = Case("delta-swap")
    sets = {case.net.embed.weight.data_ptr()}
    for version in ("v2", None, "v2", "v3", None, "v3"):
        if version is None:
            case.live.rollback()
        else:
            case.live.update(version, commit="swap")
        sets.add(case.net.embed.weight.data_ptr())
        assert case.live.root_digest() == case.root(case.live.version)
    assert len(sets) == 2
    assert bits(case.net) == case.newer


def test_post_load_runs_once_for_a_rollback():
    for kind in HELD:
        seen = []
        case = Case(kind, post_load=lambda seen=seen: seen.append(1))
        case.live.update("v2", commit=case.mode)
        seen.clear()
        case.live.rollback()
        assert len(seen) == 1


# -- how long it is held ------------------------------------------------------------------------------------------------


def test_staging_keeps_it_and_entering_drops_it(case):
    case.live.update("v2", commit=case.mode)
    staged = case.live.stage("v3", commit="copy")
    assert case.live.previous == "v1"
    with pytest.raises(UpdateInProgress):
        case.live.rollback()
    case.live.abandon(staged)
    assert case.live.previous == "v1"
    staged = case.live.stage("v3", commit="copy")
    case.live.enter(staged)
    assert case.live.previous is None
    case.live.revert()
    assert case.live.previous is None
    case.check_new()


def test_a_staging_that_fails_keeps_it(case):
    case.live.update("v2", commit=case.mode)
    with pytest.raises(VersionNotFound):
        case.live.stage("v9")
    data = next(data for (version, _), data in case.source.bytes.items() if version == "v3" and len(data) > 200)
    data[150] ^= 1
    payload = ("v3", "delta-00001.bin")
    if payload in case.source.bytes:
        case.source.bytes[payload][150] ^= 1
    with pytest.raises(WeightcastError):
        case.live.stage("v3", commit="copy")
    assert case.live.previous == "v1"
    case.live.rollback()
    case.check_old()


def test_a_swap_by_delta_uses_the_spare_buffers_up_when_it_is_staged():
    case = Case("delta-swap")
    case.live.update("v2", commit="swap")
    assert case.live.previous == "v1"
    staged = case.live.stage("v3", commit="swap")
    assert case.live.previous is None
    case.live.abandon(staged)
    with pytest.raises(NotFound):
        case.live.rollback()
    case.check_new()


def test_a_swap_by_delta_that_makes_its_own_buffers_does_not():
    case = Case("delta")
    case.live.update("v2", commit="delta")
    staged = case.live.stage("v3", commit="swap")
    assert case.live.previous == "v1"
    case.live.abandon(staged)
    case.live.rollback()
    case.check_old()


def test_clearing_a_stream_a_first_load_and_bytes_that_were_not_proved_leave_nothing_to_go_back_to():
    case = Case("copy")
    case.live.update("v2")
    case.live.clear()
    assert case.live.previous is None
    case.live.update("v2")
    assert case.live.previous is None
    case.live.update("v3", commit="inplace")
    assert case.live.previous is None
    case.live.update("v2", verify_checksum=False)
    assert case.live.previous == "v3"
    case.live.update("v1")
    assert case.live.previous is None
    fresh = LiveModel(make(0), source=case.source)
    fresh.update("v1")  # over weights that have no name
    assert fresh.previous is None
    with pytest.raises(NotFound):
        fresh.rollback()


def test_who_does_not_want_it_pays_no_memory_for_it():
    for kind in HELD:
        case = Case(kind, keep_previous=False)
        case.live.update("v2", commit=case.mode)
        assert case.live.previous is None
        with pytest.raises(NotFound):
            case.live.rollback()
        case.check_new()
        case.live.update("v3", commit=case.mode)
        assert bits(case.net) == case.newer


def test_what_is_held_for_a_rollback_does_not_keep_a_cleared_model_in_memory(case):
    staged = case.stage()
    case.live.commit(staged)
    assert case.live.previous == "v1"
    case.live.clear()  # raises if anything still refers to the weights
    assert staged.version == "v2"


# -- failing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HELD)
def test_a_rollback_that_fails_anywhere_says_failed_and_recovers_to_the_version_before(kind):
    total = writes_of(kind)
    assert total >= 5
    for error in (OSError("device lost"), KeyboardInterrupt()):
        for fails in range(1, total + 1):
            case = Case(kind)
            with pytest.MonkeyPatch.context() as patch:
                writes = Writes(patch, error=error)
                case.live.update("v2", commit=case.mode)
                writes.fails = {writes.count + fails}
                with pytest.raises((CommitFailed, KeyboardInterrupt)) as caught:
                    case.live.rollback()
            if isinstance(error, Exception):
                assert "rolling back to v1 failed (OSError: device lost)" in str(caught.value)
            assert (case.live.version, case.live.previous, case.live.state) == (None, None, State.FAILED)
            assert case.live.recover()
            case.check_old()
            case.live.update("v2", commit=case.mode)
            case.check_new()


@pytest.mark.parametrize("kind", HELD)
def test_a_rollback_that_leads_to_other_bytes_is_not_served_and_not_recovered_to(kind):
    case = Case(kind)
    case.live.update("v2", commit=case.mode)
    former = case.live._holding._former
    former.commit._undo.insert(0, lambda: case.net.norm.bias.data.add_(1))  # memory that went bad meanwhile
    with pytest.raises(CommitFailed, match="rolling back to v1 failed") as caught:
        case.live.rollback()
    assert isinstance(caught.value.__cause__, DigestMismatch)
    assert caught.value.__cause__.tensors == ("norm.bias",)
    assert case.live.state is State.FAILED
    assert not case.live.recover()
    assert case.live.state is State.FAILED
    case.live.update("v2", commit="copy")
    case.check_new()
    assert case.live.recover()


def test_a_parameter_that_had_no_memory_before_has_none_to_go_back_to():
    case = Case("copy")
    case.net.norm.bias.data = torch.empty(0)
    case.live.update("v2")
    with pytest.raises(CommitFailed, match="rolling back"):
        case.live.rollback()
    assert case.live.state is State.FAILED
    case.live.update("v1")
    case.check_old()


def test_a_version_that_carries_less_is_rolled_back_to_one_that_carries_more(rng):
    source = MemorySource()
    full = {"a": rng.standard_normal(9), "mask": rng.standard_normal(3)}
    source.add("v0", full)
    source.add("v1", {"a": rng.standard_normal(9)})
    target = {"a": np.zeros(9), "mask": np.zeros(3)}
    live = LiveModel(target, source=source, fixed=["mask"])
    live.update("v0")
    live.update("v1")
    assert live.rollback() == "v0"
    assert all((target[name] == full[name]).all() for name in full)
    assert live.root_digest() == source.manifests["v0"].root_digest
