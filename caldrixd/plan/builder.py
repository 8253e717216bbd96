"""Builds a plan: methods are named as ops, so that an architecture reads like a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from caldrixd.plan.plan import KvState, Op, Plan, RecurrentState, Weight
from caldrixd.spec import Rope


class PlanBuilder:
    """Collects ops. Buffers are names; widths follow from the weights."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._ops: list[Op] = []
        self._widths: dict[str, int] = {}
        self._weights: dict[str, Weight] = {}
        self._states: list[KvState] = []
        self._recurrent: list[RecurrentState] = []

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

    def rmsnorm(self, x: str, gain: str, eps: float, *, groups: int = 1, offset: float = 0.0) -> str:
        width = self._widths[x]
        gain = self._weight(gain, width // groups)
        return self._emit("rmsnorm", (x,), width, (gain,), eps=eps, groups=groups, offset=offset)

    def linear(self, x: str, weight: str, width: int, *, bias: str | None = None) -> str:
        names = [self._weight(weight, width, self._widths[x])]
        if bias is not None:
            names.append(self._weight(bias, width))
        return self._emit("linear", (x,), width, tuple(names))

    def slice(self, x: str, *, groups: int, first: int, count: int) -> str:
        return self._emit("slice", (x,), groups * count, groups=groups, first=first, count=count)

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

    def sigmoid_mul(self, x: str, gate: str) -> str:
        return self._emit("sigmoid_mul", (x, gate), self._widths[x])

    def add(self, a: str, b: str) -> str:
        return self._emit("add", (a, b), self._widths[a])

    def gather(self, x: str) -> str:
        return self._emit("gather", (x,), self._widths[x])

    def experts(
        self,
        x: str,
        scores: str,
        names: Sequence[tuple[str, str, str]],
        width: int,
        *,
        top_k: int,
        normalise: bool,
    ) -> str:
        """`names`: the gate, up and down weights of each expert; `width` that of its hidden row."""
        hidden = self._widths[x]
        weights = []
        for gate, up, down in names:
            weights += [self._weight(gate, width, hidden), self._weight(up, width, hidden)]
            weights.append(self._weight(down, hidden, width))
        return self._emit(
            "experts",
            (x, scores),
            hidden,
            tuple(weights),
            experts=len(names),
            top_k=top_k,
            normalise=normalise,
        )

    def _state(self, *shape: int) -> int:
        self._recurrent.append(RecurrentState(shape))
        return len(self._recurrent) - 1

    def causal_conv(self, x: str, weight: str, *, taps: int) -> str:
        width = self._widths[x]
        names = (self._weight(weight, width, 1, taps),)
        return self._emit("causal_conv", (x,), width, names, taps=taps, state=self._state(taps - 1, width))

    def delta_rule(
        self,
        qkv: str,
        a: str,
        b: str,
        *,
        a_log: str,
        dt_bias: str,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
    ) -> str:
        names = (self._weight(a_log, value_heads), self._weight(dt_bias, value_heads))
        return self._emit(
            "delta_rule",
            (qkv, a, b),
            value_heads * value_dim,
            names,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            state=self._state(value_heads, key_dim, value_dim),
        )

    def gated_rmsnorm(self, x: str, z: str, gain: str, eps: float, *, groups: int) -> str:
        width = self._widths[x]
        names = (self._weight(gain, width // groups),)
        return self._emit("gated_rmsnorm", (x, z), width, names, eps=eps, groups=groups)

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
            recurrent=tuple(self._recurrent),
        )
