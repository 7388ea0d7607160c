"""Who may ask a depot: tokens and TLS, with clients that have the right ones, wrong ones and none."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl

import pytest
from depot_stand import (
    CERT,
    KEY,
    WAIT_S,
    ask,
    ask_on,
    connected,
    eventually,
    file_path,
    is_cut,
    nothing_left,
    part_bytes,
    raw,
    serving,
    status_of,
    tensors,
)

from weightcast import Store
from weightcast.depot.access import server_tls
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf
from weightcast.errors import InvalidInput, StorageFailed

TOKEN = "s3cret-token"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("depot") / "store")
    store.publish("step_1", tensors(elements=1_000_000))
    return store


@pytest.fixture(scope="module")
def clean():
    with nothing_left():
        yield


@pytest.fixture(scope="module")
def guarded(clean, store):
    with serving(store, token=TOKEN) as depot:
        yield depot


@pytest.fixture(scope="module")
def encrypted(clean, store):
    with serving(store, tls=server_tls(CERT, KEY), stall_s=1.0) as depot:
        yield depot


def trusting():
    return ssl.create_default_context(cafile=str(CERT))


@contextlib.contextmanager
def secure(depot, trust=None):
    connection = http.client.HTTPSConnection("127.0.0.1", depot.port, timeout=WAIT_S, context=trust or trusting())
    with contextlib.closing(connection):
        yield connection


PATHS = ("/v1/versions", "/v1/newest", "/versions/step_1/manifest.json", file_path(), "/v1/receivers", "/nothing")


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_told_without_the_token(guarded, path):
    answer = ask(guarded, path)

    assert (answer.status, answer.json["code"]) == (401, "access_refused")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert TOKEN not in answer.json["message"]


@pytest.mark.parametrize(
    "field",
    [
        "", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer x" * 500,
        f"Bearer {TOKEN.upper()}", f"Bearer {TOKEN} {TOKEN}", f"Bearer {TOKEN}\xe4", "Bearer \xff\xfe", f"Bearer {TOKEN},x",
    ],
)  # fmt: skip
def test_another_token_is_refused(guarded, field):
    assert ask(guarded, "/v1/versions", Authorization=field).status == 401


@pytest.mark.parametrize("field", [f"Bearer {TOKEN}", f"bearer   {TOKEN}  "])
def test_the_token_opens_everything(guarded, field):
    assert ask(guarded, "/v1/versions", Authorization=field).status == 200
    assert ask(guarded, "/nothing", Authorization=field).status == 404


def test_health_needs_no_token(guarded):
    assert ask(guarded, "/health").status == 200


def test_a_body_without_a_token_is_not_even_read(guarded):
    answer = raw(guarded, b"POST /v1/acks HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n", end=False)

    assert status_of(answer) == 401


@pytest.mark.parametrize("token", ["", "two words", "line\nend", "ümlaut", "x" * 5000])
def test_a_token_that_cannot_be_sent_is_refused_at_once(store, token):
    with StoredShelf(store.path) as shelf, nothing_left(), pytest.raises(InvalidInput, match="token"):
        Depot(shelf, token=token)


def test_files_come_over_tls(encrypted, store):
    with secure(encrypted) as connection:
        assert encrypted.url.startswith("https://")
        assert ask_on(connection, file_path()).body == part_bytes(store)
        assert ask_on(connection, file_path(), Range="bytes=5-9").body == part_bytes(store)[5:10]


def test_a_client_that_does_not_know_the_certificate_goes_away(encrypted):
    with secure(encrypted, ssl.create_default_context()) as connection, pytest.raises(ssl.SSLCertVerificationError):
        ask_on(connection, "/health")
    with secure(encrypted) as connection:
        assert ask_on(connection, "/health").status == 200


def test_plain_http_is_not_answered_where_tls_is_spoken(encrypted):
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        answer = raw(encrypted, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", end=False)
    assert not answer.startswith(b"HTTP")


def test_a_client_that_does_not_shake_hands_is_dropped_and_keeps_nobody_waiting(encrypted):
    with connected(encrypted) as silent, connected(encrypted) as garbled:
        garbled.sendall(os.urandom(3))
        with secure(encrypted) as connection:
            assert ask_on(connection, "/health").status == 200
        assert is_cut(silent)
        assert is_cut(garbled)


def test_a_client_that_stops_reading_in_the_middle_of_tls_is_dropped(encrypted):
    raw_socket = connected(encrypted)
    with trusting().wrap_socket(raw_socket, server_hostname="127.0.0.1") as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(20):
            sock.sendall(f"GET {file_path()} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        sock.recv(1000)
        eventually(lambda: encrypted.stats().connections == 0, "the end of the connection")


def test_closing_cuts_encrypted_connections_too(store):
    with nothing_left(), serving(store, tls=server_tls(CERT, KEY)) as depot, secure(depot) as connection:
        assert ask_on(connection, "/health").status == 200
        with connected(depot):
            eventually(lambda: depot.stats().connections == 2, "two connections")
            depot.close()
        with pytest.raises((OSError, http.client.HTTPException)):
            ask_on(connection, "/health")


def test_certificates_that_cannot_be_used_are_refused(tmp_path):
    (tmp_path / "nonsense.pem").write_text("nonsense")

    with pytest.raises(InvalidInput, match="PEM"):
        server_tls(tmp_path / "nonsense.pem", KEY)
    with pytest.raises(StorageFailed, match="No such file"):
        server_tls(tmp_path / "none.pem", KEY)
