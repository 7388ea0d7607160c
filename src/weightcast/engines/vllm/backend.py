"""The backend `weightcast` of vLLM's weight transfer: one worker's end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightcast import logs
from weightcast.engines.vllm.hooks import install_core_hooks, install_worker_hooks
from weightcast.engines.vllm.updater import CommitMode
from weightcast.engines.vllm.workers import checked, make_updater
from weightcast.errors import InvalidInput


@dataclass
class WeightcastInit(WeightTransferInitInfo):
    """Settings, all optional: a server need not be initialised at all. `commit` is `mode` of `ModelUpdater`."""

    commit: CommitMode | None = None


@dataclass
class WeightcastUpdate(WeightTransferUpdateInfo):
    """A version (default: the newest of the source) and where to get it. Log lines about it carry the `update_id`."""

    source: str = ""
    version: str | None = None
    verify_checksum: bool = True
    timeout: float = 180.0
    update_id: str = ""


class WeightcastEngine(WeightTransferEngine[WeightcastInit, WeightcastUpdate]):
    """Stages in `receive_weights`, which touches nothing, and commits in `finish_weight_update`, whole or not at all."""

    init_info_cls = WeightcastInit
    update_info_cls = WeightcastUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.updater = make_updater(vllm_config, model)
        install_worker_hooks()
        install_core_hooks()

    def init_transfer_engine(self, init_info: WeightcastInit) -> None:
        """Take settings."""
        if init_info.commit is not None and init_info.commit not in get_args(CommitMode):
            raise InvalidInput(f"commit must be one of {', '.join(get_args(CommitMode))}, not {init_info.commit!r}.")
        self.updater.mode = init_info.commit

    def start_weight_update(self) -> None:
        """Nothing to do: what an update before this one left unfinished is dropped when another version is staged."""

    def receive_weights(self, update_info: WeightcastUpdate) -> None:
        """Fetch, verify and prepare everything, or raise."""
        info = update_info
        with logs.bound(update_id=str(info.update_id)):
            self.updater.stage(checked(info.source, info.version, info.verify_checksum, info.timeout))

    def finish_weight_update(self) -> None:
        """Make the staged version live on every rank, or on none."""
        self.updater.commit()

    def shutdown(self) -> None:
        """Release connections and memory. The model stays as it is."""
        self.updater.close()
