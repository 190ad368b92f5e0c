"""What is no regular file is not opened, and no more is read than allowed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_pp.common.plain_files import open_plain, read_plain
from megatron_pp.errors import FileFormatError
from megatron_pp.plan.costs.files import read_text
from megatron_pp.tracing.run import load_run


def special(path: Path, kind: str) -> Path:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
@pytest.mark.parametrize("links", [False, True])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str, links: bool) -> None:
    with pytest.raises(OSError):  # noqa: PT011 (what the system says of links and devices)
        open_plain(special(tmp_path / "file", kind), links=links)


def test_a_link_to_a_file_is_read_if_links_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_plain(tmp_path / "link", 7, links=True) == b"content"
    with pytest.raises(OSError, match="larger than 6 bytes"):
        read_plain(tmp_path / "file", 6)
    with pytest.raises(OSError):  # noqa: PT011
        read_plain(tmp_path / "link", 7)


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_traces_and_measured_costs_are_regular_files(tmp_path: Path, kind: str) -> None:
    trace = special(tmp_path / "trace-1-rank00000.jsonl", kind)
    with pytest.raises(FileFormatError, match="not a plain file"):
        load_run(tmp_path)
    with pytest.raises(FileFormatError, match="not a plain file"):
        read_text(trace, plain=True)


def test_a_pipe_from_a_shell_is_read_where_the_user_names_the_file(tmp_path: Path) -> None:
    into, out = os.pipe()
    os.write(out, b"[1, 2]\r\n")
    os.close(out)
    assert read_text(f"/dev/fd/{into}") == "[1, 2]\n"
    os.close(into)
