"""What a model is: the numbers of config.json after the gate has accepted them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: angle of pair i at position p is p * inverse_frequency(i).

    `kind` is "default", "linear" or "llama3". `rotary_dim` dimensions of each head rotate, in
    pairs (i, i + rotary_dim/2). The last four fields belong to the scaled kinds.
    """

    kind: str
    theta: float
    rotary_dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """A dense decoder-only transformer. Sizes are in elements; `max_context` in tokens.

    `qkv_bias` says whether q, k and v projections have a bias; `tied` whether the output head
    is the embedding matrix. `sliding_window` 0 means full attention.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_context: int
    tied: bool
    qkv_bias: bool
    sliding_window: int = 0
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
