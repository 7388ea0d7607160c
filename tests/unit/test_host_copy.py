"""The host copy: it follows versions whole or not at all. Deltas are written into it, whole versions come beside it."""

import gc
import shutil
import threading
import weakref
from dataclasses import replace

import pytest
from host_copies import (
    WAIT_S,
    anything,
    bits,
    bring,
    check_held,
    copy_in,
    damage,
    memfds,
    places,
    published,
    stage,
    state,
    wanted,
)

from weightcast import Store
from weightcast.clock import Deadline
from weightcast.delta.edit import edit_tensor
from weightcast.delta.memory import HostMemory
from weightcast.engines.host.copy import HostCopy, changed_names
from weightcast.engines.host.shared import SharedBuffers
from weightcast.errors import (
    CommitFailed,
    Corrupt,
    DigestMismatch,
    InvalidInput,
    NotFound,
    VersionDoesNotFit,
    VersionNotFound,
    WrongState,
)
from weightcast.worker.commits import delta as commits_delta


@pytest.fixture
def store(tmp_path):
    return published(tmp_path / "store")


@pytest.fixture
def made():
    """The buffers that a copy made."""
    return []


@pytest.fixture(params=["own", "shared"])
def copy(request, made):
    with copy_in(request.param, made) as one:
        yield one


@pytest.fixture
def own(made):
    with copy_in("own", made) as one:
        yield one


# -- following -----------------------------------------------------------------------------------------------------


def test_full_versions_and_deltas_follow_each_other(copy, store):
    for number in (0, 1, 2, 3, 4, 1):
        before = copy.held
        staged = stage(copy, store, number)

        assert bits(staged.arrays) == bits(state(number))
        assert (staged.manifest.version, staged.former_manifest, copy.held) == (f"step_{number}", before, before)
        last = int(before.version.removeprefix("step_")) if before else None
        assert bits(staged.former) == ({} if last is None else bits(state(last)))
        copy.commit(staged)
        check_held(copy, store, number)


def test_a_delta_comes_first_by_the_full_version_that_it_stands_on(copy, store):
    assert bits(bring(copy, store, 2).arrays) == bits(state(2))
    check_held(copy, store, 2)


def test_without_a_name_it_is_the_newest_version(copy, store):
    assert stage(copy, store).manifest.version == "step_4"


def test_the_same_version_again_is_the_same_and_nothing_moves(own, made, store):
    first = stage(own, store, 0)
    assert stage(own, store, 0) is first
    assert stage(own, store, 0, timeout=1.0) is first
    own.commit(first)
    again = stage(own, store, 0)

    assert places(again.arrays) == places(first.arrays)
    own.commit(again)
    assert bits(bring(own, store, 1).former) == bits(state(0))
    assert made[0].taken_nbytes == sum(array.nbytes for name, array in state(0).items() if name != "head")


def test_what_is_abandoned_is_not_served_and_can_be_staged_again(copy, store):
    bring(copy, store, 0)
    for _ in range(3):
        staged = stage(copy, store, 1)
        copy.abandon(staged)
        assert copy.held.version == "step_0"
    assert bits(bring(copy, store, 1).arrays) == bits(state(1))


def test_another_version_takes_the_place_of_one_that_nobody_committed(copy, store):
    bring(copy, store, 0)
    stage(copy, store, 1)
    staged = stage(copy, store, 3)
    assert (staged.former_manifest.version, bits(staged.former)) == ("step_0", bits(state(0)))
    copy.commit(staged)
    check_held(copy, store, 3)


def test_a_version_of_another_shape_leaves_the_copy_alone_until_it_counts(copy, made, store, tmp_path):
    other = published(tmp_path / "other", "fd", side=60)
    bring(copy, store, 0)
    bring(copy, store, 1)

    staged = stage(copy, other, 1)

    assert (bits(staged.arrays), bits(staged.former)) == (bits(state(1, side=60)), bits(state(1)))
    copy.abandon(staged)
    check_held(copy, store, 1)
    damage(other, 0, "*.safetensors")
    with pytest.raises(Corrupt):
        stage(copy, other, 1)
    check_held(copy, store, 1)
    assert bits(bring(copy, store, 2).arrays) == bits(state(2))
    del staged
    first = weakref.ref(made[0])
    fresh = published(tmp_path / "fresh", "fd", side=60)
    bring(copy, fresh, 0)
    assert bits(bring(copy, fresh, 1).arrays) == bits(state(1, side=60))
    made.clear()
    assert first() is None  # the memory of the former shape was given back


def test_tensors_may_come_and_go(copy, tmp_path):
    store = Store(tmp_path / "store")
    few = {name: array for name, array in state(0).items() if not name.startswith("layer")}
    store.publish("step_0", state(0), mode="full")
    store.publish("step_1", few, mode="full")
    for number, names in ((0, state(0)), (1, few), (0, state(0))):
        assert bits(bring(copy, store, number).arrays) == bits(names)


# -- deltas in place -----------------------------------------------------------------------------------------------


def test_deltas_are_written_into_the_memory_of_their_base(own, made, tmp_path):
    store = published(tmp_path / "long", "fddddd")
    lies = places(bring(own, store, 0).arrays)
    taken = made[0].taken_nbytes
    for number in range(1, 6):
        staged = stage(own, store, number)
        assert places(staged.arrays) == lies
        assert bits(staged.former) == bits(state(number - 1))
        own.commit(staged)
    assert made[0].taken_nbytes == taken


def test_a_delta_that_was_given_up_is_taken_back_before_anything_else(copy, store):
    lies = places(bring(copy, store, 0).arrays)
    for number in (1, 2, 1):
        copy.abandon(stage(copy, store, number))
        check_held(copy, store, 0)
    staged = stage(copy, store, 2)
    assert places(staged.arrays) == lies
    assert bits(staged.former) == bits(state(0))


def test_what_somebody_still_reads_is_not_written_over(copy, store):
    bring(copy, store, 0)
    read = stage(copy, store, 1)
    other = stage(copy, store, 2)

    assert (bits(read.arrays), bits(other.arrays), bits(other.former)) == tuple(bits(state(number)) for number in (1, 2, 0))
    copy.abandon(other)
    copy.abandon(read)
    check_held(copy, store, 0)


def test_whoever_looks_again_at_what_counts_does_not_see_the_next_delta(copy, store):
    bring(copy, store, 1)
    read = stage(copy, store, 1)
    staged = stage(copy, store, 2)
    assert bits(read.arrays) == bits(staged.former) == bits(state(1))
    copy.commit(staged)
    assert bits(read.arrays) == bits(state(1))
    check_held(copy, store, 2)


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_a_write_that_fails_halfway_leaves_every_bit_of_the_version_that_counts(copy, store, monkeypatch, moment):
    bring(copy, store, 0)
    written, write = [], HostMemory.write

    def fail(self, indices, values):
        written.append(self.spec.name)
        if len(written) == moment:
            raise MemoryError("no more")
        write(self, indices, values)

    monkeypatch.setattr(HostMemory, "write", fail)
    with pytest.raises(CommitFailed, match="no more"):
        stage(copy, store, 1)
    assert len(written) >= moment
    check_held(copy, store, 0)
    assert bits(bring(copy, store, 1).arrays) == bits(state(1))


@pytest.mark.parametrize("wrong", ["another element", "another value", "none"])
def test_a_change_that_does_not_lead_to_the_version_is_refused_before_it_is_written(copy, store, monkeypatch, wrong):
    bring(copy, store, 0)
    before, changed = bits(stage(copy, store, 0).arrays), []

    def worked_out(memory, change):
        edit = edit_tensor(memory, change)
        if edit.spec.name != "layer.1":
            return edit
        indices, after = edit.indices.copy(), edit.after.copy()
        if wrong == "another element":
            indices[-1] += 1
        elif wrong == "another value":
            after[0] ^= 1
        else:
            after[0] = edit.before[0]
        changed.append(edit)
        return replace(edit, indices=indices, after=after)

    monkeypatch.setattr(commits_delta, "edit_tensor", worked_out)
    with pytest.raises(DigestMismatch, match=r"layer\.1"):
        stage(copy, store, 1)
    monkeypatch.undo()
    assert changed
    assert bits(stage(copy, store, 0).arrays) == before
    assert bits(bring(copy, store, 1).arrays) == bits(state(1))


# -- refusals ------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_a_byte_of_it_comes(own, made, store):
    bring(own, store, 0)
    before, seen = stage(own, store, 1), []

    def refuse(manifest):
        seen.append(manifest.version)
        raise VersionDoesNotFit(manifest.version, [])

    taken = made[0].taken_nbytes
    with pytest.raises(VersionDoesNotFit):
        own.stage(wanted(store, 3), fits=refuse, deadline=Deadline.after(WAIT_S))
    assert (seen, made[0].taken_nbytes) == (["step_3"], taken)
    own.commit(before)
    check_held(own, store, 1)


@pytest.mark.parametrize("kept", [False, True])
def test_a_damaged_delta_leaves_what_is_held_and_the_next_one_comes(copy, made, store, kept):
    bring(copy, store, 0)
    good = (store.path / "versions" / "step_1" / "delta-00001.bin").read_bytes()
    damage(store, 1)
    errors = []
    for _ in range(4):
        with pytest.raises(Corrupt) as caught:
            stage(copy, store, 1)
        errors += [caught.value] if kept else []
        check_held(copy, store, 0)
    (store.path / "versions" / "step_1" / "delta-00001.bin").write_bytes(good)
    for number in (1, 2, 3, 4):
        assert bits(bring(copy, store, number).arrays) == bits(state(number))
    assert len(made) == 1
    if isinstance(made[0], SharedBuffers):
        assert len(made[0].slabs) == 2


def test_errors_that_somebody_keeps_do_not_keep_memory(copy, made, store):
    bring(copy, store, 0)
    damage(store, 3, "*.safetensors")
    errors = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            with pytest.raises(Corrupt) as caught:
                stage(copy, store, 3)
            errors.append(caught.value)
            cycle = [caught.value]
            cycle.append(cycle)
    finally:
        gc.enable()
    if isinstance(made[0], SharedBuffers):
        assert len(made[0].slabs) == 2
    else:
        assert len(made[0].places) == 2 * len(places(state(0)))


def test_what_cannot_be_found_is_an_error_and_nothing_else(copy, store):
    staged = stage(copy, store, 1)
    for source, error in (("file:///nowhere", NotFound), ("gopher://x", InvalidInput)):
        with pytest.raises(error):
            stage(copy, source, 1)
    with pytest.raises(VersionNotFound):
        stage(copy, store, 99)
    copy.commit(staged)
    check_held(copy, store, 1)


def test_what_was_taken_on_trust_is_proved_when_that_is_asked_for(copy, store):
    damage(store, 3, "*.safetensors")
    for _ in range(2):
        bad = stage(copy, store, 3, verify_checksum=False)
        assert bits(bad.arrays) != bits(state(3))
        with pytest.raises(Corrupt):
            stage(copy, store, 3)
        bring(copy, store, 3, verify_checksum=False)
        with pytest.raises(Corrupt):
            stage(copy, store, 3)
    shutil.rmtree(store.path)
    published(store.path)
    bring(copy, store, 3)
    assert stage(copy, store, 3, verify_checksum=False).manifest == copy.held
    check_held(copy, store, 3)


# -- commits -------------------------------------------------------------------------------------------------------


def test_a_commit_may_come_long_after_the_deadline_for_staging(copy, store):
    over = threading.Event()
    staged = copy.stage(wanted(store, 0), fits=anything, deadline=Deadline.after(WAIT_S, cancelled=over))
    over.set()
    copy.commit(staged)
    check_held(copy, store, 0)


def test_what_is_no_longer_current_can_be_neither_committed_nor_harm(copy, store):
    first = bring(copy, store, 0)
    old = stage(copy, store, 1)
    new = stage(copy, store, 3)

    copy.abandon(old)
    with pytest.raises(WrongState, match="step_1"):
        copy.commit(old)
    assert bits(old.arrays) == bits(state(1))  # whoever holds it can still read it
    assert copy.held.version == "step_0"
    copy.commit(first)  # it counts already
    copy.commit(new)
    copy.commit(new)
    copy.abandon(new)
    with pytest.raises(WrongState):
        copy.commit(old)
    check_held(copy, store, 3)
    copy.close()
    copy.abandon(new)
    with pytest.raises(WrongState):
        copy.commit(new)
    assert copy.held is None


# -- memory --------------------------------------------------------------------------------------------------------


def test_however_many_versions_come_there_is_memory_for_two(copy, made, tmp_path):
    store = published(tmp_path / "long", "fdddfdddd")
    for number in (*range(9), 0, 3, 8):
        bring(copy, store, number)
    assert len(made) == 1
    if isinstance(made[0], SharedBuffers):
        assert len(made[0].slabs) == 2
        used = sum(-(-array.nbytes // 64) * 64 for name, array in state(0).items() if name != "head")
        assert [slab.nbytes for slab in made[0].slabs] == [used] * 2
    else:
        assert len(made[0].places) == 2 * len(places(state(0)))
    check_held(copy, store, 8)


def test_after_close_everything_is_given_back_at_once(store):
    gc.collect()
    before = memfds()
    copy = HostCopy(name="engine", make_buffers=SharedBuffers)
    gc.disable()  # gigabytes cannot wait for the collector
    try:
        for _ in range(2):
            for number in (0, 1, 2, 3):
                bring(copy, store, number)
            stage(copy, store, 4)
            assert memfds() > before
            copy.close()
            assert memfds() == before
    finally:
        gc.enable()


def test_a_reader_outlives_the_copy(store):
    copy = HostCopy(name="engine", make_buffers=SharedBuffers)
    staged = bring(copy, store, 1)
    copy.close()
    assert bits(staged.arrays) == bits(state(1))


# -- what changed --------------------------------------------------------------------------------------------------


def test_what_changed_is_told_by_digests_for_every_name(tmp_path):
    store = published(tmp_path / "store", "fdf")
    first, second, third = (store.manifest(f"step_{number}") for number in range(3))
    assert changed_names(None, first) == set(state(0))
    assert changed_names(first, first) == set()
    assert changed_names(first, second) == changed_names(first, third) == {"embed", "head", "layer.1", "odd"}
    other = published(tmp_path / "other", "f", side=60)
    assert changed_names(first, other.manifest("step_0")) >= {"embed", "head"}
