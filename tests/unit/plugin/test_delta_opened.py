"""What disk-delta's settings mean: where versions are, which hooks are called, what a job cannot start with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `train` is not installed")

from miles_plugin.arguments import TrainConfig  # noqa: E402
from miles_plugin.arguments_sources import load_config  # noqa: E402
from miles_plugin.checkpoint import VERSIONS  # noqa: E402
from miles_plugin.rollout.functions import CustomFunctionError  # noqa: E402
from miles_plugin.version import VersionAuthority  # noqa: E402
from miles_plugin.version_owner import Owner  # noqa: E402
from miles_plugin.weight_transfer.disk_delta import opened  # noqa: E402
from miles_plugin.weight_transfer.disk_delta.storage import open_storage  # noqa: E402
from mooncake_store.errors import ConfigError, MissingDependency  # noqa: E402
from tests.unit.plugin.delta_readers import World  # noqa: E402
from tests.unit.plugin.delta_training import make_base, some_weights, step  # noqa: E402

URL = "http://10.0.0.1:30000"
# What the hooks were called with.
calls: list[tuple[Any, ...]] = []


def wrote(args: Any, version_dir: str, engines: Sequence[str]) -> None:
    calls.append((args.hf_checkpoint, version_dir, engines))


def reads(args: Any, version_dir: str) -> None:
    calls.append((args.hf_checkpoint, version_dir))


def fails(args: Any, version_dir: str, *engines: Any) -> None:
    raise OSError("no route to the mirror")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()


def config(*flags: str) -> TrainConfig:
    return load_config(["--update-weight-transfer-mode", "disk-delta", *flags])


def hook(name: str) -> str:
    return f"{__name__}.{name}"


# Where


def test_on_one_machine_versions_are_in_the_report(tmp_path: Path) -> None:
    assert opened.published_in(config(), tmp_path) == str(tmp_path / "weights")


def test_a_directory_is_the_same_one_for_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for given, means in (
        ("shared/weights", f"{tmp_path}/shared/weights"), ("~/weights", "/home/me/weights"),
        ("/mnt/weights", "/mnt/weights"), ("file:///mnt/weights", "/mnt/weights"), ("s3://bucket/run", "s3://bucket/run"),
    ):  # fmt: skip
        assert opened.published_in(config("--update-weight-disk-dir", given), tmp_path) == means


@pytest.mark.parametrize(
    ("flags", "encoding"),
    [
        ([], "sparse"),
        (["--custom-update-weight-post-write-path", "a.b"], "xor"),
        (["--custom-update-weight-pre-read-path", "a.b"], "sparse"),
        (["--custom-update-weight-post-write-path", "a.b", "--update-weight-delta-encoding", "sparse"], "sparse"),
        (["--update-weight-delta-encoding", "overwrite"], "overwrite"),
    ],
)
def test_who_has_readers_of_their_own_publishes_what_they_know(flags: list[str], encoding: str) -> None:
    assert opened.encoding_of(config(*flags)) == encoding


def test_what_is_published_by_these_settings_arrives_by_them(tmp_path: Path) -> None:
    weights = some_weights()
    base = make_base(tmp_path / "base", weights)
    settings = config(
        "--update-weight-disk-dir", str(tmp_path / "shared"), "--update-weight-local-checkpoint-dir",
        str(tmp_path / "ckpt"), "--update-weight-anchor-interval", "2", "--update-weight-delta-checksum", "adler32",
    )  # fmt: skip
    hosts = opened.open_hosts(settings, tmp_path / "run", base)
    assert (tmp_path / "ckpt" / "current" / "config.json").is_file(), "before the first update: what engines start from"
    publisher = opened.open_publisher(settings, tmp_path / "run", base, 0, 1)
    bases = []
    for version in (0, 1, 2, 3):
        shares = [publisher.encode(version, weights.items())]
        if publisher.needs_full(shares):
            shares = [publisher.full(version)]
        published = publisher.finish(version, shares)
        bases.append(published.base if published.is_published else "none")
        brought = hosts.bring_to(version if published.is_published else None, [URL])
        assert (list(brought.paths), brought.failed) == ([URL], {})
        step(weights, version)
    publisher.close()
    assert bases == ["none", 0, None, 2]
    assert not (tmp_path / "run").exists()


# Hooks


def test_the_hooks_are_told_the_version_s_directory(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.publish(1)
    settings = config(
        "--update-weight-disk-dir", str(world.source), "--custom-update-weight-pre-read-path", hook("reads"),
        "--custom-update-weight-post-write-path", hook("wrote"),
    )  # fmt: skip
    hosts = opened.open_hosts(settings, tmp_path / "run", world.base)
    assert calls[0] == (str(world.base), f"{world.source}/weight_v000001")
    calls.clear()
    told = opened.post_write(settings, tmp_path, world.base)
    assert told is not None
    told("weight_v000002", (URL,))
    assert calls == [(str(world.base), f"{world.source}/weight_v000002", [URL])]
    calls.clear()
    world.publish(2)
    assert not hosts.bring_to(2, [URL]).failed
    assert (str(world.base), f"{world.source}/weight_v000002") in calls
    assert opened.post_write(config(), tmp_path, world.base) is None


def test_a_hook_that_fails_is_named_with_its_line_and_the_version(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.publish(1)
    flags = ["--update-weight-disk-dir", str(world.source)]
    told = opened.post_write(
        config(*flags, "--custom-update-weight-post-write-path", hook("fails")), tmp_path, world.base
    )
    assert told is not None
    with pytest.raises(
        CustomFunctionError, match=r"post_write_path=\S+fails, version \S+weight_v000001: OSError: no ro"
    ):
        told("weight_v000001", [URL])
    with pytest.raises(CustomFunctionError, match=r"pre_read_path=\S+fails, version \S+weight_v000001: OSError.*raise"):
        opened.open_hosts(
            config(*flags, "--custom-update-weight-pre-read-path", hook("fails")), tmp_path / "run", world.base
        )


# What a job cannot start with


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ["--ray-address", "10.0.0.1:6379"],
            "update_weight_transfer_mode=disk-delta with ray_address=10.0.0.1:6379: .*--update-weight-disk-dir",
        ),
        (["--hf-checkpoint", "{tmp}"], "hf_checkpoint=.*: no .*safetensors there.*transfer-mode broadcast"),
        (
            ["--custom-update-weight-post-write-path", "nowhere.hook"],
            "custom_update_weight_post_write_path=nowhere.hook: there is no module 'nowhere'",
        ),
        (
            ["--custom-update-weight-pre-read-path", hook("nothing")],
            "custom_update_weight_pre_read_path=.* has no 'nothing'",
        ),
        (["--custom-update-weight-pre-read-path", hook("wrote")], r"cannot be called with \(args, version_dir\)"),
        (["--update-weight-disk-dir", "/proc/weights"], "update_weight_disk_dir=/proc/weights: /proc is no directory"),
        (["--update-weight-disk-dir", "memory://"], "update_weight_disk_dir=memory://: each process has its own"),
        (
            ["--update-weight-disk-dir", "ftp://host/x"],
            "ftp://host/x: no place to publish; allowed: a directory, s3://",
        ),
        (
            ["--update-weight-local-checkpoint-dir", "/proc/ckpt"],
            "update_weight_local_checkpoint_dir=/proc/ckpt: /proc",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_started(
    flags: list[str], expected: str, tmp_path: Path
) -> None:
    flags = [flag.format(tmp=tmp_path) for flag in flags]
    with pytest.raises(ConfigError, match=expected) as caught:
        opened.check_settings(config(*flags))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("package", "flags"),
    [
        ("blake3", ["--update-weight-delta-checksum", "blake3"]),
        ("obstore.store", ["--update-weight-disk-dir", "s3://bucket/run"]),
    ],
)
def test_a_package_that_is_not_installed(package: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match="pip install"):
        opened.check_settings(config(*flags))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_checkpoint_of_other_numbers_than_the_trainers_send(dtype: torch.dtype, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", {"a": torch.zeros(3, dtype=dtype), "b": torch.zeros(2, dtype=dtype)})
    with pytest.raises(ConfigError, match=r"base: its weights are F(32|16), the trainers send BF16, .*save it as BF16"):
        opened.check_settings(config("--hf-checkpoint", str(base)))


def test_what_can_work_leaves_nothing_behind(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", some_weights())
    opened.check_settings(
        config(
            "--hf-checkpoint", str(base), "--update-weight-disk-dir", str(tmp_path / "a" / "b"),
            "--update-weight-local-checkpoint-dir", str(tmp_path / "c"),
            "--custom-update-weight-post-write-path", hook("wrote"),
            "--custom-update-weight-pre-read-path", hook("reads"),
        )
    )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    assert not calls


def test_a_place_with_later_versions_of_another_run_is_refused(tmp_path: Path) -> None:
    """At the first update the trainer would refuse it; what is known at the start is said at the start."""
    world = World(tmp_path)
    place = ["--update-weight-disk-dir", str(world.source)]
    opened.check_settings(config(*place))
    world.publish(1, 2)
    with pytest.raises(ConfigError, match="holds version 2 of an earlier run, this one would begin with 0; name an em"):
        opened.check_settings(config(*place))
    saved = tmp_path / "saved"
    authority = VersionAuthority(saved / VERSIONS, Owner.here("run"))
    authority.register_trainer("trainer")
    for version in range(3):
        if version == 2:
            with pytest.raises(ConfigError, match="would begin with 2"):
                opened.check_settings(config(*place, "--save", str(saved)))
        assert authority.allocate("trainer") == version
    authority.close()
    opened.check_settings(config(*place, "--save", str(saved)))
    assert len(open_storage(world.source).names()) > 2
