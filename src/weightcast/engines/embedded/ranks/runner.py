"""The models of a rank and their caches: built and run. The same on all ranks. Weights come from `live.py`."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path

import numpy as np
import torch

from weightcast import logs
from weightcast.engines.embedded.batch import Batch
from weightcast.engines.embedded.messages import Routing, Submit
from weightcast.engines.embedded.model.build import Model, build_model
from weightcast.engines.embedded.model.cache import KVCache
from weightcast.engines.embedded.model.causal import CausalModel
from weightcast.engines.embedded.model.weights import materialize
from weightcast.engines.embedded.model_config import ModelConfig
from weightcast.engines.embedded.ranks.graphs import make_graphs
from weightcast.engines.embedded.ranks.group import RankGroup
from weightcast.engines.embedded.ranks.step import Work
from weightcast.engines.embedded.scheduling.sequence import Sequence
from weightcast.engines.embedded.settings import EngineSettings
from weightcast.errors import InvalidInput

log = logs.get(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Runner:
    """The models of this rank, without weights at first, and their caches. All ranks must call `forward` alike."""

    def __init__(self, settings: EngineSettings, group: RankGroup) -> None:
        self.settings, self.group = settings, group
        torch.set_num_threads(settings.threads or max(1, len(os.sched_getaffinity(0)) // settings.ranks))
        self.config = ModelConfig.read(Path(settings.model_dir))
        self.draft_config = ModelConfig.read(Path(settings.draft_dir)) if settings.draft_dir else None
        self.dtype = _DTYPES[self.config.dtype if settings.dtype == "auto" else settings.dtype]
        self._build()
        self._size()
        self.graphs = make_graphs(settings.graphs, max_batch=settings.max_batch)
        self._caches: dict[Work, KVCache] = {}
        self.rebuild_caches()

    def _build(self) -> None:
        build = partial(build_model, ranks=self.group, dtype=self.dtype, device="meta", experts=self.settings.experts)
        self.main = build(self.config)
        self.models: dict[Work, Model] = {Work.MAIN: self.main}
        if self.draft_config is not None:
            main = self.main if isinstance(self.main, CausalModel) else None
            self.models[Work.DRAFT] = build(self.draft_config, main=main)
        for model in self.models.values():
            materialize(model, self.settings.device, weights=False)

    @property
    def draft(self) -> Model | None:
        """The draft model, if there is one."""
        return self.models.get(Work.DRAFT)

    # -- caches ----------------------------------------------------------------------------------------------------------

    def _size(self) -> None:
        """How large the caches are. Both models have the same slots, so that one block table serves both."""
        settings, config, draft = self.settings, self.config, self.draft_config
        slot_nbytes = KVCache.nbytes_per_slot(config, self.group.size, dtype=self.dtype, hidden=self._keeps_hidden)
        if draft is not None:
            slot_nbytes += KVCache.nbytes_per_slot(draft, self.group.size, dtype=self.dtype, hidden=False)
        longest = min(known.max_length for known in (config, draft) if known is not None)
        longest = min(settings.max_length or longest, longest)
        useful = settings.max_batch * -(-longest // settings.block_size)
        fitting = settings.cache_nbytes // (slot_nbytes * settings.block_size * self.group.size)
        self.blocks = settings.blocks or max(1, min(useful, fitting))
        self.max_length = min(longest, self.blocks * settings.block_size)
        log.info(
            "cache allocated",
            blocks=self.blocks,
            block_size=settings.block_size,
            nbytes=self.blocks * settings.block_size * slot_nbytes,
            max_length=self.max_length,
        )

    @property
    def _keeps_hidden(self) -> bool:
        return self.draft_config is not None and self.draft_config.mtp

    @property
    def moe(self) -> bool:
        """Whether tokens are routed to experts."""
        return bool(self.config.moe_layers)

    @property
    def has_caches(self) -> bool:
        """Whether keys and values have memory."""
        return bool(self._caches)

    @property
    def cache(self) -> KVCache:
        """The main model's cache."""
        return self._caches[Work.MAIN]

    def release_caches(self) -> None:
        """Free the caches, the draft model's first, and before them what was captured with their addresses."""
        self.graphs.release()
        self._caches.pop(Work.DRAFT, None)
        self._caches.pop(Work.MAIN, None)

    def rebuild_caches(self) -> None:
        """Allocate the caches, if they were freed: empty, with routing recorded anew."""
        if self._caches:
            return
        settings = self.settings
        for work, config in ((Work.MAIN, self.config), (Work.DRAFT, self.draft_config)):
            if config is not None:
                self._caches[work] = KVCache.allocate(
                    config,
                    self.group.size,
                    slots=self.blocks * settings.block_size,
                    block_size=settings.block_size,
                    dtype=self.dtype,
                    device=settings.device,
                    hidden=work is Work.MAIN and self._keeps_hidden,
                )

    def capture(self) -> None:
        """Capture the step functions, once weights and caches are there: at the start, and after addresses changed."""
        self.graphs.capture([(model, self._caches[work]) for work, model in self.models.items()], self.cache)

    # -- steps -----------------------------------------------------------------------------------------------------------

    def forward(self, work: Work, batch: Batch) -> torch.Tensor:
        """The logits of the batch's rows (float32, on the host) on rank 0; no rows on the others."""
        model = self.models[work]
        hidden = self.graphs.forward(model, batch, self._caches[work], self.cache)
        if not len(batch.rows):
            return hidden.new_empty((0, self.config.vocab_size))
        logits = self.group.gather_columns(model.logits(hidden[batch.rows]))
        return logits.narrow(1, 0, self.config.vocab_size) if self.group.rank == 0 else logits

    def check_routing(self, request: Submit) -> None:
        """Refuse to record or replay experts where there are none, or not such."""
        if not self.moe:
            if request.record_routing or request.replay is not None:
                raise InvalidInput("the model has no experts: there is no routing to record or to replay.")
            return
        replay, wanted = request.replay, (len(self.config.moe_layers), self.config.experts_per_token)
        if replay is None:
            return
        if replay.shape[1:] != wanted or len(replay.data) != 2 * math.prod(replay.shape):
            raise InvalidInput(
                f"a routing of shape {list(replay.shape)} in {len(replay.data)} bytes does not fit: this model takes int16 "
                f"numbers of shape [tokens, {wanted[0]} MoE layers, {wanted[1]} experts per token]."
            )
        experts = np.frombuffer(replay.data, dtype="<i2")
        if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < self.config.experts:
            raise InvalidInput(f"a routing names experts outside of 0 to {self.config.experts - 1}.")

    def routing(self, sequence: Sequence) -> Routing:
        """Where the tokens of a sequence went, but for the last, which went through no layer."""
        if self.cache.routing is None:
            raise InvalidInput("the model has no experts: there is no routing to report.")
        slots = torch.tensor(sequence.slots(0, sequence.computed), device=self.settings.device)
        experts = self.cache.routing[slots].cpu().numpy().astype("<i2", copy=False)
        shape = (experts.shape[0], experts.shape[1], experts.shape[2])
        return Routing(shape=shape, data=np.ascontiguousarray(experts).tobytes())
