"""`vllm serve` as a process of its own."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from weightcast.bench.served import Serving
from weightcast.clock import Deadline
from weightcast.config import ALLOW_SOURCE
from weightcast.errors import MissingExtra, ReplicaFailed

START_S = 300.0
STOP_S = 30.0
MODEL = "bench"
_TOKENS = 16  # short requests: what is computed again after an update is a pause, too, and not the one that is meant
_SETTINGS = ("VLLM_SERVER_DEV_MODE=1", "VLLM_CPU_KVCACHE_SPACE=1", "HF_HUB_OFFLINE=1", "VLLM_LOGGING_LEVEL=WARNING")


def vllm_program() -> Path:
    """The program `vllm` of this environment. Raises `MissingExtra` without it."""
    program = Path(sys.executable).with_name("vllm")
    if not program.exists():
        raise MissingExtra("vllm", "vllm", "weightcast bench vllm")
    return program


@contextmanager
def vllm_served(model_dir: Path, scratch: Path, *, requests: int) -> Iterator[Serving]:
    """A server with our backend that takes what is in `scratch`, once it is ready. Its log is there too. It computes so many
    requests at once.
    """
    program = vllm_program()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [
        "/usr/bin/env", *_SETTINGS, f"{ALLOW_SOURCE}=file://{scratch.absolute()}/*", str(program),
        "serve", str(model_dir), "--served-model-name", MODEL,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "4096",
        "--max-num-seqs", str(requests), "--enforce-eager", "--skip-tokenizer-init",
        "--weight-transfer-config", json.dumps({"backend": "weightcast"}),
    ]  # fmt: skip
    with (scratch / "vllm.log").open("w+b") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)  # noqa: S603 - a bench
        try:
            _wait_ready(process, port, log)
            yield Serving(process.pid, port)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    deadline = Deadline.after(START_S)
    while process.poll() is None:
        deadline.check("starting vllm serve")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        except OSError:
            time.sleep(0.2)
        finally:
            connection.close()
    log.seek(0)
    raise ReplicaFailed(f"vllm serve ended with {process.returncode}:\n{log.read()[-4000:].decode(errors='replace')}")


def wanted() -> dict[str, object]:
    """What a stream of tokens asks for."""
    return {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": _TOKENS, "temperature": 0, "detokenize": False}
