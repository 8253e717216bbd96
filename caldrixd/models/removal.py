"""Taking a directory out of a cache: it is there whole, or it is gone."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from caldrix_protocol.refusals import Refused

# Of what is being removed; the hub's library takes no such name for a repo.
_PREFIX = ".caldrix-removed-"


def remove(path: Path) -> None:
    """Remove a directory with all that is in it. Links in it are removed, not followed.

    Its name goes first and in one step, so that nobody finds a part of it. Refused "model/not-removed" where
    that is not allowed, with nothing removed.
    """
    try:
        _check(path)
        going = _set_aside(path)
        with suppress(FileNotFoundError):  # of what another has removed before
            shutil.rmtree(going)
    except OSError as error:
        raise Refused("model/not-removed", path=error.filename or path, reason=error.strerror) from None


def _set_aside(path: Path) -> Path:
    """Its new name, or its own in a layer of a container's image: overlayfs renames no directory there."""
    aside = path.with_name(_PREFIX + secrets.token_hex(8))
    try:
        path.rename(aside)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return path
    return aside


def finish(cache: Path) -> None:
    """Remove what is left of removals that were killed, as far as that is allowed."""
    for aside in cache.glob(_PREFIX + "*"):
        shutil.rmtree(aside, ignore_errors=True)


def _check(path: Path) -> None:
    """Every directory that has something in it lets it go. OSError names the first that does not."""
    for folder, folders, files in os.walk(path, onerror=_raise):
        if (folders or files) and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
            number = errno.EROFS if read_only else errno.EACCES
            raise OSError(number, os.strerror(number), folder)


def _raise(error: OSError) -> None:
    raise error
