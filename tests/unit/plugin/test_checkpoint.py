"""Checkpoints on disk: complete or absent, whatever is cut off, and never another run's."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_plugin import checkpoint, durable
from miles_plugin.arguments import TrainConfig
from miles_plugin.arguments_sources import load_config, load_config_and_origins
from miles_plugin.checkpoint import Progress
from miles_plugin.version import VersionAuthority
from miles_plugin.version_owner import Owner
from mooncake_store.errors import ConfigError
from tests.report_samples import make_finished_report

REPORT = make_finished_report().to_dict()


def config(*argv: str) -> TrainConfig:
    return load_config(argv)


def make_policy(directory: Path, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 8} | changes))
    return directory


POLICY = make_policy(Path(tempfile.mkdtemp()), num_hidden_layers=2)


def save(directory: Path, number: int, argv: tuple[str, ...] = (), version: int = 3, arm: str = "real") -> Path:
    partial = checkpoint.begin(directory, number)
    (partial / "state").write_text(f"state after {number}")
    (partial / ".metadata").touch()
    settings = config("--save", str(directory), *argv)
    manager = {"cursor": 8 * number, "prompts": settings.task}
    report = REPORT | {"config": settings.model_dump(mode="json")}
    return checkpoint.commit(partial, Progress(arm, number, manager, version, str(POLICY)), settings, report)


def damage_versions(directory: Path) -> None:
    directory.mkdir()
    (directory / "00000007.json").write_text('{"format": 1')


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    save(tmp_path, 2)
    saved = save(tmp_path, 4)
    assert [entry.name for entry in sorted(tmp_path.glob("iter_*"))] == ["iter_0000002", "iter_0000004"]
    resume = checkpoint.find(config("--load", str(tmp_path)))
    assert resume is not None
    assert resume.directory == saved
    assert resume.progress == Progress("real", 4, {"cursor": 32, "prompts": "spell_backward"}, 3, str(POLICY))
    assert resume.report["run_id"] == REPORT["run_id"]
    assert (resume.directory / "state").read_text() == "state after 4"
    earlier = checkpoint.find(config("--load", str(tmp_path / "iter_0000002")))
    assert earlier is not None
    assert earlier.progress.rollouts_done == 2


def test_without_load_there_is_nothing_to_resume() -> None:
    assert checkpoint.find(config()) is None


def test_a_job_that_restarts_itself_begins_when_nothing_was_saved_yet(tmp_path: Path) -> None:
    assert checkpoint.find(config("--load", str(tmp_path / "new"), "--save", str(tmp_path / "new"))) is None
    with pytest.raises(ConfigError, match=r"load=.*no latest_checkpointed_iteration\.txt.*--save"):
        checkpoint.find(config("--load", str(tmp_path / "new")))


@pytest.mark.parametrize("killed_before", ["write", "rename", "sync_directory"])
@pytest.mark.parametrize("again", [False, True])
def test_a_crash_at_any_moment_leaves_the_checkpoint_before(
    killed_before: str, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies before the n-th call of each kind: what is found is complete, the old one or the new one."""

    class Killed(Exception):
        pass

    def dying(original: Callable[..., Any], survives: int) -> Callable[..., Any]:
        calls = iter(range(survives))

        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls, None) is None:
                raise Killed
            return original(*arguments, **options)

        return call

    owner: Any = Path if killed_before == "rename" else durable
    seen = set()
    for survives in range(10):
        directory = tmp_path / str(survives)
        save(directory, 2)
        if again:  # the one before it was killed in the same way
            save(directory, 4)
            (directory / checkpoint.LATEST).write_text("2\n")
        with monkeypatch.context() as patch:
            patch.setattr(owner, killed_before, dying(getattr(owner, killed_before), survives))
            try:
                save(directory, 4)
                finished = True
            except Killed:
                finished = False
        resume = checkpoint.find(config("--load", str(directory)))
        assert resume is not None
        found = resume.progress.rollouts_done
        assert (resume.directory / "state").read_text() == f"state after {found}"
        seen.add(found)
        save(directory, 4)  # the next run is not in the way of what was left
        if finished:
            assert found == 4
            break
    assert seen == {2, 4}


def test_what_a_run_resumed_earlier_would_replace_is_refused(tmp_path: Path) -> None:
    first, second = save(tmp_path / "ck", 2), save(tmp_path / "ck", 4)
    checkpoint.begin(tmp_path / "ck", 6)  # half a checkpoint is nothing to keep
    expected = r"load=.*iter_0000002: save=.*: iter_0000004; name another --save.*--load .*ck$"
    with pytest.raises(ConfigError, match=expected):
        checkpoint.check_save(config("--load", str(first), "--save", str(tmp_path / "ck")))
    checkpoint.check_save(config("--load", str(first), "--save", str(tmp_path / "elsewhere")))
    for load in (second, tmp_path / "ck"):
        checkpoint.check_save(config("--load", str(load), "--save", str(tmp_path / "ck")))


def test_versions_continue_above_what_was_used_after_the_checkpoint(tmp_path: Path) -> None:
    def go_on(name: str, above: int, updates: int) -> int:
        versions = VersionAuthority(tmp_path / name / checkpoint.VERSIONS, Owner.here("run"))
        versions.continue_above(above)
        versions.register_trainer("trainer")
        newest = [versions.allocate("trainer") for _ in range(updates)][-1]
        versions.close()
        return newest

    assert go_on("saved", -1, 3) == 2
    save(tmp_path / "saved", 2, version=2)
    assert go_on("saved", -1, 4) == 6  # the job went on, and was killed before it saved again
    resume = checkpoint.find(config("--load", str(tmp_path / "saved")))
    assert resume is not None
    assert resume.newest_version() == 6
    assert go_on("elsewhere", resume.newest_version(), 1) == 7
    assert go_on("elsewhere", -1, 1) == 8, "also when the log is read back"
    (tmp_path / "saved" / "versions.log").write_text("allocate 9\n")
    assert resume.newest_version() == 9, "an earlier release kept them there"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--seed", "1"], "seed=0, this one has seed=1"),
        (["--task", "leg_counting"], "task='spell_backward'"),
        (["--task-kwargs", '{"min_word_len": 3}'], "task_kwargs"),
        (["--tiny-num-layers", "2"], "tiny_num_layers=3"),
        (["--rollout-shuffle"], "rollout_shuffle=False"),
    ],
)
def test_a_job_with_other_data_or_another_model_does_not_resume(argv: list[str], expected: str, tmp_path: Path) -> None:
    save(tmp_path, 2)
    with pytest.raises(ConfigError) as caught:
        checkpoint.find(config("--load", str(tmp_path), *argv))
    assert expected in str(caught.value)
    assert "set it back, or start anew" in str(caught.value)


def test_what_may_change_between_runs(tmp_path: Path) -> None:
    save(tmp_path, 2)
    argv = ["--lr", "1", "--num-rollout", "99", "--object-store-backend", "mooncake", "--actor-num-gpus-per-node", "4"]
    assert checkpoint.find(config("--load", str(tmp_path), *argv)) is not None


def test_data_that_moved_is_compared_by_content_not_by_path(tmp_path: Path) -> None:
    save(tmp_path, 2, ("--prompt-data", "x.jsonl", "--eval-prompt-data", "y.jsonl"))
    moved = ["--prompt-data", "moved/x.jsonl", "--eval-prompt-data", "moved/y.jsonl"]
    assert checkpoint.find(config("--load", str(tmp_path), *moved)) is not None
    with pytest.raises(ConfigError, match="label_key=None"):
        checkpoint.find(config("--load", str(tmp_path), *moved, "--label-key", "answer"))


def test_what_makes_another_experiment_of_it_is_said_with_its_source(tmp_path: Path) -> None:
    save(tmp_path, 2, ("--rm-type", "math", "--custom-rm-path", "mine.reward", "--lr", "1e-3"))
    argv = ["--load", str(tmp_path), "--custom-rm-path", "mine.other", "--n-samples-per-prompt", "4", "--lr", "1e-3"]
    argv += ["--num-rollout", "99", "--custom-generate-function-path", "mine.generate"]
    settings, origins = load_config_and_origins(argv)
    resume = checkpoint.find(settings)
    assert resume is not None
    assert checkpoint.changes(resume, settings, origins) == [
        "rm_type 'math' -> None (from the defaults)",
        "custom_rm_path 'mine.reward' -> 'mine.other' (from the command line)",
        "n_samples_per_prompt 8 -> 4 (from the command line)",
        "custom_generate_function_path None -> 'mine.generate' (from the command line)",
    ]
    same = config("--load", str(tmp_path), "--rm-type", "math", "--custom-rm-path", "mine.reward", "--lr", "1e-3")
    assert not checkpoint.changes(resume, same, {})


@pytest.mark.parametrize(
    ("control", "arm", "done", "asked", "is_done"),
    [
        ("none", "real", 4, 4, True),
        ("none", "real", 4, 3, True),
        ("none", "real", 4, 5, False),
        ("both", "real", 4, 4, False),
        ("both", "shuffled", 4, 4, True),
        ("shuffled", "shuffled", 4, 4, True),
    ],
)
def test_a_job_that_has_done_all_its_rollouts_has_nothing_to_do(
    control: str, arm: str, done: int, asked: int, is_done: bool, tmp_path: Path
) -> None:
    saved = save(tmp_path, done, ("--reward-control", control), arm=arm)
    again = config("--load", str(tmp_path), "--reward-control", control, "--num-rollout", str(asked))
    if not is_done:
        assert checkpoint.find(again) is not None
        return
    with pytest.raises(checkpoint.AlreadyDone) as caught:
        checkpoint.find(again)
    for expected in (str(saved), "run-1", f"all {done} rollouts", f"num_rollout={asked}", "a larger --num-rollout"):
        assert expected in str(caught.value)


def test_the_save_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    saved = save(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"save=.*another run.*--load"):
        checkpoint.check_save(config("--save", str(tmp_path)))
    below = ["--save", str(tmp_path), "--load", str(tmp_path / "other")]
    with pytest.raises(ConfigError, match="another run"):
        checkpoint.check_save(config(*below))
    for load in (tmp_path, saved):
        checkpoint.check_save(config("--save", str(tmp_path), "--load", str(load)))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"save=.*no directory that can be written"):
        checkpoint.check_save(config("--save", str(tmp_path / "file" / "below")))
    checkpoint.check_save(config("--save", str(tmp_path / "new")))
    assert not (tmp_path / "new").exists(), "checking makes nothing"


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda saved: (saved.parent / checkpoint.LATEST).write_text("7\n"), "there are: iter_0000002"),
        (lambda saved: (saved.parent / checkpoint.LATEST).write_text("x"), "'x', which is no complete checkpoint"),
        (lambda saved: shutil.rmtree(saved), "there are: none"),
        (lambda saved: (saved / "job.json").write_text("{"), "not a complete checkpoint"),
        (lambda saved: (saved / "job.json").write_text('{"format": 1}'), "not a complete checkpoint"),
        (lambda saved: (saved / "report.json").unlink(), "not a complete checkpoint"),
        (lambda saved: (saved / "report.json").write_text("{}"), "report.json: format None"),
        (lambda saved: (saved / ".metadata").unlink(), "not a complete checkpoint"),
        (lambda saved: (saved.parent / "versions.log").write_text("x\n"), "versions.log, line 1"),
        (lambda saved: damage_versions(saved.parent / "versions"), "versions/00000007.json is damaged"),
        (lambda saved: (saved.parent / checkpoint.LATEST).write_bytes(b"\xff"), "no complete checkpoint"),
        (lambda saved: (saved.parent / checkpoint.LATEST).write_text("1" * 5000), "no complete checkpoint"),
        (
            lambda saved: (saved / "job.json").write_text(
                json.dumps({**json.loads((saved / "job.json").read_text()), "format": 2})
            ),
            "format 2, this package reads format 1",
        ),
    ],
)
def test_a_damaged_directory_is_named_with_the_next_step(
    damage: Callable[[Path], object], expected: str, tmp_path: Path
) -> None:
    damage(save(tmp_path, 2))
    with pytest.raises(ConfigError) as caught:
        checkpoint.find(config("--load", str(tmp_path)))
    assert expected in str(caught.value)


def test_a_policy_of_another_shape_is_refused_and_another_one_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_from = make_policy(tmp_path / "policy", num_hidden_layers=2, transformers_version="5.0")
    saved = save(tmp_path / "saved", 2, ("--hf-checkpoint", str(started_from)))
    monkeypatch.chdir(tmp_path)
    moved = make_policy(tmp_path / "moved", num_hidden_layers=2, transformers_version="5.1")
    said = [f"hf_checkpoint {str(started_from)!r} -> {str(moved)!r} (from the defaults)"]
    for path, changes in ((started_from, []), (Path("policy"), []), (moved, said)):
        settings = config("--load", str(saved), "--hf-checkpoint", str(path))
        resume = checkpoint.find(settings)
        assert resume is not None
        assert checkpoint.changes(resume, settings, {}) == changes
    for changes in ({"num_hidden_layers": 1}, {"num_hidden_layers": 3}, {"num_hidden_layers": 2, "hidden_size": 16}):
        other = make_policy(tmp_path / "other", **changes)
        with pytest.raises(ConfigError, match=r"hidden_(layers|size)=") as caught:
            checkpoint.find(config("--load", str(saved), "--hf-checkpoint", str(other)))
        assert "name the checkpoint that the saved job started from" in str(caught.value)
    with pytest.raises(ConfigError, match=r"hf_checkpoint=.*name it here too"):
        checkpoint.find(config("--load", str(saved)))


def test_a_renamed_checkpoint_is_refused_with_the_reason(tmp_path: Path) -> None:
    best = save(tmp_path, 2).rename(tmp_path / "best")
    with pytest.raises(ConfigError, match="named iter_ and seven digits; rename it back"):
        checkpoint.find(config("--load", str(best)))


def test_what_a_killed_job_left_half_saved_is_cleared_away(tmp_path: Path) -> None:
    half = checkpoint.begin(tmp_path, 7)
    (tmp_path / "mine").touch()
    with checkpoint.claim(tmp_path):
        assert not half.exists()
        assert (tmp_path / "mine").exists()
    with pytest.raises(ConfigError, match="save=/proc/x"), checkpoint.claim(Path("/proc/x/y")):
        pass


def test_a_job_that_was_taken_over_writes_into_no_checkpoint_of_the_next(tmp_path: Path) -> None:
    fenced, mine = checkpoint.begin(tmp_path, 7), checkpoint.begin(tmp_path, 7)
    (fenced / "__0_0.distcp").touch()
    assert not list(mine.iterdir())


def test_two_jobs_cannot_save_in_one_place(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable, "-c",
            "import sys; from pathlib import Path; from miles_plugin import checkpoint\n"
            "with checkpoint.claim(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()",
            str(tmp_path),
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ),
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match="another running job saves there"), checkpoint.claim(tmp_path):
        pass
    with pytest.raises(ConfigError, match="another running job saves there"):
        checkpoint.check_save(config("--save", str(tmp_path)))
    taking_over = config("--save", str(tmp_path), "--takeover")
    checkpoint.check_save(taking_over)
    with checkpoint.claim(tmp_path, taking_over.takeover):
        with pytest.raises(ConfigError, match="stop it, name another directory, or take over with --takeover"):
            checkpoint.check_save(config("--save", str(tmp_path)))
        holder.kill()
        holder.wait()
        with pytest.raises(ConfigError, match="another running job"), checkpoint.claim(tmp_path):
            pass
    with checkpoint.claim(tmp_path):
        pass
    with checkpoint.claim(None):
        pass


@pytest.mark.parametrize(
    ("load", "save", "expected"),
    [
        ("saved", "saved", True),
        ("saved/iter_0000002", "saved", True),
        ("saved/../saved/iter_0000002", "saved", True),
        ("saved", "elsewhere", False),
        ("saved/iter_0000002", "saved/elsewhere", False),
        (None, "saved", False),
        ("saved", None, False),
    ],
)
def test_whether_a_job_goes_on_where_it_was(load: str | None, save: str | None, expected: bool, tmp_path: Path) -> None:
    given = {name: tmp_path / path for name, path in (("load", load), ("save", save)) if path is not None}
    assert checkpoint.goes_on_in_place(load_config([]).model_copy(update=given)) == expected
