"""The import-only stand-ins: served to imports, harmless, removable, never in the way of a real package."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_plugin.engines.sglang_cpu import stubs


@pytest.fixture
def installed() -> Iterator[None]:
    before = set(sys.modules)
    remove = stubs.install()
    yield
    remove()
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in (*stubs.STUBBED, "sgl_kernel"):
            del sys.modules[name]


def test_imports_resolve_decorators_pass_through_and_classes_subclass(installed: None) -> None:
    absent_before = [
        name for name in stubs.STUBBED if name in sys.modules and not isinstance(sys.modules[name], stubs.StubModule)
    ]
    if absent_before:
        pytest.skip(f"{absent_before} really installed here")
    triton = importlib.import_module("triton")
    language = importlib.import_module("triton.language")

    @triton.jit
    def plain(x: int) -> int:
        return x + 1

    @triton.autotune(configs=[], key=["n"])
    def tuned(x: int) -> int:
        return x + 2

    assert (plain(1), tuned(1)) == (2, 3)
    assert triton.cdiv(7, 2) == 4
    assert [triton.next_power_of_2(n) for n in (0, 1, 5, 8)] == [1, 1, 8, 8]
    assert language.constexpr(5).value == 5
    assert not triton.runtime.driver, "feature tests must say no"
    assert issubclass(type("Own", (triton.Config,), {}), triton.Config)
    transforms = importlib.import_module("torchvision.transforms")
    assert transforms.InterpolationMode.BICUBIC.value == "bicubic"
    assert transforms.InterpolationMode.NEAREST_EXACT.value == "nearest-exact"


def test_an_unimplemented_kernel_raises_when_called(installed: None) -> None:
    pytest.importorskip("torch")
    kernel = importlib.import_module("sgl_kernel")
    with pytest.raises(NotImplementedError, match="fused_experts_cpu"):
        kernel.fused_experts_cpu()
    with pytest.raises(AttributeError):
        kernel.something_for_cuda  # noqa: B018


def test_cache_slots_land_in_their_rows(installed: None) -> None:
    torch = pytest.importorskip("torch")
    kernel = importlib.import_module("sgl_kernel")
    table = torch.full((4, 6), -1, dtype=torch.int32)
    kernel.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([4, 2]), torch.tensor([10, 11, 12, 20, 21]), 6
    )
    assert table[2].tolist() == [-1, 10, 11, 12, -1, -1]
    assert table[0].tolist() == [20, 21, -1, -1, -1, -1]
    assert (table[[1, 3]] == -1).all()


def test_a_real_package_wins_and_removal_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("real = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    remove, again = stubs.install(), stubs.install()
    assert sum(isinstance(finder, stubs._StubFinder) for finder in sys.meta_path) == 1
    assert importlib.import_module("torchvision").real
    remove()
    again()
    monkeypatch.delitem(sys.modules, "torchvision")
    (tmp_path / "torchvision.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torchvision")
