"""Generated BF16 weights of any size and the weights one optimizer step later, at a density of one's choice."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from weightcast.errors import InvalidInput
from weightcast.tensors.flat import Array

BF16 = np.dtype(ml_dtypes.bfloat16)
SPREAD = 0.02  # standard deviation of the weights
RATIO = 0.23  # and of Adam's m/√v for gradients that are all noise, at a first beta of 0.9: √(0.1/1.9)
BLOCK = 1 << 22  # elements: bounds the memory beyond the result
SAMPLE_CHANGES, LARGEST_SAMPLE = 40_000, 16 * BLOCK  # what the step size is fitted to
HIGHEST_DENSITY = 0.9

Floats = NDArray[np.float32]


def generated_pair(elements: int, density: float, *, seed: int) -> tuple[Array, Array]:
    """Weights N(0, 0.02) before and after a step that changes the share `density` of their BF16 values.

    The F32 master of the weights lies between the points of the BF16 grid. Every element has noise of its own: nothing
    is repeated. The step size is fitted to the first elements, as many as it takes for 40 000 changes (67 million at most),
    so that the share is met to 1 or 2 % above a density of 0.01 %, and to 5 % above 0.005 %.
    """
    if elements < 1 or not 0 < density <= HIGHEST_DENSITY:
        raise InvalidInput(
            f"cannot generate {elements} elements at density {density}: elements must be 1 or more, and the density above "
            f"0 and at most {HIGHEST_DENSITY}."
        )
    size = _step_size(min(elements, round(SAMPLE_CHANGES / density), LARGEST_SAMPLE), density, seed)
    old, new = np.empty(elements, dtype=BF16), np.empty(elements, dtype=BF16)
    start = 0
    for master, ratio in _blocks(elements, seed):
        stop = start + len(master)
        old[start:stop] = master
        new[start:stop] = _stepped(master, ratio, size)
        start = stop
    return old, new


def _blocks(elements: int, seed: int) -> Iterator[tuple[Floats, Floats]]:
    """Master weights and the direction each takes. A larger pair begins with the master weights of a smaller one."""
    for block, start in enumerate(range(0, elements, BLOCK)):
        length = min(BLOCK, elements - start)
        master, ratio = (
            np.random.default_rng([seed, block, kind]).standard_normal(length, dtype=np.float32) for kind in (0, 1)
        )
        yield master * np.float32(SPREAD), np.clip(ratio * np.float32(RATIO), -1, 1)


def _stepped(master: Floats, ratio: Floats, size: float) -> Array:
    return (master + ratio * np.float32(size)).astype(BF16)


def _step_size(elements: int, density: float, seed: int) -> float:
    """Bisect for the step size: the larger it is, the more elements change."""
    sample = list(_blocks(elements, seed))
    wanted = density * elements
    low, high = -40.0, 10.0  # as powers of two
    while high - low > 1e-4:
        middle = (low + high) / 2
        changed = [_changed(master, ratio, 2**middle) for master, ratio in sample]
        if sum(map(np.count_nonzero, changed)) < wanted:
            low = middle
        else:
            high = middle  # and what did not change here will not change with a smaller step
            sample = [(master[moved], ratio[moved]) for (master, ratio), moved in zip(sample, changed, strict=True)]
    return float(2**high)


def _changed(master: Floats, ratio: Floats, size: float) -> NDArray[np.bool_]:
    return np.not_equal(master.astype(BF16).view(np.uint16), _stepped(master, ratio, size).view(np.uint16))
