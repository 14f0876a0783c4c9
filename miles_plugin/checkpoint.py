"""Checkpoints of a job on disk: complete or absent, and found again after any crash.

    DIR/versions/                           the policy versions of every run that saved here; numbers are never reused
    DIR/groups.journal                      fully asynchronous: which groups wait, and where; see docs/async.md
    DIR/latest_checkpointed_iteration.txt   number of the newest checkpoint (its name is that of Megatron and miles)
    DIR/iter_0000010/                       after 10 rollouts, counted over all arms
        .metadata, *.distcp                 model, optimizer, scheduler and RNG, by torch.distributed.checkpoint
        job.json                            arm, rollouts done, data cursor, the settings that a resume must share
        report.json                         the report up to there

A checkpoint is written under a temporary name and renamed; the file that names the newest one is replaced last.
"""

import contextlib
import fcntl
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles_plugin import durable
from miles_plugin.arguments import (
    DataArguments,
    PolicyArguments,
    RewardArguments,
    RolloutArguments,
    TaskArguments,
    TrainConfig,
    TrainingArguments,
)
from miles_plugin.report.record import Report, finite
from miles_plugin.version import newest_version
from mooncake_store.errors import ConfigError

FORMAT = 1
LATEST = "latest_checkpointed_iteration.txt"
VERSIONS, JOURNAL = "versions", "groups.journal"
_JOB, _REPORT, _LOCK = "job.json", "report.json", "lock"
_NAME = re.compile(r"iter_\d{7}")
# Of a model's config.json what says nothing about its shape.
_NOT_SHAPE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
# Recorded, but compared by content: the files may have moved.
_PATHS = {"hf_checkpoint", "prompt_data", "eval_prompt_data"}
# What decides the items, their order and the model: a run that changed these would not go on, it would be another run.
_SHARED_SETTINGS = (
    *(name for name in PolicyArguments.model_fields if name.startswith("tiny_")),
    *DataArguments.model_fields, *TaskArguments.model_fields, "seed", "hf_checkpoint",
)  # fmt: skip


# What may change, but makes the curve before and after one of two experiments. The weights come from the checkpoint,
# yet another hf_checkpoint may bring another tokenizer, and whoever names it may mean its weights.
_EXPERIMENT = [
    "hf_checkpoint",
    *(
        name
        for group in (RewardArguments, RolloutArguments, TrainingArguments)
        for name in group.model_fields
        if name not in ("num_rollout", "eval_interval", *_SHARED_SETTINGS)
    ),
]


class AlreadyDone(Exception):
    """The checkpoint to go on from is after the last rollout; the message says where, and how to go on."""


@dataclass(frozen=True)
class Progress:
    """How far a job has come.

    arm: of the report, "real" or "shuffled". rollouts_done: in this arm. manager: what RolloutManager.state() said.
    version: the newest policy version allocated. policy: the Hugging Face directory that the job started from.
    """

    arm: str
    rollouts_done: int
    manager: dict[str, Any]
    version: int
    policy: str


@dataclass(frozen=True)
class Resume:
    """A checkpoint to go on from.

    directory: holds the trainers' state. settings: of the job that saved it, those that a resume must share. model: the
    shape of its policy, from config.json.
    """

    directory: Path
    progress: Progress
    settings: Mapping[str, Any]
    report: Mapping[str, Any]
    model: Mapping[str, Any]

    def newest_version(self) -> int:
        """The highest policy version known to be used: the job may have gone on for a while after it saved."""
        return max(self.progress.version, newest_version(self.directory.parent / VERSIONS))


def name_of(number: int) -> str:
    """Directory name of the checkpoint after `number` rollouts."""
    return f"iter_{number:07d}"


def find(config: TrainConfig) -> Resume | None:
    """What `--load` asks for; None without it, or when it is also `--save` and holds nothing yet.

    `--load` takes a directory of checkpoints (the newest counts) or one checkpoint.

    Raises:
        ConfigError: there is no complete checkpoint, or it belongs to a job with other settings.
        AlreadyDone: nothing is left to do.
    """
    directory = config.load
    if directory is None:
        return None
    if not (directory / _JOB).is_file():
        if not (directory / LATEST).is_file():
            if config.save is not None and config.save.resolve() == directory.resolve():
                return None
            raise ConfigError(f"load={directory}: no {LATEST} there; give the directory that --save filled")
        directory = directory / name_of(_latest_number(directory))
    if not _NAME.fullmatch(directory.resolve().name):
        raise ConfigError(f"load={directory}: a checkpoint's directory is named iter_ and seven digits; rename it back")
    resume = _read(directory)
    _check_settings(resume, config)
    _check_model(resume, config)
    done = resume.progress.rollouts_done
    if resume.progress.arm == config.arms[-1] and done >= config.num_rollout:
        raise AlreadyDone(
            f"nothing to do: load={resume.directory}, saved by run {resume.report['run_id']}, has all {done} rollouts; "
            f"num_rollout={config.num_rollout} asks for no more, a larger --num-rollout goes on from there"
        )
    return resume


def changes(resume: Resume, config: TrainConfig, origins: Mapping[str, str]) -> list[str]:
    """Settings that count from here on and that the job which saved did not have: name, old and new value, and where
    the new one comes from, by `origins` (see `load_config_and_origins`)."""
    before, now = resume.report["config"], config.model_dump(mode="json")
    return [
        f"{name} {before[name]!r} -> {now[name]!r} (from {origins.get(name, 'the defaults')})"
        for name in _EXPERIMENT
        if name in before and not _same(name, before[name], now[name])
    ]


def _same(name: str, before: Any, now: Any) -> bool:
    if name == "hf_checkpoint" and before and now:
        return Path(before).resolve() == Path(now).resolve()
    return bool(before == now)


def goes_on_in_place(config: TrainConfig) -> bool:
    """Whether the job goes on in the directory that it loads from."""
    if config.save is None or config.load is None:
        return False
    save, load = config.save.resolve(), config.load.resolve()
    return save in (load, load.parent)


def check_save(config: TrainConfig) -> None:
    """Refuse a `--save` directory with checkpoints that would be replaced, or that cannot be written (ConfigError)."""
    if config.save is None:
        return
    check_writable("save", config.save)
    save, load = config.save.resolve(), config.load.resolve() if config.load else None
    loaded = load.name if load is not None and load.parent == save and (load / _JOB).is_file() else None
    if (save / LATEST).exists() and load != save and loaded is None:
        raise ConfigError(
            f"save={config.save} holds the checkpoints of another run; resume it with --load {config.save}, or name "
            "another directory"
        )
    if loaded and (later := [name for name in _complete(save) if name > loaded]):
        raise ConfigError(
            f"load={config.load}: save={config.save} holds later checkpoints, which this job would replace: "
            f"{', '.join(later)}; name another --save directory, or go on from the newest with --load {config.save}"
        )
    if (config.save / _LOCK).exists() and not config.takeover:
        with _locked(config.save):
            pass


def check_writable(setting: str, directory: Path) -> None:
    """Raise ConfigError unless `directory` can be made, or is there and can be written. Leaves nothing behind."""
    there = directory.absolute()
    try:
        there = next(path for path in (there, *there.parents) if path.exists())
        with tempfile.TemporaryDirectory(prefix=".miles-mooncake-", dir=there):  # permissions do not tell of /proc
            pass
    except OSError as error:
        raise ConfigError(
            f"{setting}={directory}: {there} is no directory that can be written ({error.strerror}); name another"
        ) from None


@contextlib.contextmanager
def claim(save: Path | None, takeover: bool = False) -> Iterator[None]:
    """Hold the directory against a second job; the claim ends with this process, however it ends.

    Args:
        takeover: also from a job that is running; the version log fences that one.

    Raises:
        ConfigError: another job saves there now.
    """
    if save is None:
        yield
        return
    try:
        save.mkdir(parents=True, exist_ok=True)
        if takeover:  # the lock of a file without a name stays with the other job, and is in nobody's way
            (save / _LOCK).unlink(missing_ok=True)
        (save / _LOCK).touch()
    except OSError as error:
        raise ConfigError(f"save={save}: {error}; name a directory that can be made and written") from error
    with _locked(save):
        for left in save.glob("iter_*.partial"):  # of a job that ended while it saved
            shutil.rmtree(left, ignore_errors=True)
        yield


@contextlib.contextmanager
def _locked(save: Path) -> Iterator[None]:
    with (save / _LOCK).open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"save={save}: another running job saves there; stop it, name another directory, or take over with "
                "--takeover, which fences that job"
            ) from None
        yield


def begin(save: Path, number: int) -> Path:
    """An empty directory for the trainers' state of checkpoint `number`; `commit` makes it a checkpoint.

    Its name is new: a job that was taken over may still be writing one of the same number.
    """
    partial = save / f"{name_of(number)}.{secrets.token_hex(4)}.partial"
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path, progress: Progress, config: TrainConfig, report: Mapping[str, Any]) -> Path:
    """Make `partial`, which holds the trainers' state, the newest checkpoint of its directory. Durable on return."""
    final = partial.with_name(partial.name.partition(".")[0])
    settings = {name: config.model_dump(mode="json")[name] for name in _SHARED_SETTINGS}
    durable.write(partial / _REPORT, json.dumps(finite(report), allow_nan=False))
    job = {"format": FORMAT, "settings": settings, "progress": asdict(progress), "model": _shape(Path(progress.policy))}
    durable.write(partial / _JOB, json.dumps(job, indent=1))
    durable.sync_directory(partial)
    if final.exists():  # of a run that was killed before it called this the newest
        shutil.rmtree(final)
    partial.rename(final)
    _point_to(final)
    return final


def _point_to(newest: Path) -> None:
    pointer = newest.parent / f"{LATEST}.partial"
    durable.write(pointer, f"{int(newest.name.removeprefix('iter_'))}\n")
    pointer.rename(newest.parent / LATEST)
    durable.sync_directory(newest.parent)


def _latest_number(directory: Path) -> int:
    text = (directory / LATEST).read_text(errors="replace").strip()
    if not text.isdecimal() or len(text) > 7 or not (directory / name_of(int(text)) / _JOB).is_file():
        there = ", ".join(_complete(directory))
        raise ConfigError(
            f"load={directory}: {LATEST} says {text!r:.40}, which is no complete checkpoint; there are: "
            f"{there or 'none'}; give one of them as --load {directory}/iter_..."
        )
    return int(text)


def _complete(directory: Path) -> list[str]:
    """Names of the complete checkpoints of a directory, the oldest first."""
    return sorted(
        path.name for path in directory.glob("iter_*") if _NAME.fullmatch(path.name) and (path / _JOB).is_file()
    )


def _read(directory: Path) -> Resume:
    try:
        record = json.loads((directory / _JOB).read_text())
        report = json.loads((directory / _REPORT).read_text())
        if record["format"] != FORMAT:
            raise ConfigError(f"load={directory}: format {record['format']}, this package reads format {FORMAT}")
        if not isinstance(record["settings"], dict) or not (directory / ".metadata").is_file():
            raise ValueError("without settings or .metadata")
        Report.from_dict(report, str(directory / _REPORT))
        resume = Resume(directory, Progress(**record["progress"]), record["settings"], report, record["model"])
        resume.newest_version()  # reads the log
        return resume
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"load={directory}: not a complete checkpoint: {error!r}; give an earlier one") from error


def _check_settings(resume: Resume, config: TrainConfig) -> None:
    now = config.model_dump(mode="json")
    compared = [name for name in resume.settings if name in now and name not in _PATHS]
    changed = [name for name in compared if now[name] != resume.settings[name]]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"load={resume.directory} was saved by a job with {name}={resume.settings[name]!r}, this one has "
            f"{name}={now[name]!r}; a resumed job shares its model, data and seed: set it back, or start anew"
        )


def _check_model(resume: Resume, config: TrainConfig) -> None:
    """A policy of another shape would fail to load, or load in part; a tiny one's shape is among the settings."""
    saved = resume.settings["hf_checkpoint"]
    if config.hf_checkpoint is None:
        if saved is not None:
            raise ConfigError(
                f"load={resume.directory} was saved by a job with hf_checkpoint={saved}; name it here too"
            )
        return
    now = _shape(config.hf_checkpoint)
    changed = [name for name in sorted({*now, *resume.model}) if now.get(name) != resume.model.get(name)]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"load={resume.directory} was saved with a policy of {name}={resume.model.get(name)!r}, hf_checkpoint="
            f"{config.hf_checkpoint} has {name}={now.get(name)!r}; name the checkpoint that the saved job started from"
        )


def _shape(policy: Path) -> dict[str, Any]:
    described: dict[str, Any] = json.loads((policy / "config.json").read_text())
    return {name: value for name, value in described.items() if name not in _NOT_SHAPE}
