"""HTTP as a depot speaks it: whole requests, half ones, wrong ones and hostile ones, over real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest
from depot_stand import (
    PART,
    WAIT_S,
    ask,
    connected,
    eventually,
    file_path,
    is_cut,
    nothing_left,
    part_bytes,
    raw,
    rest_of,
    serving,
    status_of,
    tensors,
)
from hypothesis import given
from hypothesis import strategies as st

from weightcast import Store
from weightcast.depot.connection import Connection
from weightcast.depot.exchange import Reply, Route
from weightcast.depot.heads import MAX_BODY_NBYTES, MAX_HEAD_NBYTES, Head, parse_head
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf
from weightcast.errors import Corrupt, InvalidInput, SourceFailed

STALL_S = 0.4


def echo(request, _stack):
    return Reply(200, (request.body,), len(request.body), {"X-Method": request.method})


def repeated(count):
    def handler(_request, _stack):
        return Reply(200, (b"x" * 100_000 for _ in range(count)), 300_000)

    return handler


def failing(error):
    def handler(_request, _stack):
        raise error

    return handler


def breaking(_request, stack):
    def blocks():
        yield b"x" * 100_000
        raise Corrupt("the rest is gone")

    return Reply(200, blocks(), 200_000)


ROUTES = [
    Route("POST", "/echo", echo),
    Route("GET", "/echo/{a}/{b}", lambda request, _: Reply(200, headers={"X-Path": repr(sorted(request.path.items()))})),
    Route("GET", "/query", lambda request, _: Reply(200, headers={"X-Query": repr(sorted(request.query.items()))})),
    Route("GET", "/less", repeated(2)),
    Route("GET", "/just", repeated(3)),
    Route("GET", "/more", repeated(4)),
    Route("GET", "/breaking", breaking),
    Route("GET", "/corrupt", failing(Corrupt("it is damaged"))),
    Route("GET", "/source", failing(SourceFailed("upstream is gone"))),
    Route("GET", "/mistake", failing(ZeroDivisionError("a mistake"))),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("depot") / "store")
    store.publish("step_1", tensors())
    return store


@pytest.fixture(scope="module")
def depot(store):
    with nothing_left(), serving(store, routes=ROUTES, stall_s=STALL_S, keep_s=WAIT_S) as depot:
        yield depot


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET http://x:1/health?a=b HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
        (b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"GET  /health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /hea lth HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /%ff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\nHost: x\n\n", 400),
        (GET + b"A : b\r\n\r\n", 400),
        (GET + b" folded: b\r\n\r\n", 400),
        (GET + b"no colon\r\n\r\n", 400),
        (GET + b"A: b\x00c\r\n\r\n", 400),
        (GET + b"Host: y\r\n\r\n", 400),
        (b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"BREW /health HTTP/1.1\r\nHost: x\r\n\r\n", 501),
        (b"DELETE /health HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"OPTIONS /v1/newest HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\n\r\n", 411),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 411),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc", 400),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: -3\r\n\r\nabc", 400),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3, 3\r\n\r\nabc", 400),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_NBYTES + 1), 413),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nExpect: tea\r\nContent-Length: 3\r\n\r\nabc", 417),
        (GET + b"A: " + b"b" * MAX_HEAD_NBYTES + b"\r\n\r\n", 431),
        (b"GET /" + b"b" * MAX_HEAD_NBYTES, 431),
        (GET + b"A: b\r\n" * 200 + b"\r\n", 431),
    ],
    ids=lambda value: value[:60].decode("latin-1") if isinstance(value, bytes) else str(value),
)
def test_a_request_is_answered_with_its_status(depot, request_bytes, status):
    answer = raw(depot, request_bytes)

    assert status_of(answer) == status
    head, _, body = answer.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    assert len(body) == (0 if request_bytes.startswith(b"HEAD") else length)
    assert status < 400 or b'"code"' in body


def test_only_what_a_server_can_go_on_after_leaves_the_connection_open(depot):
    after_404 = raw(depot, b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n" + GET + b"\r\n")
    after_close = raw(depot, GET + b"Connection: Close\r\n\r\n" + GET + b"\r\n")
    after_400 = raw(depot, GET + b"A : b\r\n\r\n" + GET + b"\r\n")
    after_body = raw(depot, b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc" + GET + b"\r\n")

    assert after_404.count(b"HTTP/1.1 ") == 2
    assert [answer.count(b"HTTP/1.1 ") for answer in (after_close, after_400, after_body)] == [1, 1, 1]
    assert all(b"Connection: close" in answer for answer in (after_close, after_400, after_body))


def test_requests_that_come_at_once_are_answered_in_their_order(depot, store):
    ranges = [(7 * index, 7 * index + 5) for index in range(50)]
    ranged = b"".join(f"GET {file_path()} HTTP/1.1\r\nHost: x\r\nRange: bytes={a}-{b}\r\n\r\n".encode() for a, b in ranges)

    answers = raw(depot, ranged).split(b"HTTP/1.1 206 Partial Content\r\n")[1:]

    assert [answer.partition(b"\r\n\r\n")[2] for answer in answers] == [part_bytes(store)[a : b + 1] for a, b in ranges]


def test_a_request_that_comes_byte_by_byte_is_understood(depot):
    with connected(depot) as sock:
        for byte in b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello":
            sock.sendall(bytes([byte]))
        assert rest_of(sock).endswith(b"\r\n\r\nhello")


def test_a_body_is_asked_for_where_the_client_waits_for_that(depot):
    head = b"POST /%s HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    with connected(depot) as sock:
        sock.sendall(head % b"echo")
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"hello")
        assert rest_of(sock).endswith(b"hello")
    with connected(depot) as sock:
        sock.sendall(head % b"nothing")
        assert status_of(rest_of(sock)) == 404


def test_paths_and_queries_are_decoded_after_they_were_split(depot):
    assert ask(depot, "/echo/x%2Fy/%C3%A4%20").headers["x-path"] == "[('a', 'x/y'), ('b', 'ä ')]"
    assert ask(depot, "/query?a=1%26b&c=&a=2").headers["x-query"] == "[('a', '2'), ('c', '')]"


def test_a_large_body_comes_whole(depot):
    body = os.urandom(3 << 20)

    assert ask(depot, "/echo", "POST", body).body == body


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab"])
def test_a_client_that_stops_in_the_middle_of_a_request_is_told_so_and_dropped(store, sent):
    with serving(store, routes=ROUTES, stall_s=0.2, keep_s=0.3) as depot, connected(depot) as sock:
        sock.sendall(sent)
        answer = rest_of(sock)

    assert answer == b"" if not sent else status_of(answer) == 408


def test_a_client_that_sends_a_byte_now_and_then_is_dropped_all_the_same(depot):
    with connected(depot) as sock:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() < began + WAIT_S:
                sock.sendall(b"G")
                sock.settimeout(STALL_S / 10)
                with contextlib.suppress(TimeoutError):
                    if sock.recv(1000):
                        break
        assert time.monotonic() < began + WAIT_S


def test_an_idle_connection_is_closed_after_a_while(store):
    with serving(store, keep_s=0.2) as depot, connected(depot) as sock:
        sock.sendall(GET + b"\r\n")
        assert rest_of(sock).endswith(b'{"status":"ok"}')


def test_errors_of_handlers_are_told_by_their_codes(depot):
    assert (ask(depot, "/corrupt").status, ask(depot, "/corrupt").json["code"]) == (502, "corrupt")
    assert (ask(depot, "/source").status, ask(depot, "/source").json["code"]) == (500, "source_failed")
    assert (ask(depot, "/mistake").status, ask(depot, "/mistake").json["code"]) == (500, "error")
    assert "ZeroDivision" not in ask(depot, "/mistake").json["message"]


@pytest.mark.parametrize("path", ["/less", "/more", "/breaking"])
def test_an_answer_that_is_not_what_was_promised_ends_the_connection(depot, path):
    answer = raw(depot, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() + GET + b"\r\n", end=False)

    assert answer.count(b"HTTP/1.1 ") == 1
    body = answer.partition(b"\r\n\r\n")[2]
    assert len(body) == {"/less": 200_000, "/more": 300_000, "/breaking": 100_000}[path]


def test_an_answer_of_several_blocks_comes_whole(depot):
    assert ask(depot, "/just").body == b"x" * 300_000


def test_fifty_clients_are_served_at_a_time(depot, store):
    data, wrong, start = part_bytes(store), [], threading.Barrier(50)

    def client(index):
        start.wait(WAIT_S)
        for turn in range(4):
            first = 13 * index + turn
            if ask(depot, file_path(), Range=f"bytes={first}-{first + 999}").body != data[first : first + 1000]:
                wrong.append(index)

    clients = [threading.Thread(target=client, args=(index,)) for index in range(50)]
    for one in clients:
        one.start()
    for one in clients:
        one.join(WAIT_S)
    assert not wrong


@pytest.mark.parametrize("lingers_s", [0, 2])
def test_a_full_depot_lets_an_idle_client_go_and_refuses_if_all_are_busy(store, monkeypatch, lingers_s):
    run = Connection.run
    monkeypatch.setattr(Connection, "run", lambda self: (run(self), time.sleep(lingers_s)))  # it made room once, not twice
    done = threading.Event()
    busy = Route("GET", "/busy", lambda _request, _stack: (done.wait(WAIT_S), Reply(204))[1])
    with (
        serving(store, max_connections=2, routes=[busy]) as depot,
        connected(depot) as first,
        connected(depot) as second,
        contextlib.closing(contextlib.ExitStack()) as ending,
    ):
        ending.callback(done.set)
        for sock in (first, second):
            sock.sendall(GET + b"\r\n")
            assert sock.recv(1000)
        second.sendall(b"GET /busy HTTP/1.1\r\nHost: x\r\n\r\n")
        eventually(lambda: depot.stats().requests == 3, "the third request")
        with connected(depot) as third:
            third.sendall(b"GET /busy HTTP/1.1\r\nHost: x\r\n\r\n")
            assert first.recv(1000) == b""
            eventually(lambda: depot.stats().requests == 4, "the fourth request")
            with connected(depot) as fourth:
                refusal = rest_of(fourth)
                assert (status_of(refusal), b'"overloaded"' in refusal) == (503, True)
    assert depot.stats().refused == 1


def test_a_waiting_request_ends_when_its_client_goes(store):
    with serving(store) as depot:
        with connected(depot) as sock:
            sock.sendall(b"GET /v1/newest?after=step_1&wait=50 HTTP/1.1\r\nHost: x\r\n\r\n")
            eventually(lambda: depot.stats().requests == 1, "the request")
        eventually(lambda: depot.stats().connections == 0, "the end of the connection")


def test_stats_count_what_was_done(store):
    with serving(store) as depot:
        ask(depot, file_path())
        ask(depot, "/nothing")
        eventually(lambda: depot.stats().connections == 0, "the end of the connections")
        stats = depot.stats()
    assert (stats.accepted, stats.requests, stats.failures) == (2, 2, 0)
    assert stats.sent_nbytes > len(part_bytes(store))


def test_closing_twice_and_while_clients_wait_leaves_nothing(store):
    with nothing_left():
        shelf = StoredShelf(store.path)
        depot = Depot(shelf)
        waiting = [connected(depot) for _ in range(3)]
        waiting[0].sendall(b"GET /v1/newest?after=step_1&wait=50 HTTP/1.1\r\nHost: x\r\n\r\n")
        waiting[1].sendall(b"GET /hea")
        eventually(lambda: depot.stats().accepted == 3, "three connections")
        depot.close()
        depot.close()
        for sock in waiting:
            with sock:
                assert is_cut(sock)
        with pytest.raises(OSError, match="refused"):
            connected(depot)
        shelf.close()
        shelf.close()


def test_a_depot_that_is_forgotten_closes_itself(store):
    with nothing_left(), StoredShelf(store.path) as shelf:
        depot = Depot(shelf)
        with connected(depot) as sock:
            del depot
            assert is_cut(sock)


def test_a_child_of_a_fork_does_not_end_the_depot(store):
    with serving(store) as depot:
        child = os.fork()
        if not child:
            depot.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert ask(depot, "/health").status == 200


@pytest.mark.parametrize(
    "listen", ["", "8300", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "no.such.host.invalid:0", "[::1:0"]
)
def test_an_address_that_cannot_be_listened_on_is_refused(store, listen):
    with StoredShelf(store.path) as shelf, nothing_left(), pytest.raises(InvalidInput, match="listen"):
        Depot(shelf, listen)


def test_a_port_in_use_is_refused(store):
    with serving(store) as depot, StoredShelf(store.path) as shelf, pytest.raises(InvalidInput, match="in use"):
        Depot(shelf, f"127.0.0.1:{depot.port}")


def test_a_depot_listens_on_ipv6_too(store):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with serving(store, listen="[::1]:0") as depot:
        assert depot.url == f"http://[::1]:{depot.port}"
        with socket.create_connection(("::1", depot.port), timeout=WAIT_S) as sock:
            sock.sendall(GET + b"Connection: close\r\n\r\n")
            assert status_of(rest_of(sock)) == 200


def test_routes_that_are_given_twice_are_refused(store):
    with StoredShelf(store.path) as shelf, pytest.raises(InvalidInput, match="twice"):
        Depot(shelf, routes=[Route("GET", "/health", echo)])


WORDS = [
    b"GET", b"POST", b" ", b"/", b"/health", b"%", b"%41", b"?a=b", b"HTTP/1.1", b"\r\n", b"\n", b"Host: x", b":", b"\x00",
    b"Content-Length: ", b"5", b"-1", b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"\xff", b"[", b"http://[",
]  # fmt: skip


@given(words=st.lists(st.sampled_from(WORDS) | st.binary(max_size=5), max_size=30))
def test_whatever_comes_as_a_head_is_understood_or_refused(words):
    read = parse_head(b"GET " + b"".join(words) + b"\r\n\r\n")

    assert isinstance(read, Head) or 400 <= read.status < 600


def test_heads_are_read_into_their_parts():
    head = parse_head(
        b"GET /a%20b/c?d=e HTTP/1.1\r\nHost: x\r\nX-Y:  z \t\r\nAccept: 1\r\nAccept: 2\r\nConnection: a, close\r\n\r\n"
    )

    assert isinstance(head, Head)
    assert (head.segments, head.query, head.keeps) == (("a b", "c"), {"d": "e"}, False)
    assert (head.headers["x-y"], head.headers["accept"]) == ("z", "1, 2")
    assert PART not in head.path
