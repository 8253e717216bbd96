"""The Hugging Face cache as its library lays it out, looked at without the library and without a connection.

<cache>/models--owner--name/refs/main             the commit that "main" was
                           /snapshots/<commit>/   links, by name, to
                           /blobs/<etag>          the files
                           /.caldrix/<commit>     ours: which files a model needs, and what of it was checked
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from caldrix_protocol.refusals import Refused
from caldrixd.json_file import read_bytes, read_object
from caldrixd.models import files

OFFLINE_VARIABLES = ("CALDRIX_OFFLINE", "HF_HUB_OFFLINE")
DEFAULT_ENDPOINT = "https://huggingface.co"
COMMIT = re.compile(r"[0-9a-f]{40}")
MAX_RECORD = 1 << 20
# Files of tokenizers of any kind; of which kind they may be is said when the model is looked at.
_TOKENIZER = re.compile(r"tokenizer\.|vocab\.|merges\.|.*piece.*\.model|.*tiktoken|tekken|bpe\.|rwkv_vocab")
MAX_REFERENCE = 1 << 10
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def offline_variable(environment: Mapping[str, str]) -> str | None:
    """The variable that forbids connections, if one is set to more than a no."""
    for variable in OFFLINE_VARIABLES:
        if environment.get(variable, "").strip().lower() not in ("", "0", "no", "off", "false"):
            return variable
    return None


def cache_root(environment: Mapping[str, str]) -> Path:
    """Where the library keeps its cache in this environment. Refused "socket/no-home"."""
    if named := environment.get("HF_HUB_CACHE"):
        return Path(named)
    if home := environment.get("HF_HOME"):
        return Path(home) / "hub"
    if cache := environment.get("XDG_CACHE_HOME"):
        return Path(cache) / "huggingface" / "hub"
    if not environment.get("HOME"):
        raise Refused("socket/no-home")
    return Path(environment["HOME"]) / ".cache" / "huggingface" / "hub"


@dataclass(frozen=True)
class Repo:
    """A repo on the hub, "owner/name", at a revision: a branch, a tag or a commit."""

    name: str
    revision: str

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return bool(COMMIT.fullmatch(self.revision))

    def storage(self, cache: Path) -> Path:
        return cache / ("models--" + self.name.replace("/", "--"))

    def snapshot(self, cache: Path, commit: str) -> Path:
        return self.storage(cache) / "snapshots" / commit

    def record(self, cache: Path, commit: str) -> Path:
        return self.storage(cache) / ".caldrix" / commit

    def reference(self, cache: Path) -> Path:
        return self.storage(cache) / "refs" / self.revision

    def commit(self, cache: Path) -> str | None:
        """The commit that the cache knows for the revision."""
        if self.pinned:
            return self.revision
        try:
            text = read_bytes(self.reference(cache), MAX_REFERENCE).decode("ascii").strip()
        except (Refused, ValueError):
            return None
        return text if COMMIT.fullmatch(text) else None


@dataclass(frozen=True)
class Cached:
    """What the cache holds of a repo at a revision. `missing` are names of files; `certain` is False where
    the hub alone knows whether that is all and right.

    `digests` of all files, by their names, are there where their blobs tell, nobody has compared them, and
    who does can remember it.
    """

    directory: Path
    missing: tuple[str, ...]
    certain: bool
    digests: Mapping[str, str]

    @property
    def complete(self) -> bool:
        return not self.missing


def look(repo: Repo, cache: Path) -> Cached | None:
    """None when the cache knows no commit for the revision, or has none of its files."""
    commit = repo.commit(cache)
    if commit is None:
        return None
    directory = repo.snapshot(cache, commit)
    if not directory.is_dir():
        return None
    path = repo.record(cache, commit)
    record = read_record(path)
    if record is None:
        place = path.parent if path.parent.exists() else path.parent.parent
        return _judged(directory, can_remember=place.is_dir() and os.access(place, os.W_OK))
    certain = record.sizes.keys() <= record.checked.keys()
    return Cached(directory, lacking(directory, record.sizes), certain, {})


def lacking(directory: Path, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The files that are not there, or not with their size in bytes."""
    return tuple(name for name, size in sizes.items() if _size(directory / name) != size)


@dataclass(frozen=True)
class Record:
    """Which files a model needs, by their names, with their sizes in bytes.

    `checked` has when a file was changed last, in nanoseconds, as it was when its digest was right.
    """

    sizes: Mapping[str, int]
    checked: Mapping[str, int]


def write_record(path: Path, record: Record) -> None:
    """Keep which files a model needs. OSError."""
    written = {"sizes": dict(record.sizes), "checked": dict(record.checked)}
    write_whole(path, json.dumps(written, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all. OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, "utf-8")
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read_record(path: Path) -> Record | None:
    """None where there is no record that can be used."""
    try:
        fields = read_object(path, MAX_RECORD)
    except Refused:
        return None
    sizes, checked = fields.get("sizes"), fields.get("checked", {})
    if not sizes or not _numbers(sizes) or not _numbers(checked):
        return None
    return Record(sizes, checked) if all(Path(name).name == name for name in sizes) else None


def _numbers(value: object) -> bool:
    return type(value) is dict and all(type(number) is int for number in value.values())


def _judged(directory: Path, *, can_remember: bool) -> Cached:
    """A snapshot that another program fetched: the model's own files say what belongs to it."""
    missing = [] if (directory / "config.json").is_file() else ["config.json"]
    if not any(map(_TOKENIZER.match, os.listdir(directory))):
        missing.append("tokenizer.json")
    whole = any((directory / name).exists() for name in (files.SINGLE, files.INDEX))
    digests = _digests(directory) if whole and can_remember else {}
    try:
        files.weight_files(directory)
    except Refused as refused:
        if refused.code == "weights/index-absent":
            missing += str(refused.fields["names"]).split(", ")
        elif refused.code in ("model/no-safetensors", "model/other-weights", "model/adapter"):
            missing.append("*.safetensors")
    return Cached(directory, tuple(missing), whole and not digests, digests)


def _digests(directory: Path) -> dict[str, str]:
    """Of the files of a snapshot by the names of their blobs; none where one of them does not tell."""
    found = {}
    for path in directory.iterdir():
        blob = os.path.basename(os.path.realpath(path))
        if path.is_symlink() and DIGEST.fullmatch(blob):
            found[path.name] = blob
        elif not path.is_dir():
            return {}
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
