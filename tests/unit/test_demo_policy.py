"""The policy of the demo computes what `transformers` computes, and its parameters are the tensors of its checkpoint."""

import pytest
import torch

from weightcast.demo.policy import Policy
from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.errors import UnsupportedModel
from weightcast.store.checkpoint import Checkpoint


@pytest.fixture(autouse=True)
def one_thread():
    """Several would wait for each other wherever other tests want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model_dir(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("policy") / "model"
    init_checkpoint(directory, "tiny", seed=5, tied=request.param)
    return directory


def test_its_logits_are_those_of_transformers(model_dir):
    from transformers import AutoModelForCausalLM

    known = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokens = torch.randint(0, 256, (3, 29), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(Policy.load(model_dir)(tokens), known(tokens).logits, atol=2e-5, rtol=2e-5)


def test_logprobs_are_of_each_token_given_those_before_it(model_dir):
    policy = Policy.load(model_dir)
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = policy.logprobs(tokens, start=4)
        assert found.shape == (2, 5)
        for row in range(2):
            for place in range(4, 9):
                scores = torch.log_softmax(policy(tokens[row : row + 1, :place])[0, -1], dim=0)
                torch.testing.assert_close(found[row, place - 4], scores[tokens[row, place]], atol=1e-5, rtol=1e-5)


def test_what_is_published_is_the_checkpoint_in_bf16_and_every_parameter_learns(model_dir):
    policy = Policy.load(model_dir)
    stored = Checkpoint(model_dir).specs
    published = policy.rounded()
    assert {name: tuple(tensor.shape) for name, tensor in published.items()} == {
        name: spec.shape for name, spec in stored.items()
    }
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    policy.logprobs(torch.arange(24).view(2, 12), start=3).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in policy.parameters())
    with torch.no_grad():
        next(policy.parameters()).zero_()
    assert all(tensor.any() for tensor in published.values()), "what was published changed with the policy"


def test_a_model_with_experts_is_refused(tmp_path):
    init_checkpoint(tmp_path / "moe", "moe")
    with pytest.raises(UnsupportedModel):
        Policy.load(tmp_path / "moe")
