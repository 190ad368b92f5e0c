"""Reads and writes files of a run. A run may come from elsewhere, so only plain files are read. Writes are complete or
absent."""

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
    """Raises OSError if one of ``names`` in ``folder`` is a link, or a file with a second name: a write to it would
    change a file elsewhere."""
    for name in names:
        with suppress(FileNotFoundError):
            there = os.lstat(folder / name)
            if stat.S_ISLNK(there.st_mode) or (stat.S_ISREG(there.st_mode) and there.st_nlink > 1):
                advice = "it is a link, and a run writes only into its own folder: replace it by a copy"
                raise OSError(errno.EINVAL, advice, str(folder / name))


def read_text(path: Path) -> str:
    """The text of a plain file. Raises OSError as ``open_plain`` does, and ValueError if it is not UTF-8."""
    return read_plain(path, _LARGEST_TEXT).decode()


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to disk. A reader sees the old or the new content, also after a crash. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)  # left by a crash, or a link to another user's file
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
    """Return when the changes of names in ``folder`` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
