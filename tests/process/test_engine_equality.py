"""Two ranks answer as `transformers` does, token for token: float32, greedy.

In every run, tests/unit/test_engine_answers.py has one rank, and tests/unit/test_engine_model_ranks.py two beside one.
"""

import asyncio
import itertools

import pytest

from engine_reference import DRAFTS, MODELS, PROMPTS, draft_setting, expected, forget, write_checkpoints
from weightcast.engines.embedded.messages import Describe

from .engine_runs import ask, ask_all, running

MATRIX = list(itertools.product(MODELS, (True, False), DRAFTS))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    write_checkpoints(root)
    yield root
    forget()


async def compare(root, model, prefix_cache, draft):
    settings = {"ranks": 2, "prefix_cache": prefix_cache, "max_step_tokens": 64} | draft_setting(root, model, draft)
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


@pytest.mark.slow
@pytest.mark.parametrize(("model", "prefix_cache", "draft"), MATRIX)
def test_answers_are_those_of_transformers_in_the_whole_matrix(checkpoints, model, prefix_cache, draft):
    asyncio.run(compare(checkpoints, model, prefix_cache, draft))
