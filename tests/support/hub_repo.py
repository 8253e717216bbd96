"""Repositories of the hub that tests run: named files, their git and LFS names, and the commit they make."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

LFS_ABOVE = 100_000  # bytes: larger files stand behind a redirect, as LFS files do
_CHUNK = 1 << 20


@dataclass(frozen=True)
class File:
    """One file: bytes in memory, or a path whose contents must not change while it is served.

    A claimed size in bytes is said to be its own, and spaces are sent up to there.
    """

    name: str
    source: bytes | Path
    claimed: int | None = None

    @cached_property
    def size(self) -> int:
        if self.claimed is not None:
            return self.claimed
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        with self.open() as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()

    @property
    def lfs(self) -> bool:
        return self.size > LFS_ABOVE

    @cached_property
    def pointer(self) -> bytes:
        """What git stores of an LFS file."""
        version = "https://git-lfs.github.com/spec/v1"
        return f"version {version}\noid sha256:{self.sha256}\nsize {self.size}\n".encode()

    @cached_property
    def blob(self) -> str:
        """The id git gives the file, or the pointer that stands for it."""
        if self.lfs:
            data = self.pointer
        else:
            with self.open() as stream:
                data = stream.read()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.blob

    def open(self) -> BinaryIO:
        return io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source.open("rb")


@dataclass(frozen=True)
class Repo:
    """One revision of a repository. A gated one can be listed by all, a private one is not seen at all."""

    files: Mapping[str, File]
    commit: str
    gated: bool = False
    private: bool = False


def repo(
    source: Path | Mapping[str, bytes | Path],
    *,
    commit: str = "",
    gated: bool = False,
    private: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> Repo:
    """Of the files under a directory, or of contents by name. Names are not looked at: they may be hostile.

    Without `commit` (40 hex digits) it follows from the files, so that the same files make the same commit.
    `sizes` are claimed for the files of these names.
    """
    if isinstance(source, Path):
        paths = sorted(path for path in source.rglob("*") if path.is_file())
        source = {path.relative_to(source).as_posix(): path for path in paths}
    files = {name: File(name, content, (sizes or {}).get(name)) for name, content in source.items()}
    tree = "".join(f"{name}\0{file.blob}\0" for name, file in files.items()).encode("utf-8", "surrogatepass")
    return Repo(files, commit or hashlib.sha1(tree).hexdigest(), gated, private)
