"""The faults that a micro-step is suspected of, each as something to re-enact."""

from collections.abc import Callable, Iterator
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradacc_jax.equivalence import report
from gradacc_jax.equivalence.trial import Seen, Suspect, Trial

PyTree = Any


def _scaled(seen: Seen, factor: float) -> PyTree:
    return times(seen.whole, factor)


def suspects(
    trial: Trial, found: list[PyTree], expected: list[PyTree]
) -> Iterator[Suspect]:
    """The faults, those first that explain the most by the least.

    Args:
      trial: the micro-step and the optimizer.
      found: the micro-step's parameters, before the first window and after each.
      expected: the plain optimizer's.
    """
    k = trial.q.num_microbatches
    yield Suspect(
        report.PARTIAL,
        "a window that was closed early was divided by k, not by the number of micro-"
        "batches that it held. Divide by the sum of weights, as accumulate() does",
        lambda seen: times(seen.whole, seen.size / k),
    )
    yield Suspect(
        report.LOST,
        "closing a window early did not run the optimizer, and its micro-batches were "
        "lost. Pass emit=True with the last of them",
        lambda seen: None if seen.partial else seen.whole,
    )
    for what in ("sum", "mean"):
        yield Suspect(
            report.BLEED,
            f"the {what} is not reset: every step has all earlier windows in it",
            functools.partial(_not_reset, what=what),
        )
    for index in (-1, 0):
        yield Suspect(
            report.ONE,
            f"only the {'last' if index else 'first'} micro-batch of each window "
            "counts: is the sum overwritten?",
            functools.partial(_one, index=index),
        )
    yield from scales(k)
    yield Suspect(gradient=_mean_of_means, averages=True)
    yield from scales(k, _mean_of_means, averages=True)
    counters = trial.counters()
    each = [(name,) for name in counters]
    for some in [*each, tuple(counters)] if len(each) > 1 else each:
        text = (
            f"in the optimizer's state {', '.join(some)} counts micro-steps: it goes "
            f"{k} times too fast. Put what counts inside the accumulator, which runs it"
            " once per window"
        )
        yield Suspect(report.COUNTER, text, counters=some)
        yield Suspect(report.COUNTER, text, _mean_of_means, some, averages=True)
    factors = _factors(trial, found, expected)
    if factors is not None:
        yield Suspect(
            report.SCALE,
            f"gradients are off by a factor: {_named(factors, k)}. Each is to be the "
            "mean over the window, divided once",
            lambda seen: jax.tree.map(times, seen.whole, factors),
        )


def scales(
    k: int, gradient: Callable[..., PyTree] = _scaled, averages: bool = False
) -> Iterator[Suspect]:
    """Gradients that are k times too large, and k times too small."""
    texts = {
        float(k): f"the gradient is {k} times too large: micro-gradients are added up "
        f"and never divided. Divide the loss or the sum by {k}, in one place",
        1 / k: f"the gradient is {k} times too small: it is divided by {k} twice, once "
        "in the loss and once by the accumulator, say. Divide in one place",
    }
    for factor, text in texts.items():
        made = functools.partial(gradient, factor=factor)
        yield Suspect(report.SCALE, text, made, averages=averages)


def times(tree: PyTree, factor: float) -> PyTree:
    return jax.tree.map(lambda x: x * jnp.asarray(factor, x.dtype), tree)


def _one(seen: Seen, index: int) -> PyTree:
    return seen.micros()[index]


def _mean_of_means(seen: Seen, factor: float = 1.0) -> PyTree:
    micros = seen.micros()
    return times(_sum(micros), factor / len(micros))


def _not_reset(seen: Seen, what: str) -> PyTree:
    windows = [*seen.earlier, (seen.size, seen.whole)]
    counted = sum(count for count, _ in windows)
    divisor = seen.size if what == "sum" else counted
    return times(_sum([times(g, count) for count, g in windows]), 1 / divisor)


def _sum(trees: list[PyTree]) -> PyTree:
    return functools.reduce(optax.tree.add, trees)


def _factors(
    trial: Trial, found: list[PyTree], expected: list[PyTree]
) -> PyTree | None:
    """Each parameter's first movement over the expected one; None if that is none."""

    def leaf(a: np.ndarray, b: np.ndarray, start: np.ndarray) -> float:
        moved, right = np.ravel(a - start), np.ravel(b - start)
        size = float(np.real(np.vdot(right, right)))
        if size == 0:
            return 1.0
        factor = float(np.real(np.vdot(right, moved))) / size
        off = report.largest(moved - factor * right)
        # How exact it must be is asked again when it is re-enacted.
        close = off <= 1e3 * trial.accepted.relative * report.largest(moved)
        return factor if close else float("nan")

    factors = jax.tree.map(leaf, found[1], expected[1], expected[0])
    return None if np.isnan(jax.tree.leaves(factors)).any() else factors


def _named(factors: PyTree, k: int) -> str:
    known = {float(k): " (k)", 1 / k: " (1/k)", float(k**2): " (k²)", k**-2: " (1/k²)"}

    def number(factor: float) -> str:
        names = [name for x, name in known.items() if abs(factor - x) <= 1e-4 * x]
        return f"{factor:.4g}" + (names[0] if names else "")

    leaves = jax.tree_util.tree_leaves_with_path(factors)
    numbers = {number(factor) for _, factor in leaves}
    if len(numbers) == 1:
        return f"all by {numbers.pop()}"
    return report.listed(
        [
            f"{jax.tree_util.keystr(path)} by {number(factor)}"
            for path, factor in leaves
            if abs(factor - 1) > 1e-6
        ]
    )
