"""Causal convolution over the rows of a sequence, channel by channel, with SiLU."""

from caldrix_kernels.op import Arg, Op, Tolerance

OP = Op(
    name="causal_conv",
    arguments=(
        Arg("x", ("rows", "channels")),
        Arg("state", ("taps - 1", "channels")),
        Arg("weight", ("channels", "1", "taps"), "bf16, f16 or f32 as stored"),
    ),
    result=Arg("y", ("rows", "channels")),
    tolerance=Tolerance(1e-6, 5e-6),
    parameters=("taps",),
)
