"""docs/architecture.md says who may import whom; this holds the code to it."""

import fnmatch
import re
import sys
from typing import NamedTuple

from tests.structure.source import PACKAGES, ROOT, Module, modules

HEADING = "## Who may import whom"


class Rule(NamedTuple):
    """What modules that match `pattern` may import; `not_standard` are parts of the standard library."""

    pattern: str
    ours: frozenset[str]
    others: frozenset[str]
    not_standard: frozenset[str]


def names(cell: str) -> frozenset[str]:
    return frozenset(re.findall(r"`([\w.*]+)`", cell))


def table() -> list[Rule]:
    """The rows of the table under HEADING. A name after "not" in the third column is forbidden."""
    text = (ROOT / "docs/architecture.md").read_text("utf-8").split(HEADING)[1]
    rules = []
    for line in text.splitlines():
        if line.startswith("## "):
            break
        if line.startswith("| `"):
            _, patterns, ours, others, _ = re.split(r"(?<!\\)\|", line)
            allowed, _, forbidden = others.partition(" not ")
            rules += [Rule(p, names(ours), names(allowed), names(forbidden)) for p in sorted(names(patterns))]
    return rules


def matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")


def rule_of(name: str, rules: list[Rule]) -> Rule | None:
    """The most specific rule that covers a module: the longest pattern."""
    found = [rule for rule in rules if matches(name, rule.pattern)]
    return max(found, key=lambda rule: len(rule.pattern), default=None)


def faults(module: Module, rules: list[Rule]) -> list[str]:
    rule = rule_of(module.name, rules)
    if rule is None:
        return [f"{module.name} is in no row"]
    found = []
    for name in module.imports():
        top = name.split(".")[0]
        if top in PACKAGES:
            allowed = any(matches(name, ours) for ours in (rule.pattern, *rule.ours))
        elif top in sys.stdlib_module_names or top == "__future__":
            allowed = top not in rule.not_standard
        else:
            allowed = top in rule.others
        if not allowed:
            found.append(f"{module.name} imports {name}")
    return found


def test_the_table_is_kept() -> None:
    rules = table()
    assert [fault for module in modules() for fault in faults(module, rules)] == []


def test_the_table_has_no_dead_rows() -> None:
    rules = table()
    used = {rule for module in modules() if (rule := rule_of(module.name, rules))}
    assert [rule.pattern for rule in rules if rule not in used] == []


def test_no_row_allows_what_nothing_needs() -> None:
    rules = table()
    spare = {(rule.pattern, name) for rule in rules for name in rule.others}
    for module in modules():
        rule = rule_of(module.name, rules)
        assert rule is not None
        spare -= {(rule.pattern, name.split(".")[0]) for name in module.imports()}
    assert spare == set()
