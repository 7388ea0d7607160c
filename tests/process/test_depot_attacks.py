"""Attacks on a real depot process: connections that hold places, ports, and acknowledgements that hold versions."""

from __future__ import annotations

import contextlib
import http.client
import inspect
import os
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest

from weightcast import DepotPublisher, LiveModel, Store
from weightcast.clock import Deadline
from weightcast.errors import Conflict
from weightcast.store.acks import MAX_PINNED_PER_CLIENT, MAX_RECEIVERS_PER_CLIENT, PINNED_S
from weightcast.transports.http.access import Access
from weightcast.transports.http.client import DepotClient
from weightcast.transports.nixl.receiver import NixlReceiver
from weightcast.wire.depot import Ack, Acknowledged
from weightcast.wire.nixl import GrantQuery

WAIT_S = 30
ATTACKERS = 1024
ANSWERED_S = 15.0  # half of what the depot gave a client that stops, and answered 503 to all others meanwhile
HALF_SENT_S = 2.5  # half of what a half-sent head is given: nothing has run out by then
TOKEN = "s3cret"
TLS = Path(__file__).parent.parent / "data" / "tls"


@pytest.fixture(autouse=True)
def _descriptors() -> Iterator[None]:
    """Enough open files for all attackers in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ATTACKERS + 512
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"{wanted} open files are needed, and {hard} allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.publish("step_1", {"a": np.arange(3000, dtype=np.float32)})
    return store


@contextlib.contextmanager
def depot_port(tmp_path: Path, *arguments: object, descriptors: int = 4096) -> Iterator[int]:
    """`weightcast depot` with so many open files at most; its port."""
    port_file, output = tmp_path / "port", tmp_path / "output"
    command = [sys.executable, "-m", "weightcast", "depot", "--listen", "127.0.0.1:0", "--port-file", str(port_file)]
    limits = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))}
    with output.open("wb") as out:
        process = subprocess.Popen([*command, *map(str, arguments)], stdout=out, stderr=out, **limits)
    try:
        end = time.monotonic() + WAIT_S
        while not port_file.exists():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < end, output.read_text()
            time.sleep(0.02)
        yield int(port_file.read_text())
        assert process.poll() is None, output.read_text()
    finally:
        process.kill()
        process.wait(WAIT_S)


@contextlib.contextmanager
def attackers(port: int, sent: bytes, *, addresses: int = 1, count: int = ATTACKERS) -> Iterator[list[socket.socket]]:
    """Connections that each send this, take nothing and stay."""
    with contextlib.ExitStack() as stack:
        made = []
        for index in range(count):
            source = (f"127.0.1.{index % addresses + 1}", 0)
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.settimeout(WAIT_S)
            one.bind(source)
            one.connect(("127.0.0.1", port))
            one.setblocking(False)
            with contextlib.suppress(OSError):  # its buffer is full, or it had to make room
                one.send(sent)
            made.append(one)
        yield made


def held(made: list[socket.socket]) -> int:
    """How many of these connections the depot has not ended."""
    count = 0
    for one in made:
        try:
            count += one.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            count += 1
        except OSError:
            pass
    return count


def answers(port: int, count: int = 20, **headers: str) -> list[int]:
    """The statuses of requests of a client of its own, each on a new connection."""
    statuses = []
    for _ in range(count):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWERED_S)) as connection:
            connection.request("GET", "/v1/newest", headers=headers)
            statuses.append(connection.getresponse().status)
    return statuses


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
ATTACKS = {
    "one byte": b"G",
    "nothing": b"",
    "half a head": b"GET /v1/newest HTTP/1.1\r\nHost: ",
    "half a body without a token": b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 16000000\r\n\r\nabc",
    "answers that are not read": GET * 20_000,
    "refusals that are not read": b"GET /v1/newest HTTP/1.1\r\nHost: x\r\n\r\n" * 20_000,
}


@pytest.mark.parametrize(("attack", "addresses"), [*((attack, 1) for attack in ATTACKS), ("one byte", 40)])
def test_connections_without_a_token_do_not_keep_a_client_with_one_from_its_answer(tmp_path, store, attack, addresses):
    (tmp_path / "token").write_text(TOKEN)
    with (
        depot_port(tmp_path, "--store", store.path, "--token-file", tmp_path / "token") as port,
        contextlib.closing(DepotClient(f"http://127.0.0.1:{port}", access=Access(TOKEN), stall_s=ANSWERED_S)) as client,
    ):
        assert client.newest(deadline=Deadline.after(WAIT_S)).version == "step_1"
        with attackers(port, ATTACKS[attack], addresses=addresses):
            assert answers(port, Authorization=f"Bearer {TOKEN}") == [200] * 20
            assert client.newest(deadline=Deadline.after(ANSWERED_S)).version == "step_1"


@pytest.mark.parametrize("attack", ["one byte", "half a body", "an answer that is not read"])
def test_neither_do_those_that_stop_in_the_middle_where_no_token_is_asked_for(tmp_path, store, attack):
    store.publish("step_2", {"a": np.zeros(8 << 20, dtype=np.float32)}, "full")
    part = "/versions/step_2/model-00001-of-00001.safetensors"
    sent = {
        "one byte": b"G",
        "half a body": b"POST /v1/acks HTTP/1.1\r\nHost: x\r\nContent-Length: 16000000\r\n\r\nabc",
        "an answer that is not read": f"GET {part} HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
    }
    # few places: the answers that nobody reads fill the kernel's buffers, two MiB each
    with depot_port(tmp_path, "--store", store.path, descriptors=256) as port, attackers(port, sent[attack], count=300):
        time.sleep(1.5)  # one that is in the middle of a request is given a second
        assert answers(port) == [200] * 20


def test_neither_do_those_that_wait_for_a_version_that_does_not_come(tmp_path, store):
    waiting = b"GET /v1/newest?after=step_1&wait=60 HTTP/1.1\r\nHost: x\r\n\r\n"
    with depot_port(tmp_path, "--store", store.path, descriptors=256) as port, attackers(port, waiting, count=300):
        assert answers(port) == [200] * 20
        with contextlib.closing(DepotClient(f"http://127.0.0.1:{port}", stall_s=ANSWERED_S)) as client:
            store.publish("step_2", {"a": np.zeros(3000, dtype=np.float32)})
            deadline = Deadline.after(WAIT_S)
            while client.newest(deadline=deadline).version != "step_2":
                deadline.check("waiting for step_2")


def test_half_a_handshake_does_not_either(tmp_path, store):
    tls = ("--tls-cert", TLS / "cert.pem", "--tls-key", TLS / "key.pem")
    trust = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    with depot_port(tmp_path, "--store", store.path, *tls) as port, attackers(port, b"\x16\x03\x01"):
        for _ in range(10):
            with contextlib.closing(
                http.client.HTTPSConnection("127.0.0.1", port, timeout=ANSWERED_S, context=trust)
            ) as connection:
                connection.request("GET", "/v1/newest")
                assert connection.getresponse().status == 200


def test_a_depot_without_descriptors_lets_half_sent_heads_make_room(tmp_path, store):
    with depot_port(tmp_path, "--store", store.path, descriptors=256) as port, attackers(port, b"G"):
        assert answers(port) == [200] * 20


def test_one_address_has_few_half_sent_heads_and_none_for_long(tmp_path, store):
    with depot_port(tmp_path, "--store", store.path) as port, attackers(port, b"GET", count=300) as made:
        end = time.monotonic() + HALF_SENT_S
        while held(made) > 64:
            assert time.monotonic() < end, f"{held(made)} half-sent heads of one address are held"
            time.sleep(0.05)
        with attackers(port, b"GET", count=10, addresses=10) as others:
            assert held(others) == 10
        end = time.monotonic() + 10
        while any(one.fileno() >= 0 and not _ended(one) for one in made):
            assert time.monotonic() < end, "a head that was half sent is still waited for"
            time.sleep(0.05)


def _ended(one: socket.socket) -> bool:
    """Whether the depot has ended a connection, after whatever it answered."""
    try:
        while one.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


# -- acknowledgements --------------------------------------------------------------------------------------------------


def acknowledged(port: int, source: str, *acks: Ack) -> list[int]:
    """The statuses of acknowledgements that a client at this address sends."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S, source_address=(source, 0))
    statuses = []
    with contextlib.closing(connection):
        for ack in acks:
            connection.request("POST", "/v1/acks", msgspec.json.encode(ack))
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)
    return statuses


def publish(store: Store, version: str) -> None:
    store.publish(version, {"a": np.arange(10, dtype=np.float32)}, "full")


def wait_until(fact: Callable[[], bool], store: Store) -> None:
    end = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < end, f"{len(store.versions())} versions are still there: {store.versions()}"
        time.sleep(0.05)


def test_a_client_cannot_keep_all_versions_by_acknowledging_them(tmp_path, store):
    with depot_port(tmp_path, "--store", store.path, "--keep-last", "2") as port:
        assert acknowledged(port, "127.0.1.2", Ack("gen-0", "step_1", "")) == [204]
        for step in range(2, 42):
            publish(store, f"step_{step}")
            acks = [Ack(f"{step}-{index}", f"step_{step}", "") for index in range(20)]
            assert acknowledged(port, "127.0.1.1", *acks) == [204] * 20

        publish(store, "step_100")
        wait_until(lambda: len(store.versions()) <= 2 + 1 + MAX_PINNED_PER_CLIENT, store)
        assert "step_1" in store.versions()  # an honest receiver is at it
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
            connection.request("GET", "/v1/receivers")
            told = msgspec.json.decode(connection.getresponse().read(), type=list[Acknowledged])
        assert len(told) <= MAX_RECEIVERS_PER_CLIENT + 1

        long_ago = time.time() - PINNED_S - 1
        for manifest in store.path.glob("versions/*/manifest.json"):
            os.utime(manifest, (long_ago, long_ago))
        publish(store, "step_101")
        wait_until(lambda: store.versions() == ["step_100", "step_101"], store)


# -- ports -------------------------------------------------------------------------------------------------------------

needs_nixl = pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed")


def listeners(pid: int) -> set[tuple[str, int]]:
    """The IPv4 addresses and ports that a process listens on."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(descriptor.readlink().name)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    return {(socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in found}


def asked_for_nixl(port: int, store: Store) -> tuple[int, bytes]:
    """What a depot answers to a client with the token that wants to read step_1 with NIXL."""
    body = msgspec.json.encode(GrantQuery(store.manifest("step_1").root_digest))
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
        connection.request("POST", "/v1/versions/step_1/nixl", body, {"Authorization": f"Bearer {TOKEN}"})
        response = connection.getresponse()
        return response.status, response.read()


@needs_nixl
def test_a_depot_opens_no_port_for_nixl_unless_that_is_switched_on(tmp_path, store):
    (tmp_path / "token").write_text(TOKEN)
    with depot_port(tmp_path, "--store", store.path, "--token-file", tmp_path / "token") as port:
        status, body = asked_for_nixl(port, store)
        assert (status, b"--nixl on" in body) == (409, True)
        assert listeners(_pid_of(port)) == {("127.0.0.1", port)}


@needs_nixl
def test_with_nixl_a_depot_and_its_receivers_listen_where_the_depot_does(tmp_path, store):
    (tmp_path / "token").write_text(TOKEN)
    with depot_port(tmp_path, "--store", store.path, "--token-file", tmp_path / "token", "--nixl", "on") as port:
        status, _ = asked_for_nixl(port, store)
        ports = listeners(_pid_of(port))
        assert (status, {address for address, _ in ports}) == (200, {"127.0.0.1"})
        assert len(ports) > 1
        url = f"nixl://127.0.0.1:{port}?token_file={tmp_path / 'token'}"
        ran = subprocess.run(
            [sys.executable, __file__, url], capture_output=True, text=True, timeout=2 * WAIT_S, check=False
        )
        assert ran.stdout.split() == ["step_1", "127.0.0.1"], ran.stderr


@needs_nixl
def test_a_trainer_opens_no_port_for_nixl_unless_that_is_switched_on():
    with DepotPublisher("127.0.0.1:0") as publisher, closing(NixlReceiver(publisher.url)) as receiver:
        publisher.publish("step_1", {"a": np.arange(3, dtype=np.float32)})
        manifest = receiver.manifest("step_1", deadline=Deadline.after(WAIT_S))
        with pytest.raises(Conflict, match="nixl=True"):
            list(receiver.pieces(manifest, deadline=Deadline.after(WAIT_S)))


def test_a_trainer_listens_on_the_loopback_unless_it_is_told_otherwise():
    # read, not run: another process may have the port
    assert inspect.signature(DepotPublisher).parameters["listen"].default == "127.0.0.1:8300"


def _pid_of(port: int) -> int:
    """The process that listens on a port."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and ("127.0.0.1", port) in listeners(int(entry.name)):
                return int(entry.name)
    raise AssertionError(f"nothing listens on {port}")


def _receive(url: str) -> None:
    """Take the newest version from a depot, and print it with the addresses that this process listens on."""
    weights = {"a": np.zeros(3000, dtype=np.float32)}
    with LiveModel(weights, source=url) as live:
        print(live.update().version, *sorted({address for address, _ in listeners(os.getpid())}), flush=True)


if __name__ == "__main__":
    _receive(sys.argv[1])
