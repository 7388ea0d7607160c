"""How loops are compiled: by Numba, ahead of use, for exactly the types that occur, and kept in a cache on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from weightcast import logs

log = logs.get(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

_loops: list[Any] = []


def read_of(item: Any) -> Any:
    """Memory that is only read; the weakest type, so that any array passes without compiling once more."""
    return types.Array(item, 1, "C", readonly=True, aligned=False)


def write_of(item: Any) -> Any:
    return types.Array(item, 1, "C", aligned=False)


LANE_TYPES = (types.int8, types.int16, types.int32)
INDEX_TYPES = (types.uint32, types.uint64)
U8, U32, U64, I64 = types.uint8, types.uint32, types.uint64, types.int64


def compiled(*signatures: Any) -> Callable[[Function], Function]:
    """Compile now, for exactly these types, or load from the cache: nothing is compiled in the middle of an update."""
    wrapper = numba.njit(list(signatures), nogil=True, cache=can_cache(), error_model="numpy")

    def compile_now(function: Function) -> Function:
        loop = wrapper(function)
        _loops.append(loop)
        return cast("Function", loop)

    return compile_now


def count_compiled() -> int:
    """How many loops were compiled in this process, for one type each, and not loaded from the cache."""
    return sum(sum(loop.stats.cache_misses.values()) for loop in _loops)


@cache
def can_cache() -> bool:
    """Whether there is a place to keep compiled code: beside the package, or in the user's cache directory."""
    try:
        numba.njit(cache=True)(lambda: None)
    except RuntimeError as error:
        log.warning(
            "kernels not kept", why="delta kernels are compiled anew in every process, which takes some seconds", error=error
        )
        return False
    return True


@intrinsic
def prefetch(typing_context, array, index):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Ask for the cache line of ``array[index]`` without waiting for it."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        byte = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        place = builder.bitcast(builder.gep(data, [args[1]]), byte)
        # Read rather than write intent, into all caches, data: measured fastest for scattered stores.
        builder.call(function, [place, *(ir.Constant(number, value) for value in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, index), generate


@intrinsic
def trailing_zeros(typing_context, number):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """How many of the lowest bits of a number other than 0 are 0."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def differing(typing_context, old, new, at):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Which of the 64 lanes from `at` on differ, the first in the lowest bit. Written as vectors, which need no branches."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        lanes = ir.VectorType(ir.IntType(signature.args[0].dtype.bitwidth), 64)

        def load(kind, array):  # type: ignore[no-untyped-def]
            data = context.make_array(kind)(context, builder, array).data
            return builder.load(builder.bitcast(builder.gep(data, [args[2]]), lanes.as_pointer()), align=1)

        unlike = builder.icmp_unsigned("!=", load(signature.args[0], args[0]), load(signature.args[1], args[1]))
        return builder.bitcast(unlike, ir.IntType(64))

    return types.uint64(old, new, types.int64), generate
