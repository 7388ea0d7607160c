"""Following a source, and what is counted of updates."""

import asyncio
import logging
import time

import pytest
from click.testing import CliRunner
from control_engine import MODEL, EchoEngine, read_metrics, serving, wait_for, write_model_dir
from control_weights import EchoStatus, forget

from weightcast.cli.serve import serve as serve_command
from weightcast.control.follow import Follower, backoff_s
from weightcast.control.settings import ServerSettings
from weightcast.control.waiting import within
from weightcast.control.weight_metrics import WeightMetrics
from weightcast.engines.base import Failure, UpdateRequest, UpdateStatus
from weightcast.engines.states import ReplicaState
from weightcast.errors import DeadlineExceeded, InvalidInput, ReplicaFailed, SourceFailed, UpdateInProgress


@pytest.fixture
def model_dir(tmp_path):
    return write_model_dir(tmp_path / "model")


@pytest.fixture
def server(model_dir):
    """One that follows, often enough for a test."""
    with serving(model_dir, follow=True, follow_poll_s=0.01, follow_commit="swap", follow_timeout_s=9) as running:
        yield running
        running.engine.hold = None
        forget(running.engine)


def turns(server, count=3):
    """Wait until the source was asked some times more."""
    before = server.engine.asked
    wait_for(lambda: server.engine.asked >= before + count)


def update(server, **body):
    return server.http.post("/v1/update_weights", json=body)


def test_each_new_version_is_taken_once(server):
    turns(server)
    assert server.engine.requests == []
    server.engine.published.append("step_2")
    wait_for(lambda: server.engine.status.version == "step_2")
    server.engine.published.append("step_3")
    wait_for(lambda: server.engine.status.version == "step_3")
    turns(server)

    assert server.engine.requests == [
        UpdateRequest(version=version, commit="swap", timeout_s=9, follow=True) for version in ("step_2", "step_3")
    ]
    assert read_metrics(server.url)['weightcast_weight_updates_total{outcome="done"}'] == 2


def test_nothing_is_followed_unasked(model_dir):
    with serving(model_dir) as server:
        server.engine.published.append("step_2")
        assert server.http.get("/health").status_code == 200
        assert server.engine.asked == 0


def test_a_rollback_stays_until_something_newer_is_published(server):
    server.engine.published.append("step_2")
    wait_for(lambda: server.engine.status.version == "step_2" and server.engine.status.state == "READY")
    turns(server, 1)
    assert server.http.post("/v1/weights/rollback").status_code == 200
    turns(server)
    assert server.engine.status.version == "step_1"

    server.engine.published.append("step_3")
    wait_for(lambda: server.engine.status.version == "step_3")


def test_what_an_operator_chose_stays_too(server):
    server.engine.published[:] = ["step_0", "step_1"]
    turns(server)
    assert update(server, version="step_0").status_code == 200
    turns(server)

    assert server.engine.status.version == "step_0"


def test_a_pin_outlives_the_ranks_and_ends_when_following_is_resumed(server):
    server.engine.published[:] = ["step_0", "step_1"]
    assert update(server, version="step_0").status_code == 200
    server.engine.status = EchoStatus(version="step_0", restarts=1)
    turns(server)
    assert server.http.get("/v1/weights").json()["result"]["pin"]["away_from"] == "step_1"
    assert server.engine.status.version == "step_0"

    assert server.http.post("/v1/weights/follow").json()["result"]["pin"] is None
    wait_for(lambda: server.engine.status.version == "step_1")


def test_a_failed_replica_that_is_pinned_is_brought_back_to_what_it_was_pinned_to(server):
    server.engine.published[:] = ["step_0", "step_1"]
    assert update(server, version="step_0").status_code == 200
    server.engine.status = EchoStatus(state="FAILED", reason="torn", version="step_0")
    wait_for(lambda: ("recover",) in server.engine.calls)

    assert server.engine.requests[-1].version is None


def test_an_answer_that_is_older_than_an_operators_update_is_not_taken():
    async def run():
        engine = EchoEngine()
        await engine.start()
        follower = Follower(engine, UpdateRequest(), poll_s=1000)

        async def slow():
            engine.published.append("step_2")
            engine.status = EchoStatus(version="step_2")  # an operator's, meanwhile
            return "step_1"

        engine.newest_version = slow
        await follower.turn()
        assert engine.requests == []

    asyncio.run(run())


def publish_and_cancel(server):
    """Publish step_2, and cancel the follower's update to it."""
    server.engine.hold = "staging"
    server.engine.published.append("step_2")
    wait_for(lambda: [update.phase for update in server.engine.updates.values()] == ["staging"])
    (update_id,) = server.engine.updates
    assert server.http.delete(f"/v1/updates/{update_id}").status_code == 200
    server.engine.hold = None


def test_a_cancelled_version_is_taken_once_following_is_resumed(server):
    publish_and_cancel(server)
    assert update(server, version="step_1").status_code == 200
    turns(server)
    assert server.engine.status.version == "step_1"

    assert server.http.post("/v1/weights/follow").status_code == 200
    wait_for(lambda: server.engine.status.version == "step_2")


def test_a_cancelled_version_is_not_taken_again(server):
    publish_and_cancel(server)
    turns(server)
    assert len(server.engine.requests) == 1

    server.engine.published.append("step_3")
    wait_for(lambda: server.engine.status.version == "step_3")


def test_a_version_that_fails_is_tried_again_and_told_once(server, caplog):
    caplog.set_level(logging.INFO, "weightcast.control.follow")
    server.engine.fail = ("staging", SourceFailed("the source died halfway."))
    server.engine.published.append("step_2")
    wait_for(lambda: len(server.engine.requests) >= 3)
    told = [record.message for record in caplog.records if record.name == "weightcast.control.follow"]
    assert [line.partition(" retry_s")[0] for line in told] == ["version not taken  version=step_2 code=source_failed"]

    server.engine.fail = None
    wait_for(lambda: server.engine.status.version == "step_2")


def test_a_version_that_failed_waits_and_a_newer_one_does_not():
    async def run():
        engine = EchoEngine()
        await engine.start()
        follower = Follower(engine, UpdateRequest(), poll_s=1000)
        engine.fail = ("staging", SourceFailed("the source died halfway."))
        engine.published.append("step_2")
        for _ in range(3):
            await follower.turn()
        engine.published.append("step_3")
        for _ in range(3):
            await follower.turn()
        assert [request.version for request in engine.requests] == ["step_2", "step_3"]

    asyncio.run(run())


def test_who_was_faster_is_waited_for_without_complaint(caplog):
    async def run():
        engine = EchoEngine()
        follower = Follower(engine, UpdateRequest(), poll_s=1000)
        await follower.turn()
        assert engine.asked == 0  # it has not started
        await engine.start()
        engine.published.append("step_2")
        engine.begin_update, begin = taken, engine.begin_update
        await follower.turn()
        engine.begin_update = begin
        await follower.turn()
        assert engine.status.version == "step_2"

    asyncio.run(run())
    assert "failed" not in caplog.text


def taken(request):
    raise UpdateInProgress("STAGING")


def test_an_engine_is_not_waited_for_for_ever():
    with pytest.raises(DeadlineExceeded, match=r"looking did not finish within 0\.01 s"):
        asyncio.run(within(0.01, "looking", asyncio.sleep(60)))


def test_failures_are_tried_less_and_less_often():
    assert [backoff_s(1.0, failures) for failures in (0, 1, 2, 5, 6, 10**6)] == [1, 2, 4, 32, 60, 60]
    assert backoff_s(90.0, 3) == 90


def test_a_silent_source_is_asked_again(server, caplog):
    server.engine.source_dead = True
    turns(server)
    server.engine.published.append("step_2")
    assert sum("does not answer" in record.message for record in caplog.records) == 1

    server.engine.source_dead = False
    wait_for(lambda: server.engine.status.version == "step_2")


def test_a_mistake_in_one_turn_does_not_end_following(server, caplog):
    server.engine.fail = ("staging", ReplicaFailed("rank 1 died."))
    server.engine.begin_update, begin = broken, server.engine.begin_update
    server.engine.published.append("step_2")
    wait_for(lambda: "ZeroDivisionError" in caplog.text)
    server.engine.begin_update, server.engine.fail = begin, None

    wait_for(lambda: server.engine.status.version == "step_2")


def broken(request):
    return 1 / 0


def test_somebody_elses_update_is_waited_for(server):
    server.engine.published[:] = ["step_0", "step_1"]
    server.engine.hold = "staging"
    update_id = update(server, version="step_0", wait=False).json()["result"]["update_id"]
    server.engine.published.append("step_2")
    asked = server.engine.asked
    wait_for(lambda: server.engine.updates[update_id].phase == "staging")
    assert server.engine.asked - asked <= 1  # an engine that is busy has nothing to follow
    server.engine.hold = None

    wait_for(lambda: server.engine.status.version == "step_2")
    assert [request.version for request in server.engine.requests] == ["step_0", "step_2"]


def test_what_sleeps_is_left_alone(server):
    assert server.http.post("/v1/sleep").status_code == 200
    server.engine.published.append("step_2")
    time.sleep(0.2)  # it would be asked many times
    assert server.engine.requests == []

    server.http.post("/v1/wakeup")
    wait_for(lambda: server.engine.status.version == "step_2")


def test_a_failed_replica_is_brought_back(server):
    turns(server)
    server.engine.status = EchoStatus(state="FAILED", reason="torn")

    wait_for(lambda: server.engine.status.state == "READY")
    assert [request.version for request in server.engine.requests] == ["step_1"]


def test_a_replica_that_restarted_with_an_older_version_takes_the_newest_again(server):
    server.engine.published.append("step_2")
    wait_for(lambda: server.engine.status == EchoStatus(version="step_2"))
    turns(server)
    server.engine.status = EchoStatus(restarts=1)

    wait_for(lambda: server.engine.status.version == "step_2")


def test_following_ends_with_the_server(model_dir):
    with serving(model_dir, follow=True, follow_poll_s=0.01) as server:
        server.engine.hold = "staging"
        server.engine.published.append("step_2")
        wait_for(lambda: server.engine.status.state == "STAGING")
        server.stop()
        server.thread.join(20)

    assert server.error == []
    assert server.engine.status.version == "step_1"


def test_settings_of_following_that_cannot_work_are_named():
    with pytest.raises(InvalidInput, match=r"follow_poll_s=0.*follow_timeout_s=-1"):
        ServerSettings(model_name="m", follow_poll_s=0, follow_timeout_s=-1)


@pytest.mark.parametrize(
    ("options", "words"), [(["--follow"], "needs --source"), (["--draft-names", "mtp.*"], "needs --draft")]
)
def test_options_that_need_another_are_refused(tmp_path, options, words):
    ended = CliRunner().invoke(serve_command, [str(tmp_path), *options])

    assert ended.exit_code == 2
    assert words in ended.output


def test_the_help_names_every_path(model_dir):
    told = CliRunner().invoke(serve_command, ["--help"]).output
    with serving(model_dir) as server:
        paths = server.http.get("/openapi.json").json()["paths"]

    assert [path for path in paths if path.partition("{")[0].rstrip("/") not in told] == []


# -- metrics -------------------------------------------------------------------------------------------------------------


def test_updates_are_counted(model_dir):
    with serving(model_dir) as server, server.openai() as client:
        engine = server.engine
        engine.published += ["step_2", "step_3"]
        client.completions.create(model=MODEL, prompt="abc", max_tokens=5)
        answers = [update(server, version="step_2").json()["result"]]
        client.completions.create(model=MODEL, prompt="abc", max_tokens=7, n=2)
        answers.append(update(server, version="step_2").json()["result"])
        engine.fail = ("staging", SourceFailed("it died."))
        update(server, version="step_3")
        engine.fail, engine.hold = None, "staging"
        update_id = update(server, wait=False).json()["result"]["update_id"]
        wait_for(lambda: engine.updates[update_id].phase == "staging")
        server.http.delete(f"/v1/updates/{update_id}")
        samples = read_metrics(server.url)

    def updates(outcome):
        return samples[f'weightcast_weight_updates_total{{outcome="{outcome}"}}']

    assert [updates(one) for one in ("done", "same", "source_failed", "update_cancelled")] == [1, 1, 1, 1]
    failures = {name: value for name, value in samples.items() if "weight_update_failures_total" in name}
    assert failures == {'weightcast_weight_update_failures_total{cause="source_failed"}': 1}
    for phase in ("lookup", "stage", "verify", "wait", "commit", "proof", "settle", "total"):
        told = sum(ranks[0][f"{phase}_s"] for ranks in answers)
        assert samples[f'weightcast_weight_update_seconds_sum{{phase="{phase}"}}'] == pytest.approx(told, abs=1e-6)
        assert samples[f'weightcast_weight_update_seconds_count{{phase="{phase}"}}'] == 2
        assert samples[f'weightcast_weight_update_seconds_bucket{{phase="{phase}",le="+Inf"}}'] == 2
    assert (samples["weightcast_weight_pause_seconds_sum"], samples["weightcast_weight_pause_seconds_count"]) == (0.5, 1)
    assert samples["weightcast_weight_update_bytes_total"] == 2 * 1000 + 2 * 500
    assert samples['weightcast_completion_tokens_by_version_total{version="step_1"}'] == 5
    assert samples['weightcast_completion_tokens_by_version_total{version="step_2"}'] == 14
    assert samples['weightcast_weight_version_info{version="step_2",root_digest="xxh3-128:00"}'] == 1


def test_the_replicas_state_is_a_gauge(model_dir):
    with serving(model_dir) as server:
        before = read_metrics(server.url)
        server.http.post("/v1/sleep?tags=weight")
        asleep = read_metrics(server.url)

    assert {name for name in before if "replica_state" in name} == {
        f'weightcast_replica_state{{state="{state}"}}' for state in ReplicaState
    }
    for samples, state, paused, weight, legacy in ((before, "READY", 0, 0, 0), (asleep, "CLEARED", 1, 1, -2)):
        states = [name for name, value in samples.items() if "replica_state" in name and value == 1]
        assert states == [f'weightcast_replica_state{{state="{state}"}}']
        assert samples["weightcast_replica_paused"] == paused
        assert samples['weightcast_replica_asleep{tag="weight"}'] == weight
        assert samples['weightcast_replica_asleep{tag="kv_cache"}'] == 0
        assert samples["weightcast_replica_legacy_status"] == legacy


def test_only_the_last_versions_have_their_tokens_counted():
    metrics = WeightMetrics()
    for step in range(100):
        metrics.answered("base", 1)
        metrics.answered(f"step_{step}", 2)
    page = "".join(metrics.pages())

    assert page.count("completion_tokens_by_version_total{") == 32
    assert 'version="base"} 100' in page
    assert 'version="step_99"} 2' in page
    assert 'version="step_0"}' not in page


def test_an_update_that_failed_without_saying_why_is_counted():
    metrics = WeightMetrics()
    metrics.update_ended(UpdateStatus(id="1", request=UpdateRequest(), phase="failed"))
    metrics.update_ended(UpdateStatus(id="2", request=UpdateRequest(), phase="done"))
    metrics.update_ended(UpdateStatus(id="3", request=UpdateRequest(), phase="failed", error=Failure("corrupt", "x")))
    page = "".join(metrics.pages())

    assert 'weight_updates_total{outcome="failed"} 1' in page
    assert 'weight_updates_total{outcome="done"} 1' in page
    assert 'weight_update_failures_total{cause="corrupt"} 1' in page
