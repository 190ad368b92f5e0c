"""``megatron-pp draw``: timelines, grids and files."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.unit_tests.tools.cli.conftest import MODEL


def test_draw_prints_the_timeline(command):
    code, out, _ = command("draw", "-s", "1f1b", "-P", 2, "-M", 2)
    assert code == 0
    assert "rank 0 F0" in out
    assert "\x1b[" not in out  # not a terminal


def test_draw_grids_and_what_they_cost(command):
    code, out, _ = command("draw", "--style", "grid", "-s", "naive,gpipe,1f1b", "-P", 4, "-M", 4)
    assert code == 0
    assert "rank 3      .  .  . F0 B0 F1 B1 F2 B2 F3 B3" in out
    assert "75.0%" in out
    assert "4 3 2 1" in out


def test_the_grids_table_counts_slots_by_what_operations_cost(command):
    """F, I and W of a rank's share of the model take 1 slot each, a whole backward takes 2, and half a share takes half
    of that. So 1F1B takes 3 (M + P - 1)."""
    _, out, _ = command("draw", "--style", "grid", "-s", "1f1b,zb_h1,zb_v", "-P", 4, "-M", 4)
    assert "a microbatch on a rank takes F 1, B 2, I 1, W 1 slots" in " ".join(out.split())
    rows = {line.split()[0]: line.split() for line in out.splitlines() if "%" in line}
    assert rows["1f1b"] == ["1f1b", "21", *["9"] * 4, "42.9%", "4", "3", "2", "1", "4", "8", "8", "4"]
    assert rows["zb_h1"][1:6] == ["15", *["3"] * 4]
    assert rows["zb_v"][1:6] == ["13.5", *["1.5"] * 4]
    assert rows["zb_h1"][7:11] == ["4"] * 4  # microbatches that wait for W count as in flight, as in simulate


@pytest.mark.slow
def test_several_schedules_are_one_drawing(command, tmp_path):
    _, out, _ = command("draw", "-s", "1f1b,zb_h1", "-P", 2, "-M", 4)
    assert "1f1b P=2 V=1 M=4\nstep 15 slots" in out
    assert "zb_h1 P=2 V=1 M=4\nstep 13 slots" in out
    for name in ("a.svg", "a.html"):
        assert command("draw", "-s", "1f1b,zb_h1", "-P", 2, "-M", 4, "-o", tmp_path / name)[0] == 0
        text = (tmp_path / name).read_text()
        assert all(title in text for title in ("1f1b P=2 V=1 M=4", "zb_h1 P=2 V=1 M=4"))
    code, _, error = command("draw", "-s", "1f1b,zb_h1", "-P", 2, "-o", tmp_path / "a.json")
    assert (code, error.count("\n")) == (2, 1)
    assert "a Chrome trace has one schedule" in error


@pytest.mark.slow
@pytest.mark.parametrize(("term", "colours"), [("xterm", r"4[0-7]"), ("xterm-256color", r"48;5;\d+")])
def test_a_terminal_of_16_colours_gets_colours_of_its_own(term, colours):
    environment = {**os.environ, "TERM": term, "FORCE_COLOR": "1", "COLORTERM": "", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    for style in ("text", "grid"):
        line = [sys.executable, "-m", "megatron_pp", "draw", "-s", "zb_h1", "-P", "2", "-M", "2", "--style", style]
        out = subprocess.run(line, capture_output=True, text=True, check=True, env=environment).stdout
        found = dict(re.findall(rf"\x1b\[[\d;]*?;({colours})m([FIW])\d", out))
        assert sorted(found.values()) == ["F", "I", "W"]


def test_a_picture_without_matplotlib_is_an_error_of_one_line(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("a.svg", "a.png"):
        code, _, error = command("draw", "-P", 2, "-M", 2, "-o", tmp_path / name)
        assert code == 2
        assert error == "megatron-pp draw: SVG and PNG pictures need matplotlib: pip install '.[viz]'\n"
    assert command("draw", "-P", 2, "-M", 2, "-o", tmp_path / "a.html")[0] == 0


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("a.svg", b"<?xml"),
        ("a.html", b"<!DOCTYPE html>"),
        ("a.png", b"\x89PNG"),
        ("a.json", b'{"displayTimeUnit"'),
        ("a.txt", b"zb_v"),
    ],
)
def test_draw_writes_what_the_ending_says(command, tmp_path, name, beginning):
    path = tmp_path / name
    arguments = ["-P", 2, "-M", 4, "--forward-ms", 2, "--backward-ms", 4, *MODEL]
    code, out, _ = command("draw", "-s", "zb_v", *arguments, "-o", path)
    assert (code, out) == (0, f"wrote {path}\n")
    assert path.read_bytes().startswith(beginning)


def test_a_grid_can_be_written_to_a_file(command, tmp_path):
    code, out, _ = command("draw", "--style", "grid", "-s", "gpipe", "-P", 2, "-M", 3, "-o", tmp_path / "grid.txt")
    assert (code, out) == (0, f"wrote {tmp_path / 'grid.txt'}\n")
    written = (tmp_path / "grid.txt").read_text()
    shown = command("draw", "--style", "grid", "-s", "gpipe", "-P", 2, "-M", 3)[1]
    assert written == shown


def test_writing_to_a_link_or_a_pipe_keeps_the_link_or_pipe(command, tmp_path):
    (tmp_path / "plan.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to(tmp_path / "plan.csv")
    assert command("plan", "-o", tmp_path / "link.csv")[0] == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "plan.csv").read_text() == (tmp_path / "link.csv").read_text() != "old"
    os.mkfifo(tmp_path / "pipe.csv")
    reader = subprocess.Popen(["cat", tmp_path / "pipe.csv"], stdout=subprocess.PIPE, text=True)
    assert command("plan", "-o", tmp_path / "pipe.csv")[0] == 0
    assert reader.communicate(timeout=30)[0] == (tmp_path / "plan.csv").read_text()
    assert (tmp_path / "pipe.csv").is_fifo()
