"""What all requests share."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from weightcast.control.engine import Engine
from weightcast.control.in_flight import InFlight
from weightcast.control.metrics import Metrics
from weightcast.control.plan import Endpoint, Plan
from weightcast.control.planner import Planner
from weightcast.control.problems import Problems
from weightcast.control.settings import ServerSettings
from weightcast.control.tokenizer import Tokenizer

LARGE_BODY = 64 << 10  # bytes; to read and tokenize more at once would hold up everybody else


@dataclass(frozen=True)
class Service:
    """An engine, its tokenizer and how requests are taken. `created` is when the server was started."""

    engine: Engine
    tokenizer: Tokenizer
    settings: ServerSettings
    metrics: Metrics = field(default_factory=Metrics)
    in_flight: InFlight = field(default_factory=InFlight)
    created: int = field(default_factory=lambda: int(time.time()))

    async def plan(self, endpoint: Endpoint, body: bytes, problems: Problems) -> Plan:
        """What the body asks for. Raises `NotReady` before the engine's first start, else what `Planner` raises."""
        planner = Planner(
            model_name=self.settings.model_name,
            tokenizer=self.tokenizer,
            limits=self.engine.limits,
            max_choices=self.settings.max_choices,
        )
        if len(body) < LARGE_BODY:
            return planner.plan(endpoint, body, problems)
        return await asyncio.to_thread(planner.plan, endpoint, body, problems)
