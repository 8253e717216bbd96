"""The blocks that architectures share, as plan fragments, and the decoder that is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from caldrixd.architectures.config import FULL, LINEAR, SLIDING
from caldrixd.plan.builder import PlanBuilder
from caldrixd.plan.plan import Plan
from caldrixd.spec import Experts, ModelSpec


def norm(plan: PlanBuilder, x: str, name: str, spec: ModelSpec, *, groups: int = 1) -> str:
    return plan.rmsnorm(x, name, spec.rms_norm_eps, groups=groups, offset=spec.norm_offset)


def _attend(plan: PlanBuilder, x: str, spec: ModelSpec, layer: str, *, last: bool, window: int) -> str:
    prefix = f"{layer}.self_attn"

    def project(name: str, width: int) -> str:
        bias = f"{prefix}.{name}_proj.bias" if spec.qkv_bias else None
        return plan.linear(x, f"{prefix}.{name}_proj.weight", width, bias=bias)

    def place(x: str, name: str, heads: int) -> str:
        if spec.qk_norm:
            x = norm(plan, x, f"{prefix}.{name}_norm.weight", spec, groups=heads)
        return plan.rope(x, heads, spec.head_dim)

    width = spec.heads * spec.head_dim
    gate = None
    if spec.attention_gate:
        both = project("q", 2 * width)
        q, gate = (
            plan.slice(both, groups=spec.heads, first=first, count=spec.head_dim)
            for first in (0, spec.head_dim)
        )
    else:
        q = project("q", width)
    q = place(q, "q", spec.heads)
    k = place(project("k", spec.kv_heads * spec.head_dim), "k", spec.kv_heads)
    v = project("v", spec.kv_heads * spec.head_dim)
    y = plan.attention(
        q, k, v, heads=spec.heads, kv_heads=spec.kv_heads, head_dim=spec.head_dim, window=window
    )
    if gate is not None:
        y = plan.sigmoid_mul(y, gate)
    if last:
        y = plan.gather(y)
    return plan.linear(y, f"{prefix}.o_proj.weight", spec.hidden_size)


def full_attention(plan: PlanBuilder, x: str, spec: ModelSpec, layer: str, *, last: bool) -> str:
    return _attend(plan, x, spec, layer, last=last, window=0)


def sliding_attention(plan: PlanBuilder, x: str, spec: ModelSpec, layer: str, *, last: bool) -> str:
    return _attend(plan, x, spec, layer, last=last, window=spec.sliding_window)


def delta_net(plan: PlanBuilder, x: str, spec: ModelSpec, layer: str, *, last: bool) -> str:
    """A gated delta net: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024)."""
    net, prefix = spec.delta_net, f"{layer}.linear_attn"
    assert net is not None
    keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
    qkv = plan.linear(x, f"{prefix}.in_proj_qkv.weight", 2 * keys + values)
    qkv = plan.causal_conv(qkv, f"{prefix}.conv1d.weight", taps=net.taps)
    z = plan.linear(x, f"{prefix}.in_proj_z.weight", values)
    y = plan.delta_rule(
        qkv,
        plan.linear(x, f"{prefix}.in_proj_a.weight", net.value_heads),
        plan.linear(x, f"{prefix}.in_proj_b.weight", net.value_heads),
        a_log=f"{prefix}.A_log",
        dt_bias=f"{prefix}.dt_bias",
        key_heads=net.key_heads,
        value_heads=net.value_heads,
        key_dim=net.key_dim,
        value_dim=net.value_dim,
    )
    y = plan.gated_rmsnorm(y, z, f"{prefix}.norm.weight", spec.rms_norm_eps, groups=net.value_heads)
    if last:
        y = plan.gather(y)
    return plan.linear(y, f"{prefix}.out_proj.weight", spec.hidden_size)


def feed_forward(plan: PlanBuilder, x: str, spec: ModelSpec, layer: str) -> str:
    prefix = f"{layer}.mlp"
    gate = plan.linear(x, f"{prefix}.gate_proj.weight", spec.intermediate_size)
    up = plan.linear(x, f"{prefix}.up_proj.weight", spec.intermediate_size)
    return plan.linear(plan.silu_mul(gate, up), f"{prefix}.down_proj.weight", spec.hidden_size)


def mixture(plan: PlanBuilder, x: str, experts: Experts, layer: str) -> str:
    prefix = f"{layer}.mlp"
    each = [f"{prefix}.experts.{expert}" for expert in range(experts.count)]
    names = [(f"{e}.gate_proj.weight", f"{e}.up_proj.weight", f"{e}.down_proj.weight") for e in each]
    scores = plan.linear(x, f"{prefix}.gate.weight", experts.count)
    return plan.experts(x, scores, names, experts.width, top_k=experts.top_k, normalise=experts.normalise)


_MIXERS: Mapping[str, Callable[..., str]] = {
    FULL: full_attention,
    SLIDING: sliding_attention,
    LINEAR: delta_net,
}


def decoder(spec: ModelSpec) -> Plan:
    """The pre-norm decoder stack that all families share.

    Other rows read of a row only its keys and values or its part of the recurrent state, so beyond the
    last layer's attention or delta net only the rows whose logits are wanted go on: of a prompt, one.
    """
    plan = PlanBuilder(spec.rope)
    embedding = f"{spec.prefix}.embed_tokens.weight"
    x = plan.embed(embedding, spec.vocab_size, spec.hidden_size)
    for number, kind in enumerate(spec.layer_types):
        layer = f"{spec.prefix}.layers.{number}"
        last = number == spec.layers - 1
        normed = norm(plan, x, f"{layer}.input_layernorm.weight", spec)
        branch = _MIXERS[kind](plan, normed, spec, layer, last=last)
        x = plan.add(plan.gather(x) if last else x, branch)
        normed = norm(plan, x, f"{layer}.post_attention_layernorm.weight", spec)
        if spec.experts is not None and number in spec.experts.layers:
            x = plan.add(x, mixture(plan, normed, spec.experts, layer))
        else:
            x = plan.add(x, feed_forward(plan, normed, spec, layer))
    x = norm(plan, x, f"{spec.prefix}.norm.weight", spec)
    plan.linear(x, embedding if spec.tied else "lm_head.weight", spec.vocab_size)
    return plan.finish(vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, max_context=spec.max_context)
