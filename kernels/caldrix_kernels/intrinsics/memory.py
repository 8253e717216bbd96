"""Intrinsics for raw memory, atomics and the two system calls a thread pool needs. Addresses are int64."""

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from caldrix_kernels.intrinsics.vector import F32, I16, I32, I64, const, load, pointer, store

SYS_FUTEX = 202  # x86-64
FUTEX_WAIT_PRIVATE = 128
FUTEX_WAKE_PRIVATE = 129


def _accessors(llvm_type, numba_type, size):
    @intrinsic
    def read(typing, address):
        def codegen(context, builder, signature, arguments):
            return load(builder, arguments[0], llvm_type, align=size)

        return numba_type(types.int64), codegen

    @intrinsic
    def write(typing, address, value):
        def codegen(context, builder, signature, arguments):
            store(builder, arguments[1], arguments[0], align=size)
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return read, write


load_i64, store_i64 = _accessors(I64, types.int64, 8)
load_u32, store_u32 = _accessors(I32, types.uint32, 4)
load_u16, store_u16 = _accessors(I16, types.uint16, 2)
load_f32, store_f32 = _accessors(F32, types.float32, 4)


@intrinsic
def bits_to_float(typing, bits):
    """uint32 bit pattern -> float32."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], F32)

    return types.float32(types.uint32), codegen


@intrinsic
def half_at(typing, address):
    """The float16 at an address, widened to float32."""

    def codegen(context, builder, signature, arguments):
        return builder.fpext(load(builder, arguments[0], ir.HalfType(), align=2), F32)

    return types.float32(types.int64), codegen


@intrinsic
def atomic_add(typing, address, value):
    """Add and return the value before."""

    def codegen(context, builder, signature, arguments):
        return builder.atomic_rmw("add", pointer(builder, arguments[0], I64), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typing, address):
    def codegen(context, builder, signature, arguments):
        return builder.load_atomic(pointer(builder, arguments[0], I64), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typing, address, value):
    def codegen(context, builder, signature, arguments):
        builder.store_atomic(arguments[1], pointer(builder, arguments[0], I64), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def compare_exchange(typing, address, expected, value):
    """Store `value` if `expected` stands there; return what stood there."""

    def codegen(context, builder, signature, arguments):
        place = pointer(builder, arguments[0], I64)
        pair = builder.cmpxchg(place, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 0)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typing):
    """The spin-wait hint of x86."""

    def codegen(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def futex(typing, address, operation, value):
    """futex(2) on the low 32 bits of the int64 at `address`; Linux x86-64."""

    def codegen(context, builder, signature, arguments):
        system_call = get_or_insert_function(builder.module, ir.FunctionType(I64, [I64] * 7), "syscall")
        place, operation, value = arguments
        return builder.call(
            system_call, [const(SYS_FUTEX), place, operation, value, const(0), const(0), const(0)]
        )

    return types.int64(types.int64, types.int64, types.int64), codegen
