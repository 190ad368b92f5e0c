"""No option is ignored: it changes the answer, or it is refused by name. The sizes of a schedule file may be left
out."""

from __future__ import annotations

import re
import shlex

import pytest

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.tools.cli import draw, plan, report, simulate, verify
from megatron_pp.tools.cli.options.parser import parse
from testkit.inputs.plan_text import save_plan
from tests.unit_tests.tools.cli.conftest import assert_refused

pytestmark = pytest.mark.usefixtures("files")
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
    "--modules": "a=0; b=1; a>b", "--skip-tensors": "a=0>1", "--skip-cache": "all",
    "--sequence-slices": "2", "--attention-share": "0.5", "--output-ms": "1.5",
    "--max-ctas": "3", "--context-mb": "100", "--gpu": "h100",
    "--megatron-args": "--num-layers 8 --hidden-size 128 --seq-length 128 --num-attention-heads 8 --swiglu",
    "--fsdp-collectives": "zero3", "--fsdp-max-active-stages": "2", "--unshard-ms": "1", "--reduce-grad-ms": "2",
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
    "plan --modules 'a=0; b=1,2; a>b' -M 4",
    "plan --list",
)
TIMES = "--forward-ms 1 --backward-ms 2 --p2p-ms 0.1 --activation-mb 0.2 --bandwidth 0.1"
SIZES = "--layers 4 --hidden-size 64 --seq-length 64 --attention-heads 4 --recompute none --tensor-parallel 2"
SIMULATIONS = (
    f"simulate -s seq_1f1b -P 2 -M 4 --sequence-slices 2 {TIMES} {SIZES} --json",
    f"simulate -s interleaved_1f1b -P 2 -V 2 -M 8 {TIMES} {SIZES} --json",
    f"simulate -s zb_h1 -P 2 -M 4 {TIMES} {SIZES} --json",
    f"simulate -s gpipe -P 2 -M 4 {TIMES} {SIZES} --memory --json",
    f"simulate -s pipe_offload -P 2 -V 2 -M 4 {TIMES} {SIZES} --json",
    f"simulate --compare interleaved_1f1b,zb_h1 -P 2 -V 2 -M 8 {TIMES} {SIZES} --json",
)


def options_of(name: str) -> dict[str, str]:
    """All options of a command that change its answer: name of the value -> spelling."""
    spelling = parse({name: COMMANDS[name]}, [name, "FOLDER"] if name == "report" else [name]).spelling
    return {dest: option for dest, option in spelling.items() if dest not in OUTSIDE}


def printed_by(command, line: str) -> str:
    code, out, err = command(*shlex.split(line))
    assert code == 0, err
    return out


def assert_not_ignored(command, line: str, option: str, before: str) -> None:
    """Asserts that the option changes the output or is refused. ``before`` is the output without the option."""
    words = [option, VALUES[option]] if option in VALUES else [option]
    code, out, err = command(*shlex.split(line), *words)
    if code == 2:
        assert (out, err.count("\n")) == ("", 1)
    else:
        group = re.compile(r" group=\d+")  # the first line has it also if the schedule has no groups
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
    """Options of ``plan`` are tested with ``plan``, because some of them do not change a simulation's numbers."""
    before = printed_by(command, line)
    for dest, option in options_of("simulate").items():
        # --gloo: only there do both directions of a link meet. --keep-outputs: only there are they many at the peak.
        changes = {"gloo": "interleaved" in line, "keep_outputs": "gpipe" in line}
        changes |= {"memory": "--memory" not in line, "json": False}
        if dest not in options_of("plan") and changes.get(dest, True):
            assert_not_ignored(command, line, option, before)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_value_to_try(name):
    switches = {
        *("--forward-only", "--variable-shapes", "--param-sync", "--compute-only", "--list", "--keep-outputs"),
        "--memory",
        *("--gloo", "--sequence-parallel", "--optimizer-bypass", "--json", "--dark"),
    }
    assert set(options_of(name).values()) <= switches | set(VALUES)


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


def test_files_of_different_sizes_are_not_compared(command):
    save_plan(build_plan(PlanSpec("gpipe", 2, 1, 3)), "three.csv")
    words = ("compute.csv is a schedule of 4 microbatches on 2 ranks, three.csv of 3 on 2",)
    assert_refused(command("simulate", "--compare", "compute.csv,three.csv"), 2, *words)
