"""What is asked for: which bytes count, and how many there may be."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import jax

from gradacc_jax.checkpointing.budget.planner import Planner
from gradacc_jax.checkpointing.budget.plans import Plans
from gradacc_jax.checkpointing.budget.traced import Traced, is_traced
from gradacc_jax.checkpointing.regions import Split

PyTree = Any
Within = Callable[..., jax.stages.Lowered]


@dataclasses.dataclass(frozen=True)
class Request:
    """What was asked for; see :func:`remat_to_fit`.

    Attributes:
      fun: the function.
      argnums: the places of the arguments that it is differentiated in.
      has_aux: whether it returns ``(value, aux)``.
      bytes_of: compiles a program with a function like ``fun`` in it, for arguments of
        these shapes, and returns the bytes that count; infinite if it does not compile.
      budget: how many there may be.
      max_compiles: how many programs to compile at most.
      progress: told after each of them what it needs.
      returns_gradients: whether the gradients are results of the program.
    """

    fun: Callable[..., PyTree]
    argnums: tuple[int, ...]
    has_aux: bool
    bytes_of: Callable[[Callable[..., PyTree], Sequence[PyTree]], float]
    budget: int
    max_compiles: int
    progress: Callable[[str], None]
    returns_gradients: bool = False

    def plans(self, traced: Traced, planner: Planner) -> Plans:
        """The plans for the function, as it was traced."""
        returned = self.returns_gradients
        return traced.plans(planner, self.argnums, self.has_aux, returned)

    @property
    def name(self) -> str:
        """The function's."""
        return getattr(self.fun, "__name__", type(self.fun).__name__)


@dataclasses.dataclass(frozen=True)
class Temporaries:
    """The temporaries of a compiled program.

    Attributes:
      argnums: what its function is differentiated with respect to.
      has_aux: whether the function returns ``(value, aux)``.
      within: makes the program of a function and shapes, if it is not value and
        gradient.
    """

    argnums: tuple[int, ...]
    has_aux: bool
    within: Within | None

    def __call__(self, fun: Callable[..., PyTree], args: Sequence[PyTree]) -> float:
        try:
            stats: Any = self._lowered(fun, args).compile().memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                return math.inf
            raise
        return float(stats.temp_size_in_bytes)

    def _lowered(
        self, fun: Callable[..., PyTree], args: Sequence[PyTree]
    ) -> jax.stages.Lowered:
        if self.within is not None:
            lowered = self.within(fun, *args)
            if not hasattr(lowered, "compile"):
                raise TypeError(
                    f"within returned a {type(lowered).__name__}; expected a lowered "
                    "program: lambda fun, *args: jax.jit(step_of(fun)).lower(*args)"
                )
            return lowered
        given = Split(args, is_traced)

        def step(leaves: list[Any]) -> Any:
            return jax.value_and_grad(
                fun, self.argnums, has_aux=self.has_aux, allow_int=True
            )(*given.joined(leaves))

        return jax.jit(step).lower(given.arrays)
