#!/usr/bin/env python
"""Check and measure on 1 to 8 GPUs, in parts, what only a GPU can show.

    scripts/gpu_check.sh                   parts that have not run here at this commit, first those that never ran
    scripts/gpu_check.sh --only race eight these parts, even if they are done
    scripts/gpu_check.sh --fresh           all parts again
    scripts/gpu_check.sh --out FILE.md     write elsewhere: FILE.md, data/FILE.json
    scripts/gpu_check.sh --list            the parts, with their deadlines and what each needs
    scripts/gpu_check.sh --page            make the page from the recorded results, and run nothing
    scripts/gpu_check.sh --cpu             try the script over gloo without a GPU; checks nothing of CUDA

Each part runs in processes of its own, and has a deadline at which they are killed. Its verdict is pass, fail, numbers
(measured, without a limit) or not run, with the reason. The results are in docs/data/gpu_results.json, a committed
file. A part's result is replaced only when the part runs again. The file is saved after each part. If a run ends early
(Ctrl-C, SIGTERM, the end of its time), the finished parts are kept, and the next call continues there. All parts
together take two calls. The exit status is 0 if no part has failed, 1 if a part has failed or has yet to run, and 2 for
wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
for folder in (str(ROOT), str(ROOT / "scripts")):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from gpu_day import outside, table  # noqa: E402
from gpu_day.bench import TINY, Machine, Result, Sizes  # noqa: E402
from gpu_day.page import page  # noqa: E402
from gpu_day.runner import OtherRunError, Run, run_parts, write_whole  # noqa: E402

from testkit.race_cases import KEEP_FREED_MEMORY_MAPPED  # noqa: E402

SECONDS = 1170.0
PAGE = ROOT / "docs" / "gpu_results.md"
_STAND_IN_GPUS = 2  # the number of GPUs that --cpu assumes


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.list:
        for part in table.PARTS:
            print(f"{part.name:18} {part.deadline:4.0f} s  {part.title}")
        return 0
    if args.page:
        return only_the_page(args.out or PAGE)
    if args.cpu:
        os.environ.update(KEEP_FREED_MEMORY_MAPPED)  # for the ranks, which are new processes
        machine = Machine("gloo", _STAND_IN_GPUS)
    else:
        machine = Machine("nccl", outside.gpu_count())
    if machine.gpus == 0:
        print("gpu_check: torch finds no GPU here; --cpu tries the script without one", file=sys.stderr)
        return 2
    saved = args.out and args.out.parent / "data" / f"{args.out.stem}.json"
    run = Run(machine, TINY if args.cpu else Sizes(), saved)
    try:
        run.read()
    except OtherRunError as other:
        print(f"gpu_check: {other}", file=sys.stderr)
        return 2
    if not args.fresh:
        run.go_on()
    return carried_out(run, args)


def only_the_page(out: Path) -> int:
    run = Run(Machine("nccl", 0), Sizes(), out.parent / "data" / f"{out.stem}.json")
    try:
        run.read()
    except OtherRunError as other:
        print(f"gpu_check: {other}", file=sys.stderr)
        return 2
    write_page(run, out)
    return 0


def carried_out(run: Run, args: argparse.Namespace) -> int:
    """Run the parts that are chosen or have yet to run, and write the page. Returns the exit status."""
    parts = table.chosen(args.only) if args.only else run.to_come()
    try:
        run_parts(run, parts, args.seconds, say)
    except KeyboardInterrupt:
        print("gpu_check: ended early", file=sys.stderr)
    run.save()
    write_page(run, args.out)
    failures = run.failures()
    to_come = [] if args.only else run.to_come()
    for failure in failures:
        print(f"FAILED: {failure.splitlines()[0]}")
    if to_come:
        print(f"TO COME: {', '.join(part.name for part in to_come)}")
    return 1 if failures or to_come else 0


def write_page(run: Run, out: Path | None) -> None:
    if out is not None:
        write_whole(out, page(run, out))
        print(f"wrote {out}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE.md", help=f"default: {PAGE.name}, with --cpu nowhere")
    names = [part.name for part in table.PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="PART", help="see --list")
    parser.add_argument("--fresh", action="store_true", help="run all parts again")
    parser.add_argument("--page", action="store_true", help="make the page from the recorded results, and run nothing")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="limit for all parts together (default: %(default)g)"
    )
    parser.add_argument("--cpu", action="store_true", help="gloo on the CPU, with small sizes; writes only to --out")
    parser.add_argument("--list", action="store_true", help="print the parts and do nothing")
    args = parser.parse_args(argv)
    if args.out is None and not args.cpu:
        args.out = PAGE
    if args.out is not None and (args.out.is_dir() or not args.out.parent.is_dir() or args.out.suffix != ".md"):
        parser.error(f"--out {args.out}: must be a file FILE.md in a folder that exists")
    if not args.seconds > 0.0:
        parser.error(f"--seconds {args.seconds:g}: must be above 0")
    return args


def say(part: table.Part, result: Result) -> None:
    """Print a line for a part that has ended, and its failures."""
    why = "" if result.failures else result.why
    print(f"{part.name:18} {result.verdict:8} {result.seconds:6.1f} s  {why}", flush=True)
    for failure in result.failures:
        print(f"  FAILED: {failure}", flush=True)


def _ended(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM as Ctrl-C. A second SIGTERM is ignored, because `timeout` sends two."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _ended)
    raise SystemExit(main())
