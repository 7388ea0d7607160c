"""Two ranks answer as `transformers` does, token for token: float32, greedy. tests/unit/test_engine_answers.py has one."""

import asyncio
import itertools

import pytest

from engine_reference import PROMPTS, expected, greedy, reference
from weightcast.engines.embedded.drafts import init_draft
from weightcast.engines.embedded.messages import Describe
from weightcast.engines.embedded.presets import init_checkpoint

from .engine_runs import ask, ask_all, running

MODELS = {
    "tied": {"preset": "tiny", "tied": True},
    "untied": {"preset": "tiny", "tied": False},
    "moe": {"preset": "moe"},
}
DRAFTS = ("no draft", "plain", "mtp")
MATRIX = list(itertools.product(MODELS, (True, False), DRAFTS))
SAMPLE = [("tied", False, "mtp"), ("untied", True, "plain"), ("moe", True, "no draft")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Every model and its drafts."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, options in MODELS.items():
        init_checkpoint(root / name, **{"seed": 3} | options)
        for kind in DRAFTS[1:]:
            init_draft(root / f"{name}-{kind}", root / name, kind, noise=0.05)
    yield root
    greedy.cache_clear()
    reference.cache_clear()


async def compare(root, model, prefix_cache, draft):
    settings = {"ranks": 2, "prefix_cache": prefix_cache, "max_step_tokens": 64}
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


@pytest.mark.parametrize(("model", "prefix_cache", "draft"), SAMPLE)
def test_answers_are_those_of_transformers(checkpoints, model, prefix_cache, draft):
    asyncio.run(compare(checkpoints, model, prefix_cache, draft))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "prefix_cache", "draft"), MATRIX)
def test_answers_are_those_of_transformers_in_the_whole_matrix(checkpoints, model, prefix_cache, draft):
    asyncio.run(compare(checkpoints, model, prefix_cache, draft))
