"""An engine loses its store, and recovers from snapshots in the legacy layout.

    python examples/legacy_recovery.py

A trainer's last version is in a store and, as legacy systems keep it, in files `model_state.tp{rank}.{id}.part{N}.pdparams`:
for each rank the tensors of the checkpoint. An engine of two ranks serves that version. Then the store is lost and a rank
of the engine dies: the replica cannot load its version again and says FAILED, rather than serve something else. One call
brings it back from the snapshots, with every byte proved. In the end a snapshot becomes a version of a new store.

Needs: pip install 'weightcast[serve]'
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weightcast import Store

RANKS = 2
PATIENCE_S = 120.0


def weightcast(*words: object) -> None:
    """The command line tool, whose words are shown."""
    print(f"$ weightcast {' '.join(map(str, words))}", flush=True)
    subprocess.run([sys.executable, "-m", "weightcast", *map(str, words)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit like others: what is below cleans up
    with tempfile.TemporaryDirectory(prefix="wc-example-") as directory:
        run(Path(directory))


def run(directory: Path) -> None:
    model, store, snapshots = directory / "model", directory / "store", directory / "snapshots"

    print("-- the trainer leaves a version in the store, and as a snapshot for each rank\n", flush=True)
    weightcast("model", "init", model, "--seed", 1)
    weightcast("model", "init", directory / "trained", "--seed", 2)
    weightcast("publish", store, "step_7", directory / "trained")
    for rank in range(RANKS):
        which = ("--rank", rank, "--ranks", RANKS, "--id", 0)
        weightcast("snapshot", "write", store, "step_7", snapshots, *which, "--part-size", "200KiB")
    weightcast("snapshot", "ls", snapshots)
    published = Store(store).manifest("step_7").root_digest

    print("\n-- the engine serves it\n", flush=True)
    with engine(model, "--source", store, "--allow-source", f"snapshot://{snapshots}") as url:
        ask("POST", f"{url}/v1/update_weights", {"version": "step_7"})
        before = completion(url)
        print(f"step_7 says {before!r}")

        print("\n-- the store is lost, and rank 1 dies\n", flush=True)
        shutil.rmtree(store)
        os.kill(ask("GET", f"{url}/v1/stats")["data"][1]["pid"], signal.SIGKILL)
        print(wait_until_failed(url))

        print("\n-- recovery from the snapshots\n", flush=True)
        ranks = ask("POST", f"{url}/v1/weights/recover", {"source": f"snapshot://{snapshots}?id=0", "version": "step_7"})
        for rank in ranks["result"]:
            print(f"rank {rank['rank']}: {rank['version']} from {rank['source'].partition('?')[0]}")
        weights = ask("GET", f"{url}/v1/weights")["result"]
        assert (weights["version"], weights["root_digest"]) == ("step_7", published), weights
        ask("POST", f"{url}/v1/weights/verify", {})  # every live byte, hashed anew
        assert completion(url) == before
        print(f"step_7 says {before!r} again; root digest {published}, as published")

    print("\n-- a snapshot becomes a version of a new store\n", flush=True)
    for rank in range(RANKS):
        weightcast("snapshot", "check", snapshots, "--rank", rank, "--id", 0)
    weightcast("snapshot", "convert", snapshots, directory / "new-store", "--rank", 0, "--id", 0)
    assert Store(directory / "new-store").manifest("step_7").root_digest == published
    print("\nThe new store's step_7 is the one that was lost, bit for bit.")


# -- the engine -----------------------------------------------------------------------------------------------------------


@contextmanager
def engine(model: Path, *options: object) -> Iterator[str]:
    """`weightcast serve`; gives its URL when it serves."""
    words = ("-q", "serve", model, "--ranks", RANKS, "--port", 0, "--threads", 1, *options)
    command = [sys.executable, "-m", "weightcast", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()  # comes when all ranks are ready; ends empty if they cannot start
            assert line.startswith("serving"), "the engine did not start"
            yield line.split()[-1]
        finally:
            process.terminate()


def ask(method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:  # its body says why
        sys.exit(f"{url} answered {error.code}: {error.read().decode()}")


def completion(url: str) -> str:
    body = {"model": "model", "prompt": "Hello", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return ask("POST", f"{url}/v1/completions", body)["choices"][0]["text"]


def wait_until_failed(url: str) -> str:
    """Why the replica is FAILED, once it is. `/health` answers 503 unless it serves, and its body says what it is doing."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S).close()
        except urllib.error.HTTPError as error:
            health = json.load(error)
            if health["state"] == "FAILED":
                return health["reason"]
        time.sleep(0.1)
    sys.exit("the replica did not fail, although its version cannot be loaded any more")


if __name__ == "__main__":
    main()
