"""How much memory things take beside the model, measured in processes of their own with 512 MiB or 1 GiB of weights."""

from __future__ import annotations

import shutil

import pytest

from .children import report_of
from .memory_probe import PART_NBYTES

MIB = 1 << 20
A_FEW_PARTS = 3 * PART_NBYTES + 32 * MIB  # less than half of the smaller model
SIZES = [pytest.param(512 * MIB, id="512MiB"), pytest.param(1024 * MIB, id="1GiB", marks=pytest.mark.slow)]


def measured(name, directory, nbytes=0):
    return report_of("memory_probe", name, directory, "--nbytes", nbytes)


@pytest.fixture
def check(record_property):
    """Compare a measured peak with its limit, and keep the number."""

    def compare(what: str, nbytes: int, limit: int) -> None:
        text = f"{what}: {nbytes / MIB:.1f} MiB at the peak, allowed {limit / MIB:.0f} MiB"
        record_property("memory", text)
        print(text)
        assert nbytes <= limit, text

    return compare


@pytest.fixture(scope="module", params=SIZES)
def published(request, memory_root):
    """A store with so many bytes in parts of 64 MiB, how many, and what publishing it took."""
    store = memory_root / f"store-{request.param}"
    yield store, request.param, measured("publish", store, request.param)
    shutil.rmtree(store)


def test_the_probe_sees_memory_that_is_freed_again():
    report = measured("borrow_100_mib", "/")

    assert 95 * MIB < report["borrowed"] < 110 * MIB  # the kernel counts pages in batches


def test_publishing_a_stream_takes_no_more_memory_than_a_few_of_its_tensors(published, check):
    _, _, report = published

    check("publishing from one buffer of 16 MiB", report["publish"], 64 * MIB)


def test_publishing_a_delta_takes_memory_for_a_few_chunks_and_not_for_the_model(memory_dir, check):
    report = measured("publish_delta", memory_dir, 512 * MIB)

    check("a delta of 512 MiB from one buffer of 16 MiB", report["delta"], 320 * MIB)
    check("a second delta, after following the first", report["followed"], 320 * MIB)
    check("a delta that turns out too large", report["given_back"], 320 * MIB)


def test_updating_in_place_takes_no_more_memory_than_a_few_parts(published, check):
    store, nbytes, _ = published

    check("updating in place", measured("update_inplace", store, nbytes)["inplace"], A_FEW_PARTS)


def test_a_meta_module_takes_no_memory_until_it_is_loaded_and_then_little_more_than_its_size(published, check):
    store, nbytes, _ = published

    report = measured("first_load", store, nbytes)

    check("capturing a meta module", report["capture"], 8 * MIB - 1)
    check("first load, beyond the model", report["beyond_model"], A_FEW_PARTS)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("kind", ["one_file", pytest.param("in_parts", marks=pytest.mark.slow)])
def test_loading_a_snapshot_takes_no_more_memory_than_a_few_parts(kind, nbytes, memory_dir, check):
    report = measured(f"load_snapshot_{kind}", memory_dir, nbytes)

    check(f"loading a snapshot {kind}", report["loading"], A_FEW_PARTS)
