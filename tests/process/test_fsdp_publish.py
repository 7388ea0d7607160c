"""Two ranks under FSDP2 give their modules to everything that takes one; what comes out is the whole model, bit for bit."""

from __future__ import annotations

import json
import select
import time

import numpy as np
import pytest
import torch

from weightcast import LiveModel, Store
from weightcast.tensors.bridges import host_array
from weightcast.tensors.digest import array_digest

from .children import end, start_module
from .fsdp_publishers import GROUP_S, whole

RANKS = 2
WAIT_S = 120.0  # far more than it takes, on a machine that may be busy


class Trainers:
    """The ranks: all are asked the same, at the same time, unless a test asks one of them alone."""

    def __init__(self, directory, ranks=RANKS):
        self.directory = directory
        self.children = [start_module("fsdp_publishers", directory, rank, ranks) for rank in range(ranks)]

    def ready(self):
        for said in ("imported", "ready"):
            assert [self.answer(rank) for rank in range(len(self.children))] == [said] * len(self.children)
            for child in self.children if said == "imported" else ():
                child.stdin.write("\n")
                child.stdin.flush()
        return self

    def send(self, rank, call, /, *arguments, **options):
        self.children[rank].stdin.write(json.dumps([call, arguments, options]) + "\n")
        self.children[rank].stdin.flush()

    def answer(self, rank):
        child = self.children[rank]
        readable, _, _ = select.select([child.stdout], [], [], WAIT_S)
        line = child.stdout.readline() if readable else ""
        if not line:
            child.kill()
            pytest.fail(f"rank {rank} said nothing: {child.stderr.read()[-3000:]}")
        return json.loads(line)

    def ask(self, call, /, *arguments, **options):
        for rank in range(len(self.children)):
            self.send(rank, call, *arguments, **options)
        return [self.answer(rank) for rank in range(len(self.children))]

    def close(self):
        for child in self.children:
            end(child)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    trainers = Trainers(tmp_path_factory.mktemp("fsdp"))
    try:
        yield trainers.ready()
    finally:
        trainers.close()


@pytest.fixture
def alone(tmp_path):
    """Ranks of one test, which may not survive it."""
    trainers = Trainers(tmp_path)
    try:
        yield trainers.ready()
    finally:
        trainers.close()


def state_of(seed):
    return {name: host_array(name, tensor) for name, tensor in whole(seed).state_dict().items()}


def same(loaded, expected):
    return {name: array_digest(array) for name, array in loaded.items()} == {
        name: array_digest(array) for name, array in expected.items()
    }


def as_bf16(arrays, *, keep=()):
    return {
        name: host_array(name, torch.from_numpy(array).to(torch.bfloat16))
        if array.dtype == np.float32 and not name.startswith(tuple(keep) or ("\0",))
        else array
        for name, array in arrays.items()
    }


def errors(answers, kind):
    assert all(isinstance(one, dict) and one["module"] == "weightcast.errors.kinds" for one in answers), answers
    assert [one["error"] for one in answers] == [kind] * len(answers), answers
    return [one["text"] for one in answers]


# -- the store ------------------------------------------------------------------------------------------------------------


def test_a_store_takes_the_module_from_all_ranks_and_tells_all_the_same(shared):
    first, second = shared.ask("store_publish", "step_1", 11, name="whole")
    assert first == second
    store = Store(shared.directory / "whole")
    assert same(store.load("step_1"), state_of(11))
    assert store.manifest("step_1").tied == {"head.weight": "embed.weight"}
    assert store.verify("step_1").ok


def test_a_delta_is_made_of_gathered_tensors_too(shared):
    shared.ask("store_publish", "step_1", 11, name="deltas")
    answers = shared.ask("store_publish", "step_2", 11, name="deltas", mode="delta")
    assert [one[1] for one in answers] == ["delta"] * RANKS
    answers = shared.ask("store_publish", "step_3", 12, name="deltas")  # all changed: the delta is given up for a full one
    assert [one[1] for one in answers] == ["full"] * RANKS
    assert same(Store(shared.directory / "deltas").load("step_3"), state_of(12))


def test_gathered_tensors_are_converted_and_renamed(shared):
    shared.ask("store_publish", "step_1", 11, name="bf16", dtype="BF16", keep_dtype=["gate.*"])
    assert same(Store(shared.directory / "bf16").load("step_1"), as_bf16(state_of(11), keep=["gate."]))


@pytest.mark.slow
def test_meshes_of_several_dimensions_are_gathered_too(tmp_path):
    trainers = Trainers(tmp_path, ranks=4)
    try:
        answers = trainers.ready().ask("store_publish_hybrid", "step_1", 13)
    finally:
        trainers.close()
    assert answers == [[answers[0][0], [1, 2]]] * 4
    assert same(Store(tmp_path / "hybrid").load("step_1"), state_of(13))


def test_what_the_first_rank_cannot_write_is_refused_on_all_ranks_and_they_go_on(shared):
    shared.ask("store_publish", "step_1", 11, name="exists")
    texts = errors(shared.ask("store_publish", "step_1", 12, name="exists"), "VersionExists")
    assert texts[0] == texts[1]
    assert len(set(map(tuple, shared.ask("store_publish", "step_2", 12, name="exists")))) == 1


def test_a_failure_in_the_middle_ends_all_ranks_with_the_same_error(shared):
    (shared.directory / "file").write_text("no directory")
    texts = errors(shared.ask("store_publish", "step_1", 11, name="file/below"), "StorageFailed")
    assert texts[0] == texts[1]


def test_ranks_that_publish_different_tensors_are_refused(shared):
    for rank, names in enumerate((["up.weight", "up.bias"], ["up.bias", "up.weight"])):
        shared.send(rank, "store_publish_mapping", "mixed", names)
    texts = errors([shared.answer(rank) for rank in range(RANKS)], "InvalidInput")
    assert all("do not give the same version, names" in text for text in texts)


def test_placements_whose_values_no_rank_holds_are_refused_by_name(shared):
    texts = errors(shared.ask("store_publish_partial"), "UnsupportedTensor")
    assert all("tensor 'w'" in text and "only Shard(dim) and Replicate() are carried" in text for text in texts)


def test_a_rank_that_dies_or_does_not_come_ends_the_others_with_an_error_of_ours(alone):
    alone.send(0, "store_publish", "step_1", 11)
    alone.send(1, "die")
    (text,) = errors([alone.answer(0)], "GatherFailed")
    assert "every rank must call publish" in text
    assert not (alone.directory / "store").exists()


def test_a_call_on_one_rank_alone_ends_with_the_timeout_of_the_group(alone):
    began = time.monotonic()
    alone.send(0, "store_publish", "step_1", 11)
    (text,) = errors([alone.answer(0)], "GatherFailed")
    assert GROUP_S / 2 < time.monotonic() - began < 4 * GROUP_S
    assert "waiting for all ranks to publish failed on rank 0 of 2" in text


# -- publishers of memory -------------------------------------------------------------------------------------------------


def test_publishers_on_one_host_share_out_the_gathered_tensors(shared):
    shared.ask("ipc_open", "ipc", RANKS)
    counts = shared.ask("ipc_publish", "step_1", 21)
    expected = as_bf16(state_of(21))
    assert sum(counts) == len(expected) - 1  # one name is tied
    assert min(counts) > 0
    model = {name: np.zeros_like(array) for name, array in expected.items()}
    with LiveModel(model, source=f"ipc://{shared.directory}/ipc") as live:
        live.update("step_1")
    assert same(model, expected)


def test_a_publisher_that_fails_ends_those_of_the_other_ranks_and_they_go_on(shared):
    shared.ask("ipc_open", "ipc-failing", RANKS)
    shared.send(0, "ipc_publish", "step_1", 21)
    shared.send(1, "ipc_publish", "step_1", 21, timeout=0)
    (text,) = errors([shared.answer(0)], "GatherFailed")
    assert "another rank failed" in text
    errors([shared.answer(1)], "DeadlineExceeded")
    assert sum(shared.ask("ipc_publish", "step_2", 21)) == len(state_of(21)) - 1


def test_a_publisher_that_is_not_that_of_its_rank_says_which_to_make(shared):
    shared.ask("ipc_open", "ipc-three", 3)
    texts = errors(shared.ask("ipc_publish", "step_1", 21), "InvalidInput")
    assert all(f"rank={rank}, ranks={RANKS}) on this rank" in texts[rank] for rank in range(RANKS))


def test_a_stream_of_shards_is_refused_with_what_to_do(shared):
    assert all("tensor.full_tensor()" in text for text in errors(shared.ask("ipc_stream"), "UnsupportedTensor"))


def test_publishers_for_other_hosts_send_shards_as_they_are(shared):
    urls = shared.ask("depot_publish", "step_1", 31)
    expected = as_bf16(state_of(31), keep=["gate."])
    model = {name: np.zeros_like(array) for name, array in expected.items()}
    LiveModel(model, source=f"shares+{urls[0]},{urls[1].removeprefix('http://')}").update("step_1")
    assert same(model, expected)
    texts = errors(shared.ask("depot_publish", "step_2", 31, ranks=1), "InvalidInput")
    assert all("ranks is 1" in text for text in texts)


# -- a model that is updated ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commit", ["copy", "inplace", "delta"])
def test_a_sharded_module_takes_its_boxes_of_whole_versions(shared, commit):
    store = Store(shared.directory / f"updates-{commit}")
    weights = whole(41)
    store.publish("step_1", weights.state_dict())
    with torch.no_grad():
        weights.up.weight[3, 2] += 1
        weights.embed.weight[12, 7] -= 1
    source = f"file://{store.path}"
    for answer in shared.ask("update", source, "step_1", 41, commit):
        assert answer[:4] == ["inplace" if commit == "inplace" else "copy", True, True, "none"]
    store.publish("step_2", weights.state_dict(), mode="delta")
    for answer in shared.ask("update", source, "step_2", 41, commit, changed=True):
        assert answer[1:4] == [True, True, "none"]


def test_a_swap_of_memory_that_fsdp_holds_on_to_is_refused_and_so_is_clearing(shared):
    store = Store(shared.directory / "swap")
    store.publish("step_1", whole(41).state_dict())
    texts = errors(shared.ask("update", f"file://{store.path}", "step_1", 41, "swap"), "VersionDoesNotFit")
    assert all("not swappable" in text and "commit by copy" in text for text in texts)
    assert all("cannot be cleared" in text for text in errors(shared.ask("clear"), "InvalidInput"))


def test_a_version_that_does_not_fit_is_told_in_whole_shapes(shared):
    store = Store(shared.directory / "misfit")
    state = whole(41).state_dict()
    store.publish("step_1", {**state, "up.weight": torch.zeros(12, 9)})
    texts = errors(shared.ask("update", f"file://{store.path}", "step_1", 41), "VersionDoesNotFit")
    assert all("shape: up.weight: the model has [12, 8], the version [12, 9]" in text for text in texts)
