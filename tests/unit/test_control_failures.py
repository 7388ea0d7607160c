"""What clients are told when something is wrong, late, full, gone or dead."""

import json
import re
import select
import socket
import threading
from pathlib import Path

import httpx
import openai
import pytest
from control_engine import MODEL, serving, wait_for, write_model_dir
from control_weights import EchoStatus

from weightcast import errors
from weightcast.control.statuses import status_of

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    path = write_model_dir(tmp_path_factory.mktemp("model"))
    with serving(path, max_body_nbytes=1 << 20, max_choices=8, body_timeout_s=0.3) as server:
        yield server


@pytest.fixture
def server(running):
    engine = running.engine
    yield running
    engine.step_s, engine.max_requests, engine.moe, engine.blocks = 0.0, 64, True, 100
    engine.held_at = engine.fail_at = engine.abort_at = engine.switch_at = None
    engine.status = EchoStatus()
    wait_for(lambda: not engine.running, "requests are left in the engine")
    engine.cancelled.clear()


@pytest.fixture
def client(server):
    with server.openai() as client:
        yield client


def post(server, path="/v1/completions", **body):
    return httpx.post(f"{server.url}{path}", json={"model": MODEL, **body}, timeout=20)


def complete(client, prompt="abc", **options):
    return client.completions.create(model=MODEL, prompt=prompt, **{"temperature": 0, **options})


def test_every_error_has_a_status():
    found, waiting = {}, [errors.WeightcastError]
    while waiting:
        cls = waiting.pop()
        found[cls.__name__] = status_of(cls)
        waiting += [sub for sub in cls.__subclasses__() if sub.__module__.startswith(f"{errors.__name__}.")]

    named = {name for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, errors.WeightcastError)}
    assert set(found) == named
    expected = {
        "InvalidInput": 422, "UnsupportedModel": 422, "NotFound": 404, "SnapshotNotFound": 404, "Conflict": 409,
        "UpdateInProgress": 409, "Overloaded": 429, "NotReady": 503, "ReplicaFailed": 503, "DeadlineExceeded": 504,
        "Corrupt": 502, "DigestMismatch": 502, "SourceFailed": 502, "StorageFailed": 500, "WeightcastError": 500,
        "VersionDoesNotFit": 422, "DeltaDoesNotFit": 422, "VerificationUnavailable": 422, "CommitFailed": 500,
        "UpdateFailed": 500, "UpdateCancelled": 409, "VersionNotServed": 409, "WrongState": 409,
        "BaseVersionMismatch": 409,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_the_page_of_errors_tells_every_code_and_its_status():
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", page, re.MULTILINE))
    known = {name: getattr(errors, name) for name in errors.__all__ if hasattr(getattr(errors, name), "code")}
    told = {
        name: int(status)
        for status, names in re.findall(r"^\| (\d+) \| (.*?) \|", page, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }

    assert rows == {name: cls.code for name, cls in known.items() if name != "WeightcastError"}
    assert told == {name: status_of(known[name]) for name in told}
    assert set(told.values()) == {status_of(cls) for cls in known.values()}


def test_all_fields_that_are_wrong_are_listed_at_once(server):
    body = {
        "prompt": "x", "logit_bias": {"1": 2}, "presence_penalty": 0.5, "suffix": "end", "best_of": 3, "colour": "red",
        "temperature": 3, "n": 0, "stop": [""], "logprobs": True, "seed": 1.5, "top_p": 0,
    }  # fmt: skip
    reply = post(server, **body)

    error = reply.json()["error"]
    assert reply.status_code == 422
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_input")
    assert {problem["param"] for problem in error["problems"]} == set(body) - {"prompt"}
    assert all(name in error["message"] for name in body if name != "prompt")


def test_the_client_raises_what_it_has_for_bad_input(client):
    with pytest.raises(openai.UnprocessableEntityError, match="tools") as caught:
        client.chat.completions.create(model=MODEL, messages=CHAT, tools=[{"type": "function", "function": {"name": "f"}}])
    assert caught.value.param == "tools"


def test_fields_that_ask_for_nothing_are_fine(server):
    nothing = {
        "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "user": "me", "store": True,
        "metadata": {"a": "b"}, "stop": None, "stream": None, "stream_options": None, "n": None, "seed": None,
    }  # fmt: skip
    chat = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
        "service_tier": "auto", "parallel_tool_calls": True, "prompt_cache_key": "k", "safety_identifier": "s",
        "logprobs": False,
    }  # fmt: skip

    assert post(server, prompt="x", best_of=1, suffix=None, echo=False, **nothing).status_code == 200
    assert post(server, "/v1/chat/completions", messages=CHAT, **nothing, **chat).status_code == 200


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({}, ["prompt"]),
        ({"model": None}, ["model", "prompt"]),
        ({"model": 5, "prompt": "a"}, ["model"]),
        ({"prompt": ""}, ["prompt"]),
        ({"prompt": []}, ["prompt"]),
        ({"prompt": [[]]}, ["prompt[0]"]),
        ({"prompt": ["a", ""]}, ["prompt[1]"]),
        ({"prompt": ["a", 1]}, ["prompt"]),
        ({"prompt": [True]}, ["prompt"]),
        ({"prompt": [1.0]}, ["prompt"]),
        ({"prompt": {"a": 1}}, ["prompt"]),
        ({"prompt": None}, ["prompt"]),
        ({"prompt": [0, 259]}, ["prompt"]),
        ({"prompt": [[5], [-1]]}, ["prompt[1]"]),
        ({"prompt": [2**80]}, ["prompt"]),
        ({"prompt": "a", "max_tokens": 200}, ["max_tokens"]),
        ({"prompt": "a" * 200}, ["prompt"]),
        ({"prompt": ["a"] * 3, "n": 3}, ["n"]),
        ({"prompt": "a", "echo": True, "logprobs": 1}, ["echo"]),
        ({"prompt": "a", "logprobs": 21}, ["logprobs"]),
        ({"prompt": "a", "stop": ["x"] * 17}, ["stop"]),
        ({"prompt": "a", "stop": [1]}, ["stop"]),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, ["stream_options"]),
        ({"prompt": "a", "stream": True, "stream_options": {"other": 1}}, ["stream_options.other"]),
        ({"prompt": "a", "timeout": 0}, ["timeout"]),
        ({"prompt": "a", "messages": CHAT}, ["messages"]),
        ({"prompt": "a", "return_routed_experts": True, "stop": "x"}, ["return_routed_experts"]),
        ({"prompt": "a", "routed_experts": {"shape": [1, 1, 1], "data": "?"}}, ["routed_experts.data"]),
        ({"prompt": "a", "routed_experts": {"shape": [1, 2, 1], "data": "AAA="}}, ["routed_experts"]),
        ({"prompt": "a", "routed_experts": {"shape": [-1, -1, 1], "data": "AAA="}}, ["routed_experts"]),
        ({"prompt": "a", "max_tokens": 1, "routed_experts": {"shape": [3, 1, 1], "data": "AAAAAAAA"}}, ["routed_experts"]),
        ({"prompt": ["a", "b"], "routed_experts": {"shape": [1, 1, 1], "data": "AAA="}}, ["routed_experts"]),
    ],
)  # fmt: skip
def test_a_completion_that_cannot_be_is_refused(server, body, params):
    reply = post(server, **body)

    assert reply.status_code == 422
    assert [problem["param"] for problem in reply.json()["error"]["problems"]] == params


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({}, ["messages"]),
        ({"messages": []}, ["messages"]),
        ({"messages": "hi"}, ["messages"]),
        ({"messages": ["hi"]}, ["messages[0]"]),
        ({"messages": [{}]}, ["messages[0].role", "messages[0].content"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, ["messages[0].role"]),
        ({"messages": [{"role": "user", "content": None}]}, ["messages[0].content"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ["messages[0].content[0]"]),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}, ["messages[0].tool_calls"]),
        ({"messages": CHAT, "top_logprobs": 2}, ["top_logprobs"]),
        ({"messages": CHAT, "max_tokens": 2, "max_completion_tokens": 3}, ["max_tokens"]),
        ({"messages": CHAT, "max_completion_tokens": 500}, ["max_tokens"]),
        ({"messages": CHAT, "response_format": {"type": "json_object"}}, ["response_format"]),
        ({"messages": CHAT, "reasoning_effort": "high", "audio": {"a": 1}}, ["reasoning_effort", "audio"]),
        ({"messages": [{"role": "user", "content": "a" * 300}]}, ["messages"]),
    ],
)  # fmt: skip
def test_a_chat_that_cannot_be_is_refused(server, body, params):
    reply = post(server, "/v1/chat/completions", **body)

    assert reply.status_code == 422
    assert [problem["param"] for problem in reply.json()["error"]["problems"]] == params


def test_the_numbers_that_do_not_fit_are_told(server):
    message = post(server, prompt="abc", max_tokens=500).json()["error"]["message"]

    assert all(number in message for number in ("3 tokens", "500", "200", "197"))


def test_the_cache_bounds_a_request_too(server):
    server.engine.blocks = 2  # of 16 tokens; the last token of an answer needs no room

    assert post(server, prompt="abc", max_tokens=30).status_code == 200
    assert "33 allowed" in post(server, prompt="abc", max_tokens=31).json()["error"]["message"]


def test_experts_are_refused_where_there_are_none(server):
    server.engine.moe = False

    assert post(server, prompt="a", return_routed_experts=True).status_code == 422
    assert post(server, prompt="a", routed_experts={"shape": [1, 1, 1], "data": "AAA="}).status_code == 422


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"model": "\\ud800"}', b"[" * 100_000, b'{"temperature": 1e999}', b"nul"]
)
def test_a_body_that_is_no_json_object_is_refused(server, body):
    reply = httpx.post(f"{server.url}/v1/completions", content=body)

    assert reply.status_code == 422
    assert reply.json()["error"]["code"] == "invalid_input"


def test_a_body_that_is_too_large_is_refused_declared_or_not(server):
    large = b'{"model": "' + b"x" * (1 << 20) + b'"}'
    declared = httpx.post(f"{server.url}/v1/completions", content=large)
    in_chunks = httpx.post(
        f"{server.url}/v1/completions", content=(large[at : at + 65536] for at in range(0, len(large), 65536))
    )

    for reply in (declared, in_chunks):
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "too_large"


def test_a_body_that_is_declared_too_large_is_not_waited_for(server):
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=20) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")

        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("leaves", [True, False])
def test_a_body_that_does_not_come_is_not_waited_for(server, leaves):
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=20) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        wait_for(lambda: in_flight(server) == 1 or select.select([connection], [], [], 0)[0])  # or it has timed out already
        assert leaves or connection.recv(1000).startswith(b"HTTP/1.1 504")

    wait_for(lambda: in_flight(server) == 0)


def in_flight(server):
    line = re.search("^weightcast_requests_in_flight (.*)$", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
    return int(line[1])


def test_a_large_body_is_read_all_the_same(server):
    reply = post(server, prompt="a" * 900_000)

    assert reply.status_code == 422
    assert "has 900000 characters" in reply.json()["error"]["message"]


def test_another_models_name_is_not_found_as_openai_says_it(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt", prompt="x")

    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_unknown_paths_and_methods_have_the_envelope(server):
    nowhere, wrong = httpx.get(f"{server.url}/v1/nowhere"), httpx.get(f"{server.url}/v1/completions")

    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "unknown_url")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "wrong_method")


def test_a_full_engine_says_when_to_come_back(server):
    server.engine.max_requests = 2
    reply = post(server, prompt=["a", "b", "c"])

    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")
    assert int(reply.headers["retry-after"]) > 0
    wait_for(lambda: not server.engine.running, "answers that were taken before the queue was full go on")


def test_an_engine_that_is_not_ready_takes_nothing_and_says_why(server):
    server.engine.status = EchoStatus(state="RESTARTING", reason="rank 1 died", restarts=1)
    reply, health = post(server, prompt="a", stream=True), httpx.get(f"{server.url}/health")

    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "not_ready")
    assert int(reply.headers["retry-after"]) > 0
    assert health.status_code == 503
    assert health.json() | {"since": 0} == {
        "status": "unavailable", "state": "RESTARTING", "reason": "rank 1 died", "since": 0, "version": "step_1",
        "root_digest": "xxh3-128:00", "restarts": 1, "paused": False, "legacy_status": 1,
    }  # fmt: skip
    assert httpx.get(f"{server.url}/v1/stats").status_code == 503


def test_an_engine_that_dies_leaves_an_error_with_what_was_answered(server):
    server.engine.fail_at = 4
    reply = post(server, prompt="abc", temperature=0)

    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (503, "replica_failed", "server_error")
    assert "rank 1 died" in error["message"]
    (choice,) = error["partial"]["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abca", None)
    assert choice["weight_versions"] == [{"start": 0, "end": 4, "version": "step_1"}]


def test_an_engine_that_dies_ends_the_stream_with_an_error(server, client):
    server.engine.fail_at = 3
    texts = []
    with pytest.raises(openai.APIError, match="rank 1 died") as caught:
        texts.extend(chunk.choices[0].text for chunk in complete(client, stream=True))

    assert "".join(texts) == "abc"
    assert caught.value.code == "replica_failed"


def test_one_dead_answer_of_several_ends_them_all(server, client):
    server.engine.fail_at = 3
    with pytest.raises(openai.InternalServerError) as caught:
        complete(client, n=4, temperature=1)

    assert caught.value.status_code == 503
    assert len(caught.value.body["partial"]["choices"]) == 4


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_dies_before_the_first_token_has_a_status_even_in_a_stream(server, stream):
    server.engine.fail_at = 0
    reply = post(server, prompt="abc", stream=stream)

    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "replica_failed")
    assert "partial" not in reply.json()["error"]


def test_an_aborted_answer_says_so(server, client):
    server.engine.abort_at = 2
    (choice,) = complete(client).choices
    last = list(complete(client, stream=True))[-1].choices[0]

    for one in (choice, last):
        assert one.finish_reason == "abort"
        assert one.finish_details == {"reason": "shutting down"}
        assert one.weight_versions == [{"start": 0, "end": 2, "version": "step_1"}]


def test_a_request_that_takes_too_long_ends_with_what_was_answered(server):
    server.engine.held_at = 4
    reply = post(server, prompt="aéb", temperature=0, timeout=0.2, stop="bac")

    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (504, "deadline_exceeded")
    assert reply.headers["x-should-retry"] == "false"
    assert error["partial"]["choices"][0]["text"] == "aéb"  # the b was held back: it might have become the stop string
    assert len(server.engine.cancelled) == 1


def test_a_stream_that_takes_too_long_ends_with_an_error(server, client):
    server.engine.held_at = 4
    with pytest.raises(openai.APIError, match=r"within 0\.2 s") as caught:
        list(complete(client, stream=True, extra_body={"timeout": 0.2}))

    assert caught.value.code == "deadline_exceeded"
    assert len(server.engine.cancelled) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_cancels_its_request(server, stream, n):
    server.engine.held_at = 2
    body = json.dumps({"model": MODEL, "prompt": "abc", "stream": stream, "n": n}).encode()
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        wait_for(lambda: [answer.made for answer in [*server.engine.running.values()]] == [2] * n)
        if stream:
            assert connection.recv(1000)

    wait_for(lambda: len(server.engine.cancelled) == n, "the request goes on without its client")
    assert server.engine.running == {}


def test_a_stream_that_is_closed_by_the_client_is_cancelled(server, client):
    server.engine.held_at = 2
    with complete(client, stream=True) as stream:
        next(iter(stream))

    wait_for(lambda: len(server.engine.cancelled) == 1)


def test_an_answer_that_met_its_stop_string_does_not_go_on_while_others_do(server, client):
    server.engine.held_at = 6
    answers = []
    thread = threading.Thread(target=lambda: answers.append(complete(client, ["xSTOP", "yyyyy"], stop="STOP", max_tokens=9)))
    thread.start()
    wait_for(lambda: len(server.engine.cancelled) == 1 and len(server.engine.running) == 1)
    server.engine.held_at = None
    thread.join(20)

    assert [choice.text for choice in answers[0].choices] == ["x", "y" * 9]


def test_others_are_answered_while_some_wait(server, client):
    server.engine.held_at = 10
    waiting = threading.Thread(target=lambda: complete(client, max_tokens=16))
    waiting.start()
    wait_for(lambda: len(server.engine.running) == 1)

    assert complete(client, max_tokens=5).choices[0].text == "abcab"
    server.engine.held_at = None
    waiting.join(20)
    assert not waiting.is_alive()


def test_a_mistake_of_ours_is_told_without_its_details(server, caplog):
    server.engine.status = None
    reply = httpx.get(f"{server.url}/health")

    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert "healthy" not in reply.text
    wait_for(lambda: "AttributeError" in caplog.text, "the trace is not in the log")
