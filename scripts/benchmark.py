#!/usr/bin/env python
"""Measure this engine beside its peers: `benchmark.py overhead`, `benchmark.py all --quick --out results`, ...

Each subcommand is a module of `benchmarks/` with `HELP`, `QUICK` (what --quick sets), `add_arguments(parser)` and
`run(args)`, which returns a Report, or an exit code. A report is printed as a table; with `--out DIR` it is written as
NAME.json and NAME.txt. `benchmark.py tables --from DIR` puts tables, charts and a summary of each into
docs/performance.md. Run on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Set before torch is imported: one thread a rank, and gloo on the loopback. Variables that are already set stay.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # silences torch's profiler, which the memory benchmark uses
if Path("/sys/class/net/lo").exists():
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
for folder in (str(ROOT), str(Path(__file__).resolve().parent)):
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if folder not in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # for the ranks, which are processes
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))

SUBCOMMANDS = (
    "all",
    "overhead",
    "instructions",
    "overlap",
    "exposed",
    "sharded",
    "prediction",
    "tracing",
    "memory",
    "bubble",
    "megatron_bubble",
    "megatron_steps",
    "slices",
    "vocabulary",
    "training",
    "packing",
    "growth",
    "gpu",
    "tables",
)


def main(argv: list[str] | None = None) -> int:
    """Parse, run the subcommand, print and write its report."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(argv).parse_args(argv)
    from benchmarks.all import NO_DEVICE
    from benchmarks.report import BenchmarkError, NoDeviceError, files_of
    from benchmarks.shaped_network import sigterm_unwinds

    try:
        if args.megatron_source is not None:
            from benchmarks.megatron_library import SOURCE_VARIABLE, source

            os.environ[SOURCE_VARIABLE] = str(args.megatron_source.resolve())
            source()  # raises if it is not a checkout
        if args.out is not None:
            files_of(args.subcommand, args.out)  # raises before minutes of measuring if the report cannot be written
        with sigterm_unwinds():
            result = args.run(args)
    except BenchmarkError as error:
        print(f"benchmark.py {args.subcommand}: {error}", file=sys.stderr)
        return NO_DEVICE if isinstance(error, NoDeviceError) else 2
    if isinstance(result, int):
        return result
    print(result.text())
    if args.out is not None:
        for path in result.write(args.out):
            print(f"wrote {path}")
    return 0


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    """The parser of the subcommand that ``argv`` begins with, so that only its module is imported, or of all of
    them."""
    parser = argparse.ArgumentParser(prog="benchmark.py", description=(__doc__ or "").split("\n\n")[1])
    kinds = parser.add_subparsers(dest="subcommand", required=True)
    for name in argv[:1] if {*argv[:1]} & {*SUBCOMMANDS} else SUBCOMMANDS:
        module = importlib.import_module(f"benchmarks.{name}")
        one = kinds.add_parser(name, help=module.HELP, description=module.HELP)
        one.add_argument("--out", type=Path, help="folder for NAME.json and NAME.txt")
        one.add_argument(
            "--quick",
            action="store_true",
            help="fewer points and rounds; options on the command line keep their values",
        )
        one.add_argument(
            "--megatron-source",
            type=Path,
            metavar="PATH",
            help="a checkout of Megatron-LM, measured beside the installed megatron-core",
        )
        module.add_arguments(one)
        one.set_defaults(run=module.run)
        if "--quick" in argv:
            one.set_defaults(**module.QUICK)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
