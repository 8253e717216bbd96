"""What the hub answers: one function from a request and the repositories to a reply, without faults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.support.hub_repo import File, Repo

MEMBER = "hf_member"  # the token of a user who may read every repository
OUTSIDER = "hf_outsider"  # a valid token that opens no gated or private repository

# "owner/name" -> branch, tag or commit -> what it holds
Repos = Mapping[str, Mapping[str, Repo]]


@dataclass(frozen=True)
class Asked:
    """A request, taken apart. `what` is "info", "tree", the file's name, or "" for what no hub has."""

    what: str
    repo: str = ""
    revision: str = ""
    cached: bool = False


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | File = b""


def ask(host: str, target: str) -> Asked:
    """Of a request's path and query, to the hub or to a host behind it."""
    if host != "hub":
        return Asked(parse_qs(urlsplit(target).query).get("file", [""])[0])
    parts = urlsplit(target).path.split("/")[1:]
    match parts:
        case ["api", "models", owner, name]:
            return Asked("info", f"{owner}/{name}", "main")
        case ["api", "models", owner, name, "revision", revision]:
            return Asked("info", f"{owner}/{name}", unquote(revision))
        case ["api", "models", owner, name, "tree", revision]:
            return Asked("tree", f"{owner}/{name}", unquote(revision))
        case ["api", "resolve-cache", "models", owner, name, revision, *path]:
            return Asked(unquote("/".join(path)), f"{owner}/{name}", unquote(revision), cached=True)
        case [owner, name, "resolve", revision, *path]:
            return Asked(unquote("/".join(path)), f"{owner}/{name}", unquote(revision))
    return Asked("")


def hub_reply(target: str, token: str | None, repos: Repos, cdn: str, resolve_cache: bool) -> Reply:
    """The hub's answer. `cdn` is the origin that holds the LFS files."""
    asked = ask("hub", target)
    if token not in (None, MEMBER, OUTSIDER):
        return error_reply(401, "", "Invalid credentials in Authorization header")
    revisions = repos.get(asked.repo)
    if revisions is None or (revisions["main"].private and token != MEMBER):
        if token is None:
            # The real one sends no code, which the library takes for a missing repository over https alone.
            return error_reply(401, "RepoNotFound", "Invalid username or password.")
        return error_reply(404, "RepoNotFound", "Repository not found")
    repo = revisions.get(asked.revision)
    if repo is None:
        return error_reply(404, "RevisionNotFound", f"Invalid rev id: {asked.revision}")
    if asked.what == "info":
        return _json(_info(asked.repo, repo, "blobs" in parse_qs(urlsplit(target).query)))
    if asked.what == "tree":
        return _json([_entry(file) for file in repo.files.values()])
    if repo.gated and token != MEMBER:
        return _gated(asked.repo, token)
    file = repo.files.get(asked.what)
    commit = {"X-Repo-Commit": repo.commit}
    if file is None:
        return error_reply(404, "EntryNotFound", "Entry not found", commit)
    linked = {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(file.size)}
    if file.lfs:
        return Reply(302, {**commit, **linked, "Location": signed(cdn, file)})
    if resolve_cache and not asked.cached:
        path = f"/api/resolve-cache/models/{asked.repo}/{repo.commit}/{quote(file.name)}"
        return Reply(307, {**commit, **linked, "Location": path})
    return Reply(200, commit | _content(file), file)


def cdn_reply(target: str, repos: Repos) -> Reply:
    """The answer of the host behind the hub: a signed address opens one file, whoever asks."""
    parts = urlsplit(target)
    query = parse_qs(parts.query)
    digest = parts.path.rpartition("/")[2]
    if query.get("X-Signature") != [digest]:
        return Reply(403, {"Content-Type": "application/xml"}, b"<Error><Code>AccessDenied</Code></Error>")
    name = query["file"][0]
    for revisions in repos.values():
        for repo in revisions.values():
            file = repo.files.get(name)
            if file is not None and file.sha256 == digest:
                return Reply(200, _content(file), file)
    return Reply(404, {"Content-Type": "application/xml"}, b"<Error><Code>NoSuchKey</Code></Error>")


def signed(origin: str, file: File) -> str:
    """The address of a file on the host behind the hub."""
    return f"{origin}/repos/{file.sha256}?X-Signature={file.sha256}&file={quote(file.name, safe='')}"


def _content(file: File) -> dict[str, str]:
    return {"ETag": f'"{file.etag}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}


def _gated(name: str, token: str | None) -> Reply:
    restricted = f"Access to model {name} is restricted"
    if token is None:
        message = (
            f"{restricted}. You must have access to it and be authenticated to access it. Please log in."
        )
        return error_reply(401, "GatedRepo", message)
    return error_reply(403, "GatedRepo", f"{restricted} and you are not in the authorized list.")


def _info(name: str, repo: Repo, blobs: bool) -> dict[str, Any]:
    return {
        "_id": repo.commit[:24],
        "id": name,
        "modelId": name,
        "sha": repo.commit,
        "private": repo.private,
        "gated": "manual" if repo.gated else False,
        "disabled": False,
        "tags": [],
        "siblings": [_sibling(file, blobs) for file in repo.files.values()],
    }


def _sibling(file: File, blobs: bool) -> dict[str, Any]:
    if not blobs:
        return {"rfilename": file.name}
    lfs = {"sha256": file.sha256, "size": file.size, "pointerSize": len(file.pointer)}
    found = {"rfilename": file.name, "blobId": file.blob, "size": file.size}
    return found | {"lfs": lfs} if file.lfs else found


def _entry(file: File) -> dict[str, Any]:
    found = {"type": "file", "path": file.name, "oid": file.blob, "size": file.size}
    lfs = {"oid": file.sha256, "size": file.size, "pointerSize": len(file.pointer)}
    return found | {"lfs": lfs} if file.lfs else found


def _json(value: Any) -> Reply:
    return Reply(200, {"Content-Type": "application/json; charset=utf-8"}, json.dumps(value).encode())


def error_reply(status: int, code: str, message: str, more: Mapping[str, str] | None = None) -> Reply:
    """What the hub says is wrong, in its headers; no `code` is no header."""
    headers = {"Content-Type": "application/json; charset=utf-8", "X-Error-Message": message, **(more or {})}
    if code:
        headers["X-Error-Code"] = code
    return Reply(status, headers, json.dumps({"error": message}).encode())
