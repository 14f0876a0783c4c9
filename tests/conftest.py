"""Options of the tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=30.0, help="how long tests/soak loads the store (30)")
    parser.addoption("--soak-seed", type=int, default=None, help="of its load and its faults (a new one)")
