"""What the backward pass keeps, told before anything runs.

``jax.vjp`` is traced on shapes alone, and the leaves of the function that it returns
are the residuals: their shapes and bytes are JAX's own. Where each one comes from is
then found by going through the traced forward pass once, from the arguments on: every
value knows the arguments it depends on and the operation that made it, through calls,
loops and conditionals. Nothing is computed, and nothing is allocated on a device.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import os
from pathlib import Path
import sys
from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp

from gradacc_jax.checkpointing import policies

PyTree = Any

# Operations whose jaxprs have the operation's results, one for one, and whose inputs
# are the last of the operation's.
_CALLS = {
    "checkpoint",
    "closed_call",
    "cond",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "eval_jaxpr",
    "jit",
    "pjit",
    "remat",
    "remat2",
    "scan",
    "shard_map",
    "while",
}
_REGIONS = {"checkpoint", "remat", "remat2"}
# The same numbers, or some of them, in another form. What is moved is the first input.
_MOVES = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "copy_p",
    "device_put",
    "dynamic_slice",
    "expand_dims",
    "reduce_precision",
    "reshape",
    "rev",
    "sharding_constraint",
    "slice",
    "squeeze",
    "transpose",
    "unstack",
}
# Say nothing about where a value comes from.
_TRANSPARENT = {"optimization_barrier", "reduce_precision"}
_RANDOM = {
    "random_bits",
    "random_clone",
    "random_fold_in",
    "random_gamma",
    "random_seed",
    "random_split",
    "random_unwrap",
    "random_wrap",
    "rng_bit_generator",
    "rng_uniform",
    "threefry2x32",
}
# Whose lines are not the user's.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "gradacc_jax")
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
        import matplotlib.pyplot as plt

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
      ...     print(row.nbytes, row.dtype, row.shape, row.kind, row.origin)
      8192 bfloat16 (64, 64) copy w, by convert_element_type
      1024 bfloat16 (8, 64) argument x
      1024 bfloat16 (8, 64) computed ...
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


# --- residuals, and the operations that made them -------------------------------------


class _Value(NamedTuple):
    """Where a value of the traced forward pass comes from.

    Attributes:
      number: the same number is the same array; arguments have their own, below 0.
      args: the arguments it depends on, by their place among the leaves.
      form_of: the argument of which it has the very numbers, if any.
      random: whether it depends on random bits.
      origin: what made it.
      sites: the operation that made it, after the calls around it.
      loops: how often it was made and stacked.
    """

    number: int
    args: frozenset[int] = frozenset()
    form_of: int | None = None
    random: bool = False
    origin: str = "constant"
    sites: tuple[Any, ...] = ()
    loops: int = 1


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

    jaxpr = _open(jax.make_jaxpr(forward)(*leaves))
    inputs = [
        _Value(-1 - i, frozenset([i]), i, origin=name) for i, name in enumerate(names)
    ]
    values = _walk(jaxpr, inputs, itertools.count())
    differentiable = {
        i for i, v in enumerate(jaxpr.invars) if jnp.issubdtype(_dtype(v), jnp.inexact)
    }
    found = {
        value.number: _row(value, var.aval, names, differentiable)
        for var, value in zip(jaxpr.outvars, values, strict=True)
        if not isinstance(var, core.Literal)
    }
    return sorted(found.values(), key=lambda row: (-row.nbytes, _KINDS.index(row.kind)))


def _row(
    value: _Value, aval: Any, names: list[str], differentiable: set[int]
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
        source=_source(value.sites),
        loops=value.loops,
    )


def _walk(jaxpr: Any, inputs: Sequence[_Value], numbers: Iterator[int]) -> list[_Value]:
    """The values that a traced function returns, given those of its arguments."""
    values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> _Value:
        if not isinstance(atom, core.Literal) and atom in values:
            return values[atom]
        constant = _Value(next(numbers))
        if not isinstance(atom, core.Literal):
            values[atom] = constant
        return constant

    for eqn in jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        if bodies := _bodies(eqn):
            made = _call(eqn, bodies, given, numbers)
        else:
            made = _operation(eqn, given, numbers)
        values |= zip(eqn.outvars, made, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _operation(eqn: Any, given: list[_Value], numbers: Iterator[int]) -> list[_Value]:
    name = eqn.primitive.name
    if name in _TRANSPARENT:
        # A copy of an argument is not the argument.
        return [
            v._replace(number=next(numbers)) if v.number < 0 else v
            for v in given[: len(eqn.outvars)]
        ]
    label = eqn.params.get("name") if name == "name" else None
    if label is None:  # newer JAX has an object for it
        label = getattr(eqn.params.get("_prim"), "name", None)
    joined = _Value(
        number=0,
        args=frozenset().union(*(v.args for v in given)),
        form_of=given[0].form_of if name in _MOVES else None,
        random=name in _RANDOM or any(v.random for v in given),
        origin=name if label is None else f"named {label!r}",
        sites=(eqn,),
    )
    return [joined._replace(number=next(numbers)) for _ in eqn.outvars]


def _call(
    eqn: Any, bodies: list[Any], given: list[_Value], numbers: Iterator[int]
) -> list[_Value]:
    before = next(numbers)
    results = [_turn(eqn, body, given, numbers) for body in bodies]
    made = []
    for var, inner, *ways in zip(eqn.outvars, bodies[0].outvars, *results, strict=True):
        # Of a conditional, the branch that does something.
        value = next((v for v in ways if v.args), ways[0])
        if len(ways) > 1:
            value = value._replace(
                number=next(numbers), args=frozenset().union(*(v.args for v in ways))
            )
        if value.number > before:  # made in here
            value = value._replace(sites=(eqn, *value.sites))
        if var.aval.ndim > inner.aval.ndim:
            length = var.aval.shape[0]
            value = value._replace(number=next(numbers), loops=length * value.loops)
        made.append(value)
    return made


def _turn(
    eqn: Any, body: Any, given: list[_Value], numbers: Iterator[int]
) -> list[_Value]:
    """What a body returns; of a loop, after as many turns as change anything."""
    inputs = given[len(given) - len(body.invars) :]
    if eqn.primitive.name not in ("scan", "while"):
        return _walk(body, inputs, numbers)
    atoms = eqn.invars[len(given) - len(body.invars) :]
    carried = sum(
        v.aval.ndim == inner.aval.ndim for v, inner in zip(eqn.outvars, body.outvars)
    )
    scanned = sum(
        atom.aval.ndim > inner.aval.ndim for atom, inner in zip(atoms, body.invars)
    )
    first = len(inputs) - scanned - carried
    while True:
        results = _walk(body, inputs, numbers)
        changed = False
        for i, out in enumerate(results[:carried], first):
            old = inputs[i]
            args, random = old.args | out.args, old.random or out.random
            if out.number != old.number and (args, random) != (old.args, old.random):
                inputs[i] = out._replace(args=args, random=random, form_of=None)
                changed = True
            elif out.number != old.number and old.form_of is not None:
                # The argument at first, another value later.
                inputs[i] = out._replace(args=args, random=random, form_of=None)
                changed = True
        if not changed:
            return results


def _bodies(eqn: Any) -> list[Any]:
    """The jaxprs that an operation runs and whose results are its own."""
    name = eqn.primitive.name
    if name not in _CALLS:
        return []
    if name == "while":
        return [_open(eqn.params["body_jaxpr"])]
    return [
        inner
        for inner in map(_open, core.jaxprs_in_params(eqn.params))
        if len(inner.outvars) == len(eqn.outvars)
        and len(inner.invars) <= len(eqn.invars)
    ]


def _open(jaxpr: Any) -> Any:
    """Without its constants. Newer JAX has one class for both."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _dtype(var: Any) -> Any:
    return var.aval.dtype


# --- regions that are computed again --------------------------------------------------


def _computed_again(fun: Callable[..., PyTree], *args: PyTree) -> tuple[int, int]:
    """What the largest region holds besides what is kept, and how many there are."""
    found = Counter(dict(_regions(_open(jax.make_jaxpr(fun)(*args)), 1)))
    return max(map(_held, found), default=0), sum(found.values())


class _Region:
    """A rematerialised region: an operation, known by its identity."""

    def __init__(self, eqn: Any):
        self.eqn = eqn


def _regions(jaxpr: Any, times: int) -> Iterator[tuple[_Region, int]]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _REGIONS:
            yield _Region(eqn), times
        elif name != "shard_map":  # whose body means nothing outside of it
            turns = times * (eqn.params.get("length", 1) if name == "scan" else 1)
            for inner in _bodies(eqn):
                yield from _regions(inner, turns)


def _held(region: _Region) -> int:
    jaxpr, policy = region.eqn.params["jaxpr"], region.eqn.params["policy"]
    closed: Any = jaxpr
    if not hasattr(jaxpr, "consts"):  # older JAX has two classes
        closed = core.ClosedJaxpr(jaxpr, ())  # type: ignore[attr-defined]
    body = core.jaxpr_as_fun(closed)
    shapes = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in _open(jaxpr).invars
    ]
    again, _ = _computed_again(body, *shapes)
    kept = kept_bytes(jax.checkpoint(body, policy=policy), *shapes)
    return kept_bytes(body, *shapes) + again - kept


# --- names and lines of the user's ----------------------------------------------------


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


def _source(sites: tuple[Any, ...]) -> str:
    """The user's line that led to an operation: the innermost in which there is one.

    JAX cuts the lines of an operation at the function that was traced, so a library's
    function that was traced for another caller has none of that caller's in it.
    """
    lines = next(filter(None, map(_user_lines, reversed(sites))), ())
    if not lines:
        return ""
    file, line, function = lines[0]
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        file = str(path.relative_to(Path.cwd()))
    elif path.is_absolute():
        file = str(Path(*path.parts[-2:]))
    return f"{file}:{line} ({function.rpartition('<locals>.')[2]})"


def _user_lines(eqn: Any) -> tuple[tuple[str, int, str], ...]:
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    return tuple(
        (f.file_name, f.line_num, f.function_name)
        for f in frames
        if not f.file_name.startswith(_folders())
    )


@functools.cache
def _folders() -> tuple[str, ...]:
    """Where the libraries lie that stand between the user and an operation."""
    modules = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    folders = [os.path.dirname(str(m.__file__)) + os.sep for m in modules]
    return (*folders, functools.__file__, contextlib.__file__)


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


def _size(nbytes: int) -> str:
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if (value := nbytes / 2**bits) >= 0.9995:
            return f"{value:.{max(0, 2 - int(math.log10(value + 0.0005)))}f} {unit}"
    return f"{nbytes} B"
