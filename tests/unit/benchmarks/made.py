"""Measurements as a run would write them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measurements import Machine, Measurement

MACHINE = Machine("a CPU", 2, 24 << 30, "Linux 6")
LOAD = {"samples": 512, "shortest": 1024, "longest": 8192, "seed": 0}


def measured(
    peer: str,
    operation: str,
    seconds: Sequence[float],
    variant: str = "numpy",
    nbytes: int = 28_000_000,
    load: dict[str, int] = LOAD,
) -> list[Measurement]:
    """One measurement per round."""
    return [
        Measurement(
            run="run",
            settings=load,
            variant=variant,
            peer=peer,
            operation=operation,
            round=number,
            seconds=value,
            bytes=nbytes,
            machine=MACHINE,
            versions={"Python": "3.11"},
        )
        for number, value in enumerate(seconds)
    ]


def memory(peer: str, extra: int, variant: str = "numpy", nbytes: int = 28_000_000) -> Measurement:
    """The memory of a first put."""
    (found,) = measured(peer, "memory", [0.0], variant, nbytes)
    return Measurement(
        **{name: getattr(found, name) for name in found.__struct_fields__} | {"seconds": None, "extra_bytes": extra}
    )
