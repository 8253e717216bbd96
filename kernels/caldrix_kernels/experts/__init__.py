"""Mixture of experts: each row goes through the feed-forwards that its scores choose."""

from caldrix_kernels.op import Arg, Op, Tolerance

OP = Op(
    name="experts",
    arguments=(
        Arg("x", ("rows", "hidden")),
        Arg("scores", ("rows", "experts")),
        Arg("gate", ("experts", "width", "hidden"), "bf16, f16 or f32 as stored, one weight an expert"),
        Arg("up", ("experts", "width", "hidden"), "bf16, f16 or f32 as stored, one weight an expert"),
        Arg("down", ("experts", "hidden", "width"), "bf16, f16 or f32 as stored, one weight an expert"),
    ),
    result=Arg("y", ("rows", "hidden")),
    tolerance=Tolerance(2e-5, 1e-5),
    parameters=("experts", "top_k", "normalise"),
)
