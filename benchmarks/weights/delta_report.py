"""The tables of deltas: each encoding beside the baseline, the whole path, the targets."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import markdown
from benchmarks.measurements import Measurement
from benchmarks.statistics import Cell, Seconds, gathered, seconds_of
from benchmarks.targets import Result, section
from benchmarks.weights.delta_settings import DELTAS, THREADS
from benchmarks.weights.delta_targets import best_baseline, delta_of, most_memory, of_bound, peers_of, times_faster
from benchmarks.weights.delta_turns import APPLY, BASELINE, ENCODE, FLUSH, HASH, LIMIT, MAPPED, MEMCPY
from benchmarks.weights.delta_whole import FIRST_COPY, MATERIALIZE, PUBLISH
from miles_plugin.weight_transfer.disk_delta.codec import ENCODINGS

_TIMED = (ENCODE, APPLY, MAPPED)
_WHOLE = (PUBLISH, MATERIALIZE, FIRST_COPY)
_BASELINE = f"{BASELINE} (best process)"


def text(measurements: Sequence[Measurement], found: Sequence[Result]) -> str:
    """Everything, as Markdown: where and with what, a table per case, the whole path, the targets."""
    parts = [_circumstances(measurements)]
    parts += [_case(measurements, variant) for variant in gathered(measurements, lambda item: item.variant)]
    parts += _whole(measurements)
    if found:
        parts.append(section(found))
    parts.append(f"[The same as a picture]({DELTAS}.png)")  # here: a document has the link once there is a picture
    return "\n\n".join(parts)


def _circumstances(measurements: Sequence[Measurement]) -> str:
    processes = len(peers_of(measurements, BASELINE))
    load = (
        f"{measurements[0].bytes / 1e9:.2f} GB of bfloat16, the weights of a Qwen3, by {THREADS} threads, xxh3-128 of "
        f"every tensor included; GB/s are of the model's bytes. {processes} fresh processes of each: of the baseline "
        "the fastest counts, of the others all turns."
    )
    return markdown.circumstances(measurements, load)


def _case(measurements: Sequence[Measurement], variant: str) -> str:
    header = ["", *(part for what in _TIMED for part in (f"{what}, ms", "GB/s", "x")), "flush, ms"]
    header += ["wire, MB", "of the bound", "memory, MB"]
    rows = [
        _row(measurements, variant, name) for name in (*ENCODINGS, BASELINE) if delta_of(measurements, variant, name)
    ]
    return f"{_title(measurements, variant)}\n\n{markdown.table(header, rows)}\n\n{_limits(measurements, variant)}"


def _row(measurements: Sequence[Measurement], variant: str, name: str) -> list[str]:
    seconds, nbytes = seconds_of(measurements), _nbytes(measurements, variant)
    row = [_BASELINE if name == BASELINE else name]
    for operation in _TIMED:
        cell = _cell(seconds, variant, name, operation)
        times = None if name == BASELINE else times_faster(seconds, variant, name, operation)
        row += [markdown.milliseconds(seconds, cell), markdown.rate(seconds, cell, nbytes)]
        row.append(markdown.digits(times.median) if times is not None else "")
    row.append(markdown.milliseconds(seconds, _cell(seconds, variant, name, FLUSH)))
    delta, memory = delta_of(measurements, variant, name), most_memory(measurements, variant, name)
    row += [f"{delta['wire'] / 1e6:.2f}", f"{of_bound(delta):.3f}"] if delta is not None else ["", ""]
    row.append(f"{memory / 1e6:.1f}" if memory is not None else "")
    return row


def _cell(seconds: Seconds, variant: str, name: str, operation: str) -> Cell:
    best = best_baseline(seconds, variant, operation) if name == BASELINE else None
    return best or Cell(variant, name, operation)


def _title(measurements: Sequence[Measurement], variant: str) -> str:
    delta = next((item.delta for item in measurements if item.variant == variant and item.delta), None)
    if delta is None:
        return f"**{variant}**"
    density = 100 * delta["changed"] / delta["values"]
    return (
        f"**{variant}**: {density:.3g} % of {delta['values'] / 1e6:.0f} million values changed; bound, "
        f"n\\*H2(density) + changed\\*H(difference): {delta['bound'] / 1e6:.3g} MB"
    )


def _limits(measurements: Sequence[Measurement], variant: str) -> str:
    seconds, nbytes = seconds_of(measurements), _nbytes(measurements, variant)
    found = [
        f"{name} {markdown.milliseconds(seconds, cell)} ms, {markdown.rate(seconds, cell, nbytes)} GB/s"
        for name in (MEMCPY, HASH)
        if (cell := Cell(variant, name, LIMIT)) in seconds
    ]
    return f"Limits, all bytes by {THREADS} threads: {'; '.join(found) or 'not measured'}."


def _whole(measurements: Sequence[Measurement]) -> list[str]:
    """The table of the whole path, of the cases in which it was measured."""
    seconds = seconds_of(measurements)
    header = ["", *(part for operation in _WHOLE for part in (f"{operation}, ms", "GB/s"))]
    found = []
    for variant in gathered(measurements, lambda item: item.variant):
        rows = []
        for name in ENCODINGS:
            cells = [Cell(variant, name, operation) for operation in _WHOLE]
            if any(cell in seconds for cell in cells):
                nbytes = _nbytes(measurements, variant)
                row = [(markdown.milliseconds(seconds, cell), markdown.rate(seconds, cell, nbytes)) for cell in cells]
                rows.append([name, *(text for pair in row for text in pair)])
        if rows:
            title = f"**The whole path, {variant}**: one rank publishes, one reader applies the last two deltas at once"
            found.append(f"{title}\n\n{markdown.table(header, rows)}")
    return found


def _nbytes(measurements: Sequence[Measurement], variant: str) -> int:
    return next(item.bytes for item in measurements if item.variant == variant)
