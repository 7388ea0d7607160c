"""What can go wrong with a model while it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


class FleetUpdateFailed(WeightcastError):
    """Servers of a fleet failed in a step that all must take. `failures` has them all, with their errors, by URL.

    `committed` are those that serve the new version. `serving` tells what each server that failed in its commit serves now,
    None if it could not be asked. If both are empty, nothing was changed anywhere.
    """

    code = "fleet_update_failed"

    def __init__(
        self,
        what: str,
        failures: Mapping[str, WeightcastError],
        *,
        committed: Sequence[str] = (),
        serving: Mapping[str, str | None] | None = None,
    ) -> None:
        self.failures, self.committed, self.serving = dict(failures), tuple(committed), dict(serving or {})
        self.exit_code = min((error.exit_code for error in failures.values()), default=1)
        super().__init__(f"{what}:" + "".join(self._line(url, error) for url, error in failures.items()))

    def _line(self, url: str, error: WeightcastError) -> str:
        told = f" It serves {self.serving[url] or 'it is not known what'} now." if url in self.serving else ""
        return f"\n  {url}: {error.code}: {error}{told}"


class ProbeMismatch(WeightcastError):
    """Servers that committed a version do not compute what its weights must. `servers` has all differences, by URL."""

    code = "probe_mismatch"

    def __init__(self, version: str, tolerance: float, servers: Mapping[str, Sequence[str]]) -> None:
        self.version, self.servers = version, {url: tuple(lines) for url, lines in servers.items()}
        super().__init__(
            f"version {version} is committed, but {len(servers)} server(s) do not compute what it must (log-probabilities, "
            f"tolerance {tolerance:g}). Take them out and update again; if they are all a little off, in another dtype than "
            "the fingerprint, give it a larger tolerance:"
            + "".join(f"\n  {url}: {line}" for url, lines in servers.items() for line in lines)
        )
