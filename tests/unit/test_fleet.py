"""Many vLLM servers driven as one, against a double of vLLM's routes (`vllm_routes`): moments that a real server does not
have on demand. tests/vllm drives real ones.
"""

import json
import logging
import signal
import threading
import time

import numpy as np
import pytest
from vllm_routes import Refused, Routes, opened, worker_said

from weightcast import Store
from weightcast.cli.main import main
from weightcast.clock import Deadline
from weightcast.engines.vllm.probe import (
    METADATA_KEY,
    Fingerprint,
    Observed,
    compare,
    decode_fingerprint,
    encode_fingerprint,
    fingerprint,
)
from weightcast.errors import (
    AccessRefused,
    DeadlineExceeded,
    FleetUpdateFailed,
    InvalidInput,
    NotFound,
    ProbeMismatch,
    ReplicaFailed,
    VersionNotFound,
    WeightcastError,
)
from weightcast.fleet import rollout
from weightcast.fleet.vllm_fleet import VllmFleet, told_to_servers
from weightcast.fleet.vllm_server import NoSuchMethod, VllmServer, told_by

SOURCE = "file:///mnt/weights"
UPDATE = ["/start_weight_update", "/update_weights", "/finish_weight_update"]


@pytest.fixture
def servers():
    with opened(Routes(served="step_6"), Routes(ranks=2, served="step_6"), Routes(served="step_6")) as several:
        yield several


@pytest.fixture
def fleet(servers):
    return VllmFleet([server.url for server in servers])


def without_looks(server):
    return [call for call in server.calls if call != "weightcast_status"]


# -- staged everywhere, then committed everywhere -----------------------------------------------------------------------


def test_a_version_is_staged_on_all_servers_before_it_is_committed_on_any(servers, fleet):
    slow, staged_when_committed = servers[2], []
    slow.looks = 5
    for server in servers[:2]:
        server.on["/finish_weight_update"] = lambda: staged_when_committed.append("/update_weights" in slow.calls)

    update = fleet.update("step_7", SOURCE)

    assert staged_when_committed == [True, True]
    assert [server.served for server in servers] == ["step_7"] * 3
    assert [one.url for one in update.servers] == [server.url for server in servers]
    assert all(one.aside and one.pause_s is None and one.stage_s > 0 and one.commit_s > 0 for one in update.servers)
    for server in servers:
        assert without_looks(server) == ["weightcast_stage", *UPDATE]
    wanted = servers[0].bodies[0]["kwargs"]
    assert (wanted["version"], wanted["source"], wanted["verify_checksum"]) == ("step_7", SOURCE, True)
    (update_id,) = {server.bodies[0]["kwargs"].pop("update_id") for server in servers}  # one for all of them
    assert update_id.startswith("fleet-")
    assert servers[0].bodies[-2]["update_info"] == wanted  # or workers would stage it again


def test_if_one_rank_cannot_stage_it_no_server_is_changed_and_all_that_failed_are_told(servers, fleet):
    servers[1].refuses = {0: ("digest_mismatch", "lm_head differs"), 1: ("digest_mismatch", "embed differs")}
    servers[2].refuses = {0: ("version_not_found", "no step_7 in /mnt/weights")}

    with pytest.raises(FleetUpdateFailed, match="no server was changed: 2 of 3") as raised:
        fleet.update("step_7", SOURCE)

    assert [server.served for server in servers] == ["step_6"] * 3
    assert [server.calls[-1] for server in servers] == ["weightcast_abandon"] * 3
    assert not any(call in UPDATE for server in servers for call in server.calls)
    codes = {url: error.code for url, error in raised.value.failures.items()}
    assert codes == {servers[1].url: "digest_mismatch", servers[2].url: "version_not_found"}
    message = str(raised.value)
    assert "rank 0: lm_head differs; rank 1: embed differs" in message
    assert "rank 0: no step_7 in /mnt/weights" in message
    assert isinstance(raised.value.failures[servers[2].url], VersionNotFound)
    assert raised.value.committed == ()
    assert raised.value.exit_code == 1


def test_a_mistake_of_the_caller_has_the_status_of_one(servers, fleet):
    for server in servers:
        server.refuses = dict.fromkeys(range(server.ranks), ("version_not_found", "no such version"))

    with pytest.raises(FleetUpdateFailed) as raised:
        fleet.update("step_7", SOURCE)

    assert raised.value.exit_code == 2


def test_a_rank_that_never_ends_staging_is_given_up_at_the_deadline_and_abandoned(servers, fleet):
    servers[0].looks = 10**6

    with pytest.raises(FleetUpdateFailed) as raised:
        fleet.update("step_7", SOURCE, timeout=0.5)

    (error,) = raised.value.failures.values()
    assert isinstance(error, DeadlineExceeded)
    assert "1 of 1 ranks" in str(error)
    assert servers[0].calls[-1] == "weightcast_abandon"
    assert [server.served for server in servers] == ["step_6"] * 3


def test_a_rank_that_failed_is_told_even_if_another_one_never_ends(servers, fleet):
    def half_settled():
        servers[1].state, servers[1].error = ["STAGING", "READY"], [None, {"code": "corrupt", "message": "bad bytes"}]

    servers[1].looks = 10**6
    servers[1].on["weightcast_status"] = half_settled

    with pytest.raises(FleetUpdateFailed, match="rank 1: bad bytes"):
        fleet.update("step_7", SOURCE, timeout=0.5)


def test_staging_that_was_dropped_by_somebody_else_is_noticed(servers, fleet):
    servers[0].on["weightcast_status"] = lambda: servers[0].rpc({"method": "weightcast_abandon"})

    with pytest.raises(FleetUpdateFailed, match="somebody else drives the server"):
        fleet.update("step_7", SOURCE)


def test_a_server_that_fails_between_staging_and_commit_leaves_all_unchanged(servers, fleet):
    servers[1].on["/update_weights"] = 500

    with pytest.raises(FleetUpdateFailed, match="no server was changed: 1 of 3"):
        fleet.update("step_7", SOURCE)

    assert [server.served for server in servers] == ["step_6"] * 3
    assert not any(server.active for server in servers)
    servers[1].on.clear()
    fleet.update("step_7", SOURCE)
    assert [server.served for server in servers] == ["step_7"] * 3


def test_a_server_that_is_not_there_keeps_the_others_as_they_are(servers):
    fleet = VllmFleet([servers[0].url, "http://127.0.0.1:1"])

    with pytest.raises(FleetUpdateFailed, match=r"http://127.0.0.1:1: replica_failed: .*cannot be reached"):
        fleet.update("step_7", SOURCE)

    assert servers[0].served == "step_6"


# -- failing in the commit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [500, "cut"])
def test_a_server_that_fails_in_its_commit_is_named_beside_those_that_committed(servers, fleet, how):
    servers[1].on["/finish_weight_update"] = how

    with pytest.raises(FleetUpdateFailed, match="step_7 is committed by 2 of 3 servers") as raised:
        fleet.update("step_7", SOURCE)

    assert raised.value.committed == (servers[0].url, servers[2].url)
    assert raised.value.serving == {servers[1].url: "step_6"}
    assert "It serves step_6 now." in str(raised.value)
    assert servers[1].calls[-1] == "weightcast_abandon"


def test_a_server_that_dies_between_the_phases_is_named_and_it_is_said_that_its_version_is_unknown(servers, fleet):
    servers[1].on["/update_weights"] = servers[1].die

    with pytest.raises(FleetUpdateFailed) as raised:
        fleet.update("step_7", SOURCE)

    assert raised.value.committed == (servers[0].url, servers[2].url)
    assert raised.value.serving == {servers[1].url: None}
    assert "It serves it is not known what now." in str(raised.value)


def test_what_ranks_say_of_a_failed_commit_is_told_in_full(servers, fleet):
    servers[1].on["/finish_weight_update"] = 500
    failed = {"code": "commit_failed", "message": "undone: /mnt/weights/x is short"}

    def look():
        if "/finish_weight_update" in servers[1].calls:
            servers[1].error[1] = failed

    servers[1].on["weightcast_status"] = look

    with pytest.raises(FleetUpdateFailed, match="commit_failed: rank 1: undone: /mnt/weights/x is short"):
        fleet.update("step_7", SOURCE)


def test_a_server_that_hangs_in_its_commit_is_given_up_at_the_deadline(servers, fleet, monkeypatch):
    monkeypatch.setattr(rollout, "CLEAN_UP_S", 0.3)
    servers[1].on["/finish_weight_update"] = "hang"
    began = time.monotonic()

    with pytest.raises(FleetUpdateFailed) as raised:
        fleet.update("step_7", SOURCE, timeout=0.7)

    assert isinstance(raised.value.failures[servers[1].url], DeadlineExceeded)
    assert len(raised.value.committed) == 2
    assert time.monotonic() - began < 20


# -- pausing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_is_made_around_the_commit_alone(servers, fleet, mode):
    update = fleet.update("step_7", SOURCE, pause=mode)

    for server in servers:
        assert without_looks(server)[1:] == [*UPDATE[:2], f"/pause?mode={mode}", UPDATE[2], "/resume"]
        assert not server.paused
    assert all(one.pause_s >= one.commit_s for one in update.servers)


@pytest.mark.parametrize("route", ["/pause", "/finish_weight_update"])
def test_no_server_stays_paused_when_its_commit_fails(servers, fleet, route):
    servers[0].on[route] = lambda: (servers[0].set_paused(True), servers[0].on.update({route: 500}), False)[-1]

    with pytest.raises(FleetUpdateFailed):
        fleet.update("step_7", SOURCE, pause="keep")

    assert not any(server.paused for server in servers)


def test_resuming_is_tried_again_and_a_server_that_stays_paused_is_told(servers, fleet, monkeypatch):
    monkeypatch.setattr(rollout, "CLEAN_UP_S", 0.3)
    servers[0].on["/resume"] = lambda: servers[0].calls.count("/resume") > 2
    servers[1].on["/resume"] = 500

    with pytest.raises(FleetUpdateFailed, match="may stay paused") as raised:
        fleet.update("step_7", SOURCE, pause="keep")

    assert list(raised.value.failures) == [servers[1].url]
    assert len(raised.value.committed) == 3  # it committed, and that is said
    assert not servers[0].paused


def test_an_unknown_pause_is_refused_before_anything_is_asked(servers, fleet):
    with pytest.raises(InvalidInput, match="keep, wait, abort"):
        fleet.update("step_7", SOURCE, pause="stop")

    assert servers[0].calls == []


# -- workers without staging, and interrupting --------------------------------------------------------------------------


def test_a_server_whose_workers_cannot_stage_aside_is_updated_step_by_step_and_that_is_logged(caplog):
    with opened(Routes(knows_stage=False), Routes()) as (old, new), caplog.at_level(logging.WARNING, "weightcast"):
        update = VllmFleet([old.url, new.url]).update("step_7", SOURCE)

        assert (old.served, new.served) == ("step_7", "step_7")
        assert [one.aside for one in update.servers] == [False, True]
        assert old.calls == ["weightcast_stage", "/get_world_size", *UPDATE]
    (record,) = caplog.records
    assert record.message.startswith("server cannot stage")


def not_configured():
    raise Refused(500, worker_said("Weight transfer not configured. Please set weight_transfer_config."))


@pytest.mark.parametrize(("number", "how"), [(0, 404), (1, 404), (0, not_configured)])
def test_a_server_without_vllms_own_updates_is_committed_by_its_workers(servers, fleet, number, how):
    servers[number].on["/start_weight_update"] = how

    fleet.update("step_7", SOURCE, pause="keep")

    assert [server.served for server in servers] == ["step_7"] * 3
    assert without_looks(servers[number])[-3:] == ["/pause?mode=keep", "weightcast_commit", "/resume"]


@pytest.mark.parametrize("knows_stage", [True, False])
def test_a_call_that_failed_on_several_workers_is_not_followed_by_one_whose_answers_would_be_mixed_up(servers, knows_stage):
    servers[1].knows_stage = knows_stage
    servers[1].on["/start_weight_update"] = not_configured

    with pytest.raises(FleetUpdateFailed, match="not configured" if knows_stage else "have no method weightcast_stage"):
        VllmFleet(servers[1].url).update("step_7", SOURCE)

    assert servers[1].served == "step_6"
    assert "/update_weights" not in servers[1].calls


def test_a_deadline_that_passes_before_the_commit_changes_nothing(servers, fleet):
    servers[2].on["/update_weights"] = lambda: time.sleep(0.6)

    with pytest.raises(WeightcastError, match=r"did not finish within 0\.5 s"):
        fleet.update("step_7", SOURCE, timeout=0.5)

    assert [server.served for server in servers] == ["step_6"] * 3


def test_an_interrupted_update_ends_at_once_and_is_abandoned_everywhere(servers, fleet):
    servers[0].looks = 10**6
    servers[0].on["weightcast_status"] = lambda: _interrupt(servers[0])
    began = time.monotonic()

    with pytest.raises(KeyboardInterrupt):
        fleet.update("step_7", SOURCE)

    assert time.monotonic() - began < 60  # and not when staging is given up
    assert [server.calls[-1] for server in servers] == ["weightcast_abandon"] * 3


def _interrupt(server):
    if server.calls.count("weightcast_status") == 2:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


# -- one server ---------------------------------------------------------------------------------------------------------


def test_what_a_server_is_asked_and_says(servers):
    server = VllmServer(servers[0].url + "/")
    assert server.url == servers[0].url
    assert server.health()
    assert server.weight_version() == "step_6"
    server.pause("wait")
    assert server.is_paused()
    server.resume()
    assert not server.is_paused()
    assert server.reset_prefix_cache(running=True)
    assert servers[0].calls[-1] == "/reset_prefix_cache?reset_running_requests=true"
    server.init({"a": 1})
    assert servers[0].bodies[-1] == {"init_info": {"a": 1}}
    (rank,) = server.status()
    assert (rank.state, rank.version, rank.staged, rank.rank, rank.error) == ("READY", "step_6", None, 0, None)


def test_a_server_that_hangs_or_drips_is_given_up_at_the_deadline(servers):
    for how in ("hang", "drip"):
        servers[0].on["/weight_info"] = how
        with pytest.raises(DeadlineExceeded, match="asking for its version at http"):
            VllmServer(servers[0].url).weight_version(deadline=Deadline.after(0.2))


def test_what_a_worker_said_is_told_without_its_wrapping(servers):
    servers[0].on["/update_weights"] = 500

    with pytest.raises(ReplicaFailed, match=r"answered 500 to staging a version: RuntimeError: out of memory in <path>$"):
        VllmServer(servers[0].url).update({"version": "step_7"})
    assert told_by(b'{"error": "Failed to pause generation: x"}') == "Failed to pause generation: x"
    assert told_by(b"<html>") == "<html>"
    assert told_by(b"") == "without a word"


def test_a_missing_method_and_a_missing_route_say_how_to_start_the_server():
    with opened(Routes(knows_stage=False)) as (old,):
        with pytest.raises(NoSuchMethod, match=r'have no method weightcast_status.*"backend":"weightcast"'):
            VllmServer(old.url).status()
        old.on["/weight_info"] = 404
        with pytest.raises(InvalidInput, match="VLLM_SERVER_DEV_MODE=1"):
            VllmServer(old.url).weight_version()


def test_a_token_is_shown_and_never_told():
    with opened(Routes(token="secret-word")) as (guarded,):
        assert VllmServer(guarded.url, "secret-word").weight_version() == "default"
        with pytest.raises(AccessRefused) as raised:
            VllmServer(guarded.url, "another-secret").weight_version()
        assert "another-secret" not in str(raised.value) + repr(VllmServer(guarded.url, "another-secret"))


@pytest.mark.parametrize(
    "url", ["gen-0:8000", "ftp://gen-0", "http://", "http://user:word@gen-0", "http://gen-0?x=1", "http://gen-0:99999", ""]
)
def test_what_is_not_the_url_of_a_server_is_refused(url):
    with pytest.raises(InvalidInput, match="not the URL of a server"):
        VllmServer(url)


def test_an_answer_that_is_not_vllms_is_told_as_such(servers):
    servers[0].told = lambda _: "[]"

    with pytest.raises(ReplicaFailed, match="status of its workers cannot be read"):
        VllmServer(servers[0].url).status()


# -- the four methods that vLLM's trainers call -------------------------------------------------------------------------


def test_the_methods_of_vllms_clients_go_to_all_servers_and_list_all_failures(servers, fleet):
    fleet.init_weight_transfer_engine({})
    fleet.start_weight_update()
    fleet.update_weights({"version": "step_7", "source": SOURCE})
    servers[0].on["/finish_weight_update"] = servers[2].on["/finish_weight_update"] = 500
    with pytest.raises(FleetUpdateFailed, match=f"done by {servers[1].url}, and failed on 2") as raised:
        fleet.finish_weight_update("step_7")
    assert list(raised.value.failures) == [servers[0].url, servers[2].url]
    servers[0].on.clear()
    servers[2].on.clear()
    servers[1].active = True
    fleet.finish_weight_update("step_7")

    assert [server.served for server in servers] == ["step_7"] * 3


@pytest.mark.parametrize("urls", [[], ["http://a:1", "http://a:1/"]])
def test_a_fleet_has_servers_each_of_them_once(urls):
    with pytest.raises(InvalidInput, match="each of them once"):
        VllmFleet(urls)


# -- what is looked up in the source ------------------------------------------------------------------------------------


def test_without_a_version_all_servers_are_told_the_same_newest_one(servers, fleet, store):
    store.publish("step_8", {"a": np.zeros(4, "float32")})

    assert fleet.update(None, store).version == "step_8"
    assert {server.served for server in servers} == {"step_8"}
    assert servers[0].bodies[0]["kwargs"]["source"] == store.path.as_uri()


def test_servers_are_told_of_directories_by_their_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert told_to_servers("a b") == (tmp_path / "a b").as_uri()
    assert told_to_servers(Store("x")) == (tmp_path / "x").as_uri()
    assert told_to_servers("http://depot:8300") == "http://depot:8300"


# -- the probe ----------------------------------------------------------------------------------------------------------

PRINT = Fingerprint(prompt=(3, 4, 5), logprobs=(-1.0, -2.0), top=((7, -0.5), (8, -1.5)), dtype="float32", tolerance=0.01)


def seen(server, shift=0.0):
    server.logprobs = {"prompt": [(4, -1.0 + shift), (5, -2.0)], "top": {7: -0.501, 8: -1.5, 9: -6.0}}


def test_servers_that_compute_what_they_must_pass_the_probe_of_the_versions_metadata(servers, fleet, store):
    store.publish("step_8", {"a": np.zeros(4, "float32")}, metadata={METADATA_KEY: encode_fingerprint(PRINT)})
    for server in servers:
        seen(server)

    assert fleet.update("step_8", store, probe=True).probed
    assert servers[0].bodies[-1]["prompt"] == [3, 4, 5]
    assert servers[0].bodies[-1]["logprobs"] == 4


def test_a_server_that_computes_something_else_is_told_with_every_position(servers, fleet):
    for server in servers:
        seen(server, 0.25 if server is servers[1] else 0.0)

    with pytest.raises(ProbeMismatch) as raised:
        fleet.update("step_7", SOURCE, probe=PRINT)

    assert raised.value.servers == {servers[1].url: ("position 1, token 4: expected -1.0000, found -0.7500",)}
    assert [server.served for server in servers] == ["step_7"] * 3  # and the message says so
    assert "step_7 is committed" in str(raised.value)


def test_a_server_that_cannot_be_probed_is_told_and_so_is_that_it_committed(servers, fleet):
    for server in servers:
        seen(server)
    servers[2].on["/v1/completions"] = 500

    with pytest.raises(FleetUpdateFailed, match="committed everywhere, but 1 server") as raised:
        fleet.update("step_7", SOURCE, probe=PRINT)
    assert len(raised.value.committed) == 3

    seen(servers[0], 1.0)
    with pytest.raises(ProbeMismatch, match="could not be asked"):
        fleet.update("step_8", SOURCE, probe=PRINT)


def test_a_version_without_a_fingerprint_is_refused_before_anything_is_changed(servers, fleet, store):
    store.publish("step_8", {"a": np.zeros(4, "float32")})
    with pytest.raises(NotFound, match="no fingerprint in its metadata"):
        fleet.update("step_8", store, probe=True)
    store.publish("step_9", {"a": np.zeros(4, "float32")}, "full", metadata={METADATA_KEY: "{}"})
    with pytest.raises(InvalidInput, match="not a fingerprint"):
        fleet.update("step_9", store, probe=True)

    assert servers[0].calls == []


def test_numbers_that_are_missing_or_no_numbers_are_differences():
    assert compare(PRINT, Observed(logprobs=(-1.0, -2.0), top={7: -0.5, 8: -1.5})) == []
    assert [one.position for one in compare(PRINT, Observed(logprobs=(float("nan"),), top={7: -0.5, 8: -1.5}))] == [1, 2]
    (missing,) = compare(PRINT, Observed(logprobs=(-1.0, -2.0), top={7: -0.5, 9: -4.0}))
    assert str(missing) == "position 3, token 8: expected -1.5000, found at most -4.0000"
    assert compare(PRINT, Observed(logprobs=(-1.0, -2.0), top={7: -0.5, 9: -1.495})) == []  # just below what is listed
    assert len(compare(PRINT, Observed(logprobs=(), top={}))) == 4


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"prompt": (3,), "logprobs": ()}, "two tokens"),
        ({"prompt": (3, -1, 5)}, "negative"),
        ({"logprobs": (-1.0,)}, "need 2 log-probabilities"),
        ({"top": ()}, "1 to 10"),
        ({"logprobs": (-1.0, float("nan"))}, "not numbers"),
        ({"tolerance": 0.0}, "tolerance"),
    ],
)
def test_a_fingerprint_that_contradicts_itself_is_refused(change, why):
    fields = {name: getattr(PRINT, name) for name in PRINT.__struct_fields__} | change

    with pytest.raises(InvalidInput, match=why):
        Fingerprint(**fields)


def test_a_fingerprint_is_what_the_model_says_and_leaves_its_mode_alone():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 11)).train()
    prompt = [1, 2, 3, 4]

    one, two = fingerprint(model, prompt, top=3), fingerprint(model, prompt, top=3)

    assert one == two  # no dropout
    assert model.training
    with torch.inference_mode():
        table = torch.log_softmax(model.eval()(torch.tensor(prompt)), -1)
    assert one.logprobs == pytest.approx([float(table[at, token]) for at, token in enumerate(prompt[1:])], abs=1e-5)
    assert [token for token, _ in one.top] == torch.topk(table[-1], 3).indices.tolist()
    assert (one.dtype, one.tolerance) == ("float32", 1e-3)
    assert decode_fingerprint(encode_fingerprint(one)) == one
    with pytest.raises(InvalidInput, match="two tokens"):
        fingerprint(model, [1])


# -- the command line ---------------------------------------------------------------------------------------------------


def called(capsys, *arguments):
    status = main([*arguments])
    told = capsys.readouterr()
    return status, told.out + told.err


def test_the_command_updates_servers_and_tells_what_they_serve(servers, capsys):
    urls = [part for server in servers[:2] for part in ("--server", server.url)]

    status, told = called(capsys, "vllm", "update", *urls, "--source", SOURCE, "--version", "step_7", "--pause", "keep")
    assert (status, [server.served for server in servers[:2]]) == (0, ["step_7", "step_7"])
    assert "2 server(s) serve step_7" in told

    status, told = called(capsys, "vllm", "status", *urls, "--json")
    found = json.loads(told)["servers"]
    assert (status, [len(one["ranks"]) for one in found]) == (0, [1, 2])
    assert found[0]["ranks"][0]["version"] == "step_7"

    status, told = called(capsys, "vllm", "status", *urls, "--server", "http://127.0.0.1:1")
    assert status == 1
    assert "replica_failed" in told


def test_the_command_tells_failures_with_their_status(servers, capsys):
    servers[0].refuses = {0: ("version_not_found", "no step_9")}
    ask = ("vllm", "update", "--server", servers[0].url, "--source", SOURCE, "--version", "step_9")

    assert called(capsys, *ask)[0] == 2
    status, told = called(capsys, *ask, "--json")
    assert (status, json.loads(told)["error"]["code"]) == (2, "fleet_update_failed")
    servers[0].refuses = {0: ("digest_mismatch", "x")}
    assert called(capsys, *ask)[0] == 1
    assert called(capsys, "vllm", "update", "--server", "nowhere", "--source", SOURCE, "--version", "a")[0] == 2
