"""What the project promises of its figures, with all cores of the machine."""

from __future__ import annotations

from tests.bench.figures import Case, Target

LLAMA_CPP = "llama.cpp"
TRANSFORMERS = "transformers"
READ_LIMIT = "read limit"
MULTIPLY_LIMIT = "multiply-add limit"
DOT_LIMIT = "bfloat16 limit"
# What one arithmetic can do at most is no limit of the other.
LIMITED = {MULTIPLY_LIMIT: "f32", DOT_LIMIT: "bf16"}
FILE_READ = "reading the file"
NUMBA = "numba"

# (figure, stored format of the weights, arithmetic); "" stands for any.
_TARGETS: dict[tuple[str, str, str], tuple[Target, ...]] = {
    ("decode", "bf16", "f32"): (Target(LLAMA_CPP, 1.25), Target(READ_LIMIT, 0.9)),
    ("decode-at-1500", "bf16", "f32"): (Target(LLAMA_CPP, 1.3),),
    ("prefill-512", "bf16", "f32"): (Target(LLAMA_CPP, 1.4), Target(MULTIPLY_LIMIT, 0.85)),
    ("prefill-512", "bf16", "bf16"): (Target(LLAMA_CPP, 2.2), Target(TRANSFORMERS, 1.6)),
    ("prefill-2000", "bf16", "f32"): (Target("prefill-512", 0.8),),
    ("prefill-2000", "bf16", "bf16"): (Target("prefill-512", 0.8),),
    ("clients-8", "bf16", "f32"): (Target("clients-1", 4), Target(LLAMA_CPP, 1.5)),
    ("stall", "bf16", "f32"): (Target("", 0.25, most=True),),
    ("decode-beside-2-loops", "bf16", "f32"): (Target("decode", 0.4), Target(LLAMA_CPP, 3)),
    ("decode-c", "bf16", "f32"): (Target(NUMBA, 0.8),),
    ("packing", "", ""): (Target("", 2),),
    ("load-second-family", "", ""): (Target(FILE_READ, 1.3, most=True),),
    ("load-second-family-from-disk", "", ""): (Target(FILE_READ, 1.3, most=True),),
    ("compiled-for-second-family", "", ""): (Target("", 0, most=True),),
    ("peak-beside-weights-and-state", "", ""): (Target("", 250, most=True),),
}


def targets(name: str, case: Case, threads: int) -> tuple[Target, ...]:
    """Those of a figure; none for fewer threads than `threads`, what the machine has."""
    if case.threads != threads:
        return ()
    return _TARGETS.get((name, case.weights, case.arithmetic)) or _TARGETS.get((name, "", ""), ())
