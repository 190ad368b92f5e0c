"""The command line, and every impossible one refused before any communication."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.gpt.libraries import choose_libraries
from examples.gpt.process import Process, choose_device
from examples.gpt.program import main
from examples.gpt.settings import ARGUMENTS, Settings, parse
from megatron_pp.config.model_config import ModelParallelConfig
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from testkit.inputs.plan_text import rows, save_plan
from testkit.stand_ins.standin_libraries import write as write_apex
from tests.unit_tests.examples.test_training_folder import save_run


def test_help_shows_real_defaults_and_choices_and_every_option_of_schedules_and_communication(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    flags = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())  # without its frames and line breaks
    for part in (
        "--num-layers INT transformer layers of the whole model (default: 4)",
        "--precision {fp32,bf16}",
        "--pipeline-placement {None,loop,v}",
        "--learning-rate FLOAT peak learning rate of AdamW (default: 0.003)",
        "--deallocate-pipeline-outputs, --no-deallocate-pipeline-outputs",
        "--overlap-pairs",  # in the place of a function
    ):
        assert part in flags, part
    # Nothing this model or program could do with them, or flags of the program's own set them.
    without = {
        *("tensor_model_parallel_size", "context_parallel_size", "sequence_parallel", "params_dtype", "pipeline_dtype"),
        *("enable_autocast", "autocast_dtype", "defer_embedding_wgrad_compute", "barrier_with_L1_time"),
        "calculate_per_token_loss",
    }
    options = {field.name for field in dataclasses.fields(ModelParallelConfig) if field.metadata["cli"]}
    assert [name for name in options - without if f"--{name.replace('_', '-')}" not in flags] == []


CONFIGS = """
4 | | pipeline_model_parallel_size=4 data_parallel_size=1
4 | --data-parallel-size 2 | pipeline_model_parallel_size=2 data_parallel_size=2
4 | --pipeline-model-parallel-size 2 | pipeline_model_parallel_size=2 data_parallel_size=2
1 | | pipeline_model_parallel_size=1 data_parallel_size=1
2 | --precision bf16 | pipeline_dtype=torch.bfloat16 enable_autocast=True autocast_dtype=torch.bfloat16
2 | | pipeline_dtype=torch.float32 enable_autocast=False
2 | --batch-p2p-comm | batch_p2p_comm=True lowering_policy=batched
2 | --no-batch-p2p-comm | batch_p2p_comm=False
2 | --virtual-pipeline-model-parallel-size 2 --overlap-p2p-comm | num_chunks=2 lowering_policy=overlap
2 | --no-deallocate-pipeline-outputs --max-pending-sends 5 | deallocate_pipeline_outputs=False max_pending_sends=5
2 | --num-layers 7 --pipeline-model-parallel-layout 4,3 | layers_of_stages()=[[0,1,2,3],[4,5,6]]
2 | --pipeline-schedule interleaved_1f1b --microbatch-group-size-per-vp-stage 3 | microbatch_group_size_per_vp_stage=3
2 | --pipeline-schedule zb_v | virtual_pipeline_model_parallel_size=2
2 | --pipeline-schedule interleaved_zb | virtual_pipeline_model_parallel_size=2
2 | --pipeline-schedule 1f1b | virtual_pipeline_model_parallel_size=None
2 | --pipeline-schedule breadth_first --virtual-pipeline-model-parallel-size 1 | num_chunks=1
"""


@pytest.mark.parametrize(("world", "flags", "expected"), rows(CONFIGS))
def test_flags_and_the_world_size_make_the_config(world: str, flags: str, expected: str) -> None:
    config = parse(flags.split()).make_config(int(world))
    for name, value in (pair.split("=") for pair in expected.split()):
        found = getattr(config, name.removesuffix("()"))
        assert str(found() if callable(found) else found).replace(" ", "") == value, name


def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    pair = Process(rank=1, world_size=2, local_rank=1, local_world_size=2)
    assert choose_device("auto", pair) == torch.device("cpu")
    assert choose_device("auto", Process()) == torch.device("cuda", 0)


# {run} is the folder of a run, {N.csv} a schedule of N microbatches.
BAD_INPUT = r"""
--no-such-flag | ArgumentError | no-such-flag
--train-step 3 | ArgumentError | Unrecognized options: --train-step, 3 .did you mean --train-steps or --trace-steps
--schedule zb_v | ArgumentError | did you mean --pipeline-schedule\? --help lists all flags
--train-steps many | ArgumentError | train-steps.*many
--num-microbatches 0 | ArgumentError | --num-microbatches is 0; it must be at least 1
--validation-fraction 1.5 | ArgumentError | --validation-fraction is 1.5; .* 0 and 1.0
--validation-fraction 1 | DataError | training text of 0 bytes is too short
--trace first | ScheduleInputError | trace_steps is 'first'; it must list steps
--trace 3,9-12 --train-steps 11 | ArgumentError | 9-12, but the run ends after step 11
--config none.toml | ArgumentError | --config is none.toml, which cannot be used: .*No such file
--learning-rate -1 | ArgumentError | --learning-rate is -1.0; it must be at least 0
--learning-rate inf | ArgumentError | --learning-rate is inf
--min-learning-rate 1 | ArgumentError | between 0 and 0.003
--precision fp8 | ArgumentError | fp8.*fp32.*bf16
--pipeline-model-parallel-size 3 | WorldSizeError | world size is 2.*nearest: 3
--data-parallel-size 4 | WorldSizeError | world size is 2
--pipeline-model-parallel-size 2 --data-parallel-size 2 | WorldSizeError | world size is 2
--pipeline-model-parallel-size 0 | ConfigError | smallest legal value is 1
--data-parallel-size -1 | ConfigError | smallest legal value is 1
--pipeline-schedule zigzag | ScheduleError | zigzag.*1f1b
--pipeline-schedule 1f1b --virtual-pipeline-model-parallel-size 2 | ScheduleError | 2 were given .virtual
--virtual-pipeline-model-parallel-size 0 | ConfigError | smallest legal value is 1
--virtual-pipeline-model-parallel-size 2 --microbatch-group-size-per-vp-stage 1 | ConfigError | nearest legal value is 2
--overlap-p2p-comm --batch-p2p-comm | ConfigError | both True
--num-layers 5 | LayoutError | nearest num_layers: 4 or 6
--pipeline-model-parallel-layout 1,2 | LayoutError | 3 of num_layers 4
--num-attention-heads 3 | ConfigError | 128.*3.*nearest
--hidden-size 36 | ArgumentError | 36 over --num-attention-heads 4 gives heads of an odd width
--data /no/such/path | DataError | /no/such/path is not a file or a readable folder
--max-data-bytes 20000 | DataError | validation text of 1000 bytes is too short
--resume /no/such/run | NoCheckpointError | no run at /no/such/run
--resume a --run-dir b | ArgumentError | both given
--fp8 hybrid | ArgumentError | --fp8 is hybrid, which needs --transformer-impl
--transformer-impl te | ArgumentError | te.*local.*transformer_engine
--pipeline-schedule {5.csv} | FileFormatError | is a schedule of 5 microbatches on 2 ranks; this step has 8 on 2
--pipeline-schedule auto --pipeline-measured none.json | ScheduleError | none.json: cannot be read
--device cuda | ArgumentError | of 2 ranks here each needs a GPU, and there are 0
--run-dir {run} --seed 7 | ArgumentError | holds a run of other settings; give another folder, or --resume {run}
--resume {run} --num-layers 8 | CheckpointLayoutError | num_layers is 4 there and 8 here
--resume {run} --data-parallel-size 2 | CheckpointLayoutError | num_microbatches times data_parallel_size is 8 there
--resume {run} --untie-embeddings-and-output-weights | CheckpointLayoutError | untie_embeddings_and_output_weights is
"""
LIBRARIES = {"--transformer-impl": "transformer_engine", "--optimizer-impl": "apex", "--norm-impl": "apex"}
REFUSED = [*rows(BAD_INPUT), [f"--resume {'x' * 5000}", "NoCheckpointError", "no run at"]]
for flag, library in LIBRARIES.items():
    sentence = f"{flag} is {library}.* (cannot be imported|computes only on GPUs)"
    REFUSED.append([f"{flag} {library}", "ArgumentError", sentence])
BAD_TOML = {
    "trainsteps = 7": "Unrecognized options: --trainsteps",
    "seed = 'x'": "Error parsing --seed",
    "seed": "Expected '='",
    "data = ['--help']": "no part may begin with '-'",
    "a = " + "[" * 5000: "it is nested too deeply",
    "a." * 50000 + "b = 1": "it has 100,005 characters; settings have at most 16,384",
    "seed = '\\x1b[2J'": r"Error parsing --seed.*x1b",
}
for number, words in enumerate(BAD_TOML.values()):
    sentence = rf"--config is .*{number}.toml, which cannot be used: .*{words}"
    REFUSED.append([f"--config {{{number}.toml}}", "ArgumentError", sentence])
DAMAGED = ["", '{"seed": ', "[]", '{"seed": null}', '{"data": ["--help"]}', '{"num_layers": true}']
for number in range(len(DAMAGED)):
    REFUSED.append([f"--resume {{damaged-{number}}}", "CheckpointError", "arguments.json cannot be read"])


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the files that flags name in braces."""
    folder = tmp_path_factory.mktemp("given")
    save_run(folder / "run", parse([]), 3)
    save_plan(build_plan(PlanSpec("1f1b", 2, 1, 5)), folder / "5.csv", "torch-csv")
    for number, text in enumerate(BAD_TOML):
        (folder / f"{number}.toml").write_text(text)
    for number, text in enumerate(DAMAGED):
        (folder / f"damaged-{number}").mkdir()
        (folder / f"damaged-{number}" / ARGUMENTS).write_text(text)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "error", "sentence"), REFUSED, ids=[flags[:60] for flags, *_ in REFUSED])
def test_bad_input_is_reported_before_any_communication(
    flags: str,
    error: str,
    sentence: str,
    given: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This process is rank 1 of 2 with no peer in sight: who tried to communicate would wait. It is the first rank of
    its node, which reports bad input."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(re.sub(r"{(.*?)}", rf"{given}/\1", flags).split()) == (3 if error == "CheckpointError" else 2)
    assert not dist.is_initialized()
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(sentence.replace("{run}", f"{given}/run"), line)
    assert line.startswith(f"train.py: {error}: ")


def test_auto_leaves_apex_alone_without_its_compiled_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """apex's Python modules import without the compiled parts, and fail at the first call."""
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
