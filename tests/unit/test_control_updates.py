"""Updates over HTTP: begun, waited for, watched, cancelled, refused; and what else is asked about weights."""

import json
import re
import socket
import threading
import uuid

import httpx
import pytest
from control_engine import serving, wait_for, write_model_dir
from control_weights import EchoStatus, forget

from weightcast import errors
from weightcast.engines.base import UpdateRequest
from weightcast.transports.allowed import AllowedSources

HEADERS = b"host: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    settings = {"max_control_body_nbytes": 1 << 16, "body_timeout_s": 0.3, "sources": AllowedSources(["file:///store"])}
    with serving(write_model_dir(tmp_path_factory.mktemp("model")), **settings) as server:
        yield server


@pytest.fixture
def server(running):
    engine = running.engine
    engine.published = ["step_1", "step_2", "step_3"]
    yield running
    engine.hold = None
    wait_for(lambda: all(update.ended for update in engine.updates.values()), "an update is left in the engine")
    forget(engine)


def post(server, path, body=None, **options):
    content = None if body is None else json.dumps(body).encode()
    return server.http.post(path, content=content, **options)


def update(server, **body):
    return post(server, "/v1/update_weights", body)


def begin(server, **body):
    return update(server, wait=False, **body).json()["result"]["update_id"]


def status(server, update_id):
    return server.http.get(f"/v1/updates/{update_id}").json()["result"]


def refusal(reply, status, code):
    """What a reply refuses with, after checking its envelope."""
    content = reply.json()
    assert (reply.status_code, content["code"]) == (status, code), content
    assert (content["status"], content["result"]) == ("error", None)
    assert content["error_message"]
    assert content["request_id"] == reply.headers["x-request-id"]
    assert ("problems" in content) == (status == 422)
    return content


def test_an_update_replies_with_one_entry_per_rank(server):
    reply = update(server, version="step_2")
    content = reply.json()

    assert reply.status_code == 200
    assert (content["status"], content["error_message"]) == ("success", "Success")
    assert [(one["rank"], one["version"], one["mode"]) for one in content["result"]] == [
        (0, "step_2", "copy"),
        (1, "step_2", "copy"),
    ]
    assert {"sync_cost", "update_cost", "total_cost", "pause_s", "proof_s", "bytes"} <= set(content["result"][0])
    assert set(content) == {"request_id", "status", "error_message", "result"}
    assert server.http.get("/v1/weights").json()["result"]["version"] == "step_2"


def test_a_control_call_has_an_id_of_its_own_or_the_callers(server):
    own = server.http.get("/v1/weights")
    theirs = server.http.get("/v1/weights", headers={"x-request-id": "trace-7"})
    refused = update(server, colour="red")

    assert uuid.UUID(own.json()["request_id"].removeprefix("control-")).version == 4
    assert own.json()["request_id"] == own.headers["x-request-id"]
    assert theirs.json()["request_id"] == theirs.headers["x-request-id"] == "trace-7"
    assert refused.json()["request_id"].startswith("control-")


@pytest.mark.parametrize("body", [None, {}, {"version": None, "source": None, "timeout": None, "wait": None}])
def test_without_fields_the_engine_decides(server, body):
    assert post(server, "/v1/update_weights", body).status_code == 200
    assert server.engine.requests == [UpdateRequest()]
    assert server.engine.status.version == "step_3"


def test_every_field_reaches_the_engine(server):
    body = {
        "version": "step_2", "source": "file:///store", "transfer_mode": "gdr", "verify_checksum": False, "timeout": 7,
        "commit": "swap", "pause": "wait", "clear_cache": False, "release_cache": True,
    }  # fmt: skip

    assert update(server, **body).status_code == 200
    assert server.engine.requests == [UpdateRequest(timeout_s=7, **{n: v for n, v in body.items() if n != "timeout"})]


@pytest.mark.parametrize("mode", ["copy", "swap", "inplace", "delta", "auto"])
def test_every_way_to_commit_can_be_named(server, mode):
    assert update(server, commit=mode).status_code == 200
    assert server.engine.requests[0].commit == mode


def test_all_that_is_wrong_with_an_update_is_listed(server):
    body = {
        "version": 5, "source": "", "transfer_mode": "carrier pigeon", "verify_checksum": "yes", "timeout": 0,
        "commit": "maybe", "pause": True, "clear_cache": 1, "release_cache": "no", "wait": "later", "colour": None,
        "rsync_config": {"etcd_server": "x"},
    }  # fmt: skip
    content = refusal(update(server, **body), 422, "invalid_input")

    assert {problem["param"] for problem in content["problems"]} == set(body)
    words = {problem["param"]: problem["message"] for problem in content["problems"]}
    assert words["colour"] == words["rsync_config"] == "unknown field"
    assert all(name in words["commit"] for name in ("copy", "swap", "inplace", "delta", "auto"))
    assert all(name in words["transfer_mode"] for name in ("auto", "snapshot", "ipc", "http", "rdma", "gdr"))
    assert server.engine.requests == []


@pytest.mark.parametrize("timeout", [-1, "5", True, 1e300, [1]])
def test_a_timeout_is_a_number_of_seconds_that_clocks_can_count(server, timeout):
    assert [problem["param"] for problem in refusal(update(server, timeout=timeout), 422, "invalid_input")["problems"]] == [
        "timeout"
    ]


CALLS = [
    "/v1/update_weights", "/v1/weights/verify", "/v1/weights/rollback", "/v1/weights/recover", "/v1/weights/digest",
    "/v1/pause", "/v1/resume", "/v1/abort_requests", "/v1/sleep", "/v1/wakeup", "/clear_load_weight", "/update_model_weight",
]  # fmt: skip


@pytest.mark.parametrize("path", CALLS)
def test_unknown_fields_are_refused_everywhere(server, path):
    before = server.engine.status
    content = refusal(post(server, path, {"colour": None, "size": 2}), 422, "invalid_input")

    assert {"colour", "size"} <= {problem["param"] for problem in content["problems"]}
    assert server.engine.status is before
    assert server.engine.calls == []


@pytest.mark.parametrize("path", CALLS)
def test_what_belongs_into_the_body_is_refused_in_the_url(server, path):
    content = refusal(post(server, f"{path}?mode=wait&timeout=1", {}), 422, "invalid_input")

    assert {"mode", "timeout"} <= {problem["param"] for problem in content["problems"]}
    assert server.engine.calls == []


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b"\xff", b"version=step_1", b"[" * 5000])
def test_a_body_that_is_no_json_object_is_refused(server, path, body):
    refusal(server.http.post(path, content=body), 422, "invalid_input")


@pytest.mark.parametrize("path", CALLS)
def test_a_body_that_is_too_large_is_refused(server, path):
    large = httpx.post(f"{server.url}{path}", json={"version": "x" * (1 << 16)})
    content = refusal(large, 413, "too_large")

    assert "65536" in content["error_message"]


def test_a_body_that_does_not_come_is_not_waited_for(server):
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(
            b"POST /v1/pause HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 504")
    assert not server.engine.is_paused


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/pause"), ("POST", "/v1/weights"), ("PUT", "/v1/updates/7"), ("PUT", "/v1/is_paused")],
)
def test_the_wrong_method_has_the_envelope_of_control_calls(server, method, path):
    reply = server.http.request(method, path)

    refusal(reply, 405, "wrong_method")
    assert reply.headers["allow"]


def test_a_mistake_of_ours_has_the_envelope_of_control_calls(server, caplog):
    server.engine.status = None
    refusal(server.http.get("/v1/weights"), 500, "internal_error")
    wait_for(lambda: "AttributeError" in caplog.text, "the trace is not in the log")
    server.engine.status = EchoStatus()


def test_an_update_without_a_source_is_refused_with_what_to_do(server):
    server.engine.source = None
    content = refusal(update(server), 422, "invalid_input")

    assert "--source" in content["error_message"]
    assert content["problems"] == [{"param": None, "message": content["error_message"]}]


def test_a_version_that_is_not_there_is_not_found(server):
    assert "it holds step_1" in refusal(update(server, version="step_9"), 404, "version_not_found")["error_message"]


MISMATCHES = [errors.Mismatch("missing", "a.weight", "not in the version"), errors.Mismatch("shape", "b", "2 not 3")]
FAILURES = [
    (errors.VersionDoesNotFit("step_3", MISMATCHES), 422),
    (errors.rebuilt("version_does_not_fit", "told by a rank"), 422),
    (errors.VerificationUnavailable("no digests"), 422),
    (errors.BaseVersionMismatch(version="b", base="a", base_root="1", serving="c", serving_root="2"), 409),
    (errors.DigestMismatch("x", [("t", "1", "2")]), 502),
    (errors.SourceFailed("it died"), 502),
    (errors.StorageFailed("read", "/x", OSError(28, "full")), 500),
    (errors.UpdateFailed("out of memory"), 500),
    (errors.CommitFailed("undone"), 500),
    (errors.ReplicaFailed("rank 1 died"), 503),
    (errors.DeadlineExceeded("staging", 3), 504),
]  # fmt: skip


@pytest.mark.parametrize(("error", "expected"), FAILURES, ids=lambda value: getattr(value, "code", None))
def test_what_an_update_fails_with_has_its_status(server, error, expected):
    server.engine.fail = ("committing", error)
    reply = update(server)
    content = refusal(reply, expected, error.code)
    told = server.http.get(f"{reply.headers['location']}").json()["result"]

    assert content["error_message"] == str(error)
    assert (told["phase"], told["error"], told["result"]) == ("failed", {"code": error.code, "message": str(error)}, None)
    assert (server.engine.status.version, server.engine.status.state) == ("step_1", "READY")


def test_all_mismatches_are_listed(server):
    server.engine.fail = ("staging", errors.VersionDoesNotFit("step_3", MISMATCHES))

    assert refusal(update(server), 422, "version_does_not_fit")["problems"] == [
        {"param": "a.weight", "message": "missing: not in the version"},
        {"param": "b", "message": "shape: 2 not 3"},
    ]


def test_an_update_that_takes_too_long_is_over(server):
    server.engine.hold = "staging"
    refusal(update(server, timeout=0.1), 504, "deadline_exceeded")
    assert server.engine.status.state == "READY"


def test_an_update_need_not_be_waited_for(server):
    server.engine.hold = "staging"
    reply = update(server, version="step_2", wait=False)
    begun = reply.json()["result"]

    assert (reply.status_code, reply.json()["status"]) == (202, "success")
    assert reply.headers["location"] == f"/v1/updates/{begun['update_id']}"
    wait_for(lambda: status(server, begun["update_id"])["phase"] == "staging")
    staging = status(server, begun["update_id"])
    assert (staging["bytes"], staging["total"], staging["percent"]) == (500, 2000, 25.0)
    assert staging["ended"] is staging["error"] is staging["result"] is None
    assert staging["seconds"] >= 0
    assert server.http.get("/v1/weights").json()["result"]["update"] == begun["update_id"]

    server.engine.hold = None
    wait_for(lambda: status(server, begun["update_id"])["phase"] == "done")
    done = status(server, begun["update_id"])
    assert (done["percent"], done["version"], len(done["result"])) == (100.0, "step_2", 2)
    assert done["ended"] >= done["began"]
    assert done["seconds"] == pytest.approx(done["ended"] - done["began"], abs=1e-5)  # what a float has of Unix time
    assert done["request"]["version"] == "step_2"


def test_a_staging_update_can_be_cancelled(server):
    server.engine.hold = "staging"
    update_id = begin(server)
    wait_for(lambda: status(server, update_id)["phase"] == "staging")
    reply = server.http.delete(f"/v1/updates/{update_id}")

    assert reply.status_code == 200
    assert (reply.json()["result"]["phase"], reply.json()["result"]["error"]["code"]) == ("cancelled", "update_cancelled")
    assert server.engine.status == EchoStatus()
    refusal(server.http.delete(f"/v1/updates/{update_id}"), 409, "wrong_state")


def test_who_waits_for_an_update_that_somebody_cancels_is_told(server):
    server.engine.hold = "staging"
    replies = []
    waiting = threading.Thread(target=lambda: replies.append(update(server)))
    waiting.start()
    wait_for(lambda: server.engine.status.state == "STAGING")
    update_id = server.http.get("/v1/weights").json()["result"]["update"]
    wait_for(lambda: status(server, update_id)["phase"] == "staging")
    server.http.delete(f"/v1/updates/{update_id}")
    waiting.join(20)

    refusal(replies[0], 409, "update_cancelled")


def test_a_committing_update_cannot_be_cancelled(server):
    server.engine.hold = "committing"
    update_id = begin(server)
    wait_for(lambda: status(server, update_id)["phase"] == "committing")

    refusal(server.http.delete(f"/v1/updates/{update_id}"), 409, "wrong_state")
    health = server.http.get("/health")
    assert (health.status_code, health.json()["state"], health.json()["legacy_status"]) == (200, "COMMITTING", 1)
    server.engine.hold = None
    wait_for(lambda: status(server, update_id)["phase"] == "done")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("update_id", ["nothing", "..%2F..", "%00", "a%20b"])
def test_an_update_that_is_not_known_is_not_found(server, method, update_id):
    reply = server.http.request(method, f"/v1/updates/{update_id}")

    assert reply.status_code == 404


def test_a_second_update_is_refused_while_one_runs(server):
    server.engine.hold = "staging"
    first = begin(server)
    refusal(update(server), 409, "update_in_progress")
    refusal(update(server, wait=False), 409, "update_in_progress")
    refusal(post(server, "/v1/weights/recover"), 409, "update_in_progress")
    refusal(post(server, "/v1/sleep"), 409, "wrong_state")
    refusal(post(server, "/v1/weights/rollback"), 409, "wrong_state")
    server.engine.hold = None
    wait_for(lambda: status(server, first)["phase"] == "done")

    assert len(server.engine.requests) == 1


def test_of_many_updates_at_once_one_runs(server):
    server.engine.hold = "staging"
    replies = []
    threads = [threading.Thread(target=lambda: replies.append(update(server, wait=False).status_code)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    server.engine.hold = None

    assert sorted(replies) == [202] + [409] * 7


def test_a_client_that_goes_away_does_not_cancel_its_update(server):
    server.engine.hold = "staging"
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(b"POST /v1/update_weights HTTP/1.1\r\n" + HEADERS + b"content-length: 2\r\n\r\n{}")
        wait_for(lambda: server.engine.status.state == "STAGING")
    assert server.http.get("/v1/is_paused").status_code == 200  # the server has seen the connection close by now
    assert server.engine.status.state == "STAGING"
    server.engine.hold = None

    wait_for(lambda: server.engine.status == EchoStatus(version="step_3"), "the update ended with its client")


def test_an_update_to_what_is_served_moves_nothing(server):
    assert {one["mode"] for one in update(server, version="step_1").json()["result"]} == {"none"}


def test_weights_tell_what_is_served(server):
    result = server.http.get("/v1/weights").json()["result"]

    assert (result["state"], result["version"], result["root_digest"]) == ("READY", "step_1", "xxh3-128:00")
    assert (result["legacy_status"], result["paused"], result["asleep"], result["update"]) == (0, False, [], None)
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]


def test_weights_are_looked_at_or_told_as_they_were(server):
    looks = server.engine.looks
    assert server.http.get("/v1/weights").status_code == 200
    assert server.engine.looks == looks + 1
    server.engine.status = EchoStatus(state="RESTARTING", reason="rank 1 died")

    result = server.http.get("/v1/weights").json()["result"]
    assert (result["state"], result["reason"], result["version"]) == ("RESTARTING", "rank 1 died", "step_1")
    server.engine.status = EchoStatus(state="STARTING", version="")
    refusal(server.http.get("/v1/weights"), 503, "not_ready")


def test_weights_are_told_as_they_were_when_a_rank_is_lost_while_it_is_asked(server, monkeypatch):
    async def lost():
        raise errors.ReplicaFailed("rank 1 was lost.")

    monkeypatch.setattr(server.engine, "look_at_weights", lost)
    reply = server.http.get("/v1/weights")
    assert (reply.status_code, reply.json()["result"]["version"]) == (200, "step_1")


def test_weights_can_be_verified(server):
    assert [one["rank"] for one in post(server, "/v1/weights/verify").json()["result"]] == [0, 1]
    assert post(server, "/v1/weights/verify", {"timeout": 5}).status_code == 200
    assert server.engine.calls == [("verify", 180.0), ("verify", 5.0)]

    server.engine.corrupt = True
    refusal(post(server, "/v1/weights/verify"), 502, "source_failed")
    health = server.http.get("/health")
    assert (health.status_code, health.json()["state"], health.json()["legacy_status"]) == (503, "FAILED", 2)


def test_a_failed_replica_recovers(server):
    server.engine.status = EchoStatus(state="FAILED", reason="torn")
    reply = post(server, "/v1/weights/recover", {"version": "step_2", "timeout": 9})

    assert (reply.status_code, len(reply.json()["result"])) == (200, 2)
    assert server.engine.calls == [("recover",)]
    assert server.engine.requests == [UpdateRequest(version="step_2", timeout_s=9)]
    assert server.engine.status == EchoStatus(version="step_2")


def test_a_recovery_need_not_be_waited_for(server):
    reply = post(server, "/v1/weights/recover", {"wait": False})

    assert reply.status_code == 202
    wait_for(lambda: status(server, reply.json()["result"]["update_id"])["phase"] == "done")


def test_the_previous_version_can_be_had_back_once(server):
    refusal(post(server, "/v1/weights/rollback"), 404, "not_found")
    update(server)
    reply = post(server, "/v1/weights/rollback", {"timeout": 3})

    assert (reply.status_code, reply.json()["result"]["version"]) == (200, "step_1")
    refusal(post(server, "/v1/weights/rollback"), 404, "not_found")


def test_digests_are_those_of_the_tensors_named(server):
    reply = post(server, "/v1/weights/digest", {"names": ["b", "a", "b"]})
    md5 = post(server, "/v1/weights/digest", {"names": ["a"], "algorithm": "md5", "timeout": 2})

    assert reply.json()["result"][1] == {"rank": 1, "digests": {"b": "xxh3-128:00", "a": "xxh3-128:00"}}
    assert md5.json()["result"][0]["digests"] == {"a": "md5:00"}
    assert server.engine.calls == [("digest", ("b", "a"), "xxh3-128", 180.0), ("digest", ("a",), "md5", 2.0)]
    refusal(post(server, "/v1/weights/digest", {"names": ["nothing"]}), 404, "not_found")


@pytest.mark.parametrize(
    ("body", "params"),
    [
        (None, ["names"]),
        ({"names": []}, ["names"]),
        ({"names": None}, ["names"]),
        ({"names": "a"}, ["names"]),
        ({"names": ["a", 1, ""]}, ["names[1]", "names[2]"]),
        ({"names": ["a"], "algorithm": "sha1"}, ["algorithm"]),
    ],
)
def test_digests_of_nothing_are_refused(server, body, params):
    content = refusal(post(server, "/v1/weights/digest", body), 422, "invalid_input")

    assert [problem["param"] for problem in content["problems"]] == params


@pytest.mark.parametrize("state", ["STARTING", "RESTARTING", "DRAINING"])
def test_a_replica_that_is_away_says_when_to_come_back(server, state):
    server.engine.status = EchoStatus(state=state, reason="a reason")
    replies = [post(server, path) for path in ("/v1/update_weights", "/v1/pause", "/v1/sleep", "/v1/weights/verify")]

    for reply in replies:
        assert "a reason" in refusal(reply, 503, "not_ready")["error_message"]
        assert int(reply.headers["retry-after"]) > 0


def test_every_path_is_described(server):
    paths = server.http.get("/openapi.json").json()["paths"]

    assert set(CALLS) <= set(paths)
    assert "commit" in json.dumps(paths["/v1/update_weights"]["post"]["requestBody"])
    assert re.search("goes away.*does not cancel", paths["/v1/update_weights"]["post"]["description"], re.DOTALL)
    assert paths["/v1/updates/{update_id}"]["get"]["parameters"][0]["name"] == "update_id"
    assert paths["/clear_load_weight"]["get"]["deprecated"]
    assert "deprecated" not in paths["/clear_load_weight"]["post"]
