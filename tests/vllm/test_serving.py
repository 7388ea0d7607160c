"""`vllm serve`, updated live: what it says afterwards is what a fresh one and `transformers` say."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from curl import begin, statuses, update, version_of
from models import greedy
from servers import VllmServer

PROMPT = [5, 6, 7, 8]
N = 24
LONG = 1200


def test_a_server_follows_full_versions_and_deltas(server, steps, model_a, model_b, nudged_once, nudged_twice):
    for version, folder in [("other", model_b), ("step_0", model_a), ("step_1", nudged_once), ("step_2", nudged_twice)]:
        update(server, version, steps)
        assert server.tokens(PROMPT, N) == greedy(folder, PROMPT, N)
        assert version_of(server) == version
        assert statuses(server)[0]["version"] == version


def test_a_fresh_server_on_the_new_weights_says_the_same(server, steps, model_b):
    update(server, "other", steps)
    with VllmServer(model_b, backend=None) as fresh:
        assert fresh.tokens(PROMPT, N) == server.tokens(PROMPT, N) == greedy(model_b, PROMPT, N)


def test_two_ranks_share_one_copy_and_follow_together(steps, model_a, model_b, nudged_once, tmp_path):
    with VllmServer(model_b, tp=2) as server:
        assert server.tokens(PROMPT, N) == greedy(model_b, PROMPT, N)
        for version, folder in [("step_0", model_a), ("step_1", nudged_once), ("other", model_b)]:
            update(server, version, steps)
            assert server.tokens(PROMPT, N) == greedy(folder, PROMPT, N)
        assert [status["version"] for status in statuses(server)] == ["other", "other"]
        refused = begin(server, "nowhere", steps)
        assert refused.status_code == 500
        assert "nowhere" in refused.text
        assert [status["rank"] for status in statuses(server)] == [0, 1]  # no answer is taken for that to another call
        assert server.post("/finish_weight_update").status_code == 500  # and no rank waits for another
        assert [status["version"] for status in statuses(server)] == ["other", "other"]
        update(server, "step_0", steps)
        assert server.tokens(PROMPT, N) == greedy(model_a, PROMPT, N)


@pytest.mark.parametrize("pause", [None, "keep"])
def test_a_request_that_runs_through_an_update_goes_on_with_the_new_weights(server, steps, model_a, model_b, pause):
    """Its tokens so far stay, and what comes after them is what a fresh engine says after them."""
    old = greedy(model_a, PROMPT, LONG)
    for _ in range(3):  # where the client gets no core in time, the update comes behind the request: then it says nothing
        update(server, "step_0", steps)
        answer = answer_through_an_update(server, steps, pause)
        differ = [index for index in range(LONG) if answer[index] != old[index]]
        if differ:
            break
    assert differ, "no update came into effect while a request ran"
    same = differ[0]
    assert same > 0, "the update came before the request"
    then = answer[same : same + 8]
    assert then == greedy(model_b, PROMPT + answer[:same], len(then))


def answer_through_an_update(server, steps, pause):
    """The tokens of a long request, to whose server another version was given while it ran."""
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(server.tokens, PROMPT, LONG, timeout=120)
        time.sleep(1.0)
        if pause:
            assert server.post(f"/pause?mode={pause}").status_code == 200
        update(server, "other", steps)
        if pause:
            assert server.post("/resume").status_code == 200
        answer = asked.result(120)
    assert len(answer) == LONG
    return answer
