"""What the tests of the whole job share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")
pytest.importorskip("ray", reason="the extra `train` is not installed")

from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint  # noqa: E402
from tests.e2e.jobs import Marked, no_process_left  # noqa: E402


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(build_model(32, 1, seed=0), build_tokenizer(), directory)
    return directory


@pytest.fixture
def marked() -> Iterator[Marked]:
    """Marks the processes of a test's jobs; none may be left at its end."""
    with no_process_left() as mark:
        yield mark
