"""Rotary position embedding: dimension pairs of each head turned by an angle that grows with position."""

from caldrix_kernels.op import Arg, Op, Tolerance

OP = Op(
    name="rope",
    arguments=(
        Arg("x", ("rows", "heads * head_dim")),
        Arg("cosines", ("rows", "rotary_dim / 2")),
        Arg("sines", ("rows", "rotary_dim / 2")),
    ),
    result=Arg("y", ("rows", "heads * head_dim")),
    tolerance=Tolerance(1e-6, 1e-6),
    parameters=("heads", "head_dim"),
)
