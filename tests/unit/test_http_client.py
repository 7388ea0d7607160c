"""Requests to one depot: right answers, wrong ones, and none."""

import logging
import socket
import ssl
import threading
import time

import msgspec
import numpy as np
import pytest

from http_depots import CERT, KEY, Scripted, depots, publish, soon
from weightcast.clock import Deadline
from weightcast.errors import (
    AccessRefused,
    DeadlineExceeded,
    InvalidInput,
    ManifestCorrupt,
    NotFound,
    SourceFailed,
    UpdateCancelled,
    VersionNotFound,
    WeightcastError,
)
from weightcast.transports.http.access import Access
from weightcast.transports.http.client import DepotClient, OneRange, OtherBytes, parse_address
from weightcast.wire.depot import Catalogue, file_tag

TOKEN = "a-token-that-nobody-should-ever-see"


@pytest.fixture
def asking():
    """Clients that are closed whatever happens."""
    made = []

    def ask(url, **settings):
        made.append(DepotClient(url, **{"stall_s": 5.0, **settings}))
        return made[-1]

    yield ask
    for client in made:
        client.close()


def reply(body: bytes = b"{}", status: str = "200 OK", **headers: str) -> bytes:
    lines = {"Content-Length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


EMPTY = reply(b'{"newest":null,"versions":[]}')


# -- right answers ----------------------------------------------------------------------------------------------------


def test_a_client_reads_everything_that_a_depot_has(store, asking):
    manifest = publish(store)
    with depots(store) as served:
        client = asking(served[0].url)
        assert client.manifest("step_1", deadline=soon()) == manifest
        newest = client.newest(deadline=soon())
        assert (newest.version, newest.root_digest) == ("step_1", manifest.root_digest)
        assert [offer.version for offer in client.catalogue(deadline=soon()).versions] == ["step_1"]
        assert client.newest(deadline=soon(), after="step_1", wait_s=0.1) is None
        for part in manifest.parts:
            whole = (store.path / "versions" / "step_1" / part.file).read_bytes()
            for start, stop in ((0, len(whole)), (0, 1), (len(whole) - 1, len(whole)), (7, 7), (1000, 60_001)):
                memory = bytearray(stop - start + 2)
                client.read(manifest, part.file, start, memoryview(memory)[1:-1], deadline=soon())
                assert memory == b"\0" + whole[start:stop] + b"\0"
        assert served[0].stats().accepted == 1  # one connection for all of it


def test_errors_of_a_depot_are_raised_as_what_they_are_and_name_it(store, asking):
    manifest = publish(store, mib=0.1)
    with depots(store) as served:
        client = asking(served[0].url)
        with pytest.raises(VersionNotFound, match=served[0].url):
            client.manifest("step_9", deadline=soon())
        with pytest.raises(NotFound, match=served[0].url):
            client.read(manifest, "nothing.bin", 0, memoryview(bytearray(4)), deadline=soon())
        size = manifest.parts[0].nbytes
        with pytest.raises(WeightcastError, match=served[0].url):
            client.read(manifest, manifest.parts[0].file, size + 1, memoryview(bytearray(4)), deadline=soon())
        with pytest.raises(SourceFailed, match="asked for bytes"):  # a shorter range than was asked for
            client.read(manifest, manifest.parts[0].file, size - 2, memoryview(bytearray(4)), deadline=soon())
        assert client.newest(deadline=soon()).version == "step_1"


def test_other_bytes_under_the_same_name_are_refused_before_one_is_written(store, asking):
    manifest = publish(store, mib=0.1)
    part = msgspec.structs.replace(manifest.parts[0], pieces=bytes(len(manifest.parts[0].pieces)))
    other = msgspec.structs.replace(manifest, parts=(part, *manifest.parts[1:]))
    memory = bytearray(b"x" * 100)
    with depots(store) as served:
        client = asking(served[0].url)
        with pytest.raises(OtherBytes, match=served[0].url):
            client.read(other, manifest.parts[0].file, 0, memoryview(memory), deadline=soon())
    assert memory == b"x" * 100


# -- access -----------------------------------------------------------------------------------------------------------


def test_a_depot_with_a_token_wants_it_and_nobody_else_gets_to_see_it(store, asking, caplog):
    caplog.set_level(logging.DEBUG)
    publish(store, mib=0.1)
    with depots(store, token=TOKEN) as served:
        assert asking(served[0].url, access=Access(token=TOKEN)).newest(deadline=soon()).version == "step_1"
        for access in (None, Access(token=TOKEN[:-1] + "_")):
            with pytest.raises(AccessRefused, match=served[0].url) as refused:
                asking(served[0].url, access=access).newest(deadline=soon())
            assert TOKEN[:-1] not in str(refused.value)
    assert TOKEN[:-1] not in caplog.text
    assert TOKEN not in repr(Access(token=TOKEN))


def test_a_token_file_is_read_and_what_cannot_be_a_token_is_refused(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    assert Access.read(token_file=path).token == TOKEN
    for text in ("two words", "", "né", "line\nline"):
        path.write_text(text)
        with pytest.raises(InvalidInput, match="token"):
            Access.read(token_file=path)
    with pytest.raises(InvalidInput, match="certificates"):
        Access.read(ca_file=path)


def test_an_encrypted_depot_is_believed_only_with_the_right_certificate(store, asking):
    manifest = publish(store)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERT, KEY)
    with depots(store, tls=context) as served:
        assert served[0].url.startswith("https://")
        client = asking(served[0].url, access=Access.read(ca_file=CERT))
        part = manifest.parts[0]
        memory = bytearray(part.nbytes)
        client.read(manifest, part.file, 0, memoryview(memory), deadline=soon())
        assert memory == (store.path / "versions" / "step_1" / part.file).read_bytes()
        with pytest.raises(SourceFailed, match=r"CERTIFICATE|certificate"):
            asking(served[0].url).newest(deadline=soon())
        with pytest.raises(SourceFailed):
            asking(served[0].url.replace("https", "http")).newest(deadline=soon())
    with depots(store) as served, pytest.raises(SourceFailed, match="https"):
        asking(served[0].url.replace("http", "https"), stall_s=0.3).newest(deadline=soon())


# -- connections ------------------------------------------------------------------------------------------------------


def test_a_connection_that_was_closed_meanwhile_is_replaced_without_a_word(store, asking):
    publish(store, mib=0.1)
    with depots(store, keep_s=0.1) as served:
        client = asking(served[0].url)
        for _ in range(3):
            assert client.newest(deadline=soon()).version == "step_1"
            time.sleep(0.3)
        assert served[0].stats().accepted == 3


def test_a_request_is_repeated_once_if_a_kept_connection_ends_instead_of_an_answer(asking):
    with Scripted(EMPTY, b"", EMPTY, EMPTY) as server:
        client = asking(server.url)
        for _ in range(3):
            client.catalogue(deadline=soon())
        assert server.accepted == 2
    with Scripted(b"", EMPTY) as server, pytest.raises(SourceFailed, match=server.url):
        asking(server.url).catalogue(deadline=soon())  # a new one that ends is not an old one that ended


def test_answers_of_many_threads_are_not_mixed_up(store, asking):
    manifest = publish(store)
    part = manifest.parts[0]
    whole = (store.path / "versions" / "step_1" / part.file).read_bytes()
    wrong = []
    with depots(store) as served:
        client = asking(served[0].url, connections=2)

        def read(seed):
            rng = np.random.default_rng(seed)
            for _ in range(20):
                start = int(rng.integers(0, len(whole) - 70_000))
                memory = bytearray(int(rng.integers(1, 70_000)))
                client.read(manifest, part.file, start, memoryview(memory), deadline=soon())
                if memory != whole[start : start + len(memory)]:
                    wrong.append((start, len(memory)))

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        while served[0].stats().connections > 2:  # the others were closed, as the depot will notice
            time.sleep(0.01)
    assert wrong == []


# -- answers that are wrong -------------------------------------------------------------------------------------------

ODD = {
    "not HTTP": b"\x16\x03\x01\x00\xa5 what?\r\n\r\n",
    "HTTP/2": b"HTTP/2 200\r\ncontent-length: 2\r\n\r\n{}",
    "no status": b"HTTP/1.1 abc\r\nContent-Length: 2\r\n\r\n{}",
    "no colon": b"HTTP/1.1 200 OK\r\nContent-Length 2\r\n\r\n{}",
    "no length": reply(Content_Length=""),
    "chunked": reply(Transfer_Encoding="chunked"),
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a negative length": reply(Content_Length="-2"),
    "a huge length": reply(Content_Length="99999999999999"),
    "an endless head": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
    "another message": reply(b'{"newest": 3}'),
    "no JSON": reply(b"<html>"),
    "a redirect": reply(b"", "302 Found", Location="http://127.0.0.1:1/"),
    "a proxy's own error": reply(b"<html>bad gateway</html>", "502 Bad Gateway"),
    "an unknown code": reply(b'{"code":"of_the_future","message":"who knows"}', "500 Internal Server Error"),
    "its own deadline": reply(b'{"code":"deadline_exceeded","message":"it took too long"}', "504 Gateway Timeout"),
    "a body cut short": reply(Content_Length="200"),
    "nothing": b"",
}


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD)
def test_an_answer_that_makes_no_sense_is_the_sources_failure(answer, asking):
    with Scripted(answer, keep=False) as server, pytest.raises(SourceFailed, match=server.url):
        asking(server.url).catalogue(deadline=soon())


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
def test_a_proxy_that_refuses_access_is_told_from_one_that_is_broken(status, asking):
    with Scripted(reply(b"<html>who are you?", status)) as server, pytest.raises(AccessRefused, match=server.url):
        asking(server.url).catalogue(deadline=soon())


def test_heads_in_several_pieces_and_interim_answers_are_understood(asking):
    with Scripted(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + EMPTY) as server:
        assert asking(server.url).catalogue(deadline=soon()) == Catalogue(None, ())
    with Scripted(EMPTY.replace(b"HTTP/1.1 200 OK", b"HTTP/1.0 200 OK")) as server:
        assert asking(server.url).catalogue(deadline=soon()) == Catalogue(None, ())


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ({"ETag": f'"xxh3-128:{"0" * 32}/100"'}, OtherBytes),
        ({"Content_Range": "bytes 1-5/100"}, SourceFailed),
        ({"Content_Range": ""}, SourceFailed),
        ({"Content_Length": "5"}, SourceFailed),
    ],
)
def test_the_answer_to_a_range_must_be_that_range_of_that_file(store, asking, headers, error):
    manifest = publish(store, mib=0.1)
    file = manifest.parts[0].file
    right = {"ETag": file_tag(manifest, file), "Content_Range": "bytes 0-3/100"}
    memory = bytearray(b"....")
    for tag in (right["ETag"], '"of a server that is no depot"', ""):
        with Scripted(reply(b"good", "206 Partial Content", **right | {"ETag": tag})) as server:
            asking(server.url).read(manifest, file, 0, memoryview(memory), deadline=soon())
            assert memory == b"good"
    with Scripted(reply(b"evil", "206 Partial Content", **{**right, **headers})) as server, pytest.raises(error) as raised:
        asking(server.url).read(manifest, file, 0, memoryview(memory), deadline=soon())
    assert type(raised.value) is error
    assert memory == b"good"


def several(*parts: tuple[str, bytes], **headers: str) -> bytes:
    body = b"".join(b"\r\n--x\r\ncontent-range: bytes %b\r\n\r\n%b" % (where.encode(), data) for where, data in parts)
    kind = {"Content_Type": "multipart/byteranges; boundary=x"}
    return reply(body + b"\r\n--x--\r\n", "206 Partial Content", **kind | headers)


def test_several_ranges_come_in_one_answer_and_the_connection_is_kept(store, asking):
    manifest = publish(store, mib=0.1)
    file = manifest.parts[0].file
    with Scripted(several(("0-3/100", b"good"), ("9-10/100", b"ok")), EMPTY) as server:
        client = asking(server.url)
        with client.opened_ranges(manifest, file, [(0, 4), (9, 11)], deadline=soon()) as response:
            for start, data in ((0, b"good"), (9, b"ok")):
                memory = bytearray(len(data))
                response.begin(start, start + len(data))
                response.readinto(memoryview(memory))
                assert memory == data
        client.catalogue(deadline=soon())
        assert client.takes_several
    assert "Range: bytes=0-3,9-10" in server.requests[0]
    assert server.accepted == 1


@pytest.mark.parametrize(
    "answer",
    [
        reply(b"the whole file"),
        reply(b"good", "206 Partial Content", Content_Range="bytes 0-3/100"),
        several(("0-10/100", b"good.....ok")),
        several(("9-10/100", b"ok"), ("0-3/100", b"good")),
        several(("0-3/100", b"good"), Content_Length="40"),
    ],
)
def test_a_server_that_answers_several_ranges_otherwise_is_asked_for_one_from_then_on(store, asking, answer):
    manifest = publish(store, mib=0.1)
    with Scripted(answer) as server:
        client = asking(server.url)
        with (
            pytest.raises(OneRange),
            client.opened_ranges(manifest, manifest.parts[0].file, [(0, 4), (9, 11)], deadline=soon()) as response,
        ):
            response.begin(0, 4)
        assert not client.takes_several


def read_ranges(response, memories):
    for start, memory in memories.items():
        response.begin(start, start + len(memory))
        response.readinto(memoryview(memory))


@pytest.mark.parametrize("rest", [b"", b"\r\n--x\r\ncontent-range: bytes 9-10/100"], ids=["ended", "cut off"])
def test_a_server_that_answers_fewer_ranges_than_asked_is_not_waited_for(store, asking, rest):
    manifest = publish(store, mib=0.1)
    body = b"--x\r\nContent-Range: bytes 0-3/100\r\n\r\ngood" + rest
    with Scripted(reply(body, "206 Partial Content", Content_Type="multipart/byteranges; boundary=x")) as server:
        client, memory = asking(server.url), bytearray(4)
        began = time.monotonic()
        several_ranges = client.opened_ranges(manifest, manifest.parts[0].file, [(0, 4), (9, 11)], deadline=soon())
        with pytest.raises(OneRange), several_ranges as response:
            read_ranges(response, {0: memory, 9: bytearray(2)})
        assert time.monotonic() - began < 2
        assert memory == b"good"
        assert not client.takes_several


def test_a_manifest_with_a_flipped_bit_or_of_another_version_is_refused(store, asking):
    publish(store, mib=0.1)
    data = bytearray((store.path / "versions" / "step_1" / "manifest.json").read_bytes())
    with Scripted(reply(bytes(data))) as server, pytest.raises(SourceFailed, match="describes step_1"):
        asking(server.url).manifest("step_2", deadline=soon())
    data[len(data) // 2] ^= 1
    with Scripted(reply(bytes(data))) as server, pytest.raises(ManifestCorrupt, match=server.url):
        asking(server.url).manifest("step_1", deadline=soon())


# -- no answer --------------------------------------------------------------------------------------------------------


def test_a_depot_that_says_nothing_costs_its_own_deadline_or_the_callers(asking):
    with Scripted() as server:
        began = time.monotonic()
        with pytest.raises(SourceFailed, match=r"silent for 0\.3 s"):
            asking(server.url, stall_s=0.3).catalogue(deadline=soon())
        with pytest.raises(DeadlineExceeded, match=server.url):
            asking(server.url).catalogue(deadline=soon(0.3))
        assert time.monotonic() - began < 4  # and not the five seconds of a stall


def test_cancelling_or_closing_ends_the_wait_at_once(asking):
    cancelled = threading.Event()
    with Scripted() as server:
        client = asking(server.url, stall_s=20)
        threading.Timer(0.2, cancelled.set).start()
        began = time.monotonic()
        with pytest.raises(UpdateCancelled):
            client.catalogue(deadline=Deadline.after(20, cancelled=cancelled))
        threading.Timer(0.2, client.close).start()
        with pytest.raises(SourceFailed, match=server.url):
            client.catalogue(deadline=soon())
        assert time.monotonic() - began < 5


def test_a_host_that_does_not_let_anybody_in_is_given_up(asking):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        try:
            with pytest.raises(SourceFailed, match="connecting"):
                asking(f"http://127.0.0.1:{address[1]}", connect_s=0.3).catalogue(deadline=soon())
        finally:
            for one in waiting:
                one.close()
    with pytest.raises(SourceFailed, match="cannot be reached"):
        asking("http://127.0.0.1:1").catalogue(deadline=soon())
    with pytest.raises(SourceFailed, match="cannot be found"):
        asking("http://no-such-host.invalid:80").catalogue(deadline=soon())


# -- addresses --------------------------------------------------------------------------------------------------------


def test_urls_of_depots_are_read_and_written_alike():
    for url in ("http://host:7070", "https://host:443", "http://[::1]:80", "http://gateway:80/depots/7"):
        assert parse_address(url).url == url
    assert parse_address("http://host").url == "http://host:80"
    assert parse_address("https://host/").url == "https://host:443"


@pytest.mark.parametrize(
    "url", ["host:80", "ftp://host", "http://", "http://host:x", "http://host:99999", "http://host?x=1", "http://[::1"]
)
def test_what_is_no_url_of_a_depot_is_refused(url):
    with pytest.raises(InvalidInput, match="not the URL of a depot"):
        parse_address(url)


def test_a_password_in_a_url_is_refused_and_not_repeated():
    with pytest.raises(InvalidInput, match="token_file") as refused:
        parse_address("http://me:secret@host:80")
    assert "secret" not in str(refused.value)
