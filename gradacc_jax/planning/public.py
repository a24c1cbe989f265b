"""The functions that users call: a plan for a loss, and a plan for any step."""

from collections.abc import Callable, Sequence
import dataclasses
import operator
from typing import Any

import optax

from gradacc_jax.planning import chips
from gradacc_jax.planning.chips import Chip
from gradacc_jax.planning.compile import Target
from gradacc_jax.planning.fitted import is_fit
from gradacc_jax.planning.report import ACROSS_CALLS, ONE_CALL, Plan
from gradacc_jax.planning.search import (
    Fitting,
    Made,
    Search,
    Split,
    Variant,
    divisors,
)
from gradacc_jax.planning.sizes import bytes_text
from gradacc_jax.planning.steps import Training

PyTree = Any
POLICIES = ("none", "dots", "full")


def plan(
    loss_fn: Callable[..., Any],
    params: PyTree,
    optimizer: optax.GradientTransformation,
    batch: PyTree,
    *,
    global_batch_size: int | None = None,
    microbatch_size: int | None = None,
    num_microbatches: int | None = None,
    chip: str | Chip | None = None,
    memory: int | str | None = None,
    policies: Sequence[Any] = POLICIES,
    batch_axis: PyTree = 0,
    key: Any = None,
    state: PyTree = None,
    trainable: PyTree = None,
    margin: float = 0.05,
    has_aux: bool = False,
    weight_fn: Callable[..., Any] | None = None,
    loss_reduction: str | None = None,
    time_budget: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    r"""Chooses micro-batch, k and policy for a memory budget, before anything runs.

    The global batch is fixed. Of all ways to make it in micro-batches, with each of the
    policies, in one call or across calls, the plan is the fastest whose compiled
    program needs

    .. math::
        \text{arguments} + \text{outputs} - \text{aliased} + \text{temporaries} +
        \text{workspace} \le (1 - \text{margin}) \cdot \text{memory}.

    What a program needs is compiled; how long it takes is predicted: a lower bound by
    the operations and the memory traffic of its jaxpr, recomputation and a cost for
    each micro-batch among them. Of micro-batches that take as long, the smallest is
    chosen. They are equal, unless the batch has no divisor near to what fits (a prime
    number of examples). Nothing is put on a device.

    Args:
      loss_fn: ``loss_fn(params, batch)`` or ``loss_fn(params, batch, key)``, as for
        :func:`gradacc_jax.train_step`. If it has a keyword ``policy`` it applies it to
        the blocks of its model; in any other "fit" stands for all policies but "none".
      params: the parameters, or their shapes (``jax.eval_shape`` of what makes them).
      optimizer: the plain optimizer, not wrapped in :func:`gradacc_jax.accumulate`.
      batch: examples, or their shapes; of how many does not matter. Where it is sharded
        over a mesh (an ``AbstractMesh`` will do), each device has its own micro-batch.
      global_batch_size: examples of an optimizer step; by default as many as ``batch``
        has. Of this, ``microbatch_size`` and ``num_microbatches``, two give the third.
      microbatch_size: examples of a micro-batch on one device, if that is decided.
      num_microbatches: micro-batches of a step, if that is decided.
      chip: a name of :func:`gradacc_jax.chips`, such as "rtx-4090" or "v5e", whether
        this machine has one or not; None for its own device.
      memory: the budget of one device, in bytes or as "24GiB"; by default what JAX
        leaves usable of the chip.
      policies: what may be tried, as strings or values of
        :mod:`gradacc_jax.policies`, and "fit": what is computed again is then chosen by
        :func:`gradacc_jax.remat_to_fit` so that the step fits, on one device and in one
        call.
      batch_axis: the examples' axis: an integer, or a pytree prefix of the batch; None
        marks what is not batched.
      key: a PRNG key or its shape, if the loss takes one.
      state: what the loss carries, such as batch statistics: it is then
        ``loss_fn(params, state, batch[, key]) -> (loss, state)``, and with ``has_aux``
        ``(loss, (state, aux))``.
      trainable: a pytree prefix of the parameters, of booleans. The others are frozen:
        no gradient, no sum, no optimizer state.
      margin: the part of the memory that is left free.
      has_aux: whether the loss returns ``(loss, aux)``.
      weight_fn: from a batch to its number of loss terms.
      loss_reduction: "mean" or "sum", as for :func:`gradacc_jax.train_step`. A sum
        without ``weight_fn`` is planned in one call only, where it stays a sum.
      time_budget: seconds after which the best that was found is taken; with it the
        plan depends on how fast this machine is.
      progress: called with a line of text after each compilation.

    Returns:
      The :class:`Plan`. Its ``train_step`` is ``step(params, state, batch[, key]) ->
      (params, state, metrics)``, with a ``state`` made by ``plan.tx.init`` (of the
      trained parameters), on the global batch or, across calls, on one micro-batch;
      parameters and state are donated. With carried state it is ``step(params, state,
      carried, batch[, key])`` and returns it in its place. Where the chip is this
      machine's it is the compiled program itself.

    Raises:
      ImportError: the chip's compiler is not installed; it says what installs it.
      TimeoutError: the time budget was spent before anything fitted.
      ValueError: nothing fits, and then it names the smallest need in bytes; or the
        three sizes disagree.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from gradacc_jax import plan
      >>> def loss_fn(w, x):
      ...     return jnp.mean(jnp.tanh(x @ w) ** 2)
      >>> w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
      >>> x = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
      >>> found = plan(loss_fn, w, optax.sgd(0.1), x, memory="2MiB")
      >>> found.microbatch_size * found.num_microbatches, found.policy
      (1024, 'none')
      >>> found.peak_bytes < 2 * 2**20
      True
    """
    _check_options(policies, margin)
    training = Training(
        loss_fn=loss_fn,
        optimizer=optimizer,
        params=params,
        batch=batch,
        batch_axis=batch_axis,
        key=key,
        carried=state,
        trainable=trainable,
        has_aux=has_aux,
        weight_fn=weight_fn,
        loss_reduction=loss_reduction,
    )
    devices = training.num_devices
    if global_batch_size is None and None in (microbatch_size, num_microbatches):
        global_batch_size = training.num_examples
    total, splits = resolve(
        global_batch_size, microbatch_size, num_microbatches, devices
    )
    training = dataclasses.replace(training, global_examples=total // devices)
    is_free = len(splits) > 1 and devices == 1
    found = _plan(
        training.variants(policies),
        total,
        splits,
        devices,
        fitting=training.fitting(policies),
        chip=chip,
        memory=memory,
        margin=margin,
        ragged=total if is_free else 0,
        sums=training.sums_bytes,
        time_budget=time_budget,
        progress=progress,
    )
    return dataclasses.replace(
        found,
        train_step=training.face(found.train_step),
        tx=training.tx_of(found.form, found.num_microbatches),
    )


def plan_step(
    step_for: Callable[[int, int, Any], tuple[Any, ...]],
    *,
    global_batch_size: int | None = None,
    microbatch_size: int | None = None,
    num_microbatches: int | None = None,
    num_devices: int = 1,
    chip: str | Chip | None = None,
    memory: int | str | None = None,
    policies: Sequence[Any] = POLICIES,
    margin: float = 0.05,
    across_calls: bool = False,
    time_budget: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Chooses micro-batch, k and policy for a step that is made by a function of yours.

    Args:
      step_for: ``step_for(microbatch_size, num_microbatches, policy)`` returns
        ``(step, args)`` or ``(step, args, donate_argnums)``: a function, jitted or not,
        and its arguments or their shapes.
      global_batch_size: examples of an optimizer step.
      microbatch_size: examples of a micro-batch on one device, if that is decided.
      num_microbatches: micro-batches of a step, if that is decided.
      num_devices: how many devices share a step: micro-batch × k × devices is the
        global batch.
      chip: as for :func:`plan`.
      memory: as for :func:`plan`.
      policies: the values to give to ``step_for``; any that can be hashed.
      margin: the part of the memory that is left free.
      across_calls: whether a call of the step is one micro-step, so that
        ``num_microbatches`` calls make an optimizer step.
      time_budget: as for :func:`plan`.
      progress: as for :func:`plan`.

    Returns:
      The :class:`Plan`; its ``train_step`` is the chosen step, compiled already where
      the chip is this machine's.

    Raises:
      ImportError: as for :func:`plan`.
      ValueError: as for :func:`plan`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from gradacc_jax import plan_step
      >>> def step_for(microbatch_size, num_microbatches, policy):
      ...     shape = (num_microbatches, microbatch_size, 64)
      ...     def step(x):
      ...         def add(total, part):
      ...             return total + jnp.sum(jnp.tanh(part @ part.T)), None
      ...         return jax.lax.scan(add, jnp.zeros(()), x)[0]
      ...     return step, (jax.ShapeDtypeStruct(shape, jnp.float32),)
      >>> found = plan_step(
      ...     step_for, global_batch_size=512, policies=("none",), memory="200KiB"
      ... )
      >>> found.microbatch_size * found.num_microbatches
      512
    """
    _check_options(policies, margin)
    total, splits = resolve(
        global_batch_size, microbatch_size, num_microbatches, num_devices
    )

    def variant(policy: Any) -> Variant:
        form = ACROSS_CALLS if across_calls else ONE_CALL
        return Variant(policy, form, lambda m, k: Made(*step_for(m, k, policy)))

    return _plan(
        list(map(variant, policies)),
        total,
        splits,
        num_devices,
        chip=chip,
        memory=memory,
        margin=margin,
        time_budget=time_budget,
        progress=progress,
    )


def resolve(
    global_batch_size: int | None,
    microbatch_size: int | None,
    num_microbatches: int | None,
    num_devices: int = 1,
) -> tuple[int, list[Split]]:
    """The global batch, and the splits of one device's part of it to choose from.

    Two of the three numbers give the third; the global batch alone leaves a choice.

    Raises:
      ValueError: they disagree, do not divide, or are too few.

    Examples:
      >>> resolve(12, 4, None)
      (12, [Split(size=4, k=3)])
    """
    given = {
        "global_batch_size": global_batch_size,
        "microbatch_size": microbatch_size,
        "num_microbatches": num_microbatches,
    }
    for name, number in given.items():
        if number is not None and operator.index(number) < 1:
            raise ValueError(f"{name}={number} is less than 1; choose at least 1")
    total, size, count = map(_index, given.values())
    if total is None:
        if size is None or count is None:
            raise ValueError(
                f"global_batch_size=None, microbatch_size={size} and num_microbatches="
                f"{count} do not say how large a step is; give the first or both others"
            )
        return size * count * num_devices, [Split(size, count)]
    over = f" on num_devices={num_devices}" if num_devices > 1 else ""
    if total % num_devices:
        raise ValueError(
            f"global_batch_size={total} does not divide{over}; choose a multiple"
        )
    own = total // num_devices
    if size is not None and count is not None:
        if size * count != own:
            raise ValueError(
                f"global_batch_size={total}, microbatch_size={size} and "
                f"num_microbatches={count}{over} disagree: {size} x {count} x "
                f"{num_devices} = {size * count * num_devices}; give two of them"
            )
        return total, [Split(size, count)]
    for name, number in (("microbatch_size", size), ("num_microbatches", count)):
        if number is None:
            continue
        if own % number:
            near = [s.size for s in divisors(own)]
            below = max((d for d in near if d < number), default=1)
            above = min((d for d in near if d > number), default=own)
            raise ValueError(
                f"{name}={number} does not divide global_batch_size={total}{over}; "
                f"choose {below} or {above}"
            )
        return total, [Split(size or own // number, count or own // number)]
    return total, divisors(own)


def _check_options(policies: Sequence[Any], margin: float) -> None:
    if not 0 <= margin < 1:
        raise ValueError(f"margin={margin}: expected a part of the memory, such as .05")
    if not policies:
        raise ValueError('policies=() leaves nothing to try; give at least ("none",)')


def _index(number: Any) -> int | None:
    return None if number is None else operator.index(number)


def _plan(
    variants: list[Variant],
    total: int,
    splits: list[Split],
    num_devices: int,
    *,
    chip: str | Chip | None,
    memory: int | str | None,
    margin: float,
    fitting: Fitting | None = None,
    ragged: int = 0,
    sums: int | None = None,
    time_budget: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    target = Target.of(chip)
    budget = chips.budget(target.chip, memory)
    search = Search(
        target,
        int(budget * (1 - margin)),
        splits,
        ragged=ragged,
        sums=sums,
        progress=progress,
        time_budget=time_budget,
    )
    best, candidates = search.run(variants, fitting)
    assert best.memory is not None
    reference = next((v for v in variants if str(v.policy) == "none"), None)
    if reference is None and fitting is not None:
        reference = fitting.plain
    recomputed = 0.0
    if reference is not None:
        plain = search.way(
            dataclasses.replace(reference, form=best.variant.form), splits[-1]
        )
        recomputed = max(best.cost.flops - plain.cost.flops, 0.0)
    program = best.program if target.is_here else best.made.fun
    return Plan(
        microbatch_size=best.split.size,
        num_microbatches=best.split.k,
        policy=best.variant.policy,
        peak_bytes=best.memory.peak,
        recompute_flops=recomputed,
        candidates=candidates,
        global_batch_size=total,
        num_devices=num_devices,
        form=best.variant.form,
        chip=target.chip.name,
        budget_bytes=budget,
        margin=margin,
        seconds=best.cost.seconds,
        compiles=search.compiles,
        notes=(*search.notes, *_notes(best, candidates, target, budget)),
        train_step=program,
    )


def _notes(best: Any, candidates: Any, target: Target, budget: int) -> list[str]:
    notes = []
    if best.split.k == 1:
        notes.append(
            "the whole batch fits in one pass: accumulation is not worth it here"
        )
        slower = [
            c
            for c in candidates
            if c.num_microbatches > 1 and c.memory and c.policy != best.variant.policy
        ]
        if slower and str(best.variant.policy) != "none":
            notes[-1] += ", and keeping less is faster than accumulating"
    usable = target.chip.usable_bytes
    if target.chip.platform == "gpu" and budget > usable:
        part = min(budget / target.chip.memory_bytes, 0.99)
        notes.append(
            f"JAX takes {chips.gpu_fraction():.0%} of a GPU, {bytes_text(usable)} of "
            f"this one, unless the environment says XLA_CLIENT_MEM_FRACTION={part:.2f}"
        )
    elif target.chip.platform == "gpu" and not target.is_here:
        notes.append(
            f"JAX takes {chips.gpu_fraction():.0%} of this GPU's "
            f"{bytes_text(target.chip.memory_bytes)}; XLA_CLIENT_MEM_FRACTION changes "
            "that"
        )
    assert best.memory is not None
    if best.memory.workspace:
        notes.append(
            f"temporaries include {bytes_text(best.memory.workspace)} for workspace "
            "that only a GPU that is there could tell: an allowance"
        )
    if is_fit(best.variant.policy):
        notes.append(
            "policy fit: what is computed again was chosen by remat_to_fit; "
            "train_step(loss_fn, optimizer, "
            f"num_microbatches={best.split.k}, max_temp_bytes="
            f"{best.memory.temporaries}) makes such a step too"
        )
    notes += [*best.memory.notes]
    return notes
