"""A replica takes a live stream: its digests are known when all ranks have it, and must be the same for all of them."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from weightcast.engines.base import UpdateRequest
from weightcast.engines.embedded.replica.replica import Replica
from weightcast.errors import InvalidInput, SourceFailed, WeightcastError
from weightcast.tensors.digest import array_digest
from weightcast.tensors.dtypes import DType
from weightcast.transports import registry
from weightcast.wire.manifest import Manifest, TensorEntry, compute_root

from .replicas import in_loop, model_dir, request, run_root, running, write_script
from .scripted_rank import ECHO

__all__ = ["model_dir", "run_root"]  # fixtures


def manifest_of(value: float) -> Manifest:
    """The version that the stream is, as it is known at its end."""
    array = np.full(64, value, np.float32)
    entry = TensorEntry(
        name="w", dtype=DType.F32, shape=(64,), part=0, offset=0, nbytes=array.nbytes, digest=array_digest(array)
    )
    return Manifest(
        version="live", sequence=0, step=0, kind="full", created_s=0.0, algorithm="xxh3-128",
        root_digest=compute_root((entry,), "xxh3-128"), parts=(), tensors=(entry,),
    )  # fmt: skip


SEALED = manifest_of(2.0)
ROOT, OTHER = SEALED.root_digest, manifest_of(3.0).root_digest


def reading(root: str) -> dict[str, object]:
    """What the script of a rank says that it read."""
    return {"read": {"root_digest": root}}


class Trainer:
    """What the front end hears of the stream: nothing of its digests at first, `then` when it asks again."""

    url = "stream:///run"

    def __init__(self, then: Manifest | WeightcastError) -> None:
        self.asked, self.closed, self._then = 0, 0, then

    def newest(self) -> str:
        return "live"

    def manifest(self, version: str, *, deadline: object) -> Manifest:
        self.asked += 1
        if self.asked == 1:
            return replace(SEALED, root_digest="", tensors=tuple(replace(one, digest="") for one in SEALED.tensors))
        if isinstance(self._then, WeightcastError):
            raise self._then
        return self._then

    def close(self) -> None:
        self.closed += 1


async def update(replica: Replica, monkeypatch: pytest.MonkeyPatch, trainer: Trainer, **options: object) -> None:
    monkeypatch.setitem(registry._SCHEMES, "stream", lambda *_: trainer)
    status = replica.begin_update(UpdateRequest(source="stream:///run", **options))
    await replica.finish_update(status.id)


@in_loop
async def test_a_stream_that_all_ranks_agree_on_is_served_under_its_digest(model_dir, monkeypatch):
    trainer = Trainer(SEALED)
    async with running(model_dir) as replica:
        write_script(model_dir, rank_0=reading(ROOT), rank_1=reading(ROOT))
        await update(replica, monkeypatch, trainer)
        assert (replica._updates.served.manifest, replica._updates.served.root_digest) == (SEALED, ROOT)
        assert replica._updates.previous.version == "step_7"
        assert (trainer.asked, trainer.closed) == (2, 2)
        await update(replica, monkeypatch, Trainer(SEALED), verify_checksum=False)
        assert replica._updates.served.root_digest == ""


@pytest.mark.parametrize(
    ("roots", "then", "said"),
    [
        ((ROOT, OTHER), SEALED, f"rank 1 .*expected {ROOT}, found {OTHER}"),
        ((OTHER, OTHER), SEALED, f"rank 0 .*found {OTHER}.* rank 1 .*found {OTHER}"),
        ((ROOT, ""), SEALED, "rank 1 .*found none"),
        ((ROOT, ROOT), replace(SEALED, root_digest=""), "still has no digests"),
        ((ROOT, ROOT), manifest_of(3.0), "rank 0 read"),
        ((ROOT, ROOT), replace(SEALED, tied={"v": "w"}), "ties other names"),
        ((ROOT, ROOT), SourceFailed("the trainer has gone"), "the trainer has gone"),
    ],
)
@in_loop
async def test_a_stream_whose_digest_cannot_be_had_is_abandoned(roots, then, said, model_dir, monkeypatch):
    async with running(model_dir) as replica:
        write_script(model_dir, rank_0=reading(roots[0]), rank_1=reading(roots[1]))
        with pytest.raises(SourceFailed, match=said):
            await update(replica, monkeypatch, Trainer(then))
        assert replica._updates.served.version == "step_7"
        assert replica.status.healthy
        answer = [output async for output in replica.submit(request(1, ECHO))]
        assert answer[-1].version == "step_7"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"version": "step_3"}, "rank 1 .*version: expected live, found step_3"),
        ({"rank": 0}, "rank 1 .*rank: expected 1, found 0"),
        ({"ranks": 4}, "rank 1 .*number of ranks: expected 2, found 4"),
        ({"tensors": {"w": "b"}}, "rank 1 .*tensor w: expected a, found b"),
    ],
)
@in_loop
async def test_a_rank_that_read_something_else_is_named_and_nothing_is_committed(found, said, model_dir, monkeypatch):
    async with running(model_dir) as replica:
        first = reading(ROOT)["read"] | ({"tensors": {"w": "a"}} if "tensors" in found else {})
        write_script(model_dir, rank_0={"read": first}, rank_1={"read": reading(ROOT)["read"] | found})
        with pytest.raises(SourceFailed, match=said):
            await update(replica, monkeypatch, Trainer(SEALED))
        assert replica._updates.served.version == "step_7"
        assert replica.status.healthy


@in_loop
async def test_a_stream_cannot_feed_two_models_of_a_rank(model_dir, monkeypatch):
    async with running(model_dir) as replica:
        monkeypatch.setattr(replica, "settings", replace(replica.settings, draft_dir="drafts", draft_names=("mtp.*",)))
        trainer = Trainer(SEALED)
        with pytest.raises(InvalidInput, match="Publish it held"):
            await update(replica, monkeypatch, trainer)
        assert trainer.asked == 1
