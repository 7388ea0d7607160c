"""Real replicas of the embedded engine."""

import asyncio
import itertools
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from engine_reference import ANSWER
from weightcast.engines.embedded.messages import Sampling, Submit
from weightcast.engines.embedded.replica.replica import Replica
from weightcast.engines.embedded.settings import EngineSettings

_numbers = itertools.count()


@dataclass
class Answered:
    """A whole answer."""

    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    versions: list = field(default_factory=list)
    last: object = None


@asynccontextmanager
async def running(model_dir, **settings):
    """A started replica; all its processes are gone afterwards."""
    small = {"cache_nbytes": 8 << 20, "heartbeat_s": 20.0, "threads": 1}
    replica = Replica(EngineSettings(model_dir=str(model_dir), **small | settings))
    try:
        await replica.start()
        yield replica
    finally:
        await replica.close(drain_s=0)


async def ask(replica, prompt, *, record_routing=False, replay=None, **sampling):
    """One request to its end."""
    how = Sampling(**{"max_tokens": ANSWER} | sampling)
    request = Submit(
        id=f"request-{next(_numbers)}", prompt=tuple(prompt), sampling=how, record_routing=record_routing, replay=replay
    )
    answered = Answered()
    async for output in replica.submit(request):
        answered.tokens += output.tokens
        answered.logprobs += output.logprobs or ()
        answered.versions += [output.version] * len(output.tokens)
        answered.last = output
    return answered


async def ask_all(replica, prompts, **options):
    """All at once."""
    return await asyncio.gather(*(ask(replica, prompt, **options) for prompt in prompts))
