"""A function of the user's, traced: its program, and the way back to its results."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradacc_jax.checkpointing.budget.apply import Engine, checkpointed, run_plan
from gradacc_jax.checkpointing.budget.needs import shape_of
from gradacc_jax.checkpointing.budget.planner import Planner
from gradacc_jax.checkpointing.budget.plans import Plan, Plans, for_program
from gradacc_jax.checkpointing.budget.programs import Program, is_floating, results
from gradacc_jax.checkpointing.budget.programs import run as run_operations
from gradacc_jax.checkpointing.regions import Split, is_array

PyTree = Any


class Traced:
    """A function, traced on arguments.

    Args:
      fun: the function.
      args: its arguments, or shapes of them.
    """

    def __init__(self, fun: Callable[..., PyTree], args: Sequence[PyTree]):
        self.given = Split(tuple(args), is_traced)
        made: list[Split] = []

        def flat(*leaves: Any) -> list[Any]:
            made.append(Split(fun(*self.given.joined(leaves)), _is_jax_array))
            return made[-1].arrays

        self.shapes = [shape(x) for x in self.given.arrays]
        closed = jax.make_jaxpr(flat)(*self.given.arrays)
        self.consts = list(closed.consts)
        self.program = Program.of(closed)
        self.made = made[-1]

    def wrt(self, argnums: Sequence[int]) -> list[int]:
        """The program's inputs that are differentiated."""
        args = self.given.tree.unflatten(range(len(self.given.traced)))
        wanted = {i for number in argnums for i in jax.tree.leaves(args[number])}
        leaves = [i for i, traced in enumerate(self.given.traced) if traced]
        return [
            len(self.consts) + place
            for place, i in enumerate(leaves)
            if i in wanted and is_floating(self.shapes[place])
        ]

    def plans(
        self,
        planner: Planner,
        argnums: Sequence[int],
        has_aux: bool,
        returned: bool = False,
    ) -> Plans:
        """The plans for this program; see :meth:`Planner.plans`."""
        return planner.plans(
            self.program,
            self.wrt(argnums),
            towards=[0] if has_aux else None,
            returned=returned,
        )

    def run(self, plan: Plan, engine: Engine) -> PyTree:
        """The function's result, by a plan for this program or one that is alike."""
        inputs = [*self.consts, *self.given.arrays]
        return self.made.joined(
            run_plan(for_program(plan, self.program), inputs, engine)
        )

    def derivative(self, argnums: Sequence[int], plan: Plan | None = None) -> Any:
        """Value and gradient, as a function of the arrays among the arguments."""
        wrt = self.wrt(argnums)

        def run(*leaves: Any) -> Any:
            inputs = [*self.consts, *leaves]

            def of(*active: Any) -> list[Any]:
                given = list(inputs)
                for v, x in zip(wrt, active, strict=True):
                    given[v] = x
                if plan is None:
                    values = dict(enumerate(given))
                    run_operations(self.program.operations, values)
                    return results(self.program, values)
                return run_plan(plan, given, checkpointed)

            made, vjp = jax.vjp(of, *(inputs[v] for v in wrt))
            return made, vjp([_ones(x) for x in made])

        return run


def is_traced(x: Any) -> bool:
    """Whether an argument is an array, or stands for one."""
    if isinstance(x, bool | int | float | complex | np.generic | jax.ShapeDtypeStruct):
        return True
    return is_array(x)


def shape(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of an argument, wherever it lies."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)
    return shape_of(jax.typeof(x))


def _ones(x: Any) -> Any:
    if is_floating(jax.typeof(x)):
        return jnp.ones_like(x)
    return np.zeros(np.shape(x), jax.dtypes.float0)


def _is_jax_array(x: Any) -> bool:
    return isinstance(x, jax.Array)
