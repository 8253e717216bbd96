"""The arithmetic: one package for each op, with its signature, its reference and its variants."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from caldrix_kernels import (
    add,
    attention,
    causal_conv,
    delta_rule,
    embed,
    experts,
    gated_rmsnorm,
    gather,
    linear,
    rmsnorm,
    rope,
    sigmoid_mul,
    silu_mul,
)
from caldrix_kernels import slice as slice_
from caldrix_kernels.op import Op

OPS: Mapping[str, Op] = MappingProxyType(
    {
        op.name: op
        for op in (
            embed.OP,
            rmsnorm.OP,
            linear.OP,
            slice_.OP,
            rope.OP,
            attention.OP,
            silu_mul.OP,
            sigmoid_mul.OP,
            add.OP,
            gather.OP,
            experts.OP,
            causal_conv.OP,
            delta_rule.OP,
            gated_rmsnorm.OP,
        )
    }
)
