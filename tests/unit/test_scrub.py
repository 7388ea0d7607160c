"""The scrubber: live memory that somebody else writes to is found, whatever is committed meanwhile."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from weightcast import LiveModel, Store
from weightcast.errors import DigestMismatch, InvalidInput
from weightcast.worker import scrub
from weightcast.worker.states import State

BLOCK = 4096


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(scrub, "BLOCK_NBYTES", BLOCK)
    monkeypatch.setattr("weightcast.worker.commits.delta.BLOCK_NBYTES", BLOCK)
    monkeypatch.setattr(scrub, "_STEP_NBYTES", 1024)


def made(seed=0):
    random = np.random.default_rng(seed)
    return {
        "large": random.normal(size=(70, 100)).astype(np.float32),
        "small": random.normal(size=9).astype(np.float32),
        "empty": np.zeros((0, 4), dtype=np.float32),
        "turned": np.asfortranarray(random.normal(size=(30, 40)).astype(np.float32)),
    }


def changed(tensors, count=5, seed=1):
    """The same with a few elements of each tensor changed."""
    random = np.random.default_rng(seed)
    new = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    new = {name: array.copy() for name, array in new.items()}
    for array in new.values():
        flat = array.reshape(-1)
        if flat.size:
            flat[random.choice(flat.size, size=min(count, flat.size), replace=False)] += 1
    return new


@pytest.fixture
def serving(tmp_path):
    """A model that serves v1 of a store, which has v2 as a delta on it and v3 as a full version."""
    store = Store(tmp_path / "store")
    first = made()
    store.publish("v1", first, "full")
    store.publish("v2", changed(first), "delta")
    store.publish("v3", made(7), "full")
    weights = {name: np.zeros_like(array) for name, array in first.items()}
    live = LiveModel(weights, source=store.path.as_uri())
    live.update("v1")
    return live, weights


def whole_pass(live):
    scrubber = live._holding.scrubber
    passes = scrubber.report.passes
    for _ in range(1000):
        assert scrubber.step()
        if scrubber.report.passes > passes:
            return
    pytest.fail("a pass did not end")


def test_passes_over_clean_memory_end_and_are_counted(serving, small_blocks):
    live, _ = serving
    before = time.time()
    for number in (1, 2, 3):
        whole_pass(live)
        assert live.scrubbed.passes == number
    assert before <= live.scrubbed.clean <= time.time()
    assert 0 < live.scrubbed.period_s < 60


@pytest.mark.parametrize("name", ["large", "small", "turned"])
@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("version", ["v1", "v2", "v3"])
def test_an_element_that_somebody_else_writes_is_found_and_named(serving, small_blocks, name, learnt, version):
    live, weights = serving
    if learnt:
        whole_pass(live)
    if version != "v1":
        live.update(version)
    last = (-1,) * weights[name].ndim
    weights[name][last] = np.nextafter(weights[name][last], np.float32(9))
    with pytest.raises(DigestMismatch, match=f"(?s)version {version}.*{name}"):
        whole_pass(live)


def test_a_delta_keeps_what_was_learnt_of_blocks_up_to_date(serving, small_blocks):
    live, _ = serving
    whole_pass(live)
    learnt = {name: list(sums) for name, sums in live._holding.scrubber._known.items()}
    assert live.update("v2").mode == "delta"
    kept = live._holding.scrubber._known
    assert kept.keys() == learnt.keys()
    assert kept != learnt
    whole_pass(live)
    assert live._holding.scrubber._known == kept


@pytest.mark.parametrize("steps", range(0, 12, 2))
def test_commits_and_rollbacks_in_the_middle_of_a_pass_are_no_damage(serving, small_blocks, steps):
    live, _ = serving
    scrubber = live._holding.scrubber
    for act in (
        lambda: live.update("v2"),
        live.rollback,
        lambda: live.update("v2"),
        lambda: live.update("v3"),
        live.rollback,
    ):
        for _ in range(steps):
            assert scrubber.step()
        act()
    whole_pass(live)


def test_a_delta_right_after_a_rollback_is_no_damage(serving, small_blocks):
    live, _ = serving
    live.update("v2")
    whole_pass(live)
    live.rollback()
    assert live.update("v2").mode == "delta"  # before the scrubber has read anything of what was rolled back to
    whole_pass(live)


def test_damage_where_a_delta_wrote_is_found_too(serving, small_blocks):
    live, weights = serving
    whole_pass(live)
    before = weights["large"].copy()
    live.update("v2")
    weights["large"].reshape(-1)[np.flatnonzero(weights["large"] != before)[0]] = 0
    with pytest.raises(DigestMismatch, match="block"):
        whole_pass(live)


def test_there_is_nothing_to_read_before_the_first_version_and_after_a_clear(tmp_path):
    live = LiveModel(made())
    assert not live._holding.scrubber.step()
    live.clear()
    assert not live._holding.scrubber.step()


def test_a_commit_waits_for_the_reader_only_until_it_looks_up(serving):
    live, _ = serving
    lifecycle = live._holding.lifecycle
    assert lifecycle.begin_reading()
    assert not lifecycle.begin_reading()
    thread = threading.Thread(target=live.update, args=("v3",))
    thread.start()
    end = time.monotonic() + 20
    while not lifecycle.hurry and time.monotonic() < end:
        time.sleep(0.001)
    assert lifecycle.hurry
    assert lifecycle.state is not State.COMMITTING
    lifecycle.end_reading()
    thread.join(timeout=20)
    assert live.version == "v3"


def test_the_thread_tells_once_for_each_version_and_goes_on_after_the_next(serving):
    live, weights = serving
    found, told = [], threading.Event()

    def damaged(error):
        found.append(str(error))
        told.set()

    live.scrub(1.0, damaged)
    weights["small"][3] += 1
    assert told.wait(20)
    assert "small" in found[0]
    time.sleep(0.3)
    assert len(found) == 1
    told.clear()
    live.update("v3")
    passes = live.scrubbed.passes
    end = time.monotonic() + 20
    while live.scrubbed.passes == passes and time.monotonic() < end:
        time.sleep(0.01)
    assert live.scrubbed.passes > passes
    weights["small"][3] += 1
    assert told.wait(20)
    assert len(found) == 2
    assert "v3" in found[1]
    live.close()


def test_a_model_that_nobody_uses_any_more_is_not_kept_alive_by_its_scrubber(tmp_path):
    store = Store(tmp_path / "store")
    store.publish("v1", made(), "full")
    live = LiveModel({name: np.zeros_like(array) for name, array in made().items()}, source=store.path.as_uri())
    live.update("v1")
    live.scrub(0.5, lambda _: None)
    holding, thread = weakref.ref(live._holding), live._holding.scrubber._thread
    del live
    end = time.monotonic() + 20
    while holding() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert holding() is None
    thread.join(timeout=20)
    assert not thread.is_alive()


@pytest.mark.parametrize("share", [0, -0.1, 1.5])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(InvalidInput, match="share"):
        LiveModel(made()).scrub(share, lambda _: None)


def test_weights_that_were_found_damaged_are_neither_taken_for_the_version_nor_built_on(serving, small_blocks):
    live, weights = serving
    weights["large"][3, 3] += 1
    with pytest.raises(DigestMismatch, match="large"):
        whole_pass(live)
    assert not live._holding.scrubber.step()
    assert live.update("v1").mode == "copy"
    assert weights["large"].tobytes() == made()["large"].tobytes()
    whole_pass(live)
    weights["small"][0] += 1
    with pytest.raises(DigestMismatch, match="small"):
        whole_pass(live)
    assert live.update("v2").mode == "copy"
    whole_pass(live)


def test_names_of_one_memory_that_the_next_version_lists_in_another_order_are_no_damage(tmp_path):
    store, memory = Store(tmp_path / "store"), np.zeros(4096, dtype=np.float32)
    first = np.arange(4096, dtype=np.float32)
    store.publish("v1", {"a": first, "b": first.copy()}, "full")
    live = LiveModel({"a": memory, "b": memory}, source=store)
    live.update("v1")
    whole_pass(live)
    second = first + (first == 7)
    store.publish("v2", {"b": second, "a": second.copy()}, "delta")
    assert live.update("v2").mode == "delta"
    whole_pass(live)
    whole_pass(live)


def test_a_scrubber_that_is_started_again_runs_once_and_survives_a_caller_that_raises(serving, monkeypatch):
    live, weights = serving
    monkeypatch.setattr(scrub, "_LEAST_PASS_S", 0.0)
    told = threading.Event()

    def fail(_):
        told.set()
        raise OSError("nobody listens")

    live.scrub(1.0, fail)
    live.scrub(1.0, fail)
    assert [thread.name for thread in threading.enumerate()].count("scrub") == 1
    weights["large"][0, 0] += 1
    assert told.wait(20)
    live.update("v1")
    passes, until = live.scrubbed.passes, time.monotonic() + 20
    while live.scrubbed.passes <= passes:
        assert time.monotonic() < until, "the scrubber has ended"
        time.sleep(0.01)
    live.close()
