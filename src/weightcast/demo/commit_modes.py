"""Full versions and deltas, one live model, every way to commit, and one version that is damaged."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weightcast.errors import Corrupt, MissingExtra
from weightcast.store import layout
from weightcast.store.store import Store
from weightcast.worker.live_model import LiveModel
from weightcast.worker.result import UpdateResult

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DemoRow:
    """One update of the demo. `proved` means that the live bytes have the root digest that was published."""

    version: str
    how: str
    nbytes: int
    stage_s: float
    verify_s: float
    commit_s: float
    total_s: float
    live_digest: str
    proved: bool


@dataclass(frozen=True)
class DemoReport:
    """What the demo did."""

    tensors: int
    nbytes: int
    rows: list[DemoRow]
    refusal: str
    intact: bool


def run_demo(*, width: int = 1024) -> DemoReport:
    """Run the demo in a temporary store, which is removed afterwards."""
    try:
        import torch  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise MissingExtra("torch", "torch", "the demo") from error
    with tempfile.TemporaryDirectory(prefix="weightcast-demo-") as directory, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _run(Store(Path(directory)), width)


def _model(width: int) -> torch.nn.Module:
    """A stack of linear layers with a tied head, in BF16."""
    import torch  # noqa: PLC0415

    layers = [torch.nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(8)]
    embedding = torch.nn.Embedding(4 * width, width, dtype=torch.bfloat16)
    head = torch.nn.Linear(width, 4 * width, bias=False, dtype=torch.bfloat16)
    head.weight = embedding.weight
    return torch.nn.Sequential(embedding, *layers, head)


def _nudge(model: torch.nn.Module) -> torch.nn.Module:
    """What an optimizer step of reinforcement learning does: about one weight in a hundred moves to a neighbouring value."""
    import torch  # noqa: PLC0415

    for parameter in model.parameters():
        moved = torch.rand(parameter.shape) < 0.01
        parameter.data.view(torch.int16)[moved] += 1
    return model


def _run(store: Store, width: int) -> DemoReport:
    import torch  # noqa: PLC0415

    trainer = _model(width)
    for step in (1, 2, 3):
        trainer = _model(width)
        store.publish(f"step_{step}", trainer.state_dict(), mode="full")
    with torch.device("meta"):
        live = LiveModel(_model(width), source=store)
    rows: list[DemoRow] = []

    def record(how: str, update: Callable[[], UpdateResult]) -> None:
        result = update()
        digest = live.root_digest()
        proved = digest == store.manifest(result.version).root_digest
        times = (result.stage_s, result.verify_s, result.commit_s, result.total_s)
        rows.append(DemoRow(result.version, how, result.bytes, *times, live_digest=digest, proved=proved))

    record("first load of a meta model: adopts", lambda: live.update("step_1"))
    record("copy: addresses stay", lambda: live.update("step_2", commit="copy"))
    record("swap: pointers switch", lambda: live.update("step_3", commit="swap"))
    record("inplace: no staging memory", lambda: live.update("step_1", commit="inplace"))
    live.clear()
    record("after clear(): adopts again", lambda: live.update("step_3"))
    store.publish("step_4", _nudge(trainer).state_dict())
    record("delta: what changed is scattered", lambda: live.update("step_4", commit="delta"))
    store.publish("step_5", _nudge(trainer).state_dict())
    record("delta by swap: moves spare buffers", lambda: live.update("step_5", commit="swap"))
    store.publish("step_6", _nudge(trainer).state_dict())
    before = live.root_digest()
    refusal = _refused(store, live, "step_6")
    manifest = store.manifest("step_3")
    return DemoReport(len(manifest.tensors), manifest.nbytes, rows, refusal, intact=live.root_digest() == before)


def _refused(store: Store, live: LiveModel, version: str) -> str:
    """Flip a byte in the middle of a version's largest file and try to take the version."""
    file = max(layout.version_dir(store.path, version).iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    try:
        live.update(version)
    except Corrupt as error:
        return f"refused ({error.code})"
    return "TAKEN"
