"""The output folder of a run: its configuration, its metrics and its checkpoints.

    config.json      what was run: every setting, the text's digest, the software
    metrics.jsonl    one line for each optimizer step
    checkpoints/     Orbax, one folder for each, named by the number of sequences
                     trained on: parameters, the optimizer's state with its open
                     window, and the settings
    loss.png         the curve

A run can be killed at any moment. So files are replaced, never rewritten in place,
Orbax shows a checkpoint only when it is complete, and what `metrics.jsonl` holds beyond
the checkpoint is dropped on resuming.

Of several processes the first writes, and all of them together write a checkpoint, each
its devices' part of every array, into the one folder that all of them see.
"""

from collections.abc import Callable
import dataclasses
import json
import math
import os
from pathlib import Path
import platform
from typing import Any

import flax
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

import gradacc_jax
from gradacc_jax.cli.settings import CommandError, Settings, first_line
from gradacc_jax.cli.text import Corpus

CONFIG, METRICS, CHECKPOINTS, PLOT = (
    "config.json",
    "metrics.jsonl",
    "checkpoints",
    "loss.png",
)
KEPT_CHECKPOINTS = 2

PyTree = Any
Record = dict[str, Any]


def check_free(folder: Path) -> None:
    """Refuses to write over a run.

    Raises:
        CommandError: the folder holds one, or files of the same names.
    """
    taken = [n for n in (CONFIG, METRICS, CHECKPOINTS, PLOT) if (folder / n).exists()]
    if taken:
        raise CommandError(
            f"--out={folder} already holds {', '.join(taken)}; add --resume to go on "
            "with that run, or choose another folder"
        )


def make(folder: Path) -> None:
    """Makes the folder of a run.

    Raises:
        CommandError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CommandError(
            f"--out={folder} cannot be written: {error.strerror}; choose another folder"
        ) from error


def describe(settings: Settings, corpus: Corpus) -> Record:
    """What `config.json` holds."""
    return {
        "settings": dataclasses.asdict(settings),
        "text": {
            "files": corpus.num_files,
            "bytes": corpus.num_bytes,
            "sha256": corpus.sha256,
        },
        "software": {
            "gradacc_jax": gradacc_jax.__version__,
            "jax": jax.__version__,
            "flax": flax.__version__,
            "optax": optax.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "device": jax.devices()[0].device_kind,
        },
    }


def write_config(folder: Path, config: Record) -> None:
    """Writes `config.json`, which makes the folder the folder of a run."""
    _replace(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def read_config(folder: Path) -> Record:
    """Reads the `config.json` of a run that is to go on.

    Raises:
        CommandError: there is no run, or its configuration cannot be understood.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
        config["settings"] = _settings(config["settings"])
        return {name: config[name] for name in ("settings", "text", "software")}
    except FileNotFoundError as error:
        raise CommandError(
            f"--resume found no {CONFIG} in --out={folder}; name the folder of a run, "
            "or leave --resume out to begin one"
        ) from error
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"{path} is not what this version of gradacc writes: {error!r}"
        ) from error


def check_same(where: Path, stored: Settings, wanted: Settings) -> None:
    """Refuses to go on with a run as if it had been another.

    The text may have moved (its digest is compared elsewhere), checkpoints may become
    rarer, more or less may be rematerialised, the global batch cut otherwise and spread
    over other devices (which changes roundings at most), and the number of steps may
    change where no learning rate depends on it.

    Raises:
        CommandError: naming every setting that differs, with both values.
    """
    free = {"text", "checkpoint_every", "remat", "activation_memory"}
    free |= {"micro_batch", "num_microbatches", "devices", "model_parallel"}
    free |= {"steps"} if stored.schedule == "constant" else set()
    names = [
        field.name
        for field in dataclasses.fields(Settings)
        if field.name not in free
        and getattr(stored, field.name) != getattr(wanted, field.name)
    ]
    if names:
        was, asked = (
            ", ".join(f"{name}={getattr(settings, name)}" for name in names)
            for settings in (stored, wanted)
        )
        raise CommandError(
            f"{where} was made with {was}, not with {asked}; leave these options out "
            "to go on with it, or train into another --out"
        )


def check_text(folder: Path, stored: Record, config: Record) -> None:
    """Refuses other text; says so if other software is going on with the run.

    Raises:
        CommandError: the text is not what the run began with.
    """
    was, now = stored["text"], config["text"]
    if was["sha256"] != now["sha256"]:
        raise CommandError(
            f"{folder} was made with text of {was['files']} files and {was['bytes']} "
            f"bytes that is no longer the same (now {now['files']} files and "
            f"{now['bytes']} bytes); bring it back, or train into another --out"
        )
    changed = [
        f"{name} {stored['software'].get(name)} is now {version}"
        for name, version in config["software"].items()
        if stored["software"].get(name) != version
    ]
    if changed:
        print(
            f"note: {', '.join(changed)}; the rest of the run need not be bitwise what "
            "it would have been"
        )


class Checkpoints:
    """The checkpoints of a run; a context manager that ends when all are written."""

    def __init__(self, folder: Path, settings: Settings):
        self._path = (folder / CHECKPOINTS).absolute()
        self._settings = settings
        self._manager = ocp.CheckpointManager(
            self._path,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=KEPT_CHECKPOINTS,
                cleanup_tmp_directories=True,  # what a kill left half written
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()  # Waits for what is being written.

    def save(self, micro_step: int, params: PyTree, state: PyTree) -> None:
        """Writes a checkpoint, in the background; nothing if there is one."""
        sequences = micro_step * self._settings.sequences_in_micro_step
        if sequences == self._manager.latest_step():
            return
        arrays = {"params": params, "state": state}
        if jax.process_count() == 1:
            # A copy: the next micro-step is given these arrays' memory, and would write
            # to it what Orbax is still writing to the disk.
            arrays = jax.tree.map(np.array, arrays)
        self._manager.save(
            sequences,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardSave(arrays),
                settings=ocp.args.JsonSave(dataclasses.asdict(self._settings)),
            ),
        )
        if jax.process_count() > 1:  # Of these arrays there was no copy.
            self._manager.wait_until_finished()

    def restore(
        self, like: Callable[[Settings], PyTree]
    ) -> tuple[int, Settings, PyTree, PyTree] | None:
        """Reads the newest complete checkpoint.

        Args:
            like: from the settings that it was made with to shapes of
                `(params, state)`, with shardings.

        Returns:
            How many sequences were trained on, the settings, parameters and state; None
            where no checkpoint is complete yet.

        Raises:
            CommandError: the checkpoint is of another model, or cannot be read.
        """
        sequences = self._manager.latest_step()
        if sequences is None:
            return None
        where = self._path / str(sequences)
        try:
            item = ocp.args.Composite(settings=ocp.args.JsonRestore())
            stored = _settings(self._manager.restore(sequences, args=item)["settings"])
        except Exception as error:
            raise CommandError(
                f"{where} cannot be read: {first_line(error)}"
            ) from error
        check_same(where, stored, self._settings)
        try:
            arrays = dict(zip(("params", "state"), like(stored)))
            item = ocp.args.Composite(arrays=ocp.args.StandardRestore(arrays))
            arrays = self._manager.restore(sequences, args=item)["arrays"]
        except Exception as error:
            raise CommandError(
                f"{where} cannot be read: {first_line(error)}"
            ) from error
        return sequences, stored, arrays["params"], arrays["state"]


class Metrics:
    """Appends to `metrics.jsonl`, step by step; a context manager."""

    def __init__(self, folder: Path | None, steps: int):
        """Opens the file with its first `steps` lines; later ones are dropped.

        Without a folder, where another process writes, all goes nowhere.
        """
        path = Path(os.devnull) if folder is None else folder / METRICS
        if folder is not None:
            kept = read_metrics(folder)[:steps] if path.exists() else []
            _replace(path, "".join(map(_line, kept)))
        self._file = path.open("a")

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, record: Record) -> None:
        """Adds a line, which outlives the process from here on."""
        self._file.write(_line(record))
        self._file.flush()


def read_metrics(folder: Path) -> list[Record]:
    """Reads all complete lines of `metrics.jsonl`."""
    records = []
    for line in (folder / METRICS).read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # Torn by a kill; nothing follows it.
            break
        records.append({n: math.nan if v is None else v for n, v in record.items()})
    return records


def _settings(fields: Record) -> Settings:
    return Settings(**fields | {"text": tuple(fields["text"])})  # JSON has no tuples.


def _line(record: Record) -> str:
    # JSON knows no nan and no infinity.
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite) + "\n"


def _replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    os.replace(part, path)
