"""Sequences in a paged cache, for tests that drive a model by hand: blocks are given out in a random order."""

import random

import torch

from weightcast.engines.embedded.batch import Batch


class PagedSequences:
    def __init__(self, *, blocks=64, block_size=4, seed=0, shuffled=True):
        self.block_size, self.slots = block_size, blocks * block_size
        self._free = list(range(blocks))
        if shuffled:
            random.Random(seed).shuffle(self._free)
        self.blocks, self.lengths = {}, {}

    def batch(self, turns, *, rows="last", replay=None):
        """The next tokens of some sequences: `turns` maps the name of a sequence to them."""
        tokens, positions, slots, chosen, starts, lengths, tables = [], [], [], [], [0], [], []
        for name, new in turns.items():
            begin = self.lengths.get(name, 0)
            end = begin + len(new)
            table = self.blocks.setdefault(name, [])
            while len(table) * self.block_size < end:
                table.append(self._free.pop())
            self.lengths[name] = end
            tokens += new
            positions += range(begin, end)
            slots += [self.slot(name, place) for place in range(begin, end)]
            starts.append(len(tokens))
            lengths.append(end)
            tables.append(table[: -(-end // self.block_size)])
            chosen.append(len(tokens) - 1)
        width = max(map(len, tables))
        return Batch(
            tokens=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            starts=tuple(starts),
            lengths=tuple(lengths),
            tables=torch.tensor([table + [0] * (width - len(table)) for table in tables]),
            rows=torch.tensor(chosen if rows == "last" else range(len(tokens))),
            replay=replay,
        )

    def slot(self, name, place):
        return self.blocks[name][place // self.block_size] * self.block_size + place % self.block_size

    def all_slots(self, name):
        return torch.tensor([self.slot(name, place) for place in range(self.lengths[name])])

    def cut(self, name, length):
        """Forget the last tokens of a sequence: drafts that were not accepted."""
        self.lengths[name] = length
