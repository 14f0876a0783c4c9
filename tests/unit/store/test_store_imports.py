"""The transport must be importable where neither Ray, torch nor Mooncake is."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_store import ConfigError, MissingDependency, client, open_store, wheel


def test_import_needs_no_backend() -> None:
    code = (
        "import sys, mooncake_store\n"
        "heavy = {'ray', 'torch', 'mooncake', 'mooncake.store'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ImportError("libibverbs.so.1: cannot open shared object file"), ["libibverbs1", "apt", "libibverbs", "dnf"]),
        (ModuleNotFoundError("No module named 'mooncake'", name="mooncake"), ["miles-mooncake", "cpu", "cuda13"]),
        (ImportError("libcuda.so.1: cannot open shared object file"), ["libcuda.so.1", "driver", "exactly one"]),
    ],
)
def test_missing_mooncake_is_named(monkeypatch: pytest.MonkeyPatch, error: ImportError, expected: list[str]) -> None:
    def fail(_: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(MissingDependency) as caught:
        client.load_mooncake()
    for word in expected:
        assert word in str(caught.value)


def test_missing_ray_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"miles-mooncake\[train\]"):
        open_store("ray")


def test_known_bad_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda _: object())
    monkeypatch.setattr(wheel, "_owners", lambda: ("mooncake-transfer-engine",))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.3.10.post2")
    with pytest.raises(ConfigError, match=r"0\.3\.10\.post2"):
        client.load_mooncake()


def install_distribution(directory: Path, name: str) -> None:
    """What pip leaves of a wheel that brings the module `mooncake`."""
    record = directory / f"{name.replace('-', '_')}-1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (record / "top_level.txt").write_text("mooncake\n")


def test_two_owners_of_the_module_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mooncake-transfer-engine", "mooncake-of-somebody"):
        install_distribution(tmp_path, name)
    monkeypatch.syspath_prepend(tmp_path)
    wheel._owners.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"mooncake-of-somebody and mooncake-transfer-engine.* uninstall all"):
            client.load_mooncake()
    finally:
        wheel._owners.cache_clear()
