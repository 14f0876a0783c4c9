"""Options of the tests, and which of them run side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes is the machine's affair, not the code's.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
TESTS = Path(__file__).parent
# Each of these in one process, one test after the other: they wait for services more than they compute, and share a
# machine's Ray, SGLang or Mooncake's limits. Unit tests go wherever there is room.
ALONE = {
    "e2e": "jobs",
    "integration/plugin": "jobs",
    "gpu": "jobs",
    "integration/store": "store",
    "integration/benchmarks": "store",
    "soak": "store",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=30.0, help="how long tests/soak loads the store (30)")
    parser.addoption("--soak-seed", type=int, default=None, help="of its load and its faults (a new one)")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        place = item.path.relative_to(TESTS).as_posix()
        for folder, group in ALONE.items():
            if place.startswith(folder + "/"):
                item.add_marker(pytest.mark.xdist_group(group))
