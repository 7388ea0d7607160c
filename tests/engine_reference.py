"""The models that the engine is asked, their drafts, and what `transformers` says to the same prompts."""

import functools

import torch

from weightcast.engines.embedded.drafts import init_draft
from weightcast.engines.embedded.presets import init_checkpoint

PROMPTS = (
    list(b"Hello, my name is"),
    list(b"x"),
    list(b"The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy cat."),
    list(b"The quick brown fox jumps over the lazy dog. The quick brown fox sleeps."),
    list(range(32, 127)),
)
ANSWER = 40
MODELS = {"tied": {"preset": "tiny", "tied": True}, "untied": {"preset": "tiny", "tied": False}, "moe": {"preset": "moe"}}
DRAFTS = ("no draft", "plain", "mtp")


def write_checkpoints(root):
    """Every model and its drafts."""
    for name, options in MODELS.items():
        init_checkpoint(root / name, **{"seed": 3} | options)
        for kind in DRAFTS[1:]:
            init_draft(root / f"{name}-{kind}", root / name, kind, noise=0.05)


def draft_setting(root, model, draft):
    """What the engine is told about a draft."""
    return {} if draft == "no draft" else {"draft_dir": str(root / f"{model}-{draft}")}


def forget():
    """Let go of the reference models."""
    greedy.cache_clear()
    reference.cache_clear()


@functools.cache
def reference(model_dir):
    """The same checkpoint in `transformers`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def greedy(model_dir, prompt, tokens=ANSWER):
    """What `transformers` answers, one prompt at a time. `prompt` is a tuple."""
    inputs = torch.tensor([prompt])
    made = reference(model_dir).generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return made[0, len(prompt) :].tolist()


def expected(model_dir, prompts=PROMPTS):
    return [greedy(model_dir, tuple(prompt)) for prompt in prompts]
