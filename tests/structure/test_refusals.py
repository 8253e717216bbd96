"""Rows, the code that names them and the page that explains them agree."""

import ast
import re
import string

from caldrix_protocol.refusals import ROWS, STATUS
from tests.structure.source import ROOT, modules

CODE = re.compile(r"[a-z]+/[a-z0-9-]+")
# Rows that keep their words for a part that does not exist yet.
FOR_LATER = {"lane/metal-no-device"}
# What makes a sentence of a row: its code first, then its fields by name.
FILLERS = {"Refused", "as_notice", "as_status", "sentence"}


def codes_in_the_code() -> set[str]:
    """Every string constant outside the table itself that has the form of a code."""
    return {
        node.value
        for module in modules()
        if module.name != "caldrix_protocol.refusals"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value)
    }


def quoted() -> list[str]:
    """The messages quoted in docs/troubleshooting.md: the lines of its `text` blocks."""
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    blocks = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def as_quoted(text: str) -> str:
    return re.sub(r"\{(\w+)\}", r"<\1>", text)


def test_every_code_in_the_code_is_a_row() -> None:
    areas = {code.split("/")[0] for code in ROWS}
    unknown = {code for code in codes_in_the_code() if code.split("/")[0] in areas} - ROWS.keys()
    assert unknown == set()


def test_every_row_is_used() -> None:
    assert ROWS.keys() - codes_in_the_code() == FOR_LATER


def blanks(text: str) -> set[str]:
    """The names of the fields in a row's text."""
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_every_row_is_given_its_fields() -> None:
    """A row with an empty field would be an internal error in place of a sentence."""
    faults = [
        f"{module.name}:{call.lineno} {code} lacks {', '.join(sorted(lacking))}"
        for module in modules()
        for name, call in module.calls()
        if name in FILLERS and all(keyword.arg for keyword in call.keywords)
        for code in [getattr(call.args[0], "value", None)]
        if code in ROWS
        if (lacking := blanks(ROWS[code].text) - {keyword.arg for keyword in call.keywords})
    ]
    assert faults == []


def test_every_row_is_quoted_once_and_every_quote_is_a_row() -> None:
    rows = {as_quoted(row.text) for row in ROWS.values() if row.kind != STATUS}
    quotes = quoted()
    assert sorted(rows - set(quotes)) == []
    assert sorted(set(quotes) - rows) == []
    assert sorted(quote for quote in set(quotes) if quotes.count(quote) > 1) == []


def test_rows_are_one_line_without_a_full_stop() -> None:
    assert [row.code for row in ROWS.values() if "\n" in row.text or row.text.endswith(".")] == []


def test_codes_are_kebab_case() -> None:
    assert [code for code in ROWS if not CODE.fullmatch(code)] == []
