"""Two versions of a small model: as checkpoints that an engine can start with, and in stores that updates come from."""

import shutil

import numpy as np
import pytest
import torch
from engine_thread import ThreadRank, feed_of, tokens_of
from safetensors.numpy import load_file, save_file

from engine_reference import PROMPTS
from weightcast.engines.embedded.messages import Digest
from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.engines.embedded.ranks import process
from weightcast.engines.embedded.ranks.rank import Rank
from weightcast.store.store import Store

MORE = 8  # tokens under the new version that are compared: over hundreds, two may be as likely as float32 can tell
LONG = 1500  # tokens of an answer that is still running whatever happens to the weights meanwhile


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Versions:
    """`v1` and `v2` are directories; `full` and `delta` are the URLs of stores in which v2 comes whole or as a delta.

    `more` are tensors that the stores have beside the model's own, by version.
    """

    def __init__(self, root, preset="tiny", *, more=None, **changes):
        self.v1, self.v2 = root / "v1", root / "v2"
        init_checkpoint(self.v1, preset, seed=1, **changes)
        shutil.copytree(self.v1, self.v2)
        self.tensors = {"v1": load_file(self.v1 / "model.safetensors")}
        self.tensors["v2"] = changed(self.tensors["v1"])
        save_file(self.tensors["v2"], self.v2 / "model.safetensors")
        for version, tensors in (more or {}).items():
            self.tensors[version] |= tensors
        for kind in ("full", "delta"):
            store = Store(root / kind)
            store.publish("v1", self.tensors["v1"], "full")
            store.publish("v2", self.tensors["v2"], kind)
        self.full, self.delta = f"file://{root / 'full'}", f"file://{root / 'delta'}"

    def source(self, kind):
        return {"full": self.full, "delta": self.delta}[kind]


def changed(tensors, *, share=0.05, seed=2):
    """Tensors of which a share of the elements differs, by enough to say other things."""
    random = np.random.default_rng(seed)
    return {
        name: (values + (random.random(values.shape) < share) * 3 * values.std() * random.choice([-1, 1], values.shape))
        .astype(values.dtype)
        for name, values in tensors.items()
    }  # fmt: skip


def begun(rank, *, prompts=PROMPTS[:2], made=4, **options):
    """Long requests that have made some tokens."""
    names = [rank.submit(prompt, **{"max_tokens": LONG} | options) for prompt in prompts]
    rank.wait_for(lambda: all(made <= count(rank, name) for name in names))
    return dict(zip(names, prompts, strict=True))


def count(rank, name, version=None):
    """How many tokens have come, of one version or of all."""
    return sum(len(one.tokens) for one in rank.outputs[name] if version in (None, one.version))


def by_version(outputs):
    """The tokens of an answer as (version, tokens), in their order."""
    parts = []
    for output in outputs:
        if output.tokens and (not parts or parts[-1][0] != output.version):
            parts.append((output.version, []))
        if output.tokens:
            parts[-1][1].extend(output.tokens)
    return parts


# -- for several files of tests ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Versions(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def inside(monkeypatch):
    """The ranks that run in threads of the test, to look at their memory."""
    made = []
    monkeypatch.setattr(process, "Rank", lambda *arguments: made.append(Rank(*arguments)) or made[-1])
    return made


def to_v2(versions, kind="full", **options):
    return [feed_of("main", versions.source(kind), take="v2", **options)]


def fresh(directory, prompt, tokens, **settings):
    """What a rank says that was started with this checkpoint."""
    with ThreadRank(directory, **settings) as rank:
        return tokens_of(rank.ask(prompt, max_tokens=tokens))


def digest_of(rank, name):
    """Of a tensor that the rank holds whole."""
    (piece,) = rank.job(Digest(names=(name,), algorithm="xxh3-128"))["digests"][name]
    return piece["digest"]


def check_continued(rank, name, prompt, directory):
    """The answer has changed versions once, and went on as a fresh engine does behind what was said before."""
    rank.wait_for(lambda: count(rank, name, "v2") >= MORE)
    rank.cancel(name)
    (first, said), (second, goes_on) = by_version(rank.outputs[name])
    assert (first, second) == ("v1", "v2")
    assert goes_on[:MORE] == fresh(directory, [*prompt, *said], MORE)
