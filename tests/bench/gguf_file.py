"""A model directory -> a GGUF file of the same bf16 weights, the inverse of caldrixd.fetcher.convert."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from caldrixd.fetcher import WEIGHTS
from caldrixd.fetcher.convert import CONTROL_TOKEN, tensor_name
from caldrixd.models import weights
from caldrixd.plan.plan import Tensor

NORMAL_TOKEN = 1  # of gguf.TokenType
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


def cached(directory: Path, cache: Path) -> Path:
    """The GGUF file of a LlamaForCausalLM directory, written into `cache` when it is not there yet."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for name in ("config.json", "tokenizer.json", WEIGHTS):
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
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_sizes(writer, config)
    _add_tokenizer(writer, _read(directory / "tokenizer.json"), config)
    tensors = weights.open_checkpoint(directory).tensors
    names = ["token_embd", "output_norm", *([] if config["tie_word_embeddings"] else ["output"])]
    names += [f"blk.{layer}.{part}" for layer in range(config["num_hidden_layers"]) for part in BLOCK_PARTS]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name in names:
        full = f"{name}.weight"
        bits = _bf16(tensors[tensor_name(full)])
        if bits.ndim == 1:
            writer.add_tensor(full, (bits.astype(np.uint32) << 16).view(np.float32))
            continue
        role = name.split(".")[-1]
        if role in heads:
            bits = paired_rotation(bits, heads[role])
        writer.add_tensor(full, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def paired_rotation(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Reorder q or k rows [heads * head_dim, hidden] so that i and i + head_dim / 2 are neighbours."""
    halves = rows.reshape(heads, 2, -1, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _bf16(tensor: Tensor) -> npt.NDArray[np.uint16]:
    if tensor.dtype != "BF16":
        raise ValueError(f"weights are {tensor.dtype}, not BF16")
    return tensor.data.reshape(-1).view(np.uint16).reshape(tensor.shape)


def _read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return result


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_theta"])


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Enough to load: the benches give token ids."""
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(vocabulary, key=lambda token: vocabulary[token]))
    writer.add_token_types(
        [CONTROL_TOKEN if number in special else NORMAL_TOKEN for number in range(len(vocabulary))]
    )
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
