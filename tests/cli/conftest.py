"""A run small enough to be made again and again, and how to look at what it left."""

import contextlib
import io
import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from gradacc_jax.cli.main import main

# Plain SGD: its programs pass the strict promotion of dtypes that tests run under.
SMALL = (
    *("--seq-len", "16", "--micro-batch", "2", "--num-microbatches", "3"),
    *("--num-layers", "2", "--embed-dim", "8", "--num-heads", "1"),
    *("--steps", "4", "--learning-rate", "0.5", "--checkpoint-every", "2"),
    *("--devices", "1"),
)
# 16 sequences a step, to be spread over devices.
SPREAD = (
    *("--seq-len", "16", "--global-batch", "16"),
    *("--num-layers", "2", "--embed-dim", "8", "--num-heads", "2"),
    *("--steps", "4", "--learning-rate", "0.5", "--checkpoint-every", "2"),
)
SGD = ("--optimizer", "sgd", "--schedule", "constant", "--warmup-steps", "0")


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory):
    """Runs of one kind are the same programs, in this process and in others."""
    folder = str(tmp_path_factory.mktemp("compiled"))
    options = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in options}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> str:
    """Short documents, so that micro-batches have unequal weights."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"{i}.txt").write_text(
            f"{i} little pigs, went to market. " * (i % 3 + 1)
        )
    return str(folder)


@pytest.fixture(scope="session")
def finished_and_said(tmp_path_factory, text) -> tuple[Path, str]:
    """The folder of a verified run that was not stopped, and all that it printed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    options = ["--text", text, "--out", str(folder), *SMALL, *SGD, "--verify"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["train", *options]) == 0
    return folder, said.getvalue()


@pytest.fixture(scope="session")
def begin(text) -> tuple[str, ...]:
    """The command that begins a run on several devices; they and its folder follow."""
    return ("train", "--text", text, *SPREAD, *SGD)


@pytest.fixture(scope="session")
def alone(tmp_path_factory, begin) -> Path:
    """The folder of that run on one device. Not to be written to."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    options = ("--devices", "1", "--micro-batch", "8", "--out", str(folder))
    assert main([*begin, *options]) == 0
    return folder


@pytest.fixture
def finished(finished_and_said) -> Path:
    """The folder of a run that was not stopped. Not to be written to."""
    return finished_and_said[0]


def metrics_of(folder: Path) -> list[dict]:
    """All that a run wrote of its steps, but for how long they took."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        assert record.pop("tokens_per_second") > 0
    return records


def checkpoints_of(folder: Path) -> list[int]:
    """After how many sequences there are checkpoints; a micro-step has two."""
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def arrays_of(folder: Path) -> dict:
    """Parameters and optimizer state of the last checkpoint."""
    path = folder / "checkpoints" / str(checkpoints_of(folder)[-1]) / "arrays"
    # As NumPy arrays: the devices that wrote it may not be here.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(path.absolute()).item_metadata.tree
        as_numpy = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree
        )
        restore = ocp.args.PyTreeRestore(restore_args=as_numpy)
        return checkpointer.restore(path.absolute(), args=restore)


def contents_of(folder: Path) -> dict[str, bytes]:
    """Every file, byte for byte."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def assert_same_run(a: Path, b: Path) -> None:
    """Bitwise the same parameters, state and metrics."""
    assert metrics_of(a) == metrics_of(b)
    assert checkpoints_of(a)[-1] == checkpoints_of(b)[-1]
    ours, theirs = arrays_of(a), arrays_of(b)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert x.dtype == y.dtype
        assert x.tobytes() == y.tobytes()


def assert_same_training(a: Path, b: Path) -> None:
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
