"""The models tests run: tiny random ones kept in the checkout, and the demo model from the user's cache."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from caldrixd.architectures import FAMILIES
from caldrixd.models import gate, weights
from caldrixd.plan import oracle
from caldrixd.plan.plan import Plan, Tensor

DATA = Path(__file__).parents[1] / "data"
TINY = tuple(sorted(path.name for path in (DATA / "models").iterdir() if path.is_dir()))


def tiny(name: str) -> Path:
    """The directory of a tiny model."""
    return DATA / "models" / name


def reference(name: str) -> dict[str, Any]:
    """What transformers answers in float32: of a tiny model, or of "smollm2-135m-instruct"."""
    path = tiny(name) / "reference.json" if name in TINY else DATA / "reference" / f"{name}.json"
    result: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return result


def smollm2() -> Path:
    """The demo model's directory: under $CALDRIX_TEST_MODELS, else fetched once into the user's cache."""
    models = os.environ.get("CALDRIX_TEST_MODELS")
    if models:
        return Path(models) / "smollm2-135m-instruct"
    from tests.support.demo import demo_directory

    return demo_directory()


def opened(directory: Path) -> tuple[Plan, Mapping[str, Tensor]]:
    """The plan of a model directory, and its tensors."""
    spec = gate.read_spec(directory)
    family = FAMILIES[spec.architecture]
    return family.build(spec), weights.open_checkpoint(directory, family.stacked).tensors


def oracle_program(directory: Path) -> oracle.Program:
    return oracle.load(*opened(directory))
