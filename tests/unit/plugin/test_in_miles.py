"""The plugin against a host of miles's shape, each in a process of its own: what is changed, refused, and put back."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the extra `train` is not installed")
pytest.importorskip("torch", reason="the extra `train` is not installed")

HOST = Path(__file__).parents[2] / "miles_host"
OURS = "miles_plugin.in_miles.object_store"
LOOK = """
def classes():
    from miles.utils import data, object_store
    from miles.backends.training_utils import data as training
    return (object_store.MooncakeObjectStore.__module__, data.process_rollout_data.__globals__["__name__"],
            training.process_rollout_data.__globals__["__name__"], object_store.RayObjectStore.__module__)

THEIRS = ("miles.utils.object_store", "miles.utils.data", "miles.utils.data", "miles.utils.object_store")
OURS = ("miles_plugin.in_miles.object_store", "miles_plugin.in_miles.delayed_split",
        "miles_plugin.in_miles.delayed_split", "miles.utils.object_store")
"""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A copy of the host that a test may change."""
    return Path(shutil.copytree(HOST, tmp_path / "host"))


def run(code: str, host: Path | None = HOST) -> tuple[int, str]:
    """Exit status and the last line of what a Python process says that has `host` on its path."""
    path = [str(Path(__file__).parents[3]), *([str(host)] if host else [])]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{LOOK}\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, said[-1] if said else ""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import miles_plugin; miles_plugin.install(); assert classes() == OURS", id="before miles"),
        pytest.param("classes(); import miles_plugin; miles_plugin.install(); assert classes() == OURS", id="after it"),
        pytest.param(
            "import miles.utils.object_store, miles_plugin; miles_plugin.install(); assert classes() == OURS",
            id="between its modules",
        ),
        pytest.param(
            "import miles_plugin; miles_plugin.install(); miles_plugin.install(); assert classes() == OURS", id="twice"
        ),
        pytest.param(
            "import miles_plugin; miles_plugin.install(); classes()\n"
            "from miles_plugin.in_miles import installation; installation.uninstall(); assert classes() == THEIRS\n"
            "installation.uninstall(); miles_plugin.install(); assert classes() == OURS",
            id="out and in again",
        ),
        pytest.param(
            "import miles_plugin; miles_plugin.install()\n"
            "from miles_plugin.in_miles import installation; installation.uninstall(); assert classes() == THEIRS",
            id="out before miles is imported",
        ),
    ],
)
def test_the_backend_is_installed_and_taken_out(code: str) -> None:
    assert run(code) == (0, "")


def test_importing_the_plugin_imports_nothing_of_miles() -> None:
    code = "import miles_plugin; assert not {'miles', 'ray', 'torch', 'wrapt'} & set(sys.modules)"
    assert run(code) == (0, "")
    assert run("import miles_plugin; miles_plugin.install()", host=None) == (0, "")  # a worker, before miles is known


STORE = "miles/utils/object_store.py"
DATA, CONVERSION = "miles/utils/data.py", "miles/ray/rollout/train_data_conversion.py"
CHANGES = [
    (STORE, "class MooncakeObjectStore", "class Other", "MooncakeObjectStore.__init__", "nothing of that name"),
    (STORE, "(args, *, contribute_segment=None)", "(args)", "init_instance(args, contr", "init_instance(args)"),
    (STORE, "(self, value, value_spec=None)", "(self, value)", "BaseObjectStore.put(self, val", "BaseObjectStore.put("),
    (DATA, "dp_size, witness_info)", "dp_size)", "process_rollout_data(args, rol", "process_rollout_data(args, "),
    (
        CONVERSION,
        "*, dp_size",
        "*, size",
        "dp_raw(args, data, dp_size)",
        "split_train_data_by_dp_raw(args, data, size)",
    ),
]


@pytest.mark.parametrize(("file", "old", "new", "looked_for", "found"), CHANGES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_unknown_miles_is_refused_and_left_alone(
    host: Path, file: str, old: str, new: str, looked_for: str, found: str, when: str
) -> None:
    source = (host / file).read_text()
    assert old in source
    (host / file).write_text(source.replace(old, new))
    first = "import miles.utils.object_store as there, miles.utils.data; " if when == "after" else ""
    status, said = run(
        f"{first}import miles_plugin\n"
        "try: miles_plugin.install()\n"
        "finally:\n"
        "    import miles.utils.object_store as there\n"
        "    assert 'miles_plugin' not in str(vars(there)), 'half installed'",
        host,
    )
    assert status == 1
    for words in ("ConfigError", looked_for, f"found {found}", "radixark/miles 01df799d4", "Nothing was changed"):
        assert words in said


def test_a_miles_without_an_object_store_is_refused(host: Path) -> None:
    (host / STORE).unlink()
    status, said = run("import miles_plugin; miles_plugin.install()", host)
    assert status == 1
    assert "looked for miles.utils.object_store" in said


def test_an_unknown_miles_that_appears_later_is_refused_at_its_import(host: Path) -> None:
    (host / STORE).write_text((host / STORE).read_text().replace("class MooncakeObjectStore", "class Other"))
    status, said = run(
        f"import miles_plugin; miles_plugin.install(); sys.path[:0] = [{str(host)!r}]\nimport miles.utils.object_store",
        host=None,
    )
    assert status == 1
    assert "looked for miles.utils.object_store.MooncakeObjectStore" in said


def test_a_store_that_is_open_already_is_refused() -> None:
    status, said = run(
        "from argparse import Namespace\nfrom miles.utils import object_store\n"
        "object_store.init_instance(Namespace(object_store_backend='ray'))\nimport miles_plugin; miles_plugin.install()"
    )
    assert status == 1
    assert "before init_instance()" in said


def test_a_ref_in_a_process_without_the_backend_says_what_to_do() -> None:
    status, said = run(
        "import pickle; from miles_plugin.in_miles.ref import MilesRef; from mooncake_store import BatchRef\n"
        "pickle.loads(pickle.dumps(MilesRef(BatchRef('mooncake', 'r', 'k', 1, 1, '0' * 32))))"
    )
    assert status == 1
    assert "miles_plugin.run" in said


@pytest.mark.parametrize(
    ("name", "flag"),
    [("post_write", "--custom-update-weight-post-write-path"), ("DataBuffer", "--custom-async-data-buffer-path")],
)
def test_names_of_hooks_are_reserved(name: str, flag: str) -> None:
    status, said = run(f"import importlib; getattr(importlib.import_module('miles_plugin.hooks'), {name!r})")
    assert status == 1
    assert "ConfigError" in said
    assert f"leave {flag} out" in said


# --- the runner -------------------------------------------------------------------------------------------------------


def start(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "miles_plugin.run", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(environment or {})},
    )


@pytest.fixture
def script(host: Path) -> Path:
    """Prints how it was started."""
    path = host / "script.py"
    path.write_text(
        "import json, os, sys; path = sys.path[0]; from miles.utils import object_store\n"
        "print(json.dumps([sys.argv, path, __name__, object_store.MooncakeObjectStore.__module__,"
        " os.environ.get('RAY_RUNTIME_ENV_HOOK'), os.environ.get('RAY_JOB_CONFIG_JSON_ENV_VAR')]))\n"
    )
    return path


def test_a_script_runs_as_python_would_run_it(script: Path) -> None:
    done = start(str(script), "--flag", "a b")
    assert done.returncode == 0, done.stderr
    argv, path, name, store, hook, job = json.loads(done.stdout)
    assert argv == [str(script), "--flag", "a b"]
    assert (path, name, store) == (str(script.parent), "__main__", OURS)
    assert (hook, job) == ("miles_plugin.run.runtime_env", None)


def test_what_the_script_raises_and_exits_with_is_its_own(script: Path) -> None:
    script.write_text("import mooncake_store; raise mooncake_store.ConfigError('of the job')")
    done = start(str(script))
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    script.write_text("raise SystemExit(7)")
    assert start(str(script)).returncode == 7


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 2, "usage: python -m miles_plugin.run SCRIPT"),
        (["--help"], 0, "usage: python -m miles_plugin.run SCRIPT"),
        (["nowhere.py"], 2, "there is no script 'nowhere.py'"),
        ([__file__], 2, "miles cannot be imported"),
    ],
)
def test_what_cannot_be_started_is_said(arguments: list[str], status: int, said: str) -> None:
    done = start(*arguments)
    assert done.returncode == status
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_submitted_job_keeps_its_runtime_environment(script: Path) -> None:
    job = {"runtime_env": {"env_vars": {"A": "1"}}, "metadata": {"job_name": "mine"}}
    done = start(str(script), environment={"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)})
    assert done.returncode == 0, done.stderr
    job["runtime_env"]["worker_process_setup_hook"] = "miles_plugin.install"  # type: ignore[assignment]
    assert json.loads(json.loads(done.stdout)[5]) == job


def test_another_setup_hook_is_refused(script: Path) -> None:
    job = {"runtime_env": {"worker_process_setup_hook": "theirs.hook"}}
    done = start(str(script), environment={"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)})
    assert done.returncode == 2
    assert "theirs.hook" in done.stderr
    assert "miles_plugin.install()" in done.stderr
