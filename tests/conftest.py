"""Options of the tests. In `make test` any two of them may run side by side."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes is the machine's affair, not the code's.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=30.0, help="how long tests/soak loads the store (30)")
    parser.addoption("--soak-seed", type=int, default=None, help="of its load and its faults (a new one)")
