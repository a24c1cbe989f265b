"""`gradacc train --remat`: the same training in less memory, and what it says of it."""

import re

import numpy as np
import pytest

from gradacc_jax import policies
from gradacc_jax.cli import report
from gradacc_jax.cli.main import main
from gradacc_jax.cli.model import NAMES
from gradacc_jax.cli.settings import CommandError, resolve_remat

from .conftest import SGD, SMALL, checkpoints_of, metrics_of


def saved(said):
    """What a run said of temporaries, by policy, in MiB."""
    (line,) = re.findall(r"remat: temporaries with (.*); chosen: (\S+)", said)
    sizes = re.findall(r"([\w,]+) ([\d.]+) MiB", line[0])
    return {name: float(size) for name, size in sizes}, line[1]


@pytest.mark.parametrize("remat", ["full", "sqrt", "attention,mlp_in"])
def test_a_rematerialised_run_is_the_same_run_in_less_memory(
    tmp_path, text, finished, capsys, remat
):
    out = tmp_path / "run"
    run = ["train", "--text", text, "--out", str(out), *SMALL, *SGD, "--remat", remat]
    assert main(run) == 0
    sizes, chosen = saved(capsys.readouterr().out)
    assert chosen == remat
    assert {"none", "dots", "full", "sqrt", remat} == set(sizes)
    ours, theirs = metrics_of(out), metrics_of(finished)
    for name in ("loss", "grad_norm"):
        # Recomputed numbers may be rounded otherwise.
        np.testing.assert_allclose(
            [r[name] for r in ours], [r[name] for r in theirs], rtol=1e-5
        )


def test_deeper_models_save_more_by_full_rematerialisation(tmp_path, text, capsys):
    out = tmp_path / "run"
    run = ["train", "--text", text, "--out", str(out), *SMALL, *SGD, "--steps", "1"]
    assert (
        main([*run, "--num-layers", "8", "--micro-batch", "8", "--remat", "full"]) == 0
    )
    said = capsys.readouterr().out
    sizes, _ = saved(said)
    assert sizes["full"] < 0.5 * sizes["none"]
    assert sizes["full"] <= sizes["dots"] <= sizes["none"]
    assert "saves nothing" not in said


def test_a_compiler_that_undoes_it_is_told_on():
    class Program:
        def __init__(self, size):
            self.temp_size_in_bytes = size

        def memory_analysis(self):
            return self

    programs = {"none": Program(2**20), "full": Program(2**20)}
    assert "full saves nothing in this program" in report.rematerialisation(
        "full", programs
    )


def test_a_run_may_go_on_with_more_rematerialisation(tmp_path, text, finished):
    out = tmp_path / "run"
    run = ["train", "--text", text, "--out", str(out), *SMALL, *SGD]
    assert main([*run, "--steps", "2"]) == 0
    more = ["train", "--resume", "--out", str(out), "--steps", "4", "--remat", "full"]
    assert main(more) == 0
    assert checkpoints_of(out)[-1] == 12
    np.testing.assert_allclose(
        [r["loss"] for r in metrics_of(out)],
        [r["loss"] for r in metrics_of(finished)],
        rtol=1e-5,
    )


def test_policies_and_names_are_understood_and_near_misses_named():
    assert resolve_remat("none", 4, NAMES) == (4, policies.none)
    assert resolve_remat("checkpoint_dots", 4, NAMES) == (4, policies.dots)
    assert resolve_remat("sqrt", 4, NAMES) == ("sqrt", policies.full)
    names = policies.save_names("attention", "mlp_in")
    assert resolve_remat("attention, mlp_in", 4, NAMES) == (4, names)
    with pytest.raises(CommandError, match=r"--remat=atention is not known \(atten"):
        resolve_remat("atention", 4, NAMES)
    with pytest.raises(CommandError, match=r"--remat=mlp_in,atention is not known"):
        resolve_remat("mlp_in,atention", 4, NAMES)
