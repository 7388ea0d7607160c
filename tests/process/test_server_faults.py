"""`weightcast serve` when a rank dies or hangs under load, when it is told to end, and when its front end is killed."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest

from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.engines.embedded.replica.run_dir import RunDir

from .server_process import WAIT_S, complete, server_process

ERROR_WITHIN_S = 5
LONG = {"max_tokens": 3500}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    init_checkpoint(path, preset="tiny", seed=7)
    return path


@pytest.fixture(scope="module")
def server(model_dir):
    with server_process(model_dir, "--ranks", 2) as running:
        yield running
        assert running.stop() == 0, running.said()
        assert running.left_behind() == []


def stream_until_error(client):
    """How many tokens came, the error, and when."""
    count = 0
    try:
        for _ in complete(client, stream=True, **LONG):
            count += 1
    except openai.APIError as error:
        return count, error, time.monotonic()
    return count, None, time.monotonic()


def ask_until_error(client):
    try:
        complete(client, **LONG)
    except openai.APIError as error:
        return error.body["partial"]["usage"]["completion_tokens"], error, time.monotonic()
    return 0, None, time.monotonic()


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.slow)],
)
def test_a_rank_that_is_lost_under_load_is_told_and_comes_back(server, number):
    with server.client() as client, ThreadPoolExecutor(6) as pool:
        before, ranks, restarts = complete(client).choices[0].text, server.ranks(), server.health()["restarts"]
        shared = server.shared_memory()
        answers = [pool.submit(stream_until_error if one % 2 else ask_until_error, client) for one in range(6)]
        server.wait_for(lambda: server.stats()[0]["running"] == 6, "load")
        steps = server.stats()[0]["steps"]
        server.wait_for(lambda: server.stats()[0]["steps"] > steps + 10, "some tokens for everybody")
        os.kill(ranks[1], number)
        lost = time.monotonic()
        server.wait_for(lambda: server.health()["state"] != "READY", "a health that tells", ERROR_WITHIN_S)
        outcomes = [answer.result(WAIT_S) for answer in answers]

        for count, error, moment in outcomes:
            assert error is not None
            assert error.code == "replica_failed"
            assert "rank 1" in str(error)
            assert count > 0
            assert moment - lost < ERROR_WITHIN_S
        server.wait_for(lambda: server.health()["state"] == "READY", "READY again", 90)
        assert complete(client).choices[0].text == before
        assert server.health()["restarts"] == restarts + 1
        server.wait_for(lambda: not any(map(psutil.pid_exists, ranks)), "the end of the old ranks")
        assert len(list(server.tmp_dir.iterdir())) == 1  # the directory of the ranks that run now
        assert not any(Path(name).exists() for name in shared)


def test_sigterm_drains_and_leaves_nothing(model_dir):
    with server_process(model_dir) as server, server.client() as client, ThreadPoolExecutor(2) as pool:
        answer = pool.submit(complete, client, max_tokens=600)
        server.wait_for(lambda: server.stats()[0]["running"] == 1, "load")
        server.look()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.health()["state"] == "DRAINING", "DRAINING")
        with pytest.raises(openai.InternalServerError) as refused:
            complete(client)
        finished = answer.result(WAIT_S)

        assert server.process.wait(WAIT_S) == 0, server.said()
        assert refused.value.status_code == 503
        assert (finished.choices[0].finish_reason, finished.usage.completion_tokens) == ("length", 600)
        assert server.left_behind() == []


@pytest.mark.slow
def test_a_second_signal_does_not_wait(model_dir):
    with (
        server_process(model_dir, "--drain-timeout", 300) as server,
        server.client() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(complete, client, **LONG)
        server.wait_for(lambda: server.stats()[0]["running"] == 1, "load")
        server.process.send_signal(signal.SIGINT)
        server.wait_for(lambda: server.health()["state"] == "DRAINING", "DRAINING")
        assert server.stop(signal.SIGINT) == 0, server.said()

        assert answer.result(WAIT_S).choices[0].finish_reason == "abort"
        assert server.left_behind() == []


def test_nothing_outlives_a_front_end_that_is_killed(model_dir):
    with server_process(model_dir, "--ranks", 2) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, client, **LONG)
        server.wait_for(lambda: server.stats()[0]["running"] == 1, "load")
        server.look()
        server.process.kill()
        server.process.wait(WAIT_S)

        with pytest.raises(openai.APIError):
            answer.result(WAIT_S)
        end = time.monotonic() + WAIT_S
        while server.left_behind():
            assert time.monotonic() < end, f"left behind: {server.left_behind()}"
            time.sleep(0.05)
        assert len(server.started) >= 3


def test_the_next_start_removes_the_directory_of_a_server_whose_processes_were_all_killed(model_dir, monkeypatch):
    with server_process(model_dir) as server:
        server.look()
        os.kill(server.ranks()[0], signal.SIGSTOP)  # so that it cannot tidy up
        for process in server.alive():
            process.kill()
        server.process.wait(WAIT_S)
        (left,) = server.tmp_dir.iterdir()
        monkeypatch.setattr(tempfile, "tempdir", str(server.tmp_dir))
        mine = RunDir()
        try:
            assert list(server.tmp_dir.iterdir()) == [mine.path]
            RunDir().remove()
            assert mine.path.exists(), "its owner lives"
        finally:
            mine.remove()
        assert not left.exists()


def serve_once(*arguments):
    command = [sys.executable, "-m", "weightcast", "serve", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def test_mistakes_are_told_at_once(tmp_path, server, model_dir):
    port = server.port_file.read_text().strip()
    taken, nowhere, empty = serve_once(model_dir, "--port", port), serve_once(tmp_path / "nowhere"), serve_once(tmp_path)

    assert (taken.returncode, nowhere.returncode, empty.returncode) == (2, 2, 2)
    assert f"port {port}" in taken.stderr
    assert "no model directory" in nowhere.stderr
    assert "no config.json and no tokenizer.json" in empty.stderr
    assert "Traceback" not in taken.stderr + nowhere.stderr + empty.stderr


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path):
    path = tmp_path / "broken"
    init_checkpoint(path, preset="tiny", seed=7)
    (path / "model.safetensors").write_bytes(b"")
    ended = serve_once(path, "--port", 0)

    assert ended.returncode in (1, 2)
    assert ended.stderr.startswith("error: ") or "\nerror: " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_ranks_that_cannot_be_built_are_told_once_and_without_a_traceback(model_dir):
    ended = serve_once(model_dir, "--ranks", 3, "--port", 0)

    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("cannot be divided over 3 ranks") == 1
    error, _, problems = ended.stderr.rpartition("error: ")[2].partition("\n")
    assert error.startswith("ranks 0, 1, 2 reported unsupported_model: ")
    assert len(problems.splitlines()) == 2
