"""What a training step tells of itself."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradacc_jax import precision
from gradacc_jax import window as windows
from gradacc_jax.accumulation import accumulation_metrics
from gradacc_jax.accumulation.state import accumulators, unused
from gradacc_jax.window import Window

PyTree = Any


class StepMetrics(NamedTuple):
    """What a training step reports; scalars but for ``aux``.

    Attributes:
      loss: the weighted mean of the loss over the window so far; when the window is
        closed, the loss of the full batch.
      grad_norm: the global norm of the window's mean gradient where this call gave it
        to the inner optimizer, else 0.
      weight: the sum of weights in the window so far. Without a ``weight_fn`` a call
        weighs 1; with one that returns a dict it is a dict.
      emitted: whether this call closed a window.
      skipped: how many micro-batches (or windows) were skipped since the beginning.
      aux: what the loss function returned beside the loss in this call; with several
        micro-batches in a call, reduced as ``aux_reduction`` says.
    """

    loss: jax.Array
    grad_norm: jax.Array
    weight: jax.Array
    emitted: jax.Array
    skipped: jax.Array
    aux: PyTree


def step_metrics(
    state: PyTree,
    value: jax.Array,
    norm: Any,
    weight: PyTree,
    aux: PyTree,
    runs: Any,
) -> StepMetrics:
    found = accumulators(state)
    if not found:
        one = jnp.ones((), precision.scalar_dtype())
        return StepMetrics(
            loss=value,
            grad_norm=norm,
            weight=(
                one
                if weight is None
                else jax.tree.map(lambda w: w.astype(one.dtype), weight)
            ),
            emitted=jnp.ones((), bool),
            skipped=jnp.zeros((), jnp.int32),
            aux=aux,
        )
    (held,) = found
    of_window = accumulation_metrics(held)

    def window_norm() -> jax.Array:
        window = Window(held.acc_grads, held.acc_weight)
        return global_norm(windows.close(window, window.total, dtype=jnp.float32))

    if not unused(held.acc_grads):
        # After an emit the sum is still there, until the next micro-step.
        def no_norm() -> jax.Array:
            return jnp.zeros_like(jax.eval_shape(window_norm))

        if isinstance(runs, bool):
            norm = window_norm() if runs else no_norm()
        else:
            norm = jax.lax.cond(runs, window_norm, no_norm)
    return StepMetrics(
        loss=of_window.get("value", value),
        grad_norm=norm,
        weight=of_window["weight"],
        emitted=of_window["emitted"],
        skipped=of_window["skipped"],
        aux=aux,
    )


def global_norm(grads: PyTree) -> jax.Array:
    leaves = [g for g in jax.tree.leaves(grads) if precision.has_gradient(g)]
    return optax.tree.norm([g.astype(precision.working_dtype(g.dtype)) for g in leaves])
