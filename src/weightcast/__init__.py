"""weightcast: put new weights into running inference engines, whole and verified, or not at all.

    from weightcast import LiveModel, Store

    Store("/mnt/weights").publish("step_100", model.state_dict())
    LiveModel(engine_model, source="file:///mnt/weights").update("step_100")

Importing this loads neither torch nor any other framework.
"""

from weightcast.errors import Mismatch, WeightcastError
from weightcast.store.delta_policy import DeltaPolicy
from weightcast.store.store import Store
from weightcast.wire.manifest import Manifest
from weightcast.worker.fit import TRANSFORMER_GROUPS
from weightcast.worker.live_model import LiveModel
from weightcast.worker.result import UpdateResult
from weightcast.worker.states import State
from weightcast.worker.targets.capture import ModelPart

__version__ = "0.1.0"

__all__ = [
    "TRANSFORMER_GROUPS",
    "DeltaPolicy",
    "LiveModel",
    "Manifest",
    "Mismatch",
    "ModelPart",
    "State",
    "Store",
    "UpdateResult",
    "WeightcastError",
    "__version__",
]
