"""GRPO: the policy gradient of groups of answers, each compared with the others to the same prompt.

The master weights are float32 and AdamW moves them; what is published is their BF16 rounding, which is what the engine
computes with. So the engine holds exactly the bytes that the trainer published, and a step that is too small to move a
weight to its next BF16 value changes nothing there: that is what makes deltas small. The gradient is taken at the float32
weights; the ratio to the engine's log-probabilities, which is clipped, makes up for the rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightcast.demo.policy import Policy

LEARNING_RATE = 2e-3
BETAS = (0.9, 0.95)
# Far above the usual 1e-8: a weight with a small gradient then takes a small step, and not one as large as all others. The
# same is learned with fewer weights that reach another BF16 value.
EPSILON = 1e-2
CLIP = 0.2
GRADIENT_NORM = 1.0
_SMALL = 1e-4  # a group whose rewards are all the same teaches nothing, and is not divided by zero


@dataclass(frozen=True)
class Sampled:
    """The answers to one step's prompts, in groups of the same size. All prompts and all answers are of the same length.

    `tokens` are prompt and answer, (answers, tokens); `start` is where the answers begin; `logprobs` are those that the
    engine told, (answers, tokens − start); `rewards` are (prompts, answers to each).
    """

    tokens: torch.Tensor
    start: int
    logprobs: torch.Tensor
    rewards: torch.Tensor


@dataclass(frozen=True)
class Learned:
    """What one step did. `gap` is by how much the trainer's log-probabilities differ from the engine's, on average."""

    loss: float
    gap: float


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """How much better each answer is than its group, in standard deviations of the group; one row per group."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, correction=0, keepdim=True) + _SMALL)


def clipped_loss(new: torch.Tensor, old: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    """The clipped surrogate over all sampled tokens; `gains` has one number per answer."""
    ratio, gain = torch.exp(new - old), gains.unsqueeze(1)
    return -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()


class Trainer:
    """The policy and its optimizer."""

    def __init__(self, policy: Policy, *, learning_rate: float = LEARNING_RATE) -> None:
        self.policy = policy
        self._optimizer = torch.optim.AdamW(
            policy.parameters(), lr=learning_rate, betas=BETAS, eps=EPSILON, weight_decay=0.0
        )

    def step(self, sampled: Sampled) -> Learned:
        """One step up the gradient. The answers were made by the engine, so its log-probabilities are the old ones."""
        gains = advantages(sampled.rewards).flatten()
        new = self.policy.logprobs(sampled.tokens, sampled.start)
        loss = clipped_loss(new, sampled.logprobs, gains)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), GRADIENT_NORM)
        self._optimizer.step()
        return Learned(loss.item(), (new.detach() - sampled.logprobs).abs().mean().item())
