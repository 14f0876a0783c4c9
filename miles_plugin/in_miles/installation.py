"""Puts this project's backend into a miles process, and takes it out again.

miles creates its store from a closed enum, with no place to register another, so the class behind "mooncake" is
replaced, and with it the function that cuts a rank's rows out of a batch that all ranks share. Nothing else of miles
changes. A module that is not imported yet is changed right after its import, so that a worker which never uses the
store pays nothing.
"""

import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from miles_plugin.in_miles import names
from mooncake_store.errors import ConfigError


class _Installation:
    """What is changed in this process: module, name, what was there before, and what is there now."""

    def __init__(self) -> None:
        self.active = self.hooked = False
        self.changed: list[tuple[ModuleType, str, Any, Any]] = []
        self.lock = threading.RLock()

    def replace(self, module: ModuleType, name: str, new: Any, before: Any = None) -> None:
        """`before` is what is put back, if not what is there now."""
        there = getattr(module, name)
        self.changed.append((module, name, there if before is None else before, new))
        setattr(module, name, new)

    def has(self, module: ModuleType, name: str) -> bool:
        """Whether the module's name is ours at this moment; a reload brings miles's back."""
        return any(each[:2] == (module, name) and getattr(module, name) is each[3] for each in self.changed)


_installation = _Installation()


def install() -> None:
    """See `miles_plugin.install`."""
    with _installation.lock:
        if not _installation.active:
            _check()
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
    """Put back what was there, where ours still is; idempotent. A store that is open stays open."""
    with _installation.lock:
        _installation.active = False
        for module, name, before, ours in reversed(_installation.changed):
            if getattr(module, name, None) is ours:
                setattr(module, name, before)
        _installation.changed.clear()


def is_installed() -> bool:
    """Whether `install` was called, and not undone."""
    return _installation.active


def _check() -> None:
    if names.is_importable():
        names.check()
    host = sys.modules.get(names.OBJECT_STORE)
    if getattr(host, names.INSTANCE, None) is not None:
        raise ConfigError(
            f"{names.OBJECT_STORE} has opened its store already; call miles_plugin.install() before init_instance()"
        )


def _when_active(change: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def after_import(module: ModuleType) -> None:
        with _installation.lock:
            if _installation.active:
                names.check()  # not before, where miles was not on the path yet
                change(module)

    return after_import


def _change_store(module: ModuleType) -> None:
    if not _installation.has(module, names.STORE_CLASS):
        ours = importlib.import_module("miles_plugin.in_miles.object_store")
        _installation.replace(module, names.STORE_CLASS, ours.MooncakeObjectStore)


def _change_split(module: ModuleType) -> None:
    if not _installation.has(module, names.SHARD_FUNCTION):
        ours = importlib.import_module("miles_plugin.in_miles.delayed_split")
        _installation.replace(module, names.SHARD_FUNCTION, ours.rows_by_rank(getattr(module, names.SHARD_FUNCTION)))


def _change_importer(module: ModuleType) -> None:
    if _installation.has(module, names.SHARD_FUNCTION):
        return
    ours = getattr(sys.modules[names.DATA], names.SHARD_FUNCTION)
    # Imported after DATA, it has what replaces the function already.
    is_ours = getattr(module, names.SHARD_FUNCTION) is ours
    _installation.replace(module, names.SHARD_FUNCTION, ours, before=inspect.unwrap(ours) if is_ours else None)


# In this order where several are imported already.
_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    names.OBJECT_STORE: _change_store,
    names.DATA: _change_split,
    **dict.fromkeys(names.IMPORTERS, _change_importer),
}
