"""How the tokens of one batch attend: decided once per batch, used by every layer.

Sequences that bring few tokens (decoding, checking drafts) attend together in one call over slots gathered from the cache.
Prompts attend one by one: a fresh one to itself, without the cache; a continued one to all of its slots.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from weightcast.engines.embedded.batch import Batch

FEW = 8  # tokens of a sequence up to which it joins others
_SHORT = 256  # sequences up to this length are padded to each other; longer ones only to less than twice their length

Rows = slice | torch.Tensor


@dataclass(frozen=True)
class _FreshPrompt:
    """A sequence of which nothing was computed before."""

    rows: Rows

    def attend(self, queries: torch.Tensor, fresh: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return _attend_one(queries, fresh, None)


@dataclass(frozen=True)
class _LongTurn:
    """A sequence that brings many tokens behind a computed prefix. `mask` has shape (its new tokens, all its tokens)."""

    rows: Rows
    slots: Rows
    mask: torch.Tensor

    def attend(self, queries: torch.Tensor, fresh: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return _attend_one(queries, cached[self.slots], self.mask)


@dataclass(frozen=True)
class _ShortTurns:
    """Sequences that bring the same small number of tokens each. `slots` are padded to the longest, and masked."""

    rows: Rows
    sequences: int
    slots: Rows
    mask: torch.Tensor | None

    def attend(self, queries: torch.Tensor, fresh: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        count, heads, size = queries.shape
        sequences, tokens = self.sequences, count // self.sequences
        taken = cached[self.slots] if isinstance(self.slots, slice) else cached.index_select(0, self.slots)
        kv_heads = taken.shape[2]
        keys, values = taken.view(sequences, -1, 2, kv_heads, size).permute(2, 0, 3, 1, 4).unbind()
        # Heads that share keys become further queries of those keys, so that nothing is repeated.
        if tokens == 1:
            grouped = queries.view(sequences, kv_heads, -1, size)
            mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask)
            return mixed.reshape(count, heads * size)
        grouped = (
            queries.reshape(sequences, tokens, kv_heads, -1, size).transpose(1, 2).reshape(sequences, kv_heads, -1, size)
        )
        mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask)
        return mixed.reshape(sequences, kv_heads, tokens, -1, size).transpose(1, 2).reshape(count, heads * size)


def _attend_one(queries: torch.Tensor, keys_values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention of one sequence, causal unless there is a mask. Key heads stand where batches would: none is repeated."""
    count, heads, size = queries.shape
    kv_heads = keys_values.shape[2]
    share = heads // kv_heads
    grouped = queries.reshape(count, kv_heads, share, size).permute(1, 2, 0, 3)
    keys, values = (keys_values[:, side].transpose(0, 1).unsqueeze(1).expand(-1, share, -1, -1) for side in (0, 1))
    mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, is_causal=mask is None)
    return mixed.permute(2, 0, 1, 3).reshape(count, heads * size)


_Group = _FreshPrompt | _LongTurn | _ShortTurns


class AttentionPlan:
    """The groups of one batch. `share` is the number of query heads per key head."""

    def __init__(self, batch: Batch, *, block_size: int, share: int, dtype: torch.dtype) -> None:
        self.slots = batch.slots
        self._batch, self._block_size, self._share, self._dtype = batch, block_size, share, dtype
        self._device = batch.slots.device
        self._groups: list[_Group] = []
        short: dict[tuple[int, int], list[int]] = defaultdict(list)
        for sequence, length in enumerate(batch.lengths):
            count = batch.starts[sequence + 1] - batch.starts[sequence]
            if count == length and count > 1:
                self._groups.append(_FreshPrompt(self._rows([sequence])))
            elif count > FEW:
                self._groups.append(self._long_turn(sequence, count, length))
            elif count:
                short[count, max(length, _SHORT).bit_length()].append(sequence)
        self._groups += [self._short_turns(members, count) for (count, _), members in short.items()]

    def attend(self, queries: torch.Tensor, fresh: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        """Attention of all tokens: `queries` (tokens, heads, head size), `fresh` (tokens, 2, key heads, head size)."""
        if len(self._groups) == 1:
            return self._groups[0].attend(queries, fresh, cached)
        mixed = queries.new_empty((queries.shape[0], queries.shape[1] * queries.shape[2]))
        for group in self._groups:
            mixed[group.rows] = group.attend(queries[group.rows], fresh[group.rows], cached)
        return mixed

    def _rows(self, sequences: Sequence[int]) -> Rows:
        starts = self._batch.starts
        if sequences[-1] - sequences[0] == len(sequences) - 1:
            return slice(starts[sequences[0]], starts[sequences[-1] + 1])
        rows = [row for sequence in sequences for row in range(starts[sequence], starts[sequence + 1])]
        return torch.tensor(rows, device=self._device)

    def _long_turn(self, sequence: int, count: int, length: int) -> _LongTurn:
        places = torch.arange(length, device=self._device)
        mask = self._mask(places <= places[length - count :].unsqueeze(1))
        return _LongTurn(self._rows([sequence]), self._slots([sequence], length, None), mask)

    def _short_turns(self, sequences: list[int], count: int) -> _ShortTurns:
        lengths = [self._batch.lengths[sequence] for sequence in sequences]
        longest, seen, mask = max(lengths), None, None
        if count > 1 or min(lengths) < longest:
            places, ends = torch.arange(longest, device=self._device), torch.tensor(lengths, device=self._device)
            seen = places < ends.unsqueeze(1)
            if count == 1:
                mask = self._mask(seen).view(len(sequences), 1, 1, -1)
            else:  # a query for each token and each head that shares the keys
                last = (ends - count).unsqueeze(1) + torch.arange(count, device=self._device).repeat_interleave(self._share)
                mask = self._mask(places <= last.unsqueeze(2)).unsqueeze(1)
        return _ShortTurns(self._rows(sequences), len(sequences), self._slots(sequences, longest, seen), mask)

    def _slots(self, sequences: Sequence[int], length: int, seen: torch.Tensor | None) -> Rows:
        """The slots of each sequence, one behind the other, padded with its own first slot where it is not `seen`.

        A slice where a single sequence lies in consecutive blocks: nothing has to be gathered then.
        """
        size, tables = self._block_size, self._batch.tables
        width = -(-length // size)
        tables = (tables if len(sequences) == len(tables) else tables[list(sequences)])[:, :width]
        if len(sequences) == 1 and self._device.type == "cpu":
            blocks = tables[0].tolist()
            if blocks == list(range(blocks[0], blocks[0] + width)):
                return slice(blocks[0] * size, blocks[0] * size + length)
        slots = (tables * size).unsqueeze(2) + torch.arange(size, device=self._device)
        slots = slots.view(len(sequences), -1)[:, :length]
        return (slots if seen is None else torch.where(seen, slots, slots[:, :1])).reshape(-1)

    def _mask(self, seen: torch.Tensor) -> torch.Tensor:
        """What is added to the scores: a mask of numbers is faster than one of truth values."""
        return torch.zeros(seen.shape, dtype=self._dtype, device=self._device).masked_fill_(~seen, float("-inf"))
