"""Reading, checking, comparing, folding and pruning versions that are deltas."""

import dataclasses
import shutil

import msgspec
import numpy as np
import pytest
from test_store_deltas import bits_of, chain_of, files_of, kinds_of, same_state, step_on

from weightcast import Store, delta
from weightcast.clock import Deadline
from weightcast.delta.container import read_table
from weightcast.errors import (
    BaseVersionMismatch,
    Conflict,
    DeltaCorrupt,
    DigestMismatch,
    InvalidInput,
    ManifestCorrupt,
    NotFound,
    PartCorrupt,
    StorageFailed,
    VersionNotFound,
)
from weightcast.store import folding, layout
from weightcast.store.catalog import Catalog
from weightcast.store.chain import decoded_step, resolve
from weightcast.store.delta_policy import DeltaPolicy
from weightcast.store.payload import packed_entry
from weightcast.tensors.boxes import Box
from weightcast.tensors.digest import bytes_digest
from weightcast.tensors.sums import Digests, array_sum
from weightcast.transports.file import FileReceiver
from weightcast.wire.manifest import (
    BaseRef,
    BoxEntry,
    Manifest,
    compute_root,
    decode_manifest,
    encode_manifest,
    entry_of,
)

COUNT = 5


@pytest.fixture
def states(rng):
    return [state | {"head": state["bf16"]} for state in chain_of(rng, COUNT)]


@pytest.fixture
def chained(tmp_path, states):
    """step_0 is full, step_1 to step_4 are deltas, each on the one before, which they are decoded along."""
    store = Store(tmp_path / "store", delta=DeltaPolicy(packing="classes"))
    for number, state in enumerate(states):
        store.publish(f"step_{number}", state, files={"config.json": b"{}"})
    assert kinds_of(store) == ["full", *["delta"] * (COUNT - 1)]
    return store


def payload_path(store, version):
    return layout.version_dir(store.path, version) / store.manifest(version).payloads[0].file


def rewrite(store, version, **fields):
    """A manifest that says something else, properly sealed."""
    changed = msgspec.structs.replace(store.manifest(version), **fields)
    layout.manifest_path(store.path, version).write_bytes(encode_manifest(changed))


def snapshot(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


# -- reading ----------------------------------------------------------------------------------------------------------


def test_a_chain_is_found_from_its_end(chained):
    chain = resolve(Catalog(chained.path), "step_3")
    assert (chain.full.version, chain.end.version, len(chain)) == ("step_0", "step_3", 4)
    assert [manifest.version for manifest in chain.deltas] == ["step_1", "step_2", "step_3"]
    assert len(resolve(Catalog(chained.path), "step_0")) == 1


def test_read_streams_every_byte_of_a_delta_version_once(chained, states):
    wanted = {name: array for name, array in states[3].items() if name != "head"}
    got = {name: bytearray(array.nbytes) for name, array in wanted.items()}
    total = 0
    for piece in chained.read("step_3"):
        got[piece.tensor][piece.offset : piece.offset + len(piece.data)] = piece.data
        total += len(piece.data)
    assert total == sum(array.nbytes for array in wanted.values())
    assert all(bytes(got[name]) == array.tobytes() for name, array in wanted.items())


def test_a_reader_gives_any_byte_range_of_a_delta_version(chained, states, rng):
    with chained.reader("step_4") as reader:
        for entry in reader.in_order():
            whole = states[4][entry.name].tobytes()
            cuts = [sorted(rng.integers(0, entry.nbytes + 1, 2).tolist()) for _ in range(8)]
            for start, stop in [(0, entry.nbytes), *cuts]:
                buffer = memoryview(bytearray(stop - start))
                reader.read_into(entry, start, buffer)
                assert bytes(buffer) == whole[start:stop]


def test_tensors_come_under_every_name_and_some_can_be_asked_for(chained, states):
    with chained.reader() as reader:
        seen = {name: array.copy() for name, array in reader.tensors()}
        assert same_state(seen, states[4])
        pieces = list(reader.pieces(Deadline.after(30), names={"f32", "bool"}))
    assert {piece.tensor for piece in pieces} == {"f32", "bool"}


def test_loaded_arrays_are_the_callers_own(chained, states):
    with chained.reader("step_2") as reader:
        first = reader.load_all()
        for array in first.values():
            bits_of(array)[:] = 0xFF
        assert same_state(reader.load_all(), states[2])


def test_diff_of_delta_versions_is_that_of_full_ones(chained, states, tmp_path):
    other = Store(tmp_path / "other")
    for number in (1, 4):
        other.publish(f"step_{number}", states[number], mode="full")
    found = chained.diff("step_1", "step_4")
    assert found == other.diff("step_1", "step_4")
    assert {tensor.name for tensor in found.tensors} > {"bf16", "i64", "scalar"}
    assert found.same >= 2
    assert chained.diff("step_4", "step_4").equal


def test_a_receiver_gives_the_payload_of_a_delta_and_not_its_tensors(chained):
    receiver = FileReceiver(chained)
    manifest = receiver.manifest("step_2", deadline=Deadline.after(30))
    got = bytearray(manifest.payloads[0].nbytes)
    for piece in receiver.pieces(manifest, deadline=Deadline.after(30), names=manifest.transfers()):
        assert piece.tensor == "delta-00001.bin"
        got[piece.offset : piece.offset + len(piece.data)] = piece.data
    assert bytes(got) == payload_path(chained, "step_2").read_bytes()
    assert list(receiver.pieces(manifest, deadline=Deadline.after(30), names={"bf16"})) == []
    payload_path(chained, "step_2").write_bytes(got[:-1])
    with pytest.raises(PartCorrupt, match="the manifest says"):
        list(receiver.pieces(manifest, deadline=Deadline.after(30)))


# -- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.untraced
def test_any_flipped_byte_of_a_payload_is_caught_by_everything_that_reads_it(chained, rng):
    path = payload_path(chained, "step_2")
    data = bytearray(path.read_bytes())
    for position in {0, 8, len(data) - 1, *rng.integers(0, len(data), 12).tolist()}:
        data[position] ^= 0x10
        path.write_bytes(data)
        for version in ("step_2", "step_4"):
            assert "delta-00001.bin: expected" in chained.verify(version).problems[0]
            with pytest.raises(DigestMismatch, match=r"delta-00001\.bin: expected"):
                chained.load(version)
            with pytest.raises(DigestMismatch):
                next(chained.read(version))
            with pytest.raises(DigestMismatch):
                chained.diff("step_0", version)
        assert chained.verify("step_1").ok
        data[position] ^= 0x10
    path.write_bytes(data)
    assert chained.verify("step_4").ok


def test_a_missing_truncated_or_grown_payload_is_named(chained):
    path = payload_path(chained, "step_2")
    data = path.read_bytes()
    for change in (data[:-1], data[:10], b"", data + b"x"):
        path.write_bytes(change)
        assert str(path) in chained.verify("step_2").problems[0]
        with pytest.raises(PartCorrupt, match="the manifest says"):
            chained.load("step_2")
    path.unlink()
    with pytest.raises(PartCorrupt, match="missing"):
        chained.load("step_2")


@pytest.mark.parametrize("act", ["load", "reader", "fold", "verify", "delta_between"])
def test_a_missing_base_is_named_with_who_needs_it(chained, act):
    shutil.rmtree(layout.version_dir(chained.path, "step_1"))
    before = snapshot(chained.path)
    if act == "verify":
        assert "version step_1 is not in" in chained.verify("step_4").problems[0]
    else:
        arguments = ("step_0", "step_4") if act == "delta_between" else ("step_4",)
        with pytest.raises(VersionNotFound, match=r"step_1 is not in .* version step_2 needs it as its base"):
            getattr(chained, act)(*arguments)
    assert snapshot(chained.path) == before


@pytest.mark.parametrize("act", ["load", "reader", "fold", "verify"])
def test_a_base_of_another_state_is_refused(chained, states, rng, act):
    shutil.rmtree(layout.version_dir(chained.path, "step_1"))
    Store(chained.path).publish("step_1", step_on(states[1], rng) | {"head": states[1]["bf16"]}, mode="full")
    chained.announce("step_4")
    before = snapshot(chained.path)
    if act == "verify":
        assert "version step_2 is a delta on step_1" in chained.verify("step_4").problems[0]
    else:
        with pytest.raises(BaseVersionMismatch, match="version step_2 is a delta on step_1"):
            getattr(chained, act)("step_4")
    with pytest.raises(Conflict, match="step_2 is a delta on step_1"):
        chained.publish("step_5", states[4], mode="delta")
    assert snapshot(chained.path) == before
    assert chained.publish("step_5", states[4]).kind == "full"


def test_bases_that_lead_in_a_circle_are_refused_and_gc_comes_to_an_end(chained):
    last = chained.manifest("step_3")
    rewrite(chained, "step_1", base=BaseRef(version="step_3", root_digest=last.root_digest))
    with pytest.raises(ManifestCorrupt, match="comes back to"):
        chained.load("step_2")
    assert not chained.verify("step_4").ok
    assert "step_1" in chained.gc(keep_last=1).kept


def test_a_damaged_tensor_of_the_base_is_found_wherever_it_is_built_on(chained):
    manifest = chained.manifest("step_0")
    path = layout.version_dir(chained.path, "step_0") / manifest.parts[0].file
    data = bytearray(path.read_bytes())
    for name in ("still", "turned"):
        data[manifest.by_name()[name].offset] ^= 1
    path.write_bytes(data)
    assert sorted(problem.split()[1] for problem in chained.verify("step_0").problems) == ["still", "turned"]
    (problem,) = chained.verify("step_2").problems
    assert problem.startswith("it is built on step_0, which is damaged: tensor ")
    assert problem.endswith("And 1 more problem(s).")
    with pytest.raises(DigestMismatch) as caught:
        chained.load("step_2")
    assert sorted(caught.value.tensors) == ["still", "turned"]
    with pytest.raises(DigestMismatch):
        chained.fold("step_2")
    with pytest.raises(DigestMismatch):
        chained.delta_between("step_0", "step_2")


def test_a_damaged_base_along_which_nothing_decodes_is_blamed(chained):
    manifest = chained.manifest("step_0")
    path = layout.version_dir(chained.path, "step_0") / manifest.parts[0].file
    data = bytearray(path.read_bytes())
    entry = manifest.by_name()["every"]
    data[entry.offset : entry.offset + entry.nbytes] = bytes(entry.nbytes)
    path.write_bytes(data)
    with pytest.raises(DigestMismatch, match=r"versions/step_0.*\n  every"):
        chained.load("step_2")
    with pytest.raises(DeltaCorrupt, match="step_1 does not decode along its base step_0, whose bytes may be damaged"):
        next(chained.read("step_2"))
    assert "it is built on step_0, which is damaged: tensor every" in chained.verify("step_2").problems[0]


@pytest.mark.parametrize("head", ["head", "a_head"])  # summed under the name that holds the bytes, and under the other
def test_a_delta_between_versions_with_tied_names_applies_to_the_tensors_that_hold_the_bytes(tmp_path, rng, head):
    store, states = Store(tmp_path / "store"), chain_of(rng, 3)
    for number, state in enumerate(states):
        store.publish(f"step_{number}", state | {head: state["bf16"]})
    for packed in (store.delta_between("step_0", "step_2"), store.delta_between("step_0", "step_2", packing="classes")):
        target = {name: array.copy() for name, array in states[0].items()}
        delta.apply(target, packed)  # it compares the roots of what was there and of what comes out
        assert same_state(target, states[2])


def test_a_payload_that_leads_elsewhere_than_its_manifest_says_is_refused(chained):
    sparse = delta.decode(chained.delta_between("step_1", "step_2", packing="gaps"))
    other = delta.pack(dataclasses.replace(sparse, new_root="xxh3-128:" + "0" * 32))
    payload_path(chained, "step_2").write_bytes(other)
    entry = chained.manifest("step_2").payloads[0]
    rewrite(chained, "step_2", payloads=(msgspec.structs.replace(entry, nbytes=len(other), digest=bytes_digest(other)),))
    with pytest.raises(DeltaCorrupt, match="leads from"):
        chained.load("step_2")
    assert "leads from" in chained.verify("step_2").problems[0]


def test_all_problems_of_a_delta_version_are_listed(chained):
    path = payload_path(chained, "step_3")
    path.write_bytes(path.read_bytes()[::-1])
    (layout.version_dir(chained.path, "step_3") / "config.json").write_bytes(b"[]")
    problems = chained.verify("step_3").problems
    assert ["delta-00001.bin" in problems[0], "config.json" in problems[1]] == [True, True]


# -- folding ----------------------------------------------------------------------------------------------------------


def test_a_folded_version_leads_from_the_full_one_and_is_the_same_state(chained, states):
    before = chained.manifest("step_4")
    after = chained.fold()
    assert after == chained.manifest("step_4")
    assert (after.base.version, after.payloads[0].file) == ("step_0", "delta-00002.bin")
    same = {"base": before.base, "payloads": before.payloads}
    assert msgspec.structs.replace(after, **same) == before
    assert files_of(chained, "step_4") == ["config.json", "delta-00001.bin", "delta-00002.bin", "manifest.json"]
    assert same_state(chained.load("step_4"), states[4])
    assert all(chained.verify(version).ok for version in chained.versions())
    assert chained.fold("step_4") == after  # nothing is left to fold
    assert len(files_of(chained, "step_4")) == 4


def test_folding_onto_a_version_in_between_and_further_later(chained, states):
    assert chained.fold("step_4", onto="step_2").base.version == "step_2"
    assert same_state(chained.load("step_4"), states[4])
    again = chained.fold("step_4", onto="step_1")
    assert (again.base.version, again.payloads[0].file) == ("step_1", "delta-00003.bin")
    assert same_state(chained.load("step_4"), states[4])
    assert chained.fold("step_4", onto="step_1") == again


def test_a_fold_keeps_the_packing_that_was_published(tmp_path, states):
    store = Store(tmp_path / "s", delta=DeltaPolicy(packing="gaps"))
    for number, state in enumerate(states[:3]):
        store.publish(f"step_{number}", state)
    Store(store.path).fold("step_2")
    assert delta.inspect(payload_path(store, "step_2").read_bytes()).packing == "gaps"


@pytest.mark.parametrize("keep", ["store", "memory"])
def test_publishing_goes_on_after_a_fold(tmp_path, states, keep):
    store = Store(tmp_path / "s", delta=DeltaPolicy(keep=keep))
    for number, state in enumerate(states[:4]):
        store.publish(f"step_{number}", state)
    Store(store.path).fold("step_3")
    store.gc(keep_last=1)
    assert store.versions() == ["step_0", "step_3"]
    manifest = store.publish("step_4", states[4])
    assert (manifest.kind, manifest.base.version) == ("delta", "step_3")
    assert same_state(store.load(), states[4])


def test_gc_keeps_the_bases_of_deltas_and_removes_what_a_fold_left(chained, states):
    report = chained.gc(keep_last=1)
    assert report.removed == []
    assert report.kept["step_0"] == "base of step_1"
    chained.fold("step_4", onto="step_2")
    assert chained.gc(keep_last=1, dry_run=True).garbage == ["step_4/delta-00001.bin"]
    assert (layout.version_dir(chained.path, "step_4") / "delta-00001.bin").exists()
    report = chained.gc(keep_last=1)
    assert (report.removed, report.garbage) == (["step_3"], ["step_4/delta-00001.bin"])
    chained.fold("step_4")
    assert chained.gc(keep_last=1).removed == ["step_1", "step_2"]
    assert chained.versions() == ["step_0", "step_4"]
    assert files_of(chained, "step_4") == ["config.json", "delta-00003.bin", "manifest.json"]
    assert same_state(chained.load(), states[4])
    assert chained.verify().ok


def test_a_reader_in_the_middle_of_a_version_goes_on_while_it_is_folded(chained, states):
    receiver = FileReceiver(chained)
    manifest = chained.manifest("step_4")
    with chained.reader("step_4") as reader:
        chained.fold("step_4")
        assert same_state(reader.load_all(), states[4])
    got = b"".join(bytes(piece.data) for piece in receiver.pieces(manifest, deadline=Deadline.after(30)))
    assert bytes_digest(got, "xxh3-128") == manifest.payloads[0].digest


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"version": "step_0"}, InvalidInput, "full version"),
        ({"version": "step_2", "onto": "step_3"}, InvalidInput, "its bases are step_0, step_1"),
        ({"version": "step_2", "onto": "step_2"}, InvalidInput, "its bases are"),
        ({"version": "step_9"}, NotFound, "step_9"),
    ],
)
def test_what_cannot_be_folded_is_refused(chained, arguments, error, said):
    before = snapshot(chained.path)
    with pytest.raises(error, match=said):
        chained.fold(**arguments)
    assert snapshot(chained.path) == before


@pytest.mark.parametrize("failing", ["write_synced", "sync_dir", "replace_synced"])
def test_a_fold_that_fails_leaves_the_version_as_it_was(chained, monkeypatch, failing):
    before = snapshot(chained.path)
    original = getattr(folding, failing)

    def fail_late(path, *rest):
        original(path, *rest)
        raise StorageFailed("sync", path, OSError(5, "Input/output error"))

    with monkeypatch.context() as broken:
        broken.setattr(folding, failing, fail_late)
        with pytest.raises(StorageFailed):
            chained.fold()
    assert snapshot(chained.path) == before
    assert chained.fold().base.version == "step_0"


# -- one delta for a replica that is behind ---------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [None, "gaps"])
@pytest.mark.parametrize(("old", "new"), [(0, 4), (1, 3), (2, 3), (3, 3)], ids=["all", "some", "one", "none"])
def test_one_delta_leads_from_any_version_to_any_later_one(chained, states, old, new, packing):
    packed = chained.delta_between(f"step_{old}", f"step_{new}", packing=packing)
    found = delta.inspect(packed)
    assert found.packing == (packing or "classes")
    roots = [chained.manifest(f"step_{number}").root_digest for number in (old, new)]
    assert [found.base_root, found.new_root] == roots
    replica = {name: np.array(array, order="C") for name, array in states[old].items() if name != "head"}
    delta.apply(replica, packed)
    assert same_state(replica, {name: array for name, array in states[new].items() if name != "head"})


def test_versions_that_share_no_chain_have_no_delta_between_them(chained, states):
    chained.publish("other", states[3], mode="full")
    with pytest.raises(NotFound, match="no deltas lead from version step_1 to other, which is a full version"):
        chained.delta_between("step_1", "other")
    with pytest.raises(NotFound, match="from version step_3 to step_1, which is a delta on step_0"):
        chained.delta_between("step_3", "step_1")


def test_a_folded_delta_is_smaller_than_the_steps_it_replaces(tmp_path, rng):
    """Elements that move back and forth cancel."""
    store = Store(tmp_path / "s")
    state = chain_of(rng, 1)[0]
    other = step_on(state, rng)
    for number in range(6):
        store.publish(f"step_{number}", (state, other)[number % 2])
    assert len(store.delta_between("step_0", "step_4")) < 1000
    assert store.fold("step_4").payloads[0].nbytes < 1000
    assert same_state(store.load("step_4"), state)
    assert same_state(store.load("step_5"), other)


# -- whose fault it is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["still", "every"])
def test_verify_blames_the_file_that_is_damaged_and_not_the_versions_that_are_built_on_it(chained, name):
    manifest = chained.manifest("step_0")
    path = layout.version_dir(chained.path, "step_0") / manifest.parts[0].file
    data = bytearray(path.read_bytes())
    entry = manifest.by_name()[name]
    data[entry.offset : entry.offset + entry.nbytes] = bytes(
        255 - byte for byte in data[entry.offset : entry.offset + entry.nbytes]
    )
    path.write_bytes(data)
    (cause,) = chained.verify("step_0").problems
    assert f"tensor {name} in {path.name}: expected" in cause
    for version in ("step_1", "step_2", "step_4"):
        assert chained.verify(version).problems == [f"it is built on step_0, which is damaged: {cause}"]


def test_verify_blames_a_damaged_delta_for_the_deltas_on_it_and_both_for_their_own_files(chained):
    path = payload_path(chained, "step_2")
    path.write_bytes(path.read_bytes()[::-1])
    (layout.version_dir(chained.path, "step_3") / "config.json").write_bytes(b"[]")
    assert chained.verify("step_1").ok
    (cause,) = chained.verify("step_2").problems
    first, second = chained.verify("step_3").problems
    assert first == f"it is built on step_2, which is damaged: {cause}"
    assert "config.json" in second
    assert chained.verify("step_4").problems == [first]


def test_a_fold_and_a_delta_over_several_versions_are_cut_as_the_policy_says(tmp_path, rng):
    slicing = delta.Slicing((delta.Cut(("w",), 1, 4),))
    store = Store(tmp_path, delta=DeltaPolicy(slicing=slicing))
    state = {"w": rng.normal(size=(16, 64)).astype(np.float32)}
    for number in range(3):
        state["w"][number, ::5] += 1
        store.publish(f"step_{number}", state, mode="full" if number == 0 else "delta")
    store.fold()
    quarters = {Box((0, first), (16, 16)) for first in range(0, 64, 16)}
    for packed in (payload_path(store, "step_2").read_bytes(), store.delta_between("step_0", "step_2")):
        assert {block.box for chunk in read_table(memoryview(packed)).chunks for block in chunk.blocks} == quarters


def test_a_payload_that_changes_a_tensor_which_its_version_does_not_list_is_refused(rng):
    old = {name: rng.normal(size=100).astype(np.float32) for name in "ab"}
    new = {name: array + 1 for name, array in old.items()}
    specs, packed = delta.ArrayState(old).specs, []
    with delta.Encoder(packed.append, packing="gaps") as encoder:
        for name, spec in specs.items():
            encoder.add_box(spec, Box.whole((100,)), old[name], new[name], summed=spec)
        encoder.flush()
        encoder.finish(base_root="", new_root="")
    payload = b"".join(packed)
    total = str(array_sum(specs["a"], new["a"]))
    entry = entry_of(specs["a"], digests=Digests("", total))
    root = compute_root((entry,), "xxh3-128")
    box = BoxEntry(start=(0,), shape=(100,), ranks=(0,), offsets=(), sum=total)
    manifest = Manifest(
        version="step_1", sequence=1, step=1, kind="delta", created_s=1.0, algorithm="xxh3-128", root_digest=root,
        parts=(), tensors=(entry,), boxes={"a": (box,)}, base=BaseRef(version="step_0", root_digest=root),
        payloads=(packed_entry("delta-00001.bin", payload, "xxh3-128"),), piece_nbytes=4 << 20,
    )  # fmt: skip
    manifest = decode_manifest(encode_manifest(manifest), "manifest.json")
    with pytest.raises(DeltaCorrupt, match="changes 'b', which is no tensor of it"):
        decoded_step([payload], manifest, delta.ArrayState(old))
