"""`gradacc train` on several devices: one model, however its batch is spread."""

import contextlib
import io
import os
import shutil
import signal

import jax
import optax
import pytest

import gradacc_jax
from gradacc_jax.cli import devices, report, train
from gradacc_jax.cli.main import main
from gradacc_jax.cli.settings import Settings

from .conftest import (
    arrays_of,
    assert_same_run,
    assert_same_training,
    checkpoints_of,
    metrics_of,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _quickly_compiled():
    """Programs that are as right, and take half as long to compile."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def on_eight(tmp_path_factory, begin):
    """The folder of a run on eight devices, and what it said. Not to be written to."""
    folder = tmp_path_factory.mktemp("on eight") / "run"
    options = ("--devices", "8", "--micro-batch", "1", "--out", str(folder))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main([*begin, *options]) == 0
    return folder, said.getvalue()


@pytest.fixture
def _only_trained(monkeypatch):
    """Leaves out what a run compiles when it has been trained."""
    monkeypatch.setattr(train, "_held_out_loss", lambda *_: None)
    monkeypatch.setattr(train, "_sample", lambda *_: "")


@pytest.fixture
def stop_at(monkeypatch):
    """Sends the process a Ctrl-C while a given micro-step is under way."""
    shown = report.Reporter.micro_step

    def set_to(stop):
        def micro_step(self, number):
            shown(self, number)
            if number == stop:
                os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(report.Reporter, "micro_step", micro_step)

    return set_to


def test_on_eight_devices_a_run_is_that_of_one(on_eight, alone):
    folder, said = on_eight
    assert (
        "devices: 8 (cpu), data=8; gradients summed over data once a step\n"
        "step: 16 sequences of 16 bytes in 2 micro-batches of 1 on each of 8 devices"
    ) in said
    assert_same_training(folder, alone)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--devices 4 --micro-batch 2 --model-parallel 2",
            "data=2 x model=2; layers shared over model; gradients summed over data "
            "once a step\nstep: 16 sequences of 16 bytes in 4 micro-batches of 2 on "
            "each of 2 groups of 2 devices",
        ),
        (
            "--devices 4 --micro-batch 2 --sharding fsdp",
            "data=4; parameters and optimizer state spread over data",
        ),
        (
            "--devices 4 --micro-batch 2 --sharding fsdp --model-parallel 2 --in-step",
            "data=2 x model=2; layers shared over model; parameters and optimizer sta",
        ),
        (
            "--devices 4 --micro-batch 1 --model-parallel 2 --in-step --verify",
            "verify: equal to 4 steps",
        ),
    ],
)
def test_however_it_is_spread_a_run_is_that_of_one_device(
    tmp_path, begin, alone, capsys, options, said
):
    out = tmp_path / "run"
    assert main([*begin, *options.split(), "--out", str(out)]) == 0
    assert said in capsys.readouterr().out
    assert_same_training(out, alone)


@pytest.mark.usefixtures("_only_trained")
def test_stopped_within_a_step_it_goes_on_on_as_many_devices_or_on_others(
    tmp_path, begin, on_eight, stop_at, capsys
):
    unstopped, _ = on_eight
    run, other = tmp_path / "run", tmp_path / "other"
    stop_at(3)
    options = ("--devices", "8", "--micro-batch", "1", "--out", str(run))
    assert main([*begin, *options]) == 130
    assert checkpoints_of(run)[-1] == 24  # a step and the first half of one
    shutil.copytree(run, other)
    sums = jax.tree.leaves(arrays_of(run)["state"]["acc_grads"])
    assert {x.shape[0] for x in sums} == {8}
    capsys.readouterr()

    stop_at(None)
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert_same_run(run, unstopped)

    # On half as many devices the window has twice as many micro-batches, and is
    # entered in its second half as well.
    assert main(["train", "--resume", "--out", str(other), "--devices", "4"]) == 0
    said = capsys.readouterr().out
    assert "16 bytes in 4 micro-batches of 1 on each of 4 devices" in said
    assert "resumed after micro-step 6 of 16 (step 1 of 4 and 2 of 4 micro-" in said
    assert_same_training(other, unstopped)


@pytest.mark.usefixtures("_only_trained")
def test_between_steps_it_goes_on_with_any_micro_batch(tmp_path, on_eight, alone):
    run, expected = tmp_path / "run", tmp_path / "expected"
    shutil.copytree(on_eight[0], run)
    shutil.copytree(alone, expected)
    # Two micro-batches a step become one, for which there are no sums, and then four.
    for options in (
        "--steps 5 --devices 4 --micro-batch 4",
        "--steps 6 --devices 2 --num-microbatches 4",
    ):
        assert main(["train", "--resume", "--out", str(run), *options.split()]) == 0
    assert main(["train", "--resume", "--out", str(expected), "--steps", "6"]) == 0
    assert len(metrics_of(run)) == 6
    assert_same_training(run, expected)


@pytest.mark.parametrize("sharding", ["data", "fsdp"])
def test_moments_of_other_shapes_than_parameters_are_whole(sharding):
    settings = Settings(devices=8, model_parallel=2, sharding=sharding, embed_dim=128)
    placement = devices.place(settings)
    tx = gradacc_jax.accumulate(optax.adafactor(0.1), 4, axis_name=placement.axis_name)
    state = placement.like_state(tx, settings)
    for name in ("query_key_value", "mlp_out"):
        row = state.inner_state[0].v_row["blocks"][name]["kernel"]
        total = state.acc_grads["blocks"][name]["kernel"]
        assert row.sharding.is_fully_replicated
        assert not total.sharding.is_fully_replicated
