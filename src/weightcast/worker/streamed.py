"""`inplace`: a route streamed into the live parameters, with no staging memory but that of the deltas."""

from __future__ import annotations

from weightcast.delta.edit import move_tensor
from weightcast.errors import InvalidInput
from weightcast.tensors.digest import DEFAULT, array_digest
from weightcast.worker.commits.delta import can_decode, decode_along
from weightcast.worker.commits.inplace import InplaceCommit
from weightcast.worker.fit import Plan, plan_update
from weightcast.worker.route import Route
from weightcast.worker.stager import Stager
from weightcast.worker.staging import check_digests


class StreamedUpdate:
    """A full version and the deltas on it, written over the live weights. `touched` tells whether a failure matters."""

    def __init__(self, stager: Stager, route: Route, plan: Plan) -> None:
        self._stager, self._route, self._plan = stager, route, plan
        self._full = route.full or route.manifest
        self._base = plan_update(self._full, stager.parts, stager.rules, swap=False) if route.deltas else plan
        self._inplace = InplaceCommit(self._base, stager.receiver, self._full)
        self.nbytes = self._base.nbytes

    @property
    def touched(self) -> bool:
        """Whether live bytes have been overwritten."""
        return self._inplace.touched

    def apply(self) -> None:
        """Stream the full version, then scatter the deltas, and prove what came out."""
        payloads = self._stager.payloads(self._route.deltas)  # before anything is touched
        self.nbytes += sum(map(len, payloads))
        if not can_decode(payloads, self._base, self._full):
            raise InvalidInput(
                f"version {self._route.manifest.version} is a delta, and the model ignores tensors of its base, so it "
                "cannot be decoded in place. Commit by copy, or publish deltas with packing 'gaps'."
            )
        self._inplace.apply(checksum=self._stager.checksum, deadline=self._stager.deadline)
        if payloads:
            self._scatter(payloads)

    def _scatter(self, payloads: list[memoryview]) -> None:
        delta = decode_along(payloads, self._base, self._full)
        digests: dict[str, str] = {}
        for landing in self._plan.landings:
            change = delta.tensors.get(landing.entry.name)
            if change is not None:
                move_tensor(landing.slot.lanes(), change)
            found = array_digest(landing.slot.live(), self._route.manifest.algorithm or DEFAULT)
            if found != landing.entry.digest or landing.entry.name not in digests:
                digests[landing.entry.name] = found
        if self._stager.checksum:
            check_digests(f"version {self._route.manifest.version} in the live model", self._plan.entries, digests)

    def release_adopted(self) -> None:
        """Drop the memory that slots without any were given: the way back of a first load."""
        self._inplace.release_adopted()
