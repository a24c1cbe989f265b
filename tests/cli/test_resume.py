"""A run stopped at any micro-step goes on as if it had not been stopped."""

import os
from pathlib import Path
import shutil
import signal
import subprocess
import sys

import pytest

from gradacc_jax.cli import report
from gradacc_jax.cli.main import main

from .conftest import SGD, SMALL, arrays_of, assert_same_run, checkpoints_of, metrics_of

ADAMW = ("--optimizer", "adamw", "--learning-rate", "0.01", "--warmup-steps", "1")

# The command, with a signal to itself while a given micro-step is under way and a given
# checkpoint is complete.
STOPPED = """
import os, sys, time
from gradacc_jax.cli import report
from gradacc_jax.cli.main import main

shown = report.Reporter.micro_step

def micro_step(self, number):
    shown(self, number)
    if number == int(sys.argv[1]):
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.01)
        os.kill(os.getpid(), int(sys.argv[3]))

report.Reporter.micro_step = micro_step
sys.exit(main(sys.argv[4:]))
"""


def command(*argv: str) -> subprocess.CompletedProcess:
    """Runs Python with these arguments, as somebody would in a terminal."""
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, *argv],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=300,
    )


@pytest.mark.slow
def test_a_run_stopped_by_sigterm_and_then_killed_ends_bitwise_equal(tmp_path, text):
    unstopped, run = tmp_path / "unstopped", tmp_path / "a run"
    begin = ("train", "--text", text, *SMALL, *ADAMW, "--out")
    resume = ("train", "--resume", "--out", str(run))
    sixth, seventh = (str(run / "checkpoints" / n) for n in ("12", "14"))
    term, kill = (str(int(s)) for s in (signal.SIGTERM, signal.SIGKILL))

    done = command("-m", "gradacc_jax", *begin, str(unstopped))
    assert (done.returncode, done.stderr) == (0, "")

    # Within a window: a checkpoint is written at once.
    done = command("-c", STOPPED, "7", sixth, term, *begin, str(run))
    assert (done.returncode, done.stderr) == (143, "")
    assert "micro-step 7 of 12 (step 2 of 4 and 1 of 3 micro-batches)" in done.stdout
    assert f"gradacc train --resume --out '{run}'" in done.stdout
    assert (run / "loss.png").exists()
    assert checkpoints_of(run) == [12, 14]
    assert int(arrays_of(run)["state"]["mini_step"]) == 1

    done = command("-c", STOPPED, "11", seventh, kill, *resume)
    assert done.returncode == -signal.SIGKILL, done.stderr
    # Written after the checkpoint, the third step is not to be there twice in the end.
    assert (run / "metrics.jsonl").read_text().count("\n") == 3

    done = command("-m", "gradacc_jax", *resume)
    assert (done.returncode, done.stderr) == (0, "")
    assert "resumed after micro-step 7" in done.stdout
    assert_same_run(run, unstopped)


@pytest.mark.slow
def test_a_run_stopped_by_ctrl_c_ends_bitwise_equal(
    tmp_path, text, finished, monkeypatch, capsys
):
    run = tmp_path / "run"
    shown = report.Reporter.micro_step
    stop = 5

    def micro_step(self, number):
        shown(self, number)
        if number == stop:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(report.Reporter, "micro_step", micro_step)
    handler = signal.getsignal(signal.SIGINT)
    begin = ["train", "--text", text, "--out", str(run), *SMALL, *SGD]
    assert main(begin) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert checkpoints_of(run) == [10]
    stop = 12  # Too late to stop a run that has just ended.
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert "resumed after micro-step 5" in capsys.readouterr().out
    assert_same_run(run, finished)


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins_again(
    tmp_path, text, finished, capsys
):
    run = tmp_path / "run"
    run.mkdir()
    # What is there after a kill within the first two steps.
    (run / "config.json").write_bytes((finished / "config.json").read_bytes())
    lines = (finished / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0] + lines[1][:20])
    assert main(["train", "--resume", "--out", str(run), *SMALL, *SGD]) == 0
    assert "resumed after micro-step 0" in capsys.readouterr().out
    assert_same_run(run, finished)


@pytest.mark.slow
def test_a_finished_run_with_a_constant_learning_rate_can_be_made_longer(
    tmp_path, finished
):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert main(["train", "--resume", "--out", str(run), "--steps", "5"]) == 0
    assert metrics_of(run)[:4] == metrics_of(finished)
    assert [record["step"] for record in metrics_of(run)] == [1, 2, 3, 4, 5]
    assert checkpoints_of(run) == [24, 30]
