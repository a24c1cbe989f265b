"""What a training step does in one call: gradients, then one micro-step of ``tx``.

Gradients come by one of three ways, and the caller sees the same numbers: added to the
accumulator during the backward pass (``references.py``), made and then added, or summed
over the micro-batches of a batch that is split (``microbatching.py``).
"""

from collections.abc import Callable
import dataclasses
import functools
import inspect
import operator
from typing import Any, NamedTuple, TypeGuard
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradacc_jax import (
    arguments,
    auxiliary,
    losses,
    microbatching,
    precision,
    reduction,
    references,
    splitting,
)
from gradacc_jax import window as windows
from gradacc_jax.accumulation import (
    AccumulateState,
    AccumulateTransformation,
    apply_gradients,
)
from gradacc_jax.accumulation.application import close
from gradacc_jax.accumulation.checks import check_weight
from gradacc_jax.accumulation.state import accumulators, has_device_axis, unused
from gradacc_jax.checkpointing import policies
from gradacc_jax.monitoring import StepMetrics, step_metrics
from gradacc_jax.window import Window

PyTree = Any
LossFn = Callable[..., Any]
WeightFn = Callable[[PyTree], PyTree]


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The options that all forms of the training step share; see :func:`train_step`."""

    num_microbatches: int = 1
    microbatch_size: int | None = None
    batch_axis: PyTree = 0
    has_aux: bool = False
    weight_fn: WeightFn | None = None
    loss_reduction: str | None = None
    aux_reduction: PyTree = "mean"
    axis_name: Any = None
    unroll: int = 1

    @property
    def axes(self) -> reduction.Axes:
        return reduction.checked_axes(self.axis_name)

    def __post_init__(self) -> None:
        k = arguments.count("num_microbatches", self.num_microbatches)
        size = arguments.count("microbatch_size", self.microbatch_size)
        if not isinstance(k, int):
            raise ValueError(
                f"num_microbatches={k}; choose a Python integer, at least 1 (a traced "
                "number of micro-batches is for value_and_grad)"
            )
        object.__setattr__(self, "num_microbatches", k)
        object.__setattr__(self, "microbatch_size", size)
        if self.loss_reduction not in (None, "mean", "sum"):
            raise ValueError(
                f"loss_reduction={self.loss_reduction!r} is not known; choose "
                '"mean" or "sum"'
            )
        auxiliary.check_reduction(self.aux_reduction)
        object.__setattr__(self, "axis_name", self.axes or None)


def micro_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    params: PyTree,
    state: PyTree,
    carried: PyTree,
    batch: PyTree,
    key: jax.Array | None = None,
    *,
    options: StepOptions,
    emit: bool | None = None,
) -> tuple[PyTree, PyTree, PyTree, StepMetrics]:
    """The body of :func:`train_step`, with state that the model carries.

    Args:
      loss_fn: ``loss_fn(params, carried, batch)``, or with a key behind, returning
        ``(loss, (carried, aux))``.
      tx: the optimizer.
      params: the parameters.
      state: the optimizer's state.
      carried: what goes from one micro-batch to the next, such as batch statistics.
      batch: one micro-batch, or the batch that is split into several.
      key: None, or what is folded with the micro-batch's number.
      options: as for :func:`train_step`.
      emit: as for a step.

    Returns:
      The new ``(params, state, carried, metrics)``.
    """
    _check_no_multi_steps(state)
    found = accumulators(state)
    if len(found) > 1:
        raise ValueError(
            f"tx holds {len(found)} accumulators, and a training step has one window; "
            "put one accumulate() around the whole optimizer"
        )
    if emit is not None and not found:
        raise ValueError(
            f"emit={emit} is for an accumulator, and tx holds none; wrap the optimizer "
            "in accumulate(opt, k)"
        )
    options = _resolved(options, tx)
    reduces_itself = bool(found) and not unused(found[0].grad_norm)
    if bool(options.axes) != reduces_itself and found:
        raise ValueError(
            f"axis_name={options.axis_name!r} but the accumulator in tx was given "
            f"{'one' if reduces_itself else 'none'}; pass the same to both: "
            "accumulate(..., axis_name=...) reduces once a window"
        )
    if key is not None and found:
        key = jax.random.fold_in(key, _number_in_window(found[0], options.axes))
    if _in_parts(options, batch, found):
        if found:
            _warn_of_both(tx, options, batch)
        made = _in_one_call(
            loss_fn, params, carried, batch, key, options, accumulates=bool(found)
        )
        return _applied(tx, params, state, made, emit, options.axes)

    weight = None if options.weight_fn is None else options.weight_fn(batch)
    check_weight(weight)
    local = state
    # Differentiated while it varies, a parameter has a gradient of this device.
    given, params = params, reduction.vary(params, options.axes)
    if isinstance(tx, AccumulateTransformation):
        # Gradients will be like the parameters.
        local = tx.options.checked(params, state, weight, emit)
    weight = None if weight is None else jnp.asarray(weight)

    def loss(params: PyTree) -> tuple[jax.Array, PyTree]:
        keys = () if key is None else (key,)
        value, rest = loss_fn(params, carried, batch, *keys)
        losses.check_loss(value)
        return value, rest

    if options.axes:
        reduction.check_batch(batch, params, options.axes)
        reduction.check_loss(jax.eval_shape(loss, params)[0], options.axes)
    talk = reduction.Talk()
    if weight is not None:
        talk = reduction.talk(loss, params, options.axes)
    if not _in_place(tx, loss, params, local, weight):
        reduction.check_weighable(talk)
        (value, (new, aux)), grads = jax.value_and_grad(
            loss, has_aux=True, allow_int=True
        )(params)
        norm = precision.global_norm(grads)
        new = _carried_on(weight, new, carried)
        made = _Gradients(grads, norm, value, weight, new, aux)
        return _applied(tx, given, state, made, emit, options.axes)

    value, rest, added, runs = _added_in_place(
        tx, loss, params, local, weight, emit, together=talk.at_all
    )
    params, value, (new, aux) = _after_reading(given, value, rest)
    carried = _carried_on(weight, new, carried)
    # The gradient's dtypes are the sums'.
    like = added.acc_grads
    added = tx.options.stored(added)
    params, state = close(tx, params, added, like, runs, weight=weight, value=value)
    metrics = step_metrics(state, value, None, weight, aux, runs, options.axes)
    reduction.check_alike(params, state, options.axes)
    return params, state, carried, metrics


def stateless(loss_fn: LossFn, has_aux: bool) -> LossFn:
    """The user's loss in the form that :func:`micro_step` takes."""

    def loss(params: PyTree, carried: PyTree, *args: Any) -> tuple[Any, PyTree]:
        value, aux = losses.pair_of(loss_fn(params, *args), has_aux)
        return value, (carried, aux)

    return loss


def with_policy(loss_fn: LossFn, policy: Any) -> LossFn:
    """The loss with a policy handed to it, which it applies to its blocks."""
    policy = policies.resolve(policy)
    if policy == policies.none:
        return loss_fn  # which may have a policy of its own
    if not takes_policy(loss_fn):
        raise ValueError(
            f"policy={policy!r}, and the loss function has no keyword `policy` to take "
            "it; applied to a whole loss a policy saves nothing. Let the loss apply it "
            "to the blocks of its model, by remat(block, policy=policy), or give it a "
            "model made by remat_modules(model, policy)"
        )
    return functools.partial(loss_fn, policy=policy)


def takes_policy(loss_fn: LossFn) -> bool:
    """Whether a loss has a keyword ``policy``, behind its parameters and batch."""
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # some callables have none
        return False
    named = [p for p in parameters if p.name == "policy"]
    return bool(named) and named[0] not in parameters[:2]


def _resolved(options: StepOptions, tx: optax.GradientTransformation) -> StepOptions:
    """The options with the reduction of the loss that ``tx`` asks for."""
    asked = options.loss_reduction
    if isinstance(tx, AccumulateTransformation):
        of_tx = "sum" if tx.options.terms_are_sums else "mean"
        if asked not in (None, of_tx):
            raise ValueError(
                f"loss_reduction={asked!r} but tx = accumulate(..., loss_reduction="
                f"{of_tx!r}); pass the same to both"
            )
        asked = of_tx
        if tx.options.axes:
            if options.axes not in ((), tx.options.axes):
                raise ValueError(
                    f"axis_name={options.axis_name!r} but tx = accumulate(..., "
                    f"axis_name={tx.options.axes!r}); pass the same to both"
                )
            options = dataclasses.replace(options, axis_name=tx.options.axes)
    return dataclasses.replace(options, loss_reduction=asked or "mean")


def _in_parts(
    options: StepOptions, batch: PyTree, found: list[AccumulateState]
) -> bool:
    """Whether a call is more than one pass over its batch, or needs a division."""
    weights = None
    if options.weight_fn is not None:
        weights = jax.eval_shape(options.weight_fn, batch)
    named = weights is not None and not losses.is_leaf(weights)
    if named and found:
        raise ValueError(
            f"weight_fn returned {jax.tree.structure(weights)}, and an accumulator "
            "has one weight; give several to a plain optimizer and num_microbatches=k"
        )
    divides = options.loss_reduction == "sum" and weights is not None and not found
    several = options.num_microbatches > 1 or options.microbatch_size is not None
    # With no accumulator there, the loop reduces over devices, be it of one turn.
    return several or named or divides or (bool(options.axes) and not found)


class _Gradients(NamedTuple):
    """What a call's batch gives, before anything is applied."""

    grads: PyTree
    norm: jax.Array
    value: jax.Array
    weight: PyTree
    carried: PyTree
    aux: PyTree


def _in_one_call(
    loss_fn: LossFn,
    params: PyTree,
    carried: PyTree,
    batch: PyTree,
    key: jax.Array | None,
    options: StepOptions,
    *,
    accumulates: bool,
) -> _Gradients:
    """What a batch gives, one micro-batch after the other."""
    leaves, tree = jax.tree.flatten(params)
    trained = [x for x in leaves if precision.has_gradient(x)]

    def merged(trained: list[Any]) -> PyTree:
        given = iter(trained)
        return jax.tree.unflatten(
            tree, [next(given) if precision.has_gradient(x) else x for x in leaves]
        )

    def loss(trained: list[Any], batch: PyTree, carried: PyTree, *key: Any) -> Any:
        value, (carried, aux) = loss_fn(merged(trained), carried, batch, *key)
        return value, (carried, (_weights(options.weight_fn, batch), aux))

    # Sums are divided by the accumulator, when its window closes.
    left_to_tx = accumulates and options.loss_reduction == "sum"
    if accumulates:  # which reduces
        trained = reduction.vary(trained, options.axes)
    settings = microbatching.Options(
        has_aux=True,
        num_microbatches=(
            None
            if options.num_microbatches == 1 and options.microbatch_size is not None
            else options.num_microbatches
        ),
        microbatch_size=options.microbatch_size,
        batch_axis=options.batch_axis,
        weight_fn=None if left_to_tx else options.weight_fn,
        reduction=options.loss_reduction or "mean",
        aux_reduction=("sum", options.aux_reduction),
        state_argnums=2,
        key_argnums=() if key is None else 3,
        axis_name=None if accumulates else options.axis_name,
        loss_axes=options.axes if accumulates else (),
        unroll=options.unroll,
    )
    args = (trained, batch, carried) if key is None else (trained, batch, carried, key)
    call = microbatching.Call(settings, loss, args)
    found = call.accumulated()
    # Taken of the sums: of the mean, read twice then, XLA would make an array.
    total, total_weight = found.held.grads
    norm = precision.global_norm(total)
    if found.divides:
        norm = norm / jnp.where(total_weight == 0, 1, total_weight)
    (value, (carried, (weight, aux))), grads = call.result(found)
    given = iter(grads)
    grads = [
        next(given)
        if precision.has_gradient(x)
        else np.zeros(jnp.shape(x), jax.dtypes.float0)
        for x in leaves
    ]
    grads = jax.tree.unflatten(tree, grads)
    return _Gradients(grads, norm, value, weight, carried, aux)


def _applied(
    tx: optax.GradientTransformation,
    params: PyTree,
    state: PyTree,
    made: _Gradients,
    emit: bool | None,
    axes: reduction.Axes,
) -> tuple[PyTree, PyTree, PyTree, StepMetrics]:
    """The end of a micro-step that has made its gradients."""
    params, value, (carried, aux) = _after_reading(
        params, made.value, (made.carried, made.aux)
    )
    weight, found = made.weight, accumulators(state)
    own = tx.options if isinstance(tx, AccumulateTransformation) else None
    if own is not None and own.is_single and own.divides and weight is not None:
        # There is no accumulator whose window could tell the norm.
        made = made._replace(norm=made.norm / jnp.where(weight == 0, 1, weight))

    def apply(params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        given = {"weight": weight, "emit": emit} if found else {}
        return apply_gradients(tx, params, state, made.grads, value=value, **given)

    if found or weight is None:
        params, state = apply(params, state)
    else:
        # As in an accumulator's window: no terms, no step.
        some = [w > 0 for w in jax.tree.leaves(weight)]
        any_term = functools.reduce(operator.or_, some)
        params, state = jax.lax.cond(
            any_term,
            apply,
            lambda params, state: (params, state),
            params,
            state,
        )
        made = made._replace(norm=jnp.where(any_term, made.norm, 0))
    reduction.check_alike(params, state, axes)
    runs: Any = emit is not False
    for held in accumulators(state):
        if not has_device_axis(held):
            runs = runs & held.emitted & (held.acc_weight > 0)
    return (
        params,
        state,
        carried,
        step_metrics(state, value, made.norm, weight, aux, runs, axes),
    )


def _number_in_window(held: AccumulateState, axes: reduction.Axes) -> jax.Array | int:
    """The micro-batch's number among all of its window, those of other devices too."""
    index = reduction.device_index(axes)
    return held.mini_step * reduction.num_devices(axes) + index


def _carried_on(weight: jax.Array | None, new: PyTree, old: PyTree) -> PyTree:
    """What is carried after a micro-batch: as before it, if it has no loss term."""
    arguments.check_state(old, new)
    if weight is None:
        return new
    new, old = (jax.tree.map(jnp.asarray, tree) for tree in (new, old))
    return reduction.cond(weight != 0, lambda: new, lambda: old)


def _weights(weight_fn: WeightFn | None, batch: PyTree) -> PyTree:
    """The weights of a micro-batch as scalars that can be summed."""

    def scalar(weight: Any) -> jax.Array:
        check_weight(weight)
        return jnp.asarray(weight).astype(precision.scalar_dtype())

    return None if weight_fn is None else jax.tree.map(scalar, weight_fn(batch))


def _after_reading(params: PyTree, *others: PyTree) -> tuple[PyTree, ...]:
    """The same values, with the parameters after the others.

    Whatever reads the parameters has then done so before they are updated in place:
    else XLA keeps a copy of those that only the loss or aux read (a weight penalty).
    """
    after: tuple[PyTree, ...] = jax.lax.optimization_barrier((params, *others))
    # In jax 0.10 everything in it varies over the same axes; parameters must not.
    before = jax.tree.map(reduction.varying_axes, params)
    return (
        after
        if jax.tree.map(reduction.varying_axes, after[0]) == before
        else (params, *others)
    )


def _warn_of_both(
    tx: optax.GradientTransformation, options: StepOptions, batch: PyTree
) -> None:
    """Says the global batch of two accumulations, one in the other."""
    axes = splitting.batch_axes(batch, options.batch_axis)
    size = splitting.num_examples(batch, axes)
    size *= reduction.num_devices(options.axes)
    k = tx.options.k if isinstance(tx, AccumulateTransformation) else None
    if k == 1:
        return
    of_window = f"the window's calls of {size} examples each"
    if isinstance(k, int):
        of_window = f"{k} calls of {size} examples, {k * size}"
    warnings.warn(
        f"num_microbatches={options.num_microbatches} and microbatch_size="
        f"{options.microbatch_size} split a call's batch, and tx accumulates over "
        f"calls too: the global batch is {of_window}. If a call is to be a whole "
        "step, pass the plain optimizer",
        stacklevel=2,
    )


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
    if options.shard_accumulators:
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
    together: bool,
) -> tuple[jax.Array, PyTree, AccumulateState, Any]:
    """Loss, aux, the state with the micro-batch in it, and whether ``tx`` is to run."""
    first = state.mini_step == 0
    options = tx.options

    def both_passes(total: PyTree) -> tuple[jax.Array, PyTree, PyTree]:
        value, vjp, aux = jax.vjp(loss, params, has_aux=True)
        cotangent = jnp.ones_like(value)
        if weight is not None and options.weighted:
            cotangent = reduction.vary_like(weight.astype(value.dtype), value)
        elif weight is not None and together:
            cotangent = cotangent * (weight != 0).astype(value.dtype)
        return value, aux, references.add(vjp, total, cotangent)

    def forward_pass(total: PyTree) -> tuple[jax.Array, PyTree, PyTree]:
        return *loss(params), total

    total = options.opened(state)
    if weight is None or together:
        value, aux, total = both_passes(total)
    else:
        # 0 times nan is nan: a micro-batch of weight 0 gets no backward pass.
        value, aux, total = reduction.cond(
            weight != 0, both_passes, forward_pass, total
        )
    weights = windows.weighed(state.acc_weight, weight, first=first)
    held = Window(options.from_device(total), weights)
    added, closes, _ = options.settle(state, held, weight, emit, {"value": value})
    return value, aux, added, options.runs(closes, added.acc_weight, weight)


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
