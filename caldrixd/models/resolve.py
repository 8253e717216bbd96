"""From the model argument to a directory: an existing directory, an alias, or a refusal."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from caldrix_protocol.refusals import Refused
from caldrixd.json_file import reason_of
from caldrixd.models.aliases import ALIASES
from caldrixd.models.files import weight_files

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,200})?", re.ASCII)


@dataclass(frozen=True)
class ResolvedModel:
    """What a name stands for. `directory` is None for the demo model: the fetcher knows where it lies."""

    name: str
    directory: Path | None

    @property
    def demo(self) -> bool:
        return self.directory is None


def resolve(name: str) -> ResolvedModel:
    """An absolute directory, or an alias. Refused "model/..." for everything else.

    A directory is not looked into; `check_files` does that.
    """
    if name.startswith(("/", "./", "../", "~")):
        return ResolvedModel(name, _directory(name))
    if name in ALIASES:
        return ResolvedModel(name, None)
    shown = name[:200]
    if _REPO.fullmatch(name):
        raise Refused("model/hub-not-yet", model=shown)
    raise Refused("model/not-a-model", model=shown, aliases=", ".join(ALIASES))


def _directory(name: str) -> Path:
    path = Path(name)
    try:
        found = path.is_absolute() and "\0" not in name and path.is_dir()
        if found:
            next(path.iterdir(), None)
    except OSError as error:
        raise Refused("model/not-readable", path=name, reason=reason_of(error)) from None
    if not found:
        raise Refused("model/no-such-directory", path=name)
    return path


def check_files(directory: Path) -> tuple[str, ...]:
    """The weight files of a model, if all its files are there. Refused by what lacks."""
    if not (directory / "config.json").exists():
        raise Refused("model/missing-files", path=directory)
    if not (directory / "tokenizer.json").exists():
        raise Refused("tokenizer/missing", path=directory)
    return weight_files(directory)
