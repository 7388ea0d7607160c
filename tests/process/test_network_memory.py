"""How much memory receiving takes over a network: `prefetch` + 2 buckets and a little, whatever the size of the version.

Measured in processes of their own, in which something small has been received before.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

import pytest

from .children import end, report_of, start_module
from .network_memory import PREFETCH

MIB = 1 << 20
SIZES = [
    pytest.param((256 * MIB, 8 * MIB), id="256MiB"),
    pytest.param((4096 * MIB, 64 * MIB), id="4GiB", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
]
WAYS = ["http", pytest.param("nixl", marks=pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="nixl-cu12"))]


class Served(NamedTuple):
    """A version at a depot, and the buckets that it is to be received in."""

    host: str
    nbytes: int
    bucket_nbytes: int


@pytest.fixture(scope="module", params=SIZES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    nbytes, bucket_nbytes = request.param
    path = tmp_path_factory.mktemp("network") / "store"  # on a disk: memory is short enough
    child = None
    try:
        assert report_of("network_memory", "publish", path, nbytes, timeout=200)["published"] == nbytes
        child = start_module("network_memory", "depot", path)
        lines = iter(child.stdout.readline, "")  # libraries in C may have something to say before
        url = next(line.strip() for line in lines if line.startswith("http://"))
        yield Served(url.removeprefix("http://"), nbytes, bucket_nbytes)
    finally:
        if child is not None:
            end(child)
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end_of_it", ["hashing", "inplace"])
def test_receiving_takes_memory_for_buckets_and_not_for_the_model(served, way, end_of_it, monkeypatch, record_property):
    monkeypatch.setenv("UCX_TLS", "tcp")  # as between hosts
    url = f"{way}://{served.host}"
    report = report_of("network_memory", end_of_it, url, served.nbytes, served.bucket_nbytes, timeout=300)
    limit = (PREFETCH + 2) * served.bucket_nbytes + 32 * MIB
    text = f"{report['peak'] / MIB:.1f} MiB of {limit / MIB:.0f} for {served.nbytes / MIB:.0f} MiB"
    record_property("memory", text)
    print(text)
    assert report["taken"] == served.nbytes
    assert report["peak"] <= limit
