"""The accumulator's state, and what can be asked of it wherever it sits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradacc_jax import precision
from gradacc_jax import window as windows
from gradacc_jax.window import Window

PyTree = Any


class SkipCounts(NamedTuple):
    """How often something was skipped (int32 scalars).

    Attributes:
      consecutive: micro-batches (with ``skip_nonfinite="window"``, windows) skipped in
        a row, up to now.
      total: the same since the beginning.
    """

    consecutive: jax.Array
    total: jax.Array


class AccumulateState(NamedTuple):
    r"""State of :func:`accumulate`: arrays only, whose structure never changes.

    Attributes:
      mini_step: micro-steps in the open window, int32.
      gradient_step: windows closed so far, int32; what schedules of k count.
      inner_state: the inner optimizer's state.
      acc_grads: the sum :math:`\sum w_i g_i`; after an emit it still holds the window
        that was closed, until the next micro-step overwrites it. ``()`` if k is 1.
      acc_weight: the sum :math:`\sum w_i`, of the open or the just closed window.
      acc_extra_args: for each name in ``average_extra_args`` its own sums.
      emitted: whether the last call closed a window, bool.
      skip_state: what ``should_skip_update_fn`` returned last, else ``()``.
      skips: a :class:`SkipCounts` where something can be skipped, else ``()``.
      grad_norm: with ``axis_name``, the global norm of the gradient that the last call
        gave to the inner optimizer, 0 if it gave none; else ``()``.

    With ``axis_name`` the three sums (``acc_grads``, ``acc_weight``,
    ``acc_extra_args``) differ from device to device and have a leading axis of devices.
    """

    mini_step: jax.Array
    gradient_step: jax.Array
    inner_state: Any
    acc_grads: PyTree
    acc_weight: jax.Array
    acc_extra_args: dict[str, Window]
    emitted: jax.Array
    skip_state: Any
    skips: Any
    grad_norm: Any = ()


def has_updated(state: PyTree) -> jax.Array:
    """Whether the last micro-step closed a window, so that parameters may have moved.

    Args:
      state: an optimizer state that holds one :class:`AccumulateState` somewhere.

    Returns:
      A bool scalar.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from gradacc_jax import accumulate, has_updated
      >>> print(has_updated(accumulate(optax.sgd(1.0), 2).init(jnp.zeros(3))))
      False
    """
    return jnp.asarray(_only(state).emitted)


def accumulation_metrics(state: PyTree) -> dict[str, jax.Array]:
    """Numbers worth logging about the window that is open or was just closed.

    Args:
      state: an optimizer state that holds one :class:`AccumulateState` somewhere.

    Returns:
      The scalars ``mini_step``, ``gradient_step``, ``emitted``, ``weight`` (the sum of
      weights), ``skipped`` and ``consecutive_skipped`` (0 where nothing can be), and
      the mean so far of each averaged extra argument, such as ``value`` (nan if no
      micro-batch of the window brought one).

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from gradacc_jax import accumulate, accumulation_metrics
      >>> tx = accumulate(optax.sgd(1.0), 4)
      >>> state = tx.init(jnp.zeros(3))
      >>> _, state = tx.update(jnp.ones(3), state, weight=6, value=2.5)
      >>> metrics = accumulation_metrics(state)
      >>> print(metrics["mini_step"], metrics["weight"], metrics["value"])
      1 6.0 2.5
    """
    held = over_devices(_only(state))
    skips = SkipCounts(zero_count(), zero_count()) if unused(held.skips) else held.skips
    metrics = {
        "mini_step": held.mini_step,
        "gradient_step": held.gradient_step,
        "emitted": held.emitted,
        "weight": held.acc_weight,
        "skipped": skips.total,
        "consecutive_skipped": skips.consecutive,
        **{name: windows.average(w) for name, w in held.acc_extra_args.items()},
    }
    # In the state of an nnx optimizer they are variables.
    return {name: jnp.asarray(number) for name, number in metrics.items()}


def raise_if_skipping(state: PyTree, limit: int) -> None:
    """Stops a run that does nothing but skip; call it between steps, outside ``jit``.

    Args:
      state: an optimizer state that holds one :class:`AccumulateState` somewhere.
      limit: how many micro-batches (``skip_nonfinite="window"``: windows) in a row may
        be skipped.

    Raises:
      RuntimeError: if more than ``limit`` in a row were.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from gradacc_jax import accumulate, raise_if_skipping
      >>> tx = accumulate(optax.sgd(1.0), 4, skip_nonfinite="micro_batch")
      >>> _, state = tx.update(jnp.array(jnp.nan), tx.init(jnp.array(0.0)))
      >>> raise_if_skipping(state, limit=10)
    """
    skips = _only(state).skips
    if unused(skips):
        raise ValueError(
            "state.skips=(): this accumulator skips nothing; give accumulate() "
            'skip_nonfinite="micro_batch", "window", or should_skip_update_fn'
        )
    if int(skips.consecutive) > limit:
        raise RuntimeError(
            f"skipped {int(skips.consecutive)} in a row, more than limit={limit} "
            f"({int(skips.total)} in all): gradients are not finite, or "
            "should_skip_update_fn refuses them; look at the data and the loss scale"
        )


def from_multi_steps_state(
    state: optax.MultiStepsState, use_grad_mean: bool = True
) -> AccumulateState:
    """A state of ``optax.MultiSteps``, in the middle of a window too, carried over.

    ``optax.MultiSteps`` keeps the mean of the gradients so far; an
    :class:`AccumulateState` keeps their sum, with weight 1 each.

    Args:
      state: the state, as loaded from a checkpoint, say.
      use_grad_mean: what ``optax.MultiSteps`` was given.

    Returns:
      The state for ``accumulate`` with the same first five options and the others at
      their defaults (and every_k_schedule not the number 1).

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from gradacc_jax import accumulate, from_multi_steps_state
      >>> params = jnp.array(0.0)
      >>> old = optax.MultiSteps(optax.sgd(1.0), 2)
      >>> _, state = old.update(jnp.array(1.0), old.init(params), params)
      >>> new = accumulate(optax.sgd(1.0), 2)
      >>> updates, _ = new.update(jnp.array(3.0), from_multi_steps_state(state), params)
      >>> print(updates)
      -2.0
    """
    if not isinstance(state, optax.MultiStepsState):
        raise ValueError(
            f"state={type(state).__name__} is not an optax.MultiStepsState; pass the "
            "state of the MultiSteps itself, not that of a chain around it"
        )
    mini_step = jnp.asarray(state.mini_step, jnp.int32)
    weight = mini_step.astype(precision.scalar_dtype())

    def total(mean: jax.Array) -> jax.Array:
        scaled = mean.astype(precision.working_dtype(mean.dtype))
        return precision.scale(scaled, weight).astype(mean.dtype)

    scalar = jax.ShapeDtypeStruct((), precision.scalar_dtype())
    return AccumulateState(
        mini_step=mini_step,
        gradient_step=jnp.asarray(state.gradient_step, jnp.int32),
        inner_state=precision.owned(state.inner_opt_state, ()),
        acc_grads=jax.tree.map(total, state.acc_grads)
        if use_grad_mean
        else state.acc_grads,
        acc_weight=weight,
        acc_extra_args={"value": windows.empty(scalar, None)},
        emitted=(mini_step == 0) & (jnp.asarray(state.gradient_step) > 0),
        skip_state=precision.owned(state.skip_state, ()),
        skips=()
        if unused(state.skip_state)
        else SkipCounts(zero_count(), zero_count()),
    )


def has_device_axis(held: AccumulateState) -> bool:
    """Whether the sums have an axis of devices, as ``jax.shard_map`` needs it."""
    return len(jnp.shape(held.acc_weight)) == 1


def over_devices(held: AccumulateState) -> AccumulateState:
    """The sums of weights and extra arguments over the devices that are here."""
    if not has_device_axis(held):
        return held
    return held._replace(
        acc_weight=jnp.sum(held.acc_weight),
        acc_extra_args=jax.tree.map(jnp.sum, held.acc_extra_args),
    )


def accumulators(state: PyTree) -> list[AccumulateState]:
    """Every :class:`AccumulateState` in an optimizer state, outermost ones only."""
    leaves = jax.tree.leaves(state, is_leaf=is_accumulator)
    return [leaf for leaf in leaves if is_accumulator(leaf)]


def check_state(state: Any) -> None:
    """Raises unless ``state`` is the state of a bare :func:`accumulate`."""
    if not isinstance(state, AccumulateState):
        raise ValueError(
            f"state={type(state).__name__} is not an AccumulateState; pass what "
            "tx.init(params) or the last tx.update returned (a MultiStepsState is "
            "converted by from_multi_steps_state)"
        )


def unused(field: Any) -> bool:
    """Whether a field of an :class:`AccumulateState` is not in use: ``()``."""
    return type(field) is tuple and not field


def is_accumulator(x: Any) -> bool:
    return isinstance(x, AccumulateState)


def _only(state: PyTree) -> AccumulateState:
    found = accumulators(state)
    if len(found) != 1:
        raise ValueError(
            f"the state holds {len(found)} AccumulateStates, expected 1; pass the "
            "state of a transformation with one accumulate(), or one AccumulateState "
            "(a MultiStepsState is converted by from_multi_steps_state)"
        )
    return found[0]


def replaced(state: PyTree, accumulator: AccumulateState) -> PyTree:
    """``state`` with its only accumulator's state replaced."""
    return jax.tree.map(
        lambda x: accumulator if is_accumulator(x) else x,
        state,
        is_leaf=is_accumulator,
    )


def zero_count() -> jax.Array:
    # Made anew each time: a donated state must not hold one buffer twice.
    return jnp.zeros((), jnp.int32)
