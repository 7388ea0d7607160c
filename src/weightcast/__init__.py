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
from weightcast.wire.manifest import Manifest
from weightcast.worker.fit import TRANSFORMER_GROUPS
from weightcast.worker.live_model import LiveModel
from weightcast.worker.result import UpdateResult
from weightcast.worker.states import State
from weightcast.worker.targets.capture import ModelPart

if TYPE_CHECKING:
    from weightcast.publish.publication import Publication
    from weightcast.publish.publisher import Publisher

__version__ = "0.1.0"

__all__ = [
    "TRANSFORMER_GROUPS",
    "DeltaPolicy",
    "LiveModel",
    "Manifest",
    "Mismatch",
    "ModelPart",
    "Publication",
    "Publisher",
    "State",
    "Store",
    "UpdateResult",
    "WeightcastError",
    "__version__",
]


def __getattr__(name: str) -> object:
    """What needs ZeroMQ, which is an extra, is loaded when it is asked for."""
    if name == "Publisher":
        from weightcast.publish.publisher import Publisher  # noqa: PLC0415

        return Publisher
    if name == "Publication":
        from weightcast.publish.publication import Publication  # noqa: PLC0415

        return Publication
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
