r"""Why a loss on micro-batches is not what it is on the whole batch.

Four experiments with a loss :math:`l` say why; each changes the batch in a way that
only one kind of loss would notice.

**Places.** The examples change places. A mean does not notice. A loss that draws a mask
for each *place* in the batch does: it has a key that no one folds, which gives every
micro-batch the same masks.

**Mixtures.** A batch is filled with ``a`` copies of one micro-batch and ``b`` copies of
another, in eleven proportions. For one mean over :math:`w` terms a micro-batch,

.. math:: l(a, b) = \frac{a\, w_1 l_1 + b\, w_2 l_2}{a\, w_1 + b\, w_2},

a hyperbola, whose pole is the same for the value, for each number of the gradient, and
at every parameter. A sum of means with denominators of their own has as many poles as
denominators, all real, none twice. Whatever mixes the examples in another way (batch
norm, a softmax over the batch, the square of a mean) is no such function of the
proportion. Poles are found by linear algebra (:func:`_poles`).

**Weights.** If there is one pole, the whole batch's value and gradient are a weighted
sum of the micro-batches'; least squares finds the weights, to be compared with those
that were used, and with what the batch's arrays add up to.

**Copies.** If there is no such function, a batch is filled with copies of one micro-
batch. Means over a batch stay what they are: a loss that does not notice depends on
statistics. One that does, such as a contrastive loss, compares the examples with each
other.
"""

from collections.abc import Callable, Iterator
import itertools
from typing import Any

import jax
import numpy as np

from gradacc_jax.equivalence import conditions, report
from gradacc_jax.equivalence.experiments import PROPORTIONS, Experiments

_PAIRS = 6  # of micro-batches that are mixed
_LEAST = 4  # examples of a micro-batch that are mixed, where it has as many
_MOST_DENOMINATORS = 3


def diagnose(examine: Experiments, draws: bool, used: np.ndarray) -> dict[str, str]:
    """The causes of a difference in the loss or its gradient.

    Args:
      examine: the experiments.
      draws: whether the loss draws random numbers from keys of its own.
      used: each micro-batch's factor in the accumulation, of shape (terms, k).
    """
    everything = np.arange(examine.size)
    whole = examine.everywhere(everything)
    micros = np.stack([examine.everywhere(m) for m in examine.micro_batches])
    causes: dict[str, str] = {}
    shuffled = np.random.default_rng(0).permutation(everything)
    if not all(
        examine.same(whole, examine.everywhere(order))
        for order in (everything[::-1], shuffled)
    ):
        if draws:
            return {
                report.KEY: "random numbers are drawn from a key that the loss has of "
                "its own (or finds in the batch), one for each place: every micro-"
                "batch gets the same ones, and the whole batch others. Make the key an "
                "argument, loss_fn(params, batch, key), and pass key=: it is folded by "
                "the micro-batch's number"
            }
        return {
            report.COUPLED: "the loss changes when examples change places, and draws "
            "no random numbers: it knows an example by its place in the batch, or "
            "computes it from its neighbours. Give each example what it needs as one "
            "entry of the batch"
        }
    for term, name in enumerate(examine.names):
        y, v = whole[term], micros[:, term]
        if examine.same(weighted(used[term], v), y):
            continue
        label = f"the term {name}" if name else "the loss"
        bad = [i for i in range(len(v)) if not np.all(np.isfinite(v[i]))]
        if any(used[term][i] != 0 for i in bad):
            causes[report.EMPTY] = (
                f"{label} is not finite on the micro-batches "
                f"{report.listed(i + 1 for i in bad)}, though it is on the whole batch:"
                " a mean over no terms is 0 / 0. Pass weight_fn, the number of loss "
                "terms: a micro-batch of weight 0 is left out, nan and all"
            )
            continue
        denominators = _denominators(examine, term)
        if denominators == 1:
            causes |= _weights(examine, term, label, y, v, used[term])
        elif denominators is not None:
            causes[report.DENOMINATORS] = (
                f"{label} is a sum of {denominators} means with denominators of their "
                "own, and no one weight is right for all of them. Return a dict of "
                "terms, and from weight_fn a dict with each term's number of loss terms"
            )
        elif _unchanged_by_copies(examine, term):
            causes[report.STATISTICS] = (
                f"{label} depends on statistics of the whole batch (it does not change "
                "when a batch is repeated, and yet is no mean over examples): batch "
                "norm, a load-balancing or a variance loss. A micro-batch's statistics "
                "are others; no weights mend that. Use layer or group norm, use running"
                " averages, or accept that the statistics are those of micro-batches"
            )
        else:
            causes[report.COUPLED] = (
                f"{label} compares the examples of the batch with each other, as "
                "contrastive losses do: an example meets fewer others in a micro-batch."
                " No weights mend that; chunked_encode() computes such losses on the "
                "whole batch"
            )
    return causes


def _weights(
    examine: Experiments,
    term: int,
    label: str,
    y: np.ndarray,
    v: np.ndarray,
    used: np.ndarray,
) -> dict[str, str]:
    """The loss is one mean, or a sum; what factors do its micro-batches have?"""
    found = _factors_of(v, y, examine)
    if found is None:
        return {}
    for total, name, now in ((v.sum(0), "sum", "mean"), (v.mean(0), "mean", "sum")):
        given = examine.q.reduction
        if given == now and examine.same(total, y):
            return {
                report.REDUCTION: f"{label} is a {name} over its batch, and was taken "
                f'for a {now}: pass reduction="{name}"'
            }
    remedy = (
        "Pass weight_fn, from a micro-batch to its number of loss terms: what the loss "
        "divides by"
    )
    if abs(np.sum(found) - 1) > 1e-6:
        remedy = (
            "The first do not sum to 1: is its denominator clipped, as in max(weight, "
            f"1)? {remedy}"
        )
    for what, code, shares in _candidates(examine):
        if examine.same(shares @ v, y):
            found, remedy = shares, f"With {what} they agree: {code}"
            break
    equally = ", a mean of means" if np.ptp(used) <= 1e-12 else ""
    return {
        report.WEIGHTS: f"{label} counts the micro-batches with the factors "
        f"{_factors(found)}; they were added with {_factors(used)}{equally}. {remedy}"
    }


def _factors_of(v: np.ndarray, y: np.ndarray, examine: Experiments) -> Any:
    """Factors with ``factors @ v == y``, of sum 1 if there are such; or None."""
    size = max(report.largest(v), 1e-300)
    ones = np.ones((len(v), 1))
    for a, b in ((np.hstack([v / size, ones]), np.append(y / size, 1)), (v, y)):
        found = np.linalg.lstsq(a.T, b, rcond=None)[0]
        if examine.same(found @ a, b):
            return found
    return None


def _candidates(examine: Experiments) -> Iterator[tuple[str, str, np.ndarray]]:
    """Numbers of loss terms that the batch's arrays may stand for, as shares."""
    sizes = np.array([len(m) for m in examine.micro_batches])
    yield "the number of examples", "no weight_fn is needed", sizes / examine.size
    counts: dict[str, Callable[[np.ndarray], Any]] = {
        "jnp.sum({})": np.sum,
        "jnp.sum({} != 0)": np.count_nonzero,
        "jnp.sum({} >= 0)": lambda x: np.count_nonzero(x >= 0),
    }
    for (path, x), axis in zip(
        jax.tree_util.tree_leaves_with_path(examine.q.batch),
        jax.tree.leaves(examine.axes),
    ):
        x = np.asarray(x) if axis >= 0 and not conditions.is_key(x) else None
        if x is None or np.iscomplexobj(x):
            continue
        code = "batch" + jax.tree_util.keystr(path)
        for pattern, count in counts.items():
            each = [count(np.take(x, m, axis)) for m in examine.micro_batches]
            if min(each) >= 0 and sum(each) > 0:
                expression = pattern.format(code)
                yield (
                    expression,
                    f"weight_fn=lambda batch: {expression}",
                    np.array(each, np.float64) / float(sum(each)),
                )


def _denominators(examine: Experiments, term: int) -> int | None:
    """Of how many means the loss is a sum; None if it is none."""
    slots = PROPORTIONS + 1
    groups = _groups(examine)
    proportions = np.arange(1, slots) / slots
    most = 1
    for one, other in itertools.islice(itertools.pairwise(groups), _PAIRS):
        curve = np.stack(
            [
                examine.everywhere(np.concatenate([one] * a + [other] * (slots - a)))[
                    term
                ]
                for a in range(1, slots)
            ]
        )
        curve = curve[:, np.all(np.isfinite(curve), axis=0)]
        if curve.size == 0:
            continue
        for count in range(1, _MOST_DENOMINATORS + 1):
            if _poles(proportions, curve, count, examine.accepted.relative):
                most = max(most, count)
                break
        else:
            return None
    return most


def _poles(x: np.ndarray, curve: np.ndarray, count: int, relative: float) -> bool:
    r"""Whether all columns of ``curve`` are P(x) / Q(x), with one Q for all of them.

    P and Q are polynomials of degree ``count``, and Q has distinct real roots outside
    [0, 1]. In a basis U of such polynomials on the points ``x``, Q = U q is sought so
    that Q(x) y(x) lies in the span of U for every column y: q is the null vector of the
    stacked matrices (1 - U U') diag(y) U.

    Args:
      x: the proportions, of shape (points,).
      curve: of shape (points, columns).
      count: the number of poles.
      relative: what counts as 0.
    """
    # As many columns as there are points say the same, and are quicker.
    u, s, _ = np.linalg.svd(curve, full_matrices=False)
    curve = u * s
    vandermonde = np.vander(2 * x - 1, count + 1)
    basis, triangular = np.linalg.qr(vandermonde)
    off = np.eye(len(x)) - basis @ basis.T
    stacked = np.concatenate([off @ (y[:, None] * basis) for y in curve.T])
    _, s, rows = np.linalg.svd(stacked, full_matrices=False)
    if s[-1] > relative * max(np.max(np.abs(curve)), 1e-300):
        return False
    if count == 1:
        return True
    polynomial = np.linalg.solve(triangular, rows[-1])
    # A leading coefficient of 0 is a pole at infinity: a denominator that counts
    # examples. Two are none: that is the square of a mean, say.
    leading = np.abs(polynomial) > 1e-6 * np.max(np.abs(polynomial))
    at_infinity = int(np.argmax(leading))
    roots = np.roots(polynomial[at_infinity:])
    real = np.sort(roots.real)
    return bool(
        at_infinity <= 1
        and np.all(np.abs(roots.imag) <= 1e-6 * np.abs(roots))
        and np.all(np.abs(real) > 1)
        and np.all(np.diff(real) > 1e-3 * np.abs(real[1:]))
    )


def _unchanged_by_copies(examine: Experiments, term: int) -> bool:
    group = _groups(examine)[0]
    copies = PROPORTIONS + 1
    a = examine.everywhere(group)[term]
    b = examine.everywhere(np.tile(group, copies))[term]
    return examine.same(a, b / copies if examine.q.reduction == "sum" else b)


def _groups(examine: Experiments) -> list[np.ndarray]:
    """The first examples of each micro-batch, equally many of each.

    A batch of twelve such groups is about as large as the whole one, or small.
    """
    size = max(_LEAST, examine.size // (PROPORTIONS + 1))
    size = min(size, len(examine.micro_batches[-1]))
    return [m[:size] for m in examine.micro_batches]


def _factors(factors: np.ndarray) -> str:
    return report.listed([f"{x:.4g}" for x in factors])


def weighted(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """``sum(w * x)`` that leaves out what has weight 0, be it nan."""
    w = weights.reshape(-1, *[1] * (x.ndim - 1))
    return np.sum(np.where(w == 0, 0, w * np.where(w == 0, 0, x)), axis=0)
