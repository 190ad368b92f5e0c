"""The command line, and every impossible one refused before any communication."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.gpt.checkpoint import Checkpoint, make_newest, write_description
from examples.gpt.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointLayoutError,
)
from examples.gpt.libraries import choose_libraries
from examples.gpt.process import Process, choose_device
from examples.gpt.program import _layout, find_start, main
from examples.gpt.settings import ARGUMENTS, Settings, parse, save_settings
from megatron_pp.config.model_config import ModelParallelConfig, TransformerConfig
from megatron_pp.errors import ConfigError, PlanError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from tests.harness.plan_text import rows, save_plan
from tests.harness.standin_libraries import write as write_apex
from tests.harness.training_ranks import train_here


def config_of(*argv: str, world_size: int = 2) -> TransformerConfig:
    return parse(argv).make_config(world_size)


def test_help_shows_real_defaults_and_choices_and_every_option_of_schedules_and_communication() -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main(["--help"])
    flags = " ".join(said.getvalue().replace("\u2502", " ").split())  # without its frames and line breaks
    for part in (
        "--num-layers INT transformer layers of the whole model (default: 4)",
        "--precision {fp32,bf16}",
        "--pipeline-placement {None,loop,v}",
        "--learning-rate FLOAT peak learning rate of AdamW (default: 0.003)",
        "--deallocate-pipeline-outputs, --no-deallocate-pipeline-outputs",
        "--overlap-pairs",  # in the place of a function
    ):
        assert part in flags, part
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
        "calculate_per_token_loss",  # all samples have as many tokens
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


GRIDS = """
4 | None | None | (4, 1)
4 | None | 2 | (2, 2)
4 | 2 | None | (2, 2)
4 | 1 | 4 | (1, 4)
1 | None | None | (1, 1)
4 | 3 | None | WorldSizeError: .*world size is 4
4 | None | 3 | WorldSizeError: .*world size is 4
4 | 2 | 1 | WorldSizeError: .*world size is 4
2 | None | 4 | WorldSizeError: .*world size is 2
2 | 0 | None | ConfigError: .*smallest legal value is 1
2 | None | 0 | ConfigError: .*smallest legal value is 1
2 | -2 | None | ConfigError: .*smallest legal value is 1
2 | None | -1 | ConfigError: .*smallest legal value is 1
"""


@pytest.mark.parametrize(("world", "pipeline", "replicas", "expected"), rows(GRIDS))
def test_the_grid_fills_in_what_is_left_open(world: str, pipeline: str, replicas: str, expected: str) -> None:
    sizes = [None if text == "None" else int(text) for text in (pipeline, replicas)]
    settings = Settings(pipeline_model_parallel_size=sizes[0])
    settings.model.data_parallel_size = sizes[1]
    try:
        config = settings.make_config(int(world))
        found = str((config.pipeline_model_parallel_size, config.data_parallel_size))
    except ConfigError as error:
        found = f"{type(error).__name__}: {error}"
    assert found == expected or re.match(expected, found), found


def test_torchrun_tells_a_process_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Process.from_environment() == Process(5, 8, 1, 4)
    for name in environment:
        monkeypatch.delenv(name)
    assert Process.from_environment() == Process(0, 1, 0, 1)


def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    pair = Process(rank=1, world_size=2, local_rank=1, local_world_size=2)
    assert choose_device("auto", pair) == torch.device("cpu")
    assert choose_device("auto", Process()) == torch.device("cuda", 0)
    with pytest.raises(ArgumentError, match="of 2 ranks here each needs a GPU, and there are 1"):
        choose_device("cuda", pair)


BAD_INPUT = r"""
--no-such-flag | ArgumentError | no-such-flag
--train-step 3 | ArgumentError | Unrecognized options: --train-step
--train-steps many | ArgumentError | train-steps.*many
--num-microbatches 0 | ArgumentError | --num-microbatches is 0; it must be at least 1
--seq-length 0 | ArgumentError | --seq-length is 0
--validation-fraction 1.5 | ArgumentError | --validation-fraction is 1.5; .* 0 and 1.0
--validation-fraction 1 | DataError | training text of 0 bytes is too short
--max-data-bytes 0 | ArgumentError | --max-data-bytes is 0; it must be at least 1
--trace first | ScheduleInputError | trace_steps is 'first'; it must list steps
--trace 3,9-12 --train-steps 11 | ArgumentError | 9-12, but the run ends after step 11
--config none.toml | ArgumentError | --config is none.toml, which cannot be used: .*No such file
--micro-batch-size -1 | ArgumentError | --micro-batch-size is -1
--train-steps -1 | ArgumentError | --train-steps is -1
--learning-rate -1 | ArgumentError | --learning-rate is -1.0; it must be at least 0
--learning-rate nan | ArgumentError | --learning-rate is nan
--learning-rate inf | ArgumentError | --learning-rate is inf
--min-learning-rate 1 | ArgumentError | between 0 and 0.003
--clip-grad nan | ArgumentError | --clip-grad is nan
--precision fp8 | ArgumentError | fp8.*fp32.*bf16
--pipeline-model-parallel-size 3 | WorldSizeError | world size is 2.*nearest: 3
--data-parallel-size 4 | WorldSizeError | world size is 2
--pipeline-schedule zigzag | ScheduleError | zigzag.*1f1b
--pipeline-schedule 1f1b --virtual-pipeline-model-parallel-size 2 | ScheduleError | 2 were given .virtual
--virtual-pipeline-model-parallel-size 0 | ConfigError | smallest legal value is 1
--virtual-pipeline-model-parallel-size 2 --microbatch-group-size-per-vp-stage 1 | ConfigError | nearest legal value is 2
--overlap-p2p-comm --batch-p2p-comm | ConfigError | both True
--num-layers 5 | LayoutError | nearest num_layers: 4 or 6
--pipeline-model-parallel-layout 1,2 | LayoutError | 3 of num_layers 4
--num-attention-heads 3 | ConfigError | 128.*3.*nearest
--hidden-size 36 | ArgumentError | 36 over --num-attention-heads 4 gives heads of an odd width
--data /no/such/path | DataError | /no/such/path is no file or readable folder
--max-data-bytes 2000 | DataError | training text of 1900 bytes is too short
--max-data-bytes 20000 | DataError | validation text of 1000 bytes is too short
--resume /no/such/run | NoCheckpointError | no run at /no/such/run
--resume a --run-dir b | ArgumentError | both given
--fp8 hybrid | ArgumentError | --fp8 is hybrid, which needs --transformer-impl
--transformer-impl te | ArgumentError | te.*local.*transformer_engine
--pipeline-schedule none.csv | ScheduleError | none.csv: cannot be read
--pipeline-schedule auto --pipeline-measured none.json | ScheduleError | none.json: cannot be read
--device cuda | ArgumentError | of 2 ranks here each needs a GPU, and there are 0
"""
LIBRARIES = {"--transformer-impl": "transformer_engine", "--optimizer-impl": "apex", "--norm-impl": "apex"}
REFUSED = [*rows(BAD_INPUT), [f"--resume {'x' * 5000}", "NoCheckpointError", "no run at"]]
for flag, library in LIBRARIES.items():
    sentence = f"{flag} is {library}.* (cannot be imported|computes on GPUs alone)"
    REFUSED.append([f"{flag} {library}", "ArgumentError", sentence])


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 1 of 2 with no peer in sight: who tried to communicate would wait. It is the first rank of
    its node, which reports bad input."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.slow
@pytest.mark.usefixtures("second_of_two")
@pytest.mark.parametrize(("flags", "error", "sentence"), REFUSED, ids=[flags[:60] for flags, *_ in REFUSED])
def test_bad_input_is_reported_before_any_communication(
    flags: str, error: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags.split()) == 2
    assert not dist.is_initialized()
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(sentence, line)
    assert line.startswith(f"train.py: {error}: ")


def test_auto_leaves_apex_alone_without_its_compiled_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python imports all the same, and fails at the first call."""
    monkeypatch.syspath_prepend(write_apex(tmp_path))
    gpu = torch.device("cuda")
    parts, fused_adam, _ = choose_libraries(Settings(), gpu, split=False)
    assert fused_adam.__module__ == "apex.optimizers"
    assert parts.norm.__module__ == "apex.normalization"
    for name in ("amp_C", "fused_layer_norm_cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    parts, fused_adam, _ = choose_libraries(Settings(), gpu, split=False)
    assert fused_adam is None
    assert parts.norm is torch.nn.LayerNorm
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("second_of_two")
def test_a_schedule_file_that_does_not_fit_is_reported_before_any_communication(tmp_path: Path) -> None:
    save_plan(build_plan(PlanSpec("1f1b", 2, 1, 5)), tmp_path / "mine.csv", "torch-csv")
    flags = ["--pipeline-schedule", str(tmp_path / "mine.csv")]
    with pytest.raises(PlanError, match="is a schedule of 5 microbatches on 2 ranks; this step has 8 on 2"):
        train_here(flags)
    assert not dist.is_initialized()
    assert main(flags) == 2


def test_a_schedule_brings_its_number_of_chunks() -> None:
    for name, chunks in {"zb_v": 2, "zb_h1": None, "interleaved_zb": 2, "1f1b": None}.items():
        assert config_of("--pipeline-schedule", name).virtual_pipeline_model_parallel_size == chunks
    config = config_of("--pipeline-schedule", "breadth_first", "--virtual-pipeline-model-parallel-size", "1")
    assert config.num_chunks == 1


def test_files_are_remembered_wherever_the_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_settings(parse(["--pipeline-schedule", "a.csv", "--pipeline-measured", "b.json"]), tmp_path)
    saved = json.loads((tmp_path / ARGUMENTS).read_text())
    assert (saved["pipeline_schedule"], saved["pipeline_measured"]) == (
        str(tmp_path / "a.csv"),
        str(tmp_path / "b.json"),
    )


def test_a_toml_file_gives_settings_which_flags_override(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(
        'train_steps = 7\ndata = ["a", "b"]\ntensorboard = false\nbatch_p2p_comm = false\n'
        "[model]\nnum-layers = 8\nlayernorm_epsilon = 1e-6\n[optimizer]\nlearning_rate = 1e-3\n"
    )
    settings = parse(["--train-steps", "9", "--config", str(file)])
    assert (settings.train_steps, settings.data, settings.tensorboard) == (9, ("a", "b"), False)
    assert (settings.model.num_layers, settings.model.layernorm_epsilon, settings.learning_rate) == (8, 1e-6, 1e-3)
    assert settings.model.batch_p2p_comm is False


AS_ON_PYTHON_3_10 = """
import sys, tomllib
import torch, tyro
sys.modules["tomli"] = tomllib  # the same parser under the name that it has on PyPI
sys.modules["tomllib"] = None  # an import of it raises ImportError
sys.version_info = (3, 10, 0, "final", 0)
from examples.gpt.settings import parse
print(parse(["--config", sys.argv[1]]).train_steps)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no tomllib to lend")
def test_a_toml_file_is_read_without_tomllib(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text("train_steps = 7")
    command = [sys.executable, "-c", AS_ON_PYTHON_3_10, str(tmp_path / "small.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainsteps = 7", "Unrecognized options: --trainsteps"),
        ("seed = 'x'", "Error parsing --seed"),
        ("seed", "Expected '='"),
        ("data = ['--help']", "no part may begin with '-'"),
        ("a = " + "[" * 5000, "it is nested too deeply"),
        ("a." * 50000 + "b = 1", "it has 100,005 characters; settings have at most 16,384"),
        ("seed = '\\x1b[2J'", r"Error parsing --seed.*x1b"),
    ],
)
def test_a_toml_file_that_cannot_be_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ArgumentError, match=rf"--config is .*bad.toml, which cannot be used: .*{words}"):
        parse(["--config", str(tmp_path / "bad.toml")])


def test_a_switch_that_may_be_open_is_a_switch() -> None:
    found = [parse(argv).model.batch_p2p_comm for argv in ([], ["--batch-p2p-comm"], ["--no-batch-p2p-comm"])]
    assert found == [None, True, False]


def save_run(folder: Path, settings: Settings) -> Path:
    """What a run of two ranks leaves, tensors apart."""
    checkpoint = folder / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    layout = _layout(settings, settings.make_config(2))
    write_description(Checkpoint(checkpoint, checkpoint.name, 3, layout, {}, {}, {}))
    (folder / "checkpoints" / "latest").write_text("step-00000003\n")
    save_settings(settings, folder)
    return checkpoint


OTHER_MODELS = """
--num-layers 8 | num_layers is 4 there and 8 here
--hidden-size 64 | hidden_size is 128 there and 64 here
--micro-batch-size 2 | micro_batch_size is 4 there and 2 here
--data-parallel-size 2 | num_microbatches times data_parallel_size is 8 there and 16 here
--untie-embeddings-and-output-weights | untie_embeddings_and_output_weights is False there
"""


@pytest.mark.slow
@pytest.mark.usefixtures("second_of_two")
@pytest.mark.parametrize(("flags", "difference"), rows(OTHER_MODELS))
def test_checkpoints_of_another_model_are_refused(flags: str, difference: str, tmp_path: Path) -> None:
    save_run(tmp_path, parse([]))
    with pytest.raises(CheckpointLayoutError, match=difference):
        train_here([*flags.split(), "--resume", str(tmp_path)])
    assert not dist.is_initialized()


@pytest.mark.usefixtures("second_of_two")
def test_a_folder_with_a_run_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    save_run(tmp_path, parse([]))
    with pytest.raises(ArgumentError, match=f"holds a run of other settings; give another, or --resume {tmp_path}"):
        train_here(["--run-dir", str(tmp_path), "--seed", "7"])


def test_a_restart_goes_on_from_what_its_run_has_saved(tmp_path: Path) -> None:
    named = save_run(tmp_path, parse([]))
    settings = parse(["--resume", str(named)])
    layout = _layout(settings, settings.make_config(2))
    later = named.with_name("step-00000005")
    later.mkdir()
    write_description(Checkpoint(later, later.name, 5, layout, {}, {}, {}))
    make_newest(later)
    starts = [find_start(settings, layout, again).checkpoint for again in (False, True)]
    assert [start.step for start in starts if start is not None] == [3, 5]


@pytest.mark.parametrize("inside", [".", "checkpoints", "checkpoints/step-00000003"])
def test_a_resumed_run_remembers_its_flags(tmp_path: Path, inside: str) -> None:
    started = parse(
        ["--num-layers", "8", "--overlap-p2p-comm", "--learning-rate", "1e-3", "--run-dir", "x", "--data", "a", "/b"]
    )
    save_run(tmp_path, started)
    resumed = parse(["--resume", str(tmp_path / inside), "--train-steps", "17"])
    data = (str(Path("a").absolute()), "/b")
    changes: dict[str, Any] = {"run_dir": None, "resume": str(tmp_path / inside), "train_steps": 17, "data": data}
    assert resumed == dataclasses.replace(started, **changes)


def test_a_schedule_that_is_given_anew_brings_its_own_chunks(tmp_path: Path) -> None:
    save_run(tmp_path, parse(["--virtual-pipeline-model-parallel-size", "2", "--overlap-p2p-comm"]))
    resumed = parse(["--resume", str(tmp_path), "--pipeline-schedule", "zb_h1"])
    assert (resumed.model.virtual_pipeline_model_parallel_size, resumed.model.overlap_p2p_comm) == (None, True)


@pytest.mark.parametrize(
    "text", ["", '{"seed": ', "[]", '{"seed": null}', '{"data": ["--help"]}', '{"num_layers": true}']
)
def test_damaged_arguments_are_refused(tmp_path: Path, text: str) -> None:
    save_run(tmp_path, parse([]))
    (tmp_path / "arguments.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"arguments.json cannot be read"):
        parse(["--resume", str(tmp_path)])


def test_defaults_are_possible() -> None:
    for world_size in (1, 2, 4):
        config_of(world_size=world_size)
    Settings().check()
