"""Which rows of which tensors a packed matrix holds, for each shape of a plan: beside lists of rows."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from caldrix_kernels.formats import narrow_bf16, widen, widen_bf16
from caldrix_kernels.step.layout import BF16, F16, FLOAT32, FORMAT_BYTES, PANEL, round_up
from caldrixd.architectures.blocks import decoder
from caldrixd.lanes import packing
from caldrixd.lanes.drivers.compiler import compile_kernels
from caldrixd.lanes.lowering import lower
from caldrixd.plan.builder import PlanBuilder
from caldrixd.plan.plan import Plan, Tensor
from caldrixd.spec import DeltaNet, Experts, ModelSpec, Rope

Float32 = npt.NDArray[np.float32]

NUMPY = {"F16": np.float16, "F32": np.float32}
HIDDEN = 39
# Those of a matrix that is packed in four tasks.
MANY_ROWS = PANEL * packing.PANELS_A_TASK * 3 + 5
LAYER = "model.layers.0"
ATTENTION = f"{LAYER}.self_attn"
SPEC = ModelSpec(
    architecture="Qwen2ForCausalLM",
    vocab_size=70,
    hidden_size=HIDDEN,
    intermediate_size=53,
    layer_types=("full_attention",),
    heads=6,
    kv_heads=2,
    head_dim=10,
    rms_norm_eps=1e-5,
    rope=Rope("default", 10000.0, 10),
    max_context=64,
    tied=False,
)


class Loaded:
    """A plan's random weights, stored in `dtypes` by the end of their names or else BF16, and packed."""

    def __init__(self, plan: Plan, dtypes: Mapping[str, str] | None = None) -> None:
        self.tensors: dict[str, Tensor] = {}
        rng = np.random.default_rng(0)
        for weight in plan.weights:
            dtype = next((d for end, d in (dtypes or {}).items() if weight.name.endswith(end)), "BF16")
            values = rng.standard_normal(weight.shape, np.float32)
            stored = narrow_bf16(values) if dtype == "BF16" else values.astype(NUMPY[dtype])
            self.tensors[weight.name] = Tensor(dtype, weight.shape, stored.reshape(-1).view(np.uint8))
        self.lowered = lower(plan)
        pack = compile_kernels(lambda *_: None).pack_panels
        self.weights = packing.pack_weights(self.lowered, self.tensors, pack, 2)

    def rows(self, tensor: str) -> list[Float32]:
        found = self.tensors[tensor]
        return list(widen(found.data, found.dtype, found.shape))

    def packed(self, name: str, form: int = BF16) -> Float32:
        """A packed matrix in rows again, without the columns that pad it."""
        matrix = self.lowered.packed[name]
        assert self.weights.formats[name] == form
        columns = round_up(matrix.columns, PANEL)
        held = self._held(name, matrix.rows * columns * FORMAT_BYTES[form])
        if form == BF16:
            pairs = held.view(np.uint16).reshape(-1, columns // 2, PANEL, 2)
            values = widen_bf16(pairs.swapaxes(1, 2)).reshape(-1, columns)
        else:
            panels = held.view(np.float16 if form == F16 else np.float32).reshape(-1, columns, PANEL)
            values = panels.swapaxes(1, 2).reshape(-1, columns).astype(np.float32)
        assert not values[:, matrix.columns :].any()
        return values[:, : matrix.columns]

    def bias(self, name: str) -> Float32:
        return self._held(f"bias of {name}", self.lowered.packed[name].rows * 4).view(np.float32)

    def _held(self, name: str, size: int) -> npt.NDArray[np.uint8]:
        begin = self.weights.addresses[name] - self.weights.arena.address
        return self.weights.arena.bytes[begin : begin + size]


def filled(rows: Sequence[Float32], multiple: int = PANEL) -> list[Float32]:
    """And zeros like its first row up to a multiple of rows."""
    return [*rows, *[np.zeros_like(rows[0])] * (-len(rows) % multiple)]


def heads(rows: Sequence[Float32], size: int, first: int = 0, count: int | None = None) -> list[Float32]:
    """Of each head of `size` rows those from `first` on, filled to panels."""
    found = []
    for begin in range(0, len(rows), size):
        found += filled(rows[begin + first : begin + first + (count or size)])
    return found


def met(gate: Sequence[Float32], up: Sequence[Float32]) -> list[Float32]:
    """Sixteen rows of the one and the sixteen of the other."""
    found = []
    for begin in range(0, len(gate), 16):
        found += filled(gate[begin : begin + 16], 16) + filled(up[begin : begin + 16], 16)
    return found


def same(got: npt.ArrayLike, expected: Sequence[Float32]) -> None:
    np.testing.assert_array_equal(got, np.array(expected), strict=True)


@pytest.mark.parametrize("head_dim", [10, 32, 64, 80, 96])
def test_heads_begin_at_panels(head_dim: int) -> None:
    loaded = Loaded(decoder(replace(SPEC, head_dim=head_dim, rope=Rope("default", 1e4, 10), qkv_bias=True)))
    weights, biases = [], []
    for letter in "qkv":
        weights += heads(loaded.rows(f"{ATTENTION}.{letter}_proj.weight"), head_dim)
        biases += heads(loaded.rows(f"{ATTENTION}.{letter}_proj.bias"), head_dim)
    name = f"qkv of {ATTENTION}.q_proj.weight"
    same(loaded.packed(name), weights)
    same(loaded.bias(name), biases)


@pytest.mark.parametrize("head_dim", [10, 32, 80])
def test_queries_and_gates_of_one_tensor_part(head_dim: int) -> None:
    spec = replace(SPEC, head_dim=head_dim, rope=Rope("default", 1e4, 10), attention_gate=True)
    loaded = Loaded(decoder(spec))
    q, k, v = (f"{ATTENTION}.{letter}_proj.weight" for letter in "qkv")
    queries = heads(loaded.rows(q), 2 * head_dim, 0, head_dim)
    same(
        loaded.packed(f"qkv of {q}"),
        queries + heads(loaded.rows(k), head_dim) + heads(loaded.rows(v), head_dim),
    )
    gates = [row for number, row in enumerate(loaded.rows(q)) if number // head_dim % 2]
    same(loaded.packed(f"gate of {q}"), filled(gates))


@pytest.mark.parametrize("biased", ["qk", "v", "qkv"])
def test_what_has_no_bias_has_zeros(biased: str) -> None:
    plan = PlanBuilder(Rope("default", 1e4, 8))
    x = plan.embed("table", 64, HIDDEN)
    normed = plan.rmsnorm(x, "gain", eps=1e-5)
    q, k, v = (
        plan.linear(normed, letter, 16, bias=f"bias {letter}" if letter in biased else None)
        for letter in "qkv"
    )
    y = plan.attention(plan.rope(q, 2, 8), plan.rope(k, 2, 8), v, heads=2, kv_heads=2, head_dim=8)
    x = plan.add(x, plan.linear(y, "o", HIDDEN))
    plan.linear(plan.rmsnorm(x, "last", eps=1e-5), "table", 64)
    loaded = Loaded(plan.finish(vocab_size=64, hidden_size=HIDDEN, max_context=64))
    nothing = [np.zeros((), np.float32)] * 16
    biases = [
        row
        for letter in "qkv"
        for row in heads(loaded.rows(f"bias {letter}") if letter in biased else nothing, 8)
    ]
    same(loaded.bias("qkv of q"), biases)
    assert "bias of o" not in loaded.weights.addresses


@pytest.mark.parametrize("width", [7, 16, 48, 53])
@pytest.mark.parametrize(("dtype", "form"), [("BF16", BF16), ("F16", F16), ("F32", FLOAT32)])
def test_gates_meet_their_rows_in_a_panel(width: int, dtype: str, form: int) -> None:
    loaded = Loaded(decoder(replace(SPEC, intermediate_size=width)), {"": dtype})
    gate, up = (f"{LAYER}.mlp.{name}_proj.weight" for name in ("gate", "up"))
    same(loaded.packed(f"gate and up of {gate}", form), met(loaded.rows(gate), loaded.rows(up)))


def test_formats_that_meet_become_float32() -> None:
    loaded = Loaded(decoder(SPEC), {"up_proj.weight": "F32", "k_proj.weight": "F16"})
    gate, up = (f"{LAYER}.mlp.{name}_proj.weight" for name in ("gate", "up"))
    same(loaded.packed(f"gate and up of {gate}", FLOAT32), met(loaded.rows(gate), loaded.rows(up)))
    q, k, v = (f"{ATTENTION}.{letter}_proj.weight" for letter in "qkv")
    expected = [row for name in (q, k, v) for row in heads(loaded.rows(name), 10)]
    same(loaded.packed(f"qkv of {q}", FLOAT32), expected)


@pytest.mark.parametrize("width", [16, 21])
def test_each_expert_begins_at_a_panel(width: int) -> None:
    loaded = Loaded(decoder(replace(SPEC, experts=Experts(3, 2, width, True, (0,)))))
    ups, downs = [], []
    for expert in range(3):
        gate, up, down = (
            f"{LAYER}.mlp.experts.{expert}.{name}_proj.weight" for name in ("gate", "up", "down")
        )
        ups += met(loaded.rows(gate), loaded.rows(up))
        downs += filled(loaded.rows(down))
    first = f"{LAYER}.mlp.experts.0"
    same(loaded.packed(f"gates and ups of {first}.gate_proj.weight"), ups)
    same(loaded.packed(f"downs of {first}.down_proj.weight"), downs)
    router = f"{LAYER}.mlp.gate.weight"
    same(loaded.packed(router), filled(loaded.rows(router)))


def test_each_projection_of_a_delta_net_begins_at_a_panel() -> None:
    net = DeltaNet(4, 1, 2, 16, 48)
    loaded = Loaded(decoder(replace(SPEC, layer_types=("linear_attention", "full_attention"), delta_net=net)))
    names = [f"{LAYER}.linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "a", "b")]
    expected = [row for name in names for row in filled(loaded.rows(name))]
    same(loaded.packed(f"projections of {names[0]}"), expected)


def test_a_matrix_of_one_tensor_is_filled_to_a_panel() -> None:
    loaded = Loaded(decoder(replace(SPEC, vocab_size=MANY_ROWS)))
    for name in (f"{ATTENTION}.o_proj.weight", f"{LAYER}.mlp.down_proj.weight", "lm_head.weight"):
        same(loaded.packed(name), filled(loaded.rows(name)))


def test_a_tensor_is_released_once_its_matrix_is_packed() -> None:
    plan = decoder(replace(SPEC, vocab_size=MANY_ROWS))
    events: list[str | int] = []
    tensors = {
        name: replace(tensor, release=partial(events.append, name))
        for name, tensor in Loaded(plan).tensors.items()
    }
    kernel = compile_kernels(lambda *_: None).pack_panels

    def pack(*arguments: int) -> None:
        kernel(*arguments)
        events.append(arguments[6])

    lowered = lower(plan)
    weights = packing.pack_weights(lowered, tensors, pack, 3)
    assert events.count(weights.addresses["lm_head.weight"]) == 4
    for name, matrix in lowered.packed.items():
        packed = len(events) - 1 - events[::-1].index(weights.addresses[name])
        for tensor in matrix.tensors:
            assert events.count(tensor) == 1
            assert events.index(tensor) > packed


def test_copies_are_gone_before_the_next_matrix_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = decoder(replace(SPEC, layer_types=("full_attention",) * 2))
    tensors = Loaded(plan, {"up_proj.weight": "F32", "k_proj.weight": "F16"}).tensors
    copies: list[weakref.ref[npt.NDArray[np.float32]]] = []
    alive = []

    def widened(*stored: Any) -> Float32:
        values = widen(*stored).copy()
        copies.append(weakref.ref(values))
        return values

    def released() -> None:
        alive.append(sum(copy() is not None for copy in copies))

    monkeypatch.setattr(packing, "widen", widened)
    pack = compile_kernels(lambda *_: None).pack_panels
    tensors = {name: replace(tensor, release=released) for name, tensor in tensors.items()}
    packing.pack_weights(lower(plan), tensors, pack, 1)
    assert len(copies) > 2 * (3 + 1)
    assert not any(alive)


@pytest.mark.parametrize("threads", [1, 3])
def test_what_cannot_be_read_ends_the_packing(threads: int) -> None:
    plan = decoder(SPEC)

    class Torn(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            if name.endswith("down_proj.weight"):
                raise MemoryError(name)
            return super().__getitem__(name)

    pack = compile_kernels(lambda *_: None).pack_panels
    with pytest.raises(MemoryError, match="down_proj"):
        packing.pack_weights(lower(plan), Torn(Loaded(plan).tensors), pack, threads)
