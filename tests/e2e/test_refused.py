"""Jobs that must not start: status 2 and one readable line, before anything is started or written."""

import json
import re
import socket
from pathlib import Path

import pytest

from tests.e2e.jobs import Marked, run
from tests.integration.plugin.conftest import make_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.e2e]
# Mooncake's own complaint about a connection comes before ours.
MOONCAKE_LOG = re.compile(r"E\d{4} |WARNING: Logging before InitGoogleLogging")
MOONCAKE = ["--object-store-backend", "mooncake", "--mooncake-store-init-kwargs"]


def refused(arguments: list[str], cwd: Path, marked: Marked) -> str:
    """Run a job that must not start, in the empty directory `cwd`; return its message, one line."""
    done = run(arguments, marked, cwd)
    assert done.returncode == 2, done.stderr
    assert not done.stdout
    ours = [line for line in done.stderr.strip().splitlines() if not MOONCAKE_LOG.match(line)]
    assert len(ours) == 1, done.stderr
    assert not list(cwd.iterdir()), "a job that did not start leaves nothing behind"
    return ours[0]


def test_a_master_that_does_not_answer(tmp_path: Path, marked: Marked) -> None:
    kwargs = '{"protocol":"tcp","master_server_address":"127.0.0.1:1"}'
    message = refused([*MOONCAKE, kwargs], tmp_path, marked)
    assert "127.0.0.1:1" in message
    assert "from init_kwargs" in message


def test_a_listener_that_is_no_master(tmp_path: Path, marked: Marked) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kwargs = json.dumps({"protocol": "tcp", "master_server_address": f"127.0.0.1:{listener.getsockname()[1]}"})
        assert "does not serve as a Mooncake master" in refused([*MOONCAKE, kwargs], tmp_path, marked)


@pytest.mark.parametrize("does", ["nothing", "hangs up"])
def test_an_external_engine_that_is_none(does: str, tmp_path: Path, marked: Marked) -> None:
    policy = make_checkpoint(tmp_path / "policy", seed=0)
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        if does == "hangs up":
            listener.close()
        arguments = ["--hf-checkpoint", str(policy), "--rollout-external", "--rollout-external-engine-addrs", address]
        message = refused(arguments, tmp_path / "empty", marked)
    assert f"rollout_external_engine_addrs={address}: the engine cannot be used" in message
    assert "rollout_external_engine_addrs from the command line" in message
    assert "no answer" in message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--rollout-external"], "rollout_external=True: no engine is named"),
        (
            ["--update-weight-transfer-mode", "disk-delta", "--ray-address", "127.0.0.1:1"],
            "disk-delta with ray_address=127.0.0.1:1: .*update-weight-disk-dir",
        ),
        (
            ["--update-weight-transfer-mode", "disk-delta", "--custom-update-weight-post-write-path", "nowhere.hook"],
            "custom_update_weight_post_write_path=nowhere.hook: there is no module 'nowhere'.* from the command line",
        ),
        (["--num-rolout", "3"], "--num-rollout"),
        (["--rollout-batch-size", "7"], "rollout_batch_size=7 .*rollout_batch_size from the command line"),
        (["--hf-checkpoint", "/nowhere"], "hf_checkpoint=/nowhere"),
        (["--task", "spell_backwards"], "spell_backward"),
        (["--report", "/dev/null/x"], "report=/dev/null/x"),
        (["--load", "/nowhere"], "load=/nowhere"),
        (["--save", "/dev/null/x"], "save=/dev/null/x"),
        (["--colocate"], "colocate=True"),
        (["--rollout-num-gpus", "10000"], "of memory, allowed: "),
        ([*MOONCAKE, '{"protocol": "tcp", "master_server_address": ""}'], "master_server_address = ''"),
        ([*MOONCAKE, '{"protocl": "tcp"}'], "did you mean 'protocol'"),
        ([*MOONCAKE, '{"protocol": "tcp", "global_segment_size": "9000gb"}'], "MemTotal"),
        ([*MOONCAKE, '{"protocol": "rdma"}'], "no RDMA device.*protocol from the command line"),
        ([*MOONCAKE, '{"protocol": "tcp",'], "not JSON at line 1, column 20"),
    ],
)
def test_a_wrong_setting(arguments: list[str], expected: str, tmp_path: Path, marked: Marked) -> None:
    assert re.search(expected, refused(arguments, tmp_path, marked))


def test_a_checkpoint_of_which_engines_can_have_no_delta(tmp_path: Path, marked: Marked) -> None:
    policy = make_checkpoint(tmp_path / "policy", seed=0)
    (policy / "model.safetensors").rename(policy / "pytorch_model.bin")
    (tmp_path / "empty").mkdir()
    arguments = ["--hf-checkpoint", str(policy), "--update-weight-transfer-mode", "disk-delta"]
    message = refused(arguments, tmp_path / "empty", marked)
    assert re.search(
        r"hf_checkpoint=\S+policy: no \*\.safetensors there.*use --update-weight-transfer-mode broadcast", message
    )


def test_the_variable_that_is_not_read(tmp_path: Path, marked: Marked, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = marked.environment | {"MOONCAKE_MASTER_ADDR": "10.0.0.1:50051"}
    monkeypatch.setattr(Marked, "environment", environment)
    message = refused([*MOONCAKE, '{"protocol": "tcp"}'], tmp_path, marked)
    assert "MOONCAKE_MASTER_ADDR='10.0.0.1:50051'" in message
    assert "MOONCAKE_MASTER" in message.replace("MOONCAKE_MASTER_ADDR", "")
