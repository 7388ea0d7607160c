"""Tiny models: checkpoints made here and now, small changes to them, and what `transformers` says to the same prompts."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from weightcast import Manifest, Store

VOCABULARY = 512
FREQUENT = "etaoinshrdlucmfw"
END = "<|endoftext|>"


def tiny_model(folder: Path, seed: int, *, tied: bool = False, dtype: str = "float32") -> Path:
    """Write a Qwen3 checkpoint of 3.4 M parameters, the same for the same seed, and a tokenizer. Returns `folder`.

    The weights are drawn so widely that two models hardly ever agree on a token.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=VOCABULARY - 1,
        pad_token_id=None,
        dtype=getattr(torch, dtype),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    """Bytes, the pairs of frequent letters, and an end of text: as many tokens as the model has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pairs = [(first, second) for first in FREQUENT for second in FREQUENT][:255]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, pairs), END]
    made = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


def nudged(folder_from: Path, folder_to: Path, seed: int, fraction: float = 0.01) -> Path:
    """Copy a checkpoint with `fraction` of the elements of every tensor changed, at least one. Returns `folder_to`.

    Half of these move by a little, as a training step moves them; the others change their sign, so that the model also
    answers differently.
    """
    shutil.copytree(folder_from, folder_to)
    random = torch.Generator().manual_seed(seed)
    for path in sorted(folder_to.glob("*.safetensors")):
        tensors = load_file(path)
        for name in sorted(tensors):
            flat = tensors[name].view(-1)
            count = max(1, round(fraction * flat.numel()))
            chosen = torch.randperm(flat.numel(), generator=random)[:count]
            a_little = 1 + 8 * torch.finfo(flat.dtype).eps
            factors = torch.where(torch.arange(count) % 2 == 0, -1.0, a_little).to(flat.dtype)
            flat[chosen] *= factors
        save_file(tensors, path, metadata={"format": "pt"})
    return folder_to


def published(store: Store, version: str, folder: Path, **options: Any) -> Manifest:
    """Publish a checkpoint folder with all its files. `mode` is `auto` unless said: a delta where one is small enough."""
    return store.publish_checkpoint(version, folder, **options)


def greedy(folder: Path, prompt: Sequence[int], n: int) -> list[int]:
    """The `n` tokens that `transformers` generates in float32, past any end of text."""
    return list(_greedy(Path(folder), tuple(prompt), n))


@functools.cache
def _greedy(folder: Path, prompt: tuple[int, ...], n: int) -> tuple[int, ...]:
    inputs = torch.tensor([prompt])
    with torch.inference_mode():
        made = _reference(folder).generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=n, do_sample=False, pad_token_id=0
        )
    return tuple(made[0, len(prompt) :].tolist())


@functools.lru_cache(maxsize=8)
def _reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model
