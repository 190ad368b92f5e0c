"""Files of a run, which may come from elsewhere: only plain files are read; what is written is whole or not there."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from megatron_pp.common.plain_files import open_plain, read_plain

__all__ = ["check_own", "open_plain", "read_text", "sync_folder", "write_atomically"]

_LARGEST_TEXT = 1 << 28  # bytes


def check_own(folder: Path, names: Iterable[str]) -> None:
    """Raises OSError where one of ``names`` in ``folder`` is a link, or a file that has another name too: what is
    written under it would go elsewhere."""
    for name in names:
        with suppress(FileNotFoundError):
            there = os.lstat(folder / name)
            if stat.S_ISLNK(there.st_mode) or (stat.S_ISREG(there.st_mode) and there.st_nlink > 1):
                advice = "it is a link, and a run writes into its own folder only: put a copy in its place"
                raise OSError(errno.EINVAL, advice, str(folder / name))


def read_text(path: Path) -> str:
    """The text of a plain file. Raises OSError as ``open_plain``, ValueError if it is not UTF-8."""
    return read_plain(path, _LARGEST_TEXT).decode()


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to disk so that a reader, or a crash, sees the old content or the new. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)  # left by a crash, or a link to a file of somebody else's
    try:
        with open(temporary, "x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return when the disk has what was made, renamed and removed in ``folder``."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
