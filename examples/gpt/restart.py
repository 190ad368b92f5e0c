"""Where a run begins: anew, where ``--resume`` says, or, when torchrun has started its processes again, where it was.

After a failure torchrun's agents, which live on, start new processes with the old command line (``--max-restarts``). A
run remembers its agents and what it began with in a file of its folder, so its processes know the folder as their own
run's. torchrun's restart count would not do: an agent that restarts its processes because another one did does not
count.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from examples.gpt.arguments import ARGUMENTS, RunArguments, find_run
from examples.gpt.checkpoint import check_layout, find_checkpoint, newest_name
from examples.gpt.description import Checkpoint
from examples.gpt.errors import ArgumentError
from examples.gpt.files import read_text, write_atomically
from examples.gpt.lock import lock_folder
from examples.gpt.rendezvous_store import on_all_ranks
from megatron_pp.faults.liveness import process_of

LAUNCH = "launch.json"
RUNS = Path("runs")


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        folder: the run's folder, which need not exist yet.
        checkpoint: what it continues from.
        again: it is a launch's second start: of a run that this launch has begun itself.
    """

    folder: Path
    checkpoint: Checkpoint | None = None
    again: bool = False


@dataclass(frozen=True)
class Launch:
    """What a run's folder remembers of the launch that wrote to it last.

    Attributes:
        agents: torchrun's agents, one on each node; empty without torchrun.
        began_with: the checkpoint that it continued, as --resume gave it; ``None`` for a new run.
        newest_then: name of the newest checkpoint when it began.
    """

    agents: list[str]
    began_with: str | None
    newest_then: str | None


def this_agent(environment: Mapping[str, str] = os.environ) -> str:
    """The torchrun agent that has started this process: the same in all restarts. Empty without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return ""
    agent = process_of(os.getppid())
    return f"{agent.host or socket.gethostname()}/{os.getppid()}/{agent.started}"


def find_start(run: RunArguments, layout: dict[str, Any], agents: Sequence[str], alone: bool = True) -> Start:
    """Where the run of this command line begins.

    Args:
        run: the command line.
        layout: what a checkpoint must have in common with the run; see :class:`Checkpoint`.
        agents: that have started this run's processes, as far as is known.
        alone: ``agents`` are all; else a run of another agent may be ours too.

    Raises:
        ArgumentError: the folder holds another run, or cannot be written.
        CheckpointError: there is no checkpoint to continue from, or it is of another layout.
    """
    return _start_in(_folder(run, agents), run, layout, agents, alone)


def _start_in(folder: Path, run: RunArguments, layout: dict[str, Any], agents: Sequence[str], alone: bool) -> Start:
    launch = _read_launch(folder)
    if launch is not None and set(launch.agents) & set(agents):
        return _second_start(folder, launch, layout)
    if run.resume is not None:
        return Start(folder, _checked(find_checkpoint(Path(run.resume)), layout))
    if alone:
        _check_new(folder)
    _check_writable(folder)
    return Start(folder)


@contextmanager
def agreed_start(run: RunArguments, layout: dict[str, Any]) -> Iterator[tuple[Start, list[str]]]:
    """Rank 0's :func:`find_start`, and all agents; the run's folder is locked meanwhile. Collective.

    Rank 0's, since what the others see of a shared folder may be older, and clocks differ, after which new folders are
    named.

    Raises:
        ArgumentError, CheckpointError: as ``find_start``, on every rank.
        RunInUseError: another run works in the folder; on every rank.
    """
    agents, _ = on_all_ranks(this_agent)
    first = dist.get_rank() == 0
    with ExitStack() as locks:
        start = _agreed(lambda: _begin(run, layout, agents, locks) if first else None)
        _agreed(lambda: None if first else _follow(start.folder, locks))
        yield start, agents


def remember(start: Start, agents: Sequence[str]) -> None:
    """Note in the run's folder, which exists, that ``agents`` have started it. Called by one rank."""
    former = _read_launch(start.folder) if start.again else None
    began_with = None if start.checkpoint is None else str(start.checkpoint.path.absolute())
    launch = Launch(
        sorted(set(filter(None, agents))),
        former.began_with if former else began_with,
        former.newest_then if former else newest_name(start.folder / "checkpoints"),
    )
    write_atomically(start.folder / LAUNCH, json.dumps(vars(launch), indent=1) + "\n")


def _begin(run: RunArguments, layout: dict[str, Any], agents: Sequence[str], locks: ExitStack) -> Start:
    folder = _folder(run, agents)
    locks.enter_context(lock_folder(folder, first=True))
    return _start_in(folder, run, layout, agents, alone=True)


def _follow(folder: Path, locks: ExitStack) -> None:
    locks.enter_context(lock_folder(folder, first=False))


def _agreed(action: Callable[[], Any]) -> Any:
    """What ``action`` gave on rank 0; the first failure of any rank is raised on all."""
    results, failures = on_all_ranks(action)
    if failures:
        raise failures[0]
    return results[0]


def _second_start(folder: Path, launch: Launch, layout: dict[str, Any]) -> Start:
    newest = newest_name(folder / "checkpoints")
    if newest is not None and newest != launch.newest_then:  # the launch has saved since it began
        return Start(folder, _checked(find_checkpoint(folder / "checkpoints" / newest), layout), again=True)
    if launch.began_with is not None:
        return Start(folder, _checked(find_checkpoint(Path(launch.began_with)), layout), again=True)
    return Start(folder, again=True)


def _folder(run: RunArguments, agents: Sequence[str]) -> Path:
    if run.resume is not None:
        return find_run(Path(run.resume))
    if run.run_dir is not None:
        return Path(run.run_dir)
    ours = [path.parent for path in RUNS.glob(f"*/{LAUNCH}") if _is_of(path.parent, agents)]
    return max(ours, default=RUNS / time.strftime("%Y%m%d-%H%M%S"))


def _is_of(folder: Path, agents: Sequence[str]) -> bool:
    launch = _read_launch(folder)
    return launch is not None and bool(set(launch.agents) & set(agents))


def _check_new(folder: Path) -> None:
    if (folder / ARGUMENTS).exists():
        raise ArgumentError(
            f"--run-dir {folder} holds a run already; give another, or --resume {folder} to continue it"
        )


def _check_writable(folder: Path) -> None:
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ArgumentError(
            f"the run's folder {folder} cannot be made, as {existing} is no writable folder; give another --run-dir"
        )


def _checked(checkpoint: Checkpoint, layout: dict[str, Any]) -> Checkpoint:
    check_layout(checkpoint, layout)
    return checkpoint


def _read_launch(folder: Path) -> Launch | None:
    """None where there is none. One that cannot be read is none: the run is then not continued by itself."""
    try:
        content = json.loads(read_text(folder / LAUNCH))
        launch = Launch(content["agents"], content["began_with"], content["newest_then"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    named = all(isinstance(value, str | None) for value in (launch.began_with, launch.newest_then))
    listed = isinstance(launch.agents, list) and all(isinstance(agent, str) and agent for agent in launch.agents)
    return launch if named and listed else None
