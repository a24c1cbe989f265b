"""One micro-step with its application: parameters in, parameters out.

``update`` must return a tree of zero updates, which someone then adds: two passes over
memory for nothing. Here the conditional is around both, so that parameters pass through
it untouched. But the accumulator may sit somewhere inside other transformations
(``chain``, ``partition``, ...), which only ``update`` can reach, and its addition must
stand outside the conditional. So one ``update`` is asked for in parts, by an extra
argument, a ``Part``, that travels through every wrapper: the addition first; then, on
either side of the conditional, the inner optimizer's run or the rest.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend as jex
import optax

from gradacc_jax.accumulation.micro_step import Part
from gradacc_jax.accumulation.state import (
    accumulators,
    has_device_axis,
    replaced,
    unused,
)

PyTree = Any


def apply_gradients(
    tx: optax.GradientTransformation,
    params: PyTree,
    state: PyTree,
    grads: PyTree,
    *,
    weight: Any = None,
    emit: Any = None,
    **extra_args: Any,
) -> tuple[PyTree, PyTree]:
    """One micro-step: ``tx.update`` and ``optax.apply_updates``, at the least cost.

    The result is that of the two calls. But a silent micro-step writes no zero updates
    and reads no parameter: it reads the gradients, and reads and writes the sums, 12
    bytes a float32 parameter, with no copy and no temporary. Jit it with the first two
    arguments donated::

        step = jax.jit(partial(apply_gradients, tx), donate_argnums=(0, 1))

    Arguments and results stand in one order, so donated buffers meet their results.

    Args:
      tx: any optax transformation that holds one :func:`accumulate` somewhere, bare or
        inside ``chain``, ``partition``, ``masked``, ... (With none it is a plain step;
        with several, or with a Python bool for ``emit``, the two calls are made.)
      params: the parameters.
      state: the state of ``tx``.
      grads: the micro-batch's gradients.
      weight: see :func:`accumulate`.
      emit: see :func:`accumulate`.
      **extra_args: passed to ``tx.update``.

    Returns:
      The new ``(params, state)``.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from functools import partial
      >>> from gradacc_jax import accumulate, apply_gradients
      >>> tx = optax.chain(optax.clip(1.0), accumulate(optax.sgd(0.5), 2))
      >>> params = jnp.array([1.0, 2.0])
      >>> state = tx.init(params)
      >>> step = jax.jit(partial(apply_gradients, tx), donate_argnums=(0, 1))
      >>> for gradient in (jnp.array([1.0, 9.0]), jnp.array([0.0, 1.0])):
      ...     params, state = step(params, state, gradient)
      >>> print(params)
      [0.75 1.5 ]
    """
    found = accumulators(state)
    if not found and (weight is not None or emit is not None):
        raise ValueError(
            f"weight={weight!r} and emit={emit!r} are for an accumulator, and the "
            "state of tx holds none; wrap the optimizer in accumulate(opt, k)"
        )
    update = optax.with_extra_args_support(tx).update
    if found:
        extra_args |= {"weight": weight, "emit": emit}
    added = None
    if (
        len(found) == 1
        and not isinstance(emit, bool)
        and not unused(found[0].acc_grads)
    ):
        added = _added(update, grads, state, params, extra_args)
    if added is None:
        part = Part("all")
        if found:
            extra_args |= {"accumulation_part": part}
        updates, state = update(grads, state, params, **extra_args)
        if (weight is not None or emit is not None) and not part.reached:
            raise ValueError(
                f"weight={weight!r} and emit={emit!r} do not reach the accumulator: a "
                "wrapper in tx drops extra arguments; let its update take **extra_args "
                "and pass them on (optax.GradientTransformationExtraArgs)"
            )
        return _apply_updates(params, updates), state
    (held,) = accumulators(added)
    runs = held.emitted
    if not has_device_axis(held):  # else it is known after the reduction
        runs = runs & (held.acc_weight > 0)
    return close(tx, params, added, grads, runs, **extra_args)


def _added(
    update: Callable[..., Any],
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    extra_args: dict[str, Any],
) -> PyTree | None:
    """``state`` with the micro-batch added to its accumulator, and nothing else done.

    None where that cannot be asked for: a wrapper drops extra arguments, or something
    around the accumulator has effects (a callback), which must not happen twice.
    """
    part = Part("add")

    def add(grads: PyTree, state: PyTree, params: PyTree) -> PyTree:
        return update(grads, state, params, accumulation_part=part, **extra_args)[1]

    jaxpr, shapes = jax.make_jaxpr(add, return_shape=True)(grads, state, params)
    if not part.reached or jaxpr.effects:
        return None
    leaves = jex.core.jaxpr_as_fun(jaxpr)(*jax.tree.leaves((grads, state, params)))
    added = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    return replaced(state, *accumulators(added))


def close(
    tx: optax.GradientTransformation,
    params: PyTree,
    added: PyTree,
    grads: PyTree,
    runs: Any,
    **extra_args: Any,
) -> tuple[PyTree, PyTree]:
    """The second half of a micro-step: the inner optimizer, where the window closes.

    Args:
      tx: as in :func:`apply_gradients`.
      params: the parameters.
      added: the state with the micro-batch in its accumulator, and ``emitted`` saying
        whether that closes the window.
      grads: the micro-batch's gradients, for their dtypes.
      runs: whether the inner optimizer is to run; with a bool no conditional is made.
      **extra_args: passed to ``tx.update``.

    Returns:
      The new ``(params, state)``.
    """
    update = optax.with_extra_args_support(tx).update
    (held,) = accumulators(added)

    def branch(name: str) -> Callable[..., Any]:
        def go(params: PyTree, added: PyTree) -> tuple[PyTree, PyTree]:
            updates, state = update(
                grads, added, params, accumulation_part=Part(name), **extra_args
            )
            (closed,) = accumulators(state)
            # The sums stay outside: a conditional would copy what it passes on.
            state = replaced(state, closed._replace(acc_grads=()))
            return _apply_updates(params, updates), state

        return go

    if isinstance(runs, bool):
        params, state = branch("run" if runs else "rest")(params, added)
    else:
        params, state = jax.lax.cond(runs, branch("run"), branch("rest"), params, added)
    (closed,) = accumulators(state)
    return params, replaced(state, closed._replace(acc_grads=held.acc_grads))


def _apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """``optax.apply_updates``, which knows neither float0 nor strict promotion."""

    def leaf(p: Any, u: Any) -> Any:
        if p is None or u.dtype == jax.dtypes.float0:
            return p
        return optax.apply_updates(p, u)

    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(leaf, params, updates, is_leaf=lambda x: x is None)
