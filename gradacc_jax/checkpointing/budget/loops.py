"""Loops (``lax.scan``): what goes round in them, and the same loop with another body.

A loop is one operation of its program, and its body a program of its own. What the body
keeps is kept once for every turn. A loop of n turns can be made one of m turns of a
loop of n / m: kept are then the carries of the outer loop, and what one of the inner
loops keeps, at the price of one more forward pass. And its body can be several turns at
a time, which need not all keep the same: between what every turn keeps and what none
does there is then something in the middle.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from gradacc_jax.checkpointing.budget.needs import shape_of
from gradacc_jax.checkpointing.budget.programs import (
    Operation,
    Program,
    bind,
    num_bytes,
)

_AT_ONCE = 4


class Loop:
    """A ``scan``: its body, and which of its inputs are which.

    Args:
      operation: the operation.
      at_once: how many turns its body is; a divisor of their number.
    """

    def __init__(self, operation: Operation, at_once: int = 1):
        eqn = operation.eqn
        self.eqn, self.at_once = eqn, at_once
        closed = eqn.params["jaxpr"]
        self.consts = list(getattr(closed, "consts", ()))
        turn = Program.of(closed)
        self.length: int = eqn.params["length"] // at_once
        inner = [aval.shape for aval in turn.avals[: turn.num_inputs]]
        inner = inner[len(self.consts) :]
        outer = [atom.aval.shape for atom in eqn.invars]
        made = [v.aval.shape for v in getattr(closed, "jaxpr", closed).outvars]
        # In the order of JAX's: constants, carry, and what is scanned over, which has
        # an axis more outside of the loop.
        num_scanned = sum(len(a) > len(b) for a, b in zip(outer, inner))
        self.num_carried = sum(
            len(v.aval.shape) == len(b) for v, b in zip(eqn.outvars, made)
        )
        self.num_constant = len(inner) - num_scanned - self.num_carried
        self.body = turn if at_once == 1 else self._several(turn)

    @property
    def carried(self) -> range:
        """The numbers of the carry among the body's inputs."""
        start = len(self.consts) + self.num_constant
        return range(start, start + self.num_carried)

    @functools.cached_property
    def carry_bytes(self) -> int:
        """The bytes of the carry."""
        return sum(self.body.nbytes[v] for v in self.carried)

    @property
    def sliced_bytes(self) -> int:
        """What is copied when the loop is cut in two: what it scans over, and makes."""
        scanned = self.eqn.invars[self.num_constant + self.num_carried :]
        made = self.eqn.outvars[self.num_carried :]
        return sum(num_bytes(atom.aval) for atom in (*scanned, *made))

    def wrt(self, active: Sequence[bool]) -> tuple[int, ...]:
        """The body's inputs with a derivative, given those of the loop's."""
        found = [False] * len(self.consts) + list(active)
        while True:
            out = self.body.active(found)
            again = list(found)
            for v, made in zip(self.carried, self.body.outputs, strict=False):
                again[v] = found[v] or (isinstance(made, int) and out[made])
            if again == found:
                return tuple(v for v, is_active in enumerate(found) if is_active)
            found = again

    def with_body(self, body: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """The loop with another body: of constants, carry and what is scanned over."""

        def run(*inputs: Any) -> list[Any]:
            inner = self.body.avals[len(self.consts) : self.body.num_inputs]
            traced = jax.make_jaxpr(lambda *args: body(*self.consts, *args))(
                *map(shape_of, inner)
            )
            if traced.consts or self.at_once > 1:
                return self._scan(body, inputs)
            return bind(self.eqn, inputs, jaxpr=traced)

        return run

    def in_parts(
        self,
        body: Callable[..., list[Any]],
        turns: int,
        again: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> Callable[..., list[Any]]:
        """The loop, of one turn at a time, as one of loops and one for the rest.

        Args:
          body: of a single turn.
          turns: of an inner loop.
          again: makes a function one that is computed again in the backward pass.
        """
        outer, rest = divmod(self.length, turns)
        split = self.num_constant

        def inner(turns: int, consts: Any, carry: Any, scanned: Any) -> Any:
            return self._scan(body, (*consts, *carry, *scanned), turns)

        def run(*inputs: Any) -> list[Any]:
            consts, carry, scanned = (
                list(inputs[:split]),
                list(inputs[split : split + self.num_carried]),
                list(inputs[split + self.num_carried :]),
            )
            backwards = self.eqn.params["reverse"]
            whole = outer * turns
            first, last = (0, whole) if not backwards else (rest, self.length)
            parts = [lax.slice_in_dim(x, first, last) if rest else x for x in scanned]
            parts = [x.reshape(outer, turns, *x.shape[1:]) for x in parts]
            piece = again(lambda consts, carry, x: inner(turns, consts, carry, x))

            def step(carry: Any, x: Any) -> tuple[Any, Any]:
                made = piece(consts, carry, x)
                return made[: self.num_carried], made[self.num_carried :]

            carry, ys = lax.scan(step, carry, parts, length=outer, reverse=backwards)
            ys = [y.reshape(whole, *y.shape[2:]) for y in ys]
            if not rest:
                return [*carry, *ys]
            left = (whole, self.length) if not backwards else (0, rest)
            tail = [lax.slice_in_dim(x, *left) for x in scanned]
            made = again(lambda consts, carry, x: inner(rest, consts, carry, x))(
                consts, carry, tail
            )
            others = made[self.num_carried :]
            pairs = zip(others, ys) if backwards else zip(ys, others)
            return [
                *made[: self.num_carried],
                *(lax.concatenate(pair, 0) for pair in pairs),
            ]

        return run

    def _scan(
        self,
        body: Callable[..., list[Any]],
        inputs: Sequence[Any],
        turns: int | None = None,
    ) -> list[Any]:
        split = self.num_constant
        consts = inputs[:split]
        carry = list(inputs[split : split + self.num_carried])

        scanned = list(inputs[split + self.num_carried :])
        several = self.at_once

        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            made = body(*self.consts, *consts, *carry, *x)
            ys = made[self.num_carried :]
            if several > 1:
                each = range(0, len(ys), several)
                ys = [jnp.stack(ys[i : i + several]) for i in each]
            return made[: self.num_carried], ys

        if several > 1:
            scanned = [x.reshape(self.length, several, *x.shape[1:]) for x in scanned]
        params = self.eqn.params
        as_it_was = turns is None and several == 1
        carry, ys = lax.scan(
            step,
            carry,
            scanned,
            length=self.length if turns is None else turns,
            reverse=params["reverse"],
            unroll=params["unroll"] if as_it_was else 1,
        )
        if several > 1:
            ys = [y.reshape(self.length * several, *y.shape[2:]) for y in ys]
        return [*carry, *ys]

    def _several(self, turn: Program) -> Program:
        """Several turns as one program.

        What is scanned over comes in whole, and a turn's part of it is taken where it
        is read first, so that it need not be kept. What is made in every turn comes out
        one by one.
        """
        start = len(self.consts) + self.num_constant
        slices = range(start + self.num_carried, turn.num_inputs)
        avals = list(turn.avals[: slices.start])
        avals += [
            a.update(shape=(self.at_once, *a.shape))
            for a in turn.avals[slices.start : slices.stop]
        ]
        operations: list[Operation] = []

        def add(operation: Operation, part: Program, at: dict[int, Any]) -> None:
            for v in operation.outputs:
                at[v] = len(avals)
                avals.append(part.avals[v])
            operations.append(
                operation._replace(
                    inputs=tuple(_read(atom, at) for atom in operation.inputs),
                    outputs=tuple(at[v] for v in operation.outputs),
                )
            )

        def part_of(v: int, i: int) -> Any:
            take = functools.partial(lax.index_in_dim, index=i, axis=0, keepdims=False)
            part = Program.of(jax.make_jaxpr(take)(shape_of(avals[v])))
            at = {0: v}
            for operation in part.operations:
                add(operation, part, at)
            return _read(part.outputs[0], at)

        carry: list[Any] = list(self.carried)
        made: dict[int, list[Any]] = {}
        order = range(self.at_once)
        for i in reversed(order) if self.eqn.params["reverse"] else order:
            at: dict[int, Any] = dict(enumerate([*range(start), *carry]))
            for operation in turn.operations:
                for v in operation.values:
                    if v in slices and v not in at:
                        at[v] = part_of(v, i)
                add(operation, turn, at)
            for v in turn.outputs:
                if v in slices and v not in at:
                    at[v] = part_of(v, i)
            out = [_read(atom, at) for atom in turn.outputs]
            carry, made[i] = out[: self.num_carried], out[self.num_carried :]
        ys = [y for of_turns in zip(*(made[i] for i in order)) for y in of_turns]
        return Program(tuple(operations), tuple(avals), slices.stop, (*carry, *ys))


def _read(atom: Any, at: dict[int, Any]) -> Any:
    """A value under its other number; a literal stays."""
    return at[atom] if isinstance(atom, int) else atom


def is_loop(operation: Operation) -> bool:
    """Whether an operation is a loop that can be given another body.

    One whose arrays carry their shardings in their types (explicit meshes) cannot.
    """
    if operation.name != "scan" or operation.eqn.params["length"] < 2:
        return False
    avals = [atom.aval for atom in (*operation.eqn.invars, *operation.eqn.outvars)]
    specs = [getattr(getattr(aval, "sharding", None), "spec", ()) for aval in avals]
    return all(axis is None for spec in specs for axis in spec)


def inner_lengths(length: int) -> list[int]:
    """Lengths of inner loops worth a try: near the square root, divisors first."""
    root = math.isqrt(length)
    divisors = [d for d in range(2, length // 2 + 1) if length % d == 0]
    near = sorted(divisors, key=lambda d: abs(math.log(d / max(root, 1))))[:4]
    if not any(root / 2 <= d <= 2 * root for d in near) and root > 1:
        near.append(root)
    return near


def turns_at_once(length: int) -> int:
    """How many turns a body may be, if not one: few, or it takes long to compile."""
    return max(d for d in range(1, _AT_ONCE + 1) if length % d == 0)
