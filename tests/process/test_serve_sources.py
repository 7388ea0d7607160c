"""A server of two ranks takes versions out of the trainer's shared memory, held once, streamed, and lost on the way; and
from trainers and depots over the network.
"""

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest

from weightcast import DepotPublisher, Publisher, Shard, Store
from weightcast.depot.server import Depot
from weightcast.depot.stored import StoredShelf
from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.errors import WeightcastError

from .server_process import WAIT_S, complete, server_process

TRAINER = """
import sys, time
from weightcast import Publisher, Store
publisher = Publisher(sys.argv[1], bucket_nbytes=1 << 16)
state = Store(sys.argv[2]).load(sys.argv[3])
def slowly():
    for number, (name, tensor) in enumerate(state.items()):
        if number == len(state) // 2:
            print("half", flush=True)
            time.sleep(60)
        yield name, tensor
publisher.stream("lost", slowly(), like=state, receivers=2)
"""


class Stand:
    """A server, versions that answer differently, and a directory to publish them in."""

    def __init__(self, root: Path, server, ipc_dir: Path) -> None:
        self.server, self.store, self.ipc_dir = server, Store(root / "store"), ipc_dir
        self.url = f"ipc://{ipc_dir}"

    def state(self, number: int) -> dict[str, np.ndarray]:
        """That of a version: a shuffled part of each tensor of the first one."""
        rng, state = np.random.default_rng(number), {}
        for name, array in self.store.load("step_0").items():
            places = rng.choice(array.size, max(1, array.size // 10), replace=False)
            array.reshape(-1)[places] = rng.permutation(array.reshape(-1)[places])
            state[name] = array
        return state

    def update(self, version: str, *, source: str | None = None, **options: object) -> httpx.Response:
        body = {"version": version, "source": source or self.url, "timeout": WAIT_S, **options}
        return httpx.post(f"{self.server.url}/v1/update_weights", json=body, timeout=2 * WAIT_S)

    def weights(self) -> dict[str, object]:
        answer = httpx.get(f"{self.server.url}/v1/weights", timeout=WAIT_S)
        return answer.json()["result"]

    def tokens(self) -> str:
        with self.server.client() as client:
            return complete(client).choices[0].text

    def check(self, number: int, root_digest: str) -> None:
        """The server proves and answers what it would if the version had come from a store."""
        weights = self.weights()
        assert (weights["version"], weights["root_digest"]) == (f"step_{number}", root_digest)
        verified = httpx.post(f"{self.server.url}/v1/weights/verify", json={}, timeout=WAIT_S)
        assert verified.status_code == 200, verified.text
        told = self.tokens()
        self.store.publish(f"again_{number}", self.state(number), mode="full")
        assert self.update(f"again_{number}", source=f"file://{self.store.path}").status_code == 200
        assert self.weights()["root_digest"] == root_digest
        assert self.tokens() == told


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    root = tmp_path_factory.mktemp("ipc-serve")
    init_checkpoint(root / "model", "tiny", seed=3)
    Store(root / "store").publish_checkpoint("step_0", root / "model")
    ipc_dir = Path(tempfile.mkdtemp(prefix="wc-ipc-")) / "run"
    allowed = (f"file://{root}/store", f"ipc://{ipc_dir}", "http://127.0.0.1:*", "shares+http://127.0.0.1:*")
    arguments = [word for source in allowed for word in ("--allow-source", source)]
    with server_process(root / "model", "--ranks", 2, *arguments) as server:
        yield Stand(root, server, ipc_dir)
        shutil.rmtree(ipc_dir.parent, ignore_errors=True)


def shared_inodes(pid: int) -> set[str]:
    """The memory of publishers that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return set(re.findall(r"\s(\d+)\s+/memfd:weightcast", maps))


def test_ranks_read_one_slab_and_commit_it_in_every_mode(stand):
    with Publisher(stand.url) as publisher:
        for number, commit in enumerate(("copy", "swap", "auto", "inplace"), start=1):
            published = publisher.publish(f"step_{number}", stand.state(number))
            answer = stand.update(f"step_{number}", commit=commit)
            assert answer.status_code == 200, answer.text
            stand.check(number, published.manifest.root_digest)
        published = publisher.publish("step_5", stand.state(5))
        assert stand.update("step_5").status_code == 200
        published.wait(receivers=2)
        mapped = [shared_inodes(pid) for pid in stand.server.ranks()]
        assert mapped[0]
        assert mapped[0] == mapped[1], "each version is held once, whatever the number of ranks"


def test_a_stream_feeds_both_ranks(stand):
    with Publisher(stand.url, bucket_nbytes=1 << 16) as publisher:
        for number, commit in ((11, "copy"), (12, "swap")):
            done = []
            trainer = threading.Thread(
                target=lambda number=number, done=done: done.append(
                    publisher.stream(f"step_{number}", stand.state(number), receivers=2, timeout=WAIT_S)
                )
            )
            trainer.start()
            answer = retried(lambda number=number, commit=commit: stand.update(f"step_{number}", commit=commit))
            trainer.join(WAIT_S)
            assert answer.status_code == 200, answer.text
            done[0].wait(timeout=WAIT_S)
            assert len(done[0].taken) == 2
            stand.check(number, done[0].manifest.root_digest)


def test_a_stream_cannot_be_committed_in_place_by_ranks(stand):
    before = stand.weights()
    with Publisher(stand.url) as publisher:

        def waits_in_vain():
            with pytest.raises(WeightcastError):
                publisher.stream("step_20", stand.state(20), timeout=WAIT_S)

        trainer = threading.Thread(target=waits_in_vain)
        trainer.start()
        answer = retried(lambda: stand.update("step_20", commit="inplace"))
        publisher.close()
        trainer.join(WAIT_S)
        assert not trainer.is_alive()
    assert answer.status_code == 422, answer.text
    assert "copy or swap" in answer.text
    assert stand.weights()["version"] == before["version"]


def test_a_trainer_that_is_killed_in_a_stream_leaves_the_old_version_and_the_next_update_works(stand):
    before, told = stand.weights(), stand.tokens()
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, stand.url, str(stand.store.path), "step_0"], stdout=subprocess.PIPE, text=True
    )
    answers = []
    asking = threading.Thread(target=lambda: answers.append(retried(lambda: stand.update("lost"))))
    asking.start()
    try:
        assert trainer.stdout.readline() == "half\n"
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(WAIT_S)
        trainer.stdout.close()
    asking.join(2 * WAIT_S)
    assert answers[0].status_code == 502, answers[0].text
    assert "died" in answers[0].text
    assert (stand.weights()["version"], stand.tokens()) == (before["version"], told)
    assert not stand.ipc_dir.joinpath("rank-0").exists(), "whoever notices clears up"
    with Publisher(stand.url) as publisher:
        published = publisher.publish("step_31", stand.state(31))
        assert stand.update("step_31").status_code == 200
        stand.check(31, published.manifest.root_digest)


def results(answer: httpx.Response) -> list[dict[str, object]]:
    assert answer.status_code == 200, answer.text
    return answer.json()["result"]


def test_ranks_take_their_boxes_from_a_trainer_over_the_network(stand):
    with DepotPublisher("127.0.0.1:0") as publisher:
        for number, commit in enumerate(("copy", "swap", "inplace"), start=41):
            state = stand.state(number)
            published = publisher.publish(f"step_{number}", state)
            told = results(stand.update(f"step_{number}", source=publisher.url, commit=commit))
            published.wait(receivers=1, timeout=WAIT_S)
            if commit != "inplace":  # that reads everything twice
                assert sum(one["bytes"] for one in told) < 1.3 * sum(array.nbytes for array in state.values())
            stand.check(number, published.manifest.root_digest)


def test_ranks_that_are_behind_are_sent_one_delta(stand):
    with StoredShelf(stand.store.path) as shelf, Depot(shelf) as depot:
        results(stand.update(stand.store.newest(), source=depot.url))
        state = stand.store.load()
        for number in (51, 52, 53):
            for array in state.values():
                array.reshape(-1)[number::997] *= 2
            manifest = stand.store.publish(f"behind_{number}", state, mode="delta")
        told = results(stand.update("behind_53", source=depot.url))
    assert {one["mode"] for one in told} == {"delta"}
    assert sum(one["bytes"] for one in told) < sum(array.nbytes for array in state.values()) / 10
    assert stand.weights()["root_digest"] == manifest.root_digest
    assert httpx.post(f"{stand.server.url}/v1/weights/verify", json={}, timeout=WAIT_S).status_code == 200


def test_ranks_take_what_several_trainer_ranks_share(stand):
    state = stand.state(61)
    halves = [{}, {}]
    for name, array in state.items():
        middle = len(array) // 2
        for rank, (start, rows) in enumerate(((0, array[:middle]), (middle, array[middle:]))):
            halves[rank][name] = Shard(rows, shape=array.shape, start=(start,) + (0,) * (array.ndim - 1))
    with DepotPublisher("127.0.0.1:0", rank=0, ranks=2) as first, DepotPublisher("127.0.0.1:0", rank=1, ranks=2) as second:
        for publisher, half in zip((first, second), halves, strict=True):
            publisher.publish("step_61", half)
        source = f"shares+{first.url},{second.url.removeprefix('http://')}"
        results(stand.update("step_61", source=source))
        assert httpx.post(f"{stand.server.url}/v1/weights/verify", json={}, timeout=WAIT_S).status_code == 200
        told = stand.tokens()
    stand.store.publish("again_61", state, mode="full")
    assert stand.update("again_61", source=f"file://{stand.store.path}").status_code == 200
    assert stand.tokens() == told


def retried(call):
    """The answer once the trainer is there and has announced the version."""
    for _ in range(200):
        answer = call()
        if answer.status_code not in (404, 502) or "died" in answer.text:
            return answer
        threading.Event().wait(0.05)
    return answer


def test_a_store_that_is_made_after_the_server_is_followed_and_the_start_says_that_it_waits(tmp_path):
    init_checkpoint(tmp_path / "model", "tiny", seed=3)
    with server_process(tmp_path / "model", "--source", tmp_path / "later", "--follow", "--follow-poll", 0.2) as server:
        assert server.log.read_text().count("source not there yet") == 1
        Store(tmp_path / "later").publish_checkpoint("step_1", tmp_path / "model")

        def serves() -> bool:
            return httpx.get(f"{server.url}/v1/weights", timeout=WAIT_S).json()["result"]["version"] == "step_1"

        server.wait_for(serves, "the version of a store that was made later")
