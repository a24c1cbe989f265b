"""`gradacc train --in-step`: an optimizer step a call, and the same training."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradacc_jax.cli import report
from gradacc_jax.cli.main import main

from .conftest import SGD, SMALL, arrays_of, assert_same_run, checkpoints_of, metrics_of

EPS = float(jnp.finfo(jnp.float32).eps)


@pytest.fixture(scope="module")
def in_one_call(tmp_path_factory, text):
    """The folder of a run that was not stopped. Not to be written to."""
    folder = tmp_path_factory.mktemp("in-step") / "run"
    options = ["--text", text, "--out", str(folder), *SMALL, *SGD]
    assert main(["train", "--in-step", "--verify", *options]) == 0
    return folder


def test_its_losses_and_parameters_are_those_of_the_form_across_calls(
    in_one_call, finished
):
    ours, theirs = metrics_of(in_one_call), metrics_of(finished)
    assert [r["weight"] for r in ours] == [r["weight"] for r in theirs]
    for name in ("loss", "grad_norm"):
        # The same sums in other programs: some roundings a step, little amplified yet.
        np.testing.assert_allclose(
            [r[name] for r in ours], [r[name] for r in theirs], rtol=16 * EPS
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=64 * EPS, atol=64 * EPS),
        arrays_of(in_one_call)["params"],
        arrays_of(finished)["params"],
    )
    assert checkpoints_of(in_one_call) == checkpoints_of(finished)


@pytest.mark.slow
def test_a_run_stopped_by_ctrl_c_ends_bitwise_equal(
    tmp_path, text, in_one_call, monkeypatch, capsys
):
    run = tmp_path / "run"
    shown = report.Reporter.micro_step

    def micro_step(self, number):
        shown(self, number)
        if number == 3:  # the first call, of three micro-batches, is under way
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(report.Reporter, "micro_step", micro_step)
    begin = ["train", "--in-step", "--text", text, "--out", str(run), *SMALL, *SGD]
    assert main(begin) == 130
    assert checkpoints_of(run) == [6]
    assert "the sum of gradients among these" in capsys.readouterr().out
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert_same_run(run, in_one_call)


def test_a_run_of_the_other_form_is_not_gone_on_with(tmp_path, finished, capsys):
    run = ["train", "--resume", "--out", str(finished), "--in-step"]
    assert main(run) == 2
    assert (
        "was made with in_step=False, not with in_step=True" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_run_that_only_skips_is_ended(tmp_path, text, capsys):
    out = tmp_path / "run"
    run = ["train", "--in-step", "--text", text, "--out", str(out), *SMALL, *SGD]
    options = ["--learning-rate", "1e30", "--steps", "40", "--skip-nonfinite", "window"]
    assert main([*run, *options]) == 1
    assert "skipped" in capsys.readouterr().err


def test_micro_batches_cannot_be_skipped_one_by_one(capsys):
    options = ["train", "--in-step", "--skip-nonfinite", "micro_batch"]
    assert main(options) == 2
    assert "choose --skip-nonfinite window" in capsys.readouterr().err
