"""The package as a whole: its errors, the names at its top, and what works without torch."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys

import pytest

import megatron_pp
from megatron_pp import MegatronPPError, errors
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.spec import PlanSpec
from tests.conftest import PROJECT_ROOT

WITHOUT_TORCH = ("megatron_pp.plan", "megatron_pp.tools.draw", "megatron_pp.tools.cli")


def modules_of(package: str) -> list[str]:
    path = importlib.import_module(package).__path__
    return [package, *(m.name for m in pkgutil.walk_packages(path, f"{package}.") if not m.name.endswith("__main__"))]


def exceptions_of(module: str) -> list[type[BaseException]]:
    members = vars(importlib.import_module(module)).values()
    return [m for m in members if inspect.isclass(m) and issubclass(m, BaseException) and m.__module__ == module]


def test_every_error_of_the_package_has_one_base():
    found = [error for module in modules_of("megatron_pp") for error in exceptions_of(module)]
    assert len(found) > 25
    assert [error for error in found if not issubclass(error, MegatronPPError)] == []


def test_every_public_error_is_importable_from_the_top():
    for error in exceptions_of("megatron_pp.errors"):
        assert getattr(megatron_pp, error.__name__) is error
        assert error.__name__ in megatron_pp.__all__


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (errors.PipelineError, RuntimeError),
        (errors.P2PTypeError, TypeError),
        (errors.P2PShapeError, ValueError),
        (errors.ScheduleInputError, ValueError),
        (errors.ConfigError, ValueError),
        (errors.PlanError, ValueError),
        (errors.InstructionError, ValueError),
        (errors.WeightGradError, RuntimeError),
        (errors.WeightGradSplitError, ValueError),
        (errors.FusedWeightGradError, TypeError),
        (errors.ParallelStateError, RuntimeError),
        (errors.NotServedError, NotImplementedError),
        (errors.UnknownMegatronError, RuntimeError),
    ],
)
def test_errors_keep_their_builtin_base(error: type[Exception], base: type[Exception]):
    assert issubclass(error, base)


@pytest.mark.parametrize(
    ("error", "values"),
    [
        (errors.PipelinePeerError("gone", rank=2, instruction="F0.3", message="boom"), {"rank": 2, "message": "boom"}),
        (errors.PipelineStallError("gone", suspects=(1,), progress={0: "F0.1"}), {"progress": {0: "F0.1"}}),
        (errors.WireMismatchError("gone", field="dtype", values={0: "a"}), {"field": "dtype", "values": {0: "a"}}),
        (errors.SendBufferError("gone", chunk=1), {"rank": -1, "chunk": 1}),
        (errors.P2PTimeoutError("gone"), {}),
    ],
)
def test_errors_survive_pickling_with_what_they_hold(error: errors.PipelineError, values: dict[str, object]):
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.args, vars(again)) == (type(error), "gone", ("gone",), vars(error))
    assert {name: getattr(again, name) for name in values} == values


def test_a_users_error_subclass_with_another_signature_keeps_its_text():
    class OwnError(errors.P2PError):
        def __init__(self, rank: int, text: str) -> None:
            super().__init__(f"rank {rank}: {text}")

    assert str(OwnError(3, "gone")) == "rank 3: gone"


def test_the_public_names_exist():
    assert set(megatron_pp.__all__) <= set(dir(megatron_pp))
    for name in megatron_pp.__all__:
        assert getattr(megatron_pp, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        megatron_pp.no_such_name  # noqa: B018


@pytest.mark.slow
def test_every_module_at_the_top_is_an_attribute():
    """The same holds in a program that has imported nothing but the package."""
    names = [module.name for module in pkgutil.iter_modules(megatron_pp.__path__) if module.name != "__main__"]
    assert {"parallel_state", "schedules", "p2p_communication", "plan", "testing"} <= set(names)
    program = f"import megatron_pp; print(*(getattr(megatron_pp, name).__name__ for name in {names}))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == [f"megatron_pp.{name}" for name in names]


def test_a_plan_is_built_verified_and_simulated_from_the_top():
    plan = megatron_pp.build_plan(PlanSpec("1f1b", pipeline_size=2, num_chunks=1, num_microbatches=4))
    assert megatron_pp.verify(plan).worst_rank == 0
    assert megatron_pp.simulate(plan, StageCosts.uniform(2)).makespan == 15


@pytest.mark.slow
def test_plans_drawings_and_the_command_line_do_not_load_torch():
    modules = ", ".join(name for package in WITHOUT_TORCH for name in modules_of(package))
    program = f"import sys, megatron_pp, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_every_path_in_codeowners_is_there():
    lines = (PROJECT_ROOT / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    paths = [line.split()[0] for line in lines if line.startswith("/")]
    assert [path for path in paths if not (PROJECT_ROOT / path[1:]).exists()] == []


def test_functions_have_at_most_60_lines():
    too_long = []
    for folder in ("megatron_pp", "examples", "scripts", "benchmarks", "testkit", "tests"):
        for path in sorted((PROJECT_ROOT / folder).rglob("*.py")):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
            lengths = [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in functions]
            too_long += [f"{path}: {name} has {lines} lines" for name, lines in lengths if lines > 60]
    assert too_long == []
