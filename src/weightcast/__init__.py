"""weightcast: put new weights into running inference engines, whole and verified, or not at all.

    from weightcast import LiveModel, Store

    Store("/mnt/weights").publish("step_100", model.state_dict())
    LiveModel(engine_model, source="file:///mnt/weights").update("step_100")

Importing this loads neither torch nor any other framework.
"""

from typing import TYPE_CHECKING

from weightcast.errors import Mismatch, WeightcastError
from weightcast.store.delta_policy import DeltaPolicy
from weightcast.store.store import Store
from weightcast.tensors.boxes import Box, Held, Placement
from weightcast.tensors.dtypes import DType
from weightcast.tensors.spec import TensorSpec
from weightcast.wire.manifest import Manifest
from weightcast.worker.fit import TRANSFORMER_GROUPS
from weightcast.worker.live_model import LiveModel
from weightcast.worker.result import UpdateResult
from weightcast.worker.shard_layout import Shards
from weightcast.worker.states import State
from weightcast.worker.targets.capture import ModelPart

if TYPE_CHECKING:
    from weightcast.fleet.vllm_fleet import VllmFleet
    from weightcast.publish.depot_publisher import DepotPublisher
    from weightcast.publish.publication import Publication
    from weightcast.publish.publisher import Publisher
    from weightcast.publish.share_writer import ShareWriter
    from weightcast.publish.shares import Shard

__version__ = "0.1.0"

__all__ = [
    "TRANSFORMER_GROUPS",
    "Box",
    "DType",
    "DeltaPolicy",
    "DepotPublisher",
    "Held",
    "LiveModel",
    "Manifest",
    "Mismatch",
    "ModelPart",
    "Placement",
    "Publication",
    "Publisher",
    "Shard",
    "Shards",
    "ShareWriter",
    "State",
    "Store",
    "TensorSpec",
    "UpdateResult",
    "VllmFleet",
    "WeightcastError",
    "__version__",
]


def __getattr__(name: str) -> object:
    """What publishes from a trainer's memory, by ZeroMQ, which is an extra, or over HTTP, and what drives other engines, is
    loaded when it is asked for.
    """
    if name == "VllmFleet":
        from weightcast.fleet.vllm_fleet import VllmFleet  # noqa: PLC0415

        return VllmFleet
    if name == "DepotPublisher":
        from weightcast.publish.depot_publisher import DepotPublisher  # noqa: PLC0415

        return DepotPublisher
    if name == "ShareWriter":
        from weightcast.publish.share_writer import ShareWriter  # noqa: PLC0415

        return ShareWriter
    if name == "Shard":
        from weightcast.publish.shares import Shard  # noqa: PLC0415

        return Shard
    if name == "Publisher":
        from weightcast.publish.publisher import Publisher  # noqa: PLC0415

        return Publisher
    if name == "Publication":
        from weightcast.publish.publication import Publication  # noqa: PLC0415

        return Publication
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
