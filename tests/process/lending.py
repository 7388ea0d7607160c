"""A trainer that lends its tensors, and receivers of the same process that read them. Prints what it found."""

from __future__ import annotations

import json
from contextlib import closing

import numpy as np

from weightcast import DepotPublisher, LiveModel
from weightcast.clock import Deadline
from weightcast.errors import WeightcastError
from weightcast.transports.http.client import DepotClient, version_path
from weightcast.transports.http.receiver import HttpReceiver
from weightcast.transports.nixl.receiver import Mode, NixlReceiver
from weightcast.wire.nixl import Grant, GrantQuery


def soon() -> Deadline:
    return Deadline.after(30)


def refused(call, *arguments) -> str:
    try:
        call(*arguments)
    except WeightcastError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def read(url: str, mode: Mode, version: str, tensors: dict[str, np.ndarray]) -> bool:
    """Whether NIXL reads just these tensors."""
    live = {name: np.zeros_like(array) for name, array in tensors.items()}
    with closing(NixlReceiver(url, mode=mode)) as receiver:
        LiveModel(live, source=receiver).update(version)
    return all(live[name].tobytes() == tensors[name].tobytes() for name in tensors)


def main() -> None:
    random = np.random.default_rng(3)
    tensors = {f"t{number}": random.standard_normal((number, 1000)).astype(np.float32) for number in range(9)}
    tensors["bytes"] = random.integers(0, 255, 4099, dtype=np.uint8)
    tensors["tied"] = tensors["t3"]
    live = {name: np.zeros_like(array) for name, array in tensors.items()}
    with (
        DepotPublisher("127.0.0.1:0", nixl=True) as publisher,
        closing(DepotClient(publisher.url)) as client,
        closing(HttpReceiver([publisher.url])) as receiver,
    ):
        publisher.publish("step_1", {"a": np.ones(3)})
        with publisher.lend("step_2", tensors, 60) as lease:
            manifest = client.manifest(receiver.newest(), deadline=soon())
            path = version_path("step_2", "nixl", "lease")
            grant = client.ask("POST", path, GrantQuery(manifest.root_digest), Grant, deadline=soon())
            LiveModel(live, source=receiver).update("step_2")
            report = {
                "gdr": read(publisher.url, "gdr", "step_2", tensors),
                "confirmed": lease.confirmed,
                "newest": manifest.version,
                "lent": {name: sum(region.nbytes for region in some) for name, some in grant.regions.items()},
                "again": refused(publisher.lend, "step_2", tensors, 60),
                "active": lease.active,
            }
        report["ended"] = refused(lambda: client.manifest("step_2", deadline=soon()))
        report["left"] = publisher.versions
        publisher.publish("step_2", tensors)
        report["rdma"] = read(publisher.url, "rdma", "step_2", tensors)
        report["strided"] = refused(publisher.lend, "step_3", {"a": np.ones((4, 4)).T}, 60)
    report["equal"] = all(live[name].tobytes() == tensors[name].tobytes() for name in tensors)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
