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

import wrapt

from miles_plugin.in_miles import names
from miles_plugin.in_miles.state import installation as state
from mooncake_store.errors import ConfigError


def install() -> None:
    """See `miles_plugin.install`."""
    with state.lock:
        if not state.active:
            _check()
        state.active = True
        try:
            if not state.hooked:
                state.hooked = True
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
    with state.lock:
        state.active = False
        for module, name, before, ours in reversed(state.changed):
            if getattr(module, name, None) is ours:
                setattr(module, name, before)
        state.changed.clear()


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
        with state.lock:
            if state.active:
                names.check()  # not before, where miles was not on the path yet
                change(module)

    return after_import


def _change_store(module: ModuleType) -> None:
    if not state.has(module, names.STORE_CLASS):
        ours = importlib.import_module("miles_plugin.in_miles.object_store")
        state.replace(module, names.STORE_CLASS, ours.MooncakeObjectStore)


def _change_split(module: ModuleType) -> None:
    if not state.has(module, names.SHARD_FUNCTION):
        ours = importlib.import_module("miles_plugin.in_miles.delayed_split")
        state.replace(module, names.SHARD_FUNCTION, ours.rows_by_rank(getattr(module, names.SHARD_FUNCTION)))


def _change_importer(module: ModuleType) -> None:
    if state.has(module, names.SHARD_FUNCTION):
        return
    ours = getattr(sys.modules[names.DATA], names.SHARD_FUNCTION)
    # Imported after DATA, it has what replaces the function already.
    is_ours = getattr(module, names.SHARD_FUNCTION) is ours
    state.replace(module, names.SHARD_FUNCTION, ours, before=inspect.unwrap(ours) if is_ours else None)


# In this order where several are imported already.
_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    names.OBJECT_STORE: _change_store,
    names.DATA: _change_split,
    **dict.fromkeys(names.IMPORTERS, _change_importer),
}
