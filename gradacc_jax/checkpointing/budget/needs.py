"""What the backward pass reads of a program's values, if all of them can be kept.

JAX is asked, and not second-guessed: every value is given a name, the whole program is
put under ``jax.checkpoint`` with a policy that keeps whatever has a name, and the
residuals of the derivative that JAX then makes are looked up by their names. What a
derivative's own rule computes (the cosine for a sine) has no name, and JAX goes back to
the named value it is made of.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from gradacc_jax.checkpointing.budget.programs import Program, is_key, results, run
from gradacc_jax.checkpointing.origins import values_of

PREFIX = "gradacc_jax.fit."


def needs_of(program: Program, wrt: Sequence[int]) -> frozenset[int]:
    """The values that the backward pass reads.

    Args:
      program: the program.
      wrt: the inputs that it is differentiated with respect to.

    Returns:
      Numbers of values; inputs that it reads are among them.
    """
    if not wrt:
        return frozenset()
    inputs = program.avals[: program.num_inputs]
    names = {v: f"{PREFIX}{v}" for v in range(len(program.avals))}

    def named(*args: Any) -> list[Any]:
        values = dict(enumerate(args))
        run(program.operations, values, then=lambda v, x: mark(names[v], x))
        return results(program, values)

    keep = jax.checkpoint_policies.save_only_these_names(*names.values())

    def forward(*args: Any) -> list[Any]:
        given = list(args)

        def of(*active: Any) -> list[Any]:
            for v, x in zip(wrt, active, strict=True):
                given[v] = x
            return jax.checkpoint(named, policy=keep)(*given)

        return jax.tree.leaves(jax.vjp(of, *(args[v] for v in wrt))[1])

    traced = jax.make_jaxpr(forward)(*map(shape_of, inputs)).jaxpr
    found = set()
    for value in values_of(traced, [f"named '{PREFIX}{v}'" for v in range(len(inputs))]):
        number = value.origin.removeprefix(f"named '{PREFIX}").removesuffix("'")
        if number.isdigit():
            found.add(int(number))
    return frozenset(found)


def mark(name: str, x: Any) -> Any:
    """``x`` with a name on it, if it is an array of numbers."""
    return x if is_key(jax.typeof(x)) else checkpoint_name(x, name)


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """An argument to trace with."""
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)
    )
