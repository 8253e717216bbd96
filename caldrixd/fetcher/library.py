"""The border to huggingface_hub: its session, headers, locks and small downloads, for one repo.

Its errors become refusals here. Where the library is more generous than caldrix, what its session sends
and receives is looked at on the way: the token is for the endpoint alone, and no answer may name a place
outside the cache, be a web page, or be packed so that it grows.
"""

from __future__ import annotations

import errno
import json
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, unquote, urlsplit

from huggingface_hub import set_client_factory
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import WeakFileLock, build_hf_headers, get_session

from caldrix_protocol.refusals import Refused
from caldrixd.json_file import without_number
from caldrixd.models.hub import COMMIT, DIGEST, Repo

# The base of everything the library's HTTP package raises; which package that is depends on its version.
NetworkError: type[Exception] = HfHubHTTPError.__bases__[0]

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
CONNECT_SECONDS = 10.0
LEAST_RATE = 1024  # bytes a second, over two of the times that a host may be silent
# For one small file: two for its size and place, two for its bytes, and some more when they fail. The library
# would try for ten minutes.
MAX_REQUESTS = 6
MAX_LISTING = 32 << 20
MAX_SMALL = 64 << 20  # bytes of a file that the library downloads
_ETAG = re.compile(r'(?:W/)?"?[A-Za-z0-9_-]{1,128}"?')
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,=+ -]{0,220}")


@dataclass(frozen=True)
class File:
    """One file of a repo: bytes, and its digest: SHA-256 of an LFS file (64 hex digits), else git's SHA-1."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Listing:
    """A repo at one commit: the files at its top."""

    commit: str
    files: Mapping[str, File]


class Slow(Exception):
    """A host that goes on sending, at less than LEAST_RATE for so many seconds."""

    def __init__(self, host: str, seconds: float) -> None:
        self.host = host
        self.seconds = seconds


class Hub:
    """Requests for `repo`, which the user called `model`.

    `seconds` is how long a host may be silent; `clock` gives seconds.
    """

    def __init__(
        self,
        endpoint: str,
        repo: Repo,
        model: str,
        cache: Path,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Refused("hub/endpoint", value=endpoint)
        self.endpoint = endpoint.rstrip("/")
        self.repo = repo
        self.model = model
        self.cache = cache
        self._seconds = seconds
        self._clock = clock
        self._requests_left: int | None = None  # None: as many as we make ourselves
        with self.border():
            try:
                usual = get_session()
            except OSError as error:
                raise Refused("hub/certificates", reason=error.strerror or _line(error)) from None
        client, timeout, hooks = _prompt(type(usual), 4 * seconds), type(usual.timeout), usual.event_hooks
        set_client_factory(
            lambda: client(
                follow_redirects=True,
                timeout=timeout(seconds, connect=min(seconds, CONNECT_SECONDS)),
                headers={"accept-encoding": "identity"},
                event_hooks={
                    "request": [*hooks["request"], self._before],
                    "response": [*hooks["response"], self._after],
                },
            )
        )

    @property
    def page(self) -> str:
        """Where a person reads about the repo, and accepts its terms."""
        return f"{self.endpoint}/{self.repo.name}"

    def listing(self) -> Listing:
        """The commit of the revision and its files. Refused "hub/..."."""
        url = f"{self.endpoint}/api/models/{self.repo.name}/revision/{quote(self.repo.revision, safe='')}"
        with self.border():
            listing = _listing(self._read(url))
        if self.repo.pinned and listing.commit != self.repo.revision:
            raise Refused("hub/moved", model=self.model, commit=self.repo.revision)
        return listing

    def digests(self, name: str) -> frozenset[str]:
        """The digests of all files of another repo; none where the hub does not tell."""
        try:
            url = f"{self.endpoint}/api/models/{quote(name)}"
            with self.border():
                return frozenset(file.digest for file in _listing(self._read(url)).files.values())
        except Refused:
            return frozenset()

    def download(self, name: str, commit: str) -> None:
        """Have a small file in the snapshot of a commit, by the library. Refused "hub/..."."""
        target = self.repo.snapshot(self.cache, commit) / name
        if target.exists():
            return
        from huggingface_hub import hf_hub_download  # takes longer to import than a cached model to find

        self._requests_left = MAX_REQUESTS
        with self.border(), _no_file_over(MAX_SMALL):
            path = hf_hub_download(
                self.repo.name, name, revision=commit, cache_dir=self.cache, endpoint=self.endpoint
            )
        self._requests_left = None
        if Path(path) != target:
            raise Refused("hub/moved", model=self.model, commit=commit)

    @contextmanager
    def stream(self, name: str, commit: str, offset: int) -> Iterator[Any]:
        """The response to a GET for a file from the byte `offset` on. Raises NetworkError and Slow."""
        url = f"{self.endpoint}/{self.repo.name}/resolve/{commit}/{quote(name)}"
        headers = build_hf_headers()
        if offset:
            headers["range"] = f"bytes={offset}-"
        with get_session().stream("GET", url, headers=headers) as response:
            yield response

    @contextmanager
    def lock(self, digest: str, seconds: float) -> Iterator[None]:
        """Hold the library's own lock of a blob. TimeoutError after `seconds`."""
        path = self.lock_path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(path, timeout=seconds):
            yield

    def lock_path(self, digest: str) -> Path:
        return self.cache / ".locks" / self.repo.storage(self.cache).name / f"{digest}.lock"

    @contextmanager
    def border(self) -> Iterator[None]:
        """Every failure of the library and of the network becomes a refusal; a full disk stays an OSError."""
        try:
            yield
        except Refused:
            raise
        except HfHubHTTPError as error:
            self.refuse_status(error.response)
        except (NetworkError, Slow) as error:
            raise self.failed(error) from None
        except OSError as error:
            self._refuse_os_error(error)
        except ImportError as error:  # a kind of proxy that needs another package
            raise self.failed(error) from None
        except ValueError as error:
            raise Refused("hub/answer", model=self.model, reason=_line(error)) from None

    def refuse_status(self, response: Any) -> NoReturn:
        """Raise what a response that is no success means."""
        status = response.status_code
        asked_with_token = "authorization" in response.request.headers
        code = response.headers.get("x-error-code", "")
        known = {
            "model": self.model,
            "repo": self.repo.name,
            "revision": self.repo.revision,
            "url": self.page,
        }
        if self._origin(str(response.request.url)) != self._origin(self.endpoint):
            raise Refused("hub/status", model=self.model, host=_host(response), status=status)
        gated = status in (401, 403) and code == "GatedRepo"
        if (status == 401 or gated) and not asked_with_token:
            raise Refused("hub/no-token", **known)
        if gated:
            raise Refused("hub/gated", **known)
        if status == 401:
            raise Refused("hub/bad-token", **known)
        _, resolved, place = urlsplit(str(response.request.url)).path.partition("/resolve/")
        if status == 404 and code == "EntryNotFound" and resolved:
            name = place.rpartition("/")[2]
            raise Refused("hub/no-file", model=self.model, file=unquote(name))
        if status == 404:
            raise Refused("hub/no-revision" if code == "RevisionNotFound" else "hub/no-repo", **known)
        raise Refused("hub/status", model=self.model, host=_host(response), status=status)

    def failed(self, error: Exception) -> Refused:
        """What an error of the network means."""
        if isinstance(error, Slow):
            return Refused(
                "hub/slow",
                model=self.model,
                host=error.host,
                rate=LEAST_RATE,
                seconds=f"{error.seconds:g}",
            )
        kinds = {kind.__name__ for kind in type(error).__mro__}
        host = _place(self.endpoint)
        if "TooManyRedirects" in kinds:
            return Refused("hub/redirects", model=self.model)
        if "TimeoutException" in kinds:
            return Refused("hub/timeout", model=self.model, host=host, seconds=f"{self._seconds:g}")
        return Refused("hub/unreachable", model=self.model, host=host, reason=_line(error))

    def _refuse_os_error(self, error: OSError) -> NoReturn:
        cause = error.__cause__
        if isinstance(cause, HfHubHTTPError):
            self.refuse_status(cause.response)
        if isinstance(cause, NetworkError):
            raise self.failed(cause) from None
        if error.errno in NO_SPACE:
            raise error
        if error.errno in (None, errno.EFBIG):
            raise Refused("hub/answer", model=self.model, reason=_line(error)) from None
        place = error.filename or self.cache
        raise Refused("hub/cache", path=place, reason=error.strerror or error) from None

    def _read(self, url: str) -> Any:
        """The JSON at an address of the hub's API, of at most MAX_LISTING bytes."""
        with get_session().stream(
            "GET", url, params={"blobs": "true"}, headers=build_hf_headers()
        ) as response:
            if response.status_code != 200:
                self.refuse_status(response)
            body = bytearray()
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > MAX_LISTING:
                    raise ValueError(f"its listing has over {MAX_LISTING} bytes")
        try:
            return json.loads(body)
        except RecursionError:
            raise ValueError("its listing is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"its listing is no JSON ({_line(error)})") from None

    def _before(self, request: Any) -> None:
        """Of every request, also one that follows a redirect."""
        url = str(request.url)
        if self._requests_left is not None:
            self._requests_left -= 1
            if self._requests_left < 0:
                place = _place(self.endpoint)
                raise Refused("hub/timeout", model=self.model, host=place, seconds=f"{self._seconds:g}")
            request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), self._seconds)
        if self._origin(url) != self._origin(self.endpoint):
            request.headers.pop("authorization", None)
        if self.endpoint.startswith("https:") and not url.startswith("https:"):
            raise Refused("hub/insecure", model=self.model, host=_place(url))

    def _after(self, response: Any) -> None:
        headers = response.headers
        if response.status_code == 200 and headers.get("content-type", "").startswith("text/html"):
            raise Refused("hub/web-page", model=self.model, host=_host(response))
        if headers.get("content-encoding", "identity") != "identity":
            raise Refused("hub/answer", model=self.model, reason="it is packed, which was not asked for")
        if response.request.method == "HEAD":
            for name, allowed in (("etag", _ETAG), ("x-linked-etag", _ETAG), ("x-repo-commit", COMMIT)):
                if name in headers and not allowed.fullmatch(headers[name]):
                    raise Refused("hub/answer", model=self.model, reason=f"its {name} is no name of a file")
        response.iter_raw = self._paced(response)

    def _paced(self, response: Any) -> Callable[..., Iterator[bytes]]:
        """The response's own way to its body, which ends with Slow where that does not come fast enough."""
        pieces, window = response.iter_raw, 2 * self._seconds

        def paced(*arguments: Any, **more: Any) -> Iterator[bytes]:
            came, since = 0, self._clock()
            for piece in pieces(*arguments, **more):
                came += len(piece)
                if (passed := self._clock() - since) >= window:
                    if came < LEAST_RATE * passed:
                        raise Slow(_host(response), window)
                    came, since = 0, self._clock()
                yield piece

        return paced

    @staticmethod
    def _origin(url: str) -> tuple[str, str, int | None]:
        parts = urlsplit(url)
        usual = {"http": 80, "https": 443}.get(parts.scheme)
        return parts.scheme, (parts.hostname or "").lower(), parts.port or usual


def _prompt(client: type[Any], seconds: float) -> type[Any]:
    """A kind of client that has the headers of an answer within so many seconds, or raises Slow.

    The limits of the library's own begin anew with every byte. The seconds are also for the connection, which
    a host with several addresses may need time for.
    """

    def send(self: Any, request: Any, **how: Any) -> Any:
        with _alarm(seconds, Slow(_place(str(request.url)), seconds)):
            return client.send(self, request, **how)

    return type(client.__name__, (client,), {"send": send})


@contextmanager
def _alarm(seconds: float, error: Exception) -> Iterator[None]:
    """Raise `error` in the block, whatever it waits for, when the seconds are over. For the main thread."""

    def expire(number: int, frame: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _no_file_over(size: int) -> Iterator[None]:
    """Let no file of this process grow over that many bytes, however much a host sends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = size if before[1] == resource.RLIM_INFINITY else min(size, before[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _listing(answer: Any) -> Listing:
    commit = answer.get("sha") if type(answer) is dict else None
    if type(commit) is not str or not COMMIT.fullmatch(commit):
        raise ValueError("its listing names no commit")
    siblings = answer.get("siblings")
    if type(siblings) is not list:
        raise ValueError("its listing has no files")
    files = [file for item in siblings if (file := _file(item)) is not None]
    return Listing(commit, {file.name: file for file in files})


def _file(item: Any) -> File | None:
    """A file at the top of a repo with what is needed to fetch it; None for any other entry."""
    if type(item) is not dict:
        return None
    name, size, digest = item.get("rfilename"), item.get("size"), item.get("blobId")
    lfs = item.get("lfs")
    if type(lfs) is dict:
        size, digest = lfs.get("size"), lfs.get("sha256")
    if type(name) is not str or not _NAME.fullmatch(name) or type(size) is not int or size < 0:
        return None
    if type(digest) is not str or not DIGEST.fullmatch(digest):
        return None
    return File(name, size, digest)


def _host(response: Any) -> str:
    return _place(str(response.request.url))


def _place(url: str) -> str:
    """Host and port of an address, without a name and password."""
    return urlsplit(url).netloc.rpartition("@")[2]


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in without_number(str(error)).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
