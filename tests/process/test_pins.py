"""What an operator decided stays: a real server that follows a store, and loses ranks and its front end."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weightcast.store.snapshot import write_snapshot

from .follow_stand import FollowStand
from .server_process import START_S, WAIT_S, ServerProcess


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    one = FollowStand(tmp_path_factory.mktemp("pins"))
    try:
        one.publish("step_1")
        one.start()
        yield one
    finally:
        one.close()


def at_newest(stand):
    """Serve a new version, with the one before it held."""
    before = stand.publish()
    stand.follow()
    stand.wait_serving(before)
    newest = stand.publish()
    stand.wait_serving(newest)
    return before, newest


def test_a_rollback_survives_the_loss_of_a_rank(stand):
    before, newest = at_newest(stand)
    assert stand.rollback().status_code == 200
    stand.dwell(before)
    stand.kill_rank(1)
    stand.wait_serving(before)
    stand.dwell(before, turns=20)
    stand.judge(before, newest)


def test_an_explicit_version_survives_the_loss_of_a_rank(stand):
    _, newest = at_newest(stand)
    assert stand.update("base").status_code == 200
    stand.kill_rank(0)
    stand.wait_serving("base")
    stand.dwell("base", turns=20)
    stand.judge("base", newest)


def test_something_newer_ends_a_pin_and_a_pointer_that_goes_back_and_forth_does_not(stand):
    before, newest = at_newest(stand)
    assert stand.rollback().status_code == 200
    for announced in ("base", newest, before, newest):
        stand.store.announce(announced)
        stand.dwell(before)
    stand.judge(before, newest)
    newer = stand.publish()
    stand.wait_serving(newer)
    stand.judge(newer, None)


def test_following_can_be_resumed(stand):
    before, newest = at_newest(stand)
    assert stand.rollback().status_code == 200
    stand.dwell(before)
    answer = stand.follow()
    assert answer.status_code == 200, answer.text
    assert answer.json()["result"]["pin"] is None
    stand.wait_serving(newest)
    stand.judge(newest, None)


def test_the_newest_version_by_name_pins_nothing(stand):
    _, newest = at_newest(stand)
    assert stand.update("base").status_code == 200
    stand.judge("base", newest)
    assert stand.update(newest).status_code == 200
    stand.judge(newest, None)


def test_a_served_version_that_is_named_again_is_pinned(stand):
    before, newest = at_newest(stand)
    stand.store.announce(before)
    stand.wait_serving(before)
    stand.store.announce(newest)
    stand.wait_serving(newest)
    assert stand.update(before).status_code == 200
    answer = stand.update(before)
    assert [one["mode"] for one in answer.json()["result"]] == ["none", "none"]
    stand.judge(before, newest)


# -- the state directory -------------------------------------------------------------------------------------------------


def test_a_pin_survives_the_front_end(stand):
    before, newest = at_newest(stand)
    assert stand.rollback().status_code == 200
    stand.kill_front_end()
    stand.start()
    stand.dwell(before, turns=20)
    stand.judge(before, newest)
    newer = stand.publish()
    stand.wait_serving(newer)
    stand.judge(newer, None)


def has_failed(stand, version):
    """Whether the server is FAILED and names the version. It tries again all the time: its state and reason are one look."""
    health = stand.server.health()
    return health["state"] == "FAILED" and version in health["reason"]


def test_a_version_that_is_gone_is_not_replaced_by_another(stand):
    before, newest = at_newest(stand)
    assert stand.rollback().status_code == 200
    stand.kill_front_end()
    directory = stand.store.path / "versions" / before
    aside = stand.root / "aside"
    shutil.move(directory, aside)
    stand.start(ready=False)
    stand.server.wait_for(stand.server.port_file.exists, "the port file", START_S)
    stand.server.wait_for(lambda: has_failed(stand, before), "FAILED", START_S)
    now = stand.weights()
    assert (now["version"], now["pin"]["away_from"]) == (before, newest)
    shutil.move(aside, directory)
    stand.wait_serving(before)
    stand.judge(before, newest)


def test_that_a_version_is_gone_is_logged_once_however_often_it_is_tried(stand):
    before, _ = at_newest(stand)
    assert stand.rollback().status_code == 200
    directory, aside = stand.store.path / "versions" / before, stand.root / "aside"
    shutil.move(directory, aside)
    logged = len(stand.server.log.read_text())
    stand.kill_rank(1)
    stand.server.wait_for(lambda: stand.metric("weightcast_weight_update_failures_total") > 3, "some tries", START_S)
    page = stand.server.log.read_text()[logged:]
    shutil.move(aside, directory)
    stand.wait_serving(before)
    for event in ("replica failed", "load failed", "update failed", "update received"):
        assert page.count(f"  {event}  ") <= 1, page


def test_a_state_directory_belongs_to_one_server(stand):
    other = ServerProcess(stand.model_dir, "--state-dir", stand.state_dir)
    try:
        assert other.process.wait(START_S) == 2
        assert "used by another server" in other.said()
    finally:
        other.end()


def test_an_update_that_cannot_be_written_down_is_not_committed(stand):
    before, newest = at_newest(stand)
    file, aside = stand.state_dir / "state.json", stand.root / "state-aside.json"
    file.rename(aside)
    (file / "in the way").mkdir(parents=True)
    answer = stand.update(before)
    assert (answer.status_code, answer.json()["code"]) == (500, "commit_failed"), answer.text
    assert str(file) in answer.text
    stand.judge(newest, None)
    shutil.rmtree(file)
    aside.rename(file)
    assert stand.update(before).status_code == 200
    stand.judge(before, newest)


def serve(model_dir: Path, state_dir: Path) -> subprocess.CompletedProcess[str]:
    """A server that cannot start."""
    command = [sys.executable, "-m", "weightcast", "serve", model_dir, "--port", 0, "--state-dir", state_dir]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=START_S, check=False)


def test_a_damaged_state_file_is_told_and_nothing_is_served(stand, tmp_path):
    at_newest(stand)
    shutil.copytree(stand.state_dir, tmp_path / "state")
    path = tmp_path / "state" / "state.json"
    path.write_bytes(path.read_bytes().replace(b"step", b"stop", 1))
    ended = serve(stand.model_dir, path.parent)
    assert ended.returncode == 1
    assert f"state file {path} cannot be used" in ended.stderr
    assert "remove it" in ended.stderr


def test_a_state_of_another_model_is_refused(stand, tmp_path):
    at_newest(stand)
    shutil.copytree(stand.state_dir, tmp_path / "state")
    shutil.copytree(stand.model_dir, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text() + "\n")
    ended = serve(tmp_path / "model", tmp_path / "state")
    assert ended.returncode == 1
    assert "another config.json" in ended.stderr


# -- a source that keeps no order ----------------------------------------------------------------------------------------


def test_a_pin_that_was_made_while_the_source_was_silent_ends_too(tmp_path):
    stand = FollowStand(tmp_path)
    snapshots = tmp_path / "snapshots"
    snapshots.mkdir()

    def snapshot(version):
        for rank in range(2):
            write_snapshot(
                snapshots, stand.store.load(version), rank=rank, ranks=2, device_id="0", version=version, part_nbytes=None
            )

    try:
        for _ in range(3):
            stand.publish()
        stand.start(source=f"snapshot://{snapshots}?id=0")
        assert stand.update("step_1", source=f"file://{stand.store.path}").status_code == 200
        assert stand.weights()["pin"]["away_from"] == ""
        snapshot("step_2")  # nothing tells whether it is new, or was there when the operator decided
        stand.server.wait_for(lambda: stand.weights()["pin"]["away_from"] == "step_2", "a whole pin", WAIT_S)
        stand.dwell("step_1")
        stand.judge("step_1", "step_2")
        snapshot("step_3")
        stand.wait_serving("step_3")
        stand.judge("step_3", None)
    finally:
        stand.close()


# -- a start with the newest version -------------------------------------------------------------------------------------


def test_a_follower_that_starts_with_the_newest_version_fetches_and_copies_nothing(tmp_path):
    stand = FollowStand(tmp_path)
    try:
        stand.start(state=False)
        stand.wait_serving("base")
        page = stand.server.log.read_text()
        metrics = stand._http.get(f"{stand.server.url}/metrics").text
        assert "\nweightcast_weight_update_bytes_total 0" in metrics, page
        stand.judge("base", None)
        stand.dwell("base", turns=10)
        newer = stand.publish()
        stand.wait_serving(newer)
        assert stand.rollback().status_code == 200
        stand.judge("base", newer)
        stand.server.wait_for(lambda: stand.server.health()["state"] == "READY", "READY", WAIT_S)
    finally:
        stand.close()
