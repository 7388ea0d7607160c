"""What a whole run comes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from weightcast.demo.records import Committed, Finished, Recovery, Started, Step
from weightcast.demo.view import shown, size_of

RISE = 2.0  # how many times the first reward the last one must be
_WINDOW = 5


@dataclass(frozen=True)
class Summary:
    """All of a run. Rewards and rates are means; `first_reward` and `last_reward` are over `window` steps at either end."""

    steps: int
    window: int
    first_reward: float
    last_reward: float
    first_sample: str
    last_sample: str
    versions: int
    full_versions: int
    delta_versions: int
    full_nbytes: int
    delta_nbytes: int
    median_delta_nbytes: int
    median_density: float
    median_stage_s: float
    median_pause_s: float
    worst_pause_s: float
    median_update_s: float
    tokens: int
    tokens_per_s: float
    rollout_s: float
    train_s: float
    publish_s: float
    update_s: float
    start_s: float
    total_s: float
    recovery: Recovery | None
    version: str
    root_digest: str
    boxes: int
    tensors: int
    problems: list[str]

    @property
    def rise(self) -> float:
        """How many times the reward of the start that of the end is."""
        return self.last_reward / self.first_reward if self.first_reward else float("inf")

    @property
    def learned(self) -> bool:
        """Whether the reward rose as it must."""
        return self.last_reward > 0 and self.rise >= RISE

    @property
    def equal(self) -> bool:
        """Whether the engine's weights are the trainer's, bit for bit."""
        return not self.problems


def summarize(started: Started, steps: Sequence[Step], finished: Finished) -> Summary:
    """Put a run together. Pauses and rates leave out the step in which a rank was killed: that one is in `recovery`."""
    window = max(1, min(_WINDOW, len(steps) // 4))
    commits: list[Committed] = [started.first, *(step.committed for step in steps)]
    deltas = [one for one in commits if one.kind == "delta"]
    killed = finished.recovery.step if finished.recovery else None
    calm = [step for step in steps if step.number != killed] or list(steps)
    updates = [step.committed for step in steps]
    return Summary(
        steps=len(steps),
        window=window,
        first_reward=fmean(step.reward for step in steps[:window]),
        last_reward=fmean(step.reward for step in steps[-window:]),
        first_sample=steps[0].sample,
        last_sample=steps[-1].sample,
        versions=len(commits),
        full_versions=len(commits) - len(deltas),
        delta_versions=len(deltas),
        full_nbytes=started.full_nbytes,
        delta_nbytes=sum(one.nbytes for one in deltas),
        median_delta_nbytes=round(median(one.nbytes for one in deltas)) if deltas else 0,
        median_density=median(one.density for one in updates),
        median_stage_s=median(one.stage_s for one in updates),
        median_pause_s=median(one.pause_s for one in updates),
        worst_pause_s=max(one.pause_s for one in updates),
        median_update_s=median(one.update_s for one in updates),
        tokens=sum(step.tokens for step in steps),
        tokens_per_s=sum(step.tokens for step in calm) / sum(step.rollout_s for step in calm),
        rollout_s=sum(step.rollout_s for step in steps),
        train_s=sum(step.train_s for step in steps),
        publish_s=sum(one.publish_s for one in commits),
        update_s=sum(one.update_s for one in commits),
        start_s=started.start_s,
        total_s=finished.total_s,
        recovery=finished.recovery,
        version=finished.version,
        root_digest=finished.root_digest,
        boxes=finished.boxes,
        tensors=finished.tensors,
        problems=finished.problems,
    )


def facts(found: Summary) -> Iterator[tuple[str, str]]:
    """The summary for people: names, and a line for each."""
    rewards = f"{found.first_reward:.3f} → {found.last_reward:.3f}, {found.rise:.1f} times"
    yield "reward", f"{rewards} (means of the first and last {found.window} of {found.steps} steps)"
    yield "best answer", f"first {shown(found.first_sample)}   last {shown(found.last_sample)}"
    yield "versions", f"{found.versions} committed live: {found.full_versions} full, {found.delta_versions} deltas"
    full, changed = size_of(found.full_nbytes), f"{found.median_density:.1%} of the weights changed (median)"
    if found.delta_versions:
        share = found.median_delta_nbytes / found.full_nbytes
        yield "bytes", f"full {full}, delta {size_of(found.median_delta_nbytes)} (median, {share:.1%}); {changed}"
    else:
        yield "bytes", f"{full} each: this transport holds whole versions; {changed}"
    pauses = f"{found.median_pause_s * 1e3:.1f} ms (median), {found.worst_pause_s * 1e3:.1f} ms (worst)"
    yield "pause", f"{pauses}; staged while serving in {found.median_stage_s * 1e3:.0f} ms (median)"
    yield "rollouts", f"{found.tokens:,} tokens by the version just committed, {found.tokens_per_s:,.0f} tokens/s"
    if (back := found.recovery) is not None:
        lost = f"{back.lost_requests} of {back.requests} requests lost ({back.lost_answers} answers) and repeated"
        yield "kill", f"rank {back.rank} in step {back.step}: {lost}; back at {back.version} after {back.recovery_s:.1f} s"
    parts = {
        "start": found.start_s, "rollouts": found.rollout_s, "training": found.train_s,
        "publishing": found.publish_s, "updates": found.update_s,
    }  # fmt: skip
    yield "time", f"{found.total_s:.0f} s: " + ", ".join(f"{name} {seconds:.0f}" for name, seconds in parts.items())
