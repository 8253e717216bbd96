"""The hub that tests run is held to huggingface_hub: the library, unchanged, must see in it the real one."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, errors, hf_hub_download, snapshot_download
from huggingface_hub.utils._http import close_session
from huggingface_hub.utils.tqdm import disable_progress_bars

from tests.support import hub
from tests.support.models import tiny

NAME = "tiny/llama"
MODEL = tiny("tiny-llama")
COMMIT = "93efa2f097d58c2a74874c7e644dbc9b0cee75a2"


@pytest.fixture(autouse=True)
def _direct(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No proxy, no token of the machine, and no connection kept from another test."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith("HF_"):
            monkeypatch.delenv(name)
    disable_progress_bars()
    close_session()
    yield
    close_session()


def whole(tmp_path: Path, server: hub.Server, **more: Any) -> Path:
    return Path(
        snapshot_download(NAME, endpoint=server.endpoint, cache_dir=tmp_path, **({"token": False} | more))
    )


def one(tmp_path: Path, server: hub.Server, file: str, **more: Any) -> Path:
    token = {"token": False}
    return Path(hf_hub_download(NAME, file, endpoint=server.endpoint, cache_dir=tmp_path, **(token | more)))


@pytest.mark.parametrize("resolve_cache", [False, True])
def test_a_snapshot_has_the_files_under_their_names(tmp_path: Path, resolve_cache: bool) -> None:
    with hub.serve({NAME: hub.repo(MODEL, commit=COMMIT)}, resolve_cache=resolve_cache) as server:
        found = whole(tmp_path, server)
    assert found.name == COMMIT
    assert {path.name: path.read_bytes() for path in found.iterdir()} == {
        path.name: path.read_bytes() for path in MODEL.iterdir()
    }
    assert (tmp_path / "models--tiny--llama/refs/main").read_text() == COMMIT
    assert server.files("cdn") == ["model.safetensors"]
    assert set(server.files()) == {path.name for path in MODEL.iterdir()}
    assert server.sent("model.safetensors") == (MODEL / "model.safetensors").stat().st_size


def test_blobs_are_named_as_git_and_lfs_name_them(tmp_path: Path) -> None:
    with hub.serve({NAME: MODEL}) as server:
        found = whole(tmp_path, server)
    weights = (MODEL / "model.safetensors").read_bytes()
    assert (found / "model.safetensors").resolve().name == hashlib.sha256(weights).hexdigest()
    git = subprocess.run(
        ("git", "hash-object", "--no-filters", MODEL / "config.json"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert (found / "config.json").resolve().name == git.stdout.strip()


def test_the_model_info_has_sizes_and_digests(tmp_path: Path) -> None:
    with hub.serve({NAME: MODEL}) as server:
        info = HfApi(server.endpoint, token=False).model_info(NAME, files_metadata=True)
        plain = HfApi(server.endpoint, token=False).model_info(NAME)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    assert {name: sibling.size for name, sibling in siblings.items()} == {
        path.name: path.stat().st_size for path in MODEL.iterdir()
    }
    lfs = siblings["model.safetensors"].lfs
    assert lfs is not None
    assert lfs.sha256 == hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()
    assert siblings["config.json"].lfs is None
    assert [sibling.size for sibling in plain.siblings or ()] == [None] * len(siblings)


def test_branches_and_commits(tmp_path: Path) -> None:
    other = hub.repo({"config.json": b"{}"})
    with hub.serve({NAME: hub.repo(MODEL, commit=COMMIT), f"{NAME}@v/2": other}) as server:
        assert whole(tmp_path, server, revision="v/2").name == other.commit
        assert whole(tmp_path, server, revision=COMMIT).name == COMMIT
        with pytest.raises(errors.RevisionNotFoundError):
            whole(tmp_path, server, revision="v3")
        with pytest.raises(errors.RevisionNotFoundError):
            one(tmp_path, server, "config.json", revision="0" * 40)
        with pytest.raises(errors.RemoteEntryNotFoundError):
            one(tmp_path, server, "vocab.json")


@pytest.mark.parametrize("token", [False, hub.OUTSIDER])
def test_a_missing_and_a_private_repo_look_the_same(tmp_path: Path, token: str | bool) -> None:
    with hub.serve({NAME: hub.repo(MODEL, private=True)}) as server:
        with pytest.raises(errors.RepositoryNotFoundError) as private:
            whole(tmp_path, server, token=token)
        with pytest.raises(errors.RepositoryNotFoundError) as missing:
            snapshot_download("no/such", endpoint=server.endpoint, cache_dir=tmp_path, token=token)
        assert (
            private.value.response.status_code
            == missing.value.response.status_code
            == (404 if token else 401)
        )
        assert (whole(tmp_path, server, token=hub.MEMBER) / "config.json").exists()


@pytest.mark.parametrize(("token", "status"), [(False, 401), (hub.OUTSIDER, 403)])
def test_a_gated_repo_is_listed_and_not_read(tmp_path: Path, token: str | bool, status: int) -> None:
    with hub.serve({NAME: hub.repo(MODEL, gated=True)}) as server:
        assert HfApi(server.endpoint, token=token).model_info(NAME).gated == "manual"
        with pytest.raises(errors.GatedRepoError) as refused:
            one(tmp_path, server, "config.json", token=token)
        assert refused.value.response.status_code == status
        assert (one(tmp_path, server, "config.json", token=hub.MEMBER)).exists()


def test_a_bad_token_is_told_from_a_missing_repo(tmp_path: Path) -> None:
    with hub.serve({NAME: MODEL}) as server, pytest.raises(errors.HfHubHTTPError) as refused:
        HfApi(server.endpoint, token="hf_wrong").model_info(NAME)
    assert refused.value.response.status_code == 401
    assert not isinstance(refused.value, errors.RepositoryNotFoundError)
    assert "Invalid credentials" in str(refused.value)


def test_the_library_sends_its_token_to_the_hub_alone(tmp_path: Path) -> None:
    with hub.serve({NAME: hub.repo(MODEL, gated=True)}) as server:
        one(tmp_path, server, "model.safetensors", token=hub.MEMBER)
    assert {(request.host, request.token) for request in server.requests} == {
        ("hub", hub.MEMBER),
        ("cdn", None),
    }


def test_the_endpoint_is_taken_from_the_environment(tmp_path: Path) -> None:
    program = f"import huggingface_hub as h; print(h.hf_hub_download({NAME!r}, 'config.json'))"
    with hub.serve({NAME: MODEL}) as server:
        environment = {"PATH": os.environ["PATH"], "HF_HOME": str(tmp_path), **server.environment}
        found = subprocess.run(
            (sys.executable, "-c", program), env=environment, capture_output=True, text=True, check=True
        )
    assert json.loads(Path(found.stdout.strip()).read_bytes()) == json.loads(
        (MODEL / "config.json").read_bytes()
    )
    assert server.files() == ["config.json"]
    assert server.connections >= 1


def test_names_are_served_as_they_are() -> None:
    names = ["../x", "a/../../x", "/etc/x", "C:\\x", "x\0.safetensors", "e\u0301.safetensors", "CON"]
    with hub.serve({NAME: hub.repo(dict.fromkeys(names, b"here"))}) as server:
        info = HfApi(server.endpoint, token=False).model_info(NAME)
    assert [sibling.rfilename for sibling in info.siblings or ()] == names


def get(url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One plain request, without redirects: the status, the headers and the body, or what came of it."""
    origin, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(origin, timeout=hub.SECONDS)
    try:
        connection.request("GET", "/" + path, headers=headers)
        reply = connection.getresponse()
        try:
            body = reply.read()
        except http.client.IncompleteRead as error:
            body = error.partial
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, body
    finally:
        connection.close()


CONTENT = bytes(range(256)) * 1024


@pytest.fixture
def server() -> Iterator[hub.Server]:
    with hub.serve({NAME: hub.repo({"big": CONTENT, "small": b"0123456789"})}) as made:
        yield made


def big(server: hub.Server) -> str:
    return get(f"{server.endpoint}/{NAME}/resolve/main/big")[1]["location"]


def test_ranges(server: hub.Server) -> None:
    url = big(server)
    status, headers, body = get(url, Range="bytes=1000-1999")
    assert (status, body) == (206, CONTENT[1000:2000])
    assert headers["content-range"] == f"bytes 1000-1999/{len(CONTENT)}"
    assert get(url, Range="bytes=262000-")[::2] == (206, CONTENT[262000:])
    status, headers, body = get(url, Range=f"bytes={len(CONTENT)}-")
    assert (status, headers["content-range"], body) == (416, f"bytes */{len(CONTENT)}", b"")
    assert [request.range for request in server.requests[1:]] == [
        "bytes=1000-1999",
        "bytes=262000-",
        f"bytes={len(CONTENT)}-",
    ]
    assert [request.sent for request in server.requests[1:]] == [1000, 144, 0]


def test_an_unsigned_address_opens_nothing(server: hub.Server) -> None:
    assert get(big(server).partition("?")[0])[0] == 403


@pytest.mark.parametrize(
    ("action", "at", "asked", "expected"),
    [
        ("cut", 70_000, "bytes=0-", (206, CONTENT[:70_000])),
        ("cut", 0, "bytes=0-", (206, b"")),
        ("cut", 70_000, "bytes=70001-", (206, CONTENT[70_001:])),
        ("no-range", 0, "bytes=5-", (200, CONTENT)),
        ("416", 0, "bytes=5-", (416, b"")),
        ("short", 3, "bytes=5-", (206, CONTENT[5:-3])),
        ("long", 3, "bytes=262140-", (206, CONTENT[262140:] + b"   ")),
        ("altered", 262141, "bytes=262140-", (206, b"\xfc\xfc\xfe\xff")),
        ("status", 503, "bytes=5-", (503, b"the hub is not well\n")),
    ],
)
def test_faults_of_a_body(
    server: hub.Server, action: str, at: int, asked: str, expected: tuple[int, bytes]
) -> None:
    url = big(server)
    server.fail(action, "big", at=at, times=1)
    assert get(url, Range=asked)[::2] == expected
    server.heal()
    assert get(url)[::2] == (200, CONTENT)


def test_faults_of_a_reply(server: hub.Server) -> None:
    url = f"{server.endpoint}/{NAME}/resolve/main/small"
    server.fail("login", "small", times=1)
    server.fail("loop", "small", times=1)
    server.fail("elsewhere", "small", times=1)
    server.fail("no-commit", "small", times=1)
    server.fail("absent", "small", times=1)
    assert b"<!doctype html>" in get(url)[2]
    assert get(url)[1]["location"] == url
    assert get(url)[1]["location"].startswith(server.origins["stranger"])
    assert "x-repo-commit" not in get(url)[1]
    assert get(url)[1]["x-error-code"] == "EntryNotFound"
    status, headers, body = get(url)
    assert (status, body) == (200, b"0123456789")
    assert "x-repo-commit" in headers


def test_a_redirect_elsewhere_still_has_the_file(server: hub.Server) -> None:
    server.fail("elsewhere", "big", host="hub")
    status, _, body = get(big(server))
    assert (status, body) == (200, CONTENT)
    assert [request.host for request in server.requests] == ["hub", "stranger"]


def test_a_bomb_inflates(server: hub.Server) -> None:
    server.fail("bomb", "info", at=5_000_000)
    _, headers, body = get(f"{server.endpoint}/api/models/{NAME}")
    assert headers["content-encoding"] == "gzip"
    assert len(body) < 50_000
    assert gzip.decompress(body) == b" " * 5_000_000


@pytest.mark.parametrize("action", ["stall", "silent"])
def test_what_is_held_goes_on_when_released(server: hub.Server, action: str) -> None:
    url = big(server)
    server.fail(action, "big", at=100_000, times=1)
    with ThreadPoolExecutor(1) as pool:
        body = pool.submit(get, url)
        server.wait(lambda: len(server.requests) == 2)
        if action == "stall":
            server.wait(lambda: server.sent("big") == 100_000)
        assert not body.done()
        server.release()
        assert body.result() == (200, body.result()[1], CONTENT)


def test_a_held_reply_ends_with_the_hub(server: hub.Server) -> None:
    server.fail("silent", "info")
    with ThreadPoolExecutor(1) as pool, hub.serve({NAME: MODEL}) as brief:
        brief.fail("silent", "info")
        pool.submit(get, f"{brief.endpoint}/api/models/{NAME}")
        brief.wait(lambda: len(brief.requests) == 1)


def test_main_moves_between_two_requests(server: hub.Server) -> None:
    url = f"{server.endpoint}/{NAME}/resolve/main/small"
    before = get(url)[1]["x-repo-commit"]
    new = hub.repo({"small": b"new"})
    server.upon("info", lambda: server.move(NAME, new))
    assert json.loads(get(f"{server.endpoint}/api/models/{NAME}")[2])["sha"] == before
    assert get(url)[1]["x-repo-commit"] == new.commit
    assert get(url.replace("main", before))[2] == b"0123456789"
