"""`gradacc train --remat`: the same training in less memory, and what it says of it."""

import dataclasses
from functools import partial
import re

import chex
import jax
import numpy as np
import pytest

from gradacc_jax import policies
from gradacc_jax.cli import model, output, report
from gradacc_jax.cli.main import main
from gradacc_jax.cli.model import NAMES
from gradacc_jax.cli.settings import CommandError, Settings, resolve_remat
from gradacc_jax.cli.text import Batch

from .conftest import SGD, SMALL, metrics_of


def saved(said):
    """What a run said of temporaries, by policy, in MiB."""
    (line,) = re.findall(r"remat: temporaries with (.*); chosen: (\S+)", said)
    sizes = re.findall(r"([\w,]+) ([\d.]+) MiB", line[0])
    return {name: float(size) for name, size in sizes}, line[1]


@pytest.mark.slow
def test_a_rematerialised_run_is_the_same_run_in_less_memory(
    tmp_path, text, finished, capsys
):
    out, remat = tmp_path / "run", "attention,mlp_in"
    run = ["train", "--text", text, "--out", str(out), *SMALL, *SGD, "--remat", remat]
    assert main(run) == 0
    said = capsys.readouterr().out
    sizes, chosen = saved(said)
    assert chosen == remat
    assert {"none", "dots", "full", "sqrt", remat} == set(sizes)
    assert "saves nothing" not in said
    ours, theirs = metrics_of(out), metrics_of(finished)
    for name in ("loss", "grad_norm"):
        # Recomputed numbers may be rounded otherwise.
        np.testing.assert_allclose(
            [r[name] for r in ours], [r[name] for r in theirs], rtol=1e-5
        )


@pytest.mark.slow
def test_each_policy_leaves_the_gradients_and_less_memory():
    settings = Settings(num_layers=8, embed_dim=8, num_heads=1)
    rng = np.random.default_rng(0)
    batch = Batch(
        rng.integers(1, 256, (8, 17)).astype(np.uint8), np.full(8, 16, np.int32)
    )
    _, params = model.create(settings)
    found, temporaries = {}, {}
    for remat in ("none", "dots", "sqrt", "full"):
        forward = model.forward(dataclasses.replace(settings, remat=remat))
        loss = partial(model.next_byte_loss, forward)
        program = jax.jit(jax.value_and_grad(loss)).lower(params, batch).compile()
        found[remat] = program(params, batch)
        temporaries[remat] = program.memory_analysis().temp_size_in_bytes
        chex.assert_trees_all_close(found[remat], found["none"], rtol=1e-5, atol=1e-6)
    assert temporaries["full"] < 0.5 * temporaries["none"]
    assert temporaries["dots"] < temporaries["none"]
    assert temporaries["sqrt"] <= temporaries["full"]


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


def test_a_run_may_go_on_with_more_rematerialisation(tmp_path):
    stored = Settings()
    output.check_same(tmp_path, stored, dataclasses.replace(stored, remat="full"))


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


@pytest.mark.slow
@pytest.mark.newest
def test_a_run_keeps_to_a_budget_of_activation_memory(tmp_path, text, finished, capsys):
    out = tmp_path / "run"
    run = ["train", "--text", text, "--out", str(out), *SMALL, *SGD]
    assert main([*run, "--activation-memory", "1KiB"]) == 2
    found = re.search(r"smallest needs (\d+) bytes", capsys.readouterr().err)
    budget = 1.01 * int(found[1])
    assert main([*run, "--activation-memory", str(budget)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"activation memory: temporaries .* instead of .* MiB", said)
    ours, theirs = metrics_of(out), metrics_of(finished)
    # Recomputed numbers may be rounded otherwise.
    np.testing.assert_allclose(
        [r["loss"] for r in ours], [r["loss"] for r in theirs], rtol=1e-5
    )


def test_a_budget_must_be_a_size_and_no_policy_beside_it():
    with pytest.raises(CommandError, match="--activation-memory='much' is no number"):
        Settings(activation_memory="much")
    with pytest.raises(CommandError, match=r"--remat=dots and .* choose one"):
        Settings(activation_memory="1MiB", remat="dots")
