"""A picture of a run: the reward, and how long the engine paused for each version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weightcast.demo.records import Recovery, Step
from weightcast.errors import MissingExtra


def draw(path: Path, steps: Sequence[Step], recovery: Recovery | None, *, title: str) -> None:
    """Write a PNG. Raises `MissingExtra` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtra("matplotlib", "demo", "the plot") from error
    numbers = [step.number for step in steps]
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    figure.suptitle(title)
    above.plot(numbers, [step.reward for step in steps], color="tab:blue", marker=".")
    above.set_ylabel("mean reward")
    above.set_ylim(0, 1)
    pauses = [1e3 * step.committed.pause_s for step in steps]
    below.bar(numbers, pauses, color="tab:orange")
    below.set_ylabel("pause of the commit, ms")
    below.set_xlabel("optimizer step = committed version")
    if recovery is not None:
        for axes in (above, below):
            axes.axvline(recovery.step, color="tab:red", linestyle="--")
        above.annotate(
            f"rank {recovery.rank} killed,\nback after {recovery.recovery_s:.1f} s",
            (recovery.step, 0.04), xytext=(6, 0), textcoords="offset points", color="tab:red",
        )  # fmt: skip
    figure.savefig(path, dpi=120)
