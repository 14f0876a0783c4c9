"""Two jobs on one run: the second is refused, or takes over, and the first can then neither update nor save."""

from pathlib import Path

import pytest

from tests.e2e.jobs import SMALL, Marked, await_output, read_report, run, running, steps_of

pytestmark = [pytest.mark.integration, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_second_job_is_refused_or_takes_over(checkpoint: Path, tmp_path: Path, marked: Marked) -> None:
    saved, output = tmp_path / "saved", tmp_path / "output"
    arguments = [
        *SMALL, "--hf-checkpoint", str(checkpoint), "--save", str(saved), "--load", str(saved), "--save-interval", "1",
        "--object-store-backend", "ray",
    ]  # fmt: skip
    with running([*arguments, "--num-rollout", "100000", "--report", str(tmp_path / "first")], marked, output) as job:
        await_output(job, output, "iter_0000002")
        second = [*arguments, "--num-rollout", "100000", "--report", str(tmp_path / "second")]
        refused = run(second, marked)
        assert refused.returncode == 2
        assert "--takeover" in refused.stderr
        with running([*second, "--takeover"], marked, tmp_path / "taken") as successor:
            await_output(successor, tmp_path / "taken", "resumed after")
            assert job.wait(60) == 1
            assert "do not belong to" in output.read_text()
            assert "took over" in output.read_text()
            await_output(successor, tmp_path / "taken", f"saved {saved}")
    before, after = read_report(tmp_path / "first"), read_report(tmp_path / "second")
    served = [step["served_version"] for step in steps_of(before)]
    assert int(steps_of(after)[-1]["sample_versions"][0]) > max(served)
    assert before["status"].startswith("stopped")
