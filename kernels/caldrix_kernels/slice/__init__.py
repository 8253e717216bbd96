"""The same columns of each of a row's equal parts: a projection that holds two things head by head."""

from caldrix_kernels.op import Arg, Op, Tolerance

OP = Op(
    name="slice",
    arguments=(Arg("x", ("rows", "groups * part")),),
    result=Arg("y", ("rows", "groups * count")),
    tolerance=Tolerance(0.0, 0.0),
    parameters=("groups", "first", "count"),
)
