r"""Plans: for every segment of a program what is kept, and what that costs.

A plan is one way to cut a program, and for every segment one of its choices: let it
alone, or compute it again from what comes in and from what a minimum cut says to save.
Its bytes are predicted thus. When the backward pass is in a segment, there are the
inputs and saved values of that segment and of all before it, and all that the
derivative of this one needs:

.. math::
    M = \max_s \; \Big( h_s + \Big( \sum_{i < s} (x_i + k_i) + k_s - g_s \Big)_+ \Big),

with x what crosses into later segments, k what is kept and h what is held besides while
the segment is computed again. Where the program returns gradients, those that are not
yet written have room for g of what is kept. In a loop all that is kept is kept once for
every turn.

The plans from the smallest to the function as it is are found greedily: of all
segments the next better choice that spares most seconds for a byte comes first. What
is then left of a number of bytes is filled with whatever fits.
"""

from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from gradacc_jax.checkpointing import policies
from gradacc_jax.checkpointing.budget.costs import Rates, again
from gradacc_jax.checkpointing.budget.cuts import Gradients, Segment, segmentations
from gradacc_jax.checkpointing.budget.loops import (
    Loop,
    inner_lengths,
    is_loop,
    turns_at_once,
)
from gradacc_jax.checkpointing.budget.needs import needs_of
from gradacc_jax.checkpointing.budget.programs import (
    Operation,
    Program,
    is_nameable,
)
from gradacc_jax.checkpointing.budget.solve import Choice, Problem, Task, pareto

_LEVELS = 24
# Of how many ways to choose for the body of a loop all are looked at. What is chosen is
# chosen for every turn, so that little else comes between two of them.
_WAYS = 2**16
# A loop that keeps a smaller part of all than this is an operation like others.
_SMALL = 0.01
# What is computed again is partly fused into what reads it, and never written. Without
# this a last segment that keeps all seems as good as one that is computed again.
_HELD = 0.9
# How many cuts are made for a segment, and from how many operations on it is too large
# to be worth that.
_CORNERS, _LARGE = 12, 600
# Operations with derivatives that keep values of their own, which have no names here:
# they run again whenever their segment does.
_OPAQUE = {"cond", "custom_vjp_call", "custom_vjp_call_jaxpr", "scan", "shard_map"}


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


class Planner:
    """Finds the plans of programs, and of the bodies of their loops.

    Args:
      rates: of the chip.
    """

    def __init__(self, rates: Rates):
        self.rates = rates
        self._solved: dict[Any, tuple[list[Option], dict[str, Option]]] = {}
        self._loops: dict[Any, Any] = {}  # with their equations, or ids are others'

    def plans(
        self,
        program: Program,
        wrt: Sequence[int],
        turns: int = 1,
        towards: Sequence[int] | None = None,
        returned: bool = False,
    ) -> "Plans":
        """The plans of a program.

        Args:
          program: what to plan.
          wrt: the inputs that it is differentiated with respect to.
          turns: how often it runs, if it is the body of a loop.
          towards: which of its results are differentiated; None for all.
          returned: whether the gradients are results of the program that counts.
        """
        needs = needs_of(program, wrt, towards)
        is_wrt = [v in set(wrt) for v in range(program.num_inputs)]
        active = program.active(is_wrt)
        held = [
            float(sum(program.nbytes[v] for v in operation.outputs if v in needs))
            for operation in program.operations
        ]
        loops: dict[int, tuple[list[Option], dict[str, Option]]] = {}
        alone: list[int] = []
        enough = _SMALL * sum(held)
        for i, operation in enumerate(program.operations):
            if operation.eqn.effects:
                alone.append(i)
            elif is_loop(operation):
                given = [isinstance(v, int) and active[v] for v in operation.inputs]
                options, of_policies = self._loop(operation, given)
                if options and options[-1].kept > enough:
                    loops[i] = options, of_policies
                    alone.append(i)
        gradients = Gradients.of(program, wrt) if returned else None
        cuts = segmentations(program, held, alone, gradients)
        of_cuts: list[list[Plan]] = []
        fixed: dict[str, Plan] = {}
        for cut in cuts:
            pieces, widest = [], 0.0
            for segment in cut:
                part, inputs, outputs = program.part(segment.start, segment.end)
                crossing = {
                    v for v in outputs if program.last_read_at[v] >= segment.end
                }
                widest = max([widest, *(program.nbytes[v] for v in crossing)])
                if segment.alone:
                    as_it_is: Any = [Option(0, 0, 0, 0, Alone())], {}
                    options, of_policies = loops.get(segment.start, as_it_is)
                else:
                    made = range(part.num_inputs, len(part.avals))
                    whole = [
                        v
                        for o in program.operations[segment.start : segment.end]
                        for v in o.outputs
                    ]
                    local = dict(zip(whole, made, strict=True))
                    options, of_policies = self._options(
                        part,
                        frozenset(local[v] for v in whole if v in needs),
                        frozenset(local[v] for v in crossing),
                        tuple(active[v] for v in inputs),
                        turns > 1,
                    )
                pieces.append(
                    Piece(
                        segment,
                        part,
                        inputs,
                        outputs,
                        float(sum(program.nbytes[v] for v in crossing)),
                        options,
                        of_policies,
                    )
                )
            room = np.zeros(len(cut))
            if gradients is not None:
                room = gradients.room(cut, widest)
            for form in _forms(pieces) if turns == 1 else [None]:
                kind = form or len(of_cuts)
                ways = _Cut(program, kind, _of_form(pieces, form), turns, room)
                of_cuts.append(_best(ways.plans(), turns))
            for name in _POLICIES:
                plan = ways.fixed(name)
                if name not in fixed or plan.peak < fixed[name].peak:
                    fixed[name] = plan
        of_cuts.sort(key=lambda plans: (plans[0].peak, plans[0].cost))
        return Plans(_best([*itertools.chain(*of_cuts)], turns), of_cuts, fixed)

    def seconds(self, program: Program) -> float:
        """What a program takes once."""
        numbers = range(len(program.operations))
        return sum(self.rates.seconds(program, i) for i in numbers)

    def _options(
        self,
        part: Program,
        needed: frozenset[int],
        free: frozenset[int],
        active: tuple[bool, ...],
        in_loop: bool,
    ) -> tuple[list[Option], dict[str, Option]]:
        """The choices for a segment: corners of its frontier, alone; fixed policies."""
        key = part.signature, needed, free, active, in_loop
        if key not in self._solved:
            self._solved[key] = self._solve(part, needed, free, active, in_loop)
        return self._solved[key]

    def _solve(
        self,
        part: Program,
        needed: frozenset[int],
        free: frozenset[int],
        active: tuple[bool, ...],
        in_loop: bool,
    ) -> tuple[list[Option], dict[str, Option]]:
        is_active = part.active(active)
        everything = float(sum(part.nbytes[v] for v in needed - free))
        alone = Option(everything, 0.0, 0.0, 0.0, Alone())
        if not needed:
            return [alone], {}
        forced, forced_flops, tasks = 0.0, 0.0, []
        for i, operation in enumerate(part.operations):
            cost = again(part, i, self.rates)
            if operation.name in _OPAQUE and any(
                is_active[v] for v in operation.values
            ):
                forced, cost = forced + cost, 0.0
                forced_flops += part.work[i].total
            tasks.append(
                Task(
                    tuple({v for v in operation.values if v >= part.num_inputs}),
                    operation.outputs,
                    cost,
                )
            )

        def nbytes(v: int) -> float:
            if v in free:
                return 0.0
            return float(part.nbytes[v]) if is_nameable(part.avals[v]) else math.inf

        held = float(sum(part.nbytes[v] for v in needed))
        problem = Problem(tasks, needed, nbytes)

        def option(choice: Choice) -> Option:
            there = sum(part.nbytes[v] for v in choice.saved & needed)
            flops = sum(part.work[i].total for i in choice.again if tasks[i].cost)
            return Option(
                choice.nbytes,
                _HELD * (held - there),
                choice.cost + forced,
                flops + forced_flops,
                Again(choice.saved),
            )

        fixed = {k: problem.saving(v) for k, v in _of_policies(part).items()}
        corners = problem.frontier(limit=_CORNERS if len(tasks) < _LARGE else 3)
        choices = [*corners, *fixed.values()]
        if in_loop:
            choices += problem.subsets(corners)
        options = [option(choice) for choice in pareto(choices)]
        # What cannot be named cannot be saved, and decisions are not made again.
        found = [o for o in options if o.kept < everything and 0 < o.cost < math.inf]
        of_policies = {name: option(choice) for name, choice in fixed.items()}
        return (
            sorted([*found, alone], key=lambda o: o.kept),
            {k: o for k, o in of_policies.items() if o.kept + o.cost < math.inf},
        )

    def _loop(
        self, operation: Operation, active: Sequence[bool]
    ) -> tuple[list[Option], dict[str, Option]]:
        """The choices for a loop, in one of its turns or in several at a time."""
        # A loop in the body of a loop is there as often as its body has turns.
        key = id(operation.eqn), tuple(active)
        if key in self._loops:
            return self._loops[key][1]
        options, of_policies = self._of_loop(Loop(operation), active)
        at_once = turns_at_once(operation.eqn.params["length"])
        if at_once > 1 and options:
            options = options + self._of_loop(Loop(operation, at_once), active)[0]
        best: dict[Any, list[Option]] = {}
        for option in sorted(options, key=lambda o: (o.kept + o.held, o.cost)):
            of_form = best.setdefault(_form(option), [])
            if not of_form or option.cost < of_form[-1].cost:
                of_form.append(option)
        found = sorted(itertools.chain(*best.values()), key=lambda o: o.kept)
        self._loops[key] = operation.eqn, (found, of_policies)
        return self._loops[key][1]

    def _of_loop(
        self, loop: Loop, active: Sequence[bool]
    ) -> tuple[list[Option], dict[str, Option]]:
        """The choices for a loop: its body by any plan, and loops of loops."""
        wrt = loop.wrt(active)
        if not wrt:
            return [], {}
        length, carry = loop.length, float(loop.carry_bytes)
        plans = self.plans(loop.body, wrt, turns=length)
        needs = needs_of(loop.body, wrt)
        used = float(sum(loop.body.nbytes[v] for v in loop.carried if v in needs))
        found = []
        once = self.seconds(loop.body)
        work = sum(work.total for work in loop.body.work)

        def whole(plan: Plan) -> Option:
            is_plain = all(isinstance(o.way, Alone) for o in plan.options)
            kept = plan.kept + (used if is_plain else carry)
            return Option(
                length * kept,
                # All that the backward pass of several turns starts from is there when
                # it begins, and compilers compute again as early as they can.
                plan.held if loop.at_once == 1 else sum(o.held for o in plan.options),
                length * plan.cost,
                length * plan.flops,
                Alone() if is_plain else InLoop(loop, plan, None),
            )

        for plan in plans.frontier:
            found.append(whole(plan))
            kept = found[-1].kept / length
            for turns in inner_lengths(length) if loop.at_once == 1 else ():
                outer, rest = divmod(length, turns)
                copied = float(loop.sliced_bytes) if rest else 0.0
                found.append(
                    Option(
                        outer * carry + copied,
                        turns * kept + plan.held,
                        length * (plan.cost + once),
                        length * (plan.flops + work),
                        InLoop(loop, plan, turns),
                    )
                )
        return found, {name: whole(plan) for name, plan in plans.fixed.items()}


def _form(option: Option) -> Any:
    """In which form a loop is run: by its turns, by several, or as loops of loops."""
    if not isinstance(option.way, InLoop):
        return None
    return option.way.loop.at_once, option.way.turns is None


def _forms(pieces: Sequence[Piece]) -> list[Any]:
    """The forms of the loops in a program; None alone if there are none."""
    found = {_form(option) for piece in pieces for option in piece.options}
    return sorted(found - {None}) or [None]


def _of_form(pieces: Sequence[Piece], form: Any) -> tuple[Piece, ...]:
    """A program of whose loops all have one form, or any of them for None."""
    if form is None:
        return tuple(pieces)

    def of(piece: Piece) -> Piece:
        options = [o for o in piece.options if _form(o) in (None, form)]
        return dataclasses.replace(piece, options=options)

    return tuple(map(of, pieces))


_POLICIES = ("full", "dots", "dots_with_no_batch_dims")


def _of_policies(part: Program) -> dict[str, frozenset[int]]:
    """What the fixed policies save of a program."""
    found: dict[str, frozenset[int]] = {}
    for name in _POLICIES:
        policy = policies.resolve(name)
        found[name] = frozenset(
            v
            for operation in part.operations
            if policy(
                operation.eqn.primitive,
                *(atom.aval for atom in operation.eqn.invars),
                **operation.eqn.params,
            )
            is True
            for v in operation.outputs
        )
    return found


class _Cut:
    """One way to cut a program, and the plans that it gives."""

    def __init__(
        self,
        program: Program,
        kind: Any,
        pieces: tuple[Piece, ...],
        turns: int,
        room: np.ndarray,
    ):
        self.program, self.kind, self.pieces = program, kind, pieces
        self.turns, self.room = turns, room
        self.crossing = np.array([p.crossing for p in pieces])
        self.kept = [np.array([o.kept for o in p.options]) for p in pieces]
        self.cost = [np.array([o.cost for o in p.options]) for p in pieces]
        # A row for each piece, filled up to the most options, to pick from at once.
        self.rows = np.arange(len(pieces))
        self.table = np.zeros((2, len(pieces), max(map(len, self.kept), default=0)))
        for i, piece in enumerate(pieces):
            for j, option in enumerate(piece.options):
                self.table[:, i, j] = option.kept, option.held

    def plans(self) -> list[Plan]:
        """Plans of this cut, from the smallest to the function as it is."""
        if not self.pieces:
            return [Plan(self.program, self.kind, (), (), 0.0, 0.0, 0.0)]
        if self.turns > 1 and math.prod(map(len, self.kept)) <= _WAYS:
            return [self._plan(state) for state in self._best_of_all()]
        at = np.array([int(np.argmin(k)) for k in self.kept])
        states = [at.copy()]
        for piece, option in self._steps():
            if option > at[piece]:
                at[piece] = option
                states.append(at.copy())
        peaks = [sum(self.bytes(state)) for state in states]
        seen = {tuple(state): None for state in states}
        for level in np.geomspace(max(min(peaks), 1.0), max(*peaks, 1.0), _LEVELS):
            start = max(
                (i for i, p in enumerate(peaks) if p <= level * (1 + 1e-9)), default=0
            )
            seen[tuple(self._filled(states[start].copy(), level))] = None
        return [self._plan(state) for state in seen]

    def _best_of_all(self) -> np.ndarray:
        """Of all states of a loop's body those that no other beats."""
        shape = tuple(map(len, self.kept))
        kept = functools.reduce(np.add.outer, self.kept).ravel()
        cost = functools.reduce(np.add.outer, self.cost).ravel()
        of_pieces = [self.table[1, i, :n] for i, n in enumerate(shape)]
        held = functools.reduce(np.maximum.outer, of_pieces).ravel()
        nbytes = self.turns * kept + held
        order = np.lexsort((cost, nbytes))
        least = np.minimum.accumulate(cost[order])
        better = np.concatenate([[True], least[1:] < least[:-1]])
        return np.stack(np.unravel_index(order[better], shape), -1)

    def bytes(self, at: Sequence[int] | np.ndarray) -> tuple[float, float]:
        """What a state keeps for the backward pass, and what it holds besides."""
        return self._bytes(*self.table[:, self.rows, at])

    def _bytes(self, kept: np.ndarray, held: np.ndarray) -> tuple[float, float]:
        through = self.crossing + kept
        if not len(through):
            return 0.0, 0.0
        if self.turns > 1:
            return float(through.sum()), float(held.max())
        before = np.cumsum(through) - through
        peak = float((np.maximum(before + kept - self.room, 0) + held).max())
        total = float(through.sum())
        return min(total, peak), max(peak - total, 0.0)

    def size(self, at: Sequence[int] | np.ndarray) -> float:
        """The bytes of a state at its worst moment."""
        kept, held = self.bytes(at)
        return self.turns * kept + held

    def _steps(self) -> list[tuple[int, int]]:
        """Pieces and their next better options, most seconds for a byte first."""
        steps = []
        for i, (kept, cost) in enumerate(zip(self.kept, self.cost)):
            at = int(np.argmin(kept))
            while True:
                more, less = kept - kept[at], cost[at] - cost
                worth = np.where((more > 0) & (less > 0), less / np.maximum(more, 1), 0)
                if not worth.any():
                    break
                at = int(np.argmax(worth))
                steps.append((-float(worth[at]), -i, at))
        return [(-i, option) for _, i, option in sorted(steps, key=lambda s: s[:2])]

    def _filled(self, at: np.ndarray, level: float) -> np.ndarray:
        """A state with whatever better options still fit."""
        for i in reversed(range(len(at))):
            for option in np.argsort(self.cost[i]):
                if self.cost[i][option] >= self.cost[i][at[i]]:
                    break
                before, at[i] = at[i], option
                if self.size(at) <= level * (1 + 1e-9):
                    break
                at[i] = before
        return at

    def fixed(self, policy: str) -> Plan:
        """The plan of a fixed policy on every segment but the last."""
        options = [p.fixed.get(policy, p.options[-1]) for p in self.pieces]
        if options and self.turns == 1:
            options[-1] = self.pieces[-1].options[-1]
        return self._of(options)

    def _plan(self, at: Sequence[int]) -> Plan:
        return self._of([p.options[i] for p, i in zip(self.pieces, at)])

    def _of(self, options: Sequence[Option]) -> Plan:
        kept, held = self._bytes(
            np.array([o.kept for o in options]), np.array([o.held for o in options])
        )
        cost = float(sum(o.cost for o in options))
        return Plan(
            self.program, self.kind, self.pieces, tuple(options), kept, held, cost
        )


def _best(plans: Sequence[Plan], turns: int) -> list[Plan]:
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (turns * p.kept + p.held, p.cost)):
        if not kept or plan.cost < kept[-1].cost:
            kept.append(plan)
    return kept
