"""What a worker of vLLM can be asked by `collective_rpc`, with the backend and without it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from weightcast import logs
from weightcast.engines.host.copy import Fits, HostCopy, HostVersions, Wanted
from weightcast.engines.host.keeper import SharedHostCopy
from weightcast.engines.vllm.peers import Peers
from weightcast.engines.vllm.updater import ModelUpdater
from weightcast.errors import InvalidInput, UpdateFailed, WeightcastError
from weightcast.transports.allowed import AllowedSources

log = logs.get(__name__)


class WeightcastExtension:
    """Methods of a worker. With the backend they are there by themselves; for a vLLM that has no backends, start it with
    ``--worker-extension-cls weightcast.engines.vllm.workers.WeightcastExtension``.

    `weightcast_stage` on all workers, `weightcast_status` until all are STAGED, then `weightcast_commit` is an update.
    """

    def weightcast_stage(
        self,
        source: str,
        version: str | None = None,
        verify_checksum: bool = True,
        timeout: float = 180.0,
        update_id: str = "",
    ) -> None:
        """Stage a version in the background and return at once; `weightcast_status` tells how it goes.

        `update_id` is what the caller calls this update: log lines about it, here and at the source, carry it.
        """
        with logs.bound(update_id=str(update_id)):
            _updater(self).begin(checked(source, version, verify_checksum, timeout))

    def weightcast_status(self) -> str:
        """What this worker serves and has staged, as JSON."""
        return json.dumps(_updater(self).status())

    def weightcast_abandon(self) -> None:
        """Drop what is staged or being staged."""
        _updater(self).abandon()

    def weightcast_commit(self) -> str:
        """Make the staged version live on every worker, or on none, and return its name."""
        return _updater(self).commit()

    def weightcast_call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Call another method, and return its result, or its error: nothing is raised, so that every rank answers."""
        try:
            return {"result": getattr(self, method)(*args, **kwargs)}
        except Exception as error:  # noqa: BLE001 - it is raised where all ranks have answered
            log.warning("call failed", method=method, error=error)
            code = error.code if isinstance(error, WeightcastError) else UpdateFailed.code
            named = str(error) if isinstance(error, WeightcastError) else f"{type(error).__name__}: {error}"
            return {"error": {"code": code, "message": named}}

    def weightcast_version(self) -> str | None:
        """The version that this worker serves."""
        return _updater(self).version


def checked(source: object, version: object, verify_checksum: object, timeout: object) -> Wanted:
    """What a request asks for. Raises `InvalidInput` for one that cannot be meant, `SourceNotAllowed` for a source that the
    server was not started with: WEIGHTCAST_ALLOW_SOURCE.
    """
    if not isinstance(source, str) or not source:
        raise InvalidInput('an update needs a source: {"version": "step_7", "source": "file:///mnt/weights"}.')
    if version is not None and not isinstance(version, str):
        raise InvalidInput(f"the version must be a string, not {version!r}.")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise InvalidInput(f"the timeout must be a number of seconds, not {timeout!r}.")
    return Wanted(AllowedSources.of_environment().resolve(source), version, bool(verify_checksum), float(timeout))


def make_updater(vllm_config: Any, model: Any) -> ModelUpdater:
    """The updater of a worker: with a copy of its own, or, where there are several workers, with one copy per host."""
    parallel = vllm_config.parallel_config
    instance = str(vllm_config.instance_id).partition("_dp")[0]  # replicas on one host share a copy
    folder = Path(str(vllm_config.model_config.model))
    seed = f"checkpoint://{folder.absolute()}" if folder.is_dir() else None
    name = f"vllm-{socket.gethostname()}-{instance}"

    def make_versions(fits: Fits) -> HostVersions:
        if parallel.world_size_across_dp == 1:
            return HostCopy(name=name, seed=seed)
        return SharedHostCopy(name, lambda make: HostCopy(name=name, make_buffers=make, seed=seed), fits)

    return ModelUpdater(model, vllm_config.model_config, make_versions=make_versions, peers=Peers(), rank=int(parallel.rank))


def _updater(worker: Any) -> ModelUpdater:
    engine = getattr(worker, "weight_transfer_engine", None)
    found = getattr(engine, "updater", None) or getattr(worker, "_weightcast_updater", None)
    if found is None:
        found = worker._weightcast_updater = make_updater(worker.vllm_config, worker.model_runner.get_model())
    updater: ModelUpdater = found
    return updater
