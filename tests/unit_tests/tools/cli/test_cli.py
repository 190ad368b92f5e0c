"""The output of ``plan`` and ``verify``, and refusals of all commands. Most tests run commands in this process."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from unittest import mock

import pytest
from rich.console import Console

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.io.serialize import format_plan, load_plan
from megatron_pp.plan.ir.spec import ON_NCCL, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.tools.advise import pipeline_search
from megatron_pp.tools.cli import command_line, verify
from megatron_pp.tools.cli.command_line import main
from megatron_pp.tools.cli.terminal import print_table
from testkit.inputs.plan_text import edited, placed, save_plan
from tests.unit_tests.tools.cli.conftest import assert_refused

# --- plan


def test_plan_prints_one_line_per_rank_that_parses(command):
    code, out, _ = command("plan", "-s", "interleaved_1f1b", "-P", 2, "-V", 2, "-M", 4)
    plan = build_plan(PlanSpec("interleaved_1f1b", 2, 2, 4, device=ON_NCCL))
    lines = out.splitlines()
    assert (code, lines[0]) == (0, "# " + plan.spec.describe())
    for rank, line in enumerate(lines[1:]):
        name, _, program = line.partition(": ")
        assert (name, placed(plan.placement, rank, program)) == (f"rank {rank}", plan.programs[rank])


def test_plan_compute_only(command):
    _, out, _ = command("plan", "-P", 2, "-M", 2, "--compute-only")
    assert out.splitlines()[1:] == ["rank 0: F0.0 F0.1 B0.0 B0.1", "rank 1: F0.0 B0.0 F0.1 B0.1"]


def test_plan_writes_and_reads_files(command, tmp_path):
    path = tmp_path / "plan.json"
    assert command("plan", "-s", "zb_h1", "-P", 2, "-M", 4, "-o", path)[:2] == (0, f"wrote {path}\n")
    assert load_plan(path) == build_plan(PlanSpec("zb_h1", 2, 1, 4, device=ON_NCCL))
    code, out, _ = command("plan", "--import", path, "--format", "json")
    assert code == 0
    assert json.loads(out)["spec"]["schedule"] == "zb_h1"


def test_plan_imports_pytorchs_order_and_lowers_it_as_asked(command, tmp_path):
    path = tmp_path / "torch.csv"
    path.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    _, out, _ = command("plan", "--import", path, "--policy", "batched")
    assert "imported P=2 V=1 M=2" in out
    assert "[" in out


def test_plan_lists_the_schedules(command):
    _, out, _ = command("plan", "--list")
    assert [line.split()[0] for line in out.splitlines()] == list(SCHEDULES)


# --- verify


def test_verify_and_plan_print_the_certificate(command):
    code, out, _ = command("verify", "-s", "1f1b", "-P", 2, "-M", 4)
    assert code == 0
    assert out.splitlines()[1].startswith(
        "certificate: complete, lifetime, rendezvous, one_queue, any_wait, order; programs sha256:"
    )
    answer = json.loads(command("verify", "-s", "1f1b", "-P", 2, "-M", 4, "--json", "--device", "one_queue")[1])
    assert (answer["accepted"], answer["device"]) == (True, ["one_queue"])
    plan = json.loads(command("plan", "-s", "1f1b", "-P", 2, "-M", 4, "--device", "one_queue", "--format", "json")[1])
    assert plan["certificate"]["digest"] == answer["digest"]


def test_verify_says_what_is_wrong_with_a_file_and_where(command, tmp_path):
    path = tmp_path / "plan.json"
    save_plan(edited(build_plan(PlanSpec("1f1b", 2, 1, 4)), 0, "drop FREE_F0.1"), path)
    code, out, _ = command("verify", "--import", path)
    assert code == 1
    assert "refused: rank 0: at the end of the plan, of chunk 0, microbatch 1" in out


def test_verify_under_the_rules_of_a_device(command, tmp_path):
    """A plan by name is lowered for these rules. A plan from a file is refused if it was not."""
    words = ("verify", "-s", "interleaved_1f1b", "-P", 2, "-M", 4)
    code, out, _ = command(*words, "--device", "static_buffers,one_queue", "--device", "device_sync")
    assert code == 0
    assert "deadlock-free under one_queue and device_sync and static_buffers, every send waited" in out
    path = tmp_path / "plan.json"
    save_plan(build_plan(PlanSpec("interleaved_1f1b", 2, 2, 4)), path)
    assert command("verify", "--import", path, "--device", "rendezvous,one_queue")[0] == 0
    code, out, _ = command("verify", "--import", path, "--device", "device_sync")
    assert code == 1
    assert "refused: deadlock under device_sync: rank 0 waits at F0.1, which synchronises the device, for rank 1" in out
    assert_refused(command("verify", "--device", "one_queue,fast"), 2, "device rule 'fast' is not known; it is one of")


# --- refusals, and the command as a process


STRANGE = "\x1b]0;owned\x07\r\x9b2J\u202e\ud800"


@pytest.mark.parametrize("command_line", ["verify", "simulate", "draw", "plan"])
@pytest.mark.parametrize("place", ["op", "tensor", "remark", "schedule", "policy", "key", "placement", "name", "text"])
def test_a_file_of_a_strangers_reaches_the_terminal_as_text_only(command, tmp_path, command_line, place):
    content = json.loads(format_plan(build_plan(PlanSpec("1f1b", 2, 1, 2)), "json"))
    if place in ("schedule", "policy"):
        content["spec"][place] += STRANGE
    elif place == "name":
        content["spec"]["policy"] = "quick"
    elif place in ("remark", "placement"):
        content[place] += STRANGE
    elif place == "key":
        content["spec"][STRANGE] = 1
    else:
        content["programs"][1][0][place] = STRANGE
    path = tmp_path / ("plan\x1b[2J\x9b.json" if place == "name" else "plan.json")
    path.write_text(f"0F0,{STRANGE[:-1]}\n" if place == "text" else json.dumps(content), encoding="utf-8")
    code, out, err = command(command_line, "--import", path)
    assert (code > 0) == (place != "remark")
    assert out or err
    assert [c for c in out + err if not (c.isprintable() or c == "\n")] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plan", "verify", "simulate", "advise", "draw", "report"])
def test_examples_in_help_run(command, tmp_path, monkeypatch, name):
    """Runs each example that needs no trace, no arguments and no plan of the user. "all" leaves out schedules with a
    search: they take ten seconds here, and run in test_compare_all_names_what_cannot_be_had.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline_search, "_FIRST", 60.0)  # seconds; a first plan is built also on a loaded machine
    built = ",".join(name for name, family in SCHEDULES.items() if family.search is None)
    save_plan(build_plan(PlanSpec("1f1b", 2, 1, 4)), "mine.csv")
    code, said, _ = command(name, "--help")
    text = said.split("examples:")[1].split("exit codes")[0].replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines() if f"megatron-pp {name}" in line]
    assert (code, len(lines) > 0) == (0, True)
    for words in lines:
        if name != "report" and not {"--import", "--from-trace", "--megatron-args"} & set(words):
            quick = ["--budget-s", 0, "--jobs", 1] if name == "advise" else []
            assert command(*(built if word == "all" else word for word in words[1:]), *quick)[0] == 0, words


def test_as_a_module_it_needs_no_torch():
    """``python -m megatron_pp`` runs if torch cannot be imported."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['megatron-pp', 'draw', '-P', '2', '-M', '2'];"
        "import runpy; runpy.run_module('megatron_pp', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "rank 1" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("what", ["plan -P 8 -M 512", "draw -P 8 -M 512", "draw --style grid -P 8 -M 64"])
def test_a_reader_that_has_seen_enough_is_no_error(what):
    pipe = f"{sys.executable} -m megatron_pp {what} | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", pipe], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("what", ["plan", "draw", "simulate --json", "verify", "plan -o /dev/stdout --format json"])
def test_a_full_disk_is_reported_in_one_line(what):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_pp", *what.split()], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"cannot be written (No space left on device)" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("plain", ["NO_COLOR", "--no-colour", None])
def test_colours_are_left_out_where_the_environment_or_the_user_says_so(plain):
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"FORCE_COLOR": "1", "TERM": "xterm"}
    environment |= {plain: "1"} if plain == "NO_COLOR" else {}
    flags = ["--no-colour"] if plain == "--no-colour" else []
    line = [sys.executable, "-m", "megatron_pp", "draw", *flags]
    shown = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    assert ("\x1b[37;44mF0" in shown) == (plain is None)
    assert "B0==" in shown


@pytest.mark.slow
def test_tensors_that_skip_stages_are_counted(command):
    """arXiv 2603.15031, section 4.1, has 496 blocks per microbatch without a cache and 220 with a cache; on a hop 31
    and
    8."""
    line = ["-s", "interleaved_1f1b", "-P", "8", "-V", "4", "-M", "8", "--skip-tensors", "blocks"]
    head = command("plan", *line)[1].splitlines()[1]
    assert "220 sent per microbatch, at most 8 on a hop; without a cache 496 (31)" in head
    found = json.loads(command("simulate", *line, "--skip-cache", "all", "--json")[1])["skip_tensors"]
    assert (found["cache"], found["messages"], found["peak"]) == ("all", 196, 7)
    assert found["by_cache"]["none"] == {"messages": 496, "peak": 31}
    assert "skip_tensors" not in json.loads(command("simulate", "-P", "2", "--json")[1])


def test_a_schedule_that_a_module_registers_is_named_by_both(command, tmp_path, monkeypatch):
    (tmp_path / "my_schedules.py").write_text(
        "from megatron_pp.plan.orders.family import Family\n"
        "from megatron_pp.plan.orders import SCHEDULES, register\n"
        "register(Family('mine', SCHEDULES['1f1b'].orders, source='here', summary='1F1B again', chunks=1))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with mock.patch.dict(SCHEDULES), mock.patch.dict(sys.modules):
        code, out, _ = command("draw", "-s", "my_schedules:mine", "-P", 2, "-M", 4, "-o", "mine.html")
        assert (code, out) == (0, "wrote mine.html\n")
        assert "mine P=2" in command("verify", "-s", "my_schedules:mine", "-P", 2, "-M", 4)[1]
        assert "mine" in command("simulate", "--compare", "1f1b,my_schedules:mine", "-P", 2, "-M", 4)[1]
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize("form", ["json", "csv", "txt"])
def test_plan_says_what_it_has_written(command, tmp_path, form):
    assert command("plan", "-o", tmp_path / f"plan.{form}")[:2] == (0, f"wrote {tmp_path}/plan.{form}\n")
    out = command("plan", "--format", "json", "-o", "/dev/null")[1]
    assert out == ""


def test_ctrl_c_is_reported_in_one_line(command, monkeypatch):
    def run(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "run", run)
    assert_refused(command("verify"), 130, "megatron-pp verify: ended by Ctrl-C")


def test_ctrl_c_while_modules_are_imported_too(command, monkeypatch):
    def imported(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "_command", imported)
    assert_refused(command("verify"), 130, "megatron-pp: ended by Ctrl-C")


def test_a_closed_output_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["verify", "-P", "2", "-M", "2"]) == 0


@pytest.mark.parametrize(("is_terminal", "lines"), [(True, 3), (False, 1)])
def test_numbers_of_a_table_are_never_broken(monkeypatch, is_terminal, lines):
    """Sentences are wrapped on a terminal, in columns that are wide enough to read on any terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=20, color_system=None)
    why = "waits for messages in flight, and then for late peers"
    print_table(console, "", ["schedule", "step ms", "why"], [["interleaved_zb V=4 M=128", "~12345.6", why]])
    text = console.file.getvalue()
    assert "interleaved_zb V=4 M=128" in text
    assert "~12345.6" in text
    words = [word for word in why.split() if word != "in"]  # this word is also in the name
    assert sum(any(word in line for word in words) for line in text.splitlines()) == lines
