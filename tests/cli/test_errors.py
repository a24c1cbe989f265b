"""What cannot work is one line that says so, with exit code 2, and loses nothing."""

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest

import gradacc_jax
from gradacc_jax.cli import output, train
from gradacc_jax.cli.main import main
from gradacc_jax.cli.settings import CommandError, Settings

from .conftest import SGD, SMALL, contents_of


@pytest.fixture
def fails(capsys):
    """Runs a command that must fail, and returns the one line that it says."""

    def run(*argv: str, code: int = 2) -> str:
        assert main(["train", *argv]) == code
        captured = capsys.readouterr()
        assert captured.err.startswith("gradacc: error: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return run


def test_without_arguments_there_is_help(capsys):
    assert main([]) == 0
    assert "train a byte-level transformer" in capsys.readouterr().out


def test_the_module_is_the_command_and_tells_its_version():
    command = [sys.executable, "-m", "gradacc_jax", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"gradacc_jax {gradacc_jax.__version__}\n"


def test_help_names_every_default(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    for words in ("--gradient-accumulation-steps", "(default: 240)", "--verify"):
        assert words in said


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--steps", "0", "expected an integer, at least 1, not '0'"),
        ("--num-microbatches", "2.5", "expected an integer, at least 1, not '2.5'"),
        ("--micro-batch", "-3", "expected an integer, at least 1, not '-3'"),
        ("--seed", "-1", "expected an integer, at least 0, not '-1'"),
        ("--seed", "3000000000", "expected an integer, at most 2147483647, not "),
        ("--text", "", "expected a path, not an empty string"),
        ("--out", "", "expected a path, not an empty string"),
        ("--learning-rate", "nan", "expected a number above 0, not 'nan'"),
        ("--checkpoint-every", "0", "expected an integer, at least 1, not '0'"),
        ("--devices", "0", "expected an integer, at least 1, not '0'"),
        ("--coordinator", "host", "expected HOST:PORT, not 'host'"),
        ("--sharding", "model", "invalid choice: 'model'"),
        ("--schedule", "linear", "invalid choice: 'linear'"),
        ("--skip-nonfinite", "all", "invalid choice: 'all'"),
    ],
)
def test_a_value_out_of_range_is_told_what_was_expected(capsys, option, value, message):
    with pytest.raises(SystemExit) as stop:
        main(["train", f"{option}={value}"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert option in error
    assert message in error


def test_numbers_that_disagree_and_unknown_optimizers_are_errors(fails, tmp_path):
    out = tmp_path / "run"
    numbers = ("--global-batch", "8", "--micro-batch", "4")
    alias = ("--gradient-accumulation-steps", "3")
    assert "disagree: 4 x 3 = 12" in fails(
        "--out", str(out), "--devices", "1", *numbers, *alias
    )
    assert "mean" not in fails("--out", str(out), "--optimizer", "sdg")
    assert not out.exists()


def test_texts_that_cannot_be_trained_on_are_errors(fails, tmp_path):
    out = tmp_path / "run"
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.touch()
    short.write_text("short")
    for path, message in (
        (empty, "holds no text"),
        (short, "less than one sequence"),
        (tmp_path / "gone", "cannot be read"),
    ):
        assert message in fails("--text", str(path), "--out", str(out), *SGD)
    assert not out.exists()


def test_a_folder_that_cannot_be_written_is_an_error(fails, text, tmp_path):
    (tmp_path / "file").touch()
    error = fails("--text", text, "--out", str(tmp_path / "file" / "run"), *SGD)
    assert "cannot be written: Not a directory; choose another folder" in error


def test_a_folder_that_holds_a_run_is_not_written_over(fails, text, finished):
    before = contents_of(finished)
    error = fails("--text", text, "--out", str(finished), *SMALL, *SGD)
    assert "already holds config.json, metrics.jsonl" in error
    assert "--resume" in error
    assert contents_of(finished) == before


def test_resuming_needs_a_folder_with_a_run_in_it(fails, tmp_path):
    assert "--resume needs --out" in fails("--resume")
    assert "found no config.json in" in fails("--resume", "--out", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_resuming_another_model_names_every_difference(fails, finished):
    before = contents_of(finished)
    other = ("--num-layers", "3", "--embed-dim", "16", "--learning-rate", "0.5")
    error = fails("--resume", "--out", str(finished), *other)
    assert "num_layers=2, embed_dim=8, not with num_layers=3, embed_dim=16" in error
    assert "learning_rate" not in error
    assert contents_of(finished) == before


def test_more_devices_than_there_are_is_an_error(fails, text, finished):
    error = fails("--text", text, "--devices", "9", *SGD)
    assert "--devices=9, and there are 8 of kind cpu; choose --devices 8" in error
    assert "set JAX_NUM_CPU_DEVICES=9" in error
    error = fails("--resume", "--out", str(finished), "--devices", "4")
    assert "--global-batch=6 does not divide over 4 devices; choose 4 or 8" in error


def test_resuming_within_a_step_needs_micro_steps_that_end_there():
    settings = Settings(global_batch=48, micro_batch=6, num_microbatches=2, devices=4)
    assert train._micro_step(settings, 48 + 24) == 3
    with pytest.raises(CommandError) as error:
        train._micro_step(settings, 48 + 16)
    assert str(error.value) == (
        "the run was stopped within a step, after 16 of 48 sequences, which are no "
        "number of micro-steps of 24 (--micro-batch=6 on 4 devices); choose "
        "--micro-batch 4"
    )
    with pytest.raises(CommandError, match="go on as it was until the step has ended"):
        train._micro_step(settings, 48 + 6)


def test_resuming_on_other_text_is_an_error(fails, finished, tmp_path):
    before = contents_of(finished)
    (tmp_path / "other.txt").write_text("something else " * 20)
    error = fails("--resume", "--out", str(finished), "--text", str(tmp_path))
    assert "text of 40 files" in error
    assert "now 1 files" in error
    assert contents_of(finished) == before


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_an_error(fails, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    config = json.loads((run / "config.json").read_text())
    config["settings"]["embed_dim"] = 16
    (run / "config.json").write_text(json.dumps(config))
    before = contents_of(run)
    error = fails("--resume", "--out", str(run))
    assert "checkpoints/24 was made with embed_dim=8, not with embed_dim=16" in error
    assert contents_of(run) == before


@pytest.mark.parametrize("content", ["{", "{}", '{"settings": {"text": [], "x": 1}}'])
def test_a_configuration_that_cannot_be_understood_is_an_error(
    fails, tmp_path, content
):
    (tmp_path / "config.json").write_text(content)
    error = fails("--resume", "--out", str(tmp_path))
    assert "config.json is not what this version of gradacc writes" in error


def test_a_missing_library_is_told_how_to_install_it(fails, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find(name) if name != "rich" else None
    )
    error = fails("--out", str(tmp_path / "run"))
    assert "rich not found" in error
    assert "pip install 'gradacc_jax[cli]'" in error
    assert not (tmp_path / "run").exists()


def test_a_torn_line_of_metrics_is_dropped(tmp_path):
    lines = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": null}\n{"step": 3, "lo'
    (tmp_path / "metrics.jsonl").write_text(lines)
    with output.Metrics(tmp_path, steps=1) as metrics:
        metrics.append({"step": 2, "loss": 1.5})
    assert output.read_metrics(tmp_path) == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 1.5},
    ]
