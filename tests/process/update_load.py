"""A server that is asked without pause and updated again and again: what it answered, and what it took."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from .server_process import ServerProcess, server_process
from .update_load_clients import STREAMS, TIMEOUT_S, Answer, Course, Load
from .update_load_versions import DONE_AS, Planned, Trainer

_LEAST_TOKENS, _MOST_TOKENS = 1, 120  # between two updates, over all streams
_KV_CACHE = "3MiB"  # little: sequences are preempted, and cached prefixes are given away


@dataclass(frozen=True)
class Sample:
    """What all processes of the server have, right after an update."""

    rss_nbytes: int
    threads: int
    files: int
    shared_memory: int

    @classmethod
    def of(cls, server: ServerProcess) -> Sample:
        processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
        return cls(
            sum(process.memory_info().rss for process in processes),
            sum(process.num_threads() for process in processes),
            sum(process.num_fds() for process in processes),
            len(server.shared_memory()),
        )


@dataclass
class Record:
    """Everything that came out of a run."""

    planned: Sequence[Planned]
    start_version: str = ""
    answers: list[Answer] = field(default_factory=list)
    asked: int = 0
    cached_tokens: int = 0
    results: list[list[dict[str, Any]]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    stats: list[dict[str, Any]] = field(default_factory=list)
    metrics: str = ""
    seconds: float = 0.0

    @property
    def numbers(self) -> dict[str, int]:
        """The commits, by their versions."""
        return {self.start_version: 0} | {one.version: one.number for one in self.planned}


def run(trainer: Trainer, planned: Sequence[Planned], seed: int) -> Record:
    """Serve the trainer's model with two ranks, do the updates under load, and end it politely."""
    trainer.publish(planned[0])  # what it needs is compiled now, and not beside the server
    arguments = ("--ranks", 2, "--source", f"file://{trainer.store.path}", "--kv-cache", _KV_CACHE, "--heartbeat", 20)
    with server_process(trainer.model_dir, *arguments) as server:
        record = Record(planned, start_version=server.health()["version"])
        began = time.monotonic()
        asyncio.run(_drive(server, trainer, record, seed))
        record.seconds = time.monotonic() - began
        record.stats, record.metrics = server.stats(), httpx.get(f"{server.url}/metrics", timeout=TIMEOUT_S).text
        _check_the_end(server, trainer, planned[-1])
        shared = server.shared_memory()
        assert server.stop() == 0, server.said()
        assert server.left_behind() == []
        assert not any(Path(name).exists() for name in shared)
    return record


async def _drive(server: ServerProcess, trainer: Trainer, record: Record, seed: int) -> None:
    course = Course()
    load = Load(server.url, course, seed)
    async with asyncio.TaskGroup() as group:
        for number in range(STREAMS):
            group.create_task(load.stream(number))
        published: asyncio.Queue[Planned] = asyncio.Queue(maxsize=1)
        published.put_nowait(record.planned[0])
        group.create_task(_publish_all(trainer, record.planned[1:], published))
        await _update_all(server, published, record, load, course)
        await load.until(load.tokens + STREAMS * 20)  # the last version is asked too
        load.stopping = True
    record.answers, record.asked, record.cached_tokens = load.answers, load.asked, load.cached_tokens


async def _publish_all(trainer: Trainer, planned: Sequence[Planned], published: asyncio.Queue[Planned]) -> None:
    """A little ahead of the server, as trainers are."""
    for one in planned:
        await asyncio.to_thread(trainer.publish, one)
        await published.put(one)


async def _update_all(
    server: ServerProcess, published: asyncio.Queue[Planned], record: Record, load: Load, course: Course
) -> None:
    rng = np.random.default_rng(len(record.planned))
    async with httpx.AsyncClient(base_url=server.url, timeout=2 * TIMEOUT_S) as client:
        for _ in record.planned:
            planned = await published.get()
            await load.until(load.tokens + int(rng.integers(_LEAST_TOKENS, _MOST_TOKENS)))
            course.begun = planned.number
            reply = await client.post("/v1/update_weights", json=planned.body)
            assert reply.status_code == 200, f"{planned}: {reply.status_code} {reply.text}\n{server.said()}"
            course.done = planned.number
            record.results.append(reply.json()["result"])
            record.samples.append(Sample.of(server))


def _check_the_end(server: ServerProcess, trainer: Trainer, last: Planned) -> None:
    """The server holds the last version, whole, and nothing else goes on in it."""
    wanted = trainer.store.manifest(last.version).root_digest
    verified = httpx.post(f"{server.url}/v1/weights/verify", json={}, timeout=TIMEOUT_S)
    assert verified.status_code == 200, verified.text
    weights = httpx.get(f"{server.url}/v1/weights", timeout=TIMEOUT_S).json()["result"]
    assert (weights["version"], weights["root_digest"], weights["state"]) == (last.version, wanted, "READY")
    assert [rank["version"] for rank in weights["ranks"]] == [last.version] * 2
    health = server.health()
    assert (health["restarts"], health["paused"]) == (0, False)


def check_results(record: Record) -> None:
    """Both ranks did what they were asked for."""
    for planned, results in zip(record.planned, record.results, strict=True):
        done_as = DONE_AS[planned.kind, planned.commit]
        found = [(one["rank"], one["version"], one["mode"]) for one in results]
        assert found == [(rank, planned.version, done_as) for rank in range(2)], planned


def check_counts(record: Record) -> None:
    """The server has seen what the clients have: nothing was lost on the way, nothing is left in it."""
    counted = {"requests": 0, "done": 0, "tokens": 0}
    for name, labels, value in re.findall(r"^weightcast_(\w+_total)(\S*) (\S+)$", record.metrics, re.MULTILINE):
        if name == "requests_total":
            assert 'outcome="ok"' in labels or 'outcome="aborted"' in labels, f"{labels}: {value}"
            counted["requests"] += int(float(value))
        elif name == "weight_updates_total":
            assert 'outcome="done"' in labels, f"{labels}: {value}"
            counted["done"] = int(float(value))
        elif name == "completion_tokens_total":
            counted["tokens"] = int(float(value))
    tokens = sum(len(answer.tokens) for answer in record.answers)
    assert counted == {"requests": record.asked, "done": len(record.planned), "tokens": tokens}
    assert record.stats[0]["running"] == record.stats[0]["waiting"] == 0


def check_answers(record: Record) -> None:
    """Every request was answered whole, or ended by an update that may; all by versions that were there at that time."""
    numbers = record.numbers
    ends = {one.number: one for one in record.planned if one.pause != "keep"}
    for answer in record.answers:
        commits = [numbers[span["version"]] for span in answer.spans]
        edges = [0, *(span["end"] for span in answer.spans)]
        assert [span["start"] for span in answer.spans] == edges[:-1], answer
        assert edges == sorted(set(edges)), answer
        assert edges[-1] == len(answer.tokens), answer
        assert commits == sorted(set(commits)), answer
        assert len(answer.logprobs) in (0, len(answer.tokens)), answer
        assert all(answer.earliest <= commit <= answer.latest for commit in commits), answer
        assert not [number for number in ends if commits and commits[0] < number <= commits[-1]], answer
        if answer.finish == "abort":
            aborting = [
                one for one in ends.values() if one.pause == "abort" and answer.reason.endswith(f" by {one.version}")
            ]
            assert len(aborting) == 1, answer
            assert all(commit < aborting[0].number for commit in commits), answer
        else:
            assert (answer.finish, len(answer.tokens)) == ("length", answer.max_tokens), answer
