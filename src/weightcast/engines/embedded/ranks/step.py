"""The step message: one int32 tensor from rank 0 to the others before every forward pass.

It carries the batch, and in its first number the control signal: 0, the id of a command that all ranks execute now, or
`PARK`: no further message follows until rank 0 wakes its peers over their sockets. So a signal costs nothing of its own,
every rank acts on it between the same two forward passes, and an idle engine runs no collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from weightcast.engines.embedded.batch import Batch
from weightcast.engines.embedded.ranks.group import RankGroup

PARK = -1
INLINE = 1024  # numbers in the first broadcast; most steps fit

_HEADER = 8


class Work(IntEnum):
    """Which model a step runs."""

    NONE = 0
    MAIN = 1
    DRAFT = 2


@dataclass(frozen=True)
class Step:
    """What all ranks do next: execute a command, run a model on a batch, both, or park."""

    signal: int = 0
    work: Work = Work.NONE
    batch: Batch | None = None


class StepChannel:
    """Sends steps from rank 0 and receives them on the others. Its buffer is made once."""

    def __init__(self, group: RankGroup, device: str) -> None:
        self._group, self._device = group, device
        self._buffer = torch.zeros(INLINE, dtype=torch.int32)

    def send(self, step: Step) -> None:
        """Tell all other ranks."""
        if self._group.size == 1:
            return
        numbers = _pack(step)
        head = min(len(numbers), INLINE)
        self._buffer[:head] = numbers[:head]
        self._group.broadcast(self._buffer)
        if len(numbers) > INLINE:
            self._group.broadcast(numbers[INLINE:].contiguous())

    def receive(self) -> Step:
        """The next step of rank 0. Waits for as long as a collective may take."""
        self._group.broadcast(self._buffer)
        length = int(self._buffer[_HEADER - 1])
        numbers = self._buffer
        if length > INLINE:
            rest = torch.empty(length - INLINE, dtype=torch.int32)
            self._group.broadcast(rest)
            numbers = torch.cat((self._buffer, rest))
        return _unpack(numbers, self._device)


def _pack(step: Step) -> torch.Tensor:
    batch = step.batch
    if batch is None:
        return torch.tensor([step.signal, step.work, 0, 0, 0, 0, 0, _HEADER], dtype=torch.int32)
    replay = batch.replay
    routes = 0 if replay is None else replay.shape[1] << 16 | replay.shape[2]
    rest = [batch.tokens, batch.positions, batch.slots, torch.tensor([*batch.starts, *batch.lengths]), batch.rows]
    rest += [batch.tables.flatten()] + ([] if replay is None else [replay.flatten()])
    length = _HEADER + sum(part.numel() for part in rest)
    header = [
        step.signal,
        step.work,
        len(batch.tokens),
        batch.sequences,
        len(batch.rows),
        batch.tables.shape[1],
        routes,
        length,
    ]
    return torch.cat((torch.tensor(header, dtype=torch.int32), *(part.cpu().to(torch.int32) for part in rest)))


def _unpack(numbers: torch.Tensor, device: str) -> Step:
    signal, work, tokens, sequences, rows, width, routes, length = numbers[:_HEADER].tolist()
    if not tokens:
        return Step(signal, Work(work))
    shape = (tokens, routes >> 16, routes & 0xFFFF)
    sizes = [tokens, tokens, tokens, sequences + 1, sequences, rows, sequences * width, shape[0] * shape[1] * shape[2]]
    parts = torch.split(numbers[_HEADER:length].long(), sizes)  # a copy: the buffer is used again for the next step
    return Step(signal, Work(work), _batch(parts, width, shape, device))


def _batch(parts: Sequence[torch.Tensor], width: int, shape: tuple[int, int, int], device: str) -> Batch:
    tokens, positions, slots, starts, lengths, rows, tables, replay = parts
    return Batch(
        tokens=tokens.to(device),
        positions=positions.to(device),
        slots=slots.to(device),
        starts=tuple(starts.tolist()),
        lengths=tuple(lengths.tolist()),
        tables=tables.reshape(len(lengths), width).to(device),
        rows=rows.to(device),
        replay=replay.reshape(shape).to(device) if shape[1] else None,
    )
