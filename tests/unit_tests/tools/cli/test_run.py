"""``megatron-pp run``: the script runs as with Python itself, with the engine installed and the given settings."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from megatron_pp.integrations import megatron_core
from megatron_pp.integrations.megatron import stand_ins
from megatron_pp.integrations.megatron.settings import TABLE
from megatron_pp.tools.cli import run
from megatron_pp.tools.cli.errors import UsageError
from tests.unit_tests.integrations.test_megatron_versions import published_schedules
from tests.unit_tests.tools.cli.conftest import assert_refused

PROBE = """
import json, pickle, sys, types
from pathlib import Path
class Mine: ...
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__, "package": __package__,
    "spec": __spec__ and __spec__.name, "loader": type(__loader__).__name__, "main": vars(main) is globals(),
    "builtins": isinstance(__builtins__, types.ModuleType), "annotations": f.__annotations__ if (
        f := eval("lambda: 0")) else None, "pickled": type(pickle.loads(pickle.dumps(Mine()))) is Mine,
}))
def annotated(value: Path): ...
assert annotated.__annotations__ == {"value": Path}, "no future statement of ours holds"
"""
AS_MAIN = "import sys\nfrom megatron_pp.tools.cli.run import load_module, load_script\n{}(sys.argv[1], sys.argv[2:])()"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a script and a package, and another folder with a stand-in for Megatron-core. The interpreter's
    state is restored afterwards."""
    for name in ("scripts/probe.py", "package/__init__.py", "package/__main__.py", "package/probe.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name.endswith("__init__.py") else PROBE)
    (tmp_path / "link.py").symlink_to(tmp_path / "scripts" / "probe.py")
    write_megatron(tmp_path / "library" / "megatron" / "core")
    monkeypatch.chdir(tmp_path)
    with (
        mock.patch.dict(sys.modules),
        mock.patch.object(sys, "argv", list(sys.argv)),
        mock.patch.object(sys, "path", list(sys.path)),
        mock.patch.object(sys, "meta_path", list(sys.meta_path)),
    ):
        for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
            del sys.modules[name]
        yield tmp_path


def write_megatron(core: Path) -> None:
    """Writes files with the names and signatures of a Megatron-core release. They import each other as its files do."""
    (core / "pipeline_parallel").mkdir(parents=True)
    (core / "__init__.py").write_text("import megatron.core.pipeline_parallel\n__version__ = '0.16.1'\n")
    (core / "parallel_state.py").write_text("")
    (core / "pipeline_parallel" / "__init__.py").write_text("from .schedules import get_forward_backward_func\n")
    functions = [f for f in vars(published_schedules("0.16.1")).values() if inspect.isfunction(f)]
    signatures = [f"def {function.__name__}{inspect.signature(function)}: ..." for function in functions]
    chooser = "def get_forward_backward_func(pp_size=None, vp_size=None): return forward_backward_no_pipelining"
    (core / "pipeline_parallel" / "schedules.py").write_text(
        "\n".join([*signatures, chooser, "class P2PCommunicator: ..."])
    )


@pytest.mark.parametrize(
    ("of_python", "of_ours"),
    [
        (["scripts/probe.py"], ["load_script", "scripts/probe.py"]),
        (["link.py"], ["load_script", "link.py"]),
        (["-m", "package.probe"], ["load_module", "package.probe"]),
        (["-m", "package"], ["load_module", "package"]),
    ],
)
def test_a_script_sees_the_same_environment_as_under_python(of_python: list[str], of_ours: list[str]) -> None:
    arguments = ["--help", "--", "-m", "a b"]
    ours = [sys.executable, "-c", AS_MAIN.format(of_ours[0]), *of_ours[1:], *arguments]
    outputs = [
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        for command in ([sys.executable, *of_python, *arguments], ours)
    ]
    theirs, seen = map(json.loads, outputs)
    assert seen == theirs
    assert (seen["main"], seen["pickled"], seen["argv"][1:]) == (True, True, arguments)


def script(*lines: str) -> str:
    Path("train.py").write_text("\n".join(["import json, os, pathlib, sys", *lines]))
    return "train.py"


NOTE_ARGUMENTS = "pathlib.Path('arguments').write_text(json.dumps(sys.argv))"
IMPORT_MEGATRON = "sys.path.insert(0, os.path.abspath('library')); import megatron.core"


@pytest.mark.parametrize("flags", [[], ["--overlap-p2p-comm"], ["--p2p-timeout", "3", "--no-batch-p2p-sync"]])
def test_flags_behind_the_script_are_its_own(command: Callable[..., tuple[int, str, str]], flags: list[str]) -> None:
    behind = ["--help", "--p2p-timeout", "5", "--", "--settings", "none.toml"]
    code, _, said = command("run", *flags, script(IMPORT_MEGATRON, NOTE_ARGUMENTS), *behind)
    assert (code, said) == (0, "")
    assert json.loads(Path("arguments").read_text()) == ["train.py", *behind]


def test_the_engine_is_installed_when_the_script_has_imported_megatron(
    command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script imports Megatron-core from a folder that only the script knows. All names that it imports are ours."""
    monkeypatch.setenv("MEGATRON_PP_MAX_PENDING_SENDS", "5")
    Path("settings.toml").write_text("p2p_timeout = 7\nmax_pending_sends = 6\nstrict = true")
    lines = (
        "assert 'megatron' not in sys.modules",
        "sys.path.insert(0, os.path.abspath('library'))",
        "from megatron.core.pipeline_parallel import get_forward_backward_func",
        "from megatron_pp.integrations import megatron_core",
        "assert megatron_core.is_installed()",
        "assert type(get_forward_backward_func(1)).__module__ == 'megatron_pp.integrations.megatron.stand_ins'",
    )
    assert command("run", "--settings", "settings.toml", "--overlap-p2p-comm", script(*lines))[0] == 0
    installed = stand_ins.current()
    assert installed is not None
    assert installed.settings.strict
    policy = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    assert installed.settings.overrides == {"p2p_timeout": 7, "max_pending_sends": 5, **policy}


def test_an_unknown_megatron_is_an_error_of_its_import(command: Callable[..., tuple[int, str, str]]) -> None:
    (Path("library/megatron/core/__init__.py")).write_text("__version__ = '0.13.0'")
    lines = ("sys.path.insert(0, os.path.abspath('library'))", "import megatron.core.pipeline_parallel")
    with pytest.raises(megatron_core.UnknownMegatronError, match=r"0\.13\.0 is not supported"):
        command("run", script(*lines))


def test_a_script_that_never_imports_megatron_is_noted(command: Callable[..., tuple[int, str, str]]) -> None:
    code, _, said = command("run", script())
    assert (code, said) == (0, "megatron-pp run: train.py has not imported Megatron-core's schedules\n")


@pytest.mark.parametrize("ending", ["sys.exit(3)", "sys.exit('too bad')", "sys.exit()"])
def test_the_exit_code_is_the_scripts(command: Callable[..., tuple[int, str, str]], ending: str) -> None:
    expected = eval(ending.removeprefix("sys.exit") if ending != "sys.exit()" else "None")
    assert command("run", script(IMPORT_MEGATRON, ending))[0] == expected


@pytest.mark.parametrize("error", ["ImportError('no apex')", "OSError(28, 'disk full')", "KeyboardInterrupt()"])
def test_errors_of_the_script_are_raised_unchanged(command: Callable[..., tuple[int, str, str]], error: str) -> None:
    """Unlike errors of other commands, they are not turned into a line of error."""
    with pytest.raises(type(eval(error))):
        command("run", script(IMPORT_MEGATRON, f"raise {error}"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--overlap-p2p-com"], "option --overlap-p2p-com is not known (did you mean --overlap-p2p-comm?)"),
        (["--p2p-timeout", "soon"], "--p2p-timeout: p2p_timeout is 'soon'; it must be a number of seconds above 0"),
        (["--settings", "none.toml"], "settings file none.toml: cannot be read"),
        (["--step-number", "3"], "option --step-number is not known"),
        (["--p2p-timeout", "9", "--compute-timeout", "8"], "compute_timeout is 8, below p2p_timeout, 9"),
        (
            ["--p2p-debug=yes"],
            "--p2p-debug is a switch, true or false, and takes no value ('yes'): write --p2p-debug or",
        ),
        (["--settings", "words.toml"], "overlap_p2p_comm is yes; a switch of TOML is true or false"),
    ],
)
def test_a_wrong_setting_is_reported_before_the_script_runs(
    command: Callable[..., tuple[int, str, str]], flags: list[str], words: str
) -> None:
    Path("words.toml").write_text("overlap_p2p_comm = yes\n")
    assert_refused(command("run", *flags, script(NOTE_ARGUMENTS)), 2, "megatron-pp run: ", words)
    assert not Path("arguments").exists()


def test_a_script_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """As one without permission; the script of this test is gone when it is to run."""
    with pytest.raises(UsageError, match=r"gone.py: cannot be read \(No such file or directory\)"):
        run.load_script(str(tmp_path / "gone.py"), [])


def test_help_has_groups_and_choices(command: Callable[..., tuple[int, str, str]]) -> None:
    said = command("run", "--help")[1]
    places = [said.index(title) for title in ("the schedule:", "transfers:", "failures:", "traces and measurements:")]
    assert places == sorted(places)
    assert said.index("--p2p-channels {one_way,shared}") > places[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: SCRIPT; see"),
        (["none.py"], "none.py: there is no such file"),
        (["package"], "package: it is a folder, not a script"),
        *(
            (["-m", name], f"-m {name}: there is no module of this name")
            for name in ("no_such_module", "package.none", "no_such.module", "scripts", "package/probe.py")
        ),
    ],
)
def test_run_reports_a_missing_script(
    command: Callable[..., tuple[int, str, str]], words: list[str], said: str
) -> None:
    assert_refused(command("run", *words), 2, f"megatron-pp run: {said}")


def test_an_error_of_the_package_that_holds_the_module_is_raised(command: Callable[..., tuple[int, str, str]]) -> None:
    Path("package/__init__.py").write_text("import not_there")
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        command("run", "-m", "package.probe")


def test_help_lists_every_setting(command: Callable[..., tuple[int, str, str]]) -> None:
    code, said, _ = command("run", "--help")
    assert code == 0
    for name, setting in TABLE.items():
        assert (f"--{name.replace('_', '-')} " in said.replace(",", " ")) == (not setting.kind.only_keyword), name
    assert "run " in command("--help")[1]


@pytest.mark.parametrize(("package", "extra"), [("megatron.core", "megatron"), ("tqdm", "megatron")])
def test_a_missing_package_is_named_with_its_extra(
    command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    def prepare(argv: list[str]) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(run, "prepare", prepare)
    words = f"No module named {package!r}; install it by `pip install '.[{extra}]'`"
    assert_refused(command("run", script()), 2, "megatron-pp run: ", words)
