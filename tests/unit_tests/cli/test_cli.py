"""The command: what it prints, what it writes, and how it refuses. Each call is a real one, in this process."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from megatron_pp.cli.terminal import print_table
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.compare import fitted
from megatron_pp.plan.costs import FREE, StageCosts
from megatron_pp.plan.measured import Measured
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.serialize import load_plan
from megatron_pp.plan.sim.simulate import simulate
from megatron_pp.plan.spec import PlanSpec
from tests.harness.plan_text import placed, save_plan, without
from tests.unit_tests.cli.conftest import assert_refused

MODEL = ["--layers", "16", "--hidden-size", "1024", "--seq-length", "1024", "--vocab-size", "32000"]


# --- plan


def test_plan_prints_one_line_per_rank_that_parses(command):
    code, out, _ = command("plan", "-s", "interleaved_1f1b", "-P", 2, "-V", 2, "-M", 4)
    plan = build_plan(PlanSpec("interleaved_1f1b", 2, 2, 4))
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
    assert command("plan", "-s", "zb_h1", "-P", 2, "-M", 4, "-o", path)[:2] == (0, "")
    assert load_plan(path) == build_plan(PlanSpec("zb_h1", 2, 1, 4))
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


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_verify_accepts_every_schedule(command, schedule):
    code, out, _ = command("verify", "-s", schedule, "-P", 4, "-M", 8)
    assert code == 0
    assert "deadlock-free, every send waited before its buffer is released; peak on rank" in out


def test_verify_and_plan_print_the_certificate(command):
    code, out, _ = command("verify", "-s", "1f1b", "-P", 2, "-M", 4)
    assert code == 0
    assert out.splitlines()[1].startswith("certificate: complete, lifetime, rendezvous, order; programs sha256:")
    answer = json.loads(command("verify", "-s", "1f1b", "-P", 2, "-M", 4, "--json", "--device", "one_queue")[1])
    assert (answer["accepted"], answer["device"]) == (True, ["one_queue"])
    plan = json.loads(command("plan", "-s", "1f1b", "-P", 2, "-M", 4, "--device", "one_queue", "--format", "json")[1])
    assert plan["certificate"]["digest"] == answer["digest"]


def test_verify_reads_a_plan_file_of_version_1(command, tmp_path):
    """As release 0.1 wrote it."""
    spec = {"schedule": "1f1b", "pipeline_size": 2, "num_chunks": 1, "num_microbatches": 1}
    programs = ["F0.0 SA0.0 RG0.0 DA0.0 WG0.0 GE0 B0.0", "RA0.0 WA0.0 F0.0 GE0 B0.0 SG0.0 DG0.0"]
    content = {"format": "megatron_pp.plan", "version": 1, "spec": spec, "placement": "loop", "remark": ""}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**content, "programs": programs}))
    code, out, _ = command("verify", "--import", path)
    assert (code, "deadlock-free" in out) == (0, True), out
    path.write_text(json.dumps({**content, "programs": [programs[0].replace("RG0.0 ", ""), programs[1]]}))
    assert_refused(command("simulate", "--import", path), 1, "refused: rank 0: WAIT_B0.0")


def test_verify_says_what_is_wrong_with_a_file_and_where(command, tmp_path):
    path = tmp_path / "plan.json"
    save_plan(without(build_plan(PlanSpec("1f1b", 2, 1, 4)), 0, "FREE_F0.1"), path)
    code, out, _ = command("verify", "--import", path)
    assert code == 1
    assert "refused: rank 0: at the end of the plan, of chunk 0, microbatch 1" in out


def test_verify_under_the_rules_of_a_device(command, tmp_path):
    """A plan by name is lowered for them; one from a file is refused where it was not."""
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


# --- simulate


def test_simulate_under_the_rules_of_a_device(command):
    words = [
        "simulate",
        "-s",
        "gpipe",
        "-P",
        2,
        "-M",
        4,
        "--forward-ms",
        1,
        "--backward-ms",
        2,
        "--p2p-ms",
        3,
        "--json",
    ]
    spans = {
        rule: json.loads(command(*words, "--device", rule)[1])["makespan"] for rule in ("rendezvous", "device_sync")
    }
    assert spans["rendezvous"] == json.loads(command(*words)[1])["makespan"] < spans["device_sync"]
    assert_refused(command(*words, "--device", "one_queue", "--gloo"), 2, "one_queue: gloo's transfers wait for no")


def test_simulate_gives_the_closed_form(command):
    arguments = ["simulate", "-s", "1f1b", "-P", "4", "-M", "16", "--forward-ms", "10", "--backward-ms", "20", "--json"]
    facts = json.loads(command(*arguments)[1])
    assert facts["makespan"] == pytest.approx((16 + 3) * 30)
    assert facts["bubble_share"] == pytest.approx(3 / 19)
    assert facts["peak_in_flight"] == [4, 3, 2, 1]
    assert len(facts["links"]) == 6


def test_simulate_weighs_what_waits_for_weight_gradients(command):
    arguments = ["simulate", "-s", "zb_h2", "-P", "3", "-M", "6", "--json"]
    model = ["--layers", "3", "--hidden-size", "64", "--seq-length", "64", "--recompute", "full"]

    def peak(*more):
        return json.loads(command(*arguments, *more)[1])["peak_activations"][2]

    assert peak("--weight-share", "1") == 5.0  # one in flight, four waiting
    assert peak("--weight-share", "0.5") == 3.0
    assert peak() == pytest.approx(1 + 4 * 32 / 34)
    assert peak(*model) > 4 * 15  # recomputed layers keep their input alone


def test_simulate_divides_a_ranks_time_over_its_chunks(command):
    arguments = [
        "simulate",
        "-s",
        "interleaved_1f1b",
        "-P",
        "4",
        "-V",
        "4",
        "-M",
        "8",
        "--forward-ms",
        "8",
        "--backward-ms",
        "16",
        "--json",
    ]
    assert json.loads(command(*arguments)[1])["makespan"] == pytest.approx((4 * 8 + 3) * 24 / 4)


def test_simulate_takes_times_per_stage_links_and_sizes(command):
    arguments = "simulate -s gpipe -P 2 -M 1 --forward-ms 1,2 --backward-ms 2,4 --activation-mb 1 --bandwidth 1"
    arguments += " --link 1-0:0.5:0.25 --json"
    facts = json.loads(command(*arguments.split())[1])
    # F 1, 1 MB at 1 GB/s = 1 ms, F 2, B 4, 0.5 + 4 ms back, B 2
    assert facts["makespan"] == pytest.approx(1 + 1 + 2 + 4 + 4.5 + 2)


def test_simulate_shows_tables_in_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = command("simulate", "-P", 4, *MODEL)
    assert code == 0
    assert "peak memory" in out or "peak" in out
    assert max(map(len, out.splitlines())) <= 80


def test_compare_ranks_under_a_memory_limit(command):
    arguments = ["simulate", "--compare", "gpipe,1f1b,zb_h1", "-P", 4, "-M", "8,32", *MODEL, "--json"]
    free = json.loads(command(*arguments)[1])
    assert [c["per_microbatch"] for c in free] == sorted(c["per_microbatch"] for c in free)
    assert all(c["refused"] is None for c in free)
    limit = sorted(c["peak_bytes"] for c in free)[2] / 2**30 + 0.01
    limited = json.loads(command(*arguments, "--memory-limit", limit)[1])
    fits = [c for c in limited if c["refused"] is None]
    assert len(fits) >= 2
    assert limited[: len(fits)] == fits
    assert all(c["peak_bytes"] <= limit * 2**30 for c in fits)
    assert "GiB" in limited[-1]["refused"]
    assert command(*arguments, "--memory-limit", 0.001)[0] == 1


@pytest.mark.slow
def test_compare_all_names_what_cannot_be_had(command):
    code, out, _ = command("simulate", "--compare", "all", "-P", 4, "-V", "2,3", "-M", 5, *MODEL)
    assert code == 0
    assert "16 layers do not divide over 12 stages" in out


def test_simulate_says_how_far_a_plan_is_from_the_bound(command):
    arguments = ["simulate", "-s", "1f1b", "-P", 4, "-M", 16]
    code, out, _ = command(*arguments)
    assert code == 0
    assert "within 11.8% of the bound, 51 slots (work of rank 3)" in out  # 57 slots; ZB-H1 takes 51
    bound = json.loads(command(*arguments, "--json")[1])["bound"]
    assert (bound["step"], bound["reason"], bound["excess"]) == (51, "work of rank 3", pytest.approx(57 / 51 - 1))
    ranked = json.loads(command("simulate", "--compare", "1f1b,zb_h1", "-P", 4, "-M", 16, "--json")[1])
    assert [c["bound"]["excess"] for c in ranked] == [0, pytest.approx(57 / 51 - 1)]


COSTS = ["--forward-ms", 1, "--backward-ms", 1.3, "--weight-ms", 0.8, "--p2p-ms", 0.2]


@pytest.mark.slow
def test_auto_is_searched_for_the_costs_that_are_given(command):
    """As from Python with the same values; without costs as ever."""
    measured = Measured(1.0, 1.3, 0.8, backward=2.1, transfer=0.2, memory_limit=4.0, weight_activation=1.0)
    expected = build_plan(PlanSpec("auto", 4, 1, 8, measured=measured))
    step = simulate(expected, measured.costs(4), measured.network()).makespan
    alone = json.loads(command("simulate", "-s", "auto", "-P", 4, "-V", 1, "-M", 8, *COSTS, "--json")[1])
    ranked = json.loads(command("simulate", "--compare", "auto", "-P", 4, "-V", 1, "-M", 8, *COSTS, "--json")[1])
    assert alone["makespan"] == ranked[0]["makespan"] == step
    spec = PlanSpec("auto", 4, 1, 8)
    assert fitted(spec, StageCosts.uniform(4, 4.0, 4.0, 4.0), FREE) == spec


@pytest.mark.slow
def test_auto_is_searched_under_the_memory_limit(command):
    """Where 1F1B does not fit, ``auto`` does: its search knows the limit, and what messages take off it."""
    arguments = ["simulate", "--compare", "auto,1f1b", "-P", 2, "-V", 1, "-M", 4, *COSTS, *MODEL[:6], "--json"]
    rows = {c["schedule"]: c for c in json.loads(command(*arguments)[1])}
    limit = rows["1f1b"]["peak_bytes"] - 2**20
    rows = {c["schedule"]: c for c in json.loads(command(*arguments, "--memory-limit", limit / 2**30)[1])}
    assert rows["1f1b"]["refused"]
    assert rows["auto"]["refused"] is None
    assert rows["auto"]["peak_bytes"] <= limit
    assert rows["auto"]["bound"]["step"] <= rows["auto"]["makespan"]


# --- draw


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
    """F, I and W of a rank's share take 1 slot, a whole backward 2, half a share half: 1F1B takes 3 (M + P - 1)."""
    _, out, _ = command("draw", "--style", "grid", "-s", "1f1b,zb_h1,zb_v", "-P", 4, "-M", 4)
    assert "a microbatch on a rank takes F 1, B 2, I 1, W 1 slots" in " ".join(out.split())
    rows = {line.split()[0]: line.split() for line in out.splitlines() if "%" in line}
    assert rows["1f1b"] == ["1f1b", "21", *["9"] * 4, "42.9%", "4", "3", "2", "1", "4", "8", "8", "4"]
    assert rows["zb_h1"][1:6] == ["15", *["3"] * 4]
    assert rows["zb_v"][1:6] == ["13.5", *["1.5"] * 4]
    assert rows["zb_h1"][7:11] == ["4"] * 4  # a waiting weight gradient is in flight too, as for simulate


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
    assert "a Chrome trace holds one schedule" in error


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
        assert error == "megatron-pp draw: SVG and PNG pictures need matplotlib: pip install 'megatron-pp[viz]'\n"
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


def test_what_is_written_to_a_link_or_a_pipe_leaves_it_one(command, tmp_path):
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


# --- refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("plan -s nonsense", ["'nonsense' is not known; it is one of gpipe"]),
        ("plan -P 0", ["pipeline size is 0"]),
        ("plan -P -3", ["-3", "megatron-pp plan --help"]),
        ("plan --frobnicate", ["option --frobnicate is not known", "megatron-pp plan --help"]),
        ("plan -s 1f1b -V 3", ["has 1 model chunk(s) a rank, not 3"]),
        ("plan --import nowhere.csv", ["nowhere.csv", "cannot be read"]),
        ("plan --import nowhere.csv -P 4", ["--import brings its own pipeline size"]),
        ("plan -o plan.xyz", ["not as 'xyz'"]),
        ("plan -o no/such/folder/plan.csv", ["no/such/folder/plan.csv", "cannot be written"]),
        ("simulate --forward-ms 3", ["--forward-ms and --backward-ms go together"]),
        ("simulate --forward-ms 1,2 --backward-ms 1,2,3", ["one length; --forward-ms has 2, --backward-ms has 3"]),
        ("simulate -P 4 --forward-ms 1,2,3 --backward-ms 1,2,3", ["times of 3 stages cannot be regrouped into 4"]),
        ("simulate --bandwidth 10", ["--bandwidth needs the size of a message"]),
        ("simulate --layers 4", ["also needs --hidden-size and --seq-length"]),
        ("simulate --layers 6 --hidden-size 8 --seq-length 8", ["6 layers do not divide over 4 stages"]),
        ("simulate --memory-limit 3", ["--memory-limit is for --compare"]),
        ("simulate --compare 1f1b --memory-limit 3", ["--memory-limit needs the shape of the model"]),
        ("simulate --compare 1f1b -s gpipe", ["--schedule does not go with --compare, which names the schedules"]),
        ("simulate --compare 1f1b,nonsense", ["'nonsense' is not known"]),
        ("simulate --link 3-4:1", ["--link 3-4 is no link between two of 4 ranks"]),
        ("simulate --link 1-1:1", ["--link 1-1 is no link between two of 4 ranks"]),
        ("simulate --link 3-4", ["argument --link", "'' is not a number"]),
        ("simulate -M 4,8", ["-s, -V and -M name 2 plans, and this takes one"]),
        ("simulate --from-trace .", ["there are no traces"]),
        ("draw -o plan.xyz", ["drawings are written as .svg, .html", "not as '.xyz'"]),
        ("draw --width 19", ["--width is 19; text needs at least 20"]),
        ("draw --width 200 -o plan.png", ["--width is 200; png needs at least 300"]),
        ("draw --style svg", ["needs a file to write to: -o FILE"]),
        ("draw --style grid -s naive -V 2", ["schedule naive has 1 model chunk(s) a rank, not 2"]),
        ("report .", ["there are no traces"]),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(command, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert_refused(command(*arguments.split()), 2, *words)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", ["-1", "x", "nan", "inf", "1,,2"])
def test_numbers_that_are_none_are_refused_by_the_parser(command, text):
    code, _, err = command("simulate", f"--forward-ms={text}", "--backward-ms", "1")
    assert code == 2
    assert err.count("\n") == 1
    assert "is not a number of at least 0" in err


def test_a_plan_that_does_not_verify_is_not_simulated(command, tmp_path):
    path = tmp_path / "plan.json"
    save_plan(without(build_plan(PlanSpec("gpipe", 2, 1, 2)), 1, "RECV_F0.0"), path)
    assert_refused(command("simulate", "--import", path), 1, "refused: rank 1: WAIT_F0.0")


@pytest.mark.parametrize("name", ["plan", "verify", "simulate", "advise", "draw", "report"])
def test_help_has_examples_that_work(command, name):
    code, out, _ = command(name, "--help")
    assert code == 0
    assert f"megatron-pp {name}" in out.split("examples:")[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plan", "verify", "simulate", "draw"])
def test_examples_in_help_run(command, tmp_path, monkeypatch, name):
    """Every example that needs no trace and no whole plan of the user's."""
    monkeypatch.chdir(tmp_path)
    save_plan(build_plan(PlanSpec("1f1b", 2, 1, 4)), "mine.csv")
    text = command(name, "--help")[1].split("examples:")[1].split("exit codes")[0].replace("\\\n", " ")
    lines = [line.split("(")[0].split() for line in text.splitlines() if "megatron-pp" in line]
    for words in lines:
        if not {"--import", "--from-trace"} & set(words):
            assert command(*words[1:])[0] == 0, words


def test_as_a_module_it_needs_no_torch():
    """``python -m megatron_pp``, with torch made impossible to import."""
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
def test_a_full_disk_is_said_in_one_line(what):
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
    """arXiv 2603.15031, section 4.1: 496 blocks a microbatch without a cache, 220 with one; 31 and 8 on a hop."""
    line = ["-s", "interleaved_1f1b", "-P", "8", "-V", "4", "-M", "8", "--skip-tensors", "blocks"]
    head = command("plan", *line)[1].splitlines()[1]
    assert "220 sent per microbatch, at most 8 on a hop; without a cache 496 (31)" in head
    found = json.loads(command("simulate", *line, "--skip-cache", "all", "--json")[1])["skip_tensors"]
    assert (found["cache"], found["messages"], found["peak"]) == ("all", 196, 7)
    assert found["by_cache"]["none"] == {"messages": 496, "peak": 31}
    assert "skip_tensors" not in json.loads(command("simulate", "-P", "2", "--json")[1])


@pytest.mark.parametrize(("is_terminal", "lines"), [(True, 3), (False, 1)])
def test_numbers_of_a_table_are_never_broken(monkeypatch, is_terminal, lines):
    """Sentences are, on a terminal, and into parts that can be read however narrow it is."""
    monkeypatch.delenv("COLUMNS", raising=False)
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=20, color_system=None)
    why = "waits for messages in flight, and then for late peers"
    print_table(console, "", ["schedule", "step ms", "why"], [["interleaved_zb V=4 M=128", "~12345.6", why]])
    text = console.file.getvalue()
    assert "interleaved_zb V=4 M=128" in text
    assert "~12345.6" in text
    assert sum(any(word in line for word in why.split()) for line in text.splitlines()) == lines
