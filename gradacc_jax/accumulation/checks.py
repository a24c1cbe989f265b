"""What :mod:`gradacc_jax.accumulation` refuses, and the words it does it with.

Everything here happens at construction or while tracing: nothing of it is in the
compiled program.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradacc_jax import precision, reduction

PyTree = Any


def checked_k(k: Any) -> Any:
    """``every_k_schedule`` as a Python int, a traced integer, or the function it is."""
    if callable(k):
        return k
    name = "every_k_schedule"
    if isinstance(k, jax.core.Tracer):
        check_traced_k(k, name)
        return k
    integer = isinstance(k, (int, np.integer, np.ndarray, jax.Array))
    if not integer or isinstance(k, bool) or np.shape(k) != () or not _is_int(k):
        raise ValueError(
            f"{name}={k!r} is not an integer scalar; pass how many micro-steps make a "
            "window, or a function from the gradient step to that"
        )
    if int(k) < 1:
        raise ValueError(f"{name}={int(k)} is less than 1; choose at least 1")
    return int(k)


def _is_int(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.integer))


def check_traced_k(k: Any, name: str) -> None:
    if jnp.shape(k) != () or not _is_int(k):
        raise ValueError(
            f"{name} has dtype {jnp.result_type(k)} and shape {jnp.shape(k)}; expected "
            "an integer scalar"
        )
    if not isinstance(k, jax.core.Tracer) and int(k) < 1:
        raise ValueError(f"{name}={int(k)} is less than 1; it must be at least 1")


def check_weight(weight: Any) -> None:
    if weight is None:
        return
    if jnp.shape(weight) != ():
        raise ValueError(
            f"weight has shape {jnp.shape(weight)}; expected a scalar, the number of "
            "loss terms in the micro-batch: sum your mask first"
        )
    if jnp.issubdtype(jnp.result_type(weight), jnp.complexfloating):
        raise ValueError(f"weight={weight!r} is complex; pass a real scalar >= 0")
    if not isinstance(weight, jax.core.Tracer) and not 0 <= float(weight) < np.inf:
        raise ValueError(
            f"weight={float(weight)} is not a weight; pass a finite scalar >= 0"
        )


def check_skip(skip: Any) -> None:
    if jnp.shape(skip) != () or not jnp.issubdtype(jnp.result_type(skip), jnp.bool_):
        raise ValueError(
            f"should_skip_update_fn returned dtype {jnp.result_type(skip)} and shape "
            f"{jnp.shape(skip)} for its decision; expected a bool scalar"
        )


def check_device_axis(state: Any, axes: reduction.Axes) -> None:
    reduction.num_devices(axes)  # or an error
    shape = jnp.shape(state.acc_weight)
    if shape != (1,):
        raise ValueError(
            f"state.acc_weight has shape {shape}, and with axis_name={axes} a device "
            "holds one entry of it, of shape (1,); make the state by tx.init inside "
            "jax.shard_map, and pass it with the specs that state_specs(tx, params) "
            "gives"
        )


def check_on_devices(grads: PyTree, emit: Any, axes: reduction.Axes) -> None:
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        if precision.has_gradient(g):
            reduction.check_not_reduced(
                f"grads{jax.tree_util.keystr(path)}",
                g,
                axes,
                "differentiate with respect to jax.lax.pcast(params, axis_name, "
                'to="varying"), as train_step does, or leave axis_name out',
            )
    if emit is not None:
        reduction.check_same("emit", emit, axes)


def check_unreduced_options(skip_nonfinite: Any, shard_accumulators: bool) -> None:
    """Raises for options that must look at gradients which nobody can read."""
    if skip_nonfinite is not None:
        raise ValueError(
            f"skip_nonfinite={skip_nonfinite!r} must look at gradients, and those of "
            "an explicit mesh axis are unreduced until the window closes; use "
            "jax.shard_map (train_step enters it by itself)"
        )
    if shard_accumulators:
        raise ValueError(
            "shard_accumulators=True on an explicit mesh axis; leave axis_name out and "
            "shard the state instead: state_shardings(tx, params, shard_over=...)"
        )


def check_inner_state(before: PyTree, after: PyTree) -> None:
    old: Any = jax.tree.structure(before)
    new = jax.tree.structure(after)
    if old != new:
        raise ValueError(
            "the inner optimizer's state changes its structure in update, from "
            f"{old} to {new}; accumulate() passes it through a conditional, so it must "
            "stay what init made it"
        )


def scalar_argument(name: str, value: Any) -> jax.Array:
    if jnp.shape(value) != ():
        raise ValueError(
            f"{name} has shape {jnp.shape(value)}, but average_extra_args averages "
            "scalars; pass a scalar, or leave the name out of average_extra_args"
        )
    if jnp.issubdtype(jnp.result_type(value), jnp.complexfloating):
        raise ValueError(f"{name}={value!r} is complex; only real scalars are averaged")
    return jnp.asarray(value)


def check_gradients(
    grads: PyTree, sums: PyTree, accumulator_dtype: Any, parts: int = 0
) -> None:
    """Raises unless the gradients fit the sums in structure, shape and dtype.

    With ``parts``, a sum is that part of the numbers that one device has, flat.
    """
    expected = dict(
        jax.tree_util.tree_leaves_with_path(sums, is_leaf=precision.is_masked)
    )
    given = dict(
        jax.tree_util.tree_leaves_with_path(grads, is_leaf=precision.is_masked)
    )
    if unmatched := given.keys() ^ expected.keys():
        path = min(unmatched, key=jax.tree_util.keystr)
        name = jax.tree_util.keystr(path)
        missing = (
            f"there is no parameter for grads{name}"
            if path in given
            else f"grads has nothing for the parameter{name}"
        )
        raise ValueError(
            f"{missing}; pass gradients of the structure that tx.init was given (mask "
            "what is frozen with optax.masked or optax.partition around accumulate)"
        )
    for path, total in expected.items():
        name, g = f"grads{jax.tree_util.keystr(path)}", given[path]
        if precision.is_masked(total):
            if precision.has_gradient(g):
                raise ValueError(
                    f"{name} has dtype {g.dtype}, but its parameter is not "
                    "differentiable; pass integer zeros or float0 there"
                )
            continue
        if precision.is_masked(g) or _held_shape(g, parts) != total.shape:
            shape = "none (masked)" if precision.is_masked(g) else jnp.shape(g)
            raise ValueError(
                f"{name} has shape {shape}, but its parameter has shape "
                f"{total.shape}; pass gradients of the parameters given to tx.init"
            )
        dtype = precision.dtype_of(g)
        if not precision.has_gradient(g):
            raise ValueError(
                f"{name} has dtype {dtype}, but its parameter is differentiable; pass "
                "its gradient"
            )
        wide = total.dtype
        if accumulator_dtype is not None:
            wide = precision.promote_types(accumulator_dtype, wide)
        if precision.promote_types(wide, dtype) != wide:
            raise ValueError(
                f"{name} has dtype {dtype}, which a sum of dtype {wide} would narrow; "
                "give the gradients the parameters' dtype, or accumulate() a wider "
                "accumulator_dtype"
            )


def _held_shape(g: Any, parts: int) -> tuple[int, ...]:
    """The shape of the sum of gradients like ``g``; see :func:`check_gradients`."""
    shape = jnp.shape(g)
    return (-(-math.prod(shape) // parts),) if parts else shape
