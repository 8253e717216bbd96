"""Where the daemon of a user is: the same answer on both sides, and never a directory others can write to."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from caldrix_protocol import address
from caldrix_protocol.address import (
    SOCKET_PATH_LIMIT,
    Address,
    cache_directory,
    ensure_directory,
    find_address,
    state_directory,
)
from caldrix_protocol.refusals import Refused

UID = os.geteuid()
NOBODY = 65534


@pytest.fixture
def home() -> Iterator[Path]:
    """An empty directory with a path short enough for a socket in it; tmp_path has no such bound."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def found(platform: str = "linux", uid: int = UID, **environment: str) -> Address:
    return find_address(environment, uid, platform)


def refusal(platform: str = "linux", uid: int = UID, **environment: str) -> Refused:
    with pytest.raises(Refused) as caught:
        found(platform, uid, **environment)
    return caught.value


def test_the_files_of_a_runtime_directory(home: Path) -> None:
    home.chmod(0o700)
    directory = f"{home}/caldrix"
    assert found(XDG_RUNTIME_DIR=str(home)) == Address(
        directory, f"{directory}/caldrixd.sock", f"{directory}/caldrixd.lock", f"{directory}/start.lock"
    )
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("named", ["", "run", "./run", "~/run", "/nowhere/at/all"])
def test_a_runtime_directory_that_cannot_be_meant_counts_as_unset(home: Path, named: str) -> None:
    environment = {"HOME": str(home), "XDG_RUNTIME_DIR": named}
    assert find_address(environment, NOBODY, "linux") == find_address({"HOME": str(home)}, NOBODY, "linux")
    assert find_address(environment, NOBODY, "linux").directory == f"{home}/.local/state/caldrix/run"


def test_without_the_variable_the_usual_directory_is_taken_if_it_is_private(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "USUAL_PARENT", str(home))
    fallback = f"{home}/.local/state/caldrix/run"
    assert found(HOME=str(home)).directory == fallback
    usual = home / str(UID)
    usual.mkdir(0o700)
    assert found(HOME=str(home)).directory == f"{usual}/caldrix"
    assert found("darwin", HOME=str(home)).directory == fallback
    for mode in (0o710, 0o701, 0o770, 0o777):
        usual.chmod(mode)
        assert found(HOME=str(home)).directory == fallback
    usual.rmdir()
    usual.touch(0o700)
    assert found(HOME=str(home)).directory == fallback


@pytest.mark.parametrize("uid", [UID, UID + 1])
def test_only_ones_own_usual_directory_is_taken(
    home: Path, monkeypatch: pytest.MonkeyPatch, uid: int
) -> None:
    monkeypatch.setattr(address, "USUAL_PARENT", str(home))
    (home / str(uid)).mkdir(0o700)
    expected = f"{home}/{uid}/caldrix" if uid == UID else f"{home}/.local/state/caldrix/run"
    assert found(uid=uid, HOME=str(home)).directory == expected


def test_the_usual_directory_is_where_the_system_puts_it() -> None:
    assert address.USUAL_PARENT == "/run/user"


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o722, 0o777, 0o1777])
def test_a_runtime_directory_others_can_write_to_is_refused(home: Path, mode: int) -> None:
    home.chmod(mode)
    refused = refusal(XDG_RUNTIME_DIR=str(home))
    assert refused.code == "socket/directory-mode"
    assert f"run chmod 700 {home}" in refused.text


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_a_runtime_directory_others_can_only_read_is_taken(home: Path, mode: int) -> None:
    home.chmod(mode)
    assert found(XDG_RUNTIME_DIR=str(home)).directory == f"{home}/caldrix"


def test_a_foreign_runtime_directory_is_refused_also_through_a_link(home: Path) -> None:
    link = home / "link"
    link.symlink_to("/")
    for path in ("/", str(link)):
        refused = refusal(uid=UID + 1, XDG_RUNTIME_DIR=path)
        assert refused.code == "socket/directory-owner"
        assert path in refused.text


def test_a_link_to_ones_own_runtime_directory_is_taken(home: Path) -> None:
    (home / "real").mkdir(0o700)
    (home / "link").symlink_to(home / "real")
    assert found(XDG_RUNTIME_DIR=f"{home}/link").directory == f"{home}/link/caldrix"


def test_a_runtime_directory_that_is_a_file_is_refused(home: Path) -> None:
    (home / "file").write_text("")
    assert refusal(XDG_RUNTIME_DIR=f"{home}/file").code == "socket/directory-link"


def make_file(path: Path) -> None:
    path.write_text("")


def make_link(path: Path) -> None:
    path.with_name("real").mkdir(0o700)
    path.symlink_to(path.with_name("real"))


def make_dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def make_open(path: Path) -> None:
    path.mkdir()
    path.chmod(0o750)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (make_file, "socket/directory-link"),
        (make_link, "socket/directory-link"),
        (make_dangling_link, "socket/directory-link"),
        (make_open, "socket/directory-mode"),
    ],
)
def test_what_stands_in_place_of_our_directory_is_refused_by_both_sides(
    home: Path, make: object, code: str
) -> None:
    home.chmod(0o700)
    there = found(XDG_RUNTIME_DIR=str(home))
    assert callable(make)
    make(home / "caldrix")
    assert refusal(XDG_RUNTIME_DIR=str(home)).code == code
    with pytest.raises(Refused) as caught:
        ensure_directory(there)
    assert caught.value.code == code


def test_our_directory_in_anothers_hands_is_refused(home: Path) -> None:
    ensure_directory(found("darwin", HOME=str(home)))
    assert refusal("darwin", uid=UID + 1, HOME=str(home)).code == "socket/directory-owner"


def test_the_directory_is_made_private_whatever_the_umask(home: Path) -> None:
    before = os.umask(0)
    try:
        there = found("darwin", HOME=str(home))
        ensure_directory(there)
        ensure_directory(there)
    finally:
        os.umask(before)
    made = Path(there.directory)
    assert made == home / ".local/state/caldrix/run"
    assert made.stat().st_mode & 0o777 == 0o700
    assert found("darwin", HOME=str(home)) == there


def test_a_directory_that_cannot_be_made_is_refused(home: Path) -> None:
    (home / ".local").write_text("")
    with pytest.raises(Refused) as caught:
        ensure_directory(found("darwin", HOME=str(home)))
    assert caught.value.code == "socket/directory-missing"
    assert f"{home}/.local/state/caldrix/run" in caught.value.text


def deep(home: Path, length: int) -> Path:
    """A new directory whose path has exactly `length` bytes."""
    left = length - len(os.fsencode(home))
    path = home
    while left > 0:
        name = "d" * (min(left, 100) - 1)
        path, left = path / name, left - len(name) - 1
    path.mkdir(0o700, parents=True)
    assert len(os.fsencode(path)) == length
    return path


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_path_too_long_for_a_socket_is_refused_with_the_numbers(home: Path, platform: str) -> None:
    limit = SOCKET_PATH_LIMIT[platform]
    fits = limit - len("/caldrix/caldrixd.sock")
    home.chmod(0o700)
    there = found(platform, XDG_RUNTIME_DIR=str(deep(home, fits)))
    assert len(os.fsencode(there.socket)) == limit
    refused = refusal(platform, XDG_RUNTIME_DIR=str(deep(home, fits + 2)))
    assert refused.code == "socket/path-too-long"
    assert f"has {limit + 2} bytes; at most {limit} are possible" in refused.text


def test_the_longest_path_can_be_bound(home: Path) -> None:
    import sys

    limit = SOCKET_PATH_LIMIT[sys.platform]
    there = found(sys.platform, XDG_RUNTIME_DIR=str(deep(home, limit - len("/caldrix/caldrixd.sock"))))
    ensure_directory(there)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(there.socket)
    assert os.path.exists(there.socket)


def test_bytes_are_counted_and_not_characters(home: Path) -> None:
    base = home / ("é" * 60)
    base.mkdir(0o700)
    assert refusal(XDG_RUNTIME_DIR=str(base)).code == "socket/path-too-long"


@pytest.mark.parametrize(
    ("environment", "state", "cache"),
    [
        ({"HOME": "/h"}, "/h/.local/state/caldrix", "/h/.cache/caldrix"),
        ({"HOME": "/h", "XDG_STATE_HOME": "/s", "XDG_CACHE_HOME": "/c"}, "/s/caldrix", "/c/caldrix"),
        (
            {"HOME": "/h", "XDG_STATE_HOME": "s", "XDG_CACHE_HOME": ""},
            "/h/.local/state/caldrix",
            "/h/.cache/caldrix",
        ),
    ],
)
def test_state_and_cache(environment: dict[str, str], state: str, cache: str) -> None:
    assert state_directory(environment) == state
    assert cache_directory(environment) == cache


@pytest.mark.parametrize("environment", [{}, {"HOME": ""}, {"HOME": "relative"}])
def test_without_a_home_the_password_database_is_asked(environment: dict[str, str]) -> None:
    import pwd

    assert cache_directory(environment) == f"{pwd.getpwuid(os.getuid()).pw_dir}/.cache/caldrix"


def test_a_user_without_any_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    with pytest.raises(Refused) as caught:
        state_directory({})
    assert caught.value.code == "socket/no-home"
