"""Root mean square norm: each row, or each part of it, divided by its root mean square, times a gain."""

from caldrix_kernels.op import Arg, Op, Tolerance

OP = Op(
    name="rmsnorm",
    arguments=(Arg("x", ("rows", "groups * part")), Arg("gain", ("part",))),
    result=Arg("y", ("rows", "groups * part")),
    tolerance=Tolerance(1e-6, 2e-6),
    parameters=("eps", "groups", "offset"),
)
