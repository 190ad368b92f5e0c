"""Reading and writing files the same way everywhere: clear errors, and nothing half-written."""

import errno
import os
import tempfile
from pathlib import Path

from megatron_pp.common.plain_files import read_plain
from megatron_pp.errors import FileFormatError

_LARGEST = 1 << 30  # bytes of a file
_LARGEST_STREAM = 1 << 26  # characters from a pipe or a device, which may never end


def read_text(path: str | os.PathLike[str], plain: bool = False) -> str:
    """The file's text. ``plain``: only of a regular file, or a link to one, as for what lies in a run's folder or is
    measured; else a pipe will do too, as one that a shell gives. Raises FileFormatError where it cannot be read or is
    no text."""
    try:
        if plain or not is_special(path):
            return read_plain(path, _LARGEST, links=True).decode("utf-8-sig").replace("\r\n", "\n")
        with Path(path).open(encoding="utf-8-sig") as file:  # Excel writes a byte order mark
            text = file.read(_LARGEST_STREAM + 1)
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path}: not a text file in UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:  # no name that a file can have
        raise FileFormatError(f"{str(path)!r}: cannot be read ({error})") from error
    if len(text) > _LARGEST_STREAM:
        raise FileFormatError(f"{path}: longer than {_LARGEST_STREAM:,} characters")
    return text


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises FileFormatError where ``write_whole`` would, as far as that is known before long work."""
    why = why_unwritable(path)
    if why:
        raise FileFormatError(f"{path}: cannot be written ({why})")


def why_unwritable(path: str | os.PathLike[str]) -> str:
    """Why a file of this name cannot be written; empty where nothing is known against it."""
    try:
        target = os.path.realpath(path)
    except ValueError as error:  # no name that a file can have
        return str(error)
    folder = os.path.dirname(target)
    if os.path.isdir(target):
        return os.strerror(errno.EISDIR)
    if not os.path.isdir(folder):
        return os.strerror(errno.ENOENT)
    may = os.access(target if is_special(path) else folder, os.W_OK)
    return "" if may else os.strerror(errno.EACCES)


def is_special(path: str | os.PathLike[str]) -> bool:
    """Whether it is a device or a pipe, which no file may replace."""
    other = os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
    return other or os.fspath(path).startswith("/dev/")


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file so that others see the old one or all of the new one; links stay, and devices and pipes are written
    to. Raises FileFormatError.
    """
    target = Path(os.path.realpath(path))
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        if is_special(path):
            Path(path).write_bytes(data)
            return
        handle, scratch = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(data)
            os.umask(mask := os.umask(0))
            os.chmod(scratch, 0o666 & ~mask)
            os.replace(scratch, target)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be written ({error.strerror or error})") from error
