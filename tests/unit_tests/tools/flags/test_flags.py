"""The table of Megatron's flags, and how flags and values become settings."""

from __future__ import annotations

import pytest

from megatron_pp.tools.flags.programs import rows, setting_of
from megatron_pp.tools.flags.read import read_words
from megatron_pp.tools.flags.table import options, settings
from megatron_pp.tools.flags.words import values_of_words


def test_the_table_has_kinds_and_defaults() -> None:
    assert settings()["num_layers"].kind == "int"
    assert settings()["overlap_p2p_comm"].options == {"--no-overlap-p2p-communication": False}
    assert settings()["overlap_p2p_comm"].default is True
    assert settings()["recompute_modules"].kind == "text list"
    assert not settings()["variable_seq_lengths"].options, "a field of a config that no flag sets"
    assert options()["--fp8-format"].name == "fp8"


def test_words_are_read_as_megatrons_parser_reads_them() -> None:
    words = "--num-layers=4 --lr 1e-4 --swiglu --no-overlap-p2p-communication --recompute-modules mlp moe --made-up 3"
    read = read_words(words.split())
    assert read.given == {
        "num_layers": 4,
        "lr": 1e-4,
        "swiglu": True,
        "overlap_p2p_comm": False,
        "recompute_modules": ["mlp", "moe"],
    }
    assert read.unknown == ["--made-up"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--num-layers four", "--num-layers is 'four'; it must be a whole number"),
        ("--num-layers", "--num-layers needs a value, but none was given"),
        ("--swiglu 3", "--swiglu is a switch and takes no value, but '3' was given"),
    ],
)
def test_values_of_the_wrong_kind(words: str, complaint: str) -> None:
    assert read_words(words.split()).wrong == [complaint]


def test_each_row_of_the_programs_names_a_setting() -> None:
    for row in rows():
        name = row.setting.removeprefix("!")
        assert name in ("", "=config") or name in settings(), row


def test_keys_of_other_programs_are_mapped_to_megatrons_settings() -> None:
    assert setting_of("megatron-bridge", "model.num_moe_experts") == "num_experts"
    assert setting_of("megatron-bridge", "logger.log_interval") == ""
    assert setting_of("megatron-bridge", "model.made_up") is None
    assert setting_of("ms-swift", "fp8_format") == "fp8"


def test_values_of_other_programs() -> None:
    found = values_of_words(["train.py", "--a-b", "3", "--c", "true", "--d", "--e", "1e-3", "--f=x", "--g", "1", "2"])
    assert found == {"a_b": 3, "c": True, "d": True, "e": 1e-3, "f": "x", "g": ["1", "2"]}
