"""Names that the index of a repo may not give to its weight files."""

from __future__ import annotations

# None of them is a bare name of an ordinary file that ends in .safetensors.
HOSTILE_NAMES = (
    "../x.safetensors",
    "a/../../x.safetensors",
    "/etc/x.safetensors",
    "C:\\x.safetensors",
    "D:x.safetensors",
    "\\\\h\\s\\x.safetensors",
    "x\0.safetensors",
    "CON",
    "x" * 300 + ".safetensors",
    "ｘ.safetensors",
    "x\u2215y.safetensors",
    ".hidden.safetensors",
    "sub/x.safetensors",
    "x.SAFETENSORS",
    "x.safetensors\n",
    "x.safetensors ",
    "\x1b]52;c;QQ==\x07.safetensors",
    "\u202ex.safetensors",
    "..safetensors",
    "..",
    "",
    "model.safetensors.index.json",
    "pytorch_model.bin",
)
# Two names of one file where capitals do not count.
TWINS = ("Model.safetensors", "model.safetensors")
