"""Element types in safetensors spelling, and the NumPy type that carries each without changing a bit."""

from __future__ import annotations

from enum import StrEnum

import ml_dtypes
import numpy as np

from weightcast.errors import UnsupportedTensor


class DType(StrEnum):
    """One element type. Packed 4-bit formats travel as U8: their bytes are opaque here."""

    BOOL = "BOOL"
    U8 = "U8"
    I8 = "I8"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"
    F8_E8M0 = "F8_E8M0"
    U16 = "U16"
    I16 = "I16"
    F16 = "F16"
    BF16 = "BF16"
    U32 = "U32"
    I32 = "I32"
    F32 = "F32"
    U64 = "U64"
    I64 = "I64"
    F64 = "F64"
    C64 = "C64"

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The NumPy dtype that holds these elements."""
        return _TO_NUMPY[self]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _TO_NUMPY[self].itemsize

    @property
    def is_float(self) -> bool:
        """True for real floating-point types: those whose distance is counted in units in the last place."""
        return self.value[0] in "FB" and self is not DType.BOOL


_TO_NUMPY: dict[DType, np.dtype[np.generic]] = {
    DType.BOOL: np.dtype(np.bool_),
    DType.U8: np.dtype(np.uint8),
    DType.I8: np.dtype(np.int8),
    DType.F8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.F8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
    DType.F8_E8M0: np.dtype(ml_dtypes.float8_e8m0fnu),
    DType.U16: np.dtype(np.uint16),
    DType.I16: np.dtype(np.int16),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.U32: np.dtype(np.uint32),
    DType.I32: np.dtype(np.int32),
    DType.F32: np.dtype(np.float32),
    DType.U64: np.dtype(np.uint64),
    DType.I64: np.dtype(np.int64),
    DType.F64: np.dtype(np.float64),
    DType.C64: np.dtype(np.complex64),
}
_FROM_NUMPY = {dtype: name for name, dtype in _TO_NUMPY.items()}


def from_numpy(dtype: np.dtype[np.generic]) -> DType:
    """The spelling of a NumPy dtype. Big-endian and non-numeric types are refused."""
    found = _FROM_NUMPY.get(dtype)
    if found is None:
        raise UnsupportedTensor(
            f"NumPy dtype {dtype.str if dtype.kind != 'V' else dtype} cannot be carried: only little-endian "
            f"{', '.join(DType)}."
        )
    return found
