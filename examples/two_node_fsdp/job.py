"""The job that `submit` gives to Ray: its command line, its settings, and what runs of it."""

import json
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from examples.two_node_fsdp.settings import Settings
from miles_plugin.arguments_sources import load_config
from mooncake_store.errors import ConfigError


def new_id() -> str:
    return f"two-nodes-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def entrypoint(settings: Settings, run_id: str, directory: Path) -> list[str]:
    """The driver's command line, which Ray runs on the head; `directory` gets the job's settings and its report.

    Raises:
        ConfigError: a setting of the job that is wrong, or a directory that cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"STATE_DIR = {settings.state_dir}: {error}; name a directory that can be written") from error
    if settings.trainer == "miles":
        script = str(Path(settings.miles_home or "") / "train.py")
        return [sys.executable, "-m", "miles_plugin.run", script, *_flags(_miles_settings(settings))]
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(_our_settings(settings), sort_keys=False))
    report = directory / "report"
    load_config(["--config", str(path)])  # what is wrong is said here, and not in the job's log
    return [
        sys.executable, "-m", "miles_plugin", "train", "--config", str(path),
        "--run-id", run_id, "--report", str(report),
    ]  # fmt: skip


def jobs(settings: Settings) -> Iterator[str]:
    """A line for each job, or one that says why they are not known."""
    from ray.job_submission import JobSubmissionClient

    try:
        for job in JobSubmissionClient(settings.dashboard).list_jobs():
            yield f"job     {job.submission_id or job.job_id:16} {job.status.value}"
    except Exception as error:  # of many kinds, none of them documented
        yield f"job     not known: {str(error).splitlines()[0]}"


def stop_all(settings: Settings, seconds: float) -> Iterator[str]:
    """End the jobs that run, wait `seconds` at most for each; a line for each."""
    from ray.job_submission import JobSubmissionClient

    try:
        jobs = JobSubmissionClient(settings.dashboard)
        for job in jobs.list_jobs():
            if job.submission_id and not job.status.is_terminal():
                jobs.stop_job(job.submission_id)
                until = time.monotonic() + seconds
                while not jobs.get_job_status(job.submission_id).is_terminal() and time.monotonic() < until:
                    time.sleep(0.5)
                yield f"job {job.submission_id}: {jobs.get_job_status(job.submission_id).value}"
    except Exception as error:
        yield f"jobs were not stopped in order: {str(error).splitlines()[0]}"


def _our_settings(settings: Settings) -> dict[str, Any]:
    job = {**settings.job, "ray_address": settings.ray_address}
    job["mooncake_store_init_kwargs"] = {**_mapping(job), **_store(settings)}
    if settings.model_path:
        job["hf_checkpoint"] = settings.model_path
    if settings.dataset_path:
        job["prompt_data"] = settings.dataset_path
    return job


def _miles_settings(settings: Settings) -> dict[str, Any]:
    """Flags of miles's train.py: those under `miles:`, and what the launch knows."""
    given = settings.miles
    return {
        **given,
        "object_store_backend": "mooncake",
        "mooncake_store_init_kwargs": {**_mapping(given), **_store(settings)},
        **({"hf_checkpoint": settings.model_path} if settings.model_path else {}),
        **({"prompt_data": settings.dataset_path} if settings.dataset_path else {}),
    }


def _mapping(given: Mapping[str, Any]) -> Mapping[str, Any]:
    kwargs = given.get("mooncake_store_init_kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise ConfigError(f"mooncake_store_init_kwargs = {kwargs!r}: allowed is a mapping of names to values")
    return kwargs


def _store(settings: Settings) -> dict[str, Any]:
    """What all nodes share; the rest, such as a device's name, every node has in its environment."""
    return {"master_server_address": settings.master_address, "protocol": settings.protocol}


def _flags(given: Mapping[str, Any]) -> list[str]:
    """A mapping as command-line flags: true is a bare flag, false and null leave it out, a mapping is JSON."""
    flags: list[str] = []
    for name, value in given.items():
        if value is None or value is False:
            continue
        flags.append(f"--{name.replace('_', '-')}")
        if isinstance(value, Mapping):
            flags.append(json.dumps(value))
        elif isinstance(value, list):
            flags += map(str, value)
        elif value is not True:
            flags.append(str(value))
    return flags
