"""What a check found: a verdict, the differences, and the causes, as a table."""

from collections.abc import Iterable, Mapping
import dataclasses
import textwrap
from typing import Any

import jax
import numpy as np

from gradacc_jax import precision
from gradacc_jax.equivalence.conditions import Tolerance

PyTree = Any
# The names of the causes, as they stand in `EquivalenceReport.causes`.
WEIGHTS = "unequal weights"
DENOMINATORS = "several denominators"
REDUCTION = "sum or mean"
STATISTICS = "batch statistics"
COUPLED = "examples coupled through the loss"
KEY = "one key for all"
STATE = "a state update per micro-batch"
EMPTY = "a micro-batch without loss terms"
SCALE = "wrong scale"
SILENT = "an update on silent micro-steps"
LENGTH = "a window of another length"
COUNTER = "a counter that counts micro-steps"
BLEED = "a window that bleeds"
PARTIAL = "a partial window divided by k"
LOST = "a partial window that is lost"
ONE = "only one micro-batch counts"
NARROW = "a narrow accumulator"
UNKNOWN = "unexplained"

_SHOWN = 12  # rows of the printed table
_WIDTH = 88


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one array of the result is from what the whole batch gives.

    Attributes:
      what: which array: "loss", "gradient['w']", "state['mean']".
      double: the relative difference in float64.
      given: the relative difference in the dtypes the arrays were given in.
      equal: whether ``double`` is rounding.
    """

    what: str
    double: float
    given: float
    equal: bool


@dataclasses.dataclass(frozen=True)
class EquivalenceReport:
    """What :func:`check_equivalence` found; it prints as a table.

    Attributes:
      equal: whether accumulation and whole batch are equal, up to rounding.
      causes: the likely causes, most telling first: from a cause's name to what was
        seen and what to do. Empty where ``equal``.
      differences: one for the loss, for each of its terms, for each array of the
        gradient (of the parameters, for a micro-step) and of the carried state.
      compared: what was compared, in words.
      dtype: the dtype of the numbers in ``given``.
      notes: what limits the verdict.
    """

    equal: bool
    causes: Mapping[str, str]
    differences: tuple[Difference, ...]
    compared: str
    dtype: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        verdict = "EQUAL" if self.equal else "NOT EQUAL"
        lines = [f"{verdict}: {self.compared}"]
        worst = sorted(self.differences, key=lambda d: (d.equal, -d.double))
        kept = [d for d in self.differences if d in worst[:_SHOWN]]
        title = "relative difference"
        width = max(len(title), *(len(d.what) for d in kept))
        lines.append(f"  {title:{width}}  {self.dtype:>9}    float64")
        for d in kept:
            mark = "" if d.equal else "  differs"
            lines.append(f"  {d.what:{width}}  {d.given:9.1e}  {d.double:9.1e}{mark}")
        if len(worst) > _SHOWN:
            rest = worst[_SHOWN].double
            lines.append(f"  and {len(worst) - _SHOWN} more, at most {rest:.1e}")
        for title, text in [
            *((f"cause: {name}", text) for name, text in self.causes.items()),
            *(("note", text) for text in self.notes),
        ]:
            lines.append(title)
            lines += textwrap.wrap(
                text,
                _WIDTH,
                initial_indent="  ",
                subsequent_indent="  ",
                break_on_hyphens=False,
            )
        return "\n".join(lines)


def difference(
    found: Any, expected: Any, scale: float, floor: float, rounding: float = 0.0
) -> float:
    """The largest difference, relative to the largest number expected.

    Args:
      found: an array.
      expected: an array like it.
      scale: how large such numbers are elsewhere.
      floor: what part of ``scale`` numbers are compared to at least.
      rounding: the error that both have from an addition before, if any.
    """
    a, b = np.asarray(found), np.asarray(expected)
    if not np.iscomplexobj(a):  # bfloat16, integers and booleans too
        a, b = a.astype(np.float64), b.astype(np.float64)
    largest = np.max(np.abs(a - b), initial=0) - rounding
    if largest <= 0:
        return 0.0
    size = max(np.max(np.abs(b)), floor * scale)
    return float(largest / size) if largest < np.inf and size > 0 else float("inf")


def largest(*trees: PyTree) -> float:
    """The largest absolute finite number in the trees, 0 if there is none."""
    found = [np.abs(np.asarray(x)) for x in jax.tree.leaves(trees)]
    return max((float(np.max(x[np.isfinite(x)], initial=0)) for x in found), default=0)


def differences(
    name: str,
    double: tuple[PyTree, PyTree],
    given: tuple[PyTree, PyTree],
    accepted: Tolerance,
    scale: float,
) -> list[Difference]:
    """One :class:`Difference` for each array of a tree.

    Args:
      name: what the trees hold.
      double: found and expected, in float64.
      given: the same in the given dtypes.
      accepted: what counts as equal.
      scale: how large such numbers are; see :func:`difference`.
    """
    found = jax.tree_util.tree_leaves_with_path(double[0])
    expected = jax.tree.leaves(double[1])
    narrow = zip(*map(jax.tree.leaves, given), strict=True)
    rows = []
    for (path, a), b, pair in zip(found, expected, narrow, strict=True):
        far = difference(a, b, scale, accepted.floor)
        rows.append(
            Difference(
                what=name + jax.tree_util.keystr(path),
                double=far,
                given=difference(pair[0], pair[1], scale, accepted.floor),
                equal=far <= accepted.relative,
            )
        )
    return rows


def listed(items: Iterable[Any]) -> str:
    """The first few of ``items``, as text."""
    shown = [str(x) for x in items]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")


def dtype_of(params: PyTree) -> str:
    """The dtype that parameters were given in, to head a column."""
    dtypes = {precision.dtype_of(p).name for p in jax.tree.leaves(params)}
    return dtypes.pop() if len(dtypes) == 1 else "as given"


def limits(narrowest: np.dtype, accepted: Tolerance) -> tuple[str, ...]:
    """A note on what cannot be seen, where not everything is float64."""
    if narrowest == np.float64:
        return ()
    return (
        f"some numbers are {narrowest.name} even where float64 is given: differences "
        f"below {accepted.relative:g} cannot be told from rounding",
    )


def not_double(what: str, error: Exception) -> str:
    """A note that float64 was tried in vain."""
    reason = str(error).splitlines()[0]
    return (
        f"the {what} does not run in float64 ({reason}): both columns are of the dtypes"
        " that were given"
    )
