#!/usr/bin/env python
"""Compare losses and gradients of pipelines with those of one process, under Megatron-core's schedules and under ours.

    python scripts/parity_table.py                    every case; writes docs/parity.md
    python scripts/parity_table.py --engine ours --pp 2 --output -

A real GPTModel of Megatron-core on the CPU with gloo, the same weights for every cut, 8 microbatches. Each cell is
the largest absolute difference of any loss or gradient from the run with one process: 0 means equal to the last
bit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.megatron.cases import POLICIES, Case, Job, Model, Outcome  # noqa: E402
from tests.megatron.runner import parity_jobs, run_jobs  # noqa: E402

MODELS = {"untied": Model(), "tied": Model(tied=True, position="learned_absolute")}
ENGINES = ("megatron", "ours")
# (forward_only, variable_shapes) of a table's columns
COLUMNS = {"training": (False, False), "training, variable shapes": (False, True), "forward only": (True, False)}
COLUMNS["forward only, variable shapes"] = (True, True)
Row = tuple[int, int | None, int | None, str, bool]  # P, V, group size, policy, deallocate


def rows(sizes: list[int]) -> list[Row]:
    result: list[Row] = []
    for pp, vp in itertools.product(sizes, (None, 2)):
        for group in (None,) if vp is None else (None, 6):
            result += [(pp, vp, group, policy, keep) for policy in POLICIES for keep in (True, False)]
    return result


def case_of(row: Row, column: tuple[bool, bool], model: Model, engine: str) -> Case:
    pp, vp, group, policy, deallocate = row
    forward_only, variable = column
    return Case(
        model=model,
        engine=engine,
        pp=pp,
        vp=vp,
        group=group,
        policy=policy,
        deallocate=deallocate,
        forward_only=forward_only,
        variable_shapes=variable,
    )


def cell(outcome: Outcome) -> str:
    """ "0", a difference, or in a word what happened instead."""
    if outcome.status == "ok":
        return outcome.short()
    if outcome.status == "hang":
        return "hangs"
    if "died" in outcome.message or "size mismatch" in outcome.message or "match" in outcome.message.lower():
        return "crashes"
    if any(word in outcome.message for word in ("ValueError", "RuntimeError: The remainder", "ConfigError")):
        return "refused"
    return "crashes"


def markdown(title: str, model: Model, sizes: list[int], engines: list[str], results: dict[Case, Outcome]) -> str:
    names = {"megatron": "Megatron", "ours": "megatron_pp"}
    heads = [f"{column}: {names[engine]}" for column in COLUMNS for engine in engines]
    lines = [f"## {title}", "", "| P | V | group | communication | outputs | " + " | ".join(heads) + " |"]
    lines.append("|" + " --- |" * (5 + len(heads)))
    for row in rows(sizes):
        pp, vp, group, policy, deallocate = row
        cells = [
            cell(results[case_of(row, column, model, engine)]) for column in COLUMNS.values() for engine in engines
        ]
        marked = [c if c == "0" else f"**{c}**" for c in cells]
        head = [str(pp), str(vp or "-"), str(group or pp if vp else "-"), policy, "freed" if deallocate else "kept"]
        lines.append("| " + " | ".join(head + marked) + " |")
    return "\n".join(lines) + "\n"


INTRODUCTION = """# Parity with one process

Written by `scripts/parity_table.py` with megatron-core {megatron} and torch {torch}, on the CPU with gloo.

A real `GPTModel` of Megatron-core (8 layers, fp32, dropout 0), the same weights for every cut, wrapped in
Megatron's `DistributedDataParallel`, 8 microbatches. Each cell is the largest absolute difference of any loss or
any gradient from the run with one pipeline rank; **0 means equal to the last bit**. P: pipeline ranks; V: model
chunks per rank; group: microbatches per group and chunk (`microbatch_group_size_per_vp_stage`). Communication:
*overlap* is `overlap_p2p_comm`, *flush* adds `overlap_p2p_comm_warmup_flush`, *batched* is `batch_p2p_comm`,
*plain* is neither. Outputs are *freed* with `deallocate_pipeline_outputs`, else *kept*.

Tied embeddings: a pipeline sums the gradients of the embedding and of the output layer apart and adds the two at
the end; the run with one process does the same here. (Added microbatch by microbatch, as one process with one
shared parameter does, they differ in the last bit under every engine, Megatron's included.)

Not all cells of Megatron's that are wrong are wrong by the same amount every time: what is read from freed memory
is arbitrary. *refused* is a clear error before anything runs; *crashes* is an error in the middle of a
step; *hangs* means no answer within {deadline:g} seconds.

Here the freed-output race shows nearly every time, because gloo reads a send's buffer late; on NCCL it depends on
timing (Megatron-LM#4047). Released Megatron-core has it up to 0.17; 0.18 waits for each send at once instead.

Megatron refuses *overlap* without chunks, and a last group that is smaller than P (8 microbatches in groups of 6 on
4 ranks).

The test suite's own cases (`tests/functional_tests/test_megatron_parity.py`) passed with Megatron-core 0.14.0, 0.15.3,
0.16.1, 0.17.1, 0.18.2, 0.19.0 and the main branch of August 2026.
"""


def summary(engines: list[str], results: dict[Case, Outcome]) -> str:
    lines = [
        "## In short",
        "",
        "| | cases | equal to the last bit | different | crash or hang | refused |",
        "|" + " --- |" * 6,
    ]
    for engine in engines:
        cells = [cell(outcome) for case, outcome in results.items() if case.engine == engine]
        equal, refused = cells.count("0"), cells.count("refused")
        broken = cells.count("crashes") + cells.count("hangs")
        name = {"megatron": "Megatron-core's schedules", "ours": "megatron_pp"}[engine]
        lines.append(
            f"| {name} | {len(cells)} | {equal} | {len(cells) - equal - refused - broken} | {broken} | {refused} |"
        )
    return "\n".join(lines) + "\n"


def run(cases: list[Case], deadline: float) -> dict[Case, Outcome]:
    from tqdm import tqdm

    results: dict[Case, Outcome] = {}
    with tempfile.TemporaryDirectory() as directory:
        jobs = parity_jobs(cases, directory)
        for job in jobs:
            job.deadline = deadline if job.case.pp > 1 else 120.0
        with tqdm(total=len(jobs), file=sys.stderr, smoothing=0) as bar:

            def note(job: Job, outcome: Outcome) -> None:
                if job.case.pp > 1:
                    results[job.case] = outcome
                if outcome.status != "ok" and job.case.engine == "ours":
                    bar.write(f"{job.case.label()}: {outcome.short()}", file=sys.stderr)
                bar.update()

            # One set of processes per pipeline size serves many cases.
            run_jobs(jobs, deadline=deadline * len(jobs) + 300, on_outcome=note)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, action="append", help="default: both")
    parser.add_argument("--pp", type=int, action="append", help="pipeline sizes; default: 2 and 4")
    parser.add_argument("--model", choices=MODELS, action="append", help="default: both")
    parser.add_argument("--deadline", type=float, default=20.0, help="seconds for one case")
    parser.add_argument("--output", default=str(ROOT / "docs" / "parity.md"), help="a file, or - for the terminal")
    args = parser.parse_args()
    engines, sizes = args.engine or list(ENGINES), args.pp or [2, 4]
    models = {name: MODELS[name] for name in args.model or MODELS}

    cases = [
        case_of(row, column, model, engine)
        for engine in engines
        for model in models.values()
        for row in rows(sizes)
        for column in COLUMNS.values()
    ]
    results = run(sorted(cases, key=lambda case: case.pp), args.deadline)
    versions = {"megatron": importlib.metadata.version("megatron-core"), "torch": importlib.metadata.version("torch")}
    parts = [INTRODUCTION.format(**versions, deadline=args.deadline), summary(engines, results)]
    parts += [
        markdown(f"{name.capitalize()} embeddings", model, sizes, engines, results) for name, model in models.items()
    ]
    text = "\n".join(parts)
    if args.output == "-":
        print(text)
    else:
        Path(args.output).write_text(text, encoding="utf-8")
    ours = [
        outcome for case, outcome in results.items() if case.engine == "ours" and cell(outcome) not in ("0", "refused")
    ]
    return 1 if ours else 0


if __name__ == "__main__":
    sys.exit(main())
