"""Writes a paragraph for each benchmark of docs/performance.md. It says what the benchmark's chart shows, with numbers
from its report."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from benchmarks.megatron_steps import MEGATRONS, SCHEDULES
from benchmarks.overhead import ON_GLOO
from benchmarks.report import Report, Row, shown
from benchmarks.work import PLUG_IN

PEERS = {
    "megatron": "Megatron-core",
    "megatron-main": "Megatron-LM main",
    "torch": "torch",
    "torch per-edge": "torch with a group for each edge",
}


def _peers(report: Report) -> dict[str, str]:
    """Engine -> its name in sentences. The name of a Megatron-core has the measured release."""
    names = dict(PEERS)
    for engine, package in (("megatron", "megatron-core"), ("megatron-main", "Megatron-LM")):
        if package in report.settings:
            names[engine] = f"Megatron-core {str(report.settings[package]).partition(' ')[0]}"
    return names


def reading(report: Report) -> str:
    """The paragraph of a report, "" if its benchmark has none."""
    write = READINGS.get(report.name)
    return "" if write is None else write(report)


def overhead(report: Report) -> str:
    column = "outside us (median)"
    ours = _values(report.rows, column, engine="ours")
    if not ours:  # --only-gloo
        return _plugged_in(report.rows, column).strip()
    sentences = [f"For each virtual microbatch our engine takes {_typical(ours, ' us')} outside the model."]
    for engine, name in _peers(report).items():
        theirs = _values(report.rows, column, engine=engine)
        if theirs:
            share = _typical(_values(report.rows, "ours / it", engine=engine), form="{:.2f}")
            sentences.append(f"{_capital(name)} takes {_typical(theirs, ' us')}; ours is {share} of it.")
    return f"{' '.join(sentences)}{_plugged_in(report.rows, column)}"


def _plugged_in(rows: Sequence[Row], column: str) -> str:
    """Sentences about our engine under `install()`."""
    of = {engine: {row["setting"]: row for row in _rows(rows, engine=engine)} for engine in (PLUG_IN, "megatron")}

    def compared(measured: str) -> str:
        """The median of our values, and the median of their ratios to Megatron-core's, as text with ranges."""
        both = [
            (mine[measured], theirs[measured])
            for setting, mine in of[PLUG_IN].items()
            if (theirs := of["megatron"].get(setting)) and None not in (mine.get(measured), theirs.get(measured))
        ]
        ratio = [mine / theirs for mine, theirs in both]
        ours = [mine for mine, _ in both]
        return f"{_typical(ours, ' us')}, {_typical(ratio, form='{:.2f}')} of" if both else ""

    stubbed, main_thread, wall = compared(column), compared(ON_GLOO[0]), compared(ON_GLOO[1])
    text = ""
    if stubbed:
        text = f" Under `install()` it takes {stubbed} what Megatron-core's schedules take."
    if main_thread:
        text += f" Over gloo the busiest main thread takes {main_thread} theirs, and a step takes {wall} theirs."
    return text


def exposed(report: Report) -> str:
    fast = [row for row in report.rows if row["transfer / F"] <= 1.0]
    over = _over_bound(fast, _peers(report), "our steps")
    return f"If a transfer takes no longer than a forward, {over} {_faster(report.rows)}"


def sharded(report: Report) -> str:
    over = _over_bound(report.rows, _peers(report), "our steps of sharded stages")
    return f"{_capital(over)} {_faster(report.rows)}"


def _over_bound(rows: Sequence[Row], named: dict[str, str], steps: str) -> str:
    """A sentence about our engine, and one about the peers."""
    peers = [
        f"{name} takes {_typical(theirs, form='{:.2f}')}"
        for engine, name in named.items()
        if (theirs := _values(rows, "over bound", engine=engine))
    ]
    ours = _typical(_values(rows, "over bound", engine="ours"), form="{:.2f}")
    return f"{steps} take {ours} times their bound. {_capital(_list(peers))}."


def _faster(rows: Sequence[Row]) -> str:
    """A sentence that says at how many points a peer is faster."""
    at = {_point(row): row["ms (median)"] for row in rows if row["engine"] == "ours"}
    gaps = [row["ms (median)"] / at[_point(row)] - 1 for row in rows if row["engine"] != "ours"]
    slower = [gap for gap in gaps if gap < 0]
    if not slower:
        return f"No peer is faster than ours at any of {len(gaps)} points."
    return f"A peer is faster than ours at {len(slower)} of {len(gaps)} points, by {-100 * min(slower):.1f}% at most."


def overlap(report: Report) -> str:
    ours, waits = (_values(report.rows, "of free at once", variant=variant) for variant in ("ours", "wait at once"))
    more = [
        100 * (row["of free at once"] / mine - 1)
        for row, mine in zip(_rows(report.rows, variant="wait at once"), ours, strict=True)
    ]
    return (
        f"Our steps take {_typical(ours, form='{:.2f}')} of the time of steps that free without waiting. Steps that "
        f"wait at once take {_typical(waits, form='{:.2f}')} of it. In the same memory they differ from ours by "
        f"{min(more):+.0f}% to {max(more):+.0f}%. Freeing without waiting is not safe. Here it works on copies, which "
        "have a defined result but cost time and memory of their own."
    )


def memory(report: Report) -> str:
    worst = {
        (row["setting"], row["engine"]): max(row.get(f"rank {rank}") or 0 for rank in range(4)) for row in report.rows
    }
    settings = list(dict.fromkeys(row["setting"] for row in report.rows))
    off = [abs(worst[setting, "ours"] - worst[setting, "predicted"]) for setting in settings]
    peers = []
    for engine, name in _peers(report).items():
        ratios = [worst[setting, engine] / worst[setting, "ours"] for setting in settings if (setting, engine) in worst]
        if ratios:
            peers.append(f"that of {name} holds {_typical(ratios)}")
    most = f"{max(off):.2g}"
    near = "" if max(off) == 0 else f"within {most} activation{'' if most == '1' else 's'} of "
    return f"Our fullest rank holds {near}what `verify` predicts. {_capital(_list(peers))} times as much."


def bubble(report: Report) -> str:
    made = [row for row in report.rows if isinstance(row.get("measured"), float)]
    above = [100 * row["measured - simulated"] for row in made]
    return (
        f"Measured bubbles are {_typical(above, form='{:.1f}')} percentage points above the simulator's. Steps take "
        f"{_typical(_values(made, 'step over simulated'), form='{:.2f}')} times the simulated time, over {len(made)} "
        f"schedules."
    )


def megatron_steps(report: Report) -> str:
    same = [row for row in report.rows if row["schedule"] in MEGATRONS]
    ratios, fastest = (_values(same, column) for column in ("ours / megatron", "of the fastest"))
    slower = sorted((row for row in same if row["ours / megatron"] > 1.03), key=lambda r: -r["ours / megatron"])
    added = ", ".join(
        f"{name} {_range(shares, '{:.2f}')}"
        for name in SCHEDULES
        if name not in MEGATRONS and (shares := _values(report.rows, "ours / megatron", schedule=name))
    )
    added = f" Schedules that Megatron does not have, beside its own with as many chunks: {added}." if added else ""
    most = "".join(" (most: {schedule}, P={P}, {policy}, {shapes} shapes)".format(**row) for row in slower[:1])
    above = f"{len(slower) or 'No'} setting{'s are' if len(slower) > 1 else ' is'} above the target of 1.03{most}."
    return (
        f"Under `install()` a step takes {_typical(ratios, form='{:.2f}')} of the time of Megatron-core's own, over "
        f"{len(ratios)} settings. Of the fastest steps it is {_typical(fastest, form='{:.2f}')}. {above} Steps take "
        f"{_typical(_values(same, 'ours / simulated'), form='{:.2f}')} times the simulator's time.{added}"
    )


def prediction(report: Report) -> str:
    off = [100 * abs(row["off by"]) for row in report.rows]
    return (
        f"The prediction is off by {statistics.median(off):.1f}% in the median, and by {max(off):.1f}% at the worst of "
        f"{len(off)} points. {sum(value <= 5 for value in off)} of them are within the target of 5%."
    )


def tracing(report: Report) -> str:
    return (
        f"Recording adds {_typical(_values(report.rows, 'added us'), ' us')} to each virtual microbatch. This is "
        f"{_typical([100 * share for share in _values(report.rows, 'share')], '%', '{:.2f}')} of "
        f"{report.settings.get('compute ms', 10.0):g} ms of compute."
    )


def training(report: Report) -> str:
    rows = [row for row in report.rows if row["model"].startswith("GPTModel")]
    ours, theirs = (_values(rows, "step ms (median)", engine=engine) for engine in ("ours", "megatron"))
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return (
        f"With Megatron-core's own GPTModel our steps take {_typical(ratios, form='{:.2f}')} of the time of "
        f"Megatron-core's schedules, over {len(ratios)} cases. The cores compute all the time, so there is little to "
        f"hide. What differs is overhead, and the noise of a few steps on a shared machine."
    )


def growth(report: Report) -> str:
    last = report.rows[-1]
    look_up = _range(_values(report.rows, "cached us"), "{:.2f}")
    return (
        f"The largest plan, {last['P x V x M']}, has {last['instructions']:,} instructions. A rank can use it after "
        f"{shown(last['first use s'])} s, once per training run. Making all of it takes {shown(last['build s'])} s, "
        f"verifying it {shown(last['verify s'])} s. Looking it up takes {look_up} us at any size. The time outside the "
        "model for each virtual microbatch falls with the number of microbatches, to "
        f"{last['outside us / virtual microbatch']:.1f} us."
    )


def packing(report: Report) -> str:
    columns = ("simulated planned / fixed", "planned / fixed")
    simulated, measured = (_typical(_values(report.rows, column), form="{:.2f}") for column in columns)
    waited = max(_values(report.rows, "waited ms"))
    return (
        f"A planned step takes {measured} of the time in the fixed order. The simulator says {simulated}. Ranks wait "
        f"for the search for {waited:.3g} ms a step at most."
    )


def _rows(rows: Iterable[Row], **wanted: str) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def _values(rows: Iterable[Row], column: str, **wanted: str) -> list[float]:
    return [row[column] for row in _rows(rows, **wanted) if row.get(column) is not None]


def _point(row: Row) -> tuple[object, ...]:
    return row["P"], row["schedule"], row.get("V"), row.get("gather / F", row.get("transfer / F"))


def _range(values: Sequence[float], form: str = "") -> str:
    """ "2 to 7", or the value if all look the same. Numbers have three digits, and from 1,000 on all digits."""
    low, high = ((form or ("{:,.0f}" if end >= 1000 else "{:.3g}")).format(end) for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _typical(values: Sequence[float], unit: str = "", form: str = "") -> str:
    """ "3 (2 to 7)": the median and the range, or the value if all look the same."""
    median, whole = _range([statistics.median(values)], form), _range(values, form)
    return f"{median}{unit}" if whole == median else f"{median}{unit} ({whole})"


def _capital(sentence: str) -> str:
    """``sentence`` with a capital letter. A name that is written small stays small."""
    return sentence if sentence.startswith("torch") else f"{sentence[0].upper()}{sentence[1:]}"


def _list(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


READINGS: dict[str, Callable[[Report], str]] = {
    write.__name__: write
    for write in (
        overhead, exposed, sharded, overlap, memory, bubble, megatron_steps, prediction, tracing, training, packing,
        growth,
    )
}  # fmt: skip
