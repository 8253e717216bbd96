"""Builds a plan: methods are named as ops, so that an architecture reads like a forward pass."""

from __future__ import annotations

from caldrixd.plan.plan import KvState, Op, Plan, Weight
from caldrixd.spec import Rope


class PlanBuilder:
    """Collects ops. Buffers are names; widths follow from the weights."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._ops: list[Op] = []
        self._widths: dict[str, int] = {}
        self._weights: dict[str, Weight] = {}
        self._states: list[KvState] = []

    def _weight(self, name: str, *shape: int) -> str:
        weight = Weight(name, shape)
        if self._weights.setdefault(name, weight) != weight:
            raise ValueError(f"{name} is used with two shapes")
        return name

    def _emit(
        self,
        kind: str,
        inputs: tuple[str, ...],
        width: int,
        weights: tuple[str, ...] = (),
        **params: float,
    ) -> str:
        output = f"{kind}.{len(self._ops)}"
        self._ops.append(Op(kind, inputs, output, weights, params))
        self._widths[output] = width
        return output

    def embed(self, table: str, vocab_size: int, width: int) -> str:
        return self._emit("embed", (), width, (self._weight(table, vocab_size, width),))

    def rmsnorm(self, x: str, gain: str, eps: float) -> str:
        width = self._widths[x]
        return self._emit("rmsnorm", (x,), width, (self._weight(gain, width),), eps=eps)

    def linear(self, x: str, weight: str, width: int, *, bias: str | None = None) -> str:
        names = [self._weight(weight, width, self._widths[x])]
        if bias is not None:
            names.append(self._weight(bias, width))
        return self._emit("linear", (x,), width, tuple(names))

    def rope(self, x: str, heads: int, head_dim: int) -> str:
        return self._emit("rope", (x,), self._widths[x], heads=heads, head_dim=head_dim)

    def attention(
        self, q: str, k: str, v: str, *, heads: int, kv_heads: int, head_dim: int, window: int = 0
    ) -> str:
        layer = len(self._states)
        self._states.append(KvState(layer, kv_heads, head_dim))
        return self._emit(
            "attention",
            (q, k, v),
            heads * head_dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            layer=layer,
            window=window,
        )

    def silu_mul(self, gate: str, up: str) -> str:
        return self._emit("silu_mul", (gate, up), self._widths[gate])

    def add(self, a: str, b: str) -> str:
        return self._emit("add", (a, b), self._widths[a])

    def gather(self, x: str) -> str:
        return self._emit("gather", (x,), self._widths[x])

    def finish(self, *, vocab_size: int, hidden_size: int, max_context: int) -> Plan:
        return Plan(
            ops=tuple(self._ops),
            widths=dict(self._widths),
            weights=tuple(self._weights.values()),
            states=tuple(self._states),
            rope=self._rope,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            max_context=max_context,
        )
