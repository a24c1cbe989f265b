"""What is asked about a loss, and the loss on any choice of examples."""

from collections.abc import Callable
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradacc_jax import losses, precision, splitting
from gradacc_jax.equivalence import conditions, report
from gradacc_jax.equivalence.conditions import Tolerance

PyTree = Any
PROPORTIONS = 11  # in which two micro-batches are mixed


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
    key: Any
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
        """The shapes of the loss: of a scalar, or a dict of them; checked."""
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


class Experiments:
    """The loss on any choice of examples, at several parameters.

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
        equations = 2 * max(k, PROPORTIONS)
        self.points = max(2, -(-equations // numbers))
        self.cache: dict[tuple[int, ...], np.ndarray] = {}

    def _run(self, params: PyTree, batch: PyTree, state: PyTree) -> jax.Array:
        dtype = precision.scalar_dtype()

        def values(params: PyTree) -> list[jax.Array]:
            terms, _ = self.q.loss(params, batch, self.q.still(), state)
            return [x.astype(dtype) for x in jax.tree.leaves(terms)]

        found, vjp = jax.vjp(values, params)
        rows = []
        for term in range(len(found)):
            one = [jnp.asarray(float(i == term), dtype) for i in range(len(found))]
            (grads,) = vjp(one)
            parts = [found[term][None]]
            for g in jax.tree.leaves(grads):
                parts.append(jnp.ravel(g.real).astype(dtype))
                if jnp.iscomplexobj(g):
                    parts.append(jnp.ravel(g.imag).astype(dtype))
            rows.append(jnp.concatenate(parts))
        return jnp.stack(rows)

    def take(self, examples: np.ndarray) -> PyTree:
        return taken(self.q.batch, self.axes, examples)

    def params(self, point: int) -> PyTree:
        """The parameters, or others in their neighbourhood with the same signs."""
        if point == 0:
            return self.q.params
        rng = np.random.default_rng(point)

        def leaf(p: Any) -> np.ndarray:
            p = np.asarray(p)
            step = 0.05 * np.where(p == 0, 0.1, np.abs(p))
            moved = p + step * rng.uniform(-1, 1, np.shape(p))
            return np.asarray(moved, p.dtype)

        return jax.tree.map(leaf, self.q.params)

    def at(self, examples: np.ndarray, point: int) -> np.ndarray:
        found = self.run(self.params(point), self.take(examples), self.q.state)
        return np.asarray(found, np.float64)

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


def total(terms: PyTree) -> jax.Array:
    """The loss, of its terms."""
    return jax.tree.reduce(operator.add, terms)


def taken(batch: PyTree, axes: PyTree, examples: np.ndarray) -> PyTree:
    """A batch of some of the examples, each as often as it is named."""

    def leaf(x: Any, axis: int) -> Any:
        return x if axis < 0 else jnp.take(x, examples, axis=axis)

    return jax.tree.map(leaf, batch, axes)
