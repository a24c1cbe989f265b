"""Running a program by a plan: what is computed again, and what is kept.

There are three engines, since nothing promises that a compiler keeps a second
computation apart from the first. ``jax.checkpoint`` is the one that JAX maintains. The
others are a ``custom_vjp`` of our own. Its backward pass ties everything it starts
from, residuals *and* cotangents, through ``optimization_barrier``, so that the second
computation cannot begin before the backward pass is there; or, for compilers that throw
barriers away, it stands in a branch. ``selftest`` says which of them holds.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradacc_jax.checkpointing import policies
from gradacc_jax.checkpointing.budget.needs import PREFIX, mark
from gradacc_jax.checkpointing.budget.plans import Again, InLoop, Option, Piece, Plan
from gradacc_jax.checkpointing.budget.programs import (
    Program,
    is_floating,
    is_key,
    results,
    run,
)

typeof = jax.typeof

# Makes of a program a function that keeps of its inside only these values.
Engine = Callable[[Program, frozenset[int]], Callable[..., list[Any]]]


def run_plan(plan: Plan, inputs: Sequence[Any], engine: Engine) -> list[Any]:
    """The results of the plan's program.

    Args:
      plan: what to keep.
      inputs: of the program.
      engine: how.
    """
    values = dict(enumerate(inputs))
    for piece, option in zip(plan.pieces, plan.options, strict=True):
        given = [values[v] for v in piece.inputs]
        made = _function(piece, option, engine)(*given)
        values |= zip(piece.outputs, made, strict=True)
    return results(plan.program, values)


def _function(piece: Piece, option: Option, engine: Engine) -> Callable[..., list[Any]]:
    match option.way:
        case Again(saved):
            return engine(piece.program, saved)
        case InLoop(loop, plan, turns):
            # Forward and backward pass are two loops, whose bodies no compiler merges.
            def body(*inputs: Any) -> list[Any]:
                return run_plan(plan, inputs, checkpointed)

            looped = (
                loop.with_body(body)
                if turns is None
                else loop.in_parts(body, turns, jax.checkpoint)
            )
            # The piece's inputs are in the order in which its operation reads them.
            (operation,) = piece.program.operations
            return lambda *given: _picked(
                piece.program,
                looped(
                    *(
                        given[v] if isinstance(v, int) else v.val
                        for v in operation.inputs
                    )
                ),
            )
    return plain(piece.program)


def _picked(program: Program, made: Sequence[Any]) -> list[Any]:
    """Those results of a program's only operation that are read later."""
    (operation,) = program.operations
    return results(program, dict(zip(operation.outputs, made, strict=True)))


def plain(program: Program) -> Callable[..., list[Any]]:
    """The program as a function, as it was traced."""

    def function(*inputs: Any) -> list[Any]:
        values = dict(enumerate(inputs))
        run(program.operations, values)
        return results(program, values)

    return function


def checkpointed(program: Program, saved: frozenset[int]) -> Callable[..., list[Any]]:
    """The engine that is JAX's own."""
    names = {v: f"{PREFIX}{v}" for v in saved}

    def function(*inputs: Any) -> list[Any]:
        values = dict(enumerate(inputs))
        run(
            program.operations,
            values,
            then=lambda v, x: mark(names[v], x) if v in names else x,
        )
        return results(program, values)

    keep = policies.save_names(*names.values()) if names else policies.full
    return jax.checkpoint(function, policy=keep)


def barred(program: Program, saved: frozenset[int]) -> Callable[..., list[Any]]:
    """The engine with a barrier of our own. It has no forward-mode derivative."""
    return _own(program, saved, _behind_a_barrier)


def conditional(program: Program, saved: frozenset[int]) -> Callable[..., list[Any]]:
    """The engine that computes again in a branch that the compiler cannot foresee.

    For compilers that remove barriers. It has no forward-mode derivative.
    """
    return _own(program, saved, _in_a_branch)


def _own(
    program: Program, saved: frozenset[int], guard: Callable[..., Any]
) -> Callable[..., list[Any]]:
    return _guarded(
        plain(program),
        lambda inputs: _with_saved(program, inputs, saved),
        lambda inputs, kept: _from_saved(program, inputs, kept),
        guard,
    )


def _with_saved(
    program: Program, inputs: Sequence[Any], saved: frozenset[int]
) -> tuple[list[Any], dict[int, Any]]:
    values = dict(enumerate(inputs))
    run(program.operations, values)
    return results(program, values), {v: values[v] for v in sorted(saved)}


def _from_saved(
    program: Program, inputs: Sequence[Any], kept: dict[int, Any]
) -> list[Any]:
    """The program once more: saved values are taken, their derivatives are made."""
    values = dict(enumerate(inputs))

    def then(v: int, x: Any) -> Any:
        if v not in kept:
            return x
        return _as_saved(x, kept[v]) if is_floating(typeof(x)) else kept[v]

    run(program.operations, values, then=then)
    return results(program, values)


@jax.custom_jvp
def _as_saved(computed: Any, saved: Any) -> Any:
    """What was saved, with the derivative of what it was computed from."""
    return saved


@_as_saved.defjvp
def _(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return primals[1], tangents[0]


def _guarded(
    function: Callable[..., Any],
    with_saved: Callable[[Any], tuple[Any, Any]],
    from_saved: Callable[[Any, Any], Any],
    guard: Callable[..., Any],
) -> Callable[..., Any]:
    """A function whose derivative starts from what was kept, behind a guard."""

    @jax.custom_vjp
    def segment(*inputs: Any) -> Any:
        return function(*inputs)

    def forward(*inputs: Any) -> tuple[Any, Any]:
        made, kept = with_saved(inputs)
        return made, (inputs, kept)

    def backward(residuals: Any, cotangents: Any) -> Any:
        inputs = residuals[0]
        # Integers and keys have no derivative, and float0 is no array to a compiler.
        wrt = [
            i for i, x in enumerate(jax.tree.leaves(inputs)) if is_floating(typeof(x))
        ]
        leaves, tree = jax.tree.flatten(cotangents)
        real = [i for i, x in enumerate(leaves) if x.dtype != jax.dtypes.float0]

        def derivative(residuals: Any, given: list[Any]) -> list[Any]:
            inputs, kept = residuals
            all_given = list(leaves)
            for i, x in zip(real, given, strict=True):
                all_given[i] = x
            _, vjp = jax.vjp(lambda *inputs: from_saved(inputs, kept), *inputs)
            made = jax.tree.leaves(vjp(jax.tree.unflatten(tree, all_given)))
            return [made[i] for i in wrt]

        made = guard(derivative, residuals, [leaves[i] for i in real])
        flat, inputs_tree = jax.tree.flatten(inputs)
        zeros: list[Any] = [np.zeros(np.shape(x), jax.dtypes.float0) for x in flat]
        for i, x in zip(wrt, made, strict=True):
            zeros[i] = x
        return jax.tree.unflatten(inputs_tree, zeros)

    segment.defvjp(forward, backward)
    return segment


def _behind_a_barrier(
    derivative: Callable[..., Any], residuals: Any, cotangents: list[Any]
) -> Any:
    """The derivative of values none of which is there before all of them are."""
    leaves, tree = jax.tree.flatten(residuals)
    tied = [i for i, x in enumerate(leaves) if not is_key(typeof(x))]
    made, cotangents = jax.lax.optimization_barrier(
        ([leaves[i] for i in tied], cotangents)
    )
    for i, x in zip(tied, made, strict=True):
        leaves[i] = x
    return derivative(jax.tree.unflatten(tree, leaves), cotangents)


def _in_a_branch(
    derivative: Callable[..., Any], residuals: Any, cotangents: list[Any]
) -> Any:
    """The derivative in a branch that is always taken, which only we know.

    No square of an integer leaves 2 when divided by 4.
    """
    some = next((x for x in cotangents if x.size), None)
    if some is None:
        return _behind_a_barrier(derivative, residuals, cotangents)
    first = jnp.real(some).astype(jnp.float32).ravel()[0]
    number = jax.lax.bitcast_convert_type(first, jnp.uint32)
    shapes = jax.eval_shape(derivative, residuals, cotangents)
    return jax.lax.cond(
        (number * number) % jnp.uint32(4) != jnp.uint32(2),
        derivative,
        lambda *_: [jnp.zeros(x.shape, x.dtype) for x in shapes],
        residuals,
        cotangents,
    )
