"""What :func:`remat_to_fit` did: as a text, as a table, as a plot."""

from collections import Counter
from collections.abc import Sequence
import dataclasses
from typing import Any

from gradacc_jax.checkpointing.budget.plans import Again, Alone, InLoop, Option, Piece
from gradacc_jax.checkpointing.origins import source_of
from gradacc_jax.checkpointing.sizes import size_text

_ROWS = 24


@dataclasses.dataclass(frozen=True)
class RematSegment:
    """A part of the function, and what becomes of it.

    Attributes:
      source: the user's lines in it, ``file:line (function)``, first and last.
      what: "left alone", "computed again", or what became of a loop.
      saved: what is saved of its inside, each with its shape and what made it.
      saved_bytes: the bytes kept of its inside for the backward pass.
      recomputed_flops: the floating-point operations done a second time.
    """

    source: str
    what: str
    saved: tuple[str, ...]
    saved_bytes: int
    recomputed_flops: float


@dataclasses.dataclass(frozen=True)
class RematPoint:
    """A way to run the function: bytes against operations.

    Attributes:
      temp_bytes: temporaries of the whole program, as predicted.
      flops: of value and gradient.
      compiled_bytes: temporaries of the compiled program; None if it was not compiled.
    """

    temp_bytes: int
    flops: float
    compiled_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class RematReport:
    """What :func:`remat_to_fit` did. ``print`` it, or ``.plot()`` it.

    Attributes:
      name: the function's.
      max_temp_bytes: the budget.
      temp_bytes: temporaries of the compiled program that was chosen.
      predicted_bytes: what was predicted for it before anything was compiled.
      plain_temp_bytes: temporaries of the function as it was given; None if it does
        not compile.
      flops: floating-point operations of value and gradient, counted in the traced
        program.
      plain_flops: those of the function as it was given.
      segments: what becomes of every part of the function.
      frontier: what other numbers of bytes would cost, the fewest bytes first.
      policies: what fixed policies would cost, by their names, applied to the segments
        that suit each best.
      num_compiles: how many programs were compiled for this.
      engine: how recomputation is kept in place.
    """

    name: str
    max_temp_bytes: int
    temp_bytes: int
    predicted_bytes: int
    plain_temp_bytes: int | None
    flops: float
    plain_flops: float
    segments: tuple[RematSegment, ...]
    frontier: tuple[RematPoint, ...]
    policies: dict[str, RematPoint]
    num_compiles: int
    engine: str

    def __str__(self) -> str:
        plain = self.plain_temp_bytes
        before = "does not compile" if plain is None else size_text(plain)
        more = self.flops / self.plain_flops - 1 if self.plain_flops else 0.0
        head = (
            f"{self.name}: {size_text(self.temp_bytes)} of temporaries for "
            f"{size_text(self.max_temp_bytes)} (as it was: {before}), "
            f"{_flops(self.flops)} a gradient ({more:+.1%}), {self.num_compiles} "
            f"program(s) compiled"
        )
        return "\n".join([head, *self.table().splitlines()])

    def table(self) -> str:
        """The segments as a table, equal ones in one row."""
        counts = Counter(self.segments)
        header = ("", "saved", "again", "what", "source")
        rows = [
            (
                f"{count} x" if count > 1 else "",
                size_text(count * s.saved_bytes),
                _flops(count * s.recomputed_flops),
                s.what,
                s.source,
            )
            for s, count in counts.items()
        ]
        rest = len(rows) - _ROWS
        lines = _aligned([header, *rows[:_ROWS]])
        return "\n".join(lines + ([f"and {rest} more rows"] if rest > 0 else []))

    def plot(self) -> Any:
        """The frontier of bytes against operations, with the fixed policies on it.

        Returns:
          The matplotlib figure.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError(
                "plots need matplotlib: pip install matplotlib"
            ) from error

        figure, ax = plt.subplots(figsize=(7, 4.2), layout="tight")
        base = self.plain_flops or 1.0
        line = sorted(self.frontier, key=lambda p: p.temp_bytes)
        ax.plot(
            [p.temp_bytes / 2**20 for p in line],
            [p.flops / base for p in line],
            color="C0",
            drawstyle="steps-post",
            label="remat_to_fit, predicted",
        )
        compiled = [
            (p.compiled_bytes, p.flops) for p in line if p.compiled_bytes is not None
        ]
        ax.plot(
            [nbytes / 2**20 for nbytes, _ in compiled],
            [flops / base for _, flops in compiled],
            "o",
            color="C0",
            label="compiled",
        )
        for i, (name, point) in enumerate(self.policies.items()):
            where = point.temp_bytes / 2**20, point.flops / base
            ax.plot(*where, "s", color=f"C{i + 1}", label=name)
        ax.plot(
            [self.temp_bytes / 2**20],
            [self.flops / base],
            "*",
            color="k",
            markersize=12,
        )
        ax.axvline(self.max_temp_bytes / 2**20, color="0.6", linewidth=1)
        ax.set_xlabel("temporaries, MiB")
        ax.set_ylabel("FLOPs, over keeping everything")
        ax.set_title(self.name)
        ax.legend(frameon=False)
        ax.spines[["top", "right"]].set_visible(False)
        return figure


def segment_of(piece: Piece, option: Option) -> RematSegment:
    """What a report says of a segment and its choice."""
    return RematSegment(
        source=_lines(piece),
        what=_what(option),
        saved=_saved(piece, option),
        saved_bytes=round(option.kept),
        recomputed_flops=option.flops,
    )


def _what(option: Option) -> str:
    match option.way:
        case Alone():
            return "left alone"
        case Again(saved):
            return f"computed again, {len(saved)} saved" if saved else "computed again"
        case InLoop(loop, plan, turns):
            again = sum(not isinstance(o.way, Alone) for o in plan.options)
            what = f"loop of {loop.length * loop.at_once}"
            if loop.at_once > 1:
                what += f", {loop.at_once} turns at a time"
            if turns is not None:
                outer, rest = divmod(loop.length, turns)
                what += f" as {outer} of {turns}" + (
                    f" and one of {rest}" if rest else ""
                )
            return what + (f", {again} segment(s) of its body again" if again else "")
    raise AssertionError(option.way)


def _saved(piece: Piece, option: Option) -> tuple[str, ...]:
    if not isinstance(option.way, Again):
        return ()
    program = piece.program
    found = []
    for v in sorted(option.way.saved):
        operation = program.operations[program.made_at[v]]
        aval = program.avals[v]
        shape = str(list(aval.shape)).replace(" ", "")
        made = f"{aval.dtype}{shape} {operation.name}"
        found.append(f"{made} {source_of(operation.sites)}".rstrip())
    return tuple(found)


def _lines(piece: Piece) -> str:
    operations = piece.program.operations
    first = next(filter(None, (source_of(o.sites) for o in operations)), "")
    last = next(filter(None, (source_of(o.sites) for o in reversed(operations))), "")
    return first if first == last else f"{first} to {last}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        for row in rows
    ]


def _flops(number: float) -> str:
    for unit, power in (("TFLOP", 12), ("GFLOP", 9), ("MFLOP", 6), ("kFLOP", 3)):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {unit}"
    return f"{number:.0f} FLOP"
