"""Any schedule with any feature under any policy, on any network: losses and gradients equal those of one process to
the last bit, hostile networks have nothing to report, and on virtual devices no two streams race.

``MEGATRON_PP_EXHAUSTIVE=1`` runs the whole products, not a part of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from megatron_pp.feature_table import CACHES
from megatron_pp.features.pairs.pair_runner import HalfCall, in_turn, on_two_streams
from megatron_pp.features.skip_tensors.routes import SkipTensor, skip_tensors
from megatron_pp.features.slices.sequence_slice import sequence_slice
from megatron_pp.plan.ir.placement import LOOP
from megatron_pp.plan.ir.spec import CHANNELS, ONE_WAY, POLICIES
from megatron_pp.testing.adversarial_transports import HOSTILE_NETWORKS
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import HIDDEN, TOY_SCHEDULES, ToyBlock, ToyData, ToyResult, reference_run
from megatron_pp.weight_grad import split_weight_grad
from testkit.device_runs.stream_runs import POLICIES as FLAGS
from testkit.models.blocks import UNUSUAL_OUTPUTS
from testkit.streams import StreamNetwork, StreamReport, virtual_cuda
from testkit.streams.waiting import on_one_core
from testkit.sweeps import EXHAUSTIVE

NETWORKS = (*HOSTILE_NETWORKS, StreamNetwork)


def backward_first(forward_call: HalfCall, backward_call: HalfCall) -> None:
    backward_call()
    forward_call()


# Fields of the config; "slices" and "named" change the model too, those without fields nothing but the model.
FEATURES: dict[str, dict[str, Any]] = {
    "split": {},
    "named": {},
    "slices": {"sequence_slices": 4},
    "offload": {},
    "pairs": {"overlapped_forward_backward": in_turn},
    "pairs on two streams": {"overlapped_forward_backward": on_two_streams},
    "pairs backward first": {"overlapped_forward_backward": backward_first},
    "checkpoint": {},
    "reentrant checkpoint": {},
    **{name: {} for name in UNUSUAL_OUTPUTS},
    "debug": {"p2p_debug": True},
    "outputs kept": {"deallocate_pipeline_outputs": False},
    "sends waited at once": {"max_pending_sends": 0},
    "sends waited late": {"max_pending_sends": 5},
    "batches synchronised": {"batch_p2p_sync": True},
}
MEASURED = {"forward": 1.0, "backward_input": 1.2, "weight": 0.7, "transfer": 0.2, "memory_limit": 8.0}
PAIRS = {name for name in FEATURES if name.startswith("pairs")}
# Of each of these sets a run has one at most; and what changes the model in its own way does not go with exact numbers.
EXCLUDED = [{"offload", *PAIRS}, {"checkpoint", "reentrant checkpoint", *UNUSUAL_OUTPUTS},
            {"sends waited at once", "sends waited late"}]  # fmt: skip
# As at import time: "auto" schedules search for minutes at large shapes.
NAMED = [name for name, family in TOY_SCHEDULES.items() if family.search is None]
CHUNKED = "interleaved_1f1b"


class WholeNumbers(ToyData):
    """In float64, so that no sum depends on its order where the number of microbatches is a power of two."""

    def microbatch(self, mb: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, target = super().microbatch(mb)
        return (2 * x).round().double(), (2 * target).round().double()


class ExactBlock(torch.nn.Module):
    """A stage that exchanges features, flips signs and adds whole numbers, named tensors, and with ``causal`` earlier
    tokens. Its layer can leave weight gradients for later.
    """

    def __init__(self, stage: int, tensors: tuple[SkipTensor, ...] = (), causal: bool = False) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(stage)
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        signs = torch.randint(0, 2, (HIDDEN, 1), generator=draw).double() * 2 - 1
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(HIDDEN).roll(1, 0) * signs)
            self.linear.bias.copy_(torch.randint(-2, 3, (HIDDEN,), generator=draw))
        self.causal = causal
        self.uses = [one.name for one in tensors if stage in one.users]
        self.makes = [one for one in tensors if one.source == stage]

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> Any:
        assert list(named) == self.uses
        for count, tensor in enumerate(named.values(), 1):
            x = x + tensor * count
        if self.causal:
            part, tokens = sequence_slice(), len(x)
            x = (x if part is None else part.extend(self, x, dim=0)[0]).cumsum(0)[-tokens:]
        output = self.linear(x)
        made = {one.name: (output - x if one.gradient else x.detach() + 1) for one in self.makes}
        return (output, made) if made else output


class Checkpointed(torch.nn.Module):
    """A stage that is computed again in its backward."""

    def __init__(self, block: torch.nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self.reentrant = reentrant
        self.uses = getattr(block, "uses", ())

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> Any:
        if self.reentrant and not x.requires_grad:
            return self.block(x, **named)
        return checkpoint(self.block, x, use_reentrant=self.reentrant, **named)


@dataclass(frozen=True)
class Run:
    schedule: str
    size: int
    num_chunks: int
    count: int
    policy: str = "overlap"
    features: frozenset[str] = frozenset()
    network: type[MemoryNetwork] = HOSTILE_NETWORKS[0]
    channels: str = ONE_WAY
    variable: bool = False
    forward_only: bool = False
    pollable: bool = False
    group: int | None = None
    cache: str = CACHES[0]
    seed: int = 0

    @property
    def stages(self) -> int:
        return self.size * self.num_chunks

    @property
    def tensors(self) -> tuple[SkipTensor, ...]:
        text = "blocks" if self.seed % 2 else f"a=0>{self.stages - 1}; m=0>1 no_grad"
        return tuple(skip_tensors(text, self.stages)) if "named" in self.features else ()

    @property
    def exact(self) -> bool:
        return bool(self.features & {"named", "slices"})

    def left_out(self) -> dict[str, str]:
        """Features that do not go with the rest, and why."""
        found: dict[str, str] = {}
        for why, rule in RULES:
            for feature in sorted(rule(self, self.features.difference(found))):
                found[feature] = why
        return found

    def possible(self) -> Run:
        """The same without what does not go together."""
        num_chunks = TOY_SCHEDULES[self.schedule].chunks or self.num_chunks
        run = replace(self, features=self.features.difference(self.left_out()), num_chunks=num_chunks)
        if run.exact:
            run = replace(run, count=1 << min(3, self.count.bit_length() - 1))
        return replace(run, variable=run.variable and "slices" not in run.features)

    @property
    def unusual(self) -> str:
        return next(iter(self.features & set(UNUSUAL_OUTPUTS)), "")

    def block(self, stage: int) -> torch.nn.Module:
        if self.unusual:
            return UNUSUAL_OUTPUTS[self.unusual](stage)
        made = ExactBlock(stage, self.tensors, "slices" in self.features) if self.exact else ToyBlock(stage)
        for kind in ("checkpoint", "reentrant checkpoint"):
            if kind in self.features:
                return Checkpointed(made, kind.startswith("reentrant"))
        return made

    def fields(self) -> dict[str, Any]:
        found = {"pipeline_schedule": self.schedule, "p2p_channels": self.channels, **FLAGS[self.policy]}
        for feature in self.features:
            found |= FEATURES[feature]
        if "offload" in self.features:
            found |= {"offload_chunks": self.num_chunks, "offload_slots": 1 + self.seed % 2}
        if "named" in self.features:
            found |= {"skip_tensors": self.tensors, "skip_cache": self.cache}
        if self.group is not None:
            found["microbatch_group_size_per_vp_stage"] = self.group
        if self.schedule.startswith("auto") and "split" in self.features:
            found["pipeline_measured"] = MEASURED
        return {"pipeline_dtype": torch.float64 if self.exact else torch.float32, **found}

    def check(self) -> None:
        """Runs the step, and compares."""
        kind, on_streams = WholeNumbers if self.exact else ToyData, self.network is StreamNetwork
        data = kind(self.count, seq_length=4 if self.exact else 3, variable=self.variable)
        more = {"seed": self.seed % 3} if on_streams else {"seed": self.seed, "pollable": self.pollable}
        plain = self.network is MemoryNetwork
        network: Any = self.network(self.size, self.channels == ONE_WAY, **({} if plain else more))
        with on_one_core(), virtual_cuda() if on_streams else nullcontext():
            found = run_in_threads(
                *(self.size, self.num_chunks, data),
                network=network,
                forward_only=self.forward_only,
                block=self.block,
                prepare=split_weight_grad if "split" in self.features else None,
                timeout=120.0,
                **self.fields(),
            )
        slices = 4 if "slices" in self.features else 1
        losses = [sum(found.losses[k : k + slices]) / slices for k in range(0, len(found.losses), slices)]
        expected = reference(self.stages, data, self.forward_only, self.tensors, self.exact, slices > 1, self.unusual)
        grads = {name.replace(".block.", "."): grad for name, grad in found.grads.items()}
        assert ToyResult(losses, grads).difference(expected) == 0.0, self
        if on_streams:
            report = StreamReport.of(network, [found])
            assert not report.races, f"{self}: {report}"
            assert self.forward_only or self.count < 4 or report.reused > 0, "memory that nobody reuses shows no race"
        elif not plain:
            assert network.violations == [], self


def _more_than_one(of: set[str], run: Run, has: frozenset[str]) -> set[str]:
    return set(sorted(has & of)[1:])


def _does_not_go_with(is_so: Callable[[Run], bool], what: Collection[str], run: Run, has: frozenset[str]) -> set[str]:
    return set(has & set(what)) if is_so(run) else set()


def _stages_of(run: Run) -> int:
    return run.size * (TOY_SCHEDULES[run.schedule].chunks or run.num_chunks)


def _sums_are_rounded(run: Run) -> bool:
    return _stages_of(run) > 8 or bool(run.features & set(UNUSUAL_OUTPUTS))


# In this order: why features are left out, and (run, features so far) -> which.
RULES: list[tuple[str, Callable[[Run, frozenset[str]], set[str]]]] = [
    *((f"it does not go with others of {', '.join(sorted(some))}", partial(_more_than_one, some)) for some in EXCLUDED),
    *(
        (why, partial(_does_not_go_with, is_so, what))
        for why, is_so, what in (
            (
                "no search plans for it",
                lambda run: TOY_SCHEDULES[run.schedule].search is not None,
                {"named", "slices", "offload", *PAIRS},
            ),
            ("the schedule offloads, which has no pairs", lambda run: run.schedule == "pipe_offload", PAIRS),
            (
                "the schedule has whole backwards",
                lambda run: not TOY_SCHEDULES[run.schedule].splits_weight,
                {"split"},
            ),
            ("the schedule has no slices", lambda run: not TOY_SCHEDULES[run.schedule].sliced, {"slices"}),
            ("there is one stage", lambda run: _stages_of(run) == 1, {"named"}),
            (
                "it takes one input and gives one output",
                lambda run: "reentrant checkpoint" in run.features,
                {"named"},
            ),
            ("sums are not exact", _sums_are_rounded, {"named", "slices"}),
            ("nothing is batched", lambda run: run.policy == "overlap", {"batches synchronised"}),
            (
                "a stage is handed over as it is, and views may round in another order",
                lambda run: run.size == 1 or TOY_SCHEDULES[run.schedule].placement != LOOP,
                {"views"},
            ),
            ("there are fewer than 3 stages", lambda run: _stages_of(run) < 3, {"frozen stages"}),
            (
                "it takes virtual devices for other ones in a backward",
                lambda run: run.network is StreamNetwork,
                {"checkpoint"},
            ),
        )
    ),
]


@functools.lru_cache(maxsize=256)
def reference(
    stages: int,
    data: ToyData,
    forward_only: bool,
    tensors: tuple[SkipTensor, ...],
    exact: bool,
    causal: bool,
    unusual: str,
) -> ToyResult:
    """One process."""
    block = functools.partial(ExactBlock, tensors=tensors, causal=causal) if exact else ToyBlock
    return reference_run(stages, data, forward_only, UNUSUAL_OUTPUTS.get(unusual, block))


# -- every schedule ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("schedule", TOY_SCHEDULES)
def test_every_schedule_and_policy(schedule: str, policy: str) -> None:
    """On virtual devices, and on a hostile network with one of eight combinations of size, channels and polling, which
    take turns: every policy on every network meets all of them but for one at most.
    """
    i, j = list(TOY_SCHEDULES).index(schedule), POLICIES.index(policy)
    Run(schedule, 2, 2, 4, policy, network=StreamNetwork, variable=(i + j) % 2 == 1).possible().check()
    combinations = list(enumerate(product((2, 3), CHANNELS, (False, True))))
    some = combinations if EXHAUSTIVE else [combinations[(i // len(HOSTILE_NETWORKS) + j) % len(combinations)]]
    for kind in HOSTILE_NETWORKS if EXHAUSTIVE else [HOSTILE_NETWORKS[(i + j) % len(HOSTILE_NETWORKS)]]:
        for seed, (size, channels, pollable) in some:
            features = frozenset() if seed == 1 else frozenset({"split"})
            run = Run(schedule, size, 2, 2 * size + 1, policy, features, kind, channels, seed % 3 == 2, seed % 4 == 3)
            replace(run, pollable=pollable, seed=seed).possible().check()


ALWAYS = {"split", "named", "slices", "offload", "pairs", "pairs on two streams", "debug"}
"""With every schedule; what else there is, with each third in turn."""
TOGETHER = ["offload, checkpoint", "offload, reentrant checkpoint", "offload, slices, split", "slices, pairs",
            "slices, debug", "slices, checkpoint", "named, pairs", "named, debug", "named, split", "pairs, split",
            "pairs on two streams, split", "pairs backward first, debug, sends waited late"]  # fmt: skip


WITH_FEATURES = [
    (name, one)
    for i, name in enumerate(TOY_SCHEDULES)
    for j, one in enumerate([*FEATURES, *TOGETHER])
    if EXHAUSTIVE or one in ALWAYS or (i + j) % 3 == 0 or ("slices" in one and TOY_SCHEDULES[name].sliced)
]


def runs_with(schedule: str, wanted: str) -> tuple[list[Run], str]:
    """Runs of a schedule with features, and why there are none. Policies take turns by threes, networks by fours, over
    the schedules that run with a feature: so these meet all of both. Where the features do not go with the one whose
    turn it is, the next one takes its place.
    """
    i, j, features = list(TOY_SCHEDULES).index(schedule), [*FEATURES, *TOGETHER].index(wanted), set(wanted.split(", "))
    place = i if wanted in ALWAYS or "slices" in features else i // 3  # among the schedules that run with it
    policies, networks = _from(place + j, POLICIES), _from(place + j // 3, NETWORKS)
    found, why = list[Run](), dict[str, str]()
    for turn, (policy, network) in enumerate(product(policies, networks)):
        size, count, cache = 2 + (i + j + turn) % 2, 8 - j % 2, CACHES[(i // 2 + j + turn) % 3]
        run = Run(schedule, size, 2, count, policy, frozenset(features), network, cache=cache, seed=i + j)
        why |= run.left_out()
        if features <= (run := run.possible()).features:
            found.append(run)
    streams = [run for run in found if wanted == "split" and run.network is StreamNetwork]
    some = found if EXHAUSTIVE else list(dict.fromkeys([*found[:1], *streams[:1]]))
    return some, "; ".join(f"{feature}: {reason}" for feature, reason in why.items() if not found)


def _from(turn: int, values: Sequence[Any]) -> list[Any]:
    return [values[(turn + k) % len(values)] for k in range(len(values))]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "wanted"), WITH_FEATURES)
def test_every_schedule_with_every_feature(schedule: str, wanted: str) -> None:
    """Each, and some that meet, under a policy and on a network that take turns."""
    some, why = runs_with(schedule, wanted)
    if not some:
        pytest.skip(why)
    for run in some:
        run.check()


# What the test above runs: features -> under each of POLICIES, on each of NETWORKS.
RAN: dict[str, tuple[list[int], list[int]]] = {
    "split": ([6, 9, 6], [4, 3, 3, 11]),
    "named": ([7, 7, 7], [6, 5, 5, 5]),
    "slices": ([1, 2, 1], [1, 1, 1, 1]),
    "offload": ([7, 7, 7], [5, 6, 5, 5]),
    "pairs": ([6, 7, 7], [4, 6, 5, 5]),
    "pairs on two streams": ([7, 6, 7], [4, 6, 5, 5]),
    "pairs backward first": ([3, 2, 2], [2, 1, 2, 2]),
    "checkpoint": ([2, 3, 2], [4, 1, 2, 0]),
    "reentrant checkpoint": ([3, 2, 3], [2, 2, 2, 2]),
    "views": ([3, 2, 1], [1, 2, 2, 1]),
    "the input itself": ([2, 3, 2], [2, 2, 1, 2]),
    "view of the input": ([3, 2, 3], [2, 2, 2, 2]),
    "frozen stages": ([3, 3, 2], [1, 3, 2, 2]),
    "output read by a hook": ([2, 3, 2], [2, 2, 2, 1]),
    "auxiliary loss": ([3, 2, 3], [2, 2, 2, 2]),
    "output saved": ([3, 3, 2], [2, 2, 2, 2]),
    "debug": ([7, 8, 8], [5, 6, 6, 6]),
    "outputs kept": ([3, 2, 3], [2, 2, 2, 2]),
    "sends waited at once": ([3, 3, 2], [2, 2, 2, 2]),
    "sends waited late": ([2, 3, 2], [2, 1, 2, 2]),
    "batches synchronised": ([0, 5, 3], [2, 2, 2, 2]),
    "offload, checkpoint": ([3, 2, 2], [4, 2, 1, 0]),
    "offload, reentrant checkpoint": ([2, 3, 2], [2, 2, 1, 2]),
    "offload, slices, split": ([1, 1, 0], [0, 0, 1, 1]),
    "slices, pairs": ([1, 1, 2], [1, 1, 1, 1]),
    "slices, debug": ([2, 1, 1], [1, 1, 1, 1]),
    "slices, checkpoint": ([1, 2, 1], [2, 1, 1, 0]),
    "named, pairs": ([3, 2, 2], [1, 2, 2, 2]),
    "named, debug": ([2, 3, 2], [1, 2, 2, 2]),
    "named, split": ([1, 1, 2], [1, 1, 1, 1]),
    "pairs, split": ([1, 1, 0], [0, 1, 1, 0]),
    "pairs on two streams, split": ([1, 1, 1], [2, 0, 1, 0]),
    "pairs backward first, debug, sends waited late": ([2, 2, 3], [2, 1, 2, 2]),
}


def test_the_table_counts_runs_with_each_feature() -> None:
    """The table of it. A cell is 0 where the features never go with the policy or the network."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    for wanted in [*FEATURES, *TOGETHER]:
        some = [run for name, one in WITH_FEATURES if one == wanted for run in runs_with(name, one)[0]]
        policies = [sum(run.policy == policy for run in some) for policy in POLICIES]
        found[wanted] = policies, [sum(run.network is kind for run in some) for kind in NETWORKS]
    if EXHAUSTIVE:
        assert all(all(found[name][0]) for name in found if name != "batches synchronised")
    else:
        assert found == RAN, "\n".join(f"    {name!r}: {row}," for name, row in found.items())


@pytest.mark.parametrize("schedule", NAMED)
def test_every_schedule_on_many_and_on_few_microbatches(schedule: str) -> None:
    """With backwards split; on eight ranks the ragged number alone."""
    for size, count in ((2, 1), (2, 7), (3, 2), (3, 6), (8, 19)):
        Run(schedule, size, 2, count, features=frozenset({"split"}), network=MemoryNetwork).possible().check()


@pytest.mark.parametrize(("size", "num_chunks"), [*product((1, 2, 3, 4), repeat=2)])
def test_the_default_schedules_at_all_sizes(size: int, num_chunks: int) -> None:
    """Numbers of microbatches with each policy; outputs, group size, direction, shapes and channels take turns."""
    schedule = CHUNKED if num_chunks > 1 else "1f1b"
    counts = sorted({1, max(1, size - 1), size, 2 * size, 2 * size + 1, 3 * size + 2})
    outputs = ["", *UNUSUAL_OUTPUTS]
    for turn, (count, policy) in enumerate(product(counts, POLICIES)):
        forward_only, variable = (turn + turn // 6) % 2 == 1, (turn // 2 + num_chunks) % 2 == 1
        groups = (size, size + 1, 2 * size) if num_chunks > 1 else (None,)
        features = {outputs[(turn + size) % len(outputs)], "outputs kept" if (turn + num_chunks) % 3 == 0 else ""} - {
            ""
        }
        run = Run(schedule, size, num_chunks, count, policy, frozenset(features), forward_only=forward_only)
        group, channels = groups[(turn // 3 + turn) % len(groups)], CHANNELS[(turn // 3) % 2]
        network = [MemoryNetwork, *HOSTILE_NETWORKS][turn % 4]
        replace(run, network=network, variable=variable, group=group, channels=channels).possible().check()


def large_cases() -> list[tuple[str, str, type[MemoryNetwork]]]:
    """All of them, or a part: 1F1B of chunks under every policy and on every network, each second other one once, in
    turn.
    """
    if EXHAUSTIVE:
        return list(
            product((name for name in TOY_SCHEDULES if not name.startswith("auto")), POLICIES, HOSTILE_NETWORKS)
        )
    pairs = list(product(POLICIES, HOSTILE_NETWORKS))
    others = [name for name in NAMED if name != CHUNKED][1::2]
    chunked = [(CHUNKED, policy, kind) for policy, kind in zip(POLICIES, HOSTILE_NETWORKS, strict=True)]
    return chunked + [(schedule, *pairs[turn % len(pairs)]) for turn, schedule in enumerate(others)]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "policy", "kind"), large_cases())
def test_sixteen_ranks_and_up_to_eight_chunks(schedule: str, policy: str, kind: type[MemoryNetwork]) -> None:
    """P=16, V=8 is the shape of the run in Megatron-LM#4047. DualPipeV has an order of its own from 2 P on."""
    num_chunks = TOY_SCHEDULES[schedule].chunks or (8 if EXHAUSTIVE or schedule == CHUNKED else 3)
    count = 16 if num_chunks > 2 else 32 if EXHAUSTIVE or schedule == "dualpipe_v" else 20
    Run(schedule, 16, num_chunks, count, policy, frozenset({"split"}), kind, seed=405).possible().check()


# -- drawn -------------------------------------------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A pipeline of any shape, a schedule, a policy, features that go together, and a network with a seed."""
    schedule, size = draw(st.sampled_from(list(TOY_SCHEDULES))), draw(st.integers(1, 6))
    return Run(
        *(schedule, size, draw(st.integers(1, 4)), draw(st.integers(1, 13))),
        policy=draw(st.sampled_from(POLICIES)),
        features=frozenset(draw(st.sets(st.sampled_from(list(FEATURES)), max_size=4))),
        network=draw(st.sampled_from(NETWORKS)),
        channels=draw(st.sampled_from(CHANNELS)),
        variable=draw(st.booleans()),
        forward_only=draw(st.booleans()),
        pollable=draw(st.booleans()),
        group=size + draw(st.integers(0, size)),
        cache=draw(st.sampled_from(CACHES)),
        seed=draw(st.integers(0, 2**32 - 1)),
    ).possible()


@pytest.mark.slow
@settings(max_examples=1000 if EXHAUSTIVE else 40)
@given(runs())
def test_drawn_runs_have_the_numbers_of_one_process(run: Run) -> None:
    run.check()


def test_the_comparison_sees_one_wrong_bit() -> None:
    """The standard itself: a single unit in the last place of one gradient, a lost loss and a missing gradient are
    differences.
    """
    result, other = reference_run(2, ToyData(2)), reference_run(2, ToyData(2))
    assert result.difference(other) == 0.0
    other.grads["0.scale"][0] = other.grads["0.scale"][0].nextafter(other.grads["0.scale"].new_tensor(9e9))
    assert result.difference(other) > 0.0
    assert result.difference(ToyResult(result.losses[:1], result.grads)) == float("inf")
    assert result.difference(ToyResult(result.losses, {})) == float("inf")
