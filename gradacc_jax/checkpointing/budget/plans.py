"""Plans: for every segment of a program what is kept, and what that costs."""

import dataclasses
from typing import Any, NamedTuple

from gradacc_jax.checkpointing.budget.cuts import Segment
from gradacc_jax.checkpointing.budget.loops import Loop
from gradacc_jax.checkpointing.budget.programs import Program


class Alone(NamedTuple):
    """A segment as it was traced."""


class Again(NamedTuple):
    """A segment that is computed again, from its inputs and these values."""

    saved: frozenset[int]


class InLoop(NamedTuple):
    """A loop whose body follows a plan.

    Attributes:
      loop: the loop.
      plan: for its body.
      turns: of the loops that it is made of; None if it stays one.
    """

    loop: Loop
    plan: "Plan"
    turns: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Option:
    """One choice for a segment.

    Attributes:
      kept: bytes that are there until the backward pass comes, besides inputs.
      held: bytes that are there besides while it is in the segment.
      cost: seconds of what is computed again.
      flops: its floating-point operations.
      way: what to do.
    """

    kept: float
    held: float
    cost: float
    flops: float
    way: Alone | Again | InLoop


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A segment with its choices.

    Attributes:
      segment: where it is.
      program: what it does.
      inputs: the numbers of its inputs in the whole program.
      outputs: those of its results.
      crossing: the bytes of those that later segments read.
      options: its choices, the fewest bytes first.
      fixed: what fixed policies choose, by their names.
    """

    segment: Segment
    program: Program
    inputs: list[int]
    outputs: list[int]
    crossing: float
    options: list[Option]
    fixed: dict[str, Option] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """One choice for every segment.

    Attributes:
      program: what it is for.
      kind: plans of one kind are predicted wrong in the same way: they are of one way
        to cut the program, or have loops of one form.
      pieces: its segments.
      options: their choices.
      kept: bytes kept for the backward pass.
      held: bytes that are there besides at its worst moment.
      cost: seconds of what is computed again.
    """

    program: Program
    kind: Any
    pieces: tuple[Piece, ...]
    options: tuple[Option, ...]
    kept: float
    held: float
    cost: float

    @property
    def flops(self) -> float:
        """The floating-point operations of what is computed again."""
        return sum(option.flops for option in self.options)

    @property
    def peak(self) -> float:
        """The bytes that are there at the worst moment, as predicted."""
        return self.kept + self.held


class Plans(NamedTuple):
    """The plans of a program.

    Attributes:
      frontier: those that no other beats in bytes and seconds, the fewest bytes first;
        the last one leaves the program as it is.
      cuts: the frontier of each cut alone, that of the fewest bytes first.
      fixed: of each fixed policy, on the segments that suit it.
    """

    frontier: list[Plan]
    cuts: list[list[Plan]]
    fixed: dict[str, Plan]


def for_program(plan: Plan, program: Program) -> Plan:
    """The plan for another trace of the same program: equal operations, new objects."""
    pieces, options = [], []
    for piece, option in zip(plan.pieces, plan.options, strict=True):
        segment = piece.segment
        part, inputs, outputs = program.part(segment.start, segment.end)
        if isinstance(option.way, InLoop):
            loop = Loop(part.operations[0], option.way.loop.at_once)
            inner = for_program(option.way.plan, loop.body)
            way = InLoop(loop, inner, option.way.turns)
            option = dataclasses.replace(option, way=way)
        pieces.append(Piece(segment, part, inputs, outputs, piece.crossing, [option]))
        options.append(option)
    return dataclasses.replace(
        plan, program=program, pieces=tuple(pieces), options=tuple(options)
    )
