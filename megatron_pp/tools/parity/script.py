"""Finds out how a training script reads its flags and makes its steps, and whether it accepts the given sizes.

The script runs as the first rank of its layout, with process groups that send nothing, up to the first forward of its
first step. So all checks of the script and of Megatron run on the given sizes, before sizes are made small. Under
Megatron's training loop, parameters have no memory during this run, because the model may be large.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_pp.integrations import megatron_core
from megatron_pp.integrations.on_import import WhenImported
from megatron_pp.tools.flags.flags import Flags
from megatron_pp.tools.parity.cpu.wrapping import wrap, wrapped
from megatron_pp.tools.parity.records.recorder import TRAINING_LOOP
from megatron_pp.tools.parity.workers.processes import RunError, run_ranks

_MEGATRONS = ("--tensor-model-parallel-size", "--mock-data", "--tokenizer-type", "--transformer-impl", "--eval-iters")
"""A parser that knows these flags is Megatron's."""
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_PATIENCE = 60.0  # seconds
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass
class Seen:
    """The behaviour of a script until its first forward.

    megatrons_parser  Megatron's parser reads the script's flags, not the script's own parser
    options           options of that parser, each with the name that parity uses; empty if they are not known
    loop              the script calls Megatron's `pretrain`
    error             the reason if the script ended earlier
    usage             argparse's error about flags that it does not understand
    """

    megatrons_parser: bool = False
    options: dict[str, str] = field(default_factory=dict)
    loop: bool = False
    error: str = ""
    usage: str = ""


def examine(
    script: str,
    load: Callable[[str, list[str]], Callable[[], None]],
    flags: Callable[[Seen], Flags],
    world: int,
    folder: Path,
    deadline: float,
    schedule: bool,
) -> Seen:
    """Runs ``script`` as rank 0 of ``world``, in a process of its own. It gets the flags ``flags(seen)`` when its
    parser reads them. With ``schedule``, Megatron's schedule also checks the number of microbatches.

    A script that dies, or does not reach its first forward within ``deadline`` seconds, may need the other ranks. It is
    then judged by its imports in this process.
    """

    def body(rank: int) -> Seen:
        return _Examination(flags, world, folder, schedule).run(script, load)

    try:
        return run_ranks(body, 1, folder, min(deadline, _PATIENCE))[0]
    except RunError:
        imported = TRAINING_LOOP in sys.modules
        return Seen(megatrons_parser=imported, loop=imported)


class _Examination:
    """The examination of a script, in the process of its rank."""

    def __init__(self, flags: Callable[[Seen], Flags], world: int, folder: Path, schedule: bool) -> None:
        self.flags = flags
        self.world = world
        self.folder = folder
        self.schedule = schedule
        self.seen = Seen()
        self.process = os.getpid()

    def run(self, script: str, load: Callable[[str, list[str]], Callable[[], None]]) -> Seen:
        os.environ.update(WORLD_SIZE=str(self.world), LOCAL_WORLD_SIZE=str(self.world))
        _pretend_groups(self.world)
        wrap(argparse.ArgumentParser, "parse_known_args", self._parse)
        wrap(argparse.ArgumentParser, "error", self._usage)
        WhenImported((TRAINING_LOOP,), self._watch_loop)
        WhenImported((_SCHEDULES,), self._watch_schedules)
        try:
            load(script, self.flags(self.seen).words())()
            self.seen.error = "the script ended before its first training step"
        except SystemExit as ended:
            if os.getpid() != self.process:
                raise
            self.seen.error = f"the script ended with {ended.code!r} before its first training step"
        except Exception as error:
            traceback.print_exc()
            words = traceback.format_exception_only(type(error), error)[-1].strip()
            lacks_memory = isinstance(error, MemoryError) or any(text in words.lower() for text in _NO_MEMORY)
            self.seen.error = "" if lacks_memory else words
        return self.seen

    def _parse(self, original: Any, parser: argparse.ArgumentParser, args: Any = None, *rest: Any, **named: Any) -> Any:
        """Parses arguments. A parser that reads this process's own arguments is the script's, and gets the flags."""
        given = sys.argv[1:] if args is None else list(args)
        if given == sys.argv[1:] and all(name in parser._option_string_actions for name in _MEGATRONS):
            parser.allow_abbrev = False  # parity does not resolve abbreviations
            self.seen.megatrons_parser = True
            self.seen.options = _options_of(parser)
            sys.argv[1:] = given = self.flags(self.seen).words()
        return original(parser, given, *rest, **named)

    def _usage(self, original: Any, parser: argparse.ArgumentParser, message: str) -> Any:
        self.seen.usage = f"{parser.prog}: error: {message}"
        return original(parser, message)

    def _watch_loop(self) -> None:
        from megatron.core.datasets import utils

        from megatron_pp.integrations.megatron.named_objects import replace_names

        utils.compile_helpers = lambda: None  # helpers of data sets, which are not read
        training: Any = sys.modules[TRAINING_LOOP]
        pretrain = training.pretrain
        replace_names([(pretrain, wrapped(pretrain, self._pretrain))])
        wrap(training, "setup_model_and_optimizer", self._set_up)
        wrap(training, "get_megatron_optimizer", self._with_model)

    def _pretrain(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.loop = True
        return original(*args, **kwargs)

    def _set_up(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron_pp.integrations.megatron.named_objects import replace_names
        from megatron_pp.tools.parity import cpu_stand_in

        if not getattr(torch.cuda, "_megatron_pp_stand_in", False):
            self._end()  # a model on a GPU would take its memory
        from megatron.core.distributed import DistributedDataParallel

        cpu_stand_in.CPU = torch.device("meta")
        replace_names([(DistributedDataParallel, _ModuleItself)])
        return original(*args, **kwargs)

    def _with_model(self, original: Any, config: Any, model: Any, *args: Any, **kwargs: Any) -> NoReturn:
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.pipeline_parallel import schedules
        from megatron.training import get_args

        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        several = len(chunks) > 1
        if self.schedule:
            schedules.get_forward_backward_func()(
                forward_step_func=self._forward,
                data_iterator=[iter(()) for _ in chunks] if several else iter(()),
                model=chunks if several else chunks[0],
                num_microbatches=get_num_microbatches(),
                seq_length=get_args().seq_length,
                micro_batch_size=get_args().micro_batch_size,
                forward_only=False,
            )
        self._end()

    def _watch_schedules(self) -> None:
        from megatron.core.pipeline_parallel import schedules

        from megatron_pp.integrations.megatron.named_objects import replace_names

        chosen = schedules.get_forward_backward_func
        replace_names([(chosen, wrapped(chosen, self._choice))])

    def _choice(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapped(original(*args, **kwargs), self._schedule)

    def _schedule(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.schedule or megatron_core.is_installed():
            self._end()  # the schedule of this engine would communicate with other ranks
        return original(*args, **{**kwargs, "forward_step_func": self._forward})

    def _forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._end()

    def _end(self) -> NoReturn:
        """Ends the process immediately, so that the script cannot catch an exception."""
        if os.getpid() == self.process:
            (self.folder / "rank0.result").write_bytes(pickle.dumps(self.seen))
        os._exit(0)


def _options_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Option -> its name for parity. If several options set one value, it is the option with the value's name."""
    names = {}
    for option, action in parser._option_string_actions.items():
        own = "--" + action.dest.replace("_", "-")
        names[option] = own if own in action.option_strings else option
    return names


class _ModuleItself:
    """Replaces the wrapper that allocates memory for gradients. It returns the module itself."""

    def __new__(cls, config: Any, ddp_config: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        return module


def _pretend_groups(world: int) -> None:
    """Makes process groups of ``world`` ranks. This process is their first rank, and their collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    begin = dist.init_process_group
    group = dist.new_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        begin("fake", store=FakeStore(), rank=0, world_size=world)

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return group(ranks, backend="fake")

    for owner in (dist, sys.modules["torch.distributed.distributed_c10d"]):
        vars(owner).update(init_process_group=init_process_group, new_group=new_group)
    for name in ("all_reduce", "broadcast", "barrier"):
        wrap(dist, name, _nothing)


def _nothing(original: Any, *args: Any, **kwargs: Any) -> None:
    return None


def canonical(words: Flags, options: dict[str, str]) -> Flags:
    """The flags by the names that parity knows, if options have several names. ``options`` are those of the script's
    parser, which accepts no abbreviations."""
    return Flags(tuple((options.get(name, name), values) for name, values in words.items))


def refuse(seen: Seen) -> None:
    """Raises RunError for flags that argparse does not understand."""
    if seen.usage:
        raise RunError(seen.usage)
