"""A traced function as a list of operations on numbered values.

Calls of nested ``jit`` are inlined, so that what is inside of them can be kept or
computed again piece by piece. Every value has a number of its own: first the inputs,
then what the operations make, in order. Nothing of the user's is changed: an operation
is the equation that JAX traced, bound again with other inputs.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp

from gradacc_jax.checkpointing.flops import Work, work_of_operation

_INLINED = {"jit", "pjit", "closed_call", "core_call"}
# Another form of the same array: XLA writes no new one, or does so on the fly.
MOVES = {
    "bitcast_convert_type",
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "expand_dims",
    "iota",
    "name",
    "reduce_precision",
    "reshape",
    "rev",
    "slice",
    "squeeze",
    "transpose",
}


class Operation(NamedTuple):
    """One operation of a program.

    Attributes:
      eqn: the equation that JAX traced.
      inputs: numbers of values, and literals.
      outputs: the numbers of what it makes.
      sites: the calls that it stood in, outermost first, and the equation.
      kind: what there is to say of the equation that is the same for equal ones.
    """

    eqn: Any
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]
    sites: tuple[Any, ...]
    kind: tuple[Any, ...]

    @property
    def name(self) -> str:
        """Of its primitive."""
        return self.eqn.primitive.name

    @property
    def values(self) -> Iterator[int]:
        """The numbers among its inputs."""
        return (v for v in self.inputs if isinstance(v, int))


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function.

    Attributes:
      operations: in the order of the trace.
      avals: the shapes of all values, by number.
      num_inputs: how many of them are inputs.
      outputs: numbers of values, and literals.
    """

    operations: tuple[Operation, ...]
    avals: tuple[Any, ...]
    num_inputs: int
    outputs: tuple[Any, ...]

    @classmethod
    def of(cls, jaxpr: Any) -> "Program":
        """The program of a jaxpr. Its constants come first among the inputs."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        avals: list[Any] = []
        operations: list[Operation] = []

        def new(variables: Sequence[Any]) -> range:
            avals.extend(v.aval for v in variables)
            return range(len(avals) - len(variables), len(avals))

        def inline(jaxpr: Any, inputs: Sequence[Any], sites: tuple[Any, ...]) -> Any:
            at = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

            def read(atom: Any) -> Any:
                return atom if isinstance(atom, core.Literal) else at[atom]

            for eqn in jaxpr.eqns:
                given = tuple(map(read, eqn.invars))
                where = (*sites, eqn)
                if (inner := _inlined(eqn)) is not None:
                    made = inline(inner, given, where)
                else:
                    made = tuple(new(eqn.outvars))
                    operations.append(Operation(eqn, given, made, where, _kind(eqn)))
                at |= zip(eqn.outvars, made, strict=True)
            return tuple(map(read, jaxpr.outvars))

        inputs = new([*jaxpr.constvars, *jaxpr.invars])
        outputs = inline(jaxpr, inputs, ())
        return cls(tuple(operations), tuple(avals), len(inputs), outputs)

    @functools.cached_property
    def signature(self) -> tuple[Any, ...]:
        """Equal for programs that one plan fits: the same operations and shapes."""
        operations = tuple(
            (operation.kind, tuple(map(_atom, operation.inputs)), operation.outputs)
            for operation in self.operations
        )
        shapes = tuple(map(_shape, self.avals))
        return shapes, operations, tuple(map(_atom, self.outputs))

    @functools.cached_property
    def nbytes(self) -> tuple[int, ...]:
        """The bytes of all values, by number."""
        return tuple(map(num_bytes, self.avals))

    @functools.cached_property
    def work(self) -> tuple[Work, ...]:
        """What each operation computes."""
        return tuple(work_of_operation(operation.eqn) for operation in self.operations)

    @functools.cached_property
    def made_at(self) -> tuple[int, ...]:
        """For every value the operation that makes it; -1 for inputs."""
        at = [-1] * len(self.avals)
        for i, operation in enumerate(self.operations):
            for v in operation.outputs:
                at[v] = i
        return tuple(at)

    @functools.cached_property
    def first_read_at(self) -> tuple[int, ...]:
        """For every value the first operation that reads it; their number for none."""
        at = [len(self.operations)] * len(self.avals)
        for i, operation in reversed(list(enumerate(self.operations))):
            for v in operation.values:
                at[v] = i
        return tuple(at)

    @functools.cached_property
    def last_read_at(self) -> tuple[int, ...]:
        """For every value the last operation that reads it; -1 for none."""
        at = [-1] * len(self.avals)
        for i, operation in enumerate(self.operations):
            for v in operation.values:
                at[v] = i
        return tuple(at)

    @functools.cached_property
    def last_used_at(self) -> tuple[int, ...]:
        """For every value the last operation that reads it; results: their number."""
        at = list(self.last_read_at)
        for v in self.outputs:
            if isinstance(v, int):
                at[v] = len(self.operations)
        return tuple(at)

    def part(self, start: int, end: int) -> tuple["Program", list[int], list[int]]:
        """Operations of this program as a program of their own.

        Args:
          start: the first of them.
          end: the one behind the last.

        Returns:
          The part, and the numbers that its inputs and its results have here. Results
          are what is read later.
        """
        inputs: dict[int, None] = {}
        made: list[int] = []
        for operation in self.operations[start:end]:
            inputs |= {v: None for v in operation.values if self.made_at[v] < start}
            made += operation.outputs
        numbers = {v: i for i, v in enumerate([*inputs, *made])}

        def read(atom: Any) -> Any:
            return numbers[atom] if isinstance(atom, int) else atom

        operations = tuple(
            operation._replace(
                inputs=tuple(map(read, operation.inputs)),
                outputs=tuple(map(read, operation.outputs)),
            )
            for operation in self.operations[start:end]
        )
        outputs = [v for v in made if self.last_used_at[v] >= end]
        part = Program(
            operations,
            tuple(self.avals[v] for v in numbers),
            len(inputs),
            tuple(map(read, outputs)),
        )
        return part, list(inputs), outputs

    def active(self, inputs: Sequence[bool]) -> list[bool]:
        """Which values a derivative with respect to some inputs goes through."""
        found = [*inputs, *[False] * (len(self.avals) - self.num_inputs)]
        for operation in self.operations:
            if operation.name != "stop_gradient" and any(
                found[v] for v in operation.values
            ):
                for v in operation.outputs:
                    found[v] = is_floating(self.avals[v])
        return found


def run(
    operations: Sequence[Operation],
    values: dict[int, Any],
    then: Callable[[int, Any], Any] = lambda number, value: value,
    instead: Callable[[Operation], Callable[..., list[Any]] | None] = lambda _: None,
) -> None:
    """Runs operations, and puts what they make among the values.

    Args:
      operations: what to run.
      values: the values so far, by number; added to.
      then: what becomes of each value that is made.
      instead: a function to be run in the place of an operation, or None.
    """
    for operation in operations:
        inputs = [values[v] if isinstance(v, int) else v.val for v in operation.inputs]
        other = instead(operation)
        with operation.eqn.ctx.manager:
            made = bind(operation.eqn, inputs) if other is None else other(*inputs)
        for number, value in zip(operation.outputs, made, strict=True):
            values[number] = then(number, value)


def bind(eqn: Any, inputs: Sequence[Any], **others: Any) -> list[Any]:
    """Runs one equation on other inputs, and with some parameters replaced."""
    params = eqn.primitive.get_bind_params({**eqn.params, **others})
    made = eqn.primitive.bind(*inputs, **params)
    return list(made) if eqn.primitive.multiple_results else [made]


def results(program: Program, values: dict[int, Any]) -> list[Any]:
    """The program's results, once its operations have run."""
    return [values[v] if isinstance(v, int) else v.val for v in program.outputs]


def num_bytes(aval: Any) -> int:
    """The bytes of an array; of keys, those of the integers they hold."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return math.prod(aval.shape) * 16
    return math.prod(aval.shape) * dtype.itemsize


def is_floating(aval: Any) -> bool:
    """Whether a value has a derivative: it is real or complex."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def is_key(aval: Any) -> bool:
    """Whether a value is a random key, or another thing that is no array of numbers."""
    dtype = getattr(aval, "dtype", None)
    return dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended)


def is_nameable(aval: Any) -> bool:
    """Whether JAX can keep a value by a name: keys and complex numbers it cannot."""
    return not is_key(aval) and not jnp.issubdtype(aval.dtype, jnp.complexfloating)


def _inlined(eqn: Any) -> Any:
    """The body of a call that means no more than its body; else None."""
    if eqn.primitive.name not in _INLINED or eqn.effects:
        return None
    placed = [*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())]
    if any(type(s).__name__ != "UnspecifiedValue" for s in placed):
        return None
    closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if closed is None or getattr(closed, "consts", None):
        return None
    return getattr(closed, "jaxpr", closed)


def _kind(eqn: Any) -> tuple[Any, ...]:
    """See :class:`Operation`."""
    plain = [
        (k, v)
        for k, v in sorted(eqn.params.items())
        if isinstance(v, int | float | str | bool | tuple)
        and k not in ("name", "branches")
    ]
    inside = [Program.of(j).signature for j in core.jaxprs_in_params(eqn.params)]
    return eqn.primitive.name, repr(plain), tuple(inside)


def _atom(atom: Any) -> Any:
    return atom if isinstance(atom, int) else _shape(atom.aval)


def _shape(aval: Any) -> tuple[Any, ...]:
    dtype = getattr(aval, "dtype", None)
    return getattr(aval, "shape", ()), str(aval) if dtype is None else dtype
