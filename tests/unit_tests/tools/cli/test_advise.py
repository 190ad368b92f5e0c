"""``megatron-pp advise``."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.config.rules import lowering_policy
from megatron_pp.integrations import on_import
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.measured import measured_values
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.spec import POLICIES, PlanSpec
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.tools.advise.answer import megatron_models_run, our_flags, our_settings
from megatron_pp.tools.advise.candidates import candidates
from megatron_pp.tools.advise.evaluate import Outcome
from megatron_pp.tools.advise.model import PART, Model, layer
from megatron_pp.tools.advise.question import Question
from megatron_pp.tools.cli import advise, run
from testkit.sweeps import EXHAUSTIVE
from tests.unit_tests.tools.cli.conftest import assert_refused
from tests.unit_tests.tools.test_trace_report import write_traces

SMALL = ("advise", "-P", 4, "--global-batch", 8, "--memory-gb", 80, "--jobs", 1)
COSTS = ("--forward-ms", 1, "--backward-ms", 1, "--weight-ms", 1, "--activation-gb", 2, "--p2p-ms", 0.1)
TIMES = {"forward_ms": 1, "backward_ms": 2}
FEW = ("--max-chunks", 2, "--schedules", "1f1b,zb_h1,zb_v,interleaved_1f1b")


def test_the_answer_comes_first(command, tmp_path):
    picture = tmp_path / "front.svg"
    code, out, err = command(*SMALL, *COSTS, *FEW, "--plot", picture)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("run zb_v: V=2 (v placement), M=8 microbatches of 1, overlap, layers in equal shares")
    assert "step 26.8 ms" in lines[1]
    assert "of the bound" in lines[1]
    assert lines[2].strip().startswith("memory of each rank 8.76, 8.96, 8.96, 8.76 GB, of 80, 0.96 of it for")
    more = "communicators and context are estimated for NVLink; over sockets, up to 1.5 GB were measured"
    assert lines[3].strip() == more
    assert "verified: complete, lifetime, rendezvous, one_queue, any_wait, order" in lines[5]
    flags = "--pipeline-schedule zb_v --overlap-p2p-comm pretrain_gpt.py --pipeline-model-parallel-size 4"
    sizes = "--num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 1"
    assert f"torchrun --nproc-per-node 4 -m megatron_pp run {flags} {sizes}" in out
    assert "Step time against memory" in out
    assert "Why not another" in out
    assert "slower" in out
    assert picture.read_text().startswith("<?xml")
    assert "zb_v V=2" in picture.read_text()


def test_a_signal_ends_the_search_with_an_answer(command, monkeypatch):
    @contextmanager
    def progress():
        yield lambda done, of, what: not what.startswith("estimating") and os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(advise, "_progress", progress)
    before = signal.getsignal(signal.SIGTERM)
    code, out, err = command(*SMALL, *COSTS, *FEW)
    assert (code, err) == (3, "")
    assert out.startswith("run ")
    assert "interrupted after" in out
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_ends_the_search_for_an_order_with_the_pipeline_that_was_found(command, monkeypatch):
    monkeypatch.setattr(advise, "best_order", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    words = (*SMALL, *COSTS, "--schedules", "1f1b", "--microbatch-costs", "1,2,1,2,1,2,1,2")
    code, out, err = command(*words)
    assert (code, err) == (3, "")
    assert out.startswith("run 1f1b")
    assert "interrupted before an order of the unequal microbatches was found" in out
    code, out, _ = command(*words, "--json")
    assert code == 3
    assert (json.loads(out)["interrupted"], json.loads(out)["microbatch_order"]) == (True, None)


def test_a_bar_on_the_terminal_counts(capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with advise._progress():
        pass
    assert "None" not in capsys.readouterr().err
    with advise._progress() as report:
        report(3, 8, "zb_v")
    err = capsys.readouterr().err
    assert "38%" in err
    assert "left" in err


def test_a_long_search_says_how_far_it_is_where_there_is_no_terminal(command, monkeypatch):
    monkeypatch.setattr(advise, "_SILENCE", 0.0)
    code, out, err = command(*SMALL, *COSTS, *FEW)
    assert (code, out[:4]) == (0, "run ")
    assert re.search(r"^megatron-pp advise: \d+% done, zb_v V=2 M=8$", err, re.MULTILINE)


def test_a_search_that_was_cut_short_says_so_first(command):
    code, out, err = command(*SMALL, *COSTS, "--budget-s", 0)
    assert (code, err) == (0, "")
    assert re.search(r"; search cut short: \d+ of \d+ candidates were not built$", out.splitlines()[0])
    assert "cut short" not in command(*SMALL, *COSTS, *FEW)[1]
    words = ("-P", 4, "--global-batch", 8, "--memory-gb", 80, *COSTS, "--sequence-slices", 100000)
    answer = command("advise", *words, "--schedules", "seq_1f1b", "--jobs", 1)
    assert_refused(answer, 2, "search cut short after", "none of 1 candidates was built", "give a larger --budget-s")


def test_json_has_the_same(command):
    answer = json.loads(command(*SMALL, *COSTS, *FEW, "--json", "--device", "one_queue")[1])
    best = answer["recommended"]
    assert (best["schedule"], best["num_chunks"], best["num_microbatches"]) == ("zb_v", 2, 8)
    assert best["certificate"]["device"] == ["one_queue"]
    assert best["bound_ms"] <= best["step_ms"] == answer["pareto"][0]["step_ms"]
    assert len(best["memory_gb"]) == 4
    assert {one["schedule"] for one in answer["alternatives"]} == {"1f1b", "zb_h1", "interleaved_1f1b", "zb_v"}
    assert all(one["why_not"] for one in answer["alternatives"])


def test_flags_are_those_of_the_command_that_runs_them(monkeypatch, tmp_path):
    """If Megatron's models cannot run the schedule, the answer has fields of our config instead of flags."""
    (tmp_path / "m.json").write_text("{}")
    given = []
    monkeypatch.setattr(on_import, "install_on_import", given.append)
    asked = Question(4, 8, 80.0, ((1, Model((layer(PART, 4, 4, 4, 8.0),))),), slices=(1, 2), host_bandwidth=1.0)
    for one in candidates(asked):
        for policy in POLICIES:
            outcome = Outcome(replace(one, policy=policy, group_size=8))
            assert set(our_settings(outcome)) <= {field.name for field in fields(TransformerConfig)}
            if megatron_models_run(outcome):
                run.prepare([*our_flags(outcome, str(tmp_path / "m.json")), __file__])
                assert lowering_policy(SimpleNamespace(**given.pop().overrides)) == policy
            else:
                assert one.slices == 2


def test_slices_are_for_a_loop_of_ones_own(command):
    words = ("--schedules", "seq_1f1b", "--sequence-slices", 2)
    code, out, _ = command(*SMALL, *COSTS, *words)
    assert code == 0
    assert "TransformerConfig(pipeline_schedule='seq_1f1b', overlap_p2p_comm=True, sequence_slices=2, ...)" in out
    assert "megatron-pp run" not in out
    assert json.loads(command(*SMALL, *COSTS, *words, "--json")[1])["recommended"]["flags"] is None


def test_advise_takes_costs_of_layers(command):
    words = ("--costs-per", "layer", "--layers", 14, "--loss-ms", "2,2,2", "--max-chunks", 1, "--schedules", "zb_h1")
    code, out, _ = command(*SMALL, *COSTS, *words)
    assert code == 0
    assert "layers 4,4,4,2" in out
    assert "--pipeline-model-parallel-layout 'Et*4|(t*4|)*2t*2L'" in out


def test_advise_takes_costs_of_stages(command):
    code, out, _ = command(*SMALL, "--forward-ms", "1,1,1,2", "--backward-ms", "2,2,2,4", *FEW)
    assert code == 0
    assert "layers as given" in out


def test_a_search_writes_what_it_plans_for(command, tmp_path):
    path = tmp_path / "advised.json"
    size = ("advise", "-P", 2, "--global-batch", 4, "--memory-gb", 80, "--jobs", 1)
    code, out, _ = command(*size, *COSTS, "--schedules", "auto", "--max-chunks", 1, "--measured-out", path)
    assert code == 0
    assert f"--pipeline-measured {path}" in out
    measured = measured_values(str(path))
    assert measured.forward == (1.0,) * 2
    assert measured.transfer == 0.1
    assert command(*size, "--costs", path, *FEW)[0] == 0
    words = (*size, *COSTS, "--max-chunks", 1, "--measured-out", tmp_path / "m.json", "--json")
    best = json.loads(command(*words, "--schedules", "auto")[1])["recommended"]
    assert best["flags"]["megatron_pp"][2:4] == ["--pipeline-measured", str(tmp_path / "m.json")]
    (tmp_path / "m.json").unlink()
    assert command(*words, "--schedules", "1f1b")[2].endswith(
        "m.json is not written: 1f1b is not a schedule with a search\n"
    )
    assert not (tmp_path / "m.json").exists()


def test_advise_estimates_times_from_sizes_and_a_gpus_rates(command):
    sizes = "--num-layers 14 --hidden-size 1024 --seq-length 2048 --num-attention-heads 16 --vocab-size 32000 --bf16 "
    sizes += "--global-batch-size 8 --pipeline-model-parallel-size 2"
    words = ("--gpu", "h100", "--max-chunks", 1, "--schedules", "1f1b", "--jobs", 1)
    code, out, _ = command("advise", "--megatron-args", sizes, *words)
    assert code == 0
    assert "tokens/s" in out
    assert "MFU" in out
    assert "GB, of 80" in out
    given = ("-P", 2, "--global-batch", 8, "--layers", 14, "--hidden-size", 1024, "--seq-length", 2048)
    given += ("--attention-heads", 16, "--vocab-size", 32000)
    assert command("advise", *given, *words)[1] == out


def test_a_hybrid_model_gets_the_stages_of_its_pattern(command):
    sizes = (
        "--hybrid-layer-pattern M-M-*-|M-M-*-/M- --hidden-size 1024 --seq-length 2048 --num-attention-heads 16 --bf16"
    )
    words = ("--gpu", "h100", "--max-chunks", 1, "--schedules", "1f1b", "--json")
    found = json.loads(command(*SMALL, "--megatron-args", sizes, *words)[1])["recommended"]
    flags = found["flags"]["megatron"]
    pattern = flags[flags.index("--hybrid-layer-pattern") + 1]
    assert pattern.replace("|", "") == "M-M-*-M-M-*-/M-"
    assert pattern.count("|") == 3
    assert sum(found["layers_per_stage"]) == 13


@pytest.mark.parametrize("slower", [("--gpu-network", 1), ("--gpu-link", 1, "--gpus-per-node", 72)])
def test_links_of_experts_are_of_the_gpu_or_given(command, slower):
    sizes = ("--layers", 8, "--hidden-size", 1024, "--seq-length", 2048, "--experts", 32, "--expert-parallel", 32)
    words = (*SMALL, "--gpu", "h100", *sizes, "--max-chunks", 1, "--schedules", "1f1b", "--p2p-ms", 0, "--json")
    fast, slow = (json.loads(command(*words, *more)[1])["recommended"]["step_ms"] for more in ((), slower))
    assert slow > 3 * fast


BUSY = 4  # other processes that use the machine's cores
DEEPSEEK = (
    "--num-layers 61 --hidden-size 7168 --seq-length 4096 --ffn-hidden-size 18432 --num-attention-heads 128 --swiglu "
    "--bf16 --multi-latent-attention --q-lora-rank 1536 --num-experts 256 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) "
    "--expert-tensor-parallel-size 1 --expert-model-parallel-size 64 --vocab-size 129280 --mtp-num-layers 1 "
    "--use-distributed-optimizer --moe-token-dispatcher-type flex --global-batch-size 512 "
    "--pipeline-model-parallel-size 16"
)


@pytest.mark.slow
@pytest.mark.skipif(not EXHAUSTIVE, reason="takes minutes of all cores: MEGATRON_PP_EXHAUSTIVE=1 runs it")
def test_deepseek_on_16_ranks_is_answered_on_a_busy_machine():
    """The search needs the processor time of 20 s on two idle cores; three times as much if caches are shared."""
    command = [sys.executable, "-m", "megatron_pp", "advise", "--gpu", "h100", "--data-parallel", "16", "--json"]
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        found = subprocess.run([*command, "--megatron-args", DEEPSEEK], capture_output=True, check=True, text=True)
    finally:
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        for other in others:
            other.kill()
            other.wait()
    answer = json.loads(found.stdout)
    assert answer["recommended"]["layout"].count("m") == 1
    assert max(answer["recommended"]["memory_gb"]) <= 80
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3 * 2 * 20


def test_an_encoder_moves_layers_away_from_its_stage(command):
    sizes = ("--layers", 16, "--hidden-size", 1024, "--seq-length", 2048, "--vocab-size", 1000)
    encoder = ("--encoder-layers", 4, "--encoder-hidden-size", 1024, "--encoder-seq-length", 2048)
    words = (*SMALL, "--gpu", "h100", *sizes, "--max-chunks", 1, "--schedules", "1f1b", "--json")
    found = json.loads(command(*words, *encoder)[1])["recommended"]
    assert found["layers_per_stage"][0] < min(found["layers_per_stage"][1:])


def test_sizes_beside_times_say_what_a_message_is(command):
    sizes = "--num-layers 8 --hidden-size 1000 --seq-length 1000 --bf16 --mtp-num-layers 1"
    words = (*COSTS[:-2], "--megatron-args", sizes, "--max-chunks", 1, "--schedules", "1f1b", "--json")
    slow, fast = (json.loads(command(*SMALL, *words, "--bandwidth", rate)[1])["recommended"] for rate in (2, 2e6))
    assert slow["step_ms"] > fast["step_ms"] + 6  # the first microbatch waits for 6 or more messages of 2 MB
    assert slow["layout"].count("m") == 1
    given = json.loads(command(*SMALL, *words, "--bandwidth", 2, "--activation-mb", 2)[1])["recommended"]
    assert given["step_ms"] == slow["step_ms"]


def test_a_file_of_layers(command, tmp_path):
    path = tmp_path / "layers.json"
    decoder = {"count": 6, "forward_ms": 1, "backward_ms": 2, "activation_gb": 1, "static_gb": 2}
    loss = {"kind": "loss", "forward_ms": 2, "backward_ms": 2, "weight_ms": 2}
    embedding = {"kind": "embedding", "forward_ms": 0, "backward_ms": 0}
    path.write_text(json.dumps({"layers": [embedding, decoder, loss], "message_mb": 10}))
    words = ("--bandwidth", 10, "--max-chunks", 1, "--schedules", "1f1b", "--json", "--jobs", 1)
    code, out, _ = command("advise", "-P", 2, "--global-batch", 4, "--memory-gb", 80, "--costs", path, *words)
    assert code == 0
    best = json.loads(out)["recommended"]
    assert best["layout"] == "Et*4|t*2L"
    # 4 layers with 2 GB of parameters and 1 of activations for each of 2 microbatches, and pipeline tensors.
    taken = (534 + 8 * (10 + 2)) * 2**20 / 1e9  # a CUDA context, and channels with one neighbour
    assert best["communicators_and_context_gb"] == [pytest.approx(taken)] * 2
    assert best["memory_gb"][0] == pytest.approx(4 * 2 + 2 * 4 + taken, abs=0.05)
    assert_refused(
        command(*SMALL, "--costs", path, "--static-gb", 1), 2, "--static-gb cannot be given with --costs FILE"
    )


def test_outputs_that_stay_are_counted(command, tmp_path):
    """GPipe with eight microbatches: the first rank keeps all outputs. If outputs are freed after their send, it keeps
    one."""
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"layers": [{"count": 4, **TIMES, "activation_gb": 1}], "message_mb": 500}))
    words = ("--global-batch", 8, "--memory-gb", 200, "--costs", path, "--bandwidth", 1000, "--max-chunks", 1)
    line = ("advise", "-P", 2, *words, "--schedules", "gpipe", "--no-recompute", "--json", "--jobs", 1, "--gloo")
    gone, kept = (json.loads(command(*line, *more)[1])["recommended"] for more in ((), ("--keep-outputs",)))
    assert [b - a for a, b in zip(gone["memory_gb"], kept["memory_gb"], strict=True)] == pytest.approx([7 * 0.5, 0])
    assert command(*line, "--keep-outputs", "--memory-gb", gone["memory_gb"][0] + 3)[0] == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"layers": [{"forward": 1}]}, "'forward' is not known"),
        ({"layers": [TIMES], "mesage_mb": 1}, "key 'mesage_mb' is not known"),
        ({"layers": None}, "layers must be a list of objects"),
        ({"layers": [["forward_ms", "backward_ms"]]}, "layers must be a list of objects"),
        ({"layers": []}, "no layers"),
        ({"layers": [TIMES], "message_mb": -1}, "message_mb is -1; it must be a number from 0 to 1e+18"),
        ({"layers": [{**TIMES, "forward_ms": "1"}]}, "forward_ms is '1'; it must be a number"),
        ({"layers": [{**TIMES, "backward_ms": float("nan")}]}, "backward_ms is nan"),
        ({"layers": [{**TIMES, "weight_ms": None}]}, "weight_ms is None"),
        ({"layers": [{**TIMES, "static_gb": 10**400}]}, "static_gb is 1000"),
        ({"layers": [{**TIMES, "count": 1.5}]}, "the count of a layer is 1.5; it must be a whole number"),
        ({"layers": [{**TIMES, "count": 0}]}, "the count of a layer is 0"),
        ({"layers": [{**TIMES, "count": 10**9}]}, "more than 100000 layers"),
        ({"layers": [{**TIMES, "kind": ["decoder"]}]}, "the kind of a layer is ['decoder']"),
        ({"forward": [1, 1], "run": {"pipeline_size": "2"}}, "pipeline_size of run is '2'"),
        ({"forward": [1, 1], "units": {"time": "ms"}}, "memory was not measured"),
    ],
)
def test_a_file_of_costs_that_holds_none_is_refused(command, tmp_path, content, problem):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(content))
    assert_refused(command(*SMALL, "--costs", path), 2, str(path), problem)


def test_advise_uses_measured_stages_transfers_and_added_memory(command, tmp_path):
    path = tmp_path / "measured.json"
    values = {"forward": [1, 1], "backward_input": [1, 1], "weight": [1, 1], "activation": [2, 2], "transfer": 0.5}
    path.write_text(json.dumps(values))
    words = ("--global-batch", 1, "--memory-gb", 80, "--schedules", "1f1b", "--jobs", 1, "--costs", path)
    _, out, _ = command("advise", "-P", 2, *words, "--static-gb", "3,5", "--gloo")
    assert "step 7 ms" in out  # 6 ms of compute, a message forward and a message back
    assert "memory of each rank 5, 7 GB, of 80\n" in out
    _, out, _ = command("advise", "-P", 2, *words)
    assert "parameters, gradients and optimizer states not counted (--static-gb)" in out
    assert_refused(command("advise", "-P", 2, *words, "--static-gb", "1,2,3"), 2, "--static-gb has 3 numbers")


def test_microbatches_are_as_large_as_when_they_were_measured(command, tmp_path):
    path = tmp_path / "measured.json"
    run = {"pipeline_size": 2, "micro_batch_size": 4, "seq_length": 100}
    path.write_text(json.dumps({"forward": [4, 4], "backward_input": [4, 4], "weight": [4, 4], "run": run}))
    words = ("--global-batch", 8, "--memory-gb", 80, "--schedules", "1f1b", "--jobs", 1, "--json", "--costs", path)
    as_it_was, half = (
        json.loads(command("advise", *words, *size)[1])["recommended"] for size in ((), ("--micro-batch-size", 2))
    )
    assert (as_it_was["micro_batch_size"], as_it_was["num_microbatches"], as_it_was["step_ms"]) == (4, 2, 36)
    assert as_it_was["tokens_per_second"] == pytest.approx(8 * 100 / 36e-3)
    assert (half["num_microbatches"], half["step_ms"]) == (4, 30)


def test_memory_that_is_too_small_says_what_would_do(command):
    words = ("--memory-gb", 0.1, "--no-recompute", *FEW)
    code, out, err = command(*SMALL[:5], *SMALL[7:], *COSTS, *words)
    assert (code, out) == (1, "")
    assert "nothing fits into 0.1 GB; the least memory that was found is 8.66 GB" in err


def test_a_plan_that_fits_without_communicators_and_context_only_is_refused(command):
    """Between two ranks the channels of 1F1B take 0.1 GB, and those of ZB-V 0.2 GB. A CUDA context takes 0.56 GB."""
    words = ("-P", 4, "--global-batch", 8, "--jobs", 1, *COSTS[:6], "--activation-gb", 2, "--no-recompute", "--json")

    def found(memory, schedules, *more):
        code, out, _ = command("advise", *words, "--memory-gb", memory, "--schedules", schedules, *more)
        return code, json.loads(out)

    assert found(8.5, "1f1b", "--gloo")[0] == 0
    code, facts = found(8.5, "1f1b")
    assert (code, facts["recommended"]) == (1, None)
    assert facts["alternatives"][0]["refused"] == "needs 8.66 GB on rank 0"
    # The faster plan needs more communicators. It is refused if only those of the slower plan fit.
    _, both = found(8.9, "1f1b,zb_v")
    assert both["recommended"]["schedule"] == "1f1b"
    assert [one["refused"] for one in both["alternatives"] if one["schedule"] == "zb_v"] == ["needs 8.96 GB on rank 1"]
    assert found(8.97, "1f1b,zb_v")[1]["recommended"]["schedule"] == "zb_v"
    assert found(8.9, "1f1b,zb_v", "--max-ctas", 2)[1]["recommended"]["schedule"] == "zb_v"


def test_the_costs_of_a_run(command, tmp_path):
    """The traces of two ranks for one step of 1F1B, written as a run writes them."""
    plan = build_plan(PlanSpec("1f1b", 2, 1, 4))
    result = simulate(plan, StageCosts.per_stage([2, 3], [2, 3], [2, 3]))
    write_traces(tmp_path, [result])
    words = ("--global-batch", 4, "--memory-gb", 80, "--activation-gb", 2, "--max-chunks", 1, "--schedules", "1f1b")
    code, out, _ = command("advise", "--from-trace", tmp_path, *words, "--jobs", 1, "--json")
    assert code == 0
    best = json.loads(out)["recommended"]
    assert best["step_ms"] == pytest.approx(result.makespan, rel=0.01)
    assert_refused(
        command("advise", "--from-trace", tmp_path, *words, "--forward-ms", 1, "--backward-ms", 1), 2, "--from-trace"
    )


def test_a_missing_package_is_reported_before_the_search(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(advise, "search", lambda *_: pytest.fail("it searched first"))
    words = "megatron-pp advise: SVG and PNG pictures need matplotlib: pip install '.[viz]'"
    assert_refused(command(*SMALL, *COSTS, *FEW, "--plot", "front.svg"), 2, words)


def test_the_command_names_a_file_that_is_there(command):
    size = ("advise", "-P", 2, "--global-batch", 4, "--memory-gb", 80, "--jobs", 1)
    code, out, _ = command(*size, *COSTS, "--schedules", "auto", "--max-chunks", 1)
    assert code == 0
    named = re.search(r"--pipeline-measured (\S+)", out)
    assert named is not None
    assert measured_values(named[1]).forward == (1.0,) * 2


def test_files_that_check_reads_give_the_same_answer(command, tmp_path):
    sizes = (
        "num_layers: 14\nhidden_size: 1024\nseq_length: 2048\nnum_attention_heads: 16\nvocab_size: 32000\nbf16: true\n"
    )
    (tmp_path / "gpt.yaml").write_text(sizes)
    flags = [f"--{line.replace('_', '-').replace(': ', ' ').replace(' true', '')}" for line in sizes.splitlines()]
    (tmp_path / "run.sh").write_text(f"torchrun pretrain_gpt.py {' '.join(flags)}\n")
    words = (*SMALL, "--max-chunks", 1, "--schedules", "1f1b", "--gpu", "h100")
    expected = command(*words, "--megatron-args", " ".join(flags))
    assert expected[0] == 0
    for name in ("gpt.yaml", "run.sh"):
        assert command(*words, "--megatron-args", tmp_path / name)[:2] == expected[:2]
    (tmp_path / "gpt.yaml").write_text(sizes.replace("14", "many"))
    code, _, complaint = command(*words, "--megatron-args", tmp_path / "gpt.yaml")
    assert (code, "num_layers is 'many'; it must be a whole number" in complaint) == (2, True)
