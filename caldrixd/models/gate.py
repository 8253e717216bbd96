"""Decides from config.json alone whether a model can run, before any weight is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from caldrix_protocol.refusals import Refused
from caldrixd.architectures import FAMILIES, Family
from caldrixd.architectures.fields import Fields, excerpt
from caldrixd.json_file import read_object
from caldrixd.spec import ModelSpec

MAX_CONFIG = 1 << 20
_NAMES_CODE = ("auto_map", "model_file")
_QUANTISED = ("quantization_config", "compression_config")


def read_spec(directory: Path) -> ModelSpec:
    """The spec of a model directory. Refused "config/..." for whatever cannot run.

    `eos_ids` is the union of config.json and generation_config.json.
    """
    config = read_object(directory / "config.json", MAX_CONFIG)
    family = _family(config)
    fields = Fields(config)
    for place in (fields, fields.section("text_config") or fields):
        _refuse_code_and_quantisation(place)
    if config.get("transformers_weights") is not None:
        raise Refused("config/weights-file")
    spec = family.read_config(config)
    eos_ids = (*spec.eos_ids, *_generation_eos_ids(directory / "generation_config.json"))
    return replace(spec, eos_ids=tuple(dict.fromkeys(eos_ids)))


def _refuse_code_and_quantisation(fields: Fields) -> None:
    for name in _NAMES_CODE:
        if fields.values.get(name):
            raise Refused("config/runs-code", field=fields.prefix + name)
    for name in _QUANTISED:
        if fields.values.get(name) is not None:
            raise Refused("config/quantised", field=fields.prefix + name)


def _family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures")
    if names is None:
        raise Refused("config/architectures-count", count=0)
    if type(names) is not list or any(type(name) is not str for name in names):
        raise Refused("config/type", field="architectures", expected="a list of names", value=excerpt(names))
    if len(names) != 1:
        raise Refused("config/architectures-count", count=len(names))
    if names[0] not in FAMILIES:
        name, supported = excerpt(names[0]).strip('"'), ", ".join(FAMILIES)
        raise Refused("config/architecture", name=name, supported=supported)
    return FAMILIES[names[0]]


def _generation_eos_ids(path: Path) -> tuple[int, ...]:
    if not path.exists():
        return ()
    try:
        return Fields(read_object(path, MAX_CONFIG)).token_ids("eos_token_id")
    except Refused as refused:
        if "field" not in refused.fields:
            raise
        reason = f"eos_token_id must be {refused.fields['expected']}"
        raise Refused("config/unreadable", file=path.name, reason=reason) from None
