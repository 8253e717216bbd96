"""`caldrix models pin` in a copy of the source, against the hub of tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from caldrixd.models import aliases
from tests.cli.test_model_commands import rows
from tests.support import hub
from tests.support.cli import COMMAND, ROOT, Home, Result, finish
from tests.support.hub import Repo
from tests.support.hub_cli import model


class Checkout(NamedTuple):
    """A copy of the source, and a user's home to run it in."""

    path: Path
    home: Home

    @property
    def table(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = json.loads(
            (self.path / "caldrixd/models/aliases.json").read_text()
        )
        return found

    def pin(self, more: Mapping[str, str], prefix: tuple[str, ...] = ()) -> Result:
        imports = os.pathsep.join(str(self.path / part) for part in ("protocol", "kernels", "."))
        process = subprocess.Popen(
            (*prefix, *COMMAND, "models", "pin"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**self.home.environment, "PYTHONPATH": imports, **more},
            cwd=self.path,
        )
        return finish(process)


@pytest.fixture
def checkout(home: Home, tmp_path: Path) -> Checkout:
    path = tmp_path / "checkout"
    for name in ("caldrixd", "caldrix_client", "protocol", "kernels"):
        shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    (path / "docs").mkdir()
    for name in ("docs/models.md", "pyproject.toml"):
        shutil.copy(ROOT / name, path / name)
    return Checkout(path, home)


def at(number: int) -> str:
    return f"{number:040x}"


def released() -> dict[str, Repo]:
    """The repos of all aliases, each at a commit of its own."""
    return {alias.repo: model(commit=at(number)) for number, alias in enumerate(aliases.HUB.values(), 1)}


def test_pin_writes_the_commit_of_each_alias(checkout: Checkout) -> None:
    before = checkout.table
    with hub.serve(released()) as server:
        result = checkout.pin(server.environment)
        assert result.status == 0, result.err
        again = checkout.pin(server.environment)
    pins = rows(result)
    assert checkout.table == {
        name: row | {"revision": at(number)} for number, (name, row) in enumerate(before.items(), 1)
    }
    assert [pins[name][1] for name in before] == [row["revision"] for row in checkout.table.values()]
    page = (checkout.path / "docs/models.md").read_text("utf-8")
    for name, row in checkout.table.items():
        assert aliases.documented(name, aliases.Alias(**row)) in page
    assert len(page.splitlines()) == len((ROOT / "docs/models.md").read_text("utf-8").splitlines())
    assert result.err.endswith(f"rows that changed: {len(before)}\n")
    assert (again.status, again.err[-21:]) == (0, "rows that changed: 0\n")
    assert not list((checkout.path / "caldrixd/models").glob(".*"))
    assert set(aliases.read((checkout.path / "caldrixd/models/aliases.json").read_text())) == set(before)


def test_pin_of_what_the_hub_does_not_tell(checkout: Checkout) -> None:
    repos = released()
    del repos["Qwen/Qwen3-8B"]
    before = checkout.table
    with hub.serve(repos) as server:
        result = checkout.pin(server.environment)
    assert result.status == 1
    assert "Qwen/Qwen3-8B: the hub refused the request" in result.err
    assert "the hub did not tell the commits of qwen3-8b; their rows of " in result.err.splitlines()[-1]
    assert result.out.count("\n") == len(before)
    kept = [name for name in before if checkout.table[name] == before[name]]
    assert kept == ["qwen3-8b"]


def test_pin_without_a_network(checkout: Checkout) -> None:
    before = checkout.table
    with hub.serve({}) as server:
        nobody = server.environment
    away = checkout.pin(nobody)
    assert (away.status, away.out) == (1, "")
    assert away.err.count("cannot be reached: ") == 1
    assert "cannot be reached: Connection refused; " in away.err.splitlines()[-1]
    offline = checkout.pin({"HF_HUB_OFFLINE": "1"})
    assert (offline.status, offline.out) == (1, "")
    assert "HF_HUB_OFFLINE is set, so the hub is not asked" in offline.err
    assert checkout.table == before


def test_pin_is_for_a_checkout_that_can_be_written(checkout: Checkout) -> None:
    before = checkout.table
    with hub.serve(released()) as server:
        page = checkout.path / "docs/models.md"
        page.write_text(page.read_text("utf-8").replace("| `qwen3-8b` |", "| `qwen` |"), "utf-8")
        other = checkout.pin(server.environment)
        assert (other.status, "its row of qwen3-8b is not that of the table" in other.err) == (1, True)
        asked = len(server.requests)
        page.unlink()
        installed = checkout.pin(server.environment)
        assert (installed.status, installed.out, len(server.requests)) == (1, "", asked)
    assert "the aliases are pinned in a source checkout of caldrix; " in installed.err
    assert checkout.table == before


def test_pin_where_the_user_may_not_write(checkout: Checkout) -> None:
    """Root writes everywhere but for its capabilities, which the command and its daemon go without here."""
    prefix = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
    (checkout.path / "caldrixd/models").chmod(0o555)
    with hub.serve(released()) as server:
        result = checkout.pin(server.environment, prefix)
        assert server.requests == []
    (checkout.path / "caldrixd/models").chmod(0o755)
    assert (result.status, result.out) == (1, "")
    assert f"cannot be pinned: {checkout.path}/caldrixd/models: this user may not write there" in result.err
