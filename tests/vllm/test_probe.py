"""What a real server computes, compared with what the publisher's model says."""

import pytest
import torch
from models import published
from transformers import AutoModelForCausalLM

from weightcast import Store
from weightcast.engines.vllm.probe import METADATA_KEY, compare, encode_fingerprint, fingerprint
from weightcast.errors import ProbeMismatch
from weightcast.fleet import vllm_server
from weightcast.fleet.vllm_fleet import VllmFleet

PROMPT = [5, 6, 7, 8, *range(40, 60)]


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def fleet(server, model_a, tmp_path):
    """The shared server, put back to what it served."""
    one = VllmFleet(server.url)
    yield one
    store = Store(tmp_path / "back")
    published(store, "step_1", model_a)
    one.update("step_1", store)


def test_a_server_computes_what_the_publisher_said_and_nothing_else(fleet, model_a, nudged_once, model_b, tmp_path):
    store = Store(tmp_path / "store")
    folders = {"step_1": model_a, "step_2": nudged_once, "step_3": model_b}
    prints = {version: fingerprint(loaded(folder), PROMPT) for version, folder in folders.items()}
    for version, folder in folders.items():
        metadata = {METADATA_KEY: encode_fingerprint(prints[version])}
        store.publish(version, loaded(folder).state_dict(), metadata=metadata)

        assert fleet.update(version, store, probe=True).probed
        (server,) = fleet.servers
        assert compare(prints[version], server.completion(PROMPT)) == []

    for version in ("step_1", "step_2"):  # what another version says is told from it, also after one small step
        with pytest.raises(ProbeMismatch, match="step_3 is committed, but 1 server") as raised:
            fleet.update("step_3", store, probe=prints[version])
        assert len(raised.value.servers[server.url]) > len(PROMPT) // 2
    fleet.update("step_1", store)
    assert compare(prints["step_2"], server.completion(PROMPT))


def test_the_numbers_are_computed_anew_and_do_not_come_from_a_cache(fleet, model_a, model_b, tmp_path):
    store = Store(tmp_path / "store")
    published(store, "step_1", model_a)
    published(store, "step_2", model_b)
    (server,) = fleet.servers
    prompt = list(range(3, 400))
    fleet.update("step_1", store)
    before = server.completion(prompt)
    fleet.update("step_2", store, probe=fingerprint(loaded(model_b), prompt))

    assert server.completion(prompt) != before


def test_a_prompt_that_the_model_cannot_have_is_told(fleet):
    (server,) = fleet.servers
    with pytest.raises(vllm_server.ReplicaFailed, match="vocabulary"):
        server.completion([3, 10**6])
