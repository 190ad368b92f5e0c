"""The output of commands on terminals of 80 and 120 columns. Lines are broken between words, tables stay whole,
commands can be pasted, names of instructions are explained, and other libraries print nothing. Lines into a pipe are
not wrapped.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from megatron_pp.tools.cli import command_line, parity
from megatron_pp.tools.cli.command_line import main
from megatron_pp.tools.cli.legend import legend
from megatron_pp.tools.cli.options.parser import HelpFormatter
from megatron_pp.tools.cli.terminal import print_command, print_line, wrapped, wrapped_command
from megatron_pp.tools.parity.answers.verdicts import REPEAT

ADVICE = "advise -P 2 --global-batch 4 --memory-gb 80 --activation-gb 2 --forward-ms 1 --backward-ms 2 --p2p-ms 0.1"
_HELPED = ("plan", "verify", "simulate", "advise", "draw", "report", "parity", "run", "check")
COMMANDS = {
    "plan": "plan -s zb_v -P 2 -M 3",
    "families": "plan --list",
    "verify": "verify -s 1f1b -P 2 -M 4",
    "refused": "verify -s mine.csv",
    "simulate": "simulate -s zb_v -P 4 -M 8 --p2p-ms 0.1",
    "compared": "simulate --compare 1f1b,zb_h1,interleaved_zb,zb_v -P 4 -V 1,2 -M 8 --p2p-ms 0.1",
    "not possible": "simulate --compare 1f1b,zb_v,combined_1f1b -P 4 -V 1,2 -M 3",
    "memory": "simulate -s zb_v -P 4 -M 8 --memory --layers 32 --hidden-size 4096 --seq-length 4096",
    "draw": "draw -s interleaved_1f1b -P 2 -V 2 -M 4",
    "grid": "draw --style grid -s naive,1f1b -P 2 -M 2",
    "advise": f"{ADVICE} --max-chunks 1 --schedules gpipe,1f1b,zb_h1",
    "wrong value": "simulate -s 1f1b -P 2 -M 4 --p2p-ms -3",
    "wrong name": "draw -s no_such_schedule_as_this_one_is_known_to_the_command -P 2 -M 4",
    **{f"help of {name}": f"{name} --help" for name in _HELPED},
}
WIDTHS = (80, 120)
_END = "the end of a command"
_PROGRAM = f"""
import contextlib, json, sys
from megatron_pp.tools.cli.command_line import main

for command in json.loads(sys.argv[1]):
    with contextlib.suppress(SystemExit):
        main(command)
    print("{_END}", flush=True)
"""


def _on_a_terminal(width: int, folder: Path) -> dict[str, list[str]]:
    """The lines that each command prints, on both of its streams."""
    terminal, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    given = json.dumps([shlex.split(command) for command in COMMANDS.values()])
    streams = {"stdin": side, "stdout": side, "stderr": side}
    run = subprocess.Popen([sys.executable, "-c", _PROGRAM, given], cwd=folder, env=environment, **streams)  # type: ignore[call-overload]
    os.close(side)
    seen = b""
    try:
        while piece := os.read(terminal, 1 << 16):
            seen += piece
    except OSError:  # the other side is closed
        pass
    finally:
        os.close(terminal)
        assert run.wait(timeout=120) == 0, seen.decode()[-2000:]
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode()).replace("\r\n", "\n")
    texts = [one.rpartition("\r")[2] for one in text.split(f"{_END}\n")]  # after the rest of a progress bar
    return {name: one.strip("\n").split("\n") for name, one in zip(COMMANDS, texts, strict=False)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("terminal")
    (here / "mine.csv").write_text("0F0,0F1,0F2,0B0,0B1,0B2\n1B0,1F0,1F1,1B1,1F2,1B2\n")
    return here


@pytest.fixture(scope="module", params=WIDTHS)
def shown(request: pytest.FixtureRequest, folder: Path) -> tuple[int, dict[str, list[str]]]:
    return request.param, _on_a_terminal(request.param, folder)


@pytest.fixture(scope="module")
def piped(folder: Path) -> dict[str, str]:
    given = json.dumps([shlex.split(command) for command in COMMANDS.values()])
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, given],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(COMMANDS, done.stdout.split(f"{_END}\n"), strict=False))


@pytest.mark.parametrize("name", COMMANDS)
def test_lines_fit_or_are_one_word(shown: tuple[int, dict[str, list[str]]], name: str) -> None:
    width, lines = shown
    assert any(lines[name])
    too_long = [line for line in lines[name] if len(line) > width and len(line.rstrip(" \\").split()) > 1]
    assert too_long == []


@pytest.mark.parametrize("name", ["families", "verify", "simulate", "advise"])
def test_no_word_is_broken(shown: tuple[int, dict[str, list[str]]], piped: dict[str, str], name: str) -> None:
    _, lines = shown
    words = [word for line in lines[name] for word in line.split() if word != "\\" and "─" not in word]
    whole = {word for word in piped[name].split() if "─" not in word}
    assert set(words) == whole


@pytest.mark.parametrize("name", _HELPED)
def test_no_option_is_broken_in_a_help(shown: tuple[int, dict[str, list[str]]], name: str) -> None:
    _, lines = shown
    assert [line for line in lines[f"help of {name}"] if re.search(r"\w-$", line)] == []


def test_a_command_can_be_pasted(shown: tuple[int, dict[str, list[str]]], piped: dict[str, str]) -> None:
    width, lines = shown
    start = next(k for k, line in enumerate(lines["advise"]) if line.startswith("torchrun "))
    pasted = lines["advise"][start]
    for line in lines["advise"][start + 1 :]:
        if not pasted.endswith("\\"):
            break
        pasted = pasted[:-1] + line
    (whole,) = (line for line in piped["advise"].split("\n") if line.startswith("torchrun "))
    assert len(whole) > width, "it has to be wrapped"
    assert shlex.split(pasted) == shlex.split(whole)


def test_names_of_instructions_are_explained(shown: tuple[int, dict[str, list[str]]], piped: dict[str, str]) -> None:
    _, lines = shown
    words = {name: " ".join(" ".join(of).split()) for name, of in lines.items()}
    assert "# F0.0 is microbatch 0 of the rank's chunk 0; F forward; I input gradients; W weight" in words["plan"]
    assert "HAND_ hands over to another stage of the same rank; _F of an output; _B of a gradient" in words["plan"]
    assert "B0.0 is microbatch 0 of the rank's chunk 0; F forward; B backward" in words["refused"]
    assert "F1.3 chunk 1, microbatch 3" in words["draw"]
    assert "F forward B backward F3 microbatch 3" in words["grid"]
    assert not any(line.startswith("# F0.0 is") for line in piped["plan"].split("\n")), "programs read the lines"


def test_columns_that_do_not_fit_go_below_behind_the_first_one(
    shown: tuple[int, dict[str, list[str]]], piped: dict[str, str]
) -> None:
    width, lines = shown
    titles = [line.strip() for line in lines["memory"]]
    assert titles.count("More columns") == (width < 103)
    assert "More columns" not in piped["memory"]
    assert any(line.startswith("F1.4 is microbatch 4 of the rank's chunk 1") for line in lines["memory"])
    whole, rows = _memory_rows(piped["memory"].split("\n")), _memory_rows(lines["memory"])
    assert len(whole) == 4
    assert [rows[rank] + [cell for again in rows[rank + 4 :: 4] for cell in again[1:]] for rank in range(4)] == whole


def _memory_rows(lines: list[str]) -> list[list[str]]:
    start = next(k for k, line in enumerate(lines) if line.startswith("Peak memory of each rank's GPU"))
    return [line.split() for line in lines[start:] if re.match(r"  [0-3] ", line)]


def test_a_legend_has_what_the_text_has() -> None:
    assert legend("rank 3 is slow") == ""
    assert legend("rank 1: W2.7") == "W2.7 is microbatch 7 of the rank's chunk 2; W weight gradients"
    assert legend("SEND_B0.3").startswith("SEND_B0.3 is microbatch 3 of the rank's chunk 0; SEND_ posts a send; _B")


@pytest.mark.parametrize("width", [1, 20, 60])
def test_a_wrapped_command_is_the_same_to_a_shell(width: int) -> None:
    for command in (
        "torchrun --nproc-per-node 4 -m megatron_pp run --name 'two  words' --x=\"a  b\" -v script.py ...",
        "  megatron-pp parity 'it'\"'\"'s one' --flag",
    ):
        assert shlex.split(wrapped_command(command, width).replace("\\\n", "")) == shlex.split(command)


def test_spaces_within_a_line_stay() -> None:
    assert wrapped("name      what it is, in more words", 24, hang=10) == (
        "name      what it is, in\n          more words"
    )  # fmt: skip
    assert wrapped("    indented words go on deeper", 20) == "    indented words\n        go on deeper"


def test_only_a_terminal_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")  # some shells export it
    text = "a line of words that is longer"
    for is_terminal, lines in ((True, 2), (False, 1)):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=20, color_system=None)
        print_line(console, text)
        assert console.file.getvalue().count("\n") == lines  # type: ignore[attr-defined]
        print_command(console, text)
        assert console.file.getvalue().count("\\\n") == lines - 1  # type: ignore[attr-defined]


def test_paritys_answer_is_wrapped_too() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40, color_system=None)
    repeat = f"{REPEAT}megatron-pp parity {'--flag 3 ' * 9}train.py"
    parity._print([f"changed: {', '.join(['--a: 1 -> 2'] * 9)}", repeat], console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 40
    assert lines[1].startswith("    ")
    repeat = "\n".join(lines).partition(REPEAT)[2]
    assert shlex.split(repeat.replace("\\\n", "")) == ["megatron-pp", "parity", *["--flag", "3"] * 9, "train.py"]


def test_help_keeps_lines_that_are_indented() -> None:
    text = "first words\nand more:\n  command --flag \\\n      3   # a remark\n\nexit codes: 0 done"
    shown = HelpFormatter("prog")._fill_text(text, 31, "")
    assert shown == "first words and more:\n  command --flag 3   # a remark\n\nexit codes: 0 done"
    assert HelpFormatter("prog")._fill_text(text, 20, "").split("\n")[2:4] == ["  command --flag 3", "      # a remark"]


def test_warnings_of_other_libraries_are_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warns(*_: object) -> object:
        warnings.warn_explicit("of another library", UserWarning, "/site-packages/other/module.py", 3)
        warnings.warn_explicit("of ours", UserWarning, command_line.__file__, 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "open_terminal", warns)
    monkeypatch.setattr(sys, "warnoptions", [])
    main(["verify", "-P", "2", "-M", "2"])
    assert "another library" not in (shown := capsys.readouterr().err)
    assert "note: of ours" in shown
    monkeypatch.setattr(sys, "warnoptions", ["default"])
    main(["verify", "-P", "2", "-M", "2"])
    assert "another library" in capsys.readouterr().err
