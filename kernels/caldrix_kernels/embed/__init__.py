"""Token embedding: the table's row of each token."""

from caldrix_kernels.op import Arg, Op, Tolerance

OP = Op(
    name="embed",
    arguments=(
        Arg("table", ("vocabulary", "width")),
        Arg("tokens", ("rows",), "int64"),
    ),
    result=Arg("x", ("rows", "width")),
    tolerance=Tolerance(0.0, 0.0),
)
