"""Puts this project's backend into a miles process, and takes it out again.

miles creates its store from a closed enum, with no place to register another, so the class behind "mooncake" is
replaced, and with it the function that cuts a rank's rows out of a batch that all ranks share. Nothing else of miles
changes. A module that is not imported yet is changed right after its import, so that a worker which never uses the
store pays nothing.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from miles_plugin.in_miles import names
from mooncake_store.errors import ConfigError


class _Installation:
    """What is changed in this process, and what was there before."""

    def __init__(self) -> None:
        self.active = False
        self.hooked = False
        self.before: list[tuple[ModuleType, str, Any]] = []

    def replace(self, module: ModuleType, name: str, new: Any) -> None:
        self.before.append((module, name, inspect.unwrap(getattr(module, name))))
        setattr(module, name, new)


_installation = _Installation()


def install() -> None:
    """See `miles_plugin.install`."""
    if _installation.active:
        return
    if names.is_importable():
        names.check()
    host = sys.modules.get(names.OBJECT_STORE)
    if getattr(host, names.INSTANCE, None) is not None:
        raise ConfigError(
            f"{names.OBJECT_STORE} has opened its store already; call miles_plugin.install() before init_instance()"
        )
    _installation.active = True
    try:
        if not _installation.hooked:
            _installation.hooked = True
            for module, change in _CHANGES.items():
                wrapt.register_post_import_hook(_when_active(change), module)
        for module, change in _CHANGES.items():
            if module in sys.modules:
                change(sys.modules[module])
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Put everything back as it was; idempotent. A store that is open stays open."""
    _installation.active = False
    for module, name, before in reversed(_installation.before):
        setattr(module, name, before)
    _installation.before.clear()


def is_installed() -> bool:
    """Whether `install` was called, and not undone."""
    return _installation.active


def _when_active(change: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def after_import(module: ModuleType) -> None:
        if _installation.active:
            names.check()  # not before, where miles was not on the path yet
            change(module)

    return after_import


def _change_store(module: ModuleType) -> None:
    ours = importlib.import_module("miles_plugin.in_miles.object_store")
    _installation.replace(module, names.STORE_CLASS, ours.MooncakeObjectStore)


def _change_split(module: ModuleType) -> None:
    ours = importlib.import_module("miles_plugin.in_miles.delayed_split")
    _installation.replace(module, names.SHARD_FUNCTION, ours.rows_by_rank(getattr(module, names.SHARD_FUNCTION)))


def _change_importer(module: ModuleType) -> None:
    # Imported after DATA, it has what replaces the function already.
    _installation.replace(module, names.SHARD_FUNCTION, getattr(sys.modules[names.DATA], names.SHARD_FUNCTION))


# In this order where several are imported already.
_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    names.OBJECT_STORE: _change_store,
    names.DATA: _change_split,
    **dict.fromkeys(names.IMPORTERS, _change_importer),
}
