"""What seconds are drawn from: how long a sample, a step or an update takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mooncake_store.errors import ConfigError

Seconds = npt.NDArray[np.float64]

FORMS = (
    "SECONDS, exponential:MEAN, lognormal:MEDIAN,SIGMA[,LONGEST], pareto:LOW,ALPHA[,HIGH], uniform:LOW,HIGH, "
    "or file:PATH"
)
_BLOCK = 4096  # draws at a time: one by one numpy takes longer than what is done with the number


class Distribution(Protocol):
    """Of seconds, none of them negative."""

    @property
    def mean(self) -> float:
        """Seconds, finite."""

    def sample(self, rng: np.random.Generator, size: int) -> Seconds:
        """`size` draws, float64 of shape [size]."""


@dataclass(frozen=True)
class Fixed:
    """Always the same."""

    seconds: float

    def __post_init__(self) -> None:
        _check("seconds", self.seconds, self.seconds >= 0, "0 or more")

    @property
    def mean(self) -> float:
        return self.seconds

    def sample(self, _rng: np.random.Generator, size: int) -> Seconds:
        return np.full(size, float(self.seconds))

    def __str__(self) -> str:
        return f"{self.seconds:g}"


@dataclass(frozen=True)
class Exponential:
    mean_seconds: float

    def __post_init__(self) -> None:
        _check("mean", self.mean_seconds, self.mean_seconds > 0, "more than 0")

    @property
    def mean(self) -> float:
        return self.mean_seconds

    def sample(self, rng: np.random.Generator, size: int) -> Seconds:
        return rng.exponential(self.mean_seconds, size)

    def __str__(self) -> str:
        return f"exponential:{self.mean_seconds:g}"


@dataclass(frozen=True)
class Lognormal:
    """sigma: of the logarithm; at 1 the 99th percentile is ten times the median. longest: what would take longer takes
    this, as responses do that are cut off.
    """

    median: float
    sigma: float
    longest: float = math.inf

    def __post_init__(self) -> None:
        _check("median", self.median, self.median > 0, "more than 0")
        _check("sigma", self.sigma, 0 < self.sigma <= 5, "more than 0, to 5")
        if not math.isinf(self.longest):
            _check("longest", self.longest, self.longest > 0, "more than 0")

    @property
    def mean(self) -> float:
        whole = self.median * math.exp(self.sigma * self.sigma / 2)
        if math.isinf(self.longest):
            return whole
        cut = math.log(self.longest / self.median) / self.sigma
        return whole * _normal_below(cut - self.sigma) + self.longest * (1 - _normal_below(cut))

    def sample(self, rng: np.random.Generator, size: int) -> Seconds:
        return np.minimum(self.longest, self.median * np.exp(self.sigma * rng.standard_normal(size)))

    def __str__(self) -> str:
        cut = "" if math.isinf(self.longest) else f",{self.longest:g}"
        return f"lognormal:{self.median:g},{self.sigma:g}{cut}"


@dataclass(frozen=True)
class Pareto:
    """The longest tail: the share that takes longer than t is (low / t) ** alpha, until `high`, which none exceeds."""

    low: float
    alpha: float
    high: float = math.inf

    def __post_init__(self) -> None:
        _check("low", self.low, self.low > 0, "more than 0")
        _check("alpha", self.alpha, self.alpha > 0, "more than 0")
        if math.isinf(self.high):
            _check("alpha", self.alpha, self.alpha > 1, "more than 1, or a third number, the longest there is")
        else:
            _check("high", self.high, self.high > self.low, f"more than the lowest, {self.low:g}")

    @property
    def _share_below_high(self) -> float:
        return 1 - math.pow(self.low / self.high, self.alpha)

    @property
    def mean(self) -> float:
        low, alpha, high = self.low, self.alpha, self.high
        if alpha == 1:
            return low * math.log(high / low) / self._share_below_high
        above = 0.0 if math.isinf(high) else high * math.pow(low / high, alpha)
        return alpha / (alpha - 1) * (low - above) / self._share_below_high

    def sample(self, rng: np.random.Generator, size: int) -> Seconds:
        return np.asarray(self.low * (1 - self._share_below_high * rng.random(size)) ** (-1 / self.alpha))

    def __str__(self) -> str:
        return f"pareto:{self.low:g},{self.alpha:g}" + ("" if math.isinf(self.high) else f",{self.high:g}")


@dataclass(frozen=True)
class Uniform:
    low: float
    high: float

    def __post_init__(self) -> None:
        _check("low", self.low, self.low >= 0, "0 or more")
        _check("high", self.high, self.high >= self.low, f"not less than the lowest, {self.low:g}")

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def sample(self, rng: np.random.Generator, size: int) -> Seconds:
        return rng.uniform(self.low, self.high, size)

    def __str__(self) -> str:
        return f"uniform:{self.low:g},{self.high:g}"


@dataclass(frozen=True)
class Empirical:
    """What was measured, drawn with replacement. source: where it was read."""

    seconds: tuple[float, ...]
    source: str = "measured"

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ConfigError(f"{self.source}: no seconds; allowed: one number or more")
        for number, value in enumerate(self.seconds, 1):
            _check(f"{self.source}: value {number}", value, value >= 0, "0 or more")

    @property
    def mean(self) -> float:
        return math.fsum(self.seconds) / len(self.seconds)

    def sample(self, rng: np.random.Generator, size: int) -> Seconds:
        return np.asarray(self.seconds)[rng.integers(len(self.seconds), size=size)]

    def __str__(self) -> str:
        return f"{len(self.seconds)} values of {self.source}"


def stream(distribution: Distribution, rng: np.random.Generator) -> Iterator[float]:
    """Draws without end, as Python floats."""
    while True:
        yield from distribution.sample(rng, _BLOCK).tolist()


def parse(text: str, named: str, from_report: Callable[[Path], Empirical]) -> Distribution:
    """The distribution that `text` describes, in one of FORMS.

    Args:
        named: the setting, for messages.
        from_report: reads the seconds from what is no list of numbers: a report, or the directory that has it.

    Raises:
        ConfigError: another form, a number out of range, or a file that cannot be read.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "file":
            path = Path(rest)
            return from_report(path) if path.is_dir() or path.suffix == ".json" else _read(path)
        if kind in _KINDS:
            return _KINDS[kind](*map(float, rest.split(",")))
        return Fixed(float(text))
    except (ValueError, TypeError) as error:
        why = str(error) if isinstance(error, ConfigError) else "not understood"
        raise ConfigError(f"{named} {text}: {why}; allowed: {FORMS}") from error


_KINDS: dict[str, Callable[..., Distribution]] = {
    "fixed": Fixed,
    "exponential": Exponential,
    "lognormal": Lognormal,
    "pareto": Pareto,
    "uniform": Uniform,
}


def _read(path: Path) -> Empirical:
    """A number a line; blank lines and those that begin with # are passed over."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error})") from error
    values = []
    for number, line in enumerate(lines, 1):
        if (stripped := line.strip()) and not stripped.startswith("#"):
            try:
                values.append(float(stripped))
            except ValueError as error:
                raise ConfigError(f"{path}, line {number} is {stripped!r:.40}, not a number of seconds") from error
    return Empirical(tuple(values), str(path))


def _normal_below(value: float) -> float:
    """Share of a standard normal distribution below `value`."""
    return (1 + math.erf(value / math.sqrt(2))) / 2


def _check(name: str, value: float, fits: bool, allowed: str) -> None:
    if not fits or not math.isfinite(value):
        raise ConfigError(f"{name} = {value:g}, it must be {allowed}, and finite")
