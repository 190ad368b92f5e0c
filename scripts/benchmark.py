#!/usr/bin/env python
"""Measure this engine beside its peers: `benchmark.py overhead`, `benchmark.py exposed --pp 2`, ...

Each subcommand is a module of `benchmarks/` with `HELP`, `add_arguments(parser)` and `run(args) -> Report`. It
prints a table, and with `--out DIR` writes NAME.json, NAME.txt and, where there is something to draw, NAME.png.
`benchmark.py tables --from DIR` puts those tables into docs/performance.md. Run on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Before torch is imported: one thread a rank, and gloo on the loopback, or a machine's own settings where given.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if Path("/sys/class/net/lo").exists():
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
for folder in (str(ROOT), str(Path(__file__).resolve().parent)):
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if folder not in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # for the ranks, which are processes
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))

SUBCOMMANDS = (
    "overhead",
    "overlap",
    "exposed",
    "prediction",
    "tracing",
    "memory",
    "bubble",
    "training",
    "growth",
    "gpu",
    "tables",
)


def main(argv: list[str] | None = None) -> int:
    """Parse, run the subcommand, print and write its report."""
    parser = argparse.ArgumentParser(prog="benchmark.py", description=(__doc__ or "").split("\n\n")[1])
    kinds = parser.add_subparsers(dest="subcommand", required=True)
    for name in SUBCOMMANDS:
        if importlib.util.find_spec(f"benchmarks.{name}") is None:
            continue
        module = importlib.import_module(f"benchmarks.{name}")
        one = kinds.add_parser(name, help=module.HELP, description=module.HELP)
        one.add_argument("--out", type=Path, help="folder for NAME.json, NAME.txt and NAME.png")
        module.add_arguments(one)
        one.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    from benchmarks.report import BenchmarkError

    try:
        report = args.run(args)
    except BenchmarkError as error:
        print(f"benchmark.py {args.subcommand}: {error}", file=sys.stderr)
        return 2
    if report is not None:
        print(report.text())
        if args.out is not None:
            for path in report.write(args.out):
                print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
