"""A model of the hub, made complete in the Hugging Face cache: the cheapest check first, the weights last."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from caldrix_protocol import sizes
from caldrix_protocol.connection import as_status
from caldrix_protocol.messages import Message, Planned, Progress
from caldrix_protocol.refusals import Refused
from caldrixd.fetcher import transfer
from caldrixd.fetcher.library import MAX_SMALL, File, Hub, Listing
from caldrixd.fetcher.transfer import Patience
from caldrixd.json_file import read_bytes, read_object
from caldrixd.models import files, gate
from caldrixd.models.hub import Repo, lacking, look, write_record
from caldrixd.models.resolve import parse_repo
from caldrixd.text import files as text_files

CONFIG = "config.json"
# A header of safetensors says its own length first.
MIN_WEIGHTS = 8
# Beside config.json, the tokenizer, the index and the weights: what is wanted where the repo has it.
SMALL_FILES = ("generation_config.json", "chat_template.jinja", "chat_template.json")
MIB = 1 << 20
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)

Send = Callable[[Message], None]


@dataclass(frozen=True)
class Job:
    """What to fetch, where to, and how to speak of it. `proceed` waits until the daemon wants the weights."""

    model: str
    repo: Repo
    cache: Path
    endpoint: str
    patience: Patience
    send: Send
    proceed: Callable[[], object]


def fetch(job: Job) -> None:
    """Make the model complete. Refused for whatever stands against that, as early as it can be known."""
    hub = Hub(job.endpoint, job.repo, job.model, job.cache, job.patience.seconds)
    before = look(job.repo, job.cache)
    listing = hub.listing()
    snapshot = Snapshot(job, hub, listing)
    with snapshot.border():
        if before is None or not before.complete:
            snapshot.point()
        snapshot.fetch()
        snapshot.point()


class Snapshot:
    """One commit of the repo, in the cache."""

    def __init__(self, job: Job, hub: Hub, listing: Listing) -> None:
        self._job = job
        self._hub = hub
        self._listing = listing
        self._directory = job.repo.snapshot(job.cache, listing.commit)
        self._blobs = job.repo.storage(job.cache) / "blobs"
        self._sizes: dict[str, int] = {}
        self._unsaid: list[File] | None = []  # downloaded before anything was announced

    @contextmanager
    def border(self) -> Iterator[None]:
        """A cache that cannot be used is a refusal."""
        try:
            yield
        except OSError as error:
            path = error.filename or self._job.cache
            raise Refused("hub/cache", path=path, reason=error.strerror or error) from None

    def fetch(self) -> None:
        """In this order: config.json, tokenizer, index, disk, the daemon's word, weights."""
        self._check_names()
        self._need(CONFIG)
        self._check_early()
        weights = self._weights()
        listed = self._listing.files
        small = [*text_files.needed(listed), *(name for name in SMALL_FILES if name in listed)]
        self._sizes |= {name: self._listing.files[name].size for name in small}
        self._sizes |= {file.name: file.size for file in weights}
        for file in weights:
            blob = self._blobs / file.digest
            if file.name in self._missing() and _size(blob) == file.size:
                _link(blob, self._directory / file.name)
        missing = self._missing()
        self._check_adapter(weights)
        if not missing:
            with suppress(OSError):  # a cache that is complete may be one that cannot be written
                self._write_record()
            return
        self._write_record()
        self._check_disk(missing)
        self._announce(missing)
        for name in small:
            self._need(name)
        to_come = [file for file in weights if file.name in missing]
        total = sum(file.size for file in weights)
        self._job.send(Planned(str(self._directory), total, sum(file.size for file in to_come)))
        self._job.proceed()
        self._download(to_come)
        if left := self._missing():
            names = ", ".join(left)
            raise Refused("hub/incomplete", model=self._job.model, path=self._directory, names=names)

    def point(self) -> None:
        """Let the revision's name mean this commit in the cache, as the library writes it."""
        if self._job.repo.commit(self._job.cache) == self._listing.commit:
            return
        path = self._job.repo.reference(self._job.cache)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        partial.write_text(self._listing.commit, "ascii")
        partial.rename(path)

    def _write_record(self) -> None:
        write_record(self._job.repo.record(self._job.cache, self._listing.commit), self._sizes)

    def _missing(self) -> dict[str, File]:
        return {name: self._listing.files[name] for name in lacking(self._directory, self._sizes)}

    def _need(self, name: str, limit: int = MAX_SMALL) -> None:
        """Have a small file. One that is there with another size is not that file."""
        file = self._listing.files.get(name)
        if file is None:
            raise Refused("hub/missing-files", model=self._job.model, file=name)
        if file.size > limit:
            raise Refused("config/too-big", file=name, size=file.size, limit=limit)
        self._sizes[name] = file.size
        path = self._directory / name
        if not lacking(self._directory, {name: file.size}):
            return
        self._remove(path)
        self._hub.download(name, self._listing.commit)
        if not transfer.is_whole(path, file):
            self._remove(path)
            raise Refused("hub/digest", file=name)
        self._say_downloaded(file)

    def _read(self, name: str, limit: int) -> bytes:
        """A small file, got first where it is not there yet."""
        self._need(name, limit)
        return read_bytes(self._directory / name, limit)

    def _remove(self, path: Path) -> None:
        """A link of the snapshot, and what it leads to if that is a blob of this repo."""
        target = Path(os.path.realpath(path))
        if target.parent == Path(os.path.realpath(self._blobs)):
            target.unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def _check_names(self) -> None:
        """A repo of an adapter, or of weights in another form, is known by its listing."""
        listed, model = self._listing.files, self._job.model
        if file := files.adapter(listed):
            self._need(files.ADAPTER_CONFIG)
            raise Refused("hub/adapter-only", model=model, file=file, base=files.base_of(self._directory))
        other = files.foreign(listed)
        if other and CONFIG not in listed:
            raise Refused("hub/other-weights", model=model, file=other[0], kind=other[1])

    def _check_early(self) -> None:
        """What config.json, the names of the files and small files of the tokenizer tell."""
        try:
            gate.read_spec(self._directory)
            text_files.check(self._listing.files, self._read, "repo")
        except Refused as refused:
            model = self._job.model
            if refused.code == "tokenizer/missing":
                raise Refused("hub/missing-files", model=model, file=text_files.TOKENIZER) from None
            if self._sizes.keys() == {CONFIG} and not refused.code.startswith("hub/"):
                raise Refused("hub/refused-early", model=model, reason=refused.text) from None
            raise
        if other := files.foreign(self._listing.files):
            raise Refused("hub/other-weights", model=self._job.model, file=other[0], kind=other[1])
        if not any(name.endswith(".safetensors") for name in self._listing.files):
            raise Refused("hub/no-safetensors", model=self._job.model)

    def _weights(self) -> list[File]:
        if files.SINGLE not in self._listing.files and files.INDEX in self._listing.files:
            self._need(files.INDEX, files.MAX_INDEX)
        names = files.choose(self._directory, self._listing.files)
        weights = [self._listing.files[name] for name in names]
        for file in weights:
            if file.size < MIN_WEIGHTS:
                raise Refused("hub/empty-file", model=self._job.model, file=file.name, size=file.size)
        return weights

    def _check_adapter(self, weights: list[File]) -> None:
        """A repo that carries its adapter's base model unchanged is an adapter, which is not applied."""
        if files.ADAPTER_CONFIG not in self._listing.files:
            return
        self._need(files.ADAPTER_CONFIG)
        named = read_object(self._directory / files.ADAPTER_CONFIG, gate.MAX_CONFIG).get(
            "base_model_name_or_path"
        )
        base = parse_repo(named) if type(named) is str else None
        if base is not None and {file.digest for file in weights} <= self._hub.digests(base.name):
            raise Refused("hub/adapter", model=self._job.model, base=base.name)

    def _check_disk(self, missing: Mapping[str, File]) -> None:
        """What is still to come must fit on the cache's file system."""
        self._blobs.mkdir(parents=True, exist_ok=True)
        needed = sum(file.size - _size(self._partial(file)) for file in missing.values())
        free = shutil.disk_usage(self._blobs).free
        if needed > free:
            needed = -(-needed // MIB)
            raise Refused(
                "hub/disk", model=self._job.model, path=self._job.cache, needed=needed, free=free // MIB
            )

    def _announce(self, missing: Mapping[str, File]) -> None:
        """The first line says all that this download brings, also what was needed to know that."""
        early, self._unsaid = self._unsaid or [], None
        whole = [*early, *missing.values()]
        listed = ", ".join(f"{file.name} {sizes.size(file.size)}" for file in whole)
        size = sizes.size(sum(file.size for file in whole))
        self._job.send(as_status("status/downloading", model=self._job.model, files=listed, size=size))
        for file in early:
            self._say_downloaded(file)

    def _say_downloaded(self, file: File) -> None:
        if self._unsaid is not None:
            self._unsaid.append(file)
        else:
            self._job.send(as_status("status/downloaded", file=file.name, size=sizes.size(file.size)))

    def _download(self, weights: list[File]) -> None:
        """Fetch weight files, each into its blob, and link the snapshot to it."""
        total = sum(file.size for file in weights)
        before = 0
        for file in weights:
            offset = before

            def report(position: int, offset: int = offset) -> None:
                self._job.send(Progress("download", offset + position, total))

            blob = self._blobs / file.digest
            with self._lock(file):
                if _size(blob) != file.size:
                    partial = self._partial(file)
                    transfer.fetch(self._hub, file, self._listing.commit, partial, self._job.patience, report)
                    partial.rename(blob)
                _link(blob, self._directory / file.name)
            before += file.size
            self._say_downloaded(file)

    def _partial(self, file: File) -> Path:
        return self._blobs / f"{file.digest}.caldrix-partial"

    @contextmanager
    def _lock(self, file: File) -> Iterator[None]:
        """Hold the library's lock of the blob. One who holds it is waited for while the file grows."""
        with ExitStack() as stack:
            grown = -1
            while True:
                try:
                    stack.enter_context(self._hub.lock(file.digest, self._job.patience.seconds))
                    break
                except TimeoutError:
                    size = sum(map(_size, self._blobs.glob(f"{file.digest}*")))
                    if size <= grown:
                        path = self._hub.lock_path(file.digest)
                        raise Refused("hub/locked", file=file.name, path=path) from None
                    if grown < 0:
                        self._job.send(as_status("status/download-waiting", model=self._job.model))
                    grown = size
            yield


def _link(blob: Path, pointer: Path) -> None:
    """A relative link, as the library makes it; where the file system has none, the file itself."""
    pointer.unlink(missing_ok=True)
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        blob.rename(pointer)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
