"""`weightcast serve` with two ranks while its weights are replaced: what its answers, its log and its metrics tell."""

import json
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import numpy as np
import pytest

from weightcast import Store, logs
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf
from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.worker.result import PHASES

from .server_process import WAIT_S, complete, server_process

DEBUG = ("-v", "--log-format", "json")


class Stand:
    """A server that logs everything in JSON, and a store of versions for it, which a depot offers too."""

    def __init__(self, server, store, depot):
        self.server, self.store, self.depot = server, store, depot

    def call(self, method, path, **body):
        return httpx.request(method, f"{self.server.url}{path}", json=body if method == "POST" else None, timeout=2 * WAIT_S)

    def update(self, version, **options):
        return self.call("POST", "/v1/update_weights", version=version, **options)

    def weights(self):
        return self.call("GET", "/v1/weights").json()["result"]

    def metrics(self):
        samples = (line.rsplit(" ", 1) for line in self.call("GET", "/metrics").text.splitlines() if line[0] != "#")
        return {name: float(value) for name, value in samples}

    def ends_of(self, update_id):
        """What was logged of the end of an update."""
        ends = ("update committed", "update not needed", "update failed", "update cancelled")
        return [line for line in self.lines() if line.get("update_id") == update_id and line["event"] in ends]

    def lines(self, since=0):
        """Everything that the server and its ranks have logged."""
        return lines_of(self.server)[since:]


def lines_of(server):
    return [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]


def shown(lines):
    """What an operator sees without -v."""
    return [line for line in lines if line["level"] != "DEBUG"]


def misnamed(store):
    """A state that does not fit: no name is right."""
    return {f"wrong.{name}": array for name, array in store.load("step_0").items()}


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    root = tmp_path_factory.mktemp("updates")
    init_checkpoint(root / "model", "tiny", seed=3)
    store = Store(root / "store")
    store.publish_checkpoint("step_0", root / "model")
    rng = np.random.default_rng(0)
    for number in range(1, 5):
        state = {name: rng.permuted(array, axis=0) for name, array in store.load("step_0").items()}
        store.publish(f"step_{number}", state, mode="full")
    with ExitStack() as stack:
        depot = stack.enter_context(Depot(stack.enter_context(StoredShelf(store.path))))
        source = f"file://{store.path}"
        server = stack.enter_context(
            server_process(root / "model", "--ranks", 2, "--source", source, "--allow-source", depot.url, logging=DEBUG)
        )  # fmt: skip
        yield Stand(server, store, depot)


def test_health_is_200_in_every_probe_while_versions_are_committed_and_requests_answered(stand):
    seen, over, answers = [], threading.Event(), []

    def probe():
        with httpx.Client(base_url=stand.server.url, timeout=WAIT_S) as client:
            while not over.is_set():
                reply = client.get("/health")
                seen.append((reply.status_code, reply.json()["state"]))

    def ask():
        with stand.server.client() as client:
            while not over.is_set():
                answers.append(complete(client, max_tokens=8).choices[0].finish_reason)

    threads = [threading.Thread(target=one) for one in (probe, ask)]
    for thread in threads:
        thread.start()
    commits, end = 0, time.monotonic() + WAIT_S
    try:
        while commits < 20 or ("COMMITTING" not in {state for _, state in seen} and time.monotonic() < end):
            assert stand.update(f"step_{1 + commits % 2}").status_code == 200
            commits += 1
    finally:
        over.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert "COMMITTING" in {state for _, state in seen}, "no probe came during a commit: this proves nothing"
    assert {status for status, _ in seen} == {200}
    assert set(answers) == {"length"}


def seconds_of(samples, phase):
    return samples[f'weightcast_weight_update_seconds_sum{{phase="{phase}"}}']


@pytest.mark.parametrize("kind", ["file", "depot"])
def test_the_phases_of_an_update_add_up_in_its_answer_its_record_its_log_line_and_the_metrics(stand, kind):
    source = {"file": f"file://{stand.store.path}", "depot": stand.depot.url}[kind]
    assert stand.update("step_0").status_code == 200
    before, told = stand.metrics(), []
    for version, commit in (("step_3", "auto"), ("step_4", "swap"), ("step_3", "inplace"), ("step_3", "auto")):
        began = time.monotonic()
        reply = stand.update(version, source=source, commit=commit)
        taken_s = time.monotonic() - began
        assert reply.status_code == 200, reply.text
        ranks = reply.json()["result"]
        (times,) = {tuple(one[f"{phase}_s"] for phase in PHASES) for one in ranks}  # a phase ends with its slowest rank
        (total_s,) = {one["total_s"] for one in ranks}
        assert sum(times) == pytest.approx(total_s)
        assert 0 < total_s <= taken_s
        assert all(one["pause_s"] <= one["commit_s"] for one in ranks)
        assert all(one["sync_cost"] + one["update_cost"] == pytest.approx(one["total_cost"]) for one in ranks)

        record = stand.call("GET", reply.headers["location"]).json()["result"]
        assert record["result"] == ranks
        assert record["seconds"] == total_s == pytest.approx(record["ended"] - record["began"], abs=1e-5)
        assert record["times"] == {f"{phase}_s": ranks[0][f"{phase}_s"] for phase in (*PHASES, "total")}

        (line,) = stand.ends_of(record["update_id"])
        if ranks[0]["mode"] == "none":
            assert (line["event"], line["ms"]) == ("update not needed", logs.ms(total_s))
        else:
            assert line["event"] == "update committed"
            assert {name: line[f"{name}_ms"] for name in (*PHASES, "total")} == {
                name: logs.ms(ranks[0][f"{name}_s"]) for name in (*PHASES, "total")
            }
            assert line["pause_ms"] == logs.ms(max(one["pause_s"] for one in ranks))
        told.append(ranks)
    assert [ranks[0]["mode"] == "none" for ranks in told] == [False, False, False, True]

    after = stand.metrics()
    for phase in (*PHASES, "total"):
        counted = seconds_of(after, phase) - seconds_of(before, phase)
        assert counted == pytest.approx(sum(ranks[0][f"{phase}_s"] for ranks in told), abs=1e-6)
    paused = after["weightcast_weight_pause_seconds_sum"] - before["weightcast_weight_pause_seconds_sum"]
    assert paused == pytest.approx(sum(max(one["pause_s"] for one in ranks) for ranks in told), abs=1e-6)


def test_the_time_of_an_update_that_fails_is_in_the_phase_that_it_failed_in(stand):
    reply = stand.update("step_9")
    record = stand.call("GET", reply.headers["location"]).json()["result"]
    assert reply.status_code == 404
    assert record["times"]["lookup_s"] == record["times"]["total_s"] - record["times"]["settle_s"] > 0
    (line,) = stand.ends_of(record["update_id"])
    assert (line["event"], line["ms"]) == ("update failed", logs.ms(record["seconds"]))


def test_a_version_is_served_since_its_commit_and_after_a_rollback_since_then(stand):
    moments = []
    for version in ("step_1", "step_2"):
        moments.append(time.time())
        assert stand.update(version).status_code == 200
        moments.append(time.time())
        assert moments[-2] <= stand.weights()["since"] <= moments[-1]
    assert stand.call("POST", "/v1/weights/rollback").status_code == 200
    weights = stand.weights()
    assert weights["version"] == "step_1"
    assert moments[-1] <= weights["since"] <= time.time()


def test_a_version_that_does_not_fit_is_one_line_and_its_list_is_in_the_answer_and_at_debug(stand):
    state = misnamed(stand.store)
    stand.store.publish("misnamed", state, mode="full")
    since = len(stand.lines())
    reply = stand.update("misnamed")
    assert reply.status_code == 422
    stand.server.wait_for(lambda: len(stand.lines(since)) >= 3, "the lines")

    (name, *_) = state
    lines = stand.lines(since)
    (failed,) = [line for line in shown(lines) if line["level"] != "INFO"]
    assert (failed["event"], failed["code"]) == ("update failed", "version_does_not_fit")
    assert re.search(r"misnamed does not fit the model.* \d+ mismatch\(es\): \(and \d+ more lines\)$", failed["error"])
    assert not any("\n" in str(value) for line in lines for value in line.values())
    assert not any(name in str(line) for line in shown(lines)), "a list in the log"
    assert reply.json()["error_message"].count("mismatch(es)") == 1, "each rank's list in the answer"
    assert sum(name in str(line) for line in lines) == 2, "DEBUG has each problem, once for each rank"


def test_a_follower_that_fails_again_and_again_says_so_once(tmp_path):
    init_checkpoint(tmp_path / "model", "tiny", seed=3)
    store = Store(tmp_path / "store")
    store.publish_checkpoint("step_0", tmp_path / "model")
    asked = ("--source", f"file://{store.path}", "--follow", "--follow-poll", "0.05")
    with server_process(tmp_path / "model", *asked, logging=DEBUG) as server:

        def of(event):
            return [line for line in lines_of(server) if line["event"] == event]

        server.wait_for(lambda: of("update committed"), "the first version")
        since = len(lines_of(server))
        store.publish("misnamed", misnamed(store), mode="full")
        server.wait_for(lambda: len(of("update failed")) >= 4, "some tries")
        told = [line["event"] for line in shown(lines_of(server)[since:])]
        assert told == ["update received", "update failed", "version not taken"]

        since = len(lines_of(server))
        reply = httpx.post(f"{server.url}/v1/update_weights", json={"version": "misnamed"}, timeout=WAIT_S)
        assert reply.status_code == 422
        asked_for = [line["event"] for line in shown(lines_of(server)[since:]) if "request_id" in line]
        assert asked_for[:2] == ["update received", "update failed"], "what a caller asks for is always told"


def test_a_rank_that_is_killed_is_told_in_few_lines(stand):
    since, restarts = len(stand.lines()), stand.server.health()["restarts"]
    os.kill(stand.server.ranks()[1], signal.SIGKILL)
    stand.server.wait_for(lambda: stand.server.health()["restarts"] > restarts, "the ranks again", 90)
    wrong = [line for line in shown(stand.lines(since)) if line["level"] != "INFO"]
    assert [line["event"] for line in wrong] == ["rank lost", "replica restarting"]
    assert sum("SIGKILL" in str(line) for line in wrong) == 1, "the cause is told once"


def test_an_update_goes_on_if_its_caller_goes_away_and_its_record_says_how_it_ended(stand):
    before, host, port = len(stand.lines()), *stand.server.url.removeprefix("http://").split(":")
    version = "step_4" if stand.weights()["version"] != "step_4" else "step_3"
    body = json.dumps({"version": version, "pause": "wait"}).encode()
    head = f"POST /v1/update_weights HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
    with stand.server.client() as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, client, max_tokens=600)
        stand.server.wait_for(lambda: stand.server.stats()[0]["running"] == 1, "load")
        with socket.create_connection((host, int(port))) as caller:
            caller.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            stand.server.wait_for(lambda: stand.server.health()["state"] != "READY", "the update")
        assert stand.weights()["version"] != version, "the update did not wait, so nobody could leave it"
        assert answer.result(WAIT_S).usage.completion_tokens == 600

    def commits():
        return [line for line in stand.lines(before) if line["event"] == "update committed"]

    stand.server.wait_for(commits, "the update of a caller that is gone")
    committed = commits()
    record = stand.call("GET", f"/v1/updates/{committed[0]['update_id']}").json()["result"]
    assert (len(committed), record["phase"], record["version"]) == (1, "done", version)
