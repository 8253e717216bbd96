"""The project's own modules, parsed."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Import package -> the directory that holds it.
PACKAGES = {
    "caldrix_protocol": "protocol",
    "caldrix_kernels": "kernels",
    "caldrixd": ".",
    "caldrix_client": ".",
}
# Programs: what a user, the client or the daemon starts as a process of its own.
ENTRY_POINTS = {
    "caldrix_client.__main__",
    "caldrix_client.main",
    "caldrixd.__main__",
    "caldrixd.fetcher.__main__",
    "caldrixd.lanes.drivers.probe",
    "caldrixd.worker.__main__",
}


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name (a package's ends in `__init__`), its text and its tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        """Every call of a plain or dotted name, with that name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and (name := dotted(node.func)):
                yield name, node

    def imports(self) -> Iterator[str]:
        """Every module this one names in an import, at any depth."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}: relative import"
                assert node.module is not None
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute expression, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


@functools.cache
def modules() -> tuple[Module, ...]:
    """All modules of the four packages."""
    return tuple(
        parse(path, name_of(path.relative_to(ROOT / directory)))
        for package, directory in PACKAGES.items()
        for path in sorted((ROOT / directory / package).rglob("*.py"))
    )


@functools.cache
def files_of_tests() -> tuple[Module, ...]:
    """All files under tests/."""
    return tuple(
        parse(path, name_of(path.relative_to(ROOT))) for path in sorted((ROOT / "tests").rglob("*.py"))
    )


def parse(path: Path, name: str) -> Module:
    text = path.read_text("utf-8")
    return Module(name, path, text, ast.parse(text))


def name_of(relative: Path) -> str:
    return ".".join(relative.with_suffix("").parts)
