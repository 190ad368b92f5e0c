"""Flags of a script: read, shrunk, and taken apart into the parts of a parallel layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_pp.tools.flags.flags import Flags
from megatron_pp.tools.parity.layout import Layout, fewest_processes, stages_of
from megatron_pp.tools.parity.shrink import for_parity, shrink

MODEL = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1"
MODEL += " --global-batch-size 256"
TP2, PP2, PP4 = (f"--{name}-model-parallel-size {n}" for name, n in (("tensor", 2), ("pipeline", 2), ("pipeline", 4)))
CP2, EP2, V2 = "--context-parallel-size 2", "--expert-model-parallel-size 2", "--num-virtual-stages-per-pipeline-rank 2"


def layout(text: str, world: int | None = None) -> Layout:
    flags = Flags.read(f"{MODEL} {text}".split())
    return Layout(flags, world or fewest_processes(flags))


def small(text: str) -> Flags:
    return shrink(layout(text))


def test_flags_are_read_and_written_as_they_were():
    words = ["data", "--a", "1", "2", "--b", "--c=3", "--lr", "-1e-3", "--a", "4"]
    flags = Flags.read(words)
    assert flags.words() == [*words[:5], "--c", "3", *words[6:]]
    assert (flags.text("--a"), flags.number("--c", 0), flags.text("--lr"), flags.text("--none", "x")) == (
        *("4", 3, "-1e-3", "x"),
    )
    assert flags.set("--a", 9).words().count("9") == 2
    assert "--b" not in flags.with_values(b=False)
    assert flags.with_values(new_one=True).words()[-1] == "--new-one"


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et|tt|L", ["Et", "tt", "L"]),
        ("Et*3|(tt|)*2,m|L", ["Ettt", "tt", "tt", "m", "L"]),
        ("E|(t|)*2tL", ["E", "t", "t", "tL"]),
    ],
)
def test_a_layout_string_is_read_as_stages(text, stages):
    assert stages_of(text) == stages


@pytest.mark.parametrize(
    ("text", "processes"),
    [
        (TP2, 2),
        (f"{TP2} {PP4}", 8),
        ("--use-distributed-optimizer", 2),
        (f"{TP2} --use-distributed-optimizer", 4),
        (f"--num-experts 8 {EP2}", 2),
        (f"--num-experts 8 {EP2} {TP2} --expert-tensor-parallel-size 1", 2),
        (f"--num-experts 8 {EP2} {TP2}", 4),
    ],
)
def test_processes_that_a_layout_needs(text, processes):
    assert fewest_processes(layout(text).flags) == processes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{PP4} {V2}", {"--num-layers": "8", "--global-batch-size": "8"}),
        (f"{PP2} --num-layers-per-virtual-pipeline-stage 4", {"--num-layers": "8"}),
        (TP2, {"--num-layers": "2", "--num-attention-heads": "4", "--hidden-size": "32"}),
        (f"{CP2} {TP2}", {"--seq-length": "16"}),
        ("--num-query-groups 8 --group-query-attention", {"--num-query-groups": "2", "--num-attention-heads": "4"}),
        (f"--num-experts 64 {EP2} --moe-router-topk 8", {"--num-experts": "4", "--moe-router-topk": "2"}),
        (
            f"{PP2} --pipeline-model-parallel-layout Ettt|tttttt|ttt|L",
            {"--pipeline-model-parallel-layout": "Et|tt|t|L", "--num-layers": "4"},
        ),
        (f"{PP2} --account-for-loss-in-pipeline-split", {"--num-layers": "3"}),
        (
            f"{PP2} --pipeline-model-parallel-layout Et*16|t*16L --moe-layer-freq ([0]*3+[1]*29)",
            {"--num-layers": "2", "--moe-layer-freq": "([0]*1+[1]*1)"},
        ),
        (
            f"{PP2} --decoder-first-pipeline-num-layers 20 --moe-layer-freq ([0]*3+[1]*29)",
            {"--num-layers": "3", "--moe-layer-freq": "([0]*1+[1]*2)"},
        ),
    ],
)
def test_sizes_go_down_to_what_the_layout_needs(text, expected):
    flags = small(text)
    assert {name: flags.text(name) for name in expected} == expected


def test_nothing_grows_and_the_parts_stay():
    wanted = layout(f"{PP2} {V2} {TP2} --sequence-parallel --num-experts 4 {EP2} --swiglu")
    got = Layout(shrink(wanted), wanted.world)
    assert got.parts() == wanted.parts()
    assert "--swiglu" in got.flags
    once = shrink(got)
    assert once == got.flags, "a second time changes nothing"


def test_changed_sizes_are_listed():
    flags = layout(f"{TP2} --bf16 --load /x")
    changed, words = for_parity(flags, 2, True, False)
    assert "--num-layers: 32 -> 2" in words
    assert "--bf16: on -> -" in words
    assert "--load" not in changed.flags
    own, _ = for_parity(flags, 2, True, False, own_loop=True)
    assert {name for name, _ in own.flags.items} <= {name for name, _ in flags.flags.items}
    assert (changed.uneven_masks, own.uneven_masks) == (True, False)


@pytest.mark.parametrize(
    ("text", "there", "gone"),
    [
        ("", "--no-gradient-accumulation-fusion", "--recompute-modules"),
        ("--defer-embedding-wgrad-compute", "--transformer-impl", "--no-gradient-accumulation-fusion"),
        ("--recompute-modules moe_act --recompute-granularity selective", "--seq-length", "--recompute-granularity"),
    ],
)
def test_flags_that_the_cpu_cannot_run_are_replaced(text, there, gone):
    changed, _ = for_parity(layout(text), 2, True, False)
    assert there in changed.flags
    assert gone not in changed.flags
    kept, _ = for_parity(layout("--recompute-modules mlp moe_act --recompute-granularity selective"), 2, True, False)
    assert kept.flags.text("--recompute-modules") == "mlp"


def test_one_process_computes_the_same():
    alone = layout(f"{TP2} {PP2} {V2} {CP2} --sequence-parallel --use-distributed-optimizer --swiglu").alone()
    assert alone.world == 1
    assert alone.label() == "uneven masks"
    assert alone.flags.text("--global-batch-size") == "256"
    assert "--swiglu" in alone.flags
    hybrid = layout(f"{PP2} --hybrid-layer-pattern M*-|M-").alone()
    assert hybrid.flags.text("--hybrid-layer-pattern") == "M*-M-"


@pytest.mark.parametrize(
    ("text", "part", "left", "world"),
    [
        (f"{TP2} {PP2}", "TP", "PP 2", 2),
        (f"{PP2} {V2}", "VPP", "PP 2", 2),
        (f"{PP2} {V2}", "PP", "", 1),
        (f"{TP2} --sequence-parallel", "sequence parallelism", "TP 2", 2),
        (f"{TP2} --use-distributed-optimizer", "DP", "TP 2, distributed optimizer", 2),
        (f"--num-experts 8 {EP2}", "experts", "DP 2", 2),
    ],
)
def test_a_part_is_switched_off(text, part, left, world):
    full = Layout(layout(text).flags, layout(text).world, uneven_masks=False)
    got = full.without(part)
    assert (got.label(), got.world) == (left, world)


def test_a_checkpoint_is_a_part():
    """A checkpoint keeps its flags and its kind of optimizer, also in one process."""
    asked = replace(layout(f"{PP2} --use-distributed-optimizer --ckpt-format torch", 4), checkpoint="restore")
    assert asked.label() == "PP 2, DP 2, distributed optimizer, uneven masks, checkpoint (restore)"
    small, _ = for_parity(asked, 2, True, False)
    assert (small.flags.text("--ckpt-format"), small.flags.text("--train-iters")) == ("torch", "4")
    assert small.alone() == replace(small, checkpoint="resume").alone()
    assert small.alone().label() == "distributed optimizer, uneven masks, checkpoint (save)"
    without = asked.without("checkpoint")
    assert without == replace(asked, checkpoint="")
    assert without.alone().label() == "uneven masks"


def test_a_size_is_halved():
    assert layout(PP4).halved("PP") == layout(PP2)
    assert layout(PP2).halved("PP") is None
    assert layout("", 4).halved("DP") == layout("", 2)
