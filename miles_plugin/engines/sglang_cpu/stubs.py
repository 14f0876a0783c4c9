"""Import-only stand-ins for packages that SGLang imports but a CPU run does not use.

A stand-in answers every attribute: capitalised names are empty classes (they get subclassed), other names are
modules that act as pass-through decorators (`@triton.jit`). No stubbed kernel may run; SGLang's torch-native path
does not call one.
"""

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

STUBBED = ("triton", "torchvision")


class _StubMeta(type):
    def __getattr__(cls, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _StubClass(metaclass=_StubMeta):
    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass


class StubModule(types.ModuleType):
    """A module whose every attribute exists. Falsy and empty, so that feature tests against it say no."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        if full_name in sys.modules:
            return sys.modules[full_name]
        is_class = name[:1].isupper()
        value = type(name, (_StubClass,), {"__module__": self.__name__}) if is_class else StubModule(full_name)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __contains__(self, _item: object) -> bool:
        return False


def _raised(name: str) -> type[Exception]:
    return type(name, (Exception,), {})


class _Constexpr:
    def __init__(self, value: Any = None) -> None:
        self.value = value


# What SGLang and torch read from these modules at import time, beyond names that only have to exist.
_CONTENTS: dict[str, dict[str, Any]] = {
    "triton": {
        "__version__": "3.7.0",
        "cdiv": lambda a, b: -(a // -b),
        "next_power_of_2": lambda x: 1 << (x - 1).bit_length() if x > 0 else 1,
    },
    "triton.language": {"constexpr": _Constexpr},
    "triton.runtime.cache": {"triton_key": lambda: "stub"},
    "triton.compiler.compiler": {"triton_key": lambda: "stub"},
    "triton.runtime.autotuner": {"OutOfResources": _raised("OutOfResources"), "PTXASError": _raised("PTXASError")},
    "torchvision": {"__version__": "0.28.0"},
    "torchvision.transforms": {
        "InterpolationMode": enum.Enum(
            "InterpolationMode",
            {
                name: name.lower().replace("_", "-")
                for name in ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
            },
        )
    },
}


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "sgl_kernel":
            return importlib.util.spec_from_file_location(fullname, Path(__file__).with_name("sgl_kernel.py"))
        if fullname.partition(".")[0] in STUBBED:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(_CONTENTS.get(module.__name__, {}))


def install() -> Callable[[], None]:
    """Serve the stand-ins to later imports of this process; a package that is really installed wins.

    Idempotent. Returns a function that takes the finder out again (modules already imported stay).
    """
    present = [finder for finder in sys.meta_path if isinstance(finder, _StubFinder)]
    finder = present[0] if present else _StubFinder()
    if not present:
        sys.meta_path.append(finder)
    return lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None
