"""`gradacc plan`, `gradacc chips`, and runs that are planned for a budget."""

import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import jax
import pytest

from gradacc_jax.cli import memory, plan
from gradacc_jax.cli.devices import Placement
from gradacc_jax.cli.main import main

from .conftest import SGD, checkpoints_of, metrics_of

MINE = """
import os, time
import jax, jax.numpy as jnp, optax

def loss_fn(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)

def setup():
    return {
        "loss_fn": loss_fn,
        "params": jax.ShapeDtypeStruct((64, 64), jnp.float32),
        "optimizer": optax.sgd(0.1),
        "batch": jax.ShapeDtypeStruct((32, 16, 64), jnp.float32),
    }

def crash():
    os.abort()

def nothing():
    return 3

def forever():
    open("started", "w").write(str(os.getpid()))
    time.sleep(600)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with a module in it, to plan for from there."""
    (tmp_path / "mine_to_plan.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    # What pytest imports here must not reach the other process's search path.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return tmp_path


def test_chips_are_listed_with_what_installs_their_compilers(capsys):
    assert main(["chips"]) == 0
    said = capsys.readouterr().out
    for words in ("rtx-4090", "v5e", "GB/s", "NVIDIA's", "usable"):
        assert words in said


def test_a_function_of_the_users_is_planned_in_a_process_of_its_own(mine, capsys):
    asked = ("--memory", "10MB", "--global-batch", "64")
    written = ("--json", "plan.json", "--plot", "plan.png")
    assert main(["plan", "mine_to_plan:setup", *asked, *written]) == 0
    assert "mine_to_plan" not in sys.modules
    said = capsys.readouterr().out
    assert "= 64, policy none" in said
    told = json.loads((mine / "plan.json").read_text())
    assert told["microbatch_size"] * told["num_microbatches"] == 64
    assert (mine / "plan.png").stat().st_size > 5000
    assert multiprocessing.active_children() == []


def test_a_target_that_crashes_costs_the_answer_and_nothing_else(mine, capsys):
    assert main(["plan", "mine_to_plan:crash"]) == 2
    assert "ended with code -6 and without an answer" in capsys.readouterr().err
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mine_to_plan:missing", "has no attribute 'missing'"),
        ("mine_to_plan:nothing", "returned int; return a dict of arguments"),
    ],
)
def test_a_target_that_cannot_be_planned_is_an_error(
    mine, monkeypatch, target, message
):
    monkeypatch.syspath_prepend(str(mine))
    with pytest.raises(plan.CommandError, match=message):
        plan.plan_here(target, dict(OPTIONS))


OPTIONS = {
    "seq_len": 32,
    "optimizer": "sgd",
    "dtype": "f32",
    "trainable": None,
    "policies": "none",
}


@pytest.mark.optax_promotes
@pytest.mark.parametrize(
    ("target", "changed", "message"),
    [
        ("gpt:125M", {}, "gpt:125M is not known; choose gpt:124M"),
        ("gpt:2x60", {}, "channels a multiple of 64"),
        ("gpt:2x64", {"chip": "gtx"}, "chip='gtx' is not known"),
        ("gpt:2x64", {"trainable": "nrom"}, "no parameter has 'nrom' in its name"),
        ("gpt:2x64", {"optimizer": "sdg"}, "is no optimizer of optax"),
        (
            "gpt:2x64",
            {"global_batch": 8, "micro_batch": 3, "num_microbatches": 2},
            "global_batch_size=8, microbatch_size=3 and num_microbatches=2 disagree",
        ),
    ],
)
def test_what_cannot_be_planned_is_told_before_anything_is_compiled(
    target, changed, message
):
    with pytest.raises(plan.CommandError, match=message):
        plan.plan_here(target, {**OPTIONS, **changed})


def test_a_plot_needs_what_draws_it(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["plan", "gpt:124M", "--plot", "plan.png"]) == 2
    assert "--plot needs matplotlib; install" in capsys.readouterr().err


def test_a_word_that_is_no_target_is_an_error(capsys):
    assert main(["plan", "gpt2"]) == 2
    assert "gpt2 is no target; name gpt:124M" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.optax_promotes
def test_a_gpt_is_planned_with_and_without_frozen_parameters():
    asked = {"memory": "1GB", "global_batch": 4, "micro_batch": 1}
    every = plan.plan_here("gpt:2x64", {**OPTIONS, **asked})
    few = plan.plan_here("gpt:2x64", {**OPTIONS, **asked, "trainable": "norm"})
    assert every.num_microbatches == few.num_microbatches == 4
    assert few.peak_bytes < every.peak_bytes
    assert few.candidates[0].flops < every.candidates[0].flops


def test_killing_the_command_leaves_no_process_behind(mine):
    command = [sys.executable, "-m", "gradacc_jax", "plan", "mine_to_plan:forever"]
    parent = subprocess.Popen(command, cwd=mine, stderr=subprocess.PIPE)
    try:
        started = mine / "started"
        for _ in range(600):
            if started.exists() and started.read_text():
                break
            time.sleep(0.1)
        worker = int(started.read_text())
    finally:
        parent.send_signal(signal.SIGKILL)  # No time for goodbyes.
        parent.communicate()
    for _ in range(100):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        # Reparented and not yet reaped, it is gone all the same.
        with open(f"/proc/{worker}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                return
        time.sleep(0.1)
    pytest.fail("the worker outlived the command")


# --- gradacc train --memory --------------------------------------------------------

TINY = (
    *("--seq-len", "16", "--num-layers", "2", "--embed-dim", "8", "--num-heads", "1"),
    *("--steps", "4", "--learning-rate", "0.5", "--checkpoint-every", "3"),
    *("--global-batch", "12", "--remat", "none", "--devices", "1"),
)


def settings_of(folder):
    return json.loads((folder / "config.json").read_text())["settings"]


def test_a_budget_that_nothing_fits_is_an_error(capsys, text, tmp_path):
    run = tmp_path / "run"
    options = ["--text", text, "--out", str(run), *TINY, *SGD, "--memory", "1KB"]
    assert main(["train", *options, "--micro-batch", "1"]) == 2
    error = capsys.readouterr().err
    assert "--memory=1KB: nothing fits into 950 bytes" in error
    assert not run.exists()


class RunsOut:
    """A compiled step whose device has not enough memory at one of its calls."""

    def __init__(self, step, at, loses):
        self.step, self.at, self.loses = step, at, loses

    def __getattr__(self, name):
        return getattr(self.step, name)

    def __call__(self, params, state, batch):
        self.at -= 1
        if self.at:
            return self.step(params, state, batch)
        if self.loses:  # Some runtimes have taken the arguments by then.
            jax.tree.map(lambda x: x.delete(), (params, state))
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_step", "loses"), [(False, False), (False, True), (True, False)]
)
def test_a_run_that_is_out_of_memory_goes_on_with_smaller_micro_batches(
    capsys, monkeypatch, text, tmp_path, in_step, loses
):
    compile_step = Placement.compile
    compiled = []

    def compile_once(*args):
        compiled.append(compile_step(*args))
        # In the third step, which across calls has 2 micro-batches.
        at = 3 if in_step else 6
        return RunsOut(compiled[0], at, loses) if len(compiled) == 1 else compiled[-1]

    monkeypatch.setattr(Placement, "compile", compile_once)
    run = tmp_path / "run"
    options = ["--text", text, "--out", str(run), *TINY, *SGD, "--memory", "auto"]
    options += ["--micro-batch", "6", "--checkpoint-every", "1" if loses else "3"]
    assert main(["train", *options, *(["--in-step"] if in_step else [])]) == 0
    said = capsys.readouterr().out
    assert "plan for cpu: micro-batch 6 x 2 = 12, policy none" in said
    assert "out of memory with micro-batches of 6; planned again, at the same" in said
    assert "resumed after micro-step 6 of 12 (step 2 of 4" in said
    # The same global batch, no step lost, none made twice.
    settings = settings_of(run)
    assert (settings["micro_batch"], settings["num_microbatches"]) == (4, 3)
    assert [r["step"] for r in metrics_of(run)] == [1, 2, 3, 4]
    assert checkpoints_of(run)[-1] == 4 * 12
    assert [r["weight"] > 0 for r in metrics_of(run)] == [True] * 4


def test_where_no_smaller_micro_batch_is_left_the_run_ends(text, tmp_path):
    settings = memory.Settings(global_batch=4, micro_batch=1, num_microbatches=4)
    with pytest.raises(memory.CommandError, match="there are no smaller ones"):
        memory._smaller(settings, "auto")


def test_other_errors_are_not_taken_for_too_little_memory():
    rescue = memory.Rescue(memory.Settings(), lambda: None)
    with pytest.raises(ZeroDivisionError), rescue:
        raise ZeroDivisionError
