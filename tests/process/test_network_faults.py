"""Random faults between depots and receivers: peers that die, stop or lie, links and connections that break.

Whatever happens and whenever, an update ends in bounded time, either with every byte of the version that was wanted or with
an error of ours and every byte of the version from before; and the next one is fine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from http_depots import Scripted
from weightcast.bench.fanout_network import Network, lacking
from weightcast.clock import Deadline
from weightcast.errors import SourceFailed
from weightcast.transports.http.client import DepotClient

from .children import TESTS, end
from .fault_draws import KINDS
from .fault_stage import publish_all

SEEDS = {"sampled": 9, "full": 1}
RUNNERS = {"sampled": 1, "full": 2}
TRIALS = {"sampled": 8, "full": 500}
RATE_BITS = 400_000_000  # a few megabytes take a tenth of a second: time enough for something to happen
WITHIN_S = {"sampled": 110, "full": 1500}


@pytest.mark.timeout(1600)
def test_a_fault_at_any_moment_ends_in_the_old_version_or_the_new_one_and_the_next_update_is_fine(form, memory_dir):
    publish_all(memory_dir / "stores")
    found = list(run_all(memory_dir, form))
    trials = [one for one in found if "trial" in one]
    growths = [one for one in found if "growth" in one]
    print(*told(trials, growths), sep="\n")

    wrong = [f"{one['told']}: {problem}" for one in trials for problem in one["problems"]]
    wrong += [f"after {one['after']} trials: {problem}" for one in growths for problem in one["growth"]["problems"]]
    assert not wrong, "\n".join([f"{len(wrong)} problem(s):", *wrong])
    assert len(trials) == TRIALS[form]
    assert {one["kind"] for one in trials} >= set(KINDS) - {"link"}


# -- faults that random ones meet rarely ---------------------------------------------------------------------------------


def test_an_answer_that_is_not_text_is_the_failure_of_a_depot():
    answer = b'HTTP/1.1 200 OK\r\nContent-Length: 44\r\n\r\n{"version":"\xe4a","sequence":1,"root_digest":""}'
    with Scripted(answer) as server, closing(DepotClient(server.url)) as client, pytest.raises(SourceFailed):
        client.newest(deadline=Deadline.after(20))


# -- running -----------------------------------------------------------------------------------------------------------


def run_all(directory: Path, form: str) -> Iterator[dict[str, Any]]:
    """Share the trials out to processes, each with a network of its own, and tell what they told."""
    each, linked = TRIALS[form] // RUNNERS[form], not lacking()
    with ExitStack() as stack:
        runners = []
        for number in range(RUNNERS[form]):
            place = directory / f"runner-{number}"
            place.mkdir()
            network = stack.enter_context(Network(2, rate_bits=RATE_BITS)) if linked else None
            trials = (number * each, (number + 1) * each)
            seed = int(os.environ.get("WEIGHTCAST_FAULT_SEED", SEEDS[form]))
            runners.append((place, _start(stack, directory / "stores", place, (seed, *trials), network)))
        until = time.monotonic() + WITHIN_S[form]
        for place, child in runners:
            try:
                status = child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = "no end"
            lines = (place / "report").read_text().splitlines()
            yield from map(json.loads, lines)
            told = (place / "errors").read_text()[-4000:]
            assert status == 0, f"it ended with {status} after {lines[-1:]}:\n{told}"


def _start(
    stack: ExitStack, stores: Path, place: Path, trials: tuple[int, int, int], network: Network | None
) -> subprocess.Popen[str]:
    words: list[object] = [sys.executable, "-m", "process.fault_trials", stores, place, *trials]
    if network is not None:
        far = " ".join(network.under(1))
        words = [*network.under(0), *words, "--far", far, "--address", network.address(1), "--near", network.address(0)]
    search = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
    report, errors = (stack.enter_context((place / name).open("w")) for name in ("report", "errors"))
    child = subprocess.Popen(
        [str(word) for word in words],
        env={**environ, "UCX_TLS": "tcp"},  # as between hosts; processes of one would copy from each other's memory
        stdin=subprocess.DEVNULL, stdout=report, stderr=errors, text=True, start_new_session=True,
    )  # fmt: skip
    stack.callback(end, child)
    return child


# -- telling -----------------------------------------------------------------------------------------------------------


def told(trials: list[dict[str, Any]], growths: list[dict[str, Any]]) -> Iterator[str]:
    """What happened, in lines."""
    receivers = Counter(one["receiver"] for one in trials)
    yield f"{len(trials)} trials: {', '.join(f'{count} {name}' for name, count in receivers.most_common())}"
    yield f"{'':10} trials struck completed; time from the fault to the error: median, worst; errors"
    for kind in (*KINDS, "all"):
        some = [one for one in trials if kind in (one["kind"], "all")]
        if not some:
            continue
        failed = [one for one in some if any(one["errors"])]
        after = [one["after_s"] for one in failed if one["after_s"] is not None]
        codes = Counter(code for one in failed for code in set(one["errors"]) if code)
        yield (
            f"{kind:10} {len(some):6} {sum(one['struck'] for one in some):6} {len(some) - len(failed):9}  "
            f"{statistics.median(after) if after else 0:6.2f} s {max(after, default=0):6.2f} s  "
            f"{', '.join(f'{count} {code}' for code, count in codes.most_common())}"
        )
    over, following = max(one["over_s"] for one in trials), [one["next_s"] for one in trials]
    yield f"longest time over a deadline: {over:.2f} s"
    yield f"next update: median {statistics.median(following):.2f} s, worst {max(following):.2f} s"
    yield from (f"a depot died by itself: {one['told']}: {one['died']}" for one in trials if one["died"])
    yield from (
        f"after {one['after']} trials of a runner: "
        + ", ".join(f"{count} {name}" for name, count in one["growth"].items() if name != "problems")
        for one in growths
    )
