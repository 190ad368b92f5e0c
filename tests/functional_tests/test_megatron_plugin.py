"""Installing and uninstalling the plug-in, steps that are handed back to Megatron, and refusals before any message."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_pp.plan.costs.measured import MeasuredFile
from tests.functional_tests.megatron_support import needs_megatron

from testkit.megatron.cases import Case, Job, Model, Outcome  # isort: skip
from testkit.megatron.runner import run_jobs  # isort: skip

pytestmark = needs_megatron

CHECKS = "tests.functional_tests.megatron_checks:"
SETTINGS = "tests.functional_tests.megatron_settings_checks:"
MESSAGES = "tests.functional_tests.megatron_message_checks:"
ALONE = Case(Model(layers=2), microbatches=2)
PAIR = Case(Model(layers=4), pp=2, vp=2, microbatches=4, policy="plain")
SINGLE = Case(Model(layers=4), pp=2, microbatches=4, policy="batched")
FOUR = Case(Model(layers=4), pp=4, microbatches=4, policy="overlap")

JOBS = {
    "installed_release": ALONE,
    "names_are_replaced_and_restored": ALONE,
    "context_manager_restores_what_was": ALONE,
    "schedules_are_chosen_as_megatron_does": ALONE,
    "unserved_steps_are_handed_back": ALONE,
    "parallel_state_is_not_initialised": ALONE,
    "distributed_is_not_initialised": ALONE,  # the last one on its process
    "impossible_arguments_are_errors": PAIR,
    "own_groups_and_communicator_are_taken": SINGLE,
    "a_rank_runs_a_model_of_its_own": dataclasses.replace(PAIR, schedule="zb_v"),
    "checkpointed_microbatches": PAIR,
    "outputs_that_a_hook_reads_keep_their_data": PAIR,
    "shapes_are_those_of_the_release": SINGLE,
    "interleaved_shapes_ignore_the_decoders_length": PAIR,
    "evaluation_leaves_autograd_as_it_is": SINGLE,
    "evaluation_gives_graphs_back": dataclasses.replace(PAIR, policy="overlap"),
    SETTINGS + "settings_reach_the_engine_and_not_the_config": SINGLE,
    SETTINGS + "wrong_settings_install_nothing": SINGLE,
    SETTINGS + "what_its_stages_cost_is_measured": PAIR,
    SETTINGS + "metrics_reach_megatrons_writer": PAIR,
    "tests.functional_tests.known_steps_checks:run_as_megatrons": dataclasses.replace(ALONE, microbatches=1),
    SETTINGS + "steps_of_unequal_microbatches_have_their_plans": PAIR,
    SETTINGS + "packed_steps_are_planned_while_it_trains": SINGLE,
    MESSAGES + "messages_grow_from_stage_to_stage": FOUR,
    MESSAGES + "messages_between_chunks_have_one_width": PAIR,
    MESSAGES + "sums_in_a_v_are_refused": dataclasses.replace(PAIR, schedule="zb_v"),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    jobs = [Job(case, check=name if ":" in name else CHECKS + name) for name, case in JOBS.items()]
    return dict(zip(JOBS, run_jobs(jobs, deadline=200), strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_a_check_of_the_plug_in_passes(name: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[name].status == "ok", outcomes[name].message


def test_each_reason_for_megatrons_own_schedule_is_logged(outcomes: dict[str, Outcome]) -> None:
    (warnings,) = outcomes["unserved_steps_are_handed_back"].facts
    for words in (
        *("hybrid_context_parallel", "cuda_graph_impl", "use_ring_exchange_p2p"),
        "Derived.recv_forward",
    ):
        assert sum(words in line for line in warnings) == 1, f"{words} in {warnings}"


def test_the_engine_replaces_megatrons_choice_of_schedule(outcomes: dict[str, Outcome]) -> None:
    (names,) = outcomes["schedules_are_chosen_as_megatron_does"].facts
    assert names[0] == "forward_backward_no_pipelining"
    if len(names) > 1:
        assert names[1:] == [
            "forward_backward_no_pipelining",
            "forward_backward_pipelining_without_interleaving",
            "forward_backward_pipelining_with_interleaving",
        ]


def test_a_pipeline_rank_may_run_a_model_without_its_pipeline(outcomes: dict[str, Outcome]) -> None:
    facts = outcomes["a_rank_runs_a_model_of_its_own"].facts
    if facts == [None, None]:
        pytest.skip("GPTModel of Megatron-core 0.14 cannot be built for a V")
    assert facts == [0, 4]


def test_block_sums_in_a_v_are_refused_on_every_rank(outcomes: dict[str, Outcome]) -> None:
    facts = outcomes[MESSAGES + "sums_in_a_v_are_refused"].facts
    if facts == [None, None]:
        pytest.skip("GPTModel of Megatron-core 0.14 cannot be built for a V")
    assert all("'zb_v' places stages in a v, and config.enable_attention_residuals is on" in said for said in facts)


def test_errors_are_raised_on_every_rank(outcomes: dict[str, Outcome]) -> None:
    first, second = outcomes["impossible_arguments_are_errors"].facts
    assert first == second


def test_given_groups_give_losses_on_the_last_stage_only(outcomes: dict[str, Outcome]) -> None:
    first, last = outcomes["own_groups_and_communicator_are_taken"].facts
    assert first == []
    assert len(last) == SINGLE.microbatches


def test_outputs_that_a_hook_reads_have_gradients(outcomes: dict[str, Outcome]) -> None:
    for largest in outcomes["outputs_that_a_hook_reads_keep_their_data"].facts:
        assert min(largest) > 0.0


def test_checkpoint_activations_microbatch_equals_megatrons(outcomes: dict[str, Outcome]) -> None:
    for theirs, ours in outcomes["checkpointed_microbatches"].facts:
        assert theirs == ours
        assert len({tuple(more) for more in theirs}) == 2, "some microbatches in part, some in full"


def test_p2p_settings_choose_how_transfers_are_posted(outcomes: dict[str, Outcome]) -> None:
    for policies in outcomes[SETTINGS + "settings_reach_the_engine_and_not_the_config"].facts:
        assert policies == ["batched", "overlap", "overlap", "plain", *["overlap"] * 5] * 2


def test_packed_steps_run_in_orders_that_both_ranks_have_found(outcomes: dict[str, Outcome]) -> None:
    first, second = outcomes[SETTINGS + "packed_steps_are_planned_while_it_trains"].facts
    assert first == second
    assert [moved for _, moved, _ in first] == [False, True, False, True] * 2
    assert {planned for *_, planned in first} == {None, "auto"}


def test_steps_of_unequal_microbatches_change_their_plan_on_both_ranks(outcomes: dict[str, Outcome]) -> None:
    first, second = outcomes[SETTINGS + "steps_of_unequal_microbatches_have_their_plans"].facts
    assert first == second == ["interleaved_1f1b", "auto", "auto"]


def test_the_first_rank_writes_what_all_stages_cost(outcomes: dict[str, Outcome]) -> None:
    first, second = outcomes[SETTINGS + "what_its_stages_cost_is_measured"].facts
    assert second == {}
    file = MeasuredFile.from_dict(first)
    assert file.run is not None
    assert (file.run.schedule, file.run.pipeline_size, file.run.num_chunks) == ("interleaved_1f1b", 2, 2)
    for values in (file.values.forward, file.values.backward, file.values.activation):
        assert isinstance(values, tuple)
        assert len(values) == 4
        assert min(values) > 0
    assert file.network is not None
    assert file.network.message > 0


def test_wrong_settings_are_errors_on_every_rank(outcomes: dict[str, Outcome]) -> None:
    first, second = outcomes[SETTINGS + "wrong_settings_install_nothing"].facts
    assert first == second


def test_evaluation_has_gradients_where_the_caller_has_them(outcomes: dict[str, Outcome]) -> None:
    for seen in outcomes["evaluation_leaves_autograd_as_it_is"].facts:
        count = SINGLE.microbatches
        assert seen == [True] * 2 * count + [False] * count


def test_evaluation_frees_the_graph_of_a_sent_output(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["evaluation_gives_graphs_back"].facts == [0, 0]


def test_interleaved_message_shapes_follow_the_sequence_length(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["interleaved_shapes_ignore_the_decoders_length"].facts == [0, PAIR.microbatches]


def test_every_second_step_has_scalars_of_all_ranks_beside_megatrons_own(outcomes: dict[str, Outcome]) -> None:
    first, last = outcomes[SETTINGS + "metrics_reach_megatrons_writer"].facts
    own = [first.pop("own"), last.pop("own")]
    assert first == {}, "the last rank writes"
    names = [("bubble {}", 0), ("exposed wait {} (ms)", 1), ("time {} (ms)", 2)]
    assert sorted(last) == sorted(f"pipeline/{name.format(which)}" for name, _ in names for which in ("mean", "max"))
    for name, at in names:
        for k, step in enumerate((2, 4)):
            of_ranks = [numbers[k][at] for numbers in own]
            for which, value in (("mean", sum(of_ranks) / 2), ("max", max(of_ranks))):
                assert last[f"pipeline/{name.format(which)}"][k] == [step, pytest.approx(value, rel=1e-6)]
    assert all(0 < value < 1 for _, value in last["pipeline/bubble max"])
