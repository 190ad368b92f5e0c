"""One paragraph on each benchmark of docs/performance.md: what its chart shows, in numbers taken from its report."""

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


def reading(report: Report) -> str:
    """The paragraph, or an empty string where there is none for this benchmark."""
    write = READINGS.get(report.name)
    return "" if write is None else write(report)


def overhead(report: Report) -> str:
    column = "outside us (median)"
    ours = _values(report.rows, column, engine="ours")
    if not ours:  # --only-gloo
        return _plugged_in(report.rows, column).strip()
    text = f"Our engine takes {_range(ours)} us outside the model for each virtual microbatch"
    peers = []
    for engine, name in PEERS.items():
        theirs = _values(report.rows, column, engine=engine)
        if theirs:
            share = _range(_values(report.rows, "ours / it", engine=engine), "{:.2f}")
            peers.append(f"{name} {_range(theirs)} us (ours is {share} of it)")
    return f"{text}; {_list(peers)}.{_plugged_in(report.rows, column)}"


def _plugged_in(rows: Sequence[Row], column: str) -> str:
    """A sentence on ours under `install()`."""
    of = {engine: {row["setting"]: row for row in _rows(rows, engine=engine)} for engine in (PLUG_IN, "megatron")}

    def compared(measured: str) -> str:
        """The range, and that of its ratios to Megatron-core's."""
        both = [
            (mine[measured], theirs[measured])
            for setting, mine in of[PLUG_IN].items()
            if (theirs := of["megatron"].get(setting)) and None not in (mine.get(measured), theirs.get(measured))
        ]
        ratios = [mine / theirs for mine, theirs in both]
        return f"{_range([mine for mine, _ in both])} us, {_range(ratios, '{:.2f}')} of" if both else ""

    stubbed, main_thread, wall = compared(column), compared(ON_GLOO[0]), compared(ON_GLOO[1])
    text = ""
    if stubbed:
        text = f" Under `install()` it is {stubbed} what Megatron-core's schedules take."
    if main_thread:
        text += f" Over gloo it is {main_thread} theirs on the busiest main thread, and a step takes {wall} theirs."
    return text


def exposed(report: Report) -> str:
    over, peers = _over_bound([row for row in report.rows if row["transfer / F"] <= 1.0])
    text = f"As long as a transfer takes no longer than a forward, our steps take {over} times their bound"
    return f"{text}; {peers}. {_faster(report.rows)}"


def sharded(report: Report) -> str:
    over, peers = _over_bound(report.rows)
    return f"Our steps of sharded stages take {over} times their bound; {peers}. {_faster(report.rows)}"


def _over_bound(rows: Sequence[Row]) -> tuple[str, str]:
    """The range of ours, and those of the peers."""
    peers = [
        f"{name} {_range(theirs, '{:.2f}')}"
        for engine, name in PEERS.items()
        if (theirs := _values(rows, "over bound", engine=engine))
    ]
    return _range(_values(rows, "over bound", engine="ours"), "{:.2f}"), _list(peers)


def _faster(rows: Sequence[Row]) -> str:
    """At how many points a peer is faster."""
    at = {_point(row): row["ms (median)"] for row in rows if row["engine"] == "ours"}
    gaps = [row["ms (median)"] / at[_point(row)] - 1 for row in rows if row["engine"] != "ours"]
    slower = [gap for gap in gaps if gap < 0]
    if not slower:
        return f"No peer is faster than ours at any of {len(gaps)} points."
    return f"A peer is faster than ours at {len(slower)} of {len(gaps)} points, by {-100 * min(slower):.1f}% at most."


def overlap(report: Report) -> str:
    ours, waits = (_values(report.rows, "of free at once", variant=variant) for variant in ("ours", "wait at once"))
    saved = [
        f"{100 * (row['of free at once'] / mine - 1):.0f}"
        for row, mine in zip(_rows(report.rows, variant="wait at once"), ours, strict=True)
    ]
    lowest, highest = min(saved, key=float), max(saved, key=float)
    return (
        f"Our steps take {_range(ours, '{:.2f}')} of those that free without waiting, in the memory of those that wait "
        f"at once, which take {_range(waits, '{:.2f}')}: {lowest} to {highest}% longer than ours. Freeing without "
        f"waiting is not safe; its copies, made to have a defined result, cost time and memory of their own."
    )


def memory(report: Report) -> str:
    worst = {
        (row["setting"], row["engine"]): max(row.get(f"rank {rank}") or 0 for rank in range(4)) for row in report.rows
    }
    settings = list(dict.fromkeys(row["setting"] for row in report.rows))
    off = [abs(worst[setting, "ours"] - worst[setting, "predicted"]) for setting in settings]
    peers = []
    for engine, name in PEERS.items():
        ratios = [worst[setting, engine] / worst[setting, "ours"] for setting in settings if (setting, engine) in worst]
        if ratios:
            peers.append(f"that of {name} {_range(ratios)} times as much")
    most = f"{max(off):.2g}"
    near = "" if max(off) == 0 else f"within {most} activation{'' if most == '1' else 's'} of "
    return f"Our worst rank holds {near}what `verify` predicts; {_list(peers)}."


def bubble(report: Report) -> str:
    made = [row for row in report.rows if isinstance(row.get("measured"), float)]
    above = [100 * row["measured - simulated"] for row in made]
    return (
        f"Measured bubbles are {_range(above, '{:.1f}')} percentage points above the simulator's, and steps take "
        f"{_range(_values(made, 'step over simulated'), '{:.2f}')} of the simulated time, over {len(made)} schedules."
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
    added = f" Schedules that Megatron lacks, of its steps with as many chunks: {added}." if added else ""
    named = "".join(", most at {schedule}, P={P}, {policy}, {shapes} shapes".format(**row) for row in slower[:1])
    return (
        f"Under `install()` steps take {_range(ratios, '{:.2f}')} of the time of Megatron-core's own by medians, "
        f"{_range(fastest, '{:.2f}')} by their fastest steps, over {len(ratios)} settings; medians above the "
        f"1.03 that is wanted: {len(slower)}{named}. They take "
        f"{_range(_values(same, 'ours / simulated'), '{:.2f}')} of the simulator's time.{added}"
    )


def prediction(report: Report) -> str:
    off = [100 * abs(row["off by"]) for row in report.rows]
    return (
        f"The prediction is off by {statistics.median(off):.1f}% at the median and {max(off):.1f}% at the worst of "
        f"{len(off)} points; {sum(value <= 5 for value in off)} are within the 5% that are wanted."
    )


def tracing(report: Report) -> str:
    return (
        f"Recording adds {_range(_values(report.rows, 'added us'))} us to each virtual microbatch: "
        f"{_range([100 * share for share in _values(report.rows, 'share')], '{:.2f}')}% of "
        f"{report.settings.get('compute ms', 10.0):g} ms of compute."
    )


def training(report: Report) -> str:
    rows = [row for row in report.rows if row["model"].startswith("GPTModel")]
    ours, theirs = (_values(rows, "step ms (median)", engine=engine) for engine in ("ours", "megatron"))
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return (
        f"With Megatron-core's own GPTModel our steps take {_range(ratios, '{:.2f}')} of the time of Megatron-core's "
        f"schedules, over {len(ratios)} cases. The cores compute all the time, so that there is little to hide behind: "
        "what differs is overhead, and the noise of a few steps on a shared machine."
    )


def growth(report: Report) -> str:
    last = report.rows[-1]
    look_up = _range(_values(report.rows, "cached us"), "{:.2f}")
    return (
        f"The largest plan, {last['P x V x M']} with {last['instructions']:,} instructions, is ready on a "
        f"rank in {shown(last['first use s'])} s at its first use, once per training run; made whole, it is built in "
        f"{shown(last['build s'])} s and verified in {shown(last['verify s'])} s. Looking it up takes {look_up} us at "
        "any size, and the time outside the model per virtual microbatch falls with the number of microbatches, to "
        f"{last['outside us / virtual microbatch']:.1f} us."
    )


def packing(report: Report) -> str:
    columns = ("simulated planned / fixed", "planned / fixed")
    simulated, measured = (_range(_values(report.rows, column), "{:.2f}") for column in columns)
    waited = max(_values(report.rows, "waited ms"))
    return (
        f"A planned step takes {simulated} of the time in the fixed order by the simulator, {measured} as measured; "
        f"ranks wait for the search for {waited:.3g} ms a step at most."
    )


def _rows(rows: Iterable[Row], **wanted: str) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def _values(rows: Iterable[Row], column: str, **wanted: str) -> list[float]:
    return [row[column] for row in _rows(rows, **wanted) if row.get(column) is not None]


def _point(row: Row) -> tuple[object, ...]:
    return row["P"], row["schedule"], row.get("V"), row.get("gather / F", row.get("transfer / F"))


def _range(values: Sequence[float], form: str = "") -> str:
    """ "2 to 7", or the value where all look the same; with three digits, and all of a number from 1,000 on."""
    low, high = ((form or ("{:,.0f}" if end >= 1000 else "{:.3g}")).format(end) for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _list(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


READINGS: dict[str, Callable[[Report], str]] = {
    write.__name__: write
    for write in (
        overhead, exposed, sharded, overlap, memory, bubble, megatron_steps, prediction, tracing, training, packing,
        growth,
    )
}  # fmt: skip
