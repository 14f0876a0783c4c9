"""Start a miles script with this project's Mooncake backend in its driver and in every Ray worker.

    python -m miles_plugin.run train.py --object-store-backend mooncake ...

The script and its flags are miles's own, unchanged. Under `ray job submit` put the same behind `--`.
"""

import importlib
import json
import os
import runpy
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from miles_plugin import install
from miles_plugin.in_miles import names
from mooncake_store.errors import ConfigError

HOOK = "miles_plugin.install"
# Of Ray (2.50 to 2.60): a function that ray.init() gives its runtime environment, and what a submitted job gets as its.
RUNTIME_ENV_HOOK = "RAY_RUNTIME_ENV_HOOK"
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
UV_RUN = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
OURS = "miles_plugin.run.runtime_env"
# What stood in the two variables before, to be done first.
_BEFORE, _UV = "MILES_MOONCAKE_RUNTIME_ENV_HOOK", "MILES_MOONCAKE_UV_RUN_RUNTIME_ENV"
_USAGE = """usage: python -m miles_plugin.run SCRIPT [ARGUMENTS...]

Run a miles script, e.g. train.py, with the Mooncake backend of miles-mooncake in its driver and in every Ray worker.
SCRIPT and ARGUMENTS are miles's own; the backend is used when they say --object-store-backend mooncake."""


def prepare(script: str) -> None:
    """Install the backend here and for every worker of this process's Ray job, before the script is run.

    Raises:
        ConfigError: no such script, no miles, or one that is not known; or a Ray setup hook of the user's.
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"there is no script {script!r}; name a miles script, e.g. train.py in its checkout")
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)  # as `python SCRIPT` has it
    if not names.is_importable():
        raise ConfigError(
            f"miles cannot be imported for {script}: install it (pip install -e its checkout), or put the checkout on "
            f"PYTHONPATH"
        )
    install()
    install_in_workers(os.environ)


def install_in_workers(environ: MutableMapping[str, str]) -> None:
    """Let every worker of this process's Ray job run HOOK when it starts. Called before Ray is imported.

    Raises:
        ConfigError: another setup hook is asked for; Ray has one only.
    """
    if environ.get(JOB_CONFIG):  # what `ray job submit` asked for
        try:
            job = json.loads(environ[JOB_CONFIG])
            job["runtime_env"] = with_hook(job.get("runtime_env"))
        except (ValueError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{JOB_CONFIG} = {environ[JOB_CONFIG]!r:.200} is no job's configuration: {error}"
            ) from error
        environ[JOB_CONFIG] = json.dumps(job)
        return
    before = environ.get(RUNTIME_ENV_HOOK, "")
    if before != OURS:
        environ[_BEFORE] = before
    # Under `uv run` Ray would ask uv alone, and nobody else.
    environ[_UV], environ[UV_RUN] = environ.get(_UV) or environ.get(UV_RUN, "1"), "0"
    environ[RUNTIME_ENV_HOOK] = OURS


def runtime_env(asked: Any) -> Any:
    """What Ray calls with the runtime environment that ray.init() was given."""
    if os.environ.get(_UV, "0").lower() in ("1", "true"):
        asked = _as_uv_has_it(asked)
    if before := os.environ.get(_BEFORE):
        module, _, name = before.rpartition(".")
        asked = getattr(importlib.import_module(module), name)(asked)
    return with_hook(asked)


def _as_uv_has_it(asked: Any) -> Any:
    """What Ray does by itself in a driver that `uv run` started: workers get the same environment."""
    try:
        from ray._private.runtime_env import uv_runtime_env_hook as uv
    except ImportError:  # a Ray that does not know uv
        return asked
    return uv.hook(asked) if uv._get_uv_run_cmdline() else asked


def with_hook(asked: Any) -> dict[str, Any]:
    """The runtime environment with HOOK; ConfigError when it names another."""
    asked = dict(asked or {})
    there = asked.get("worker_process_setup_hook") or HOOK
    if there != HOOK:
        raise ConfigError(
            f"worker_process_setup_hook = {there!r} in the Ray runtime environment: a Ray job has one only; call "
            f"miles_plugin.install() in yours and in the driver, and start the script without miles_plugin.run"
        )
    return {**asked, "worker_process_setup_hook": HOOK}


def _main() -> None:
    argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        raise SystemExit(0 if argv else 2)
    try:
        prepare(argv[0])
    except ConfigError as error:
        print(f"miles_plugin.run: {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    sys.argv[:] = argv
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    _main()
