"""What can be said of a model directory without a byte of its weights."""

from __future__ import annotations

from pathlib import Path

from caldrixd.architectures import FAMILIES
from caldrixd.models import gate, weights
from caldrixd.models.resolve import check_directory
from caldrixd.text import files as text_files


def look(directory: Path) -> None:
    """Refused for what could not be loaded."""
    check_directory(directory)
    spec = gate.read_spec(directory)
    text_files.check_directory(directory)
    family = FAMILIES[spec.architecture]
    entries = weights.read_entries(directory, family.stacked)
    weights.check(entries, family.build(spec), family.ignored, architecture=spec.architecture)
