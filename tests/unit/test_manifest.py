"""A manifest is believed only if every byte and every claim in it holds."""

import json

import msgspec
import numpy as np
import pytest

from weightcast.errors import InvalidInput, ManifestCorrupt, UnsupportedFormat
from weightcast.tensors.digest import root_digest
from weightcast.tensors.sums import root_of_sums
from weightcast.wire.manifest import (
    FORMAT,
    Manifest,
    check_version_id,
    compute_root,
    decode_manifest,
    encode_manifest,
    summed_names,
)


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


def root_over_bytes(manifest):
    return root_digest(((entry.spec, entry.digest) for entry in manifest.tensors), manifest.algorithm)


def as_format_1(manifest):
    """The same version as releases before sums wrote it."""
    tensors = tuple(msgspec.structs.replace(entry, sum="", summed_as="") for entry in manifest.tensors)
    root = root_over_bytes(manifest)
    return msgspec.structs.replace(manifest, format=1, tensors=tensors, root_digest=root, piece_nbytes=0)


def test_a_manifest_of_format_1_has_no_sums_and_a_root_over_digests_of_bytes(manifest):
    older = as_format_1(manifest)
    assert decode_manifest(encode_manifest(older), "m") == older
    assert (older.root_digest, compute_root(older.tensors, "xxh3-128")) == (root_over_bytes(manifest),) * 2
    assert [entry.proof for entry in older.tensors] == [entry.digest for entry in manifest.tensors]
    tied = msgspec.structs.replace(older, tied={"A": "a"})  # which were not summed, under whatever name
    assert decode_manifest(encode_manifest(tied), "m") == tied


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (lambda m: change_tensor(m, digest="xxh3-128:" + "0" * 32), "root digest"),
        (lambda m: change_tensor(m, digest=""), "not one by xxh3-128"),
        (lambda m: change_tensor(m, sum="sum:0"), "tensor 'a' has sum 'sum:0'"),
        (lambda m: change_tensor(m, summed_as="tied"), "'a' is summed as 'tied', not as ''"),
        (lambda m: msgspec.structs.replace(m, format=2), "tensor 'a' has sum ''"),
    ],
)
def test_a_sealed_lie_in_format_1_is_still_a_lie(manifest, lie, said):
    with pytest.raises(ManifestCorrupt, match=said):
        decode_manifest(encode_manifest(lie(as_format_1(manifest))), "m")


def test_a_tensor_is_compared_with_the_digest_of_its_bytes_or_else_with_its_sum(manifest, of_delta):
    placed, moved = manifest.tensors[0], of_delta.tensors[0]
    assert (placed.proof, moved.proof, moved.digest) == (placed.digest, moved.sum, "")
    assert {manifest.root_digest, of_delta.root_digest} == {
        root_of_sums((entry.sum_spec, entry.sum) for entry in one.tensors) for one in (manifest, of_delta)
    }


@pytest.mark.parametrize(
    ("tied", "summed"),
    [
        ({}, {}),
        ({"b": "a"}, {}),
        ({"a": "b"}, {"b": "a"}),
        ({"b": "c", "a": "c"}, {"c": "a"}),
        ({"z": "c", "d": "c"}, {}),
        ({"c": "b", "a": "b", "e": "d", "B": "f"}, {"b": "a", "f": "B"}),
    ],
)
def test_tied_bytes_are_summed_under_the_smallest_of_their_names(tied, summed):
    assert summed_names(tied) == summed


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
        (lambda m: change_tensor(m, digest=""), "not one by xxh3-128"),
        (lambda m: change_tensor(m, sum="sum:" + "0" * 32), "root digest"),
        (lambda m: change_tensor(m, sum=""), "tensor 'a' has sum ''"),
        (lambda m: change_tensor(m, sum="sum:" + "0" * 31), "tensor 'a' has sum 'sum:0"),
        (lambda m: change_tensor(m, sum=m.tensors[0].digest), "tensor 'a' has sum 'xxh3-128:"),
        (lambda m: change_tensor(m, sum=m.tensors[0].sum.upper()), "tensor 'a' has sum 'SUM:"),
        (lambda m: change_tensor(m, summed_as="tied"), "'a' is summed as 'tied', not as ''"),
        (lambda m: change_tensor(m, summed_as="b.weight"), "'a' is summed as 'b.weight', not as ''"),
        (lambda m: msgspec.structs.replace(m, tied={"A": "a"}), "'a' is summed as '', not as 'A'"),
        (lambda m: msgspec.structs.replace(m, root_digest="xxh3-128:" + "0" * 32), "root digest"),
        (lambda m: msgspec.structs.replace(m, root_digest="sums:" + "0" * 32), "root digest"),
        (lambda m: msgspec.structs.replace(m, root_digest=root_over_bytes(m)), "root digest"),
        (lambda m: msgspec.structs.replace(m, tied={"x": "nobody"}), "no bytes"),
        (lambda m: msgspec.structs.replace(m, tied={"a": "b.weight"}), "listed 2 times"),
        (lambda m: msgspec.structs.replace(m, kind="delta"), "kind delta"),
        (lambda m: msgspec.structs.replace(m, algorithm=None), "no digests"),
        (lambda m: msgspec.structs.replace(m, version="../x"), "version id"),
        (lambda m: msgspec.structs.replace(m, piece_nbytes=(64 << 10) - 1), "pieces of 65535 bytes"),
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
        of_delta.payloads[0].nbytes,
        of_delta.payloads[0].digest,
    )
    assert of_delta.nbytes == 8000


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (lambda m: msgspec.structs.replace(m, payloads=()), r"0 payload\(s\)"),
        (lambda m: msgspec.structs.replace(m, base=None), "base None"),
        (lambda m: msgspec.structs.replace(m, kind="full"), "lies in part 0 of 0"),
        (lambda m: msgspec.structs.replace(m, payloads=(msgspec.structs.replace(m.payloads[0], file="../x"),)), "file name"),
        (
            lambda m: msgspec.structs.replace(m, payloads=(msgspec.structs.replace(m.payloads[0], digest="md5:0"),)),
            "digest 'md5:0'",
        ),
        (lambda m: msgspec.structs.replace(m, payloads=(msgspec.structs.replace(m.payloads[0], nbytes=-1),)), "-1 bytes"),
        (lambda m: msgspec.structs.replace(m, base=msgspec.structs.replace(m.base, version="../x")), "base"),
        (lambda m: msgspec.structs.replace(m, base=msgspec.structs.replace(m.base, version=m.version)), "its own base"),
        (lambda m: change_tensor(m, sum="sum:" + "0" * 32), "root digest"),
        (lambda m: change_tensor(m, sum=""), "tensor 'a' has sum ''"),
        (lambda m: change_tensor(m, digest="md5:" + "0" * 32), "not one by xxh3-128"),
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
