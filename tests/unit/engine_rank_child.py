"""One rank of a divided model: joins its peers over gloo, runs the jobs of a JSON file, leaves its logits beside it.

python engine_rank_child.py JOBS.json RANK SIZE
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from engine_models import loaded, new_cache, prompts
from engine_sequences import PagedSequences

from weightcast.engines.embedded.model.parallel import OneRank


class GlooRanks:
    def __init__(self, rank, size):
        self.rank, self.size, self.calls = rank, size, 0

    def all_reduce(self, tensor):
        dist.all_reduce(tensor)
        self.calls += 1
        return tensor


def run(job, ranks):
    """Prompts, a decoding step and a turn of drafts; with a head, what it says of the same tokens. Local logits of all."""
    main = loaded(job["model"], ranks=ranks, experts=job["experts"])
    head = loaded(job["draft"], ranks=ranks, experts=job["experts"], main=main) if "draft" in job else None
    sequences = PagedSequences()
    cache = new_cache(main, sequences, ranks=ranks.size, hidden=head is not None)
    head_cache = new_cache(head, sequences, ranks=ranks.size) if head else None
    logits = []
    for start, stop in ((0, 9), (9, 10), (10, 14)):
        batch = sequences.batch({name: tokens[start:stop] for name, tokens in prompts(14, 14).items()}, rows="all")
        logits.append(main.logits(main(batch, cache)))
        if head is not None:
            logits.append(head.logits(head(batch, head_cache, cache)))
    routing = cache.routing[sequences.all_slots("s0")].numpy() if cache.routing is not None else np.zeros(0)
    return torch.cat(logits).numpy(), routing


def run_alone(job):
    return run(job, OneRank())


def main():
    path, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(str(path.with_suffix(".rendezvous")), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    ranks, saved = GlooRanks(rank, size), {}
    for index, job in enumerate(json.loads(path.read_text())):
        before = ranks.calls
        saved[f"logits-{index}"], saved[f"routing-{index}"] = run(job, ranks)
        saved[f"calls-{index}"] = np.array(ranks.calls - before)
    np.savez(path.with_suffix(f".{rank}.npz"), **saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
