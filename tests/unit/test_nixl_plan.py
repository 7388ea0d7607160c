"""What is read from where, what a nixl:// URL says, and who may still read: without NIXL."""

import os
import time
from contextlib import closing
from importlib.util import find_spec
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.depot.nixl_holds import Holds, Memory
from weightcast.errors import InvalidInput, MissingExtra, SourceFailed
from weightcast.tensors.dtypes import DType
from weightcast.transports.nixl.agent import Registration, region_of
from weightcast.transports.nixl.library import load_nixl
from weightcast.transports.nixl.options import open_nixl
from weightcast.transports.nixl.plan import MAX_STRETCHES, Stretch, batches, stretches
from weightcast.wire.manifest import Manifest, PartEntry, TensorEntry
from weightcast.wire.nixl import Grant, Region

DIGEST = "xxh3-128:" + "0" * 32


def version(sizes: list[int]) -> Manifest:
    """A version of one part with tensors of these sizes, after a header of 10 bytes."""
    at, tensors = 10, []
    for index, nbytes in enumerate(sizes):
        entry = {"dtype": DType.U8, "shape": (nbytes,), "part": 0, "offset": at, "nbytes": nbytes, "digest": DIGEST}
        tensors.append(TensorEntry(name=f"t{index}", **entry))
        at += nbytes
    part = PartEntry(file="part", nbytes=at, header_nbytes=10, header_digest=DIGEST)
    return Manifest(
        version="v", sequence=1, step=1, kind="full", created_s=0.0, algorithm="xxh3-128", root_digest=DIGEST,
        parts=(part,), tensors=tuple(tensors),
    )  # fmt: skip


def granted(regions: dict[str, tuple[Region, ...]]) -> Grant:
    return Grant(grant="g", agent="a", metadata=b"\0\xff", seconds=1.0, regions=regions)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=8),
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(1, 64),
    st.booleans(),
)
def test_every_byte_is_read_once_from_where_it_lies(sizes, cuts, limit, leased):
    manifest = version(sizes)
    memory = np.random.default_rng(1).integers(0, 255, manifest.parts[0].nbytes, dtype=np.uint8)
    regions, at = [], 0
    for cut in (*cuts, len(memory)):  # the file lies in pieces, a thousand bytes apart
        stop = min(at + cut, len(memory))
        regions.append((1000 * len(regions) + at, at, stop))
        at = stop
    where = {"part": tuple(Region(address, stop - start) for address, start, stop in regions)}
    if leased:
        where = {entry.name: (Region(10**6 + entry.offset, entry.nbytes),) for entry in manifest.tensors}
    found = {entry.name: np.zeros(entry.nbytes, np.uint8) for entry in manifest.tensors}
    told = dict.fromkeys(found, 0)
    for batch in batches(stretches(manifest, granted(where), found, leased=leased, limit=limit), 64):
        assert sum(part.nbytes for part in batch) <= 64
        for part in batch:
            assert 0 < part.nbytes <= limit
            if leased:
                start = part.source.address - 10**6
            else:
                start = next(
                    first + part.source.address - address
                    for address, first, stop in reversed(regions)
                    if address <= part.source.address and stop > first
                )
            found[part.name][part.offset : part.offset + part.nbytes] = memory[start : start + part.nbytes]
            told[part.name] += part.nbytes
    assert told == {entry.name: entry.nbytes for entry in manifest.tensors}
    assert all((found[entry.name] == memory[entry.offset : entry.offset + entry.nbytes]).all() for entry in manifest.tensors)


def test_a_depot_that_does_not_tell_where_all_lies_has_failed():
    manifest = version([20, 30])
    with pytest.raises(SourceFailed, match="25 of 30"):
        list(stretches(manifest, granted({"part": (Region(0, 55),)}), ["t0", "t1"], leased=False, limit=99))
    with pytest.raises(SourceFailed, match="0 of 20"):
        list(stretches(manifest, granted({}), ["t0"], leased=True, limit=99))
    with pytest.raises(InvalidInput, match="what"):
        list(stretches(manifest, granted({}), ["what"], leased=True, limit=99))


def test_a_read_is_all_host_memory_or_all_device_memory_and_has_few_stretches():
    devices = [-1, -1, 0, 1, -1]
    parts = [Stretch(f"t{index}", 0, Region(0, 1, device)) for index, device in enumerate(devices)]
    assert [[part.source.device for part in batch] for batch in batches(parts, 99)] == [[-1, -1], [0, 1], [-1]]
    many = [Stretch("t", index, Region(index, 1)) for index in range(2 * MAX_STRETCHES + 1)]
    assert [len(batch) for batch in batches(many, 10**9)] == [MAX_STRETCHES, MAX_STRETCHES, 1]


def test_a_grant_keeps_its_bytes_on_the_wire():
    grant = granted({"part": (Region(1 << 47, 5), Region(7, 8, 3))})
    assert msgspec.json.decode(msgspec.json.encode(grant), type=Grant) == grant


class OtherAgent:
    """Stands for NIXL: counts what is registered."""

    name = "agent"

    def __init__(self):
        self.registered = 0

    def register(self, regions):
        self.registered += 1
        return Registration(())

    def deregister(self, registration):
        self.registered -= 1

    def metadata(self, registration):
        return b""


def test_memory_stays_until_the_last_receiver_has_confirmed():
    with closing(Holds(seconds=30.0)) as holds:
        agent = OtherAgent()
        memory = Memory(agent, {"part": (Region(0, 1),)}, "a version")
        first, second = holds.grant(memory, fresh=True), holds.grant(memory)
        assert holds.renew(first.grant, "agent").seconds > 29
        with pytest.raises(SourceFailed, match="started anew"):
            holds.renew(first.grant, "another agent")
        holds.confirm(first.grant)
        assert agent.registered == 1
        with pytest.raises(SourceFailed):
            holds.confirm(first.grant)
        holds.confirm(second.grant)
        assert agent.registered == len(holds) == 0
        assert holds.grant(memory) is None  # it is gone


def test_a_receiver_that_does_not_come_back_loses_its_hold_at_once_and_its_memory_later():
    with closing(Holds(seconds=0.05, grace_s=0.6)) as holds:
        agent = OtherAgent()
        memory = Memory(agent, {}, "a version")
        grant = holds.grant(memory, fresh=True)
        time.sleep(0.06)
        with pytest.raises(SourceFailed, match="not renewed in time"):
            holds.renew(grant.grant, "agent")
        assert agent.registered == 1
        for _ in range(500):
            if not agent.registered:
                break
            time.sleep(0.02)
        assert agent.registered == 0


def test_a_receiver_that_is_late_and_says_that_it_reads_no_more_is_refused_and_frees_the_memory():
    with closing(Holds(seconds=0.01, grace_s=60.0)) as holds:
        agent = OtherAgent()
        grant = holds.grant(Memory(agent, {}, "a version"), fresh=True)
        time.sleep(0.02)
        with pytest.raises(SourceFailed, match="not renewed in time"):
            holds.confirm(grant.grant)
        assert agent.registered == len(holds) == 0


def test_time_in_which_the_process_was_stopped_is_no_grace(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("weightcast.depot.nixl_holds.time.monotonic", lambda: now[0])
    with closing(Holds(seconds=1.0, grace_s=1.2)) as holds:
        agent = OtherAgent()
        holds.grant(Memory(agent, {}, "a version"), fresh=True)
        now[0] += 1000.0  # as if a night had passed: one turn counts for half a second at most
        time.sleep(0.3)
        assert agent.registered == 1


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nixl://host:1?mode=what", "rdma or gdr"),
        ("nixl://host:1?what=1&bucket_nbytes=x", "bucket_nbytes=x"),
        ("nixl://host:1?prefetch=0", "positive"),
        ("nixl://host:1?stall_s=nan", "positive"),
        ("nixl://host:1?tls=maybe", "neither"),
        ("nixl://one:1,two:2", "one depot"),
        ("nixl://host:1/path", "one depot"),
        ("nixl:///path", "one depot"),
    ],
)
def test_urls_that_cannot_be_opened_say_why(url, told):
    location = urlsplit(url)
    options = dict(pair.split("=") for pair in location.query.split("&") if pair)
    with pytest.raises(InvalidInput, match=told):
        open_nixl(location, options)


def test_a_url_says_how_to_read():
    options = {"mode": "gdr", "prefetch": "3", "bucket_nbytes": "1048576", "nic": "mlx5_0", "stall_s": "2.5"}
    with closing(open_nixl(urlsplit("nixl://host:7070"), options)) as receiver:
        assert receiver.url == "nixl://host:7070"
        assert (receiver._mode, receiver._prefetch, receiver._bucket_nbytes) == ("gdr", 3, 1048576)


def test_without_nixl_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("weightcast.transports.nixl.library._NAMES", ("no_such_nixl",))
    monkeypatch.setattr("weightcast.transports.nixl.library._loaded_by", None)
    with pytest.raises(MissingExtra, match=r"nixl-cu12.*pip install 'weightcast\[nixl\]'"):
        load_nixl()


@pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed")
def test_ucx_is_tuned_where_the_user_has_not_done_it(monkeypatch):
    monkeypatch.setenv("UCX_TCP_TX_SEG_SIZE", "64k")
    monkeypatch.setenv("UCX_TCP_RX_SEG_SIZE", "")
    monkeypatch.delenv("UCX_TCP_RX_SEG_SIZE")
    load_nixl()
    assert (os.environ["UCX_TCP_TX_SEG_SIZE"], os.environ["UCX_TCP_RX_SEG_SIZE"]) == ("64k", "1m")


def test_memory_that_does_not_lie_in_one_stretch_is_refused():
    array = np.arange(12, dtype=np.uint16).reshape(3, 4)
    assert region_of("t", array) == Region(array.ctypes.data, 24)
    with pytest.raises(InvalidInput, match="contiguous"):
        region_of("t", array.T)
