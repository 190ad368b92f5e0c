"""Opens files that may come from other people: only regular files, and only up to a size.

A FIFO waits for a writer for ever, and a device never ends. So neither is opened in a folder of another person,
whatever its name is.
"""

import errno
import os
import stat
from io import BufferedRandom, BufferedReader


def open_plain(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, links: bool = False
) -> BufferedRandom | BufferedReader:
    """Open a regular file, for writing too with ``os.O_RDWR``. Raises OSError for a FIFO, a device, a folder, and
    unless ``links`` for a symbolic link."""
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return open(descriptor, "r+b") if flags & os.O_RDWR else open(descriptor, "rb")


def read_plain(path: str | os.PathLike[str], most: int, links: bool = False) -> bytes:
    """The content of a regular file. Raises OSError as ``open_plain``, and for more than ``most`` bytes."""
    with open_plain(path, links=links) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
        return file.read(most)
