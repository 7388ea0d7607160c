"""Plays the device: models whose next token is a function of version and tokens, and caches that know what is in each slot.

A cache slot holds the whole history of its keys and values: which tokens came before it, and which weights computed each of
them. So whatever a sequence reads that is not its own shows.
"""

import random
import zlib
from dataclasses import dataclass

from scheduling_checks import check_pool

from weightcast.engines.embedded.messages import Routing, Sampling, Submit, TokenLogprob
from weightcast.engines.embedded.scheduling.blocks import BlockPool
from weightcast.engines.embedded.scheduling.sampling import accept
from weightcast.engines.embedded.scheduling.scheduler import Scheduler, StepResult


def next_token(version, tokens, vocabulary):
    """What the main model says: a function of its weights and of the tokens before."""
    return zlib.crc32(bytes(tokens) + version.encode()) % vocabulary


@dataclass(frozen=True)
class Setup:
    blocks: int = 12
    block_size: int = 4
    max_batch: int = 4
    max_step_tokens: int = 8
    max_length: int = 40
    draft_tokens: int = 0
    prefix_cache: bool = True
    vocabulary: int = 5
    skill: float = 0.7  # of the draft model


class Cache:
    """What one model has in each slot, and what it should have there for each sequence."""

    def __init__(self):
        self._histories, self._slots, self._own = {}, {}, {}

    def grown(self, history, token, weights):
        return self._histories.setdefault((history, token, weights), len(self._histories) + 1)

    def own(self, sequence, weights, computed):
        """The right contents of a sequence; at its start those of a prefix that the present weights computed alone."""
        key = (sequence, sequence.preemptions)
        if key not in self._own:
            history, self._own[key] = 0, []
            for token in sequence.tokens[:computed]:
                history = self.grown(history, token, weights)
                self._own[key].append(history)
        return self._own[key]

    def write(self, sequence, start, tokens, weights):
        own = self.own(sequence, weights, start)
        assert start <= len(own), "tokens are left out"
        self.check(sequence, start, weights)
        del own[start:]
        for token, slot in zip(tokens, sequence.slots(start, len(tokens)), strict=True):
            own.append(self.grown(own[-1] if own else 0, token, weights))
            self._slots[slot] = own[-1]

    def check(self, sequence, count, weights):
        own = self.own(sequence, weights, count)
        slots = [sequence.slot(position) for position in range(count)]
        assert slots == sequence.slots(0, count)
        assert [self._slots.get(slot) for slot in slots] == own[:count], "a sequence reads what is not its own"


class Simulation:
    """An engine without arithmetic. Every step checks the plan, the caches, the pool and the order of the queue."""

    def __init__(self, setup, seed=0):
        self.setup, self.random = setup, random.Random(seed)
        self.version, self.cleared = "v1", 0
        self.pool = BlockPool(setup.blocks, setup.block_size, prefix_cache=setup.prefix_cache, version=self.version)
        self.scheduler = Scheduler(
            self.pool,
            max_batch=setup.max_batch,
            max_step_tokens=setup.max_step_tokens,
            max_length=setup.max_length,
            draft_tokens=setup.draft_tokens,
            version=self.version,
        )
        self.main, self.draft = Cache(), Cache()
        self.requests, self.open, self.outputs = {}, [], {}
        self.steps = 0

    @property
    def weights(self):
        """What marks contents that may be shared: the version, and how often the cache was cleared."""
        return self.version, self.cleared

    def submit(self, prompt, **how):
        name = f"r{len(self.outputs)}"
        extra = {key: how.pop(key) for key in ("record_routing", "replay") if key in how}
        request = Submit(id=name, prompt=tuple(prompt), sampling=Sampling(**how), **extra)
        assert self.scheduler.submit(request) is None
        self.requests[name], self.outputs[name] = request, []
        self.open.append(name)
        return name

    def cancel(self, name):
        assert self.scheduler.cancel(name)
        self.open.remove(name)
        del self.requests[name]
        self.check()

    def set_version(self, version):
        self.version = version
        self.scheduler.set_version(version)
        assert self.pool.cached == 0
        self.check()

    def clear_cache(self):
        self.cleared += 1
        self.pool.clear_cache()
        assert self.pool.cached == 0
        self.check()

    def step(self, meanwhile=None):
        """Plan, compute, apply. `meanwhile` is called before the last."""
        chunks = self.scheduler.plan()
        self.check()
        self.check_plan(chunks)
        for chunk in chunks:  # whoever was just admitted may have found a prefix, for both models
            self._check_caches(chunk, chunk.start)
        results = [self._compute(chunk) for chunk in chunks]
        for chunk, result in zip(chunks, results, strict=True):  # again: nobody may have written into another's slots
            self._check_caches(chunk, chunk.start + chunk.count + max(0, len(result.tokens) - 1))
        if meanwhile:
            meanwhile()
        outputs = self.scheduler.apply(results, routing=self._routing)
        self.steps += 1
        assert len({output.id for output in outputs}) == len(outputs)
        for output in outputs:
            assert output.tokens
            assert output.version == self.version
            self.outputs[output.id].append(output)
            if output.finish:
                self.open.remove(output.id)
        self.check()
        return chunks, outputs

    def finish(self):
        """Run until nothing is left."""
        bound = 40 + sum(len(one.prompt) + one.sampling.max_tokens for one in self.requests.values()) * 4
        for _ in range(bound):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"not done after {bound} steps"
        assert self.scheduler.plan() == []
        assert self.pool.free + self.pool.cached == self.pool.blocks
        for name in self.requests:
            self.check_answer(name)

    # -- a step ----------------------------------------------------------------------------------------------------------

    def _compute(self, chunk):
        sequence, end = chunk.sequence, chunk.start + chunk.count
        proposals = self._propose(chunk) if self.setup.draft_tokens else []
        self.main.write(sequence, chunk.start, [*sequence.tokens[chunk.start : end], *proposals], self.weights)
        if self.setup.draft_tokens and not proposals and self.random.random() < 0.7:  # else it catches up later
            self._catch_up(sequence, end)
        if not chunk.wants_token:
            return StepResult(chunk, ())
        tokens, chosen = list(sequence.tokens), []
        for proposal in [*proposals, None]:
            chosen.append(next_token(self.version, tokens, self.setup.vocabulary))
            tokens.append(proposal)
        kept = chosen[: 1 + accept(proposals, chosen)]
        return StepResult(chunk, tuple(kept), tuple(TokenLogprob(float(token)) for token in kept))

    def _propose(self, chunk):
        sequence, wanted = chunk.sequence, self.random.randint(0, chunk.draft)
        proposals = []
        for _ in range(wanted):
            tokens = [*sequence.tokens, *proposals]
            right = next_token(self.version, tokens, self.setup.vocabulary)
            proposals.append(
                right if self.random.random() < self.setup.skill else self.random.randrange(self.setup.vocabulary)
            )
        if proposals:
            self._catch_up(sequence, len(sequence.tokens))
            self.draft.write(sequence, len(sequence.tokens), proposals[:-1], self.weights)
            sequence.draft_computed = len(sequence.tokens) + len(proposals) - 1
        return proposals

    def _catch_up(self, sequence, end):
        start = sequence.draft_computed
        self.draft.write(sequence, start, sequence.tokens[start:end], self.weights)
        sequence.draft_computed = end

    def _routing(self, sequence):
        assert sequence.record_routing
        assert sequence.computed == len(sequence.tokens) - 1
        self.main.check(sequence, sequence.computed, self.weights)
        return Routing(shape=(sequence.computed, 1, 1), data=bytes(2 * sequence.computed))

    # -- what must hold --------------------------------------------------------------------------------------------------

    def _check_caches(self, chunk, computed):
        self.main.check(chunk.sequence, computed, self.weights)
        if self.setup.draft_tokens:
            self.draft.check(chunk.sequence, min(chunk.sequence.draft_computed, len(chunk.sequence.tokens)), self.weights)

    def check(self):
        running, waiting = self.scheduler._running, self.scheduler._waiting
        check_pool(self.pool, [sequence.blocks for sequence in running.values()])
        assert [*running, *waiting] == self.open, "not in the order of arrival"
        assert all(not (sequence.blocks or sequence.computed or sequence.draft_computed) for sequence in waiting.values())
        assert (self.scheduler.running, self.scheduler.waiting) == (len(running), len(waiting))

    def check_plan(self, chunks):
        setup, running = self.setup, self.scheduler._running
        assert bool(chunks) == self.scheduler.has_work
        if chunks:
            assert self.open[0] in [chunk.sequence.id for chunk in chunks], "the oldest waits"
        assert len({chunk.sequence.id for chunk in chunks}) == len(chunks) <= setup.max_batch
        assert sum(chunk.count + chunk.draft for chunk in chunks) <= setup.max_step_tokens
        making = {name for name, sequence in running.items() if sequence.computed == len(sequence.tokens) - 1}
        assert making <= {chunk.sequence.id for chunk in chunks}, "a sequence that makes tokens waits"
        for chunk in chunks:
            sequence = chunk.sequence
            assert running[sequence.id] is sequence
            assert chunk.start == sequence.computed
            assert 1 <= chunk.count <= sequence.missing
            assert chunk.wants_token == (chunk.count == sequence.missing)
            assert 0 <= chunk.draft <= setup.draft_tokens
            assert chunk.draft == 0 or (chunk.count == 1 and chunk.wants_token)
            assert chunk.start + chunk.count + chunk.draft <= len(sequence.blocks) * setup.block_size
            assert not chunk.draft or len(sequence.tokens) + chunk.draft + 1 <= sequence.limit
        if not self.setup.prefix_cache:
            assert self.pool.cached == 0

    def check_answer(self, name):
        request, outputs = self.requests[name], self.outputs[name]
        how, tokens = request.sampling, list(request.prompt)
        expected, made = None, [(output.version, token) for output in outputs for token in output.tokens]
        for version, token in made:
            assert expected is None, "tokens behind the end"
            assert token == next_token(version, tokens, self.setup.vocabulary)
            tokens.append(token)
            if token in how.stop_tokens:
                expected = "stop"
            elif len(tokens) - len(request.prompt) == how.max_tokens or len(tokens) == self.setup.max_length:
                expected = "length"
        assert expected is not None
        assert [output.finish for output in outputs] == [None] * (len(outputs) - 1) + [expected]
        assert [one.logprob for output in outputs for one in output.logprobs] == [token for _, token in made]
        assert all(output.cached_tokens < len(request.prompt) for output in outputs)
        last = outputs[-1].routing
        assert last.shape == (len(tokens) - 1, 1, 1) if request.record_routing else last is None

    def answer(self, name):
        return [token for output in self.outputs[name] for token in output.tokens]
