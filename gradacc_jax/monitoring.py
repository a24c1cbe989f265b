"""What a training step tells of itself."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradacc_jax import precision, reduction
from gradacc_jax import window as windows
from gradacc_jax.accumulation import accumulation_metrics
from gradacc_jax.accumulation.state import (
    AccumulateState,
    accumulators,
    has_device_axis,
    unused,
)
from gradacc_jax.window import Window

PyTree = Any


class StepMetrics(NamedTuple):
    """What a training step reports; scalars but for ``aux``.

    Attributes:
      loss: the weighted mean of the loss over the window so far; when the window is
        closed, the loss of the full batch. On many devices (``axis_name``) it is known
        then only, and nan before: to know it they would have to talk to each other.
      grad_norm: the global norm of the window's mean gradient where this call gave it
        to the inner optimizer, else 0.
      weight: the sum of weights in the window so far. Without a ``weight_fn`` a call
        weighs 1 (on each device); with one that returns a dict it is a dict. On many
        devices it is nan until the window is closed, as the loss is.
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
    axes: reduction.Axes = (),
) -> StepMetrics:
    """The metrics of a micro-step.

    Args:
      state: the optimizer's state after it.
      value: its loss.
      norm: its gradient's norm, where there is no accumulator.
      weight: its weight, or None.
      aux: what the loss function returned beside.
      runs: whether it gave a gradient to the inner optimizer.
      axes: the mesh axes that an accumulator's sums differ over.
    """
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
    if has_device_axis(held):
        return _of_devices(held, value, aux, axes)
    of_window = accumulation_metrics(held)

    def window_norm() -> jax.Array:
        window = Window(held.acc_grads, held.acc_weight)
        mean = windows.close(window, window.total, dtype=jnp.float32)
        return precision.global_norm(mean)

    if not unused(held.grad_norm):
        norm = held.grad_norm
    elif not unused(held.acc_grads):
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


def _of_devices(
    held: AccumulateState, value: jax.Array, aux: PyTree, axes: reduction.Axes
) -> StepMetrics:
    """The metrics where sums differ from device to device: of closed windows."""

    def closed() -> tuple[jax.Array, jax.Array]:
        sums = held.acc_weight, held.acc_extra_args
        weight, extras = jax.tree.map(lambda x: x[0], reduction.all_reduce(sums, axes))
        loss = jnp.full((), jnp.nan, value.dtype)
        if "value" in extras:
            loss = windows.average(extras["value"])
        return loss, weight

    def open_still() -> tuple[jax.Array, jax.Array]:
        return jax.tree.map(
            lambda x: jnp.full(x.shape, jnp.nan, x.dtype), jax.eval_shape(closed)
        )

    loss, weight = jax.lax.cond(held.emitted, closed, open_still)
    of_window = accumulation_metrics(held)
    return StepMetrics(
        loss=loss,
        grad_norm=held.grad_norm,
        weight=weight,
        emitted=of_window["emitted"],
        skipped=of_window["skipped"],
        aux=aux,
    )
