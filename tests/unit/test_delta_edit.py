"""Edits: absolute values at indices, which can be written again, journalled, and taken back."""

import struct

import msgspec
import numpy as np
import pytest
import xxhash
from delta_samples import copied, pair, same, state_chains
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast import delta
from weightcast.delta.memory import memory_of
from weightcast.errors import DeltaCorrupt, DeltaDoesNotFit
from weightcast.tensors.dtypes import DType


def memories_of(state):
    return {name: memory_of(name, array) for name, array in state.items()}


def edit_between(base, new):
    return delta.prepare(memories_of(base), delta.decode(delta.encode(base, new), base))


@pytest.fixture
def sample(rng):
    pairs = {
        "w": pair(rng, DType.BF16, (30, 20), density=0.05),
        "all": pair(rng, DType.F32, (90,), density=1),
        "wide": pair(rng, DType.F64, (50,), density=0.1),
        "q": pair(rng, DType.F8_E4M3, (31,), density=0.1),
        "same": (np.zeros(4, np.int32),) * 2,
    }
    return ({name: both[side].copy() for name, both in pairs.items()} for side in (0, 1))


def test_preparing_only_reads(sample):
    base, new = sample
    snapshot = copied(base)
    edit = edit_between(base, new)
    assert same(base, snapshot)
    assert {one.spec.name for one in edit.tensors} == {"w", "all", "wide", "q"}
    sizes = [
        one.before.nbytes + one.after.nbytes + (0 if one.indices is None else one.indices.nbytes) for one in edit.tensors
    ]
    assert edit.nbytes == sum(sizes)


@settings(max_examples=60)
@given(chain=state_chains(), order=st.lists(st.booleans(), min_size=1, max_size=6))
def test_finish_and_undo_come_in_any_order_and_number(chain, order):
    base, new = chain
    edit = edit_between(base, new)
    journalled = delta.Edit.from_journal(edit.to_journal())
    target = copied(base)
    for forward in order:
        for one in (edit, journalled):
            (one.finish if forward else one.undo)(memories_of(target))
            assert same(target, new if forward else base)


@settings(max_examples=60)
@given(chain=state_chains())
def test_a_journal_holds_all_of_an_edit(chain):
    edit = edit_between(*chain)
    journal = edit.to_journal()
    again = delta.Edit.from_journal(journal)
    assert [one.spec for one in again.tensors] == [one.spec for one in edit.tensors]
    for one, other in zip(edit.tensors, again.tensors, strict=True):
        assert (one.indices is None) == (other.indices is None)
        assert one.indices is None or (one.indices.dtype, one.indices.tolist()) == (
            other.indices.dtype,
            other.indices.tolist(),
        )
        assert (one.before.tobytes(), one.after.tobytes()) == (other.before.tobytes(), other.after.tobytes())
    assert again.to_journal() == journal


def test_a_damaged_journal_is_refused_wherever_it_is_damaged(sample):
    journal = bytearray(edit_between(*sample).to_journal())
    for at in range(len(journal)):
        for flip in (0x01, 0x80, 0xFF):
            journal[at] ^= flip
            with pytest.raises(DeltaCorrupt):
                delta.Edit.from_journal(journal)
            journal[at] ^= flip
    delta.Edit.from_journal(journal)


def test_a_journal_that_is_cut_short_or_longer_is_refused(sample):
    journal = edit_between(*sample).to_journal()
    for length in range(len(journal)):
        with pytest.raises(DeltaCorrupt):
            delta.Edit.from_journal(journal[:length])
    for extra in (b"\0", journal):
        with pytest.raises(DeltaCorrupt):
            delta.Edit.from_journal(journal + extra)


def forged_journal(entries, body=b""):
    """A journal whose digest is right, whatever it says."""
    table = msgspec.json.encode(entries)
    return struct.pack("<8sQ16s", b"wcedit1\n", len(table), xxhash.xxh3_128(table + body).digest()) + table + body


ENTRY = {"name": "w", "dtype": "U16", "shape": [10], "changes": 2, "whole": False}
VALUES = np.array([1, 2], np.uint16).tobytes() * 2


def test_a_journal_that_lies_is_refused():
    good = forged_journal([ENTRY], np.array([1, 9], np.uint32).tobytes() + VALUES)
    assert delta.Edit.from_journal(good).tensors[0].indices.tolist() == [1, 9]
    for entries, body in [
        ([ENTRY], np.array([1, 10], np.uint32).tobytes() + VALUES),  # outside: a scatter would write past the end
        ([ENTRY], b""),
        ([ENTRY], np.array([1, 9], np.uint32).tobytes() + VALUES + b"\0"),
        ([{**ENTRY, "changes": -1}], b""),
        ([{**ENTRY, "changes": 11}], bytes(88)),
        ([{**ENTRY, "whole": True}], VALUES),
        ([{**ENTRY, "whole": True, "changes": 1}], bytes(4)),
        ([{**ENTRY, "dtype": "U4"}], VALUES),
        ([{**ENTRY, "name": ""}], np.array([1, 9], np.uint32).tobytes() + VALUES),
        ([{**ENTRY, "shape": ["x"]}], VALUES),
        ({"not": "a list"}, b""),
    ]:
        with pytest.raises(DeltaCorrupt):
            delta.Edit.from_journal(forged_journal(entries, body))


def test_a_journal_of_another_model_is_refused_before_anything_is_written(sample):
    base, new = sample
    edit = delta.Edit.from_journal(edit_between(base, new).to_journal())
    for change in ({"w": base["w"][:5]}, {"all": base["all"].view(np.int32)}, {"q": None}):
        target = {name: array for name, array in {**copied(base), **change}.items() if array is not None}
        snapshot = copied(target)
        for act in (edit.finish, edit.undo):
            with pytest.raises(DeltaDoesNotFit):
                act(memories_of(target))
            assert same(target, snapshot)


def test_an_edit_leaves_tensors_alone_that_it_does_not_know(sample):
    base, new = sample
    edit = edit_between(base, new)
    target = {**copied(base), "other": np.arange(5)}
    edit.finish(memories_of(target))
    assert same(target, {**new, "other": np.arange(5)})
