"""The models of a rank and their caches: built, filled and run. The same on all ranks."""

from __future__ import annotations

import logging
import math
import os
from functools import partial
from pathlib import Path

import numpy as np
import torch

from weightcast.engines.embedded.batch import Batch
from weightcast.engines.embedded.messages import Routing, Submit
from weightcast.engines.embedded.model.build import Model, build_model
from weightcast.engines.embedded.model.cache import KVCache
from weightcast.engines.embedded.model.causal import CausalModel
from weightcast.engines.embedded.model.loading import load
from weightcast.engines.embedded.model_config import ModelConfig
from weightcast.engines.embedded.ranks.group import RankGroup
from weightcast.engines.embedded.ranks.step import Work
from weightcast.engines.embedded.scheduling.sequence import Sequence
from weightcast.engines.embedded.settings import EngineSettings
from weightcast.errors import InvalidInput
from weightcast.store.checkpoint import Checkpoint

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Runner:
    """Loads the weights on creation. `forward` runs one model on one batch; all ranks must call it alike."""

    def __init__(self, settings: EngineSettings, group: RankGroup) -> None:
        self.settings, self.group = settings, group
        torch.set_num_threads(settings.threads or max(1, len(os.sched_getaffinity(0)) // settings.ranks))
        self.config = ModelConfig.read(Path(settings.model_dir))
        self.draft_config = ModelConfig.read(Path(settings.draft_dir)) if settings.draft_dir else None
        self._load()
        self._allocate()

    def _load(self) -> None:
        settings = self.settings
        self.dtype = _DTYPES[self.config.dtype if settings.dtype == "auto" else settings.dtype]
        build = partial(build_model, ranks=self.group, dtype=self.dtype, device=settings.device, experts=settings.experts)
        self.main = build(self.config)
        main = self.main if isinstance(self.main, CausalModel) else None
        load(self.main, Checkpoint(Path(settings.model_dir)))
        self.draft: Model | None = None
        if self.draft_config is not None and settings.draft_dir is not None:
            self.draft = build(self.draft_config, main=main)
            load(self.draft, Checkpoint(Path(settings.draft_dir)))

    def _allocate(self) -> None:
        """Caches of both models with the same slots, so that one block table serves both."""
        settings, config, draft = self.settings, self.config, self.draft_config
        hidden = draft is not None and draft.mtp
        slot_nbytes = KVCache.nbytes_per_slot(config, self.group.size, dtype=self.dtype, hidden=hidden)
        if draft is not None:
            slot_nbytes += KVCache.nbytes_per_slot(draft, self.group.size, dtype=self.dtype, hidden=False)
        longest = min(known.max_length for known in (config, draft) if known is not None)
        longest = min(settings.max_length or longest, longest)
        useful = settings.max_batch * -(-longest // settings.block_size)
        fitting = settings.cache_nbytes // (slot_nbytes * settings.block_size * self.group.size)
        self.blocks = settings.blocks or max(1, min(useful, fitting))
        self.max_length = min(longest, self.blocks * settings.block_size)
        slots = self.blocks * settings.block_size
        allocate = partial(
            KVCache.allocate,
            ranks=self.group.size,
            slots=slots,
            block_size=settings.block_size,
            dtype=self.dtype,
            device=settings.device,
        )
        self.cache = allocate(config, hidden=hidden)
        self._loaded: dict[Work, tuple[Model, KVCache]] = {Work.MAIN: (self.main, self.cache)}
        if self.draft is not None and draft is not None:
            self._loaded[Work.DRAFT] = (self.draft, allocate(draft))
        log.info(
            "allocate rank=%d blocks=%d block_size=%d nbytes=%d max_length=%d",
            self.group.rank, self.blocks, settings.block_size, slots * slot_nbytes, self.max_length,
        )  # fmt: skip

    def forward(self, work: Work, batch: Batch) -> torch.Tensor:
        """The logits of the batch's rows (float32, on the host) on rank 0; no rows on the others."""
        model, cache = self._loaded[work]
        hidden: torch.Tensor = model(batch, cache, self.cache)
        if not len(batch.rows):
            return hidden.new_empty((0, self.config.vocab_size))
        logits = self.group.gather_columns(model.logits(hidden[batch.rows]))
        return logits.narrow(1, 0, self.config.vocab_size) if self.group.rank == 0 else logits

    def check_routing(self, request: Submit) -> None:
        """Refuse to record or replay experts where there are none, or not such."""
        routing = self.cache.routing
        if routing is None:
            if request.record_routing or request.replay is not None:
                raise InvalidInput("the model has no experts: there is no routing to record or to replay.")
            return
        replay, wanted = request.replay, tuple(routing.shape[1:])
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
