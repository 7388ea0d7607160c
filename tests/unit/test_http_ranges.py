"""Which bytes go where, which depots are asked, and what the URL of a source says. Nothing here touches the network."""

import time
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from weightcast.errors import (
    AccessRefused,
    InvalidInput,
    SourceFailed,
    UnknownSource,
    VersionNotFound,
    WeightcastError,
    rebuilt,
)
from weightcast.transports.http import ranges
from weightcast.transports.http.client import DepotClient, OtherBytes
from weightcast.transports.http.depots import MAX_NBYTES, MIN_NBYTES, TRIES, Depots, combined
from weightcast.transports.http.options import parse_options
from weightcast.transports.http.ranges import Arrived, InOrder, Segment, stretches
from weightcast.transports.http.receiver import HttpReceiver
from weightcast.transports.registry import open_receiver


def segment(at: int, name: str, nbytes: int, offset: int = 0) -> Segment:
    return Segment(at, name, offset, memoryview(bytearray(nbytes)))


def test_neighbours_become_one_stretch_and_gaps_and_files_divide():
    found = stretches(
        [("a", segment(10, "x", 5)), ("a", segment(15, "y", 1)), ("a", segment(17, "z", 3)), ("b", segment(20, "w", 2))]
    )

    assert [(one.file, one.start, one.stop) for one in found] == [("a", 10, 16), ("a", 17, 20), ("b", 20, 22)]


def test_any_range_of_a_stretch_is_written_to_the_right_bytes_of_the_right_tensors():
    sizes = [3, 1, 1, 40, 2, 13]
    starts = np.cumsum([100, *sizes])
    parts = [
        segment(int(at), f"t{index}", size, 1000 * index)
        for index, (at, size) in enumerate(zip(starts, sizes, strict=False))
    ]
    (stretch,) = stretches(("file", one) for one in parts)
    data = bytes(range(100, 160))
    for start in range(100, 160):
        for stop in range(start, 161):
            for one in parts:
                one.memory[:] = bytes(len(one.memory))
            views = [one.data for group in stretch.groups(start, stop) for one in group]
            assert sum(map(len, views)) == stop - start
            rest = data[start - 100 : stop - 100]
            for view in views:
                view[:], rest = rest[: len(view)], rest[len(view) :]
            whole = b"".join(bytes(one.memory) for one in parts)
            assert whole == bytes(start - 100) + data[start - 100 : stop - 100] + bytes(160 - stop)
            told = [(one.tensor, one.offset, len(one.data)) for one in stretch.between(start, stop)]
            assert sum(nbytes for _, _, nbytes in told) == stop - start
            assert all(offset // 1000 == int(name[1:]) for name, offset, _ in told)


def test_large_parts_are_received_by_themselves_and_small_ones_together(monkeypatch):
    monkeypatch.setattr(ranges, "SMALL_NBYTES", 5)
    monkeypatch.setattr(ranges, "MAX_GROUP", 3)
    sizes = [1, 5, 6, 2, 2, 2, 2, 9]
    starts = np.cumsum([0, *sizes])
    (stretch,) = stretches(("file", segment(int(at), "t", size)) for at, size in zip(starts, sizes, strict=False))

    groups = [[len(one.data) for one in group] for group in stretch.groups(0, stretch.stop)]

    assert groups == [[1, 5], [6], [2, 2, 2], [2], [9]]


def test_requests_end_between_tensors_where_that_is_near_enough():
    (stretch,) = stretches(("file", segment(at, str(at), 10)) for at in (0, 10, 20, 30))

    assert stretch.cut(0, 40, 18) == 10
    assert stretch.cut(0, 40, 25) == 20
    assert stretch.cut(0, 40, 40) == stretch.cut(0, 40, 400) == 40
    assert stretch.cut(3, 40, 4) == 7  # no end of a tensor is near
    assert stretch.cut(5, 9, 100) == 9


def test_bytes_of_a_tensor_are_told_in_order_whatever_order_they_come_in(rng):
    (stretch,) = stretches([("file", segment(0, "a", 1))])
    for _ in range(50):
        order, told = InOrder(), {"a": 0, "b": 0}
        sizes = {name: rng.integers(1, 5, size=8).tolist() for name in told}
        parts = [(name, sum(sizes[name][:index]), size) for name in sizes for index, size in enumerate(sizes[name])]
        for index in rng.permutation(len(parts)):
            name, offset, size = parts[index]
            for one in order.add(Arrived(name, offset, memoryview(bytes(size)), stretch)):
                assert one.offset == told[one.tensor]
                told[one.tensor] += len(one.data)
        assert told == {name: sum(sizes[name]) for name in told}


# -- depots -----------------------------------------------------------------------------------------------------------


def three(**settings: Any) -> Depots:
    return Depots([DepotClient(f"http://host-{index}:80") for index in range(3)], **settings)


def test_a_depot_rests_longer_each_time_and_bytes_make_it_new():
    depots = three()
    depot = depots.all[0]
    waits = []
    for _ in range(6):
        depots.fail(depot, SourceFailed("broke"), time.monotonic())
        waits.append(depot.retry_at - time.monotonic())
        assert depots.resting(depot)
    assert waits == sorted(waits)
    assert depot.failed
    depots.moved(depot)
    assert (depot.failures, depot.error) == (0, None)


def test_connections_that_break_together_count_once_and_what_will_not_change_counts_at_once():
    depots = three()
    first, second, third = depots.all
    begun = time.monotonic()
    for _ in range(5):
        assert not depots.fail(first, SourceFailed("broke"), begun)
    assert first.failures == 1
    assert not depots.fail(second, AccessRefused("who are you?"), begun)
    assert second.failed
    assert not depots.fail(third, OtherBytes("another version"), begun)
    assert third.failed
    for _ in range(TRIES - 1):
        last = depots.fail(first, SourceFailed("broke"), time.monotonic())
    assert last


def test_one_that_only_rests_is_woken_when_nobody_else_is_left():
    depots = three()
    rested, *others = depots.all
    depots.spare(rested, 20.0)
    assert depots.resting(rested)
    for one in others:
        depots.fail(one, VersionNotFound("v", "there", []), time.monotonic())
    assert not depots.resting(rested)


def test_only_the_first_that_work_are_called_if_not_all_are_wanted():
    depots = three(spread=1)
    assert [depots.called(depot) for depot in depots.all] == [True, False, False]
    depots.fail(depots.all[0], AccessRefused("no"), time.monotonic())
    assert [depots.called(depot) for depot in depots.all[1:]] == [True, False]
    near = three(spread=1, order="nearest")
    for depot, seconds in zip(near.all, (0.3, 0.001, 0.02), strict=True):
        assert near.called(depot)  # as long as it is not known how far it is
        near.answered(depot, seconds)
    assert [near.called(depot) for depot in near.all] == [False, True, False]
    everybody = three()
    assert [everybody.called(depot) for depot in everybody.all] == [True, True, True]


def test_a_slow_depot_is_asked_for_less_at_once():
    depots = three()
    slow, fast, _ = depots.all
    for depot, rate in ((slow, 1e5), (fast, 5e9)):
        depots.answered(depot, 0.001)
        depots.delivered(depot, int(rate), 1.0)
    assert MIN_NBYTES < slow.request_nbytes < fast.request_nbytes == MAX_NBYTES


def test_a_depot_that_would_only_hold_up_the_others_is_not_asked():
    depots = three()
    slow, fast, _ = depots.all
    assert depots.worthwhile(slow, 1 << 20, 1 << 20)  # nothing is known
    depots.delivered(slow, 1_000_000, 1.0)
    depots.delivered(fast, 100_000_000, 1.0)
    assert depots.worthwhile(fast, 1 << 20, 1 << 20)
    assert depots.worthwhile(slow, 1 << 20, 1 << 30)  # the other has ten seconds to go
    assert not depots.worthwhile(slow, 1 << 20, 8 << 20)
    depots.fail(fast, AccessRefused("no"), time.monotonic())
    assert depots.worthwhile(slow, 1 << 20, 8 << 20)


def test_one_error_tells_what_every_depot_said():
    same = combined(
        "asking", [("a", rebuilt("version_not_found", "not here")), ("b", rebuilt("version_not_found", "nor here"))]
    )
    assert isinstance(same, VersionNotFound)
    mixed = combined("asking", [("a", AccessRefused("no")), ("b", None), ("c", SourceFailed("broke"))])
    assert type(mixed) is SourceFailed
    assert [line.strip() for line in str(mixed).splitlines()[1:]] == ["a: no", "b: sent nothing", "c: broke"]
    alone = AccessRefused("no")
    assert combined("asking", [("a", alone)]) is alone


# -- the URL of a source ----------------------------------------------------------------------------------------------


def test_a_url_names_several_depots_and_how_to_ask_them(tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    url = (
        "https://one:1,[::1]:2,three/depots?connections=3&prefetch=1&bucket_nbytes=65536&stall_s=2.5&spread=1&order=nearest"
    )
    location = urlsplit(url)
    options = dict(pair.split("=") for pair in location.query.split("&"))
    urls, access, settings = parse_options(location, {**options, "token_file": str(token)})

    assert urls == ("https://one:1/depots", "https://[::1]:2/depots", "https://three/depots")
    assert access.token == "0123456789abcdef"
    assert settings == {
        "connections": 3,
        "prefetch": 1,
        "bucket_nbytes": 65536,
        "stall_s": 2.5,
        "spread": 1,
        "order": "nearest",
    }
    receiver = open_receiver(f"{url}&token_file={token}", rank=0)
    assert isinstance(receiver, HttpReceiver)
    assert receiver.url == "https://one:1,[::1]:2,three:443/depots"
    assert HttpReceiver(["http://a:1", "https://b:2", "http://a:1"]).url == "http://a:1, https://b:2"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://", "must name the host"),
        ("http://one:1,,two:2", "must name the host"),
        ("http://one:1?connections=0&stall_s=x", r"connections=0.*stall_s=x"),
        ("http://one:1?prefetch=many", "prefetch=many"),
        ("http://one:1?nonsense=1", "unknown option.*nonsense"),
        ("http://one:1?token_file=/no/such/file", "token"),
        ("https://one:1?ca_file=/no/such/file", "certificates"),
        ("http://one:x", "not the URL of a depot"),
        ("http://me:secret@one:1", "token_file"),
        ("file://elsewhere/path", "must name a directory on this host"),
        ("ipc://", "must name a directory on this host"),
        ("http://one:1?stall_s=nan", "stall_s=nan"),
        ("http://one:1?order=random", "listed or nearest"),
    ],
)
def test_what_a_url_gets_wrong_is_said_without_its_secrets(url, why):
    with pytest.raises(InvalidInput, match=why) as refused:
        open_receiver(url, rank=0)
    assert "secret" not in str(refused.value)


def test_an_unknown_scheme_lists_those_that_there_are():
    with pytest.raises(UnknownSource, match="http://, https://"):
        open_receiver("gopher://host", rank=0)
    with pytest.raises(WeightcastError):
        HttpReceiver([])
