"""Models for the tests of the embedded engine: built from a checkpoint, and the same in `transformers`."""

from pathlib import Path

import torch
from engine_sequences import PagedSequences

from weightcast.clock import Deadline
from weightcast.engines.embedded.model.build import build_model
from weightcast.engines.embedded.model.cache import KVCache
from weightcast.engines.embedded.model.held import shards_of
from weightcast.engines.embedded.model.parallel import OneRank
from weightcast.engines.embedded.model.weights import materialize
from weightcast.engines.embedded.model_config import ModelConfig
from weightcast.transports.checkpoint import CheckpointReceiver
from weightcast.worker.live_model import LiveModel
from weightcast.worker.shards import cut

torch.set_num_threads(1)  # models this small gain nothing from a second thread, and wait for it where cores are shared


class FakeRank:
    """One of several ranks that are not there: enough to look at what a rank holds, not to run it."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def all_reduce(self, tensor):
        raise AssertionError("this rank has no peers")


def loaded(directory, *, ranks=None, dtype=torch.float32, experts="sharded", main=None):
    model = empty(directory, ranks=ranks, dtype=dtype, experts=experts, main=main)
    load(model, directory)
    return model


def empty(directory, *, ranks=None, dtype=torch.float32, experts="sharded", main=None):
    """The model of a checkpoint as a rank starts with it: without weights."""
    config = ModelConfig.read(directory)
    model = build_model(config, ranks or OneRank(), dtype=dtype, device="meta", experts=experts, main=main)
    materialize(model, "cpu", weights=False)
    return model


def load(model, directory, *, names=(), ignore=()):
    """Bring a checkpoint into a model in the way a rank does, which knows no other way for a first version."""
    receiver = CheckpointReceiver(Path(directory))
    version = cut_from(model, receiver, receiver.identify(deadline=Deadline.after(60)), names=names, ignore=ignore)
    return LiveModel(model).update(version.newest(), source=version)


def cut_from(model, receiver, manifest, *, names=(), ignore=()):
    """What a model holds of a version."""
    shards = shards_of(model, names=names, ignore=ignore)
    return cut(
        receiver, manifest, shards,
        held=None, mode="copy", checksum=True, deadline=Deadline.after(60), progress=lambda *_: None,
    )  # fmt: skip


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


def greedy(model, given, count, *, sequences=None, cache=None):
    """Continue prompts together, `count` tokens each; in a fresh cache, or behind what is in the one that is given."""
    sequences = sequences or PagedSequences(blocks=256)
    cache, turns, said = cache or new_cache(model, sequences), dict(given), {name: [] for name in given}
    for _ in range(count):
        batch = sequences.batch(turns)
        chosen = model.logits(model(batch, cache)[batch.rows]).argmax(-1).tolist()
        turns = {name: [token] for name, token in zip(turns, chosen, strict=True)}
        for name, (token,) in turns.items():
            said[name].append(token)
    return said
