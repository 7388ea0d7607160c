"""Models for the tests of the embedded engine: built from a checkpoint, and the same in `transformers`."""

from pathlib import Path

import torch
from engine_sequences import PagedSequences

from weightcast.engines.embedded.model.build import build_model
from weightcast.engines.embedded.model.cache import KVCache
from weightcast.engines.embedded.model.loading import load
from weightcast.engines.embedded.model.parallel import OneRank
from weightcast.engines.embedded.model_config import ModelConfig
from weightcast.store.checkpoint import Checkpoint

torch.set_num_threads(1)  # models this small gain nothing from a second thread, and wait for it where cores are shared


class FakeRank:
    """One of several ranks that are not there: enough to look at what a rank holds, not to run it."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def all_reduce(self, tensor):
        raise AssertionError("this rank has no peers")


def loaded(directory, *, ranks=None, dtype=torch.float32, experts="sharded", main=None):
    model = build_model(
        ModelConfig.read(directory), ranks or OneRank(), dtype=dtype, device="cpu", experts=experts, main=main
    )
    load(model, Checkpoint(Path(directory)))
    return model


def new_cache(model, sequences, *, ranks=1, hidden=False, dtype=torch.float32):
    return KVCache.allocate(
        model.config,
        ranks,
        slots=sequences.slots,
        block_size=sequences.block_size,
        dtype=dtype,
        device="cpu",
        hidden=hidden,
    )


def reference(directory, dtype=torch.float32):
    """The same checkpoint in `transformers`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


@torch.no_grad()
def reference_logits(model, tokens):
    return model(torch.tensor([tokens])).logits[0]


def prompts(*lengths, seed=7, tokens=range(256)):
    random = torch.Generator().manual_seed(seed)
    drawn = (torch.randint(tokens.start, tokens.stop, (length,), generator=random) for length in lengths)
    return {f"s{index}": prompt.tolist() for index, prompt in enumerate(drawn)}


def logits_of(model, turns, **kinds):
    """All logits of one batch in a fresh cache, by sequence."""
    sequences = PagedSequences(**kinds)
    return step(model, new_cache(model, sequences), sequences, turns)


def step(model, cache, sequences, turns, **options):
    """Run the next tokens of some sequences; all their logits, by sequence."""
    batch = sequences.batch(turns, rows="all", **options)
    logits = model.logits(model(batch, cache))
    bounds = zip(batch.starts, batch.starts[1:], strict=False)
    return {name: logits[start:stop] for name, (start, stop) in zip(turns, bounds, strict=True)}


def greedy(model, given, count):
    """Continue prompts together, `count` tokens each."""
    sequences = PagedSequences(blocks=256)
    cache, turns, said = new_cache(model, sequences), dict(given), {name: [] for name in given}
    for _ in range(count):
        batch = sequences.batch(turns)
        chosen = model.logits(model(batch, cache)[batch.rows]).argmax(-1).tolist()
        turns = {name: [token] for name, token in zip(turns, chosen, strict=True)}
        for name, (token,) in turns.items():
            said[name].append(token)
    return said
