"""Versions with NaNs and infinities are refused where that is asked for, and nothing of them is published."""

import ml_dtypes
import numpy as np
import pytest

from weightcast import DepotPublisher, Publisher, Store
from weightcast.errors import InvalidInput, VersionNotSet
from weightcast.tensors.dtypes import DType
from weightcast.tensors.flat import flat_bytes
from weightcast.tensors.lanes import check_finite
from weightcast.tensors.spec import TensorSpec

FLOATS = [DType.F64, DType.F32, DType.F16, DType.BF16, DType.F8_E4M3, DType.F8_E5M2, DType.F8_E8M0, DType.C64]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_pattern_is_told_as_numpy_tells_it(dtype):
    width = 4 if dtype is DType.C64 else dtype.itemsize
    rng = np.random.default_rng(1)
    if width < 4:
        bits = np.arange(1 << (8 * width), dtype=f"u{width}")
    else:
        bits = rng.integers(0, 1 << 63, 4096, dtype=np.uint64).astype(f"u{width}")
        special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, np.finfo(f"f{width}").max], dtype=f"f{width}")
        bits = np.concatenate([bits, special.view(f"u{width}")])
    part = np.float32 if dtype is DType.C64 else dtype.numpy
    for pattern in bits[:: max(1, len(bits) // 5000)]:
        one = np.array([pattern, pattern])
        with np.errstate(invalid="ignore"):  # signalling NaNs
            finite = bool(np.isfinite(one.view(part).astype(np.float64)).all())
        spec = TensorSpec("w", dtype, (one.nbytes // dtype.itemsize,))
        try:
            check_finite(spec, flat_bytes(one))
            assert finite, pattern
        except InvalidInput:
            assert not finite, pattern


def test_integers_have_none():
    check_finite(TensorSpec("w", DType.U16, (4,)), np.full(8, 255, np.uint8))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("how", ["mapping", "iterator"])
@pytest.mark.parametrize("mode", ["full", "auto"])
def test_a_store_refuses_and_stays_as_it_was(tmp_path, value, how, mode):
    store = Store(tmp_path / "s")
    good = {"a": np.ones((300, 300), ml_dtypes.bfloat16), "b": np.ones(70_000, np.float32)}
    bad = {name: array.copy() for name, array in good.items()}
    bad["b"][-1] = value
    for before in (None, "step_0"):
        given = bad if how == "mapping" else iter(bad.items())
        with pytest.raises(InvalidInput, match="'b' has a NaN or an infinity"):
            store.publish("step_1", given, mode, finite=True)
        if before is None:
            with pytest.raises(VersionNotSet):
                store.newest()
            store.publish("step_0", good, finite=True)
        assert store.newest() == "step_0"
        assert store.versions() == ["step_0"]
    store.publish("step_1", bad)
    assert store.newest() == "step_1"


def test_what_becomes_infinite_by_conversion_is_refused(tmp_path):
    tensors = {"w": np.full(8, 1e39, np.float64)}
    Store(tmp_path / "s").publish("a", tensors, finite=True)
    with pytest.raises(InvalidInput, match="'w'"):
        Store(tmp_path / "s").publish("b", tensors, dtype="F32", finite=True)


@pytest.mark.parametrize("kind", [Publisher, DepotPublisher])
def test_publishers_refuse_and_keep_the_newest(tmp_path, kind):
    with kind(tmp_path / "run") if kind is Publisher else kind("127.0.0.1:0") as publisher:
        publisher.publish("step_0", {"w": np.ones(100, np.float32)}, finite=True)
        with pytest.raises(InvalidInput, match="'w' has a NaN"):
            publisher.publish("step_1", {"w": np.full(100, np.nan, np.float32)}, finite=True)
        assert publisher.versions[-1] == "step_0"
        publisher.publish("step_1", {"w": np.full(100, np.nan, np.float32)})
