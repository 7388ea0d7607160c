"""The bench of the delta codec: sizes on real and generated weights, speeds on generated ones, and the targets of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import numpy as np

from weightcast import delta, logs
from weightcast.bench.delta_size import FOLDED, FoldRow, SizeRow, fold_rows, size_rows
from weightcast.bench.delta_speed import APPLY, FIND_TWO_THREADS, SpeedRow, speed_rows
from weightcast.bench.generated import generated_pair
from weightcast.bench.report import At, Report, Target, this_machine
from weightcast.bench.trained import OBJECTIVES, Objective, State, adamw_states, model_directory
from weightcast.errors import MissingExtra
from weightcast.tensors.flat import Array

log = logs.get(__name__)

Progress = Callable[[str], None]
DeltaRow = SizeRow | FoldRow | SpeedRow

LEARNING_RATE = 1e-6
DENSITIES = (0.001, 0.005, 0.01, 0.03, 0.1)
TARGET_DENSITY = 0.01  # the one that has targets
TWO_THREADS = 1.6  # times as fast as one
SIZE_ELEMENTS = 1 << 25  # of generated weights whose size is counted: more changes no ratio
SPEED_ELEMENTS = 1 << 25  # of real weights at least, if speeds on them are to say anything


@dataclass(frozen=True)
class DeltaSettings:
    """How much is measured. `layers` and `quick` are for tests; `quick` asserts only the sizes of generated weights."""

    elements: int = 1 << 27
    steps: int = 20
    seed: int = 0
    target_rounds: int = 15
    other_rounds: int = 5
    layers: int | None = None
    quick: bool = False


QUICK = DeltaSettings(elements=2_000_000, steps=2, target_rounds=2, other_rounds=2, layers=1, quick=True)


def run_delta_bench(settings: DeltaSettings, progress: Progress = log.info) -> Report:
    """Measure everything. Without the extra `bench` this raises `MissingExtra`, or leaves real weights out if `quick`."""
    delta.warm_up()
    bench = _Bench(settings, progress)
    bench.real()
    bench.generated()
    return Report(
        bench="delta",
        machine=this_machine(),
        settings=asdict(settings),
        rows=[{"kind": row.kind, **asdict(row)} for row in bench.rows],
        targets=bench.targets,
        notes=bench.notes,
    )


class _Bench:
    def __init__(self, settings: DeltaSettings, progress: Progress) -> None:
        self._settings, self._progress = settings, progress
        self.rows: list[DeltaRow] = []
        self.targets: dict[str, Target] = {}
        self.notes = [
            "speeds are those of the fastest of interleaved rounds, in bytes of the base; 16-bit elements",
            "sizes are those of whole packed deltas, decoded and compared bit for bit before they were counted",
        ]

    def real(self) -> None:
        """Sizes on real weights, and speeds on those of all objectives as one flat tensor."""
        try:
            model_directory()
        except MissingExtra as error:
            if not self._settings.quick:
                raise
            self.notes.append(f"real weights are left out: {error}")
            return
        pairs = [self._trained(objective) for objective in OBJECTIVES]
        old, new = (_flat(states) for states in zip(*pairs, strict=True))
        if old.size >= SPEED_ELEMENTS:
            self._speeds("real_all", old, new, rounds=self._settings.other_rounds)

    def _trained(self, objective: Objective) -> tuple[State, State]:
        workload, settings = f"real_{objective}", self._settings
        self._progress(f"{workload}: training {settings.steps} steps")
        states = adamw_states(
            steps=settings.steps,
            last=min(max(FOLDED), settings.steps),
            lr=LEARNING_RATE,
            objective=objective,
            seed=settings.seed,
            layers=settings.layers,
        )
        sizes = self._sizes(workload, *states[-2:])
        self._size_targets(workload, sizes, asserted=not settings.quick)
        self.rows += fold_rows(workload, states)
        return states[-2], states[-1]

    def generated(self) -> None:
        """Sizes and speeds at every density, and the targets at one."""
        for density in DENSITIES:
            workload, aimed = f"generated_{density * 100:g}pct", density == TARGET_DENSITY
            self._progress(f"{workload}: generating")
            old, new = generated_pair(self._settings.elements, density, seed=self._settings.seed)
            sizes = self._sizes(workload, {"weights": old[:SIZE_ELEMENTS]}, {"weights": new[:SIZE_ELEMENTS]})
            rounds = self._settings.target_rounds if aimed else self._settings.other_rounds
            speeds = self._speeds(workload, old, new, rounds=rounds)
            if aimed:
                self._size_targets(workload, sizes, asserted=True)
                self._speed_targets(speeds, asserted=not self._settings.quick)

    def _sizes(self, workload: str, old: State, new: State) -> list[SizeRow]:
        self._progress(f"{workload}: sizes")
        rows = list(size_rows(workload, old, new))
        self.rows += rows
        return rows

    def _speeds(self, workload: str, old: Array, new: Array, *, rounds: int) -> list[SpeedRow]:
        self._progress(f"{workload}: speeds")
        rows = list(speed_rows(workload, old, new, rounds=rounds))
        self.rows += rows
        return rows

    def _size_targets(self, workload: str, rows: Iterable[SizeRow], *, asserted: bool) -> None:
        row = {row.codec: row for row in rows}
        exponent, order0 = row["classes"].over_exponent_bound, row["gaps"].over_order0
        self._target(f"{workload}.classes_over_exponent_bound", exponent, "most", 1.15, asserted)
        smaller = row["xor_zstd"].nbytes / row["classes"].nbytes
        self._target(f"{workload}.xor_zstd_over_classes", smaller, "least", 2.5, asserted)
        self._target(f"{workload}.gaps_over_order0", order0, "most", 1.15, asserted)

    def _speed_targets(self, rows: Iterable[SpeedRow], *, asserted: bool) -> None:
        row = {row.operation: row for row in rows}
        for operation, limit in (("encode_gaps", 0.8), ("encode_classes", 0.5), ("decode_classes", 0.5)):
            self._target(f"{operation}_over_find", row[operation].over_limit, "least", limit, asserted)
        self._target("apply_over_scatter", row[APPLY].over_limit, "least", 1.5, asserted)
        for operation in ("encode_classes", "decode_classes"):
            both = f"{operation}_two_threads"
            self._target(both, row[operation].ms / row[both].ms, "least", TWO_THREADS, asserted)
        spare = row[FIND_TWO_THREADS].over_limit
        if spare < TWO_THREADS:  # the targets stand as they are: a reader must know what they were taken on
            self.notes.append(
                f"a second thread made NumPy's own search only {spare:.2f} times as fast: other work had the second core, "
                "and what two threads reach here says little"
            )

    def _target(self, name: str, value: float, at: At, limit: float, asserted: bool) -> None:
        self.targets[name] = Target(value, limit, at, asserted)


def _flat(states: Iterable[State]) -> Array:
    return np.concatenate([array.reshape(-1) for state in states for array in state.values()])
