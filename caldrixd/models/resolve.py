"""From the model argument to what it names: an existing directory, an alias or a repo on the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from caldrix_protocol.refusals import Refused
from caldrixd.json_file import reason_of
from caldrixd.models import aliases, files
from caldrixd.models.hub import Repo

DEFAULT_REVISION = "main"
# As the hub names things: no run of two dashes or dots, which would be ambiguous as a directory's name.
_REPO = re.compile(
    r"(?!.*(?:--|\.\.))(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?<![.-]))"
    r"(?:@(?!.*//)(?P<revision>\w[\w./-]{0,198}\w|\w))?",
    re.ASCII,
)
_PAGE = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repo>[^/?#]+/[^/?#]+)")
# How alike a word and an alias must be, from 0 to 1, for a mistake in typing.
ALIKE = 0.75
# Letters of a word that may be the beginning of an alias.
SHORTEST = 4


@dataclass(frozen=True)
class ResolvedModel:
    """What a name stands for: a directory, a repo, or, with neither, the demo model."""

    name: str
    directory: Path | None = None
    repo: Repo | None = None


def resolve(name: str) -> ResolvedModel:
    """An absolute directory, an alias or a repo id. Refused "model/..." for everything else.

    A directory is not looked into; `check_directory` does that.
    """
    if name.startswith(("/", "./", "../", "~")):
        return ResolvedModel(name, directory=_directory(name))
    if name == aliases.DEMO:
        return ResolvedModel(name)
    if name in aliases.HUB:
        alias = aliases.HUB[name]
        return ResolvedModel(name, repo=Repo(alias.repo, alias.revision))
    if repo := parse_repo(name):
        return ResolvedModel(name, repo=repo)
    known = {"model": name[:200], "aliases": ", ".join(aliases.NAMES)}
    if nearest := _nearest(name):
        raise Refused("model/near-miss", **known, nearest=nearest)
    raise Refused("model/not-a-model", **known)


def _nearest(name: str) -> str | None:
    """The repo in a web address or before a slash too much, else the alias that is most alike."""
    page = _PAGE.match(name)
    inner = page["repo"] if page else name.rstrip("/")
    if parse_repo(inner):
        return inner
    word = name[:100].partition("@")[0].lower()
    longer = [alias for alias in aliases.NAMES if alias.startswith(word)] if len(word) >= SHORTEST else []
    return next(iter(longer or get_close_matches(word, aliases.NAMES, 1, ALIKE)), None)


def parse_repo(name: str) -> Repo | None:
    """What "owner/name" or "owner/name@revision" says; None for any other text."""
    found = _REPO.fullmatch(name)
    return Repo(found["repo"], found["revision"] or DEFAULT_REVISION) if found else None


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


def check_directory(directory: Path) -> None:
    """Whether a directory can be a model at all. Refused "model/missing-files" and what says more."""
    try:
        if (directory / "config.json").exists():
            return
        names = {path.name for path in directory.iterdir()}
    except OSError as error:
        raise Refused("model/not-readable", path=directory, reason=reason_of(error)) from None
    if files.adapter(names) or files.foreign(names):
        raise files.without_weights(directory, names)
    raise Refused("model/missing-files", path=directory)
