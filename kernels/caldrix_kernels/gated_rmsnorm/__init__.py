"""Root mean square norm of each head, times a gain and the SiLU of a gate."""

from caldrix_kernels.op import Arg, Op, Tolerance

OP = Op(
    name="gated_rmsnorm",
    arguments=(
        Arg("x", ("rows", "groups * part")),
        Arg("z", ("rows", "groups * part")),
        Arg("gain", ("part",), "bf16, f16 or f32 as stored"),
    ),
    result=Arg("y", ("rows", "groups * part")),
    tolerance=Tolerance(1e-6, 5e-6),
    parameters=("eps", "groups"),
)
