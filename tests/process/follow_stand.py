"""A server of two ranks that follows a store, the versions in that store, and a look at what the server serves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from weightcast import Store
from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.tensors.digest import array_digest

from .server_process import START_S, WAIT_S, ServerProcess

POLL_S = 0.05
WHOLE = "model.norm.weight"  # every rank holds all of it, and every version has another


class FollowStand:
    """`published` are the versions of the store, oldest first. Their order is that of their publication."""

    def __init__(self, root: Path, *, seed: int = 3) -> None:
        self.root, self.model_dir, self.state_dir = root, root / "model", root / "state"
        init_checkpoint(self.model_dir, "tiny", seed=seed)
        self.store = Store(root / "store")
        self.store.publish_checkpoint("base", self.model_dir)
        self.published = ["base"]
        self._state = self.store.load("base")
        self.digests = {"base": array_digest(self._state[WHOLE])}
        self.server: ServerProcess | None = None
        self._http = httpx.Client(timeout=2 * WAIT_S)

    def publish(self, version: str | None = None) -> str:
        """A new version: a few elements of each tensor change places with others."""
        version = version or f"step_{len(self.published)}"
        rng, changed = np.random.default_rng(len(self.published)), {}
        for name, array in self._state.items():
            changed[name] = array.copy()
            places = rng.choice(array.size, max(2, array.size // 50), replace=False)
            flat = changed[name].reshape(-1)
            flat[places] = np.roll(flat[places], 1)
        changed[WHOLE] = (changed[WHOLE].astype(np.float32) * (1 + 2**-5)).astype(changed[WHOLE].dtype)
        self._state = changed
        self.store.publish(version, changed)
        self.published.append(version)
        self.digests[version] = array_digest(changed[WHOLE])
        return version

    # -- the server ------------------------------------------------------------------------------------------------------

    def start(self, *, state: bool = True, ready: bool = True, source: str | None = None) -> ServerProcess:
        """Start the server, with its state directory if it is to have one. It follows the store unless told otherwise."""
        arguments = ["--ranks", 2, "--source", source or self.store.path, "--follow", "--follow-poll", POLL_S]
        arguments += ["--allow-source", f"snapshot://{self.root}/*", "--allow-source", f"file://{self.store.path}"]
        self.server = ServerProcess(self.model_dir, *arguments, *(["--state-dir", self.state_dir] if state else []))
        if ready:
            self.server.wait_ready()
        return self.server

    def kill_rank(self, rank: int) -> None:
        """SIGKILL, and wait until all ranks run again."""
        restarts = self.server.health()["restarts"]
        os.kill(self.server.ranks()[rank], signal.SIGKILL)
        self.server.wait_for(lambda: self.server.health()["restarts"] > restarts, "a restart", START_S)

    def kill_front_end(self) -> None:
        """SIGKILL. Its ranks end by themselves."""
        self.server.look()
        os.kill(self.server.process.pid, signal.SIGKILL)
        self.server.process.wait(WAIT_S)
        end = time.monotonic() + WAIT_S
        while self.server.alive():
            assert time.monotonic() < end, self.server.alive()
            time.sleep(0.02)
        self.server.end()

    def close(self) -> None:
        self._http.close()
        if self.server is not None:
            self.server.end()

    # -- calls -----------------------------------------------------------------------------------------------------------

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self._http.post(f"{self.server.url}{path}", json=body)

    def update(self, version: str | None = None, **options: Any) -> httpx.Response:
        named = {} if version is None else {"version": version}
        return self.post("/v1/update_weights", timeout=WAIT_S, **named, **options)

    def rollback(self) -> httpx.Response:
        return self.post("/v1/weights/rollback")

    def follow(self) -> httpx.Response:
        return self.post("/v1/weights/follow")

    def weights(self) -> dict[str, Any]:
        answer = self._http.get(f"{self.server.url}/v1/weights")
        assert answer.status_code == 200, answer.text
        return answer.json()["result"]

    def metric(self, name: str) -> float:
        """The sum of a counter of `/metrics` over its labels."""
        lines = self._http.get(f"{self.server.url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    # -- what is served --------------------------------------------------------------------------------------------------

    def wait_serving(self, version: str) -> dict[str, Any]:
        """Wait until the server rests at this version."""

        def rests() -> bool:
            now = self.weights()
            return (now["version"], now["state"], now["update"]) == (version, "READY", None)

        self.server.wait_for(rests, f"serving {version}", START_S)
        return self.weights()

    def dwell(self, version: str, turns: int = 4) -> None:
        """The server stays at this version while it looks at its source some times."""
        end = time.monotonic() + turns * POLL_S
        while time.monotonic() < end:
            now = self.weights()
            assert (now["version"], now["state"]) == (version, "READY"), now
            time.sleep(POLL_S / 4)

    def judge(self, version: str, away_from: str | None) -> None:
        """All ranks hold this very version, proved, and the pin is what it should be."""
        now = self.weights()
        assert now["version"] == version, now
        assert {rank["version"] for rank in now["ranks"]} == {version}, now
        pin = now["pin"] and (now["pin"]["version"], now["pin"]["away_from"])
        assert pin == (None if away_from is None else (version, away_from)), now
        verified = self.post("/v1/weights/verify")
        assert verified.status_code == 200, verified.text
        answer = self.post("/v1/weights/digest", names=[WHOLE])
        found = {box["digest"] for rank in answer.json()["result"] for box in rank["digests"][WHOLE]}
        assert found == {self.digests[version]}, f"{version}: {answer.text}"
