"""Plans in files: what is written is read back equal; PyTorch's own files import; bad files are refused in one line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp.errors import ExchangeError, PlanError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.files import write_whole
from megatron_pp.plan.instruction import format_program
from megatron_pp.plan.measured import Measured
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.serialize import format_plan, load_plan, parse_plan
from megatron_pp.plan.spec import CHANNELS, POLICIES, PlanSpec
from megatron_pp.plan.verifier import verify
from tests.harness.plan_text import save_plan

TORCH_SCHEDULES = {
    "ScheduleGPipe": "loop",
    "Schedule1F1B": "loop",
    "ScheduleInterleaved1F1B": "loop",
    "ScheduleLoopedBFS": "loop",
    "ScheduleInterleavedZeroBubble": "loop",
    "ScheduleZBVZeroBubble": "v",
    "ScheduleDualPipeV": "v",
}


def small_plan(schedule="1f1b", p=2, v=1, m=3, **options):
    return build_plan(PlanSpec(schedule, p, v, m, **options))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    p=st.integers(1, 4),
    m=st.integers(1, 9),
    policy=st.sampled_from(POLICIES),
    channels=st.sampled_from(CHANNELS),
    forward_only=st.booleans(),
    form=st.sampled_from(["csv", "json"]),
)
def test_what_is_written_is_read_back_equal(name, p, m, policy, channels, forward_only, form):
    spec = PlanSpec(
        name, p, SCHEDULES[name].chunks or 2, m, policy=policy, channels=channels, forward_only=forward_only
    )
    try:
        plan = build_plan(spec)
    except PlanError:
        return  # some families want more microbatches than this
    assert parse_plan(format_plan(plan, form)) == plan


@pytest.mark.parametrize("form", ["csv", "json"])
def test_files_round_trip_and_leave_nothing_beside_them(tmp_path, form):
    plan = small_plan("interleaved_1f1b", 2, 2, 4, grad_sync="explicit", param_sync=True, policy="batched")
    path = tmp_path / f"plan.{form}"
    save_plan(plan, path)
    assert load_plan(path) == plan
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_compute_order_survives_pytorchs_format(name):
    plan = small_plan(name, 4, SCHEDULES[name].chunks or 2, 8)
    back = parse_plan(format_plan(plan, "torch-csv"))
    assert back.orders == plan.orders
    assert back.placement == plan.placement


def test_pytorchs_format_is_numbered_by_stage_with_idle_cells():
    rows = format_plan(small_plan("1f1b", 2, 1, 2), "torch-csv").splitlines()
    assert rows == ["0F0,0F1,,0B0,,0B1", ",1F0,1B0,1F1,1B1,"] or rows == ["0F0,0F1,,0B0,0B1", ",1F0,1B0,1F1,1B1"]


# Tests that read the same files go to the same worker: writing them loads torch twice.
from_torch = pytest.mark.xdist_group("torch_files")


@pytest.fixture(scope="module")
def torch_files(tmp_path_factory):
    """Folders with the files of PyTorch's seven schedules: (P, M) -> folder."""
    folders = {}
    for p, m in ((2, 4), (4, 8)):
        folder = folders[(p, m)] = tmp_path_factory.mktemp(f"p{p}m{m}")
        script = Path(__file__).parents[2] / "harness" / "make_torch_csv.py"
        done = subprocess.run(
            [sys.executable, str(script), str(folder), str(p), str(m)], capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stderr[-2000:]
    return folders


@from_torch
@pytest.mark.parametrize("shape", [(2, 4), (4, 8)])
@pytest.mark.parametrize("name", sorted(TORCH_SCHEDULES))
def test_pytorchs_schedules_import_and_verify(torch_files, name, shape):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for policy in POLICIES:
            plan = load_plan(torch_files[shape] / f"{name}.csv", policy=policy)
            verify(plan)
            assert plan.placement.kind == TORCH_SCHEDULES[name]
            assert (plan.spec.pipeline_size, plan.spec.num_microbatches) == shape


@from_torch
def test_pytorchs_numbering_of_1f1b_is_read_with_a_warning(torch_files):
    """PyTorch's table of 1F1B counts the last stage's forwards from 1; the order it means is clear."""
    text = (torch_files[(4, 8)] / "Schedule1F1B.csv").read_text()
    if "3F0" in text:
        pytest.skip("this PyTorch counts them from 0")
    with pytest.warns(UserWarning, match="forwards of stage 3 are counted from 1"):
        plan = parse_plan(text)
    assert format_program(plan.orders[3][:4]) == "F0.0 B0.0 F0.1 B0.1"


def torch_text(schedule="interleaved_1f1b"):
    return format_plan(small_plan(schedule, 2, SCHEDULES[schedule].chunks or 2, 4), "torch-csv")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: "", "no action in it"),
        (lambda t: t[: len(t) // 2], "rows or actions are missing|is missing or has no counterpart"),
        (lambda t: t.splitlines()[0] + "\n", "neither in a loop nor in a V"),
        (lambda t: t.replace("0B2", ""), r"backward of stage 0, microbatch 2 \(0B2\) is missing"),
        (lambda t: t.replace("0F2", "0F1"), "row 1: 0F1 stands twice"),
        (lambda t: t.replace("1F2", "1X2"), "row 2, cell .*'1X2' is no action"),
        (lambda t: t.replace("1F2", "1F999999999"), r"1F2.* is missing"),
        (lambda t: t.replace("1F2", "5F2"), "neither in a loop nor in a V"),
        (lambda t: t.replace("0B0", "0I0"), r"weight gradients.*0W0"),
        (lambda t: t.replace("0B0", "0I0,0B0,0W0"), "0I0 and 0B0 are both there"),
        (lambda t: t.replace("1F2", "1SEND_F2"), "is communication; write the file with format 'compute_only'"),
        (lambda t: t.replace("0F0", '"0F0'), "not a CSV file|is no action"),
        (lambda t: "\n" + t, "row 1: rank 0 has nothing to do"),
    ],
)
def test_bad_pytorch_files_are_refused_in_one_line(damage, message):
    with pytest.raises(ExchangeError, match=message) as caught:
        parse_plan(damage(torch_text()))
    assert "\n" not in str(caught.value)


def test_an_order_that_can_not_run_is_refused():
    swapped = torch_text("gpipe").replace("0F0", "x").replace("0B0", "0F0").replace("x", "0B0")
    with pytest.raises(PlanError, match=r"rank 0: B0\.0 .* F0\.0 has to come before it"):
        parse_plan(swapped)
    with pytest.raises(PlanError, match=r"rank . can not run"):
        parse_plan("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")


def edited(**changes):
    content = json.loads(format_plan(small_plan(), "json"))
    for key, value in changes.items():
        target = content["spec"] if key in content["spec"] else content
        target[key] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (format_plan(small_plan(), "json")[:200], "not a JSON file, or cut off"),
        ("{" * 100_000, "not a JSON file, or cut off"),
        ("{}", "no plan that this reads"),
        (edited(version=2), "no plan that this reads"),
        (edited(spec=[]), "'spec' is missing or no object"),
        (edited(pipeline_size=3), "programs of 2 ranks; the pipeline has 3"),
        (edited(pipeline_size="2"), "pipeline_size is '2'; it must be of type int"),
        (edited(pipeline_size=True), "pipeline_size is True; it must be of type int"),
        (edited(forward_only=0), "forward_only is 0; it must be of type bool"),
        (edited(num_microbatches=10**9), "rank 0 has .* instructions for 1 chunk.* of 1000000000 microbatches"),
        (edited(num_microbatches=0), "number of microbatches is 0"),
        (edited(policy="hopeful"), "policy 'hopeful' is not known"),
        (edited(placement="spiral"), "placement 'spiral' is not known"),
        (edited(placement=["loop"]), "is not known"),
        (edited(programs="F0.0"), "'programs' is missing or no list of strings"),
        (edited(programs=["F0.0 Q1.1", ""]), "programs, rank 0: 'Q1.1' is not an instruction"),
        (edited(programs=["F0.0 [SEND_F0.0", ""]), "programs, rank 0: .* is not an instruction"),
        (edited(orders=["F0.0"]), "orders of 1 ranks; the pipeline has 2"),
    ],
)
def test_bad_json_is_refused_in_one_line(text, message):
    with pytest.raises(PlanError, match=message) as caught:
        parse_plan(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["csv", "json"])
def test_measured_values_travel_with_the_plan(form):
    measured = Measured(forward=(1.0, 1.5), backward_input=2.0, weight=0.5, memory_limit=4.0)
    plan = small_plan("auto", 2, 1, 4, measured=measured)
    assert parse_plan(format_plan(plan, form)) == plan


def test_bad_measured_values_are_refused():
    with pytest.raises(PlanError, match="measured values colour are not known"):
        parse_plan(edited(measured={"colour": 1}))
    with pytest.raises(PlanError, match="measured forward is"):
        parse_plan(edited(measured={"forward": "fast"}))
    with pytest.raises(PlanError, match="'measured' must be an object"):
        parse_plan(edited(measured=3))


def test_unknown_and_missing_fields_are_named():
    content = json.loads(format_plan(small_plan(), "json"))
    content["spec"]["colour"] = "red"
    with pytest.raises(ExchangeError, match="the spec has no field 'colour'"):
        parse_plan(json.dumps(content))
    del content["spec"]["colour"], content["spec"]["num_chunks"]
    with pytest.raises(ExchangeError, match="the spec lacks num_chunks"):
        parse_plan(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t[: len(t) // 2], "cut off or damaged"),
        (lambda t: t.rsplit("\n", 2)[0] + "\n", "cut off or damaged"),
        (lambda t: t.replace("plan,1", "plan,7"), "version 7 of the plan format is not known"),
        (lambda t: t.replace("SEND_F0.1", "ZZ0.1"), "program of rank 0, cell .*'ZZ0.1' is not an instruction"),
        (lambda t: t.replace("program,1", "program,3"), "expected the program of rank 1, found 'program,3'"),
        (lambda t: t.replace("schedule,1f1b", "schedule"), "expected a name and its value"),
        (lambda t: t.replace("num_chunks,1", "num_chunks,many"), "num_chunks is 'many'; it must be of type int"),
    ],
)
def test_bad_csv_is_refused_in_one_line(damage, message):
    with pytest.raises(ExchangeError, match=message) as caught:
        parse_plan(damage(format_plan(small_plan(), "csv")))
    assert "\n" not in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(form=st.sampled_from(["csv", "json", "torch-csv"]), data=st.data())
def test_no_damage_brings_anything_but_a_plan_error(form, data):
    """Cut a piece out of a file, or write something into it: a plan comes out, or a PlanError."""
    text = format_plan(small_plan(), form)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 30)))
    middle = data.draw(st.text(max_size=6))
    with contextlib.suppress(PlanError):
        verify(parse_plan(text[:start] + middle + text[end:]))


def test_files_that_are_no_text_or_not_there(tmp_path):
    binary = tmp_path / "plan.csv"
    binary.write_bytes(b"\xff\xfe\x00F")
    with pytest.raises(ExchangeError, match="not a text file in UTF-8"):
        load_plan(binary)
    with pytest.raises(ExchangeError, match="can not be read"):
        load_plan(tmp_path / "nothing.csv")


def test_a_refused_format_writes_nothing(tmp_path):
    with pytest.raises(ExchangeError, match="not as 'pickle'"):
        save_plan(small_plan(), tmp_path / "plan.pickle")
    assert os.listdir(tmp_path) == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "out.csv"
    write_whole(target, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ExchangeError, match="can not be written"):
        write_whole(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.csv"]
