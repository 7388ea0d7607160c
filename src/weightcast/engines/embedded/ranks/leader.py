"""Rank 0: takes requests, decides every step, tells the other ranks, and sends what came out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from msgspec import structs

from weightcast import logs
from weightcast.engines.embedded.messages import (
    Action,
    Cancel,
    ClearCache,
    Commit,
    Describe,
    Freeze,
    Output,
    Outputs,
    Release,
    Revert,
    Rollback,
    Settle,
    Submit,
    Thaw,
)
from weightcast.engines.embedded.ranks.batching import Span, make_batch
from weightcast.engines.embedded.ranks.inbox import Inbox
from weightcast.engines.embedded.ranks.rank import Rank
from weightcast.engines.embedded.ranks.speculation import Speculator
from weightcast.engines.embedded.ranks.step import PARK, Step, Work
from weightcast.engines.embedded.ranks.wake import WakeSender
from weightcast.engines.embedded.scheduling.blocks import BlockPool
from weightcast.engines.embedded.scheduling.sampling import Choice, accept, choose
from weightcast.engines.embedded.scheduling.scheduler import Chunk, Scheduler, StepResult
from weightcast.engines.states import ReplicaState
from weightcast.errors import InvalidInput, WrongState

log = logs.get(__name__)

_IDLE_S = 1.0
_PROOF_S = 0.02  # once after a commit, between two steps, for ranks to finish reading back: it takes longer beside a step
_BROKEN = "the model made logits that are not numbers. Its weights are broken or do not fit its dtype: load another version."


class Leader:
    """The main loop of rank 0. While there is nothing to do it waits on its socket, and its peers on theirs."""

    def __init__(self, rank: Rank, inbox: Inbox, wake: WakeSender) -> None:
        self._rank, self._inbox, self._wake = rank, inbox, wake
        self._runner, settings = rank.runner, rank.settings.engine
        self._pool = BlockPool(self._runner.blocks, settings.block_size, prefix_cache=settings.prefix_cache, version="")
        drafting = self._runner.draft is not None
        self._speculator = Speculator(lambda spans: self._forward(Work.DRAFT, spans)) if drafting else None
        self._scheduler = Scheduler(
            self._pool,
            max_batch=settings.max_batch,
            max_step_tokens=settings.max_step_tokens,
            max_length=self._runner.max_length,
            draft_tokens=settings.draft_tokens if drafting else 0,
            version="",
        )
        self._paused = False
        self._scheduler.frozen = True  # until there are weights
        self._withheld: list[Output] | None = None  # made by weights that are not proved yet
        self._proof_s = 0.0  # how long the next step may wait for their proof
        self._awake = False  # whether the peers are receiving steps
        self._signal = 0  # the command that rides on the next step message

    def run(self) -> None:
        """Serve until a `Shutdown` was executed."""
        while not self._rank.leaving:
            if not self._scheduler.has_work and not self._inbox.next_command:
                self._park()
                self._inbox.wait(_IDLE_S)
            if self._withheld and self._proof_s:  # clients wait for the word that ends the commit
                self._inbox.wait(self._proof_s)
                self._proof_s = 0.0
            self._take_requests()
            command = self._inbox.next_command
            ends_commit = self._withheld and isinstance(self._inbox.next_action, Settle | Revert)
            chunks = [] if ends_commit else self._scheduler.plan()
            if chunks:
                self._step(chunks, command)
            elif command:
                self._send(Step(signal=command))
            if command:
                self._rank.execute(command, self._inbox, self._perform)

    def _take_requests(self) -> None:
        refused: list[Output] = []
        for message in self._inbox.receive():
            self._rank.vitals.tick()
            if isinstance(message, Cancel):
                self._scheduler.cancel(message.id)
            else:
                refused += self._submit(message)
        self._tell(refused)

    def _submit(self, request: Submit) -> list[Output]:
        caller = request.request_id or None
        log.debug("request taken", request_id=caller, answer=request.id, prompt_tokens=len(request.prompt))
        try:
            self._runner.check_routing(request)
            answer = self._scheduler.submit(request)
        except InvalidInput as error:
            log.debug("request refused", request_id=caller, answer=request.id, error=error)
            answer = Output(
                id=request.id,
                tokens=(),
                version=self._rank.live.version,
                finish="error",
                reason=str(error),
                refused=True,
            )
        return [] if answer is None else [answer]

    # -- a step ----------------------------------------------------------------------------------------------------------

    def _step(self, chunks: Sequence[Chunk], command: int) -> None:
        """One pass of the main model. A command rides on the last message of the step and is executed after it."""
        self._rank.steps += 1
        proposals = self._speculator.propose(chunks) if self._speculator else [[] for _ in chunks]
        behind = [chunk for chunk, more in zip(chunks, proposals, strict=True) if not more] if self._speculator else []
        self._signal = 0 if behind else command
        logits = self._forward(Work.MAIN, [_span(chunk, more) for chunk, more in zip(chunks, proposals, strict=True)])
        if self._speculator and behind:
            self._signal = command
            self._speculator.follow(behind)
        outputs = self._scheduler.apply(self._decide(chunks, proposals, logits), routing=self._runner.routing)
        self._tell(outputs)

    def _tell(self, outputs: Sequence[Output]) -> None:
        """Send outputs, or keep them back until the weights that made them are proved."""
        if self._withheld is not None:
            self._withheld += outputs
        elif outputs:
            self._inbox.send(Outputs(outputs=tuple(outputs)))

    def _forward(self, work: Work, spans: Sequence[Span]) -> torch.Tensor:
        settings = self._rank.settings.engine
        batch = make_batch(spans, block_size=settings.block_size, device=settings.device)
        self._send(Step(signal=self._signal, work=work, batch=batch))
        self._signal = 0
        return self._runner.forward(work, batch)

    def _decide(self, chunks: Sequence[Chunk], proposals: Sequence[Sequence[int]], logits: torch.Tensor) -> list[StepResult]:
        """The main model's own tokens: one for each chunk that reaches its sequence's end, one for each proposal kept."""
        wanted = [
            (chunk.sequence.sampling, len(chunk.sequence.tokens) + offset)
            for chunk, more in zip(chunks, proposals, strict=True)
            if chunk.wants_token
            for offset in range(1 + len(more))
        ]
        chosen = iter(choose(logits, wanted, tick=self._rank.vitals.tick))
        results = []
        for chunk, more in zip(chunks, proposals, strict=True):
            picks = [next(chosen) for _ in range(1 + len(more))] if chunk.wants_token else []
            sound = [pick for pick in takewhile(lambda one: one is not None, picks) if pick is not None]
            kept = sound[: 1 + accept(more, [token for token, _ in sound])]
            if self._speculator:
                self._speculator.settle(chunk, len(more), max(0, len(kept) - 1))
            results.append(_result(chunk, kept, broken=bool(picks) and not kept))
        return results

    # -- the other ranks -------------------------------------------------------------------------------------------------

    def _send(self, step: Step) -> None:
        if not self._awake:
            self._wake.wake()
            self._awake = self._rank.vitals.busy = True
        self._rank.channel.send(step)

    def _park(self) -> None:
        if self._awake:
            self._rank.channel.send(Step(signal=PARK))
            self._awake = self._rank.vitals.busy = False

    # -- commands --------------------------------------------------------------------------------------------------------

    def _perform(self, number: int, action: Action) -> Any:
        try:
            return self._do(number, action)
        finally:
            self._scheduler.frozen = self._paused or not self._rank.resident
            renewed = isinstance(action, Commit | Revert | Rollback)  # other bytes may come under the same name
            if renewed or self._scheduler.version != self._rank.live.version:
                self._scheduler.set_version(self._rank.live.version)

    def _do(self, number: int, action: Action) -> Any:
        """What only rank 0 does for a command, around what every rank does."""
        match action:
            case Describe():
                return self._rank.describe(self._counters(), commands=self._inbox.executed)
            case ClearCache():
                self._pool.clear_cache()
            case Freeze():
                self._paused = True
                if action.recompute:
                    self._scheduler.recompute()
            case Thaw():
                if not self._rank.resident:
                    missing = "weights" if not self._rank.live.whole else "the KV cache"
                    raise WrongState("resume", f"without {missing}", [ReplicaState.READY])
                self._paused = False
            case Release() if "kv_cache" in action.tags:
                self._scheduler.recompute()
            case Commit() if action.release_cache:
                self._scheduler.recompute()  # whether it succeeds or not, the caches are new afterwards
            case Revert():
                self._disown(action.reason)
        result = self._rank.perform(number, action)
        match action:
            case Commit():
                self._withheld, self._proof_s = [], _PROOF_S
                if action.clear_cache:
                    self._scheduler.recompute()
            case Settle():
                made, self._withheld = self._withheld or [], None
                self._tell(made)
        return result

    def _disown(self, reason: str) -> None:
        """The weights of the last outputs turned out wrong: nobody gets those, and what runs has seen them."""
        made, self._withheld = self._withheld or [], None
        ended = {output.id: output for output in made if output.finish is not None}
        outputs = [*ended.values(), *self._scheduler.abort_all(reason)]
        self._tell([structs.replace(output, tokens=(), logprobs=None, finish="error", reason=reason) for output in outputs])

    def _counters(self) -> dict[str, int]:
        return {
            "running": self._scheduler.running,
            "waiting": self._scheduler.waiting,
            "preempted": self._scheduler.preempted,
            "blocks_free": self._pool.free,
            "blocks_cached": self._pool.cached,
            "prefix_hits": self._pool.hits,
            "prefix_queries": self._pool.queries,
            "drafted": self._speculator.drafted if self._speculator else 0,
            "accepted": self._speculator.accepted if self._speculator else 0,
        }


def _span(chunk: Chunk, proposed: Sequence[int]) -> Span:
    sequence, start = chunk.sequence, chunk.start
    tokens = [*sequence.tokens[start : start + chunk.count], *proposed]
    return Span(sequence, start, tokens, rows=1 + len(proposed) if chunk.wants_token else 0)


def _result(chunk: Chunk, kept: Sequence[Choice], *, broken: bool) -> StepResult:
    logprobs = tuple(detail for _, detail in kept if detail is not None)
    return StepResult(chunk, tuple(token for token, _ in kept), logprobs or None, _BROKEN if broken else None)
