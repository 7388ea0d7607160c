"""docs/delta-format.md says what the bytes are: a reader written from it alone reads them, and its examples are real."""

import itertools
import re
from pathlib import Path

import delta_reader
import ml_dtypes
import numpy as np
import pytest
import zstandard
from delta_samples import ODD_32, chunks_of, lanes_of, pair, state_chains
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast import delta
from weightcast.delta import container, streams
from weightcast.delta.container import PACKINGS
from weightcast.tensors.dtypes import DType
from weightcast.tensors.kernels import kernels
from weightcast.tensors.lanes import kind_of, lanes_per_element
from weightcast.tensors.spec import MAX_DIMS

PAGE = Path(__file__).parents[2] / "docs" / "delta-format.md"


def bytes_of(state):
    return {name: array.tobytes() for name, array in state.items()}


def check(base, new, packing, chunk=1 << 23):
    """The other reader gets the same state out of the bytes."""
    with chunks_of(chunk):
        packed = delta.encode(base, new, packing=packing)
    assert delta_reader.read(packed, bytes_of(base)) == bytes_of(new)
    return packed


# -- the other reader ----------------------------------------------------------------------------------------------


@pytest.mark.untraced
@settings(max_examples=60)
@given(chain=state_chains(), packing=st.sampled_from(PACKINGS), chunk=st.sampled_from([64, 500, 1 << 23]))
def test_another_reader_gets_the_same_state(chain, packing, chunk):
    check(*chain, packing, chunk)


def dtypes_and_packings():
    """All combinations; those that differ from others in the packing alone are among the slow ones."""
    for number, (dtype, packing) in enumerate(itertools.product(DType, PACKINGS)):
        usual = number % len(PACKINGS) == number // len(PACKINGS) % len(PACKINGS)
        yield pytest.param(dtype, packing, marks=[] if usual else pytest.mark.slow)


@pytest.mark.untraced
@pytest.mark.parametrize(("dtype", "packing"), list(dtypes_and_packings()))
def test_another_reader_understands_every_dtype_in_every_form(dtype, packing, rng):
    near, far = pair(rng, dtype, (6000,), density=0.02), pair(rng, dtype, (5000,), density=1, far=True)
    close = pair(rng, dtype, (5000,), density=1)
    base, new = ({"near": near[side], "far": far[side], "close": close[side]} for side in (0, 1))
    packed = check(base, new, packing)
    forms = {one.form for one in delta.inspect(packed).tensors}
    assert forms >= {"sparse", "dense"} or forms >= {"sparse", "raw"} or dtype is DType.BOOL
    check(base, new, packing, chunk=1024)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", [DType.F32, DType.C64, DType.F64, DType.U32])
def test_another_reader_understands_the_odd_patterns(dtype, packing):
    old = np.repeat(ODD_32, len(ODD_32) + 1)
    new = np.tile(np.append(ODD_32, [0xDEADBEEF]).astype(np.uint32), len(ODD_32))
    base, state = ({"w": lanes.view(dtype.numpy)} for lanes in (old, new))
    check(base, state, packing)


def test_another_reader_understands_a_delta_of_every_form(rng):
    found = set()
    for density, far in [(0.001, False), (1, False), (1, True)]:
        old, new = pair(rng, DType.F32, (5000,), density=density, far=far)
        found |= {one.form for one in delta.inspect(check({"w": old}, {"w": new}, "gaps")).tensors}
    assert found == {"sparse", "dense", "raw"}


def test_the_other_reader_refuses_damage_and_another_base(rng):
    """It is a reader, not a rubber stamp."""
    old, new = pair(rng, DType.BF16, (300,), density=0.1)
    packed = delta.encode({"w": old}, {"w": new})
    for at in range(0, len(packed), 7):
        if not 11 <= at < 16:
            damaged = packed[:at] + bytes([packed[at] ^ 0x10]) + packed[at + 1 :]
            with pytest.raises(ValueError):  # noqa: PT011 - struct's and zstd's among them
                delta_reader.read(damaged, {"w": old.tobytes()})
    with pytest.raises(delta_reader.Bad, match="another base"):
        delta_reader.read(packed, {"w": new.tobytes()})


# -- the page ------------------------------------------------------------------------------------------------------


def hex_blocks():
    """The dumps on the page, as bytes."""
    blocks = re.findall(r"^```hex\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [bytes.fromhex("".join(line.partition("  ")[2] for line in block.splitlines())) for block in blocks]


def example():
    old = [[0x3F80, 0x3FC0, 0x3E80, 0x4000], [0x3FA0, 0x3EC0, 0xBF80, 0x0000]]
    new = [[0x3F80, 0x3FC1, 0x3E80, 0x4000], [0x3F9F, 0x3EC0, 0x3F80, 0x0000]]
    return [
        {"bias": np.zeros(2, np.float32), "w": np.array(lanes, np.uint16).view(ml_dtypes.bfloat16)} for lanes in (old, new)
    ]


def test_the_example_on_the_page_is_what_the_encoder_writes():
    packed, table = hex_blocks()
    base, new = example()
    assert delta.encode(base, new) == packed  # if zstd was upgraded: check the next test, and dump it anew
    offset, size = np.frombuffer(packed[-40:], "<u8", 1)[0], np.frombuffer(packed[-32:], "<u4", 1)[0]
    assert zstandard.decompress(packed[offset : offset + size]) == table


def test_the_example_on_the_page_can_be_read():
    packed, _ = hex_blocks()
    base, new = example()
    assert delta_reader.read(packed, bytes_of(base)) == bytes_of(new)
    delta.apply(base, packed)
    assert bytes_of(base) == bytes_of(new)
    offsets = [line.partition("  ")[0] for line in PAGE.read_text().split("```hex\n")[1].splitlines()]
    assert offsets[: len(packed) // 16 + 1] == [f"{16 * row:04x}" for row in range(len(packed) // 16 + 1)]


@pytest.mark.parametrize("backend", ["compiled", "numpy"])
def test_the_numbers_on_the_page_are_coded_as_it_says(backend):
    chosen = kernels(backend)
    symbols, low = chosen.put_numbers(np.array([3, 70, 9], np.uint32), np.array([3]), np.array([2], np.uint8))
    assert (symbols.tobytes().hex(" "), low.tobytes().hex()) == ("00 10 02", "3b")
    symbols, low = chosen.put_numbers(np.array([1000], np.uint32), np.array([1]), np.zeros(1, np.uint8))
    assert (symbols.tolist(), low.tolist()) == ([63], [40])


@pytest.mark.parametrize("backend", ["compiled", "numpy"])
@given(
    numbers=st.lists(
        st.integers(0, 2**32 - 1) | st.integers(0, 40) | st.sampled_from([2**k for k in range(32)]), max_size=30
    ),
    shift=st.integers(0, 24),
)
def test_numbers_are_coded_as_the_page_says(backend, numbers, shift):
    shifts = np.full(len(numbers), shift, np.uint8)
    symbols, low = kernels(backend).put_numbers(np.array(numbers, np.uint32), np.ones(len(numbers), np.int64), shifts)
    assert delta_reader.take_numbers(symbols.tobytes(), shifts.tolist(), low.tobytes()) == numbers
    assert kernels(backend).take_numbers(symbols, np.ones(len(numbers), np.int64), shifts, low).tolist() == numbers


def test_the_table_of_dtypes_on_the_page_is_complete_and_right():
    rows = re.findall(
        r"^\| (`[A-Z`0-9_, ]+) \| (\d+) \| (\d) \| (yes|no) \| (\d+), (\w+) \| (\d+) \|$", PAGE.read_text(), re.M
    )
    seen = {}
    for names, lane_bits, per_element, signed, shift, mask, classes in rows:
        for name in re.findall(r"`(\w+)`", names):
            seen[DType(name)] = (int(lane_bits), int(per_element), signed == "yes", int(shift), int(mask, 16), int(classes))
    expected = {}
    for dtype in DType:
        kind = kind_of(dtype)
        expected[dtype] = (
            8 * kind.nbytes, lanes_per_element(dtype), kind.signed_magnitude, kind.shift, kind.mask, kind.classes
        )  # fmt: skip
    assert seen == expected


def test_the_limits_on_the_page_are_those_of_the_code():
    page = PAGE.read_text()
    assert f"Format {container.FORMAT}." in page
    assert (container.MAX_CHUNK_LANES, container.MAX_TABLE_NBYTES) == (1 << 24, 1 << 28)
    assert "| lanes of all blocks of a chunk | 2^24 " in page
    assert "| the table, decoded | 2^28 bytes |" in page
    assert (container.BLOCK_LANES, container.MAX_TABLE_RATIO) == (1 << 16, 1024)
    assert (container.SLICED_NBYTES, container.MAX_SLICES) == (256, 64)
    assert "blocks of 2^16 lanes, and those of 256 bytes or more into 64 blocks besides" in page
    assert "weightcast cuts tensors of 256 bytes or more, into at most 64 parts" in page
    assert f"| dimensions | {MAX_DIMS} |" in page
    assert streams._MAX_SHIFT == 24
    assert "shift**, at most 24" in page


@pytest.mark.parametrize(("dtype", "lanes"), [("BF16", [2, 3, 6, 7]), ("F64", [4, 5, 6, 7, 12, 13, 14, 15])])
def test_the_box_on_the_page_has_these_lanes(dtype, lanes):
    box = delta_reader.Box([0, 2], [2, 2])
    block = delta_reader.Block(delta_reader.Tensor("w", dtype, [2, 4], "w", [box]), 1, 0, len(lanes), 1)
    assert [block.place(lane) for lane in range(len(lanes))] == lanes


@pytest.mark.untraced
@settings(max_examples=30)
@given(chain=state_chains(), packing=st.sampled_from(PACKINGS), dim=st.integers(0, 2), parts=st.integers(1, 9))
def test_another_reader_understands_slices(chain, packing, dim, parts):
    base, new = chain
    with chunks_of(200):
        packed = delta.encode(base, new, packing=packing, slicing=delta.Slicing((delta.Cut(("*",), dim, parts),)))
    assert delta_reader.read(packed, bytes_of(base)) == bytes_of(new)


def test_the_map_puts_floats_in_order_and_is_its_own_inverse():
    for dtype in (DType.BF16, DType.F16, DType.F8_E4M3):
        kind = delta_reader.Kind.of(dtype)
        lanes = range(1 << (8 * dtype.itemsize))
        assert all(kind.map(kind.map(lane)) == lane for lane in lanes)
        with np.errstate(invalid="ignore"):
            values = np.arange(len(lanes), dtype=lanes_of(dtype)).view(dtype.numpy).astype(np.float64)
        half = len(lanes) // 2
        order = sorted(
            (lane for lane in lanes if np.isfinite(values[lane])), key=lambda lane: (kind.map(lane) + half) % (2 * half)
        )
        assert (np.diff(values[order]) >= 0).all()
