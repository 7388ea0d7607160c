"""Attacks on `weightcast serve`, each against a real server process: what a caller must not be able to do."""

import http.client
import json
import socket
import threading
import time
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import httpx
import openai
import psutil
import pytest

from weightcast import Store
from weightcast.engines.embedded.presets import init_checkpoint

from .server_process import WAIT_S, complete, server_process

KEY, TOKEN, SECRET = "key-of-inference", "token-of-control", "the-content-of-a-private-file"
SOON_S = 10  # on a busy machine; such bodies took minutes
SMALL_NBYTES = 64 << 10  # of an answer


class Elsewhere(BaseHTTPRequestHandler):
    """A host of the attacker. It remembers what it was sent."""

    def do_GET(self):
        self.server.seen.append((self.path, self.headers.get("authorization")))
        self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("security")
    init_checkpoint(root / "model", "tiny", seed=3)
    init_checkpoint(root / "trained", "tiny", seed=4)
    for name in ("store", "allowed/run_1", "private"):
        Store(root / name).publish_checkpoint("step_1", root / "trained")
    (root / "allowed" / "link").symlink_to(root / "private")
    for name, text in (("key", KEY), ("token", TOKEN), ("secret", SECRET)):
        (root / name).write_text(f"{text}\n")
        (root / name).chmod(0o600)
    return root


@pytest.fixture(scope="module")
def unguarded(files):
    """No token was configured, and it listens on every address."""
    with server_process(files / "model", "--host", "0.0.0.0", "--source", files / "store") as server:
        yield server


@pytest.fixture(scope="module")
def guarded(files, elsewhere):
    """Tokens for both kinds of calls, sources that callers may name, and the legacy GETs."""
    arguments = ("--api-key-file", files / "key", "--control-token-file", files / "token", "--legacy-get")
    arguments += ("--allow-source", f"{files}/allowed/*", "--allow-source", f"{elsewhere.url}?token_file={files}/secret")
    with server_process(files / "model", "--host", "0.0.0.0", "--source", files / "store", *arguments) as server:
        yield server


@pytest.fixture(scope="module")
def elsewhere():
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        server.seen = []
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(WAIT_S)


def control(server, path, body=None, token=None, **headers):
    sent = {"authorization": f"Bearer {token}"} if token else {}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{server.url}{path}", json=body or {}, headers=sent, timeout=WAIT_S)


def update(server, source, token=None):
    return control(server, "/v1/update_weights", {"source": source, "timeout": 10}, token)


def raw(server, method, path, body=b"", **headers):
    """A request just as it is written here: no header is added but Host, and that only if none is given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.url.rpartition(":")[2], timeout=WAIT_S)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.putrequest(method, path, skip_host="host" in names, skip_accept_encoding=True)
        for name, value in {"content-length": str(len(body)), **names}.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        reply = connection.getresponse()
        text = reply.read().decode()
        return SimpleNamespace(status=reply.status, headers=reply.headers, text=text, code=code_of(text))
    finally:
        connection.close()


def code_of(text):
    content = json.loads(text)
    return content["error"]["code"] if "error" in content else content.get("code")


def is_paused(server, token=None):
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.get(f"{server.url}/v1/is_paused", headers=headers, timeout=WAIT_S).json()["result"]["is_paused"]


def refused(reply, status, code):
    content = reply.json()
    assert (reply.status_code, content["code"]) == (status, code), reply.text
    assert len(reply.content) < SMALL_NBYTES
    return content["error_message"]


# -- sources that a caller names ------------------------------------------------------------------------------------------


def test_a_request_cannot_have_a_file_sent_as_a_token(unguarded, files, elsewhere):
    reply = update(unguarded, f"{elsewhere.url}?token_file={files}/secret")

    assert elsewhere.seen == [], "the server called a host that it was not allowed to"
    assert SECRET not in reply.text
    refused(reply, 403, "source_not_allowed")


def test_a_request_cannot_probe_hosts_and_ports(unguarded, elsewhere):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.2)
        there = update(unguarded, f"http://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(TimeoutError):
            listening.accept()
    nowhere = update(unguarded, "http://127.0.0.1:1")

    assert refused(there, 403, "source_not_allowed").count("127.0.0.1") <= 1
    refused(nowhere, 403, "source_not_allowed")
    assert elsewhere.seen == []


@pytest.mark.parametrize("kind", ["", "file://", "checkpoint://", "snapshot://", "ipc://", "legacy-ipc://"])
def test_a_request_cannot_probe_paths(unguarded, files, kind):
    query = "?id=0" if "snapshot" in kind or "legacy" in kind else ""
    answers = [update(unguarded, f"{kind}{files}/{name}{query}") for name in ("private", "secret", "missing")]

    told = {refused(reply, 403, "source_not_allowed").replace(name, "NAME")
            for reply, name in zip(answers, ("private", "secret", "missing"), strict=True)}  # fmt: skip
    assert len(told) == 1, "what is there and what is not have the same answer"


@pytest.mark.parametrize(
    "path", ["allowed/../private", "allowed/run_1/../../private", "allowed/%2e%2e/private", "allowed/link"]
)
def test_the_way_out_of_an_allowed_directory_is_closed(guarded, files, path):
    refused(update(guarded, f"file://{files}/{path}", TOKEN), 403, "source_not_allowed")


def test_a_request_may_name_what_was_configured_and_what_matches_a_pattern(guarded, files):
    for source in (
        f"file://{files}/store",
        f"{files}/store",
        f"file://localhost{files}/allowed/run_1",
        f"{files}/allowed/run_1",
    ):
        reply = update(guarded, source, TOKEN)
        assert reply.status_code == 200, reply.text
        assert reply.json()["result"][0]["version"] == "step_1"


def test_a_token_goes_only_where_the_operator_sends_it(guarded, files, elsewhere):
    elsewhere.seen.clear()
    stolen = update(guarded, f"{elsewhere.url}?token_file={files}/token", TOKEN)
    assert "token_file" in refused(stolen, 403, "source_not_allowed")
    assert elsewhere.seen == []

    named = update(guarded, elsewhere.url, TOKEN)
    assert named.status_code in (404, 502), named.text
    assert {sent for _, sent in elsewhere.seen} == {f"Bearer {SECRET}"}, "the options that were configured go with it"
    elsewhere.seen.clear()


# -- who may call ---------------------------------------------------------------------------------------------------------


def test_without_the_key_nothing_is_generated(guarded):
    url = guarded.url
    for call in (
        lambda: raw(guarded, "POST", "/v1/completions", b'{"model": "tiny", "prompt": "a"}'),
        lambda: raw(guarded, "POST", "/v1/chat/completions", b"{}", authorization="Bearer wrong"),
        lambda: raw(guarded, "GET", "/v1/models", authorization=f"Bearer {TOKEN}"),
        lambda: raw(guarded, "GET", "/v1/stats", authorization=f"Basic {KEY}"),
        lambda: raw(guarded, "GET", "/v1/unknown"),
    ):
        reply = call()
        assert (reply.status, reply.code) == (401, "unauthorized")
        assert reply.headers["www-authenticate"] == "Bearer"
        assert KEY not in reply.text
    assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/metrics").status_code == 200


def test_openai_clients_send_the_key(guarded):
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0, timeout=WAIT_S) as client:
        assert complete(client, max_tokens=2).choices[0].text
    with guarded.client() as client, pytest.raises(openai.AuthenticationError):
        complete(client)


CONTROL = [
    ("POST", "/v1/update_weights"), ("POST", "/v1/pause"), ("POST", "/v1/sleep"), ("POST", "/v1/weights/recover"),
    ("GET", "/v1/weights"), ("GET", "/v1/is_paused"), ("DELETE", "/v1/updates/1"), ("POST", "/clear_load_weight"),
    ("GET", "/clear_load_weight"), ("GET", "/update_model_weight"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), CONTROL)
def test_without_the_token_nothing_is_controlled(guarded, method, path):
    json_type = {"content_type": "application/json"} if method == "POST" else {}
    for sent in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Bearer {KEY}"}, {"authorization": "Bearer"}):
        reply = raw(guarded, method, path, **json_type, **sent)
        assert (reply.status, reply.code) == (401, "unauthorized")
        assert reply.headers["www-authenticate"] == "Bearer"
        assert TOKEN not in reply.text


def test_the_token_controls_and_a_name_in_host_needs_no_more(guarded):
    assert not is_paused(guarded, TOKEN)
    assert control(guarded, "/v1/pause", token=TOKEN, host="gen-0.cluster:8000").status_code == 200
    assert is_paused(guarded, TOKEN)
    assert raw(guarded, "POST", "/v1/resume", authorization=f"bearer {TOKEN}").status == 200


def test_tokens_are_never_logged(guarded):
    said = guarded.log.read_text()
    assert not [word for word in (KEY, TOKEN, SECRET) if word in said]


def outer_address():
    """An address of this machine that is not loopback's."""
    found = [
        one.address for addresses in psutil.net_if_addrs().values() for one in addresses if one.family == socket.AF_INET
    ]
    return next((address for address in found if not address.startswith("127.")), None)


def test_without_a_token_control_answers_on_loopback_only(unguarded):
    assert control(unguarded, "/v1/resume").status_code == 200
    forwarded = control(unguarded, "/v1/pause", x_forwarded_for="203.0.113.7")
    assert "--control-token-file" in refused(forwarded, 403, "forbidden")
    address = outer_address()
    if address is not None:
        port = unguarded.url.rpartition(":")[2]
        away = httpx.post(f"http://{address}:{port}/v1/pause", json={}, timeout=WAIT_S)
        assert "--control-token-file" in refused(away, 403, "forbidden")
        assert httpx.get(f"http://{address}:{port}/v1/models", timeout=WAIT_S).status_code == 200
    assert not is_paused(unguarded)


def test_the_start_says_that_control_is_for_loopback_only(unguarded, guarded):
    assert unguarded.log.read_text().count("control limited to loopback") == 1
    assert "control limited" not in guarded.log.read_text()


# -- pages in a browser of this machine -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None]
)
@pytest.mark.parametrize("body", [b"{}", b""])
def test_a_page_cannot_pause_it_with_what_needs_no_preflight(unguarded, kind, body):
    reply = raw(unguarded, "POST", "/v1/pause", body, **({"content_type": kind} if kind else {}))

    assert (reply.status, reply.code) == (415, "not_json"), reply.text
    assert "application/json" in reply.text
    assert not is_paused(unguarded)


@pytest.mark.parametrize(
    "sent",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:1"},
        {"sec_fetch_site": "cross-site"},
    ],
)
def test_a_page_of_another_origin_is_refused_whatever_it_sends(unguarded, sent):
    reply = raw(unguarded, "POST", "/v1/pause", b"{}", content_type="application/json", **sent)

    assert (reply.status, reply.code) == (403, "forbidden"), reply.text
    assert not is_paused(unguarded)


def test_a_page_of_the_same_origin_is_answered(unguarded):
    origin = unguarded.url.replace("127.0.0.1", "localhost")
    sent = {"host": origin.removeprefix("http://"), "origin": origin, "sec_fetch_site": "same-origin"}
    assert raw(unguarded, "POST", "/v1/resume", b"{}", content_type="application/json", **sent).status == 200


@pytest.mark.parametrize("path", ["/clear_load_weight", "/update_model_weight"])
def test_a_get_changes_nothing(unguarded, path):
    reply = raw(unguarded, "GET", path)

    assert (reply.status, reply.code, reply.headers["allow"]) == (405, "wrong_method", "POST"), reply.text
    assert "--legacy-get" in reply.text
    assert unguarded.health()["state"] == "READY"


def test_a_get_of_the_old_protocol_can_be_asked_for(guarded):
    assert raw(guarded, "GET", "/update_model_weight", authorization=f"Bearer {TOKEN}").status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", ""]
)
def test_a_name_that_was_rebound_to_this_machine_is_refused(unguarded, host):
    for method, path in (("POST", "/v1/pause"), ("GET", "/v1/weights")):
        reply = raw(unguarded, method, path, host=host, content_type="application/json")
        assert (reply.status, reply.code) == (403, "forbidden"), reply.text
        assert "--allow-host" in reply.text
    assert not is_paused(unguarded)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1", "[::1]:8000", "10.1.2.3:8000", "a.localhost"])
def test_addresses_and_localhost_are_no_names_that_can_be_rebound(unguarded, host):
    assert raw(unguarded, "GET", "/v1/weights", host=host).status == 200


# -- bodies ---------------------------------------------------------------------------------------------------------------


class Watched:
    """What a server took in memory, and how long others waited for an answer meanwhile."""

    def __init__(self, server):
        self._server, self._ended = server, threading.Event()
        self._process = psutil.Process(server.process.pid)
        self._thread = threading.Thread(target=self._watch)
        self.grown, self.longest_s = 0, 0.0

    def _watch(self):
        before = self._process.memory_info().rss
        with httpx.Client(timeout=WAIT_S) as client:
            while not self._ended.wait(0.01):
                began = time.monotonic()
                client.get(f"{self._server.url}/v1/models")
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self.grown = max(self.grown, self._process.memory_info().rss - before)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join(WAIT_S)


@cache
def unknown_keys(nbytes):
    one = '"k%07d":0,'
    return ("{" + "".join(one % number for number in range(nbytes // 13)) + '"z":0}').encode()


def parts_of(body):
    for start in range(0, len(body), 1 << 16):
        yield body[start : start + (1 << 16)]


MIB = 1 << 20
BODIES = {
    "15.7 MB of unknown keys": ("/v1/pause", unknown_keys(15_700_000), 413),
    "15.7 MB of unknown keys, in chunks": ("/v1/pause", unknown_keys(15_700_000), 413),
    "many keys within the limit": ("/v1/pause", unknown_keys(MIB - 100), 422),
    "many keys of a field": ("/v1/update_weights", b'{"version": ' + unknown_keys(MIB - 100) + b"}", 422),
    "a deep body": ("/v1/pause", b'{"mode": ' + b"[" * 500_000 + b"]" * 500_000 + b"}", 422),
    "a body that is not closed": ("/v1/pause", b"[" * (MIB - 1), 422),
    "a long list of wrong names": ("/v1/weights/digest", b'{"names": [' + b"1," * 500_000 + b"1]}", 422),
    "a long name of a key": ("/v1/pause", b'{"' + b"k" * (MIB - 100) + b'": 0}', 422),
    "a long value": ("/v1/pause", b'{"mode": "' + b"k" * (MIB - 100) + b'"}', 422),
    "many keys of a completion": ("/v1/completions", unknown_keys(15_700_000), 422),
    "many empty prompts": ("/v1/completions", b'{"model": "tiny", "prompt": [' + b"[]," * 5_000_000 + b"[]]}", 422),
    "many wrong messages": ("/v1/chat/completions", b'{"model": "tiny", "messages": [' + b"0," * 5_000_000 + b"0]}", 422),
    "a deep completion": ("/v1/completions", b'{"prompt": ' + b'{"a":' * 2_000_000 + b"0" + b"}" * 2_000_000 + b"}", 422),
    "a long prompt": ("/v1/completions", b'{"model": "tiny", "prompt": "' + b"ab " * 5_200_000 + b'"}', 422),
    "a long chat": (
        "/v1/chat/completions",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "' + b"ab " * 5_200_000 + b'"}]}',
        422,
    ),
    "a long model name": ("/v1/completions", b'{"model": "' + b"m" * 15_000_000 + b'"}', 404),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_has_a_small_answer_soon_and_takes_little_memory(unguarded, name):
    path, body, status = BODIES[name]
    content = parts_of(body) if "chunks" in name else body
    with Watched(unguarded) as watched:
        began = time.monotonic()
        reply = httpx.post(
            f"{unguarded.url}{path}", content=content, headers={"content-type": "application/json"}, timeout=WAIT_S
        )
        took_s = time.monotonic() - began

    assert reply.status_code == status, reply.text[:1000]
    assert len(reply.content) < SMALL_NBYTES
    assert took_s < SOON_S, f"{took_s:.1f} s"
    assert watched.longest_s < 1, f"others waited {watched.longest_s:.1f} s"
    assert watched.grown < 256 * MIB, f"{watched.grown / MIB:.0f} MiB"
    assert not is_paused(unguarded)


def test_what_is_wrong_is_listed_up_to_a_bound(unguarded):
    reply = control(unguarded, "/v1/abort_requests", {"req_ids": ["x" * 5000] * 2, **{f"k{n:02}": 0 for n in range(58)}})
    content = reply.json()

    assert reply.status_code == 422
    assert {"param": "k00", "message": "unknown field"} in content["problems"]
    assert len(content["problems"]) <= 100
    assert len(content["error_message"]) < 10_000
