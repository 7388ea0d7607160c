"""`weightcast depot` as a process of its own: what it prints, serves, keeps and leaves behind."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightcast import Store
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf
from weightcast.store.acks import Acks
from weightcast.wire.depot import Ack

WAIT_S = 40
TLS = Path(__file__).parent.parent / "data" / "tls"


def tensors(seed):
    return {"a": np.random.default_rng(seed).standard_normal(3000).astype(np.float32)}


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    store.publish("step_1", tensors(1))
    return store


class Running:
    def __init__(self, tmp_path: Path, *arguments: object, **settings: Any) -> None:
        self.port_file, self.output = tmp_path / "port", tmp_path / "output"
        command = [sys.executable, "-m", "weightcast", "-v", "depot", "--listen", "127.0.0.1:0"]
        command += ["--port-file", str(self.port_file), *map(str, arguments)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, **settings)

    def wait_for(self, fact, what):
        end = time.monotonic() + WAIT_S
        while not fact():
            assert time.monotonic() < end, f"{what} did not come about:\n{self.output.read_text()}"
            assert self.process.poll() is None, f"it ended:\n{self.output.read_text()}"
            time.sleep(0.02)

    def get(self, path, *, trust=None, **headers):
        self.wait_for(self.port_file.exists, "the port file")
        port = int(self.port_file.read_text())
        connection = (
            http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
            if trust is None
            else http.client.HTTPSConnection("127.0.0.1", port, timeout=WAIT_S, context=trust)
        )
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()


@contextlib.contextmanager
def running(tmp_path: Path, *arguments: object) -> Iterator[Running]:
    one = Running(tmp_path, *arguments)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait(WAIT_S)


def test_a_depot_says_where_it_is_serves_and_ends_with_zero(tmp_path, store):
    with running(tmp_path, "--store", store.path) as depot:
        assert depot.get("/health") == (200, b'{"status":"ok"}')
        manifest = (store.path / "versions" / "step_1" / "manifest.json").read_bytes()
        assert depot.get("/versions/step_1/manifest.json") == (200, manifest)
        port = int(depot.port_file.read_text())
        depot.process.terminate()
        assert depot.process.wait(WAIT_S) == 0
        assert f"serving {store.path} at http://127.0.0.1:{port}" in depot.output.read_text()
        assert not depot.port_file.exists()
    assert sorted(os.listdir(store.path)) == [".lock", "version.yaml", "versions"]


def test_new_versions_are_served_and_old_ones_removed_but_for_those_that_receivers_serve(tmp_path, store):
    with running(tmp_path, "--store", store.path, "--keep-last", 2) as depot:
        root = store.manifest("step_1").root_digest
        depot.get("/health")
        Acks(store.path).note(Ack("gen-0", "step_1", root))
        for step in range(2, 5):
            store.publish(f"step_{step}", tensors(step), mode="full")
            status, body = depot.get(f"/v1/newest?after=step_{step - 1}&wait=30")
            assert (status, b"step_%d" % step in body) == (200, True)
        depot.wait_for(lambda: store.versions() == ["step_1", "step_3", "step_4"], "the removal of step_2")
        status, body = depot.get("/v1/receivers")
        assert (status, b"gen-0" in body) == (200, True)
        depot.process.send_signal(signal.SIGINT)
        assert depot.process.wait(WAIT_S) == 0


def test_a_token_and_tls_are_taken_from_files(tmp_path, store):
    (tmp_path / "token").write_text(" s3cret\n")
    arguments = ("--token-file", tmp_path / "token", "--tls-cert", TLS / "cert.pem", "--tls-key", TLS / "key.pem")
    trust = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    with running(tmp_path, "--store", store.path, *arguments) as depot:
        assert depot.get("/health", trust=trust)[0] == 200
        assert depot.get("/v1/versions", trust=trust)[0] == 401
        assert depot.get("/v1/versions", trust=trust, Authorization="Bearer s3cret")[0] == 200
        assert "https://127.0.0.1:" in depot.output.read_text()
        assert "s3cret" not in depot.output.read_text()


def test_a_depot_that_mirrors_another_fills_its_own_store_and_serves_it(tmp_path, store):
    (tmp_path / "token").write_text("s3cret")
    arguments = ("--token-file", tmp_path / "token")
    with (
        StoredShelf(store.path) as shelf,
        Depot(shelf, token="s3cret") as upstream,
        running(tmp_path, "--store", tmp_path / "copy", "--mirror", upstream.url, *arguments) as depot,
    ):
        bearer = "Bearer s3cret"
        status, body = depot.get("/v1/newest?wait=30", Authorization=bearer)
        assert (status, b"step_1" in body) == (200, True)
        depot.wait_for((tmp_path / "copy" / "version.yaml").exists, "the copy")
        manifest = (store.path / "versions" / "step_1" / "manifest.json").read_bytes()
        assert depot.get("/versions/step_1/manifest.json", Authorization=bearer) == (200, manifest)
        assert upstream.url in depot.output.read_text()
        depot.process.terminate()
        assert depot.process.wait(WAIT_S) == 0
    assert Store(tmp_path / "copy").verify("step_1").ok


@pytest.mark.parametrize("options", [[], ["--keep-last", 2]])
def test_a_depot_waits_for_a_store_that_is_not_there_yet(tmp_path, options):
    later = tmp_path / "some" / "where" / "store"
    with running(tmp_path, "--store", later, *options) as depot:
        status, body = depot.get("/v1/newest")
        assert (status, b"no version yet" in body) == (404, True)
        assert depot.get("/health")[0] == 200
        assert f"waiting for a store at {later}" in depot.output.read_text()
        assert not later.parent.exists()
        Store(later).publish("step_1", tensors(1))
        status, body = depot.get("/v1/newest?wait=30")
        assert (status, b"step_1" in body) == (200, True)
        depot.process.terminate()
        assert depot.process.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--store", "{tmp}/store/version.yaml"], "not a directory"),
        (["--store", "{tmp}/store", "--listen", "nowhere"], "HOST:PORT"),
        (["--store", "{tmp}/store", "--tls-cert", "{tmp}/x"], "need each other"),
        (["--store", "{tmp}/store", "--tls-cert", "{tmp}/x", "--tls-key", "{tmp}/x"], "No such file"),
        (["--store", "{tmp}/store", "--token-file", "{tmp}/x"], "token"),
        (["--store", "{tmp}/store", "--keep-full-every", "2"], "--keep-last"),
        (["--store", "{tmp}/store", "--mirror-ca", "{tmp}/x"], "--mirror"),
    ],
)
def test_a_wrong_call_is_told_what_is_wrong(tmp_path, store, capsys, arguments, said):
    from weightcast.cli.main import main

    assert main(["depot", *(argument.format(tmp=tmp_path) for argument in arguments)]) in (1, 2)
    assert said in capsys.readouterr().err
