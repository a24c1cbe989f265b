"""One jitted, donated training step: the form most people should use.

A call differentiates the loss on what it is given and makes one micro-step of ``tx``.
With ``tx = accumulate(opt, k)`` that is one micro-batch, and every k-th call moves the
parameters; with a plain optimizer every call does.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import optax

from gradacc_jax import losses, precision, references
from gradacc_jax import window as windows
from gradacc_jax.accumulation import (
    AccumulateState,
    AccumulateTransformation,
    accumulation_metrics,
    apply_gradients,
)
from gradacc_jax.accumulation.application import close
from gradacc_jax.accumulation.checks import check_weight
from gradacc_jax.accumulation.state import accumulators, unused
from gradacc_jax.window import Window

PyTree = Any
LossFn = Callable[..., Any]
WeightFn = Callable[[PyTree], jax.Array]


class StepMetrics(NamedTuple):
    """What a training step reports; scalars but for ``aux``.

    Attributes:
      loss: the weighted mean of the loss over the window so far; when the window is
        closed, the loss of the full batch.
      grad_norm: the global norm of the window's mean gradient where this call gave it
        to the inner optimizer, else 0.
      weight: the sum of weights in the window so far.
      emitted: whether this call closed a window.
      skipped: how many micro-batches (or windows) were skipped since the beginning.
      aux: what the loss function returned beside the loss, of this micro-batch.
    """

    loss: jax.Array
    grad_norm: jax.Array
    weight: jax.Array
    emitted: jax.Array
    skipped: jax.Array
    aux: PyTree


def train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    weight_fn: WeightFn | None = None,
    donate: bool = True,
) -> Callable[..., tuple[PyTree, PyTree, StepMetrics]]:
    """Compiles a loss and an optimizer into one training step.

    The step is ``step(params, state, batch, key=None, *, emit=None) -> (params, state,
    metrics)``. With ``tx = accumulate(opt, k)``, ``batch`` is one micro-batch and every
    k-th call is an optimizer step; with a plain ``opt``, ``batch`` is the whole batch.

    With a bare :func:`accumulate`, whose sums have the parameters' dtypes, the backward
    pass adds its gradients straight into ``state.acc_grads``: a micro-step holds no
    gradient tree. Elsewhere gradients are made and then added; same values: inside
    ``chain`` or ``partition``, with ``skip_nonfinite="micro_batch"``, and with weights
    where the loss has a ``custom_vjp`` or float16 in it, since the weight is the loss's
    cotangent in place, which the one might clip and the other overflow.

    Args:
      loss_fn: ``loss_fn(params, batch)`` or ``loss_fn(params, batch, key)`` returning
        the loss, a real scalar, or ``(loss, aux)``. The loss is the mean over the
        micro-batch's loss terms (their sum, if ``tx`` has ``loss_reduction="sum"``).
      tx: the optimizer.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
      weight_fn: from the batch to its number of loss terms, a scalar such as the number
        of tokens that are not padding. Without it every micro-batch weighs the same.
      donate: whether parameters and state are updated in place. The arguments are then
        gone after the call: copy what is to be kept, ``jax.tree.map(jnp.copy, p)``.

    Returns:
      The step, a ``jax.jit`` function. Its ``key`` is folded with the number of the
      micro-batch in its window, so that one key may serve a whole window. ``emit=True``
      closes a window early, ``emit=False`` keeps it open, None leaves it to the count:
      at the end of an epoch write ``emit=True if last else None``. Each of the three
      compiles a program of its own.

    Raises:
      ValueError: when tracing, for a loss that is not a real scalar, or a ``tx`` with
        more than one accumulator.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from gradacc_jax import accumulate, train_step
      >>> def loss_fn(w, batch):
      ...     return jnp.mean((batch - w) ** 2)
      >>> tx = accumulate(optax.sgd(0.5), 2)
      >>> w = jnp.array(0.0)
      >>> state = tx.init(w)
      >>> step = train_step(loss_fn, tx, weight_fn=lambda batch: batch.size)
      >>> for batch in (jnp.array([1.0, 1.0, 1.0]), jnp.array([5.0])):
      ...     w, state, metrics = step(w, state, batch)
      ...     print(w, metrics.loss, metrics.emitted)
      0.0 1.0 False
      2.0 7.0 True
    """

    def step(
        params: PyTree,
        state: PyTree,
        batch: PyTree,
        key: jax.Array | None = None,
        *,
        emit: bool | None = None,
    ) -> tuple[PyTree, PyTree, StepMetrics]:
        return micro_step(
            loss_fn,
            tx,
            params,
            state,
            batch,
            key,
            has_aux=has_aux,
            weight_fn=weight_fn,
            emit=emit,
        )

    return jax.jit(
        step, static_argnames=("emit",), donate_argnums=(0, 1) if donate else ()
    )


def micro_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    params: PyTree,
    state: PyTree,
    batch: PyTree,
    key: jax.Array | None = None,
    *,
    has_aux: bool = False,
    weight_fn: WeightFn | None = None,
    emit: bool | None = None,
) -> tuple[PyTree, PyTree, StepMetrics]:
    """The body of :func:`train_step`, to be traced inside a ``jit`` of one's own."""
    _check_no_multi_steps(state)
    found = accumulators(state)
    if len(found) > 1:
        raise ValueError(
            f"tx holds {len(found)} accumulators, and a training step has one window; "
            "put one accumulate() around the whole optimizer"
        )
    if key is not None and found:
        key = jax.random.fold_in(key, found[0].mini_step)
    if emit is not None and not found:
        raise ValueError(
            f"emit={emit} is for an accumulator, and tx holds none; wrap the optimizer "
            "in accumulate(opt, k)"
        )
    weight = None if weight_fn is None else weight_fn(batch)
    check_weight(weight)
    if isinstance(tx, AccumulateTransformation):
        # Gradients will be like the parameters.
        state = tx.options.checked(params, state, weight, emit)
    weight = None if weight is None else jnp.asarray(weight)

    def loss(params: PyTree) -> tuple[jax.Array, PyTree]:
        out = loss_fn(params, batch) if key is None else loss_fn(params, batch, key)
        return losses.loss_and_aux(out, has_aux)

    norm: Any = None
    runs: Any
    if _in_place(tx, loss, params, state, weight):
        value, aux, added, runs = _added_in_place(tx, loss, params, state, weight, emit)
        # Whatever reads the parameters has done so before they are updated in place:
        # else XLA keeps a copy of those that only the loss or aux read (a weight
        # penalty, say). The same below.
        params, value, aux = jax.lax.optimization_barrier((params, value, aux))
        # The gradient's dtypes are the sums'.
        params, state = close(tx, params, added, added.acc_grads, runs, value=value)
    else:
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True, allow_int=True)(
            params
        )
        params, value, aux = jax.lax.optimization_barrier((params, value, aux))
        norm = _global_norm(grads)
        given = {"weight": weight, "emit": emit} if found else {}
        params, state = apply_gradients(tx, params, state, grads, value=value, **given)
        runs = emit is not False
        for held in accumulators(state):
            runs = runs & held.emitted & (held.acc_weight > 0)
    return params, state, _metrics(state, value, norm, weight, aux, runs)


def _in_place(
    tx: optax.GradientTransformation,
    loss: Callable[[PyTree], tuple[jax.Array, PyTree]],
    params: PyTree,
    state: PyTree,
    weight: jax.Array | None,
) -> TypeGuard[AccumulateTransformation]:
    """Whether the backward pass may add into the accumulator itself."""
    if not isinstance(tx, AccumulateTransformation) or unused(state.acc_grads):
        return False
    options = tx.options
    # What a micro-batch may be dropped for must be known before it is added.
    if options.skip_nonfinite == "micro_batch" or options.should_skip_update_fn:
        return False
    weighted = weight is not None and options.weighted
    if not references.serve(loss, params, state.acc_grads, weighted):
        return False
    # The weight becomes the loss's cotangent, and must not be rounded to bfloat16.
    value, _ = jax.eval_shape(loss, params)
    return not weighted or value.dtype == precision.scalar_dtype()


def _added_in_place(
    tx: AccumulateTransformation,
    loss: Callable[[PyTree], tuple[jax.Array, PyTree]],
    params: PyTree,
    state: AccumulateState,
    weight: jax.Array | None,
    emit: bool | None,
) -> tuple[jax.Array, PyTree, AccumulateState, Any]:
    """Loss, aux, the state with the micro-batch in it, and whether ``tx`` is to run."""
    first = state.mini_step == 0
    options = tx.options

    def both_passes(total: PyTree) -> tuple[jax.Array, PyTree, PyTree]:
        value, vjp, aux = jax.vjp(loss, params, has_aux=True)
        cotangent = jnp.ones_like(value)
        if weight is not None and options.weighted:
            cotangent = weight.astype(value.dtype)
        return value, aux, references.add(vjp, total, cotangent)

    def forward_pass(total: PyTree) -> tuple[jax.Array, PyTree, PyTree]:
        return *loss(params), total

    total = windows.opened(state.acc_grads, first=first)
    if weight is None:
        value, aux, total = both_passes(total)
    else:
        # 0 times nan is nan: a micro-batch of weight 0 gets no backward pass.
        value, aux, total = jax.lax.cond(weight != 0, both_passes, forward_pass, total)
    held = Window(total, windows.weighed(state.acc_weight, weight, first=first))
    added, closes, _ = options.settle(state, held, weight, emit, {"value": value})
    return value, aux, added, options.runs(closes, added.acc_weight, weight)


def _metrics(
    state: PyTree,
    value: jax.Array,
    norm: Any,
    weight: jax.Array | None,
    aux: PyTree,
    runs: Any,
) -> StepMetrics:
    found = accumulators(state)
    if not found:
        one = jnp.ones((), precision.scalar_dtype())
        return StepMetrics(
            loss=value,
            grad_norm=norm,
            weight=one if weight is None else weight.astype(one.dtype),
            emitted=jnp.ones((), bool),
            skipped=jnp.zeros((), jnp.int32),
            aux=aux,
        )
    (held,) = found
    of_window = accumulation_metrics(held)

    def window_norm() -> jax.Array:
        window = Window(held.acc_grads, held.acc_weight)
        return _global_norm(windows.close(window, window.total, dtype=jnp.float32))

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


def _global_norm(grads: PyTree) -> jax.Array:
    leaves = [g for g in jax.tree.leaves(grads) if precision.has_gradient(g)]
    return optax.tree.norm([g.astype(precision.working_dtype(g.dtype)) for g in leaves])


def _check_no_multi_steps(state: PyTree) -> None:
    def is_multi_steps(x: Any) -> bool:
        return isinstance(x, optax.MultiStepsState)

    if any(map(is_multi_steps, jax.tree.leaves(state, is_leaf=is_multi_steps))):
        raise ValueError(
            "tx holds an optax.MultiSteps, whose windows a training step cannot see: "
            "weights would be lost, and every micro-batch count as a step; replace it "
            "by accumulate() with the same arguments, and a state of it by "
            "from_multi_steps_state"
        )
