"""How much memory things take beside the model, measured in processes of their own with 1 GiB of weights."""

from __future__ import annotations

import pytest

from .children import report_of
from .memory_probe import PART_NBYTES

MIB = 1 << 20
A_FEW_PARTS = 3 * PART_NBYTES + 32 * MIB


@pytest.fixture
def check(record_property):
    """Compare a measured peak with its limit, and keep the number."""

    def compare(what: str, nbytes: int, limit: int) -> None:
        text = f"{what}: {nbytes / MIB:.1f} MiB at the peak, allowed {limit / MIB:.0f} MiB"
        record_property("memory", text)
        print(text)
        assert nbytes <= limit, text

    return compare


@pytest.fixture(scope="module")
def published(memory_root):
    """A store with 1 GiB in parts of 64 MiB, and what publishing it took."""
    return memory_root / "store", report_of("memory_probe", "publish", memory_root / "store")


def test_the_probe_sees_memory_that_is_freed_again():
    report = report_of("memory_probe", "borrow_100_mib", "/")

    assert 95 * MIB < report["borrowed"] < 110 * MIB  # the kernel counts pages in batches


def test_publishing_a_stream_takes_no_more_memory_than_a_few_of_its_tensors(published, check):
    _, report = published

    check("publishing 1 GiB from one buffer of 16 MiB", report["publish"], 64 * MIB)


def test_publishing_a_delta_takes_memory_for_a_few_chunks_and_not_for_the_model(memory_dir, check):
    report = report_of("memory_probe", "publish_delta", memory_dir)

    check("a delta of 512 MiB from one buffer of 16 MiB", report["delta"], 320 * MIB)
    check("a second delta, after following the first", report["followed"], 320 * MIB)
    check("a delta that turns out too large", report["given_back"], 320 * MIB)


def test_updating_in_place_takes_no_more_memory_than_a_few_parts(published, check):
    store, _ = published

    check("updating 1 GiB in place", report_of("memory_probe", "update_inplace", store)["inplace"], A_FEW_PARTS)


def test_a_meta_module_takes_no_memory_until_it_is_loaded_and_then_little_more_than_its_size(published, check):
    store, _ = published

    report = report_of("memory_probe", "first_load", store)

    check("capturing a meta module of 1 GiB", report["capture"], 8 * MIB - 1)
    check("first load of 1 GiB, beyond the model", report["beyond_model"], A_FEW_PARTS)


def test_loading_a_snapshot_takes_no_more_memory_than_a_few_parts(memory_dir, check):
    report = report_of("memory_probe", "load_snapshot", memory_dir)

    check("loading a snapshot of 1 GiB in parts of 64 MiB", report["in_parts"], A_FEW_PARTS)
    check("loading a snapshot of 1 GiB in one file", report["one_file"], A_FEW_PARTS)
