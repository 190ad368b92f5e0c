"""Hybrid models on the CPU: Mamba's scan and norm in torch, their division among ranks, and patterns of layers."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from megatron_pp.tools.flags.flags import Flags
from megatron_pp.tools.parity.cpu.hybrid_layers import GatedNorm, mamba_stand_in, split_convolved_scan
from megatron_pp.tools.parity.layout import HYBRID, Layout
from megatron_pp.tools.parity.records.parameters import Place, indices_of, part_of
from megatron_pp.tools.parity.shrink import shrink

HEADS, SIZE, GROUPS, STATES, WIDTH = 4, 3, 2, 5, 4
INNER = HEADS * SIZE
GROUPS_OF_RANKS = ("TP", "PP", "CP", "DP", "EP", "ETP")


def inputs() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    channels = INNER + 2 * GROUPS * STATES
    shapes = {
        "zxbcdt": (2, 6, INNER + channels + HEADS), "weight": (channels, WIDTH), "bias": (channels,),
        "dt_bias": (HEADS,), "A": (HEADS,), "D": (HEADS,),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def scanned(given: dict[str, torch.Tensor], groups: int) -> torch.Tensor:
    values = (given[name] for name in ("zxbcdt", "weight", "bias", "dt_bias", "A", "D"))
    return split_convolved_scan(*values, chunk_size=4, headdim=SIZE, ngroups=groups)


def by_hand(given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The recurrence, calculated number by number."""
    z, xbc, dt = given["zxbcdt"].split([INNER, len(given["weight"]), HEADS], dim=-1)
    silu, softplus = torch.nn.functional.silu, torch.nn.functional.softplus
    batch, length = z.shape[:2]
    out = torch.zeros(batch, length, INNER, dtype=torch.float64)
    convolved = torch.zeros_like(xbc)
    for t in range(length):
        for k in range(WIDTH):
            if t - k >= 0:
                convolved[:, t] += xbc[:, t - k] * given["weight"][:, WIDTH - 1 - k]
        convolved[:, t] = silu(convolved[:, t] + given["bias"])
    for b in range(batch):
        for h in range(HEADS):
            group = h // (HEADS // GROUPS)
            state = torch.zeros(SIZE, STATES, dtype=torch.float64)
            for t in range(length):
                x = convolved[b, t, h * SIZE : (h + 1) * SIZE]
                first = INNER + group * STATES
                key, query = (convolved[b, t, at : at + STATES] for at in (first, first + GROUPS * STATES))
                step = softplus(dt[b, t, h] + given["dt_bias"][h])
                state = torch.exp(step * given["A"][h]) * state + step * torch.outer(x, key)
                y = state @ query + given["D"][h] * x
                out[b, t, h * SIZE : (h + 1) * SIZE] = y * silu(z[b, t, h * SIZE : (h + 1) * SIZE])
    return out


def test_the_scan_is_the_recurrence():
    given = inputs()
    given["A"] = -torch.exp(given["A"])
    assert torch.allclose(scanned(given, GROUPS), by_hand(given), rtol=1e-12, atol=1e-12)


def test_two_ranks_have_the_halves_of_each_part():
    """z, x, B, C and dt are divided as in Megatron, and the ranks together compute the same as one process."""
    given = inputs()
    given["A"] = -torch.exp(given["A"])
    halves = []
    for rank in range(2):
        place = Place({**dict.fromkeys(GROUPS_OF_RANKS, 0), "TP": rank}, {**dict.fromkeys(GROUPS_OF_RANKS, 1), "TP": 2})
        of_state = GROUPS * STATES // 2
        sizes = {"conv": [INNER // 2, of_state, of_state]}
        sizes["in"] = [INNER // 2, *sizes["conv"], HEADS // 2]

        def part(name: str, dim: int, of: list[int], place: Place = place) -> torch.Tensor:
            whole = given[name].movedim(dim, 0)
            local = (sum(of), *whole.shape[1:])
            indices = indices_of(name, local, tuple(whole.shape), False, place, of)
            return torch.from_numpy(part_of(whole.numpy(), indices)).movedim(0, dim)

        own = {"zxbcdt": part("zxbcdt", 2, sizes["in"])}
        own |= {name: part(name, 0, sizes["conv"]) for name in ("weight", "bias")}
        own |= {name: part(name, 0, [HEADS // 2]) for name in ("dt_bias", "A", "D")}
        halves.append(scanned(own, GROUPS // 2))
    assert torch.allclose(torch.cat(halves, dim=-1), scanned(given, GROUPS), rtol=1e-12, atol=1e-12)


def test_sizes_that_do_not_fit_are_not_used():
    place = Place({**dict.fromkeys(GROUPS_OF_RANKS, 0), "TP": 1}, {**dict.fromkeys(GROUPS_OF_RANKS, 1), "TP": 2})
    assert indices_of("weight", (4, 2), (8, 2), False, place, [3])[0].tolist() == [4, 5, 6, 7]
    assert indices_of("weight", (4, 2), (8, 2), False, place, [1, 3])[0].tolist() == [1, 5, 6, 7]


@pytest.mark.parametrize("before", [True, False])
def test_the_norm_is_of_groups_and_has_a_gate(before):
    norm = GatedNorm(6, eps=0.0, group_size=3, norm_before_gate=before, dtype=torch.float64)
    x, z = torch.arange(1.0, 7.0, dtype=torch.float64), torch.full((6,), 0.7, dtype=torch.float64)
    gate = torch.nn.functional.silu(z)
    groups = (x if before else x * gate).view(2, 3)
    right = (groups / groups.square().mean(1, keepdim=True).sqrt()).view(-1) * (gate if before else 1)
    assert torch.allclose(norm(x, z), right)
    assert np.allclose(norm(x).detach(), (x.view(2, 3) / x.view(2, 3).square().mean(1, keepdim=True).sqrt()).view(-1))


def test_the_package_of_the_kernels_is_there_while_megatron_is_imported():
    with mamba_stand_in():
        from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined as scan

        assert scan is split_convolved_scan
    assert "mamba_ssm" not in sys.modules


def layout(pattern: str, *flags: str) -> Layout:
    return Layout(Flags.read([HYBRID, pattern, "--hidden-size", "64", "--num-attention-heads", "8", *flags]), 2)


PP2 = ("--pipeline-model-parallel-size", "2")


@pytest.mark.parametrize(
    ("pattern", "flags", "small"),
    [
        ("M*M*-M|MM-", PP2, "M*-|M-"),
        ("MMM*-MMM*-", PP2, "M*-M*-"),
        ("MM*EMM*E", (), "M*E"),
        ("M-M-|M-M*-/MM/MM", PP2, "M-|M-*/M/M"),
    ],
)
def test_a_pattern_keeps_a_layer_of_each_kind_on_each_stage(pattern, flags, small):
    got = shrink(layout(pattern, *flags))
    assert got.text(HYBRID) == small
    assert shrink(Layout(got, 2)) == got


def test_stages_of_a_pattern_are_chunks_and_can_be_merged():
    whole = layout("M*|M-|-M|*M/MM", *PP2)
    assert (whole.size("VPP"), whole.parts()) == (2, ["PP", "VPP", "uneven masks"])
    assert whole.without("VPP").flags.text(HYBRID) == "M*M-|-M*M/MM"
    assert whole.without("PP").flags.text(HYBRID) == whole.alone().flags.text(HYBRID) == "M*M--M*M/MM"
    assert Layout(Flags.read([HYBRID, "M|M|M|M", "--pipeline-model-parallel-size", "4"]), 4).halved("PP") is None
