"""Weights are made, staged and committed in threads inside and outside of torch's inference mode, in every combination."""

import itertools
import threading

import numpy as np
import pytest
import torch
from test_live_delta import MemorySource, stepped
from test_live_model import bits, make

from weightcast import LiveModel
from weightcast.worker.targets.capture import capture_parts

MODES = (False, True)


def slot_made_in(inference, *, device="cpu"):
    with torch.inference_mode(mode=inference):
        net = torch.nn.Module()
        net.w = torch.nn.Parameter(torch.zeros(4, 6, device=device).t())
        net.plain = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16, device=device), requires_grad=False)
    return net, capture_parts(net, "cpu")[0].slots


def data_for(slot, value):
    return np.full(slot.spec.shape, value).astype(slot.spec.dtype.numpy)


@pytest.mark.parametrize(("made", "used"), list(itertools.product(MODES, MODES)))
def test_writing_works_in_every_combination(made, used):
    net, slots = slot_made_in(made)
    for slot in slots:
        pointer = getattr(net, slot.spec.name).data_ptr()
        with torch.inference_mode(mode=used):
            slot.write(data_for(slot, 3))
        assert (slot.live() == data_for(slot, 3)).all()
        assert getattr(net, slot.spec.name).data_ptr() == pointer


@pytest.mark.parametrize(("made", "staged", "used"), list(itertools.product(MODES, MODES, MODES)))
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_is_normal_wherever_it_was_made_and_can_be_installed_everywhere(made, staged, used, device):
    net, slots = slot_made_in(made, device=device)
    for slot in slots:
        parameter = getattr(net, slot.spec.name)
        with torch.inference_mode(mode=staged):
            memory = slot.make(data_for(slot, 5))
        assert not memory.is_inference()
        with torch.inference_mode(mode=used):
            before = slot.memory()
            slot.install(memory)
            after = slot.memory()
        assert not after.is_inference()
        assert after.data_ptr() == memory.data_ptr()
        assert after.stride() == memory.stride()
        assert (slot.live() == data_for(slot, 5)).all()
        if device == "meta":
            assert before is None
            assert not getattr(net, slot.spec.name).is_inference()
            continue
        assert getattr(net, slot.spec.name) is parameter
        assert not before.is_inference()
        with torch.inference_mode(mode=not used):
            slot.install(before)
        assert (slot.live() == 0).all()
        with torch.inference_mode(mode=used):
            slot.install(None)
        assert not slot.resident
        slot.install(before)
        assert slot.resident
        assert parameter.is_inference() == made  # what a parameter is, it stays


@pytest.mark.parametrize(("made", "staged", "used"), list(itertools.product(MODES, MODES, MODES)))
def test_lanes_are_read_and_written_in_every_combination(made, staged, used):
    _, slots = slot_made_in(made)
    for slot in slots:
        for own in (False, True):
            with torch.inference_mode(mode=staged):
                memory = slot.make(data_for(slot, 1)) if own else None
                lanes = slot.lanes(memory)
            indices = np.array([2, 5], dtype=np.uint32)
            with torch.inference_mode(mode=used):
                values = lanes.read(indices)
                lanes.write(indices, values + 1)
            seen = slot.live() if memory is None else slot.seen(memory)
            changed = np.flatnonzero(np.ascontiguousarray(seen).reshape(-1) != (1 if own else 0))
            assert changed.tolist() == [2, 5]


@pytest.mark.parametrize("made", MODES)
@pytest.mark.parametrize("mode", ["copy", "swap", "delta", "inplace"])
def test_a_model_is_staged_outside_and_committed_inside_of_inference_mode(mode, made):
    nets = [make(1)]
    for seed in range(3):
        nets.append(stepped(nets[-1], seed))
    source = MemorySource()
    for number, net in enumerate(nets):
        source.add(f"v{number}", net.state_dict(), base="v1" if number == 2 else None)
    with torch.inference_mode(mode=made):
        target = make(0)
    live = LiveModel(target, source=source)
    for number in (0, 1, 2, 3):
        staged = []
        thread = threading.Thread(target=lambda v=f"v{number}", s=staged: s.append(live.stage(v, commit=mode)))
        thread.start()
        thread.join(30)
        with torch.inference_mode():
            live.enter(staged[0])
            target.head(target.embed.weight[:2].to(torch.bfloat16))
            if number == 1:
                live.revert()
                assert bits(target) == bits(nets[0])
                live.update("v1", commit=mode)
                continue
            live.prove()
            live.settle()
        assert bits(target) == bits(nets[number])
        assert live.root_digest() == source.manifests[f"v{number}"].root_digest
    if not made:  # weights that were normal still are: they can be trained
        target.norm(torch.ones(16)).sum().backward()
        assert target.norm.weight.grad is not None
