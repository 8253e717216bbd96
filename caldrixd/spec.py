"""What a model is: the numbers of config.json after the gate has accepted them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: angle of pair i at position p is p * inverse_frequency(i).

    `kind` is "default", "linear", "llama3" or "yarn". `rotary_dim` dimensions of each head rotate, in
    pairs (i, i + rotary_dim/2), times `attention_factor`. The fields after `rotary_dim` belong to the
    scaled kinds: the next three to llama3, the last four to yarn, `original_context` to both.
    """

    kind: str
    theta: float
    rotary_dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward of the layers `layers`.

    Each row goes through `top_k` of `count` feed-forwards of width `width`; `normalise` makes their
    weights add up to one.
    """

    count: int
    top_k: int
    width: int
    normalise: bool
    layers: tuple[int, ...]


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net in place of the attention of the layers of the kind "linear_attention"."""

    taps: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. Sizes are in elements; `max_context` in tokens.

    `layer_types` has "full_attention", "sliding_attention" (over the last `sliding_window` tokens) or
    "linear_attention" for each layer. `qkv_bias` says whether q, k and v projections have a bias,
    `qk_norm` whether each head of q and k is normed, `attention_gate` whether q_proj also holds a gate
    for what is attended; `norm_offset` is added to the gains of norms. `tied` says whether the output
    head is the embedding matrix. `prefix` is what the names of the decoder's tensors begin with.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_context: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    attention_gate: bool = False
    norm_offset: float = 0.0
    sliding_window: int = 0
    experts: Experts | None = None
    delta_net: DeltaNet | None = None
    prefix: str = "model"
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def layers(self) -> int:
        return len(self.layer_types)
