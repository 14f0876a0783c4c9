"""The tables of weight updates: each mode beside its limit in the same rounds, and where an update's time goes."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import markdown
from benchmarks.measurements import Measurement
from benchmarks.statistics import Cell, Seconds, Spread, gathered, ratio, seconds_of, spread_of
from benchmarks.targets import Result, section
from benchmarks.weights.trainer import MODES, P2P
from benchmarks.weights.turns import LIMITS, PROVEN
from miles_plugin.weight_transfer.transfer import PHASES

TRANSFER, UPDATE, VERIFY = "transfer", "converge", "verify"
OF_RAW = 0.9  # of a raw write's speed, what p2p is meant to reach
_NOTHING = ""


def results(measurements: Sequence[Measurement]) -> list[Result]:
    """p2p's transfer as a part of the faster raw write's speed, of every case in which both were measured."""
    seconds = seconds_of(measurements)
    found = [(variant, of_limit(seconds, variant, P2P)) for variant in _variants(measurements)]
    return [
        Result(variant, P2P, "of the faster raw write", OF_RAW, spread)
        for variant, spread in found
        if spread is not None
    ]


def of_limit(seconds: Seconds, variant: str, mode: str) -> Spread | None:
    """Which part of the speed of its limit, the fastest of them, a mode's transfer reaches."""
    limits = [cell for name in LIMITS[mode] if (cell := Cell(variant, name, TRANSFER)) in seconds]
    if not limits:
        return None
    fastest = min(limits, key=lambda cell: spread_of(seconds[cell].values()).median)
    return ratio(seconds, fastest, Cell(variant, mode, TRANSFER))


def text(measurements: Sequence[Measurement], found: Sequence[Result]) -> str:
    """Everything, as Markdown: where and with what, two tables per case, the target."""
    parts = [_circumstances(measurements)]
    parts += [_case(measurements, variant) for variant in _variants(measurements)]
    if found:
        parts.append(section(found))
    return "\n\n".join(parts)


def _circumstances(measurements: Sequence[Measurement]) -> str:
    item = measurements[0]
    load = (
        f"Stand-in engines; {item.bytes / 1e9:.2f} GB of bfloat16, the weights of a Qwen3; buckets of "
        f"{item.settings['bucket'] / 2**20:.0f} MiB; GB/s are of the model's bytes, once."
    )
    return markdown.circumstances(measurements, load)


def _case(measurements: Sequence[Measurement], variant: str) -> str:
    seconds = seconds_of(item for item in measurements if item.variant == variant)
    nbytes = next(item.bytes for item in measurements if item.variant == variant)
    peers = [peer for peer in gathered(measurements, lambda item: item.peer) if peer not in PROVEN.values()]
    rows = []
    for peer in (peer for peer in peers if Cell(variant, peer, TRANSFER) in seconds):
        spread = of_limit(seconds, variant, peer) if peer in MODES else None
        proven = Cell(variant, PROVEN.get(peer, peer), VERIFY)
        rows.append(
            [
                peer,
                markdown.milliseconds(seconds, Cell(variant, peer, UPDATE)),
                markdown.milliseconds(seconds, Cell(variant, peer, TRANSFER)),
                markdown.rate(seconds, Cell(variant, peer, TRANSFER), nbytes),
                markdown.ranged(spread) if spread is not None else _NOTHING,
                markdown.milliseconds(seconds, proven),
            ]
        )
    header = ["", "update, ms", "its transfer, ms", "GB/s", "of its limit", "proof, ms"]
    return f"**{variant}**\n\n{markdown.table(header, rows)}\n\n{_phases(seconds, variant)}"


def _phases(seconds: Seconds, variant: str) -> str:
    names = [name for mode in MODES for name in (mode, PROVEN[mode]) if Cell(variant, name, UPDATE) in seconds]
    rows = [
        [name, *(f"{1000 * spread_of(seconds[Cell(variant, name, phase)].values()).median:.3g}" for phase in PHASES)]
        for name in names
    ]
    return markdown.table(["phases, ms", *PHASES], rows)


def _variants(measurements: Sequence[Measurement]) -> list[str]:
    return gathered(measurements, lambda item: item.variant)
