"""The one place that reads the environment, NIXL's library apart: UCX takes its settings nowhere else."""

from __future__ import annotations

import os

API_KEY = "WEIGHTCAST_API_KEY"
CONTROL_TOKEN = "WEIGHTCAST_CONTROL_TOKEN"  # noqa: S105 - the name of a variable
ALLOW_SOURCE = "WEIGHTCAST_ALLOW_SOURCE"


def setting(name: str) -> str | None:
    """The value of a variable. One that is empty counts as absent."""
    return os.environ.get(name) or None
