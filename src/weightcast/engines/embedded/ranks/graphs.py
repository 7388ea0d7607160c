"""Steps that are captured before they are run: compiled pieces, or CUDA graphs. What a weight update must know of them:

    weights written where they lie (copy, delta, inplace)    what was captured stays good
    weights or caches that move (swap)                       `capture` again, before the next step
    weights or caches that are freed (sleep, release_cache)  `release` first, `capture` when they are back

Whatever is not captured runs as it is written, with the same result. So after `release`, `forward` still works.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from weightcast import logs
from weightcast.engines.embedded.batch import Batch
from weightcast.engines.embedded.model.build import Model
from weightcast.engines.embedded.model.cache import KVCache
from weightcast.engines.embedded.model.parallel import ColumnParallel, RMSNorm
from weightcast.engines.embedded.ranks.cuda_graphs import CudaGraphs
from weightcast.errors import InvalidInput, UnsupportedModel

log = logs.get(__name__)

GraphKind = Literal["off", "compile", "cuda"]
Resident = Sequence[tuple[Model, KVCache]]  # models whose weights have memory, each with its cache

BACKENDS = ("inductor", "aot_eager")
"""Ways to compile, best first. inductor needs a C++ compiler; aot_eager needs nothing and makes nothing faster."""

_RECOMPILES = 64  # per function; a capture makes two of each width there is, torch's own limit is 8
_ONE, _SEVERAL = 1, 5  # tokens of the example inputs: torch treats a size of 1 as another shape than all others


class Graphs(Protocol):
    """What a rank runs its steps through. All ranks of a replica call it alike, as their steps wait for each other.

    `captures` counts the captures since the start, `armed` says whether there is a valid one.
    """

    kind: GraphKind
    captures: int
    armed: bool

    def forward(self, model: Model, batch: Batch, cache: KVCache, main_cache: KVCache) -> torch.Tensor:
        """What `model(batch, cache, main_cache)` gives. The caller owns the result."""

    def capture(self, models: Resident, main_cache: KVCache) -> None:
        """Make ready for these models, in place of what was captured before. Leaves weights and caches as they are.

        Called when all weights and caches have memory. Raises `UnsupportedModel` if it cannot be done; then nothing is
        captured, and steps run as they are written.
        """

    def release(self) -> None:
        """Drop everything that was captured, and with it all references to weights and caches. Safe twice."""


def make_graphs(kind: GraphKind, *, max_batch: int, backends: Sequence[str] = BACKENDS) -> Graphs:
    """Graphs of a kind, with nothing captured yet.

    `max_batch` is the number of sequences up to which "cuda" captures decode steps; `backends` are tried in this order by
    "compile".
    """
    if kind == "off":
        return NoGraphs()
    if kind == "compile":
        if not backends:
            raise InvalidInput(f"there is nothing to compile with: name one or more of {', '.join(BACKENDS)}.")
        return CompiledPieces(backends)
    if kind == "cuda":
        return CudaGraphs(max_batch)
    raise InvalidInput(f"there are no graphs of the kind {kind!r}: choose off, compile or cuda.")


class NoGraphs:
    """Every step runs as it is written. Captures are counted all the same, so that what should cause one can be seen."""

    kind: GraphKind = "off"

    def __init__(self) -> None:
        self.captures = 0
        self.armed = False

    def forward(self, model: Model, batch: Batch, cache: KVCache, main_cache: KVCache) -> torch.Tensor:
        """Call the model."""
        hidden: torch.Tensor = model(batch, cache, main_cache)
        return hidden

    def capture(self, models: Resident, main_cache: KVCache) -> None:  # noqa: ARG002 - there is nothing to capture
        """Count."""
        self.captures += 1
        self.armed = True

    def release(self) -> None:
        """Note it."""
        self.armed = False


@dataclass(frozen=True)
class _Piece:
    """A layer whose `forward` is compiled: it takes rows of this `width`, and asks nothing of other ranks.

    `form` is what compiled code relies on: shape, strides, dtype, device and kind of the weight, not its address.
    """

    layer: RMSNorm | ColumnParallel
    width: int
    form: tuple[object, ...]

    def rows(self, count: int) -> torch.Tensor:
        weight = self.layer.weight
        return torch.ones((count, self.width), dtype=weight.dtype, device=weight.device)


def _pieces(model: Model) -> Iterator[_Piece]:
    for layer in model.modules():
        if isinstance(layer, RMSNorm | ColumnParallel):
            weight = layer.weight
            inputs_first = isinstance(layer, RMSNorm) or layer.transposed
            form = (weight.shape, weight.stride(), weight.dtype, weight.device, weight.is_inference())
            yield _Piece(layer, weight.shape[0 if inputs_first else 1], form)


class CompiledPieces:
    """Norms and projections compiled by torch, one by one; attention, experts and sums over the ranks run as written.

    Not the whole step: how a batch attends is decided anew for each, in Python, and would be compiled anew for each. The
    pieces are compiled for one row and for any number of rows, all layers of a shape together, when they are captured. No
    step ever compiles: what does not fit runs as it is written. Weights are inputs of the compiled code, so it holds no
    addresses: a capture after a swap only looks whether it still fits, one after a release compiles anew.

    A capture takes the first backend that compiles all pieces here, and stays with it. Results can differ from those of the
    layers as written in the last bits. Settings and caches of `torch.compile` are one per process, and so is `release`.
    """

    kind: GraphKind = "compile"

    def __init__(self, backends: Sequence[str] = BACKENDS) -> None:
        self.captures = 0
        self.armed = False
        self.backend: str | None = None
        self._backends = tuple(backends)
        self._pieces: list[_Piece] = []

    @torch.inference_mode()
    def forward(self, model: Model, batch: Batch, cache: KVCache, main_cache: KVCache) -> torch.Tensor:
        """Call the model, whose pieces are the compiled ones while `armed`."""
        with torch.compiler.set_stance("eager_on_recompile") if self.armed else nullcontext():
            hidden: torch.Tensor = model(batch, cache, main_cache)
        return hidden

    def capture(self, models: Resident, main_cache: KVCache) -> None:  # noqa: ARG002 - no compiled piece touches a cache
        """Compile the pieces of these models. The first time it tries the backends."""
        started, failures = time.monotonic(), []
        pieces = [piece for model, _ in models for piece in _pieces(model)]
        if self.armed and pieces == self._pieces:
            self.captures += 1
            return
        self._put_back()
        for backend in (self.backend,) if self.backend else self._backends:
            try:
                compiled = _compiled(pieces, backend)
            except Exception as error:  # noqa: BLE001 - whatever a compiler dies of, the next one is tried
                failures.append(f"{backend}: {_first_line(error)}")
                log.warning("compile failed", backend=backend, error=_first_line(error))
                torch._dynamo.reset()
                continue
            for piece, function in zip(pieces, compiled, strict=True):
                object.__setattr__(piece.layer, "forward", function)  # of this instance; its class stays as it is
            self._pieces, self.backend, self.armed = pieces, backend, True
            self.captures += 1
            log.info("graphs captured", graphs=len(pieces), backend=backend, ms=logs.ms(time.monotonic() - started))
            return
        raise UnsupportedModel(
            "the model's layers cannot be compiled here. Install a C++ compiler for inductor, or serve with --graphs off:"
            + "".join(f"\n  {failure}" for failure in failures)
        )

    def release(self) -> None:
        """Put the layers back as they are written, and drop all compiled code of this process."""
        if self.armed:
            self._put_back()
            torch._dynamo.reset()

    def _put_back(self) -> None:
        self.armed = False
        for piece in self._pieces:
            object.__delattr__(piece.layer, "forward")
        self._pieces = []


def _compiled(pieces: Sequence[_Piece], backend: str) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """The pieces' functions, compiled: by running them on examples, as steps will."""
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = []
    with _compiler_settings(), torch.inference_mode():
        for piece in pieces:
            function = torch.compile(piece.layer.forward, backend=backend, fullgraph=True)
            for count in (_SEVERAL, _ONE):
                rows = piece.rows(count)
                if count > 1:
                    torch._dynamo.mark_dynamic(rows, 0)
                function(rows)
            functions.append(function)
    return functions


@contextmanager
def _compiler_settings() -> Iterator[None]:
    """In this process, without helper processes, and without torch's cache of graphs on disk, which is made of pickles."""
    import torch._dynamo.config as dynamo  # noqa: PLC0415 - takes a second to import, and few want it
    import torch._functorch.config as functorch  # noqa: PLC0415
    import torch._inductor.config as inductor  # noqa: PLC0415

    with (
        dynamo.patch(recompile_limit=_RECOMPILES),
        functorch.patch(enable_autograd_cache=False),
        inductor.patch(compile_threads=1, fx_graph_cache=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about its own modules
        yield


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
