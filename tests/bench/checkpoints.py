"""Other forms of a model directory: float32 weights, and the same weights as another family."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from caldrix_kernels.formats import widen
from caldrixd.fetcher import WEIGHTS
from caldrixd.models import weights
from caldrixd.plan.plan import Tensor


def stored_format(directory: Path) -> str:
    """The format of most of the weights: "bf16", "f16" or "f32"."""
    entries = weights.open_checkpoint(directory).entries.values()
    sizes: dict[str, int] = {}
    for entry in entries:
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.end - entry.begin
    return max(sizes, key=lambda dtype: sizes[dtype]).lower()


def size(directory: Path) -> int:
    """Bytes of the weights as they are stored."""
    return weights.open_checkpoint(directory).size


def float32_copy(directory: Path, target: Path) -> Path:
    """The same model with all weights widened, in the existing directory `target`."""

    def widened(tensor: Tensor) -> Tensor:
        values = widen(tensor.data, tensor.dtype, tensor.shape)
        return Tensor("F32", tensor.shape, np.ascontiguousarray(values).view(np.uint8).reshape(-1))

    tensors = weights.open_checkpoint(directory).tensors
    return _write(directory, target, tensors, widened, {"dtype": "float32", "torch_dtype": "float32"})


def as_qwen2(directory: Path, target: Path) -> Path | None:
    """The weights of a LlamaForCausalLM with zero biases, as a Qwen2ForCausalLM; None of another family."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    if config["architectures"] != ["LlamaForCausalLM"] or config.get("rope_scaling"):
        return None
    tensors = dict(weights.open_checkpoint(directory).tensors)
    for name in [
        name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    ]:
        rows = tensors[name].shape[0]
        item = tensors[name].data.size // (rows * tensors[name].shape[1])
        bias = Tensor(tensors[name].dtype, (rows,), np.zeros(rows * item, np.uint8))
        tensors[name.removesuffix("weight") + "bias"] = bias
    changes = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return _write(directory, target, tensors, lambda tensor: tensor, changes)


def _write(
    directory: Path,
    target: Path,
    tensors: Mapping[str, Tensor],
    change: Callable[[Tensor], Tensor],
    config_changes: Mapping[str, Any],
) -> Path:
    for path in directory.glob("*.json"):
        if not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
    config = json.loads((directory / "config.json").read_text("utf-8"))
    (target / "config.json").write_text(json.dumps({**config, **config_changes}), "utf-8")
    stored = [(name, change(tensor)) for name, tensor in tensors.items()]
    header, end = {}, 0
    for name, tensor in stored:
        begin, end = end, end + tensor.data.size
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    with open(target / WEIGHTS, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in stored:
            tensor.data.tofile(file)
        # What the system would still be writing would slow what is measured next.
        os.fsync(file.fileno())
    return target
