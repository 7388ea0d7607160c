"""`legacy-ipc://`: the receiving end of a trainer that says in a legacy metadata file where its tensors lie."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import InvalidInput, SourceFailed, WrongState
from weightcast.store.version_file import read_version_file, step_of
from weightcast.tensors.flat import BLOCK_NBYTES, Piece, Pieces
from weightcast.transports.ipc.attachment import Attachment
from weightcast.transports.ipc.device import Device, Handle, Memory
from weightcast.transports.ipc.devices import device_called, device_for
from weightcast.transports.ipc.legacy import LegacyHandle, LegacyTensor, legacy_path, read_legacy
from weightcast.transports.ipc.messages import Cancel, Done, End, Layout, Open
from weightcast.transports.ipc.place import Place
from weightcast.wire.manifest import ROOT, Manifest, TensorEntry

Listed = dict[str, LegacyTensor]


class LegacyIpcReceiver:
    """Reads the tensors of `<directory>/ipc_metas_<device_id>` where they lie. The format has no digests.

    A file of a publisher of ours has the version that it names, and that publisher keeps it in place while it is read. Any
    other file is whatever version the caller, or the version file beside it, says; its bare CUDA handles are opened on
    `device` ("cuda:0"), and all that can be told at the end is whether the file is still the same.
    """

    def __init__(self, directory: Path, device_id: str, *, device: str | None = None) -> None:
        self.url = f"legacy-ipc://{directory.absolute()}?id={device_id}"
        self._dir, self._path, self._device = directory, legacy_path(directory, device_id), device
        self._listed: tuple[str, Listed] | None = None  # what was described last, and the version it was asked for as
        self._attachment: Attachment | None = None
        self._opened: dict[bytes, Memory] = {}
        self._epoch = 0

    def newest(self) -> str:
        """The version that the file names, else the one that the version file beside it names."""
        return _source(read_legacy(self._path)).version or read_version_file(self._dir).version

    def manifest(self, version: str, *, deadline: Deadline) -> Manifest:
        """The tensors that the file lists, as the version that it names; a file that names none takes the one asked for.

        The root digest is in the metadata if the file records it.
        """
        deadline.check(f"reading {self._path}")
        listed = read_legacy(self._path)
        recorded, root = _source(listed).version or version, _source(listed).root_digest
        self._listed = recorded, listed
        self._close_all_but({one.source.handle.data for one in listed.values()})
        tensors = tuple(
            TensorEntry(
                name=name, dtype=one.spec.dtype, shape=one.spec.shape, part=0, offset=0, nbytes=one.spec.nbytes, digest=""
            )
            for name, one in listed.items()
        )
        return Manifest(
            version=recorded,
            sequence=0,
            step=step_of(recorded),
            kind="full",
            created_s=0.0,
            algorithm=None,
            root_digest="",
            parts=(),
            tensors=tensors,
            metadata={ROOT: root} if root else {},
        )

    def pieces(self, manifest: Manifest, *, deadline: Deadline, names: Collection[str] | None = None) -> Pieces:
        """Whole tensors in place; from a GPU, blocks of them."""
        listed = self._same_listed(manifest, deadline)
        wanted = [one for name, one in listed.items() if names is None or name in names]
        what = f"reading {manifest.version} from {self.url}"
        if _source(listed).place:
            with self._kept(_source(listed), deadline, what) as (device, memory):
                for one in wanted:
                    yield from self._read(one, device, memory, deadline, what)
            return
        for one in wanted:
            device = self._bare_device()
            yield from self._read(one, device, self._bare_memory(device, one.source.handle), deadline, what)
        if read_legacy(self._path) != listed:
            raise SourceFailed(f"{self._path} was replaced while the tensors it listed were read. Read the new ones.")

    def close(self) -> None:
        """Disconnect and unmap. It connects again if it is used again."""
        attachment, self._attachment = self._attachment, None
        self._listed = None
        if attachment is not None:
            attachment.close()
        self._close_all_but(set())

    def _same_listed(self, manifest: Manifest, deadline: Deadline) -> Listed:
        """What was described as this version; `manifest` may have come from another process."""
        if self._listed is None or self._listed[0] != manifest.version:
            self.manifest(manifest.version, deadline=deadline)
        recorded, listed = self._listed or ("", {})
        specs = [one.spec for one in listed.values()]
        if recorded != manifest.version or specs != [entry.spec for entry in manifest.tensors]:
            raise SourceFailed(
                f"{self._path} lists {recorded} now, and {manifest.version} as it was before is asked for. "
                "Nothing was changed; ask for the newest version."
            )
        return listed

    # -- memory of a publisher of ours ---------------------------------------------------------------------------------

    @contextmanager
    def _kept(self, source: LegacyHandle, deadline: Deadline, what: str) -> Iterator[tuple[Device, Memory]]:
        """The memory, which its publisher keeps as it is until it is told that all was read."""
        attachment = self._attached(Path(source.place), deadline)
        self._epoch += 1
        try:
            opening = Open(
                epoch=self._epoch, version=source.version, root_digest=source.root_digest, described=source.sequence,
                request_id=logs.ids().get("request_id", ""), update_id=logs.ids().get("update_id", ""),
            )  # fmt: skip
            layout = attachment.ask(opening, Layout, deadline=deadline, what=what)
            if layout.memory != source.handle:
                raise SourceFailed(
                    f"{self._path} says that {source.version} lies in memory {source.handle.id}, and its publisher says "
                    f"memory {layout.memory.id}. Read the file again."
                )
            yield device_for(source.handle), attachment.memory(source.handle, layout.memories, deadline=deadline)
            attachment.ask(Done(epoch=self._epoch), End, deadline=deadline, what=what)
        except BaseException:
            if attachment.alive:
                attachment.send(Cancel(epoch=self._epoch))
            raise

    def _attached(self, place: Path, deadline: Deadline) -> Attachment:
        attachment = self._attachment
        if attachment is None or not attachment.alive or attachment.place.path != place:
            if attachment is not None:
                attachment.close()
            attachment = self._attachment = Attachment.connect(Place(place), deadline=deadline)
        return attachment

    # -- bare memory of a GPU ------------------------------------------------------------------------------------------

    def _bare_device(self) -> Device:
        if self._device is None:
            raise InvalidInput(
                f"{self._path} lists bare CUDA handles, which do not say on which GPU they are. "
                f"Say it: {self.url}&device=cuda:0."
            )
        return device_called(self._device)

    def _bare_memory(self, device: Device, handle: Handle) -> Memory:
        if handle.data not in self._opened:
            self._opened[handle.data] = device.open(handle, _no_descriptor)
        return self._opened[handle.data]

    def _close_all_but(self, handles: set[bytes]) -> None:
        for data in self._opened.keys() - handles:
            self._opened.pop(data).close()

    def _read(self, one: LegacyTensor, device: Device, memory: Memory, deadline: Deadline, what: str) -> Pieces:
        step = max(1, one.spec.nbytes) if device.kind == "memfd" else BLOCK_NBYTES
        for start in range(0, one.spec.nbytes, step):
            deadline.check(what)
            stop = min(start + step, one.spec.nbytes)
            try:
                data = device.read(memory, one.offset + start, one.offset + stop)
            except WrongState as error:  # it was unmapped because its owner died
                raise SourceFailed(f"the owner of the memory died while {what}. No weights were changed.") from error
            yield Piece(one.spec.name, start, data)


def _source(listed: Listed) -> LegacyHandle:
    return next(iter(listed.values())).source


def _no_descriptor(handle: Handle) -> int:
    raise SourceFailed(f"memory {handle.id} needs a file descriptor, and nobody is there to pass one.")
