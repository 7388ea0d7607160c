"""What vLLM's seam leaves out, put in where a worker and an engine core already are.

- A trainer that dies before `finish`, and a `finish` that fails, leave an update open, and vLLM refuses the next one.
- `finish` leaves the prefix cache as it was: prompts would be answered with keys and values of the old weights.
- The version is told in a second call after `finish`: tokens between them would carry the name of the old one.
- If a call fails on one of several ranks, vLLM leaves the answers of the ranks behind it unread, and takes them for those to
  the next call. So errors of our workers come back as answers, and are raised once all ranks have answered.
- What vLLM loads by itself, from disk or after a sleep, is not what was committed last: a delta must not build on that.

Each hook does nothing for other backends, and can be installed any number of times.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from weightcast import logs
from weightcast.errors import rebuilt

log = logs.get(__name__)

BACKEND = "weightcast"
_MARK = "_weightcast"
_COMMITTING = ("finish_weight_update", "weightcast_commit")
_GUARDED = (
    "init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update", "start_draft_weight_update",
    "update_weights", "weightcast_stage", "weightcast_status", "weightcast_abandon", "weightcast_version", *_COMMITTING,
)  # fmt: skip


def install_worker_hooks() -> None:
    """In a process of a worker: let updates be begun anew and staged in the background."""
    from vllm.v1.worker.gpu_worker import Worker  # noqa: PLC0415 - only a worker has it loaded

    from weightcast.engines.vllm.workers import WeightcastExtension  # noqa: PLC0415 - an engine core has no use for it

    if getattr(Worker, _MARK, False):
        return
    setattr(Worker, _MARK, True)
    Worker.start_weight_update = _starting(Worker.start_weight_update)
    Worker.finish_weight_update = _finishing(Worker.finish_weight_update)
    for name in ("reload_weights", "reset_weights", "sleep"):
        if hasattr(Worker, name):
            setattr(Worker, name, _forgetting(getattr(Worker, name)))
    for name, method in vars(WeightcastExtension).items():
        if name.startswith("weightcast_"):
            setattr(Worker, name, method)


def install_core_hooks() -> None:
    """In a process of an engine core, if this is one: let its caches and its version follow the weights."""
    core = sys.modules.get("vllm.v1.engine.core")
    if core is None or getattr(core.EngineCore, _MARK, False):
        return
    setattr(core.EngineCore, _MARK, True)
    core.EngineCore.collective_rpc = _following(core.EngineCore.collective_rpc)


def _ours(worker: Any) -> Any | None:
    engine = getattr(worker, "weight_transfer_engine", None)
    return engine if getattr(engine, "updater", None) is not None else None


def _starting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def start_weight_update(self: Any) -> None:
        if _ours(self) is not None and self._weight_update_active:
            log.warning("update dropped", why="it was begun and not finished, and another one begins")
            self._weight_update_active = False
        original(self)

    return start_weight_update


def _finishing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def finish_weight_update(self: Any) -> None:
        engine = _ours(self)
        if engine is not None and not self._weight_update_active:
            engine.updater.withdraw()  # ranks whose update is open wait for this one
        try:
            original(self)
        except BaseException:
            if engine is not None:
                self._weight_update_active = False
            raise

    return finish_weight_update


def _forgetting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of what changes the weights behind our back: the next version is loaded whole, not only where it differs."""

    @functools.wraps(original)
    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine = _ours(self)
        if engine is not None:
            engine.updater.forget()
        return original(self, *args, **kwargs)

    return change


def _following(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> Any:
        if method not in _GUARDED or not _workers_are_ours(self):
            return original(self, method, timeout, args, kwargs)

        def ask(method: str, args: Any = (), kwargs: Any = None) -> list[Any]:
            return _results(original(self, "weightcast_call", timeout, (method, tuple(args), kwargs or {})))

        if method not in _COMMITTING:
            return ask(method, args, kwargs)
        # Before the weights change: if this fails, nothing has happened but that caches are empty. No step comes between.
        # Running requests keep their tokens; keys and values are computed again, with the new weights.
        self._reset_caches()
        result = ask(method, args, kwargs)
        versions = set(ask("weightcast_version"))
        if len(versions) == 1 and None not in versions:
            self.set_weight_version(versions.pop())
        return result

    return collective_rpc


def _workers_are_ours(core: Any) -> bool:
    """Whether the workers of an engine core have our methods: with the backend, or with the extension."""
    config = getattr(core.vllm_config, "weight_transfer_config", None)
    extension = str(getattr(core.vllm_config.parallel_config, "worker_extension_cls", ""))
    return (config is not None and config.backend == BACKEND) or extension.endswith(".WeightcastExtension")


def _results(answers: list[dict[str, Any]]) -> list[Any]:
    """What the ranks returned; raises what went wrong on any of them, now that all of them have answered."""
    errors = [(rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
    if not errors:
        return [answer["result"] for answer in answers]
    messages = {error["message"]: None for _, error in errors}
    told = [f"rank {rank}: {error['message']}" for rank, error in errors] if len(messages) > 1 else list(messages)
    raise rebuilt(errors[0][1]["code"], "\n".join(told))
