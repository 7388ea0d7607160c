"""A manifest is believed only if every byte and every claim in it holds."""

import json

import msgspec
import numpy as np
import pytest

from weightcast.errors import InvalidInput, ManifestCorrupt, UnsupportedFormat
from weightcast.wire.manifest import FORMAT, Manifest, check_version_id, decode_manifest, encode_manifest


@pytest.fixture
def manifest(store, rng) -> Manifest:
    tensors = {
        "a": rng.standard_normal((3, 5)),
        "b.weight": rng.standard_normal(4).astype(np.float32),
        "ü": np.zeros(3, np.uint8),
    }
    tensors["tied"] = tensors["a"]
    return store.publish("step_7", tensors, files={"config.json": b"{}"}, metadata={"run": "x"})


def test_it_reads_back_as_it_was_written(manifest):
    assert decode_manifest(encode_manifest(manifest), "m") == manifest


def test_any_flipped_byte_is_noticed(manifest):
    data = encode_manifest(manifest)
    for position in range(len(data)):
        for bit in (0, 5):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with pytest.raises(ManifestCorrupt):
                decode_manifest(bytes(changed), "m")


def test_any_truncation_is_noticed(manifest):
    data = encode_manifest(manifest)
    for length in range(len(data)):
        with pytest.raises(ManifestCorrupt):
            decode_manifest(data[:length], "m")


def test_a_newer_format_is_refused_with_advice(manifest):
    newer = msgspec.structs.replace(manifest, format=FORMAT + 1)
    with pytest.raises(UnsupportedFormat, match="Upgrade weightcast"):
        decode_manifest(encode_manifest(newer), "m")


def test_fields_of_a_later_release_are_skipped(manifest):
    fields = json.loads(encode_manifest(manifest))
    del fields["seal"]

    class Later(Manifest, frozen=True, kw_only=True):
        colour: str = "blue"

    later = msgspec.convert(fields | {"colour": "red"}, Later)
    assert decode_manifest(encode_manifest(later), "m") == manifest


def change_tensor(manifest, **fields):
    first = msgspec.structs.replace(manifest.tensors[0], **fields)
    return msgspec.structs.replace(manifest, tensors=(first, *manifest.tensors[1:]))


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (lambda m: change_tensor(m, nbytes=8), "has 8 bytes"),
        (lambda m: change_tensor(m, offset=0), "starts at 0"),
        (lambda m: change_tensor(m, part=9), "part 9"),
        (lambda m: change_tensor(m, shape=(-3, -5)), "bytes"),
        (lambda m: change_tensor(m, name="b.weight"), "listed 2 times"),
        (lambda m: change_tensor(m, name=""), "name of a tensor"),
        (lambda m: change_tensor(m, digest="md5:00"), "not one by xxh3-128"),
        (lambda m: change_tensor(m, digest="xxh3-128:" + "0" * 32), "root digest"),
        (lambda m: msgspec.structs.replace(m, root_digest="xxh3-128:" + "0" * 32), "root digest"),
        (lambda m: msgspec.structs.replace(m, tied={"x": "nobody"}), "no bytes"),
        (lambda m: msgspec.structs.replace(m, tied={"a": "b.weight"}), "listed 2 times"),
        (lambda m: msgspec.structs.replace(m, kind="delta"), "kind delta"),
        (lambda m: msgspec.structs.replace(m, algorithm=None), "no digests"),
        (lambda m: msgspec.structs.replace(m, version="../x"), "version id"),
        (
            lambda m: msgspec.structs.replace(m, parts=(msgspec.structs.replace(m.parts[0], file="../../etc/passwd"),)),
            "file name",
        ),
        (lambda m: msgspec.structs.replace(m, parts=(msgspec.structs.replace(m.parts[0], nbytes=1),)), "its tensors end at"),
    ],
)
def test_a_sealed_lie_is_still_a_lie(manifest, lie, said):
    with pytest.raises(ManifestCorrupt, match=said):
        decode_manifest(encode_manifest(lie(manifest)), "m")


@pytest.fixture
def of_delta(store, rng) -> Manifest:
    state = rng.standard_normal(1000)
    store.publish("step_1", {"a": state})
    return store.publish("step_2", {"a": np.append(state[:-1], 1.0)}, mode="delta")


def test_a_delta_reads_back_as_it_was_written_and_transfers_its_payload(of_delta):
    assert decode_manifest(encode_manifest(of_delta), "m") == of_delta
    (entry,) = of_delta.transfers().values()
    assert (entry.name, entry.nbytes, entry.digest) == (
        "delta-00001.bin",
        of_delta.payload.nbytes,
        of_delta.payload.digest,
    )
    assert of_delta.nbytes == 8000


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (lambda m: msgspec.structs.replace(m, payload=None), "payload None"),
        (lambda m: msgspec.structs.replace(m, base=None), "base None"),
        (lambda m: msgspec.structs.replace(m, kind="full"), "kind full"),
        (lambda m: msgspec.structs.replace(m, payload=msgspec.structs.replace(m.payload, file="../x")), "file name"),
        (lambda m: msgspec.structs.replace(m, payload=msgspec.structs.replace(m.payload, digest="md5:0")), "digest 'md5:0'"),
        (lambda m: msgspec.structs.replace(m, payload=msgspec.structs.replace(m.payload, nbytes=-1)), "-1 bytes"),
        (lambda m: msgspec.structs.replace(m, base=msgspec.structs.replace(m.base, version="../x")), "base"),
        (lambda m: msgspec.structs.replace(m, base=msgspec.structs.replace(m.base, version=m.version)), "its own base"),
        (lambda m: change_tensor(m, digest="xxh3-128:" + "0" * 32), "root digest"),
    ],
)
def test_a_sealed_lie_about_a_delta_is_still_a_lie(of_delta, lie, said):
    with pytest.raises(ManifestCorrupt, match=said):
        decode_manifest(encode_manifest(lie(of_delta)), "m")


def test_all_problems_are_listed_at_once(manifest):
    wrong = msgspec.structs.replace(change_tensor(manifest, nbytes=8), version="../x", tied={"x": "nobody"})
    with pytest.raises(ManifestCorrupt) as caught:
        decode_manifest(encode_manifest(wrong), "m")
    assert len(caught.value.problems) >= 3


@pytest.mark.parametrize("version", ["step_1", "global_step_1200", "1", "v1.2+3-rc", "A" * 128])
def test_usual_version_ids_are_taken(version):
    assert check_version_id(version) == version


@pytest.mark.parametrize("version", ["", ".hidden", "a/b", "..", "a b", "a\n", "ü", "A" * 129, "-x", None, 7])
def test_version_ids_that_are_no_directory_names_are_refused(version):
    with pytest.raises(InvalidInput, match="version id"):
        check_version_id(version)
