"""Turns a plan into the program of the CPU interpreter: fused stages over an address table.

The interpreter keeps one residual, one normed buffer, and fuses what reads them:

    q, k, v linears + norms + ropes + writing state   HEADS
    attention + its gate                              ATTENTION
    gate, up linears + silu_mul                       LINEAR with SILU_MUL, rows interleaved 16 and 16
    linear + add to the residual                      LINEAR with ADD
    the last linear                                   LINEAR with STORE, into the logits, and ARGMAX of them
    gather of the residual or the attended            GATHER into a buffer of its own
    experts + add to the residual                     ROUTE, DISPATCH, two LINEARs, COMBINE
    projections + convolution + delta rule + norm     LINEAR with STORE, CONV, DELTA, GATED_NORM

A plan that has none of these shapes is refused before its weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from caldrix_kernels.step import layout as at
from caldrix_kernels.step.layout import PANEL, round_up
from caldrixd.lanes.branches import experts, gated_rmsnorm
from caldrixd.lanes.lowered import (
    ATTENDED,
    GATES,
    HIDDEN,
    LIKELIEST,
    LOGITS,
    NORMED,
    QUERIES,
    RESIDUAL,
    ROPE,
    WANTED_ATTENDED,
    WANTED_RESIDUAL,
    Attention,
    Lowered,
    Segment,
)
from caldrixd.lanes.stages import GATED, VECTOR, WANTED, Stages, float_bits
from caldrixd.plan.plan import Op, Plan

# Attention takes powers of two where the plan has exponentials.
LOG2_E = math.log2(math.e)


def embed(stages: Stages, op: Op) -> None:
    table = op.weights[0]
    head = stages.plan.ops[-1]
    tied = head.kind == "linear" and head.weights[0] == table
    if not tied:
        stages.tables.append(table)
    width = stages.plan.widths[op.output]
    stages.residual = op.output
    stages.buffers[op.output] = RESIDUAL
    stages.emit(
        at.EMBED,
        stages.target(RESIDUAL, width),
        {
            at.COLUMNS: round_up(width, PANEL),
            at.TRUE_WIDTH: width,
            at.WEIGHT: stages.index(table),
            at.PANELLED: int(tied),
        },
    )


def gather(stages: Stages, op: Op) -> None:
    source = stages.buffers.get(op.inputs[0], "")
    if source not in WANTED:
        raise stages.refuse(op)
    target = stages.buffers[op.output] = WANTED[source]
    stages.strides[target] = stages.strides[source]
    stages.gathered = True
    if source == RESIDUAL:
        stages.residual = op.output
    fields = {at.TARGET: stages.index(target), at.TARGET_STRIDE: stages.strides[target]}
    stages.emit(at.GATHER, stages.source(source), fields)


def rmsnorm(stages: Stages, op: Op) -> None:
    """A norm of the residual; one of heads is fused into the attention that reads them."""
    if op.inputs != (stages.residual,):
        return
    source = stages.buffer_of(op, stages.residual, RESIDUAL, WANTED_RESIDUAL)
    if op.params["groups"] != 1:
        raise stages.refuse(op)
    stages.fused.add(op.output)
    width = stages.plan.widths[op.output]
    stages.normed = op.output
    stages.emit(
        at.NORM,
        stages.source(source),
        {at.TARGET: at.NORMED, at.TARGET_STRIDE: stages.stride(NORMED, width)},
        {
            at.COLUMNS: round_up(width, PANEL),
            at.TRUE_WIDTH: width,
            at.WEIGHT: stages.held(op.weights[0], op.params["offset"]),
            at.EPSILON: float_bits(op.params["eps"]),
        },
    )


def linear(stages: Stages, op: Op) -> None:
    """Fused into what reads it, but for the last one, which makes the logits."""
    if op is not stages.plan.ops[-1]:
        return
    linear = stages.linear_behind(op.output, stages.normed, op)
    logits, stride = stages.index(LOGITS), round_up(stages.plan.vocab_size, PANEL) * 4
    target = {at.TARGET: logits, at.TARGET_STRIDE: stride}
    packing = stages.pack(linear.weights[0], [stages.whole(linear)], [linear])
    stages.emit(at.LINEAR, stages.source(NORMED), target, packing, {at.EPILOGUE: at.STORE})
    stages.emit(
        at.ARGMAX,
        {at.SOURCE: logits, at.SOURCE_STRIDE: stride, at.TRUE_WIDTH: stages.plan.vocab_size},
        {at.TARGET: stages.index(LIKELIEST), at.TARGET_STRIDE: at.WORD},
    )


def fused_later(stages: Stages, op: Op) -> None:
    """Part of a shape that a later op completes."""


def head_input(stages: Stages, buffer: str, op: Op) -> tuple[str, Op | None]:
    """What a rope turns, and the norm of each head before it."""
    rope = stages.made_by(buffer, "rope", op)
    norm = stages.producer[rope.inputs[0]]
    if norm.kind != "rmsnorm":
        return rope.inputs[0], None
    if norm.params["groups"] != rope.params["heads"]:
        raise stages.refuse(op)
    stages.fused.add(norm.output)
    return norm.inputs[0], norm


def attend(stages: Stages, op: Op) -> None:
    heads, kv_heads = int(op.params["heads"]), int(op.params["kv_heads"])
    head_dim = int(op.params["head_dim"])
    shape = Attention(head_dim, heads // kv_heads, kv_heads)
    if stages.attention not in (None, shape):
        raise stages.refuse(op)
    stages.attention = shape
    q, q_norm = head_input(stages, op.inputs[0], op)
    k, k_norm = head_input(stages, op.inputs[1], op)
    projections = [stages.projection(buffer, op) for buffer in (q, k, op.inputs[2])]
    segments: list[Segment] = []
    for projection, count in zip(projections, (heads, kv_heads, kv_heads), strict=True):
        parts = projection.heads(count, head_dim, PANEL)
        if parts is None:
            raise stages.refuse(op)
        segments += parts
    norms = {}
    for place, norm in ((at.Q_GAIN, q_norm), (at.K_GAIN, k_norm)):
        if norm is not None:
            norms[place] = stages.held(norm.weights[0], norm.params["offset"])
            norms[at.EPSILON] = float_bits(norm.params["eps"])
    geometry = {
        at.Q_HEADS: heads,
        at.KV_HEADS: kv_heads,
        at.HEAD_DIM: head_dim,
        at.STATE_OFFSET: stages.state_offset,
        at.WINDOW: int(op.params["window"]),
    }
    stages.strides[QUERIES] = round_up(head_dim, VECTOR) * 4
    stages.copies[QUERIES] = heads
    linears = [projection.linear for projection in projections]
    packing = stages.pack("qkv of " + linears[0].weights[0], segments, linears)
    stages.emit(
        at.HEADS,
        packing,
        geometry,
        norms,
        stages.source(NORMED),
        {
            at.TARGET: stages.index(QUERIES),
            at.TARGET_STRIDE: stages.strides[QUERIES],
            at.ITEMS: heads + 2 * kv_heads,
            at.ROTARY_DIM: stages.plan.rope.rotary_dim,
            at.ROPE_TABLE: stages.index(ROPE),
            at.SCALE: float_bits(op.params["scale"] * LOG2_E),
        },
    )
    stages.emit(at.ATTENTION, geometry, stages.source(QUERIES), stages.target(ATTENDED, heads * head_dim))
    stages.buffers[op.output] = ATTENDED
    stages.state_offset += at.state_bytes(kv_heads, head_dim)


def sigmoid_mul(stages: Stages, op: Op) -> None:
    """The gate of an attention: its rows are computed before, and multiplied where the attention ends."""
    x, gate = op.inputs
    attention = stages.made_by(x, "attention", op)
    row = stages.rows[-1]
    heads, head_dim = int(attention.params["heads"]), int(attention.params["head_dim"])
    projection = stages.projection(gate, op)
    segments = projection.heads(heads, head_dim, head_dim)
    if row[at.OP] != at.ATTENTION or stages.buffers.get(x) != ATTENDED or segments is None:
        raise stages.refuse(op)
    stages.rows.pop()
    packing = stages.pack("gate of " + projection.weight, segments, [projection.linear])
    target = stages.target(GATES, heads * head_dim)
    stages.emit(at.LINEAR, stages.source(NORMED), target, packing, {at.EPILOGUE: at.STORE})
    stages.rows.append(row | {at.GATE: stages.index(GATES), at.GATE_STRIDE: stages.strides[GATES]})
    stages.buffers[op.output] = ATTENDED


def silu_mul(stages: Stages, op: Op) -> None:
    gate, up = (stages.linear_behind(buffer, stages.normed, op) for buffer in op.inputs)
    width = stages.plan.widths[op.output]
    segment = Segment((gate.weights[0], up.weights[0]), 0, width, GATED)
    stages.buffers[op.output] = HIDDEN
    packing = stages.pack("gate and up of " + gate.weights[0], [segment], [gate, up])
    target = stages.target(HIDDEN, width)
    stages.emit(at.LINEAR, stages.source(NORMED), target, packing, {at.EPILOGUE: at.SILU_MUL})


def add(stages: Stages, op: Op) -> None:
    residual, branch = op.inputs
    if residual != stages.residual:
        raise stages.refuse(op)
    target = stages.buffer_of(op, residual, RESIDUAL, WANTED_RESIDUAL)
    stages.residual = op.output
    stages.buffers[op.output] = target
    into = {at.TARGET: stages.index(target), at.TARGET_STRIDE: stages.strides[target]}
    if stages.producer[branch].kind == "experts":
        experts(stages, stages.producer[branch], into)
        return
    linear = stages.made_by(branch, "linear", op)
    source = stages.buffer_of(op, linear.inputs[0], ATTENDED, WANTED_ATTENDED, HIDDEN)
    stages.fused.add(linear.output)
    packing = stages.pack(linear.weights[0], [stages.whole(linear)], [linear])
    stages.emit(at.LINEAR, stages.source(source), into, packing, {at.EPILOGUE: at.ADD})


_LOWER: Mapping[str, Callable[[Stages, Op], None]] = {
    "embed": embed,
    "gather": gather,
    "rmsnorm": rmsnorm,
    "linear": linear,
    "slice": fused_later,
    "rope": fused_later,
    "attention": attend,
    "sigmoid_mul": sigmoid_mul,
    "silu_mul": silu_mul,
    "add": add,
    "experts": fused_later,
    "causal_conv": fused_later,
    "delta_rule": fused_later,
    "gated_rmsnorm": gated_rmsnorm,
}


def lower(plan: Plan) -> Lowered:
    """The program for `plan`. Refused "lane/unsupported-op" for a shape the interpreter does not know."""
    stages = Stages(plan)
    for op in plan.ops:
        if op.kind not in _LOWER:
            raise stages.refuse(op)
        _LOWER[op.kind](stages, op)
    for op in plan.ops:
        if op.kind in ("linear", "rmsnorm") and op.output not in stages.fused:
            raise stages.refuse(op)
    return stages.finish()
