"""What the ranks staged is added up by the front end, and compared with the manifest before anything is committed."""

from contextlib import closing, nullcontext

import numpy as np
import pytest

from weightcast import Publisher, Store
from weightcast.clock import Deadline
from weightcast.engines.embedded.messages import Feed, PartLayout, RankRead, SourceBox, Vote
from weightcast.engines.embedded.replica.votes import VoteLayout, check_sums
from weightcast.errors import DigestMismatch, InvalidInput, SourceFailed
from weightcast.tensors.boxes import Box, Held, Placement
from weightcast.tensors.dtypes import DType
from weightcast.tensors.spec import TensorSpec
from weightcast.transports.registry import open_receiver
from weightcast.worker.live_model import LiveModel
from weightcast.worker.shard_layout import HeldVersion, Shards
from weightcast.worker.shards import cut

W = 200
SHAPES = {
    "q": (8, W), "k": (4, W), "out": (W, 8), "norm": (W,), "expert.0": (4, W), "expert.1": (4, W), "turned": (W, 6),
}  # fmt: skip


def tensors(seed):
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def shards_of(rank):
    """Rows and fused rows, columns, a copy on each rank, stacked experts, a transposed box, padding."""

    def held(name, shape, *placements):
        return Held(TensorSpec(name, DType.F32, shape), placements)

    def box(start, shape):
        return Box(start, shape)

    return Shards(
        held=(
            held(
                "qk", (6, W),
                Placement("q", box((4 * rank, 0), (4, W)), (0, 0)),
                Placement("k", box((2 * rank, 0), (2, W)), (4, 0)),
            ),
            held("out", (W, 4), Placement("out", box((0, 4 * rank), (W, 4)), (0, 0))),
            held("norm", (W,), Placement("norm", box((0,), (W,)), (0,))),
            held(
                "experts", (2, 2, W),
                Placement("expert.0", box((2 * rank, 0), (2, W)), (0, 0, 0)),
                Placement("expert.1", box((2 * rank, 0), (2, W)), (1, 0, 0)),
            ),
            held("turned", (3, W + 2), Placement("turned", box((0, 3 * rank), (W, 3)), (0, 0), transposed=True)),
        ),
        sources=SHAPES,
    )  # fmt: skip


def part_layout(shards):
    boxes = tuple(SourceBox(p.source, p.box.start, p.box.shape) for one in shards.held for p in one.placements)
    return PartLayout(boxes=boxes, sources=SHAPES)


class Ranks:
    """Two ranks that stage from a store, each with a model of its own."""

    def __init__(self, store):
        self.receiver = open_receiver(store.path.as_uri(), rank=0)
        self.shards = [shards_of(rank) for rank in (0, 1)]
        self.weights = [
            {one.spec.name: np.zeros(one.spec.shape, dtype=np.float32) for one in shards.held} for shards in self.shards
        ]
        self.live = [LiveModel(weights) for weights in self.weights]
        self.held = [None, None]
        self.layouts = {"main": VoteLayout.of([part_layout(shards) for shards in self.shards])}

    def stage(self, version, commit="copy", spoil=None):
        """Give a vote for each rank, with what it would hold. `spoil(rank, cut)` may change what was staged."""
        deadline = Deadline.after(60)
        manifest = self.receiver.manifest(version, deadline=deadline)
        votes, staged = [], []
        for rank, (shards, live) in enumerate(zip(self.shards, self.live, strict=True)):
            made = cut(
                self.receiver, manifest, shards, held=self.held[rank], mode=commit, checksum=True, deadline=deadline,
                progress=lambda *_: None,
            )  # fmt: skip
            mode = "delta" if made.by_delta and commit != "swap" else commit
            one = live.stage(version, source=made, commit=mode)
            if spoil is not None:
                spoil(rank, made, one)
            sums = made.sums(one.commit, deadline)
            staged.append((one, HeldVersion(made.full, one.manifest, "here", sums=sums)))
            numbers = [(total.one, total.other, count) for total, count in sums]
            votes.append(
                Vote(nbytes=0, reads=(RankRead(version=version),), sums=(np.array(numbers, dtype="<u8").tobytes(),))
            )
        return manifest, votes, staged

    def check(self, manifest, votes, *, proved=True):
        feed = Feed(part="main", manifest=b"", source="file:///here")
        check_sums(self.layouts, [feed], [manifest], votes, proved=proved)

    def update(self, version, commit="copy"):
        manifest, votes, staged = self.stage(version, commit)
        self.check(manifest, votes)
        for rank, (one, held) in enumerate(staged):
            self.live[rank].commit(one)
            self.held[rank] = held

    def refuses(self, version, spoil, match, commit="copy"):
        manifest, votes, staged = self.stage(version, commit, spoil)
        with pytest.raises(DigestMismatch, match=match):
            self.check(manifest, votes)
        for rank, (one, _) in enumerate(staged):
            self.live[rank].abandon(one)


def changed(before, count=6):
    random = np.random.default_rng(9)
    after = {name: array.copy() for name, array in before.items()}
    for array in after.values():
        array.reshape(-1)[random.choice(array.size, size=count, replace=False)] *= -1
    return after


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    store.publish("v1", tensors(1), "full")
    store.publish("v2", changed(tensors(1)), "delta")
    store.publish("v3", changed(changed(tensors(1))), "delta")
    store.publish("v4", tensors(4), "full")
    return store


@pytest.mark.parametrize("commit", ["copy", "swap"])
def test_ranks_that_staged_a_version_add_up_to_it_by_full_versions_and_by_deltas(store, commit):
    ranks = Ranks(store)
    for version in ("v1", "v2", "v3", "v4", "v1", "v3"):
        ranks.update(version, commit)


def test_a_wrong_element_in_a_staged_parameter_is_refused_and_its_tensor_named(store):
    for name, tensor in (("qk", "q"), ("out", "out"), ("experts", "expert.0"), ("turned", "turned")):

        def spoil(rank, made, _, name=name):
            if rank == 1:
                made._arrays[name].reshape(-1)[0] += 1

        Ranks(store).refuses("v1", spoil, match=rf"(?s){tensor} \(held by rank\(s\) \[0, 1\]\)")


def test_a_copy_that_differs_between_ranks_is_refused_and_both_are_named(store):
    def spoil(rank, made, _):
        if rank == 0:
            made._arrays["norm"][2] += 1

    Ranks(store).refuses("v1", spoil, match=r"(?s)norm.*the same in every copy.*rank\(s\) \[0\].*rank\(s\) \[1\]")


def test_a_rank_that_staged_the_box_of_another_is_refused(store):
    def spoil(rank, made, _):
        if rank == 1:
            made._arrays["out"][...] = tensors(1)["out"][:, :4]

    Ranks(store).refuses("v1", spoil, match="out")


def test_swapped_elements_are_refused(store):
    def spoil(rank, made, _):
        flat = made._arrays["experts"].reshape(-1)
        flat[[3, 20]] = flat[[20, 3]]

    Ranks(store).refuses("v1", spoil, match="expert")


@pytest.mark.parametrize("commit", ["copy", "swap"])
@pytest.mark.parametrize("fault", ["wrong", "swapped", "dropped"])
def test_changes_of_a_delta_that_are_wrong_are_refused(store, commit, fault):
    def spoil(rank, _, staged):
        if rank == 0:
            return
        commit = staged.commit
        edits = list(commit.changes())
        edit = next(one for one in edits if len(one.after) > 1)
        if fault == "wrong":
            edit.after[0] ^= 1
        elif fault == "swapped":
            edit.after[[0, 1]] = edit.after[[1, 0]]
        else:
            edits.remove(edit)
        commit.changes = lambda: edits

    ranks = Ranks(store)
    ranks.update("v1", commit)
    ranks.refuses("v2", spoil, match="held by rank|every copy", commit=commit)
    ranks.update("v2", commit)


def test_without_a_proof_only_copies_are_compared(store):
    def spoil(rank, made, _):
        made._arrays["out"][0, 0] += 1

    ranks = Ranks(store)
    manifest, votes, _ = ranks.stage("v1", spoil=spoil)
    ranks.check(manifest, votes, proved=False)
    with pytest.raises(DigestMismatch):
        ranks.check(manifest, votes)


def test_a_vote_of_another_length_is_refused(store):
    ranks = Ranks(store)
    manifest, votes, _ = ranks.stage("v1")
    short = Vote(nbytes=0, reads=votes[1].reads, sums=(votes[1].sums[0][:-24],))
    with pytest.raises(SourceFailed, match="rank 1 voted with"):
        ranks.check(manifest, [votes[0], short])
    with pytest.raises(SourceFailed, match="rank 0 voted with 0 bytes"):
        ranks.check(manifest, [Vote(nbytes=0, reads=()), votes[1]])


def test_a_rank_that_summed_fewer_elements_is_refused(store):
    ranks = Ranks(store)
    manifest, votes, _ = ranks.stage("v1")
    numbers = np.frombuffer(votes[0].sums[0], dtype="<u8").reshape(-1, 3).copy()
    numbers[2, 2] -= 1
    with pytest.raises(DigestMismatch, match=r"out.*expected 1600 elements, found 1599"):
        ranks.check(manifest, [Vote(nbytes=0, reads=(), sums=(numbers.tobytes(),)), votes[1]])


def test_layouts_with_holes_and_crossing_boxes_are_refused():
    whole, half = SourceBox("w", (0, 0), (4, 4)), SourceBox("w", (0, 0), (2, 4))
    shapes = {"w": (4, 4)}
    with pytest.raises(InvalidInput, match="nobody holds"):
        VoteLayout.of([PartLayout(boxes=(half,), sources=shapes)] * 2)
    with pytest.raises(InvalidInput, match="overlap and are not the same"):
        VoteLayout.of([PartLayout(boxes=(whole,), sources=shapes), PartLayout(boxes=(half,), sources=shapes)])
    VoteLayout.of([PartLayout(boxes=(whole,), sources=shapes)] * 2)


@pytest.mark.parametrize("source", ["store", "shared memory"])
@pytest.mark.parametrize("mode", ["copy", "inplace"])
def test_of_parameters_that_are_converted_the_published_bytes_are_summed(tmp_path, source, mode):
    random, shape = np.random.default_rng(3), (40, 300)
    weights = {"w": random.normal(size=shape).astype(np.float32), "t": random.normal(size=shape).astype(np.float32)}
    store = Store(tmp_path / "store")
    manifest = store.publish("v1", weights, "full")
    with Publisher(f"ipc://{tmp_path / 'ipc'}") as publisher:
        publisher.publish("v1", weights)
        url = store.path.as_uri() if source == "store" else publisher.url
        for wrong in (False, True):
            numbers = []
            for rank in (0, 1):
                box = Box.shard(shape, dim=1, rank=rank, ranks=2)
                bf16 = Held(TensorSpec("w", DType.BF16, box.shape), (Placement("w", box, (0, 0)),))
                turned = Held(TensorSpec("t", DType.F16, box.shape[::-1]), (Placement("t", box, (0, 0), transposed=True),))
                shards = Shards(held=(bf16, turned), sources={"w": shape, "t": shape})
                with closing(open_receiver(url, rank=rank)) as receiver:
                    deadline = Deadline.after(60)
                    made = cut(
                        receiver, manifest, shards, held=None, mode=mode, checksum=True, deadline=deadline,
                        progress=lambda *_: None,
                    )  # fmt: skip
                    live = LiveModel({one.spec.name: np.zeros(one.spec.shape, one.spec.dtype.numpy) for one in shards.held})
                    staged = live.stage("v1", source=made, commit=mode)
                    sums = made.sums(staged.commit, deadline)
                    live.abandon(staged)
                numbers.append([(total.one, total.other, count) for total, count in sums])
            if wrong:
                numbers[1][1] = (numbers[1][1][0] ^ 1, *numbers[1][1][1:])
            votes = [Vote(nbytes=0, reads=(), sums=(np.array(one, dtype="<u8").tobytes(),)) for one in numbers]
            boxes = [
                tuple(SourceBox(name, box.start, box.shape) for name in ("w", "t"))
                for box in (Box.shard(shape, dim=1, rank=rank, ranks=2) for rank in (0, 1))
            ]
            layouts = {"main": VoteLayout.of([PartLayout(boxes=one, sources=shards.sources) for one in boxes])}
            feed = Feed(part="main", manifest=b"", source="")
            with pytest.raises(DigestMismatch, match=r"t \(held by") if wrong else nullcontext():
                check_sums(layouts, [feed], [manifest], votes, proved=True)
