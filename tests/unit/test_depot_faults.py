"""Clients that go away, stop reading or come in crowds, and files that change under a depot: nothing hangs or stays."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import struct
import threading
import time

import numpy as np
import pytest
from depot_stand import (
    CERT,
    KEY,
    PART,
    WAIT_S,
    ask,
    connected,
    eventually,
    file_path,
    nothing_left,
    part_bytes,
    rest_of,
    serving,
    status_of,
    tensors,
)

from weightcast import Store
from weightcast.depot.access import server_tls
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf

NBYTES = 64 << 20
ASK = f"GET {file_path()} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("large") / "store")
    store.publish("step_1", {"a": np.arange(NBYTES // 4, dtype=np.int32)})
    return store


@pytest.fixture
def depot(large):
    with nothing_left():
        with serving(large, stall_s=0.5) as depot:
            yield depot
        gc.collect()


def begun(depot, request=ASK):
    """A client that has asked for the file and has read its first bytes, with little room for more."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    sock.settimeout(WAIT_S)
    sock.connect(("127.0.0.1", depot.port))
    sock.sendall(request)
    assert sock.recv(1000).startswith(b"HTTP/1.1 20")
    return sock


def is_served(depot):
    return ask(depot, "/health").status == 200


@pytest.mark.parametrize("way", ["closes", "resets", "half closes"])
def test_a_client_that_goes_away_while_it_is_sent_a_file_costs_nothing(depot, way):
    sock = begun(depot)
    if way == "resets":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if way == "half closes":
        sock.shutdown(socket.SHUT_WR)
        assert len(rest_of(sock)) > NBYTES - 1000
    sock.close()

    eventually(lambda: depot.stats().connections == 0, "the end of the connection")
    assert is_served(depot)


def test_a_client_that_stops_reading_is_dropped(depot):
    sock = begun(depot)

    eventually(lambda: depot.stats().connections == 0, "the end of the connection")
    assert is_served(depot)
    with sock, pytest.raises(ConnectionResetError):
        rest_of(sock)


def test_a_client_that_reads_slowly_but_reads_is_served_to_the_end(large):
    with serving(large, stall_s=0.5) as depot:
        sock = begun(depot, ASK.replace(b"\r\n\r\n", b"\r\nRange: bytes=0-3999999\r\nConnection: close\r\n\r\n"))
        began, data = time.monotonic(), b""
        while more := sock.recv(100_000):
            data += more
            time.sleep(0.02)
        sock.close()
    assert time.monotonic() - began > 0.5
    assert data.endswith(part_bytes(large)[3_900_000:4_000_000])


def test_closing_while_files_are_sent_cuts_them(large):
    with nothing_left():
        with serving(large) as depot:
            socks = [begun(depot) for _ in range(5)]
            depot.close()
            assert depot.stats().connections == 0
            for sock in socks:
                received = 0
                with sock, contextlib.suppress(ConnectionResetError):
                    received = len(rest_of(sock))
                assert received < NBYTES
        gc.collect()


def test_fifty_clients_of_whom_some_go_are_all_served(depot, large):
    data, wrong = part_bytes(large), []

    def client(index):
        rng = np.random.default_rng(index)
        for _ in range(3):
            first = int(rng.integers(0, len(data) - 300_000))
            if index % 5 == 0:
                begun(depot).close()
            elif ask(depot, file_path(), Range=f"bytes={first}-{first + 299_999}").body != data[first : first + 300_000]:
                wrong.append(index)

    clients = [threading.Thread(target=client, args=(index,)) for index in range(50)]
    for one in clients:
        one.start()
    for one in clients:
        one.join(WAIT_S)
    assert not wrong
    eventually(lambda: depot.stats().connections == 0, "the end of all connections")


def test_gc_under_a_reader_takes_nothing_from_it(tmp_path):
    store = Store(tmp_path / "store")
    store.publish("step_1", {"a": np.arange(NBYTES // 4, dtype=np.int32)})
    data = part_bytes(store)
    with nothing_left():
        with serving(store) as depot:
            sock = begun(depot, ASK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            store.publish("step_2", tensors(), mode="full")
            store.gc(keep_last=1)
            assert rest_of(sock).endswith(data[1000:])
            sock.close()
            later = ask(depot, file_path(), Range="bytes=-1000")
            assert (later.status, later.body) == (206, data[-1000:])
            assert ask(depot, file_path(version="step_2")).status == 200
        gc.collect()


def test_a_truncated_part_is_an_error_before_it_is_sent(tmp_path):
    store = Store(tmp_path / "store")
    store.publish("step_1", tensors())
    with serving(store) as depot:
        assert ask(depot, file_path()).status == 200
        os.truncate(store.path / "versions" / "step_1" / PART, 100)
        answer = ask(depot, file_path())
        assert (answer.status, answer.json["code"]) == (502, "part_corrupt")
        assert is_served(depot)


def test_a_part_that_is_truncated_while_it_is_sent_cuts_the_answer_and_not_the_depot(tmp_path):
    store = Store(tmp_path / "store")
    store.publish("step_1", {"a": np.arange(NBYTES // 4, dtype=np.int32)})
    with serving(store) as depot:
        sock = begun(depot)
        os.truncate(store.path / "versions" / "step_1" / PART, 4096)
        received = 0
        with sock, contextlib.suppress(ConnectionResetError):
            received = len(rest_of(sock))
        assert received < NBYTES
        assert is_served(depot)


def test_a_store_that_is_removed_leaves_a_depot_that_says_so(tmp_path):
    store = Store(tmp_path / "store")
    store.publish("step_1", tensors())
    with StoredShelf(store.path, linger_s=0.0, keep_s=0.0) as shelf, Depot(shelf) as depot:
        assert ask(depot, file_path()).status == 200
        shutil.rmtree(store.path)
        assert ask(depot, "/v1/versions").json == {"newest": None, "versions": []}
        assert ask(depot, "/v1/newest").json["code"] == "version_not_set"
        eventually(lambda: ask(depot, file_path()).status == 404, "the end of what was mapped")


def test_many_clients_over_tls_leave_nothing(large):
    import http.client
    import ssl

    with nothing_left():
        with serving(large, tls=server_tls(CERT, KEY)) as depot:
            trust, bodies = ssl.create_default_context(cafile=str(CERT)), []

            def client(index):
                connection = http.client.HTTPSConnection("127.0.0.1", depot.port, timeout=WAIT_S, context=trust)
                connection.request("GET", file_path(), headers={"Range": f"bytes={index}-{index + 999_999}"})
                response = connection.getresponse()
                bodies.append((index, response.read() if index % 2 else b""))
                connection.close()

            clients = [threading.Thread(target=client, args=(index,)) for index in range(10)]
            for one in clients:
                one.start()
            for one in clients:
                one.join(WAIT_S)
            data = part_bytes(large)
            assert all(not body or body == data[index : index + 1_000_000] for index, body in bodies)
            assert len(bodies) == 10
            eventually(lambda: depot.stats().connections == 0, "the end of all connections")
        gc.collect()


def test_a_connection_that_says_nothing_is_no_reason_to_wait_for(depot):
    with connected(depot), connected(depot) as second:
        second.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert status_of(rest_of(second)) == 200
