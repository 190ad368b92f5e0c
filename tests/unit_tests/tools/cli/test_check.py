"""``megatron-pp check``: refusals before anything is read, and the list of commands."""

from __future__ import annotations

import os

import pytest

from tests.unit_tests.tools.cli.conftest import assert_refused


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--gpus 0 job.py", "argument --gpus: '0' is not a whole number from 1 to 999999999"),
        ("job.py", "the following arguments are required: --gpus"),
        ("--gpus 8", "the following arguments are required: JOB"),
        ("--gpus 8 --gpu h1000 job.yaml", "GPU 'h1000' is not known (did you mean h100?); it is one of v100"),
        ("--gpus 8 --release new job.yaml", "'new' is not a release of Megatron-core; write it as 0.19.2"),
        ("--gpus 8 --patience never job.py", "'never' is not a number of seconds"),
        ("--gpus 8 --junit no/folder/check.xml job.yaml", "no/folder/check.xml: cannot be written"),
        (
            "--gpus 8 nothing.py",
            "nothing.py does not exist; check reads a script with its flags, or a file",
        ),
        ("--gpus 8 nothing.yaml", "nothing.yaml: cannot be read (No such file or directory)"),
        ("--gpus 8 nothing.sh", "nothing.sh: cannot be read (No such file or directory)"),
        ("--gpus 8 .", ". is a folder, not a script"),
        ("--gpus 8 -m no.such.module", "there is no module 'no.such.module'; -m needs the name of a module"),
        ("--gpus 8 no_such_module:recipe", "no_such_module:recipe cannot be called: ModuleNotFoundError"),
    ],
)
def test_an_unreadable_job_file_is_reported_in_one_sentence(command, words, complaint):
    assert_refused(command(f"check {words}"), 2, "megatron-pp check: ", complaint)


def test_a_script_that_is_not_text_is_refused(command, tmp_path):
    for name, content in (("model.py", b"\x80\x02"), ("launch", b"\x7fELF\x02\x01\x01\x00"), ("cut.py", b"x = 1\xff")):
        (tmp_path / name).write_bytes(content)
        complaint = f"{name} cannot be read as a Python script: it is "
        assert_refused(command(f"check --gpus 8 {tmp_path / name} --num-layers 4"), 2, "megatron-pp check: ", complaint)


def test_a_script_in_another_encoding_that_it_names_is_read(command, tmp_path):
    (tmp_path / "train.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'Müller'\n".encode("latin-1"))
    code, said, _ = command(f"check --gpus 8 {tmp_path / 'train.py'} --num-layers 4")
    assert code != 2
    assert "on 8 GPUs" in said


def test_a_recipe_function_is_called(command, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "my_recipes.py").write_text(
        "from dataclasses import dataclass, field\n"
        "@dataclass\nclass Model:\n    num_layers: int = 8\n    odd: int = 3\n"
        "@dataclass\nclass Config:\n    model: Model = field(default_factory=Model)\n"
        "def pretrain():\n    print('noise')\n    return Config()\n"
    )
    code, said, _ = command("check --gpus 8 my_recipes:pretrain model.num_layers=16")
    assert code == 3
    assert said.startswith("my_recipes:pretrain: megatron-bridge on 8 GPUs")
    assert "not known and was not read: model.odd" in said


def test_help_groups_the_commands(command):
    _, said, _ = command("--help")
    places = [
        said.index(f"\n{line}") for line in ("a job:\n  check ", "which pipeline:\n  advise ", "plans and numbers:")
    ]
    assert places == sorted(places)
    for name in ("run", "simulate", "draw", "plan", "verify", "report", "parity"):
        assert f"\n  {name} " in said
    assert "positional" not in said
