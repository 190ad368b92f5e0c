"""Numbers on pages equal those of the command that the page names next to them; answers and pictures that take seconds
equal the output of their command. test_printed.py runs the commands, and test_pages.py compares the other parts that
commands make.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.tools.cli import main
from scripts.made_parts import table_in
from testkit.pages import ROOT
from testkit.printed import printed

FEATURES = "docs/features.md"
SIMULATE = "megatron-pp simulate "


def rows_behind(page: str, words: str) -> list[list[str]]:
    """Return the rows of the first table after ``words`` on the page, without its head."""
    _, found, rest = (ROOT / page).read_text(encoding="utf-8").partition(words)
    assert found, f"{page} does not say {words!r}"
    return table_in(rest)[1:]


def said(command: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(shlex.split(command)[1:]) == 0, command
    return out.getvalue()


def simulated(command: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(said(f"{command} --json"))
    return found


def named(page: str, start: str) -> str:
    """Return the one command on the page that begins with ``start``, in a sentence or as a block."""
    text = re.sub(r"\s*\\?\n\s*", " ", (ROOT / page).read_text(encoding="utf-8"))
    commands = re.findall(rf"`({re.escape(start)}[^`]*)`", text) or [
        one.text for one in printed(page) if one.text.startswith(start)
    ]
    assert len(set(commands)) == 1, commands
    return commands[0]


def step(command: str) -> float:
    makespan = simulated(command)["makespan"]
    assert isinstance(makespan, float | int)
    return float(makespan)


def peak(command: str, name: str) -> float:
    ranks = simulated(command)[name]
    assert isinstance(ranks, list)
    return max(ranks)


def number(cell: str) -> float:
    return float(cell.replace(",", "").rstrip("%"))


@pytest.mark.parametrize("row", rows_behind(FEATURES, "`pipe_offload` offloads half"), ids=lambda row: row[0])
def test_offloaded_steps_and_their_peaks(row: list[str]) -> None:
    schedule, *cells = row
    words = schedule.replace("`", "").replace(",", "")
    offloads = "offload" in words
    command = f"{SIMULATE}-s {words} -P 8 -V 4 -M 32 --forward-ms 4 --backward-ms 4" + " --offload-ms 4" * offloads
    found = [step(command), step(f"{command} --gloo"), peak(command, "peak_activations")]
    found.append(peak(command, "peak_host_activations"))
    assert found == [number(cell.replace("-", "0")) for cell in cells]


@pytest.mark.parametrize("row", rows_behind(FEATURES, "An example with P = 8 and M = 4"), ids=lambda row: row[0])
def test_slices_shrink_bubble_and_memory(row: list[str]) -> None:
    schedule, bubble, kept = row
    found = re.fullmatch(r"`(\w+)`(?: with (\d+) slices)?", schedule)
    assert found is not None
    command = named(FEATURES, SIMULATE + "-s seq_1f1b").replace("seq_1f1b", found[1])
    of_this = simulated(
        re.sub(r" --sequence-slices \d+", f" --sequence-slices {found[2]}" if found[2] else "", command)
    )
    in_flight = of_this["peak_in_flight"]
    assert isinstance(in_flight, list)
    assert f"{of_this['bubble_share']:.1%}" == bubble
    assert f"{in_flight[0]:.3g}" == f"{number(kept):.3g}"


@pytest.mark.parametrize("row", rows_behind(FEATURES, "**What it gains.**"), ids=lambda row: row[0])
def test_steps_with_a_split_output_layer(row: list[str]) -> None:
    schedule, on_nccl, on_gloo = row
    command = named(FEATURES, SIMULATE + "-s vocab_1f1b").replace("vocab_1f1b", schedule.strip("`"))
    assert [step(command), step(f"{command} --gloo")] == [number(on_nccl), number(on_gloo)]


@pytest.mark.parametrize("row", rows_behind(FEATURES, "where an unshard takes as long"), ids=lambda row: row[0])
def test_steps_of_sharded_stages(row: list[str]) -> None:
    preset, on_nccl, on_gloo, unshards = row
    setting = preset.replace("`", "").replace(",", "")
    command = named(FEATURES, SIMULATE + "-s interleaved_1f1b -P 4 -V 4").replace("zero3", setting)
    assert [step(command), step(f"{command} --gloo")] == [number(on_nccl), number(on_gloo)]
    plan = said(command.replace("simulate", "plan").replace(" --unshard-ms 4", ""))
    assert len(re.findall(r"(?<!_)UNSHARD", plan)) == number(unshards)


def test_bubbles_with_the_optimizer_bypass() -> None:
    rows = rows_behind("docs/cli.md", "## The optimizer bypass")
    command = named("docs/cli.md", SIMULATE + "--compare zb_h2,")
    assert [row[0].strip("`") for row in rows] == re.findall(r"--compare (\S+)", command)[0].split(",")
    for schedule, alone, bubble, in_a_row, bubble_in_a_row in rows:
        one = f"-s {schedule.strip('`')} --forward-ms 1 --backward-ms 1 --weight-ms 1"
        found = simulated(re.sub(r"--compare \S+", one, command))
        repeated = found["optimizer_bypass"]
        assert isinstance(repeated, dict)
        assert (found["makespan"], repeated["period"]) == (number(alone), number(in_a_row)), schedule
        assert found["bubble_share"] == pytest.approx(number(bubble) / 100, abs=5e-4), schedule
        assert repeated["bubble_share"] == pytest.approx(number(bubble_in_a_row) / 100, abs=5e-4), schedule


@pytest.mark.parametrize("row", rows_behind("docs/cli.md", "## Large plans")[:2], ids=lambda row: " x ".join(row[:3]))
def test_large_plans_have_as_many_instructions(row: list[str]) -> None:
    """This checks the two smaller plans; the others take as long as the page says."""
    ranks, chunks, microbatches = (int(cell) for cell in row[:3])
    shape = {"pipeline_size": ranks, "num_chunks": chunks, "num_microbatches": microbatches}
    plan = build_plan(PlanSpec("interleaved_1f1b", device=("one_queue", "any_wait"), **shape))
    assert sum(len(program) for program in plan.programs) == number(row[3])


@pytest.mark.parametrize("page", ["docs/bound.md", "docs/schedules.md"])
def test_printed_output_follows_its_line_on_the_page(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A line has the form ``print(...)  # the output``, with or without words after a colon."""
    programs = [one.text for one in printed(page) if one.language == "python" and "print(" in one.text]
    assert programs
    for program in programs:
        shown = re.findall(r"^print\(.*\) +# ([^:\n]+)", program, re.MULTILINE)
        exec(compile(program, page, "exec"), {"__name__": "page"})
        assert capsys.readouterr().out.splitlines() == shown != []


def test_advise_answers_what_its_page_shows() -> None:
    """Compare the answer and the picture, in 15 s of CPU time, or up to 10 minutes on a busy machine."""
    command = [sys.executable, str(ROOT / "scripts" / "page_answers.py"), "--check", "advise"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_unequal_microbatches_take_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = "docs/advise.md"
    command = next(one.text for one in printed(page) if "--microbatch-costs" in one.text)
    times = re.search(r": ([\d.]+) ms; ([\d.]+) ms as given", said(command))
    assert times is not None
    section = (ROOT / page).read_text(encoding="utf-8").partition("## Unequal")[2]
    assert [time for time in times.groups() if f"{float(time):.1f} ms" not in section] == []
