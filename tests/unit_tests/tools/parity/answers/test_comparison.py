"""Records of ranks beside one process: verdicts, the first difference, ratios, sums over ranks, and the diagnosis."""

from __future__ import annotations

import functools
import json
from xml.etree import ElementTree as Xml

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_pp.tools.cli.parity import known_faults
from megatron_pp.tools.flags.flags import Flags
from megatron_pp.tools.parity.answers import junit, page
from megatron_pp.tools.parity.answers.answer import Answer
from megatron_pp.tools.parity.answers.comparison import FAR_OFF, Comparison, compare_records, same_bits
from megatron_pp.tools.parity.answers.diagnosis import Smallest, ratio_in_words, smallest
from megatron_pp.tools.parity.answers.verdicts import DIFFERENT, EQUAL, EXIT_CODES, NOT_EXERCISED, ROUNDING
from megatron_pp.tools.parity.layout import Layout
from megatron_pp.tools.parity.records.parameters import Place, indices_of, made_values
from megatron_pp.tools.parity.records.recorder import (
    BUFFER,
    FORWARD,
    GRADIENT,
    LOGGED,
    LOSS,
    NORM,
    PARAMETER,
    REPORT,
    RESTORED,
    Key,
    Record,
    Recorder,
    Value,
)
from megatron_pp.tools.parity.workers.processes import RunError

RANKS = {"TP": 0, "PP": 0, "CP": 0, "DP": 0, "EP": 0, "ETP": 0}
LOSS_KEY, GRAD = Key(0, LOSS, "loss", 0), Key(0, GRADIENT, "layers.0.weight")
OUTPUT, AFTER = Key(0, FORWARD, "layers.0", 0), Key(0, PARAMETER, "layers.0.weight")
TRUTH = {OUTPUT: (4,), LOSS_KEY: (), GRAD: (4, 6), AFTER: (4, 6)}


def values(key: Key) -> np.ndarray:
    return np.random.default_rng(hash(key.kind) % 1000).standard_normal(TRUTH[key])


def alone(dtype: type) -> Record:
    return Record(
        Place(RANKS, dict.fromkeys(RANKS, 1)), values={key: Value(np.array(values(key), dtype)) for key in TRUTH}
    )


def rank_of(number: int, size: int, dim: str, **changed: np.ndarray) -> Record:
    """A rank that has all tensors whole, except for those in ``changed``, by kind."""
    own = {key: np.array(changed.get(key.kind, values(key)), np.float32) for key in TRUTH}
    place = Place({**RANKS, dim: number}, {**dict.fromkeys(RANKS, 1), dim: size})
    return Record(place, values={key: Value(data) for key, data in own.items()})


def compared(*records: Record) -> Comparison:
    return compare_records(list(records), alone(np.float32), alone(np.float64))


def test_small_differences_count_as_rounding():
    assert compared(rank_of(0, 1, "TP")).verdict == EQUAL
    nearly = values(GRAD) * (1 + 1e-6)
    found = compared(rank_of(0, 1, "TP", gradient=nearly))
    assert found.verdict == ROUNDING
    assert found.exact_kinds() == [FORWARD, LOSS, PARAMETER]


def test_two_schedules_compute_the_same_bits_on_each_rank():
    ranks = [rank_of(0, 2, "TP"), rank_of(1, 2, "TP")]
    assert same_bits(ranks, [rank_of(0, 2, "TP"), rank_of(1, 2, "TP")])
    nearly = np.nextafter(np.array(values(GRAD), np.float32), np.float32(9))
    other = rank_of(1, 2, "TP", gradient=nearly)
    assert not same_bits(ranks, [rank_of(0, 2, "TP"), other])
    other.values[GRAD].valid = ranks[1].values[GRAD].valid = (0, 0)
    assert same_bits(ranks, [rank_of(0, 2, "TP"), other]), "nothing of it is this rank's"
    del other.values[GRAD]
    assert not same_bits(ranks, [rank_of(0, 2, "TP"), other])


def test_the_first_difference_is_the_earliest_and_has_its_ratio():
    found = compared(rank_of(0, 2, "TP"), rank_of(1, 2, "TP", gradient=2 * values(GRAD), parameter=values(AFTER) + 1))
    assert found.verdict == DIFFERENT
    assert (found.first.key, found.first.rank) == (GRAD, 1)
    assert found.first.ratio == pytest.approx(2)
    assert found.wrong()[1].ratio is None


def test_stages_are_reported_in_model_order():
    record = rank_of(1, 2, "PP", gradient=2 * values(GRAD))
    record.stage[GRAD.name] = 1
    found = compared(rank_of(0, 2, "PP"), record)
    assert found.first.stage == 3, "chunk 1 of rank 1 of 2"


@pytest.mark.parametrize(("factor", "verdict"), [(1.005, ROUNDING), (1.1, DIFFERENT)])
def test_a_large_float32_difference_is_a_fault_although_float64_is_equal(factor, verdict):
    record = rank_of(0, 1, "TP", gradient=factor * values(GRAD))
    assert compare_records([record], alone(np.float32), alone(np.float64), FAR_OFF).verdict == verdict


def test_not_a_number_is_a_difference():
    assert compared(rank_of(0, 1, "TP", loss=np.array(np.nan))).first.key == LOSS_KEY


def test_partial_sums_over_the_ranks_of_a_group():
    part = np.random.default_rng(5).standard_normal((4, 6))
    ranks = [rank_of(number, 2, "CP", gradient=grad) for number, grad in enumerate((part, values(GRAD) - part))]
    assert compared(*ranks).partial_sums == {GRAD.name: "CP"}


def test_shards_are_compared_with_their_part_and_a_gap_is_found():
    halves = [rank_of(number, 2, "DP") for number in range(2)]
    for number, record in enumerate(halves):
        record.values[GRAD].valid = (12 * number, 12 * number + 12)
        record.values[GRAD].data.reshape(-1)[12 * (1 - number) : 12 * (1 - number) + 12] = 7  # of another rank's shard
    assert compared(*halves).verdict == EQUAL
    halves[1].values[GRAD].valid = (13, 24)
    assert compared(*halves).missing == ["1 elements of the gradient of layers.0.weight are on no rank"]


def test_sums_over_the_tokens_of_context_parallel_ranks():
    halves = [rank_of(number, 2, "CP", loss=values(LOSS_KEY) / 2) for number in range(2)]
    for record in halves:
        record.values[LOSS_KEY].sum_over_context = True
    for _ in range(2):
        assert compared(*halves).verdict in (EQUAL, ROUNDING)


def test_values_that_no_rank_has_are_missing():
    record = rank_of(0, 1, "TP")
    del record.values[LOSS_KEY]
    assert compared(record).missing == ["no rank has the loss of loss, microbatch 0"]
    assert compared(record).verdict == DIFFERENT


def test_which_part_of_a_parameter_a_rank_has():
    place = Place({**RANKS, "TP": 1}, {**dict.fromkeys(RANKS, 1), "TP": 2})
    assert indices_of("qkv.weight", (4, 6), (8, 6), False, place)[0].tolist() == [4, 5, 6, 7]
    assert indices_of("linear_fc1.weight", (4, 6), (8, 6), True, place)[0].tolist() == [2, 3, 6, 7]
    assert indices_of("norm.weight", (8,), (8,), False, place) == {}
    with pytest.raises(ValueError, match=r"\(5, 6\) here and \(8, 6\) in one process"):
        indices_of("qkv.weight", (5, 6), (8, 6), False, place)
    assert np.array_equal(made_values("a", (3, 4)), made_values("a", (3, 4)))


LAYOUT = Layout(
    Flags.read(["--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "4", "--mtp-num-layers", "1"]),
    16,
)
WRONG = compared(rank_of(0, 2, "TP", gradient=2 * values(GRAD)))


@pytest.mark.parametrize(
    ("needed", "label", "dimension"),
    [({"TP"}, "TP 2", "TP"), ({"PP", "MTP"}, "PP 2, MTP", "PP + MTP"), (set(), "", "")],
)
def test_the_smallest_layout_that_differs(needed, label, dimension):
    tried = []

    def compare(layout: Layout) -> Comparison:
        tried.append(layout)
        if len(tried) == 2:
            raise RunError("a layout that cannot run")
        return WRONG if needed <= set(layout.parts()) else compared(rank_of(0, 1, "TP"))

    found = smallest(LAYOUT, WRONG, compare)
    assert (found.layout.label(), found.dimension) == (label, dimension)
    assert len(tried) < 20


def answer() -> Answer:
    layout = Layout(Flags.read(["--tensor-model-parallel-size", "2"]), 2, uneven_masks=False)
    right = compared(rank_of(0, 1, "TP"))
    found = smallest(layout, WRONG, lambda other: WRONG if "TP" in other.parts() else right)
    return Answer(["train.py"], layout, [], {"megatron": WRONG, "ours": right}, found, "megatron")


def test_the_answer_as_an_object_and_as_files():
    said = json.loads(json.dumps(answer().to_json()))
    assert (said["verdict"], said["dimension"], said["whose"]) == ("different", "TP", "megatron")
    assert said["parameters"][GRAD.name]["ratio"] == pytest.approx(2)
    assert said["parameters"][GRAD.name]["ratio_in_words"] == "x 2 = size of TP"
    assert said["first"]["operation"] == "gradient after finalize_model_grads of layers.0.weight"
    assert said["repeat"].split() == [
        *("megatron-pp", "parity", "--shrink", "none", "--nproc", "2", "--engine", "megatron", "--masks", "full"),
        *("train.py", "--tensor-model-parallel-size", "2"),
    ]
    suite = Xml.fromstring(junit.text_of(answer()))
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    picture = Xml.fromstring(page.picture_of(answer()))
    cells = picture.findall("{*}rect")
    assert [cell.get("fill") == "#b7e1c0" for cell in cells] == [False, True]
    assert "DIFFERENT: TP 2" in page.text_of(answer())


LATENT = ["--multi-latent-attention", "--tensor-model-parallel-size", "2"]


@pytest.mark.parametrize(
    ("given", "met"),
    [
        (LATENT, True),
        ([*LATENT, "--sequence-parallel"], False),
        ([*LATENT, "--sequence-parallel", "--transformer-impl", "local"], True),
    ],
)
def test_known_faults_that_the_flags_meet_are_named(given, met):
    """The answer names faults of the job's layers, not of the layers that run here on the CPU."""
    layout = Layout(Flags.read(given).set("--transformer-impl", "local"), 2, uneven_masks=False)
    different = Answer(["train.py"], layout, [], {"ours": WRONG, "megatron": WRONG})
    different.known_faults = known_faults(different, given)
    names = [one["name"] for one in different.to_json()["known_faults"]]
    assert ("shared-rotary-key-not-summed" in names) == met
    assert [line.split(": ")[1] for line in different.lines() if line.startswith("known fault: ")] == names
    right = Answer(["train.py"], layout, [], {"ours": compared(rank_of(0, 1, "TP"))})
    assert known_faults(right, given) == []


def test_a_parameter_that_is_restored_wrongly_comes_first():
    keys = [Key(2, kind, GRAD.name) for kind in (RESTORED, GRADIENT, PARAMETER)]
    place = Place(RANKS, dict.fromkeys(RANKS, 1))
    exact, wrong = (Record(place, values={key: Value(factor * values(GRAD)) for key in keys}) for factor in (1, 2))
    found = compare_records([wrong], exact, exact, 1e-11)
    layout = Layout(Flags(), 1, uneven_masks=False, checkpoint="save")
    said = Answer(["train.py"], layout, [], {"ours": found}, Smallest(layout, ["checkpoint"], found), "ours").to_json()
    assert said["first"]["operation"] == f"restored value of {GRAD.name}"
    assert said["parameters"][GRAD.name]["what"] == RESTORED
    assert "--checkpoint save train.py" in said["repeat"]


@pytest.mark.parametrize(("differing", "whose"), [(("ours",), "ours"), (("ours", "megatron"), "model"), ((), None)])
def test_an_answer_says_which_engine_differs(differing, whose):
    right = compared(rank_of(0, 1, "TP"))
    both = {engine: WRONG if engine in differing else right for engine in ("megatron", "ours")}
    assert Answer([], LAYOUT, [], both).whose == whose
    assert Answer([], LAYOUT, [], {"ours": WRONG}).whose is None


@pytest.mark.parametrize(("counted", "names"), [((0,), ["layers.0.sink", "layers.1.sink"]), ((0, 1), [])])
def test_parameters_that_a_norm_leaves_out(counted, names):
    """``counted``: the halves of the sinks whose squares are in the norm that the ranks report."""
    sizes = {"layers.0.sink": 4, "layers.1.sink": 4, "layers.0.weight": 4}
    whole = {
        name: np.random.default_rng(size + n).standard_normal(size) for n, (name, size) in enumerate(sizes.items())
    }
    norm, keys = Key(0, NORM, "gradient norm"), {name: Key(0, GRADIENT, name) for name in whole}
    right = float(np.sqrt(sum(np.sum(grad**2) for grad in whole.values())))
    left = sum(np.sum(whole[name][2:] ** 2) for name in list(whole)[:2]) if counted == (0,) else 1e-3
    exact = Record(Place(RANKS, dict.fromkeys(RANKS, 1)), values={keys[name]: Value(whole[name]) for name in whole})
    exact.values[norm] = Value(np.asarray(right))
    ranks = []
    for rank in range(2):
        own = {name: np.arange(2 * rank, 2 * rank + 2) for name in whole}
        shards = {keys[name]: Value(whole[name][part], {0: part}) for name, part in own.items()}
        place = Place({**RANKS, "TP": rank}, {**dict.fromkeys(RANKS, 1), "TP": 2})
        ranks.append(Record(place, values={**shards, norm: Value(np.asarray((right**2 - left) ** 0.5))}))
    found = compare_records(ranks, exact, exact, 1e-11)
    assert (found.first.key, found.of_norm) == (norm, names)


def test_a_recomputation_repeats_its_forward():
    """If the random state is not restored, the recomputation in the backward draws other random numbers."""
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
    for preserved in (True, False):
        recorder = Recorder(1, "", alone=True)
        handle = layer.register_forward_hook(functools.partial(recorder._repetition, "layers.0"))
        recorder.current = 0
        output = checkpoint(
            layer, torch.ones(4, 8, requires_grad=True), use_reentrant=True, preserve_rng_state=preserved
        )
        recorder.current = None
        output.sum().backward()
        handle.remove()
        assert recorder.record.unrepeated == (set() if preserved else {"layers.0"})


STATE, AVERAGE = "optimizer's exp_avg", Key(0, "optimizer's exp_avg", "layers.0.weight")


def with_value(record: Record, key: Key, value: np.ndarray, **about: object) -> Record:
    record.values[key] = Value(np.asarray(value), **about)
    return record


def compared_with(key: Key, right: np.ndarray, *records: Record) -> Comparison:
    both = [with_value(alone(dtype), key, np.asarray(right, dtype)) for dtype in (np.float32, np.float64)]
    return compare_records(list(records), *both)


@pytest.mark.parametrize(("logged", "different"), [(4.852030, False), (4.852031, False), (9.70406, True)])
def test_a_logged_number_may_be_off_by_one_in_its_last_digit(logged, different):
    record = with_value(rank_of(0, 1, "PP"), Key(0, LOGGED, "lm loss"), logged, resolution=1e-6)
    right = alone(np.float64)
    right.values[Key(0, LOGGED, "lm loss")] = Value(np.asarray(4.852030))
    found = compare_records([record], right, right, 1e-12)
    assert any(one.key.kind == LOGGED for one in found.wrong()) is different


def test_a_buffer_of_one_replica_is_a_difference():
    right = np.array([0.001, -0.001])
    ranks = [with_value(rank_of(n, 2, "DP"), Key(0, BUFFER, "router.expert_bias"), right * (1 - n)) for n in range(2)]
    found = compared_with(Key(0, BUFFER, "router.expert_bias"), right, *ranks)
    assert (found.verdict, found.first.key.kind, found.first.rank) == (DIFFERENT, BUFFER, 1)
    said = Answer(["x"], LAYOUT, [], {"megatron": found})
    assert said.parameters() == {"router.expert_bias": said.parameters()["router.expert_bias"]}
    assert said.first()["operation"] == "buffer router.expert_bias after the step"


def test_the_state_of_an_optimizer_says_by_how_much_gradients_were_clipped():
    """Adam hides the ratio: parameters have a small error, and their own ratio to the right values is one."""
    right, after = values(GRAD), values(AFTER) * 1.0001
    clipped = with_value(rank_of(0, 2, "PP", parameter=after), AVERAGE, 0.8 * right)
    found = compared_with(AVERAGE, right, clipped, with_value(rank_of(1, 2, "PP"), AVERAGE, right))
    about = Answer(["x"], LAYOUT, [], {"megatron": found}).parameters()[GRAD.name]
    assert (about["what"], about["ratio_in_words"]) == (STATE, "x 0.8")


def test_a_parameter_has_no_ratio():
    """The old value of a parameter is in both new values, so their ratio would be one."""
    said = Answer(["x"], LAYOUT, [], {"megatron": compared(rank_of(0, 1, "PP", parameter=values(AFTER) * 1.0001))})
    assert "ratio" not in said.parameters()[GRAD.name]
    assert said.first()["ratio"] is None


def test_reports_are_not_missing_where_replicas_have_parts_of_them():
    report = Key(0, REPORT, "lm loss", 0)
    for dim, verdict in (("DP", EQUAL), ("PP", DIFFERENT)):
        found = compared_with(report, np.ones(2), rank_of(0, 2, dim), rank_of(1, 2, dim))
        assert found.verdict == verdict, dim


@pytest.mark.parametrize(
    ("dim", "kind", "words"),
    [
        ("PP", "gradient", "gradient of layers.0.weight, step 0 (each stage adds up its own microbatches"),
        ("DP", "gradient", "gradient of layers.0.weight, step 0 (each replica adds up its own microbatches"),
        ("TP", "forward", "forward of layers.0, step 0 (each TP rank adds up its own part"),
        ("TP", "parameter", "parameter of layers.0.weight, step 0"),
    ],
)
def test_the_answer_says_which_sum_has_another_order(dim, kind, words):
    flag = {"TP": "--tensor-model-parallel-size", "PP": "--pipeline-model-parallel-size"}.get(dim)
    layout = Layout(Flags.read([flag, "2"] if flag else []), 2, uneven_masks=False)
    nearly = {one.kind: values(one) * (1 + 1e-7) for one in TRUTH if one.kind == kind}
    found = compared(rank_of(0, 2, dim, **nearly), rank_of(1, 2, dim))
    said = Answer(["x"], layout, [], {"megatron": found})
    assert said.verdict == ROUNDING
    assert said.to_json()["rounding"].startswith(words)
    assert any("first sum in another order: " + words in line for line in said.lines())


def test_a_setting_that_is_not_exercised_is_not_reported_as_equal():
    right = compared(rank_of(0, 1, "TP"))
    said = Answer(["x"], LAYOUT, [], {"megatron": right}, not_exercised={"--sft": "no packs", "dropout": "it is off"})
    assert said.verdict == said.to_json()["verdict"] == NOT_EXERCISED
    assert EXIT_CODES[said.verdict] == 2
    assert said.lines()[0] == "NOT EXERCISED: --sft"
    assert "not exercised: dropout: it is off" in said.lines()
    assert Xml.fromstring(junit.text_of(said)).get("errors") == "1"
    wrong = Answer(["x"], LAYOUT, [], {"megatron": WRONG}, not_exercised={"--sft": "no packs"})
    assert (wrong.verdict, EXIT_CODES[wrong.verdict]) == (DIFFERENT, 1)
    only_dropout = Answer(["x"], LAYOUT, [], {"megatron": right}, not_exercised={"dropout": "it is off"})
    assert only_dropout.verdict == EQUAL


def test_files_have_no_control_characters():
    said = Answer(["x"], LAYOUT, [], {"megatron": WRONG}, notes=["red \x1b[31m, \x00, \ud800"])
    failure = Xml.fromstring(junit.text_of(said).encode()).find("testcase/failure")
    assert "red \\x1b[31m, \\x00, \\ud800" in failure.text
    assert "red \\x1b[31m" in page.text_of(said).encode().decode()
    error = Xml.fromstring(junit.text_of_error("rank 0 failed:\n  \x07").encode())
    assert (error.get("errors"), error.find("testcase/error").text) == ("1", "rank 0 failed:\n  \\x07")


def test_a_ratio_near_one_is_reported_as_its_excess():
    assert ratio_in_words(1 + 2e-5, LAYOUT) == "x (1 + 2e-05)"
    assert ratio_in_words(1 - 3e-9, LAYOUT) == "x (1 - 3e-09)"
    assert ratio_in_words(4.0, LAYOUT) == "x 4 = size of TP"


def test_a_long_list_of_what_was_changed_is_folded() -> None:
    changed = [f"--size-{k}: 8 -> 2" for k in range(9)]
    said = Answer(["x"], LAYOUT, changed, {"ours": WRONG})
    assert said.lines()[-1] == f"changed: {', '.join(changed[:6])} and 3 more, which --json lists"
    assert said.to_json()["shrunk"] == changed
    assert Answer(["x"], LAYOUT, changed[:6], {"ours": WRONG}).lines()[-1] == f"changed: {', '.join(changed[:6])}"
    assert Answer(["x"], LAYOUT, [], {"ours": WRONG}).lines()[-1] == "changed: nothing"
