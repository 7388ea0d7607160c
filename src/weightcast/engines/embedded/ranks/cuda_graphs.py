"""CUDA graphs of decode steps: one token for each of some sequences, run from buffers that never move.

Not exercised on a GPU yet: written after the documentation of `torch.cuda.CUDAGraph`. What a graph holds, the step over
fixed buffers, is plain torch and is tested on the CPU.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from weightcast import logs
from weightcast.engines.embedded.batch import Batch
from weightcast.engines.embedded.model.attention import Attention
from weightcast.engines.embedded.model.build import Model
from weightcast.engines.embedded.model.cache import KVCache
from weightcast.engines.embedded.model.causal import CausalModel
from weightcast.engines.embedded.model.plan import AttentionPlan
from weightcast.errors import UnsupportedModel

log = logs.get(__name__)

_SHORT = 256  # tokens of the shortest sequences that a graph is captured for; from there it doubles
_WARM_UPS = 3  # runs before a capture, in which libraries allocate what they keep


def doubling(first: int, last: int) -> tuple[int, ...]:
    """first, twice that, and so on up to last, which is always there."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def is_decode(batch: Batch) -> bool:
    """Whether every sequence brings one token, and the router chooses the experts."""
    return batch.replay is None and batch.sequences > 0 and batch.starts == tuple(range(batch.sequences + 1))


class DecodeBuffers:
    """The inputs and the result of decode steps of up to `sequences` sequences with up to `length` tokens each."""

    def __init__(self, model: CausalModel, cache: KVCache, *, sequences: int, length: int) -> None:
        weight = model.embedding.weight
        zeros = partial(torch.zeros, dtype=torch.int64, device=weight.device)
        self.tokens, self.positions, self.slots = zeros(sequences), zeros(sequences), zeros(sequences)
        self.tables = zeros((sequences, -(-length // cache.block_size)))
        self.hidden = torch.zeros((sequences, model.config.hidden_size), dtype=weight.dtype, device=weight.device)

    def fill(self, batch: Batch, size: int) -> None:
        """Put in the sequences of a batch. Places up to `size` repeat the first: what they write is what it writes."""
        count, width = batch.sequences, batch.tables.shape[1]
        for buffer, given in ((self.tokens, batch.tokens), (self.positions, batch.positions), (self.slots, batch.slots)):
            buffer[:count] = given
            buffer[count:size] = given[0]
        self.tables[:count, :width] = batch.tables
        self.tables[count:size, :width] = batch.tables[0]


class DecodePlan:
    """How one token per sequence attends to up to `length` tokens, told by positions on the device and not on the host."""

    def __init__(self, buffers: DecodeBuffers, *, size: int, length: int, block_size: int) -> None:
        self.slots = buffers.slots[:size]
        places, within = (torch.arange(count, device=self.slots.device) for count in (length, block_size))
        seen = places <= buffers.positions[:size].unsqueeze(1)
        blocks = buffers.tables[:size, : -(-length // block_size)]
        taken = ((blocks * block_size).unsqueeze(2) + within).view(size, -1)[:, :length]
        # What a sequence does not have is read from its own first slot: a weight of 0 does not hide another's NaN.
        self._taken = torch.where(seen, taken, taken[:, :1]).reshape(-1)
        mask = torch.zeros(seen.shape, dtype=buffers.hidden.dtype, device=seen.device)
        self._mask = mask.masked_fill_(~seen, float("-inf")).view(size, 1, 1, length)

    def attend(self, queries: torch.Tensor, fresh: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Attention of all tokens, as `AttentionPlan.attend`."""
        count, heads, size = queries.shape
        taken = cached.index_select(0, self._taken)
        kv_heads = taken.shape[2]
        keys, values = taken.view(count, -1, 2, kv_heads, size).permute(2, 0, 3, 1, 4).unbind()
        grouped = queries.reshape(count, kv_heads, -1, size)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask).reshape(count, heads * size)


def decode(model: CausalModel, cache: KVCache, buffers: DecodeBuffers, *, size: int, length: int) -> None:
    """Run the first `size` sequences of the buffers. Every address, shape and operation is the same each time."""
    batch = Batch(
        tokens=buffers.tokens[:size],
        positions=buffers.positions[:size],
        slots=buffers.slots[:size],
        starts=tuple(range(size + 1)),
        lengths=(1,) * size,  # a plan for these is made and not used
        tables=buffers.tables[:size],
        rows=buffers.tokens[:0],
    )
    plan = DecodePlan(buffers, size=size, length=length, block_size=cache.block_size)
    with _attending_by(model, plan):
        buffers.hidden[:size] = model(batch, cache)


@contextmanager
def _attending_by(model: CausalModel, plan: DecodePlan) -> Iterator[None]:
    """While this lasts, the model attends by this plan and not by the one that follows from the batch."""
    layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
    try:
        for layer in layers:
            object.__setattr__(layer, "forward", partial(_attend_by, layer, plan))
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _attend_by(
    layer: Attention,
    plan: DecodePlan,
    x: torch.Tensor,
    residual: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    _given: object,
    cached: torch.Tensor,
) -> torch.Tensor:
    return Attention.forward(
        layer, x, residual, rope, cast("AttentionPlan", plan), cached
    )  # it has all that is asked of one


class Recorded(Protocol):
    """A step that can be run again as it was."""

    def replay(self) -> None:
        """Run it."""

    def reset(self) -> None:
        """Let go of its memory."""


class Recorder(Protocol):
    """What records the steps of one capture."""

    def record(self, warm_up: Callable[[], None], step: Callable[[], None]) -> Recorded:
        """Run `warm_up`, then record `step`, which may or may not run meanwhile."""


class GpuRecorder:
    """The seam to the GPU: records graphs that share one private pool of memory. Not exercised yet."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UnsupportedModel(
                f"CUDA graphs need a model on a GPU, and this one is on {device}. Serve with --graphs compile, or with "
                "--graphs off."
            )
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, warm_up: Callable[[], None], step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Warm up on a stream of its own, and capture there."""
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for _ in range(_WARM_UPS):
                warm_up()
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog may ask for the state of its events meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
            step()
        return graph


@dataclass(frozen=True)
class _Captured:
    """The graphs of one model, by the sequences and the length they have room for. They hold the addresses of `cache`."""

    cache: KVCache
    buffers: DecodeBuffers
    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    graphs: dict[tuple[int, int], Recorded]

    def fitting(self, batch: Batch, cache: KVCache) -> tuple[int, int] | None:
        """The smallest size and length that a batch fits into."""
        if cache is not self.cache or not is_decode(batch):
            return None
        if batch.sequences > self.sizes[-1] or max(batch.lengths) > self.lengths[-1]:
            return None
        size = self.sizes[bisect_left(self.sizes, batch.sequences)]
        return size, self.lengths[bisect_left(self.lengths, max(batch.lengths))]


class CudaGraphs:
    """Decode steps replayed from graphs; all other steps, models with experts and MTP heads run as they are written.

    (How many tokens an expert gets is a number that the host must know, and an MTP head's batch is taken apart there.) There
    is a graph for 1, 2, 4 … `max_batch` sequences, each for lengths of up to 256, 512 … tokens. All graphs of a model share
    one pool of memory and one set of buffers: they never run at the same time, and a result is copied out before the next
    step. Sums over the ranks are captured too, so all ranks capture together. Not exercised on a GPU yet.
    """

    kind: Literal["off", "compile", "cuda"] = "cuda"

    def __init__(self, max_batch: int, recorder: Callable[[torch.device], Recorder] = GpuRecorder) -> None:
        self.captures = 0
        self.armed = False
        self._max_batch, self._recorder = max_batch, recorder
        self._captured: dict[Model, _Captured] = {}

    @torch.inference_mode()
    def forward(self, model: Model, batch: Batch, cache: KVCache, main_cache: KVCache) -> torch.Tensor:
        """Replay the smallest graph that the batch fits into; without one, call the model."""
        held = self._captured.get(model)
        fitting = None if held is None else held.fitting(batch, cache)
        if held is None or fitting is None:
            hidden: torch.Tensor = model(batch, cache, main_cache)
            return hidden
        held.buffers.fill(batch, fitting[0])
        held.graphs[fitting].replay()
        return held.buffers.hidden[: batch.sequences].clone()

    def capture(self, models: Sequence[tuple[Model, KVCache]], main_cache: KVCache) -> None:  # noqa: ARG002
        """Capture the decode steps of all models that can be captured."""
        self.release()
        started = time.monotonic()
        try:
            for model, cache in models:
                recorder = self._recorder(model.decoder.norm.weight.device)
                if isinstance(model, CausalModel) and not model.config.moe_layers:
                    self._captured[model] = self._capture(model, cache, recorder)
                else:
                    log.info("capture skipped", model=type(model).__name__, why="it has steps that cannot be captured")
        except RuntimeError as error:
            self.release()
            raise UnsupportedModel(f"decode steps could not be captured: {error} Serve with --graphs off.") from error
        self.captures += 1
        self.armed = True
        count = sum(len(held.graphs) for held in self._captured.values())
        log.info("graphs captured", graphs=count, backend="cuda", ms=logs.ms(time.monotonic() - started))

    @torch.inference_mode()
    def _capture(self, model: CausalModel, cache: KVCache, recorder: Recorder) -> _Captured:
        longest = min(model.config.max_length, cache.slots)
        sizes, lengths = doubling(1, self._max_batch), doubling(_SHORT, longest)
        buffers = DecodeBuffers(model, cache, sequences=self._max_batch, length=longest)
        held, scratch = _Captured(cache, buffers, sizes, lengths, {}), _scratch(cache)
        for size in reversed(sizes):  # the largest first: the others find the memory they need in the pool
            for length in reversed(lengths):
                step = partial(decode, model, buffers=buffers, size=size, length=length)
                held.graphs[size, length] = recorder.record(partial(step, cache=scratch), partial(step, cache=cache))
        return held

    def release(self) -> None:
        """Drop graphs, buffers and their pool, and give its memory back to the device."""
        self.armed = False
        if not self._captured:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a replay may still be running
        for held in self._captured.values():
            for graph in held.graphs.values():
                graph.reset()
        self._captured = {}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _scratch(cache: KVCache) -> KVCache:
    """A cache of one block with nothing in it, for runs that must not write into the real one."""
    block = cache.block_size
    return KVCache(
        layers=tuple(torch.zeros_like(layer[:block]) for layer in cache.layers),
        block_size=block,
        hidden=None if cache.hidden is None else torch.zeros_like(cache.hidden[:block]),
    )
