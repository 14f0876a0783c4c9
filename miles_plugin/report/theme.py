"""Names and colours that the terminal, the picture and the page share. The colours are Okabe and Ito's, plus grey."""

from collections.abc import Iterable

# Where a step's time goes, in the order in which it does.
PHASE_COLOURS = {
    "generate": "#56B4E9",
    "put": "#E69F00",
    "get": "#D55E00",
    "train": "#009E73",
    "update": "#CC79A7",
    "evaluate": "#F0E442",
    "save": "#8C8C8C",
}
# Where a weight update's time goes, likewise.
UPDATE_COLOURS = {
    "prepare": "#56B4E9",
    "pause": "#F0E442",
    "flush": "#E69F00",
    "transfer": "#CC79A7",
    "verify": "#009E73",
    "activate": "#D55E00",
    "resume": "#8C8C8C",
}
_ARM_COLOURS = {"real": "#0072B2", "shuffled": "#767676"}
_ARM_LABELS = {"real": "real reward", "shuffled": "shuffled control"}
_OTHER = "#B07AA1"


def arm_label(name: str) -> str:
    return _ARM_LABELS.get(name, name)


def arm_colour(name: str) -> str:
    return _ARM_COLOURS.get(name, _OTHER)


def phase_colour(phase: str) -> str:
    return PHASE_COLOURS.get(phase, _OTHER)


def phases_in(found: Iterable[str]) -> list[str]:
    """The phases found, known ones first and in their order."""
    names = set(found)
    return [phase for phase in PHASE_COLOURS if phase in names] + sorted(names - PHASE_COLOURS.keys())
