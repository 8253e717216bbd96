"""Where things stand in the memory that Python and the compiled interpreter share. Plain integers.

Three tables of int64 words:

- the *step block*, 64 words: everything one step needs; published to the pool under a sequence lock;
- the *program*, one row of `ROW_WORDS` words an op;
- the *address table*: weights, buffers and rope tables by index, so that a program holds no address.
"""

WORD = 8

# --- step block ---------------------------------------------------------------------------------
STEP_WORDS = 64
(
    CONTROL,  # address of the control words below
    ADDRESSES,  # address of the address table
    PROGRAM,  # address of the program
    BEGIN,  # first op to run
    END,  # one past the last op
    ROWS,  # rows of this step
    WANTED,  # rows whose logits are wanted
    THREADS,  # threads that take part
    ACT,  # how activations are stored (ACT_* below)
    SPIN,  # pauses before a waiting thread parks
    BASE,  # number of the step's first item
    TOKENS,  # address of int64[rows]
    SLOTS,  # address of int64[rows]: slot of each row
    POSITIONS,  # address of int64[rows]
    EMBEDDINGS,  # address of int64[rows]: address of the row's float32 embedding, or 0
    WANTED_ROWS,  # address of int64[wanted]
    RUN_ROWS,  # address of int64[runs]: first row of each attention run
    RUN_LENGTHS,  # address of int64[runs]
    RUNS,  # number of runs
    SPLIT,  # 1: attention items are (block, run, head), partials combined by the last
    BLOCKS,  # attention blocks of the longest sequence of this step
    SLOT_TABLE,  # address of int64 state addresses by slot
    STATE_BLOCK,  # bytes of one block of positions, all layers
    SCRATCH,  # address of scratch memory, SCRATCH_BYTES a thread
    SCRATCH_BYTES,
    PRIVATE,  # address of the per-thread normed rows, PRIVATE_BYTES a thread
    PRIVATE_BYTES,
    PARTS,  # address of the partial attention results
    PART_COUNTS,  # address of int64[run, kv head]: finished blocks
    MAX_ROWS,  # capacity of the row buffers
    QUIT,  # 1: pool threads end
    KERNELS,  # address of the kernel table
    ROW_NUMBERS,  # address of int64[rows]: number of the row among this step's rows of its slot
    SEQUENCE_ROWS,  # address of int64[sequences]: first row of each slot of this step
    SEQUENCE_LENGTHS,  # address of int64[sequences]
    SEQUENCES,  # number of slots in this step
    RECURRENT,  # address of int64 addresses by slot: committed recurrent state, 0 before the first token
    RECURRENT_NEXT,  # address of int64 addresses by slot: where this step leaves it
) = range(38)

# --- control words: one cache line pair each, byte offsets ------------------------------------------
NEXT = 0  # next unclaimed item
FINISHED = 128  # finished items
COMMAND = 256  # sequence lock of the step block: odd while it is written
COMMAND_SLEEPERS = 384
FINISHED_SLEEPERS = 512
CANCEL = 640  # set by any thread
STOPPED = 768  # base + 1 of the step that saw CANCEL, then the number after its last item
CONTROL_BYTES = 1024

# --- kernel table: addresses of compiled kernels, from whatever compiler -------------------------------
# The first three are the tiles of the stored formats, by format number.
(
    TILE_BF16,
    TILE_F16,
    TILE_F32,
    TILE_DOT,
    TILE_F32_WIDE,
    TILE_DOT_WIDE,
    NORM_ROW,
    ROTATE,
    SILU_MUL_TILE,
    ATTEND_BLOCK,
    MERGE_PARTIALS,
    FINISH_HEAD,
    RUN_STEP,
    ROUTE_ROW,
    COMBINE_ROW,
    CONV_ROW,
    CONV_STATE,
    GATES_ROW,
    NORMALISE_HEAD,
    DELTA_HEAD,
    GATED_NORM_HEAD,
    ARGMAX_ROW,
) = range(22)

# --- ops --------------------------------------------------------------------------------------------
(
    EMBED,
    NORM,
    LINEAR,
    HEADS,
    ATTENTION,
    GATHER,
    ROUTE,  # scores -> experts of each row, and the rows of each expert
    DISPATCH,  # copy rows to where their experts read them
    COMBINE,  # add what the experts made of a row
    CONV,  # causal convolution, and what the delta rule reads of a row alone
    DELTA,  # the delta rule over the rows of each sequence
    GATED_NORM,
    ARGMAX,  # of each row of the logits, as int64
) = range(13)

ROW_WORDS = 46
(
    OP,
    DOMAIN,  # 0: all rows, 1: wanted rows
    SOURCE,  # address index of the input rows; NORMED for the last norm's output
    SOURCE_STRIDE,  # bytes between its rows
    TARGET,  # address index of the output rows
    TARGET_STRIDE,
    COLUMNS,  # K of a linear (padded); width of a norm (padded); width of an embedding (padded)
    WEIGHT,  # address index: panels, gain or table
    FORMAT,  # stored format of the weight
    BIAS,  # address index of float32 bias in panel order, 0 = none
    ITEMS,  # panels of a linear; heads of HEADS
    EPILOGUE,
    TRUE_WIDTH,  # norm: the width the mean divides by; ARGMAX: the logits of a row
    EPSILON,  # float32 bits
    Q_HEADS,
    KV_HEADS,
    HEAD_DIM,
    ROTARY_DIM,
    ROPE_TABLE,  # address index
    STATE_OFFSET,  # bytes of a block's state in the layers before this one
    SCALE,  # float32 bits; HEADS: of the queries, log2(e) included
    PANELLED,  # embedding table: 1 packed in panels, 0 row-major
    ROW_BYTES,  # embedding table: bytes a row, row-major only
    WINDOW,  # positions that attention sees, 0 = all
    Q_GAIN,  # HEADS: address index of a norm's gain for each query head, 0 = none
    K_GAIN,
    GATE,  # ATTENTION, GATED_NORM: address index of rows whose sigmoid or silu is multiplied, 0 = none
    GATE_STRIDE,
    GATE_AT,  # byte offset of the gate in its row
    EXPERTS,  # LINEAR: 0, or weights of that many experts follow each other and ITEMS are those of one
    TOP_K,
    NORMALISE,  # ROUTE: 1, the picked weights are divided by their sum
    ROUTES,  # address index of the route tables below
    PARTS_OF,  # COMBINE: address index of what the experts made
    PARTS_STRIDE,
    TAPS,
    KEY_HEADS,
    VALUE_HEADS,
    KEY_DIM,
    VALUE_DIM,
    A_LOG,  # address index
    DT_BIAS,  # address index
    A_AT,  # CONV: byte offsets in a source row
    B_AT,
    STEP_BYTES,  # what a tile's loop step moves on in a panel
    PANEL_BYTES,
) = range(46)

# Route tables of one step, in words: what ROUTE leaves for DISPATCH, LINEAR and COMBINE. Of each row top_k
# experts, ascending; a place is a row of the buffers in which the rows of an expert stand together.
ROUTED = 0  # rows that are routed
GROUPS = 1  # number of groups: (expert, first place, places), at most ROW_BLOCK places each
ROUTE_TABLES = 2  # then ids, places, sources, weights (float32) and groups


def route_words(max_rows: int, top_k: int, experts: int) -> int:
    """Words of the route tables: the groups are followed by a cursor for each expert."""
    places = max_rows * top_k
    return ROUTE_TABLES + 4 * places + 3 * (experts + places // ROW_BLOCK + 1) + experts


NORMED = 0  # address index with a meaning of its own, see step.numba_cpu.source_of

# Epilogues of LINEAR.
STORE, ADD, SILU_MUL = range(3)

# Stored formats of weights.
BF16, F16, FLOAT32 = range(3)
FORMATS = {"BF16": BF16, "F16": F16, "F32": FLOAT32}
FORMAT_BYTES = {BF16: 2, F16: 2, FLOAT32: 4}
# Bytes a tile's loop step moves on in a panel.
TILE_STEP = {BF16: 128, F16: 64, FLOAT32: 128}

# How activations are stored for the matmuls that read them.
ACT_F32 = 0  # float32 as computed
ACT_BF16 = 1  # bfloat16, two bytes, for the bfloat16 dot product instruction
ACT_ROUNDED = 2  # rounded to bfloat16 but kept as float32, where there is no such instruction
ACT_BYTES = {ACT_F32: 4, ACT_BF16: 2, ACT_ROUNDED: 4}

# --- geometry -----------------------------------------------------------------------------------------
PANEL = 32  # output rows of a weight panel
TILE_ROWS = 12  # most input rows that meet a panel at once
ROW_BLOCK = 11 * TILE_ROWS  # rows of a linear's item
RUN_QUERIES = 24  # queries that share the reading of a block of keys and values, unless a group has more
BLOCK = 128  # positions of an attention block
PREFETCH = 4096  # bytes ahead of what a tile of several rows reads of its weights
SMALL_ROWS = 8  # up to this many rows every thread norms for itself instead of meeting at a barrier
SPLIT_ROWS = 16  # up to this many rows attention is split over blocks


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def panel_bytes(form: int, columns: int) -> int:
    return columns * PANEL * FORMAT_BYTES[form]


def partial_bytes(head_dim: int) -> int:
    """Size of one attention partial {acc[value width], max, sum}, a multiple of 64."""
    return round_up(head_dim, PANEL) * 4 + 64


def state_bytes(kv_heads: int, head_dim: int) -> int:
    """Bytes of one layer's state for one block: keys and values in float32, values padded to panels.

    A sequence's state is a row of blocks of BLOCK positions; a block holds all layers, so that memory is
    touched densely as the sequence grows. Within a layer: per head keys [BLOCK/32][head_dim][32], then per
    head values [BLOCK][value width]. Steps that store activations as ACT_BF16 keep pairs of bfloat16 and
    need half of it: keys [BLOCK/32][head_dim/2][32][2], values [BLOCK/2][value width][2].
    """
    return kv_heads * BLOCK * (head_dim + round_up(head_dim, PANEL)) * 4


def scratch_bytes(head_dim: int, group: int) -> int:
    """Scratch memory of one thread: a tile of head rows, or scores and two sets of partials."""
    vectors = max(RUN_QUERIES, group)
    heads = TILE_ROWS * round_up(head_dim, PANEL) * 4
    return round_up(max(heads, vectors * (BLOCK * 4 + 2 * partial_bytes(head_dim))) + 4096, 4096)
