"""Control calls about requests and memory: pause, resume, abort, sleep, wake up."""

from __future__ import annotations

from weightcast.control.control_replies import Reply
from weightcast.control.control_routes import Call, Route
from weightcast.control.control_schemas import AbortBody, NoFields, PauseBody, ResumeBody, SleepBody, WakeBody, read_tags


async def pause(call: Call[PauseBody]) -> Reply:
    """Stop computing. "abort" ends what runs, with what it has; "wait" lets it end first; "keep" freezes it.

    New requests wait. Pausing what is paused is fine.
    """
    body = call.body
    await call.engine.pause(body.mode, clear_cache=body.clear_cache, timeout_s=body.timeout)
    return Reply({"is_paused": call.engine.is_paused})


async def resume(call: Call[ResumeBody]) -> Reply:
    """Go on. Refused while weights or caches are not resident. Resuming what runs is fine."""
    await call.engine.resume(timeout_s=call.body.timeout)
    return Reply({"is_paused": call.engine.is_paused})


async def is_paused(call: Call[NoFields]) -> Reply:
    """Whether requests wait for a resume."""
    return Reply({"is_paused": call.engine.is_paused})


async def abort_requests(call: Call[AbortBody]) -> Reply:
    """End requests with what they have: all of them, or those named.

    A request's id is that of its answer, or the `x-request-id` that it was sent with; it stands for all its answers.
    """
    body, problems = call.body, call.problems
    if not body.abort_all and not body.req_ids:
        problems.add("req_ids", 'name requests here, or send "abort_all": true')
    elif body.abort_all and body.req_ids:
        problems.add("req_ids", 'cannot be combined with "abort_all": true; send one of them')
    problems.check()
    ids = None if body.abort_all else call.service.in_flight.engine_ids(body.req_ids)
    return Reply(await call.engine.abort_requests(ids, timeout_s=body.timeout))


async def sleep(call: Call[SleepBody]) -> Reply:
    """Pause, and free the memory of weights, caches or both. What sleeps already is fine."""
    tags = read_tags(call.body.tags, call.request.query_params.getlist("tags"), call.problems)
    call.problems.check()
    return Reply(await call.engine.sleep(tags, call.body.mode, timeout_s=call.body.timeout))


async def wakeup(call: Call[WakeBody]) -> Reply:
    """Bring memory back, weights at the last committed version. What `sleep` paused goes on once all is resident."""
    tags = read_tags(call.body.tags, call.request.query_params.getlist("tags"), call.problems)
    call.problems.check()
    return Reply(await call.engine.wake(tags, timeout_s=call.body.timeout))


PAUSE_ROUTES = (
    Route("POST", "/v1/pause", PauseBody, pause),
    Route("POST", "/v1/resume", ResumeBody, resume),
    Route("GET", "/v1/is_paused", NoFields, is_paused),
    Route("POST", "/v1/abort_requests", AbortBody, abort_requests),
    Route("POST", "/v1/sleep", SleepBody, sleep, query=("tags",)),
    Route("POST", "/v1/wakeup", WakeBody, wakeup, query=("tags",)),
)
