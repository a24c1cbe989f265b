"""`gradacc train --distributed`: several processes that train one model."""

import os
from pathlib import Path
import signal
import socket
import subprocess
import sys

import pytest

from gradacc_jax.cli.main import main

from .conftest import assert_same_run, assert_same_training, checkpoints_of
from .test_resume import STOPPED

pytestmark = pytest.mark.slow

# Two processes of two devices each, on this machine.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "2",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles in half the time
    "PYTHONPATH": str(Path(__file__).parents[2]),
}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def job(python: list[str], *argv: str) -> list[tuple[int, str, str]]:
    """Runs the command in two processes; how each of them ended, and what it said."""
    coordinator = f"localhost:{free_port()}"
    several = ("--distributed", "--coordinator", coordinator, "--num-processes", "2")
    processes = [
        subprocess.Popen(
            [sys.executable, *python, *argv, *several, "--process-id", str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        for index in range(2)
    ]
    try:
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *words) for p, words in zip(processes, said)]


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory, begin):
    """The folder of a run in two processes, and how they ended."""
    folder = tmp_path_factory.mktemp("processes") / "run"
    options = ("--micro-batch", "2", "--out", str(folder))
    return folder, job(["-m", "gradacc_jax"], *begin, *options)


def test_two_processes_of_two_devices_train_as_one_device(unstopped, alone):
    folder, ended = unstopped
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert_same_training(folder, alone)


def test_the_first_process_alone_reports(unstopped):
    _, ended = unstopped
    (_, first, _), (_, second, _) = ended
    assert "devices: 4 (cpu) of 2 processes, data=4; gradients summed over" in first
    assert "step 4/4" in first
    assert "step 4/4" not in second
    assert "devices" not in second


def test_killed_within_a_step_the_job_goes_on_bitwise(tmp_path, begin, unstopped):
    run = tmp_path / "run"
    options = ("--micro-batch", "2", "--out", str(run))
    third = str(run / "checkpoints" / "32")
    kill = str(int(signal.SIGKILL))
    ended = job(["-c", STOPPED, "7", third, kill], *begin, *options)
    assert [code for code, _, _ in ended] == [-signal.SIGKILL] * 2, ended
    assert checkpoints_of(run) == [32]
    ended = job(["-m", "gradacc_jax"], "train", "--resume", "--out", str(run))
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert "resumed after micro-step 4 of 8 (step 2 of 4 and 0 of 2" in ended[0][1]
    assert_same_run(run, unstopped[0])


def test_a_signal_to_one_process_stops_all_at_the_end_of_a_step(
    tmp_path, begin, unstopped
):
    run = tmp_path / "run"
    options = ("--micro-batch", "2", "--out", str(run))
    # The script of the second process only sends a signal.
    to_second = STOPPED.replace(
        "if number ==", "import jax\n    if jax.process_index() and number =="
    )
    term = str(int(signal.SIGTERM))
    ended = job(["-c", to_second, "5", str(run), term], *begin, *options)
    assert [code for code, _, _ in ended] == [143, 143], ended
    assert "stopped after micro-step 6 of 8 (step 3 of 4 and 0 of 2" in ended[0][1]
    assert checkpoints_of(run)[-1] == 48
    # One process goes on, on as many devices.
    options = ("--resume", "--out", str(run))
    assert main(["train", *options]) == 0
    assert_same_training(run, unstopped[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--distributed", "--distributed needs --out FOLDER"),
        ("--coordinator localhost:1", "are for several processes; add --distributed"),
        ("--process-id 0", "are for several processes; add --distributed"),
    ],
)
def test_options_of_several_processes_that_do_not_fit(capsys, options, message):
    assert main(["train", *options.split()]) == 2
    assert message in capsys.readouterr().err
