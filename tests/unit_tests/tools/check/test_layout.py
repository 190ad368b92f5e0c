"""The layout of a job, as a picture and as data."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_pp.errors import LayoutError
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.layout import section
from megatron_pp.tools.check.stages import microbatches_of, stages_of


def job(given: dict[str, Any] | None = None, **args: Any) -> Job:
    sizes = {"num_layers": 8, "pipeline_model_parallel_size": 2, "global_batch_size": 8, "micro_batch_size": 1}
    return Job("megatron", 64, given or {}, {**sizes, **args})


def texts(**args: Any) -> list[str]:
    return [stage.text() for stage in stages_of(job(**args))]


def test_layers_are_divided_evenly() -> None:
    assert texts() == ["Et*4", "t*4L"]
    assert texts(virtual_pipeline_model_parallel_size=2) == ["Ett", "tt", "tt", "ttL"]


def test_too_few_gpus_are_not_shown_as_a_layout() -> None:
    """The section "start" says what is wrong; here there are no replicas to count microbatches for."""
    lines = "\n".join(section(job(data_parallel_size=0)).lines)
    assert "64 GPUs: pipeline 2\n" in lines
    assert "microbatches a step" not in lines


def test_the_ends_may_have_layers_of_their_own() -> None:
    sizes = {"pipeline_model_parallel_size": 4, "num_layers": 10}
    assert texts(**sizes, decoder_first_pipeline_num_layers=1, decoder_last_pipeline_num_layers=3) == [
        "Et", "t*3", "t*3", "t*3L",
    ]  # fmt: skip


def test_one_end_with_all_layers_is_taken_without_a_pipeline() -> None:
    alone = {"pipeline_model_parallel_size": 1, "num_layers": 4}
    assert texts(**alone, decoder_last_pipeline_num_layers=4) == ["Et*4L"]
    for ends in ({"first": 1}, {"last": 3}, {"first": 1, "last": 3}):
        with pytest.raises(LayoutError):
            texts(**alone, **{f"decoder_{end}_pipeline_num_layers": size for end, size in ends.items()})


def test_embedding_and_loss_may_count_as_layers() -> None:
    counted = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    assert texts(num_layers=6, **counted) == ["Et*3", "t*3L"]


def test_layers_for_more_tokens_are_in_front_of_the_loss() -> None:
    assert texts(mtp_num_layers=1) == ["Et*4", "t*4mL"]


def test_a_layout_says_it_all() -> None:
    found = texts(pipeline_model_parallel_layout="Et*3|(tt|)*2m|L", pipeline_model_parallel_size=5, num_layers=7)
    assert found == ["Et*3", "tt", "tt", "m", "L"]


def test_a_layout_may_have_the_names_of_layers() -> None:
    names = [["embedding", "decoder"], ["LayerType.decoder", "mtp", "loss"]]
    assert texts(pipeline_model_parallel_layout=names) == ["Et", "tmL"]


def test_a_hybrid_pattern_has_stages() -> None:
    assert texts(hybrid_layer_pattern="M*M-|MM*-/*-") == ["Et*4", "t*4mL"]


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ({"num_layers": 0}, "--num-layers is not given"),
        ({"num_layers": 7}, "num_layers is 7, which does not divide over 2"),
        ({"pipeline_model_parallel_layout": "Et|t|tL"}, "the layout has 3 stages; 2 pipeline ranks"),
        ({"pipeline_model_parallel_layout": "Ex|tL"}, "has a stage 'Ex'"),
        ({"pipeline_model_parallel_layout": [4, 4]}, "has a stage 4; a stage is a list of embedding, decoder, mtp, "),
        ({"pipeline_model_parallel_layout": [["decoder"], ["decodr"]]}, r"has a stage \['decodr'\]"),
    ],
)
def test_layers_that_do_not_fill_the_stages_are_an_error(args: dict[str, Any], match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        stages_of(job(**args))
    shown = section(job(**args))
    assert any(line.startswith("no picture:") for line in shown.lines)


def test_microbatches_are_of_one_replica() -> None:
    assert microbatches_of(job(global_batch_size=64, micro_batch_size=2, data_parallel_size=4)) == 8
    with pytest.raises(LayoutError, match=r"is 7; it must be a multiple of --micro-batch-size times .* 1 x 2"):
        microbatches_of(job(global_batch_size=7, data_parallel_size=2))


def test_the_picture_of_a_short_pipeline() -> None:
    found = section(job(virtual_pipeline_model_parallel_size=2))
    assert list(found.lines[-5:-2]) == ["rank  chunk 0  chunk 1", "0     Ett      tt", "1     tt       ttL"]
    assert found.data == {
        "sizes": {"tensor": 1, "pipeline": 2, "context": 1, "data": 1, "expert": 1, "expert tensor": 1},
        "stages": [
            {"rank": rank, "chunk": chunk, "layers": [first, first + 2], "embedding": first == 0, "mtp": 0,
             "loss": first == 6}
            for first, (chunk, rank) in zip((0, 2, 4, 6), ((0, 0), (0, 1), (1, 0), (1, 1)), strict=True)
        ],
    }  # fmt: skip


def test_a_long_pipeline_is_shown_by_its_ends() -> None:
    layout = "E|(t|)*126L"
    shown = section(job(num_layers=126, pipeline_model_parallel_size=16, virtual_pipeline_model_parallel_size=8,
                        pipeline_model_parallel_layout=layout)).lines  # fmt: skip
    assert max(len(line) for line in shown if line[:1].isdigit() and " t " in line) <= 78
    assert "rank  chunk 0  chunk 1  chunk 2  chunk 3  chunk 4  chunk 5  ...  chunk 7" in shown
    assert "..." in shown
    assert [line.split()[0] for line in shown if line[:1].isdigit() and " t " in line][-1] == "15"


def names(given: dict[str, Any], **args: Any) -> list[str]:
    return [finding.name for finding in section(job(given, **args)).findings]


def test_flags_that_megatron_ignores_are_named() -> None:
    overlap = {"overlap_p2p_comm": True}
    assert names(overlap) == ["overlap-without-virtual-stages"]
    assert names(overlap, virtual_pipeline_model_parallel_size=2) == []
    assert names({}) == []
    group = {"microbatch_group_size_per_vp_stage": 4}
    assert names(group, **group) == ["group-without-chunks"]
    assert names(group, **group, virtual_pipeline_model_parallel_size=2) == []
    alone = {"sequence_parallel": True}
    assert names(alone, **alone) == ["sequence-parallelism-alone"]
    assert names(alone, **alone, tensor_model_parallel_size=2) == []
    assert names({"num_layers": 8}, hybrid_layer_pattern="M*M-|MM*/*-") == ["layers-of-a-pattern"]
    assert names({"num_layers": 7}, hybrid_layer_pattern="M*M-|MM*/*-") == []


def test_a_batch_that_megatron_rounds_is_named() -> None:
    rounded = {"global_batch_size": 19, "data_parallel_size": 8, "decrease_batch_size_if_needed": True}
    shown = section(job(**rounded))
    assert "2 microbatches a step on each of 8 replicas (--global-batch-size 19, --micro-batch-size 1)" in shown.lines
    assert [(one.name, one.change) for one in shown.findings] == [("rounded-batch", "--global-batch-size 16 or 24")]


def test_uneven_ranks_in_the_middle_are_named() -> None:
    sizes = {"pipeline_model_parallel_size": 4, "num_layers": 7}
    assert names({}, **sizes, pipeline_model_parallel_layout="Ett|tt|t|ttL") == ["uneven-middle-ranks"]
    assert names({}, **sizes, pipeline_model_parallel_layout="Et|tt|tt|ttL") == []


def test_a_schedule_of_batches_begins_with_its_first() -> None:
    """--global-batch-size has its default in such a job."""
    assert microbatches_of(job(global_batch_size=1, step_batch_size_schedule="0:384 200B:768 400B:1152")) == 384
    assert microbatches_of(job(step_batch_size_schedule=None)) == 8
