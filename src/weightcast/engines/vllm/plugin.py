"""The entry point of the group `vllm.general_plugins`: vLLM calls it in its front end, its engine core and every worker."""

from __future__ import annotations

from weightcast import logs
from weightcast.engines.vllm.hooks import BACKEND, install_core_hooks

log = logs.get(__name__)


def register() -> None:
    """Register the backend with both factories of vLLM. Safe to call any number of times."""
    install_core_hooks()
    try:
        from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415 - older ones have none
            WeightTransferEngineFactory,
            WeightTransferTrainerFactory,
        )
    except ImportError as error:
        log.warning(
            "backend not registered",
            why="this vLLM has no weight-transfer backends: use --worker-extension-cls, see `weightcast docs vllm`",
            error=error,
        )
        return
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "weightcast.engines.vllm.backend", "WeightcastEngine")
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, "weightcast.engines.vllm.trainer", "WeightcastTrainer")
