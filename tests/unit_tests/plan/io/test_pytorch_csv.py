"""PyTorch's CSV files of schedules, with and without communication: read and written as PyTorch has them."""

from __future__ import annotations

import csv
import io
import re
import warnings

import pytest

from megatron_pp.errors import FileFormatError, PlanError
from megatron_pp.plan.io.serialize import format_plan, load_plan, parse_plan
from megatron_pp.plan.ir.instruction import POST_OPS, SINGLE_COMPUTE_OPS, each, format_program
from megatron_pp.plan.ir.spec import POLICIES
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.verify.verifier import verify
from testkit.inputs.make_torch_csv import write_files
from testkit.inputs.plan_text import small_plan
from testkit.processes import run_processes

TORCH_SCHEDULES = {
    "ScheduleGPipe": "loop",
    "Schedule1F1B": "loop",
    "ScheduleInterleaved1F1B": "loop",
    "ScheduleLoopedBFS": "loop",
    "ScheduleInterleavedZeroBubble": "loop",
    "ScheduleZBVZeroBubble": "v",
    "ScheduleDualPipeV": "v",
}

IN_PYTORCH = sorted(name for name, family in SCHEDULES.items() if not family.barriers)  # it has no S and T


def test_pytorchs_format_is_numbered_by_stage_with_idle_cells():
    rows = format_plan(small_plan("1f1b", 2, 1, 2), "torch-csv").splitlines()
    assert rows == ["0F0,0F1,,0B0,,0B1", ",1F0,1B0,1F1,1B1,"] or rows == ["0F0,0F1,,0B0,0B1", ",1F0,1B0,1F1,1B1"]


@pytest.fixture(scope="module")
def torch_files(tmp_path_factory):
    """Folders with the files of PyTorch's seven schedules: (P, M) -> folder."""
    folders = {(p, m): tmp_path_factory.mktemp(f"p{p}m{m}") for p, m in ((2, 4), (4, 8))}
    run_processes(write_files, 1, (folders,), backend=None, start_method="forkserver")
    return folders


@pytest.mark.slow
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


@pytest.mark.slow
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
        (lambda t: t.replace("1F2", "1X2"), "row 2, cell .*'1X2' is no action"),
        (lambda t: t.replace("1F2", "5F2"), "neither in a loop nor in a V"),
        (lambda t: t.replace("1F2", "0SEND_F2,1F2"), r"row 2: 0SEND_F2: stage 0 is not on rank 1"),
        (lambda t: t.replace("1F2", "9SEND_F2,1F2"), r"row 2: 9SEND_F2: stage 9 is not on rank 1"),
        (lambda t: t.replace("1F2", "(1F2;1I2)OVERLAP_F_B").replace("1B2", "1W2"), r"\(F0.2 I0.2\) is no pair"),
        (lambda t: t.replace("1F2", "(1F2)OVERLAP_F_B"), "a pair is of two actions"),
        (lambda t: t.replace("1F2", "(1F2;1X2)OVERLAP_F_B"), "row 2, cell .*'1X2' is no action"),
        (lambda t: t.replace("0F0", '"0F0'), "not a CSV file|is no action"),
        (lambda t: "\n" + t, "row 1: rank 0 has nothing to do"),
    ],
)
def test_pytorch_files_that_hold_no_plan_are_refused_in_one_line(damage, message):
    with pytest.raises(FileFormatError, match=message) as caught:
        parse_plan(damage(torch_text()))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.replace("0B2", ""), r"backward of stage 0, microbatch 2 \(0B2\) is missing"),
        (lambda t: t.replace("0F2", "0F1"), "row 1: 0F1 occurs twice"),
        (lambda t: t.replace("1F2", "1F999999999"), r"1F2.* is missing"),
        (lambda t: t.replace("0B0", "0I0"), r"weight gradients.*0W0"),
        (lambda t: t.replace("0B0", "0I0,0B0,0W0"), "0I0 and 0B0 are both there"),
        (lambda t: t.replace("1F2", "1SEND_F2"), r"forward of stage 1, microbatch 2 \(1F2\) is missing"),
        (lambda t: t.replace("1F2", "()OVERLAP_F_B"), r"1F2.* is missing"),
    ],
)
def test_incomplete_orders_of_pytorch_files_are_refused_in_one_line(damage, message):
    """The files hold plans, so the error is that of a wrong plan, not of an unreadable file."""
    with pytest.raises(PlanError, match=message) as caught:
        parse_plan(damage(torch_text()))
    assert (type(caught.value), "\n" in str(caught.value)) == (PlanError, False)


def test_an_order_that_cannot_run_is_refused():
    swapped = torch_text("gpipe").replace("0F0", "x").replace("0B0", "0F0").replace("x", "0B0")
    with pytest.raises(PlanError, match=r"rank 0: B0\.0 .* F0\.0 has to come before it"):
        parse_plan(swapped)
    with pytest.raises(PlanError, match=r"rank . cannot run"):
        parse_plan("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")


COMMUNICATING = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
PAIRED = [("dualpipe_v", {"overlap_pairs": True}), ("interleaved_1f1b", {"overlap_pairs": True})]


def cells_of(text):
    """The actions of each row, without idle slots and FSDP's actions, which a plan has no instruction for, and without
    the waits of sends."""
    left_out = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_SEND")
    return [[c for c in row if c and not any(word in c for word in left_out)] for row in csv.reader(io.StringIO(text))]


@pytest.mark.parametrize("shape", [(2, 4), (4, 8)])
@pytest.mark.parametrize("name", COMMUNICATING)
def test_pytorchs_communication_stays_where_it_stands(torch_files, name, shape):
    text = (torch_files[shape] / f"Schedule{name}-comms.csv").read_text()
    plan = parse_plan(text)
    verify(plan)
    assert "SEND_F" in text
    assert cells_of(format_plan(plan, "torch-csv-comms")) == cells_of(text)
    assert parse_plan(format_plan(plan, "json")) == plan


@pytest.mark.parametrize("shape", [(2, 4), (4, 8)])
@pytest.mark.parametrize("name", COMMUNICATING)
def test_pytorchs_compute_order_is_written_as_it_was_read(torch_files, name, shape):
    text = (torch_files[shape] / f"Schedule{name}.csv").read_text()
    assert cells_of(format_plan(parse_plan(text), "torch-csv")) == cells_of(text)


def test_communication_missing_from_pytorchs_rows_is_added():
    """Waits and hand-offs right before the use, releases an operation after the send, syncs as in any plan."""
    plan = parse_plan("0F0,0SEND_F0,0RECV_B0,0I0,0W0\n1RECV_F0,1F0,1I0,1SEND_B0,1W0\n")
    assert list(map(format_program, plan.programs)) == [
        "F0.0 SEND_F0.0 RECV_B0.0 FREE_F0.0 WAIT_B0.0 ENABLE_GRAD_SYNC0 I0.0 ENABLE_GRAD_SYNC0 W0.0",
        "RECV_F0.0 WAIT_F0.0 F0.0 ENABLE_GRAD_SYNC0 I0.0 SEND_B0.0 ENABLE_GRAD_SYNC0 W0.0 FREE_B0.0",
    ]
    verify(plan)


OF_2_15 = ["0F0,0SEND_F0,0RECV_B0,{},0REDUCE_GRAD,0WAIT_REDUCE_GRAD", "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0"]


@pytest.mark.parametrize(
    ("row", "release_after", "program"),
    [
        ("0B0,0WAIT_SEND_F0", 1, "F0.0 SEND_F0.0 RECV_B0.0 FREE_F0.0 WAIT_B0.0 ENABLE_GRAD_SYNC0 B0.0"),
        ("0WAIT_SEND_F0,0B0", 1, "F0.0 SEND_F0.0 RECV_B0.0 FREE_F0.0 WAIT_B0.0 ENABLE_GRAD_SYNC0 B0.0"),
        ("0I0,0WAIT_SEND_F0,0W0", 3, "F0.0 SEND_F0.0 RECV_B0.0 FREE_F0.0 WAIT_B0.0 ENABLE_GRAD_SYNC0 I0.0"),
    ],
)
def test_a_send_is_released_where_the_row_waits_for_it_at_the_latest(row, release_after, program):
    """PyTorch 2.15 waits behind the backward; the output's memory is not kept until then."""
    plan = parse_plan("\n".join(OF_2_15).format(row), release_after=release_after)
    verify(plan)
    assert format_program(plan.programs[0]).startswith(program)
    assert format_program(plan.programs[1]).endswith("SEND_B0.0 FREE_B0.0")


def test_a_wait_in_the_row_is_earlier_than_the_release():
    plan = parse_plan(
        "0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F0,0F2,0SEND_F2\n1RECV_F0,1F0,1RECV_F1,1F1,1RECV_F2,1F2\n",
        release_after=4,
    )
    assert (
        format_program(plan.programs[0]) == "F0.0 SEND_F0.0 F0.1 SEND_F0.1 FREE_F0.0 F0.2 SEND_F0.2 FREE_F0.1 FREE_F0.2"
    )
    verify(plan)


@pytest.mark.parametrize("row", ["0WAIT_SEND_F0,0F0,0SEND_F0,0RECV_B0,0B0", "0F0,0SEND_F0,0WAIT_SEND_F1,0RECV_B0,0B0"])
def test_a_wait_without_its_send_is_refused(row):
    with pytest.raises(PlanError, match=r"row 1: 0WAIT_SEND_F. has no send before it"):
        parse_plan(f"{row}\n{OF_2_15[1]}")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch-csv", "torch-csv-comms", "torch-csv-waits"])
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in IN_PYTORCH), *PAIRED])
def test_pytorch_reads_what_is_written(name, options, form):
    """Every cell is what PyTorch prints for the action that it reads in it, and the plan comes back."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    actions, comms = schedules._Action, form != "torch-csv"
    plan = small_plan(name, 4, SCHEDULES[name].chunks or 2, 8, channels="shared", **options)
    text = format_plan(plan, form)
    check_waits(text, form, schedules)
    text = text if hasattr(schedules, "WAIT_SEND_F") else re.sub(r"\d+WAIT_SEND_.\d+,?", "", text)
    stages = plan.placement.stages
    for rank, row in enumerate(csv.reader(io.StringIO(text))):
        read = [action for cell in row if (action := actions.from_str(cell)) is not None]
        assert [str(action) for action in read] == [cell for cell in row if cell]
        compute = [one for a in read for one in a.sub_actions or (a,) if one.computation_type.value in "FBIW"]
        ours = [at for at in plan.timed(rank) if at.op in SINGLE_COMPUTE_OPS]
        assert [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in compute] == [
            (stages[rank][at.chunk], at.op, at.mb) for at in ours
        ]
        assert any(a.sub_actions for a in read) == any(at.op == "PAIR" for at in plan.programs[rank])
        assert any("SEND" in str(a) or "RECV" in str(a) for a in read) == comms
    back = parse_plan(text, **options)
    assert [list(each(order)) for order in back.orders] == [list(order) for order in plan.orders]
    assert [posts_of(program) for program in back.programs if comms] == [posts_of(p) for p in plan.programs if comms]


def test_messages_that_pytorch_would_take_for_each_other_are_refused():
    """PyTorch's runtime (2.15, gloo) trained such a plan with wrong gradients, without an error."""
    plan = small_plan("1f1b_v", 2, 2, 6)
    with pytest.raises(FileFormatError, match="PyTorch has one queue for both: make the plan with --channels shared"):
        format_plan(plan, "torch-csv-waits")
    assert "0F0" in format_plan(plan, "torch-csv")
    assert "0SEND_F0" in format_plan(small_plan("1f1b_v", 2, 2, 6, channels="shared"), "torch-csv-waits")


def check_waits(text, form, schedules):
    """There is one for each send, behind it, as PyTorch 2.15 checks."""
    rows = list(csv.reader(io.StringIO(text)))
    for row in rows:
        waits = [cell for cell in row if "WAIT" in cell]
        assert sorted(waits) == sorted(
            c.replace("SEND", "WAIT_SEND") for c in row if "SEND" in c and "WAIT" not in c
        ) * (form == "torch-csv-waits")
        assert all(row.index(wait.replace("WAIT_", "")) < row.index(wait) for wait in waits)
    if form == "torch-csv-waits" and hasattr(schedules, "_validate_send_waits"):
        schedules._validate_send_waits({k: list(map(schedules._Action.from_str, row)) for k, row in enumerate(rows)})


def posts_of(program):
    return [at for at in each(program) if at.op in POST_OPS]
