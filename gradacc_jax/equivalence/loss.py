"""The first form: does a loss on micro-batches give what it gives on the whole batch?

The loss is run on the whole batch by ``jax.value_and_grad`` and on micro-batches by
:func:`gradacc_jax.value_and_grad`, in the given dtypes and in float64. Where the two
differ, ``diagnosis.py`` says why.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from gradacc_jax import losses, microbatching, precision
from gradacc_jax.equivalence import conditions, report
from gradacc_jax.equivalence.diagnosis import diagnose, weighted
from gradacc_jax.equivalence.experiments import Experiments, Question, total
from gradacc_jax.equivalence.report import EquivalenceReport

PyTree = Any


class Answer(NamedTuple):
    """A value, its terms, a gradient and a state."""

    value: Any
    terms: PyTree
    grads: PyTree
    state: PyTree


def check(q: Question) -> EquivalenceReport:
    """The report on a loss; see :func:`gradacc_jax.check_equivalence`."""
    q.terms()  # raises for a loss that is none
    given = (_accumulated(q), _whole(q))
    with conditions.double():
        d = q.in_double()
        try:
            double = (_accumulated(d), _whole(d))
        except (TypeError, ValueError) as error:
            note = report.not_double("loss", error)
        else:
            return _judged(d, double, given, ())
    return _judged(q, given, given, (note,))


def _judged(
    q: Question,
    double: tuple[Answer, Answer],
    given: tuple[Answer, Answer],
    notes: tuple[str, ...],
) -> EquivalenceReport:
    whole = double[1]
    if not all(np.all(np.isfinite(x)) for x in jax.tree.leaves(whole[:3])):
        raise ValueError(
            f"the whole batch has the loss {whole.value} and a gradient that is not "
            "finite everywhere; nothing can be compared with it"
            + (
                " (random numbers were held still: a mask drawn at a low rate is empty)"
                if q.key is not None
                else ""
            )
        )
    narrowest, draws = _program(q)
    accepted = conditions.tolerance(narrowest)
    examine = Experiments(q, accepted)
    used = _used(q, examine)
    rows = _rows(double, given, used, examine)
    causes: dict[str, str] = {}
    if not all(row.equal for row in rows if not row.what.startswith("state")):
        causes = diagnose(examine, draws, used)
    k = q.num_microbatches
    if not all(row.equal for row in rows if row.what.startswith("state")):
        causes[report.STATE] = (
            "the carried state was updated once per micro-batch, and is not what one "
            f"update by the whole batch gives. Running averages move {k} times per "
            "step: give them the momentum of rescale_momentum(), or update them once a "
            "step"
        )
    equal = all(row.equal for row in rows)
    if not equal and not causes:
        causes[report.UNKNOWN] = (
            "none of the experiments tells why. Try fewer parameters, a smaller batch, "
            "and one term of the loss at a time"
        )
    return EquivalenceReport(
        equal=equal,
        causes=causes,
        differences=tuple(rows),
        compared=f"{k} micro-batches and the whole batch of {examine.size}",
        dtype=report.dtype_of(given[1].grads),
        notes=notes + report.limits(narrowest, accepted) + _unseen(q, whole),
    )


def _unseen(q: Question, whole: Answer) -> tuple[str, ...]:
    """Notes on what the experiments cannot see."""
    notes = []
    if not any(np.any(x) for x in jax.tree.leaves(whole.grads)):
        notes.append(
            "the gradient of the whole batch is 0 everywhere, so that nothing was "
            "compared: check with other parameters, another batch or another key"
        )
    if q.key is not None:
        notes.append(
            "random numbers are held still, one value for all: where they decide which "
            "terms count (a random mask that the loss divides by), unequal weights are "
            "not seen. Draw such a mask with the batch, and pass a weight_fn"
        )
    return tuple(notes)


def _whole(q: Question) -> Answer:
    def fun(params: PyTree) -> tuple[jax.Array, tuple[PyTree, PyTree]]:
        terms, state = q.loss(params, q.batch, q.still(), q.state)
        return total(terms), (terms, state)

    (value, (terms, state)), grads = jax.jit(jax.value_and_grad(fun, has_aux=True))(
        q.params
    )
    return jax.device_get(Answer(value, terms, grads, state))


def _accumulated(q: Question) -> Answer:
    def fun(params: PyTree, batch: PyTree, key: Any, state: PyTree) -> tuple[Any, Any]:
        terms, new = q.loss(params, batch, key, state)
        aux = jax.tree.map(lambda x: x.astype(precision.scalar_dtype()), terms)
        return terms, aux if state is None else (new, aux)

    named = not losses.is_leaf(q.terms())
    f = microbatching.value_and_grad(
        fun,
        has_aux=True,
        num_microbatches=q.num_microbatches,
        batch_axis=q.batch_axis,
        weight_fn=q.weights if named else q.weight_fn,
        reduction=q.reduction,
        aux_reduction="stack",
        key_argnums=() if q.key is None else 2,
        state_argnums=() if q.state is None else 3,
    )
    (value, aux), grads = jax.jit(
        lambda params, batch, state: f(params, batch, q.still(), state)
    )(q.params, q.batch, q.state)
    state, terms = ((), aux) if q.state is None else aux
    return jax.device_get(Answer(value, terms, grads, state))


def _program(q: Question) -> tuple[np.dtype, bool]:
    def fun(params: PyTree) -> jax.Array:
        return total(q.loss(params, q.batch, q.still(), q.state)[0])

    return conditions.look(jax.value_and_grad(fun), q.params)


def _rows(
    double: tuple[Answer, Answer],
    given: tuple[Answer, Answer],
    used: np.ndarray,
    examine: Experiments,
) -> list[report.Difference]:
    def averaged(stacked: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(stacked)
        return jax.tree.unflatten(tree, [weighted(u, x) for u, x in zip(used, leaves)])

    def rows(name: str, part: Callable[[Answer], Any], scale: float) -> Any:
        pairs = [tuple(map(part, pair)) for pair in (double, given)]
        return report.differences(name, pairs[0], pairs[1], examine.accepted, scale)

    micro_values = report.largest(double[0].terms)
    found = rows("loss", lambda a: a.value, micro_values)
    if not losses.is_leaf(double[0].terms):
        double, given = (
            (ours._replace(terms=averaged(ours.terms)), whole)
            for ours, whole in (double, given)
        )
        found += rows("loss", lambda a: a.terms, micro_values)
    scale = report.largest(double[1].grads, double[0].grads)
    grads = rows("gradient", lambda a: a.grads, scale)
    if not all(row.equal for row in grads):
        # At a minimum the gradients of micro-batches cancel, and leave their rounding.
        scale = max(scale, report.largest(list(examine.micro(0)[:, :, 1:])))
        grads = rows("gradient", lambda a: a.grads, scale)
    return [*found, *grads, *rows("state", lambda a: a.state, 0.0)]


def _used(q: Question, examine: "Experiments") -> np.ndarray:
    """The factor of each micro-batch in the accumulation, of shape (terms, k)."""
    each = [
        [float(w) for w in jax.tree.leaves(q.weights(examine.take(examples)))]
        for examples in examine.micro_batches
    ]
    weights = np.array(each).T
    totals = np.sum(weights, axis=1, keepdims=True)
    named = not losses.is_leaf(q.terms())
    if q.reduction == "sum" and not named:
        ones = np.ones_like(weights)
        return ones if q.weight_fn is None else ones / totals
    return weights / np.where(totals == 0, 1, totals)
