"""The user's own functions: found by a dotted path, and reported by name when they fail."""

import asyncio
import difflib
import importlib
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from mooncake_store.errors import ConfigError

# What `call_function` waits for: where, and since when (monotonic). By call, the oldest first.
_running: dict[object, tuple[str, float]] = {}


class CustomFunctionError(RuntimeError):
    """A function of the user's failed, or returned what it must not; the message names function, sample and line."""


def load_function(setting: str, path: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    """The function at `path`, "package.module.function"; modules of the working directory are found too.

    Args:
        setting: the name of the setting that `path` came from, for messages.
        parameters: what it will be called with, by position.

    Raises:
        ConfigError: no such module or function, importing it failed, or it takes other parameters.
    """
    named, function = f"{setting}={path}", find(setting, path)
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"{named}: {type(function).__name__}, not a function; it must take ({', '.join(parameters)})")
    check_call(named, function, parameters)
    found: Callable[..., Any] = function
    return found


def find(setting: str, path: str, kind: str = "function") -> Any:
    """What is called `path`, a `kind`; raises ConfigError as `load_function` when there is nothing of that name."""
    named = f"{setting}={path}"
    module_name, _, name = path.rpartition(".")
    if not module_name or "/" in path or ":" in path or path.endswith(".py"):
        raise ConfigError(f"{named}: write it as package.module.{kind}")
    module = _import(module_name, named)
    try:
        found = getattr(module, name, None)
    except ConfigError as error:  # of a module that decides when it is asked
        raise ConfigError(f"{named}: {error}") from None
    if found is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        close = difflib.get_close_matches(name, functions, n=1) or functions[:5]
        where = getattr(module, "__file__", None) or f"the module {module_name}"
        raise ConfigError(f"{named}: {where} has no {name!r}; it has {', '.join(close) or f'no {kind}'}")
    return found


def check_call(
    named: str, function: Callable[..., Any], parameters: Sequence[str], options: Sequence[str] = ()
) -> None:
    """Raise ConfigError for a function that does not take so many parameters by position, and `options` by name."""
    try:
        inspect.signature(function).bind(*parameters, **dict.fromkeys(options))
    except ValueError:  # a builtin without a signature: calling it will tell
        pass
    except TypeError as error:
        given = ", ".join([*parameters, *(f"{option}=..." for option in options)])
        taken = f"{getattr(function, '__name__', 'it')}{inspect.signature(function)}"
        raise ConfigError(f"{named}: {taken} cannot be called with ({given}): {error}") from None


async def call_function(function: Callable[..., Any], where: str, *arguments: Any, **options: Any) -> Any:
    """What an ordinary or an async function returns.

    Raises:
        CustomFunctionError: it raised; the message begins with `where` and names its line.
    """
    call = object()
    _running[call] = where, time.monotonic()
    try:
        returned = function(*arguments, **options)
        return await returned if inspect.isawaitable(returned) else returned
    except BaseException as error:  # also SystemExit, which would end the actor without a word
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # by the caller, not by the function
        raise CustomFunctionError(f"{where}: {describe(error, function)}") from error
    finally:
        del _running[call]


def longest_call(clock: Callable[[], float] = time.monotonic) -> tuple[str, float] | None:
    """The `where` of the call that has been running for longest, and for how many seconds; None when there is none.

    May be called from another thread than the functions run in.
    """
    for where, since in list(_running.values()):
        return where, clock() - since
    return None


def describe(error: BaseException, function: Callable[..., Any]) -> str:
    """The error in one line, with the last line of the function's own file that it passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(inspect.unwrap(function), "__code__", None)
    own = [frame for frame in frames if file is not None and frame.filename == file.co_filename]
    return f"{_summary(error)}{_place((own or frames)[-1]) if frames else ''}"


def _import(name: str, named: str) -> Any:
    if os.getcwd() not in sys.path:  # a console script has its own directory there, not the working directory
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a script that is no module may well exit
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{named}: there is no module {error.name!r}; it is looked for in {os.getcwd()} and in PYTHONPATH"
            ) from None
        hint = ""
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "miles":
            hint = "; GenerateState, Sample, DataBuffer and others are here in miles_plugin.rollout.custom"
        raise ConfigError(f"{named}: importing {name} failed: {_summary(error)}{_user_place(error)}{hint}") from error


def _user_place(error: BaseException) -> str:
    """Where the import failed, leaving out the import machinery and this file."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename not in (__file__, importlib.__file__)
    ]
    return _place(frames[-1]) if frames else ""


def _summary(error: BaseException) -> str:
    return " ".join(traceback.format_exception_only(error)[-1].split())


def _place(frame: traceback.FrameSummary) -> str:
    return f" ({frame.filename}:{frame.lineno}: {frame.line})"
