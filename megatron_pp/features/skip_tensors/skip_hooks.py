"""The hooks of named tensors in making and verifying plans."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_pp.errors import FileFormatError, PlanError, ScheduleError
from megatron_pp.feature_table import CACHES
from megatron_pp.features.skip_tensors.routes import SkipTensor, routes_in, routes_of, skip_tensors, with_drops
from megatron_pp.features.skip_tensors.skip_lifetime import NamedWalk
from megatron_pp.plan.hooks import PlanHooks
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import Plan, PlanSpec, one_of
from megatron_pp.plan.ir.tasks import Cell
from megatron_pp.plan.lower.lowering import RankLowering

_MOST = 10**9  # no stage of a real plan is as large


class _Hooks(PlanHooks):
    def checked(self, spec: PlanSpec) -> Mapping[str, Any]:
        one_of("cache of skip tensors", spec.skip_cache, CACHES)
        tensors = spec.skip_tensors
        return {"skip_tensors": skip_tensors(tensors, spec.pipeline_size * spec.num_chunks) if tensors else ()}

    def of_config(self, config: Any, placement: Placement, training: bool) -> Mapping[str, Any]:
        given = config.skip_tensors
        cache = config.skip_cache
        if not given:
            return {"skip_cache": cache}
        if not isinstance(given, Iterable):
            raise ScheduleError(
                f"skip_tensors is {given!r}; it must be a text such as 'skip=0>3', or a list of SkipTensor"
            )
        try:
            found = skip_tensors(given, placement.num_stages)
            routes_of(found, cache, placement)
        except (PlanError, TypeError) as error:  # one of another length, or no tuple
            raise ScheduleError(f"skip_tensors: {error}") from error
        return {"skip_tensors": found, "skip_cache": cache}

    def described(self, spec: PlanSpec) -> str:
        count = len(spec.skip_tensors)
        return f" skip_tensors={count} cache={spec.skip_cache}" if count else ""

    def to_file(self, name: str, value: Any) -> Any:
        return [one._asdict() for one in value] if name == "skip_tensors" else value

    def from_file(self, name: str, value: Any) -> Any:
        return tuple(map(_skip_tensor, value)) if name == "skip_tensors" and isinstance(value, list) else value

    def has_names(self, spec: PlanSpec) -> bool:
        return bool(spec.skip_tensors)

    def names(self, spec: PlanSpec, placement: Placement, kind: str, stage: int) -> tuple[str, ...]:
        return routes_of(spec.skip_tensors, spec.skip_cache, placement).over(kind, stage)

    def laid_out(self, rank: RankLowering, program: list[Instruction]) -> list[Instruction]:
        spec = rank.spec
        if not spec.skip_tensors:
            return program
        routes = routes_of(spec.skip_tensors, spec.skip_cache, rank.placement)
        return with_drops(program, routes, rank.placement, spec.forward_only)

    def follower(
        self, plan: Plan, rank: int, facts: Mapping[Cell, int], error: Callable[..., PlanError]
    ) -> NamedWalk | None:
        return None if routes_in(plan) is None else NamedWalk(plan, rank, facts, error)


HOOKS = _Hooks()


def _skip_tensor(value: Any) -> SkipTensor:
    """Raises FileFormatError for what is no object of its fields."""
    kinds = {"name": str, "source": int, "users": list, "gradient": bool, "shape": list | None, "dtype": str | None}
    fits = isinstance(value, dict) and {"name", "source", "users"} <= set(value) <= set(kinds)
    fits = fits and all(isinstance(given, kinds[name]) for name, given in value.items())
    numbers = [value["source"], *value["users"], *(value.get("shape") or ())] if fits else [None]
    if any(type(number) is not int or abs(number) >= _MOST for number in numbers):
        raise FileFormatError(
            f"the spec's skip_tensors hold {str(value)[:60]}; each is an object with name, source and users (stages), "
            "and where they apply gradient, shape and dtype"
        )
    lists = {name: tuple(given) for name, given in value.items() if isinstance(given, list)}
    return SkipTensor(**{**value, **lists})
