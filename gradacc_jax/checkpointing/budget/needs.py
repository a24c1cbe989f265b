"""What the backward pass reads of a program's values, if all of them can be kept.

JAX is asked, and not second-guessed: every value is given a name, the whole program is
put under ``jax.checkpoint`` with a policy that keeps whatever has a name, and the
residuals of the derivative that JAX then makes are looked up by their names. What a
derivative's own rule computes (the cosine for a sine) has no name, and JAX goes back to
the named value it is made of.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from gradacc_jax.checkpointing.budget.cuts import stretches
from gradacc_jax.checkpointing.budget.programs import Program, is_nameable, results, run
from gradacc_jax.checkpointing.origins import values_of

PREFIX = "gradacc_jax.fit."


# As many operations are looked at in one piece.
_PIECE = 100


def needs_of(
    program: Program, wrt: Sequence[int], towards: Sequence[int] | None = None
) -> frozenset[int]:
    """The values that the backward pass reads.

    An operation's derivative reads its own inputs and results, so a long program is
    looked at piece by piece, and equal pieces once.

    Args:
      program: the program.
      wrt: the inputs that it is differentiated with respect to.
      towards: which of its results are differentiated, by their places; None for all.

    Returns:
      Numbers of values; inputs that it reads are among them.
    """
    is_wrt = set(wrt)
    active = program.active([v in is_wrt for v in range(program.num_inputs)])
    results = [v for i, v in enumerate(program.outputs) if not towards or i in towards]
    leading = _leading_to(program, results)
    known: dict[Any, frozenset[int]] = {}
    found: set[int] = set()
    for start, end in stretches(program, _PIECE):
        part, inputs, outputs = program.part(start, end)
        made = [v for o in program.operations[start:end] for v in o.outputs]
        numbers = [*inputs, *made]
        of = tuple(i for i, v in enumerate(inputs) if active[v])
        to = tuple(
            part.outputs[i] for i, v in enumerate(outputs) if active[v] and v in leading
        )
        if not of or not to:
            continue
        key = part.signature, of, to
        if key not in known:
            piece = dataclasses.replace(part, outputs=to)
            known[key] = _needs_of_piece(piece, of)
        found |= {numbers[i] for i in known[key]}
    return frozenset(found)


def _leading_to(program: Program, results: Sequence[Any]) -> set[int]:
    """The values that some results depend on."""
    found = {v for v in results if isinstance(v, int)}
    for operation in reversed(program.operations):
        if any(v in found for v in operation.outputs):
            found |= set(operation.values)
    return found


def _needs_of_piece(program: Program, wrt: Sequence[int]) -> frozenset[int]:
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
    for value in values_of(
        traced, [f"named '{PREFIX}{v}'" for v in range(len(inputs))]
    ):
        number = value.origin.removeprefix(f"named '{PREFIX}").removesuffix("'")
        if number.isdigit():
            found.add(int(number))
    return frozenset(found)


def mark(name: str, x: Any) -> Any:
    """``x`` with a name on it, if it can have one."""
    return checkpoint_name(x, name) if is_nameable(jax.typeof(x)) else x


def shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """An argument to trace with."""
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)
    )
