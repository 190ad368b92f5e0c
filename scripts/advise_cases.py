"""Writes the table of `docs/advise.md`. It compares pipelines of other projects with ours, simulated with equal costs.

python scripts/advise_cases.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from made_parts import MadePart, markdown_table, renew  # noqa: E402

from megatron_pp.config.layout_text import balanced_layout  # noqa: E402
from megatron_pp.plan.simulate.memory import ModelShape  # noqa: E402
from megatron_pp.tools.advise.answer import layout_of  # noqa: E402
from megatron_pp.tools.advise.candidates import Candidate, cut_model, states_of  # noqa: E402
from megatron_pp.tools.advise.evaluate import Outcome, evaluate  # noqa: E402
from megatron_pp.tools.advise.fit import Room, fitted  # noqa: E402
from megatron_pp.tools.advise.layers.gpus import GPUS, Gpu  # noqa: E402
from megatron_pp.tools.advise.layers.layer_sizes import Latent  # noqa: E402
from megatron_pp.tools.advise.model import LETTERS, PART, Layer, Model, layer  # noqa: E402
from megatron_pp.tools.advise.pipeline_search import search  # noqa: E402
from megatron_pp.tools.advise.question import Question  # noqa: E402
from megatron_pp.tools.advise.transformer import Transformer  # noqa: E402

PAGE = ROOT / "docs" / "advise.md"
NAMED = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "interleaved_zb", "zb_v", "v_half", "v_min")
UNLIMITED = 10_000.0  # GB: the sources of these settings state no memory limit
BUDGET = 600.0


def row(setting: str, pipeline: str, one: Outcome, theirs: Outcome) -> list[str]:
    speed = "" if one is theirs else f"{theirs.step / one.step:.2f}x"
    return [setting, pipeline, f"{one.step:.5g}", f"{one.bubble:.1%}", f"{one.excess:.1%}", speed]


def stages_of_text(text: str, layers: Sequence[Layer]) -> list[tuple[Layer, ...]]:
    """The layers of each stage of a layout without repetitions, such as ``E|t|t|LL``."""
    left = list(layers)
    kinds = {letter: kind for kind, letter in LETTERS.items()}
    stages = []
    for part in text.split("|"):
        stages.append(tuple(left.pop(0) for _ in part))
        assert [one.kind for one in stages[-1]] == [kinds[letter] for letter in part], part
    assert not left
    return stages


def theirs(question: Question, chosen: Candidate, text: str) -> Outcome:
    """The other project's schedule ``chosen``, on its layout ``text``."""
    model = question.model(chosen.micro_batch)
    placement = chosen.placement(question.pipeline_size)
    fixed = (0.0,) * question.pipeline_size
    room = Room(placement, states_of(chosen, question.pipeline_size), 1, question.memory, fixed)
    return evaluate(question, chosen, fitted(stages_of_text(text, model.layers), room, model, recompute=False))


def our_row(question: Question, theirs: Outcome) -> list[str]:
    best = search(question, BUDGET).best
    assert best is not None
    layout = f", {in_cell(layout_of(best))}" if layout_of(best) else ""
    return row("", f"ours: {best.candidate}{layout}", best, theirs)


def question_of(model: Model, ranks: int, microbatches: int, **options: Any) -> Question:
    values: dict[str, Any] = {"latency": 0.05, "bandwidth": 0.05, "schedules": NAMED, "recompute": False}
    values |= {"pipeline_size": ranks, "global_batch": microbatches, "memory": UNLIMITED, "models": ((1, model),)}
    return Question(**(values | options))


def in_cell(layout: str) -> str:
    """``layout`` for a table cell. A bar would end the cell, and stars would make italics."""
    return f"<code>{layout.replace('|', '&#124;').replace('*', '&#42;')}</code>"


def mtp_losses() -> Iterator[list[str]]:
    """Rows for NVIDIA/Megatron-LM#5318: P=8, V=2, 10 layers and 3 MTP layers with spread losses, in DeepSeek-V3's
    sizes."""
    model = deepseek(10, 3, spread=True).model(GPUS["gb200"])
    question = question_of(model, 8, 32)
    chosen = Candidate("interleaved_1f1b", 2, 1, 32, "overlap")
    before = theirs(question, chosen, "E|" + "t|" * 10 + "m|m|m||LLLL")
    setting = "Megatron-LM#5318, P=8, M=32"
    last = f"interleaved_1f1b, all losses at the end, {in_cell('E|(t|)*10m|m|m||L*4')}"
    yield row(setting, last, before, before)
    spread = theirs(question, chosen, "E|" + "t|" * 10 + "m|m|m|LL|LL")
    yield row("", f"interleaved_1f1b, as it proposes, {in_cell('E|(t|)*10m|m|m|LL|LL')}", spread, before)
    yield our_row(question, before)


def deepseek(layers: int, mtp: int, spread: bool = False) -> Transformer:
    shape = ModelShape(
        layers, 7168, 4096, num_attention_heads=128, ffn_hidden_size=18432, vocab_size=129280, data_parallel=64
    )
    experts: dict[str, Any] = {"experts": 256, "top_k": 8, "expert_hidden": 2048, "shared_hidden": 2048}
    dense = min(3, layers) if layers > 10 else 0
    moe = tuple(chain(repeat(0, dense), repeat(1, layers - dense)))
    experts |= {"expert_parallel": 64, "once": True, "groups": (4, 8), "moe_layers": moe, "latent": Latent(q_rank=1536)}
    return Transformer(shape, True, mtp_layers=mtp, spread_mtp=spread, **experts)


def unequal_layers() -> Iterator[list[str]]:
    """Rows for AdaPtis (arXiv 2509.23722): models of unequal layers, beside Megatron's interleaved 1F1B in equal
    stages."""
    gemma = ModelShape(42, 3584, 4096, num_attention_heads=16, ffn_hidden_size=14336, vocab_size=256000)
    cases: tuple[tuple[str, Transformer, Gpu], ...] = (
        ("Gemma-2 9B, P=4, M=16", Transformer(gemma, gated=True, query_groups=8), GPUS["h100"]),
        ("DeepSeek-V3, P=8, M=32", deepseek(61, 1), GPUS["h100"]),
    )
    for setting, transformer, gpu in cases:
        ranks, count = (int(part.split("=")[1]) for part in setting.split(", ")[1:])
        question = question_of(transformer.model(gpu), ranks, count)
        counts = balanced_layout(transformer.shape.num_layers, 2 * ranks)
        ends = "m" * transformer.mtp_layers + "L"
        text = "|".join(("E" if k == 0 else "") + "t" * n for k, n in enumerate(counts)) + ends
        before = theirs(question, Candidate("interleaved_1f1b", 2, 1, count, "overlap"), text)
        yield row(setting, "Megatron's interleaved_1f1b, V=2, equal stages", before, before)
        yield our_row(question, before)


def memory_limits() -> Iterator[list[str]]:
    """Rows for OptPipe (arXiv 2510.05186): plans under a memory limit. F = B = W = 1, 1 GB a microbatch, transfers
    0.1."""
    model = Model((layer(PART, 8.0, 8.0, 8.0, 8.0),))
    for limit in (8.0, 6.0, 5.0):
        question = question_of(model, 8, 32, memory=limit, latency=0.1, schedules=(*NAMED, "auto_v"), max_chunks=2)
        chosen = Candidate("1f1b", 1, 1, 32, "overlap")
        before = evaluate(question, chosen, cut_model(question, chosen, model))
        setting = f"OptPipe's question, P=8, M=32, {limit:g} GB"
        short = "" if not before.refused else f", which needs {before.peak:g} GB"
        yield row(setting, f"1f1b{short}", before, before)
        yield our_row(question, before)


def cases() -> str:
    head = ["setting", "pipeline", "step ms", "bubble", "over the bound", "faster"]
    return markdown_table([head, *mtp_losses(), *unequal_layers(), *memory_limits()])


if __name__ == "__main__":
    sys.exit(renew([MadePart(PAGE, "cases", cases)], __doc__ or ""))
