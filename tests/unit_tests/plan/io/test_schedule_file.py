"""A user's own schedule in a file, and measurements in a file, where a config names them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_pp.config.model_config import ModelParallelConfig, TransformerConfig
from megatron_pp.errors import FileFormatError, PlanError, ScheduleError, ScheduleInputError
from megatron_pp.faults.attach import describe_step
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.io.schedule_file import family_of_file
from megatron_pp.plan.ir.instruction import JOINED_OPS
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.orders import find_family, placement_kind
from megatron_pp.runtime.engine.executor import Shapes
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyData, reference_run
from megatron_pp.weight_grad import split_weight_grad
from testkit.inputs.plan_text import edited, save_plan

FORMS = {"json": "json", "torch-csv": "csv", "torch-csv-comms": "csv", "torch-csv-waits": "csv"}


def written(folder: Path, spec: PlanSpec, form: str = "json") -> str:
    path = folder / f"{spec.schedule}-{form}.{FORMS[form]}"
    save_plan(build_plan(spec), path, form)
    return str(path)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v"])
def test_a_file_in_any_format_runs_with_the_numbers_of_one_process(name: str, form: str, tmp_path: Path) -> None:
    chunks = find_family(name).chunks or 1
    path, data = written(tmp_path, PlanSpec(name, 2, chunks, 5), form), ToyData(5)
    for policy in ({"overlap_p2p_comm": True}, {"batch_p2p_comm": True}):
        result = run_in_threads(2, chunks, data, prepare=split_weight_grad, pipeline_schedule=path, **policy)
        assert result.difference(reference_run(2 * chunks, data)) == 0.0
    evaluated = run_in_threads(2, chunks, data, forward_only=True, pipeline_schedule=path)
    assert evaluated.losses == reference_run(2 * chunks, data).losses


def test_a_schedule_file_states_its_sizes_and_schedule(tmp_path: Path) -> None:
    split, whole = written(tmp_path, PlanSpec("zb_v", 2, 2, 4)), written(tmp_path, PlanSpec("1f1b_v", 2, 2, 4))
    family = find_family(split)
    assert (family.name, family.placement, family.chunks, family.splits_weight) == (split, "v", 2, True)
    assert not find_family(whole).splits_weight
    assert family.digest != find_family(whole).digest
    assert (placement_kind(split), placement_kind("1f1b"), placement_kind(None), placement_kind("?")) == (
        *("v", "loop"),
        *("loop", "loop"),
    )


def test_a_plan_file_that_fits_the_run_is_used_unchanged_and_others_are_lowered_anew(tmp_path: Path) -> None:
    spec = PlanSpec("1f1b", 2, 1, 4, lookahead=2)
    path = written(tmp_path, spec)
    here = replace(spec, schedule=path, digest=family_of_file(path).digest)
    assert build_plan(here).programs == build_plan(spec).programs
    plain = replace(here, policy="plain", lookahead=1)
    assert build_plan(plain).programs == build_plan(PlanSpec("1f1b", 2, 1, 4, policy="plain")).programs
    assert build_plan(plain).programs != build_plan(here).programs


@pytest.mark.parametrize("form", FORMS)
def test_pairs_of_a_file_run_as_one_only_where_the_run_asks_for_pairs(form: str, tmp_path: Path) -> None:
    spec = PlanSpec("dualpipe_v", 2, 2, 6, overlap_pairs=True)
    path = written(tmp_path, spec, form)
    joint = replace(spec, schedule=path, digest=family_of_file(path).digest)
    for pairs in (True, False):
        plan = build_plan(replace(joint, overlap_pairs=pairs))
        assert any(at.op in JOINED_OPS for program in plan.programs for at in program) == pairs


def test_a_plan_that_cannot_run_is_refused(tmp_path: Path) -> None:
    plan, path = build_plan(PlanSpec("1f1b", 2, 1, 2)), tmp_path / "early.json"
    save_plan(edited(plan, 0, "swap F0.0 SEND_F0.0"), path)
    with pytest.raises(PlanError, match=r"rank 0: SEND_F0\.0 .* it comes before its forward ran"):
        build_plan(PlanSpec(str(path), 2, 1, 2, digest=family_of_file(str(path)).digest))


def test_sizes_that_differ_are_reported(tmp_path: Path) -> None:
    path = written(tmp_path, PlanSpec("1f1b", 2, 1, 4))
    with pytest.raises(PlanError, match="is a schedule of 4 microbatches on 2 ranks; this step has 5 on 2"):
        run_in_threads(2, 1, ToyData(5), pipeline_schedule=path)
    with pytest.raises(ScheduleInputError, match=r"needs 1 model chunk\(s\) a rank; 2 were given"):
        run_in_threads(2, 2, ToyData(4), pipeline_schedule=path)


def test_files_that_are_not_there_or_no_plan_are_refused_by_the_config(tmp_path: Path) -> None:
    (tmp_path / "colours.csv").write_text("red,green\n")
    for name, sentence in {"none.csv": "cannot be read", "colours.csv": "'red' is no action"}.items():
        path = str(tmp_path / name)
        with pytest.raises(ScheduleError, match=f"pipeline_schedule: {path}.*{sentence}"):
            ModelParallelConfig(pipeline_schedule=path)
        with pytest.raises(FileFormatError, match=path):
            run_in_threads(2, 1, ToyData(2), pipeline_schedule=path)
    with pytest.raises(PlanError, match=r"'zigzag' is not known; it is one of .*, or a \.csv or \.json file"):
        find_family("zigzag")


def test_a_file_places_stages_and_fixes_the_number_of_chunks(tmp_path: Path) -> None:
    path = written(tmp_path, PlanSpec("zb_v", 2, 2, 4))
    sizes = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "pipeline_dtype": torch.float32}
    config = TransformerConfig(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, pipeline_schedule=path, **sizes
    )
    assert config.placement_name == "v"
    with pytest.raises(
        ScheduleError, match=r"needs 2 model chunk.* 1 were given \(virtual_pipeline_model_parallel_size\)"
    ):
        config.replace(virtual_pipeline_model_parallel_size=None)


# -- measurements ------------------------------------------------------------------------------------------------------

VALUES = {"forward": [1.0, 2.0], "weight": 0.5}


def test_measurements_are_a_dict_a_file_or_an_object(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(VALUES), encoding="utf-8-sig")  # with the byte order mark that some editors write
    data = ToyData(3)
    for given in (VALUES, str(path), Measured.from_dict(VALUES)):
        config = ModelParallelConfig(
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            pipeline_schedule="auto",
            pipeline_measured=given,
        )
        result = run_in_threads(2, 1, data, pipeline_schedule="auto", pipeline_measured=config.pipeline_measured)
        assert result.difference(reference_run(2, data)) == 0.0


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"weight": -1}, "measured weight is '?-1"),
        ({"colour": 1}, "measured values colour are not known"),
        ({"forward": [1.0] * 3}, "measured forward is given for 3 stages; there are 2"),
        ({"weight": math.nan}, "weight is nan"),
        ({"backward_input": True}, "backward_input is True"),
        ({"transfer": None}, "transfer is None"),
        ({"transfer": [0.1]}, r"transfer is \(0.1,\); it must be a number from 0 to 1e\+18$"),
        ({"forward": 1e200}, r"forward is 1e\+200; it must be a number from 0 to 1e\+18, or a list"),
        ({"links": 3}, "measured links"),
        ({"links": ((0, 1),)}, "measured links"),
        ({"links": ((0, 1, -1.0),)}, "measured links"),
        ({"links": ((0, 1, math.nan),)}, "measured links"),
        ({"memory_limit": [1.0] * 3}, "measured memory_limit is given for 3 ranks; there are 2"),
        (7, "7 is no Measured, no dict of its fields and no path"),
        ("none.json", "none.json: cannot be read"),
    ],
)
def test_impossible_measurements_are_refused_by_the_config(given: object, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=f"pipeline_measured: .*{sentence}"):
        ModelParallelConfig(
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            pipeline_schedule="auto",
            pipeline_measured=given,  # type: ignore[arg-type]
        )


def test_a_file_without_measurements_is_refused(tmp_path: Path) -> None:
    for name, text in {"broken": "{", "list": "[1]", "other": '{"colour": 1}'}.items():
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        with pytest.raises(ScheduleError, match=str(path)):
            ModelParallelConfig(pipeline_measured=str(path))


def test_ranks_compare_the_content_of_their_files(tmp_path: Path) -> None:
    """Two machines may hold different files of one name."""
    described = []
    for name in ("1f1b", "gpipe"):
        path = written(tmp_path, PlanSpec(name, 2, 1, 4))
        digest = family_of_file(path).digest
        described.append(describe_step(PlanSpec("same.csv", 2, 1, 4, digest=digest), Shapes(None, None), torch.float32))
    different = {key for key in described[0] if described[0][key] != described[1][key]}
    assert different == {"digest"}
