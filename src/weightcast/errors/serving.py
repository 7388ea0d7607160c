"""What can go wrong with a model while it serves."""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.errors.kinds import Conflict, WeightcastError


class VersionNotServed(Conflict):
    """A request asks for a weight version that is not there (yet). `serving` is the one that is."""

    code = "version_not_served"

    def __init__(self, wanted: str, serving: str) -> None:
        self.serving = serving
        super().__init__(
            f"the request asks for weight version {wanted}, and {serving or 'none'} is served. "
            "Try again after the next update."
        )


class ClearIncomplete(WeightcastError):
    """clear() dropped the parameters, but something else still holds their memory."""

    code = "clear_incomplete"

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        super().__init__(
            f"the memory of {len(names)} parameter(s) is still referenced from outside the model, so it was not freed: "
            f"{', '.join(names)}. Drop those references (optimizers, views, captured graphs) and clear again."
        )


class NotReady(WeightcastError):
    """The replica starts, restarts or drains, and takes no requests now. Try again later or elsewhere."""

    code = "not_ready"


class Overloaded(WeightcastError):
    """The replica's queue is full. Try again later or elsewhere."""

    code = "overloaded"


class ReplicaFailed(WeightcastError):
    """A rank died, hung or could not start. The message says which, and why if that is known."""

    code = "replica_failed"
