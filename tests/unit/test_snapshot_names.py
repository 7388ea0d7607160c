"""Names of the legacy layout: what was written is what is read back, and nothing else reads as a name."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weightcast.errors import InvalidInput
from weightcast.store.snapshot.names import (
    SnapshotName,
    build,
    check_device_id,
    legacy_name,
    looks_like_part,
    manifest_name,
    parse,
    part_name,
    single_name,
)

ranks = st.integers(min_value=0, max_value=10**6)
ids = st.one_of(
    st.integers(min_value=0, max_value=10**4).map(str),
    st.uuids().map(lambda uuid: f"GPU-{uuid}"),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,20}", fullmatch=True).filter(
        lambda text: not (text.lower().startswith("part") and (text[4:].isdigit() or text[4:] == ""))
    ),
)
parts = st.integers(min_value=0, max_value=10**5)
names = st.one_of(
    st.builds(SnapshotName, st.just("part"), ranks, ids, parts),
    st.builds(SnapshotName, st.sampled_from(["single", "manifest"]), ranks, ids),
    st.builds(SnapshotName, st.just("legacy"), st.just(0), ids),
)


@given(names)
@example(SnapshotName("single", 1, "234"))
@example(SnapshotName("single", 12, "34"))
@example(SnapshotName("legacy", 0, "0"))
@example(SnapshotName("part", 0, "GPU-part1", 10))
@example(SnapshotName("single", 0, "pdparams"))
@example(SnapshotName("manifest", 0, "manifest"))
def test_a_name_parses_back_to_exactly_what_wrote_it(name):
    assert parse(build(name)) == name


@given(names, names)
@example(SnapshotName("single", 1, "234"), SnapshotName("single", 12, "34"))
@example(SnapshotName("legacy", 0, "12"), SnapshotName("single", 0, "12"))
@example(SnapshotName("part", 1, "2", 34), SnapshotName("part", 12, "3", 4))
def test_different_files_have_different_names(first, second):
    assert (build(first) == build(second)) == (first == second)


@given(st.text(alphabet="model_state.tp0123part-GPU.dms\n٣", max_size=50))
def test_whatever_parses_is_written_the_same_way_again_apart_from_zeros(text):
    for file_name in (text, f"model_state.tp{text}.pdparams", f"model_state.tp0.{text}.pdparams"):
        name = parse(file_name)
        if name is not None and (name.part is None or f"part{name.part}." in file_name):
            assert build(name) == file_name


def test_the_forms_are_the_documented_ones():
    assert part_name(3, "5", 12) == "model_state.tp3.5.part12.pdparams"
    assert single_name(3, "GPU-1f2e") == "model_state.tp3.GPU-1f2e.pdparams"
    assert legacy_name("5") == "model_state.tp05.pdparams"
    assert manifest_name(3, "5") == "model_state.tp3.5.manifest.json"


def test_a_part_number_may_have_leading_zeros():
    assert parse("model_state.tp0.7.part007.pdparams") == SnapshotName("part", 0, "7", 7)


@pytest.mark.parametrize(
    "file_name",
    [
        "model_state.tp0.7.part.pdparams",
        "model_state.tp0.7.partx.pdparams",
        "model_state.tp0.7.part-1.pdparams",
        "model_state.tp0.7.part1.part2.pdparams",
        "model_state.tp0.7.part٣.pdparams",
        "model_state.tp0.٣.pdparams",
        "model_state.tp٣.7.pdparams",
        "model_state.tp0.part3.pdparams",
        "model_state.tp0part3.pdparams",
        "model_state.tp0.PART3.pdparams",
        "model_state.tp00.7.pdparams",
        "model_state.tp-1.7.pdparams",
        "model_state.tp0..pdparams",
        "model_state.tp0.pdparams",
        "model_state.tp1234.pdparams",
        "model_state.tp0.7.pdparams.tmp",
        ".model_state.tp0.7.pdparams",
        "model_state.tp0.7.pdparams\n",
        "dir/model_state.tp0.7.pdparams",
        "model_state.tp0.dir/7.pdparams",
        "model_state.tp0.7.part1.manifest.json",
    ],
)
def test_other_names_do_not_parse(file_name):
    assert parse(file_name) is None


@pytest.mark.parametrize(
    "device_id", ["", ".", "a.b", "part3", "part", "Part12", "a/b", "-1", "_", "٣", "\u212a1", "7\n", "a b", "x" * 129, 7]
)
def test_an_id_that_no_name_could_give_back_is_refused(device_id):
    with pytest.raises(InvalidInput):
        check_device_id(device_id)
    with pytest.raises(InvalidInput):
        build(SnapshotName("single", 0, device_id))


@pytest.mark.parametrize("rank", [-1, True, "0", 1.0, None])
def test_a_rank_is_a_non_negative_integer(rank):
    with pytest.raises(InvalidInput):
        single_name(rank, "7")


def test_the_legacy_form_has_no_room_for_a_rank():
    with pytest.raises(InvalidInput):
        build(SnapshotName("legacy", 1, "7"))


def test_a_part_number_belongs_to_parts_alone():
    with pytest.raises(InvalidInput):
        build(SnapshotName("single", 0, "7", 1))
    with pytest.raises(InvalidInput):
        build(SnapshotName("part", 0, "7"))
    with pytest.raises(InvalidInput):
        build(SnapshotName("part", 0, "7", -1))


def test_a_name_that_means_to_be_a_part_is_recognised_by_rank_and_id():
    assert looks_like_part("model_state.tp0.7.part1.pdparams", 0, "7")
    assert looks_like_part("model_state.tp0.7.partX.pdparams", 0, "7")
    assert looks_like_part("model_state.tp0.7.part1.bak.pdparams", 0, "7")
    assert not looks_like_part("model_state.tp0.7.part1.pdparams.tmp", 0, "7")
    assert not looks_like_part("model_state.tp0.77.part1.pdparams", 0, "7")
    assert not looks_like_part("model_state.tp0.7.pdparams", 0, "7")
