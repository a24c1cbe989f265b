"""Where to cut a program into segments.

A segment is a stretch of operations that is computed again as a whole. Of it the
forward pass keeps what comes in, and the backward pass holds, while it is there, all
that the segment's derivative needs. So a cut is cheap where little crosses it, and
segments must be small where much is held. Where little crosses is where a block of a
model ends, whether it has a name or not.

For a bound on what a segment may hold, the cuts with the least bytes crossing are found
by dynamic programming over the places where the live set is smallest. A larger bound
gives fewer segments, so that trying bounds tries numbers of segments: none is best for
all models. Twelve blocks of a transformer are best kept one by one, layers that keep
little in segments of several.
"""

from collections.abc import Sequence
import dataclasses
import itertools

import numpy as np

from gradacc_jax.checkpointing.budget.programs import Program, is_key

_PLACES = 400


@dataclasses.dataclass(frozen=True)
class Segment:
    """Operations ``start`` to ``end`` of a program.

    Attributes:
      start: its first operation.
      end: the one behind its last.
      alone: whether it is one operation that is no part of a segment: a loop, which is
        cut inside, or one with an effect, which stays as it is.
    """

    start: int
    end: int
    alone: bool = False


def segmentations(
    program: Program, held: Sequence[float], alone: Sequence[int], bounds: int = 7
) -> list[tuple[Segment, ...]]:
    """Ways to cut a program, from many segments to few.

    Args:
      program: what to cut.
      held: for each operation, the bytes that the derivative needs of what it makes.
      alone: operations that stand alone.
      bounds: how many bounds on a segment to try, at most.

    Returns:
      Each way once. The last one has as few cuts as the operations that stand alone
      make.
    """
    size = len(program.operations)
    places = _Places(program, held)
    stretches, start = [], 0
    for i in sorted(alone):
        stretches.append((start, i))
        start = i + 1
    stretches.append((start, size))
    stretches = [(a, b) for a, b in stretches if a < b]
    candidates = [places.candidates(a, b) for a, b in stretches]
    least = max((places.finest(c) for c in candidates), default=0)
    most = max((places.held(a, b) for a, b in stretches), default=0)
    tried = np.geomspace(max(least, 1), max(most, least, 1), bounds)
    found: dict[tuple[Segment, ...], None] = {}
    for bound in [*tried, 2 * max(most, 1)]:
        cut = [Segment(i, i + 1, alone=True) for i in alone]
        for at in candidates:
            cut += [Segment(a, b) for a, b in places.best(at, bound)]
        found[tuple(sorted(cut, key=lambda s: s.start))] = None
    return list(found)


def stretches(program: Program, size: int) -> list[tuple[int, int]]:
    """The program in stretches of about so many operations, where little crosses."""
    number = len(program.operations)
    if number <= 1.5 * size:
        return [(0, number)]
    places = _Places(program, [1.0] * number)
    return places.best(places.candidates(0, number), size)


class _Places:
    """What crosses a place before an operation, and what is held between two."""

    def __init__(self, program: Program, held: Sequence[float]):
        made_at, used_at = program.made_at, program.last_read_at
        crossing = [
            (made_at[v], used_at[v], program.nbytes[v])
            for v, aval in enumerate(program.avals)
            if used_at[v] > made_at[v] >= 0 and not is_key(aval)
        ]
        self.made, self.used, self.nbytes = (
            np.array([c[i] for c in crossing], dtype=float) for i in range(3)
        )
        size = len(program.operations)
        change = np.zeros(size + 2)
        np.add.at(change, self.made.astype(int) + 1, self.nbytes)
        np.add.at(change, self.used.astype(int) + 1, -self.nbytes)
        self.live = np.cumsum(change)[: size + 1]
        self.until = np.concatenate([[0.0], np.cumsum(np.asarray(held, dtype=float))])

    def held(self, start: int, end: int) -> float:
        """What the derivative of a segment needs."""
        return float(self.until[end] - self.until[start])

    def candidates(self, start: int, end: int) -> list[int]:
        """The places of a stretch where the live set is smallest, and its two ends."""
        live = self.live
        inner = [
            i
            for i in range(start + 1, end)
            if live[i] <= live[i - 1] and live[i] <= live[i + 1]
        ]
        if len(inner) > _PLACES:
            inner = sorted(sorted(inner, key=lambda i: float(live[i]))[:_PLACES])
        return [start, *inner, end]

    def finest(self, at: list[int]) -> float:
        """The least bound for which there are cuts."""
        return max(self.held(a, b) for a, b in itertools.pairwise(at))

    def best(self, at: list[int], bound: float) -> list[tuple[int, int]]:
        """The segments that hold no more than the bound and keep the least."""
        bound = max(bound, self.finest(at)) * (1 + 1e-9)
        places = np.array(at)
        until = self.until[places]
        total = max(float(until[-1] - until[0]), 1.0)
        cost, before = [0.0], [0]
        for j in range(1, len(at)):
            held = until[j] - until[:j]
            # Of equally good cuts, those that make segments of equal size.
            evenness = 1e-3 * (held / total) ** 2 * total
            through = np.array(cost) + self._kept(places[:j], at[j]) + evenness
            through[held > bound] = np.inf
            best = int(np.argmin(through))
            cost.append(float(through[best]))
            before.append(best)
        cuts, j = [len(at) - 1], len(at) - 1
        while j:
            j = before[j]
            cuts.append(j)
        cuts.reverse()
        return [(at[a], at[b]) for a, b in itertools.pairwise(cuts)]

    def _kept(self, starts: np.ndarray, end: int) -> np.ndarray:
        """For segments from each start on, the bytes made in them and read later."""
        crosses = (self.made < end) & (self.used >= end)
        made, nbytes = self.made[crosses], self.nbytes[crosses]
        order = np.argsort(made)
        below = np.concatenate([[0.0], np.cumsum(nbytes[order])])
        total = below[-1]
        return total - below[np.searchsorted(made[order], starts)]
