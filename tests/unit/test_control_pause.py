"""Pausing, aborting, sleeping and waking over HTTP, the two calls of the old protocol, and which version may answer."""

import json
import threading

import openai
import pytest
from control_engine import MODEL, serving, wait_for, write_model_dir
from control_weights import EchoStatus, forget

CALLS = "pause", "sleep", "wake", "resume"


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with serving(write_model_dir(tmp_path_factory.mktemp("model")), legacy_get=True) as server:
        yield server


@pytest.fixture
def server(running):
    yield running
    running.engine.held_at, running.engine.hold = None, None
    forget(running.engine)
    wait_for(lambda: not running.engine.running, "requests are left in the engine")
    running.engine.submitted.clear()


def post(server, path, body=None, **options):
    content = None if body is None else json.dumps(body).encode()
    return server.http.post(path, content=content, **options)


def result(reply):
    assert (reply.status_code, reply.json()["status"]) == (200, "success"), reply.text
    return reply.json()["result"]


def problems(reply):
    assert (reply.status_code, reply.json()["code"], reply.json()["status"]) == (422, "invalid_input", "error"), reply.text
    return {problem["param"]: problem["message"] for problem in reply.json()["problems"]}


def health(server):
    reply = server.http.get("/health")
    return reply.status_code, reply.json()["state"], reply.json()["reason"], reply.json()["legacy_status"]


class Asked(threading.Thread):
    """A request that is answered in the background."""

    def __init__(self, server, request_id=None, **options):
        super().__init__()
        self.server, self.answer, self.error = server, None, None
        self.headers = {"x-request-id": request_id} if request_id else {}
        self.options = {"temperature": 0, "max_tokens": 9, **options}
        self.start()

    def run(self):
        with self.server.openai() as client:
            try:
                self.answer = client.completions.create(
                    model=MODEL, prompt="abc", extra_headers=self.headers, **self.options
                )
            except openai.APIStatusError as error:
                self.error = error

    def ended(self):
        self.join(20)
        assert self.answer is not None
        return [(choice.text, choice.finish_reason) for choice in self.answer.choices]


def test_a_pause_is_seen_and_ends(server):
    assert result(server.http.get("/v1/is_paused")) == {"is_paused": False}
    assert result(post(server, "/v1/pause")) == {"is_paused": True}
    assert result(post(server, "/v1/pause")) == {"is_paused": True}
    assert result(server.http.get("/v1/is_paused")) == {"is_paused": True}
    assert health(server) == (503, "READY", "paused", 0)
    assert server.http.get("/ping").json()["paused"] is True

    asked = Asked(server)
    wait_for(lambda: len(server.engine.running) == 1)
    assert result(post(server, "/v1/resume")) == {"is_paused": False}
    assert result(post(server, "/v1/resume", {})) == {"is_paused": False}
    assert asked.ended() == [("abcabcabc", "length")]
    assert health(server) == (200, "READY", "serving", 0)
    assert server.engine.calls[0] == ("pause", "abort", False, 60.0)


def test_a_pause_by_default_ends_requests_with_what_they_have(server):
    server.engine.held_at = 4
    asked = Asked(server)
    wait_for(lambda: [*server.engine.made().values()] == [4])
    post(server, "/v1/pause")

    assert asked.ended() == [("abca", "abort")]
    assert asked.answer.choices[0].finish_details == {"reason": "aborted by the operator"}


def test_a_pause_can_keep_requests(server):
    server.engine.held_at = 4
    asked = Asked(server)
    wait_for(lambda: [*server.engine.made().values()] == [4])
    assert result(post(server, "/v1/pause", {"mode": "keep", "clear_cache": True, "timeout": 5})) == {"is_paused": True}
    server.engine.held_at = None
    post(server, "/v1/resume", {"timeout": 7})

    assert asked.ended() == [("abcabcabc", "length")]
    assert server.engine.calls == [("pause", "keep", True, 5.0), ("resume", 7.0)]


def test_a_pause_that_waits_too_long_is_none(server):
    server.engine.held_at = 4
    asked = Asked(server)
    wait_for(lambda: len(server.engine.running) == 1)
    reply = post(server, "/v1/pause", {"mode": "wait", "timeout": 0.05})

    assert (reply.status_code, reply.json()["code"]) == (504, "deadline_exceeded")
    assert result(server.http.get("/v1/is_paused")) == {"is_paused": False}
    server.engine.held_at = None
    assert asked.ended() == [("abcabcabc", "length")]


@pytest.mark.parametrize(
    ("path", "body", "params"),
    [
        ("/v1/pause", {"mode": "stop", "clear_cache": "yes", "timeout": "5"}, {"mode", "clear_cache", "timeout"}),
        ("/v1/resume", {"timeout": -1, "mode": "keep"}, {"timeout", "mode"}),
        ("/v1/sleep", {"mode": 1, "timeout": 0}, {"mode", "timeout"}),
        ("/v1/wakeup", {"mode": "abort"}, {"mode"}),
        ("/v1/abort_requests", {"abort_all": "yes", "req_ids": "x"}, {"abort_all", "req_ids"}),
        ("/v1/abort_requests", {"req_ids": [1, ""]}, {"req_ids[0]", "req_ids[1]"}),
        ("/v1/abort_requests", None, {"req_ids"}),
        ("/v1/abort_requests", {"abort_all": False}, {"req_ids"}),
        ("/v1/abort_requests", {"abort_all": None, "req_ids": []}, {"req_ids"}),
        ("/v1/abort_requests", {"abort_all": True, "req_ids": ["x"]}, {"req_ids"}),
    ],
)
def test_what_cannot_be_is_refused(server, path, body, params):
    assert set(problems(post(server, path, body))) == params
    assert server.engine.calls == []


def test_an_unknown_mode_is_answered_with_the_known_ones(server):
    words = problems(post(server, "/v1/pause", {"mode": "stop"}))["mode"]

    assert all(mode in words for mode in ("abort", "wait", "keep"))


def test_requests_are_aborted_by_any_id_their_caller_knows(server):
    server.engine.held_at = 4
    first, second = Asked(server, "mine"), Asked(server, n=2)
    wait_for(lambda: sorted(server.engine.made().values()) == [4, 4, 4])
    by_answer = next(one for one in server.engine.running if one.endswith("-1")).removesuffix("-1")

    aborted = result(post(server, "/v1/abort_requests", {"req_ids": ["mine", "nobody", "mine"]}))
    assert [one["output_token_count"] for one in aborted["aborted"]] == [4]
    assert aborted["not_found"] == ["nobody"]
    assert first.ended() == [("abca", "abort")]

    aborted = result(post(server, "/v1/abort_requests", {"req_ids": [by_answer]}))
    assert {one["request_id"] for one in aborted["aborted"]} == {f"{by_answer}-0", f"{by_answer}-1"}
    assert second.ended() == [("abca", "abort")] * 2
    assert result(post(server, "/v1/abort_requests", {"req_ids": ["mine"]}))["not_found"] == ["mine"]


def test_all_requests_are_aborted(server):
    server.engine.held_at = 2
    asked = [Asked(server, "same") for _ in range(3)]
    wait_for(lambda: len(server.engine.running) == 3)
    aborted = result(post(server, "/v1/abort_requests", {"abort_all": True, "req_ids": []}))

    assert (len(aborted["aborted"]), aborted["not_found"]) == (3, [])
    assert [one.ended() for one in asked] == [[("ab", "abort")]] * 3
    assert result(post(server, "/v1/abort_requests", {"abort_all": True})) == {"aborted": [], "not_found": []}


BOTH = ("weight", "kv_cache")


@pytest.mark.parametrize(
    ("query", "body", "tags"),
    [
        ("", None, BOTH),
        ("", {}, BOTH),
        ("", {"tags": None}, BOTH),
        ("?tags=weight", None, ("weight",)),
        ("?tags=kv_cache,weight", None, BOTH),
        ("?tags=kv_cache&tags=weight", {}, BOTH),
        ("?tags=weight", {"tags": "kv_cache"}, ("kv_cache",)),
        ("?tags=nonsense", {"tags": ["kv_cache"]}, ("kv_cache",)),
        ("?tags=%20kv_cache%20,,kv_cache", None, ("kv_cache",)),
        ("", {"tags": " kv_cache , weight ,kv_cache"}, BOTH),
        ("", {"tags": ["weight", "weight", " weight "]}, ("weight",)),
        ("", {"tags": ["weight,kv_cache"]}, BOTH),
    ],
)
@pytest.mark.parametrize("path", ["/v1/sleep", "/v1/wakeup"])
def test_tags_come_from_the_url_or_the_body(server, path, query, body, tags):
    assert len(result(post(server, path + query, body))) == 2
    called = [call for call in server.engine.calls if call[0] in ("sleep", "wake")]
    assert called == [("sleep", tags, "abort", 60.0) if path == "/v1/sleep" else ("wake", tags, 300.0)]


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ("?tags=weights", None),
        ("?tags=", None),
        ("", {"tags": ""}),
        ("", {"tags": []}),
        ("", {"tags": ["weight", "graphs", "Weight"]}),
        ("", {"tags": ["weight", 1]}),
        ("", {"tags": {"weight": True}}),
        ("", {"tags": 3}),
        ("?tags=weight", {"tags": " , "}),
    ],
)
@pytest.mark.parametrize("path", ["/v1/sleep", "/v1/wakeup"])
def test_tags_that_are_none_are_refused_with_the_known_ones(server, path, query, body):
    words = problems(post(server, path + query, body))["tags"]

    assert all(tag in words for tag in BOTH)
    assert server.engine.calls == []


def test_each_tag_sleeps_and_wakes_by_itself(server):
    result(post(server, "/v1/sleep", {"tags": "kv_cache", "mode": "keep", "timeout": 3}))
    assert health(server)[:2] == (503, "SLEEPING")
    result(post(server, "/v1/sleep?tags=weight"))
    assert health(server) == (503, "CLEARED", "asleep", -2)
    assert server.http.get("/v1/weights").json()["result"]["asleep"] == ["kv_cache", "weight"]

    refused = post(server, "/v1/resume")
    assert (refused.status_code, refused.json()["code"]) == (409, "wrong_state")
    result(post(server, "/v1/wakeup?tags=kv_cache"))
    assert health(server)[:2] == (503, "CLEARED")
    result(post(server, "/v1/wakeup", {"timeout": 4}))
    assert health(server) == (200, "READY", "woken", 0)
    assert [call for call in server.engine.calls if call[0] != "pause"] == [
        ("sleep", ("kv_cache",), "keep", 3.0),
        ("sleep", ("weight",), "abort", 60.0),
        ("wake", ("kv_cache",), 300.0),
        ("wake", BOTH, 4.0),
    ]


def test_what_stages_over_sleeping_weights_is_not_healthy(server):
    post(server, "/v1/sleep")
    server.engine.hold = "staging"
    post(server, "/v1/update_weights", {"wait": False})
    server.engine.is_paused = False

    assert health(server)[:2] == (503, "STAGING")
    server.engine.hold = None
    wait_for(lambda: server.engine.status.state == "CLEARED")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_calls_of_the_old_protocol_clear_and_bring_back(server, method):
    def call(path):
        reply = server.http.request(method, path)
        content = reply.json()
        assert (reply.status_code, content["status"], content["error_message"]) == (200, "success", "Success")
        assert (content["dp_rank"], content["local_dp_rank"], len(content["result"])) == (0, 0, 2)
        assert reply.headers.get("deprecation") == ("true" if method == "GET" else None)
        return content["msg"]

    assert call("/update_model_weight") == "model weight is normal"
    assert call("/clear_load_weight") == "clear model weight successfully"
    assert health(server) == (503, "CLEARED", "asleep", -2)
    assert call("/clear_load_weight") == "model weight is cleared"
    assert call("/update_model_weight") == "update model weight successfully"
    assert health(server) == (200, "READY", "woken", 0)
    assert call("/update_model_weight") == "model weight is normal"


def test_the_old_protocol_clears_what_is_left(server):
    post(server, "/v1/sleep?tags=weight")

    assert post(server, "/clear_load_weight").json()["msg"] == "clear model weight successfully"
    post(server, "/v1/wakeup?tags=weight")
    assert post(server, "/update_model_weight").json()["msg"] == "update model weight successfully"
    assert health(server)[0] == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/clear_load_weight", "/update_model_weight"])
@pytest.mark.parametrize(("state", "status"), [("STAGING", 409), ("COMMITTING", 409), ("RESTARTING", 503)])
def test_the_old_protocol_is_refused_when_it_is_the_wrong_moment(server, method, path, state, status):
    server.engine.status = EchoStatus(state=state)
    reply = server.http.request(method, path)
    content = reply.json()

    assert (reply.status_code, content["status"], content["dp_rank"]) == (status, "error", 0)
    assert content["msg"] == content["error_message"]
    assert (reply.headers.get("deprecation") == "true") == (method == "GET")


def test_the_old_protocol_does_not_call_a_failed_replica_updated(server):
    server.engine.status = EchoStatus(state="FAILED")
    reply = post(server, "/update_model_weight")

    assert (reply.status_code, reply.json()["code"]) == (409, "wrong_state")


# -- admission -----------------------------------------------------------------------------------------------------------


def ask(server, path="/v1/completions", **body):
    prompt = {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    return server.http.post(path, json={"model": MODEL, **prompt, **body})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("wanted", "status"),
    [
        (None, 200),
        ({"min": "step_1"}, 200),
        ({"min": "step_2"}, 200),
        ({"min": "step_3"}, 409),
        ({"exact": "step_2"}, 200),
        ({"exact": "step_2", "min": None}, 200),
        ({"exact": "step_1"}, 409),
        ({"exact": "elsewhere"}, 409),
    ],
)
def test_a_request_may_ask_for_a_version(server, path, stream, wanted, status):
    server.engine.published = ["step_1", "step_2", "step_3"]
    server.engine.status = EchoStatus(version="step_2")
    reply = ask(server, path, stream=stream, weight_version=wanted, max_tokens=2)

    assert reply.status_code == status
    if status == 409:
        error = reply.json()["error"]
        assert (error["code"], error["weight_version"]) == ("version_not_served", "step_2")
        assert reply.headers["retry-after"] == "1"
        assert server.engine.submitted == []


@pytest.mark.parametrize(
    ("wanted", "params"),
    [
        ({}, ["weight_version"]),
        ({"min": "a", "exact": "b"}, ["weight_version"]),
        ({"min": None, "exact": None}, ["weight_version"]),
        ({"max": "a", "min": "b"}, ["weight_version.max"]),
        ({"min": 5}, ["weight_version.min"]),
        ({"exact": ""}, ["weight_version.exact"]),
        ("step_1", ["weight_version"]),
        (["step_1"], ["weight_version"]),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_version_that_cannot_be_asked_for_is_refused(server, path, wanted, params):
    reply = ask(server, path, weight_version=wanted)

    assert reply.status_code == 422
    assert [problem["param"] for problem in reply.json()["error"]["problems"]] == params


def test_an_update_lets_in_who_waited_for_it(server):
    server.engine.published = ["step_1", "step_2"]
    assert ask(server, weight_version={"min": "step_2"}).status_code == 409
    result(post(server, "/v1/update_weights"))
    (choice,) = ask(server, weight_version={"min": "step_2"}, max_tokens=3, temperature=0).json()["choices"]

    assert choice["weight_versions"] == [{"start": 0, "end": 3, "version": "step_2"}]


@pytest.mark.parametrize(("mode", "finish"), [("keep", "length"), ("abort", "abort")])
def test_a_request_lives_through_an_update_or_not_as_the_update_says(server, mode, finish):
    server.engine.published, server.engine.held_at = ["step_1", "step_2"], 4
    asked = Asked(server)
    wait_for(lambda: [*server.engine.made().values()] == [4])
    result(post(server, "/v1/update_weights", {"pause": mode}))
    server.engine.held_at = None

    assert asked.ended() == [("abcabcabc" if mode == "keep" else "abca", finish)]
    spans = [(span["start"], span["end"], span["version"]) for span in asked.answer.choices[0].weight_versions]
    assert spans == [(0, 4, "step_1"), (4, 9, "step_2")][: 2 if mode == "keep" else 1]
