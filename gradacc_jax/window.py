r"""The window: a weighted sum of gradients that is opened, added to, and closed.

Over the micro-steps :math:`i` of one window, with gradients :math:`g_i` that are means
over :math:`w_i` loss terms,

.. math::
    G = \Big(\sum_i w_i g_i\Big) \cdot \frac{1}{\sum_i w_i},

which is the gradient of the mean over all :math:`\sum_i w_i` terms: the full batch's.
This is the only file that divides. It divides once, a scalar: dividing the tree would
cost another tree of temporaries.

Three things keep a window cheap and safe:

- it is opened by its first addition, which overwrites: there is no pass that resets the
  sum, and nothing of an earlier window, nan or inf, can leak into the next;
- a micro-batch of weight 0 is left out by selection, never by multiplication, because
  :math:`0 \cdot \mathrm{nan}` is nan;
- between opening and closing there are additions only.

A leaf that is not differentiable (integers, booleans, keys) has an
``optax.MaskedNode()`` for its sum: no memory.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from optax import MaskedNode

from gradacc_jax import precision, reduction

PyTree = Any


class Window(NamedTuple):
    r"""What a window holds.

    Attributes:
      total: the sum :math:`\sum w_i g_i`, a tree like the gradients.
      weight: the sum :math:`\sum w_i`, a scalar of ``precision.scalar_dtype()``.
    """

    total: PyTree
    weight: jax.Array


def empty(like: PyTree, dtype: Any) -> Window:
    """A window for gradients of parameters ``like``, before its first addition.

    Args:
      like: the parameters, as arrays or ``jax.ShapeDtypeStruct``.
      dtype: the least dtype of the sums; None takes the parameters'.

    Returns:
      A window of zeros, in ``promote_types(dtype, p.dtype)`` for each parameter p.
    """

    def leaf(p: Any) -> Any:
        if not precision.has_gradient(p):
            return MaskedNode()
        own = precision.dtype_of(p)
        return jnp.zeros_like(
            p, dtype=own if dtype is None else precision.promote_types(dtype, own)
        )

    total = jax.tree.map(leaf, like, is_leaf=precision.is_masked)
    return Window(total, jnp.zeros((), precision.scalar_dtype()))


def add(
    window: Window,
    terms: PyTree,
    weight: jax.Array | None,
    *,
    first: jax.Array | bool,
    weighted: bool = True,
) -> Window:
    """Adds one micro-batch: ``total + weight * terms``, and ``weight`` to the weights.

    Args:
      window: the window so far; its contents do not matter where ``first``.
      terms: the gradients of the micro-batch, cast to the sums' dtypes.
      weight: the micro-batch's weight, None for 1. Where it is 0 nothing is added,
        whatever ``terms`` hold.
      first: whether this is the window's first addition, which overwrites.
      weighted: False where ``terms`` are sums over the weight already; then they are
        added as they are.

    Returns:
      The window with the micro-batch in it, in the same dtypes.
    """
    w = jnp.asarray(1 if weight is None else weight).astype(window.weight.dtype)

    def leaf(total: Any, term: Any) -> Any:
        if precision.is_masked(total):
            return total
        work = precision.working_dtype(total.dtype)
        term = jnp.asarray(term).astype(work)
        if weight is not None and weighted:
            term = precision.scale(term, reduction.factor(w, term))
        held = total.astype(work)
        added = jnp.where(first, term, held + term)
        if weight is not None:
            left_out = jnp.where(first, jnp.zeros_like(held), held)
            added = jnp.where(w == 0, left_out, added)
        return added.astype(total.dtype)

    return Window(
        jax.tree.map(leaf, window.total, terms, is_leaf=precision.is_masked),
        weighed(window.weight, weight, first=first),
    )


def weighed(
    held: jax.Array, weight: jax.Array | None, *, first: jax.Array | bool
) -> jax.Array:
    """The sum of weights ``held`` with one more micro-batch's weight in it."""
    w = jnp.asarray(1 if weight is None else weight).astype(held.dtype)
    return jnp.where(first, w, held + w)


def carried(window: Window, *, first: jax.Array | bool) -> Window:
    """The window after a micro-step that brings it nothing."""
    return jax.tree.map(lambda x: jnp.where(first, jnp.zeros_like(x), x), window)


def opened(total: PyTree, *, first: jax.Array) -> PyTree:
    """The sums as an addition in place finds them: zeros where the window opens."""
    return jax.tree.map(lambda t: jnp.where(first, jnp.zeros_like(t), t), total)


def close(window: Window, like: PyTree, dtype: Any = None, mean: bool = True) -> PyTree:
    """The window's gradient: the weighted mean, or the sum.

    Args:
      window: the window; its weight must not be 0 for the mean to mean anything.
      like: the last micro-batch's gradients: the result has their dtypes, and zeros
        where they are not differentiable.
      dtype: a least dtype for the result, or None.
      mean: whether to divide by the sum of weights.

    Returns:
      A tree like ``like``. Memory: none of its own where it is consumed leaf by leaf.
    """
    # A window of weight 0 is never used; under vmap it is still computed.
    weight = jnp.where(window.weight == 0, 1, window.weight)
    reciprocal = 1 / weight

    def leaf(total: Any, g: Any) -> Any:
        if precision.is_masked(total):
            return _no_gradient(g)
        result = total.astype(precision.working_dtype(total.dtype))
        if mean:
            result = precision.scale(result, reciprocal)
        own = precision.dtype_of(g)
        return result.astype(
            own if dtype is None else precision.promote_types(dtype, own)
        )

    return jax.tree.map(leaf, window.total, like, is_leaf=precision.is_masked)


def average(window: Window) -> PyTree:
    """The weighted mean in the sums' own dtypes; nan where the weight is 0."""
    mean = close(window, window.total)
    return jax.tree.map(lambda x: jnp.where(window.weight == 0, jnp.nan, x), mean)


def _no_gradient(g: Any) -> Any:
    # Integer zeros, also for float0, with which no optimizer can compute.
    if precision.is_masked(g):
        return g
    dtype = precision.dtype_of(g)
    if dtype == jax.dtypes.float0:
        return jnp.zeros(jnp.shape(g), jnp.int32)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return g
    return jnp.zeros(jnp.shape(g), dtype)  # the same on all devices
