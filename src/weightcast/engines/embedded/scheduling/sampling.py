"""Which token follows. The choice depends on the logits, the seed and the position alone, never on the rest of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weightcast.engines.embedded.messages import Sampling, TokenLogprob

Choice = tuple[int, TokenLogprob | None]
Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def choose(
    logits: torch.Tensor, wanted: Sequence[tuple[Sampling, int]], *, tick: Callable[[], None] | None = None
) -> list[Choice | None]:
    """A token for every row of `logits` (float32), with its log-probabilities if asked for.

    `wanted` has for each row how to choose and the position in the sequence that the token will have. Among equal logits
    the smaller token number is taken to be the better one. None where the logits are not numbers, or none is finite.
    `tick` is called for every row that is more than its largest logit: with a large vocabulary one takes milliseconds.
    """
    if not wanted:
        return []
    best, greedy = logits.max(dim=1)
    sound: list[bool] = torch.isfinite(best).tolist()
    tokens: list[int] = greedy.tolist()
    details: list[TokenLogprob | None] = [None] * len(tokens)
    special = [
        row for row, (how, _) in enumerate(wanted) if sound[row] and (how.temperature > 0 or how.logprobs is not None)
    ]
    if special:
        values = logits[special].cpu().numpy()
        for index, row in enumerate(special):
            how, position = wanted[row]
            if tick is not None:
                tick()
            if how.temperature > 0:
                tokens[row] = _sample(values[index], how, uniform(how.seed, position))
            if how.logprobs is not None:
                details[row] = _logprob(values[index], tokens[row], how.logprobs)
    return [choice if good else None for choice, good in zip(zip(tokens, details, strict=True), sound, strict=True)]


def accept(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """How many of the proposed tokens stay: those before the first that is not the main model's own choice.

    `chosen[j]` is its choice at the place of `drafts[j]`. The answer is `chosen[: 1 + accept(drafts, chosen)]`.
    """
    for index, (draft, own) in enumerate(zip(drafts, chosen, strict=False)):
        if draft != own:
            return index
    return min(len(drafts), len(chosen))


def uniform(seed: int, position: int) -> float:
    """A random number in [0, 1) for one position: the SplitMix64 generator, at any place of its stream at once."""
    start = _mix(seed & _MASK)
    return (_mix((start + (position + 1) * _STEP) & _MASK) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


# -- one row -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidates:
    """Tokens that may be chosen and their weights, which need not add up to one."""

    tokens: Ints | None  # None: all of them, in order
    weights: Floats

    def pick(self, number: float) -> int:
        """The token at this part of the sum of all weights; never one of weight 0."""
        sums = np.cumsum(self.weights)
        # The largest number below 1 times a sum is less than the sum, also when rounded, so there always is such a place.
        index = int(np.searchsorted(sums, number * sums[-1], side="right"))
        return index if self.tokens is None else int(self.tokens[index])


def _sample(row: Floats, how: Sampling, number: float) -> int:
    tokens: Ints | None = None
    if 0 < how.top_k < row.size:
        tokens = _top(row, how.top_k)
        row = row[tokens]
    weights = row.astype(np.float64)
    weights -= weights.max()
    with np.errstate(over="ignore"):  # a tiny temperature makes all but the best minus infinity
        weights /= how.temperature
    candidates = _Candidates(tokens, np.exp(weights, out=weights))
    if how.top_p < 1:
        candidates = _nucleus(candidates, max(0.0, how.top_p))
    return candidates.pick(number)


def _nucleus(candidates: _Candidates, top_p: float) -> _Candidates:
    """The fewest of the most likely candidates whose weights reach `top_p` of the sum; at least one."""
    weights = candidates.weights
    total = float(weights.sum())
    # Whatever is smaller than this makes up, all together, less than what may be left out: it need not be sorted.
    places = np.flatnonzero(weights >= (1 - top_p) * total / weights.size)
    order = places[np.argsort(-weights[places], kind="stable")]
    order = order[: int(np.searchsorted(np.cumsum(weights[order]), top_p * total, side="left")) + 1]
    return _Candidates(order if candidates.tokens is None else candidates.tokens[order], weights[order])


def _top(values: Floats, count: int) -> Ints:
    """The places of the `count` largest values, or of all, best first; of equal ones the first."""
    if count < values.size:
        least = np.partition(values, values.size - count)[values.size - count]
        places = np.flatnonzero(values >= least)
    else:
        places = np.arange(values.size)
    return places[np.argsort(-values[places], kind="stable")][:count]


def _logprob(row: Floats, token: int, alternatives: int) -> TokenLogprob:
    values = row.astype(np.float64)
    best = float(values.max())
    values -= best
    total = best + float(np.log(np.exp(values, out=values).sum()))
    top = _top(row, alternatives) if alternatives > 0 else ()
    return TokenLogprob(float(row[token]) - total, tuple((int(one), float(row[one]) - total) for one in top))
