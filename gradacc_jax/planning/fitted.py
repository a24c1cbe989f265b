"""``remat_to_fit`` as one more policy: a step whose peak fits, by what it recomputes.

Other policies are what they are, and a micro-batch fits or does not. This one is made
for a limit: the loss inside the step is planned until the whole step, compiled for the
target, needs no more.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

from gradacc_jax.checkpointing.budget import Fitted, Request
from gradacc_jax.fitting import arguments_of_the_loss
from gradacc_jax.planning.compile import Built, Target

PyTree = Any
LossFn = Callable[..., Any]
FIT = "fit"
# Of one micro-batch. Budgets of a plan are seldom tight to a percent.
_COMPILES = 8


@dataclasses.dataclass(frozen=True)
class Unfitted:
    """A step whose loss can be planned.

    Attributes:
      step_of: makes the step of a loss.
      loss_fn: the loss, which returns ``(value, aux)``.
      args: the step's arguments, or their shapes.
      donate_argnums: which of them it may reuse.
    """

    step_of: Callable[[LossFn], Any]
    loss_fn: LossFn
    args: tuple[PyTree, ...]
    donate_argnums: Any

    def fit(self, target: Target, limit: int, compiled: Callable[[Built], None]) -> Any:
        """The step that needs no more than ``limit`` bytes at its peak.

        Args:
          target: what to compile for.
          limit: bytes of arguments, results and temporaries together.
          compiled: told of every program.

        Raises:
          TooSmallError: there is none.
        """

        def peak(loss_fn: LossFn, shapes: Any) -> float:
            step = self.step_of(loss_fn)
            traced = target.trace(step, self.args, self.donate_argnums)
            built = target.compile(traced)
            compiled(built)
            memory = built.memory
            # Of what is refused a bound from below is known.
            is_known = not memory.refused or memory.peak > limit
            return float(memory.peak) if is_known else math.inf

        request = Request(
            fun=self.loss_fn,
            argnums=(0,),
            has_aux=True,
            bytes_of=peak,
            budget=limit,
            max_compiles=_COMPILES,
            progress=lambda _: None,
        )
        given = arguments_of_the_loss(self.step_of, self.loss_fn, self.args)
        fitted = Fitted(request)
        fitted.fit(given if target.is_here else target.place(given))
        return self.step_of(fitted)


def is_fit(policy: Any) -> bool:
    """Whether a policy is this one."""
    return isinstance(policy, str) and policy == FIT
