"""What the pictures of a run show: its title, its facts, and panels of lines. `plot.py` and `html.py` only draw them,
so that the PNG and the page cannot disagree.
"""

import math
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from miles_plugin.report import async_series, units
from miles_plugin.report.metrics import held_out_name
from miles_plugin.report.panel import Label, Line, Panel, counting, last_of, median, x_of
from miles_plugin.report.record import Arm, Report, Step
from miles_plugin.report.theme import UPDATE_COLOURS, arm_colour, arm_label, phase_colour, phases_in

_LABEL_GAP = 0.11  # of the y range, between the middles of two labels


def title(report: Report) -> str:
    """What came of the run, in one line."""
    name = held_out_name(report.config)
    arm = main_arm(report)
    if arm is None or not arm.steps:
        return f"{name}: no rollout was finished"
    done = f"{_plural(len(arm.steps), 'rollout')} of GRPO"
    if not math.isfinite(arm.final_accuracy() - arm.initial_accuracy):
        return f"{name}: {done}, held-out accuracy not known"
    return f"{name}: held-out accuracy {arm.initial_accuracy:.2f} → {arm.final_accuracy():.2f} in {done}"


def subtitle(report: Report) -> str:
    """Of the run as a whole: what the title's number is, the control, digests, how it ended."""
    control = report.arms.get("shuffled")
    arm, parts = main_arm(report), []
    if arm is not None and sum(step.held_out_accuracy is not None for step in arm.steps) > 1:
        parts.append("after: mean of the last three measurements")
    if control is not None and control is not main_arm(report):
        parts.append(f"control with shuffled rewards {control.initial_accuracy:.2f} → {control.final_accuracy():.2f}")
    if any(arm.steps for arm in report.arms.values()):
        equal = all(arm.digests_equal() for arm in report.arms.values())
        parts.append("every rank got bit for bit what was put" if equal else "DIGESTS DIFFER between put and get")
    if report.status != "finished":
        parts.append(report.status)
    return " · ".join(parts)


def facts(report: Report) -> list[tuple[str, str]]:
    """Name and value of what somebody who looks at the picture asks next."""
    config, machine = report.config, report.machine
    protocol = config.get("mooncake_store_init_kwargs", {}).get("protocol")
    carrier = config["object_store_backend"] + (f" over {protocol}" if protocol else "")
    ranks = config.get("actor_num_nodes", 1) * config["actor_num_gpus_per_node"]
    engines = config["rollout_num_gpus"] // config["rollout_num_gpus_per_engine"]
    gpus = machine.get("gpus") or []
    hardware = f"{len(gpus)} x {gpus[0]}" if gpus else _plural(machine.get("cpus") or 0, "CPU")
    resumes = ", ".join(f"{resume.arm} at rollout {resume.rollout_id + 1}" for resume in report.resumed_at)
    rows = [
        ("run", report.run_id),
        ("status", report.status),
        ("started", report.started_at.replace("T", " ").replace("+00:00", " UTC")),
        ("took", units.seconds(report.seconds_total)),
        ("resumed", resumes),
        ("task", held_out_name(config)),
        ("policy", Path(config.get("hf_checkpoint") or "").name or "tiny Qwen3, warm-started"),
        ("rollouts", f"{config['num_rollout']} x {config['rollout_batch_size']} prompts x "
                     f"{config['n_samples_per_prompt']} samples"),
        ("object store", carrier),
        ("weight update", config["update_weight_transfer_mode"]),
        ("layout", f"{_plural(ranks, 'trainer rank')}, {_plural(engines, 'engine')}"),
        ("groups", async_series.totals(report)),
        ("machine", hardware),
        ("versions", ", ".join(f"{name} {value}" for name, value in _parts(report))),
    ]  # fmt: skip
    return [(name, value) for name, value in rows if value]


def footer(report: Report) -> list[str]:
    """The facts for under a picture: three lines."""
    known = dict(facts(report))
    return [
        f"{known['rollouts']} · object store: {known['object store']} · weight update: {known['weight update']} · "
        f"{known['layout']} · {known['machine']}",
        known.get("versions", ""),
        f"run {known['run']} · started {known['started']}, took {known['took']}"
        + (f" · groups: {known['groups']}" if "groups" in known else ""),
    ]


def main_arm(report: Report) -> Arm | None:
    """The arm that time and bytes are shown of: the first."""
    return next(iter(report.arms.values()), None)


def panels(report: Report) -> list[Panel]:
    """learning, time, bytes, versions, lag, update, and those of `async_series`; without a step they have no lines, or
    lines of one point."""
    always = [_learning(report), _time(report), _bytes(report), _versions(report), _lag(report), _update(report)]
    return always + async_series.panels(report, main_arm(report))


def _learning(report: Report) -> Panel:
    lines, ends = [], []
    for name, arm in _first_on_top(report):
        colour, label = arm_colour(name), arm_label(name)
        rewards = Line(
            f"{label}: reward of samples", x_of(arm), [s.reward for s in arm.steps], colour, 1.5, opacity=0.6
        )
        measured = [s for s in arm.steps if s.held_out_accuracy is not None]
        x = [0.0, *(s.rollout_id + 1.0 for s in measured)]
        y = [arm.initial_accuracy, *(s.held_out_accuracy or 0.0 for s in measured)]
        lines += [rewards, Line(f"{label}: held-out accuracy", x, y, colour, 3.5)]
        rise = arm.final_accuracy() - arm.initial_accuracy
        text = f"{label}\n{arm.initial_accuracy:.2f} → {arm.final_accuracy():.2f} ({rise:+.2f})"
        if measured and math.isfinite(rise):
            ends.append(Label(arm.final_accuracy(), text, colour))
    low, high = _accuracy_range(lines)
    return Panel(
        "learning",
        "Learning",
        "thick: held-out accuracy; thin: mean reward of the samples",
        "accuracy, reward",
        lines,
        y_range=(low, high),
        labels=_apart(ends, low, high),
        resumes=[resume.rollout_id + 1.0 for resume in report.resumed_at],
        last_x=max([line.x[-1] for line in lines if line.x], default=1.0),
    )


def _time(report: Report) -> Panel:
    arm = main_arm(report)
    steps = arm.steps if arm else []
    lines = [
        Line(
            f"{phase} {units.seconds(median([s.seconds[phase] for s in steps if phase in s.seconds]))}",
            x_of(arm),
            [step.seconds.get(phase, 0.0) for step in steps],
            phase_colour(phase),
        )
        for phase in phases_in(phase for step in steps for phase in step.seconds)
    ]
    return Panel(
        "time", "Time per phase", _of(arm, "seconds"), "", lines, stacked=True, legend=True, last_x=last_of(arm)
    )


def _update(report: Report) -> Panel:
    """Of all updates of a step; 0 where there was none."""
    arm = main_arm(report)
    updates = [_update_seconds(step) for step in arm.steps] if arm else []
    lines = [
        Line(
            f"{phase} {units.seconds(median([seconds[phase] for seconds in updates if phase in seconds]))}",
            x_of(arm),
            [seconds.get(phase, 0.0) for seconds in updates],
            colour,
        )
        for phase, colour in UPDATE_COLOURS.items()
        if any(seconds.get(phase) for seconds in updates)
    ]
    return Panel(
        "update",
        "Weight update",
        _of(arm, "seconds by phase"),
        "",
        lines,
        stacked=True,
        legend=True,
        last_x=last_of(arm),
    )


def _update_seconds(step: Step) -> dict[str, float]:
    totals: dict[str, float] = {}
    for update in step.updates:
        for phase, seconds in update.seconds.items():
            totals[phase] = totals.get(phase, 0.0) + seconds
    return totals


def _bytes(report: Report) -> Panel:
    arm = main_arm(report)
    steps = arm.steps if arm else []
    lines = []
    for kind in phases_in(kind for step in steps for kind in step.nbytes):
        values = [float(step.nbytes.get(kind, 0)) or math.nan for step in steps]
        middle = median(values)
        label = f"{kind} {units.nbytes(middle) if math.isfinite(middle) else 'nothing'}"
        lines.append(Line(label, x_of(arm), values, phase_colour(kind), dashed=kind == "get"))
    sizes = [value for line in lines for value in line.y if value > 0]
    panel = Panel("bytes", "Bytes moved", _of(arm, "total"), "", lines, legend=True, last_x=last_of(arm))
    if not sizes:
        return panel
    ticks = _binary_ticks(min(sizes), max(sizes))
    return replace(panel, log_y=True, y_range=(ticks[0][0], ticks[-1][0]), y_ticks=ticks)


def _versions(report: Report) -> Panel:
    lines = []
    for name, arm in _first_on_top(report):
        served: list[float] = list(accumulate(map(_served, arm.steps), _last_known))
        made = [min(_made(step), default=math.nan) for step in arm.steps]
        label = arm_label(name)
        lines.append(Line(f"{label}: served", x_of(arm), served, arm_colour(name), stairs=True))
        oldest = Line(
            f"{label}: oldest of the samples", x_of(arm), made, arm_colour(name), 1.5, dashed=True, stairs=True
        )
        lines.append(oldest)
    subtitle = "solid: served; dashed: of the samples"
    return counting(Panel("versions", "Policy versions", subtitle, "", lines, last_x=last_of(*report.arms.values())))


def _lag(report: Report) -> Panel:
    lines = []
    for name, arm in _first_on_top(report):
        lags = [float(arm.version_lag(index)) for index in range(len(arm.steps))]
        lines.append(Line(arm_label(name), x_of(arm), lags, arm_colour(name), stairs=True))
    largest = max((lag for line in lines for lag in line.y), default=0.0)
    subtitle = f"of the samples; at most {largest:.0f}" if lines else ""
    return counting(Panel("lag", "Version lag", subtitle, "", lines, last_x=last_of(*report.arms.values())))


def _first_on_top(report: Report) -> list[tuple[str, Arm]]:
    """The arms in the order in which to draw them, so that the first covers the others."""
    return list(reversed(report.arms.items()))


def _of(arm: Arm | None, what: str) -> str:
    return f"{arm_label(arm.reward)}, {what}, with medians" if arm and arm.steps else ""


def _served(step: Step) -> float:
    return math.nan if step.served_version is None else float(step.served_version)


def _last_known(before: float, now: float) -> float:
    return before if math.isnan(now) else now


def _made(step: Step) -> list[int]:
    return [int(version) for version in step.sample_versions if version.isdigit()]


def _accuracy_range(lines: list[Line]) -> tuple[float, float]:
    """0 to 1, or further if a reward is not an accuracy."""
    known = [value for line in lines for value in line.y if math.isfinite(value)]
    low, high = min([0.0, *known]), max([1.0, *known])
    margin = 0.0 if (low, high) == (0.0, 1.0) else 0.05 * (high - low)
    return low - margin, high + margin


def _apart(labels: list[Label], low: float, high: float) -> list[Label]:
    """Labels moved for none to touch another: up from the lowest on, then down from the upper end."""
    gap = _LABEL_GAP * (high - low)
    placed = sorted(labels, key=lambda label: label.y)
    floor = low + gap / 2
    for index, label in enumerate(placed):
        placed[index] = replace(label, y=max(label.y, floor))
        floor = placed[index].y + gap
    ceiling = high - gap / 2
    for index, label in reversed(list(enumerate(placed))):
        placed[index] = replace(label, y=min(label.y, ceiling))
        ceiling = placed[index].y - gap
    return placed


def _binary_ticks(smallest: float, largest: float) -> list[tuple[float, str]]:
    """Powers of two from below the smallest to above the largest value, at most seven or so."""
    low, high = math.floor(math.log2(smallest)) - 1, math.ceil(math.log2(largest)) + 1
    stride = max(1, -(-(high - low) // 6))
    return [(2.0**power, units.nbytes(2.0**power)) for power in range(low, high + stride, stride)]


def _parts(report: Report) -> list[tuple[str, str]]:
    python = report.machine.get("python")
    found = list(report.machine.get("versions", {}).items())
    return found + ([("Python", python)] if python else [])


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
