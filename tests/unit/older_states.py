"""The states that the store in tests/golden/format1 holds. Nothing of weightcast is needed: an older release wrote them."""

import ml_dtypes
import numpy as np

STEPS = ("step_1", "step_2", "step_3", "step_4", "step_5")
TIED = {"x": "w", "a_bias": "bias"}  # in the first three: one after and one before the name that holds their bytes


def states():
    """A state for each step: the first has every kind of tensor, and in each next one some elements are others."""
    every = np.arange(1 << 12, dtype=np.uint16) * np.uint16(16)
    state = {
        "w": every.view(ml_dtypes.bfloat16).reshape(64, 64),
        "bias": np.linspace(-1, 1, 321, dtype=np.float32),
        "wide": np.linspace(-1, 1, 77),
        "odd": np.arange(7, dtype=np.uint8),
        "mask": np.arange(33) % 3 == 0,
        "count": np.array(7, dtype=np.int64),
        "complex": np.arange(10, dtype=np.float32).astype(np.complex64),
        "small": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn),
        "none": np.empty((0, 4), dtype=np.float16),
    }
    found = {}
    for number, step in enumerate(STEPS):
        found[step] = tied(state) if number < 3 else state
        state = {name: array.copy() for name, array in state.items()}
        state["w"].view(np.uint16).reshape(-1)[number::97] ^= np.uint16(1)
        state["bias"][number::50] += np.float32(0.25)
        state["wide"][number] = -0.0
        state["mask"][number] ^= True
        state["count"][...] += 1 << 40
        state["small"].view(np.uint8)[number * 7] ^= 0x80
    return found


def tied(state):
    """A state with the tied names."""
    return state | {name: state[holder] for name, holder in TIED.items()}


def untied(state):
    """A state without them."""
    return {name: array for name, array in state.items() if name not in TIED}
