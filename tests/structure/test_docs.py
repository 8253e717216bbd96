"""The documentation's links, tables and commands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from caldrix_protocol.flag_tables import documentation, refused_documentation
from caldrixd.architectures import FAMILIES
from tests.structure.source import PACKAGES, ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "protocol/SPEC.md"])
# Why a block of commands is not run here.
MARKS = {"network", "hardware", "interactive", "systemd"}


def page(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", without_code(path.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)]+)\)", without_code(path.read_text("utf-8"))):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert broken == []


def test_every_page_is_linked_to() -> None:
    linked = {
        (path.parent / target.partition("#")[0]).resolve()
        for path in PAGES
        for target in re.findall(r"\]\(([^)]+)\)", path.read_text("utf-8"))
    }
    assert [str(path.relative_to(ROOT)) for path in PAGES if path not in linked] == ["README.md"]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("run", "docs/run.md"),
        ("stop", "docs/run.md"),
        ("caldrixd", "docs/run.md"),
        ("models plan", "docs/models.md"),
        ("models rm", "docs/models.md"),
    ],
)
def test_flag_tables_are_the_records(command: str, name: str) -> None:
    assert f"|---|---|---|\n{documentation(command)}\n\n" in page(name)


def test_the_table_of_refused_flags_is_the_records() -> None:
    assert f"|---|---|\n{refused_documentation('run')}\n\n" in page("docs/run.md")


@pytest.mark.parametrize("name", ["README.md", "docs/run.md"])
def test_the_architectures_are_the_families(name: str) -> None:
    found = re.findall(r"\b\w+For(?:CausalLM|ConditionalGeneration)\b", page(name))
    assert set(found) == FAMILIES.keys()


def blocks(path: Path) -> list[tuple[str, str]]:
    """(mark, commands) of each `sh` block; the mark is "" for a block that is to be run."""
    found = re.findall(r"^```sh([^\n]*)\n(.*?)^```$", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [(mark.strip(), commands) for mark, commands in found]


def test_marks_are_known() -> None:
    used = {mark for path in PAGES for mark, _ in blocks(path)}
    assert used <= {"", *MARKS}


def test_fenced_blocks_say_what_they_are() -> None:
    languages = {
        language.split()[0]
        for path in PAGES
        for language in re.findall(r"^```(.+)$", path.read_text("utf-8"), re.MULTILINE)
    }
    assert languages <= {"sh", "text", "python", "json", "ini"}


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which `caldrix` is this checkout's, with a daemon of its own and the user's cache."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in (("caldrix", "caldrix_client"), ("caldrixd", "caldrixd")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        program.chmod(0o755)
    (tmp_path / "run").mkdir(mode=0o700)
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(
            str((ROOT / place).resolve()) for place in dict.fromkeys(PACKAGES.values())
        ),
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }


@pytest.mark.parametrize(
    "path", [p for p in PAGES if any(not mark for mark, _ in blocks(p))], ids=lambda p: p.name
)
def test_commands_run(path: Path, shell: dict[str, str], tmp_path: Path) -> None:
    try:
        for mark, commands in blocks(path):
            if not mark:
                done = subprocess.run(
                    ["sh", "-euc", commands],
                    cwd=tmp_path,
                    env=shell,
                    capture_output=True,
                    text=True,
                    timeout=300,
                )
                assert done.returncode == 0, (commands, done.stdout, done.stderr)
    finally:
        subprocess.run(["caldrix", "stop", "--daemon"], env=shell, capture_output=True, timeout=300)
