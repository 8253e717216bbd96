"""The arithmetic: one package for each op, with its signature, its reference and its variants."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from caldrix_kernels import add, attention, embed, gather, linear, rmsnorm, rope, silu_mul
from caldrix_kernels.op import Op

OPS: Mapping[str, Op] = MappingProxyType(
    {
        op.name: op
        for op in (
            embed.OP,
            rmsnorm.OP,
            linear.OP,
            rope.OP,
            attention.OP,
            silu_mul.OP,
            add.OP,
            gather.OP,
        )
    }
)
