"""A trainer loop that publishes every step, and an engine in another process that follows it.

    python examples/trainer_loop.py [--steps N]

The trainer's part is `train`: fifteen lines, of which two are weightcast's. The engine's part is `follow`. The first version
travels whole; after it only what has changed in BF16 does, about a hundredth of the weights at this learning rate.

Needs: pip install 'weightcast[torch,fast]'
"""

import argparse
import multiprocessing
import signal
import sys
import tempfile
import time
from multiprocessing.synchronize import Event

import torch
from torch import nn

from weightcast import LiveModel, Store
from weightcast.errors import NotFound

WIDTH = 1024
PATIENCE_S = 60.0


def network() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


# -- the trainer ----------------------------------------------------------------------------------------------------------


def train(directory: str, steps: int) -> None:
    torch.manual_seed(0)
    model, inputs, goal = network(), torch.randn(64, WIDTH), torch.randn(64, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    store = Store(directory)  # in tmpfs, on a disk, in a mounted bucket
    for step in range(1, steps + 1):
        loss = nn.functional.mse_loss(model(inputs), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}  # what the engine computes in
        manifest = store.publish(f"step_{step}", weights)  # crash-safe: it is there whole, or not at all
        print(f"trainer  {manifest.version}  loss {loss:.5f}  published: {manifest.kind}", flush=True)


# -- the engine -----------------------------------------------------------------------------------------------------------


def follow(directory: str, last: str, ready: Event) -> None:
    """Take each new version until `last` is live. Several that came in the meantime are taken as one delta."""
    with torch.device("meta"):
        model = network().bfloat16()  # shapes only: the first version brings the memory
    fetched: dict[str, list[int]] = {"copy": [], "delta": []}
    with LiveModel(model, source=f"file://{directory}") as live:
        ready.set()
        while live.version != last:
            try:
                result = live.update()  # the newest: staged beside the model, every byte proved, then committed
            except NotFound:  # nothing has been published yet
                time.sleep(0.02)
                continue
            if result.mode == "none":  # it is live already
                time.sleep(0.02)
                continue
            fetched[result.mode].append(result.bytes)
            print(f"engine   {result.version}  {result.mode:5}  {result.bytes:>9,} bytes", flush=True)
        assert live.root_digest() == Store(directory).manifest(last).root_digest, "the live bytes are not the published ones"
    (full,), deltas = fetched["copy"], fetched["delta"]
    assert deltas, "no delta was taken"
    assert max(deltas) < full / 10, f"deltas of {deltas} bytes, where the full version had {full}"
    print(f"\nThe engine holds {last} bit for bit. Full: {full:,} bytes; deltas: {sum(deltas) // len(deltas):,} on average.")


# -- both -----------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="how many versions to publish (default: %(default)s)")
    steps = parser.parse_args().steps
    if steps < 2:
        parser.error("--steps must be at least 2: a full version and a delta")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit like others: what is below cleans up

    processes = multiprocessing.get_context("spawn")
    ready = processes.Event()
    with tempfile.TemporaryDirectory(prefix="wc-example-") as directory:
        engine = processes.Process(target=follow, args=(directory, f"step_{steps}", ready))
        engine.start()
        try:
            assert ready.wait(PATIENCE_S), "the engine did not start"
            train(directory, steps)
            engine.join(PATIENCE_S)
            assert engine.exitcode == 0, f"the engine ended with {engine.exitcode}: see above"
        finally:
            engine.kill()
            engine.join()


if __name__ == "__main__":
    main()
