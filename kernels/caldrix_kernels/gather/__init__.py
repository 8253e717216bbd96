"""The rows whose logits are wanted, in their order."""

from caldrix_kernels.op import Arg, Op, Tolerance

OP = Op(
    name="gather",
    arguments=(Arg("x", ("rows", "width")), Arg("wanted", ("wanted",), "int64")),
    result=Arg("y", ("wanted", "width")),
    tolerance=Tolerance(0.0, 0.0),
)
