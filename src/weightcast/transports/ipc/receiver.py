"""`ipc://`: the receiving end of publishers on the same host."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import InvalidInput, SourceFailed, VersionNotSet
from weightcast.tensors.flat import Array, Pieces
from weightcast.transports.ipc.attachment import Attachment
from weightcast.transports.ipc.descriptions import decode_description, merged
from weightcast.transports.ipc.devices import device_for
from weightcast.transports.ipc.messages import Ask, Cancel, Describe, Description, Done, End, Layout, Listing, Open
from weightcast.transports.ipc.place import Place
from weightcast.transports.ipc.reading import Transfer
from weightcast.wire.manifest import Manifest

ANSWER_TIMEOUT_S = 10.0
_RANKS_LOOK_S = 0.005


@dataclass(frozen=True)
class _Offer:
    """A version as the publishers describe it: what each trainer rank has, and all of it."""

    parts: tuple[Manifest, ...]
    whole: Manifest
    held: bool


class IpcReceiver:
    """Reads what publishers of this host hold in shared memory, or stream through it.

    It connects when it is first asked for something, and again if the publishers were started anew. Between updates their
    memory stays mapped, until this is closed or they die. Memory: none of its own; a stream takes its two buckets.
    Publishers must be processes of this user, or of the user `uid`.
    """

    def __init__(self, path: Path, *, token: str | None = None, uid: int | None = None) -> None:
        self.url = f"ipc://{path.absolute()}"
        self._path, self._token, self._uid = path, token, uid
        self._attached: list[Attachment] = []
        self._epoch = 0
        self._offer: _Offer | None = None  # the version that was asked for last
        self._ended: Manifest | None = None  # a stream that came whole, until it is asked for

    # -- what there is ------------------------------------------------------------------------------------------------

    def newest(self) -> str:
        """The version that was published last, by all trainer ranks."""
        return self.wait_newer(None, deadline=Deadline.after(ANSWER_TIMEOUT_S), at_once=True)

    def wait_newer(self, after: str | None, *, deadline: Deadline, at_once: bool = False) -> str:
        """The newest version once it is another than `after`; a trainer that publishes wakes everybody who waits here.

        With `at_once` the answer is whatever it is now.
        """
        what = f"waiting for a newer version than {after} from {self.url}"
        asked = None if at_once else after or ""
        while True:
            epoch, listings = self._begin(deadline), []
            for attachment in self._attached:
                listings.append(attachment.ask(Ask(epoch=epoch, after=asked), Listing, deadline=deadline, what=what))
            newest = _newest_of_all(listings)
            if newest and (at_once or newest != after):
                return newest
            if at_once:
                raise VersionNotSet(f"nothing has been published by every trainer rank at {self.url} yet.")
            deadline.check(what)
            sleep(min(_RANKS_LOOK_S, deadline.remaining()))  # some trainer rank is behind

    def manifest(self, version: str, *, deadline: Deadline) -> Manifest:
        """What the version is. One that is being streamed is not sealed before it has come whole."""
        ended, self._ended = self._ended, None
        if ended is not None and ended.version == version:
            return ended  # the trainer may be gone by now
        return self._described(version, deadline).whole

    def holds(self, manifest: Manifest) -> bool:
        """Whether the whole version is in host memory; False for one that is streamed."""
        offer = self._offer
        if offer is None or offer.whole.version != manifest.version:
            offer = self._described(manifest.version, Deadline.after(ANSWER_TIMEOUT_S))
        return offer.held and offer.whole.root_digest == manifest.root_digest

    def _described(self, version: str, deadline: Deadline) -> _Offer:
        epoch, parts, held = self._begin(deadline), [], True
        for attachment in self._attached:
            asked = Describe(epoch=epoch, version=version)
            found = attachment.ask(asked, Description, deadline=deadline, what=f"asking {self.url} for {version}")
            part = decode_description(found.manifest, self.url)
            if part.version != version:
                raise SourceFailed(f"{self.url} was asked for {version} and describes {part.version}.")
            parts.append(part)
            held = held and found.held
        self._offer = _Offer(tuple(parts), merged(parts, self.url), held)
        return self._offer

    def _begin(self, deadline: Deadline) -> int:
        """The number of a new exchange with publishers that are alive."""
        if not self._attached or not all(attachment.alive for attachment in self._attached):
            self._attach(deadline)
        self._epoch += 1
        return self._epoch

    def _attach(self, deadline: Deadline) -> None:
        self.close()
        with ExitStack() as opened:
            first = Attachment.connect(Place.of_rank(self._path, 0, self._uid), token=self._token, deadline=deadline)
            opened.callback(first.close)
            attached = [first]
            for rank in range(1, first.ranks):
                place = Place.of_rank(self._path, rank, self._uid)
                attached.append(Attachment.connect(place, token=self._token, deadline=deadline))
                opened.callback(attached[-1].close)
            lifelines = [one.lifeline for one in attached]
            for one in attached:
                one.companions = tuple(lifeline for lifeline in lifelines if lifeline is not one.lifeline)
            wrong = [f"{one.place.path} is rank {one.rank} of {one.ranks}" for one in attached if one.ranks != first.ranks]
            if wrong:
                raise SourceFailed(f"{self.url} has {first.ranks} trainer rank(s), but {'; '.join(wrong)}.")
            opened.pop_all()
        self._attached = attached

    # -- held versions ------------------------------------------------------------------------------------------------

    @contextmanager
    def mapped(
        self, manifest: Manifest, *, deadline: Deadline, names: Collection[str] | None = None
    ) -> Iterator[Mapping[str, Array]]:
        """The tensors in the publishers' memory. They are told when this begins and ends, and keep it meanwhile, or say that
        they did not.
        """
        if not manifest.sealed:
            raise InvalidInput(f"version {manifest.version} is a stream: it comes once, in pieces, and cannot be mapped.")
        with self._opened(manifest, deadline) as transfers:
            yield {
                entry.name: transfer.array(entry)
                for transfer in transfers
                for entry in transfer.entries(manifest)
                if names is None or entry.name in names
            }

    @contextmanager
    def _opened(self, manifest: Manifest, deadline: Deadline) -> Iterator[list[Transfer]]:
        self._begin(deadline)
        offer = self._same_offer(manifest, deadline)
        self._epoch += 1  # with the very publishers that described it
        epoch, what = self._epoch, f"reading {manifest.version} from {self.url}"
        transfers: list[Transfer] = []
        try:
            for attachment, part in zip(self._attached, offer.parts, strict=True):
                opening = Open(
                    epoch=epoch, version=part.version, root_digest=part.root_digest, described=part.sequence,
                    request_id=logs.ids().get("request_id", ""), update_id=logs.ids().get("update_id", ""),
                )  # fmt: skip
                layout = attachment.ask(opening, Layout, deadline=deadline, what=what)
                memory = attachment.memory(layout.memory, layout.memories, deadline=deadline)
                transfers.append(Transfer(attachment, epoch, part, device_for(layout.memory), memory))
            yield transfers
            if manifest.sealed:
                for transfer in transfers:
                    transfer.attachment.ask(Done(epoch=epoch), End, deadline=deadline, what=what)
        except BaseException:
            self._cancel(epoch)
            raise

    def _same_offer(self, manifest: Manifest, deadline: Deadline) -> _Offer:
        """The version as the publishers describe it now: `manifest` may have come from another process."""
        offer = self._offer
        if offer is None or (offer.whole.version, offer.whole.root_digest) != (manifest.version, manifest.root_digest):
            offer = self._described(manifest.version, deadline)
        if offer.whole.root_digest != manifest.root_digest:
            raise SourceFailed(
                f"{self.url} has version {manifest.version} with root digest {offer.whole.root_digest or '(not yet)'} now, "
                f"and {manifest.root_digest or 'the stream of it'} was asked for. Nothing was changed."
            )
        return offer

    def _cancel(self, epoch: int) -> None:
        for attachment in self._attached:
            if attachment.alive:
                attachment.send(Cancel(epoch=epoch))

    # -- pieces -------------------------------------------------------------------------------------------------------

    def pieces(self, manifest: Manifest, *, deadline: Deadline, names: Collection[str] | None = None) -> Pieces:
        """A held version block by block; a stream as it comes, which can be read once and must be read to its end."""
        with self._opened(manifest, deadline) as transfers:
            if manifest.sealed:
                for transfer in transfers:
                    yield from transfer.blocks(manifest, names, deadline)
            else:
                yield from self._streamed(transfers, names, deadline)

    def _streamed(self, transfers: list[Transfer], names: Collection[str] | None, deadline: Deadline) -> Pieces:
        """Bucket by bucket from whichever trainer rank has one, so that none waits for another."""
        streams = dict(enumerate(transfer.buckets(deadline) for transfer in transfers))
        ended: dict[int, Manifest] = {}
        while streams:
            for rank in self._ready([transfers[rank] for rank in streams], list(streams), deadline):
                try:
                    bucket = next(streams[rank])
                except StopIteration as end:
                    ended[rank] = end.value
                    del streams[rank]
                    continue
                yield from (piece for piece in bucket if names is None or piece.tensor in names)
        self._ended = merged([ended[rank] for rank in range(len(transfers))], self.url)

    def _ready(self, transfers: list[Transfer], ranks: list[int], deadline: Deadline) -> list[int]:
        """The trainer ranks that have sent something; the only one that is left need not have."""
        while len(ranks) > 1:
            ready = [rank for rank, one in zip(ranks, transfers, strict=True) if one.attachment.ready(one.epoch)]
            if ready:
                return ready
            deadline.check(f"receiving a stream from {self.url}")
            sleep(_RANKS_LOOK_S)
        return ranks

    def close(self) -> None:
        """Disconnect and unmap. It connects again if it is used again."""
        attached, self._attached = self._attached, []
        self._offer = self._ended = None
        for attachment in attached:
            attachment.close()


def _newest_of_all(listings: Sequence[Listing]) -> str:
    """The newest version that every trainer rank has; empty if there is none."""
    if len({listing.newest for listing in listings}) == 1:
        return listings[0].newest
    there = [{listing.newest, *listing.versions} for listing in listings]
    return next((version for version in reversed(listings[0].versions) if all(version in one for one in there)), "")
