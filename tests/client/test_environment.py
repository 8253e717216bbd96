from __future__ import annotations

import os

import pytest

from caldrix_client.environment import MAX_MODEL, MAX_VALUE, for_daemon, for_request
from caldrix_protocol.messages import Open, checks
from caldrix_protocol.refusals import Refused
from caldrix_protocol.schema import BadValue


def test_only_what_decides_caches_hub_and_proxies_travels(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.getbasetemp())
    here = os.getcwd()
    assert for_request(
        {
            "HOME": "/home/me",
            "HF_HOME": "cache/hf",
            "HF_HUB_CACHE": "~/hub",
            "HF_TOKEN_PATH": "~/token",
            "SSL_CERT_FILE": "certificates.pem",
            "XDG_CACHE_HOME": "",
            "HF_TOKEN": "hf_secret",
            "HF_HUB_OFFLINE": "1",
            "CALDRIX_OFFLINE": "",
            "https_proxy": "http://proxy:1",
            "AWS_SECRET_ACCESS_KEY": "no",
            "LD_PRELOAD": "no",
        }
    ) == {
        "HOME": "/home/me",
        "HF_HOME": f"{here}/cache/hf",
        "HF_HUB_CACHE": "/home/me/hub",
        "HF_TOKEN_PATH": "/home/me/token",
        "SSL_CERT_FILE": f"{here}/certificates.pem",
        "HF_TOKEN": "hf_secret",
        "HF_HUB_OFFLINE": "1",
        "CALDRIX_OFFLINE": "",
        "https_proxy": "http://proxy:1",
    }


def test_a_value_that_is_no_text_is_refused() -> None:
    with pytest.raises(Refused, match="HF_HOME is not valid UTF-8"):
        for_request({"HF_HOME": "/x\udcff"})


def test_a_daemon_gets_no_secret_and_no_relative_search_path() -> None:
    chosen = for_daemon(
        {"PATH": "bin::/usr/bin", "HF_TOKEN": "hf_secret", "ROCM_PATH": "/opt", "LD_PRELOAD": "x"}
    )
    assert chosen == {"PATH": f"{os.path.abspath('bin')}:/usr/bin", "ROCM_PATH": "/opt"}


def test_what_travels_is_as_long_as_the_messages_allow() -> None:
    check = checks(Open)
    assert check["model"]("x" * MAX_MODEL)
    assert check["environment"]({"HF_TOKEN": "x" * MAX_VALUE})
    with pytest.raises(BadValue):
        check["model"]("x" * (MAX_MODEL + 1))
    with pytest.raises(BadValue):
        check["environment"]({"HF_TOKEN": "x" * (MAX_VALUE + 1)})
