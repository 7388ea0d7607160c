"""What the pages show of vLLM is run as it stands, against two servers: one with the backend, one with our worker extension.

Servers take most of a minute to start, so a `vllm serve` in a block is not started again: its options must be those of the
server that the other lines of the block are sent to.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import greedy, published
from servers import VllmServer
from transformers import AutoModelForCausalLM

from documents import Block, all_blocks, calls_of, command_lines, page_id
from weightcast import DepotPublisher, Store, VllmFleet

PROMPT = [5, 6, 7, 8]
RUN_S = 300
EXTENSION = ("--worker-extension-cls", "weightcast.engines.vllm.workers.WeightcastExtension")
BACKEND = ("--weight-transfer-config", '{"backend": "weightcast"}')


def marked(language: str) -> list[Block]:
    return [block for block in all_blocks(language) if block.marker == "vllm"]


@pytest.fixture(scope="module")
def extended(model_a):
    with VllmServer(model_a, *EXTENSION, backend=None) as server:
        yield server


@pytest.fixture
def world(tmp_path, shared_server, extended, model_a, nudged_once):
    """A place for /mnt and ./checkpoint. Afterwards both servers serve `model_a` again."""
    (tmp_path / "mnt").mkdir()
    (tmp_path / "checkpoint").symlink_to(nudged_once)
    yield tmp_path
    store = Store(tmp_path / "back")
    published(store, "step_0", model_a)
    VllmFleet([shared_server.url, extended.url]).update("step_0", store)


@pytest.mark.parametrize("page", sorted({block.page for block in marked("sh")}), ids=page_id)
def test_the_shell_blocks_run(page, world, shared_server, extended, nudged_once):
    server = shared_server
    for block in [one for one in marked("sh") if one.page == page]:
        script = ["set -euo pipefail", 'curl() { command curl -sS --fail-with-body "$@"; }']
        for command in command_lines(block.text):
            started = list(calls_of(command, "vllm"))
            if started:
                (arguments,) = started
                server = {BACKEND: shared_server, EXTENSION: extended}[tuple(arguments[2:])]
            else:
                script.append(command)
        text = "\n".join(script).replace("/mnt/", f"{world}/mnt/").replace("http://127.0.0.1:8000", server.url)
        text = text.replace("127.0.0.1:8000", server.url.removeprefix("http://"))
        reads = "/mnt/weights" in text and "publish" not in text and "export" not in text
        if reads and not (world / "mnt" / "weights").exists():
            published(Store(world / "mnt" / "weights"), "step_7", nudged_once)
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        done = subprocess.run(
            ["bash", "-c", text], check=False, cwd=world, env={"PATH": path, "HOME": str(world)}, timeout=RUN_S, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}:\n{done.stdout}\nThe server said:\n{server.said()}"
    assert server.tokens(PROMPT, 16) == greedy(nudged_once, PROMPT, 16)
    assert server.get("/weight_info").json() == {"weight_version": "step_7"}


def test_the_python_blocks_run(world, shared_server, extended, nudged_once):
    model = AutoModelForCausalLM.from_pretrained(nudged_once, dtype=torch.float32)
    names = {"model": model, "prompt_ids": PROMPT, "train": nudge_a_little}
    for block in marked("python"):
        with DepotPublisher("127.0.0.1:0") as publisher:
            publisher.publish("step_7", model.state_dict())
            own = f"127.0.0.1:{free_port()}" if "listen=" in block.text else publisher.url.removeprefix("http://")
            text = re.sub(r"(trainer|0\.0\.0\.0):8300", own, block.text)
            text = text.replace("http://gen-0:8000", shared_server.url).replace("http://gen-1:8000", extended.url)
            text, loops = re.subn(r"range\(\d+\)", "range(2)", text)
            names["source"] = publisher.url
            exec(compile(text, str(block), "exec"), names)
            model.save_pretrained(world / f"{block.line}")
            for server in [shared_server] if loops else [shared_server, extended]:
                assert server.tokens(PROMPT, 16) == greedy(world / f"{block.line}", PROMPT, 16), block
                expected = names["trainer"].version if loops else "step_7"
                assert server.get("/weight_info").json() == {"weight_version": expected}
            if loops:
                names["trainer"].shutdown()


def nudge_a_little(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::97] *= -1


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
