"""Which dtype a number is kept in, and how it gets there without loss.

Three rules, used by everything that adds gradients up:

- an accumulator is at least as wide as the gradients that go into it, and at least
  ``accumulator_dtype``: ``promote_types(accumulator_dtype, dtype)``;
- arithmetic with a scalar weight happens in at least float32, also where the result is
  kept in bfloat16, because a weight such as 1040 or 1/3 is no bfloat16 number;
- a state keeps the dtypes it was made with, for ever.

JAX's implicit promotion is never relied on, so everything here also works under
``jax.numpy_dtype_promotion("strict")``.
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
from optax import MaskedNode

PyTree = Any


def promote_types(*dtypes: Any) -> np.dtype:
    """The least dtype that holds all of ``dtypes``, whatever promotion mode is set."""
    with jax.numpy_dtype_promotion("standard"):
        result = np.dtype(dtypes[0])
        for dtype in dtypes[1:]:
            result = np.dtype(jnp.promote_types(result, dtype))
    return result


def check_dtype(name: str, dtype: Any) -> np.dtype | None:
    """Returns ``dtype`` as a floating NumPy dtype, or None; errors name the option."""
    if dtype is None:
        return None
    if isinstance(dtype, jax.Array):
        # np.dtype() would take it for its own dtype.
        raise ValueError(
            f"{name}={dtype!r} is an array; pass a dtype such as jnp.float32, or None "
            "(inject_hyperparams belongs inside, accumulate(inject_hyperparams(opt)"
            "(...), k): around accumulate its schedules would count micro-steps)"
        )
    try:
        checked = np.dtype(dtype)
    except TypeError:
        raise ValueError(
            f"{name}={dtype!r} is not a dtype; pass a floating dtype such as "
            "jnp.float32, or None"
        ) from None
    if not jnp.issubdtype(checked, jnp.floating):
        raise ValueError(
            f"{name}={checked.name} cannot hold gradients; pass a floating dtype such "
            "as jnp.float32 (complex gradients get the complex dtype of that width), "
            "or None"
        )
    if jax.dtypes.canonicalize_dtype(checked) != checked:
        raise ValueError(
            f"{name}={checked.name} needs 64-bit types, which are off; "
            'set jax.config.update("jax_enable_x64", True), or pass jnp.float32'
        )
    return checked


def dtype_of(leaf: Any) -> np.dtype:
    """The dtype of an array, a ``ShapeDtypeStruct`` or a Python number."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def is_masked(leaf: Any) -> bool:
    """Whether optax, or a window, put a placeholder where a leaf would be."""
    return isinstance(leaf, MaskedNode)  # type: ignore[misc]  # optax names no class


def has_gradient(leaf: Any) -> bool:
    """Whether a leaf is differentiable: integers, booleans and keys are not."""
    if is_masked(leaf):
        return False
    return bool(jnp.issubdtype(dtype_of(leaf), jnp.inexact))


def scalar_dtype() -> np.dtype:
    """The dtype of weights and averages: float32, or float64 where that is enabled."""
    return np.dtype(jnp.result_type(float))


def working_dtype(dtype: Any) -> np.dtype:
    """The dtype in which numbers kept as ``dtype`` are computed with."""
    return promote_types(dtype, jnp.float32)


def scale(x: jax.Array, factor: jax.Array) -> jax.Array:
    """``factor * x`` for a real scalar ``factor``, in the dtype of ``x``.

    The parts of a complex number are scaled apart: in the product with ``factor + 0i``
    an infinite part would turn the other one into nan.
    """
    if jnp.iscomplexobj(x):
        return lax.complex(scale(x.real, factor), scale(x.imag, factor))
    return x * factor.astype(x.dtype)


def all_finite(tree: PyTree) -> jax.Array:
    """Whether every number in ``tree`` is finite; a bool scalar.

    By the largest absolute value, which is nan or inf if anything is: that reduces in
    one pass, where a reduction of ``isfinite`` materialises its booleans on CPU.
    """

    def leaf(x: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(x):
            return leaf(x.real) & leaf(x.imag)
        return jnp.max(jnp.abs(x), initial=0) < jnp.inf

    leaves = [leaf(x) for x in jax.tree.leaves(tree) if has_gradient(x)]
    return jnp.all(jnp.stack(leaves)) if leaves else jnp.ones((), bool)


def global_norm(grads: PyTree) -> jax.Array:
    """The norm of all differentiable numbers of a tree, computed in float32 or more."""
    leaves = [g for g in jax.tree.leaves(grads) if has_gradient(g)]
    return optax.tree.norm([g.astype(working_dtype(g.dtype)) for g in leaves])


def owned(tree: PyTree, params: PyTree) -> PyTree:
    """``tree`` as a state of its own: strong types, no buffer shared with ``params``.

    Some optimizers begin with the parameters themselves in their state. A step that
    donates both could not run: a buffer is donated once.
    """
    shared = {id(p) for p in jax.tree.leaves(params)}

    def leaf(x: Any) -> Any:
        if isinstance(x, (np.ndarray, np.generic, int, float, complex)):
            x = jnp.asarray(x)
        if not isinstance(x, jax.Array) or _is_extended(x):
            return x
        x = jnp.copy(x) if id(x) in shared else x
        return lax.convert_element_type(x, x.dtype)

    return jax.tree.map(leaf, tree)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """``tree`` in the dtypes of ``like``: a state stays what it was made as."""

    def leaf(x: Any, y: Any) -> Any:
        if not hasattr(y, "dtype") or _is_extended(y):
            return x
        return lax.convert_element_type(x, y.dtype)

    return jax.tree.map(leaf, tree, like)


def _is_extended(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.extended))
