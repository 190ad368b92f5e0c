"""Flags from dataclasses, and every impossible command line refused before any communication."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.gpt.arguments import Arguments, RunArguments, make_config, make_parser, parse_arguments
from examples.gpt.description import Checkpoint, write_description
from examples.gpt.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointLayoutError,
    DataPathError,
    NoCheckpointError,
    TextTooShortError,
)
from examples.gpt.flags import add_flags, values_of
from examples.gpt.grid import Process, choose_device, grid_sizes
from examples.gpt.program import _layout, main, train
from megatron_pp.config.checks import ConfigError, LayoutError, ScheduleError, WorldSizeError
from megatron_pp.config.model_config import ModelParallelConfig, TransformerConfig
from megatron_pp.plan.build import build_plan
from megatron_pp.plan.spec import PlanError, PlanSpec
from tests.harness.plan_text import save_plan


def config_of(*argv: str, world_size: int = 2) -> TransformerConfig:
    return make_config(parse_arguments(argv), world_size)


@dataclass
class Example:
    """One field of each kind."""

    whole: int = field(default=1, metadata={"help": "a whole number, 50% of two", "section": "numbers"})
    real: float | None = field(default=None, metadata={"help": "a number or nothing"})
    switch: bool = field(default=True, metadata={"help": "on or off"})
    text: str | list[int] | None = field(default=None, metadata={"help": "text wins over other kinds"})
    one_of: str = field(default="a", metadata={"help": "one of two", "choices": ("a", "b")})
    paths: list[str] = field(default_factory=list, metadata={"help": "several"})
    hook: Any = field(default=None, metadata={"help": "nothing a flag can hold", "cli": False})


def example_parser() -> Any:
    import argparse

    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, Example)
    return parser


def test_flags_set_fields_of_their_type() -> None:
    argv = ["--whole", "3", "--real", "2", "--no-switch", "--text", "1,2", "--one-of", "b", "--paths", "x", "y"]
    values = values_of(example_parser().parse_args(argv), Example)
    assert values == {
        "whole": 3,
        "real": 2.0,
        "switch": False,
        "text": "1,2",
        "one_of": "b",
        "paths": ["x", "y"],
    }
    assert isinstance(values["real"], float)
    Example(**values)


def test_flags_not_given_leave_the_defaults_to_the_dataclass() -> None:
    assert values_of(example_parser().parse_args([]), Example) == {}


def test_help_names_every_flag_and_its_default() -> None:
    text = example_parser().format_help()
    assert "a whole number, 50% of two (default: 1)" in text
    assert "numbers:" in text
    assert "--hook" not in text


def test_every_schedule_and_communication_option_is_a_flag() -> None:
    flags = make_parser().format_help()
    assert "--overlap-pairs" in flags  # in the place of a function
    without = {field.name for field in dataclasses.fields(ModelParallelConfig) if not field.metadata["cli"]} | {
        # Nothing this model or program could do with them; pipeline size and dtypes have flags of the program's own.
        "tensor_model_parallel_size",
        "context_parallel_size",
        "sequence_parallel",
        "params_dtype",
        "pipeline_dtype",
        "enable_autocast",
        "autocast_dtype",
        "defer_embedding_wgrad_compute",
        "barrier_with_L1_time",
    }
    for name in {f.name for f in dataclasses.fields(ModelParallelConfig)} - without:
        assert f"--{name.replace('_', '-')}" in flags, name


def test_flags_reach_the_config() -> None:
    config = config_of(
        *["--virtual-pipeline-model-parallel-size", "2", "--overlap-p2p-comm", "--max-pending-sends", "5"],
        *["--microbatch-group-size-per-vp-stage", "3", "--no-deallocate-pipeline-outputs", "--num-layers", "7"],
        *["--pipeline-model-parallel-layout", "1,3,2,1", "--p2p-channels", "shared", "--p2p-timeout", "7.5"],
    )
    assert (config.pipeline_model_parallel_size, config.num_chunks, config.data_parallel_size) == (2, 2, 1)
    assert config.lowering_policy == "overlap"
    assert config.max_pending_sends == 5
    assert config.microbatch_group_size_per_vp_stage == 3
    assert not config.deallocate_pipeline_outputs
    assert [len(layers) for layers in config.layers_of_stages()] == [1, 3, 2, 1]
    assert (config.p2p_channels, config.p2p_timeout) == ("shared", 7.5)
    assert (config.pipeline_dtype, config.enable_autocast) == (torch.float32, False)


def test_bf16_computes_and_sends_in_bf16() -> None:
    config = config_of("--precision", "bf16")
    assert (config.params_dtype, config.pipeline_dtype) == (torch.float32, torch.bfloat16)
    assert (config.enable_autocast, config.autocast_dtype) == (True, torch.bfloat16)


@pytest.mark.parametrize(
    ("world", "pipeline", "replicas", "expected"),
    [(4, None, None, (4, 1)), (4, None, 2, (2, 2)), (4, 2, None, (2, 2)), (4, 1, 4, (1, 4)), (1, None, None, (1, 1))],
)
def test_the_grid_fills_in_what_is_left_open(
    world: int, pipeline: int | None, replicas: int | None, expected: tuple[int, int]
) -> None:
    assert grid_sizes(world, pipeline, replicas) == expected


@pytest.mark.parametrize(("world", "pipeline", "replicas"), [(4, 3, None), (4, None, 3), (4, 2, 1), (2, None, 4)])
def test_a_world_that_does_not_fit_the_grid_is_refused(world: int, pipeline: int | None, replicas: int | None) -> None:
    with pytest.raises(WorldSizeError, match=f"world size is {world}"):
        grid_sizes(world, pipeline, replicas)


@pytest.mark.parametrize(("pipeline", "replicas"), [(0, None), (None, 0), (-2, None), (None, -1)])
def test_sizes_below_one_are_refused(pipeline: int | None, replicas: int | None) -> None:
    with pytest.raises(ConfigError, match="smallest legal value is 1"):
        grid_sizes(2, pipeline, replicas)


def test_torchrun_tells_a_process_who_it_is() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert Process.from_environment(environment) == Process(5, 8, 1, 4)
    assert Process.from_environment({}) == Process(0, 1, 0, 1)


def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    pair = Process(rank=1, world_size=2, local_rank=1, local_world_size=2)
    assert choose_device("auto", pair) == torch.device("cpu")
    assert choose_device("auto", Process()) == torch.device("cuda", 0)
    with pytest.raises(ArgumentError, match="1 GPUs for 2 processes"):
        choose_device("cuda", pair)


BAD_INPUT = {
    "unknown flag": ("--no-such-flag", ArgumentError, "no-such-flag"),
    "abbreviation": ("--train-step 3", ArgumentError, "unrecognized"),
    "no number": ("--train-steps many", ArgumentError, "train-steps.*many"),
    "no microbatches": ("--num-microbatches 0", ArgumentError, "--num-microbatches is 0; it must be at least 1"),
    "no sequence": ("--seq-length 0", ArgumentError, "--seq-length is 0"),
    "no samples": ("--micro-batch-size -1", ArgumentError, "--micro-batch-size is -1"),
    "negative steps": ("--train-steps -1", ArgumentError, "--train-steps is -1"),
    "learning rate": ("--learning-rate 0", ArgumentError, "positive number"),
    "learning rate is nan": ("--learning-rate nan", ArgumentError, "positive number"),
    "final learning rate": ("--min-learning-rate 1", ArgumentError, "between 0 and --learning-rate"),
    "clipping": ("--clip-grad nan", ArgumentError, "--clip-grad is nan"),
    "precision": ("--precision fp8", ArgumentError, "fp8.*fp32.*bf16"),
    "world": ("--pipeline-model-parallel-size 3", WorldSizeError, "world size is 2.*nearest: 3"),
    "replicas": ("--data-parallel-size 4", WorldSizeError, "world size is 2"),
    "schedule": ("--pipeline-schedule zigzag", ScheduleError, "zigzag.*1f1b"),
    "chunks for 1f1b": (
        "--pipeline-schedule 1f1b --virtual-pipeline-model-parallel-size 2",
        ScheduleError,
        "virtual_pipeline_model_parallel_size is 2",
    ),
    "no chunks": ("--virtual-pipeline-model-parallel-size 0", ConfigError, "smallest legal value is 1"),
    "group size": (
        "--virtual-pipeline-model-parallel-size 2 --microbatch-group-size-per-vp-stage 1",
        ConfigError,
        "nearest legal value is 2",
    ),
    "overlap and batch": ("--overlap-p2p-comm --batch-p2p-comm", ConfigError, "both True"),
    "layers": ("--num-layers 5", LayoutError, "nearest num_layers: 4 or 6"),
    "layout": ("--pipeline-model-parallel-layout 1,2", LayoutError, "3 of num_layers 4"),
    "heads": ("--num-attention-heads 3", ConfigError, "128.*3.*nearest"),
    "missing data": ("--data /no/such/path", DataPathError, "/no/such/path does not exist"),
    "short text": ("--max-data-bytes 2000", TextTooShortError, "training text of 1900 bytes is too short"),
    "short validation": ("--max-data-bytes 20000", TextTooShortError, "validation text of 1000 bytes is too short"),
    "no run": ("--resume /no/such/run", NoCheckpointError, "no run at /no/such/run"),
    "a name too long": (f"--resume {'x' * 5000}", NoCheckpointError, "no run at"),
    "two folders": ("--resume a --run-dir b", ArgumentError, "both given"),
    "folder in a file": ("--run-dir /dev/null/run", ArgumentError, "no writable folder"),
    "no Transformer Engine": (
        "--transformer-impl transformer_engine",
        ArgumentError,
        "transformer_engine.* (can not be imported|computes on GPUs alone)",
    ),
    "no apex for the optimizer": (
        "--optimizer-impl apex",
        ArgumentError,
        "--optimizer-impl is apex.* (can not be imported|computes on GPUs alone)",
    ),
    "no apex for norms": ("--norm-impl apex", ArgumentError, "--norm-impl is apex.* (can not be imported|computes on)"),
    "no layers for FP8": ("--fp8 hybrid", ArgumentError, "--fp8 is hybrid, which --transformer-impl"),
    "unknown layers": ("--transformer-impl te", ArgumentError, "te.*local.*transformer_engine"),
    "no schedule file": ("--pipeline-schedule none.csv", ScheduleError, "none.csv: can not be read"),
    "measured": ("--pipeline-schedule auto --pipeline-measured none.json", ScheduleError, "none.json: can not be read"),
    "no GPUs": ("--device cuda", ArgumentError, "GPUs for 2 processes"),
}


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 1 of 2 with no peer in sight: who tried to communicate would wait."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.usefixtures("second_of_two")
@pytest.mark.parametrize(("flags", "error", "sentence"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_told_before_any_communication(
    flags: str, error: type[Exception], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=sentence):
        train(flags.split())
    assert not dist.is_initialized()
    assert main(flags.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train.py: {error.__name__}: ") or error is ConfigError


@pytest.mark.usefixtures("second_of_two")
def test_a_schedule_file_that_does_not_fit_is_told_before_any_communication(tmp_path: Path) -> None:
    save_plan(build_plan(PlanSpec("1f1b", 2, 1, 5)), tmp_path / "mine.csv", "torch-csv")
    flags = ["--pipeline-schedule", str(tmp_path / "mine.csv")]
    with pytest.raises(PlanError, match="is a schedule of 5 microbatches on 2 ranks; this step has 8 on 2"):
        train(flags)
    assert not dist.is_initialized()
    assert main(flags) == 2


def test_a_schedule_brings_its_number_of_chunks() -> None:
    for name, chunks in {"zb_v": 2, "zb_h1": None, "interleaved_zb": 2, "1f1b": None}.items():
        assert config_of("--pipeline-schedule", name).virtual_pipeline_model_parallel_size == chunks
    config = config_of("--pipeline-schedule", "breadth_first", "--virtual-pipeline-model-parallel-size", "1")
    assert config.num_chunks == 1


def test_files_are_remembered_wherever_the_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parse_arguments(["--pipeline-schedule", "a.csv", "--pipeline-measured", "b.json"]).save(tmp_path)
    config = json.loads((tmp_path / "arguments.json").read_text())["config"]
    assert (config["pipeline_schedule"], config["pipeline_measured"]) == (
        str(tmp_path / "a.csv"),
        str(tmp_path / "b.json"),
    )


def save_run(folder: Path, arguments: Arguments) -> Path:
    """What a run of two ranks leaves, tensors apart."""
    checkpoint = folder / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    layout = _layout(arguments.run, make_config(arguments, 2))
    write_description(Checkpoint(checkpoint, checkpoint.name, 3, layout, {}, {}))
    (folder / "checkpoints" / "latest").write_text("step-00000003\n")
    arguments.save(folder)
    return checkpoint


@pytest.mark.usefixtures("second_of_two")
@pytest.mark.parametrize(
    ("flags", "difference"),
    {
        "pipeline": ("--pipeline-model-parallel-size 1", "pipeline_model_parallel_size is 2 there and 1 here"),
        "chunks": (
            "--virtual-pipeline-model-parallel-size 2",
            "virtual_pipeline_model_parallel_size is None there and 2",
        ),
        "layers": ("--num-layers 8", "num_layers is 4 there and 8 here"),
        "placement of layers": (
            "--pipeline-model-parallel-layout 1,3",
            r"layers_of_stages is \[\[0, 1\], \[2, 3\]\] there",
        ),
        "width": ("--hidden-size 64", "hidden_size is 128 there and 64 here"),
        "batch": ("--micro-batch-size 2", "micro_batch_size is 4 there and 2 here"),
        "ties": ("--untie-embeddings-and-output-weights", "untie_embeddings_and_output_weights is False there"),
    }.values(),
)
def test_checkpoints_of_another_layout_are_refused(flags: str, difference: str, tmp_path: Path) -> None:
    save_run(tmp_path, parse_arguments([]))
    with pytest.raises(CheckpointLayoutError, match=difference):
        train([*flags.split(), "--resume", str(tmp_path)])
    assert not dist.is_initialized()


@pytest.mark.usefixtures("second_of_two")
def test_a_folder_with_a_run_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    save_run(tmp_path, parse_arguments([]))
    with pytest.raises(ArgumentError, match=f"--resume {tmp_path}"):
        train(["--run-dir", str(tmp_path)])


@pytest.mark.parametrize("inside", [".", "checkpoints", "checkpoints/step-00000003"])
def test_a_resumed_run_remembers_its_flags(tmp_path: Path, inside: str) -> None:
    started = parse_arguments(
        ["--num-layers", "8", "--overlap-p2p-comm", "--learning-rate", "1e-3", "--run-dir", "x", "--data", "a", "/b"]
    )
    save_run(tmp_path, started)
    resumed = parse_arguments(["--resume", str(tmp_path / inside), "--train-steps", "17"])
    assert resumed.config == started.config
    assert resumed.run == dataclasses.replace(
        started.run, run_dir=None, resume=str(tmp_path / inside), train_steps=17, data=[str(Path("a").absolute()), "/b"]
    )


def test_damaged_arguments_are_refused(tmp_path: Path) -> None:
    save_run(tmp_path, parse_arguments([]))
    (tmp_path / "arguments.json").write_text('{"run": ')
    with pytest.raises(CheckpointError, match=r"arguments.json cannot be read"):
        parse_arguments(["--resume", str(tmp_path)])


def test_help_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main(["--help"])
    assert "--overlap-p2p-comm" in capsys.readouterr().out


def test_defaults_are_possible() -> None:
    for world_size in (1, 2, 4):
        config_of(world_size=world_size)
    RunArguments()
