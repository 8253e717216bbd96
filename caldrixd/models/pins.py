"""The table of aliases with other commits, written into the source checkout that this code runs from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from caldrix_protocol.refusals import Refused
from caldrixd.json_file import reason_of
from caldrixd.models import aliases

ROOT = aliases.TABLE.parents[2]
PAGE = ROOT / "docs/models.md"


def check_writable() -> None:
    """Refused "pin/installed" where this is no source checkout, "pin/unwritable" where nobody can write."""
    if not (ROOT / "pyproject.toml").is_file() or not PAGE.is_file():
        raise Refused("pin/installed", path=aliases.TABLE)
    for path in (aliases.TABLE, PAGE):
        for place in (path, path.parent):
            if not os.access(place, os.W_OK):
                raise Refused("pin/unwritable", path=place, reason="this user may not write there")


def rewrite(commits: Mapping[str, str]) -> int:
    """Put the commits, by repo, into the table and its page; how many rows they change.

    Refused "pin/unwritable", and then the table is as it was.
    """
    try:
        table = aliases.read(aliases.TABLE.read_text("utf-8"))
        page = PAGE.read_text("utf-8")
        pinned = {
            name: replace(alias, revision=commits.get(alias.repo, alias.revision))
            for name, alias in table.items()
        }
        for name, alias in table.items():
            row = aliases.documented(name, alias)
            if row not in page:
                reason = f"its row of {name} is not that of the table"
                raise Refused("pin/unwritable", path=PAGE, reason=reason)
            page = page.replace(row, aliases.documented(name, pinned[name]))
        _replace(PAGE, page)
        _replace(aliases.TABLE, aliases.written(pinned))
    except OSError as error:
        path = error.filename or aliases.TABLE
        raise Refused("pin/unwritable", path=path, reason=reason_of(error)) from None
    return sum(table[name] != pinned[name] for name in table)


def _replace(path: Path, text: str) -> None:
    """Whole or not at all, with the permissions that it has."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, "utf-8")
    partial.chmod(path.stat().st_mode & 0o777)
    partial.rename(path)
