"""Pickled state dicts: real files of Paddle and torch load bit for bit, everything else ends in an error of ours."""

import io
import os
import pickle
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from weightcast.errors import Corrupt, PartCorrupt, PickleRefused
from weightcast.store.pickles.state_dict import load_pickle
from weightcast.tensors.dtypes import DType

GOLDEN = Path(__file__).parent.parent / "golden" / "paddle"

STATE = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(6).astype(ml_dtypes.bfloat16),
    "h": np.arange(6, dtype=np.float16),
    "i": np.arange(5, dtype=np.int64),
    "s": np.array(3.5, dtype=np.float32),
}


def load(path):
    with load_pickle(path) as file:
        return {name: (file.specs[name].dtype, array) for name, array in file}


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        dtype, loaded = found[name]
        assert dtype.numpy == array.dtype == loaded.dtype
        assert loaded.shape == array.shape
        assert loaded.tobytes() == array.tobytes(), name


def saved(tmp_path, value, protocol=4):
    path = tmp_path / "x.pdparams"
    path.write_bytes(value if isinstance(value, bytes) else pickle.dumps(value, protocol=protocol))
    return path


def torch_saved(tmp_path, value, **options):
    path = tmp_path / "x.pdparams"
    torch.save(value, path, **options)
    return path


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# Paddle


@pytest.mark.parametrize("file", ["sd_p2.pdparams", "sd_p4.pdparams"])
def test_a_file_of_real_paddle_loads_bit_for_bit(file):
    assert_same(load(GOLDEN / file), STATE)


def test_files_written_with_numpy_1_load_too(tmp_path):
    data = (GOLDEN / "sd_p2.pdparams").read_bytes()
    assert_same(load(saved(tmp_path, patched(data, b"numpy._core.multiarray", b"numpy.core.multiarray"))), STATE)


def test_the_name_table_of_a_real_paddle_layer_is_dropped():
    found = load(GOLDEN / "lin.pdparams")
    assert [(name, array.shape) for name, (_, array) in found.items()] == [("weight", (2, 3)), ("bias", (3,))]
    assert found["weight"][1].tobytes().hex().startswith("d282d2be6c6251bf")
    assert not found["bias"][1].any()


def test_a_nested_file_of_real_paddle_is_refused_and_says_what_is_not_a_tensor():
    with pytest.raises(PartCorrupt, match=r"'a' is a dict, 'k' is a list"):
        load_pickle(GOLDEN / "nested.pdparams")


class Named:
    """Pickles as Paddle's own tensors do outside of a state dict: (name, array)."""

    def __init__(self, name, array):
        self.pair = (name, array)

    def __reduce__(self):
        return (tuple, (self.pair,))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_paddle_tensor_with_its_own_name_is_the_tensor(tmp_path, protocol):
    found = load(saved(tmp_path, {"a": Named("eager_tmp_0", STATE["w"])}, protocol))
    assert_same(found, {"a": STATE["w"]})


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("code", ["?", "u1", "i1", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "c8"])
def test_every_plain_dtype_in_every_order_loads(tmp_path, rng, protocol, code):
    array = np.frombuffer(rng.bytes(240 * np.dtype(code).itemsize), dtype=np.uint8).view(code).reshape(5, 6, 8)
    if code == "?":
        array = rng.random((5, 6, 8)) < 0.5
    state = {
        "c": array,
        "f": np.asfortranarray(array),
        "t": array.transpose(2, 0, 1),
        "zero": array[:0],
        "one": array[:1, :1, :1],
        "scalar": np.array(array[1, 2, 3]),
    }
    assert_same(load(saved(tmp_path, state, protocol)), state)


def test_large_arrays_are_read_by_range_and_not_held(tmp_path, rng):
    state = {f"t{i}": rng.random(300_000) for i in range(3)}
    with load_pickle(saved(tmp_path, state)) as file:
        buffer = bytearray(800)
        file.read_into("t1", 1600, memoryview(buffer))
        assert bytes(buffer) == state["t1"].tobytes()[1600:2400]
        assert file._held is None


def test_large_protocol_2_arrays_survive_characters_cut_between_stretches(tmp_path):
    state = {"t": np.full(3_000_001, 255, dtype=np.uint8)}  # two bytes each as text, and one before them
    state["t"][0] = 0
    assert_same(load(saved(tmp_path, state, protocol=2)), state)


def test_split_paddle_parameters_are_refused_with_the_way_out(tmp_path):
    state = {"w@@.0": STATE["w"], "UnpackBigParamInfor@@": {"w": {"OriginShape": (12,), "slices": ["w@@.0"]}}}
    with pytest.raises(PartCorrupt, match="protocol=4"):
        load_pickle(saved(tmp_path, state))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([STATE["w"]], "a list, not a dict"),
        (STATE["w"], "not a dict"),
        (None, "a None, not a dict"),
        ({"w": STATE["w"], "epoch": 3, "lr": 0.1, "note": "x"}, "'epoch' is a int, 'lr' is a float, 'note' is a text"),
        ({"w": {"deep": STATE["w"]}}, "'w' is a dict"),
        ({7: STATE["w"]}, "7 is a array"),
        ({"": STATE["w"]}, "proper name"),
        ({"w": b"raw"}, "'w' is a bytes"),
    ],
)
def test_what_is_not_a_dict_of_tensors_is_refused_by_name(tmp_path, value, said):
    with pytest.raises(PartCorrupt, match=said):
        load_pickle(saved(tmp_path, value))


def test_big_endian_arrays_are_refused(tmp_path):
    with pytest.raises(PickleRefused, match="little-endian"):
        load_pickle(saved(tmp_path, {"w": np.arange(3, dtype=">f4")}))


@pytest.mark.parametrize("dtype", ["O", "c16", "S3", "U3", "M8[s]", "f4,i4", "V8"])
def test_other_dtypes_are_refused(tmp_path, dtype):
    array = np.zeros(3, dtype=dtype) if dtype != "O" else np.array([1, "a", None], dtype=object)
    with pytest.raises(PickleRefused, match=r"numpy\.dtype"):
        load_pickle(saved(tmp_path, {"w": array}))


def patched(data, old, new):
    assert data.count(old) == 1
    return data.replace(old, new)


def test_an_array_with_too_few_bytes_for_its_shape_is_refused(tmp_path):
    data = pickle.dumps({"w": np.arange(12, dtype=np.uint8).reshape(3, 4)}, protocol=2)
    with pytest.raises(PartCorrupt, match=r"U8\[3, 5\] in its pickle has 12 bytes, not 15"):
        load_pickle(saved(tmp_path, patched(data, b"K\x03K\x04\x86", b"K\x03K\x05\x86")))


def test_bytes_after_the_end_are_refused(tmp_path):
    with pytest.raises(PartCorrupt, match="3 bytes follow"):
        load_pickle(saved(tmp_path, (GOLDEN / "sd_p4.pdparams").read_bytes() + b"abc"))


def test_the_same_name_twice_is_refused(tmp_path):
    data = patched(
        pickle.dumps({"a": STATE["i"], "b": STATE["i"] + 1}, protocol=2),
        b"X\x01\x00\x00\x00aq\x01",
        b"X\x01\x00\x00\x00qq\x01",
    )
    with pytest.raises(PartCorrupt, match="key 'q' twice"):
        load_pickle(saved(tmp_path, data.replace(b"X\x01\x00\x00\x00bq\x17", b"X\x01\x00\x00\x00qq\x17")))


def test_a_memo_index_beyond_reason_costs_no_memory(tmp_path):
    assert load(saved(tmp_path, b"\x80\x02}r\xff\xff\xff\x7f.")) == {}


@pytest.mark.parametrize("data", [b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", b"\x80\x02X\xff\xff\xff\xff."])
def test_a_length_beyond_the_end_of_the_file_costs_no_memory(tmp_path, data):
    with pytest.raises(PartCorrupt, match="wanted at byte"):
        load_pickle(saved(tmp_path, data))


# What wants more than tensors


class Calls:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def hostile_pickles(target):
    command = f"touch {target}"
    yield "posix.system", pickle.dumps({"w": Calls(os.system, command)}, protocol=4)
    yield "posix.system", pickle.dumps({"w": Calls(os.system, command)}, protocol=2)
    yield "os.system", b"\x80\x02cos\nsystem\nX" + len(command).to_bytes(4, "little") + command.encode() + b"\x85R."
    yield (
        "os.system",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93X" + len(command).to_bytes(4, "little") + command.encode() + b"\x85R.",
    )
    yield "builtins.eval", pickle.dumps({"w": Calls(eval, f"open({str(target)!r}, 'w')")}, protocol=4)
    yield "__builtin__.eval", pickle.dumps({"w": Calls(eval, f"open({str(target)!r}, 'w')")}, protocol=2)
    yield "builtins.getattr", pickle.dumps({"w": Calls(getattr, STATE, "clear")}, protocol=4)
    yield "os.path.os.system", b"\x80\x04\x8c\x07os.path\x8c\x09os.system\x93."
    yield "numpy.ndarray.__class__", b"\x80\x04\x8c\x05numpy\x8c\x11ndarray.__class__\x93."
    yield "os.system", b"\x80\x02(ios\nsystem\n."
    yield "pathlib.PosixPath", pickle.dumps({"w": target}, protocol=4)
    yield "builtins.set", pickle.dumps({"w": {1}}, protocol=2).replace(b"__builtin__", b"builtins")
    yield "the pickle opcode EXT1", b"\x80\x02\x82\x01."
    yield "a persistent id", b"\x80\x02X\x01\x00\x00\x00xQ."
    yield "a persistent id", b"\x80\x02Pos.system\n."
    yield "a call of numpy.ndarray", b"\x80\x02cnumpy\nndarray\n(tR."
    yield "a call of Text", b"\x80\x02X\x01\x00\x00\x00x)R."
    yield "a change of the state of dict", b"\x80\x02}}b."
    yield "a change of the state of numpy.ndarray", b"\x80\x02cnumpy\nndarray\n}b."
    yield "the pickle opcode NEWOBJ", b"\x80\x02cnumpy\nndarray\n)\x81."


def test_a_pickle_that_wants_more_than_tensors_is_refused_by_name_and_does_nothing(tmp_path):
    target = tmp_path / "made-by-the-pickle"
    for wanted, data in hostile_pickles(target):
        with pytest.raises(PickleRefused) as caught:
            load_pickle(saved(tmp_path, data))
        assert caught.value.wanted == wanted
        assert not target.exists()


def test_the_hostile_pickle_would_have_worked_on_the_pickle_module(tmp_path):
    target = tmp_path / "made-by-the-pickle"
    pickle.loads(next(data for wanted, data in hostile_pickles(target) if wanted == "posix.system"))
    assert target.exists()


def test_a_hostile_torch_file_is_refused_by_name_and_does_nothing(tmp_path):
    target = tmp_path / "made-by-the-pickle"
    path = torch_saved(tmp_path, {"w": torch.zeros(2), "x": Calls(os.system, f"touch {target}")})
    with pytest.raises(PickleRefused) as caught:
        load_pickle(path)
    assert caught.value.wanted == "posix.system"
    assert not target.exists()


# torch


def test_a_torch_state_dict_loads_bit_for_bit(tmp_path):
    torch.manual_seed(0)
    base = torch.randn(6, 8)
    state = OrderedDict(
        f32=base,
        bf16=base.bfloat16(),
        f16=base.half(),
        f64=base.double(),
        c64=torch.complex(base, base),
        f8=base.to(torch.float8_e4m3fn),
        f8b=base.to(torch.float8_e5m2),
        u16=torch.tensor([0, 1, 65535], dtype=torch.uint16),
        i64=torch.arange(5),
        i8=torch.arange(5, dtype=torch.int8),
        u8=torch.arange(5, dtype=torch.uint8),
        bools=base > 0,
        scalar=torch.tensor(2.5),
        empty=torch.empty(0, 4),
        parameter=torch.nn.Parameter(base.clone()),
        transposed=base.t(),
        sliced=base[1:5:2, 2:7:3],
        row=base[3],
        permuted=torch.randn(2, 3, 4).permute(2, 0, 1),
    )
    found = load(torch_saved(tmp_path, state))
    assert list(found) == list(state)
    for name, tensor in state.items():
        dtype, array = found[name]
        assert array.shape == tuple(tensor.shape)
        assert array.tobytes() == bits(tensor), name
        assert dtype.itemsize == tensor.element_size()
    assert [found[name][0] for name in ("bf16", "f8", "u16", "bools")] == [DType.BF16, DType.F8_E4M3, DType.U16, DType.BOOL]


def test_a_module_with_tied_weights_loads_both_names(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    found = load(torch_saved(tmp_path, model.state_dict()))
    assert found["0.weight"][1].tobytes() == found["1.weight"][1].tobytes() == bits(model[0].weight)


def test_an_old_torch_file_is_refused_with_the_way_out(tmp_path):
    path = torch_saved(tmp_path, {"w": torch.zeros(2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(PartCorrupt, match="old form"):
        load_pickle(path)


def rezipped(tmp_path, source, change):
    """Copy a zip file; `change` gets (name, data) and gives (name, data, compression), or None to leave it out."""
    path = tmp_path / f"changed-{len(list(tmp_path.iterdir()))}.pdparams"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            changed = change(info.filename, old.read(info))
            if changed:
                new.writestr(changed[0], changed[1], compress_type=changed[2])
    return path


def test_a_torch_zip_that_torch_did_not_write_is_refused(tmp_path):
    source = torch_saved(tmp_path, {"w": torch.arange(4.0)})

    def changed(wanted, **change):
        def apply(name, data):
            if not name.endswith(wanted):
                return name, data, zipfile.ZIP_STORED
            return (name, change.get("data", data), change.get("how", zipfile.ZIP_STORED)) if change else None

        return rezipped(tmp_path, source, apply)

    assert_same(load(changed("no such member")), {"w": np.arange(4, dtype=np.float32)})
    for path, said in (
        (changed("data/0", how=zipfile.ZIP_DEFLATED), "compressed"),
        (changed("data/0"), "storage '0' is missing"),
        (changed("data/0", data=bytes(15)), "has 15 bytes, not 16"),
        (changed("data.pkl"), "no data.pkl"),
        (changed("byteorder", data=b"big"), "little-endian"),
    ):
        with pytest.raises(PartCorrupt, match=said):
            load_pickle(path)


def test_a_member_that_only_claims_to_be_compressed_is_refused(tmp_path):
    path = torch_saved(tmp_path, {"w": torch.arange(4.0)})
    data = bytearray(path.read_bytes())
    entry = data.rfind(b"PK\x01\x02", 0, data.rfind(b"/data/0"))
    data[entry + 10] = zipfile.ZIP_DEFLATED
    with pytest.raises(PartCorrupt, match="compressed"):
        load_pickle(saved(tmp_path, bytes(data)))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"K\x00K\x02K\x03\x86", b"K\x01K\x02K\x03\x86", "reaches beyond"),  # offset
        (b"K\x02K\x03\x86", b"K\x02K\x04\x86", "reaches beyond"),  # shape
        (b"K\x03K\x01\x86", b"K\x04K\x01\x86", "reaches beyond"),  # strides
        (b"K\x02K\x03\x86", b"K\x63K\x03\x86", "reaches beyond"),
        (b"K\x03K\x01\x86", b"K\x01\x85", "the layout of a tensor"),  # one stride for two sizes
        (b"K\x06t", b"K\x07t", "has 24 bytes, not 28"),  # elements of the storage
        (b"K\x02K\x03\x86", b"J\xff\xff\xff\xffK\x03\x86", "counts"),
    ],
)
def test_a_torch_tensor_that_reaches_beyond_its_storage_is_refused(tmp_path, old, new, said):
    source = torch_saved(tmp_path, {"w": torch.arange(6.0).reshape(2, 3)})

    def change(name, data):
        return name, patched(data, old, new) if name.endswith("data.pkl") else data, zipfile.ZIP_STORED

    with pytest.raises(Corrupt, match=said):
        load_pickle(rezipped(tmp_path, source, change))


def test_a_tensor_expanded_beyond_its_storage_is_refused(tmp_path):
    path = torch_saved(tmp_path, {"w": torch.zeros(1).expand(1 << 40)})
    with pytest.raises(PartCorrupt, match="expanded from a smaller storage"):
        load_pickle(path)


# Damage


def damaged(data, rng, count):
    for _ in range(count):
        flipped = bytearray(data)
        for at in rng.integers(len(data), size=int(rng.integers(1, 4))):
            flipped[at] ^= int(rng.integers(1, 256))
        yield bytes(flipped)
        yield data[: int(rng.integers(len(data)))]


def fuzz_sources():
    yield from (
        (GOLDEN / name).read_bytes() for name in ("sd_p2.pdparams", "sd_p4.pdparams", "nested.pdparams", "lin.pdparams")
    )
    yield pickle.dumps({"f": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "w": np.arange(3)}, protocol=5)
    buffer = io.BytesIO()
    weight = torch.arange(12.0).reshape(3, 4)
    torch.save(OrderedDict(w=weight, t=weight.t(), p=torch.nn.Parameter(weight[1].bfloat16())), buffer)
    yield buffer.getvalue()


@pytest.mark.parametrize("times", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_damage_of_any_kind_ends_in_an_error_of_ours_or_in_tensors(tmp_path, rng, times):
    outcomes = {True: 0, False: 0}
    for source in fuzz_sources():
        for data in damaged(source, rng, times):
            path = saved(tmp_path, data)
            try:
                load(path)
                outcomes[True] += 1
            except Corrupt:
                outcomes[False] += 1
    assert outcomes[False] > 1.5 * times  # flips inside of array data go unnoticed: a pickle has no digests
    assert outcomes[True] > 0


@pytest.mark.parametrize("times", [1000, pytest.param(3000, marks=pytest.mark.slow)])
def test_random_opcodes_end_in_an_error_of_ours(tmp_path, rng, times):
    alphabet = np.frombuffer(b"}](NtuseaR.bQqh\x85\x86\x87\x93\x94\x8c\x01\x02K", dtype=np.uint8)
    start = b"\x80\x04\x8c\x05numpy\x94\x8c\x05dtype\x93\x94\x8c\x02f4\x94"
    for _ in range(times):
        path = saved(tmp_path, start + rng.choice(alphabet, size=int(rng.integers(1, 25))).tobytes() + b".")
        try:
            assert load(path) == {}
        except Corrupt:
            continue


def test_a_missing_file_and_a_pipe_are_errors_of_ours(tmp_path):
    with pytest.raises(PartCorrupt, match="missing"):
        load_pickle(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PartCorrupt, match="regular"):
        load_pickle(tmp_path / "pipe")


def test_a_file_that_shrinks_while_it_is_open_is_an_error_of_ours(tmp_path):
    path = shutil.copy(GOLDEN / "sd_p4.pdparams", tmp_path / "x.pdparams")
    with load_pickle(path) as file:
        os.truncate(path, 300)
        with pytest.raises(PartCorrupt, match="ends at byte"):
            dict(file)
