"""Run by the tests: random faults between depots and receivers, and what became of each update.

    python -m process.fault_trials STORES DIRECTORY SEED FIRST LAST
        [--far WORDS --address HOST --near HOST] [--trust] [--only PATTERN]

Prints one JSON object a line: one for each trial, and now and then one about what has been left behind. Trial number N of a
seed does the same wherever it runs, starting from the version that the one before it has left.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import sys
import time
from pathlib import Path

from weightcast import delta

from .fault_draws import DEADLINE_S, Trial, drawn
from .fault_growth import Growth
from .fault_hosts import Hosts
from .fault_receivers import Outcome, Replica
from .fault_stage import RELAY_STALL_S, Stage, Strike
from .fault_versions import NEWEST

HEALED_S = 30.0  # the deadline of the update after everything is well again: far more than it needs
ACKNOWLEDGE_S = 2.0  # what telling a depot of a version may take after it is served
ALLOWANCE_S = 5.0  # for a machine that does other things too
SETTLE_S = 0.05
LOOK_EVERY = 50
HANGS_S = 100.0
REPORT = os.fdopen(os.dup(sys.stdout.fileno()), "w")  # libraries in C may print to standard output what they like


def run_trial(stage: Stage, trial: Trial) -> dict[str, object]:
    """One fault, what came of it, and the update after it."""
    stage.need(trial)
    replica = stage.anew(trial.receiver) if trial.fresh else stage.replicas[trial.receiver]
    if trial.receiver == "relay" and NEWEST in replica.held:
        replica.update("b5", "copy", stage.source("whole"), HEALED_S)
    trial = trial.aimed(replica.held)
    strike = Strike(stage, trial, far=_far(replica, trial.wanted))
    source = stage.source(trial.receiver, depots=trial.depots, direct=trial.direct)
    if trial.receiver == "relay":
        stage.relay.begin(strike.arm)
    else:
        strike.arm()
    outcomes = replica.update(trial.wanted, trial.mode, source, DEADLINE_S, checksum=stage.checksum)
    ended = time.monotonic()
    strike.undo()
    died = stage.heal()
    problems = [problem for outcome in outcomes for problem in outcome.wrong] + _late(trial, outcomes)
    time.sleep(SETTLE_S)  # for bytes that come late
    problems += [f"later: {problem}" for problem in replica.check() if problem not in problems]
    healed = time.monotonic()
    problems += _next_update(stage, trial, replica, source)
    struck = 0 < strike.struck_s < ended
    return {
        "trial": trial.number,
        "kind": trial.kind,
        "receiver": trial.receiver,
        "told": trial.told(),
        "struck": struck,
        "errors": [outcome.error for outcome in outcomes],
        "modes": [outcome.mode for outcome in outcomes],
        "seconds": max(outcome.seconds for outcome in outcomes),
        "after_s": ended - strike.struck_s if struck else None,
        "over_s": max(outcome.seconds for outcome in outcomes) - _time(trial),
        "next_s": time.monotonic() - healed,
        "died": died,
        "problems": problems,
        "messages": [outcome.message for outcome in outcomes if outcome.error],
    }


def _far(replica: Replica, wanted: str) -> bool:
    """Whether the way to a version is a full one."""
    return not any(version and version[0] == wanted[0] for version in replica.held)


def _time(trial: Trial) -> float:
    """What an update has: going back from a stream in place has as much again, and then the depot is told."""
    return DEADLINE_S * (2 if trial.mode == "inplace" else 1)


def _late(trial: Trial, outcomes: list[Outcome]) -> list[str]:
    limit = _time(trial) + ACKNOWLEDGE_S + ALLOWANCE_S
    return [f"it took {outcome.seconds:.1f} s, over {limit:.1f} s" for outcome in outcomes if outcome.seconds > limit]


def _next_update(stage: Stage, trial: Trial, replica: Replica, source: str) -> list[str]:
    """The update after a fault must be fine, and exact."""
    wanted = trial.following(replica.held)
    if trial.receiver == "relay":
        if not stage.relay.resumed(lied_to=trial.kind in ("corrupt", "replayed") and not trial.at_relay):
            return [f"the relay does not go on: {stage.relay.depot.told()}"]
        wanted = "c6" if NEWEST in replica.held else NEWEST  # what a relay has
        source = source.replace(f"stall_s={RELAY_STALL_S}", f"stall_s={HEALED_S}")
    far, began = _far(replica, wanted), time.monotonic()
    outcomes = replica.update(wanted, trial.next_mode, source, HEALED_S)
    problems = [problem for outcome in outcomes for problem in outcome.wrong]
    problems += [f"it failed: {outcome.error}: {outcome.message}" for outcome in outcomes if outcome.error]
    if not problems:
        problems = replica.check_root()
        stage.note_usual(trial, trial.next_mode, time.monotonic() - began, far=far)
    return [f"the next update, to {wanted} by {trial.next_mode}: {problem}" for problem in problems]


def prepare(stage: Stage, trial: Trial) -> None:
    """Load a replica that has never been loaded, so that what is compared later has all that it needs."""
    stage.need(trial)
    for wanted in ("a1", "b5"):
        for outcome in stage.replicas[trial.receiver].update(wanted, "copy", stage.source(trial.receiver), HEALED_S):
            assert outcome.error is None, outcome


def main() -> None:
    """Parse, run, print."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    parser = argparse.ArgumentParser()
    parser.add_argument("stores", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--far", default="", help="the words before a command that runs on the far host")
    parser.add_argument("--address", default="127.0.0.1", help="of the far host")
    parser.add_argument("--near", default="127.0.0.1", help="the address of this host")
    parser.add_argument("--trust", action="store_true", help="compare no digests: trials must fail then")
    parser.add_argument("--only", default="", help="run those trials only whose description matches this")
    arguments = parser.parse_args()
    hosts = Hosts(tuple(arguments.far.split()), arguments.address, arguments.near)
    with Stage(arguments.stores, arguments.directory, hosts, checksum=not arguments.trust) as stage:
        absent = {"nixl"} - stage.replicas.keys() | (set() if hosts.apart else {"link"})
        trials = [drawn(arguments.seed, number, without=absent) for number in range(arguments.first, arguments.last)]
        trials = [trial for trial in trials if re.search(arguments.only, trial.told())]
        first = drawn(arguments.seed, 0, without=absent)
        loaded = [first.of(kind) for kind in ("whole", "ranks", "nixl") if any(kind == one.receiver for one in trials)]
        for trial in loaded:
            stage.need(trial, wait=False)
        delta.warm_up()  # as a server does; compiling takes longer than an update has
        for trial in loaded:
            prepare(stage, trial)
        stage.quiet()
        growth = Growth(stage.depots, stage.quiet)
        for count, trial in enumerate(trials, 1):
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            tell(run_trial(stage, trial))
            if count % LOOK_EVERY == 0 or count == len(trials):
                tell({"growth": growth.looked(), "after": count})
        faulthandler.cancel_dump_traceback_later()


def tell(found: dict[str, object]) -> None:
    REPORT.write(json.dumps(found) + "\n")
    REPORT.flush()


if __name__ == "__main__":
    main()
