"""A model of the hub, made complete in the Hugging Face cache: the cheapest check first, the weights last."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from caldrix_protocol import sizes
from caldrix_protocol.connection import as_status
from caldrix_protocol.messages import Message, Planned, Progress
from caldrix_protocol.refusals import Refused
from caldrixd.fetcher import transfer
from caldrixd.fetcher.library import MAX_SMALL, NO_SPACE, File, Hub, Listing
from caldrixd.fetcher.transfer import Patience
from caldrixd.json_file import read_bytes, read_object
from caldrixd.models import files, gate
from caldrixd.models.hub import Cached, Record, Repo, look, read_record, write_record, write_whole
from caldrixd.models.resolve import parse_repo
from caldrixd.text import files as text_files

CONFIG = "config.json"
# A header of safetensors says its own length first.
MIN_WEIGHTS = 8
LONG = 100_000_000  # bytes: to read that takes long enough for a word on it
# Beside config.json, the tokenizer, the index and the weights: what is wanted where the repo has it.
SMALL_FILES = ("generation_config.json", "chat_template.jinja", "chat_template.json")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)

Send = Callable[[Message], None]


@dataclass(frozen=True)
class Job:
    """What to fetch, where to, and how to speak of it. `proceed` waits until the daemon wants the weights.

    `offline` is the variable that forbids connections; what the cache holds is compared all the same.
    """

    model: str
    repo: Repo
    cache: Path
    endpoint: str
    patience: Patience
    send: Send
    proceed: Callable[[], object]
    offline: str | None = None

    @cached_property
    def hub(self) -> Hub:
        """Made when it is needed. Refused "hub/endpoint" and "hub/certificates"."""
        return Hub(self.endpoint, self.repo, self.model, self.cache, self.patience.seconds)


def fetch(job: Job) -> None:
    """Make the model complete. Refused for whatever stands against that, as early as it can be known."""
    before = look(job.repo, job.cache)
    damaged = None
    if before is not None and before.complete and before.digests and (job.repo.pinned or job.offline):
        told = Snapshot(job, _listing(before))
        with told.border():
            damaged = told.compare()
        if damaged is None:
            return
    listing = _asked(job, damaged)
    snapshot = Snapshot(job, listing)
    with snapshot.border():
        if before is None or not before.complete:
            snapshot.point()
        snapshot.fetch()
        snapshot.point()


def _listing(cached: Cached) -> Listing:
    """What the hub would say of a commit, as another program has left it."""
    found = [(name, transfer.size(cached.directory / name)) for name in cached.digests]
    there = {name: File(name, size, cached.digests[name]) for name, size in found if size >= 0}
    return Listing(cached.directory.name, there)


def _asked(job: Job, damaged: str | None) -> Listing:
    """What the hub says. A file that is known to be wrong is not used because nothing better can be had."""
    reason = f"{job.offline} is set"
    try:
        if not job.offline:
            return job.hub.listing()
    except Refused as refused:
        if damaged is None:
            raise
        reason = refused.text
    raise Refused("hub/damaged", model=job.model, file=damaged, reason=reason)


class Snapshot:
    """One commit of the repo, in the cache."""

    def __init__(self, job: Job, listing: Listing) -> None:
        self._job = job
        self._listing = listing
        self._directory = job.repo.snapshot(job.cache, listing.commit)
        self._blobs = job.repo.storage(job.cache) / "blobs"
        self._sizes: dict[str, int] = {}
        self._large: Set[File] = (
            frozenset()
        )  # the weights, which are not read to see whether they are missing
        self._record = read_record(self._record_path)
        self._checked = dict(self._record.checked) if self._record else {}
        self._unsaid: list[File] | None = []  # downloaded before anything was announced

    @contextmanager
    def border(self) -> Iterator[None]:
        """A cache that cannot be used is a refusal, and so is a disk that fills up."""
        try:
            yield
        except OSError as error:
            if error.errno in NO_SPACE:
                raise self._disk(self._to_come(self._missing().values())) from None
            path = error.filename or self._job.cache
            raise Refused("hub/cache", path=path, reason=error.strerror or error) from None

    def compare(self) -> str | None:
        """A file that is needed and not right. If there is none that is kept: nothing has to be fetched."""
        listed = self._listing.files
        small = [CONFIG, *self._small()]
        if files.SINGLE not in listed:
            small.append(files.INDEX)
        for name in small:
            if not self._is_right(listed[name]):
                return name
        weights = [listed[name] for name in files.choose(self._directory, listed)]
        self._sizes = {file.name: file.size for file in (*map(listed.__getitem__, small), *weights)}
        self._ask(weights)
        for file in weights:
            if not self._is_right(file):
                return file.name
        with suppress(OSError):
            self._write_record()
        return None

    def fetch(self) -> None:
        """In this order: config.json, tokenizer, index, disk, the daemon's word, weights."""
        self._check_names()
        self._need(CONFIG)
        self._check_early()
        weights = self._weights()
        listed = self._listing.files
        small = self._small()
        self._sizes |= {name: self._listing.files[name].size for name in small}
        self._sizes |= {file.name: file.size for file in weights}
        self._large = frozenset(weights)
        for file in weights:
            blob = self._blobs / file.digest
            if not self._is_there(file) and transfer.size(blob) == file.size:
                _link(blob, self._directory / file.name)
        missing = self._missing()
        self._check_adapter(weights)
        if not self._can_record(missing) and not missing:
            return  # nobody could remember what is checked here
        if missing:
            self._check_disk(missing)
            self._announce(missing)
        for name in small:
            self._need(name)
        if missing or not all(map(self._is_checked, weights)):
            self._fetch_weights(weights)
        if left := [name for name in self._sizes if not self._is_right(listed[name])]:
            names = ", ".join(left)
            raise Refused("hub/incomplete", model=self._job.model, path=self._directory, names=names)
        self._write_record()

    def _fetch_weights(self, weights: list[File]) -> None:
        """Ask the daemon, then read those that are there and fetch the others."""
        to_come = [file for file in weights if not self._is_there(file)]
        self._ask(weights, to_come)
        damaged = [file for file in weights if file not in to_come and not self._is_right(file)]
        if damaged:
            for file in damaged:
                self._remove(self._directory / file.name)
            anew = {file.name: file for file in damaged}
            self._check_disk(anew)
            self._announce(anew)
        self._download([*to_come, *damaged])

    def _small(self) -> list[str]:
        """What is wanted beside config.json, the index and the weights."""
        listed = self._listing.files
        return [*text_files.needed(listed), *(name for name in SMALL_FILES if name in listed)]

    def _ask(self, weights: list[File], to_come: Iterable[File] = ()) -> None:
        """Whether the daemon wants the weights."""
        total = sum(file.size for file in weights)
        self._job.send(Planned(str(self._directory), total, self._to_come(to_come)))
        self._job.proceed()

    def point(self) -> None:
        """Let the revision's name mean this commit in the cache, as the library writes it."""
        if self._job.repo.commit(self._job.cache) == self._listing.commit:
            return
        write_whole(self._job.repo.reference(self._job.cache), self._listing.commit)

    @property
    def _record_path(self) -> Path:
        return self._job.repo.record(self._job.cache, self._listing.commit)

    def _write_record(self) -> None:
        checked = {name: time for name, time in self._checked.items() if name in self._sizes}
        record = Record(dict(self._sizes), checked)
        if record != self._record:
            write_record(self._record_path, record)
            self._record = record

    def _can_record(self, missing: Mapping[str, File]) -> bool:
        """Keep which files there must be. False in a cache that is complete and cannot be written."""
        try:
            self._write_record()
        except OSError:
            if missing:
                raise
            return False
        return True

    def _missing(self) -> dict[str, File]:
        needed = [self._listing.files[name] for name in self._sizes]
        there = [self._is_there(file) if file in self._large else self._is_right(file) for file in needed]
        return {file.name: file for file, is_there in zip(needed, there, strict=True) if not is_there}

    def _need(self, name: str, limit: int = MAX_SMALL) -> None:
        """Have a small file. One that is there with another size is not that file."""
        file = self._listing.files.get(name)
        if file is None:
            raise Refused("hub/missing-files", model=self._job.model, file=name)
        if file.size > limit:
            raise Refused("config/too-big", file=name, size=file.size, limit=limit)
        self._sizes[name] = file.size
        path = self._directory / name
        if self._is_right(file):
            return
        self._remove(path)
        self._job.hub.download(name, self._listing.commit)
        for left in self._blobs.glob(f"{file.digest}*.incomplete"):  # of a download that was killed
            left.unlink(missing_ok=True)
        if not self._is_right(file):
            self._remove(path)
            raise Refused("hub/digest", file=name)
        self._say_downloaded(file)

    def _is_there(self, file: File) -> bool:
        return transfer.size(self._directory / file.name) == file.size

    def _is_checked(self, file: File) -> bool:
        """Whether what is there is what was checked before."""
        return self._checked.get(file.name) == _changed(self._directory / file.name)

    def _is_right(self, file: File) -> bool:
        """Whether a file is there with its size and digest; read once, until it is changed."""
        path = self._directory / file.name
        if not self._is_there(file) or self._is_checked(file):
            return self._is_there(file)
        changed = _changed(path)
        if file.size > LONG:
            self._job.send(as_status("status/checking", file=file.name, size=sizes.size(file.size)))
        if not transfer.is_whole(path, file):
            return False
        self._checked[file.name] = changed
        return True

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
        if base is not None and {file.digest for file in weights} <= self._job.hub.digests(base.name):
            raise Refused("hub/adapter", model=self._job.model, base=base.name)

    def _check_disk(self, missing: Mapping[str, File]) -> None:
        """What is still to come must fit on the cache's file system."""
        self._blobs.mkdir(parents=True, exist_ok=True)
        needed = self._to_come(missing.values())
        if needed > shutil.disk_usage(self._blobs).free:
            raise self._disk(needed)

    def _to_come(self, missing: Iterable[File]) -> int:
        """Bytes, without those that an earlier attempt left."""
        return sum(file.size - transfer.begun(self._blobs, file) for file in missing)

    def _disk(self, needed: int) -> Refused:
        cache = self._job.cache
        there = next(path for path in (cache, *cache.parents) if path.exists())
        free = shutil.disk_usage(there).free // sizes.MB
        needed = -(-needed // sizes.MB)
        return Refused("hub/disk", model=self._job.model, path=cache, needed=needed, free=free)

    def _announce(self, missing: Mapping[str, File]) -> None:
        """The first line says all that this download brings, also what was needed to know that."""
        early, self._unsaid = self._unsaid or [], None
        whole = [*early, *missing.values()]
        listed = ", ".join(f"{file.name} {sizes.size(file.size)}" for file in whole)
        total = sum(file.size for file in whole)
        fields = {"model": self._job.model, "files": listed, "size": sizes.size(total)}
        if there := sum(transfer.begun(self._blobs, file) for file in missing.values()):
            self._job.send(as_status("status/going-on", **fields, there=sizes.size(there)))
        else:
            self._job.send(as_status("status/downloading", **fields))
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

            blob, path = self._blobs / file.digest, self._directory / file.name
            with self._lock(file):
                ours = transfer.fetch(
                    self._job.hub, file, self._listing.commit, blob, self._job.patience, report
                )
                _link(blob, path)
            before += file.size
            if ours:
                self._checked[file.name] = _changed(path)
                self._write_record()
            self._say_downloaded(file)

    @contextmanager
    def _lock(self, file: File) -> Iterator[None]:
        """Hold the library's lock of the blob. One who holds it is waited for while the file grows."""
        with ExitStack() as stack:
            grown = -1
            while True:
                try:
                    stack.enter_context(self._job.hub.lock(file.digest, self._job.patience.seconds))
                    break
                except TimeoutError:
                    size = sum(map(transfer.size, self._blobs.glob(f"{file.digest}*")))
                    if size <= grown:
                        path = self._job.hub.lock_path(file.digest)
                        raise Refused("hub/locked", file=file.name, path=path) from None
                    if grown < 0:
                        self._job.send(as_status("status/download-waiting", model=self._job.model))
                    grown = size
            yield


def _link(blob: Path, pointer: Path) -> None:
    """A relative link, as the library makes it; where the file system has none, the file itself.

    It comes in one step: whoever has the file through a link that is there never misses it.
    """
    new = pointer.with_name(f".{secrets.token_hex(8)}")
    try:
        new.symlink_to(os.path.relpath(blob, pointer.parent))
        new.rename(pointer)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        blob.rename(pointer)


def _changed(path: Path) -> int:
    """When a file was changed last, in nanoseconds; -1 when it is not there."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return -1
