"""Where the values of a traced function come from.

The function is gone through once, from its arguments on. Every value knows the
arguments it depends on and the operation that made it, through calls, loops and
conditionals, and so the line of the user's.
"""

from collections.abc import Iterator, Sequence
import contextlib
import functools
import itertools
import os
from pathlib import Path
import sys
from typing import Any, NamedTuple

from jax.extend import core

# Operations whose jaxprs have the operation's results, one for one, and whose inputs
# are the last of the operation's.
_CALLS = {
    "checkpoint",
    "closed_call",
    "cond",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "eval_jaxpr",
    "jit",
    "pjit",
    "remat",
    "remat2",
    "scan",
    "shard_map",
    "while",
}
# The same numbers, or some of them, in another form. What is moved is the first input.
_MOVES = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "copy_p",
    "device_put",
    "dynamic_slice",
    "expand_dims",
    "reduce_precision",
    "reshape",
    "rev",
    "sharding_constraint",
    "slice",
    "squeeze",
    "transpose",
    "unstack",
}
# Say nothing about where a value comes from.
_TRANSPARENT = {"optimization_barrier", "reduce_precision"}
_RANDOM = {
    "random_bits",
    "random_clone",
    "random_fold_in",
    "random_gamma",
    "random_seed",
    "random_split",
    "random_unwrap",
    "random_wrap",
    "rng_bit_generator",
    "rng_uniform",
    "threefry2x32",
}
# Whose lines are not the user's.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "gradacc_jax")


class Value(NamedTuple):
    """Where a value of the traced forward pass comes from.

    Attributes:
      number: the same number is the same array; arguments have their own, below 0.
      args: the arguments it depends on, by their place among the leaves.
      form_of: the argument of which it has the very numbers, if any.
      random: whether it depends on random bits.
      origin: what made it.
      sites: the operation that made it, after the calls around it.
      loops: how often it was made and stacked.
    """

    number: int
    args: frozenset[int] = frozenset()
    form_of: int | None = None
    random: bool = False
    origin: str = "constant"
    sites: tuple[Any, ...] = ()
    loops: int = 1


def values_of(jaxpr: Any, names: Sequence[str]) -> list[Value]:
    """The values that a traced function returns.

    Args:
      jaxpr: the function, without its constants.
      names: of its arguments.
    """
    inputs = [
        Value(-1 - i, frozenset([i]), i, origin=name) for i, name in enumerate(names)
    ]
    return _walk(jaxpr, inputs, itertools.count())


def _walk(jaxpr: Any, inputs: Sequence[Value], numbers: Iterator[int]) -> list[Value]:
    """The values that a traced function returns, given those of its arguments."""
    values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Value:
        if not isinstance(atom, core.Literal) and atom in values:
            return values[atom]
        constant = Value(next(numbers))
        if not isinstance(atom, core.Literal):
            values[atom] = constant
        return constant

    for eqn in jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        if bodies := bodies_of(eqn):
            made = _call(eqn, bodies, given, numbers)
        else:
            made = _operation(eqn, given, numbers)
        values |= zip(eqn.outvars, made, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _operation(eqn: Any, given: list[Value], numbers: Iterator[int]) -> list[Value]:
    name = eqn.primitive.name
    if name in _TRANSPARENT:
        # A copy of an argument is not the argument.
        return [
            v._replace(number=next(numbers)) if v.number < 0 else v
            for v in given[: len(eqn.outvars)]
        ]
    label = eqn.params.get("name") if name == "name" else None
    if label is None:  # newer JAX has an object for it
        label = getattr(eqn.params.get("_prim"), "name", None)
    joined = Value(
        number=0,
        args=frozenset().union(*(v.args for v in given)),
        form_of=given[0].form_of if name in _MOVES else None,
        random=name in _RANDOM or any(v.random for v in given),
        origin=name if label is None else f"named {label!r}",
        sites=(eqn,),
    )
    return [joined._replace(number=next(numbers)) for _ in eqn.outvars]


def _call(
    eqn: Any, bodies: list[Any], given: list[Value], numbers: Iterator[int]
) -> list[Value]:
    before = next(numbers)
    results = [_turn(eqn, body, given, numbers) for body in bodies]
    made = []
    for var, inner, *ways in zip(eqn.outvars, bodies[0].outvars, *results, strict=True):
        # Of a conditional, the branch that does something.
        value = next((v for v in ways if v.args), ways[0])
        if len(ways) > 1:
            value = value._replace(
                number=next(numbers), args=frozenset().union(*(v.args for v in ways))
            )
        if value.number > before:  # made in here
            value = value._replace(sites=(eqn, *value.sites))
        if _rank(var) > _rank(inner):
            length = var.aval.shape[0]
            value = value._replace(number=next(numbers), loops=length * value.loops)
        made.append(value)
    return made


def _turn(
    eqn: Any, body: Any, given: list[Value], numbers: Iterator[int]
) -> list[Value]:
    """What a body returns; of a loop, after as many turns as change anything."""
    inputs = given[len(given) - len(body.invars) :]
    if eqn.primitive.name not in ("scan", "while"):
        return _walk(body, inputs, numbers)
    atoms = eqn.invars[len(given) - len(body.invars) :]
    carried = sum(
        _rank(v) == _rank(inner) for v, inner in zip(eqn.outvars, body.outvars)
    )
    scanned = sum(_rank(atom) > _rank(inner) for atom, inner in zip(atoms, body.invars))
    first = len(inputs) - scanned - carried
    while True:
        results = _walk(body, inputs, numbers)
        changed = False
        for i, out in enumerate(results[:carried], first):
            old = inputs[i]
            args, random = old.args | out.args, old.random or out.random
            if out.number != old.number and (args, random) != (old.args, old.random):
                inputs[i] = out._replace(args=args, random=random, form_of=None)
                changed = True
            elif out.number != old.number and old.form_of is not None:
                # The argument at first, another value later.
                inputs[i] = out._replace(args=args, random=random, form_of=None)
                changed = True
        if not changed:
            return results


def bodies_of(eqn: Any) -> list[Any]:
    """The jaxprs that an operation runs and whose results are its own."""
    name = eqn.primitive.name
    if name not in _CALLS:
        return []
    if name == "while":
        return [without_constants(eqn.params["body_jaxpr"])]
    return [
        inner
        for inner in map(without_constants, core.jaxprs_in_params(eqn.params))
        if len(inner.outvars) == len(eqn.outvars)
        and len(inner.invars) <= len(eqn.invars)
    ]


def without_constants(jaxpr: Any) -> Any:
    """Without its constants. Newer JAX has one class for both."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def source_of(sites: tuple[Any, ...]) -> str:
    """The user's line that led to an operation: the innermost in which there is one.

    JAX cuts the lines of an operation at the function that was traced, so a library's
    function that was traced for another caller has none of that caller's in it.
    """
    lines = next(filter(None, map(_user_lines, reversed(sites))), ())
    if not lines:
        return ""
    file, line, function = lines[0]
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        file = str(path.relative_to(Path.cwd()))
    elif path.is_absolute():
        file = str(Path(*path.parts[-2:]))
    return f"{file}:{line} ({function.rpartition('<locals>.')[2]})"


def _user_lines(eqn: Any) -> tuple[tuple[str, int, str], ...]:
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    return tuple(
        (f.file_name, f.line_num, f.function_name)
        for f in frames
        if not f.file_name.startswith(_folders())
    )


@functools.cache
def _folders() -> tuple[str, ...]:
    """Where the libraries lie that stand between the user and an operation."""
    modules = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    folders = [os.path.dirname(str(m.__file__)) + os.sep for m in modules]
    return (*folders, functools.__file__, contextlib.__file__)


def _rank(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))
