"""A trainer lends its tensors: they are read where they lie, until it takes them back."""

from __future__ import annotations

import importlib.util

import pytest

from .children import report_of


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="needs NIXL")
def test_lent_tensors_are_a_version_until_the_lease_ends_and_the_process_ends_well():
    report = report_of("lending")

    assert report["newest"] == "step_2"
    assert report["lent"] == {**{f"t{number}": number * 4000 for number in range(1, 9)}, "bytes": 4099}
    assert report["active"]
    assert report["equal"]
    assert report["gdr"]
    assert report["confirmed"] == 1
    assert report["rdma"]
    assert report["again"].startswith("VersionExists")
    assert report["ended"].startswith("VersionNotFound")
    assert report["left"] == ["step_1"]
    assert "not contiguous" in report["strided"]
