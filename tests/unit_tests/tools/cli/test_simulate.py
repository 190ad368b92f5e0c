"""``megatron-pp simulate``: times, memory, comparisons and bounds."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.costs.stage_costs import FREE, StageCosts
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.planner.compare import fitted
from megatron_pp.tools.advise.layers.gpus import GPUS
from megatron_pp.tools.check.priced import priced
from megatron_pp.tools.cli.options.megatron_input import job_of
from megatron_pp.tools.draw.facts import size_label
from tests.unit_tests.tools.cli.conftest import MODEL, assert_refused

OUTSIDE = (534 + 8 * 2 * (10 + 2)) * 2**20  # a CUDA context, and channels with two neighbours


def test_simulate_under_the_rules_of_a_device(command):
    line = "simulate -s gpipe -P 2 -M 4 --forward-ms 1 --backward-ms 2 --p2p-ms 3 --json"
    rules = ("rendezvous", "device_sync")
    spans = {rule: json.loads(command(line, "--device", rule)[1])["makespan"] for rule in rules}
    assert spans["rendezvous"] == json.loads(command(line)[1])["makespan"] < spans["device_sync"]
    assert_refused(command(f"{line} --device one_queue --gloo"), 2, "one_queue: gloo's transfers wait for no device")


def test_several_modules_take_the_longest_way(command):
    """Two parallel replicas of an encoder before two stages: the longest way has three stages."""
    line = ["--modules", "vision=0/1; llm=2,3; vision>llm", "-M", "8"]
    facts = json.loads(command("simulate", *line, "--forward-ms", "1", "--backward-ms", "2", "--json")[1])
    assert facts["makespan"] == pytest.approx((8 + 2) * 3)
    assert facts["bound"] is None
    assert command("verify", *line)[0] == 0
    assert "rank 3 " in command("draw", *line)[1]
    circle = command("verify", "--modules", "a=0,1; b=0,1; a>b")
    assert circle[0] == 1
    assert "rank 0 waits for F0.0 of rank 1, which never comes" in circle[1]


def test_an_encoder_in_the_bubbles_is_simulated_with_its_times(command):
    """Only its first forward and last backward are exposed: 0.5 and 1, in addition to 5 microbatches of 3."""
    line = "simulate --modules 'vision*0.5/1=0; llm#1=0,1; vision>llm' -M 4 --json"
    facts = json.loads(command(*shlex.split(line))[1])
    assert facts["busy"] == [4 * 4.5, 4 * 3]
    assert facts["makespan"] < 4 * 4.5 + 3
    slower = line.replace("0.5/1", "2/4")
    assert json.loads(command(*shlex.split(slower))[1])["makespan"] > facts["makespan"]


def test_simulate_gives_the_closed_form(command):
    arguments = ["simulate", "-s", "1f1b", "-P", "4", "-M", "16", "--forward-ms", "10", "--backward-ms", "20", "--json"]
    facts = json.loads(command(*arguments)[1])
    assert facts["makespan"] == pytest.approx((16 + 3) * 30)
    assert facts["bubble_share"] == pytest.approx(3 / 19)
    assert facts["peak_in_flight"] == [4, 3, 2, 1]
    assert len(facts["links"]) == 6


@pytest.mark.parametrize("arguments", [["-V", "2"], ["-V", "1", "--sequence-slices", "4"]])
def test_every_table_and_sentence_has_memory_in_microbatches_of_a_rank(command, arguments):
    """The unit is the same as in the README, the gallery and the drawings: 5.5 with two chunks, 1.75 with four
    slices."""
    name, peak = ("interleaved_1f1b", "5.5") if arguments[1] == "2" else ("seq_1f1b", "1.75")
    plan = ["-s", name, "-P", "4", *arguments, "-M", "8"]
    assert f"activations of at most {peak} microbatches on a rank" in command("verify", *plan)[1]
    ranks = command("simulate", *plan)[1]
    assert re.search(rf"^ +0 .* {peak} +{peak} *$", ranks, re.MULTILINE), ranks
    compared = command("simulate", "--compare", name, *plan[2:])[1]
    assert re.search(rf"{name} .* {peak} +\d+ *$", compared, re.MULTILINE), compared
    assert f"peak {peak} microbatches on rank 0" in command("draw", *plan)[1]
    assert f" {peak} " in command("draw", "--style", "grid", *plan)[1]


def test_simulate_weighs_what_waits_for_weight_gradients(command):
    arguments = ["simulate", "-s", "zb_h2", "-P", "3", "-M", "6", "--json"]
    model = ["--layers", "3", "--hidden-size", "64", "--seq-length", "64", "--recompute", "full"]

    def peak(*more):
        return json.loads(command(*arguments, *more)[1])["peak_activations"][2]

    assert peak("--weight-share", "1") == 5.0  # one in flight, four waiting
    assert peak("--weight-share", "0.5") == 3.0
    assert peak() == pytest.approx(1 + 4 * 32 / 34)
    assert peak(*model) > 4 * 15  # recomputed layers keep only their input


def test_simulate_divides_a_ranks_time_over_its_chunks(command):
    line = "simulate -s interleaved_1f1b -P 4 -V 4 -M 8 --forward-ms 8 --backward-ms 16 --json"
    assert json.loads(command(line)[1])["makespan"] == pytest.approx((4 * 8 + 3) * 24 / 4)


def test_simulate_takes_times_per_stage_links_and_sizes(command):
    arguments = "simulate -s gpipe -P 2 -M 1 --forward-ms 1,2 --backward-ms 2,4 --activation-mb 1 --bandwidth 1"
    arguments += " --link 1-0:0.5:0.25 --json"
    facts = json.loads(command(*arguments.split())[1])
    # F 1, 1 MB at 1 GB/s = 1 ms, F 2, B 4, 0.5 + 4 ms back, B 2
    assert facts["makespan"] == pytest.approx(1 + 1 + 2 + 4 + 4.5 + 2)


def test_simulate_shows_tables_in_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = command("simulate", "-P", 4, *MODEL)
    assert code == 0
    assert "peak memory" in out or "peak" in out
    assert max(map(len, out.splitlines())) <= 80


def test_compare_ranks_under_a_memory_limit(command):
    arguments = ["simulate", "--compare", "gpipe,1f1b,zb_h1", "-P", 4, "-M", "8,32", *MODEL, "--json"]
    free = json.loads(command(*arguments)[1])
    assert [c["per_microbatch"] for c in free] == sorted(c["per_microbatch"] for c in free)
    assert all(c["refused"] is None for c in free)
    limit = sorted(c["peak_bytes"] for c in free)[2] / 2**30 + 0.01
    for outside, words in ((0.0, ["--gloo"]), (OUTSIDE / 2**30, [])):
        limited = json.loads(command(*arguments, "--memory-limit", limit + outside, *words)[1])
        fits = [c for c in limited if c["refused"] is None]
        assert len(fits) >= 2
        assert limited[: len(fits)] == fits
        assert all(c["peak_bytes"] <= limit * 2**30 for c in fits)
        assert "GiB" in limited[-1]["refused"]
    assert command(*arguments, "--memory-limit", 0.001)[0] == 1


def test_a_limit_of_memory_is_one_of_communicators_and_context_too(command):
    """1F1B on two ranks: each rank receives from one peer and sends to it, over 8 NCCL channels."""
    arguments = ["simulate", "--compare", "1f1b", "-P", 2, "-M", 4, *MODEL, "--json"]
    peak, taken = json.loads(command(*arguments)[1])[0]["peak_bytes"], (534 + 8 * (10 + 2)) * 2**20

    def refused(nbytes, *words):
        code, out, _ = command(*arguments, "--memory-limit", nbytes / 2**30, *words)
        assert code == (json.loads(out)[0]["refused"] is not None)
        return json.loads(out)[0]["refused"]

    assert refused(peak + taken + 1) is None
    assert refused(peak + taken - 1) == f"needs {(peak + taken) / 2**30:.1f} GiB"
    assert refused(peak + taken - 6 * 12 * 2**20 + 1, "--max-ctas", 2) is None
    assert refused(peak + 1, "--gloo") is None


def test_all_that_a_gpu_holds_is_one_table(command):
    """ZB-V on four ranks: the inner ranks have twice as many neighbours as the first and the last."""
    line = ("simulate", "-s", "zb_v", "-P", 4, "-M", 8, "--layers", 16, *MODEL[2:], "--memory")
    facts = json.loads(command(*line, "--json")[1])
    memory = facts["memory"]
    parts = ("parameters", "activations", "outputs", "messages", "kept_back", "communicators", "context")
    for rank, one in enumerate(memory):
        assert sum(one[part] for part in parts) == pytest.approx(one["total"])
        allocated = one["total"] - one["communicators"] - one["context"]
        assert allocated == pytest.approx(facts["peak_bytes"][rank])
    assert [one["communicators"] / 2**20 for one in memory] == [192, 384, 384, 192]
    assert {one["context"] for one in memory} == {534 * 2**20}
    _, out, _ = command(*line)
    table = out[out.index("Peak memory of each rank's GPU") :].splitlines()
    rows = [line for line in table if re.match(r" +[0-3] ", line)]
    assert len(rows) == 4
    for row, one in zip(rows, memory, strict=True):
        assert row.split()[-1] == one["at"]
        assert f" {size_label(one['total'])} " in row
        assert f" {size_label(one['communicators'])}  534 MiB " in row
    assert re.search(r"one-way channels +8 +4 to 8 +2 to 4 +2 to 4 +192 MiB to 384 MiB", out)
    without = json.loads(command(*line, "--json", "--gloo")[1])["memory"]
    assert {(one["communicators"], one["context"]) for one in without} == {(0, 0)}
    _, out, _ = command(*line, "--offload-chunks", 1)
    host = json.loads(command(*line, "--offload-chunks", 1, "--json")[1])["memory"][0]["host"]
    assert re.search(rf"^ +0 .* {size_label(host)} +{size_label(2 * host)} $", out, re.MULTILINE)
    assert_refused(command(*line[:7], "--memory"), 2, "--memory needs the shape of the model")
    assert_refused(command(*line, "--gloo", "--max-ctas", 2), 2, "--max-ctas is for GPUs")


@pytest.mark.slow
def test_compare_all_names_what_cannot_be_had(command):
    code, out, _ = command("simulate", "--compare", "all", "-P", 4, "-V", "2,3", "-M", 5, *MODEL)
    assert code == 0
    assert "16 layers do not divide over 12 stages" in out


def test_simulate_says_how_far_a_plan_is_from_the_bound(command):
    arguments = ["simulate", "-s", "1f1b", "-P", 4, "-M", 16]
    code, out, _ = command(*arguments)
    assert code == 0
    assert "within 11.8% of the bound, 51 slots (work of rank 3)" in out  # 57 slots; ZB-H1 takes 51
    bound = json.loads(command(*arguments, "--json")[1])["bound"]
    assert (bound["step"], bound["reason"], bound["excess"]) == (51, "work of rank 3", pytest.approx(57 / 51 - 1))
    ranked = json.loads(command("simulate", "--compare", "1f1b,zb_h1", "-P", 4, "-M", 16, "--json")[1])
    assert [c["bound"]["excess"] for c in ranked] == [0, pytest.approx(57 / 51 - 1)]


def test_the_memory_of_a_search_bounds_no_other_schedule(command):
    """Collectives placed by cost also have measured values, with the memory of 1F1B; zb_h2 needs more memory."""
    plan = ["-P", 4, "-M", 12, "--p2p-ms", 0.5, "--json"]
    one = json.loads(command("simulate", "-s", "zb_h2", *plan, "--fsdp-collectives", "by_cost")[1])
    assert one["bound"]["step"] <= one["makespan"]
    (ranked,) = json.loads(command("simulate", "--compare", "gpipe", *plan, "--fsdp-collectives", "by_cost")[1])
    alone = json.loads(command("simulate", "-s", "gpipe", *plan, "--fsdp-collectives", "by_cost")[1])
    assert ranked["bound"] == alone["bound"]


def test_slices_in_flight_are_counted_as_chunks(command):
    plan = ["-P", 2, "-V", 2, "-M", 2, "--sequence-slices", 2, "--json"]
    alone = json.loads(command("simulate", "-s", "interleaved_seq_zb", *plan)[1])
    (ranked,) = json.loads(command("simulate", "--compare", "interleaved_seq_zb", *plan)[1])
    assert max(alone["peak_in_flight"]) == ranked["peak_in_flight"] == 3


COSTS = ["--forward-ms", 1, "--backward-ms", 1.3, "--weight-ms", 0.8, "--p2p-ms", 0.2]


@pytest.mark.slow
def test_auto_is_searched_for_the_costs_that_are_given(command):
    """The result is the same as from Python with the same values. Without costs it is that of the default values."""
    measured = Measured(1.0, 1.3, 0.8, backward=2.1, transfer=0.2, memory_limit=2.0, weight_activation=1.0)
    expected = build_plan(PlanSpec("auto", 2, 1, 6, measured=measured))
    step = simulate(expected, measured.costs(2), measured.network()).makespan
    alone = json.loads(command("simulate", "-s", "auto", "-P", 2, "-V", 1, "-M", 6, *COSTS, "--json")[1])
    ranked = json.loads(command("simulate", "--compare", "auto", "-P", 2, "-V", 1, "-M", 6, *COSTS, "--json")[1])
    assert alone["makespan"] == ranked[0]["makespan"] == step
    spec = PlanSpec("auto", 2, 1, 6)
    assert fitted(spec, StageCosts.uniform(2, 4.0, 4.0, 4.0), FREE) == spec


@pytest.mark.slow
def test_auto_is_searched_under_the_memory_limit(command):
    """``auto`` fits if 1F1B does not: its search knows the limit and the memory of messages."""
    arguments = ["simulate", "--compare", "auto,1f1b", "-P", 2, "-V", 1, "-M", 4, *COSTS, *MODEL[:6], "--json"]
    rows = {c["schedule"]: c for c in json.loads(command(*arguments)[1])}
    limit, taken = rows["1f1b"]["peak_bytes"] - 2**20, (534 + 8 * (10 + 2)) * 2**20
    rows = {c["schedule"]: c for c in json.loads(command(*arguments, "--memory-limit", (limit + taken) / 2**30)[1])}
    assert rows["1f1b"]["refused"]
    assert rows["auto"]["refused"] is None
    assert rows["auto"]["peak_bytes"] <= limit
    assert rows["auto"]["bound"]["step"] <= rows["auto"]["makespan"]


FLAGS = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 "
    "--global-batch-size 16 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
    "--vocab-size 32000 --bf16 --overlap-p2p-communication"
)
YAML = """\
num_layers: 32
hidden_size: 4096
num_attention_heads: 32
seq_length: 4096
micro_batch_size: 1
global_batch_size: 16
pipeline_model_parallel_size: 4
virtual_pipeline_model_parallel_size: 2
overlap_p2p_comm: true
bf16: true
"""


def test_a_job_of_megatrons_is_read_as_check_reads_it(command, tmp_path):
    """Flags as one text, in a shell script and in a file of a functional test give the same answer."""
    script, test = tmp_path / "job.sh", tmp_path / "model_config.yaml"
    script.write_text(f"torchrun pretrain_gpt.py {FLAGS}\n")
    pairs = re.findall(r"(--[\w-]+)(?: (\w+))?", FLAGS)
    test.write_text("MODEL_ARGS:\n" + "".join(f"  {name}: {value or 'true'}\n" for name, value in pairs))
    facts = [
        json.loads(command("simulate", "--megatron-args", given, "--gpu", "h100", "--memory", "--json")[1])
        for given in (FLAGS, str(script), str(test))
    ]
    assert facts[0] == facts[1] == facts[2]
    assert facts[0]["plan"].startswith("interleaved_1f1b P=4 V=2 M=16 group=4 overlap/")
    assert facts[0]["unit"] == "ms"
    job = job_of(FLAGS, 1)
    found = priced(job, GPUS["h100"])
    expected = simulate(found.plan, found.cut.costs, found.network(GPUS["h100"]), found.plan.spec.device)
    assert facts[0]["makespan"] == pytest.approx(expected.makespan)
    assert {round(one["bytes"] / one["messages"]) for one in facts[0]["links"]} == {4096 * 4096 * 2}
    sizes = "-s interleaved_1f1b -P 4 -V 2 -M 16 --layers 32 --hidden-size 4096 --seq-length 4096 --attention-heads 32"
    by_options = command(*f"simulate {sizes} --ffn-hidden-size 16384 --vocab-size 32000 --memory --json".split())
    assert facts[0]["peak_bytes"] == pytest.approx(json.loads(by_options[1])["peak_bytes"])


def test_a_file_of_settings_of_megatron_gives_the_pipeline(command, tmp_path):
    path = tmp_path / "gpt.yaml"
    assert_refused(command("simulate", "--megatron-args", str(tmp_path / "no.yaml")), 2, "no.yaml: cannot be read")
    path.write_text("model:\n" + "".join(f"  {line}\n" for line in YAML.splitlines()))
    plan = command("simulate", "--megatron-args", str(path), "-M", "8")[1]
    assert plan.startswith("interleaved_1f1b P=4 V=2 M=8 group=4 overlap/")


def test_options_overrule_a_job_of_megatrons(command):
    line = ["simulate", "--megatron-args", FLAGS]
    assert command(*line, "-s", "zb_h1", "-P", "2", "-M", "4")[1].startswith("zb_h1 P=2 V=1 M=4 ")
    assert command(*line, "--p2p-ms", "0.5", "--forward-ms", "1", "--backward-ms", "2")[0] == 0
    ranked = json.loads(command(*line, "--compare", "1f1b,interleaved_1f1b,zb_h1", "--gpu", "h100", "--json")[1])
    assert {one["num_microbatches"] for one in ranked} == {16}
    assert [one["schedule"] for one in ranked][-1] == "1f1b"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--gpu", "h100"), "--gpu needs --megatron-args: it estimates times from a model's sizes"),
        (("--megatron-args", FLAGS, "--gpu", "h100", "--p2p-ms", "1"), "--p2p-ms does not go with --gpu"),
        (("--megatron-args", FLAGS, "--gpu", "h100", "-P", "2"), "does not go with --gpu, whose times are for the job"),
        (("--megatron-args", FLAGS, "--modules", "a=0;b=1;a>b"), "does not go with --megatron-args"),
        (("--megatron-args", f"{FLAGS} --swiglu", "--memory"), "--memory needs a plain transformer"),
        (("--megatron-args", f"{FLAGS} --num-experts 8", "--memory"), "--memory needs a plain transformer"),
        (("--megatron-args", "--num-layers many"), "--num-layers"),
    ],
)
def test_options_that_exclude_a_megatron_job_are_refused(command, options, words):
    assert_refused(command("simulate", *options), 2, words)
