"""Control calls about weights: update, watch, cancel, verify, go back, recover, compare."""

from __future__ import annotations

from typing import Any

import msgspec

from weightcast.control.control_replies import Reply
from weightcast.control.control_routes import Call, Route
from weightcast.control.control_schemas import DigestBody, NoFields, UpdateBody, VerifyBody
from weightcast.control.problems import clipped
from weightcast.control.waiting import within
from weightcast.engines.base import UpdateRequest, UpdateStatus
from weightcast.errors import DeadlineExceeded, NotReady, ReplicaFailed

_LOOK_TIMEOUT_S = 2.0
_CANCEL_TIMEOUT_S = 60.0
_SPARE_S = 60.0  # an update ends by its own deadline; this is for undoing, beyond it


async def update_weights(call: Call[UpdateBody]) -> Reply:
    """Bring the replica to another version. It serves meanwhile, and pauses itself for the commit alone.

    Waits for the end, and replies with one entry per rank; with `"wait": false` the reply is 202 at once, and its `Location`
    tells how the update is doing. The update belongs to the replica, not to the connection: a client that goes away while
    it waits does not cancel it. `DELETE` on its location does.
    """
    return await _followed(call, call.engine.begin_update(_request(call)))


async def recover(call: Call[UpdateBody]) -> Reply:
    """Bring a replica that has FAILED back to a whole version: the last committed one, unless another is named.

    Takes and replies what `/v1/update_weights` does.
    """
    return await _followed(call, call.engine.begin_recovery(_request(call)))


def _request(call: Call[UpdateBody]) -> UpdateRequest:
    request = call.body.request(call.service.settings.update)
    if call.body.source is None:
        return request
    return msgspec.structs.replace(request, source=call.service.settings.sources.resolve(call.body.source))


async def _followed(call: Call[UpdateBody], status: UpdateStatus) -> Reply:
    call.headers["location"] = f"/v1/updates/{status.id}"  # also if it fails: there is more to read
    if not call.body.wait:
        return Reply(update_content(status), 202, call.headers)
    wait_s = status.request.timeout_s + _SPARE_S
    status = await within(wait_s, f"update {status.id}, which goes on,", call.engine.finish_update(status.id))
    return Reply(status.result, headers=call.headers)


async def update_status(call: Call[NoFields]) -> Reply:
    """How an update is doing, or how it ended."""
    return Reply(update_content(call.engine.update_status(call.request.path_params["update_id"])))


async def cancel_update(call: Call[NoFields]) -> Reply:
    """Cancel an update that is staging. No weights are changed. One that commits or has ended is a conflict."""
    update_id = call.request.path_params["update_id"]
    status = await within(_CANCEL_TIMEOUT_S, f"cancelling update {update_id}", call.engine.cancel_update(update_id))
    return Reply(update_content(status))


async def weights(call: Call[NoFields]) -> Reply:
    """What is served: version, root digest, state, since when, and what each rank holds.

    Ranks that cannot be asked now, are too busy to answer, or are lost meanwhile, are shown as they were told last.
    """
    try:
        return Reply(await within(_LOOK_TIMEOUT_S, "looking at the weights", call.engine.look_at_weights()))
    except (NotReady, ReplicaFailed, DeadlineExceeded):
        return Reply(call.engine.weights)


async def verify(call: Call[VerifyBody]) -> Reply:
    """Sum all live weights anew and compare the sums. A difference turns the replica FAILED."""
    return Reply(await call.engine.verify(timeout_s=call.body.timeout))


async def rollback(call: Call[VerifyBody]) -> Reply:
    """Go back to the previous version, if it is still held, and pin it."""
    return Reply(await call.engine.rollback(timeout_s=call.body.timeout))


async def follow(call: Call[VerifyBody]) -> Reply:
    """Remove the pin that a rollback or an explicit version left, so that the newest version is followed again."""
    return Reply(await call.engine.resume_following(timeout_s=call.body.timeout))


async def digest(call: Call[DigestBody]) -> Reply:
    """Digests of the raw bytes that each rank holds of the tensors named. Changes nothing."""
    body = call.body
    return Reply(await call.engine.digest(list(dict.fromkeys(body.names)), body.algorithm, timeout_s=body.timeout))


def update_content(status: UpdateStatus) -> dict[str, Any]:
    """An update as it is shown. Its `times` add up to `seconds`, while it runs too."""
    times = status.timeline.as_dict()
    return {
        "update_id": status.id,
        "version": status.version or None,
        "source": status.source or None,
        "phase": status.phase,
        "bytes": status.nbytes,
        "total": status.total,
        "percent": round(status.percent, 2),
        "error": status.error and {"code": status.error.code, "message": clipped(status.error.message)},
        "result": status.result,
        "began": status.began,
        "ended": status.ended,
        "seconds": times["total_s"],
        "times": times,
        "request": msgspec.to_builtins(status.request),
    }


WEIGHTS_ROUTES = (
    Route("POST", "/v1/update_weights", UpdateBody, update_weights),
    Route("GET", "/v1/updates/{update_id}", NoFields, update_status),
    Route("DELETE", "/v1/updates/{update_id}", NoFields, cancel_update),
    Route("GET", "/v1/weights", NoFields, weights),
    Route("POST", "/v1/weights/verify", VerifyBody, verify),
    Route("POST", "/v1/weights/rollback", VerifyBody, rollback),
    Route("POST", "/v1/weights/follow", VerifyBody, follow),
    Route("POST", "/v1/weights/recover", UpdateBody, recover),
    Route("POST", "/v1/weights/digest", DigestBody, digest),
)
