"""`gradacc train`, from the command line to what lies in the folder at the end."""

import json
import re

import jax
import matplotlib.image
import numpy as np
import optax
import pytest

import gradacc_jax
from gradacc_jax.cli import train
from gradacc_jax.cli.main import main

from .conftest import SGD, SMALL, arrays_of, checkpoints_of, metrics_of


def test_a_run_leaves_its_configuration_metrics_curve_and_checkpoints(finished):
    assert {path.name for path in finished.iterdir()} == {
        *("config.json", "metrics.jsonl", "loss.png", "checkpoints")
    }
    config = json.loads((finished / "config.json").read_text())
    assert config["settings"]["global_batch"] == 6
    assert config["text"]["files"] == 40
    assert config["software"]["jax"] == jax.__version__
    records = metrics_of(finished)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert set(records[0]) == {"step", "loss", "grad_norm", "weight", "skipped"}
    assert records[-1]["loss"] < records[0]["loss"]
    assert checkpoints_of(finished) == [12, 24]
    assert int(arrays_of(finished)["state"]["gradient_step"]) == 4
    assert matplotlib.image.imread(finished / "loss.png").std() > 0


def test_the_weight_of_a_step_is_its_number_of_targets(finished, text):
    settings = train.output.read_config(finished)["settings"]
    corpus = train.load_corpus([text], settings.seq_len)
    weights = [corpus.global_batch(settings, s).lengths.sum() for s in range(4)]
    assert [record["weight"] for record in metrics_of(finished)] == weights
    assert len(set(weights)) > 1


def test_a_run_says_what_it_does_and_what_it_saves(finished_and_said):
    _, said = finished_and_said
    assert "6 sequences of 16 bytes in 3 micro-batches of 2" in said
    assert re.search(r"temporaries: .* MiB for the full batch .* x less", said)
    assert re.search(r"step 4/4 · loss \d\.\d+ · \S+ tokens/s · weight \d+ · ski", said)
    assert re.search(r"loss: \d\.\d+ to \d\.\d+ nats per byte in 4 steps", said)
    found = re.search(r"verify: equal to .* losses (\S+), of parameters (\S+)\n", said)
    # Losses of about 5 and parameters of about 1; a few roundings of each.
    assert all(float(difference) < 1e-5 for difference in found.groups())


@pytest.mark.slow
def test_verify_fails_where_accumulation_is_wrong(tmp_path, text, capsys, monkeypatch):
    def wrong(optimizer, *args, **kwargs):
        scaled = optax.chain(optax.scale(1.01), optimizer)
        return gradacc_jax.accumulate(scaled, *args, **kwargs)

    monkeypatch.setattr("gradacc_jax.cli.settings.accumulate", wrong)
    out = tmp_path / "run"
    code = main(["train", "--text", text, "--out", str(out), *SMALL, *SGD, "--verify"])
    assert code == 1
    assert "verify: DIFFERS FROM 4 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_what_it_has(
    tmp_path, text, capsys
):
    out = tmp_path / "run"
    run = ["train", "--text", text, "--out", str(out), *SMALL, *SGD]
    assert main([*run, "--learning-rate", "1e30", "--checkpoint-every", "1"]) == 1
    error = capsys.readouterr().err
    assert re.match(r"gradacc: error: loss=nan at step \d; choose a lower", error)
    assert error.count("\n") == 1
    records = metrics_of(out)
    assert all(np.isfinite(record["loss"]) for record in records)
    assert checkpoints_of(out)[-1] == 6 * len(records)


@pytest.mark.slow
def test_a_run_that_only_skips_is_ended(tmp_path, text, capsys):
    out = tmp_path / "run"
    run = ["train", "--text", text, "--out", str(out), *SMALL, *SGD]
    options = ["--learning-rate", "1e30", "--steps", "40", "--skip-nonfinite", "window"]
    assert main([*run, *options]) == 1
    assert "skipped" in capsys.readouterr().err
    records = metrics_of(out)
    assert records[-1]["skipped"] > 0
