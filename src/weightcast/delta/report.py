"""What is in a delta, without decoding it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weightcast.delta.container import Table, read_table
from weightcast.delta.sparse import Delta
from weightcast.tensors.flat import Buffer
from weightcast.tensors.lanes import lane_count
from weightcast.wire.manifest import Packing

TensorForm = Literal["skip", "sparse", "dense", "raw", "mixed"]


@dataclass(frozen=True)
class TensorReport:
    """One tensor: the form that was cheapest for it (`mixed` if its blocks differ), and how much of it changes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    form: TensorForm
    lanes: int
    changes: int

    @property
    def density(self) -> float:
        """The share of lanes that change."""
        return self.changes / self.lanes if self.lanes else 0.0


@dataclass(frozen=True)
class DeltaReport:
    """A delta: `packing` is None for one in sparse form, and `nbytes` its size packed or in memory."""

    packing: Packing | None
    nbytes: int
    base_root: str
    new_root: str
    tensors: tuple[TensorReport, ...]

    @property
    def changes(self) -> int:
        """Lanes that change."""
        return sum(tensor.changes for tensor in self.tensors)

    @property
    def density(self) -> float:
        """The share of all lanes that change."""
        lanes = sum(tensor.lanes for tensor in self.tensors)
        return self.changes / lanes if lanes else 0.0

    @property
    def bytes_per_change(self) -> float:
        """Size over changes."""
        return self.nbytes / self.changes if self.changes else 0.0


def inspect(delta: Delta | Buffer, *more: Buffer) -> DeltaReport:
    """What a delta holds: for each tensor its form and density. Needs no base, and reads only the tables of packed ones.

    `more` are the other packed deltas of the same version.
    """
    if not isinstance(delta, Delta):
        tables = [read_table(memoryview(data)) for data in (delta, *more)]
        first, nbytes = tables[0], sum(map(len, (delta, *more)))
        return DeltaReport(first.packing, nbytes, first.base_root, first.new_root, _from_tables(tables))
    reports = []
    for name, spec in delta.specs.items():
        tensor = delta.tensors.get(name)
        form: TensorForm = "skip" if tensor is None else "dense" if tensor.indices is None else "sparse"
        changes = tensor.changes if tensor else 0
        reports.append(TensorReport(name, spec.dtype, spec.shape, form, lane_count(spec), changes))
    return DeltaReport(None, delta.nbytes, delta.base_root, delta.new_root, tuple(reports))


def _from_tables(tables: Sequence[Table]) -> tuple[TensorReport, ...]:
    forms: dict[str, set[TensorForm]] = {}
    changes: dict[str, int] = {}
    for chunk in (chunk for table in tables for chunk in table.chunks):
        for block in chunk.blocks:
            forms.setdefault(block.tensor, set()).add(chunk.form)
            changes[block.tensor] = changes.get(block.tensor, 0) + block.changes
    reports = []
    for name, spec in {name: spec for table in tables for name, spec in table.specs.items()}.items():
        found = forms.get(name, {"skip"})
        form = next(iter(found)) if len(found) == 1 else "mixed"
        reports.append(TensorReport(name, spec.dtype, spec.shape, form, lane_count(spec), changes.get(name, 0)))
    return tuple(reports)
