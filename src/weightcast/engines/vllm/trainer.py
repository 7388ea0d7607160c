"""The trainer's side of vLLM's weight transfer: `WeightTransferTrainerFactory` with weightcast as its backend.

    trainer = WeightTransferTrainerFactory.trainer_init(
        WeightcastTrainerInfo(rank=0, publish="file:///mnt/weights"),
        client=HTTPVLLMWeightSyncClient("http://gen-0:8000"),  # or weightcast's VllmFleet for many servers
        source=ModuleSource(model),
    )
    trainer.send_weights()

Needs vLLM. Tensors are published as a version, and the servers are told where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.weight_transfer.base import ModuleSource, TrainerInitInfo, TrainerWeightTransferEngine

from weightcast.engines.vllm.outlet import Outlet, open_outlet
from weightcast.engines.vllm.plugin import register
from weightcast.engines.vllm.probe import METADATA_KEY, Fingerprint, encode_fingerprint
from weightcast.errors import InvalidInput, UpdateFailed, WeightcastError, WrongState

if TYPE_CHECKING:
    import torch


@dataclass
class WeightcastTrainerInfo(TrainerInitInfo):
    """Where versions go, and what the servers are told.

    `publish` is "ipc" (shared memory of this host, in a directory of its own; or `ipc:///path`), "http" (served from this
    process's memory at `listen`, an address that servers reach), or a store: a directory or `file:///path`. `source` is what
    servers are told instead, if they reach it under another name.

    `delta` lets a store take deltas. The last `keep` versions stay. They are called `version_prefix` and a number, which
    counts on from what a store has. `token_file`, for "http", has what receivers must show; servers are started
    with WEIGHTCAST_ALLOW_SOURCE='http://trainer:8300?token_file=PATH'. `timeout` is for publishing, and again for what the
    servers do.
    """

    backend: ClassVar[str] = "weightcast"

    publish: str = "ipc"
    listen: str = "127.0.0.1:0"
    source: str | None = None
    delta: bool = True
    keep: int = 2
    version_prefix: str = "step_"
    token_file: str | None = None
    verify_checksum: bool = True
    timeout: float = 180.0


class WeightcastTrainer(TrainerWeightTransferEngine[WeightcastTrainerInfo]):
    """Publishes what the source yields, and has the servers take it. Made by vLLM's factory, on every trainer rank."""

    init_info_cls = WeightcastTrainerInfo

    def __init__(self, info: WeightcastTrainerInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        if source is None:
            raise InvalidInput("weightcast needs a source of weights: pass source=ModuleSource(model), say.")
        if source.held_names() is not None:
            raise InvalidInput(
                "this source gives each rank a part of the parameters only; the sender must be given all of them. Gather "
                "them in the source, or publish from every rank with weightcast.DepotPublisher(rank=…, ranks=…)."
            )
        self.info = info
        self.version: str | None = None
        self._outlet: Outlet | None = None

    @classmethod
    def trainer_init(cls, init_info: WeightcastTrainerInfo, *, client: Any, source: Any = None) -> WeightcastTrainer:
        """Open the place where versions go and greet the servers, on the sender alone."""
        trainer = cls(init_info, client=client, source=source)
        if trainer.is_sender:
            trainer._open()
        return trainer

    def _open(self) -> None:
        info = self.info
        self._outlet = open_outlet(
            info.publish,
            listen=info.listen,
            source=info.source,
            keep=info.keep,
            delta=info.delta,
            prefix=info.version_prefix,
            token_file=info.token_file,
            timeout_s=info.timeout,
        )
        if self._fleet_update() is not None:
            return
        try:
            self.client.init_weight_transfer_engine({})
        except BaseException:
            self.shutdown()
            raise

    def send_weights(self, *, probe: Fingerprint | None = None) -> None:
        """Publish a new version and have all servers serve it. Called on every rank: reading the source is collective.

        When it fails, the servers serve what they served, or what the error says, and the next call sends a new version. A
        `probe` travels in the version's metadata; with a `VllmFleet` as client the servers are then asked for it.
        """
        tensors = self._tensors()
        try:
            if self.is_sender:
                self._send(tensors, probe)
        finally:
            for _ in tensors:  # the other ranks gather every tensor with this one, also after it has failed
                pass

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.source:
            yield name, tensor.detach()

    def _send(self, tensors: Iterator[tuple[str, torch.Tensor]], probe: Fingerprint | None) -> None:
        if self._outlet is None:
            raise WrongState("send weights", "shut down", ["open"])
        metadata = {} if probe is None else {METADATA_KEY: encode_fingerprint(probe)}
        # What a module yields stays as it is meanwhile. Other sources may use the memory of one tensor for the next.
        version = self._outlet.publish(tensors, metadata=metadata, lasting=isinstance(self.source, ModuleSource))
        self._drive(version, self.info.source or self._outlet.url, probe)
        self.version = version
        self._outlet.tidy()

    def _drive(self, version: str, source: str, probe: Fingerprint | None) -> None:
        info, update = self.info, self._fleet_update()
        if update is not None:
            update(version, source, verify_checksum=info.verify_checksum, timeout=info.timeout, probe=probe)
            return
        wanted = {"version": version, "source": source, "verify_checksum": info.verify_checksum, "timeout": info.timeout}
        try:
            self.client.start_weight_update()
            self.client.update_weights(wanted)
            self.client.finish_weight_update(version)
        except WeightcastError:
            raise
        except Exception as error:
            raise UpdateFailed(
                f"version {version} is published at {source}, but the servers did not take it: {_told(error)}"
            ) from error

    def _fleet_update(self) -> Callable[..., object] | None:
        """What a fleet of ours does: it stages everywhere before it commits anywhere, and needs no greeting."""
        update = getattr(self.client, "update", None)
        return update if callable(update) else None

    def shutdown(self) -> None:
        """Close the place where versions go; what lies in this process's memory is gone then. Safe twice."""
        outlet, self._outlet = self._outlet, None
        if outlet is not None:
            outlet.close()


def _told(error: Exception) -> str:
    """The error of a client, with what the server said if the error has it, as those of `requests` do."""
    text = getattr(getattr(error, "response", None), "text", None)
    return f"{type(error).__name__}: {error}" + (f": {text[:2000]}" if isinstance(text, str) and text else "")


register()  # vLLM calls plugins where it serves, not where somebody trains; whoever needs the settings above imports this
