"""Matrix product with a weight of (outputs, inputs), and an optional bias."""

from caldrix_kernels.op import Arg, Op, Tolerance

OP = Op(
    name="linear",
    arguments=(
        Arg("x", ("rows", "inputs")),
        Arg("weight", ("outputs", "inputs"), "bf16, f16 or f32 as stored"),
        Arg("bias", ("outputs",), "bf16, f16 or f32 as stored, optional"),
    ),
    result=Arg("y", ("rows", "outputs")),
    tolerance=Tolerance(2e-5, 1e-5),
)
