"""What files of weights hold that are not safetensors, told by their names."""

from __future__ import annotations

# By how the name ends.
_KINDS = (
    (".gguf", "a GGUF file"),
    (".ggml", "a GGML file"),
    (".bin", "a pickled file of PyTorch"),
    (".pt", "a pickled file of PyTorch"),
    (".pth", "a pickled file of PyTorch"),
    (".ckpt", "a pickled checkpoint"),
    (".pkl", "a pickled file"),
    (".h5", "a file of Keras"),
    (".msgpack", "a file of Flax"),
    (".onnx", "an ONNX file"),
    (".npz", "a file of numpy"),
)


def kind_of(name: str) -> str | None:
    """What a file of this name holds, if it is weights in a form that is not read."""
    lower = name.lower()
    return next((kind for end, kind in _KINDS if lower.endswith(end)), None)
