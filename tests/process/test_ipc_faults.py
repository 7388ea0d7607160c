"""Killing and stopping either side of `ipc://` around every message, of held versions and of streams.

Whatever happens to one side, the other one ends with the right bytes or with an error of ours, soon if its peer is dead and
at the deadline if it is stopped; nothing of the dead stays; and the other one is usable at once.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from .ipc_peers import Peer, peers, receiver, trainer, until
from .ipc_traps import Fault

SAMPLE = 4  # of each list, every day
KILLED_S = 15.0  # the deadline of a receiver whose trainer is killed: nobody may come near it
NOTICED_S = 5.0  # 0.1 to 0.3 s, if the machine is not busy with other things
STOPPED_S = 0.4  # the deadline of a receiver whose trainer is stopped
SLACK_S = 3.0

TAKEN_BY_TRAINER = ["take hello", "take lifeline", "take ask", "take describe", "take open", "take done", "take cancel"]
SENT_BY_TRAINER = [
    "send welcome", "send grant", "send listing", "send description", "send layout", "send descriptor", "send end",
    "send failure",
]  # fmt: skip
SENT_BY_RECEIVER = [
    "send hello", "lifeline", "lifeline answer", "descriptor", "send ask", "send describe", "send open", "send done",
    "send cancel",
]  # fmt: skip
TAKEN_BY_RECEIVER = ["take welcome", "take listing", "take description", "take layout", "take end", "take failure"]

noticed: list[float] = []


def points(mode: str, always: list[str], bucket: str) -> list[tuple[str, int]]:
    return [(point, 0) for point in always] + ([(bucket, 0), (bucket, 3)] if mode == "stream" else [])


def trainer_faults(mode: str, how: str) -> list[Fault]:
    taken = points(mode, TAKEN_BY_TRAINER, "take ack")
    sent = points(mode, SENT_BY_TRAINER, "send ready")
    return [
        *(Fault(point, moment, nth, how) for point, nth in taken for moment in ("before", "after")),
        *(Fault(point, moment, nth, how) for point, nth in sent for moment in ("before", "after", "later")),
        *(Fault("copy", "after", nth, how) for nth in (0, 5)),
    ]


def receiver_faults(mode: str, how: str) -> list[Fault]:
    taken = [(point, 0) for point in TAKEN_BY_RECEIVER] + (
        [("take ready", 0), ("take ready", 3)] if mode == "stream" else []
    )
    sent = [(point, 0) for point in SENT_BY_RECEIVER] + ([("send ack", 0), ("send ack", 3)] if mode == "stream" else [])
    return [
        *(Fault(point, "after", nth, how) for point, nth in taken),
        *(Fault(point, moment, nth, how) for point, nth in sent for moment in ("before", "after", "later")),
    ]


def chosen(faults: list[Fault], form: str, seed: str) -> list[Fault]:
    """All, or a few that lie far apart."""
    start = random.Random(seed).randrange(len(faults))
    return (
        faults
        if form == "full"
        else [faults[(start + number * len(faults) // SAMPLE) % len(faults)] for number in range(SAMPLE)]
    )


def strays(mode: str, fault: Fault) -> bool:
    """Whether the receiver has to ask for what is not there, and to give up a transfer, for this fault to happen."""
    return "failure" in fault.point or "cancel" in fault.point or mode == "held"


def order(mode: str, seed: int, receivers: int) -> tuple[Any, ...]:
    return ("publish", seed) if mode == "held" else ("stream", seed, receivers)


def check_right(answer: tuple[Any, ...], *tolerated: str) -> bool:
    """Whether a receiver got everything. If not it must have said why, with one of these errors."""
    if answer[0] == "did":
        assert answer[1] in ("right", "gave up"), answer
        return answer[1] == "right"
    assert answer[0] in tolerated, answer
    return False


def check_all_right(*reading: Peer) -> None:
    answers = [one.heard() for one in reading]
    assert all(answer[:2] == ("did", "right") for answer in answers), answers


def check_nothing_left(one: Peer, before: dict[str, Any], root: Path) -> None:
    """Of a dead trainer, in the receiver that survived it."""
    until(lambda: one.ask("state")["memories"] == 0)
    until(lambda: one.ask("state")["threads"] == before["threads"])
    until(lambda: not root.exists())


def check_both_ways_work(train: Peer, reading: list[Peer], first_seed: int) -> None:
    """A held version and a stream, from this trainer to all of these receivers."""
    for mode, seed in (("held", first_seed), ("stream", first_seed + 1)):
        for one in reading:
            one.tell(mode, seed, KILLED_S)
        train.ask(*order(mode, seed, len(reading)))
        check_all_right(*reading)


# -- the trainer ---------------------------------------------------------------------------------------------------------


def check_as_before(one: Any, before: dict[str, Any]) -> None:
    """That nothing is left. A thread that was joined is there for another moment, for the kernel."""
    with suppress(AssertionError):
        until(lambda: one.ask("state") == before, timeout=2)
    assert one.ask("state") == before


def kill_trainer(root: Path, mode: str, fault: Fault, make: Any) -> None:
    first, second, reading = make(trainer, fault), make(trainer), make(receiver)
    reading.ask("start", root)
    before = reading.ask("state")
    first.tell("start", root, {})
    until(lambda: root.exists() and (root / "rank-0" / "token").exists())
    reading.tell(mode, 1, KILLED_S, strays(mode, fault))
    first.tell(*order(mode, 1, 1))
    died = first.sprung(10)
    assert died is not None, "it was never reached"
    answer = reading.heard()
    if not check_right(answer, "SourceFailed"):
        noticed.append(answer[-1] - died)
        assert answer[-1] - died < NOTICED_S
    check_nothing_left(reading, before, root)
    second.ask("start", root, {})
    check_both_ways_work(second, [reading], 2)
    reading.ask("close")
    check_as_before(reading, before)
    second.ask("close")
    assert not root.exists()


def stop_trainer(root: Path, mode: str, fault: Fault, make: Any) -> None:
    train, reading = make(trainer, fault), make(receiver)
    reading.ask("start", root)
    before = reading.ask("state")
    train.tell("start", root, {})
    until(lambda: root.exists() and (root / "rank-0" / "token").exists())
    reading.tell(mode, 1, STOPPED_S, strays(mode, fault))
    train.tell(*order(mode, 1, 1))
    stopped = train.sprung(10)
    assert stopped is not None, "it was never reached"
    answer = reading.heard()
    check_right(answer, "DeadlineExceeded")
    assert answer[-1] - stopped < STOPPED_S + SLACK_S
    train.go_on()
    assert train.heard()[0] == "did"  # its start
    if not train.answered(0.2):  # the stream waits for a receiver
        check_right(reading.ask_any(mode, 1, SLACK_S), "SourceFailed", "VersionNotFound", "DeadlineExceeded")
    assert train.heard()[0] in ("did", "ReceiversLost", "DeadlineExceeded")
    check_both_ways_work(train, [reading], 2)
    reading.ask("close")
    check_as_before(reading, before)
    train.ask("close")
    assert not root.exists()


# -- a receiver ----------------------------------------------------------------------------------------------------------


def kill_receiver(root: Path, mode: str, fault: Fault, make: Any) -> None:
    train, first, second, peer = make(trainer), make(receiver, fault), make(receiver), make(receiver)
    train.ask("start", root, {"hold_s": 60, "stall_s": 60})  # nobody may have to wait for the dead
    for one in (first, second, peer):
        one.ask("start", root)
    peer.ask("attach", KILLED_S)
    peer.tell(mode, 1, KILLED_S)
    first.tell(mode, 1, KILLED_S, strays(mode, fault))
    train.tell(*order(mode, 1, 2))
    assert first.sprung(10) is not None, "it was never reached"
    assert first.heard() == ("dead",)
    began = time.monotonic()
    second.tell(mode, 1, KILLED_S)  # takes the place of the dead one if the stream still waits for it
    answer = second.heard()
    assert train.heard()[0] == "did"
    check_all_right(peer)
    check_right(answer, "SourceFailed", "VersionNotFound")
    check_survivors(train, [second, peer], root)
    assert time.monotonic() - began < KILLED_S


def stop_receiver(root: Path, mode: str, fault: Fault, make: Any) -> None:
    train, stopped, second, peer = make(trainer), make(receiver, fault), make(receiver), make(receiver)
    train.ask("start", root, {})
    for one in (stopped, second, peer):
        one.ask("start", root)
    peer.ask("attach", KILLED_S)
    peer.tell(mode, 1, KILLED_S)
    stopped.tell(mode, 1, KILLED_S, strays(mode, fault))
    train.tell(*order(mode, 1, 2))
    assert stopped.sprung(10) is not None, "it was never reached"
    began = time.monotonic()
    second.tell(mode, 1, KILLED_S)
    assert train.heard()[0] == "did"
    assert check_right(peer.heard())
    check_right(second.heard(), "SourceFailed", "VersionNotFound")
    for seed in (2, 3):  # also the slab that the stopped one reads is needed
        for one in (peer, second):
            one.tell("held", seed, KILLED_S)
        train.ask("publish", seed)
        check_all_right(peer, second)
    assert time.monotonic() - began < 3 * SLACK_S
    stopped.go_on()
    check_right(stopped.heard(), "SourceFailed", "VersionNotFound", "DeadlineExceeded")
    check_survivors(train, [stopped, second, peer], root)


def check_survivors(train: Peer, reading: list[Peer], root: Path) -> None:
    check_both_ways_work(train, reading, 10)
    until(lambda: train.ask("receivers") == len(reading))
    for one in reading:
        one.ask("close")
    until(lambda: train.ask("receivers") == 0)
    train.ask("close")
    state = train.ask("state")
    assert (state["memories"], state["threads"]) == (0, 1)
    assert not root.exists()


# -- the matrix ----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["held", "stream"])
@pytest.mark.parametrize(
    ("run", "faults", "how"),
    [
        (kill_trainer, trainer_faults, "kill"),
        (stop_trainer, trainer_faults, "stop"),
        (kill_receiver, receiver_faults, "kill"),
        (stop_receiver, receiver_faults, "stop"),
    ],
    ids=["trainer killed", "trainer stopped", "receiver killed", "receiver stopped"],
)
def test_whatever_happens_to_one_side_the_other_is_right_and_usable_at_once(run, faults, how, mode, form, memory_dir):
    wrong = []
    noticed.clear()
    cases = chosen(faults(mode, how), form, f"{run.__name__} {mode}")
    for number, fault in enumerate(cases):
        with peers() as make:
            try:
                run(memory_dir / str(number), mode, fault, make)
            except AssertionError as error:
                wrong.append(f"{fault}: {error}")
        if any(memory_dir.iterdir()):
            wrong.append(f"{fault}: left {list(memory_dir.iterdir())}")
            break
    if noticed:
        print(f"deaths were noticed after {sorted(noticed)[len(noticed) // 2]:.3f} s (median), {max(noticed):.3f} s (worst)")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)} case(s):", *wrong])
