r"""From the choices of segments to plans of the whole.

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
is then left of a number of bytes is filled with whatever fits. For the body of a loop
all ways to choose are looked at, as long as they are not too many.
"""

from collections.abc import Sequence
import functools
import math
from typing import Any

import numpy as np

from gradacc_jax.checkpointing.budget.plans import Option, Piece, Plan
from gradacc_jax.checkpointing.budget.programs import Program

_LEVELS = 24
# Of how many ways to choose for the body of a loop all are looked at. What is chosen is
# chosen for every turn, so that little else comes between two of them.
_WAYS = 2**16


class Combinations:
    """The choices of all pieces of a program cut in one way, and their plans."""

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


def frontier(plans: Sequence[Plan], turns: int) -> list[Plan]:
    """Those that no other beats in bytes and seconds, the fewest bytes first."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (turns * p.kept + p.held, p.cost)):
        if not kept or plan.cost < kept[-1].cost:
            kept.append(plan)
    return kept
