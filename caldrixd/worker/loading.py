"""A model directory, loaded: everything a worker needs to answer."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from caldrix_protocol.address import cache_directory
from caldrix_protocol.messages import Load, Ready
from caldrixd.architectures import FAMILIES
from caldrixd.engine.engine import Engine
from caldrixd.lanes import cpu
from caldrixd.lanes.drivers import compiler, kernel_cache
from caldrixd.lanes.lane import Loader, Program, Report, Variant
from caldrixd.models import fit, gate, weights
from caldrixd.spec import ModelSpec
from caldrixd.text import template, tokenizer
from caldrixd.text.template import ChatTemplate
from caldrixd.text.tokenizer import Tokenizer

LANES: dict[str, Loader] = {"cpu": cpu.load}
# Of finished sequences, kept for prompts that go on from them.
MOST_CACHE_BYTES = 4 << 30


@dataclass(frozen=True)
class Model:
    """A loaded model."""

    spec: ModelSpec
    tokenizer: Tokenizer
    template: ChatTemplate | None
    program: Program
    engine: Engine

    def ready(self) -> Ready:
        return Ready(
            settings=self.program.settings,
            max_ctx=self.spec.max_context,
            chat_template=self.template is not None,
            size=self.program.size,
        )


def load(wanted: Load, environment: Mapping[str, str], report: Report) -> Model:
    """Load what the daemon asks for. Refused for anything in its files that cannot be used.

    `environment` is that of this process: it says where compiled kernels are kept.
    """
    _mention_cache(environment, report)
    directory = Path(wanted.directory)
    spec = gate.read_spec(directory)
    family = FAMILIES[spec.architecture]
    plan = family.build(spec)
    turns = template.load(directory)
    checkpoint = weights.open_checkpoint(directory, family.stacked)
    checkpoint.check(plan, family.ignored, architecture=spec.architecture)
    report("status/loading", {"model": wanted.model, "size": checkpoint.size // 1_000_000})
    with ThreadPoolExecutor(1) as beside:
        words = beside.submit(tokenizer.load, directory, spec)
        program = LANES[wanted.lane](
            plan,
            checkpoint.tensors,
            report=report,
            variant=Variant(wanted.isa, wanted.kernels),
            environment=environment,
        )
    checkpoint.check_unchanged()
    cache_bytes = min(fit.available_memory() // 4, MOST_CACHE_BYTES)
    return Model(spec, words.result(), turns, program, Engine(program, cache_bytes=cache_bytes))


def _mention_cache(environment: Mapping[str, str], report: Report) -> None:
    """Say that the usual place of compiled kernels cannot be used, when the daemon chose another."""
    usual = Path(cache_directory(environment)) / kernel_cache.KERNELS
    used = environment.get(compiler.KERNEL_CACHE, str(usual))
    if used == str(usual):
        return
    try:
        kernel_cache.make_writable(usual)
    except OSError as error:
        report("notice/kernel-cache", {"path": usual, "reason": error.strerror, "used": used})
