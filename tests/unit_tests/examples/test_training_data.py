"""Text as samples: what is read, how it is split, and that batches cover it exactly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.gpt.data import SampleOrder, read_text, split_text
from examples.gpt.errors import DataError


def order_of(length: int, *sizes: int, seed: int = 0, name: str = "training") -> SampleOrder:
    """The order of samples from a text that counts upwards.

    ``sizes``: samples in a microbatch, microbatches, replicas, tokens in a sample.
    """
    return SampleOrder((torch.arange(length) % 251).to(torch.uint8), *sizes, seed=seed, name=name)


def test_files_and_folders_are_read_in_a_fixed_order(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name, text in {"c.txt": "c", "a.txt": "a", "b/z.txt": "z", ".git/x": "hidden"}.items():
        (folder / name).write_text(text)
    (tmp_path / "last").write_text("last")
    assert read_text([str(folder), str(tmp_path / "last")], 100) == b"azclast"
    assert read_text([str(folder), str(tmp_path / "last")], 5) == b"azcla"


def test_the_standard_library_is_the_default_text() -> None:
    text = read_text([], 30_000)
    assert len(text) == 30_000
    assert b"def " in text


MADE: dict[str, Any] = {
    "missing": lambda path: None,
    "an empty file": Path.touch,
    "an empty folder": Path.mkdir,
    "a pipe, which would be waited for": os.mkfifo,
    "a file that nobody can read from its start": lambda path: path.symlink_to("/proc/self/mem"),
}


@pytest.mark.parametrize("kind", MADE)
def test_paths_without_text_are_refused(tmp_path: Path, kind: str) -> None:
    MADE[kind](path := tmp_path / "given")
    with pytest.raises(DataError, match=rf"{path}.*; give others to --data"):
        read_text([str(path)], 100)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_an_epoch_holds_every_sample_once(replicas: int) -> None:
    """Whatever the number of replicas, a step holds the same samples, and an epoch all of them."""
    order = order_of(4 * 24 + 1, 2, 6 // replicas, replicas, 4, seed=3)
    assert order.num_samples == 24
    steps = []
    for step in range(4):
        all_ranks = [order.step_iterator(step, rank, torch.device("cpu")) for rank in range(replicas)]
        found = [microbatch for rank in all_ranks for microbatch in rank]
        assert sorted(number for number, *_ in found) == list(range(step * 6, (step + 1) * 6))
        drawn = [tokens[:, 0] // 4 for _, tokens, _ in found]
        steps.append(sorted(torch.cat(drawn).tolist()))
    assert sorted(steps[0] + steps[1]) == list(range(24))
    assert sorted(steps[2] + steps[3]) == list(range(24))
    assert steps[:2] != steps[2:], "the second epoch has an order of its own"


def test_samples_follow_from_the_seed_alone_and_labels_are_the_next_tokens() -> None:
    before = torch.get_rng_state()
    one, again, other = (order_of(241, 4, 2, 1, 5, seed=seed).microbatch(0) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert one[0].equal(again[0])
    assert not one[0].equal(other[0])
    assert one[0].shape == (4, 5)
    assert torch.equal(one[1], one[0] + 1)


def test_the_validation_text_is_the_tail_and_short_texts_are_refused_with_the_length_they_need() -> None:
    training, validation = split_text(bytes(range(100)), 0.2)
    assert [*training.tolist(), *validation.tolist()] == list(range(100))
    assert len(validation) == 20
    order_of(121, 2, 3, 2, 10)
    with pytest.raises(DataError, match=r"validation text of 120 bytes .* at least 121 bytes"):
        order_of(120, 2, 3, 2, 10, name="validation")
