"""What decides caches, tokens, hub and proxies is the environment of the command, not that of the daemon."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support import daemon, hub
from tests.support.cli import COMMAND, Home, Result, finish, new_home
from tests.support.daemon import kernel_cache, running_daemon
from tests.support.hub_cli import NAME, model, refused

NOWHERE = "http://127.0.0.1:1"
MISLEADING = {
    "HF_HOME": "/nonexistent/home",
    "HF_HUB_CACHE": "/nonexistent/cache",
    "HF_TOKEN": "hf_wrong",
    "HF_TOKEN_PATH": "/nonexistent/token",
    "HF_ENDPOINT": NOWHERE,
    "HF_HUB_OFFLINE": "1",
    "CALDRIX_OFFLINE": "1",
    "HTTP_PROXY": NOWHERE,
    "HTTPS_PROXY": NOWHERE,
    "ALL_PROXY": NOWHERE,
    "http_proxy": NOWHERE,
    "SSL_CERT_FILE": "/nonexistent/certificates",
}


@pytest.fixture(scope="module")
def misled(request: pytest.FixtureRequest) -> Iterator[Home]:
    """A home whose daemon was started in an environment where nothing could be fetched."""
    cache = kernel_cache(request.config)
    with new_home(cache) as home, running_daemon(daemon.Home(home.path, home.cache, MISLEADING)):
        yield home


def pull(misled: Home, directory: Path, changes: Mapping[str, str]) -> Result:
    """Fetch a model with HOME in a directory of the test, below which the command is started."""
    home = {name: value for name, value in misled.environment.items() if name != "XDG_CACHE_HOME"}
    work, pipe = directory / "work", subprocess.PIPE
    work.mkdir(exist_ok=True)
    variables = {**home, "HOME": str(directory), **changes}
    return finish(
        subprocess.Popen(
            (*COMMAND, "pull", NAME), stdin=pipe, stdout=pipe, stderr=pipe, env=variables, cwd=work
        )
    )


@pytest.mark.parametrize(
    ("variables", "cache"),
    [
        ({}, ".cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/{}/xdg"}, "xdg/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/{}/xdg", "HF_HOME": "/{}/hf"}, "hf/hub"),
        ({"HF_HOME": "/{}/hf", "HF_HUB_CACHE": "/{}/cache"}, "cache"),
        ({"HF_HOME": "~/hf"}, "hf/hub"),
        ({"HF_HOME": "hf"}, "work/hf/hub"),
        ({"HF_HUB_CACHE": "../cache"}, "cache"),
        ({"HF_HOME": "", "HF_HUB_CACHE": ""}, ".cache/huggingface/hub"),
    ],
)
def test_the_cache_is_that_of_the_command(
    misled: Home, tmp_path: Path, variables: dict[str, str], cache: str
) -> None:
    here = {name: value.replace("/{}", str(tmp_path)) for name, value in variables.items()}
    with hub.serve({NAME: model()}) as server:
        result = pull(misled, tmp_path, {**server.environment, **here})
        assert result.status == 0, result.err
    assert [path.name for path in (tmp_path / cache).glob("models--*")] == ["models--tiny--llama"]


@pytest.mark.parametrize(
    ("variables", "file"),
    [
        ({"HF_TOKEN": hub.MEMBER}, None),
        ({"HF_TOKEN": f" {hub.MEMBER}\n"}, None),
        ({"HF_TOKEN": hub.MEMBER}, (".cache/huggingface/token", "hf_wrong")),
        ({}, (".cache/huggingface/token", hub.MEMBER)),
        ({"HF_HOME": "~/hf"}, ("hf/token", hub.MEMBER)),
        ({"HF_TOKEN_PATH": "~/secret"}, ("secret", hub.MEMBER)),
        ({"HF_TOKEN_PATH": "../secret"}, ("secret", hub.MEMBER)),
    ],
)
def test_the_token_is_that_of_the_command(
    misled: Home, tmp_path: Path, variables: dict[str, str], file: tuple[str, str] | None
) -> None:
    if file is not None:
        path = tmp_path / file[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file[1])
    with hub.serve({NAME: model(gated=True)}) as server:
        result = pull(misled, tmp_path, {**server.environment, **variables})
        assert result.status == 0, result.err
    assert {request.token for request in server.requests if request.host == "hub"} == {hub.MEMBER}


def test_a_token_that_is_not_to_be_sent_is_not(misled: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: model(gated=True)}) as server:
        told = {"HF_TOKEN": hub.MEMBER, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
        refused(pull(misled, tmp_path, {**server.environment, **told}), "HF_TOKEN")
    assert {request.token for request in server.requests} == {None}


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_all_goes_through_the_proxy_of_the_command(misled: Home, tmp_path: Path, variable: str) -> None:
    """No name server knows the hub; the proxy does."""
    with hub.serve({NAME: model()}) as server:
        proxy = server.origins["stranger"]
        result = pull(misled, tmp_path, {"HF_ENDPOINT": "http://hub.invalid", variable: proxy})
        assert result.status == 0, result.err
    assert {request.via for request in server.requests} == {"stranger"}
    assert {request.host for request in server.requests} == {"hub", "cdn"}


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy"])
def test_a_proxy_that_does_not_lead_to_the_hub(misled: Home, tmp_path: Path, variable: str) -> None:
    with hub.serve({NAME: model()}) as server:
        proxy = server.origins["stranger"]
        told = {"HF_ENDPOINT": "https://hub.invalid", variable: proxy.replace("//", "//me:secret@")}
        result = pull(misled, tmp_path, told)
        refused(result, "hub.invalid", "cannot be reached", "the proxy variables")
    assert {(request.method, request.target) for request in server.requests} == {
        ("CONNECT", "hub.invalid:443")
    }
    assert "secret" not in result.err + (misled.path / "log").read_text()


@pytest.mark.parametrize("variable", ["NO_PROXY", "no_proxy"])
def test_what_needs_no_proxy_goes_past_it(misled: Home, tmp_path: Path, variable: str) -> None:
    with hub.serve({NAME: model()}) as server:
        told = {"HF_ENDPOINT": server.endpoint, "HTTP_PROXY": NOWHERE, variable: "127.0.0.1,127.0.0.2"}
        assert pull(misled, tmp_path, told).status == 0


def test_a_proxy_that_is_not_there(misled: Home, tmp_path: Path) -> None:
    told = {"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": NOWHERE}
    result = pull(misled, tmp_path, told)
    refused(result, "the hub at hub.invalid cannot be reached: Connection refused; check the network and")


@pytest.mark.parametrize("content", ["none", None])
def test_certificates_that_are_none(misled: Home, tmp_path: Path, content: str | None) -> None:
    if content:
        (tmp_path / "work").mkdir()
        (tmp_path / "work/certificates.pem").write_text(content)
    told = {"HF_ENDPOINT": "https://127.0.0.1:1", "SSL_CERT_FILE": "certificates.pem"}
    refused(pull(misled, tmp_path, told), "SSL_CERT_FILE", "cannot be used")
