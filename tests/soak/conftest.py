"""How long the soak may take before it counts as hung."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "soak":
            item.add_marker(pytest.mark.timeout(2 * config.getoption("--soak-seconds") + 600))
