"""The demo's reward and its policy gradient."""

import pytest
import torch

from weightcast.demo.policy import Policy
from weightcast.demo.task import PROMPTS, reward
from weightcast.demo.training import CLIP, Sampled, Trainer, advantages, clipped_loss
from weightcast.engines.embedded.presets import init_checkpoint


@pytest.fixture(autouse=True)
def one_thread():
    """Several would wait for each other wherever other tests want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("text", "tokens", "worth"),
    [
        ("banana", 6, 5.5 / 6),
        ("bnmk", 4, 0.5),
        ("aaaa", 4, 0.125),
        ("B4 N!", 5, 0.0),
        ("ba", 4, 1.5 / 4),  # two tokens that are no text
        ("a b", 3, 1.0 / 3),  # a space between them: they do not alternate
        ("", 4, 0.0),
        ("é\ufffd", 4, 0.0),
    ],
)
def test_the_reward_is_the_share_that_can_be_pronounced(text, tokens, worth):
    assert reward(text, tokens) == pytest.approx(worth)


def test_prompts_are_of_one_length_so_that_groups_make_one_batch():
    assert len({len(prompt.encode()) for prompt in PROMPTS}) == 1
    assert len(set(PROMPTS)) == len(PROMPTS)


def test_an_advantage_is_relative_to_the_group_alone():
    found = advantages(torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [10.0, 10.2, 10.0, 10.2]]))
    torch.testing.assert_close(found[0], torch.tensor([-1.0, 1.0, -1.0, 1.0]), atol=1e-3, rtol=0)
    assert not found[1].any(), "a group of equals teaches nothing"
    torch.testing.assert_close(found[2], found[0], atol=1e-2, rtol=0)


def test_the_gradient_of_the_loss_is_the_policy_gradient_where_the_ratio_is_one():
    new = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    gains = torch.tensor([2.0, -1.0])
    clipped_loss(new, new.detach(), gains).backward()
    torch.testing.assert_close(new.grad, -gains.unsqueeze(1).expand(2, 2) / 4)


def test_a_ratio_that_has_gone_far_enough_the_right_way_is_pulled_no_further():
    old = torch.zeros(2, 2)
    far = torch.tensor([[2 * CLIP, -2 * CLIP], [2 * CLIP, -2 * CLIP]], requires_grad=True)
    clipped_loss(far, old, torch.tensor([1.0, -1.0])).backward()
    assert far.grad is not None
    assert (far.grad != 0).tolist() == [[False, True], [True, False]]


def test_steps_make_answers_that_are_rewarded_more_likely(tmp_path):
    init_checkpoint(tmp_path / "model", "tiny", seed=1)
    trainer = Trainer(Policy.load(tmp_path / "model"))
    tokens = torch.randint(0, 256, (8, 12), generator=torch.Generator().manual_seed(3))
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    with torch.no_grad():
        before = trainer.policy.logprobs(tokens, 4)
    for _ in range(5):
        learned = trainer.step(Sampled(tokens, 4, before, rewards))
    with torch.no_grad():
        risen = (trainer.policy.logprobs(tokens, 4) - before).mean(dim=1)
    assert risen[[0, 6]].min() > 0 > risen[[1, 2, 3, 4, 5, 7]].mean()
    assert learned.gap > 0
