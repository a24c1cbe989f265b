"""What a run shows: its progress, what accumulation saves, and the curve."""

import math
import os
from pathlib import Path
import time
from typing import Any

import jax
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from gradacc_jax import RematReport
from gradacc_jax.cli.settings import Settings
from gradacc_jax.cli.text import Corpus

PyTree = Any
Record = dict[str, Any]

MIB = 2**20
PLAIN_LINES = 24  # in a whole run, where there is no terminal to draw a bar in


class Reporter:
    """Progress: a bar in a terminal; elsewhere a line now and then.

    A context manager. In the terminal, two lines are drawn again and again::

        step 118/240 ━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━ 0:00:21
        loss 2.713 · 15,021 tokens/s · weight 2,048 · skipped 0 · micro-step 3/4
    """

    def __init__(self, settings: Settings, micro_step: int):
        self._settings = settings
        self._done = micro_step
        self._mark = (time.perf_counter(), micro_step)
        self._window = ""
        self._line = "compiled; the first step is under way"
        self._every = max(1, settings.steps // PLAIN_LINES)
        self._console = Console(highlight=False)
        self._bar = Progress(
            TextColumn("step {task.fields[step]}/{task.fields[steps]}"),
            BarColumn(bar_width=None),
            TimeRemainingColumn(),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task(
            "",
            total=settings.micro_steps,
            completed=micro_step,
            step=micro_step // settings.num_microbatches,
            steps=settings.steps,
        )
        self._live = Live(get_renderable=self._render, console=self._console)

    def _render(self) -> Group:
        return Group(self._bar, Text(f"{self._line}{self._window}"))

    def __enter__(self) -> "Reporter":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def tokens_per_second(self) -> float:
        """Bytes trained on, over the time since this was last asked."""
        now, done = time.perf_counter(), self._done
        (since, before), self._mark = self._mark, (now, done)
        sequences = self._settings.sequences_in_micro_step
        per_micro_step = sequences * self._settings.seq_len
        return (done - before) * per_micro_step / (now - since)

    def micro_step(self, micro_step: int) -> None:
        """Shows that this many micro-steps were made."""
        self._done = micro_step
        k = self._settings.num_microbatches
        self._window = f" · micro-step {micro_step % k or k}/{k}"
        self._bar.update(self._task, completed=micro_step, step=micro_step // k)

    def step(self, record: Record) -> None:
        """Shows an optimizer step."""
        self._line = (
            f"loss {record['loss']:.3f} · {record['tokens_per_second']:,.0f} tokens/s"
            f" · weight {record['weight']:,.0f} · skipped {record['skipped']}"
        )
        step, steps = record["step"], self._settings.steps
        if self._console.is_terminal:
            return
        if step == 1 or step % self._every == 0 or step == steps:
            print(f"step {step:>{len(str(steps))}}/{steps} · {self._line}", flush=True)


def introduction(settings: Settings, corpus: Corpus, params: PyTree) -> str:
    """What is trained on what."""
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    return (
        f"text: {corpus.num_files:,} files, {corpus.num_bytes:,} bytes, of which "
        f"{len(corpus.held_out.data):,} are held out\n"
        f"model: {size:,} parameters in {settings.num_layers} layers, "
        f"{'bfloat16' if settings.bf16 else 'float32'}, {settings.optimizer}\n"
        f"{_devices(settings)}\n"
        f"step: {settings.global_batch} sequences of {settings.seq_len} bytes in "
        f"{settings.num_microbatches} micro-batches of {settings.micro_batch}"
        f"{_on_each(settings)}"
    )


def _devices(settings: Settings) -> str:
    """Which devices train, and what is on each."""
    kind, processes = jax.devices()[0].device_kind, jax.process_count()
    said = f"devices: {settings.devices} ({kind})"
    if processes > 1:
        said += f" of {processes} processes"
    if settings.devices == 1:
        return said
    said += f", data={settings.data_parallel}"
    if settings.model_parallel > 1:
        said += f" x model={settings.model_parallel}; layers shared over model"
    spread = settings.sharding == "fsdp"
    return said + (
        "; parameters and optimizer state spread over data"
        if spread
        else "; gradients summed over data once a step"
    )


def _on_each(settings: Settings) -> str:
    """Where micro-batches are, if not in one place."""
    groups, size = settings.data_parallel, settings.model_parallel
    if settings.devices == 1:
        return ""
    if size == 1:
        return f" on each of {groups} devices"
    return f" on each of {groups} groups of {size} devices"


def savings(
    settings: Settings,
    step: jax.stages.Compiled,
    full_step: jax.stages.Compiled | None,
    params: PyTree,
) -> str:
    """What the compiler says that the two programs need beside their arguments."""
    if full_step is None:
        return "temporaries: the full batch in one pass does not fit on this device"
    ours, theirs = step.memory_analysis(), full_step.memory_analysis()
    if ours is None or theirs is None:
        return "temporaries: this backend does not tell"
    small, large = ours.temp_size_in_bytes, theirs.temp_size_in_bytes
    # As large as a device's part of the parameters, all of which are float32.
    sums = sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(params)
    )
    times = large / max(small, 1)
    what = "a step in micro-batches" if settings.in_step else "a micro-step"
    where = "among these" if settings.in_step else "between micro-steps"
    on_each = " (on each device)" if settings.devices > 1 else ""
    return (
        f"temporaries: {large / MIB:,.1f} MiB for the full batch in one pass, "
        f"{small / MIB:,.1f} MiB for {what} ({times:.1f} x less)"
        f"{on_each}\n"
        f"accumulator: {sums / MIB:,.1f} MiB, the sum of gradients {where}"
    )


def rematerialisation(chosen: str, steps: dict[str, jax.stages.Compiled]) -> str:
    """What each way to rematerialise leaves of a step's temporaries."""
    bytes_of = {}
    for name, step in steps.items():
        memory = step.memory_analysis()
        if memory is None:
            return "remat: this backend does not tell what it saves"
        bytes_of[name] = memory.temp_size_in_bytes
    everything = bytes_of["none"]
    parts = [
        f"{name} {size / MIB:,.1f} MiB"
        for name, size in sorted(bytes_of.items(), key=lambda item: -item[1])
    ]
    said = f"remat: temporaries with {', '.join(parts)}; chosen: {chosen}"
    if bytes_of[chosen] >= everything:
        said += (
            f"\n  {chosen} saves nothing in this program: the compiler undoes it, or "
            "one layer, computed again, needs as much as all of them keep"
        )
    return said


def activation_memory(report: RematReport) -> str:
    """What was chosen for a budget of temporaries."""
    before = "too many to compile"
    if report.plain_temp_bytes is not None:
        before = f"{report.plain_temp_bytes / MIB:,.1f} MiB"
    return (
        f"activation memory: temporaries {report.temp_bytes / MIB:,.1f} MiB of "
        f"{report.max_temp_bytes / MIB:,.1f} MiB, instead of {before}, for "
        f"{report.flops / report.plain_flops - 1:.1%} more operations"
    )


def position(settings: Settings, micro_step: int) -> str:
    """Where a run is, in words."""
    step, within = divmod(micro_step, settings.num_microbatches)
    return (
        f"micro-step {micro_step} of {settings.micro_steps} (step {step} of "
        f"{settings.steps} and {within} of {settings.num_microbatches} micro-batches)"
    )


def conclusion(folder: Path, records: list[Record], held_out: float | None) -> str:
    """What came of it, and where it is."""
    first, last = (records[i]["loss"] for i in (0, -1))
    unseen = "" if held_out is None else f"; {held_out:.3f} on held-out text"
    return (
        f"loss: {first:.3f} to {last:.3f} nats per byte in {len(records)} steps{unseen}"
        f"\nwritten: {', '.join(sorted(str(path) for path in folder.iterdir()))}"
    )


def plot(path: Path, records: list[Record], held_out_loss: float | None = None) -> None:
    """Draws the loss, and below it the gradient norm, over optimizer steps."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    loss, norm = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = [record["step"] for record in records]
    # A run that was stopped early may have made a single step.
    style = {"linewidth": 1.2, "marker": "o" if len(records) < 3 else None}
    losses = [record["loss"] for record in records]
    loss.plot(steps, losses, color="tab:blue", label="training", **style)
    if held_out_loss is not None and steps:
        loss.plot(
            steps[-1], held_out_loss, "o", color="tab:orange", label="held-out text"
        )
    if records:
        loss.legend(frameon=False)
    loss.set_ylabel("loss (nats per byte)")
    norms = [record["grad_norm"] for record in records]
    norm.plot(steps, norms, color="tab:gray", **style)
    norm.set_ylabel("gradient norm")
    norm.set_xlabel("optimizer step")
    norm.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss, norm):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, format="png", dpi=150)
    os.replace(part, path)
