"""Megatron-core's GPTModel with its stages in a V: contents of chunks, parity with Megatron's own schedules and with
one process, checkpoints from and to a loop, and refusals.
"""

from __future__ import annotations

import dataclasses

import pytest

from megatron_pp.integrations.megatron.settings import read_settings
from megatron_pp.integrations.megatron.steps.gpt_models import PlacedModel
from megatron_pp.integrations.on_import import install_on_import
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.tools.parity import cpu_stand_in
from testkit.processes import run_processes
from testkit.sweeps import EXHAUSTIVE
from tests.functional_tests.megatron_support import assert_equal, needs_megatron

from testkit.megatron.cases import Case, Job, Model, Outcome, compared  # isort: skip
from testkit.megatron.runner import parity_jobs, run_jobs  # isort: skip

pytestmark = [needs_megatron, pytest.mark.slow]

CHECKS = "tests.functional_tests.v_placement_checks:"
SCHEDULES = ("zb_v", "v_half", "v_min", "1f1b_v", "dualpipe_v")
POLICIES = ("overlap", "batched", "plain", "overlap", "batched")
TIED = Model(tied=True, position="learned_absolute")
SMALL = Model(layers=4)
SMALL_TIED = dataclasses.replace(TIED, layers=4)
MODELS = {2: (SMALL, SMALL_TIED), 4: (Model(), TIED)}  # by the number of ranks
LAYOUT = (("pipeline_model_parallel_layout", "Et|ttt|tt|L"),)
UNEVEN = (("num_layers_in_first_pipeline_stage", 2), ("num_layers_in_last_pipeline_stage", 4))
MTP = (("mtp_num_layers", 1),)
COUNTED = (("account_for_embedding_in_pipeline_split", True), ("account_for_loss_in_pipeline_split", True))

# Against Megatron's interleaved schedule: the same cut, on other ranks.
TRAINED = [
    Case(
        model,
        pp=pp,
        vp=2,
        policy=policy,
        schedule=name,
        optimizer="adam",
        clip_grad=0.0,
        steps=2,
        split_weight_grad=True,
    ).short()
    for pp in (2, 4)
    for model in MODELS[pp]
    for name, policy in zip(SCHEDULES, POLICIES, strict=True)
    if EXHAUSTIVE
    or (pp, model.tied) == (2, True)
    or ((pp, model.tied) == (4, False) and name in ("zb_v", "dualpipe_v"))
]
V = Case(SMALL, pp=2, vp=2, schedule="zb_v", policy="overlap", optimizer="adam", clip_grad=0.0, steps=2).short()
VARIED = {
    "layout": dataclasses.replace(V, model=Model(layers=6, extra_config=LAYOUT)),
    "uneven stages": dataclasses.replace(V, pp=4, microbatches=8, model=Model(layers=10, extra_config=UNEVEN)),
    "embedding and loss counted as layers": dataclasses.replace(V, model=Model(layers=6, extra_config=COUNTED)),
    "per-token loss": dataclasses.replace(V, model=dataclasses.replace(SMALL_TIED, per_token_loss=True)),
    "multi-token prediction": dataclasses.replace(V, model=Model(layers=4, extra_config=MTP)),
    "multi-token prediction, tied": dataclasses.replace(V, model=Model(layers=4, tied=True, extra_config=MTP)),
    "mixture of experts": dataclasses.replace(V, model=Model(layers=4, experts=4)),
    "tensor and sequence parallel, tied": dataclasses.replace(V, tp=2, model=SMALL_TIED),
    "distributed optimizer, tied": dataclasses.replace(
        V, dp=2, model=SMALL_TIED, optimizer="distributed", overlap_grad_reduce=True, overlap_param_gather=True
    ),
    "evaluation between steps": dataclasses.replace(V, evaluate_between=True, split_weight_grad=True),
}
ALONE = [
    Case(Model(), pp=4, vp=2, policy="overlap", schedule="zb_v"),
    Case(SMALL, pp=2, vp=2, schedule="v_min", forward_only=True).short(),
    Case(SMALL, pp=2, vp=2, schedule="zb_v", policy="overlap", variable_shapes=True).short(),
]


def loop_of(case: Case) -> Case:
    """Return the same training under Megatron's own schedule, in a form that is right on every release."""
    safe = {"engine": "megatron", "policy": "plain", "deallocate": False}
    return dataclasses.replace(case, schedule=None, split_weight_grad=False, evaluate_between=False, **safe)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    folder = tmp_path_factory.mktemp("references")
    jobs = parity_jobs(ALONE, folder)
    jobs += compared([*TRAINED, *VARIED.values()], loop_of, f"{folder}/loop{{n}}-{{rank}}.pt", other_cut=True)
    return {job.case: outcome for job, outcome in zip(jobs, run_jobs(jobs, deadline=400), strict=True)}


def name_of(case: Case) -> str:
    return f"{case.schedule} {case.label()}"


@pytest.mark.parametrize("case", TRAINED, ids=name_of)
def test_training_equals_megatrons_interleaved_schedule(case: Case, outcomes: dict[Case, Outcome]) -> None:
    assert_equal(outcomes[case])
    assert outcomes[case].param_difference == 0.0


@pytest.mark.parametrize("name", VARIED)
def test_trainings_that_combine_a_v_with_other_settings_equal_megatrons(
    name: str, outcomes: dict[Case, Outcome]
) -> None:
    assert_equal(outcomes[VARIED[name]])
    assert outcomes[VARIED[name]].param_difference == 0.0


@pytest.mark.parametrize("case", ALONE, ids=name_of)
def test_losses_and_gradients_equal_one_process(case: Case, outcomes: dict[Case, Outcome]) -> None:
    assert_equal(outcomes[case])


FOUR = dataclasses.replace(V, pp=4, model=Model())
JOBS = {
    "contents: equal stages": ("contents_of_loop_and_v", FOUR),
    "contents: layout": ("contents_of_loop_and_v", VARIED["layout"]),
    "contents: uneven": ("contents_of_loop_and_v", VARIED["uneven stages"]),
    "contents: counted": ("contents_of_loop_and_v", VARIED["embedding and loss counted as layers"]),
    "contents: tied": ("contents_of_loop_and_v", VARIED["per-token loss"]),
    **{
        name: (name, V)
        for name in (
            "functions_answer_by_chunk",
            "a_place_is_seen_and_left_again",
            "wrong_placements_are_errors",
            "forward_steps_see_their_stage",
            "reports_reach_the_last_rank",
            "the_schedule_of_install_decides",
            "steps_after_uninstall",
        )
    },
    "logs": ("logs_of_loop_and_v", VARIED["multi-token prediction"]),
    "logs: data-parallel": ("logs_of_loop_and_v", dataclasses.replace(VARIED["multi-token prediction"], dp=2)),
    "logs: experts": (
        "logs_of_loop_and_v",
        dataclasses.replace(V, policy="plain", model=Model(layers=4, experts=4, extra_config=MTP)),
    ),
    "unsendable": ("what_cannot_be_sent_is_an_error_on_both_ranks", V),
    "tied_weights_start_equal": ("tied_weights_start_equal", dataclasses.replace(V, model=SMALL_TIED)),
    "checkpoints": ("checkpoints_go_from_a_loop_to_a_v_and_back", V),
    "checkpoints: tied": (
        "checkpoints_go_from_a_loop_to_a_v_and_back",
        dataclasses.replace(V, model=SMALL_TIED),
    ),
}


@pytest.fixture(scope="module")
def facts() -> dict[str, Outcome]:
    jobs = [Job(case, check=CHECKS + check) for check, case in JOBS.values()]
    return dict(zip(JOBS, run_jobs(jobs, deadline=200), strict=True))


@pytest.mark.parametrize("name", [name for name in JOBS if name.startswith("contents")])
def test_a_stage_holds_what_megatron_gives_it_in_a_loop(name: str, facts: dict[str, Outcome]) -> None:
    assert facts[name].status == "ok", facts[name].message
    size = JOBS[name][1].pp
    loop, v = Placement("loop", size, 2), Placement("v", size, 2)
    stages = {loop.stage(rank, chunk): facts[name].facts[rank][0][chunk] for rank in range(size) for chunk in (0, 1)}
    assert len({str(stage) for stage in stages.values()}) == 2 * size
    for rank in range(size):
        for chunk in (0, 1):
            assert facts[name].facts[rank][1][chunk] == stages[v.stage(rank, chunk)]


def test_megatrons_stage_functions_answer_for_the_given_chunk(facts: dict[str, Outcome]) -> None:
    outcome = facts["functions_answer_by_chunk"]
    assert outcome.status == "ok", outcome.message
    first, last = outcome.facts
    assert first == [[True, False], [False, True], [0, 3], [1, 1], False]
    assert last == [[False, False], [False, False], [1, 2], [1, 1], True]


def test_the_place_of_a_chunk_is_restored_after_use(facts: dict[str, Outcome]) -> None:
    assert facts["a_place_is_seen_and_left_again"].status == "ok", facts["a_place_is_seen_and_left_again"].message


def test_a_forward_step_sees_the_stage_of_its_chunk(facts: dict[str, Outcome]) -> None:
    """Training scripts choose the contents of a batch by this."""
    outcome = facts["forward_steps_see_their_stage"]
    assert outcome.status == "ok", outcome.message
    first, last = outcome.facts
    assert first == [[0, True, False], [1, False, True]]
    assert last == [[0, False, True], [1, True, False]]


def test_the_schedule_of_install_decides_how_models_are_built(facts: dict[str, Outcome]) -> None:
    outcome = facts["the_schedule_of_install_decides"]
    assert outcome.status == "ok", outcome.message
    count = V.microbatches
    assert outcome.facts == [[[[True, False], [False, True]], count], [[[False, False], [False, False]], count]]


def test_a_step_after_uninstall_is_an_error_until_install_is_called_again(facts: dict[str, Outcome]) -> None:
    outcome = facts["steps_after_uninstall"]
    assert outcome.status == "ok", outcome.message
    assert [len(errors) for errors in outcome.facts] == [3, 2]
    for error in (*outcome.facts[0], *outcome.facts[1]):
        assert error.startswith(
            "this GPTModel was built for stages in a v under install(), which uninstall() has ended"
        )


def imports_later(rank: int, size: int) -> None:
    install_on_import(read_settings(pipeline_schedule="zb_v"))
    cpu_stand_in.redirect()
    with cpu_stand_in.triton_stand_in():
        from megatron.core.models.gpt import GPTModel
    assert isinstance(vars(GPTModel)["__init__"], PlacedModel)


def test_a_model_class_imported_after_install_is_placed_too() -> None:
    """`megatron-pp run` installs itself when the script has imported Megatron."""
    run_processes(imports_later, 1, backend=None, timeout=120, start_method="forkserver")


def test_all_that_the_loss_function_reports_reaches_the_last_rank(facts: dict[str, Outcome]) -> None:
    outcome = facts["reports_reach_the_last_rank"]
    assert outcome.status == "ok", outcome.message
    first, last = outcome.facts
    assert first == last
    assert len(first) == V.microbatches


@pytest.mark.parametrize("name", [name for name in JOBS if name.startswith("logs")])
def test_logs_of_the_last_stage_appear_on_the_last_rank(name: str, facts: dict[str, Outcome]) -> None:
    """The logged values equal those of Megatron's loop to the last bit."""
    outcome, case = facts[name], JOBS[name][1]
    assert outcome.status == "ok", outcome.message
    for loop, v in outcome.facts:
        assert v == loop
    last = outcome.facts[-1][1]
    assert last["mtp_1 loss"] > 0
    assert [len(seen) for _, seen in last["own"]] == [case.microbatches] * 2
    assert ("z_loss" in last) == bool(case.model.experts)


def test_reports_that_cannot_be_sent_are_an_error_on_both_ranks(facts: dict[str, Outcome]) -> None:
    outcome = facts["unsendable"]
    assert outcome.status == "ok", outcome.message
    first, last = outcome.facts
    assert first == last
    assert "cannot be pickled" in first


def test_tied_weights_start_equal_and_count_once(facts: dict[str, Outcome]) -> None:
    outcome = facts["tied_weights_start_equal"]
    assert outcome.status == "ok", outcome.message
    equal, *shared = outcome.facts[0]
    assert equal
    assert shared == [False, True], "the gradient norm leaves out one of the two"
    assert outcome.facts[1] == []


def test_a_model_for_another_placement_is_an_error_on_every_rank(facts: dict[str, Outcome]) -> None:
    outcome = facts["wrong_placements_are_errors"]
    assert outcome.status == "ok", outcome.message
    first, second = outcome.facts
    assert first == second
    words = ("was built for a loop", "was built for stages in a v", "uninstall()", "vp_stage", "takes 2 model chunks")
    for message, word in zip(first, words, strict=True):
        assert word in message


@pytest.mark.parametrize("name", [name for name in JOBS if name.startswith("checkpoints")])
def test_a_checkpoint_of_1f1b_goes_on_in_a_v_and_back(name: str, facts: dict[str, Outcome]) -> None:
    outcome = facts[name]
    assert outcome.status == "ok", outcome.message
    count = JOBS[name][1].microbatches
    for rank, seen in enumerate(outcome.facts):
        assert seen["equal"], f"parameters of rank {rank}"
    losses = outcome.facts[-1]["losses"]
    assert len(losses["alone"]) == 3 * count
    assert losses["v"] == losses["alone"][count : 2 * count]
    assert losses["back"] == losses["alone"][2 * count :]
