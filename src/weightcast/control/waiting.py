"""Waiting for an engine, but not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from weightcast.errors import DeadlineExceeded

Result = TypeVar("Result")


async def within(seconds: float, what: str, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`. Giving it up raises `DeadlineExceeded`, naming `what`."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(what, seconds) from None
