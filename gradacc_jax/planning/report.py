"""What a plan says: its choice, what else was tried and why it lost."""

from collections.abc import Callable
import dataclasses
import json
import textwrap
from typing import Any

import optax

from gradacc_jax.planning.compile import MemoryEstimate
from gradacc_jax.planning.sizes import bytes_text, flops_text, seconds_text

_WIDTH = 88
ONE_CALL, ACROSS_CALLS = "one call", "across calls"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to make the step that was considered.

    Attributes:
      microbatch_size: examples of a micro-batch, on one device.
      num_microbatches: micro-batches of an optimizer step.
      policy: what the forward pass keeps.
      form: "one call" that splits the global batch, or a call for each micro-batch,
        "across calls".
      seconds: of an optimizer step, predicted: a lower bound that ranks candidates.
      flops: of an optimizer step's products and convolutions, on one device.
      memory: the compiled program's; None where no program was compiled.
      verdict: "chosen", or why it was not.
      options: the compiler's options that its program was compiled with.
    """

    microbatch_size: int
    num_microbatches: int
    policy: Any
    form: str
    seconds: float
    flops: float
    memory: MemoryEstimate | None
    verdict: str
    options: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """The fastest way that fits, as :func:`gradacc_jax.plan` found it.

    It prints as a table. All bytes and operations are those of one device.

    Attributes:
      microbatch_size: examples of a micro-batch, on one device; where it does not
        divide the batch, those of the largest micro-batch.
      num_microbatches: micro-batches of an optimizer step.
      policy: what the forward pass keeps for the backward pass.
      peak_bytes: what the compiled program needs at once.
      recompute_flops: operations of a step that its policy computes a second time.
      candidates: all that were considered, the chosen one first.
      global_batch_size: examples of an optimizer step.
      num_devices: how many share them.
      form: "one call" or "across calls", as for :class:`Candidate`.
      chip: the chip's name.
      budget_bytes: the memory that was planned with.
      margin: the part of it that is left free.
      seconds: of an optimizer step, as predicted.
      compiles: how many programs were compiled.
      notes: what to know besides.
      train_step: the step, compiled already where the chip is this machine's.
      tx: the optimizer for it, whose ``init`` makes its state.
    """

    microbatch_size: int
    num_microbatches: int
    policy: Any
    peak_bytes: int
    recompute_flops: float
    candidates: tuple[Candidate, ...]
    global_batch_size: int
    num_devices: int
    form: str
    chip: str
    budget_bytes: int
    margin: float
    seconds: float
    compiles: int
    notes: tuple[str, ...] = ()
    train_step: Callable[..., Any] = dataclasses.field(
        default=lambda *_: None, repr=False, compare=False
    )
    tx: optax.GradientTransformation | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    @property
    def limit_bytes(self) -> int:
        """The bytes that a program may need, the budget without its margin."""
        return int(self.budget_bytes * (1 - self.margin))

    def __str__(self) -> str:
        devices = "" if self.num_devices == 1 else f" x {self.num_devices} devices"
        chosen = (
            f"micro-batch {self.microbatch_size} x {self.num_microbatches}{devices}"
            f" = {self.global_batch_size}, policy {self.policy}, {self.form}"
        )
        lines = [
            f"plan for {self.chip}: {chosen}",
            f"  peak {bytes_text(self.peak_bytes)} of {bytes_text(self.budget_bytes)}, "
            f"{self.margin:.0%} of which stay free; computed again: "
            f"{flops_text(self.recompute_flops)} a step; "
            f"{self.compiles} programs compiled",
            "",
        ]
        rows = [_TITLES, *map(self._row, self.candidates)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        for row in rows:
            cells = [
                cell.ljust(w) if i in (2, 3, 9) else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths))
            ]
            lines.append(("  " + "  ".join(cells)).rstrip())
        for note in self.notes:
            lines += textwrap.wrap(
                note, _WIDTH, initial_indent="note: ", subsequent_indent="  "
            )
        return "\n".join(lines)

    def _row(self, c: Candidate) -> tuple[str, ...]:
        memory = ("-",) * 4
        if c.memory is not None:
            temporaries = c.memory.temporaries + c.memory.workspace
            left = self.limit_bytes - c.memory.peak
            sizes = (c.memory.arguments, temporaries, c.memory.peak, left)
            memory = tuple(map(bytes_text, sizes))  # type: ignore[assignment]
        return (
            str(c.microbatch_size),
            str(c.num_microbatches),
            str(c.policy),
            c.form,
            *memory,
            seconds_text(c.seconds),
            c.verdict,
        )

    def to_json(self) -> str:
        """The plan as JSON, with all that is in the table."""

        def plain(x: Any) -> Any:
            if isinstance(x, MemoryEstimate | Candidate):
                return {f.name: plain(getattr(x, f.name)) for f in _fields(x)}
            if isinstance(x, tuple):
                return [plain(item) for item in x]
            return x if isinstance(x, int | float | str | None) else str(x)

        left_out = ("train_step", "tx")
        names = [f.name for f in _fields(self) if f.name not in left_out]
        return json.dumps({n: plain(getattr(self, n)) for n in names}, indent=2)

    def plot(self) -> Any:
        """Draws the memory of what was compiled, beside the budget.

        Returns:
          A ``matplotlib.figure.Figure``; matplotlib is imported here.
        """
        from matplotlib.figure import Figure

        rows = [c for c in self.candidates if c.memory is not None]
        rows.sort(key=lambda c: (str(c.policy), c.form, c.microbatch_size))
        figure = Figure(figsize=(8, 1.2 + 0.35 * len(rows)), layout="constrained")
        axes = figure.subplots()
        start = [0.0] * len(rows)
        parts = (
            ("arguments", "tab:gray", lambda m: m.arguments + m.outputs - m.aliased),
            ("temporaries", "tab:blue", lambda m: m.temporaries + m.workspace),
        )
        for name, color, part in parts:
            sizes = [part(c.memory) / 2**30 for c in rows]
            axes.barh(range(len(rows)), sizes, left=start, color=color, label=name)
            start = [a + b for a, b in zip(start, sizes)]
        for y, (c, x) in enumerate(zip(rows, start)):
            mark = " chosen" if c.verdict == "chosen" else ""
            axes.text(x, y, f" {seconds_text(c.seconds)}{mark}", va="center")
        axes.axvline(
            self.limit_bytes / 2**30, color="tab:red", label="budget less margin"
        )
        labels = [
            f"{c.policy}, {c.microbatch_size} x {c.num_microbatches}"
            + (", across calls" if c.form == ACROSS_CALLS else "")
            for c in rows
        ]
        axes.set_yticks(range(len(rows)), labels)
        axes.set_xlim(0, 1.25 * max(*start, self.limit_bytes / 2**30))
        axes.set_xlabel(f"GiB on one {self.chip}; predicted time of a step")
        axes.legend(frameon=False, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
        return figure


_TITLES = (
    "micro-batch",
    "k",
    "policy",
    "form",
    "arguments",
    "temporaries",
    "peak",
    "left",
    "step >=",
    "",
)


def _fields(x: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(x)
