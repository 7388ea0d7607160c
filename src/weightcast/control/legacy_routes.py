"""The two calls of the old protocol. They do what sleep and wakeup of everything do, and reply with its keys as well.

Their GET changes things, as it always has; it is deprecated, and says so.
"""

from __future__ import annotations

from weightcast.control.control_replies import Reply
from weightcast.control.control_routes import Call, Route, legacy_keys
from weightcast.control.control_schemas import LEGACY_TIMEOUT_S, NoFields
from weightcast.engines.base import TAGS
from weightcast.engines.states import TABLE, ReplicaState
from weightcast.errors import WrongState


async def clear_load_weight(call: Call[NoFields]) -> Reply:
    """Free the memory of weights and caches."""
    cleared = set(TAGS) <= set(call.engine.weights.asleep)
    result = await call.engine.sleep(TAGS, "abort", timeout_s=LEGACY_TIMEOUT_S)
    return Reply(result, beside=legacy_keys("model weight is cleared" if cleared else "clear model weight successfully"))


async def update_model_weight(call: Call[NoFields]) -> Reply:
    """Bring weights and caches back."""
    before = call.engine.weights
    normal = not before.asleep and before.state == ReplicaState.READY
    result = await call.engine.wake(TAGS, timeout_s=LEGACY_TIMEOUT_S)
    state = ReplicaState(call.engine.weights.state)
    if not TABLE[state].healthy:  # nothing slept, and yet there is no whole version: an update is needed, not this
        raise WrongState("update model weight", state, [ReplicaState.READY, ReplicaState.SLEEPING, ReplicaState.CLEARED])
    return Reply(result, beside=legacy_keys("model weight is normal" if normal else "update model weight successfully"))


LEGACY_ROUTES = (
    Route("GET", "/clear_load_weight", NoFields, clear_load_weight, legacy=True),
    Route("POST", "/clear_load_weight", NoFields, clear_load_weight, legacy=True),
    Route("GET", "/update_model_weight", NoFields, update_model_weight, legacy=True),
    Route("POST", "/update_model_weight", NoFields, update_model_weight, legacy=True),
)
