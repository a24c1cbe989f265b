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

Where blocks differ, what a segment holds is better bounded together with what all
before it keep, which is there when the backward pass comes to it: early segments may
then be large and late ones small. Fewest bytes before a place are best for all behind
it, so the same dynamic programming is exact.

Gradients that the program returns have their room from its beginning. Until they are
written, which is when the backward pass is through with the operation that read their
parameter first, the compiler puts there what fits. So many small segments may need
less than few.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools

import numpy as np

from gradacc_jax.checkpointing.budget.programs import Program, is_key

_PLACES = 400
# Into about how many segments to cut, and of how many ways to keep the best, and the
# first ones.
_NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
_BEST, _COARSE = 5, 3
# Bounds on what is there at once, in multiples of the least for which there are cuts.
_PEAKS, _HALVINGS = (1.0, 1.2, 1.5, 2.0), 12


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


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients that a program returns.

    Attributes:
      at: for each of them the first operation that reads its parameter.
      nbytes: their bytes.
    """

    at: np.ndarray
    nbytes: np.ndarray

    @classmethod
    def of(cls, program: Program, wrt: Sequence[int]) -> "Gradients":
        """Those of a program, with respect to some of its inputs."""
        at = np.array([program.first_read_at[v] for v in wrt], dtype=float)
        return cls(at, np.array([program.nbytes[v] for v in wrt], dtype=float))

    def room(self, cut: Sequence[Segment], nbytes: float) -> np.ndarray:
        """Room for values of a size while the backward pass is in each of the segments.

        A gradient has room for one value, if it is as large.
        """
        at = np.sort(self.at[self.nbytes >= nbytes])
        return nbytes * np.searchsorted(at, [segment.end for segment in cut])


def segmentations(
    program: Program,
    held: Sequence[float],
    alone: Sequence[int],
    gradients: Gradients | None = None,
) -> list[tuple[Segment, ...]]:
    """Ways to cut a program.

    Args:
      program: what to cut.
      held: for each operation, the bytes that the derivative needs of what it makes.
      alone: operations that stand alone.
      gradients: those whose room is there while they are not; None if there are none.

    Returns:
      Of the ways that were tried those that promise the least bytes when all is
      computed again, and coarse ones, which cut little off what is left alone.
    """
    places = _Places(program, held)
    parts, start = [], 0
    for i in [*sorted(alone), len(program.operations)]:
        parts.append((start, i))
        start = i + 1
    candidates = [places.candidates(a, b) for a, b in parts if a < b]
    most = max((places.held(at[0], at[-1]) for at in candidates), default=0.0)
    found: dict[tuple[Segment, ...], float] = {}

    def cut_by(
        way: Callable[[list[int]], list[tuple[int, int]]],
    ) -> tuple[Segment, ...]:
        cut = [Segment(i, i + 1, alone=True) for i in alone]
        for at in candidates:
            cut += [Segment(a, b) for a, b in way(at)]
        cut.sort(key=lambda segment: segment.start)
        found[tuple(cut)] = places.least(cut, gradients)
        return tuple(cut)

    for number in _NUMBERS:
        # A little more, or blocks of equal size would not fit.
        cut_by(functools.partial(places.best, bound=1.05 * most / number))
    coarse = list(found)[:_COARSE]
    by_peak = [cut_by(functools.partial(places.by_peak, part=part)) for part in _PEAKS]
    best = sorted(found, key=lambda cut: found[cut])[:_BEST]
    return list(dict.fromkeys([*best, *by_peak, *coarse]))


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
        self.crossings: dict[tuple[int, ...], np.ndarray] = {}
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
            # The smallest of each neighbourhood: those of the whole may all lie in a
            # part of the program where everything is small.
            near = np.array_split(inner, _PLACES)
            inner = [int(places[np.argmin(live[places])]) for places in near]
        return [start, *inner, end]

    def finest(self, at: list[int]) -> float:
        """The least bound for which there are cuts."""
        return max(self.held(a, b) for a, b in itertools.pairwise(at))

    def least(self, cut: Sequence[Segment], gradients: Gradients | None) -> float:
        """The bytes of a way to cut, if everything is computed again."""
        if not cut:
            return 0.0
        starts = [segment.start for segment in cut]
        made = np.searchsorted(starts, self.made, side="right") - 1
        crosses = np.searchsorted(starts, self.used, side="right") - 1 > made
        nbytes = self.nbytes[crosses]
        through = np.bincount(made[crosses], nbytes, len(cut))
        before = np.cumsum(through) - through
        if gradients is not None:
            before = before - gradients.room(cut, nbytes.max(initial=0.0))
        held = [0.0 if s.alone else self.held(s.start, s.end) for s in cut]
        most = float((np.maximum(before, 0.0) + np.array(held)).max())
        return max(most, float(before[-1] + through[-1]))

    def best(self, at: list[int], bound: float) -> list[tuple[int, int]]:
        """The segments that hold no more than the bound and keep the least."""
        found = self._segments(at, max(bound, self.finest(at)), together=False)
        assert found is not None
        return found

    def by_peak(self, at: list[int], part: float) -> list[tuple[int, int]]:
        """The segments that keep the least, where all that is there is bounded.

        Args:
          at: the places.
          part: the bound, in multiples of the least that is possible.
        """
        low, high = self.finest(at), self.held(at[0], at[-1])
        high = max(high, low)
        for _ in range(_HALVINGS if high > low else 0):
            middle = (low * high) ** 0.5
            if self._segments(at, middle, together=True) is None:
                low = middle
            else:
                high = middle
        found = self._segments(at, part * high, together=True)
        assert found is not None  # one segment keeps nothing before it
        return found

    def _segments(
        self, at: list[int], bound: float, *, together: bool
    ) -> list[tuple[int, int]] | None:
        """The segments within a bound that keep the least; None if there are none.

        Args:
          at: the places.
          bound: on what each of them holds.
          together: whether what is kept before it counts too.
        """
        bound *= 1 + 1e-9
        crossing = self._crossing(tuple(at))
        until = self.until[np.array(at)]
        total = max(float(until[-1] - until[0]), 1.0)
        cost, before = np.zeros(len(at)), [0]
        for j in range(1, len(at)):
            held = until[j] - until[:j]
            # Of equally good cuts, those that make segments of equal size.
            evenness = 1e-3 * (held / total) ** 2 * total
            through = cost[:j] + crossing[:j, j] + evenness
            through[(held + cost[:j] if together else held) > bound] = np.inf
            best = int(np.argmin(through))
            cost[j] = through[best]
            before.append(best)
        if not np.isfinite(cost[-1]):
            return None
        cuts, j = [len(at) - 1], len(at) - 1
        while j:
            j = before[j]
            cuts.append(j)
        cuts.reverse()
        return [(at[a], at[b]) for a, b in itertools.pairwise(cuts)]

    def _crossing(self, at: tuple[int, ...]) -> np.ndarray:
        """For segments from each place to each later one, what is read behind them."""
        if at not in self.crossings:
            table = np.zeros((len(at), len(at)))
            for j in range(1, len(at)):
                table[:j, j] = self._kept(np.array(at[:j]), at[j])
            self.crossings[at] = table
        return self.crossings[at]

    def _kept(self, starts: np.ndarray, end: int) -> np.ndarray:
        """For segments from each start on, the bytes made in them and read later."""
        crosses = (self.made < end) & (self.used >= end)
        made, nbytes = self.made[crosses], self.nbytes[crosses]
        order = np.argsort(made)
        below = np.concatenate([[0.0], np.cumsum(nbytes[order])])
        total = below[-1]
        return total - below[np.searchsorted(made[order], starts)]
