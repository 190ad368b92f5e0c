"""Draws the README's two pictures, also in a phone's width: a step as the simulator predicts it, and as it ran.

python scripts/readme_picture.py [--check]

Four processes on gloo train through ZB-H1 with compute of known length: stages sleep, so that two cores serve four
ranks. The prediction uses only these lengths and the plan. `--check` runs no step. It compares the predicted picture,
and its number in the README, with what the command makes now.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_pp.tools.cli.command_line import main as megatron_pp  # noqa: E402

README = ROOT / "README.md"
IMAGES = ROOT / "docs" / "images"
PREDICTED, MEASURED = IMAGES / "predicted.svg", IMAGES / "measured.svg"
SCHEDULE, RANKS, MICROBATCHES, MS = "zb_h1", 4, 8, 120.0
WARMUP, STEPS = 1, 5
# End of the file name -> width: about that of a README on a desktop, and on a phone.
PIXELS = {"": "1000", "-narrow": "360"}
PLAN = ["-s", SCHEDULE, "-P", str(RANKS), "-M", str(MICROBATCHES)]
COSTS = ["--forward-ms", f"{MS:g}", "--backward-ms", f"{MS:g}", "--weight-ms", f"{MS:g}"]
CAPTION = re.compile(r"Predicted: ([\d,]+) ms\. Measured: ([\d,]+) ms")


def call(*arguments: str) -> str:
    """Run a ``megatron-pp`` command and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = megatron_pp(list(arguments))
    if status:
        raise SystemExit(f"megatron-pp {' '.join(arguments)} ended with {status}")
    return printed.getvalue()


def draw(output: Path, *arguments: str) -> None:
    """Draw a picture in every width."""
    for end, pixels in PIXELS.items():
        call("draw", *arguments, "--width", pixels, "-o", str(output.with_stem(f"{output.stem}{end}")))


def draw_prediction(output: Path) -> float:
    """Draw the predicted step. Returns its length in ms."""
    draw(output, *PLAN, *COSTS)
    makespan: float = json.loads(call("simulate", *PLAN, *COSTS, "--json"))["makespan"]
    return makespan


def rank_main(rank: int, size: int) -> None:
    """One rank of the measured run. The environment names the folder in which it records its steps."""
    import torch.distributed as dist

    from benchmarks.engines import make_step
    from benchmarks.rounds import timed_rounds
    from benchmarks.stages import SplitTimedStage
    from benchmarks.work import Work

    seconds = MS / 1e3
    work = Work(SCHEDULE, size, 1, MICROBATCHES, (1, 1, 8))
    step = make_step("ours", work, rank, dist.group.WORLD, lambda _: SplitTimedStage(seconds, seconds, seconds))
    timed_rounds({"ours": step}, STEPS, WARMUP, dist.barrier)


def draw_measurement(output: Path) -> float:
    """Run the steps, and draw the one of median length. Returns its length in ms."""
    from megatron_pp.config.setting_names import variable_of
    from megatron_pp.tracing.analysis import analyse
    from megatron_pp.tracing.run import load_run
    from testkit.processes import run_processes

    with tempfile.TemporaryDirectory() as folder:
        recorded = {variable_of("trace_dir"): folder, variable_of("trace_steps"): f"{WARMUP + 1}-{WARMUP + STEPS}"}
        run_processes(rank_main, RANKS, environment=recorded, timeout=120, group_timeout=7200)
        found = analyse(load_run(folder))
        draw(output, "--from-trace", folder, "--step", str(found.step))
    return found.measured.makespan


def check() -> int:
    with tempfile.TemporaryDirectory() as folder:
        predicted = draw_prediction(Path(folder) / PREDICTED.name)
        same = all((IMAGES / now.name).read_bytes() == now.read_bytes() for now in Path(folder).iterdir())
    found = CAPTION.search(README.read_text(encoding="utf-8"))
    if same and found is not None and found[1] == f"{predicted:,.0f}":
        return 0
    print("the README's pictures are out of date; run python scripts/readme_picture.py", file=sys.stderr)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if the prediction is out of date")
    if parser.parse_args().check:
        return check()
    IMAGES.mkdir(exist_ok=True)
    predicted, measured = draw_prediction(PREDICTED), draw_measurement(MEASURED)
    caption = f"Predicted: {predicted:,.0f} ms. Measured: {measured:,.0f} ms"
    text = README.read_text(encoding="utf-8")
    if not CAPTION.search(text):
        raise SystemExit(f"{README} has no caption to replace: it needs {caption!r}")
    README.write_text(CAPTION.sub(caption, text), encoding="utf-8")
    print(caption)
    return 0


if __name__ == "__main__":
    sys.exit(main())
