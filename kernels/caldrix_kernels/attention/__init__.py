"""Causal attention of each row over the keys and values of its own sequence, up to its position."""

from caldrix_kernels.op import Arg, Op, Tolerance

OP = Op(
    name="attention",
    arguments=(
        Arg("q", ("rows", "heads * head_dim")),
        Arg("keys", ("positions", "kv_heads", "head_dim")),
        Arg("values", ("positions", "kv_heads", "head_dim")),
        Arg("own", ("rows",), "int64"),
    ),
    result=Arg("y", ("rows", "heads * head_dim")),
    tolerance=Tolerance(2e-6, 1e-5),
    parameters=("heads", "kv_heads", "head_dim", "scale", "window"),
)
