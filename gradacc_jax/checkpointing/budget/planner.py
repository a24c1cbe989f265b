"""The planner: a program is cut, the choices of its segments are found and combined.

A loop is a segment of its own. Its body is a program like the whole, and its plans are
the loop's choices.
"""

from collections.abc import Sequence
import dataclasses
import itertools
import math
from typing import Any

import numpy as np

from gradacc_jax.checkpointing import policies
from gradacc_jax.checkpointing.budget.combining import Combinations, frontier
from gradacc_jax.checkpointing.budget.costs import Rates, again
from gradacc_jax.checkpointing.budget.cuts import Gradients, Segment, segmentations
from gradacc_jax.checkpointing.budget.loops import (
    Loop,
    inner_lengths,
    is_loop,
    turns_at_once,
)
from gradacc_jax.checkpointing.budget.needs import needs_of
from gradacc_jax.checkpointing.budget.plans import (
    Again,
    Alone,
    InLoop,
    Option,
    Piece,
    Plan,
    Plans,
)
from gradacc_jax.checkpointing.budget.programs import (
    Operation,
    Program,
    is_nameable,
)
from gradacc_jax.checkpointing.budget.solve import Choice, Problem, Task, pareto

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

# The choices of a segment, the fewest bytes first, and those of fixed policies.
_Choices = tuple[list[Option], dict[str, Option]]


class Planner:
    """Finds the plans of programs, and of the bodies of their loops.

    Args:
      rates: of the chip.
    """

    def __init__(self, rates: Rates):
        self.rates = rates
        self._solved: dict[Any, _Choices] = {}
        self._loops: dict[Any, Any] = {}  # with their equations, or ids are others'

    def plans(
        self,
        program: Program,
        wrt: Sequence[int],
        turns: int = 1,
        towards: Sequence[int] | None = None,
        returned: bool = False,
    ) -> Plans:
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
        loops = self._loops_in(program, active, enough=_SMALL * sum(held))
        effects = [i for i, o in enumerate(program.operations) if o.eqn.effects]
        gradients = Gradients.of(program, wrt) if returned else None
        cuts = segmentations(program, held, [*effects, *loops], gradients)
        of_cuts: list[list[Plan]] = []
        fixed: dict[str, Plan] = {}
        for cut in cuts:
            pieces = [
                self._piece(program, segment, needs, active, loops, turns > 1)
                for segment in cut
            ]
            room = np.zeros(len(cut))
            if gradients is not None:
                crossing = (
                    program.nbytes[v]
                    for piece in pieces
                    for v in piece.outputs
                    if program.last_read_at[v] >= piece.segment.end
                )
                room = gradients.room(cut, max(crossing, default=0))
            for form in _forms(pieces) if turns == 1 else [None]:
                kind = form or len(of_cuts)
                ways = Combinations(program, kind, _of_form(pieces, form), turns, room)
                of_cuts.append(frontier(ways.plans(), turns))
            for name in _POLICIES:
                plan = ways.fixed(name)
                if name not in fixed or plan.peak < fixed[name].peak:
                    fixed[name] = plan
        of_cuts.sort(key=lambda plans: (plans[0].peak, plans[0].cost))
        return Plans(frontier([*itertools.chain(*of_cuts)], turns), of_cuts, fixed)

    def _loops_in(
        self, program: Program, active: Sequence[bool], enough: float
    ) -> dict[int, _Choices]:
        """The loops that keep enough to be looked into, with their choices."""
        found = {}
        for i, operation in enumerate(program.operations):
            if is_loop(operation) and not operation.eqn.effects:
                given = [isinstance(v, int) and active[v] for v in operation.inputs]
                choices = self._loop(operation, given)
                if choices[0] and choices[0][-1].kept > enough:
                    found[i] = choices
        return found

    def _piece(
        self,
        program: Program,
        segment: Segment,
        needs: frozenset[int],
        active: Sequence[bool],
        loops: dict[int, _Choices],
        in_loop: bool,
    ) -> Piece:
        """A segment of a program with its choices."""
        part, inputs, outputs = program.part(segment.start, segment.end)
        crossing = {v for v in outputs if program.last_read_at[v] >= segment.end}
        choices: _Choices = [Option(0, 0, 0, 0, Alone())], {}
        if segment.alone:
            choices = loops.get(segment.start, choices)
        else:
            operations = program.operations[segment.start : segment.end]
            whole = [v for o in operations for v in o.outputs]
            local = dict(zip(whole, range(part.num_inputs, len(part.avals))))
            choices = self._options(
                part,
                frozenset(local[v] for v in whole if v in needs),
                frozenset(local[v] for v in crossing),
                tuple(active[v] for v in inputs),
                in_loop,
            )
        nbytes = float(sum(program.nbytes[v] for v in crossing))
        return Piece(segment, part, inputs, outputs, nbytes, *choices)

    def seconds(self, program: Program) -> float:
        """What a program takes once."""
        numbers = range(len(program.operations))
        return sum(self.rates.seconds(program, i) for i in numbers)

    def _options(self, part: Program, *question: Any) -> _Choices:
        """See :meth:`_solve`, which equal segments go through once."""
        key = part.signature, *question
        if key not in self._solved:
            self._solved[key] = self._solve(part, *question)
        return self._solved[key]

    def _solve(
        self,
        part: Program,
        needed: frozenset[int],
        free: frozenset[int],
        active: tuple[bool, ...],
        in_loop: bool,
    ) -> _Choices:
        """The choices for a segment: corners of its frontier, alone; fixed policies.

        Args:
          part: the segment.
          needed: the values made in it that the backward pass reads.
          free: those that are kept anyway, since later segments read them.
          active: which of its inputs lead to what is differentiated.
          in_loop: whether it is in the body of a loop.
        """
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

    def _loop(self, operation: Operation, active: Sequence[bool]) -> _Choices:
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

    def _of_loop(self, loop: Loop, active: Sequence[bool]) -> _Choices:
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
