"""How good searched plans are: beside the exact optimum of small pipelines, and beside the lower bound of larger ones.

python scripts/plan_quality.py small --first 0 --count 50 --out results.jsonl     (needs the extra solver)
python scripts/plan_quality.py large --out results.jsonl
python scripts/plan_quality.py page --out results.jsonl                           (writes the tables of docs/bound.md)

Instances are drawn from their number. Small: P 2 to 4, V 1 or 2 in a loop or a V, M from P to 8, forwards of 0.5 to 1.5
in steps of 0.05, input gradients 0.8 to 1.2 and weight gradients 0.6 to 1 times that, memory in proportion to the
forward, a limit of 30 to 100% of 1F1B's fullest rank (at least one microbatch), transfers of 0 to 1.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from made_parts import long_tables_to_data, markdown_table  # noqa: E402

from megatron_pp.plan.costs.measured import Measured  # noqa: E402
from megatron_pp.plan.ir.placement import LOOP, V_SHAPE, Placement  # noqa: E402
from megatron_pp.plan.ir.spec import PlanSpec  # noqa: E402
from megatron_pp.plan.orders.list_scheduler import Problem  # noqa: E402
from megatron_pp.planner import auto  # noqa: E402
from megatron_pp.planner.bound import lower_bound  # noqa: E402
from megatron_pp.planner.exact import optimum  # noqa: E402

PAGE = ROOT / "docs" / "bound.md"
CLOSE = 1e-9
NAMES = {LOOP: "auto", V_SHAPE: "auto_v"}
Row = dict[str, Any]


def drawn(number: int) -> tuple[PlanSpec, Placement]:
    """The small instance of that number."""
    rng = random.Random(f"plan quality {number}")
    size, chunks = rng.randint(2, 4), rng.randint(1, 2)
    placement = Placement(LOOP if chunks == 1 else rng.choice([LOOP, V_SHAPE]), size, chunks)
    microbatches = rng.randint(size, 8)
    forward = [rng.randint(10, 30) / 20 for _ in range(placement.num_stages)]
    backward, weight = ([round(f * rng.uniform(*share) * 20) / 20 for f in forward] for share in ((0.8, 1.2), (0.6, 1)))
    ranks = [sum(forward[stage] for stage in stages) for stages in placement.stages]
    room = rng.uniform(0.3, 1.0) * max((size - rank) * kept for rank, kept in enumerate(ranks))
    measured = Measured(
        forward, backward, weight, transfer=rng.randint(0, 20) / 20, memory_limit=max(room, *ranks), activation=forward
    )
    return PlanSpec(NAMES[placement.kind], size, chunks, microbatches, measured=measured), placement


def searched(spec: PlanSpec, placement: Placement) -> Row:
    """The step of the searched plan, simulated as it is lowered, and the bound."""
    measured = spec.measured or Measured()
    began = time.process_time()
    best = auto.found(spec).best
    took = time.process_time() - began
    conditions = measured.costs(placement.num_stages), measured.network(), measured.memory(placement)
    bound = lower_bound(placement, spec.num_microbatches, *conditions)
    found = {"step": best.makespan, "from": best.name, "bound": bound.step, "reason": bound.reason, "seconds": took}
    return {"P": spec.pipeline_size, "V": spec.num_chunks, "M": spec.num_microbatches, "plan": spec.schedule, **found}


def small(number: int, effort: float) -> Row:
    spec, placement = drawn(number)
    row, measured = searched(spec, placement), spec.measured or Measured()
    costs, memory = measured.costs(placement.num_stages), measured.memory(placement)
    problem = Problem(placement, spec.num_microbatches, memory, costs, measured.transfer)
    best, least = row["step"], row["bound"]
    if best > least * (1 + CLOSE):
        found = optimum(problem, best, least, effort)
        best, least = min(found.step, best), max(found.bound, least)
    return {"kind": "small", "number": number, **row, "best": best, "least": min(best, least)}


def large() -> Sequence[tuple[str, int, int, float, float]]:
    """Plan, P, V, transfer, and memory over 1F1B's."""
    sizes = [("auto", 8, 1), ("auto_v", 8, 2), ("auto", 16, 1), ("auto_v", 16, 2)]
    return [(*size, transfer, room) for size in sizes for transfer in (0.0, 0.1, 0.5) for room in (1.0, 0.5)]


def large_row(plan: str, size: int, chunks: int, transfer: float, room: float) -> Row:
    """Equal stages, F = I = W = 1 a rank, so that a rank's chunks take 1 / V each."""
    placement = Placement(LOOP if plan == "auto" else V_SHAPE, size, chunks)
    each, limit = 1.0 / chunks, room * size * chunks
    measured = Measured(each, each, each, transfer=transfer, memory_limit=limit, weight_activation=1.0)
    row = searched(PlanSpec(plan, size, chunks, 4 * size, measured=measured), placement)
    return {"kind": "large", "transfer": transfer, "memory": room, **row}


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def small_table(rows: Sequence[Row]) -> list[str]:
    table: list[Sequence[str]] = [("P", "V", "instances", "optimum proven", "within 2% of it", "median", "worst")]
    groups = [(p, v) for p in (2, 3, 4) for v in (1, 2)]
    for p, v in [*groups, (None, None)]:
        mine = [row for row in rows if p in (row["P"], None) and v in (row["V"], None)]
        proven = sorted(row["step"] / row["best"] - 1 for row in mine if row["best"] <= row["least"] * (1 + CLOSE))
        if proven:
            good = sum(excess <= 0.02 + 1e-9 for excess in proven)
            numbers = [len(mine), len(proven), good, f"{proven[len(proven) // 2]:.1%}", f"{proven[-1]:.1%}"]
            table.append((str(p or "all"), str(v or "all"), *map(str, numbers)))
    others = [row for row in rows if row["best"] > row["least"] * (1 + CLOSE)]
    beaten = sum(row["step"] > 1.02 * row["best"] * (1 + CLOSE) for row in others)
    sentence = f"Of the {len(others)} without a proof in time, the solver found a plan shorter by over 2% for {beaten}."
    return [markdown_table(table), "", sentence]


def large_table(rows: Sequence[Row]) -> list[str]:
    table = [["plan", "P", "V", "M", "transfer / F", "memory / 1F1B's", "step", "bound", "above it", "by", "search s"]]
    for row in rows:
        cells = [*(row[name] for name in ("plan", "P", "V", "M", "transfer", "memory"))]
        excess = max(0.0, row["step"] / row["bound"] - 1)
        cells += [f"{row['step']:.4g}", f"{row['bound']:.4g}", f"{excess:.1%}", row["reason"]]
        table.append([*map(str, cells), f"{row['seconds']:.0f}"])
    return [markdown_table(table)]


def write_page(rows: Sequence[Row]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    tables = {"small": small_table, "large": large_table}
    for kind, table in tables.items():
        begin, end = f"<!-- table {kind} -->\n", f"<!-- end {kind} -->"
        before, _, rest = text.partition(begin)
        lines = table([row for row in rows if row["kind"] == kind])
        made = "\n".join(lines)
        made = long_tables_to_data(PAGE, "plan_quality", "larger pipelines", made) if kind == "large" else made
        text = before + begin + made + "\n" + end + rest.partition(end)[2]
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["small", "large", "page"])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    effort = "deterministic seconds of the solver for each small instance"
    parser.add_argument("--effort", type=float, default=4.0, help=effort)
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON for each instance; added to")
    args = parser.parse_args()
    if args.what == "page":
        write_page(read(args.out))
        return
    numbers = range(args.first, args.first + args.count)
    made = (small(number, args.effort) for number in numbers)
    if args.what == "large":
        made = (large_row(*case) for case in large()[args.first : args.first + args.count])
    with args.out.open("a", encoding="utf-8") as out:
        for row in made:
            out.write(json.dumps(row) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
