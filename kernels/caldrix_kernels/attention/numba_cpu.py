"""Softmax attention over fixed blocks of absolute positions.

A block's partial result for one query is {acc[value width], max, sum}; partials are merged in block order
(the online softmax of Milakov and Gimelshein, 2018, as FlashAttention uses it). Blocks start at
absolute positions, so chunking, batching and the number of threads never change the order of a sum.

Scores are logarithms to base 2: queries come multiplied by log2(e) besides the model's own scale, and what
would be an exponential is a power of two, which costs half as much.

A block's keys of a head: [BLOCK/32][head_dim][32 positions] float32; values: [BLOCK][value width] float32.
As bfloat16, for the instruction that adds two products at a time: [BLOCK/32][head_dim/2][32 positions][2]
and [BLOCK/2][value width][2 positions].
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from caldrix_kernels.intrinsics import vector as v
from caldrix_kernels.intrinsics.jit import call, kernel, routine
from caldrix_kernels.linear.numba_cpu import act_bytes
from caldrix_kernels.step.layout import ACT_BF16, ACT_BYTES, ACT_F32, ACT_ROUNDED, BLOCK, PANEL

BLOCK_VECTORS = BLOCK // v.LANES
SCORE_BYTES = 4 * BLOCK  # of one query


def _softmax(builder, act, vectors, limits=None):
    """Softmax of several (scores, max address) at once: one alone is a long chain of latencies.

    `limits` are (low, high) of each: what lies outside [low, high) has no part.
    """
    kept = []
    masked = []
    minus_infinity = ir.Constant(v.VF, [float("-inf")] * v.LANES)
    for number, (scores, _) in enumerate(vectors):
        parts = [v.load(builder, v.offset(builder, scores, 64 * i), v.VF) for i in range(BLOCK_VECTORS)]
        if limits is not None:
            keep = _within(builder, *limits[number])
            parts = [builder.select(k, part, minus_infinity) for k, part in zip(keep, parts, strict=True)]
            kept.append(keep)
        masked.append(parts)

    def folded(parts, combine):
        while len(parts) > 1:
            parts = [combine(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    tops = [folded(parts, lambda a, b: v.maximum(builder, a, b)) for parts in masked]
    tops = [v.reduce(builder, top, lambda a, b: v.maximum(builder, a, b)) for top in tops]
    weights = []
    for number, (parts, top) in enumerate(zip(masked, tops, strict=True)):
        top_lanes = v.broadcast(builder, top, v.VF)
        powers = [v.exp2(builder, builder.fsub(part, top_lanes)) for part in parts]
        if limits is not None:
            zipped = zip(kept[number], powers, strict=True)
            powers = [builder.select(k, p, v.lanes(0.0)) for k, p in zipped]
        weights.append(powers)
    sums = [v.reduce(builder, folded(parts, builder.fadd), builder.fadd) for parts in weights]
    for (scores, max_at), parts, top, total in zip(vectors, weights, tops, sums, strict=True):
        for i, part in enumerate(parts):
            v.store_activation(builder, part, v.offset(builder, scores, v.LANES * ACT_BYTES[act] * i), act)
        v.store(builder, top, max_at)
        v.store(builder, total, v.offset(builder, max_at, 4))


def _within(builder, low, high):
    """For each vector of a block, which of its columns lie in [low, high)."""
    least = v.broadcast(builder, builder.trunc(low, v.I32), v.VI)
    limit = v.broadcast(builder, builder.trunc(high, v.I32), v.VI)
    keep = []
    for i in range(BLOCK_VECTORS):
        columns = ir.Constant(v.VI, list(range(v.LANES * i, v.LANES * (i + 1))))
        under = builder.icmp_signed("<", columns, limit)
        keep.append(builder.and_(under, builder.icmp_signed(">=", columns, least)))
    return keep


def _make_softmax(act, limited):
    @intrinsic
    def softmax(typing, scores, maxima, low, high):
        """Of two rows, or twice of one: scores[0:BLOCK] -> 2**(score - max), stored as activations.

        Zero outside [low, high), but for the variant that sees the whole block. The max and the sum (float32)
        of what was not rounded yet go to `maxima`. Each argument is a pair.
        """

        def codegen(context, builder, signature, arguments):
            pairs = [[builder.extract_value(pair, i) for i in range(2)] for pair in arguments]
            vectors, limits = (list(zip(*pairs[i : i + 2], strict=True)) for i in (0, 2))
            _softmax(builder, act, vectors, limits if limited else None)
            return context.get_dummy_value()

        return types.void(*[types.UniTuple(types.int64, 2)] * 4), codegen

    return softmax


_softmax_f32, _softmax_bf16, _softmax_rounded = (
    _make_softmax(act, True) for act in (ACT_F32, ACT_BF16, ACT_ROUNDED)
)
_whole_f32, _whole_bf16 = (_make_softmax(act, False) for act in (ACT_F32, ACT_BF16))


@intrinsic
def _merge(typing, run, block, width):
    def codegen(context, builder, signature, arguments):
        run, block, width = arguments
        at_max = builder.shl(width, v.const(2))
        at_sum = builder.add(at_max, v.const(4))

        def scalar(base, at):
            return v.broadcast(builder, v.load(builder, builder.add(base, at), v.F32), v.VF)

        run_max, block_max = scalar(run, at_max), scalar(block, at_max)
        run_sum, block_sum = scalar(run, at_sum), scalar(block, at_sum)
        # The larger of the two keeps its scale: exp2(0) is exactly 1.
        rise = builder.fsub(block_max, run_max)
        rises = builder.fcmp_ordered(">", rise, v.lanes(0.0))
        fall = builder.select(rises, builder.fsub(v.lanes(-0.0), rise), rise)
        decay = v.exp2(builder, fall)
        run_scale = builder.select(rises, decay, v.lanes(1.0))
        block_scale = builder.select(rises, v.lanes(1.0), decay)
        total = v.fma(builder, block_sum, block_scale, builder.fmul(run_sum, run_scale))
        zero = ir.Constant(v.I32, 0)
        top = v.maximum(builder, run_max, block_max)
        v.store(builder, builder.extract_element(top, zero), builder.add(run, at_max))
        v.store(builder, builder.extract_element(total, zero), builder.add(run, at_sum))

        def body(index, _):
            at = builder.mul(index, v.const(64))
            place = builder.add(run, at)
            value = builder.fmul(v.load(builder, place, v.VF), run_scale)
            other = v.load(builder, builder.add(block, at), v.VF)
            v.store(builder, v.fma(builder, other, block_scale, value), place)

        v.counted_loop(builder, builder.lshr(width, v.const(4)), body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@kernel(5)
def merge_partials(run, block, width, stride, count):
    """Merge `count` partials at `block` into those at `run`: {acc[width], max, sum}, `stride` bytes apart."""
    for i in range(count):
        _merge(run + i * stride, block + i * stride, width)


def _make_finish(act, gated):
    @intrinsic
    def finish(typing, run, width, gate, out, count):
        """out[0:16 * count] = acc / sum, times sigmoid(gate), stored as an activation; count >= 1."""

        def codegen(context, builder, signature, arguments):
            run, width, gate, out, count = arguments
            at_sum = builder.add(builder.shl(width, v.const(2)), v.const(4))
            total = v.broadcast(builder, v.load(builder, builder.add(run, at_sum), v.F32), v.VF)

            def body(index, _):
                place = builder.mul(index, v.const(64))
                value = builder.fdiv(v.load(builder, builder.add(run, place), v.VF), total)
                if gated:
                    level = v.load(builder, builder.add(gate, place), v.VF)
                    value = builder.fmul(value, v.sigmoid(builder, level))
                target = builder.add(out, builder.mul(index, v.const(16 * ACT_BYTES[act])))
                v.store_activation(builder, value, target, act)

            v.counted_loop(builder, count, body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return finish


_finish_f32, _finish_bf16, _finish_rounded = (
    _make_finish(act, False) for act in (ACT_F32, ACT_BF16, ACT_ROUNDED)
)
_gated_f32, _gated_bf16, _gated_rounded = (
    _make_finish(act, True) for act in (ACT_F32, ACT_BF16, ACT_ROUNDED)
)


@kernel(6)
def finish_head(act, run, width, gate, out, count):
    """One head of the attended row; `gate` 0 means none."""
    if gate == 0:
        if act == ACT_F32:
            _finish_f32(run, width, gate, out, count)
        elif act == ACT_BF16:
            _finish_bf16(run, width, gate, out, count)
        else:
            _finish_rounded(run, width, gate, out, count)
    elif act == ACT_F32:
        _gated_f32(run, width, gate, out, count)
    elif act == ACT_BF16:
        _gated_bf16(run, width, gate, out, count)
    else:
        _gated_rounded(run, width, gate, out, count)


@routine("int64(int64)")
def partial_bytes(value_width):
    """Size of {acc, max, sum}, kept a multiple of 64."""
    return value_width * 4 + 64


@routine("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def softmax_rows(act, rows, group, back, ahead, scores, maxima, stride):
    """Of each query: row r sees columns back + r <= column < ahead + r of the block."""
    count = rows * group
    whole = ahead >= BLOCK and back + rows <= 1
    for i in range(0, count, 2):
        j = min(i + 1, count - 1)
        places = (scores + i * SCORE_BYTES, scores + j * SCORE_BYTES)
        tops = (maxima + i * stride, maxima + j * stride)
        low, high = (back + i // group, back + j // group), (ahead + i // group, ahead + j // group)
        if act == ACT_F32:
            if whole:
                _whole_f32(places, tops, low, high)
            else:
                _softmax_f32(places, tops, low, high)
        elif act == ACT_BF16:
            if whole:
                _whole_bf16(places, tops, low, high)
            else:
                _softmax_bf16(places, tops, low, high)
        else:
            _softmax_rounded(places, tops, low, high)


@kernel(16)
def attend_block(
    act,
    tile,
    tile_wide,
    keys,
    values,
    head_dim,
    value_width,
    block,
    queries,
    query_stride,
    rows,
    group,
    first,
    window,
    scores,
    out,
):
    """Partials of `rows` neighbouring positions (from `first`) times `group` query heads over one block.

    queries: activations[rows * group][head_dim]; scores: scratch float32[rows * group][BLOCK];
    out: partials[rows * group]; tile, tile_wide: addresses of linear's tiles for the activations. A
    `window` over 0 hides what lies so far back. Rows that see nothing of the block get a sum of zero.
    """
    count = rows * group
    start = block * BLOCK
    visible = min(BLOCK, first + rows - start)
    panel_bytes = PANEL * head_dim * act_bytes(act)
    for panel in range((visible + PANEL - 1) // PANEL):
        place, target = keys + panel * panel_bytes, scores + panel * PANEL * 4
        call(tile, (count, place, PANEL * 4, queries, query_stride, head_dim, target, SCORE_BYTES))
    stride = partial_bytes(value_width)
    ahead = first + 1 - start
    back = ahead - window if window > 0 else -(1 << 30)
    softmax_rows(act, rows, group, back, ahead, scores, out + value_width * 4, stride)
    if act == ACT_BF16:
        visible = (visible + 1) & ~1
    column = 0
    while column < value_width:
        place, target = values + column * 4, out + column * 4
        wide = column + 2 * PANEL <= value_width
        product = tile_wide if wide else tile
        call(product, (count, place, value_width * 4, scores, SCORE_BYTES, visible, target, stride))
        column += 2 * PANEL if wide else PANEL
