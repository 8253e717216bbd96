"""The gate of a gated feed-forward: silu(gate) * up."""

from caldrix_kernels.op import Arg, Op, Tolerance

OP = Op(
    name="silu_mul",
    arguments=(Arg("gate", ("rows", "width")), Arg("up", ("rows", "width"))),
    result=Arg("y", ("rows", "width")),
    tolerance=Tolerance(1e-6, 2e-6),
)
