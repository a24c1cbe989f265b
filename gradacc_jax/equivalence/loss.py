r"""The first form: does a loss on micro-batches give what it gives on the whole batch?

The loss :math:`l` is run on the whole batch by ``jax.value_and_grad`` and on micro-
batches by :func:`gradacc_jax.value_and_grad`. If the two differ, four experiments say
why; each changes the batch in a way that only one kind of loss would notice.

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

**Twice.** If there is no such function, a micro-batch is put beside its own copy. Means
over a batch stay what they are: a loss that does not notice depends on statistics. One
that does, such as a contrastive loss, compares the examples with each other.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradacc_jax import losses, microbatching, precision, splitting
from gradacc_jax.equivalence import conditions, report
from gradacc_jax.equivalence.conditions import Tolerance
from gradacc_jax.equivalence.report import EquivalenceReport

PyTree = Any
_PROPORTIONS = 11
_PAIRS = 6  # of micro-batches that are mixed
_LEAST = 4  # examples of a micro-batch that are mixed, where it has as many
_MOST_DENOMINATORS = 3


class Question(NamedTuple):
    """What is asked: a loss, on a batch, in so many micro-batches."""

    loss_fn: Callable[..., Any]
    params: PyTree
    batch: PyTree
    num_microbatches: int
    weight_fn: Callable[[PyTree], PyTree] | None
    reduction: str
    has_aux: bool
    batch_axis: PyTree
    key: jax.Array | None
    state: PyTree | None

    def loss(
        self, params: PyTree, batch: PyTree, key: jax.Array | None, state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """The loss, a scalar or a dict of terms, and the new state."""
        more = [x for x in (key, state) if x is not None]
        out = self.loss_fn(params, batch, *more)
        if state is None:
            return losses.pair_of(out, self.has_aux)[0], ()
        loss, rest = losses.pair_of(out, True, "(loss, new_state)")
        return loss, losses.pair_of(rest, self.has_aux, "(new_state, aux)")[0]

    def in_double(self) -> "Question":
        state = None
        if self.state is not None:
            state = conditions.stilled(conditions.widened(self.state))
        return self._replace(
            params=conditions.widened(self.params),
            batch=conditions.widened(self.batch),
            state=state,
        )

    def terms(self) -> PyTree:
        """The shape of the loss: a scalar, or a dict of scalars."""
        loss, _ = jax.eval_shape(
            self.loss, self.params, self.batch, self.still(), self.state
        )
        for term in jax.tree.leaves(loss):
            losses.check_loss(term)
        return loss

    def still(self) -> jax.Array | None:
        return None if self.key is None else conditions.still_key()

    def weights(self, batch: PyTree) -> PyTree:
        """``weight_fn``, with a weight for each term."""
        terms = self.terms()
        if self.weight_fn is not None:
            weight = self.weight_fn(batch)
            if not losses.is_leaf(weight):
                return weight
        else:
            axes = splitting.batch_axes(batch, self.batch_axis)
            weight = splitting.num_examples(batch, axes)
        return jax.tree.map(lambda _: weight, terms)


class Answer(NamedTuple):
    """A value, its terms, a gradient and a state."""

    value: Any
    terms: PyTree
    grads: PyTree
    state: PyTree


def check(q: Question) -> EquivalenceReport:
    """The report on a loss; see :func:`gradacc_jax.check_equivalence`."""
    whole, accumulated = _whole(q), _accumulated(q)
    with conditions.double():
        d = q.in_double()
        d_whole, d_accumulated = _whole(d), _accumulated(d)
        if not all(np.all(np.isfinite(x)) for x in jax.tree.leaves(d_whole[:3])):
            raise ValueError(
                f"the whole batch has the loss {d_whole.value} and a gradient that is "
                "not finite everywhere; nothing can be compared with it"
            )
        narrowest, draws = _program(d)
        accepted = conditions.tolerance(narrowest)
        examine = Experiments(d, accepted)
        rows = _rows((accumulated, whole), (d_accumulated, d_whole), accepted, examine)
        causes: dict[str, str] = {}
        if not all(row.equal for row in rows if not row.what.startswith("state")):
            causes = diagnose(examine, draws, _used(d, examine))
        if not all(row.equal for row in rows if row.what.startswith("state")):
            causes[report.STATE] = (
                "the carried state was updated once per micro-batch, and is not what "
                "one update by the whole batch gives. Running averages move "
                f"{q.num_microbatches} times per step: take the {q.num_microbatches}-th"
                " root of their momentum, or update them once per step"
            )
        equal = all(row.equal for row in rows)
        if not equal and not causes:
            causes[report.UNKNOWN] = (
                "none of the experiments tells why; try fewer parameters, a smaller "
                "batch, and one term of the loss at a time"
            )
    return EquivalenceReport(
        equal=equal,
        causes=causes,
        differences=tuple(rows),
        compared=f"{q.num_microbatches} micro-batches and the whole batch of "
        f"{examine.size}",
        dtype=given_dtype(q.params),
        notes=notes(narrowest, accepted),
    )


def notes(narrowest: np.dtype, accepted: Tolerance) -> tuple[str, ...]:
    if narrowest == np.float64:
        return ()
    return (
        f"the loss computes in {narrowest.name} even where it is given float64: "
        f"differences below {accepted.relative:g} cannot be told from rounding",
    )


def given_dtype(params: PyTree) -> str:
    dtypes = {precision.dtype_of(p).name for p in jax.tree.leaves(params)}
    return dtypes.pop() if len(dtypes) == 1 else "as given"


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


def total(terms: PyTree) -> jax.Array:
    """The loss, of its terms."""
    first, *others = jax.tree.leaves(terms)
    for term in others:
        first = first + term
    return first


def _rows(
    given: tuple[Answer, Answer],
    double: tuple[Answer, Answer],
    accepted: Tolerance,
    examine: "Experiments",
) -> list[report.Difference]:
    used = _used(examine.q, examine)

    def averaged(stacked: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(stacked)
        return jax.tree.unflatten(tree, [_dot(u, x) for u, x in zip(used, leaves)])

    def rows(name: str, part: Callable[[Answer], Any], scale: float) -> Any:
        pairs = [tuple(map(part, pair)) for pair in (double, given)]
        return report.differences(name, pairs[0], pairs[1], accepted, scale)

    micro_values = report.largest(double[0].terms)
    found = rows("loss", lambda a: a.value, micro_values)
    if not losses.is_leaf(double[0].terms):
        for i, pair in enumerate((double, given)):
            pair = (pair[0]._replace(terms=averaged(pair[0].terms)), pair[1])
            double, given = (pair, given) if i == 0 else (double, pair)
        found += rows("loss", lambda a: a.terms, micro_values)
    scale = report.largest(double[1].grads, double[0].grads)
    grads = rows("gradient", lambda a: a.grads, scale)
    if not all(row.equal for row in grads):
        # At a minimum the gradients of micro-batches cancel, and leave their rounding.
        scale = max(scale, report.largest(list(examine.micro(0)[:, :, 1:])))
        grads = rows("gradient", lambda a: a.grads, scale)
    return [*found, *grads, *rows("state", lambda a: a.state, 0.0)]


def _dot(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """``sum(w * x)`` that leaves out what has weight 0, be it nan."""
    w = weights.reshape(-1, *[1] * (x.ndim - 1))
    return np.sum(np.where(w == 0, 0, w * np.where(w == 0, 0, x)), axis=0)


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


class Experiments:
    """The loss in float64, on any choice of examples, at several parameters.

    What it gives is an array of shape (terms, numbers): for each term of the loss its
    value and its gradient.
    """

    def __init__(self, q: Question, accepted: Tolerance):
        self.q = q
        self.accepted = accepted
        self.axes = splitting.batch_axes(q.batch, q.batch_axis)
        self.size = splitting.num_examples(q.batch, self.axes)
        k = q.num_microbatches
        self.micro_batches = [np.arange(self.size)[i::k] for i in range(k)]
        terms = q.terms()
        self.names = [
            jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(terms)
        ]
        self.run = jax.jit(self._run)
        # Two parameters or more, so that there are more equations than weights.
        numbers = 1 + sum(np.size(p) for p in jax.tree.leaves(q.params))
        equations = 2 * max(k, _PROPORTIONS)
        self.points = max(2, -(-equations // numbers))
        self.cache: dict[tuple[int, ...], np.ndarray] = {}

    def _run(self, params: PyTree, batch: PyTree, state: PyTree) -> jax.Array:
        def values(params: PyTree) -> list[jax.Array]:
            terms, _ = self.q.loss(params, batch, self.q.still(), state)
            return [x.astype(jnp.float64) for x in jax.tree.leaves(terms)]

        found, vjp = jax.vjp(values, params)
        rows = []
        for term in range(len(found)):
            one = [
                jnp.asarray(float(i == term), jnp.float64) for i in range(len(found))
            ]
            (grads,) = vjp(one)
            parts = [found[term][None]]
            for g in jax.tree.leaves(grads):
                parts.append(jnp.ravel(g.real).astype(jnp.float64))
                if jnp.iscomplexobj(g):
                    parts.append(jnp.ravel(g.imag).astype(jnp.float64))
            rows.append(jnp.concatenate(parts))
        return jnp.stack(rows)

    def take(self, examples: np.ndarray) -> PyTree:
        def leaf(x: Any, axis: int) -> Any:
            return x if axis < 0 else jnp.take(x, examples, axis=axis)

        return jax.tree.map(leaf, self.q.batch, self.axes)

    def params(self, point: int) -> PyTree:
        """The parameters, or others in their neighbourhood with the same signs."""
        if point == 0:
            return self.q.params
        rng = np.random.default_rng(point)

        def leaf(p: np.ndarray) -> np.ndarray:
            step = 0.05 * np.where(p == 0, 0.1, np.abs(p))
            return p + step * rng.uniform(-1, 1, np.shape(p))

        return jax.tree.map(leaf, self.q.params)

    def at(self, examples: np.ndarray, point: int) -> np.ndarray:
        found = self.run(self.params(point), self.take(examples), self.q.state)
        return np.asarray(found)

    def everywhere(self, examples: np.ndarray) -> np.ndarray:
        """At all parameters, one after the other: shape (terms, points * numbers)."""
        name = tuple(int(i) for i in examples)
        if name not in self.cache:
            found = [self.at(examples, point) for point in range(self.points)]
            self.cache[name] = np.concatenate(found, axis=1)
        return self.cache[name]

    def micro(self, point: int) -> np.ndarray:
        """The micro-batches, of shape (k, terms, numbers)."""
        return np.stack([self.at(m, point) for m in self.micro_batches])

    def same(self, a: np.ndarray, b: np.ndarray) -> bool:
        size = max(report.largest(a), report.largest(b))
        return bool(np.max(np.abs(a - b)) <= self.accepted.relative * size)


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
    if not examine.same(whole, examine.everywhere(everything[::-1])):
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
        if examine.same(_dot(used[term], v), y):
            continue
        label = f"the term {name}" if name else "the loss"
        bad = [i for i in range(len(v)) if not np.all(np.isfinite(v[i]))]
        if any(used[term][i] != 0 for i in bad):
            causes[report.EMPTY] = (
                f"{label} is not finite on the micro-batches {_listed(bad)}, though it "
                "is on the whole batch: a mean over no terms is 0 / 0. Pass weight_fn, "
                "the number of loss terms: a micro-batch of weight 0 is left out, nan "
                "and all"
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
        elif _unchanged_twice(examine, term):
            causes[report.STATISTICS] = (
                f"{label} depends on statistics of the whole batch (it does not notice "
                "a batch given twice, but is no mean over examples): batch norm, a "
                "load-balancing or a variance loss. A micro-batch's statistics are "
                "others; no weights mend that. Use layer or group norm, use running "
                "averages, or accept that the statistics are those of micro-batches"
            )
        else:
            causes[report.COUPLED] = (
                f"{label} compares the examples of the batch with each other, as "
                "contrastive losses do: an example meets fewer others in a micro-batch."
                " No weights mend that; encode in chunks, and compute the loss on all "
                "of them"
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
        x = np.asarray(x) if axis >= 0 and not _is_key(x) else None
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


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _denominators(examine: Experiments, term: int) -> int | None:
    """Of how many means the loss is a sum; None if it is none."""
    slots = _PROPORTIONS + 1
    # Small groups in large batches, or twelve of them would be a much larger batch.
    size = min(len(examine.micro_batches[-1]), max(_LEAST, examine.size // slots))
    groups = [m[:size] for m in examine.micro_batches]
    proportions = np.arange(1, slots) / slots
    most = 1
    for one, other in zip(groups[:_PAIRS], groups[1:]):
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


def _unchanged_twice(examine: Experiments, term: int) -> bool:
    once = examine.micro_batches[0]
    a = examine.everywhere(once)[term]
    b = examine.everywhere(np.tile(once, 2))[term]
    if examine.q.reduction == "sum":
        b = b / 2
    return examine.same(a, b)


def _factors(factors: np.ndarray) -> str:
    return _listed([f"{x:.4g}" for x in factors])


def _listed(items: list[Any]) -> str:
    shown = [str(x) for x in items[:8]]
    return ", ".join(shown) + (", ..." if len(items) > 8 else "")
