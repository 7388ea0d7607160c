"""Versions of many files, and files that change under their readers: real depots and readers, under real limits."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from weightcast import Store

from .test_depot_cli import Running

WAIT_S = 120
OPEN_FILES = 1024
PARTS = {"sampled": (320, 256), "full": (1300, OPEN_FILES)}  # of a version, and the files that a process may open
TLS = Path(__file__).parent.parent / "data" / "tls"
PART = "model-00001-of-00001.safetensors"

READ = """
import sys, numpy as np
from weightcast import LiveModel, Store
path, *sources = sys.argv[1:]
expected = Store(path).load("step_2")
assert expected["t7"][0] == -1 and expected["t8"][0] == 8
for source in sources:
    for version in ("step_1", "step_2") if source == path else ("step_2",):
        model = {name: np.zeros_like(array) for name, array in expected.items()}
        LiveModel(model, source=source).update(version, commit="swap")
        assert model["t7"][0] == (7 if version == "step_1" else -1) and model[f"t{len(model) - 1}"][0] == len(model) - 1
"""


def limit_files(count: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


@contextlib.contextmanager
def running(tmp_path: Path, *arguments: object, open_files: int = OPEN_FILES) -> Iterator[Running]:
    tmp_path.mkdir(exist_ok=True)
    depot = Running(tmp_path, *arguments, preexec_fn=partial(limit_files, open_files))
    try:
        yield depot
    finally:
        depot.process.kill()
        depot.process.wait()


def limited(open_files: int, *command: object) -> None:
    child = subprocess.run(
        list(map(str, command)),
        preexec_fn=partial(limit_files, open_files),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-4000:]


def url_of(depot: Running) -> str:
    depot.wait_for(depot.port_file.exists, "the port file")
    return f"http://127.0.0.1:{int(depot.port_file.read_text())}"


def test_a_version_of_more_parts_than_files_can_be_open_is_verified_loaded_served_and_mirrored(tmp_path, form):
    parts, most = PARTS[form]
    store = Store(tmp_path / "store")
    tensors = {f"t{index}": np.full(1024, index, dtype=np.int32) for index in range(parts)}
    store.publish("step_1", tensors, "full", part_nbytes=1)
    assert len(store.manifest("step_1").parts) == parts
    tensors["t7"] = np.full(1024, -1, dtype=np.int32)
    store.publish("step_2", tensors, "delta")
    limited(most, sys.executable, "-m", "weightcast", "store", "verify", store.path)
    with running(tmp_path / "depot", "--store", store.path, open_files=most) as depot:
        mirrored = tmp_path / "mirrored"
        with running(tmp_path / "mirror", "--store", mirrored, "--mirror", url_of(depot), open_files=most) as mirror:
            mirror.wait_for((mirrored / "versions" / "step_2" / "manifest.json").exists, "the mirrored version")
            limited(most, sys.executable, "-c", READ, store.path, store.path, url_of(depot), url_of(mirror))


@pytest.mark.parametrize("nbytes", [0, 1 << 20])
def test_a_part_that_is_truncated_while_it_is_sent_over_tls_does_not_end_the_depot(tmp_path, nbytes):
    store = Store(tmp_path / "store")
    store.publish("step_1", {"a": np.arange(16 << 20, dtype=np.int32)})
    store.publish("step_2", {"a": np.arange(1000, dtype=np.int32)}, "full")
    tls = ("--tls-cert", TLS / "cert.pem", "--tls-key", TLS / "key.pem")
    context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    context.check_hostname = False
    with running(tmp_path / "depot", "--store", store.path, *tls) as depot:
        depot.wait_for(depot.port_file.exists, "the port file")
        port = int(depot.port_file.read_text())
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            with context.wrap_socket(plain) as sock:
                sock.sendall(f"GET /versions/step_1/{PART} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                received = len(sock.recv(1000))
                os.truncate(store.path / "versions" / "step_1" / PART, nbytes)  # the depot is in the middle of a block
                with contextlib.suppress(OSError):
                    while data := sock.recv(1 << 20):
                        received += len(data)
        assert received < 64 << 20
        status, data = depot.get(f"/versions/step_2/{PART}", trust=context)
        assert status == 200
        assert len(data) == (store.path / "versions" / "step_2" / PART).stat().st_size
        assert depot.process.poll() is None


def test_a_depot_that_keeps_few_versions_survives_a_hostile_version_yaml_and_goes_on_with_a_good_one(tmp_path):
    store = Store(tmp_path / "store")
    store.publish("step_1", {"a": np.arange(1000, dtype=np.int32)})
    named = store.path / "version.yaml"
    good = named.read_bytes()
    lists = [f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefgh")]
    aliases = "a: &a [x]\n" + "".join(lists)
    with running(tmp_path / "depot", "--store", store.path, "--keep-last", 1) as depot:
        for text in ("step: " + "9" * 4000, aliases + "step: *h", "step: " + "[" * 3000, "\xff", 'step: "\\UFFFFFFFF"'):
            named.write_bytes(text.encode("latin-1"))
            status, _ = depot.get("/v1/newest?wait=0.5")
            assert status == 404
        named.unlink()
        os.mkfifo(named)
        assert depot.get("/v1/newest?wait=0.5")[0] == 404
        named.unlink()
        named.write_bytes(good)
        depot.wait_for(lambda: depot.get("/v1/newest?wait=1")[0] == 200, "the newest version")
        store.publish("step_2", {"a": np.arange(1000, dtype=np.int32)}, "full")
        depot.wait_for(lambda: store.versions() == ["step_2"], "the removal of the older version")
