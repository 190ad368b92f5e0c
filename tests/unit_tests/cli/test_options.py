"""No option is ignored: it changes the answer, or is refused by name. Sizes of a schedule file need not be given."""

from __future__ import annotations

import re
import shlex

import pytest

from megatron_pp.cli import draw, plan, report, simulate, verify
from megatron_pp.cli.parser import parse
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from tests.harness.plan_text import save_plan
from tests.unit_tests.cli.conftest import assert_refused

COMMANDS = {"plan": plan, "verify": verify, "simulate": simulate, "draw": draw, "report": report}
OUTSIDE = {"help", "no_colour", "output"}  # of every command, and where the answer goes
VALUES = {  # a switch has none
    "-s": "zb_h1", "--schedule": "zb_h1", "--pipeline-size": "3", "--num-chunks": "3", "--num-microbatches": "5",
    "--group-size": "3", "--policy": "batched", "--channels": "shared", "--release-after": "2", "--lookahead": "0",
    "--device": "device_sync", "--grad-sync": "explicit", "--import": "other.csv", "--format": "torch-csv-comms",
    "--forward-ms": "3", "--backward-ms": "7", "--weight-ms": "1", "--p2p-ms": "2", "--bandwidth": "3",
    "--activation-mb": "9", "--link": "0-1:5", "--layers": "8", "--hidden-size": "128", "--seq-length": "128",
    "--micro-batch-size": "2", "--attention-heads": "8", "--ffn-hidden-size": "100", "--vocab-size": "1000",
    "--tensor-parallel": "4", "--context-parallel": "2", "--data-parallel": "2", "--recompute": "full",
    "--from-trace": "traces", "--run": "one", "--rank": "1", "--step": "0", "--compare": "1f1b",
    "--memory-limit": "0", "--weight-share": "0.3", "--style": "grid", "--width": "400",
    "--skip-tensors": "a=0>1", "--skip-cache": "all",
    "--sequence-slices": "2", "--attention-share": "0.5", "--output-ms": "1.5",
    "--offload-chunks": "1", "--offload-slots": "2", "--offload-ms": "4", "--offload-bandwidth": "1",
}  # fmt: skip
PLANS = (
    "plan -s 1f1b -P 2 -V 1 -M 4",
    "plan -s interleaved_1f1b -P 2 -V 2 -M 6",
    "plan -s 1f1b -P 2 -M 4 --policy plain",
    "plan -s seq_1f1b -P 2 -M 4",
    "plan -s interleaved_1f1b -P 2 -V 2 -M 6 --offload-chunks 2",
    "plan -s compute.csv",
    "plan --import compute.csv --format json",
    "plan --import comms.csv --format json",
    "plan --import whole.json --format json",
    "plan --list",
)
TIMES = "--forward-ms 1 --backward-ms 2 --p2p-ms 0.1 --activation-mb 0.2 --bandwidth 0.1"
SIZES = "--layers 4 --hidden-size 64 --seq-length 64 --attention-heads 4 --recompute none --tensor-parallel 2"
SIMULATIONS = (
    f"simulate -s seq_1f1b -P 2 -M 4 --sequence-slices 2 {TIMES} {SIZES} --json",
    f"simulate -s interleaved_1f1b -P 2 -V 2 -M 8 {TIMES} {SIZES} --json",
    f"simulate -s zb_h1 -P 2 -M 4 {TIMES} {SIZES} --json",
    f"simulate -s pipe_offload -P 2 -V 2 -M 4 {TIMES} {SIZES} --json",
    f"simulate --compare interleaved_1f1b,zb_h1 -P 2 -V 2 -M 8 {TIMES} {SIZES} --json",
)


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """In the working folder: two compute orders, the first with communication, and as a whole plan."""
    monkeypatch.chdir(tmp_path)
    order = build_plan(PlanSpec("1f1b", 2, 1, 4))
    save_plan(order, "compute.csv")
    save_plan(order, "comms.csv", "torch-csv-comms")
    save_plan(order, "whole.json")
    save_plan(build_plan(PlanSpec("gpipe", 2, 1, 4)), "other.csv")


def options_of(name: str) -> dict[str, str]:
    """All options of a command that ask for something: name of the value -> spelling."""
    spelling = parse({name: COMMANDS[name]}, [name, "FOLDER"] if name == "report" else [name]).spelling
    return {dest: option for dest, option in spelling.items() if dest not in OUTSIDE}


def printed_by(command, line: str) -> str:
    code, out, err = command(*shlex.split(line))
    assert code == 0, err
    return out


def assert_not_ignored(command, line: str, option: str, before: str) -> None:
    """``before``: what the line prints without the option."""
    words = [option, VALUES[option]] if option in VALUES else [option]
    code, out, err = command(*shlex.split(line), *words)
    if code == 2:
        assert (out, err.count("\n")) == ("", 1)
    else:
        group = re.compile(r" group=\d+")  # in the first line also where a schedule has no groups
        assert group.sub("", out) != group.sub("", before), f"{line} {' '.join(words)}: ignored"


@pytest.mark.parametrize("line", PLANS)
def test_options_of_a_plan(command, line):
    before = printed_by(command, line)
    for dest, option in options_of("plan").items():
        fits_already = (dest == "device" and "interleaved" not in line) or (
            dest == "variable_shapes" and "plain" in line
        )
        if (dest, line) != ("list", "plan --list") and not fits_already:
            assert_not_ignored(command, line, option, before)


@pytest.mark.slow
@pytest.mark.parametrize("line", SIMULATIONS)
def test_options_of_a_simulation(command, line):
    """Those that ``plan`` has are tested there: not each of them shows in a simulation's numbers."""
    before = printed_by(command, line)
    for dest, option in options_of("simulate").items():
        announced = "interleaved" in line  # --gloo: only there do both directions of a link meet
        if dest not in options_of("plan") and dest != "json" and (dest != "gloo" or announced):
            assert_not_ignored(command, line, option, before)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_value_to_try(name):
    switches = {
        *("--forward-only", "--variable-shapes", "--param-sync", "--compute-only", "--list", "--keep-outputs"),
        *("--gloo", "--sequence-parallel", "--optimizer-bypass", "--json", "--dark"),
    }
    assert set(options_of(name).values()) <= switches | set(VALUES)


@pytest.mark.parametrize("option", ["--from-trace", "--run", "--rank", "--step"])
def test_a_grid_takes_no_trace(command, option):
    assert_refused(command("draw", "--style", "grid", option, VALUES[option]), 2, f"{option} is for drawings in time")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("verify --p2p-ms 3", ["is an option of simulate and advise and draw, not of verify", "verify --help"]),
        ("plan --optimizer-bypass", ["--optimizer-bypass is an option of simulate, not of plan"]),
        ("verify extra", ["'extra' is one argument too many"]),
        ("draw --step 3", ["--step chooses within the traces that --from-trace names"]),
        ("draw --dark", ["--dark is for", "not text"]),
        ("draw -o a.html --width 900", ["--width is not for html"]),
        ("draw --from-trace traces -P 4", ["--pipeline-size does not go with --from-trace"]),
        ("simulate --from-trace traces --p2p-ms 1", ["--p2p-ms does not go with --from-trace"]),
        ("simulate --compare 1f1b --weight-share 1", ["--weight-share is for a single plan"]),
        ("simulate -s 1f1b --weight-share 1", ["--weight-share weighs weight gradients that wait; 1f1b has none"]),
        ("simulate --compare gpipe,1f1b -V 2", ["schedule gpipe has 1 model chunk(s) a rank, not 2"]),
        ("simulate --vocab-size 9", ["also needs --layers and --hidden-size and --seq-length"]),
        ("simulate --sequence-parallel --layers 4 --hidden-size 8 --seq-length 8", ["needs --tensor-parallel above 1"]),
        ("plan -s gpipe --group-size 2", ["--group-size is for schedules with groups (interleaved_1f1b", "not gpipe"]),
        ("plan --policy plain --lookahead 2", ["--lookahead is for --policy overlap, not plain"]),
        ("plan --channels shared --lookahead 2", ["--lookahead is for --channels one_way, not shared"]),
        ("plan --forward-only --grad-sync explicit", ["--grad-sync does not go with --forward-only"]),
        ("plan --param-sync", ["--param-sync marks the parameters of several model chunks"]),
        ("plan --skip-cache all", ["--skip-cache says what ranks keep of --skip-tensors, and there are none"]),
        ("plan -P 2 --skip-tensors a=0>2", ["stage 2 uses it; only stages behind it may, up to 1"]),
        ("plan --list -P 4", ["--pipeline-size does not go with --list"]),
        ("plan --compute-only --format json", ["--compute-only is for text, not json"]),
        ("plan --import whole.json --policy plain", ["--policy is plain; the plan in whole.json was lowered with"]),
        ("plan --import comms.csv --policy plain", ["comms.csv: the file says itself where it sends", "'plain'"]),
        ("plan --import whole.json --device one_queue", ["--device does not change whole.json"]),
    ],
)  # fmt: skip
def test_an_option_that_does_not_apply_is_refused_by_name(command, line, words):
    assert_refused(command(*line.split()), 2, *words)


# --- files as schedules


@pytest.mark.parametrize("line", ["plan", "verify", "simulate --json", "draw", "draw --style grid"])
@pytest.mark.parametrize("name", ["compute.csv", "whole.json"])
def test_sizes_are_those_of_the_file(command, line, name):
    code, out, err = command(*line.split(), "-s", name)
    assert (code, err) == (0, "")
    assert f"{name} P=2 V=1 M=4" in out
    assert command(*line.split(), "-s", name, "-P", 2, "-V", 1, "-M", 4)[1] == out


def test_names_beside_a_file_have_its_sizes(command):
    out = command("draw", "--style", "grid", "-s", "gpipe,compute.csv,interleaved_1f1b")[1]
    assert "gpipe P=2 V=1 M=4" in out
    assert "interleaved_1f1b P=2 V=2 M=4" in out
    assert command("simulate", "--compare", "all,compute.csv")[0] == 0


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("-P 3", "compute.csv is a schedule of 2 ranks; -P is 3"),
        ("-V 2", "schedule compute.csv has 1 model chunk(s) a rank, not 2"),
        ("-M 8", "compute.csv is a schedule of 4 microbatches; -M is 8"),
        ("--group-size 2", "--group-size is for schedules with groups"),
    ],
)
@pytest.mark.parametrize("name", ["plan", "verify", "simulate", "draw"])
def test_sizes_that_contradict_the_file_are_refused_with_both(command, name, flag, words):
    assert_refused(command(name, "-s", "compute.csv", *flag.split()), 2, words)


def test_files_of_two_sizes_do_not_stand_side_by_side(command):
    save_plan(build_plan(PlanSpec("gpipe", 2, 1, 3)), "three.csv")
    words = ("compute.csv is a schedule of 4 microbatches on 2 ranks, three.csv of 3 on 2",)
    assert_refused(command("simulate", "--compare", "compute.csv,three.csv"), 2, *words)


# --- names


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("plan -s 1F1B", "1f1b"),
        ("plan -s zbv", "zb_v"),
        ("plan -s dualpipe", "dualpipe_v"),
        ("plan -s Interleaved1F1B", "interleaved_1f1b"),
        ("plan -s naiv", "naive"),
        ("simulate --compare gpip,1f1b", "gpipe"),
        ("plan --policy batch", "batched"),
        ("plan --polcy batched", "--policy"),
        ("plan --device onequeue", "one_queue"),
        ("simualte", "simulate"),
        ("draw --style pgn", "png"),
    ],
)
def test_the_nearest_name_is_suggested(command, line, meant):
    assert_refused(command(*line.split()), 2, f"is not known (did you mean {meant}?)")
