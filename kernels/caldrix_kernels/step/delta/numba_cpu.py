"""A gated delta net's layer between its projections: convolution, recurrence, gated norm.

A row of the convolved buffer holds all query heads, key heads and value heads after convolution, queries
and keys normalised, then decay and beta of each value head.
"""

from caldrix_kernels.intrinsics.jit import call, routine
from caldrix_kernels.intrinsics.memory import load_i64
from caldrix_kernels.linear.numba_cpu import act_bytes
from caldrix_kernels.schedule.numba_cpu import address, kernel_at, word
from caldrix_kernels.step import layout as at

ONE_BITS = 0x3F800000


@routine("int64(int64)")
def channels_of(row):
    keys = word(row, at.KEY_HEADS) * word(row, at.KEY_DIM)
    return 2 * keys + word(row, at.VALUE_HEADS) * word(row, at.VALUE_DIM)


@routine("int64(int64, int64, int64, int64)")
def state_of(step, row, m, table):
    """Address of the op's state of row m's sequence in a table of copies, 0 before the first token."""
    copy = load_i64(word(step, table) + 8 * load_i64(word(step, at.SLOTS) + 8 * m))
    return copy + word(row, at.STATE_OFFSET) if copy != 0 else 0


@routine("void(int64, int64, int64)")
def conv_item(step, row, m):
    """Row m of the convolved buffer; the last row of a sequence leaves the state of the convolution."""
    channels, taps = channels_of(row), word(row, at.TAPS)
    stride = word(row, at.SOURCE_STRIDE)
    x = address(step, word(row, at.SOURCE)) + m * stride
    out = address(step, word(row, at.TARGET)) + m * word(row, at.TARGET_STRIDE)
    number = load_i64(word(step, at.ROW_NUMBERS) + 8 * m)
    state = state_of(step, row, m, at.RECURRENT)
    weight = address(step, word(row, at.WEIGHT))
    call(kernel_at(step, at.CONV_ROW), (x, stride, number, state, weight, channels, taps, out))
    if m + 1 == word(step, at.ROWS) or load_i64(word(step, at.ROW_NUMBERS) + 8 * (m + 1)) == 0:
        after = state_of(step, row, m, at.RECURRENT_NEXT)
        call(kernel_at(step, at.CONV_STATE), (x, stride, number + 1, state, after, channels, taps))
    key_dim, key_heads = word(row, at.KEY_DIM), word(row, at.KEY_HEADS)
    normalise = kernel_at(step, at.NORMALISE_HEAD)
    for head in range(2 * key_heads):
        place = out + head * key_dim * 4
        scale = word(row, at.SCALE) if head < key_heads else ONE_BITS
        call(normalise, (place, key_dim, scale, place))
    heads = (word(row, at.VALUE_HEADS) + 15) & ~15
    decay = out + channels * 4
    a_log, dt_bias = address(step, word(row, at.A_LOG)), address(step, word(row, at.DT_BIAS))
    gates = (x + word(row, at.A_AT), x + word(row, at.B_AT), a_log, dt_bias, heads, decay, decay + heads * 4)
    call(kernel_at(step, at.GATES_ROW), gates)


@routine("int64(int64, int64)")
def delta_items(step, row):
    """A sequence, a value head and some columns of it."""
    parts = word(row, at.VALUE_DIM) // word(row, at.COLUMNS)
    return word(step, at.SEQUENCES) * word(row, at.VALUE_HEADS) * parts


@routine("void(int64, int64, int64)")
def delta_item(step, row, item):
    """The rows of one sequence, one after the other, through some columns of one value head's state."""
    key_heads, value_heads = word(row, at.KEY_HEADS), word(row, at.VALUE_HEADS)
    key_dim, value_dim, columns = word(row, at.KEY_DIM), word(row, at.VALUE_DIM), word(row, at.COLUMNS)
    parts = value_dim // columns
    column, unit = item % parts * columns, item // parts
    sequence, head = unit // value_heads, unit % value_heads
    m = load_i64(word(step, at.SEQUENCE_ROWS) + 8 * sequence)
    rows = load_i64(word(step, at.SEQUENCE_LENGTHS) + 8 * sequence)
    stride, out_stride = word(row, at.SOURCE_STRIDE), word(row, at.TARGET_STRIDE)
    x = address(step, word(row, at.SOURCE)) + m * stride
    out = address(step, word(row, at.TARGET)) + m * out_stride
    place = (head * key_dim * value_dim + column) * 4
    before = state_of(step, row, m, at.RECURRENT)
    before = before + place if before != 0 else 0
    after = state_of(step, row, m, at.RECURRENT_NEXT) + place
    key_head = head * key_heads // value_heads
    values = 2 * key_heads * key_dim + head * value_dim + column
    decay = x + (channels_of(row) + head) * 4
    beta = decay + ((value_heads + 15) & ~15) * 4
    call(
        kernel_at(step, at.DELTA_HEAD),
        (
            rows,
            x + key_head * key_dim * 4,
            x + (key_heads + key_head) * key_dim * 4,
            x + values * 4,
            stride,
            decay,
            beta,
            stride,
            before,
            after,
            key_dim,
            columns,
            out + (head * value_dim + column) * 4,
            out_stride,
            value_dim * 4,
        ),
    )


@routine("void(int64, int64, int64)")
def gated_norm_item(step, row, m):
    value_dim, act = word(row, at.VALUE_DIM), word(step, at.ACT)
    size = act_bytes(act)
    gain, epsilon = address(step, word(row, at.WEIGHT)), word(row, at.EPSILON)
    x = address(step, word(row, at.SOURCE)) + m * word(row, at.SOURCE_STRIDE)
    z = address(step, word(row, at.GATE)) + m * word(row, at.GATE_STRIDE) + word(row, at.GATE_AT)
    out = address(step, word(row, at.TARGET)) + m * word(row, at.TARGET_STRIDE)
    for head in range(word(row, at.VALUE_HEADS)):
        column = head * value_dim
        norm = (act, x + 4 * column, z + 4 * column, gain, out + size * column, value_dim, epsilon)
        call(kernel_at(step, at.GATED_NORM_HEAD), norm)
