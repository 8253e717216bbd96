"""Emitters: plain functions that append LLVM instructions to a builder.

The vector is 16 float32 lanes everywhere. On AVX-512 it is one register, on AVX2 LLVM splits it in
two; either way each lane sees the same operations in the same order, so the bits are the same.
"""

import numpy as np
from llvmlite import binding, ir
from numba.core import config
from numba.core.cgutils import get_or_insert_function

from caldrix_kernels.step.layout import ACT_BF16, ACT_F32

LANES = 16

I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F16 = ir.HalfType()
F32 = ir.FloatType()
VF = ir.VectorType(F32, LANES)
VI = ir.VectorType(I32, LANES)
VH = ir.VectorType(I16, LANES)
VF16 = ir.VectorType(F16, LANES)


class BFloat(ir.Type):  # type: ignore[misc]
    """The LLVM type `bfloat`, which llvmlite does not name."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, BFloat)

    def __hash__(self):
        return hash("bfloat")


VBF = ir.VectorType(BFloat(), 2 * LANES)
VBF16 = ir.VectorType(BFloat(), LANES)


def _host_has(feature):
    """Whether code is compiled for a CPU with this LLVM feature."""
    if config.CPU_FEATURES is not None:
        return f"+{feature}" in config.CPU_FEATURES.split(",")
    return bool(binding.get_host_cpu_features().get(feature, False))


WIDE = _host_has("avx512f")
# Instructions that narrow to bfloat16 and multiply it.
HAS_BF16 = WIDE and _host_has("avx512bf16")


def const(value):
    """An int64 constant."""
    return ir.Constant(I64, value)


def lanes(value):
    """A float32 constant in every lane."""
    return ir.Constant(VF, [float(np.float32(value))] * LANES)


def int_lanes(value):
    """An int32 constant in every lane."""
    return ir.Constant(VI, [value] * LANES)


def pointer(builder, address, kind):
    return builder.inttoptr(address, ir.PointerType(kind))


def load(builder, address, kind, align=4):
    value = builder.load(pointer(builder, address, kind))
    value.align = align
    return value


def store(builder, value, address, align=4):
    instruction = builder.store(value, pointer(builder, address, value.type))
    instruction.align = align


def offset(builder, address, byte_count):
    """address + a constant number of bytes."""
    return builder.add(address, const(byte_count)) if byte_count else address


def broadcast(builder, scalar, kind):
    """The scalar in every lane of `kind`."""
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(
        first, undefined, ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
    )


def fma(builder, a, b, c):
    """a * b + c, rounded once."""
    function = get_or_insert_function(builder.module, ir.FunctionType(VF, [VF, VF, VF]), "llvm.fma.v16f32")
    return builder.call(function, [a, b, c])


def dot(builder, total, a, b):
    """total + two products of bfloat16 in each lane, rounded as the instruction of `HAS_BF16` does."""
    kind = ir.FunctionType(VF, [VF, VBF, VBF])
    function = get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(function, [total, a, b])


def prefetch(builder, address):
    """Bring the cache line at `address` near, for reading; any address is allowed."""
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(I8), I32, I32, I32])
    function = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    arguments = [ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)]
    builder.call(function, [pointer(builder, address, I8), *arguments])


def maximum(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def minimum(builder, a, b):
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def reduce(builder, vector, combine):
    """All lanes combined by the fixed tree i, i+8; i, i+4; i, i+2; i, i+1. Returns the scalar."""
    for half in (8, 4, 2, 1):
        rotation = ir.Constant(VI, [(lane + half) % LANES for lane in range(LANES)])
        vector = combine(vector, builder.shuffle_vector(vector, vector, rotation))
    return builder.extract_element(vector, ir.Constant(I32, 0))


def lane_numbers(builder, index):
    """int32 lanes: 16 * index + lane."""
    first = broadcast(builder, builder.trunc(builder.shl(index, const(4)), I32), VI)
    return builder.add(first, ir.Constant(VI, list(range(LANES))))


def number_of_highest(builder, best, numbers):
    """int64: of the lanes whose `best` is the highest the lowest of their `numbers`, int32."""
    highest = broadcast(builder, reduce(builder, best, lambda a, b: maximum(builder, a, b)), VF)
    equal = builder.fcmp_ordered("==", best, highest)
    numbers = builder.select(equal, numbers, int_lanes(0x7FFFFFFF))
    lowest = reduce(builder, numbers, lambda a, b: builder.select(builder.icmp_signed("<", a, b), a, b))
    return builder.zext(lowest, I64)


# exp on [-87, 88]: x = n ln2 + r with ln2 in two parts (Cody and Waite), |r| <= ln2 / 2, then the
# degree-6 minimax polynomial of Cephes expf (Moshier), evaluated by Horner with one fma a step.
LN2_HIGH = 0.693145751953125
LN2_LOW = 1.428606820309417e-06
EXP_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
# Adding 1.5 * 2**23 leaves the nearest integer in the low bits of the sum.
ROUND_MAGIC = 12582912.0


def exp(builder, x):
    """exp(x) in each lane, relative error below 2e-7; x is clamped to [-87, 88]."""
    x = minimum(builder, maximum(builder, x, lanes(-87.0)), lanes(88.0))
    shifted = fma(builder, x, lanes(1.4426950408889634), lanes(ROUND_MAGIC))
    n = builder.fsub(shifted, lanes(ROUND_MAGIC))
    r = fma(builder, n, lanes(-LN2_HIGH), x)
    r = fma(builder, n, lanes(-LN2_LOW), r)
    poly = lanes(EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:]:
        poly = fma(builder, poly, r, lanes(coefficient))
    poly = fma(builder, poly, builder.fmul(r, r), builder.fadd(r, lanes(1.0)))
    exponent = builder.shl(builder.bitcast(shifted, VI), int_lanes(23))
    return builder.bitcast(builder.add(builder.bitcast(poly, VI), exponent), VF)


# 2**r = 1 + r q(r) on |r| <= 1/2 with q of degree 4, fitted for the least relative error by Lawson's
# algorithm (1961): 9.2e-8 before rounding.
EXP2_POLYNOMIAL = (
    0.0013264727247132993,
    0.009671512688149668,
    0.055507337435740836,
    0.2402224208463513,
    0.6931469775987168,
    1.0,
)


def exp2(builder, x):
    """2**x in each lane, -125 <= x <= 0, relative error below 2e-7, exactly 1 at 0; what is less is -125."""
    x = maximum(builder, x, lanes(-125.0))
    shifted = builder.fadd(x, lanes(ROUND_MAGIC))
    r = builder.fsub(x, builder.fsub(shifted, lanes(ROUND_MAGIC)))
    poly = lanes(EXP2_POLYNOMIAL[0])
    for coefficient in EXP2_POLYNOMIAL[1:]:
        poly = fma(builder, poly, r, lanes(coefficient))
    exponent = builder.shl(builder.bitcast(shifted, VI), int_lanes(23))
    return builder.bitcast(builder.add(builder.bitcast(poly, VI), exponent), VF)


def sigmoid(builder, x):
    """1 / (1 + exp(-x)) in each lane, relative error below 4e-7 on [-87, 88]; never NaN."""
    decay = exp(builder, builder.fsub(lanes(-0.0), x))
    return builder.fdiv(lanes(1.0), builder.fadd(lanes(1.0), decay))


def silu(builder, x):
    """x / (1 + exp(-x)) in each lane."""
    decay = exp(builder, builder.fsub(lanes(-0.0), x))
    return builder.fdiv(x, builder.fadd(lanes(1.0), decay))


# The series of 2 atanh(s) = 2s (1 + s**2 / 3 + s**4 / 5 + ...) for s <= 1/3; the first term left out is
# below 2**-31 of the sum.
LOG1P_SERIES = tuple(1.0 / n for n in range(17, 1, -2))


def log1p(builder, u):
    """log(1 + u) = 2 atanh(u / (2 + u)) in each lane, 0 <= u <= 1, relative error below 2e-7."""
    s = builder.fdiv(u, builder.fadd(u, lanes(2.0)))
    square = builder.fmul(s, s)
    series = lanes(LOG1P_SERIES[0])
    for coefficient in LOG1P_SERIES[1:]:
        series = fma(builder, series, square, lanes(coefficient))
    double = builder.fadd(s, s)
    return fma(builder, double, builder.fmul(series, square), double)


def softplus(builder, x):
    """log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)) in each lane, exp as above."""
    negated = builder.fsub(lanes(-0.0), x)
    decay = exp(builder, minimum(builder, x, negated))
    return builder.fadd(maximum(builder, x, lanes(0.0)), log1p(builder, decay))


def round_to_bf16(builder, vector):
    """float32 lanes -> bfloat16 bit patterns in the high half of int32 lanes, nearest even."""
    bits = builder.bitcast(vector, VI)
    odd = builder.and_(builder.lshr(bits, int_lanes(16)), int_lanes(1))
    return builder.add(bits, builder.add(odd, int_lanes(0x7FFF)))


def store_activation(builder, vector, address, act):
    if act == ACT_F32:
        store(builder, vector, address)
        return
    if act == ACT_BF16 and HAS_BF16:
        kind = ir.FunctionType(VBF16, [VF])
        narrow = get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.cvtneps2bf16.512")
        store(builder, builder.call(narrow, [vector]), address, align=2)
        return
    bits = round_to_bf16(builder, vector)
    if act == ACT_BF16:
        store(builder, builder.trunc(builder.lshr(bits, int_lanes(16)), VH), address, align=2)
    else:
        store(builder, builder.bitcast(builder.and_(bits, int_lanes(0xFFFF0000)), VF), address)


def counted_loop(builder, count, body, state=()):
    """Emit `for i in range(count)`, count >= 1. `body(i, state) -> state` carries SSA values along.

    Returns the state after the last round.
    """
    before = builder.block
    loop = builder.function.append_basic_block("loop")
    done = builder.function.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(I64)
    index.add_incoming(const(0), before)
    carried = []
    for value in state:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        carried.append(phi)
    result = list(body(index, carried) or ())
    following = builder.add(index, const(1))
    index.add_incoming(following, builder.block)
    for phi, value in zip(carried, result, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    return result
