"""The gate of a gated attention: x * sigmoid(gate)."""

from caldrix_kernels.op import Arg, Op, Tolerance

OP = Op(
    name="sigmoid_mul",
    arguments=(Arg("x", ("rows", "width")), Arg("gate", ("rows", "width"))),
    result=Arg("y", ("rows", "width")),
    tolerance=Tolerance(1e-6, 2e-6),
)
