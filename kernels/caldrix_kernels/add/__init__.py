"""Sum of two buffers: the residual connection."""

from caldrix_kernels.op import Arg, Op, Tolerance

OP = Op(
    name="add",
    arguments=(Arg("a", ("rows", "width")), Arg("b", ("rows", "width"))),
    result=Arg("y", ("rows", "width")),
    tolerance=Tolerance(0.0, 0.0),
)
