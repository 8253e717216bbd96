"""The blocks that architectures share, as plan fragments."""

from __future__ import annotations

from caldrixd.plan.builder import PlanBuilder
from caldrixd.plan.plan import Plan
from caldrixd.spec import ModelSpec

# What checkpoints of a `decoder` may hold that its plan does not use: a tied head wins over a stored one.
IGNORED = (".self_attn.rotary_emb.inv_freq", "lm_head.weight")


def attention(plan: PlanBuilder, x: str, spec: ModelSpec, prefix: str, *, last: bool) -> str:
    """The attention branch of a layer; of the `last` one only the wanted rows."""

    def project(name: str, heads: int) -> str:
        bias = f"{prefix}.{name}.bias" if spec.qkv_bias else None
        return plan.linear(x, f"{prefix}.{name}.weight", heads * spec.head_dim, bias=bias)

    q = plan.rope(project("q_proj", spec.heads), spec.heads, spec.head_dim)
    k = plan.rope(project("k_proj", spec.kv_heads), spec.kv_heads, spec.head_dim)
    v = project("v_proj", spec.kv_heads)
    attended = plan.attention(
        q,
        k,
        v,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        window=spec.sliding_window,
    )
    if last:
        attended = plan.gather(attended)
    return plan.linear(attended, f"{prefix}.o_proj.weight", spec.hidden_size)


def feed_forward(plan: PlanBuilder, x: str, spec: ModelSpec, prefix: str) -> str:
    gate = plan.linear(x, f"{prefix}.gate_proj.weight", spec.intermediate_size)
    up = plan.linear(x, f"{prefix}.up_proj.weight", spec.intermediate_size)
    return plan.linear(plan.silu_mul(gate, up), f"{prefix}.down_proj.weight", spec.hidden_size)


def decoder(spec: ModelSpec) -> Plan:
    """The pre-norm decoder stack of the llama family.

    Other rows read of a row only its keys and values, so beyond the last attention only the rows
    whose logits are wanted go on: of a prompt, one.
    """
    plan = PlanBuilder(spec.rope)
    embedding = "model.embed_tokens.weight"
    x = plan.embed(embedding, spec.vocab_size, spec.hidden_size)
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        normed = plan.rmsnorm(x, f"{prefix}.input_layernorm.weight", spec.rms_norm_eps)
        last = layer == spec.layers - 1
        branch = attention(plan, normed, spec, f"{prefix}.self_attn", last=last)
        x = plan.add(plan.gather(x) if last else x, branch)
        normed = plan.rmsnorm(x, f"{prefix}.post_attention_layernorm.weight", spec.rms_norm_eps)
        x = plan.add(x, feed_forward(plan, normed, spec, f"{prefix}.mlp"))
    x = plan.rmsnorm(x, "model.norm.weight", spec.rms_norm_eps)
    plan.linear(x, embedding if spec.tied else "lm_head.weight", spec.vocab_size)
    return plan.finish(vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, max_context=spec.max_context)
