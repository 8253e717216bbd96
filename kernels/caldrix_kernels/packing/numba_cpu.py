"""Packing of panels: sixteen rows of sixteen units are turned at once in registers.

A unit is what a tile keeps together of one row: two bfloat16, one float16 or one float32.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from caldrix_kernels.intrinsics import vector as v
from caldrix_kernels.intrinsics.jit import kernel
from caldrix_kernels.intrinsics.memory import load_i64, load_u16, load_u32, store_u16, store_u32
from caldrix_kernels.step.layout import BF16, F16, PANEL


def _transpose(builder, rows):
    """Sixteen vectors of sixteen lanes: lane j of row i becomes lane i of row j, in four exchanges."""
    rows = list(rows)
    for reach in (8, 4, 2, 1):
        low = [lane if not lane & reach else v.LANES + lane - reach for lane in range(v.LANES)]
        high = [lane + reach if not lane & reach else v.LANES + lane for lane in range(v.LANES)]
        masks = [ir.Constant(v.VI, lanes) for lanes in (low, high)]
        for i in range(v.LANES):
            if not i & reach:
                a, b = rows[i], rows[i + reach]
                rows[i], rows[i + reach] = (builder.shuffle_vector(a, b, mask) for mask in masks)
    return rows


def _make_turn(unit):
    size = 4 if unit is v.VI else 2

    @intrinsic
    def turn(typing, rows, start, count, target, stride):
        """Units start, start + 16, ... of sixteen rows; unit u goes to target + u * stride.

        `rows` is the address of sixteen int64 row addresses; `count` vectors of sixteen units, >= 1.
        """

        def codegen(context, builder, signature, arguments):
            rows, start, count, target, stride = arguments
            begin = builder.mul(start, v.const(size))
            sources = [
                builder.add(v.load(builder, v.offset(builder, rows, 8 * i), v.I64, 8), begin)
                for i in range(v.LANES)
            ]
            first = builder.add(target, builder.mul(start, stride))

            def body(index, _):
                at = builder.mul(index, v.const(v.LANES * size))
                vectors = [v.load(builder, builder.add(source, at), unit, 2) for source in sources]
                place = builder.add(first, builder.mul(builder.mul(index, v.const(v.LANES)), stride))
                for i, vector in enumerate(_transpose(builder, vectors)):
                    v.store(builder, vector, builder.add(place, builder.mul(v.const(i), stride)), 32)

            v.counted_loop(builder, count, body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return turn


_turn_words, _turn_halves = _make_turn(v.VI), _make_turn(v.VH)


@kernel(8)
def pack_panels(form, rows, first, last, columns, padded, target, panel_bytes):
    """Write panels first..last-1. `rows` is the address of int64 row addresses, 32 a panel.

    `columns` are stored, `padded` are written (zeros after `columns`).
    """
    units = columns >> 1 if form == BF16 else columns
    whole = units & ~15
    unit = 2 if form == F16 else 4
    stride = PANEL * unit
    for panel in range(first, last):
        base = target + panel * panel_bytes
        for half in range(2):
            addresses = rows + 8 * (panel * PANEL + 16 * half)
            place = base + 16 * unit * half
            if whole > 0 and form == F16:
                _turn_halves(addresses, 0, whole >> 4, place, stride)
            elif whole > 0:
                _turn_words(addresses, 0, whole >> 4, place, stride)
            for lane in range(16):
                source = load_i64(addresses + 8 * lane)
                out = place + unit * lane
                for k in range(whole, units):
                    if form == F16:
                        store_u16(out + k * stride, load_u16(source + 2 * k))
                    else:
                        store_u32(out + k * stride, load_u32(source + 4 * k))
                after = units
                if form == BF16 and columns & 1:
                    store_u32(out + units * stride, load_u16(source + 2 * (columns - 1)))
                    after += 1
                for k in range(after, padded >> 1 if form == BF16 else padded):
                    if form == F16:
                        store_u16(out + k * stride, 0)
                    else:
                        store_u32(out + k * stride, 0)
