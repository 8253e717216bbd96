"""pyproject.toml, the Makefile and .ci/run say what the code and the documentation say."""

import importlib
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from caldrix_protocol.version import VERSION
from tests.structure.source import ENTRY_POINTS, PACKAGES, ROOT, modules
from tests.structure.test_imports import table

# Where a distribution is named other than its import package.
DISTRIBUTIONS = {"PIL": "pillow", "llvmlite": "numba"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return settings


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[]", requirement)[0].lower() for requirement in requirements}


def test_there_is_one_version(project: dict[str, Any]) -> None:
    assert project["project"]["version"] == VERSION
    assert f"## {VERSION}\n" in (ROOT / "docs/changelog.md").read_text("utf-8")


def test_what_is_required_is_what_may_be_imported(project: dict[str, Any]) -> None:
    extra = project["project"]["optional-dependencies"]
    required = names(project["project"]["dependencies"]) | names(extra["demo"])
    used = {DISTRIBUTIONS.get(name, name) for rule in table() for name in rule.others}
    assert used == required


def test_every_requirement_has_a_lower_bound(project: dict[str, Any]) -> None:
    lists = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    assert [item for items in lists for item in items if ">=" not in item] == []


def test_the_wheel_has_the_four_packages(project: dict[str, Any]) -> None:
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {(str(Path(path).parent), Path(path).name) for path in packages} == {
        (directory, package) for package, directory in PACKAGES.items()
    }


def test_the_programs_exist(project: dict[str, Any]) -> None:
    for target in project["project"]["scripts"].values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_entry_points_are_modules() -> None:
    assert ENTRY_POINTS - {module.name for module in modules()} == set()


def test_ci_runs_the_tests() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert script.read_text("utf-8").endswith("exec make test\n")


@pytest.mark.parametrize("target", ["run", "test"])
def test_a_wrong_python_is_named_before_anything_is_made(tmp_path: Path, target: str) -> None:
    done = subprocess.run(
        ["make", "--silent", target, "PYTHON=no-such-python", f"VENV={tmp_path}/venv"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert f"make {target} PYTHON=python3.12" in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
