"""What the backward pass keeps, told before anything runs.

``jax.vjp`` is traced on shapes alone, and the leaves of the function that it returns
are the residuals: their shapes and bytes are JAX's own. Where each one comes from is
read off the traced forward pass (``origins.py``). Nothing is computed, and nothing is
allocated on a device.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import inspect
import math
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

from gradacc_jax.checkpointing import policies
from gradacc_jax.checkpointing.origins import (
    Value,
    bodies_of,
    source_of,
    values_of,
    without_constants,
)
from gradacc_jax.checkpointing.sizes import size_text as _size

PyTree = Any

_REGIONS = {"checkpoint", "remat", "remat2"}
_KINDS = ("computed", "random", "copy", "constant", "argument")


@dataclasses.dataclass(frozen=True)
class Residual:
    """One array that the forward pass keeps for the backward pass.

    Attributes:
      nbytes: its size.
      shape: its shape; in a loop, with an axis for the loop.
      dtype: its dtype.
      kind: "computed"; "random" for masks and random bits, which depend on a key only;
        "copy" for an argument in another dtype or form, or stacked by a loop;
        "constant"; "argument" for an argument itself, which is alive anyway.
      origin: the operation that made it, the name it was given, or the argument.
      source: the line of the user's that did, ``file:line (function)``, or "".
      loops: how often a loop made it; 1 outside of loops.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    kind: str
    origin: str
    source: str
    loops: int = 1


@dataclasses.dataclass(frozen=True)
class ResidualReport:
    """What :func:`residual_report` found; prints as a table.

    Attributes:
      name: the function's name.
      residuals: the residuals, the largest first; arguments are among them.
      recomputed_bytes: what the largest rematerialised region holds besides, while it
        is computed again.
      num_regions: how many rematerialised regions there are; in a loop, each turn's.
    """

    name: str
    residuals: tuple[Residual, ...]
    recomputed_bytes: int
    num_regions: int

    @property
    def total_bytes(self) -> int:
        """The bytes that are kept, without arguments, which are alive anyway."""
        return sum(r.nbytes for r in self.residuals if r.kind != "argument")

    @property
    def argument_bytes(self) -> int:
        """The bytes of the arguments that the backward pass reads."""
        return sum(r.nbytes for r in self.residuals if r.kind == "argument")

    def __str__(self) -> str:
        lines = [f"residuals of {self.name}: {_size(self.total_bytes)}"]
        rows = _grouped(self)
        shown = rows[:_ROWS]
        cells = [
            (
                _size(nbytes),
                f"{count} x" if count > 1 else "",
                row.dtype + str(list(row.shape)).replace(" ", ""),
                row.kind,
                row.origin + (f", loop of {row.loops}" if row.loops > 1 else ""),
                row.source,
            )
            for row, count, nbytes in shown
        ]
        if cells:
            lines += _table(("bytes", "", "shape", "kind", "origin", "source"), cells)
        if rest := rows[_ROWS:]:
            nbytes = sum(row[2] for row in rest)
            lines.append(f"and {len(rest)} more rows, {_size(nbytes)}")
        if count := sum(r.kind == "argument" for r in self.residuals):
            plural = "s are" if count > 1 else " is"
            lines.append(
                f"{count} argument{plural} read as well ({_size(self.argument_bytes)}, "
                "alive anyway)"
            )
        if self.num_regions:
            lines.append(
                f"{_size(self.recomputed_bytes)} more while the largest of "
                f"{self.num_regions} rematerialised region(s) is computed again"
            )
        if self.num_regions == 1 and self.recomputed_bytes > self.total_bytes:
            lines.append(
                "One region holds it all again at once, so by itself it saves nothing; "
                "it does where it is one of several blocks. Wrap blocks, not the loss"
            )
        return "\n".join(line.rstrip() for line in lines)

    def compare(self, other: "ResidualReport") -> str:
        """A table of this report, as "before", and of another, as "after"."""
        rows = [
            (label, _size(a) if a else "-", _size(b) if b else "-")
            for label, a, b in _side_by_side(self, other)
        ]
        ends = [
            ("kept", self.total_bytes, other.total_bytes),
            ("computed again", self.recomputed_bytes, other.recomputed_bytes),
        ]
        rows += [(label, _size(a), _size(b)) for label, a, b in ends]
        return "\n".join(_table(("residual", "before", "after"), rows))

    def plot(self, other: "ResidualReport | None" = None) -> Any:
        """A bar for each row of the table, and one for what is computed again.

        Args:
          other: a second report, "after", whose bars stand beside these.

        Returns:
          The matplotlib figure.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError(
                "plots need matplotlib: pip install matplotlib"
            ) from error

        rows = _side_by_side(self, other or self)
        if (other or self).num_regions or self.num_regions:
            again = (other or self).recomputed_bytes
            rows.append(("computed again", self.recomputed_bytes, again))
        figure, ax = plt.subplots(figsize=(8, 1.2 + 0.35 * len(rows)), layout="tight")
        places = [float(i) for i in range(len(rows))]
        series = [("before", -0.2, [row[1] for row in rows], "0.6")]
        if other is None:
            series = [("", 0.0, [row[1] for row in rows], "C0")]
        else:
            series.append(("after", 0.2, [row[2] for row in rows], "C0"))
        for label, shift, values, color in series:
            ax.barh(
                [place + shift for place in places],
                [value / 2**20 for value in values],
                height=0.4 if other else 0.7,
                color=color,
                label=label or None,
            )
        ax.set_yticks(places, [row[0] for row in rows])
        ax.invert_yaxis()
        ax.set_xlabel("MiB kept for the backward pass")
        ax.set_title(f"{self.name}: {_size(self.total_bytes)}")
        if other is not None:
            ax.set_title(
                f"{self.name}: {_size(self.total_bytes)} before, "
                f"{_size(other.total_bytes)} after"
            )
            ax.legend()
        ax.spines[["top", "right"]].set_visible(False)
        return figure


def residual_report(
    fun: Callable[..., PyTree],
    *args: PyTree,
    argnums: int | Sequence[int] = 0,
    policy: Any = "none",
) -> ResidualReport:
    """What the backward pass of ``fun`` keeps: bytes, shapes, and where they come from.

    Args:
      fun: a function of arrays, a loss or a block of a model. What is no array is bound
        beforehand, by ``functools.partial`` or a lambda.
      *args: its arguments, pytrees of arrays or of ``jax.ShapeDtypeStruct``. Nothing is
        computed with them.
      argnums: with respect to which of them ``fun`` is differentiated, as for
        ``jax.grad``.
      policy: a policy under which ``fun`` as a whole is rematerialised first. To
        compare what your own use of :func:`remat` keeps, report on both functions.

    Returns:
      A :class:`ResidualReport`: ``print`` it, ``.plot()`` it, or compare two of them by
      ``before.compare(after)`` and ``before.plot(after)``. Its ``total_bytes`` are what
      JAX hands from the forward to the backward pass. XLA may do with less (what is
      cheap it computes twice), and an argument costs nothing.

    Raises:
      ValueError: for ``argnums`` that name no argument, and for unknown policies.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from gradacc_jax import residual_report
      >>> def block(w, x):
      ...     return jnp.tanh(x @ w.astype(jnp.bfloat16))
      >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
      >>> x = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)
      >>> report = residual_report(block, w, x, argnums=(0, 1))
      >>> for row in report.residuals:
      ...     if row.kind != "computed":
      ...         print(row.nbytes, row.dtype, row.shape, row.kind, row.origin)
      8192 bfloat16 (64, 64) copy w, by convert_element_type
      1024 bfloat16 (8, 64) argument x
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise ValueError(
                f"argnums={argnums} names argument {number}, and there are {len(args)} "
                "arguments; pass them by position"
            )
    numbers = tuple(number % len(args) for number in numbers)
    inner = fun.func if isinstance(fun, functools.partial) else fun
    name = getattr(inner, "__name__", type(inner).__name__)
    names = _argument_names(fun, args)
    policy = policies.resolve(policy)
    if policy != policies.none:
        fun = jax.checkpoint(fun, policy=policy)
    again, num_regions = _computed_again(fun, *args)
    return ResidualReport(
        name, tuple(_residuals(fun, args, numbers, names)), again, num_regions
    )


def kept_bytes(
    fun: Callable[..., PyTree], *args: PyTree, counted: Sequence[int] = ()
) -> int:
    """The residuals of ``fun`` with respect to all arguments.

    Args:
      fun: a function of arrays.
      *args: its arguments.
      counted: the arguments that count too, if the backward pass reads them.
    """
    names = [str(i) for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    found = _residuals(fun, args, tuple(range(len(args))), names)
    count = {str(i) for i in counted}
    return sum(r.nbytes for r in found if r.kind != "argument" or r.origin in count)


# --- residuals ------------------------------------------------------------------------


def _residuals(
    fun: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    argnums: tuple[int, ...],
    names: list[str],
) -> list[Residual]:
    """The residuals of ``fun``, each once, the largest first."""
    leaves, treedef = jax.tree.flatten(args)
    tree: Any = treedef

    def forward(*leaves: Any) -> list[Any]:
        given = list(tree.unflatten(leaves))

        def of(*wrt: PyTree) -> PyTree:
            for number, x in zip(argnums, wrt, strict=True):
                given[number] = x
            return fun(*given)

        _, backward = jax.vjp(of, *(given[number] for number in argnums))
        return jax.tree.leaves(backward)

    jaxpr = without_constants(jax.make_jaxpr(forward)(*leaves))
    values = values_of(jaxpr, names)
    differentiable = {
        i
        for i, v in enumerate(jaxpr.invars)
        if jnp.issubdtype(v.aval.dtype, jnp.inexact)
    }
    found = {
        value.number: _row(value, var.aval, names, differentiable)
        for var, value in zip(jaxpr.outvars, values, strict=True)
        if not isinstance(var, core.Literal)
    }
    return sorted(found.values(), key=lambda row: (-row.nbytes, _KINDS.index(row.kind)))


def _row(
    value: Value, aval: Any, names: list[str], differentiable: set[int]
) -> Residual:
    origin = value.origin
    if value.number < 0:
        kind = "argument"
    elif value.form_of is not None:
        kind = "copy"
        how = "stacked" if origin == names[value.form_of] else f"by {origin}"
        origin = f"{names[value.form_of]}, {how}"
    elif value.random and not value.args & differentiable:
        kind = "random"
    elif not value.args:
        kind = "constant"
    else:
        kind = "computed"
    return Residual(
        nbytes=math.prod(aval.shape) * aval.dtype.itemsize,
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        kind=kind,
        origin=origin,
        source=source_of(value.sites),
        loops=value.loops,
    )


# --- regions that are computed again --------------------------------------------------


def _computed_again(fun: Callable[..., PyTree], *args: PyTree) -> tuple[int, int]:
    """What the largest region holds besides what is kept, and how many there are."""
    found = list(_regions(without_constants(jax.make_jaxpr(fun)(*args)), 1))
    largest = max((_held(eqn) for eqn, _ in found), default=0)
    return largest, sum(times for _, times in found)


def _regions(jaxpr: Any, times: int) -> Iterator[tuple[Any, int]]:
    """The rematerialised operations, each with how often it runs."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _REGIONS:
            yield eqn, times
        elif name != "shard_map":  # whose body means nothing outside of it
            turns = times * (eqn.params.get("length", 1) if name == "scan" else 1)
            for inner in bodies_of(eqn):
                yield from _regions(inner, turns)


def _held(eqn: Any) -> int:
    """What a region keeps when it is computed again, and did not keep before."""
    jaxpr, policy = eqn.params["jaxpr"], eqn.params["policy"]
    closed: Any = jaxpr
    if not hasattr(jaxpr, "consts"):  # older JAX has two classes
        older_core: Any = core
        closed = older_core.ClosedJaxpr(jaxpr, ())
    body = core.jaxpr_as_fun(closed)
    shapes = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
        for v in without_constants(jaxpr).invars
    ]
    again, _ = _computed_again(body, *shapes)
    kept = kept_bytes(jax.checkpoint(body, policy=policy), *shapes)
    return kept_bytes(body, *shapes) + again - kept


def _argument_names(fun: Callable[..., PyTree], args: tuple[PyTree, ...]) -> list[str]:
    """A name for each leaf, such as ``params['w']``."""
    named: list[str] = []
    with contextlib.suppress(TypeError, ValueError):
        named = list(inspect.signature(fun).bind(*args).arguments)
        kinds = [p.kind for p in inspect.signature(fun).parameters.values()]
        named = named if inspect.Parameter.VAR_POSITIONAL not in kinds else []
    return [
        (named[i] if i < len(named) else f"args[{i}]") + jax.tree_util.keystr(path)
        for i, arg in enumerate(args)
        for path, _ in jax.tree_util.tree_leaves_with_path(arg)
    ]


# --- tables ---------------------------------------------------------------------------

_ROWS = 20


def _grouped(report: ResidualReport) -> list[tuple[Residual, int, int]]:
    """Equal rows as one: the row, how many there are, their bytes; the largest first.

    Arguments are left out.
    """
    counts = Counter(r for r in report.residuals if r.kind != "argument")
    rows = [(row, count, count * row.nbytes) for row, count in counts.items()]
    return sorted(rows, key=lambda row: -row[2])


def _side_by_side(
    before: ResidualReport, after: ResidualReport
) -> list[tuple[str, int, int]]:
    """Label, bytes before, bytes after; the largest first, the small ones together."""
    totals: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for report, total in zip((before, after), totals, strict=True):
        for row, _, nbytes in _grouped(report):
            total[f"{row.origin}  {row.source}".strip()] += nbytes
    labels = sorted(totals[0] | totals[1], key=lambda x: -max(t[x] for t in totals))
    rows = [(label, totals[0][label], totals[1][label]) for label in labels]
    if len(rows) > _ROWS:
        small = rows[_ROWS:]
        rest = f"{len(small)} more", sum(r[1] for r in small), sum(r[2] for r in small)
        rows = [*rows[:_ROWS], rest]
    return rows


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        for row in (header, *rows)
    ]
