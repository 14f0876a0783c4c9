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
            "import miles_plugin, importlib; miles_plugin.install(); classes()\n"
            "from miles.utils import data, object_store; importlib.reload(object_store); importlib.reload(data)\n"
            "miles_plugin.install(); assert classes() == OURS",
            id="again after a reload",
        ),
        pytest.param(
            "import miles_plugin, threading; classes(); seen = []\n"
            "def work(): miles_plugin.install(); seen.append(classes())\n"
            "threads = [threading.Thread(target=work) for _ in range(16)]\n"
            "[each.start() for each in threads]; [each.join() for each in threads]\n"
            "assert seen == [OURS] * 16",
            id="by many threads at once",
        ),
        pytest.param(
            "import miles_plugin, miles.backends.training_utils.data as training\n"
            "theirs = training.process_rollout_data\n"
            "wrapper = lambda *given: theirs(*given); training.process_rollout_data = wrapper\n"
            "from miles_plugin.in_miles import installation; miles_plugin.install()\n"
            "assert training.process_rollout_data is not wrapper\n"
            "installation.uninstall(); assert training.process_rollout_data is wrapper\n"
            "miles_plugin.install(); training.process_rollout_data = wrapper\n"
            "installation.uninstall(); assert training.process_rollout_data is wrapper",
            id="a user's own change stays",
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
UTILS, TRAINING = "miles/utils/ray_utils.py", "miles/backends/training_utils/data.py"
CHANGES = [
    (STORE, "class MooncakeObjectStore", "class Other", "MooncakeObjectStore.__init__", "nothing of that name"),
    (STORE, "(args, *, contribute_segment=None)", "(args)", "init_instance(args, contr", "init_instance(args)"),
    (STORE, "(self, value, value_spec=None)", "(self, value)", "BaseObjectStore.put(self, val", "BaseObjectStore.put("),
    (DATA, "dp_size, witness_info)", "dp_size)", "process_rollout_data(args, rol", "process_rollout_data(args, "),
    (DATA, "def process_rollout_data", "def broken(:", "utils/data.py: ", None),
    (
        UTILS,
        "def __init__(self, inner)",
        "def __init__(self, value)",
        "Box.__init__(self, inner)",
        "Box.__init__(self, value)",
    ),
    (STORE, "_INSTANCE", "_STORE", "object_store._INSTANCE", "nothing of that name"),
    (STORE, "StoreObjectRef = Box", "Ref = Box", "object_store.StoreObjectRef", "nothing of that name"),
    (STORE, "return MooncakeObjectStore(", "return KINDS[1](", "to make a MooncakeObjectStore", "calls of "),
    (
        STORE,
        "    def remove(self, ref): ...\n\n\nclass Ray",
        "    def remove(self, ref): ...\n\n    @abstractmethod\n    def size(self): ...\n\n\nclass Ray",
        "BaseObjectStore with put, get and remove",
        "get, put, remove, size",
    ),
    (
        TRAINING,
        "import process_rollout_data",
        "import process_rollout_data as cut",
        "an import of process_rollout_data",
        "['process_rollout_data as cut']",
    ),
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
    host: Path, file: str, old: str, new: str, looked_for: str, found: str | None, when: str
) -> None:
    source = (host / file).read_text()
    assert old in source
    (host / file).write_text(source.replace(old, new))
    is_importable = found is not None  # a source that does not parse is not
    first = "import miles.utils.object_store as there\n" if when == "after" and is_importable else ""
    status, said = run(
        f"{first}import miles_plugin\n"
        "try: miles_plugin.install()\n"
        "finally:\n"
        "    there = sys.modules.get('miles.utils.object_store')\n"
        "    assert 'miles_plugin' not in str(vars(there) if there else ''), 'half installed'",
        host,
    )
    assert status == 1
    expected = ["ConfigError", looked_for]
    if found is not None:
        expected += [f"found {found}", "radixark/miles 01df799d4", "Nothing was changed"]
    for words in expected:
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


def test_the_name_of_a_hook_that_is_not_there_is_reserved() -> None:
    status, said = run("from miles_plugin import hooks; hooks.post_write")
    assert status == 1
    assert "ConfigError" in said
    assert "leave --custom-update-weight-post-write-path out" in said


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


@pytest.mark.parametrize("job", ["", "{", "[1]", "3"])
def test_a_job_s_configuration_that_is_none_is_said_in_a_line(script: Path, job: str) -> None:
    done = start(str(script), environment={"RAY_JOB_CONFIG_JSON_ENV_VAR": job})
    assert done.returncode == (0 if not job else 2)
    assert "Traceback" not in done.stderr


def test_a_safe_path_is_left_alone(script: Path) -> None:
    path = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([str(script.parent), str(Path(__file__).parents[3])])}
    done = start(str(script), environment=path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[1] == str(script.parent)


RUNTIME_ENV = """
import json, os, sys
from miles_plugin import run
run.install_in_workers(os.environ)
import ray._private.worker as worker
print(json.dumps(worker._maybe_modify_runtime_env({"env_vars": {"A": "1"}}, False)))
"""


def test_another_hook_of_the_runtime_environment_comes_first(host: Path) -> None:
    (host / "theirs.py").write_text("def hook(asked): return {**asked, 'theirs': asked['env_vars']}")
    environment = {
        **os.environ,
        "RAY_RUNTIME_ENV_HOOK": "theirs.hook",
        "PYTHONPATH": f"{Path(__file__).parents[3]}:{host}",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUNTIME_ENV], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "env_vars": {"A": "1"}, "theirs": {"A": "1"}, "worker_process_setup_hook": "miles_plugin.install"
    }  # fmt: skip


def test_under_uv_run_workers_get_the_hook_too(tmp_path: Path) -> None:
    """Ray looks for a parent that is called so; a shell of that name will do."""
    shutil.copy("/bin/bash", tmp_path / "uv")
    (tmp_path / "inner.py").write_text(RUNTIME_ENV)
    (tmp_path / "run").write_text(f"{sys.executable} {tmp_path}/inner.py; true\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [tmp_path / "uv", "run", "inner.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    asked = json.loads(done.stdout)
    assert asked["worker_process_setup_hook"] == "miles_plugin.install", done.stderr
    assert "py_executable" in asked


def test_another_setup_hook_is_refused(script: Path) -> None:
    job = {"runtime_env": {"worker_process_setup_hook": "theirs.hook"}}
    done = start(str(script), environment={"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)})
    assert done.returncode == 2
    assert "theirs.hook" in done.stderr
    assert "miles_plugin.install()" in done.stderr
