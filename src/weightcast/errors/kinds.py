"""What can be wrong with a call, a version, a source or a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike

AnyPath = str | PathLike[str]

SHOWN_MISMATCHES = 20  # in a message
SHOWN_PROBLEMS = 100  # of a manifest, the same


class WeightcastError(Exception):
    """Root of every error this package raises on purpose."""

    code = "error"
    exit_code = 1


class InvalidInput(WeightcastError):
    """The call itself is wrong. Nothing was read or changed."""

    code = "invalid_input"
    exit_code = 2


class UnsupportedTensor(InvalidInput):
    """A tensor whose dtype, layout or type cannot be carried."""

    code = "unsupported_tensor"


class UnknownSource(InvalidInput):
    """No transport is registered for this source."""

    code = "unknown_source"

    def __init__(self, source: str, schemes: Iterable[str]) -> None:
        self.source = source
        super().__init__(
            f"cannot open source {source!r}: give a directory or a URL that starts with one of "
            f"{', '.join(f'{scheme}://' for scheme in schemes)}."
        )


class UnsupportedFormat(InvalidInput):
    """A file of ours in a form that this release cannot read."""

    code = "unsupported_format"


class UnsupportedModel(InvalidInput):
    """A checkpoint whose architecture or settings the embedded engine cannot run."""

    code = "unsupported_model"


class MissingExtra(InvalidInput):
    """An optional package is needed and not installed."""

    code = "missing_extra"

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(f"{needed_for} needs {package}, which is not installed: pip install 'weightcast[{extra}]'")


class NotFound(WeightcastError):
    """Something that was named does not exist."""

    code, exit_code = "not_found", 2


class StoreNotFound(NotFound):
    """The directory given as a store is not one."""

    code = "store_not_found"

    def __init__(self, path: AnyPath, why: str) -> None:
        super().__init__(f"no weightcast store at {path}: {why}.")


class VersionNotFound(NotFound):
    """A version that the source does not hold."""

    code = "version_not_found"

    def __init__(self, version: str, where: AnyPath, present: Sequence[str]) -> None:
        self.version, self.present = version, tuple(present)
        held = f"it holds {', '.join(present)}" if present else "it holds no version yet"
        super().__init__(f"version {version} is not in {where}: {held}.")


class VersionNotSet(NotFound):
    """No version was asked for and no version file says which one is newest."""

    code = "version_not_set"


class SnapshotNotFound(NotFound, FileNotFoundError):
    """No snapshot for this rank and device id; the message lists every place that was searched."""

    code = "snapshot_not_found"

    def __init__(self, rank: int, device_id: str, tried: Sequence[AnyPath]) -> None:
        self.rank, self.device_id, self.tried = rank, device_id, tuple(str(path) for path in tried)
        places = "".join(f"\n  {path}" for path in self.tried)
        super().__init__(f"no snapshot for rank {rank}, device id {device_id}. Looked for, in this order:{places}")


class Conflict(WeightcastError):
    """Right in itself, but not in the present state."""

    code = "conflict"


class VersionExists(Conflict):
    """A version of that name is already published. Versions never change."""

    code = "version_exists"


class StoreBusy(Conflict):
    """Another process is publishing to or pruning the store."""

    code = "store_busy"


class UpdateInProgress(Conflict):
    """A second update while one runs."""

    code = "update_in_progress"

    def __init__(self, state: str) -> None:
        super().__init__(f"an update is already running (state {state}). Wait for it; nothing was changed by this call.")


class WrongState(Conflict):
    """The operation is not allowed in this state."""

    code = "wrong_state"

    def __init__(self, operation: str, state: str, allowed: Iterable[str]) -> None:
        self.state = state
        super().__init__(f"cannot {operation} in state {state}: allowed in {', '.join(sorted(allowed))}.")


class UpdateCancelled(Conflict):
    """The update was cancelled before its commit. No weights were changed."""

    code = "update_cancelled"


class BaseVersionMismatch(Conflict):
    """A delta arrived whose base is not what this rank serves."""

    code = "base_version_mismatch"

    def __init__(
        self, *, version: str | None, base: str | None, base_root: str, serving: str | None, serving_root: str | None
    ) -> None:
        self.version, self.base, self.serving = version, base, serving
        needed = f"version {version} is a delta on {base}" if version else "the delta was made on a state"
        there = serving or ("no published version" if version else "another one")
        cure = (
            f"Update to {base} first, or publish a full version: weightcast publish --mode full."
            if version
            else "Apply the deltas that lead there first, or take the full version."
        )
        super().__init__(
            f"{needed} ({base_root}), but what is there is {there} ({serving_root or 'digest unknown'}). "
            f"No weights were changed. {cure}"
        )


class Corrupt(WeightcastError):
    """Bytes are not what was published."""

    code = "corrupt"


class ManifestCorrupt(Corrupt):
    """A manifest that cannot be believed."""

    code = "manifest_corrupt"

    def __init__(self, path: AnyPath, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        more = len(self.problems) - SHOWN_PROBLEMS
        listed = "; ".join([*self.problems[:SHOWN_PROBLEMS], *([f"and {more} more problems"] if more > 0 else [])])
        super().__init__(
            f"manifest {path} cannot be used: {listed}. Publish the version again under a new name, "
            "or restore the directory from a copy."
        )


class PartCorrupt(Corrupt):
    """A file of a version is missing, has another size, or its header differs from what was published."""

    code = "part_corrupt"

    def __init__(self, path: AnyPath, problem: str) -> None:
        self.path = str(path)
        super().__init__(f"{path}: {problem}.")


class DigestMismatch(Corrupt):
    """Tensors whose bytes differ from their digests. All of them are listed."""

    code = "digest_mismatch"

    def __init__(self, where: str, tensors: Sequence[tuple[str, str, str]]) -> None:
        self.tensors = tuple(name for name, _, _ in tensors)
        lines = "".join(f"\n  {name}: expected {expected}, found {found}" for name, expected, found in tensors)
        super().__init__(f"{where}: {len(tensors)} tensor(s) differ from their digests:{lines}")


class DeltaCorrupt(Corrupt):
    """A delta that is damaged, cut short or contradicts itself. Nothing was changed by reading it."""

    code = "delta_corrupt"

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"the delta cannot be used: {problem}. Nothing was changed; fetch or publish it again.")


class StateCorrupt(Corrupt):
    """The state file of a server, in which it keeps the committed version and the pin, cannot be read."""

    code = "state_corrupt"

    def __init__(self, path: AnyPath, problem: str) -> None:
        super().__init__(
            f"state file {path} cannot be used: {problem}. Put back a copy of it, or remove it: the server then starts with "
            "MODEL_DIR, and without a pin."
        )


class VersionFileInvalid(Corrupt):
    """version.yaml or version.txt is unreadable, or the two disagree."""

    code = "version_file_invalid"


class SnapshotInvalid(Corrupt):
    """A legacy snapshot that is incomplete, mixed or mislabelled. All problems are listed."""

    code = "snapshot_invalid"

    def __init__(self, where: AnyPath, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"snapshot {where} cannot be loaded:" + "".join(f"\n  {problem}" for problem in problems))


class PickleRefused(Corrupt):
    """A pickle asks for something that is not a tensor. Nothing in it was executed."""

    code = "pickle_refused"

    def __init__(self, path: AnyPath, wanted: str) -> None:
        self.wanted = wanted
        super().__init__(
            f"{path}: the pickle asks for {wanted}, which is not part of a tensor. Nothing in it was executed. "
            "If you trust the file, save it again as safetensors with the framework that wrote it."
        )


@dataclass(frozen=True)
class Mismatch:
    """One way in which a version does not fit a model. `found` and `wanted` are the dtypes where the kind is `dtype`."""

    kind: str
    name: str
    detail: str
    found: str = ""
    wanted: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}: {self.detail}"


class VersionDoesNotFit(WeightcastError):
    """Names, shapes, dtypes or groups of a version differ from the model. Nothing was written.

    `mismatches` has all of them; the message lists the first few. `cures` are sentences that each explain many mismatches
    at once, with those mismatches: they replace them in the message.
    """

    code = "version_does_not_fit"

    def __init__(
        self,
        version: str,
        mismatches: Sequence[Mismatch],
        cures: Sequence[tuple[str, Sequence[Mismatch]]] = (),
    ) -> None:
        self.version, self.mismatches = version, tuple(mismatches)
        explained = {mismatch for _, some in cures for mismatch in some}
        rest = [mismatch for mismatch in mismatches if mismatch not in explained]
        sentences = [f"version {version} does not fit the model; no weights were changed.", *(text for text, _ in cures)]
        if rest or not cures:
            sentences.append(_first_of(rest))
        super().__init__(" ".join(sentences))


class DeltaDoesNotFit(VersionDoesNotFit):
    """A delta and the tensors that it was to be applied to are not of the same kind. Nothing was written."""

    code = "delta_does_not_fit"

    def __init__(self, mismatches: Sequence[Mismatch]) -> None:
        self.version, self.mismatches = "", tuple(mismatches)
        WeightcastError.__init__(
            self,
            f"the delta does not fit; nothing was changed. {_first_of(mismatches)}",
        )


def _first_of(mismatches: Sequence[Mismatch]) -> str:
    """Their number, and the first of them, one per line."""
    more = len(mismatches) - SHOWN_MISMATCHES
    lines = [str(mismatch) for mismatch in mismatches[:SHOWN_MISMATCHES]] + ([f"and {more} more"] if more > 0 else [])
    return f"{len(mismatches)} mismatch(es):" + "".join(f"\n  {line}" for line in lines)


class VerificationUnavailable(WeightcastError):
    """A digest check was asked for and the source has nothing to check against."""

    code = "verification_unavailable"
    exit_code = 2


class SourceFailed(WeightcastError):
    """The source died or did not keep its word. No live weights were changed by the bytes it sent."""

    code = "source_failed"


class AccessRefused(WeightcastError):
    """A depot wants a token, or another one than it was given."""

    code = "access_refused"
    exit_code = 2


class SourceNotAllowed(WeightcastError):
    """A request names a source, or an option of one, that only the operator may name. Nothing was opened."""

    code = "source_not_allowed"
    exit_code = 2

    def __init__(self, source: str, why: str, cure: str) -> None:
        super().__init__(f"the source {source!r} is refused: {why}. Nothing was opened. To allow a source, {cure}.")


class GatherFailed(WeightcastError):
    """Ranks that publish a sharded model together could not gather its tensors, or write them. Nothing was published."""

    code = "gather_failed"


class ReceiversLost(WeightcastError):
    """Receivers of a stream died, gave up or took too long. The trainer and all others are not affected."""

    code = "receivers_lost"

    def __init__(self, version: str, dropped: Sequence[str]) -> None:
        self.version, self.dropped = version, tuple(dropped)
        lines = "".join(f"\n  {one}" for one in dropped)
        super().__init__(f"version {version} did not reach every receiver of its stream. Stream it again. Lost:{lines}")


class DeadlineExceeded(WeightcastError):
    """Something took longer than the caller allowed."""

    code = "deadline_exceeded"

    def __init__(self, what: str, seconds: float) -> None:
        self.what, self.seconds = what, seconds
        super().__init__(
            f"{what} did not finish within {seconds:g} s. Give it a larger timeout, or look at what it waits for."
        )


class StorageFailed(WeightcastError):
    """The file system refused an operation."""

    code = "storage_failed"

    def __init__(self, operation: str, path: AnyPath, cause: OSError) -> None:
        self.path, self.errno = str(path), cause.errno
        super().__init__(f"cannot {operation} {path}: {cause.strerror or cause}.")


class UpdateFailed(WeightcastError):
    """Something that is not ours (memory, a framework) failed while a version was staged. No weights were changed."""

    code = "update_failed"


class CommitFailed(WeightcastError):
    """Writing into the live model failed. The message says what the model holds now.

    `edit` is set by `delta.apply` if even undoing failed: its `undo` and `finish` may be tried again.
    """

    code = "commit_failed"
    edit: object | None = None
