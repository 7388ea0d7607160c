"""The messages of `ipc://`, as docs/protocol.md describes them. They are msgpack, each one frame of ZeroMQ.

`epoch` numbers the transfers of a connection, so that what still arrives of an abandoned one is recognised; 0 is for what
belongs to none. `sequence` counts the buckets of a transfer.
"""

from __future__ import annotations

import msgspec

from weightcast.transports.ipc.device import Handle

PROTOCOL = 2
MAX_QUESTION_NBYTES = 1 << 16  # from receivers
MAX_MESSAGE_NBYTES = 1 << 28  # from publishers: descriptions grow with the number of tensors


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What all messages have."""

    epoch: int = 0
    sequence: int = 0


# -- from receivers ----------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """The first message. Without the right token the only answer is `Failure`."""

    protocol: int
    token: str
    pid: int


class Ask(Message, frozen=True, kw_only=True, tag="ask"):
    """Which versions are there? With `after`, the answer waits until the newest is another one than that."""

    after: str | None = None


class Describe(Message, frozen=True, kw_only=True, tag="describe"):
    """What is this version?"""

    version: str


class Open(Message, frozen=True, kw_only=True, tag="open"):
    """Begin transfer `epoch` of a version that has this root digest (empty: a stream). Answered by `Layout`.

    `described` is the `sequence` of the manifest by which the receiver knows it, since the same tensors may lie elsewhere by
    now; 0 if it knows them by other means. `request_id` and `update_id` are for the publisher's log.
    """

    version: str
    root_digest: str
    described: int = 0
    request_id: str = ""
    update_id: str = ""


class Ack(Message, frozen=True, kw_only=True, tag="ack"):
    """Bucket `sequence` was copied and may be filled again."""


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """Everything was copied. Answered by `End` if the memory was kept all the time."""


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    """The transfer is given up. Not answered."""


# -- from publishers ---------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The answer to `Hello`. `session` is the secret by which the lifeline is tied to this connection."""

    protocol: int
    session: bytes
    rank: int
    ranks: int


class Listing(Message, frozen=True, kw_only=True, tag="listing"):
    """The versions that can be had, oldest first. `newest` is empty if there is none."""

    newest: str
    versions: tuple[str, ...] = ()


class Description(Message, frozen=True, kw_only=True, tag="description"):
    """A manifest (msgpack). It has no digests for a stream that has not ended. `held`: the whole version is in memory."""

    manifest: bytes
    held: bool


class Layout(Message, frozen=True, kw_only=True, tag="layout"):
    """Where the bytes are: a held version lies in `memory` as its manifest says; a stream comes through it in buckets.

    `memories` are the ids of all memory of this publisher: whatever else a receiver has mapped can go.
    """

    memory: Handle
    memories: tuple[int, ...]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of one tensor in a bucket: the number of the tensor in the manifest, where in it, where in the memory.

    `digest` is that of the whole tensor, with its last span.
    """

    tensor: int
    offset: int
    at: int
    nbytes: int
    digest: str = ""


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    """Bucket `sequence` is filled. It stays until every receiver has answered with `Ack`, or was dropped."""

    spans: tuple[Span, ...]


class End(Message, frozen=True, kw_only=True, tag="end"):
    """The transfer is whole. After a stream, `manifest` is its description with all digests."""

    manifest: bytes = b""


class Failure(Message, frozen=True, kw_only=True, tag="failure"):
    """What was asked for cannot be, or the transfer has ended. `code` is that of one of our errors."""

    code: str
    message: str
    known: tuple[str, ...] = ()


FromReceiver = Hello | Ask | Describe | Open | Ack | Done | Cancel
FromPublisher = Welcome | Listing | Description | Layout | Ready | End | Failure

encode = msgspec.msgpack.Encoder().encode
decode_from_receiver = msgspec.msgpack.Decoder(FromReceiver).decode
decode_from_publisher = msgspec.msgpack.Decoder(FromPublisher).decode
