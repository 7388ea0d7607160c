"""What each version would have said: the model written down plainly, without ranks, caches or kernels."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from .update_load_clients import Answer

TIE = 1e-4  # between the two best logits: sums in another order may decide it
LOGPROB_TOLERANCE = 2e-3
_BATCH_TOKENS = 2048
_COMPARED_BEFORE = 4  # every fourth span is enough
_SHOWN = 5


class PlainModel:
    """Qwen3 in float32, from tensors by their names."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
        self._config = config
        self._tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in tensors.items()}

    def _get(self, name: str) -> torch.Tensor:
        return self._tensors[f"{name}.weight"]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]) * self._get(name)

    def _heads(self, layer: str, kind: str, x: torch.Tensor) -> torch.Tensor:
        """Shape (sequences, heads, tokens, head size)."""
        made = functional.linear(x, self._get(f"{layer}.self_attn.{kind}_proj"))
        return made.unflatten(-1, (-1, self._config["head_dim"])).transpose(1, 2)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        half = self._config["head_dim"] // 2
        speeds = self._config["rope_theta"] ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.arange(x.shape[2], dtype=torch.float32)[:, None] * speeds
        sine, cosine, first, second = angles.sin(), angles.cos(), x[..., :half], x[..., half:]
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)

    def _attention(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        queries = self._turned(self._norm(f"{layer}.self_attn.q_norm", self._heads(layer, "q", x)))
        keys = self._turned(self._norm(f"{layer}.self_attn.k_norm", self._heads(layer, "k", x)))
        values, share = self._heads(layer, "v", x), queries.shape[1] // keys.shape[1]
        seen = functional.scaled_dot_product_attention(
            queries, keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1), is_causal=True
        )
        return functional.linear(seen.transpose(1, 2).flatten(2), self._get(f"{layer}.self_attn.o_proj"))

    def _mlp(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = (functional.linear(x, self._get(f"{layer}.mlp.{name}_proj")) for name in ("gate", "up"))
        return functional.linear(functional.silu(gate) * up, self._get(f"{layer}.mlp.down_proj"))

    @torch.inference_mode()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Behind every token, shape (sequences, tokens, vocabulary). What stands behind a token plays no part."""
        embedding = self._get("model.embed_tokens")
        x = embedding[tokens]
        for index in range(self._config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            x = x + self._attention(layer, self._norm(f"{layer}.input_layernorm", x))
            x = x + self._mlp(layer, self._norm(f"{layer}.post_attention_layernorm", x))
        return functional.linear(self._norm("model.norm", x), embedding)


@dataclass
class Findings:
    """What the comparison showed. `unlike_before` counts tokens that the version before would not have chosen, out of
    `compared_before`; `unlike_spans` counts long spans with at least one such token, out of `long_spans`.
    """

    tokens: int = 0
    ties: int = 0
    logprobs: int = 0
    wrong_count: int = 0
    wrong: list[str] = field(default_factory=list)
    compared_before: int = 0
    unlike_before: int = 0
    long_spans: int = 0
    unlike_spans: int = 0

    def is_wrong(self, text: str) -> None:
        self.wrong_count += 1
        if len(self.wrong) < _SHOWN:
            self.wrong.append(text)


@dataclass(frozen=True)
class _Span:
    """Tokens `start` to `end` of an answer, made by commit `number`."""

    answer: Answer
    start: int
    end: int
    number: int

    @property
    def rows(self) -> slice:
        """Where the logits stand that these tokens were chosen by."""
        before = len(self.answer.prompt) - 1
        return slice(before + self.start, before + self.end)

    @property
    def text(self) -> list[int]:
        """The prompt and the answer, up to the last token that is looked at."""
        return self.answer.prompt + self.answer.tokens[: self.end]


def compare(
    config: Mapping[str, Any],
    states: Sequence[Mapping[str, np.ndarray]],
    answers: Sequence[Answer],
    numbers: Mapping[str, int],
) -> Findings:
    """Every token of every answer with what the version named for it chooses behind all tokens before it.

    `numbers` gives the commit of each version. The same is asked of the version before, of some, to see whether it matters.
    """
    spans: dict[int, list[_Span]] = defaultdict(list)
    for answer in answers:
        for given in answer.spans:
            number = numbers[given["version"]]
            spans[number].append(_Span(answer, given["start"], given["end"], number))
    findings = Findings()
    for number in sorted(spans):
        model = PlainModel(config, states[number])
        for span, logits in _logits(model, spans[number]):
            _check(findings, span, logits)
        if number:
            model = PlainModel(config, states[number - 1])
            for span, logits in _logits(model, spans[number][::_COMPARED_BEFORE]):
                _compare_before(findings, span, logits)
    return findings


def _logits(model: PlainModel, spans: Sequence[_Span]) -> Iterator[tuple[_Span, torch.Tensor]]:
    """The logits that the tokens of each span must have been chosen by. Sequences of like length go together."""
    ordered = sorted(spans, key=lambda span: len(span.text))
    while ordered:
        longest = len(ordered[-1].text)
        count = max(1, _BATCH_TOKENS // longest)
        batch, ordered = ordered[-count:], ordered[:-count]
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, span in zip(tokens, batch, strict=True):
            row[: len(span.text)] = torch.tensor(span.text)
        for logits, span in zip(model.logits(tokens), batch, strict=True):
            yield span, logits[span.rows]


def _check(findings: Findings, span: _Span, logits: torch.Tensor) -> None:
    answer = span.answer
    chosen = torch.tensor(answer.tokens[span.start : span.end])
    best = logits.topk(2).values
    ties = best[:, 0] - best[:, 1] <= TIE
    wrong = logits.gather(1, chosen[:, None])[:, 0] < best[:, 0] - TIE
    findings.tokens += len(chosen)
    findings.ties += int(ties.sum())
    for place in wrong.nonzero()[:, 0].tolist():
        wanted = int(logits[place].argmax())
        findings.is_wrong(
            f"token {span.start + place} of {len(answer.tokens)} behind a prompt of {len(answer.prompt)} is "
            f"{int(chosen[place])}, and commit {span.number}, which is named for tokens {span.start} to {span.end}, "
            f"chooses {wanted} (spans: {answer.spans})"
        )
    if answer.logprobs:
        wanted_logprobs = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        given = torch.tensor(answer.logprobs[span.start : span.end])
        findings.logprobs += len(given)
        off = float((given - wanted_logprobs).abs().max())
        if not off <= LOGPROB_TOLERANCE or math.isnan(off):
            findings.is_wrong(f"log-probabilities of commit {span.number} are off by {off} (spans: {answer.spans})")


def _compare_before(findings: Findings, span: _Span, logits: torch.Tensor) -> None:
    unlike = int((logits.argmax(-1) != torch.tensor(span.answer.tokens[span.start : span.end])).sum())
    findings.compared_before += span.end - span.start
    findings.unlike_before += unlike
    if span.end - span.start >= 16:
        findings.long_spans += 1
        findings.unlike_spans += unlike > 0
