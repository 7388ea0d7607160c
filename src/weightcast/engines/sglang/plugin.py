"""The entry point of SGLang's plugins: `load_format="weightcast"` becomes an update from a source of ours."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from weightcast import logs
from weightcast.engines.sglang.request import FORMAT, LOADER, request_from_url
from weightcast.engines.sglang.update import bring, forget
from weightcast.errors import InvalidInput, NotFound, WeightcastError

log = logs.get(__name__)

Result = tuple[bool, str]
Original = Callable[..., Any]

_UPDATERS = (  # the second one is where older releases have the methods
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater",
    "sglang.srt.model_executor.model_runner.ModelRunner",
)
_OTHER_WAYS = ("update_weights_from_distributed", "load_weights_from_distributed", "update_weights_from_ipc")
_SCHEDULERS = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager",
    "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin",
)
_FRONT_ENDS = ("sglang.srt.managers.tokenizer_manager.TokenizerManager",)


def register() -> None:
    """Register the hooks with SGLang, which calls this in each of its processes. Safe twice."""
    disk = _register("update_weights_from_disk", _UPDATERS, from_disk)
    tensor = _register("update_weights_from_tensor", _UPDATERS, from_tensor)
    if not (disk and tensor):
        raise NotFound(
            "this SGLang has its methods for weight updates elsewhere: looked for update_weights_from_disk and "
            f"update_weights_from_tensor in {' and '.join(_UPDATERS)}. load_format={FORMAT!r} will not work."
        )
    for method in _OTHER_WAYS:
        _register(method, _UPDATERS, another_way)
    _register("release_memory_occupation", _SCHEDULERS, released)
    _register("_update_model_path_info", _FRONT_ENDS, renamed)


def from_disk(original: Original, updater: object, *args: Any, **kwargs: Any) -> Result:
    """Around `update_weights_from_disk(model_path, load_format, weight_name_filter=None, recapture_cuda_graph=False)`.

    Nothing is raised: an exception here would end SGLang's scheduler.
    """
    names = ("model_path", "load_format", "weight_name_filter", "recapture_cuda_graph")
    asked = dict(zip(names, args, strict=False)) | kwargs
    if asked.get("load_format") != FORMAT:
        forget(_model(updater))
        return cast("Result", original(updater, *args, **kwargs))
    try:
        _refuse_as_sglang_does(updater)
        if asked.get("weight_name_filter") is not None:
            raise InvalidInput("a weight_name_filter cannot be used with a version: it is loaded whole or not at all.")
        message = bring(_model(updater), request_from_url(asked["model_path"]), session=lambda: _session(updater))
        if asked.get("recapture_cuda_graph") and getattr(updater, "device", "") == "cuda":
            updater.recapture_cuda_graph()  # type: ignore[attr-defined]
    except WeightcastError as error:
        log.error("update failed", code=error.code, error=error)
        return False, str(error)
    except Exception as error:
        log.exception("update crashed")
        return False, f"{type(error).__name__}: {error}"
    return True, message


def from_tensor(original: Original, updater: object, *args: Any, **kwargs: Any) -> Result:
    """Around `update_weights_from_tensor(named_tensors, load_format=None)`: our loader's errors become an answer."""
    asked = dict(zip(("named_tensors", "load_format"), args, strict=False)) | kwargs
    if asked.get("load_format") != LOADER:
        forget(_model(updater))
        return cast("Result", original(updater, *args, **kwargs))
    try:
        return cast("Result", original(updater, *args, **kwargs))
    except WeightcastError as error:
        log.error("update failed", code=error.code, error=error)
        return False, str(error)


def another_way(original: Original, updater: object, *args: Any, **kwargs: Any) -> Any:
    """Around methods that write weights of another origin."""
    forget(_model(updater))
    return original(updater, *args, **kwargs)


def released(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Around `release_memory_occupation`: what was in that memory may be gone when it comes back."""
    forget()
    return original(*args, **kwargs)


def renamed(original: Original, manager: object, *args: Any, **kwargs: Any) -> Any:
    """Around `_update_model_path_info(model_path, load_format)`, which would name the model after the URL of the version."""
    asked = dict(zip(("model_path", "load_format"), args, strict=False)) | kwargs
    return None if asked.get("load_format") == FORMAT else original(manager, *args, **kwargs)


def _register(method: str, owners: tuple[str, ...], hook: Callable[..., Any]) -> bool:
    """Hook the first of these classes that has such a method. False if none has."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - importing this needs no SGLang

    for owner in owners:
        try:
            found = hasattr(pkgutil.resolve_name(owner), method)
        except (ImportError, AttributeError) as error:
            log.debug("hook skipped", owner=owner, error=error)
            continue
        if found:
            target = f"{owner}.{method}"
            if not any(known is hook for _, known, *_ in HookRegistry._hooks.get(target, ())):
                HookRegistry.register(target, hook, HookType.AROUND)
            return True
    return False


def _model(updater: object) -> nn.Module:
    get_model = getattr(updater, "get_model", None)
    return cast("nn.Module", get_model() if get_model is not None else updater.model)  # type: ignore[attr-defined]


def _refuse_as_sglang_does(updater: object) -> None:
    """The refusals that the method has before it writes: memory shared with other servers, and caches of old weights."""
    unshared = getattr(updater, "_assert_weight_cache_inactive", None)
    if unshared is not None:
        unshared("update_weights_from_disk")
    derived = getattr(sys.modules[type(updater).__module__], "_unsupported_derived_weight_cache_error", None)
    why = derived(_model(updater)) if derived is not None else None
    if why is not None:
        raise InvalidInput(why)


@contextmanager
def _session(updater: Any) -> Iterator[None]:
    """What begin_weight_update and end_weight_update do, and the default dtype that loaders expect."""
    default, served = torch.get_default_dtype(), getattr(getattr(updater, "model_config", None), "dtype", None)
    if hasattr(updater, "begin_weight_update"):
        updater.begin_weight_update()
    torch.set_default_dtype(served if isinstance(served, torch.dtype) else default)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
    if hasattr(updater, "end_weight_update"):
        updater.end_weight_update(run_post_load=False)
