"""The two functions that a user calls."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from gradacc_jax.equivalence import loss, step
from gradacc_jax.equivalence.experiments import Question
from gradacc_jax.equivalence.report import EquivalenceReport
from gradacc_jax.equivalence.trial import Loop

PyTree = Any


def check_equivalence(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    num_microbatches: int,
    *,
    has_aux: bool = False,
    weight_fn: Callable[[PyTree], PyTree] | None = None,
    reduction: str = "mean",
    batch_axis: PyTree = 0,
    key: jax.Array | Callable[[int], jax.Array] | None = None,
    state: PyTree | None = None,
    micro_step: Callable[..., tuple[Any, ...]] | None = None,
    init: Callable[[PyTree], PyTree] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    closing_step: Callable[..., tuple[Any, ...]] | None = None,
) -> EquivalenceReport:
    r"""Compares accumulation with the whole batch, and says why they differ.

    *A loss.* The value and the gradient of ``loss_fn`` on the whole batch, by
    ``jax.value_and_grad``, are compared with those on micro-batches, by
    :func:`value_and_grad`. If they differ, experiments with the batch tell unequal
    weights, terms with several denominators, a sum taken for a mean, batch statistics,
    examples that are coupled through the loss, and a key that no one folds.

    *A micro-step of your own.* With ``micro_step``, ``init`` and ``optimizer``, the
    micro-step is driven through two windows, and its parameters are compared with one
    step of the plain optimizer per window on the whole batch. If they differ, faults
    are put into the plain optimizer on purpose until it moves alike: a division done
    twice or never, a mean of means, a schedule that counts micro-steps, a sum that is
    not reset. Updates and averages on silent micro-steps are found as well.

    Both run in the given dtypes and in float64 on the CPU. float64 decides: there, a
    difference above 1e-9 is a fault and no rounding. All random numbers are held still,
    so that a loss with dropout can be compared at all.

    Args:
      loss_fn: ``loss_fn(params, batch)``, ``loss_fn(params, batch, key)``, with a
        ``state`` as one more argument. It returns the loss, a real scalar or a dict of
        terms whose sum it is, with aux and state as for :func:`value_and_grad`.
      params: the parameters.
      batch: the whole batch: a small one.
      num_microbatches: k, at least 2.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``. The aux are not compared.
      weight_fn: from a micro-batch to its number of loss terms (a dict, one for each
        term); without it, its number of examples.
      reduction: "mean" if the loss is a mean over its batch, "sum" if it is a sum.
      batch_axis: the examples' axis: an integer, or a pytree prefix of the batch; None
        marks what is not batched.
      key: a PRNG key, if ``loss_fn`` takes one. ``micro_step`` then gets it too, the
        same one at each micro-step; or what your loop gives it, as a function from the
        number of the micro-step (0, 1, ...) to a key.
      state: what is carried from micro-batch to micro-batch, such as batch statistics.
      micro_step: ``micro_step(params, state, micro_batch) -> (params, state, ...)``,
        with the ``key`` as one more argument if there is one.
      init: from the parameters to the micro-step's first state, such as ``tx.init``.
      optimizer: the plain optimizer, which is meant to run once per window. With
        ``optax.sgd`` in both, differences are easiest to read.
      closing_step: as ``micro_step``, and closes the window early. Half a window is
        then closed by it, and one more window run.

    Returns:
      An :class:`EquivalenceReport`, which prints as a table. Time and memory: a few
      compilations, of the whole batch in float64 too; where the two differ a few more,
      of batches no larger than it, or of 48 examples.

    Raises:
      ValueError: for arguments that do not go together, for a batch that does not fit
        ``num_microbatches``, and for a loss that is not finite on the whole batch.

    Examples:
      A mean over tokens, where micro-batches hold 2 tokens and 1:

      >>> import jax.numpy as jnp
      >>> from gradacc_jax import check_equivalence
      >>> def loss_fn(w, batch):
      ...     return w * jnp.sum(batch["x"] * batch["mask"]) / jnp.sum(batch["mask"])
      >>> batch = {
      ...     "x": jnp.array([1.0, 1.0, 1.0, 10.0]),
      ...     "mask": jnp.array([1.0, 0.0, 1.0, 1.0]),
      ... }
      >>> report = check_equivalence(loss_fn, jnp.array(1.0), batch, 2)
      >>> print(report.equal, *report.causes)
      False unequal weights
      >>> check_equivalence(
      ...     loss_fn,
      ...     jnp.array(1.0),
      ...     batch,
      ...     2,
      ...     weight_fn=lambda batch: jnp.sum(batch["mask"]),
      ... ).equal
      True

      A loop of one's own, which divides by k twice:

      >>> import jax, optax
      >>> tx = optax.MultiSteps(optax.sgd(1.0), 2)
      >>> def micro_step(w, state, batch):
      ...     grads = jax.grad(lambda w: jnp.mean((w - batch) ** 2) / 2)(w)
      ...     updates, state = tx.update(grads, state, w)
      ...     return optax.apply_updates(w, updates), state
      >>> report = check_equivalence(
      ...     lambda w, batch: jnp.mean((w - batch) ** 2),
      ...     jnp.array(1.0),
      ...     jnp.arange(4.0),
      ...     2,
      ...     micro_step=micro_step,
      ...     init=tx.init,
      ...     optimizer=optax.sgd(1.0),
      ... )
      >>> print(*report.causes)
      wrong scale
    """
    if num_microbatches < 2:
        raise ValueError(
            f"num_microbatches={num_microbatches} splits nothing; choose at least 2"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f'reduction={reduction!r} is not known; choose "mean" or "sum"'
        )
    question = Question(
        loss_fn=loss_fn,
        params=params,
        batch=batch,
        num_microbatches=num_microbatches,
        weight_fn=weight_fn,
        reduction=reduction,
        has_aux=has_aux,
        batch_axis=batch_axis,
        key=key,
        state=state,
    )
    if micro_step is None:
        for name, value in (
            ("init", init),
            ("optimizer", optimizer),
            ("closing_step", closing_step),
        ):
            if value is not None:
                raise ValueError(f"{name} is for a micro_step; pass that too")
        if callable(key):
            raise ValueError(
                "key is a function, which is for a micro_step; pass one PRNG key: it "
                "is folded by the number of the micro-batch"
            )
        return loss.check(question)
    if init is None or optimizer is None:
        raise ValueError(
            f"micro_step with init={init} and optimizer={optimizer}; pass "
            "init=tx.init, and the plain optimizer that runs once per window"
        )
    for name, given in (
        ("weight_fn", weight_fn is not None),
        ("state", state is not None),
        ("reduction", reduction != "mean"),
    ):
        if given:
            raise ValueError(
                f"{name} is for the accumulation of a loss by gradacc_jax, and "
                "micro_step does its own; leave one of them out"
            )
    return step.check(question, Loop(micro_step, init, optimizer, closing_step, key))


def assert_equivalence(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    num_microbatches: int,
    **options: Any,
) -> None:
    """Raises unless accumulation and whole batch are equal: a line for a test.

    Args:
      loss_fn: the loss.
      params: the parameters.
      batch: the whole batch.
      num_microbatches: k.
      **options: as for :func:`check_equivalence`.

    Raises:
      AssertionError: with the printed report, if they differ.

    Examples:
      >>> import jax.numpy as jnp
      >>> from gradacc_jax import assert_equivalence
      >>> def loss_fn(w, x):
      ...     return jnp.mean((w - x) ** 2)
      >>> assert_equivalence(loss_fn, jnp.array(2.0), jnp.arange(8.0), 4)
    """
    report = check_equivalence(loss_fn, params, batch, num_microbatches, **options)
    if not report.equal:
        raise AssertionError(f"\n{report}")
