"""What somebody would write first: backends and steps that fall into vLLM's traps, to show that the traps are there."""

from __future__ import annotations

from dataclasses import dataclass

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class Init(WeightTransferInitInfo):
    pass


@dataclass
class Update(WeightTransferUpdateInfo):
    folder: str
    names: list[str] | None = None

    def tensors(self):
        tensors = load_file(f"{self.folder}/model.safetensors")
        return {name: tensors[name] for name in self.names or tensors}


class Plain(WeightTransferEngine):
    """Loads into the live model as it is."""

    init_info_cls, update_info_cls = Init, Update

    def init_transfer_engine(self, init_info):
        pass

    def start_weight_update(self):
        pass

    def receive_weights(self, update_info):
        self.model.load_weights(update_info.tensors().items())

    def finish_weight_update(self):
        pass

    def shutdown(self):
        pass


class Layerwise(Plain):
    """As vLLM's own backends do it: the model is taken apart in `start`."""

    def start_weight_update(self):
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)


class Raising(Layerwise):
    """One whose `finish` fails after it has done its work."""

    def finish_weight_update(self):
        super().finish_weight_update()
        raise RuntimeError("finish fails")


def register() -> None:
    for engine in (Plain, Layerwise, Raising):
        WeightTransferEngineFactory.register_engine(engine.__name__.lower(), engine)
