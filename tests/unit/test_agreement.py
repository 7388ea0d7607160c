"""Ranks without a front end update together or not at all, by an all-reduce of the caller's."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from older_states import TIED, states
from test_live_layout import RANKS, SHAPES, blank, check, layout, version

from weightcast import Box, DType, Held, LiveModel, Placement, Shards, Store, TensorSpec
from weightcast.delta import ArrayState
from weightcast.errors import CommitFailed, DigestMismatch, InvalidInput, UpdateFailed
from weightcast.worker import live_model
from weightcast.worker.shard_version import ShardVersion

GOLDEN = Path(__file__).parents[1] / "golden" / "format1"
WAIT_S = 20


class Group:
    """Ranks that are threads of this process, and an all-reduce over them."""

    def __init__(self, ranks=RANKS):
        self.barrier = threading.Barrier(ranks)
        self.given = [None] * ranks
        self.rounds = 0

    def all_reduce(self, rank):
        def add_up(numbers):
            self.given[rank] = numbers
            self.barrier.wait(WAIT_S)
            total = sum(self.given)
            if self.barrier.wait(WAIT_S) == 0:
                self.rounds += 1
            return total

        return add_up


class Ranks:
    def __init__(self, store, **options):
        self.group = Group()
        self.models = [blank(rank) for rank in range(RANKS)]
        self.live = [
            LiveModel(
                self.models[rank],
                rank=rank,
                source=store,
                layout=layout(rank),
                all_reduce=self.group.all_reduce(rank),
                **options,
            )
            for rank in range(RANKS)
        ]

    def each(self, act):
        """Call `act(rank, live)` for all ranks at the same time; gives results and errors."""

        def call(rank):
            try:
                return act(rank, self.live[rank])
            except Exception as error:
                return error

        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(call, range(RANKS), timeout=2 * WAIT_S))

    def update(self, name, **options):
        results = self.each(lambda _, live: live.update(name, **options))
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def check(self, tensors):
        for rank, model in enumerate(self.models):
            check(model, rank, tensors)


def moved(tensors):
    after = {name: array.copy() for name, array in tensors.items()}
    after["k"][:, 3] += 1
    after["down"][2] -= 1
    return after


@pytest.fixture
def versions(store):
    first = version(1)
    second, other = moved(first), version(2)
    store.publish("step_1", first)
    store.publish("step_2", second, mode="delta")
    store.publish("step_3", other, mode="full")
    return {"step_1": first, "step_2": second, "step_3": other}


@pytest.mark.parametrize("commit", ["copy", "swap", "inplace", "delta"])
def test_ranks_that_agree_take_full_versions_and_deltas(store, versions, commit):
    ranks = Ranks(store)
    for name in ("step_1", "step_2", "step_3", "step_3"):
        ranks.update(name, commit=commit)
        ranks.check(versions[name])
    assert [result.mode for result in ranks.update("step_3")] == ["none"] * RANKS
    if commit != "inplace":
        ranks.update("step_1")
        assert ranks.each(lambda _, live: live.rollback()) == ["step_3"] * RANKS
        ranks.check(versions["step_3"])
        ranks.update("step_3")


def spoiled(monkeypatch, rank, spoil):
    """Let `spoil` change what one rank staged, before it is summed."""
    sums = ShardVersion.sums

    def call(version, staged, deadline):
        if version._held_rank == rank:
            spoil(version, staged)
        return sums(version, staged, deadline)

    cut = live_model.BoxTarget.cut

    def marked(target, stager, *arguments):
        made = cut(target, stager, *arguments)
        made._held_rank = int(threading.current_thread().name.rpartition("-")[2])
        return made

    monkeypatch.setattr(ShardVersion, "sums", call)
    monkeypatch.setattr(live_model.BoxTarget, "cut", marked)


@pytest.mark.parametrize("fault", ["element", "swapped", "copy"])
def test_wrong_weights_on_one_rank_stop_all_ranks_and_the_tensor_is_named(store, versions, monkeypatch, fault):
    ranks = Ranks(store)
    ranks.update("step_1")

    def spoil(version, _):
        if fault == "element":
            version._arrays["up"][0, 0] += 1
        elif fault == "swapped":
            version._arrays["up"][0, :2] = version._arrays["up"][0, 1::-1].copy()
        else:
            version._arrays["norm"][0] += 1

    with monkeypatch.context() as patched:
        spoiled(patched, 1, spoil)
        errors = ranks.each(lambda rank, live: (named(rank), live.update("step_3"))[1])
    assert [type(error) for error in errors] == [DigestMismatch] * RANKS
    tensor = "norm" if fault == "copy" else "up"
    assert all(tensor in str(error) for error in errors)
    ranks.check(versions["step_1"])
    assert [live.version for live in ranks.live] == ["step_1"] * RANKS
    ranks.update("step_3")
    ranks.check(versions["step_3"])


def named(rank):
    threading.current_thread().name = f"rank-{rank}"


def test_a_wrong_change_of_a_delta_stops_all_ranks(store, versions, monkeypatch):
    ranks = Ranks(store)
    ranks.update("step_1")

    def spoil(_, staged):
        edit = next(edit for edit in staged.changes() if edit.spec.name == "down")
        edit.after[0] ^= 1

    with monkeypatch.context() as patched:
        spoiled(patched, 0, spoil)
        errors = ranks.each(lambda rank, live: (named(rank), live.update("step_2"))[1])
    assert [type(error) for error in errors] == [DigestMismatch] * RANKS
    assert all("down" in str(error) for error in errors)
    ranks.check(versions["step_1"])


def test_a_rank_that_cannot_stage_stops_all_ranks_and_they_wait_for_nothing(store, versions):
    ranks = Ranks(store)
    ranks.update("step_1")
    errors = ranks.each(lambda rank, live: live.update("step_3", source=store if rank else store.path / "nowhere"))
    assert [isinstance(error, UpdateFailed) for error in errors] == [False, True]
    assert "1 of 2 ranks failed at staging step_3" in str(errors[1])
    assert [live.version for live in ranks.live] == ["step_1"] * RANKS
    ranks.update("step_3")
    ranks.check(versions["step_3"])


def test_ranks_that_stage_different_versions_refuse_them(store, versions):
    ranks = Ranks(store)
    errors = ranks.each(lambda rank, live: live.update("step_3" if rank else "step_1"))
    assert [type(error) for error in errors] == [UpdateFailed] * RANKS
    assert all("do not mean the same weights" in str(error) for error in errors)
    for model in ranks.models:
        assert all((array == 7).all() for array in model.values())


def test_a_commit_that_fails_on_one_rank_is_taken_back_on_all(store, versions):
    failing = [False]

    def post_load():
        if failing[0] and threading.current_thread().name == "rank-1":
            failing[0] = False
            raise OSError("no")

    ranks = Ranks(store, post_load=post_load)
    ranks.update("step_1")
    failing[0] = True
    errors = ranks.each(lambda rank, live: (named(rank), live.update("step_3"))[1])
    assert [type(error) for error in errors] == [CommitFailed] * RANKS
    assert "OSError: no" in str(errors[1])
    assert "1 of 2 ranks failed at committing step_3" in str(errors[0])
    ranks.check(versions["step_1"])
    ranks.update("step_2")
    ranks.check(versions["step_2"])


def test_a_rank_that_starts_again_is_brought_back_beside_one_that_serves_the_version(store, versions):
    ranks = Ranks(store)
    ranks.update("step_2")
    ranks.models[1] = blank(1)
    ranks.live[1] = LiveModel(ranks.models[1], rank=1, source=store, layout=layout(1), all_reduce=ranks.group.all_reduce(1))
    assert [result.mode for result in ranks.update("step_2")] == ["none", "copy"]
    ranks.check(versions["step_2"])
    ranks.update("step_3")
    ranks.check(versions["step_3"])


def test_staged_versions_are_agreed_on_before_they_are_committed(store, versions):
    ranks = Ranks(store)
    staged = ranks.each(lambda _, live: live.stage("step_1"))
    assert ranks.group.rounds == 2
    assert [result.version for result in ranks.each(lambda rank, live: live.commit(staged[rank]))] == ["step_1"] * RANKS
    assert ranks.group.rounds == 3
    ranks.check(versions["step_1"])


def test_a_tensor_that_no_rank_holds_and_one_that_is_held_in_part_are_refused(store):
    tensors = {"w": np.arange(24, dtype=np.float32).reshape(4, 6), "b": np.ones(3, np.float32)}
    store.publish("v", tensors)
    group = Group()

    def update(rank, boxes):
        held = tuple(Held.slice_of(TensorSpec(name, DType.F32, tensors[name].shape), box) for name, box in boxes.items())
        model = {one.spec.name: np.zeros(one.spec.shape, np.float32) for one in held}
        shards = Shards(held, {name: array.shape for name, array in tensors.items()})
        return LiveModel(model, source=store, layout=shards, rank=rank, all_reduce=group.all_reduce(rank)).update()

    top, bottom, part = Box((0, 0), (2, 6)), Box((2, 0), (2, 6)), Box((2, 0), (1, 6))
    both = [{"w": top}, {"w": bottom}], [{"w": top, "b": Box.whole((3,))}, {"w": part, "b": Box.whole((3,))}]
    for boxes, wanted in zip(both, ["b", "w"], strict=True):
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(update, rank, one) for rank, one in enumerate(boxes)]
            for future in futures:
                with pytest.raises(DigestMismatch, match=rf"{wanted}.*once or several times"):
                    future.result(2 * WAIT_S)


def test_converted_parameters_are_agreed_on_by_the_bytes_that_were_published(store):
    weights = version(5)
    store.publish("v", weights)
    group = Group()

    def update(rank):
        shards = layout(rank)
        held = tuple(Held(TensorSpec(one.spec.name, DType.BF16, one.spec.shape), one.placements) for one in shards.held)
        model = {one.spec.name: np.zeros(one.spec.shape, ml_dtypes.bfloat16) for one in held}
        live = LiveModel(model, source=store, layout=Shards(held, SHAPES), rank=rank, all_reduce=group.all_reduce(rank))
        live.update()
        return model

    with ThreadPoolExecutor(2) as pool:
        models = list(pool.map(update, range(2), timeout=2 * WAIT_S))
    down = np.concatenate([model["down"] for model in models], axis=1)
    assert down.tobytes() == weights["down"].astype(ml_dtypes.bfloat16).tobytes()


def test_an_all_reduce_that_fails_or_adds_nothing_up_changes_nothing(store, versions):
    def lost(_):
        raise ConnectionError("peer closed the connection")

    cases = [
        (lost, "ConnectionError: peer closed"),
        (lambda _: None, "must add"),
        (lambda numbers: numbers[:1], "must"),
    ]
    for all_reduce, match in cases:
        model = blank(0)
        live = LiveModel(model, source=store, layout=layout(0), all_reduce=all_reduce)
        with pytest.raises((UpdateFailed, InvalidInput), match=match):
            live.update("step_1")
        assert all((array == 7).all() for array in model.values())
        assert live.version is None


def test_an_all_reduce_needs_a_model_of_boxes(store):
    with pytest.raises(InvalidInput, match="give a layout"):
        LiveModel({"w": np.zeros(3)}, source=store, all_reduce=lambda numbers: numbers)


def test_a_replicated_tensor_counts_as_often_as_it_is_held(store):
    """Transposed, and on one rank only a part: three ranks, of which two hold the same."""
    weights = {"w": np.arange(32, dtype=np.float32).reshape(4, 8), "n": np.ones(5, np.float32)}
    store.publish("v", weights)
    group = Group(4)

    def update(rank):
        box = Box.shard((4, 8), dim=1, rank=rank % 2, ranks=2)
        held = (
            Held(TensorSpec("w", DType.F32, box.shape[::-1]), (Placement("w", box, (0, 0), transposed=True),)),
            Held.slice_of(TensorSpec("n", DType.F32, (5,)), Box.whole((5,))),
        )
        model = {one.spec.name: np.zeros(one.spec.shape, np.float32) for one in held}
        shards = Shards(held, {"w": (4, 8), "n": (5,)})
        LiveModel(model, source=Store(store.path), layout=shards, rank=rank, all_reduce=group.all_reduce(rank)).update()
        return model

    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(update, range(4), timeout=2 * WAIT_S))
    assert (np.concatenate([model["w"].T for model in models[:2]], axis=1) == weights["w"]).all()


def test_a_rank_without_a_row_takes_part(store):
    weights = {"w": np.arange(192, dtype=np.float32).reshape(3, 64)}
    store.publish("v", weights)
    group = Group(4)

    def update(rank):
        box = Box((min(rank, 3), 0), (int(rank < 3), 64))
        held = Held.slice_of(TensorSpec("w", DType.F32, (3, 64)), box)
        model = {"w": np.zeros(box.shape, np.float32)}
        shards = Shards((held,), {"w": (3, 64)})
        LiveModel(model, source=Store(store.path), layout=shards, rank=rank, all_reduce=group.all_reduce(rank)).update()
        return model["w"]

    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(update, range(4), timeout=2 * WAIT_S))
    assert (np.concatenate(rows) == weights["w"]).all()


def test_a_delta_on_tied_tensors_of_format_1_is_fetched_whole_once(tmp_path):
    path = tmp_path / "store"
    shutil.copytree(GOLDEN / "store", path)
    first, store = states()["step_1"], Store(path)
    store.announce("step_1")
    base = {name: array.copy() for name, array in first.items() if name not in TIED}
    specs = ArrayState(base).specs
    held = tuple(Held.slice_of(spec, Box.whole(spec.shape)) for spec in specs.values())
    model = {name: np.zeros(spec.shape, spec.dtype.numpy) for name, spec in specs.items()}
    shards = Shards(held, {name: spec.shape for name, spec in specs.items()})
    live = LiveModel(model, source=store, layout=shards, all_reduce=lambda numbers: numbers)
    live.update("step_1")
    for name, mode in (("n2", "copy"), ("n3", "delta")):
        base["bias"].reshape(-1)[3] += 1
        store.publish(name, base | {one: base[holder] for one, holder in TIED.items()}, "delta")
        assert live.update(name).mode == mode
        assert all(model[one].tobytes() == array.tobytes() for one, array in base.items())
