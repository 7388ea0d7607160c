"""Four FSDP ranks publish what they hold; tensor-parallel ranks of any number take their slices, and nothing else."""

from __future__ import annotations

import json
import time

import pytest

from weightcast.clock import Deadline

from .children import end, start_module
from .nixl_stand import needs_nixl

START_S = 120.0  # far more than it takes, on a machine that may be busy


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fsdp")
    child = start_module("fsdp_trainers", directory)
    try:
        yield directory, urls_of(child, directory)
        _, errors = child.communicate("", timeout=START_S)  # the end of its input: it must end by itself, and well
        assert child.returncode == 0, errors[-4000:]
    finally:
        end(child)


def urls_of(child, directory):
    deadline = Deadline.after(START_S)
    while not (directory / "urls.json").exists():
        deadline.check("starting the trainers")
        assert child.poll() is None, child.stderr.read()[-4000:]
        time.sleep(0.1)
    return json.loads((directory / "urls.json").read_text())


def source_of(way, rank, directory, urls):
    """Where a rank takes the versions from. The ranks of the trainer are listed in another order to each."""
    hosts = ",".join(url.removeprefix("http://") for url in (*urls[rank:], *urls[:rank]))
    return str(directory / "shares") if way == "store" else f"shares+{way}://{hosts}"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", ["http", pytest.param("nixl", marks=needs_nixl), "store"])
def test_tensor_parallel_ranks_take_their_slices_from_fsdp_ranks_bit_by_bit_and_no_piece_twice(trainers, ranks, way):
    directory, urls = trainers
    children = [
        start_module("fsdp_receiver", rank, ranks, directory / "store", source_of(way, rank, directory, urls))
        for rank in range(ranks)
    ]
    try:
        told = [child.communicate(timeout=START_S) for child in children]
    finally:
        for child in children:
            end(child)

    for child, (output, errors) in zip(children, told, strict=True):
        assert child.returncode == 0, errors[-4000:]
        report = json.loads(output)
        assert report["wrong"] == []
        if way != "store":
            assert report["own"] <= report["counted"] <= 1.02 * report["whole"], report
        if way == "http":
            assert report["counted"] <= report["received"] <= 1.02 * report["whole"], report
        assert report["tied"] == {"head.weight": "embed.weight"}
        assert {"blocks.1.norm.weight", "wide.up.weight"} <= set(report["names"])
        delta = report["delta"]
        assert (delta["mode"], delta["wrong"], delta["count"], delta["same_root"]) == ("delta", [], 4, True)
        share = (delta["payloads"] - delta["tables"]) / ranks  # 2 ranks lie on the edges of slices, 3 do not
        assert delta["nbytes"] - delta["tables"] <= (1.1 if ranks == 2 else 1.6) * share, delta
        assert delta["received"] < 0.05 * report["whole"], delta
