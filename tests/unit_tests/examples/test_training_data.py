"""Text as samples: what is read, how it is split, and that batches cover it exactly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from examples.gpt.data import SampleOrder, read_text, split_text
from examples.gpt.errors import DataError


def counting_tokens(length: int) -> torch.Tensor:
    return (torch.arange(length) % 251).to(torch.uint8)


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
    text = read_text([], 300_000)
    assert len(text) == 300_000
    assert b"def " in text
    assert text == read_text([], 300_000)


@pytest.mark.parametrize("kind", ["missing", "empty file", "empty folder"])
def test_paths_without_text_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "given"
    if kind == "empty file":
        path.touch()
    elif kind == "empty folder":
        path.mkdir()
    with pytest.raises(DataError, match=str(path)):
        read_text([str(path)], 100)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("is_folder", [True, False])
def test_unreadable_paths_are_refused(tmp_path: Path, is_folder: bool) -> None:
    path = tmp_path / "given"
    path.mkdir() if is_folder else path.write_text("text")
    path.chmod(0)
    with pytest.raises(DataError, match=r"give others to --data"):
        read_text([str(path)], 100)


@pytest.mark.skipif(not Path("/proc/self/mem").is_file(), reason="needs a file that nobody can read from its start")
def test_a_file_that_fails_while_it_is_read_is_refused() -> None:
    with pytest.raises(DataError, match="cannot read data file /proc/self/mem"):
        read_text(["/proc/self/mem"], 100)


def test_pipes_are_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is no file or readable folder"):
        read_text([str(tmp_path / "pipe")], 100)


def test_the_validation_text_is_the_tail() -> None:
    training, validation = split_text(bytes(range(100)), 0.2)
    assert training.tolist() == list(range(80))
    assert validation.tolist() == list(range(80, 100))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_an_epoch_holds_every_sample_once(replicas: int) -> None:
    """Whatever the number of replicas, a step holds the same samples, and an epoch all of them."""
    shape = {"micro_batch_size": 2, "num_microbatches": 6 // replicas, "data_parallel_size": replicas, "seq_length": 4}
    order = SampleOrder(counting_tokens(4 * 24 + 1), **shape, seed=3, name="training")
    assert order.num_samples == 24
    steps = []
    for step in range(4):
        all_ranks = [order.step_iterator(step, rank, torch.device("cpu")) for rank in range(replicas)]
        found = [microbatch for rank in all_ranks for microbatch in rank]
        count = 6
        assert sorted(number for number, *_ in found) == list(range(step * count, (step + 1) * count))
        drawn = [tokens[:, 0] // 4 for _, tokens, _ in found]
        steps.append(sorted(torch.cat(drawn).tolist()))
    assert sorted(steps[0] + steps[1]) == list(range(24))
    assert sorted(steps[2] + steps[3]) == list(range(24))
    assert steps[:2] != steps[2:], "the second epoch has an order of its own"


def test_labels_are_the_tokens_that_follow() -> None:
    shape = {"micro_batch_size": 3, "num_microbatches": 2, "data_parallel_size": 1, "seq_length": 5}
    tokens, labels = SampleOrder(counting_tokens(200), **shape, seed=0, name="training").microbatch(5)
    assert tokens.shape == labels.shape == (3, 5)
    assert tokens.dtype == labels.dtype == torch.int64
    assert torch.equal(labels, tokens + 1)


def test_the_order_follows_from_the_seed_and_leaves_the_global_generator_alone() -> None:
    shape = {"micro_batch_size": 4, "num_microbatches": 2, "data_parallel_size": 1, "seq_length": 4}
    text = counting_tokens(241)
    before = torch.get_rng_state()
    one, again, other = (SampleOrder(text, **shape, seed=seed, name="training").microbatch(0)[0] for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


def test_short_texts_are_refused_with_the_length_they_need() -> None:
    shape = {"micro_batch_size": 2, "num_microbatches": 3, "data_parallel_size": 2, "seq_length": 10}
    SampleOrder(counting_tokens(121), **shape, seed=0, name="training")
    with pytest.raises(DataError, match=r"validation text of 120 bytes .* at least 121 bytes"):
        SampleOrder(counting_tokens(120), **shape, seed=0, name="validation")
