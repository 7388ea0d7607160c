"""What the tests of commits in steps share: one model per way of committing, and writes that break off."""

import functools

import pytest
import torch
from test_live_delta import MemorySource, stepped
from test_live_model import bits, make

from weightcast import LiveModel, State
from weightcast.delta.memory import HostMemory
from weightcast.worker.targets.torch_target import TorchSlot

KINDS = ("copy", "swap", "delta", "delta-swap", "delta-swap-spare", "inplace")


class Case:
    """A model that holds `old` and can be brought to `new` in one of the ways there are; `new` is "v2" and `old` "v1"."""

    def __init__(self, kind, **options):
        nets = trained()
        self.kind = kind
        self.mode = "swap" if "swap" in kind else kind
        self.source = MemorySource()
        by_delta = "delta" in kind
        for number, net in enumerate(nets[:4]):
            self.source.add(f"v{number}", net.state_dict(), base=f"v{number - 1}" if number and by_delta else None)
        self.old, self.new, self.newer = (bits(net) for net in nets[1:4])
        self.net = make(0)
        self.live = LiveModel(self.net, source=self.source, **options)
        self.live.update("v0")
        self.live.update("v1", commit="swap" if kind == "delta-swap-spare" else "copy")

    def stage(self, version="v2", **options):
        return self.live.stage(version, commit=self.mode, **options)

    def root(self, version):
        return self.source.manifests[version].root_digest

    def check_old(self):
        assert bits(self.net) == self.old
        assert (self.live.version, self.live.state) == ("v1", State.READY)
        assert self.live.root_digest() == self.root("v1")

    def check_new(self):
        assert bits(self.net) == self.new
        assert (self.live.version, self.live.state) == ("v2", State.READY)
        assert self.live.root_digest() == self.root("v2")


@functools.cache
def trained():
    """Five models, each a step further than the one before. They are only read."""
    torch.set_num_threads(1)
    found = [make(1)]
    for seed in range(4):
        found.append(stepped(found[-1], seed))
    return found


class Writes:
    """Counts what is written into live memory, and breaks it off at these numbers, half done or just done."""

    def __init__(self, patch, fails=(), error=None):
        self.count, self.fails, self.error = 0, set(fails), error or OSError("device lost")
        for owner, name in ((TorchSlot, "write"), (TorchSlot, "install"), (HostMemory, "write")):
            patch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, real):
        def call(this, *args):
            self.count += 1
            if self.count not in self.fails:
                real(this, *args)
                return
            if isinstance(this, HostMemory) and args[0] is not None:
                real(this, args[0][: len(args[0]) // 2], args[1][: len(args[1]) // 2])
            else:
                real(this, *args)
            raise self.error

        return call


def writes_of(kind):
    """How many writes entering takes, so that every one of them can be broken off."""
    case = Case(kind)
    staged = case.stage()
    with pytest.MonkeyPatch.context() as patch:
        writes = Writes(patch)
        case.live.enter(staged)
        return writes.count
