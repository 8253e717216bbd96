"""A model directory -> a GGUF file of the same weights, the inverse of caldrixd.fetcher.convert."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from caldrix_kernels.formats import widen
from caldrixd.fetcher.convert import CONTROL_TOKEN, tensor_name
from caldrixd.models import weights
from caldrixd.models.files import weight_files
from caldrixd.plan.plan import Tensor

NORMAL_TOKEN, UNUSED_TOKEN = 1, 5  # of gguf.TokenType
# Of config.json's architectures: GGUF's name, the pre-tokenizer, and whether rotary pairs are neighbours.
FAMILIES = {
    "LlamaForCausalLM": ("llama", "smollm", True),
    "MistralForCausalLM": ("llama", "default", True),
    "Qwen2ForCausalLM": ("qwen2", "qwen2", False),
    "Qwen3ForCausalLM": ("qwen3", "qwen2", False),
}
BLOCK_PARTS = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
# Those only some families have: GGUF's name and the end of the checkpoint's.
EXTRA_PARTS = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}


def obstacle(directory: Path) -> str | None:
    """Why `write` cannot write this model, or None."""
    config = _read(directory / "config.json")
    if config["architectures"][0] not in FAMILIES:
        return f"no GGUF of a {config['architectures'][0]} is written here"
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return "no GGUF with scaled rope is written here"
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    return "no GGUF with a sliding window is written here" if windowed else None


def cached(directory: Path, cache: Path) -> Path:
    """The GGUF file of a directory without `obstacle`, written into `cache` when it is not there yet."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for name in ("config.json", "tokenizer.json", *weight_files(directory)):
        with open(directory / name, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    path = cache / f"{digest.hexdigest()[:32]}.gguf"
    if not path.exists():
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            write(directory, unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    return path


def write(directory: Path, path: Path) -> None:
    import gguf

    config = _read(directory / "config.json")
    family, pre_tokenizer, neighbours = FAMILIES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, family)
    _add_sizes(writer, config)
    _add_tokenizer(writer, _read(directory / "tokenizer.json"), config, pre_tokenizer)
    tensors = weights.open_checkpoint(directory).tensors
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if "lm_head.weight" in tensors and not config.get("tie_word_embeddings", False):
        names["output.weight"] = "lm_head.weight"
    for layer in range(config["num_hidden_layers"]):
        parts = [f"blk.{layer}.{part}.weight" for part in BLOCK_PARTS]
        names |= {part: tensor_name(part) for part in parts}
        extra = {f"blk.{layer}.{a}": f"model.layers.{layer}.{b}" for a, b in EXTRA_PARTS.items()}
        names |= {part: name for part, name in extra.items() if name in tensors}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    kinds = {name: getattr(gguf.GGMLQuantizationType, name) for name in ("BF16", "F16", "F32")}
    for part, name in names.items():
        tensor, role = tensors[name], part.split(".")[-2]
        if len(tensor.shape) == 1:
            writer.add_tensor(part, np.array(widen(tensor.data, tensor.dtype, tensor.shape)))
            continue
        rows = _rows(tensor)
        if neighbours and role in heads:
            rows = paired_rotation(rows, heads[role])
        writer.add_tensor(part, rows, raw_dtype=kinds[tensor.dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def paired_rotation(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Reorder q or k rows [heads * head_dim, hidden] so that i and i + head_dim / 2 are neighbours."""
    halves = rows.reshape(heads, 2, -1, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _rows(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """A matrix as bytes, one row of it a row."""
    return tensor.data.reshape(tensor.shape[0], -1)


def _read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return result


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.get("rope_theta") or rope["rope_theta"])


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any], pre: str) -> None:
    """Enough to load: the benches give token ids."""
    names: dict[int, str] = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    kinds = dict.fromkeys(names, NORMAL_TOKEN)
    for token in tokenizer["added_tokens"]:
        names[token["id"]], kinds[token["id"]] = token["content"], CONTROL_TOKEN
    size = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([names.get(number, f"<unused {number}>") for number in size])
    writer.add_token_types([kinds.get(number, UNUSED_TOKEN) for number in size])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for add, ids in (
        (writer.add_bos_token_id, config.get("bos_token_id")),
        (writer.add_eos_token_id, config.get("eos_token_id")),
    ):
        if ids is not None:
            add(ids[0] if isinstance(ids, list) else ids)
    writer.add_add_bos_token(False)
