"""Two ranks are paused, sleep, lose one of them and wake up: requests that were kept go on as if nothing had been."""

import asyncio
import os
import signal

import pytest

from engine_reference import PROMPTS
from weightcast.engines.embedded.messages import Describe, Sampling, Submit
from weightcast.engines.embedded.presets import init_checkpoint

from .engine_runs import ask, running
from .replicas import until

WAIT_S = 60
TOKENS = 60


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "tiny"
    init_checkpoint(directory, "tiny", seed=5)
    return directory


async def begun(replica, name):
    """A request that has made some tokens, and those."""
    answer = replica.submit(Submit(id=name, prompt=tuple(PROMPTS[2]), sampling=Sampling(max_tokens=TOKENS)))
    said = []
    while len(said) < 5:
        said += (await anext(answer)).tokens
    return answer, said


async def rest_of(answer, said):
    return said + [token async for output in answer for token in output.tokens]


async def steps(replica):
    return [rank["steps"] for rank in await replica.command(Describe(), timeout_s=WAIT_S)]


@pytest.mark.slow
def test_what_is_kept_over_a_pause_and_over_sleep_goes_on_where_it_was(model_dir):
    async def scenario():
        async with running(model_dir, ranks=2) as replica:
            wanted = (await ask(replica, PROMPTS[2], max_tokens=TOKENS)).tokens
            for clear_cache in (False, True):
                answer, said = await begun(replica, f"pause-{clear_cache}")
                await replica.pause("keep", clear_cache=clear_cache, timeout_s=WAIT_S)
                late = asyncio.create_task(ask(replica, PROMPTS[0], max_tokens=4))
                stood = await steps(replica)
                await asyncio.sleep(0.2)
                assert await steps(replica) == stood
                assert not late.done()
                await replica.resume(timeout_s=WAIT_S)
                assert await rest_of(answer, said) == wanted
                assert len((await late).tokens) == 4
            for tags in (["kv_cache"], ["weight"], ["weight", "kv_cache"]):
                answer, said = await begun(replica, "+".join(tags))
                await replica.sleep(tags, "keep", timeout_s=WAIT_S)
                held = await replica.look_at_weights()
                assert {rank.nbytes > 0 for rank in held.ranks} == {"weight" not in tags}
                await replica.wake(tags, timeout_s=WAIT_S)
                assert await rest_of(answer, said) == wanted
            await replica.verify(timeout_s=WAIT_S)
            await replica.sleep(["weight"], "abort", timeout_s=WAIT_S)
            os.kill(replica.status.pids[1], signal.SIGKILL)
            await until(lambda: replica.status.restarts == 1, replica)
            assert {rank.nbytes for rank in (await replica.look_at_weights()).ranks} == {0}
            await replica.wake(["weight"], timeout_s=WAIT_S)
            assert (await ask(replica, PROMPTS[2], max_tokens=TOKENS)).tokens == wanted
            assert replica.status.healthy

    asyncio.run(scenario())
