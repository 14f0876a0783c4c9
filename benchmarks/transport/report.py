"""The tables of a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import markdown, targets
from benchmarks.measurements import Measurement
from benchmarks.statistics import Cell, Seconds, gathered, ratio, seconds_of
from benchmarks.targets import Result
from benchmarks.transport.peers import Peer
from benchmarks.transport.targets import LOAD, memory_ratio, set_fresh
from miles_plugin.report import units

_NOTHING = ""
_USED = (
    "Into used memory: every batch was removed after its turn, and every put landed in memory that its store had used "
    "before."
)
_FRESH = (
    "Into memory never used: no batch was removed before its variant ended, and every put landed in memory that its "
    "store had not used. The pages of ours exist since its segment holder started, and its writer enters them "
    "into its page table in the background; memcpy copies between warm pages, as ever."
)


def text(
    measurements: Sequence[Measurement], peers: Sequence[Peer], found: Sequence[Result], skipped: Sequence[str]
) -> str:
    """Everything, as Markdown: where and with what, a table per variant, the targets."""
    labels = {peer.name: peer.label for peer in peers}
    fresh = measurements[0].fresh
    parts = [markdown.circumstances(measurements), _FRESH if fresh else _USED]
    parts += [_variant(measurements, variant, labels) for variant in gathered(measurements, lambda item: item.variant)]
    if found:
        parts.append(targets.section(found))
    if not fresh and any(map(set_fresh, found)):
        parts.append(
            "The targets against Ray and BundleTransfer were set for memory never used, which --fresh measures."
        )
    if found and any(item.settings | LOAD != item.settings for item in measurements):
        parts.append(
            "{samples} samples of {shortest} to {longest} tokens are what the targets are meant for.".format(**LOAD)
        )
    parts += [f"Not measured: {reason}." for reason in skipped]
    return "\n\n".join(parts)


def _variant(measurements: Sequence[Measurement], variant: str, labels: dict[str, str]) -> str:
    of_variant = [item for item in measurements if item.variant == variant]
    seconds, load = seconds_of(of_variant), of_variant[0].settings
    memory = {item.peer: memory_ratio(item) for item in of_variant if item.operation == "memory"}
    rows = []
    for peer in (name for name in labels if any(item.peer == name for item in of_variant)):
        put, get = (Cell(variant, peer, operation) for operation in ("put", "get"))
        rows.append(
            [
                labels[peer],
                markdown.milliseconds(seconds, put),
                markdown.rate(seconds, put, of_variant[0].bytes),
                _times_ours(seconds, put),
                markdown.milliseconds(seconds, get),
                markdown.rate(seconds, get, of_variant[0].bytes),
                _times_ours(seconds, get),
                f"{memory[peer]:.2f}" if peer in memory else _NOTHING,
            ]
        )
    header = ["", "put, ms", "GB/s", "x ours", "get, ms", "GB/s", "x ours", "memory"]
    title = (
        f"**{variant}**: {load['samples']} samples of {load['shortest']} to {load['longest']} tokens, "
        f"{units.nbytes(of_variant[0].bytes)}"
    )
    return f"{title}\n\n{markdown.table(header, rows)}"


def _times_ours(seconds: Seconds, cell: Cell) -> str:
    found = ratio(seconds, cell, cell._replace(peer="ours"))
    return _NOTHING if found is None or cell.peer == "ours" else markdown.digits(found.median)
