"""The engine answers as `transformers` does, token for token: float32, greedy, whatever the engine does to be fast."""

import asyncio
import itertools

import pytest

from weightcast.engines.embedded.drafts import init_draft
from weightcast.engines.embedded.messages import Describe
from weightcast.engines.embedded.presets import init_checkpoint

from .engine_runs import PROMPTS, ask, ask_all, expected, reference, running

MODELS = {
    "tied": {"preset": "tiny", "tied": True},
    "untied": {"preset": "tiny", "tied": False},
    "moe": {"preset": "moe"},
}
DRAFTS = ("no draft", "plain", "mtp")
MATRIX = list(itertools.product(MODELS, (1, 2), (True, False), DRAFTS))
SAMPLE = [
    ("tied", 1, True, "no draft"),
    ("tied", 2, False, "mtp"),
    ("untied", 1, False, "plain"),
    ("untied", 2, True, "plain"),
    ("moe", 1, True, "mtp"),
    ("moe", 2, True, "no draft"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Every model and its drafts."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, options in MODELS.items():
        init_checkpoint(root / name, **{"seed": 3} | options)
        for kind in DRAFTS[1:]:
            init_draft(root / f"{name}-{kind}", root / name, kind, noise=0.05)
    yield root
    reference.cache_clear()


async def compare(root, model, ranks, prefix_cache, draft):
    settings = {"ranks": ranks, "prefix_cache": prefix_cache, "max_step_tokens": 64}
    if draft != "no draft":
        settings["draft_dir"] = str(root / f"{model}-{draft}")
    wanted = expected(root / model)
    async with running(root / model, **settings) as replica:
        together = await ask_all(replica, PROMPTS)
        alone = [await ask(replica, prompt) for prompt in PROMPTS]  # with the prefix cache, on blocks of the first round
        stats = (await replica.command(Describe(), timeout_s=30))[0]
    assert [answer.tokens for answer in together] == wanted
    assert [answer.tokens for answer in alone] == wanted
    assert (stats["prefix_hits"] > 0) == prefix_cache
    assert (stats["accepted"] > 0) == (stats["drafted"] > 0) == (draft != "no draft")
    if draft != "no draft":
        assert stats["accepted"] < stats["drafted"], "a draft that is never wrong proves little"


@pytest.mark.parametrize(("model", "ranks", "prefix_cache", "draft"), SAMPLE)
def test_answers_are_those_of_transformers(checkpoints, model, ranks, prefix_cache, draft):
    asyncio.run(compare(checkpoints, model, ranks, prefix_cache, draft))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "ranks", "prefix_cache", "draft"), MATRIX)
def test_answers_are_those_of_transformers_in_the_whole_matrix(checkpoints, model, ranks, prefix_cache, draft):
    asyncio.run(compare(checkpoints, model, ranks, prefix_cache, draft))


@pytest.mark.parametrize("draft", ["plain", "mtp"])
def test_a_draft_changes_no_sampled_token(checkpoints, draft):
    async def sampled(**settings):
        async with running(checkpoints / "tied", **settings) as replica:
            options = {"temperature": 1.3, "top_p": 0.9, "seed": 11, "logprobs": 2}
            return await ask_all(replica, PROMPTS, **options)

    async def both():
        return await sampled(), await sampled(draft_dir=str(checkpoints / f"tied-{draft}"))

    without, with_draft = asyncio.run(both())
    assert [answer.tokens for answer in without] == [answer.tokens for answer in with_draft]
    for left, right in zip(without, with_draft, strict=True):
        assert [one.logprob for one in left.logprobs] == pytest.approx([one.logprob for one in right.logprobs], abs=1e-4)
        assert [[token for token, _ in one.top] for one in left.logprobs] == [
            [token for token, _ in one.top] for one in right.logprobs
        ]


def test_answers_do_not_change_when_requests_are_preempted(checkpoints):
    async def squeezed():
        async with running(checkpoints / "tied", blocks=16, max_length=200) as replica:
            answers = await ask_all(replica, PROMPTS * 2)
            return answers, (await replica.command(Describe(), timeout_s=30))[0]

    answers, stats = asyncio.run(squeezed())
    assert stats["preempted"] > 0
    assert [answer.tokens for answer in answers] == expected(checkpoints / "tied") * 2


def test_log_probabilities_are_those_of_transformers(checkpoints):
    import torch

    async def ask_one():
        async with running(checkpoints / "untied") as replica:
            return await ask(replica, PROMPTS[0], logprobs=3)

    answer = asyncio.run(ask_one())
    with torch.inference_mode():
        whole = torch.tensor([[*PROMPTS[0], *answer.tokens]])
        logits = reference(checkpoints / "untied")(whole).logits[0, len(PROMPTS[0]) - 1 : -1]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    best = logprobs.topk(3)
    for row, (token, detail) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        assert detail.logprob == pytest.approx(logprobs[row, token].item(), abs=1e-4)
        assert [token for token, _ in detail.top] == best.indices[row].tolist()
        assert [value for _, value in detail.top] == pytest.approx(best.values[row].tolist(), abs=1e-4)
