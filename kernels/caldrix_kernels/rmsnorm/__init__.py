"""Root mean square norm: each row divided by its root mean square, times a gain."""

from caldrix_kernels.op import Arg, Op, Tolerance

OP = Op(
    name="rmsnorm",
    arguments=(Arg("x", ("rows", "width")), Arg("gain", ("width",))),
    result=Arg("y", ("rows", "width")),
    tolerance=Tolerance(1e-6, 2e-6),
    parameters=("eps",),
)
