"""Hosts as network namespaces, for tests of links that are slow or cut. Skipped where there can be none."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from weightcast.bench.fanout_network import Network, lacking

_why_not = functools.cache(lacking)


def skip_without_namespaces() -> None:
    """Skip the test that calls this, with the reason, if this machine cannot have them."""
    if _why_not():
        pytest.skip(_why_not())


@contextmanager
def network(hosts: int, *, rate_bits: int) -> Iterator[Network]:
    """So many hosts that see each other; all is removed at the end. `under(index)` makes a command run on a host."""
    skip_without_namespaces()
    with Network(hosts, rate_bits=rate_bits) as made:
        yield made


def namespaces_of(pid: int) -> list[str]:
    """Those that a process has made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"weightcast-{pid}-")]
