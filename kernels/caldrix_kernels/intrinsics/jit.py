"""How every kernel is compiled: at import for one explicit signature, without the GIL, cached on disk.

The explicit signature matters: without one, numba compiles again for each literal argument it meets.
"""

from typing import Any

from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}
_NOT_FROM_PYTHON: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def routine(signature: str) -> Any:
    """Decorator for a function that other compiled code calls directly; it is compiled into each caller.

    Python cannot call it: the wrappers for that are a sixth of all compiling.
    """
    return njit(signature, **_OPTIONS, **_NOT_FROM_PYTHON)


def entry(signature: str) -> Any:
    """Decorator for a routine that Python calls."""
    return njit(signature, **_OPTIONS)


def kernel(arguments: int) -> Any:
    """Decorator for a kernel of that many int64 arguments and no result, with the C calling convention.

    The interpreter calls kernels by address, from a table: each is compiled once instead of into every
    caller, and a table may hold variants from another compiler.
    """
    return cfunc(types.void(*[types.int64] * arguments), cache=True, error_model="numpy")


@intrinsic
def call(typing, address, arguments):
    """Call the kernel at an address with a tuple of int64."""

    def codegen(context, builder, signature, values):
        address, arguments = values
        word = ir.IntType(64)
        count = signature.args[1].count
        function = ir.FunctionType(ir.VoidType(), [word] * count)
        target = builder.inttoptr(address, ir.PointerType(function))
        builder.call(target, [builder.extract_value(arguments, index) for index in range(count)])
        return context.get_dummy_value()

    return types.void(types.int64, arguments), codegen
