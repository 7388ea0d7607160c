"""Every exception weightcast raises.

    WeightcastError
    ├── InvalidInput              what the caller passed is wrong; nothing was read or changed
    │   ├── UnsupportedTensor     a dtype, layout or object that cannot be carried
    │   ├── UnknownSource         no transport for this URL
    │   ├── UnsupportedFormat     a file of ours with a format number or kind this release cannot read
    │   ├── UnsupportedModel      a checkpoint that the embedded engine cannot run
    │   └── MissingExtra          an optional package is not installed
    ├── NotFound
    │   ├── StoreNotFound · VersionNotFound · VersionNotSet
    │   └── SnapshotNotFound      also a FileNotFoundError; lists every place that was searched
    ├── Conflict                  right in itself, wrong now
    │   ├── VersionExists · StoreBusy · UpdateInProgress · WrongState
    │   ├── UpdateCancelled       somebody cancelled the update before it was committed
    │   ├── VersionNotServed      a request asks for a version that the replica does not serve
    │   └── BaseVersionMismatch   a delta for another base than the one that is served
    ├── Corrupt                   bytes are not what was published
    │   ├── ManifestCorrupt · PartCorrupt · DigestMismatch · VersionFileInvalid · SnapshotInvalid · StateCorrupt
    │   ├── DeltaCorrupt          a delta that contradicts itself, its base or its digests
    │   └── PickleRefused         a pickle that wants to build something other than tensors
    ├── VersionDoesNotFit         names, shapes, dtypes or groups differ from the model; carries all mismatches
    │   └── DeltaDoesNotFit       the same for a delta and the tensors it is to be applied to
    ├── VerificationUnavailable   a digest check was asked for and the source has no digests
    ├── SourceFailed              the source died, or sent too little, too much or the same twice
    ├── AccessRefused             a depot wants a token, or another one than it was given
    ├── SourceNotAllowed          a request names a source that only the operator may name
    ├── GatherFailed              ranks of a trainer could not gather a sharded model, or write their parts
    ├── ReceiversLost             receivers of a live stream died, gave up or took too long
    ├── DeadlineExceeded
    ├── StorageFailed             the file system refused: full, read-only, no permission
    ├── UpdateFailed              something outside of weightcast broke an update; no weights were changed
    ├── CommitFailed              writing into the live model failed; says which version it holds now
    ├── NotReady                  a replica that starts, restarts, drains, sleeps or has FAILED takes no requests
    ├── Overloaded                the queue of a replica is full
    ├── ReplicaFailed             a rank of a replica died, hung or could not start
    ├── FleetUpdateFailed         servers of a fleet could not take a version; says which did and what the others serve
    ├── ProbeMismatch             an engine does not compute what the version that it serves must
    └── ClearIncomplete           memory that clear() should have freed is still referenced

Each class has a stable `code`, used by programs where people read the message, and an `exit_code` for the command line:
2 where the caller must change the call, 1 where the call was right and failed.
"""

from __future__ import annotations

from weightcast.errors.kinds import (
    AccessRefused,
    AnyPath,
    BaseVersionMismatch,
    CommitFailed,
    Conflict,
    Corrupt,
    DeadlineExceeded,
    DeltaCorrupt,
    DeltaDoesNotFit,
    DigestMismatch,
    GatherFailed,
    InvalidInput,
    ManifestCorrupt,
    Mismatch,
    MissingExtra,
    NotFound,
    PartCorrupt,
    PickleRefused,
    ReceiversLost,
    SnapshotInvalid,
    SnapshotNotFound,
    SourceFailed,
    SourceNotAllowed,
    StateCorrupt,
    StorageFailed,
    StoreBusy,
    StoreNotFound,
    UnknownSource,
    UnsupportedFormat,
    UnsupportedModel,
    UnsupportedTensor,
    UpdateCancelled,
    UpdateFailed,
    UpdateInProgress,
    VerificationUnavailable,
    VersionDoesNotFit,
    VersionExists,
    VersionFileInvalid,
    VersionNotFound,
    VersionNotSet,
    WeightcastError,
    WrongState,
)
from weightcast.errors.serving import (
    ClearIncomplete,
    FleetUpdateFailed,
    NotReady,
    Overloaded,
    ProbeMismatch,
    ReplicaFailed,
    VersionNotServed,
)

__all__ = [
    "AccessRefused",
    "AnyPath",
    "BaseVersionMismatch",
    "ClearIncomplete",
    "CommitFailed",
    "Conflict",
    "Corrupt",
    "DeadlineExceeded",
    "DeltaCorrupt",
    "DeltaDoesNotFit",
    "DigestMismatch",
    "FleetUpdateFailed",
    "GatherFailed",
    "InvalidInput",
    "ManifestCorrupt",
    "Mismatch",
    "MissingExtra",
    "NotFound",
    "NotReady",
    "Overloaded",
    "PartCorrupt",
    "PickleRefused",
    "ProbeMismatch",
    "ReceiversLost",
    "ReplicaFailed",
    "SnapshotInvalid",
    "SnapshotNotFound",
    "SourceFailed",
    "SourceNotAllowed",
    "StateCorrupt",
    "StorageFailed",
    "StoreBusy",
    "StoreNotFound",
    "UnknownSource",
    "UnsupportedFormat",
    "UnsupportedModel",
    "UnsupportedTensor",
    "UpdateCancelled",
    "UpdateFailed",
    "UpdateInProgress",
    "VerificationUnavailable",
    "VersionDoesNotFit",
    "VersionExists",
    "VersionFileInvalid",
    "VersionNotFound",
    "VersionNotServed",
    "VersionNotSet",
    "WeightcastError",
    "WrongState",
    "rebuilt",
]


def rebuilt(code: str, message: str) -> WeightcastError:
    """An error that was raised in another process, from its code and message. Unknown codes become `WeightcastError`."""
    kinds = [WeightcastError]
    while kinds:
        kind = kinds.pop()
        if kind.code == code:
            error = kind.__new__(kind)  # without __init__: the message is complete, what it was made from stayed there
            error.args = (message,)
            return error
        kinds += kind.__subclasses__()
    return WeightcastError(message)
