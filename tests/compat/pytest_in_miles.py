"""pytest in a miles checkout, with this project's backend installed (`--without-plugin`: as it is).

With `--our-buffer` this project's buffer of asynchronous rollouts is miles's default one, too.

miles needs packages that a machine without a GPU lacks, and parts of an SGLang that is newer than the released one.
None of them takes part in what is tested; stand-ins let the modules be imported.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

from miles_plugin.engines.sglang_cpu import stubs


class NewerSGLang(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what no other finder does: modules that the installed SGLang does not have."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        ours = fullname.startswith("sglang.")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return stubs.StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def main(arguments: list[str]) -> int:
    if "--without-plugin" in arguments:
        arguments.remove("--without-plugin")
    else:
        import miles_plugin

        miles_plugin.install()
    stubs.install()
    sys.meta_path.append(NewerSGLang())
    if "--our-buffer" in arguments:
        arguments.remove("--our-buffer")
        from miles.rollout import fully_async_data_buffer

        from miles_plugin.hooks import DataBuffer

        fully_async_data_buffer.DefaultDataBuffer = DataBuffer
    return int(pytest.main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
