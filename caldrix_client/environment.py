"""Which environment variables travel: with a request, and into a daemon this client starts."""

from __future__ import annotations

import os
from collections.abc import Mapping

from caldrix_protocol.environment import INHERITED
from caldrix_protocol.formats import kind_of
from caldrix_protocol.refusals import Refused

PATHS = (
    "HOME",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_TOKEN_PATH",
    "PIP_CERT",
    "PIP_CONFIG_FILE",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
)
VALUES = (
    "HF_TOKEN",
    "HF_ENDPOINT",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN",
    "HF_HUB_OFFLINE",
    "CALDRIX_OFFLINE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
    "PIP_EXTRA_INDEX_URL",
    "PIP_INDEX_URL",
)

# The most bytes that `open` and its like carry of one value, and of a model.
MAX_VALUE = 32 << 10
MAX_MODEL = 4096

# How the names end of files that are no model without those beside them.
PARTS = (".json", ".safetensors")

_SEARCH_PATHS = ("LD_LIBRARY_PATH", "PATH", "PYTHONPATH")


def for_request(environment: Mapping[str, str]) -> dict[str, str]:
    """The user's own values of what decides caches, hub, package index and proxies; paths absolute.

    Raises Refused for a value that is no text or too long (usage/prompt-utf8, usage/too-long), and what
    `absolute` raises.
    """
    chosen = {}
    for name in PATHS:
        if value := environment.get(name):
            chosen[name] = _expanded(value, environment)
    for name in VALUES:
        if (value := environment.get(name)) is not None:
            chosen[name] = value
    for name, value in chosen.items():
        _require_text(name, value, MAX_VALUE)
    return chosen


def for_daemon(environment: Mapping[str, str]) -> dict[str, str]:
    """What a new daemon gets: an allow-list, search paths made absolute, since it works in `/`."""
    chosen = {name: value for name, value in environment.items() if name in INHERITED}
    for name in _SEARCH_PATHS:
        if name in chosen:
            parts = [part for part in chosen[name].split(os.pathsep) if part]
            try:
                parts = [os.path.abspath(part) for part in parts]
            except FileNotFoundError:  # the working directory was deleted: nothing is found from there
                parts = [part for part in parts if os.path.isabs(part)]
            chosen[name] = os.pathsep.join(parts)
    return chosen


def _require_text(what: str, value: str, limit: int) -> None:
    """Raise Refused when `value` came from bytes that are not UTF-8, or from more than `limit`."""
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise Refused("usage/prompt-utf8", what=what) from None
    if size > limit:
        raise Refused("usage/too-long", what=what, size=size, limit=limit)


def model_argument(argument: str) -> str:
    """What the daemon is asked for: a directory by its absolute path, anything else as it was given.

    Raises Refused (model/no-such-directory, model/file, model/file-of-one) for what is written as a directory
    and is none, and for a file of weights or of a model; for what is no text or too long (usage/prompt-utf8,
    usage/too-long).
    """
    model = _named(argument)
    _require_text("the model argument", model, MAX_MODEL)
    return model


def _named(argument: str) -> str:
    if os.path.isdir(argument):
        return absolute(argument)
    if _is_part_of_model(argument):
        raise Refused("model/file-of-one", path=argument, directory=os.path.dirname(argument) or ".")
    is_path = argument.startswith(("./", "../", "/", "~"))
    kind = kind_of(argument) or "a file"
    if os.path.isfile(argument) and (is_path or kind != "a file" or argument.endswith(".safetensors")):
        raise Refused("model/file", path=argument, kind=kind)
    if is_path:
        raise Refused("model/no-such-directory", path=argument)
    return argument


def _is_part_of_model(path: str) -> bool:
    beside = os.path.join(os.path.dirname(path), "config.json")
    return path.endswith(PARTS) and os.path.isfile(path) and os.path.isfile(beside)


def absolute(path: str) -> str:
    """The path from the root. Raises Refused (model/no-such-directory) from a deleted working directory."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise Refused("model/no-such-directory", path=path) from None


def _expanded(path: str, environment: Mapping[str, str]) -> str:
    if path == "~" or path.startswith("~/"):
        path = environment.get("HOME", "~") + path[1:]
    return absolute(path)
