"""A training step whose loss is rematerialised to fit a budget.

The bytes that count are those of the whole step: gradients, accumulator and optimizer
are in them. A step is planned at its first call with arguments of some shapes, and
planned again for other shapes.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax

from gradacc_jax.checkpointing.budget import RematReport, remat_to_fit
from gradacc_jax.checkpointing.sizes import parse_size

PyTree = Any
LossFn = Callable[..., Any]


class FittedStep:
    """A training step that fits: called, and lowered, as the step itself.

    Args:
      step_of: makes the jitted step of a loss.
      loss_fn: the loss.
      max_temp_bytes: the budget of the step's temporaries.
      has_aux: whether the loss returns ``(loss, aux)``.

    Attributes:
      reports: the :class:`RematReport` of every plan that was made, in order.
    """

    def __init__(
        self,
        step_of: Callable[[LossFn], Any],
        loss_fn: LossFn,
        max_temp_bytes: int | str,
        has_aux: bool,
    ):
        self._step_of, self._loss_fn = step_of, loss_fn
        self._budget = parse_size("max_temp_bytes", max_temp_bytes)
        self._has_aux = has_aux
        self._steps: dict[Any, Any] = {}
        self.reports: list[RematReport] = []

    def __call__(self, *args: PyTree, emit: bool | None = None) -> Any:
        return self._fitted(args, emit)(*args, emit=emit)

    def lower(self, *args: PyTree, emit: bool | None = None) -> jax.stages.Lowered:
        """The step for these arguments, lowered; see ``jax.jit``."""
        lowered: jax.stages.Lowered = self._fitted(args, emit).lower(*args, emit=emit)
        return lowered

    def _fitted(self, args: tuple[PyTree, ...], emit: bool | None) -> Any:
        """The jitted step for arguments of these shapes."""
        leaves, tree = jax.tree.flatten(args)
        key = tree, tuple(map(_placed, leaves)), emit
        if key not in self._steps:
            self._steps[key] = self._plan(args, emit)
        return self._steps[key]

    def _plan(self, args: tuple[PyTree, ...], emit: bool | None) -> Any:
        def within(loss_fn: LossFn, *_: PyTree) -> jax.stages.Lowered:
            lowered: jax.stages.Lowered = self._step_of(loss_fn).lower(*args, emit=emit)
            return lowered

        def step_of(loss_fn: LossFn) -> Any:
            return functools.partial(self._step_of(loss_fn), emit=emit)

        fitted, report = remat_to_fit(
            self._loss_fn,
            *arguments_of_the_loss(step_of, self._loss_fn, args),
            max_temp_bytes=self._budget,
            has_aux=self._has_aux,
            within=within,
        )
        self.reports.append(report)
        return self._step_of(fitted)


def arguments_of_the_loss(
    step_of: Callable[[LossFn], Any], loss_fn: LossFn, args: tuple[PyTree, ...]
) -> tuple[PyTree, ...]:
    """The shapes that a step calls its loss with: a micro-batch's.

    Args:
      step_of: makes the step of a loss.
      loss_fn: the loss.
      args: those of the step, or their shapes.
    """
    seen: list[tuple[PyTree, ...]] = []

    @functools.wraps(loss_fn)
    def recording(*given: PyTree) -> Any:
        seen.append(jax.tree.map(_shape, given))
        return loss_fn(*given)

    jax.eval_shape(step_of(recording), *args)
    return seen[0]


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _placed(x: Any) -> tuple[Any, ...]:
    """What a program is compiled for: shape, dtype and place."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    where = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    return aval.shape, aval.dtype, aval.weak_type, where
