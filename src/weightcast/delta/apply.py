"""Applying a delta to tensors in memory: all of it, proved, or nothing."""

from __future__ import annotations

from collections.abc import Mapping

from weightcast.delta.container import Table, read_table
from weightcast.delta.decoder import decode
from weightcast.delta.edit import Edit, Memories, move_tensor, prepare
from weightcast.delta.memory import memory_of
from weightcast.delta.sparse import Delta, check_specs, on_threads
from weightcast.delta.states import ArrayState, state_root
from weightcast.errors import BaseVersionMismatch, CommitFailed, DeltaCorrupt
from weightcast.tensors.flat import Buffer


def apply(
    target: Mapping[str, object], delta: Delta | Buffer, *, check_base: bool = True, threads: int | None = None
) -> Edit:
    """Change tensors in place from a delta's base to its end, and return the edit, whose `undo` is the way back.

    The root digests of the whole target are compared before and after, where the delta has them; `check_base=False` leaves
    out the first comparison, for a caller who has made it. On any failure the target is as it was.
    """
    state = ArrayState(target)
    promised = delta if isinstance(delta, Delta) else read_table(memoryview(delta), state.specs)
    check_specs(promised.specs, state.specs)
    if check_base:  # before decoding: along another base, classes would decode to nonsense
        _check_base(promised, state)
    sparse = delta if isinstance(delta, Delta) else decode(delta, state, threads=threads)
    memories = {name: memory_of(name, tensor) for name, tensor in target.items()}
    edit = prepare(memories, sparse)
    try:
        edit.finish(memories)
        _check_result(sparse, ArrayState(target))
    except BaseException as error:
        _take_back(edit, memories, error)
        raise
    return edit


def move(target: Mapping[str, object], delta: Delta, *, threads: int = 1) -> None:
    """Change tensors in place without a proof and without a way back: for private memory, which the caller proves."""
    memories = {name: memory_of(name, tensor) for name, tensor in target.items()}
    check_specs(delta.specs, {name: memory.spec for name, memory in memories.items()})
    on_threads(lambda item: move_tensor(memories[item[0]], item[1]), list(delta.tensors.items()), threads)


def _take_back(edit: Edit, memories: Memories, error: BaseException) -> None:
    try:
        edit.undo(memories)
    except BaseException as second:  # noqa: BLE001 - whatever it was, the tensors are torn now, and that is raised
        torn = CommitFailed(
            f"applying the delta failed ({type(error).__name__}: {error}) and could not be undone "
            f"({type(second).__name__}: {second}). The tensors are partly old and partly new; undo or finish the `edit` "
            "of this error, as often as it takes."
        )
        torn.edit = edit
        raise torn from error


def _check_base(promised: Delta | Table, state: ArrayState) -> None:
    """Refuse a state that is not the one a delta was made on."""
    base_root = promised.base_root
    if not base_root:
        return
    found = state_root(state, base_root, promised.summed_as)
    if found != base_root:
        raise BaseVersionMismatch(version=None, base=None, base_root=base_root, serving=None, serving_root=found)


def _check_result(delta: Delta, state: ArrayState) -> None:
    if not delta.new_root:
        return
    found = state_root(state, delta.new_root, delta.summed_as)
    if found != delta.new_root:
        raise DeltaCorrupt(f"applied, the state has root {found}, and not {delta.new_root} as it says; it was undone")
