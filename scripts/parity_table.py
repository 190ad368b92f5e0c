#!/usr/bin/env python
"""Write the tables of docs/parity.md: pipelines beside one process, and trainings beside Megatron-core's own schedules.

    python scripts/parity_table.py --checkout ~/Megatron-LM       every table, under that Megatron-core too
    python scripts/parity_table.py --part Experts                 one table
    python scripts/parity_table.py --part matrix --engine ours --pp 2 --output -

The model is Megatron-core's GPTModel, on the CPU with gloo. It has the same weights in every layout. Each cell is the
largest absolute difference of any compared number; 0 means equal to the last bit. An engine, release, size or model
that is not run keeps its values on the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from made_parts import MadePart, long_tables_to_data, markdown_table, table_in, with_tables  # noqa: E402

from megatron_pp.integrations.megatron.releases.versions import release_of  # noqa: E402
from testkit.megatron import groups  # noqa: E402
from testkit.megatron.cases import POLICIES, Case, Job, Model, Outcome  # noqa: E402
from testkit.megatron.runner import parity_jobs, run_jobs  # noqa: E402

MODELS = {"untied": Model(), "tied": Model(tied=True, position="learned_absolute")}
ENGINES = ("megatron", "ours")
NAMES = {"megatron": "Megatron", "ours": "megatron_pp"}
MATRIX = "matrix"
MATRIX_NAMES, TRAINING_NAMES = 5, 3  # number of cells in a row before its values
NOT_RUN, ABSENT = "**not run**", "-"  # ABSENT: the release lacks what the training needs
# (forward_only, variable_shapes) of a table's columns
COLUMNS = {"training": (False, False), "training, variable shapes": (False, True), "forward only": (True, False)}
COLUMNS["forward only, variable shapes"] = (True, True)
Row = tuple[int, int | None, int | None, str, bool]  # P, V, group size, policy, deallocate
Table = list[list[str]]  # the first row is the head
Releases = dict[str, str | None]  # version -> checkout; None: the installed Megatron-core


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
    """The cell of an outcome: "0", a difference, or "hangs", "crashes" or "refused"."""
    if outcome.status == "ok":
        return outcome.short()
    if outcome.status == "hang":
        return "hangs"
    if "died" in outcome.message or "size mismatch" in outcome.message or "match" in outcome.message.lower():
        return "crashes"
    if any(word in outcome.message for word in ("ValueError", "RuntimeError: The remainder", "ConfigError")):
        return "refused"
    return "crashes"


def grid(model: Model, sizes: list[int], results: dict[str, dict[Case, str]]) -> Table:
    """A table with one row for each of `rows`, and for each of COLUMNS one column per key of `results`."""
    heads = [f"{column}: {who}" for column in COLUMNS for who in results]
    table = [["P", "V", "group", "communication", "outputs", *heads]]
    for row in rows(sizes):
        pp, vp, group, policy, deallocate = row
        cells = [
            found[case_of(row, column, model, engine_of(who))]
            for column in COLUMNS.values()
            for who, found in results.items()
        ]
        head = [str(pp), str(vp or "-"), str(group or pp if vp else "-"), policy, "freed" if deallocate else "kept"]
        table.append(head + marked(cells))
    return table


def marked(cells: list[str]) -> list[str]:
    return [cell if cell in ("0", ABSENT) else f"**{cell}**" for cell in cells]


def with_kept(new: Table, old: Table, names: int) -> Table:
    """`new`, and the rows and columns that only `old` has. The first `names` cells of a row are its name."""
    tables = [table for table in (old, new) if table]
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for head, *body in tables:
        for row in body:
            rows.setdefault(tuple(row[:names]), {}).update(zip(head, row, strict=True))
    heads = list(dict.fromkeys(itertools.chain(*(table[0] for table in tables))))
    first_words = [name.partition(": ")[0] for name in heads]
    heads.sort(key=lambda name: first_words.index(name.partition(": ")[0]))
    return [heads, *([row.get(name, NOT_RUN) for name in heads] for row in rows.values())]


def engine_of(who: str) -> str:
    """The engine of a column. Its name is "Megatron" or "megatron_pp", and has a version if it is of a checkout, as in
    "megatron_pp 0.20.0"."""
    return "megatron" if who.partition(" ")[0] == NAMES["megatron"] else "ours"


def summary(tables: list[Table]) -> Table:
    cells: dict[str, list[str]] = {}
    for head, *body in tables:
        for row in body:
            for name, text in list(zip(head, row, strict=True))[MATRIX_NAMES:]:
                cells.setdefault(name.rpartition(": ")[2], []).append(text.strip("*"))
    short = [["", "cases", "equal to the last bit", "different", "crash or hang", "refused"]]
    for who, found in cells.items():
        found = [text for text in found if text != NOT_RUN.strip("*")]
        equal, refused = found.count("0"), found.count("refused")
        broken = found.count("crashes") + found.count("hangs")
        numbers = (len(found), equal, len(found) - equal - refused - broken, broken, refused)
        name = f"{who.replace('Megatron', 'Megatron-core')}'s schedules" if engine_of(who) == "megatron" else who
        short.append([name, *map(str, numbers)])
    return short


def run(cases: list[Case], deadline: float, checkout: str | None) -> dict[Case, str]:
    from tqdm import tqdm

    results: dict[Case, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        jobs = parity_jobs(cases, directory)
        for job in jobs:
            job.deadline = deadline if job.case.pp > 1 else 120.0
        with tqdm(total=len(jobs), file=sys.stderr, smoothing=0) as bar:

            def note(job: Job, outcome: Outcome) -> None:
                if job.case.pp > 1:
                    results[job.case] = cell(outcome)
                if outcome.status != "ok" and job.case.engine == "ours":
                    bar.write(f"{job.case.label()}: {outcome.short()}", file=sys.stderr)
                bar.update()

            # One set of processes for each pipeline size runs many cases.
            run_jobs(jobs, deadline * len(jobs) + 300, note, checkout)
    return results


def matrix(args: argparse.Namespace, releases: Releases, old: str) -> tuple[str, bool]:
    """The tables of all settings, in Markdown, and whether all cases of ours are equal or refused. A case that is not
    run keeps its value in `old`, the text of this part on the page.
    """
    engines, sizes = args.engine or list(ENGINES), args.pp or [2, 4]
    models = {name: MODELS[name] for name in args.model or MODELS}
    installed, torch = (importlib.metadata.version(name) for name in ("megatron-core", "torch"))
    versions = f"megatron-core {installed} and torch {torch}"
    written = f"Written by `scripts/parity_table.py` with {versions}, on the CPU with gloo."
    if old.strip() and written not in old:
        if args.engine or args.pp or args.model:
            raise SystemExit(f"the page's matrix is not of {versions}; run all of it, or give --output -")
        old = ""
    results: dict[str, dict[Case, str]] = {}
    for (version, checkout), engine in itertools.product(releases.items(), engines):
        cases = [
            case_of(row, column, model, engine)
            for model in models.values()
            for row in rows(sizes)
            for column in COLUMNS.values()
        ]
        who = NAMES[engine] if checkout is None else f"{NAMES[engine]} {short(version)}"
        if checkout is None or engine == "ours" or args.own_schedules:
            results[who] = run(sorted(cases, key=lambda case: case.pp), args.deadline, checkout)
    tables = {}
    for name in MODELS:
        title = f"### {name.capitalize()} embeddings"
        new = grid(models[name], sizes, results) if name in models else []
        before = table_in(old.partition(title)[2])
        if new or before:
            tables[title] = with_kept(new, before, MATRIX_NAMES)
    parts = {"### In short": summary(list(tables.values())), **tables}
    texts = [f"{title}\n\n{markdown_table(table)}\n" for title, table in parts.items()]
    ours = [text for who, found in results.items() if engine_of(who) == "ours" for text in found.values()]
    return "\n".join([f"{written}\n", *texts]).rstrip(), all(text in ("0", "refused") for text in ours)


def trainings(name: str, releases: Releases, old: str) -> tuple[str, bool]:
    """The table of one group under each policy and release, in Markdown, and whether all are equal. A release that is
    not run keeps its columns in `old`, the text of this part on the page.
    """
    cases = {
        title: [dataclasses.replace(case, policy=policy) for policy in groups.POLICIES]
        for title, case in groups.GROUPS[name].items()
    }
    results = [
        run_trainings([case for title in cases if runs_on(title, version) for case in cases[title]], checkout)
        for version, checkout in releases.items()
    ]
    heads = [f"{short(version)}: {policy}" for version in releases for policy in groups.POLICIES]
    new = [["training", "P", "V", *heads]]
    for title, (case, *_) in cases.items():
        cells = [cell(outcomes[case]) if case in outcomes else ABSENT for outcomes in results for case in cases[title]]
        new.append([title.replace("|", "&#124;"), str(case.pp), str(case.vp or "-"), *marked(cells)])
    named = [row[:TRAINING_NAMES] for row in new]
    table = with_kept(new, [row for row in table_in(old) if row[:TRAINING_NAMES] in named], TRAINING_NAMES)
    earlier = re.search(r"with megatron-core (.*)\.$", old, re.MULTILINE)
    before = re.split(", | and ", earlier[1]) if earlier else []
    versions = {short(version): version for version in [*before, *releases]}
    found, ran = (
        [text for row in rows[1:] for text in row[TRAINING_NAMES:] if text != ABSENT] for rows in (table, new)
    )
    equal = f"{found.count('0')} of {len(found)} are equal to the last bit"
    sentence = f"{equal}, with megatron-core {_list(list(versions.values()))}."
    return f"{markdown_table(table)}\n\n{sentence}", all(text == "0" for text in ran)


def _list(names: list[str]) -> str:
    """ "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def runs_on(title: str, version: str) -> bool:
    """Whether Megatron-core of this version has what the training needs."""
    return release_of(version) >= groups.SINCE.get(title, (0, 0))


def short(version: str) -> str:
    """The version without its commit."""
    return version.partition("+")[0]


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
    """The version that this Megatron-core states. Ends the program if it cannot be imported."""
    check = "tests.functional_tests.megatron_checks:installed_release"
    (outcome,) = run_jobs([Job(Case(Model(layers=1)), check=check)], checkout=checkout)
    if outcome.status != "ok":
        raise SystemExit(f"{checkout or 'megatron-core'}: {outcome.short()}")
    return str(outcome.facts[0]["version"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[MATRIX, *groups.GROUPS], action="append", help="default: all")
    parser.add_argument("--checkout", action="append", default=[], help="a folder with another Megatron-core")
    parser.add_argument(
        "--own-schedules", action="store_true", help="in the matrix, also run Megatron's own schedules of the checkouts"
    )
    parser.add_argument("--only-checkouts", action="store_true", help="leave out the installed Megatron-core")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="engines of the matrix; default: both")
    parser.add_argument("--pp", type=int, action="append", help="pipeline sizes of the matrix; default: 2 and 4")
    parser.add_argument("--model", choices=MODELS, action="append", help="models of the matrix; default: both")
    parser.add_argument("--deadline", type=float, default=20.0, help="seconds for one case of the matrix")
    parser.add_argument(
        "--output", default=str(ROOT / "docs" / "parity.md"), help="a page with these parts, or - for the terminal"
    )
    args = parser.parse_args()
    installed = () if args.only_checkouts else (None,)
    releases = {version_in(checkout): checkout for checkout in (*installed, *args.checkout)}
    right = True
    for name in args.part or [MATRIX, *groups.GROUPS]:
        page = None if args.output == "-" else Path(args.output)
        old = "" if page is None else MadePart(page, name, str).split(page.read_text(encoding="utf-8"))[1]
        old = old if page is None else with_tables(page, old)
        text, as_it_should = matrix(args, releases, old) if name == MATRIX else trainings(name, releases, old)
        right = right and as_it_should
        if page is None:
            print(text)
        else:
            text = long_tables_to_data(page, "parity", name, text)
            part = MadePart(page, name, lambda text=text: text)
            page.write_text(part.renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
