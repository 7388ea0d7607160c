"""What `transformers` says to the prompts that the engine is asked."""

import functools

import torch

PROMPTS = (
    list(b"Hello, my name is"),
    list(b"x"),
    list(b"The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy cat."),
    list(b"The quick brown fox jumps over the lazy dog. The quick brown fox sleeps."),
    list(range(32, 127)),
)
ANSWER = 40


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
