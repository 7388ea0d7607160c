"""Does an engine compute what a version must compute? A prompt, and the log-probabilities that its weights give to it.

The publisher takes a `Fingerprint` of its own model. It may travel in the metadata of the version (`METADATA_KEY`). After an
update the engine is asked for the same numbers, and they are compared.

What it cannot see: two versions whose numbers differ by less than the tolerance look the same, and so do differences in
weights that the prompt does not use (an expert that no token of it is sent to, the embedding of a token that is not in it).
It tells that an engine runs on other weights; that every byte is right is told by digests, before a commit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from weightcast.errors import InvalidInput, NotFound
from weightcast.wire.decoding import decode

if TYPE_CHECKING:
    import torch

METADATA_KEY = "probe"
TOP = 5
MAX_TOP = 10  # an engine is asked for twice as many, and vLLM tells no more than 20 unless it is set otherwise
# About twice what vLLM and transformers differed by at most where logits were large (bfloat16), and fifty times (float32).
# Models that have nothing in common differ by ten and more.
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a model says about a prompt.

    `logprobs` are those of the prompt's tokens from the second on, each after all before it; `top` are the likeliest tokens
    that could come next, with theirs. `dtype` is what they were computed in. An engine agrees if none of its numbers is
    further away than `tolerance`.
    """

    prompt: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[int, float], ...]
    dtype: str
    tolerance: float

    def __post_init__(self) -> None:
        problems = []
        if len(self.prompt) < 2 or any(token < 0 for token in self.prompt):
            problems.append("the prompt must be two tokens or more, none of them negative")
        if len(self.logprobs) != len(self.prompt) - 1:
            problems.append(
                f"{len(self.prompt)} tokens need {len(self.prompt) - 1} log-probabilities, not {len(self.logprobs)}"
            )
        if not 1 <= len(self.top) <= MAX_TOP:
            problems.append(f"the likeliest next tokens must be 1 to {MAX_TOP}, not {len(self.top)}")
        if not all(math.isfinite(value) for value in (*self.logprobs, *(value for _, value in self.top))):
            problems.append("some of its log-probabilities are not numbers: is the model broken?")
        if not 0 < self.tolerance < math.inf:
            problems.append(f"the tolerance must be above zero, not {self.tolerance}")
        if problems:
            raise InvalidInput(f"this cannot be a fingerprint: {'; '.join(problems)}.")


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine said about a prompt: the same numbers, and those of as many next tokens as it would tell."""

    logprobs: tuple[float, ...]
    top: Mapping[int, float]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One number that is too far away. `found` is None where the engine told none, `at_most` then bounds what it can be."""

    position: int
    token: int
    expected: float
    found: float | None
    at_most: float | None = None

    def __str__(self) -> str:
        found = "none" if self.found is None else f"{self.found:.4f}"
        if self.found is None and self.at_most is not None:
            found = f"at most {self.at_most:.4f}"
        return f"position {self.position}, token {self.token}: expected {self.expected:.4f}, found {found}"


def fingerprint(
    module: torch.nn.Module, prompt_ids: Sequence[int], top: int = TOP, *, tolerance: float | None = None
) -> Fingerprint:
    """Run a model on a prompt and keep what it says. Called by whoever publishes its weights, when they are final.

    The module is called as `module(ids)` and gives logits, by themselves or as `.logits`, as models of transformers do. It
    computes in its own dtype; the default tolerance is that dtype's, so pass one if engines serve it in a coarser one. All
    ranks of a sharded model must call this together. Its mode (training or not) is as before afterwards.
    """
    import torch  # noqa: PLC0415 - comparing needs none

    if not 1 <= top <= MAX_TOP:
        raise InvalidInput(f"top must be 1 to {MAX_TOP}, not {top}.")
    prompt = tuple(int(token) for token in prompt_ids)
    parameter = next(module.parameters(), None)
    if parameter is None or len(prompt) < 2:
        raise InvalidInput("a fingerprint needs a module with parameters, and a prompt of at least two tokens.")
    training = module.training
    module.eval()
    try:
        with torch.inference_mode():
            said = module(torch.tensor([prompt], device=parameter.device))
            logits = getattr(said, "logits", said)[0]
            table = torch.log_softmax(logits.float(), dim=-1).cpu()
    finally:
        module.train(training)
    if table.ndim != 2 or table.shape[0] != len(prompt) or table.shape[1] <= max(prompt):
        raise InvalidInput(
            f"the module must give logits for {len(prompt)} tokens of its vocabulary, not {tuple(table.shape)}."
        )
    best = torch.topk(table[-1], min(top, table.shape[1]))
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Fingerprint(
        prompt=prompt,
        logprobs=tuple(round(float(table[at, token]), 6) for at, token in enumerate(prompt[1:])),
        top=tuple((int(token), round(float(value), 6)) for value, token in zip(best.values, best.indices, strict=True)),
        dtype=dtype,
        tolerance=TOLERANCES.get(dtype, TOLERANCES["bfloat16"]) if tolerance is None else tolerance,
    )


def encode_fingerprint(fingerprint: Fingerprint) -> str:
    """A text that can stand in the metadata of a version: `publish(..., metadata={METADATA_KEY: text})`."""
    return msgspec.json.encode(fingerprint).decode()


def decode_fingerprint(text: str) -> Fingerprint:
    """The fingerprint that such a text tells. Raises `InvalidInput` if it tells none."""
    try:
        return decode(text.encode(), Fingerprint)
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise InvalidInput(f"the text is not a fingerprint: {error}.") from error


def fingerprint_of(version: str, metadata: Mapping[str, str]) -> Fingerprint:
    """The fingerprint in the metadata of a version. Raises `NotFound` if there is none."""
    text = metadata.get(METADATA_KEY)
    if text is None:
        raise NotFound(
            f"version {version} has no fingerprint in its metadata to compare with: publish it with "
            f"metadata={{{METADATA_KEY!r}: encode_fingerprint(…)}}, or pass the fingerprint itself."
        )
    return decode_fingerprint(text)


def compare(expected: Fingerprint, observed: Observed) -> list[Difference]:
    """All numbers that are further away than the tolerance; none if the engine computes what it must.

    A next token that the engine does not list has no more than the least likely one that it does.
    """
    tolerance, found = expected.tolerance, []
    for at, (token, value) in enumerate(zip(expected.prompt[1:], expected.logprobs, strict=True)):
        seen = observed.logprobs[at] if at < len(observed.logprobs) else None
        if seen is None or not abs(seen - value) <= tolerance:  # also if it is not a number
            found.append(Difference(position=at + 1, token=token, expected=value, found=seen))
    least = min(observed.top.values(), default=None)
    for token, value in expected.top:
        seen = observed.top.get(token)
        if seen is None and least is not None and value - least <= tolerance:
            continue  # it may lie just below what is listed
        if seen is None or not abs(seen - value) <= tolerance:
            at_most = least if seen is None else None
            found.append(Difference(position=len(expected.prompt), token=token, expected=value, found=seen, at_most=at_most))
    return found
