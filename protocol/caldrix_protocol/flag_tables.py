"""The flag tables of the documentation, from the records."""

from __future__ import annotations

from caldrix_protocol.option import Option
from caldrix_protocol.options import is_accepted, options_of
from caldrix_protocol.refusals import ROWS


def documentation(command: str) -> str:
    """Markdown rows `| flag | meaning | default |` of the flags a command accepts or will accept."""
    rows = []
    for option in options_of(command):
        if option.refused not in (None, "usage/not-available"):
            continue
        meaning = option.doc if is_accepted(option) else f"{option.doc} (not available yet)"
        rows.append(f"| {_spelled(option)} | {_cell(meaning)} | {_cell(option.absent)} |")
    return "\n".join(rows)


def refused_documentation(command: str) -> str:
    """Markdown rows `| flag | what is said |` of the flags and values a command always refuses."""
    said = {"`--backend host`": ROWS["usage/backend-host"].text} if command == "run" else {}
    for option in options_of(command):
        if option.refused not in (None, "usage/not-available"):
            said[f"`{option.name}`"] = ROWS[option.refused].text.format(flag=option.name)
    return "\n".join(f"| {flag} | {_cell(text)} |" for flag, text in said.items())


def _spelled(option: Option) -> str:
    after = "" if option.metavar is None else f" {option.metavar}"
    return ", ".join(f"`{_cell(name + after)}`" for name in (*option.aliases, option.name))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
