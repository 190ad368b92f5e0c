#!/usr/bin/env python
"""Compare pipelines with one process, and trainings with Megatron-core's own schedules: the tables of docs/parity.md.

    python scripts/parity_table.py --checkout ~/Megatron-LM       every table, the groups under that Megatron-core too
    python scripts/parity_table.py --part Experts                 one table
    python scripts/parity_table.py --part matrix --engine ours --pp 2 --output -

A real GPTModel of Megatron-core on the CPU with gloo, the same weights for every cut. Each cell is the largest
absolute difference of any number that is compared: 0 means equal to the last bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from made_parts import MadePart, markdown_table  # noqa: E402

from tests.megatron import groups  # noqa: E402
from tests.megatron.cases import POLICIES, Case, Job, Model, Outcome  # noqa: E402
from tests.megatron.runner import parity_jobs, run_jobs  # noqa: E402

MODELS = {"untied": Model(), "tied": Model(tied=True, position="learned_absolute")}
ENGINES = ("megatron", "ours")
MATRIX = "matrix"
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
    of_row = dict(zip(("pp", "vp", "group", "policy", "deallocate"), row, strict=True))
    return Case(model=model, engine=engine, forward_only=column[0], variable_shapes=column[1], **of_row)


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
    table = [["P", "V", "group", "communication", "outputs", *heads]]
    for row in rows(sizes):
        pp, vp, group, policy, deallocate = row
        cells = [
            cell(results[case_of(row, column, model, engine)]) for column in COLUMNS.values() for engine in engines
        ]
        marked = [c if c == "0" else f"**{c}**" for c in cells]
        head = [str(pp), str(vp or "-"), str(group or pp if vp else "-"), policy, "freed" if deallocate else "kept"]
        table.append(head + marked)
    return f"### {title}\n\n{markdown_table(table)}\n"


def summary(engines: list[str], results: dict[Case, Outcome]) -> str:
    table = [["", "cases", "equal to the last bit", "different", "crash or hang", "refused"]]
    for engine in engines:
        cells = [cell(outcome) for case, outcome in results.items() if case.engine == engine]
        equal, refused = cells.count("0"), cells.count("refused")
        broken = cells.count("crashes") + cells.count("hangs")
        name = {"megatron": "Megatron-core's schedules", "ours": "megatron_pp"}[engine]
        numbers = (len(cells), equal, len(cells) - equal - refused - broken, broken, refused)
        table.append([name, *map(str, numbers)])
    return f"### In short\n\n{markdown_table(table)}\n"


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


def matrix(args: argparse.Namespace) -> tuple[str, bool]:
    """The tables of all settings, in Markdown, and whether ours are as they should be."""
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
    megatron, torch = (importlib.metadata.version(name) for name in ("megatron-core", "torch"))
    parts = [
        f"Written by `scripts/parity_table.py` with megatron-core {megatron} and torch {torch}, on the CPU with gloo.\n"
    ]
    parts += [summary(engines, results)]
    parts += [
        markdown(f"{name.capitalize()} embeddings", model, sizes, engines, results) for name, model in models.items()
    ]
    ours = [cell(outcome) for case, outcome in results.items() if case.engine == "ours"]
    return "\n".join(parts), all(text in ("0", "refused") for text in ours)


def trainings(name: str, releases: dict[str, str | None]) -> tuple[str, bool]:
    """The table of one group under each policy and release (version: checkout), and whether all are equal."""
    cases = {
        title: [dataclasses.replace(case, policy=policy) for policy in groups.POLICIES]
        for title, case in groups.GROUPS[name].items()
    }
    results = [run_trainings(list(itertools.chain(*cases.values())), checkout) for checkout in releases.values()]
    heads = [f"{version.partition('+')[0]}: {policy}" for version in releases for policy in groups.POLICIES]
    table = [["training", "P", "V", *heads]]
    for title, (case, *_) in cases.items():
        cells = [cell(outcomes[case]) for outcomes in results for case in cases[title]]
        marked = [text if text == "0" else f"**{text}**" for text in cells]
        table.append([title.replace("|", "&#124;"), str(case.pp), str(case.vp or "-"), *marked])
    found = [text for row in table[1:] for text in row[3:]]
    equal = found.count("0")
    sentence = f"{equal} of {len(found)} are equal to the last bit, with megatron-core {' and '.join(releases)}."
    return f"{markdown_table(table)}\n\n{sentence}", equal == len(found)


def run_trainings(cases: list[Case], checkout: str | None) -> dict[Case, Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        jobs = groups.compared_with_megatron(cases, folder)

        def note(job: Job, outcome: Outcome) -> None:
            print(
                f"{job.case.engine} {job.case.label()} {job.case.loop}: {outcome.short()}", file=sys.stderr, flush=True
            )

        return {
            job.case: outcome
            for job, outcome in zip(jobs, run_jobs(jobs, 60.0 * len(jobs), note, checkout), strict=True)
        }


def version_in(checkout: str | None) -> str:
    """Of Megatron-core, as it names itself."""
    check = "tests.functional_tests.megatron_checks:installed_release"
    (outcome,) = run_jobs([Job(Case(Model(layers=1)), check=check)], checkout=checkout)
    if outcome.status != "ok":
        raise SystemExit(f"{checkout or 'megatron-core'}: {outcome.short()}")
    return str(outcome.facts[0]["version"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[MATRIX, *groups.GROUPS], action="append", help="default: all")
    parser.add_argument(
        "--checkout", action="append", default=[], help="a folder with another Megatron-core; for groups"
    )
    parser.add_argument("--engine", choices=ENGINES, action="append", help="of the matrix; default: both")
    parser.add_argument("--pp", type=int, action="append", help="pipeline sizes of the matrix; default: 2 and 4")
    parser.add_argument("--model", choices=MODELS, action="append", help="of the matrix; default: both")
    parser.add_argument("--deadline", type=float, default=20.0, help="seconds for one case of the matrix")
    parser.add_argument(
        "--output", default=str(ROOT / "docs" / "parity.md"), help="a page with these parts, or - for the terminal"
    )
    args = parser.parse_args()
    releases = {version_in(checkout): checkout for checkout in (None, *args.checkout)}
    right = True
    for name in args.part or [MATRIX, *groups.GROUPS]:
        text, as_it_should = matrix(args) if name == MATRIX else trainings(name, releases)
        right = right and as_it_should
        if args.output == "-":
            print(text)
        else:
            page = Path(args.output)
            part = MadePart(page, name, lambda text=text: text)
            page.write_text(part.renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
