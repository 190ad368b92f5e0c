"""Test `megatron-pp parity` on faults planted in Megatron-LM and in this engine, and on Megatron's own faults.

    python scripts/parity_faults.py --megatron DIR [--only TEXT ...] [--jobs N] [--csv FILE]
    python scripts/parity_faults.py --megatron DIR --layouts 100      drawn layouts, all of which must be equal

DIR is a checkout of Megatron-LM. parity_faults.toml has the faults. A fault is an edit of a module's text, made when
the module is imported. Parity is right if its verdict is "different", and it names the dimension and the parameters of
the fault. If the fault is Megatron's own, the edit repairs it: parity must say "different" without the edit, and
"equal" or "rounding" with it. The exit status is 1 if parity is wrong about a fault.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_pp.integrations.megatron.settings_file import parse_toml  # noqa: E402

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 16 --lr 1e-3 --train-iters 10 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 128 --position-embedding-type rope"
)


@dataclass(frozen=True)
class Fault:
    """A row of the file. ``flags`` are flags of parity (OPTIONS) first, then flags of the script.

    dimension   parity must name at least one of these parts
    parameters  a pattern: parity must name a parameter that matches it; "": it need not name any
    engine      whose schedule runs
    own         the fault is Megatron's own, and the edit repairs it
    script      a script in DIR or in this folder
    """

    name: str
    module: str
    old: str
    new: str
    flags: str
    dimension: list[str]
    parameters: str = ""
    engine: str = "megatron"
    own: bool = False
    script: str = "pretrain_gpt.py"


OPTIONS = ("--nproc", "--masks", "--checkpoint")
_SIZE = "--{}-model-parallel-size"
_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type {} --moe-aux-loss-coeff 0.01 "
    "--disable-bias-linear"  # Megatron's plain experts add a bias in place to a view, which autograd refuses
)
_WITH_CHUNKS = "--overlap-p2p-communication-warmup-flush"
_SWITCHES = (
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--untie-embeddings-and-output-weights", "--swiglu"),
    *("--normalization RMSNorm", "--group-query-attention --num-query-groups 4", "--disable-bias-linear"),
    *("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "--qk-layernorm"),
    *("--calculate-per-token-loss", _WITH_CHUNKS),
)
# The sitecustomize module of the ranks, which edits a module when it is imported.
SITE = """
import importlib.machinery, json, os, sys

EDITS = json.loads(os.environ["PARITY_FAULT"])  # module, old, new


class Edited(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        path = self.get_filename(fullname)
        text = self.get_data(path).decode()
        module, old, new = EDITS
        if old not in text:
            raise ImportError(f"{path} has no {old!r}")
        return compile(text.replace(old, new), path, "exec", dont_inherit=True)


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname != EDITS[0]:
            return None
        spec = super().find_spec(fullname, path, target)
        spec.loader = Edited(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, Finder)
"""


@dataclass(frozen=True)
class Outcome:
    """What parity said about a fault. ``mended``: for a fault of Megatron's own, the verdict with the edit that repairs
    it."""

    fault: Fault
    said: dict[str, Any]
    mended: str = ""

    @property
    def right(self) -> bool:
        dimension = str(self.said.get("dimension") or "")
        named = any(re.search(self.fault.parameters, name) for name in self.said.get("parameters") or {})
        return (
            self.said.get("verdict") == "different"
            and any(part in dimension for part in self.fault.dimension)
            and (named or not self.fault.parameters)
            and (not self.fault.own or self.mended in ("equal", "rounding"))
        )

    def row(self) -> dict[str, str]:
        return {
            "fault": self.fault.name,
            "flags": self.fault.flags,
            "verdict": str(self.said.get("verdict") or self.said.get("error")),
            "dimension": str(self.said.get("dimension") or ""),
            "whose": str(self.said.get("whose") or ""),
            "parameters": str(len(self.said.get("parameters") or {})),
            "right": "yes" if self.right else "no",
        }


def said_of(fault: Fault, edited: bool, megatron: Path) -> dict[str, Any]:
    """The object that ``megatron-pp parity --json`` prints, or its error. ``edited``: whether the ranks have the
    edit."""
    flags = fault.flags.split()
    split = 0
    while flags[split : split + 1] and flags[split] in OPTIONS:
        split += 2
    command = [sys.executable, "-m", "megatron_pp", "parity", *flags[:split], "--json", "--engine", fault.engine]
    script = next(path for path in (megatron / fault.script, ROOT / "scripts" / fault.script) if path.exists())
    command += [str(script), *MODEL.split(), *flags[split:]]
    with tempfile.TemporaryDirectory() as folder:
        path = [str(ROOT), str(megatron)]
        environment = dict(os.environ)
        if edited:
            (Path(folder) / "sitecustomize.py").write_text(SITE)
            environment["PARITY_FAULT"] = json.dumps([fault.module, fault.old, fault.new])
            path.insert(0, folder)
        environment["PYTHONPATH"] = os.pathsep.join(path)
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    try:
        found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
        return found
    except (IndexError, ValueError):
        return {"verdict": None, "error": ran.stderr[-2000:]}


def outcome_of(fault: Fault, megatron: Path) -> Outcome:
    if not fault.own:
        return Outcome(fault, said_of(fault, True, megatron))
    return Outcome(fault, said_of(fault, False, megatron), str(said_of(fault, True, megatron).get("verdict")))


def drawn_layouts(count: int, seed: int) -> list[Fault]:
    """``count`` random layouts of at most four ranks, as rows without an edit. Settings that Megatron-LM computes
    wrongly are left out: uneven masks and multi-token prediction under context parallelism."""
    draw = random.Random(seed)
    rows: list[Fault] = []
    while len(rows) < count:
        tp, pp, cp = draw.choice((1, 1, 2)), draw.choice((1, 2, 2, 4)), draw.choice((1, 1, 2))
        if tp * pp * cp > 4 or tp * pp * cp == 1:
            continue
        dp = draw.choice([size for size in (1, 2) if tp * pp * cp * size <= 4])
        flags = [f"--nproc {tp * pp * cp * dp}", "--masks full" if cp > 1 else "", f"{_SIZE.format('tensor')} {tp}"]
        flags += [f"{_SIZE.format('pipeline')} {pp}", f"--context-parallel-size {cp}"]
        chunks = ["--num-layers-per-virtual-pipeline-stage 1"] if pp in (2, 4) and draw.random() < 0.5 else []
        flags += chunks
        experts = draw.random() < 0.3
        flags += [_EXPERTS.format(draw.choice(("aux_loss", "seq_aux_loss", "none")))] if experts else []
        flags += ["--expert-model-parallel-size 2"] if experts and dp * cp > 1 and tp == 1 else []
        flags += ["--sequence-parallel"] if tp > 1 and (experts or draw.random() < 0.5) else []
        flags += ["--mtp-num-layers 1"] if cp == 1 and draw.random() < 0.2 else []
        switches = [flag for flag in _SWITCHES if draw.random() < 0.25]
        flags += switches if chunks else [flag for flag in switches if flag != _WITH_CHUNKS]
        rows.append(Fault("", "", "", "", " ".join(filter(None, flags)), []))
    return rows


def false_alarms(rows: list[Fault], megatron: Path, jobs: int) -> int:
    """Print the verdict of each layout. Returns how many are neither "equal" nor "rounding"."""
    alarms = 0
    with ThreadPoolExecutor(jobs) as pool:
        for row, said in zip(rows, pool.map(partial(said_of, edited=False, megatron=megatron), rows), strict=True):
            alarms += said.get("verdict") not in ("equal", "rounding")
            print(said.get("verdict"), row.flags, str(said.get("error") or "")[-300:], sep=" | ", flush=True)
    print(f"{alarms} of {len(rows)} layouts are neither equal nor rounding")
    return alarms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", type=Path, required=True, metavar="DIR", help="a checkout of Megatron-LM")
    parser.add_argument("--only", nargs="*", default=None, metavar="TEXT", help="faults whose names have one of these")
    parser.add_argument("--jobs", type=int, default=1, help="faults that run at the same time; default: 1")
    parser.add_argument("--csv", type=Path, default=None, metavar="FILE", help="write the table")
    parser.add_argument(
        "--layouts", type=int, default=0, metavar="N", help="draw N layouts and run only these, without faults"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the layouts; default: 0")
    args = parser.parse_args()
    if args.layouts:
        return min(1, false_alarms(drawn_layouts(args.layouts, args.seed), args.megatron.resolve(), args.jobs))
    faults = [Fault(**row) for row in parse_toml((ROOT / "scripts" / "parity_faults.toml").read_text())["fault"]]
    chosen = [fault for fault in faults if args.only is None or any(text in fault.name for text in args.only)]
    with ThreadPoolExecutor(args.jobs) as pool:
        outcomes = []
        for outcome in pool.map(partial(outcome_of, megatron=args.megatron.resolve()), chosen):
            outcomes.append(outcome)
            print(" | ".join(outcome.row().values()), flush=True)
    if args.csv is not None:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(outcomes[0].row()), lineterminator="\n")
            writer.writeheader()
            writer.writerows(outcome.row() for outcome in outcomes)
    return 0 if all(outcome.right for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
