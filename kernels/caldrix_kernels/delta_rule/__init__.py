"""Gated delta rule: a matrix of memory for each head that forgets, corrects itself and is read."""

from caldrix_kernels.op import Arg, Op, Tolerance

OP = Op(
    name="delta_rule",
    arguments=(
        Arg("qkv", ("rows", "2 * key_heads * key_dim + value_heads * value_dim")),
        Arg("a", ("rows", "value_heads")),
        Arg("b", ("rows", "value_heads")),
        Arg("state", ("value_heads", "key_dim", "value_dim")),
        Arg("a_log", ("value_heads",), "bf16, f16 or f32 as stored"),
        Arg("dt_bias", ("value_heads",), "bf16, f16 or f32 as stored"),
    ),
    result=Arg("y", ("rows", "value_heads * value_dim")),
    tolerance=Tolerance(2e-6, 2e-5),
    parameters=("key_heads", "value_heads", "key_dim", "value_dim"),
)
