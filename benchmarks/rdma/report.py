"""What was measured, as Markdown: GB/s beside the link and the raw baseline of the same rounds, latencies, CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks import markdown
from benchmarks.measurements import Measurement
from benchmarks.statistics import Cell, Seconds, gathered, ratio, seconds_of, spread_of

STORE, RAW = "store", "transfer engine"


@dataclass(frozen=True)
class Context:
    """Of one run. rate: of the link, bytes per second, None where a host does not say it."""

    run: str
    protocol: str
    here: str
    there: str
    versions: Mapping[str, str]
    links: str
    rate: float | None
    left_out: tuple[str, ...]


def text(found: Sequence[Measurement], context: Context) -> str:
    """The tables, one per operation."""
    seconds = seconds_of(found)
    versions = ", ".join(f"{name} {value}" for name, value in context.versions.items() if name != "SGLang")
    rate, whose = link_rate(found, context)
    rounds = len({item.round for item in found})
    link = f"{context.links}, a link of {rate / 1e9:.2f} GB/s {whose}"
    lines = [
        f"Run {context.run}, protocol **{context.protocol}**, {link}; here {context.here}; there {context.there}; "
        f"{versions}. Rounds in which all take turns: {rounds}; median, quartiles in brackets.",
    ]
    if context.left_out:
        lines.append(f"Not measured: {'; '.join(context.left_out)}.")
    for operation in gathered(found, lambda item: item.operation):
        lines += ["", f"**{operation}**", "", _table(found, seconds, operation, rate)]
    return "\n".join(lines)


def link_rate(found: Sequence[Measurement], context: Context) -> tuple[float, str]:
    """Bytes per second of the link, and whose word that is: the hosts', or else the fastest that crossed it."""
    if context.rate:
        return context.rate, "by the hosts' word"
    crossed = [item for item in found if item.settings["placement"] == "peer"] or found
    speeds = {
        peer: spread_of(item.bytes / item.seconds for item in crossed if item.peer == peer and item.seconds).median
        for peer in gathered(crossed, lambda item: item.peer)
    }
    fastest = max(speeds, key=lambda peer: speeds[peer])
    return speeds[fastest], f"as measured, by {fastest}"


def _table(found: Sequence[Measurement], seconds: Seconds, operation: str, rate: float) -> str:
    header = ["objects", "by", "GB/s", "x raw", "x link", "p50, ms", "p90, ms", "p99, ms", "CPU s/GB here", "there"]
    rows = []
    for variant in gathered(found, lambda item: item.variant):
        for peer in gathered(found, lambda item: item.peer):
            cell = Cell(variant, peer, operation)
            if cell in seconds:
                rows.append([variant, peer, *_row(found, seconds, cell, rate)])
    return markdown.table(header, rows)


def _row(found: Sequence[Measurement], seconds: Seconds, cell: Cell, rate: float) -> list[str]:
    items = [item for item in found if Cell(item.variant, item.peer, item.operation) == cell]
    speeds = [item.bytes / item.seconds for item in items if item.seconds]
    median, low, high = spread_of(speed / 1e9 for speed in speeds)
    beside = ratio(seconds, cell._replace(peer=RAW), cell) if cell.peer != RAW else None
    latencies = [latency for item in items for latency in item.latencies or ()]
    cpu = [""] * 2
    if cell.peer == STORE:
        gigabytes = sum(item.bytes for item in items) / 1e9
        cpu = [
            f"{sum((item.cpu_seconds or {})[where] for item in items) / gigabytes:.2f}" for where in ("here", "there")
        ]
    return [
        f"{median:.2f} ({low:.2f} to {high:.2f})",
        f"{beside.median:.2f}" if beside else "",
        f"{median * 1e9 / rate:.2f}",
        *(f"{1e3 * value:.2f}" for value in (np.percentile(latencies, [50, 90, 99]).tolist() if latencies else ())),
        *([""] * 3 if not latencies else []),
        *cpu,
    ]
