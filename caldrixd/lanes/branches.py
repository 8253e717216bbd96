"""Branches of many stages: a mixture of experts, and a gated delta net's layer."""

from __future__ import annotations

from caldrix_kernels.step import layout as at
from caldrix_kernels.step.layout import round_up
from caldrixd.lanes.lowered import (
    ATTENDED,
    CONVOLVED,
    DISPATCHED,
    EXPERT_HIDDEN,
    EXPERT_OUTPUT,
    MIXED,
    NORMED,
    PROJECTED,
    ROUTES,
    SCORES,
    Routing,
    Segment,
)
from caldrixd.lanes.stages import GATED, VECTOR, Fields, Stages, float_bits
from caldrixd.plan.plan import Op

# Columns of a value head that one item of the delta rule keeps: more would not stay in AVX2's registers.
DELTA_COLUMNS = (32, 16)


def experts(stages: Stages, op: Op, into: Fields) -> None:
    """The branch that is added to the residual, row by row, by COMBINE."""
    x, scores = op.inputs
    if x != stages.normed:
        raise stages.refuse(op)
    router = stages.linear_behind(scores, stages.normed, op)
    count, top_k = int(op.params["experts"]), int(op.params["top_k"])
    stages.routing = Routing(max(count, stages.routing.experts), max(top_k, stages.routing.top_k))
    hidden, width = stages.plan.widths[x], stages.shapes[op.weights[0]][0]
    routes = {at.ROUTES: stages.index(ROUTES), at.TOP_K: top_k, at.EXPERTS: count}
    for buffer in (DISPATCHED, EXPERT_HIDDEN, EXPERT_OUTPUT):
        stages.copies[buffer] = max(top_k, stages.copies.get(buffer, 0))
    stages.emit(
        at.LINEAR,
        stages.source(NORMED),
        stages.target(SCORES, count),
        stages.pack(router.weights[0], [stages.whole(router)], [router]),
        {at.EPILOGUE: at.STORE},
    )
    stages.emit(at.ROUTE, stages.source(SCORES), routes, {at.NORMALISE: int(op.params["normalise"])})
    stages.stride(DISPATCHED, hidden)
    stages.emit(at.DISPATCH, stages.source(NORMED), stages.target(DISPATCHED, hidden), routes)
    ups, downs = [], []
    for expert in range(count):
        gate, up, down = op.weights[3 * expert : 3 * expert + 3]
        ups.append(Segment((gate, up), 0, width, GATED))
        downs.append(Segment((down,), 0, hidden))
    for name, parts, weight, source, target, epilogue in (
        ("gates and ups of ", ups, op.weights[0], DISPATCHED, (EXPERT_HIDDEN, width), at.SILU_MUL),
        ("downs of ", downs, op.weights[2], EXPERT_HIDDEN, (EXPERT_OUTPUT, hidden), at.STORE),
    ):
        linear = Op("linear", (), "", (weight,))
        packing = stages.pack(name + weight, parts, [linear], count)
        fields = stages.source(source) | stages.target(*target)
        stages.emit(at.LINEAR, fields, packing, routes, {at.EPILOGUE: epilogue})
    parts_of = {at.PARTS_OF: stages.index(EXPERT_OUTPUT), at.PARTS_STRIDE: stages.strides[EXPERT_OUTPUT]}
    stages.emit(at.COMBINE, into, routes, parts_of, {at.COLUMNS: round_up(hidden, VECTOR)})


def gated_rmsnorm(stages: Stages, op: Op) -> None:
    """The end of a delta rule's layer, which is known whole only here."""
    delta = stages.made_by(op.inputs[0], "delta_rule", op)
    conv = stages.made_by(delta.inputs[0], "causal_conv", op)
    key_heads, value_heads = int(delta.params["key_heads"]), int(delta.params["value_heads"])
    key_dim, value_dim = int(delta.params["key_dim"]), int(delta.params["value_dim"])
    if key_dim % VECTOR or value_dim % VECTOR or op.params["groups"] != value_heads:
        raise stages.refuse(op)
    inputs = (conv.inputs[0], op.inputs[1], delta.inputs[1], delta.inputs[2])
    _, z_at, a_at, b_at = _project(stages, op, inputs)
    shape = {
        at.KEY_HEADS: key_heads,
        at.VALUE_HEADS: value_heads,
        at.KEY_DIM: key_dim,
        at.VALUE_DIM: value_dim,
    }
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    stages.emit(
        at.CONV,
        shape,
        stages.source(PROJECTED),
        stages.target(CONVOLVED, channels + 2 * round_up(value_heads, VECTOR)),
        {
            at.WEIGHT: stages.held(conv.weights[0]),
            at.TAPS: int(conv.params["taps"]),
            at.STATE_OFFSET: stages.recurrent_offsets[int(conv.params["state"])],
            at.A_LOG: stages.held(delta.weights[0]),
            at.DT_BIAS: stages.held(delta.weights[1]),
            at.A_AT: a_at,
            at.B_AT: b_at,
            at.SCALE: float_bits(key_dim**-0.5),
        },
    )
    state = {
        at.STATE_OFFSET: stages.recurrent_offsets[int(delta.params["state"])],
        at.COLUMNS: next(columns for columns in DELTA_COLUMNS if value_dim % columns == 0),
    }
    mixed = stages.target(MIXED, value_heads * value_dim)
    stages.emit(at.DELTA, shape, stages.source(CONVOLVED), mixed, state)
    norm = {
        at.GATE: stages.index(PROJECTED),
        at.GATE_STRIDE: stages.strides[PROJECTED],
        at.GATE_AT: z_at,
        at.WEIGHT: stages.held(op.weights[0]),
        at.EPSILON: float_bits(op.params["eps"]),
    }
    attended = stages.target(ATTENDED, value_heads * value_dim)
    stages.emit(at.GATED_NORM, shape, stages.source(MIXED), attended, norm)
    stages.buffers[op.output] = ATTENDED


def _project(stages: Stages, op: Op, inputs: tuple[str, ...]) -> list[int]:
    """One product for the linears behind `inputs`; the byte offset of each in a projected row."""
    segments: list[Segment] = []
    starts = []
    linears = [stages.linear_behind(buffer, stages.normed, op) for buffer in inputs]
    for linear in linears:
        starts.append(4 * sum(segment.rows for segment in segments))
        segments.append(stages.whole(linear))
    width = sum(segment.rows for segment in segments)
    packing = stages.pack("projections of " + linears[0].weights[0], segments, linears)
    target = stages.target(PROJECTED, width)
    stages.emit(at.LINEAR, stages.source(NORMED), target, packing, {at.EPILOGUE: at.STORE})
    return starts
