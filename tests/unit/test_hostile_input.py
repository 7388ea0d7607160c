"""Input from outside that was made to do harm: each ends in an error of ours or is understood, soon and in little memory."""

from __future__ import annotations

import copy
import json
import os
import time
import tracemalloc

import msgspec
import numpy as np
import pytest
from delta_forgery import Forged, Streams
from depot_stand import ask, raw, serving, status_of
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast import LiveModel, Store
from weightcast.clock import Deadline
from weightcast.depot.stored import StoredShelf
from weightcast.engines.embedded.model_config import ModelConfig
from weightcast.engines.embedded.replica.served import check_transfer
from weightcast.errors import DeltaDoesNotFit, ManifestCorrupt, StorageFailed, WeightcastError
from weightcast.publish.publisher import Publisher
from weightcast.store.checkpoint import Checkpoint
from weightcast.store.version_file import read_version_file, step_of
from weightcast.tensors.digest import DEFAULT, bytes_digest, piece_digests
from weightcast.transports.http.client import DepotClient
from weightcast.transports.legacy_config import LegacyConfig, with_options
from weightcast.transports.registry import open_receiver
from weightcast.wire.decoding import decode
from weightcast.wire.depot import Ack, Newest
from weightcast.wire.manifest import BoxEntry, Manifest, decode_manifest, encode_manifest

DIGITS = "9" * 5000
DEEP = "[" * 100_000 + "]" * 100_000
MOST_NBYTES = 16 << 20


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    store.publish("step_1", {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}, files={"config.json": b"{}"})
    return store


def traced(call):
    """What a call returns or raises, if it takes little memory."""
    tracemalloc.start()
    try:
        return call()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_NBYTES


def ours(call, says=""):
    """Call something that may succeed, or fail with an error of ours."""
    try:
        call()
    except WeightcastError as error:
        message = str(error)
    else:
        return
    assert says in message
    assert len(message) < 20_000


# -- version files ---------------------------------------------------------------------------------------------------

LAUGHS = "\n".join(
    ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    + ["step: *a8"]
)


@pytest.mark.parametrize(
    "text",
    [
        f"step: {DIGITS}", f"step: '{DIGITS}'", f"version: {DIGITS}", f"step: -{DIGITS}", f"step: 0x{'f' * 4000}",
        f"version: {'a' * 3000}", f"step: 1{':59' * 1000}", LAUGHS, "step: &a 1\nversion: *a", "version: *a",
        "? [step]\n: 1", "step: " + "[" * 3000, "step: 1\nother: " + "{a: " * 800, "step: !!python/object:os.system 1",
        "step: !!int foo", "version: !!binary /w==", "step: 2026-11-17", "version: 1.5", "step: 1\n---\nstep: 2",
        "a: b\n" * 100_000, "\0step: 1", 'version: "\\UFFFFFFFF"', 'other: "\\U80000000"',
    ],
)  # fmt: skip
def test_a_hostile_version_yaml_is_an_error_of_ours(tmp_path, text):
    (tmp_path / "version.yaml").write_text(text)
    with pytest.raises(WeightcastError) as caught:
        traced(lambda: read_version_file(tmp_path))
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("text", [DIGITS, "a" * 5000, "\u0665" * 10])
def test_a_hostile_version_txt_is_an_error_of_ours_wherever_it_is_read(tmp_path, text):
    (tmp_path / "version.txt").write_text(text)
    for read in (lambda: read_version_file(tmp_path), Store(tmp_path).newest, Store(tmp_path).migrate):
        ours(lambda read=read: traced(read))


def test_a_version_id_of_many_digits_gives_a_step_that_a_manifest_can_hold(store):
    assert step_of("9" * 128, default=7) == 7
    store.publish("9" * 128, {"a": np.zeros(3, np.float32)}, "full")
    assert store.newest() == "9" * 128


@pytest.mark.parametrize("name", ["version.yaml", "versions/step_1/manifest.json", "versions/step_1/config.json"])
def test_a_pipe_in_the_place_of_a_file_is_an_error_and_keeps_nobody_waiting(store, name):
    (store.path / name).unlink()
    os.mkfifo(store.path / name)
    calls = [store.newest, lambda: store.manifest("step_1"), lambda: store.verify("step_1"), store.listings]
    for call in calls:
        ours(call, "regular file")
    listed = store.listings()[0]
    assert listed.error or name == "version.yaml" or not store.verify("step_1").ok


# -- manifests -------------------------------------------------------------------------------------------------------


def resealed(data: bytes) -> bytes:
    """Bytes behind a seal that is right."""
    start = b'{"seal":"xxh3-128:' + b"0" * 32
    unsealed = start + data[len(start) :]
    return unsealed.replace(b"xxh3-128:" + b"0" * 32, bytes_digest(unsealed).encode(), 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b'"step_1"', b'"step\xff1"'),
        lambda data: data.replace(b'"version"', b'"other":' + DEEP.encode() + b',"version"'),
        lambda data: data.replace(b'"metadata":{}', b'"metadata":{"a":"\\ud800"}'),
        lambda data: data.replace(b'"name":"a"', b'"name":"\\ud800"'),
        lambda data: data.replace(b'"sequence":1', b'"sequence":' + DIGITS.encode()),
        lambda data: data.replace(b'"step":1', b'"step":1e400'),
        lambda data: data[:-200],
        lambda data: data.replace(b"{", b"\0{"),
    ],
)
def test_a_resealed_manifest_that_is_no_message_is_a_corrupt_one(store, change):
    path = store.path / "versions" / "step_1" / "manifest.json"
    data = resealed(change(path.read_bytes()))
    with pytest.raises(ManifestCorrupt):
        traced(lambda: decode_manifest(data, path))
    path.write_bytes(data)
    assert store.listings()[0].error
    with serving(store) as depot:
        assert ask(depot, "/v1/versions").json == {"newest": None, "versions": []}
        assert ask(depot, "/versions/step_1/manifest.json").status == 502


def paths_in(tree, path=()):
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from paths_in(value, (*path, key))


HOSTILE = st.sampled_from(
    [None, True, -1, 0, 1, 1 << 31, (1 << 63) - 1, -(1 << 63), 1e308, -1e308, 0.5, "", "x" * 3000, "../../etc/passwd", "\0",
     "a/b", "xxh3-128:", "blake3:" + "0" * 64, [], {}, [[]], [-1], [1 << 40] * 40, {"": ""}, "delta", "full"]
)  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A store with a full version and a delta, and their manifests as they were sealed."""
    store = Store(tmp_path_factory.mktemp("changed") / "store")
    base = {"a": np.arange(6000, dtype=np.float32), "b": np.ones((2, 3), np.int16)}
    store.publish("step_1", base, files={"config.json": b"{}"})
    base["a"][7] += 1
    store.publish("step_2", base, "delta")
    return store, {version: encode_manifest(store.manifest(version)) for version in ("step_1", "step_2")}


def read_as_a_depot(store):
    with StoredShelf(store.path) as shelf:
        shelf.offers()
        for version in ("step_1", "step_2"):
            with shelf.holding(version) as holding:
                for file, nbytes in holding.files.items():
                    holding.views(file, 0, min(nbytes, 10), deadline=Deadline.after(10))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_manifest_with_any_fields_replaced_is_refused_or_harmless(published, data):
    store, sealed = published
    version = data.draw(st.sampled_from(sorted(sealed)))
    path = store.path / "versions" / version / "manifest.json"
    tree = json.loads(sealed[version])
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from([place for place in paths_in(tree) if place and place[0] != "seal"]))
        around = tree
        for key in way:
            around = around[key]
        around[last] = copy.deepcopy(data.draw(HOSTILE))
    changed = resealed(json.dumps(tree, separators=(",", ":")).encode())
    path.write_bytes(changed)
    try:
        ours(lambda: decode_manifest(changed, path))
        ours(lambda: store.verify("step_2"))
        ours(lambda: store.load(version))
        ours(lambda: read_as_a_depot(store))
    finally:
        path.write_bytes(sealed[version])


# -- checkpoints and models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [DEEP, '{"weight_map": ' + DEEP + "}", f'{{"weight_map": {DIGITS}}}', "[]", "\xff", '{"weight_map": 1}']
)
def test_a_hostile_index_of_a_checkpoint_is_an_error_of_ours(store, text):
    directory = store.path / "versions" / "step_1"
    (directory / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(WeightcastError):
        traced(lambda: Checkpoint(directory))


@pytest.mark.parametrize("text", [DEEP, f'{{"hidden_size": {DIGITS}}}', "\xff", "[]", '{"hidden_size": 1e400}', "{"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_hostile_settings_of_a_model_are_an_error_of_ours(tmp_path, name, text):
    tokenizer = pytest.importorskip("weightcast.control.tokenizer")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    for read in (ModelConfig.read, tokenizer._read_json):
        ours(lambda read=read: traced(lambda: read(tmp_path if read == ModelConfig.read else tmp_path / name)))


@pytest.mark.parametrize(
    "header",
    [
        DEEP,
        f'{{"a": {DIGITS}}}',
        "\xff",
        '{"a": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [false, 4]}}',
    ],
)
def test_a_hostile_safetensors_header_is_an_error_of_ours(tmp_path, header):
    data = header.encode("latin-1")
    (tmp_path / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(4))
    with pytest.raises(WeightcastError):
        traced(lambda: Checkpoint(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json", "tokenizer_config.json"])
def test_a_settings_file_of_a_checkpoint_that_is_too_large_is_not_read(store, name):
    tokenizer = pytest.importorskip("weightcast.control.tokenizer")
    directory = store.path / "versions" / "step_1"
    (directory / name).touch()
    os.truncate(directory / name, (64 << 20) + 1)
    read = {
        "model.safetensors.index.json": lambda: Checkpoint(directory),
        "config.json": lambda: ModelConfig.read(directory),
    }
    with pytest.raises(StorageFailed, match="larger than"):
        traced(read.get(name, lambda: tokenizer._read_json(directory / name)))


def test_a_tensor_of_very_many_dimensions_is_refused_soon(store):
    """To multiply 100,000 sizes of 18 digits takes 30 s, in which no other thread runs."""
    path = store.path / "versions" / "step_1" / "manifest.json"
    manifest = store.manifest("step_1")
    shape = (10**18,) * 100_000
    entry = msgspec.structs.replace(manifest.tensors[0], shape=shape)
    boxes = {entry.name: (BoxEntry(start=(0,) * len(shape), shape=shape, ranks=(0,), offsets=(0,), sum=entry.sum),)}
    began = time.monotonic()
    for fields in ({}, {"parts": (), "boxes": boxes}):
        changed = msgspec.structs.replace(manifest, tensors=(entry,), **fields)
        with pytest.raises(ManifestCorrupt, match="dimensions"):
            decode_manifest(encode_manifest(changed), path)
    assert time.monotonic() - began < 10


def test_the_message_about_a_manifest_lists_some_of_its_problems():
    error = ManifestCorrupt("manifest.json", [f"tensor {number} is wrong" for number in range(10_000)])
    assert len(error.problems) == 10_000
    assert "and 9900 more problems" in str(error)
    assert len(str(error)) < 10_000


@pytest.mark.parametrize("name", ["n" * 300, "n" * 5000, "file/below"])
def test_a_store_at_a_path_that_cannot_be_is_an_error_of_ours(tmp_path, name):
    (tmp_path / "file").touch()
    store = Store(tmp_path / name)
    for call in (store.newest, store.versions, store.listings, lambda: store.manifest("step_1")):
        with pytest.raises(WeightcastError):
            call()


# -- deltas ----------------------------------------------------------------------------------------------------------


def test_a_delta_about_larger_tensors_than_its_manifest_is_refused_before_it_is_unpacked(store):
    """A rank that does not hold all tensors decodes a delta without its base. So its manifest bounds the delta."""
    first = {"w": np.zeros(1024, np.uint8), "extra": np.zeros(8, np.uint8)}
    second = {name: array.copy() for name, array in first.items()}
    second["w"][5] = 1
    store.publish("step_2", first, "full")
    store.publish("step_3", second, "delta")
    path = store.path / "versions" / "step_3" / "manifest.json"
    manifest = store.manifest("step_3")
    lanes, count = 1 << 24, 20
    frame = Streams(lanes, bytes([0x80, 0x80, 0x80, 0x08, 0]), bytes(lanes), b"", bytes(lanes // 2), b"", b"").frame()
    tensors, ones = [["extra", "U8", [8]], ["w", "U8", [1 << 40]]], [1] * count
    starts, many = [number * lanes for number in range(count)], [lanes] * count
    roots = [manifest.base.root_digest, manifest.root_digest]
    forged = Forged(0, roots, tensors, ones, [0] * count, ones, starts, many, many, [frame] * count).sealed()
    assert len(forged) < 32_000
    (path.parent / manifest.payloads[0].file).write_bytes(forged)
    payload = msgspec.structs.replace(
        manifest.payloads[0], nbytes=len(forged), digest=bytes_digest(forged), pieces=piece_digests(forged, DEFAULT)
    )
    path.write_bytes(encode_manifest(msgspec.structs.replace(manifest, payloads=(payload,))))

    weights = {"w": np.full(1024, 7, np.uint8)}
    with serving(store) as depot:
        live = LiveModel(weights, source=depot.url, ignore=["extra"])
        live.update("step_2")
        with pytest.raises(DeltaDoesNotFit, match="w"):
            traced(lambda: live.update("step_3"))
    assert live.version == "step_2"
    assert not weights["w"].any()


# -- URLs ------------------------------------------------------------------------------------------------------------

URLS = [
    "http://[::1", "http://]", "http://[::1]:99999", "http://a:b", "http://a\u2100.example", "file://[", "nixl://[::1",
    "shares+http://[::1", "ipc://[", "snapshot://[?id=0", "https://a:-1", "http://h?connections=" + DIGITS, "http://h?stall_s=nan",
    "http://h?" + "&".join(f"a{n}=1" for n in range(2000)), "http://h?bucket_nbytes=" + "9" * 30, "legacy-ipc://[?id=0",
    "http://" + ",".join(["h"] * 3000) + "?spread=" + DIGITS, "checkpoint://[", "://", "http://", "http://\0", "http://h\n",
    "file:///a%00b", "checkpoint:///a%00b", "snapshot:///a%00b?id=0", "ipc:///a%00b", "legacy-ipc:///a%00b?id=0",
]  # fmt: skip


@pytest.mark.parametrize("url", URLS)
def test_a_hostile_url_is_refused_wherever_it_is_read(url):
    for read in (
        lambda: open_receiver(url, rank=0).close(),
        lambda: check_transfer(url, "http"),
        lambda: with_options(url, {"a": "1"}),
        lambda: LegacyConfig.parse("{}").applied_to(url),
        lambda: DepotClient(url).close(),
        lambda: Publisher(url).close(),
    ):
        ours(read)


# -- requests to a depot ---------------------------------------------------------------------------------------------

PATHS = [
    f"/v1/newest?after=a&wait={DIGITS}",
    "/v1/newest?wait=nan", "/v1/newest?wait=1e999", "/v1/newest?wait=-1", "/versions/%ff/manifest.json",
    f"/versions/{DIGITS}/manifest.json",
    "/versions/%00/manifest.json", "/versions/..%2f..%2fetc/manifest.json", "/versions/step_1/..%2fmanifest.json",
    "http://[::1/v1/versions",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_hostile_question_is_refused_and_not_a_mistake_of_the_depot(store, path):
    with serving(store) as depot:
        answer = raw(depot, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert 400 <= status_of(answer) < 500
        assert ask(depot, "/health").status == 200


BODIES = [
    b"",
    b"{",
    b"\xff",
    b'"\\ud800"',
    DEEP.encode(),
    b'{"boxes":' + DEEP.encode() + b"}",
    b'{"root_digest":"\xff"}',
    DIGITS.encode(),
]


@pytest.mark.parametrize("body", BODIES)
def test_a_hostile_body_is_refused_and_not_a_mistake_of_the_depot(store, body):
    with serving(store) as depot:
        assert 400 <= ask(depot, "/v1/acks", "POST", body).status < 500


@pytest.mark.parametrize(
    "value", ["bytes=" + DIGITS + "-", "bytes=0-" + DIGITS, "bytes=-" + DIGITS, "bytes=\u00b2-", "bytes=" + "1-2," * 5000]
)
def test_a_hostile_range_is_the_whole_file_or_none_of_it(store, value):
    with serving(store) as depot:
        answer = raw(
            depot,
            b"GET /versions/step_1/config.json HTTP/1.1\r\nHost: x\r\nConnection: close\r\nRange: "
            + value.encode("latin-1") + b"\r\n\r\n",
        )  # fmt: skip
        assert status_of(answer) in (200, 416)


# -- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Ack, Newest, Manifest, list[str]])
@pytest.mark.parametrize("body", [b for b in BODIES if b])
def test_a_message_that_is_none_is_always_the_same_error(kind, body):
    with pytest.raises(msgspec.DecodeError):
        traced(lambda: decode(body, kind))
