"""Updates that change nothing: of a silent micro-step, and of what cannot move."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradacc_jax import precision, reduction

PyTree = Any


def zero_updates(updates: PyTree, count: jax.Array | None) -> PyTree:
    """Updates that change nothing: -0.0, for ``x + -0.0`` is x also where x is -0.0.

    With a ``count`` each is made from a number of its own, 0 times some count: of one
    constant XLA would write one array, and copy it to all others of its shape.
    """
    leaves, tree = jax.tree.flatten(updates)
    counts = [None if count is None else count + i for i in range(len(leaves))]
    return jax.tree.unflatten(tree, map(_zero_update, leaves, counts))


def _zero_update(aval: Any, count: jax.Array | None) -> Any:
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, jax.dtypes.float0)
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return reduction.placed_like(jnp.zeros(aval.shape, aval.dtype), aval)
    part = jnp.finfo(aval.dtype).dtype  # of a complex number its real part's
    zero = jnp.asarray(-0.0, part) if count is None else -(0.0 * count.astype(part))
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        zero = jax.lax.complex(zero, zero)
    return reduction.placed_like(jnp.broadcast_to(zero, aval.shape), aval)


def still(g: Any, update: Any) -> Any:
    """The update of a leaf: integers have no gradient, and are not moved.

    As floats, which optimizers make of them, their updates would round them.
    """
    if precision.is_masked(update) or precision.has_gradient(g):
        return update
    dtype = precision.dtype_of(g)
    if dtype == jax.dtypes.float0:
        return np.zeros(jnp.shape(g), dtype)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return g
    return jnp.zeros(jnp.shape(g), dtype)  # the same on all devices
