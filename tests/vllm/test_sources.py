"""A live server takes versions from every source, by the backend and by the methods of its workers."""

from __future__ import annotations

import tempfile
import time

import pytest
from curl import statuses, update, version_of
from models import greedy
from safetensors.torch import load_file
from servers import VllmServer

from weightcast import DepotPublisher, Publisher

PROMPT = [5, 6, 7, 8]
N = 16
EXTENSION = "weightcast.engines.vllm.workers.WeightcastExtension"


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("scheme", ["http", "nixl"])
def test_a_depot_in_the_trainer(server, model_a, model_b, nudged_once, scheme):
    """Full, then what changed: the depot works a delta out for whoever says what it serves."""
    with DepotPublisher("127.0.0.1:0", nixl=scheme == "nixl") as publisher:
        url = publisher.url.replace("http://", f"{scheme}://")
        for number, folder in enumerate([model_b, model_a, nudged_once]):
            publisher.publish(f"step_{number}", weights(folder))
            update(server, f"step_{number}", url)
            assert server.tokens(PROMPT, N) == greedy(folder, PROMPT, N)


def test_a_trainer_on_the_same_host(server, model_a, model_b):
    with tempfile.TemporaryDirectory(prefix="wc-") as folder, Publisher(f"ipc://{folder}/run") as publisher:
        for number, model in enumerate([model_a, model_b]):
            publisher.publish(f"step_{number}", weights(model))
            update(server, f"step_{number}", f"ipc://{folder}/run")
            assert server.tokens(PROMPT, N) == greedy(model, PROMPT, N)


def test_a_checkpoint_is_a_version(server, model_a):
    reply = server.post("/start_weight_update")
    reply = server.post("/update_weights", {"update_info": {"source": f"checkpoint://{model_a}"}})
    assert reply.status_code == 200, reply.text
    assert server.post("/finish_weight_update").status_code == 200
    assert server.tokens(PROMPT, N) == greedy(model_a, PROMPT, N)
    assert version_of(server) == statuses(server)[0]["version"]  # nobody named it: it is called by its digest


def test_a_delta_on_what_the_server_was_started_with(steps, model_a, nudged_once, tmp_path):
    """The base is nowhere but in the folder of the model: that is enough."""
    import shutil

    store = shutil.copytree(steps.removeprefix("file://"), tmp_path / "s")
    shutil.rmtree(store / "versions" / "step_0")
    with VllmServer(model_a, "--worker-extension-cls", EXTENSION, backend=None) as server:
        server.call("weightcast_stage", source=f"file://{store}", version="step_1")
        wait_staged(server)
        assert server.call("weightcast_commit") == ["step_1"]
        assert server.tokens(PROMPT, N) == greedy(nudged_once, PROMPT, N)
        assert version_of(server) == "step_1"
        extension_without_backend(server, steps, nudged_once, model_a)


def extension_without_backend(server, steps, nudged_once, model_a):
    """What a vLLM without weight-transfer backends can do: stage, look, commit; and the prefix cache follows."""
    long = [7 + index * 13 % 400 for index in range(300)]
    assert server.tokens(long, N) == greedy(nudged_once, long, N)
    server.call("weightcast_stage", source=steps, version="step_0")
    wait_staged(server)
    assert server.tokens(long, N) == greedy(nudged_once, long, N)
    assert server.call("weightcast_commit") == ["step_0"]
    assert server.tokens(long, N) == greedy(model_a, long, N)
    nothing = server.post("/collective_rpc", {"method": "weightcast_commit"})
    assert nothing.status_code == 500
    assert server.tokens(PROMPT, N) == greedy(model_a, PROMPT, N)


def wait_staged(server):
    end = time.monotonic() + 60
    while (status := statuses(server)[0])["state"] == "STAGING":
        assert time.monotonic() < end
        time.sleep(0.05)
    assert status["state"] == "STAGED", status
