"""The life of a server: starting, health, metrics, draining, and the address it listens on."""

import os
import signal
import socket
import sys
import threading
import time

import httpx
import openai
import pytest
from control_engine import MODEL, WAIT_S, EchoEngine, read_metrics, serving, wait_for, write_model_dir

from weightcast.cli.serve import serve as serve_command
from weightcast.control.listening import listen, port_told, url_of
from weightcast.control.prometheus import Histogram
from weightcast.control.server import serve
from weightcast.control.settings import ServerSettings, Token
from weightcast.control.tokenizer import Tokenizer
from weightcast.errors import InvalidInput, MissingExtra, NotFound, ReplicaFailed, StorageFailed


@pytest.fixture
def model_dir(tmp_path):
    return write_model_dir(tmp_path / "model")


def complete(client, **options):
    return client.completions.create(model=MODEL, prompt="abc", **{"temperature": 0, "max_tokens": 8, **options})


def test_the_port_answers_before_the_engine_does(model_dir):
    with serving(model_dir, start_held=True) as server, server.openai() as client:
        health = httpx.get(f"{server.url}/health")
        assert (health.status_code, health.json()["state"]) == (503, "STARTING")
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"] is None
        assert 'state="STARTING"} 1' in httpx.get(f"{server.url}/metrics").text
        with pytest.raises(openai.InternalServerError, match="starting"):
            complete(client)
        assert server.announced == []

        server.engine.start_held = False
        wait_for(lambda: server.announced == [server.url])

        ready = httpx.get(f"{server.url}/ping")
        assert (ready.status_code, ready.json()["status"], ready.json()["version"]) == (200, "ok", "step_1")
        assert complete(client).choices[0].text == "abcabcab"


def test_an_engine_that_cannot_start_ends_the_server_with_its_error(model_dir):
    with serving(model_dir, start_error=ReplicaFailed("rank 0 could not start.")) as server:
        server.thread.join(WAIT_S)

    assert [str(error) for error in server.error] == ["rank 0 could not start."]
    assert server.engine.closes == [0.0]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_a_stop_while_the_engine_starts_gives_up_the_start(model_dir):
    with serving(model_dir, start_held=True) as server:
        server.stop()
        time.sleep(0.05)
        server.engine.start_held = False  # as a real engine does when it is closed
        server.thread.join(WAIT_S)

    assert server.error == []
    assert server.announced == []


def test_a_drain_lets_running_requests_finish_and_takes_no_more(model_dir):
    with serving(model_dir, held_at=4) as server, server.openai() as client:
        texts = []
        streaming = threading.Thread(target=lambda: texts.extend(c.choices[0].text for c in complete(client, stream=True)))
        whole = threading.Thread(target=lambda: texts.append(complete(client).choices[0].text))
        for thread in (streaming, whole):
            thread.start()
        wait_for(lambda: len(server.engine.running) == 2)

        server.stop()
        wait_for(lambda: httpx.get(f"{server.url}/health").json()["state"] == "DRAINING")
        with pytest.raises(openai.InternalServerError, match="DRAINING") as refused:
            complete(client)
        server.engine.held_at = None
        for thread in (streaming, whole, server.thread):
            thread.join(WAIT_S)

    assert refused.value.status_code == 503
    assert sorted(texts) == sorted([*"abcabcab", "abcabcab"])
    assert server.error == []
    assert server.engine.closes == [30.0]


@pytest.mark.parametrize("asked_twice", [True, False])
def test_what_still_runs_when_draining_ends_is_aborted_with_its_partial_answer(model_dir, asked_twice):
    with serving(model_dir, held_at=4, drain_timeout_s=WAIT_S if asked_twice else 0.05) as server, server.openai() as client:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(complete(client)))
        thread.start()
        wait_for(lambda: [answer.made for answer in list(server.engine.running.values())] == [4])
        server.stop()
        if asked_twice:
            server.stop()
        thread.join(WAIT_S)
        server.thread.join(WAIT_S)

    (choice,) = answers[0].choices
    assert (choice.finish_reason, choice.text) == ("abort", "abca")
    assert server.error == []


def test_idle_connections_do_not_hold_up_the_end(model_dir):
    with serving(model_dir) as server, httpx.Client() as client:
        assert client.get(f"{server.url}/health").status_code == 200
        server.stop()
        server.thread.join(WAIT_S)
        assert not server.thread.is_alive()


def test_metrics_count_what_happened(model_dir):
    with serving(model_dir, cached_tokens=2) as server, server.openai() as client:
        assert read_metrics(server.url)["weightcast_completion_tokens_total"] == 0
        complete(client)
        list(complete(client, n=2, stream=True))
        with pytest.raises(openai.UnprocessableEntityError):
            complete(client, max_tokens=10_000)
        server.engine.fail_at = 2
        with pytest.raises(openai.InternalServerError):
            complete(client)
        samples = read_metrics(server.url)

    def requests(outcome):
        return samples[f'weightcast_requests_total{{endpoint="completions",outcome="{outcome}"}}']

    assert (requests("ok"), requests("invalid_input"), requests("replica_failed")) == (2, 1, 1)
    assert samples["weightcast_prompt_tokens_total"] == 9
    assert samples["weightcast_cached_tokens_total"] == 6
    assert samples["weightcast_completion_tokens_total"] == 8 + 16 + 2
    assert samples["weightcast_requests_in_flight"] == 0
    assert samples["weightcast_time_to_first_token_seconds_count"] == 3
    assert samples['weightcast_request_seconds_bucket{le="+Inf"}'] == samples["weightcast_request_seconds_count"] == 4
    assert samples['weightcast_replica_state{state="READY"}'] == 1
    assert samples['weightcast_weight_version_info{version="step_1",root_digest="xxh3-128:00"}'] == 1
    assert samples['weightcast_rank_steps_total{rank="1"}'] == samples['weightcast_rank_rss_bytes{rank="0"}'] == 7


def test_stats_are_those_of_every_rank(model_dir):
    with serving(model_dir) as server:
        ranks = httpx.get(f"{server.url}/v1/stats").json()["data"]

    assert [(rank["rank"], rank["steps"], rank["version"]) for rank in ranks] == [(0, 7, "step_1"), (1, 7, "step_1")]


def test_the_description_of_the_paths_can_be_had(model_dir):
    with serving(model_dir) as server:
        paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]

    assert "requestBody" in paths["/v1/chat/completions"]["post"]
    assert {"/health", "/metrics", "/v1/models", "/v1/stats"} <= set(paths)


def test_a_histogram_counts_from_below():
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 9):
        histogram.observe(value)

    assert [value for _, _, value in histogram.samples()] == [2, 3, 4, 12, 4]


def test_a_port_in_use_is_an_error_that_names_it():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert url_of(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(InvalidInput, match=f"port {port}"):
            listen("127.0.0.1", port)
    with pytest.raises(InvalidInput, match=r"cannot listen on nowhere\.invalid"):
        listen("nowhere.invalid", 0)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_an_ipv6_address_can_be_listened_on():
    try:
        listening = listen("::1", 0)
    except InvalidInput:
        pytest.skip("no IPv6")
    with listening:
        assert url_of(listening).startswith("http://[::1]:")


def test_replies_do_not_wait_for_acknowledgements():
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()[:2]):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_port_file_is_there_meanwhile(tmp_path):
    path = tmp_path / "port"
    with listen("127.0.0.1", 0) as listening:
        with port_told(path, listening):
            assert int(path.read_text()) == listening.getsockname()[1]
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(StorageFailed, match="write the port"), port_told(tmp_path / "none" / "port", listening):
            pass


def test_a_signal_ends_a_server_in_the_main_thread(model_dir, tmp_path):
    made, before = [], signal.getsignal(signal.SIGTERM)

    def make_engine():
        made.append(EchoEngine())
        return made[0]

    settings = ServerSettings(model_name=MODEL, port=0, port_file=tmp_path / "port")
    serve(make_engine, Tokenizer.read(model_dir), settings, lambda _: os.kill(os.getpid(), signal.SIGTERM))

    assert made[0].closes == [30.0]
    assert not (tmp_path / "port").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_command_refuses_a_directory_without_a_model(tmp_path):
    with pytest.raises(NotFound, match="no model directory"):
        serve_command.main([str(tmp_path / "nowhere")], standalone_mode=False)


def test_the_command_names_the_extra_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "weightcast.control.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)

    with pytest.raises(MissingExtra, match=r"pip install 'weightcast\[serve\]'"):
        serve_command.main([str(tmp_path)], standalone_mode=False)


def test_settings_that_cannot_work_are_all_named():
    with pytest.raises(InvalidInput, match=r"request_timeout_s=0.*drain_timeout_s=-1.*port=70000.*model_name"):
        ServerSettings(model_name="", port=70000, request_timeout_s=0, drain_timeout_s=-1)


def test_a_token_comes_from_a_file_or_else_from_the_environment(tmp_path, monkeypatch, caplog):
    path = tmp_path / "token"
    path.write_text("from-the-file\n")
    path.chmod(0o640)

    assert Token.read(None, "WEIGHTCAST_CONTROL_TOKEN") is None
    monkeypatch.setenv("WEIGHTCAST_CONTROL_TOKEN", "from-the-environment")
    assert Token.read(None, "WEIGHTCAST_CONTROL_TOKEN").is_shown({"authorization": "Bearer from-the-environment"})
    token = Token.read(path, "WEIGHTCAST_CONTROL_TOKEN")
    assert token.is_shown({"authorization": "bearer  from-the-file "})
    assert not token.is_shown({"authorization": "Bearer from-the-environment"})
    assert "from-the" not in f"{token} {ServerSettings(model_name=MODEL, control_token=token)}"
    assert "open to others" not in caplog.text
    path.chmod(0o644)
    Token.read(path, "WEIGHTCAST_CONTROL_TOKEN")
    assert "open to others" in caplog.text


@pytest.mark.parametrize("text", ["", "two words", "caf\u00e9", "x" * 5000])
def test_a_token_that_cannot_be_sent_is_refused(text):
    with pytest.raises(InvalidInput, match="a token must be"):
        Token(text)


@pytest.mark.parametrize("option", ["--source", "--allow-source"])
def test_the_command_refuses_a_source_that_cannot_be_allowed(model_dir, option):
    with pytest.raises(InvalidInput, match=r"http://user@host:1|must not hold a name or password"):
        serve_command.main([str(model_dir), option, "http://user@host:1"], standalone_mode=False)


def test_a_name_that_the_operator_allows_may_be_called_without_a_token(model_dir):
    with serving(model_dir, allow_hosts=("Gen-0.cluster",)) as server:
        assert server.http.get("/v1/weights", headers={"host": "gen-0.cluster:8000"}).status_code == 200
        assert server.http.get("/v1/weights", headers={"host": "gen-1.cluster:8000"}).status_code == 403
