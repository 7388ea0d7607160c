"""Faults while a live `vllm serve` is updated: it lives, serves exactly the old or the new version, and takes the next."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from curl import begin, statuses, update, version_of
from models import greedy
from safetensors.torch import load_file
from servers import VllmServer

from weightcast import Store

PROMPT = [5, 6, 7, 8]
N = 16


@pytest.fixture(scope="module")
def served(model_a, steps):
    """A server of its own that serves `step_0`."""
    with VllmServer(model_a) as server:
        update(server, "step_0", steps)
        yield server


@pytest.fixture(autouse=True)
def still_well(served, steps, model_a, nudged_once):
    """After each fault: the server lives, serves what it served, bit for bit as far as tokens tell, and takes updates."""
    assert version_of(served) == "step_0"
    yield
    assert served.get("/health").status_code == 200, served.said()
    assert version_of(served) == "step_0"
    assert served.tokens(PROMPT, N) == greedy(model_a, PROMPT, N)
    update(served, "step_1", steps)
    assert served.tokens(PROMPT, N) == greedy(nudged_once, PROMPT, N)
    update(served, "step_0", steps)
    assert served.tokens(PROMPT, N) == greedy(model_a, PROMPT, N)


def refused(served, version, source, *words, **info):
    """The update is refused with these words, and so is its finish."""
    reply = begin(served, version, source, **info)
    assert reply.status_code == 500, reply.text
    assert not [word for word in words if word not in reply.text], reply.text
    assert served.post("/finish_weight_update", {"weight_version": version}).status_code == 500


@pytest.mark.parametrize("version", ["step_1", "other"])
def test_a_flipped_byte(served, steps, tmp_path, version):
    folder = shutil.copytree(steps.removeprefix("file://"), tmp_path / "s")
    part = max((folder / "versions" / version).iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    refused(served, version, f"file://{folder}", "digest")


def test_tensors_that_are_missing_or_of_another_shape_are_all_named(served, model_b, tmp_path):
    tensors = load_file(model_b / "model.safetensors")
    lacking = {name: tensor for name, tensor in tensors.items() if "k_proj" not in name and name != "model.norm.weight"}
    store = Store(tmp_path / "s")
    store.publish("lacking", lacking)
    first, last = "layers.0.self_attn", "layers.3.self_attn"
    refused(served, "lacking", f"file://{store.path}", "model.norm.weight", f"{first}.qkv_proj", f"{last}.qkv_proj")
    wrong = {
        name: tensor[:-1].contiguous() if "o_proj" in name or "embed" in name else tensor for name, tensor in tensors.items()
    }
    store.publish("wrong", wrong | {"model.layers.0.extra.weight": tensors["model.norm.weight"]}, mode="full")
    refused(served, "wrong", f"file://{store.path}", "embed_tokens", f"{first}.o_proj", f"{last}.o_proj", "extra")


def test_a_source_that_is_not_there(served):
    refused(served, "other", "http://127.0.0.1:9", "127.0.0.1:9", timeout=5)
    refused(served, "other", "file:///nowhere", "nowhere")
    refused(served, "other", "smoke://signal", "smoke")
    refused(served, "nowhere", "", "source")


def test_a_source_that_callers_may_not_name_is_not_opened(served, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.5)
        port = elsewhere.getsockname()[1]
        refused(served, "other", f"http://127.0.0.1:{port}?token_file={secret}", "must not set token_file")
        refused(served, "other", f"http://localhost:{port}", "WEIGHTCAST_ALLOW_SOURCE")
        reply = served.post("/collective_rpc", {"method": "weightcast_stage", "kwargs": {"source": f"http://[::1]:{port}"}})
        assert "WEIGHTCAST_ALLOW_SOURCE" in reply.text
        with pytest.raises(TimeoutError):
            elsewhere.accept()


@pytest.mark.parametrize("fault", [signal.SIGKILL, None], ids=["killed", "stopped for ever"])
def test_a_source_that_dies_or_falls_silent_while_it_is_asked(served, steps, tmp_path, fault):
    with depot(steps, tmp_path) as (process, url):
        os.kill(process.pid, signal.SIGSTOP)
        served.call("weightcast_stage", source=url, version="other", timeout=8.0)
        time.sleep(0.5)
        assert statuses(served)[0]["state"] == "STAGING"
        assert served.tokens(PROMPT, 4)  # it serves meanwhile
        if fault is not None:
            os.kill(process.pid, fault)
        end = time.monotonic() + 20
        while statuses(served)[0]["state"] == "STAGING":
            assert time.monotonic() < end
            time.sleep(0.1)
        assert statuses(served)[0]["error"]["code"] in ("source_failed", "deadline_exceeded")
        refused(served, "other", url, timeout=2.0)


class depot:  # noqa: N801 - a context
    """`weightcast depot` as a process."""

    def __init__(self, steps: str, folder: Path) -> None:
        self._store, self._port_file = steps.removeprefix("file://"), folder / "port"

    def __enter__(self) -> tuple[subprocess.Popen[bytes], str]:
        command = [sys.executable, "-m", "weightcast", "depot", "--store", self._store]
        command += ["--listen", "127.0.0.1:0", "--port-file", self._port_file]
        self._process = subprocess.Popen([str(part) for part in command])
        end = time.monotonic() + 30
        while not self._port_file.exists():
            assert time.monotonic() < end
            assert self._process.poll() is None
            time.sleep(0.05)
        return self._process, f"http://127.0.0.1:{int(self._port_file.read_text())}"

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)


TRAINER = """
import sys, time, httpx
url, source = sys.argv[1:]
httpx.post(url + "/start_weight_update").raise_for_status()
wanted = {"version": "other", "source": source}
httpx.post(url + "/update_weights", json={"update_info": wanted}, timeout=60).raise_for_status()
print("staged", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("paused", [False, True])
def test_a_trainer_that_is_killed_between_start_and_finish(served, steps, model_a, paused):
    if paused:
        assert served.post("/pause?mode=keep").status_code == 200
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, served.url, steps], stdout=subprocess.PIPE)
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"staged\n"
    finally:
        trainer.kill()
        trainer.wait(10)
        trainer.stdout.close()
    if paused:
        assert served.post("/resume").status_code == 200
    assert served.tokens(PROMPT, N) == greedy(model_a, PROMPT, N)


def test_updates_under_load_without_a_pause(served, steps, model_a, nudged_once, nudged_twice):
    """Every answer is of one version, or of two that follow each other, the second of which took over the tokens so far."""
    folders = {"step_0": model_a, "step_1": nudged_once, "step_2": nudged_twice}
    prompts = [[5, 6, 7, 8], [9, 10, 11], [20, 21, 22, 23, 24]]
    answers: list[tuple[list[int], list[int]]] = []
    over = threading.Event()

    def ask(prompt: list[int]) -> None:
        while not over.is_set():
            answers.append((prompt, served.tokens(prompt, N)))

    clients = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for client in clients:
        client.start()
    for version in ["step_1", "step_2", "step_1", "step_0", "step_2", "step_0"]:
        update(served, version, steps)
        _await_one_of_each(answers, prompts)  # what runs then began with this version, and meets one update at most
    over.set()
    for client in clients:
        client.join(60)
    odd = [answer for answer in answers if not _of_one_or_two(*answer, list(folders.values()))]
    assert not odd
    assert len(answers) > 6


def _await_one_of_each(answers: list[tuple[list[int], list[int]]], prompts: list[list[int]]) -> None:
    seen, end = len(answers), time.monotonic() + 60
    while any(prompt not in [asked for asked, _ in answers[seen:]] for prompt in prompts):
        assert time.monotonic() < end
        time.sleep(0.01)


def _of_one_or_two(prompt: list[int], answer: list[int], folders: list[Path]) -> bool:
    for folder in folders:
        expected = greedy(folder, prompt, N)
        if answer == expected:
            return True
        same = next(index for index, (one, other) in enumerate(zip(answer, expected, strict=True)) if one != other)
        # It may have gone over to the other version at any token up to the first that differs.
        for split in range(same, -1, -1):
            if any(
                answer[split:] == greedy(other, prompt + answer[:split], N - split) for other in folders if other != folder
            ):
                return True
    return False
