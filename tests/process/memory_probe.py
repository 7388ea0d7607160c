"""Run by the tests: does one thing with many weights and prints how much memory it took at its peak.

python -m process.memory_probe NAME DIRECTORY [--nbytes N]
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weightcast import LiveModel, Store, delta
from weightcast.delta import warm_up
from weightcast.store.delta_policy import DeltaPolicy
from weightcast.store.snapshot import write_snapshot

TENSOR_NBYTES = 16 << 20
PART_NBYTES = 64 << 20
SIDE = 2048  # of a float32 matrix of 16 MiB
NAMES: list[str] = []  # of the tensors: as many as were asked for


class Peak:
    """The most resident memory that a block had at any moment, beyond what there was when it began."""

    def __enter__(self) -> Peak:
        warm_up()  # code is not counted: it does not grow with the weights
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = _status("VmHWM") - self._before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")


def streamed() -> Iterator[tuple[str, np.ndarray]]:
    """All tensors out of one buffer."""
    buffer = np.empty((SIDE, SIDE), dtype=np.float32)
    for number, name in enumerate(NAMES):
        buffer.fill(number)
        yield name, buffer


def live_mapping() -> dict[str, np.ndarray]:
    """Live arrays for all tensors, every page of them in memory."""
    return {name: np.full((SIDE, SIDE), -1, dtype=np.float32) for name in NAMES}


def check_loaded(model: dict[str, np.ndarray]) -> None:
    assert all(model[name][0, 0] == model[name][-1, -1] == number for number, name in enumerate(NAMES))


def borrow_100_mib(_: Path) -> dict[str, int]:
    """Proves the probe itself."""
    with Peak() as peak:
        np.ones(100 << 20, dtype=np.uint8)
    return {"borrowed": peak.nbytes}


def publish(directory: Path) -> dict[str, int]:
    with Peak() as peak:
        Store(directory).publish("step_1", streamed(), part_nbytes=PART_NBYTES)
    return {"publish": peak.nbytes}


def publish_delta(directory: Path) -> dict[str, int]:
    """Two deltas after a full version, and a third whose payload turns out too large, so that it becomes a full version."""
    delta.warm_up()
    patient, strict = (Store(directory, delta=DeltaPolicy(threads=2, max_share=share)) for share in (0.5, 0.001))
    patient.publish("step_1", moved(0), part_nbytes=PART_NBYTES)
    report = {}
    for name, store, kind in (("delta", patient, "delta"), ("followed", patient, "delta"), ("given_back", strict, "full")):
        with Peak() as peak:
            manifest = store.publish(name, moved(len(report) + 1), part_nbytes=PART_NBYTES)
        assert (manifest.kind, manifest.nbytes) == (kind, len(NAMES) * TENSOR_NBYTES)
        report[name] = peak.nbytes
    return report


def moved(step: int) -> Iterator[tuple[str, np.ndarray]]:
    """The same tensors with a few elements changed, out of one buffer."""
    for name, buffer in streamed():
        buffer[::64, ::7] += step
        yield name, buffer


def update_inplace(directory: Path) -> dict[str, int]:
    model = live_mapping()
    live = LiveModel(model, source=directory)
    with Peak() as peak:
        live.update(commit="inplace")
    check_loaded(model)
    return {"inplace": peak.nbytes}


def first_load(directory: Path) -> dict[str, int]:
    import torch  # here, because the other probes measure a process without it

    module = torch.nn.Module()
    layers = torch.nn.Module()
    module.add_module("layer", layers)
    for name in NAMES:
        layers.register_parameter(name.removeprefix("layer."), torch.nn.Parameter(torch.empty(SIDE, SIDE, device="meta")))
    LiveModel({"warm": torch.zeros(1)})  # imports what capturing torch needs
    with Peak() as captured:
        live = LiveModel(module, source=directory)
    with Peak() as loaded:
        live.update(commit="copy")
    check_loaded({name: parameter.detach().numpy() for name, parameter in module.named_parameters()})
    return {"capture": captured.nbytes, "beyond_model": loaded.nbytes - len(NAMES) * TENSOR_NBYTES}


def load_snapshot_in_parts(directory: Path) -> dict[str, int]:
    return load_snapshot(directory, PART_NBYTES)


def load_snapshot_one_file(directory: Path) -> dict[str, int]:
    return load_snapshot(directory, None)


def load_snapshot(directory: Path, part_nbytes: int | None) -> dict[str, int]:
    write_snapshot(directory, streamed(), rank=0, ranks=1, device_id="0", version="step_1", part_nbytes=part_nbytes)
    model = live_mapping()
    live = LiveModel(model, source=f"snapshot://{directory}?id=0")
    with Peak() as peak:
        live.update(commit="inplace")
    check_loaded(model)
    return {"loading": peak.nbytes}


PROBES = {
    probe.__name__: probe
    for probe in (
        borrow_100_mib, publish, publish_delta, update_inplace, first_load, load_snapshot_in_parts, load_snapshot_one_file
    )
}  # fmt: skip


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=PROBES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--nbytes", type=int, default=0)
    arguments = parser.parse_args()
    NAMES.extend(f"layer.{number}" for number in range(arguments.nbytes // TENSOR_NBYTES))
    print(json.dumps(PROBES[arguments.name](arguments.directory)))


if __name__ == "__main__":
    main()
