"""`gradacc train` on several devices: one model, however its batch is spread."""

import os
import shutil
import signal

import jax
import numpy as np
import pytest

from gradacc_jax.cli import report
from gradacc_jax.cli.main import main

from .conftest import SGD, arrays_of, assert_same_run, checkpoints_of, metrics_of

# 16 sequences a step, with unequal weights.
MODEL = (
    *("--seq-len", "16", "--global-batch", "16"),
    *("--num-layers", "2", "--embed-dim", "8", "--num-heads", "2"),
    *("--steps", "4", "--learning-rate", "0.5", "--checkpoint-every", "2"),
)


@pytest.fixture(scope="module")
def begin(text):
    """The command that begins a run, but for its folder and devices."""
    return ("train", "--text", text, *MODEL, *SGD)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, begin):
    """The folder of a run on one device. Not to be written to."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    options = ("--devices", "1", "--micro-batch", "8", "--out", str(folder))
    assert main([*begin, *options]) == 0
    return folder


def assert_same_training(a, b):
    """Equal losses and parameters, but for rounding: sums of other parts."""
    ours, theirs = metrics_of(a), metrics_of(b)
    assert [r["weight"] for r in ours] == [r["weight"] for r in theirs]
    for name in ("loss", "grad_norm"):
        expected = [r[name] for r in theirs]
        np.testing.assert_allclose([r[name] for r in ours], expected, rtol=1e-6)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6),
        arrays_of(a)["params"],
        arrays_of(b)["params"],
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--devices 8 --micro-batch 1",
            "devices: 8 (cpu), data=8; gradients summed over data once a step\n"
            "step: 16 sequences of 16 bytes in 2 micro-batches of 1 on each of 8 dev",
        ),
        (
            "--devices 4 --micro-batch 2 --sharding fsdp",
            "data=4; parameters and optimizer state spread over data",
        ),
        (
            "--devices 4 --micro-batch 2 --model-parallel 2",
            "data=2 x model=2; layers shared over model; gradients summed over data "
            "once a step\nstep: 16 sequences of 16 bytes in 4 micro-batches of 2 on "
            "each of 2 groups of 2 devices",
        ),
        ("--devices 2 --micro-batch 2 --in-step --verify", "verify: equal to 4 steps"),
        ("--devices 4 --micro-batch 2 --sharding fsdp --in-step", "data=4; parameters"),
    ],
)
def test_the_run_is_that_of_one_device(
    tmp_path, begin, alone, capsys, options, said
):
    out = tmp_path / "run"
    assert main([*begin, *options.split(), "--out", str(out)]) == 0
    assert said in capsys.readouterr().out
    assert_same_training(out, alone)
