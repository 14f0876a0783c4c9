"""Numbers as people read them: bytes in powers of 1024, durations, counts."""

import math
from collections.abc import Sequence

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_BLOCKS = "▁▂▃▄▅▆▇█"


def nbytes(number: float) -> str:
    """1253376 -> "1.2 MiB"."""
    scaled = float(number)
    for unit in _BINARY:
        if abs(scaled) < 1024 or unit == _BINARY[-1]:
            break
        scaled /= 1024
    return f"{scaled:.1f} {unit}" if unit != "B" and abs(scaled) < 9.95 else f"{scaled:.0f} {unit}"


def short_nbytes(number: float) -> str:
    """1253376 -> "1.2M"."""
    amount, unit = nbytes(number).split()
    return amount + unit[0]


def seconds(number: float | None) -> str:
    """0.0254 -> "25 ms", 100.0 -> "1 min 40 s"; "?" for what is not known."""
    if number is None or not math.isfinite(number):
        return "?"
    if 0 < number < 0.1:
        return f"{1000 * number:.0f} ms"
    if 0 < number < 10:
        return f"{number:.2f} s"
    if number < 60:
        return f"{number:.0f} s"
    minutes, rest = divmod(round(number), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def short_seconds(number: float | None) -> str:
    """Coarse: 40.3 -> "40s", 250 -> "4m", 4000 -> "1h07m"; "?" for what is not known."""
    if number is None or not math.isfinite(number):
        return "?"
    if number < 99.5:
        return f"{number:.0f}s"
    minutes = round(number / 60)
    return f"{minutes}m" if minutes < 100 else f"{minutes // 60}h{minutes % 60:02d}m"


def count(number: float) -> str:
    """4812.3 -> "4812", 48123 -> "48.1k"; "?" for what is not finite."""
    if not math.isfinite(number):
        return "?"
    for limit, unit in ((1e10, "G"), (1e7, "M"), (1e4, "k")):
        if abs(number) >= limit:
            return f"{number / (limit / 10):.1f}{unit}"
    return f"{number:.0f}"


def per_second(amount: float, duration: float | None) -> float:
    """A rate; NaN when the duration is unknown or nothing."""
    return amount / duration if duration else math.nan


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last `width` values as block characters, scaled to their own range; what is not finite is a blank."""
    shown = list(values)[-width:] if width > 0 else []
    known = [value for value in shown if value is not None and math.isfinite(value)]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BLOCKS[round((value - low) * scale)] if value is not None and math.isfinite(value) else " " for value in shown
    )
