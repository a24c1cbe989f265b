"""One jitted, donated training step: the form most people should use.

A call differentiates the loss on what it is given, in one pass or in micro-batches one
after the other, and makes one micro-step of ``tx``. With ``tx = accumulate(opt, k)``
every k-th call moves the parameters; with a plain optimizer every call does.
"""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax.sharding import PartitionSpec
import optax

from gradacc_jax import auxiliary, reduction, splitting
from gradacc_jax.accumulation.placement import device_specs
from gradacc_jax.accumulation.state import accumulators, has_device_axis
from gradacc_jax.fitting import FittedStep
from gradacc_jax.monitoring import StepMetrics
from gradacc_jax.stepping import (
    LossFn,
    StepOptions,
    WeightFn,
    micro_step,
    stateless,
    with_policy,
)

PyTree = Any


def train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    num_microbatches: int = 1,
    microbatch_size: int | None = None,
    policy: Any = "none",
    max_temp_bytes: int | str | None = None,
    batch_axis: PyTree = 0,
    has_aux: bool = False,
    weight_fn: WeightFn | None = None,
    loss_reduction: str | None = None,
    aux_reduction: PyTree = "mean",
    unroll: int = 1,
    mesh: jax.sharding.Mesh | None = None,
    axis_name: Any = None,
    out_shardings: Any = None,
    donate: bool = True,
) -> Callable[..., tuple[PyTree, PyTree, StepMetrics]]:
    """Compiles a loss and an optimizer into one training step.

    The step is ``step(params, state, batch, key=None, *, emit=None) -> (params, state,
    metrics)``. There are two ways to accumulate:

    - across calls: with ``tx = accumulate(opt, k)``, ``batch`` is one micro-batch and
      every k-th call is an optimizer step;
    - in one call: with a plain ``tx`` and ``num_microbatches=k`` (or a
      ``microbatch_size``), ``batch`` is the global batch, which is split inside the
      program (:func:`gradacc_jax.value_and_grad`), and every call is an optimizer step.

    Both at once multiply, and a warning says what the global batch then is. Neither of
    them makes a plain step on the whole batch.

    With a bare :func:`accumulate`, whose sums have the parameters' dtypes, the backward
    pass adds its gradients straight into ``state.acc_grads``: a micro-step holds no
    gradient tree. Elsewhere gradients are made and then added; same values: inside
    ``chain`` or ``partition``, with ``skip_nonfinite="micro_batch"``, and with weights
    where the loss has a ``custom_vjp`` or float16 in it, since the weight is the loss's
    cotangent in place, which the one might clip and the other overflow. In one call the
    sums are temporaries of the program, as large as the parameters in at least float32.

    Args:
      loss_fn: ``loss_fn(params, batch)`` or ``loss_fn(params, batch, key)`` returning
        the loss, a real scalar, or ``(loss, aux)``. The loss is the mean over the
        micro-batch's loss terms.
      tx: the optimizer.
      num_microbatches: into how many micro-batches a call's batch is split.
      microbatch_size: or how many examples each of them has (the last has what is
        left).
      policy: what the forward pass keeps for the backward pass; a string or one of
        :mod:`gradacc_jax.policies`. Unless it is "none", ``loss_fn`` needs a keyword
        ``policy``, which is given to it, resolved, to apply to the blocks of its model:
        applied to the whole loss a policy would save nothing.
      max_temp_bytes: a budget, such as ``"200MiB"``, for the temporaries of the
        compiled step. What is computed again is then chosen by
        :func:`remat_to_fit` (experimental), at the first call with arguments of some
        shapes; ``step.reports`` tells what was.
      batch_axis: the examples' axis: an integer, or a pytree prefix of the batch; None
        marks what is not batched.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
      weight_fn: from the batch to its number of loss terms, a scalar such as the number
        of tokens that are not padding. Without it every call weighs the same, and so
        does every example within a call. In one call it may return a dict, for a loss
        of several means with denominators of their own (``loss_fn`` then returns a dict
        of the same keys). A step of weight 0 changes no parameter.
      loss_reduction: "sum" if the loss is a sum over its terms, else "mean"; None takes
        that of ``accumulate``. A sum is divided by the weights if there is a
        ``weight_fn``.
      aux_reduction: what becomes of the aux of a call's micro-batches, as for
        :func:`gradacc_jax.value_and_grad`.
      unroll: how many micro-batches a turn of the loop handles.
      mesh: a mesh whose devices share the work: the step then runs under
        ``jax.shard_map`` over ``axis_name``. Give it the whole batch: every device
        takes its part, so that the global batch is micro-batch x k x devices. Other
        axes of the mesh are left to XLA, by the shardings of the parameters.
      axis_name: the mesh axis (or a tuple of them) over which examples are spread;
        without a ``mesh`` the caller is inside ``jax.shard_map`` already, or has set a
        mesh on which the axis is explicit. There is one
        all-reduce of gradients in a window: give it to ``accumulate`` too, which then
        reduces when the window closes, and make its state by
        :func:`gradacc_jax.init_on_mesh`.
      out_shardings: where the new parameters and state are to be, ``(of_params,
        of_state)``, as for ``jax.jit``. By default XLA decides: of a state that is
        sharded otherwise than the parameters (:func:`gradacc_jax.state_shardings` with
        ``shard_over``) it makes parameters that are sharded too.
      donate: whether parameters and state are updated in place. The arguments are then
        gone after the call: copy what is to be kept, ``jax.tree.map(jnp.copy, p)``.

    Returns:
      The step, a ``jax.jit`` function. Its ``key`` is folded with the number of the
      micro-batch in its window, so that one key may serve a whole window: micro-batch i
      draws the same numbers across calls and in one. ``emit=True`` closes a window
      early, ``emit=False`` keeps it open, None leaves it to the count: at the end of an
      epoch write ``emit=True if last else None``. Each of the three compiles a program
      of its own.

    Raises:
      ValueError: for a ``policy`` and ``max_temp_bytes`` at once; at the first call, if
        nothing fits ``max_temp_bytes``; when tracing, for a loss that is not a real
        scalar, a batch that cannot be split, or a ``tx`` with more than one
        accumulator.

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

      The same in one call:

      >>> tx = optax.sgd(0.5)
      >>> step = train_step(loss_fn, tx, num_microbatches=3)
      >>> w = jnp.array(0.0)
      >>> w, _, metrics = step(w, tx.init(w), jnp.array([1.0, 1.0, 1.0, 5.0]))
      >>> print(w, metrics.loss, metrics.emitted)
      2.0 7.0 True
    """
    options = StepOptions(
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        batch_axis=batch_axis,
        has_aux=has_aux,
        weight_fn=weight_fn,
        loss_reduction=loss_reduction,
        aux_reduction=aux_reduction,
        unroll=unroll,
        axis_name=axis_name,
    )
    axes = options.axes
    if mesh is not None:
        if not axes:
            raise ValueError(
                f"mesh={dict(mesh.shape)} and axis_name=None; name the axis over which "
                "examples are spread"
            )
        reduction.check_mesh(mesh, axes)
    if axes and max_temp_bytes is not None:
        raise ValueError(
            f"max_temp_bytes={max_temp_bytes!r} and axis_name={axis_name!r}: a budget "
            "is planned for one device so far; choose a policy instead"
        )
    rematerialised = with_policy(loss_fn, policy)
    if max_temp_bytes is not None and rematerialised is not loss_fn:
        raise ValueError(
            f"policy={policy!r} and max_temp_bytes={max_temp_bytes!r} both say what is "
            "computed again; choose one"
        )

    def step_of(loss_fn: LossFn) -> Any:
        def step(
            params: PyTree,
            state: PyTree,
            batch: PyTree,
            key: jax.Array | None = None,
            *,
            emit: bool | None = None,
        ) -> tuple[PyTree, PyTree, StepMetrics]:
            def one(
                params: PyTree, state: PyTree, batch: PyTree, key: jax.Array | None
            ) -> tuple[PyTree, PyTree, StepMetrics]:
                params, state, _, metrics = micro_step(
                    stateless(loss_fn, has_aux),
                    tx,
                    params,
                    state,
                    (),
                    batch,
                    key,
                    options=options,
                    emit=emit,
                )
                return params, state, metrics

            if mesh is None and not reduction.is_explicit(axes):
                return one(params, state, batch, key)
            return _on_mesh(one, mesh, options, params, state, batch, key)

        where = None if out_shardings is None else (*out_shardings, None)
        return jax.jit(
            step,
            static_argnames=("emit",),
            donate_argnums=(0, 1) if donate else (),
            out_shardings=where,
        )

    if max_temp_bytes is not None:
        return FittedStep(step_of, rematerialised, max_temp_bytes, has_aux)
    return step_of(rematerialised)


def _on_mesh(
    one: Callable[..., tuple[PyTree, PyTree, StepMetrics]],
    mesh: jax.sharding.Mesh | None,
    options: StepOptions,
    params: PyTree,
    state: PyTree,
    batch: PyTree,
    key: jax.Array | None,
) -> tuple[PyTree, PyTree, StepMetrics]:
    """One step on the devices of a mesh, each with its part of the batch."""
    axes = options.axes
    if reduction.is_explicit(axes):
        reduction.check_replicated(params, axes)
    there = mesh or jax.sharding.get_abstract_mesh()
    whole = PartitionSpec()
    of_state = device_specs(state, axes)
    of_batch = splitting.device_specs(
        batch,
        splitting.batch_axes(batch, options.batch_axis),
        axes,
        math.prod(there.shape[name] for name in axes),
    )
    across_calls = any(map(has_device_axis, accumulators(state)))
    of_aux: PyTree = PartitionSpec(axes)
    if not across_calls:
        of_aux = auxiliary.device_specs(options.aux_reduction, axes)

    def on_device(
        params: PyTree, state: PyTree, batch: PyTree, key: jax.Array | None
    ) -> tuple[PyTree, PyTree, StepMetrics]:
        params, state, metrics = one(params, state, batch, key)
        if across_calls:  # and not reduced: each device shows its own
            aux = jax.tree.map(lambda x: reduction.vary(x[None], axes), metrics.aux)
            metrics = metrics._replace(aux=aux)
        return params, state, metrics

    fields: dict[str, Any] = dict.fromkeys(StepMetrics._fields, whole)
    of_metrics = StepMetrics(**fields | {"aux": of_aux})
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(whole, of_state, of_batch, whole),
        out_specs=(whole, of_state, of_metrics),
        axis_names=set(axes),
    )(params, state, reduction.spread_over(batch, of_batch, there, axes), key)
