"""A GGUF file of a llama model with a byte-level BPE vocabulary -> an ordinary model directory.

GGUF differs from the checkpoint it was made of in three ways that are undone here: tensors have other
names, the rows of the q and k projections are reordered so that rotary pairs are neighbours, and floats of
the metadata are float32.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from caldrix_protocol.refusals import Refused
from caldrixd.fetcher import WEIGHTS

CONTROL_TOKEN = 3  # of gguf.TokenType

_NAMES: dict[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK_NAMES: dict[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Metadata = Mapping[str, Any]
Floats = npt.NDArray[np.float32]


def convert(gguf: Path, directory: Path) -> None:
    """Write config, weights and tokenizer of `gguf` into the existing `directory`.

    Raises Refused "demo/conversion" for any other shape of file. Needs the gguf package.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
        metadata = {name: _value(field.contents()) for name, field in reader.fields.items()}
        tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
        _write_json(directory / "config.json", model_config(metadata, tied=tied))
        _write_json(directory / "generation_config.json", generation_config(metadata))
        _write_json(directory / "tokenizer_config.json", tokenizer_config(metadata))
        build_tokenizer(metadata).save(str(directory / "tokenizer.json"), pretty=False)
        _write_weights(reader.tensors, metadata, directory / WEIGHTS)
    except OSError as error:
        raise Refused("demo/conversion", reason=error.strerror or error) from error
    except (KeyError, ValueError, IndexError) as error:
        raise Refused("demo/conversion", reason=f"{type(error).__name__}: {error}") from error


def _value(value: Any) -> Any:
    """Metadata floats are float32: give back the shortest decimal that was meant (1e-05, 100000)."""
    if not isinstance(value, float):
        return value
    number = float(str(np.float32(value)))
    return int(number) if number.is_integer() else number


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


# --- weights ----------------------------------------------------------------------------------


def tensor_name(gguf_name: str) -> str:
    """The checkpoint's name of a GGUF tensor. KeyError for one that a llama model does not have."""
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if block:
        return f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}.weight"
    return _NAMES[gguf_name.removesuffix(".weight")] + ".weight"


def half_rotation(rows: Floats, heads: int) -> Floats:
    """Reorder q or k rows [heads * head_dim, hidden]: within a head the even rows first, then the odd ones.

    GGUF pairs rotary rows (0, 1)(2, 3)...; checkpoints pair row i with i + head_dim / 2.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def bf16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    """Bit patterns of finite float32 values as bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2")


def _write_weights(tensors: Any, metadata: Metadata, path: Path) -> None:
    """Write all tensors in bf16, sorted by name, with one of them in memory at a time."""
    named = {tensor_name(tensor.name): tensor for tensor in tensors}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(named):
        shape = [int(size) for size in reversed(named[name].shape)]
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(named):
            file.write(bf16_bits(_values(named[name], metadata)).tobytes())


def _values(tensor: Any, metadata: Metadata) -> Floats:
    """A GGUF tensor as the checkpoint has it: float32, its rows in the checkpoint's order."""
    from gguf.quants import dequantize

    rows = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    shape = [int(size) for size in reversed(tensor.shape)]
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
    if not np.isfinite(values).all():
        raise ValueError(f"{tensor.name} has values that are not finite")
    role = tensor.name.split(".")[-2]
    return half_rotation(values, rows[role]) if role in rows else values


# --- configuration ----------------------------------------------------------------------------


def model_config(metadata: Metadata, *, tied: bool) -> dict[str, Any]:
    """config.json of a llama model."""
    if metadata["general.architecture"] != "llama":
        raise ValueError(f"architecture {metadata['general.architecture']!r} is not llama")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        **_special_ids(metadata),
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_scaling": None,
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """generation_config.json: the special token ids."""
    return _special_ids(metadata)


def _special_ids(metadata: Metadata) -> dict[str, int]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


# --- tokenizer --------------------------------------------------------------------------------


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The byte-level BPE tokenizer of the SmolLM family, which keeps its special tokens in the vocabulary."""
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {kind} is not byte-level BPE of the SmolLM family")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    special = [tokens[index] for index in _special_tokens(metadata)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _special_tokens(metadata: Metadata) -> list[int]:
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    return [index for index, kind in enumerate(types) if kind == CONTROL_TOKEN]


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """tokenizer_config.json: special tokens and the chat template."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    special = _special_tokens(metadata)
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(index): {"content": tokens[index], **plain} for index in special},
        "additional_special_tokens": [tokens[index] for index in special],
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "model_max_length": metadata["llama.context_length"],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
    }
