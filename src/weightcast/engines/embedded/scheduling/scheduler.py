"""Continuous batching: which tokens go through the model next, and what becomes of those it makes.

Running and waiting requests together always stand in the order of their arrival. The oldest can take every block there is,
and the pool holds any one request that was accepted, so each gets its turn and comes to its end.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from weightcast.engines.embedded.messages import FinishReason, Output, Routing, Submit, TokenLogprob
from weightcast.engines.embedded.scheduling.blocks import BlockPool
from weightcast.engines.embedded.scheduling.sequence import Sequence
from weightcast.errors import InvalidInput


@dataclass(slots=True)
class Chunk:
    """A part of a sequence that goes through the model in this step: `count` of its tokens from `start` on.

    `draft` proposed tokens may follow them: room in its blocks, in the step and in the answer is reserved.
    """

    sequence: Sequence
    start: int
    count: int
    draft: int = 0

    @property
    def wants_token(self) -> bool:
        """Whether a token can be chosen behind it."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The main model's own tokens behind a chunk: none unless it wants one, else one and one for each draft token kept.

    With a `problem` no token could be chosen, and the request ends with that as its error.
    """

    chunk: Chunk
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    problem: str | None = None


class Scheduler:
    """Call `plan`, run the model, call `apply`, and so on. Nothing else may come between the two but `cancel`.

    `plan` answers with work as long as `has_work`, which is false while `frozen`. A sequence that needs a block where there
    is none takes those of the one admitted last, which is computed again later. With `draft_tokens`, the caller keeps
    `draft_computed` of the sequences.
    """

    def __init__(
        self, pool: BlockPool, *, max_batch: int, max_step_tokens: int, max_length: int, draft_tokens: int = 0, version: str
    ) -> None:
        if not 1 <= max_batch <= max_step_tokens:
            raise InvalidInput(f"a step of {max_step_tokens} tokens has no room for each of {max_batch} sequences.")
        self.pool = pool
        self.max_batch, self.max_step_tokens, self.max_length = max_batch, max_step_tokens, max_length
        self.draft_tokens = draft_tokens
        self.version = version
        self.preempted = 0
        self.frozen = False  # set by the owner: nothing is planned, everything else goes on
        self._running: dict[str, Sequence] = {}
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._no_room = False  # the first in the queue did not fit, and nothing has been given back since

    @property
    def running(self) -> int:
        """How many sequences hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many sequences are in the queue."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute, and nothing forbids it."""
        return not self.frozen and bool(self._running or self._waiting)

    # -- requests --------------------------------------------------------------------------------------------------------

    def submit(self, request: Submit) -> Output | None:
        """Queue a request, or say in an output why it can never run."""
        limit = min(self.max_length, len(request.prompt) + request.sampling.max_tokens)
        problems = self._problems(request, limit)
        if problems:
            reason = f"request {request.id} cannot run: {'; '.join(problems)}."
            return Output(id=request.id, tokens=(), version=self.version, finish="error", reason=reason, refused=True)
        replay = request.replay
        self._waiting[request.id] = Sequence(
            id=request.id,
            tokens=list(request.prompt),
            prompt_length=len(request.prompt),
            limit=limit,
            sampling=request.sampling,
            block_size=self.pool.block_size,
            record_routing=request.record_routing,
            replay=None if replay is None else np.frombuffer(replay.data, dtype="<i2").reshape(replay.shape),
        )
        return None

    def _problems(self, request: Submit, limit: int) -> list[str]:
        prompt, problems = len(request.prompt), []
        if request.id in self._running or request.id in self._waiting:
            problems.append("another request of this id is not finished")
        if not prompt:
            problems.append("its prompt is empty")
        if request.sampling.max_tokens < 1:
            problems.append(f"it asks for {request.sampling.max_tokens} tokens")
        if prompt >= self.max_length:
            problems.append(f"its prompt of {prompt} tokens leaves no room for an answer within {self.max_length}")
        elif limit - 1 > self.pool.blocks * self.pool.block_size:  # the last token is never computed
            problems.append(
                f"prompt and answer of up to {limit} tokens do not fit the {self.pool.blocks} blocks of "
                f"{self.pool.block_size} tokens that the cache has"
            )
        replay = request.replay
        if replay is not None and (min(replay.shape) < 0 or math.prod(replay.shape) * 2 != len(replay.data)):
            problems.append(f"its routing of {len(replay.data)} bytes is not of shape {replay.shape}")
        return problems

    def cancel(self, id: str) -> bool:  # noqa: A002 - the field's name in all messages
        """Forget a request. False if there is none of this id."""
        self._no_room = False  # there is more, or the next in the queue needs less
        if self._waiting.pop(id, None) is not None:
            return True
        sequence = self._running.pop(id, None)
        if sequence is not None:
            self.pool.release(sequence.blocks)
        return sequence is not None

    def abort_all(self, reason: str) -> list[Output]:
        """End all requests now, the oldest first."""
        outputs = []
        for sequence in [*self._running.values(), *self._waiting.values()]:
            self.cancel(sequence.id)
            outputs.append(self._output(sequence, finish="abort", reason=reason))
        return outputs

    def recompute(self) -> None:
        """All keys and values are forgotten: what runs is computed again from its first token, in the same order."""
        while self._running:
            self._preempt()
        self.pool.clear_cache()

    def set_version(self, version: str) -> None:
        """Tokens made from now on carry `version`. Cached prefixes are forgotten; what runs goes on with what it holds."""
        self.version = version
        self.pool.set_version(version)

    # -- what to compute -------------------------------------------------------------------------------------------------

    def plan(self) -> list[Chunk]:
        """The next step: first sequences that make tokens, then prompts in the order of their arrival as far as they fit."""
        if self.frozen:
            return []
        chunks = [
            Chunk(sequence, sequence.computed, 1)
            for sequence in tuple(self._running.values())
            if sequence.missing == 1 and self._make_room(sequence)
        ]
        prompts = [sequence for sequence in self._running.values() if sequence.missing > 1]
        left = self.max_step_tokens - len(chunks)
        if self.draft_tokens and chunks:
            # Half of the rest is for prompts, or many drafts would keep them from ever being computed.
            left -= self._add_drafts(chunks, left // 2 if prompts or self._may_admit else left)
        for sequence in prompts:
            if not left:
                break
            left -= self._add_prompt(chunks, sequence, left)
        while left and self._may_admit and (admitted := self._admit()):
            left -= self._add_prompt(chunks, admitted, left)
        return chunks

    @property
    def _may_admit(self) -> bool:
        return bool(self._waiting) and not self._no_room and len(self._running) < self.max_batch

    @staticmethod
    def _add_prompt(chunks: list[Chunk], sequence: Sequence, left: int) -> int:
        count = min(left, sequence.missing)
        chunks.append(Chunk(sequence, sequence.computed, count))
        return count

    def _make_room(self, sequence: Sequence) -> bool:
        """See that the next token has a slot, at the cost of the youngest. False if that was the sequence itself."""
        while sequence.id in self._running:
            if sequence.computed < len(sequence.blocks) * self.pool.block_size:
                return True
            more = self.pool.allocate(1)
            if more:
                sequence.blocks += more
            else:
                self._preempt()
        return False

    def _preempt(self) -> None:
        _, sequence = self._running.popitem()
        self.pool.release(sequence.blocks)
        self._no_room = False
        sequence.blocks = []
        sequence.computed = sequence.draft_computed = 0
        sequence.preemptions += 1
        self.preempted += 1
        self._waiting[sequence.id] = sequence
        self._waiting.move_to_end(sequence.id, last=False)

    def _add_drafts(self, chunks: list[Chunk], budget: int) -> int:
        """Let the same number of draft tokens follow everywhere, as far as there is room for them."""
        each, used = min(self.draft_tokens, budget // len(chunks)), 0
        for chunk in chunks:
            sequence = chunk.sequence
            wanted = min(each, sequence.limit - len(sequence.tokens) - 1)  # one more token comes behind them
            short = self.pool.count(chunk.start + 1 + wanted) - len(sequence.blocks)
            if short > 0:
                sequence.blocks += self.pool.allocate(short) or ()
            chunk.draft = min(wanted, len(sequence.blocks) * self.pool.block_size - chunk.start - 1)
            used += chunk.draft
        return used

    def _admit(self) -> Sequence | None:
        """Give the first in the queue blocks for all its tokens, and leave one for each that runs. None if it must wait."""
        sequence = next(iter(self._waiting.values()))
        shared = self.pool.match(sequence.tokens) if sequence.replay is None else []
        short = self.pool.count(len(sequence.tokens)) - len(shared)
        if short + len(self._running) > self.pool.room(shared):
            self._no_room = True
            return None
        self.pool.share(shared)
        sequence.blocks = shared + (self.pool.allocate(short) or [])
        sequence.chain = self.pool.chain(shared) if sequence.replay is None else None
        sequence.entered = len(shared)
        sequence.computed = sequence.draft_computed = len(shared) * self.pool.block_size
        if sequence.chain is not None and not sequence.preemptions:
            sequence.cached_tokens = sequence.computed
            self.pool.queries += sequence.prompt_length
            self.pool.hits += sequence.computed
        del self._waiting[sequence.id]
        self._running[sequence.id] = sequence
        return sequence

    # -- what came out ---------------------------------------------------------------------------------------------------

    def apply(self, results: Iterable[StepResult], *, routing: Callable[[Sequence], Routing] | None = None) -> list[Output]:
        """Append the tokens, as far as stop tokens and limits let them, and end what is done.

        `routing` is asked for sequences that end and recorded theirs, while they still have their blocks. Results for
        requests that were cancelled in the meantime are dropped.
        """
        outputs = []
        for result in results:
            sequence = result.chunk.sequence
            if self._running.get(sequence.id) is not sequence:
                continue
            if result.problem is not None:
                self.cancel(sequence.id)
                outputs.append(self._output(sequence, finish="error", reason=result.problem))
            else:
                self._check(result)
                output = self._advance(sequence, result, routing)
                if output is not None:
                    outputs.append(output)
        return outputs

    @staticmethod
    def _check(result: StepResult) -> None:
        chunk, made = result.chunk, len(result.tokens)
        fits = 1 <= made <= 1 + chunk.draft if chunk.wants_token else not made
        if not fits or chunk.start != chunk.sequence.computed:
            raise InvalidInput(
                f"{made} tokens were made for request {chunk.sequence.id} behind its tokens {chunk.start} to "
                f"{chunk.start + chunk.count} and {chunk.draft} drafts, but {chunk.sequence.computed} of "
                f"{len(chunk.sequence.tokens)} were computed before. Apply each planned step once."
            )

    def _advance(
        self, sequence: Sequence, result: StepResult, routing: Callable[[Sequence], Routing] | None
    ) -> Output | None:
        kept, finish = self._cut(sequence, result.tokens)
        sequence.tokens += kept
        sequence.computed += result.chunk.count + max(0, len(kept) - 1)
        # The draft model may have computed proposals that were not kept.
        sequence.draft_computed = min(sequence.draft_computed, sequence.computed)
        self._enter(sequence)
        if not kept:
            return None
        recorded = routing(sequence) if finish and sequence.record_routing and routing else None
        if finish:
            self.cancel(sequence.id)
        logprobs = None if result.logprobs is None else result.logprobs[: len(kept)]
        return self._output(sequence, kept, logprobs=logprobs, finish=finish, routing=recorded)

    @staticmethod
    def _cut(sequence: Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """How much of the new tokens belongs to the answer, and whether it ends with them."""
        for index, token in enumerate(tokens, 1):
            if token in sequence.sampling.stop_tokens:
                return tokens[:index], "stop"
            if len(sequence.tokens) + index >= sequence.limit:
                return tokens[:index], "length"
        return tokens, None

    def _enter(self, sequence: Sequence) -> None:
        """Put blocks that are full, for both models, into the prefix cache."""
        size = self.pool.block_size
        computed = sequence.draft_computed if self.draft_tokens else sequence.computed  # the draft is never ahead here
        while sequence.chain is not None and (sequence.entered + 1) * size <= computed:
            start, block = sequence.entered * size, sequence.blocks[sequence.entered]
            sequence.chain = self.pool.register(sequence.chain, block, tuple(sequence.tokens[start : start + size]))
            sequence.entered += 1

    def _output(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...] = (),
        *,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        finish: FinishReason | None = None,
        reason: str | None = None,
        routing: Routing | None = None,
    ) -> Output:
        return Output(
            id=sequence.id,
            tokens=tokens,
            version=self.version,
            logprobs=logprobs,
            finish=finish,
            reason=reason,
            cached_tokens=sequence.cached_tokens,
            routing=routing,
        )
