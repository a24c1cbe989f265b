"""The optax transformation: options in, checked, and optax's face around them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradacc_jax import precision, reduction
from gradacc_jax.accumulation import checks
from gradacc_jax.accumulation.micro_step import Accumulation
from gradacc_jax.accumulation.state import has_updated

PyTree = Any
Schedule = Callable[[jax.Array], Any]
Accumulator = Callable[[optax.GradientTransformation], optax.GradientTransformation]


class AccumulateTransformation(optax.GradientTransformationExtraArgs):
    """What :func:`accumulate` returns: optax's face, and MultiSteps'."""

    options: Accumulation

    def has_updated(self, state: PyTree) -> jax.Array:
        """Whether the last ``update`` closed a window; see :func:`has_updated`."""
        return has_updated(state)

    def gradient_transformation(self) -> "AccumulateTransformation":
        """Returns itself: it is a ``GradientTransformation`` already."""
        return self


def accumulate(
    opt: optax.GradientTransformation,
    every_k_schedule: int | Schedule,
    use_grad_mean: bool = True,
    should_skip_update_fn: Callable[..., tuple[Any, Any]] | None = None,
    accumulator_dtype: Any = jnp.float32,
    *,
    loss_reduction: str = "mean",
    skip_nonfinite: str | None = None,
    average_extra_args: tuple[str, ...] = ("value",),
    inner_dtype: Any = None,
    axis_name: Any = None,
    shard_accumulators: bool = False,
) -> AccumulateTransformation:
    r"""Runs ``opt`` once per window of k micro-steps, on the window's mean gradient.

    The micro-step :math:`i` of a window brings the gradient :math:`g_i` of a mean over
    :math:`w_i` loss terms. The first k - 1 micro-steps return zero updates; the k-th
    gives ``opt``

    .. math:: G = \Big(\sum_i w_i g_i\Big) \cdot \frac{1}{\sum_i w_i},

    the gradient of the mean over all loss terms of the window, and returns its updates.
    The first five parameters are those of ``optax.MultiSteps``.

    The ``update`` of the result is ``update(grads, state, params=None, *, weight=None,
    emit=None, **extra_args)``:

    - ``weight``: a scalar >= 0, how many loss terms (tokens, examples) the micro-batch
      stands for; None is 1. A micro-batch of weight 0 contributes nothing, even if its
      gradients are nan. A window of total weight 0 changes nothing but the counters.
    - ``emit``: when the window closes. None: when its count reaches k. An array: then,
      or when it is true (the last batch of an epoch, say). A Python bool decides alone,
      while tracing: the program has no conditional for it.
    - ``extra_args`` go to ``opt``, those in ``average_extra_args`` as window means.

    Zero updates are ``-0.0``: adding them leaves every parameter bit as it was.

    Args:
      opt: the inner optimizer. It runs once a window: its schedules, bias correction
        and counters count emitted steps.
      every_k_schedule: k, an integer scalar >= 1, or a function from the gradient step
        (windows closed so far) to k. With a static k of 1 the result is ``opt``.
      use_grad_mean: whether ``opt`` gets the mean; if False, :math:`\sum_i w_i g_i`.
      should_skip_update_fn: as in ``optax.MultiSteps``: ``f(grads, gradient_step,
        params) -> (skip, skip_state)``; a skipped micro-step does not count, so the
        window becomes longer, by a decision that depends on the data.
      accumulator_dtype: least dtype of the sums: they have ``promote_types`` of it and
        the parameter's dtype. None takes the parameter's.
      loss_reduction: "mean" if gradients are of means over ``weight`` terms; "sum" if
        they are of sums: then :math:`G = \sum_i g_i / \sum_i w_i`.
      skip_nonfinite: "micro_batch" leaves a micro-batch with a nan or inf gradient out
        of its window (it counts towards k, with weight 0); "window" gives up a window
        whose sum is not finite. Counters never depend on the data. None checks nothing.
      average_extra_args: names of scalar extra arguments that ``opt`` gets as weighted
        means over the window, such as the loss ``value`` of ``reduce_on_plateau``.
      inner_dtype: least dtype of the gradient that ``opt`` sees; by default it sees the
        gradient's own dtype. Its state keeps the dtypes of ``opt.init``.
      axis_name: inside ``jax.shard_map``, the mesh axis (or a tuple of them) over which
        examples are spread. Each device keeps the sums of its own gradients, which must
        not be reduced (differentiate with respect to parameters that are cast to
        varying, as :func:`gradacc_jax.train_step` does), and its own weights; one
        all-reduce at the end of a window makes one gradient of them. ``init`` and
        ``update`` then run inside ``jax.shard_map``, with the specs of
        :func:`gradacc_jax.state_specs`: the sums have a leading axis of devices.
        ``skip_nonfinite="micro_batch"`` adds an all-reduce of one number to every
        micro-step, since all devices leave out the micro-batch or none.
      shard_accumulators: with ``axis_name``, reduce each micro-batch's gradients at
        once, into shards: of the sums a device holds 1 / D, instead of all, and for a
        window of k micro-steps it moves about (k + 2) P (D - 1) / D bytes for P bytes
        of gradients, instead of 2 P (D - 1) / D.

    Returns:
      An :class:`AccumulateTransformation`. Memory: one sum per differentiable parameter
      in the accumulator's dtype (none for masked parameters, or if k is 1), besides the
      state of ``opt``. Use :func:`apply_gradients` with it: a silent micro-step then
      reads the gradients, and reads and writes the sums, and nothing else.

    Raises:
      ValueError: for an option that makes no sense; when tracing ``update``, for
        gradients that do not fit the parameters, and for a weight that is known to be
        negative or nan.

    References:
      The face: `optax.MultiSteps
      <https://optax.readthedocs.io/en/latest/api/optimizer_wrappers.html>`_.

    Examples:
      Two micro-batches of 3 tokens and 1 token:

      >>> import jax.numpy as jnp, optax
      >>> from gradacc_jax import accumulate
      >>> tx = accumulate(optax.sgd(1.0), 2)
      >>> params = jnp.array(0.0)
      >>> state = tx.init(params)
      >>> for gradient, tokens in ((1.0, 3), (5.0, 1)):
      ...     updates, state = tx.update(
      ...         jnp.array(gradient), state, params, weight=tokens
      ...     )
      ...     params = optax.apply_updates(params, updates)
      ...     print(params, state.emitted)
      0.0 False
      -2.0 True
    """
    if not (hasattr(opt, "init") and hasattr(opt, "update")):
        raise ValueError(
            f"opt={opt!r} is not an optax transformation; pass one, such as "
            "optax.adamw(1e-3)"
        )
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(
            f'loss_reduction={loss_reduction!r} is not known; choose "mean" or "sum"'
        )
    if skip_nonfinite not in (None, "micro_batch", "window"):
        raise ValueError(
            f"skip_nonfinite={skip_nonfinite!r} is not known; choose None, "
            '"micro_batch" or "window"'
        )
    if skip_nonfinite is not None and should_skip_update_fn is not None:
        raise ValueError(
            f"skip_nonfinite={skip_nonfinite!r} and should_skip_update_fn are both "
            "given; choose one: the first keeps windows at k micro-steps, the second "
            "lengthens them"
        )
    axes = reduction.checked_axes(axis_name)
    if axes and should_skip_update_fn is not None:
        raise ValueError(
            f"axis_name={axis_name!r} and should_skip_update_fn: it would decide by "
            "one device's gradients how long the window is; choose skip_nonfinite"
        )
    if shard_accumulators and not axes:
        raise ValueError(
            "shard_accumulators=True needs axis_name, the mesh axis over which the "
            "sums are spread; under plain jit, shard the state: state_shardings"
        )
    if not isinstance(average_extra_args, (tuple, list)):
        raise ValueError(
            f"average_extra_args={average_extra_args!r} is not a tuple of names; pass "
            'one such as ("value",), or ()'
        )
    return _transformation(
        Accumulation(
            inner=optax.with_extra_args_support(opt),
            k=checks.checked_k(every_k_schedule),
            use_grad_mean=bool(use_grad_mean),
            should_skip_update_fn=should_skip_update_fn,
            accumulator_dtype=precision.check_dtype(
                "accumulator_dtype", accumulator_dtype
            ),
            terms_are_sums=loss_reduction == "sum",
            skip_nonfinite=skip_nonfinite,
            average_extra_args=tuple(average_extra_args),
            inner_dtype=precision.check_dtype("inner_dtype", inner_dtype),
            axes=axes,
            shard_accumulators=bool(shard_accumulators),
        )
    )


def process(
    pre: optax.GradientTransformation,
    accumulator: Accumulator,
    post: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """``optax.chain(pre, accumulator(post))``, in the order in which gradients flow.

    Where a transformation stands decides what it does: ``pre`` sees every micro-batch's
    gradients (clipping there bounds each micro-batch), ``post`` sees the window's
    gradient once (clipping there bounds the step; weight decay belongs here, or it
    would be applied at every micro-step).

    Args:
      pre: runs at every micro-step.
      accumulator: from an optimizer to its accumulating form.
      post: runs once per window.

    Returns:
      An optax transformation.

    Examples:
      >>> import optax
      >>> from gradacc_jax import accumulate, process
      >>> tx = process(
      ...     optax.zero_nans(),
      ...     lambda opt: accumulate(opt, 8),
      ...     optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
      ... )
    """
    return optax.chain(pre, accumulator(post))


def _transformation(options: Accumulation) -> AccumulateTransformation:
    update: Any = options.update  # optax's type for it knows of no named arguments
    tx = AccumulateTransformation(options.init, update)
    tx.options = options
    return tx
