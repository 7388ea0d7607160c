"""From a checkpoint directory to a running `vllm serve` that takes new versions, full and as deltas.

    python examples/vllm_update.py [--model DIR]

A store is filled from the checkpoint; the server is started from the same directory, with weightcast as its weight transfer.
Then `VllmFleet` brings it to a new version, of which only the changes are stored and fetched, and back to the first one.
Without --model a random Qwen3 model of 50 MB is made.

Needs: vLLM 0.32, on a GPU `pip install vllm 'weightcast[fast]'`; without one see docs/vllm.md
"""

import argparse
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from weightcast import Store, VllmFleet

PROMPT, TOKENS = [5, 6, 7, 8], 16
START_S, PATIENCE_S = 300.0, 60.0
VLLM = Path(sys.executable).with_name("vllm")
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that update weights
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, where there is no GPU
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


# -- the server -----------------------------------------------------------------------------------------------------------


@contextmanager
def vllm_serve(model: Path, store: Path, log_path: Path) -> Iterator[str]:
    """`vllm serve` with weightcast as its weight transfer; gives its URL when it serves. It takes versions of `store`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        VLLM, "serve", model, "--served-model-name", "model", "--host", "127.0.0.1", "--port", port, "--max-model-len", 2048,
        "--enforce-eager", "--skip-tokenizer-init", "--weight-transfer-config", json.dumps({"backend": "weightcast"}),
    ]  # fmt: skip
    with log_path.open("wb") as log:
        settings = {**os.environ, **SETTINGS, "WEIGHTCAST_ALLOW_SOURCE": f"file://{store}"}
        process = subprocess.Popen(list(map(str, command)), env=settings, stdout=log, stderr=log)
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", process, log_path)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its engine ends without it
            process.wait()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:  # it does not listen yet, or is not ready
            time.sleep(0.2)
    sys.exit(f"vllm serve did not start:\n{log_path.read_text(errors='replace')[-4000:]}")


def tokens(url: str) -> list[int]:
    """A greedy completion."""
    body = {"model": "model", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "detokenize": False}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


# -- a trainer, and the update --------------------------------------------------------------------------------------------


def trained(weights: dict[str, Any]) -> dict[str, Any]:
    """In the place of a trainer: one weight in a hundred changes its sign, so that the answer changes, too."""
    random = np.random.default_rng(1)
    for tensor in weights.values():
        flat = tensor.reshape(-1)
        chosen = random.choice(flat.size, max(1, flat.size // 100), replace=False)
        flat[chosen] = -flat[chosen]
    return weights


def update(fleet: VllmFleet, store: Store, version: str) -> None:
    """Stage the version on all servers of the fleet while they serve, then commit it on all of them."""
    done = fleet.update(version, store)
    (server,) = done.servers
    print(f"update to {version}: staged in {server.stage_s:.2f} s, committed in {server.commit_s * 1e3:.0f} ms", flush=True)
    for ranks in fleet.status().values():
        served = {(rank.version, rank.root_digest) for rank in ranks}
        assert served == {(version, store.manifest(version).root_digest)}, f"the server has {served}"


def run(model: Path, directory: Path) -> None:
    store = Store(directory / "store")
    first = store.publish_checkpoint("step_0", model)
    second = store.publish("step_1", trained(store.load("step_0")))
    assert (first.kind, second.kind) == ("full", "delta")
    print(f"step_0: full, {first.nbytes:,} bytes; step_1: a delta on it, {second.payload_nbytes:,} bytes", flush=True)

    with vllm_serve(model, directory / "store", directory / "vllm.log") as url:
        fleet = VllmFleet([url])  # or many servers: all of them take a version, or none does
        before = tokens(url)
        print(f"vllm serve answers       {before}")
        update(fleet, store, "step_0")  # what it was started with, now with a name
        assert tokens(url) == before
        update(fleet, store, "step_1")
        after = tokens(url)
        print(f"step_1 answers           {after}")
        assert after != before
        update(fleet, store, "step_0")
        assert tokens(url) == before
        print("step_0 answers as before")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint that vLLM can serve (default: a random one)")
    model = parser.parse_args().model
    if importlib.util.find_spec("vllm") is None or not VLLM.exists():
        print(
            "This example starts `vllm serve`, which is not installed beside this Python: with a GPU, `pip install vllm "
            "'weightcast[fast]'` into a fresh environment; without one see docs/vllm.md.",
            file=sys.stderr,
        )
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit like others: what is below cleans up
    with tempfile.TemporaryDirectory(prefix="wc-example-") as directory:
        if model is None:
            model = Path(directory) / "model"
            command = ["model", "init", str(model), "--preset", "small", "--dtype", "bfloat16"]
            subprocess.run([sys.executable, "-m", "weightcast", *command], check=True)
        run(model, Path(directory))


if __name__ == "__main__":
    main()
