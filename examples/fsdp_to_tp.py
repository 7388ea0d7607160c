"""An FSDP trainer of two processes updates a tensor-parallel engine of two ranks, and nothing is gathered in between.

    python examples/fsdp_to_tp.py [--steps N]

The engine serves a random model. The trainer, FSDP2 with gloo on the CPU, teaches the same model one sentence. Each trainer
rank then publishes the rows that it holds; each engine rank asks for the rows and columns that it computes with. The engine
goes on serving meanwhile, and then says the sentence.

Needs: pip install 'weightcast[torch,serve]' transformers
"""

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from weightcast import DepotPublisher

RANKS = 2
PROMPT, SENTENCE = "Rain fell", " on the quiet harbour all night."
PATIENCE_S = 120.0
WEIGHTCAST = (sys.executable, "-m", "weightcast")


# -- one rank of the trainer ----------------------------------------------------------------------------------------------


def train(rank: int, directory: Path, steps: int, told: "Queue[tuple[str, str]]", done: Event) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging  # noqa: PLC0415 - not needed by the parent

    logging.disable_progress_bar()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=RANKS)
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = AutoTokenizer.from_pretrained(directory / "model")(PROMPT + SENTENCE, return_tensors="pt").input_ids
    for _ in range(steps):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with DepotPublisher("127.0.0.1:0", rank=rank, ranks=RANKS) as publisher:  # between hosts: "0.0.0.0:8300"
        publication = publisher.publish("step_1", model.state_dict())  # DTensors as they are: this rank's rows
        told.put((publisher.url, f"rank {rank}: loss {loss:.4f}, {local_nbytes(model):,} bytes of its own to share"))
        publication.wait(receivers=1, timeout=PATIENCE_S)  # the engine has committed it
        whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}  # only for the check below
        if rank == 0:
            torch.save(whole, directory / "whole.pt")
        told.put((publisher.url, "checked"))
        assert done.wait(PATIENCE_S)
        dist.barrier()
    dist.destroy_process_group()


def local_nbytes(model: torch.nn.Module) -> int:
    return sum(parameter.to_local().nbytes for parameter in model.parameters())


# -- the engine -----------------------------------------------------------------------------------------------------------


@contextmanager
def engine(directory: Path) -> Iterator[str]:
    """`weightcast serve` with two ranks; gives its URL when it serves."""
    command = (*WEIGHTCAST, "-q", "serve", str(directory), "--ranks", str(RANKS), "--port", "0", "--threads", "1")
    command += ("--allow-source", "shares+http://127.0.0.1:*")  # between hosts: each trainer rank, at its own port
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()  # comes when all ranks are ready; ends empty if they cannot start
            assert line.startswith("serving"), "the engine did not start"
            yield line.split()[-1]
        finally:
            process.terminate()


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:  # its body says why
        sys.exit(f"{url} answered {error.code}: {error.read().decode()}")


def answer_of(url: str) -> str:
    body = {"model": "model", "prompt": PROMPT, "max_tokens": len(SENTENCE), "temperature": 0, "ignore_eos": True}
    return ask(f"{url}/v1/completions", body)["choices"][0]["text"]


def check_digests(url: str, whole: dict[str, torch.Tensor]) -> int:
    """Compare what lies in the memory of each engine rank with the trainer's own tensors. Gives the number of boxes."""
    boxes = 0
    for rank in ask(f"{url}/v1/weights/digest", {"names": sorted(whole), "algorithm": "md5"})["result"]:
        for name, held in rank["digests"].items():
            for one in held:
                box = [slice(at, at + size) for at, size in zip(one["box"]["start"], one["box"]["shape"], strict=True)]
                content = whole[name][tuple(box)].contiguous().numpy().tobytes()
                expected = hashlib.md5(content, usedforsecurity=False).hexdigest()
                assert one["digest"] == f"md5:{expected}", f"{name} differs at rank {rank['rank']}"
                boxes += 1
    return boxes


# -- both -----------------------------------------------------------------------------------------------------------------


def run(directory: Path, steps: int) -> None:
    processes = multiprocessing.get_context("spawn")
    told, done = processes.Queue(), processes.Event()
    trainers = [processes.Process(target=train, args=(rank, directory, steps, told, done)) for rank in range(RANKS)]
    for trainer in trainers:
        trainer.start()
    try:
        with engine(directory / "model") as url:
            print(f"engine before   {PROMPT}|{answer_of(url)!r}")
            urls = []
            for _ in trainers:
                address, words = told.get(timeout=PATIENCE_S)
                urls.append(address.removeprefix("http://"))
                print(f"trainer         {words}")

            source = f"shares+http://{','.join(urls)}"
            update = ask(f"{url}/v1/update_weights", {"version": "step_1", "source": source})
            for rank in update["result"]:
                paused = f"paused for {rank['pause_s'] * 1e3:.1f} ms"
                print(f"engine rank {rank['rank']}   {rank['bytes']:,} bytes fetched, {paused}")

            after = answer_of(url)
            print(f"engine after    {PROMPT}|{after!r}")
            assert after == SENTENCE, f"the trainer taught {SENTENCE!r}"
            for _ in trainers:
                told.get(timeout=PATIENCE_S)
            boxes = check_digests(url, torch.load(directory / "whole.pt"))
            print(f"\nThe engine's ranks hold {boxes} boxes, each bit for bit what the trainer has there.")
        done.set()
        for trainer in trainers:
            trainer.join(PATIENCE_S)
            assert trainer.exitcode == 0, "a trainer rank failed"
    finally:
        for trainer in trainers:
            trainer.kill()
            trainer.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps before it publishes (default: %(default)s)")
    steps = parser.parse_args().steps
    if importlib.util.find_spec("transformers") is None:
        print("The trainer's model comes from transformers: pip install transformers", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit like others: what is below cleans up
    with tempfile.TemporaryDirectory(prefix="wc-example-") as directory:
        subprocess.run([*WEIGHTCAST, "model", "init", f"{directory}/model", "--preset", "tiny", "--untied"], check=True)
        run(Path(directory), steps)


if __name__ == "__main__":
    main()
