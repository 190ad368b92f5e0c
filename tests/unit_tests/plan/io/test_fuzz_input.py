"""What comes from outside is read, or refused by the project's own errors; whatever it is. Never a KeyError, a
RecursionError, a hang, or code that a file brings along.

``MEGATRON_PP_FUZZ=20000`` draws that many examples of each instead of the suite's.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples.gpt.checkpoint import LATEST, check_layout, find_checkpoint, load_tensors
from examples.gpt.errors import CheckpointError, TrainingError
from examples.gpt.metrics import Recorder, read_metrics
from examples.gpt.settings import Settings, parse
from megatron_pp.config.conversions import chosen_steps, read_flag
from megatron_pp.config.layout_text import layers_per_stage
from megatron_pp.errors import (
    ConfigError,
    FileFormatError,
    InstructionError,
    LayoutError,
    PlanError,
    ScheduleInputError,
)
from megatron_pp.faults.store.failures import Failure
from megatron_pp.faults.store.records import Entry, Process, Progress, RecordError, decode, encode
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.measured import Measured, measured_values
from megatron_pp.plan.io.serialize import FORMATS, format_plan, load_plan, parse_plan
from megatron_pp.plan.ir.instruction_text import parse_instruction, parse_program
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.tracing.files import RunHeader, StepRecord, header_line, plan_line, step_line, sync_line
from megatron_pp.tracing.run import load_run
from testkit.inputs.forged import sealed
from testkit.inputs.mutation import DEEP, mutated_bytes, mutated_json, mutated_text
from tests.unit_tests.examples.test_training_checkpoint import (
    DESCRIPTION,
    LAYOUT,
    TENSORS,
    TENSORS_FILE,
    lone_group,
    save,
)

_ASKED = int(os.environ.get("MEGATRON_PP_FUZZ", "0"))
_CALM = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


def examples(number: int) -> Callable[[Any], Any]:
    """``number`` of them in the suite."""
    return settings(max_examples=_ASKED or number, suppress_health_check=_CALM, derandomize=not _ASKED, database=None)


def _only(allowed: type[Exception] | tuple[type[Exception], ...], read: Callable[[], Any]) -> None:
    """``read()`` returns, or raises one of ``allowed`` with something to say."""
    said = "it was read"
    try:
        read()
    except allowed as error:
        said = str(error)
    assert said.strip()


# -- plans ---

PLAN = build_plan(PlanSpec("interleaved_1f1b", 2, 2, 4, measured=Measured(forward=2.0)))
TEXTS = {form: format_plan(PLAN, form) for form in FORMATS}
TEXTS["json, pairs"] = format_plan(build_plan(PlanSpec("dualpipe_v", 2, 2, 4, overlap_pairs=True)), "json")
TEXTS["json, slices"] = format_plan(build_plan(PlanSpec("seq_zb", 2, 1, 2, slices=2)), "json")
TEXTS["json, named"] = format_plan(build_plan(PlanSpec("1f1b", 3, 1, 2, skip_tensors="a=0>2; m=0>1 no_grad")), "json")
TEXTS["torch-csv, split"] = format_plan(build_plan(PlanSpec("zb_h1", 2, 1, 4)), "torch-csv")


def _read_and_verify(text: str) -> None:
    verify(parse_plan(text))


@pytest.mark.parametrize("form", TEXTS)
@examples(60)
@given(data=st.data())
def test_a_damaged_plan_file_raises_only_plan_errors(form: str, data: st.DataObject) -> None:
    text = data.draw(mutated_text(TEXTS[form]))
    _only(PlanError, lambda: _read_and_verify(text))


@examples(100)
@given(st.one_of(*(mutated_json(json.loads(TEXTS[form])) for form in ("json", "json, slices", "json, named"))))
def test_a_plan_with_strange_values(text: str) -> None:
    _only(PlanError, lambda: _read_and_verify(text))


@pytest.mark.parametrize(
    "value", [None, True, -1, 0.5, 10**8, 10**400, "", "\x1b", [], {}, [[]], [{"op": []}]], ids=repr
)
def test_a_wrong_value_at_every_place(value: Any) -> None:
    """At the first place of its kind: of its keys, and of the operation that it is in."""
    options: Any = {"overlap_pairs": True, "policy": "batched", "param_sync": True, "skip_tensors": "a=0>2"}
    text, seen = format_plan(build_plan(PlanSpec("dualpipe_v", 2, 2, 4, **options)), "json"), set()
    for path in _places(json.loads(text)):
        content = at = json.loads(text)
        for key in path[:-1]:
            at = at[key]
        kind = (*("*" if isinstance(key, int) else key for key in path), at.get("op") if isinstance(at, dict) else "")
        if kind not in seen:
            seen.add(kind)
            at[path[-1]] = value
            _only(PlanError, lambda content=content: _read_and_verify(json.dumps(content)))
    assert len(seen) > 100


def _places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inside:
        yield (*path, key)
        yield from _places(value, (*path, key))


@examples(60)
@given(st.one_of(st.text(), st.text().map(lambda t: "0F0,0B0\n" + t), st.text().map(lambda t: "{" + t)))
def test_any_text_as_a_plan(text: str) -> None:
    _only(PlanError, lambda: parse_plan(text))


@examples(30)
@given(data=st.one_of(st.binary(max_size=200), mutated_bytes(TEXTS["json"].encode())))
def test_any_bytes_as_a_plan_file(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(data)
    _only(PlanError, lambda: load_plan(tmp_path / "plan.json"))


PAIR_IN_PAIR = TEXTS["json"].replace('{"op"', '{"op": "PAIR", "members": [' * 500 + '{"op"', 1)


@pytest.mark.parametrize("text", ["{" + '"a":' + DEEP + "}", PAIR_IN_PAIR])
def test_a_plan_that_is_nested_deeply(text: str) -> None:
    with pytest.raises(PlanError):
        parse_plan(text)


@examples(60)
@given(st.one_of(st.text(), mutated_text("[SEND_F0.3 RECV_B0.2] (F0.0 B1.1) SEND_F0.3s1:skip GRAD_SYNC1 W1.2")))
def test_any_instruction_text_is_parsed_or_refused(text: str) -> None:
    _only(InstructionError, lambda: parse_instruction(text))
    _only(InstructionError, lambda: list(parse_program(text)))


@examples(60)
@given(mutated_json({"forward": [1.0, 2], "transfer": 0.5, "memory_limit": 3, "activation": [1, 2.0]}))
def test_damaged_measured_values_are_refused(text: str) -> None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return
    _only(PlanError, lambda: measured_values(content))


# -- traces ---


def _trace(rank: int) -> str:
    plan = build_plan(PlanSpec("1f1b", 2, 1, 3))
    count = len(plan.programs[rank])
    return (
        header_line(RunHeader("r", rank, (0, 1), "cpu", "h"))
        + plan_line(plan, rank, 64.0)
        + sync_line(5, 2 * rank)
        + step_line(StepRecord(2, 0, 10, list(range(0, 10 * count, 10)), list(range(5, 10 * count, 10))))
        + sync_line(900, 3 * rank)
    )


TRACES = [_trace(rank) for rank in range(2)]


def _read_run(folder: Path) -> None:
    run = load_run(folder)
    for step in run.steps:
        run.measured(step)


def _write_run(folder: Path, one: str, other: str) -> None:
    for rank, text in enumerate((one, other)):
        data = text.encode("utf-8", "surrogatepass")
        (folder / f"trace-r-rank{rank:05d}.jsonl").write_bytes(data)


def test_the_trace_that_is_mutated_is_read(tmp_path: Path) -> None:
    _write_run(tmp_path, *TRACES)
    _read_run(tmp_path)


@pytest.mark.slow
@examples(100)
@given(data=st.data())
def test_a_damaged_trace_raises_only_file_format_errors(data: st.DataObject, tmp_path: Path) -> None:
    _write_run(tmp_path, data.draw(mutated_text(TRACES[0])), TRACES[1])
    _only(FileFormatError, lambda: _read_run(tmp_path))


@pytest.mark.parametrize("name", ["time", "ahead", "step", "plan", "base"])
def test_a_trace_with_a_number_of_more_than_64_bits(name: str, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in TRACES[0].splitlines()]
    next(line for line in lines if name in line)[name] = 10**400
    _write_run(tmp_path, "".join(json.dumps(line) + "\n" for line in lines), TRACES[1])
    with pytest.raises(FileFormatError):
        _read_run(tmp_path)


@examples(100)
@given(line=st.integers(0, 4), data=st.data())
def test_a_trace_with_strange_values(line: int, data: st.DataObject, tmp_path: Path) -> None:
    lines = TRACES[0].splitlines()
    lines[line] = data.draw(mutated_json(json.loads(lines[line])))
    _write_run(tmp_path, "\n".join(lines) + "\n", TRACES[1])
    _only(FileFormatError, lambda: _read_run(tmp_path))


# -- configuration ---

ENTRIES = st.one_of(st.integers(), st.text(max_size=9))


@examples(150)
@given(
    st.one_of(
        st.text(),
        mutated_text("Et*3|(tt|)*29,t|L"),
        mutated_text("8,8,7,7"),
        st.lists(st.one_of(ENTRIES, st.lists(ENTRIES))),
        mutated_json([["embedding", "decoder"], ["decoder", "loss"]]).map(lambda t: t if "[[[" in t else json.loads(t)),
    )
)
def test_any_layout_text_is_read_or_refused(layout: Any) -> None:
    _only(LayoutError, lambda: layers_per_stage(layout))


def test_a_layout_that_is_nested_deeply() -> None:
    for text in ("(" * 5_000 + "t" + ")" * 5_000, "(" * 300 + "t" + ")*9" * 300, "t*" + "9" * 5_000, "9" * 5_000):
        _only(LayoutError, lambda text=text: layers_per_stage(text))


@examples(60)
@given(st.one_of(st.text(), mutated_text("3,10-12")))
def test_any_text_in_environment_variables_is_read_or_refused(text: str) -> None:
    _only(ConfigError, lambda: read_flag(text))
    _only(ScheduleInputError, lambda: chosen_steps(text))


# -- between ranks ---

RECORDS = {
    Progress: Progress(3, "in_step", 7, "F0.1", 0.5, 9, Process("h", 1, 2), (3, 0, 1, 1)),
    Entry: Entry(3, {"schedule": "1f1b"}, Process("h", 1, 2)),
    Failure: Failure("exception", "0-1", 1, 1, "F0.1", "FORWARD", "ValueError", suspects=(1,), values={"0": "a"}),
}


@pytest.mark.parametrize("kind", RECORDS)
@examples(60)
@given(data=st.data())
def test_damaged_store_records_are_refused(kind: Any, data: st.DataObject) -> None:
    text = encode(RECORDS[kind])
    assert decode(kind, text) == RECORDS[kind]
    damaged = data.draw(st.one_of(mutated_json(json.loads(text)), mutated_text(text), st.binary()))
    _only(RecordError, lambda: decode(kind, damaged))


# -- what a training run left ---


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with lone_group():
        yield save(tmp_path_factory.mktemp("saved"), 1).parent


def _load(folder: Path) -> None:
    found = find_checkpoint(folder)
    check_layout(found, LAYOUT)
    load_tensors(found, {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", [LATEST, DESCRIPTION, TENSORS_FILE])
@examples(60)
@given(data=st.data())
def test_a_checkpoint_that_is_damaged_or_forged(
    name: str, data: st.DataObject, checkpoint: Path, tmp_path: Path
) -> None:
    """In a forged description the CRC-32 is right, and what it says is not."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    _load(tmp_path)
    (path,) = tmp_path.rglob(name)
    content = path.read_bytes()
    ways = [mutated_bytes(content), st.binary(max_size=40)]
    if name == DESCRIPTION:
        said = json.loads(content)
        del said["crc32"]
        ways.append(mutated_json(said).map(sealed))
    path.write_bytes(data.draw(st.one_of(ways)))
    _only(CheckpointError, lambda: _load(tmp_path))


SAVED = {"train_steps": 4, "data": ["a"], "seed": 1, "tensorboard": True, "num_layers": 4, "hidden_size": 8}


@pytest.mark.slow
@examples(25)
@given(st.one_of(mutated_json(SAVED), mutated_text(json.dumps(SAVED))))
def test_the_arguments_of_a_run_to_resume(tmp_path: Path, text: str) -> None:
    (tmp_path / "arguments.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    _only((TrainingError, ConfigError), lambda: parse(["--resume", str(tmp_path)]))


@examples(60)
@given(st.one_of(st.binary(), mutated_json({"step": 1, "loss": 2.0}).map(lambda t: t.encode("utf-8", "surrogatepass"))))
def test_the_metrics_of_a_run_to_resume(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + data)
    assert read_metrics(path)[0] == {"step": 1}
    settings = Settings(train_steps=9, log_interval=1, tensorboard=False)
    _only(TrainingError, lambda: Recorder(tmp_path, 5, settings).close())
