r"""Save or recompute: a minimum cut.

The backward pass of a segment needs some values :math:`K`. A value is there if it is
saved, or if the operation that makes it runs again, for which all inputs of that
operation must be there. With :math:`a_v` for "value v is there", :math:`r_e` for
"operation e runs again" and a price :math:`\lambda` of a byte in seconds,

.. math::
    \min_{a, r \in \{0, 1\}} \; \sum_e c_e \, r_e
        + \lambda \sum_v b_v \max(0, a_v - r_{e(v)})
    \quad\text{with}\quad a_k = 1 \; (k \in K), \quad r_e \le a_u \; (u \to e).

Every term is a function of two variables that costs when the first is 1 and the second
is 0, so this is a minimum cut, which a maximum flow finds exactly: an edge from v to
e(v) with capacity :math:`\lambda b_v`, from e to the sink with :math:`c_e`, and edges
of infinite capacity from the source to :math:`K` and from e to its inputs. What comes
into the segment is there anyway.

As :math:`\lambda` goes from nothing to infinity, the optimum goes through the corners
of a convex frontier of bytes against seconds. All of them are found by asking, for two
neighbours, for the price at which both are equally good: either nothing is better
there, or a new corner between them is (Eisner and Severance, 1976).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

# Of how many values all subsets are tried; and which part of the largest is so small
# that it is saved anyway.
_LARGE, _SMALL = 8, 0.02


class Task(NamedTuple):
    """An operation that could run again.

    Attributes:
      inputs: the values that it reads, without those that are there anyway.
      outputs: the values that it makes.
      cost: of running it again, in seconds; infinite if it must not.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost: float


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to have there what is needed.

    Attributes:
      saved: the values that are saved.
      again: the tasks that run again, by their places.
      nbytes: the bytes of what is saved.
      cost: of what runs again, in seconds.
    """

    saved: frozenset[int]
    again: frozenset[int]
    nbytes: float
    cost: float


class Problem:
    """A segment's question, for any price of a byte.

    Args:
      tasks: its operations, in order.
      needed: the values that the backward pass reads, without those that are there
        anyway. Each is made by a task.
      nbytes: what it costs to save a value; infinite for what cannot be saved.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        needed: Collection[int],
        nbytes: Callable[[int], float],
    ):
        made_by = {v: i for i, task in enumerate(tasks) for v in task.outputs}
        # What is needed, or leads to it.
        values, relevant, queue = set(needed), set(), list(needed)
        while queue:
            i = made_by[queue.pop()]
            if i not in relevant:
                relevant.add(i)
                new = set(tasks[i].inputs) - values
                values |= new
                queue += new
        self.needed = frozenset(needed)
        self.values = sorted(values)
        self.tasks = {i: tasks[i] for i in sorted(relevant)}
        self.made_by = made_by
        self.nbytes = {v: nbytes(v) for v in self.values}

    def solve(self, price: float) -> Choice:
        """The best choice where a byte costs so many seconds."""
        there = self._graph.source_side(price)
        return self.running(t for t in self.tasks if self._graph.places[t] in there)

    @functools.cached_property
    def _graph(self) -> "_Graph":
        return _Graph(self)

    def saving(self, values: Collection[int]) -> Choice:
        """The choice of a policy that saves these values, as far as they are needed."""
        again: set[int] = set()
        waiting = list(self.needed)
        while waiting:
            v = waiting.pop()
            t = self.made_by[v]
            must = self.tasks[t].cost == math.inf or self.nbytes[v] == 0
            if v not in values and not must and t not in again:
                again.add(t)
                waiting += self.tasks[t].inputs
        return self.running(again)

    def running(self, again: Iterable[int]) -> Choice:
        """The choice to run these tasks again, and to save what they and we read."""
        again = frozenset(again)
        read = set(self.needed)
        for t in again:
            read |= set(self.tasks[t].inputs)
        saved = frozenset(v for v in read if self.made_by[v] not in again)
        return Choice(
            saved,
            again,
            sum(self.nbytes[v] for v in saved),
            sum(self.tasks[t].cost for t in again),
        )

    def frontier(self, limit: int = 1000) -> list[Choice]:
        """The corners of bytes against seconds, the fewest bytes first.

        Args:
          limit: how many cuts to make at most; corners in the widest gaps come first.
        """
        if not self.needed:
            return [Choice(frozenset(), frozenset(), 0, 0)]
        costs = [t.cost for t in self.tasks.values() if t.cost and t.cost < math.inf]
        sizes = [b for b in self.nbytes.values() if b and b < math.inf]
        if not costs or not sizes:
            return [self.solve(1.0)]
        # So dear that nothing is saved to spare work, and the other way round.
        dear = 2 * sum(costs) / min(sizes)
        cheap = min(costs) / sum(sizes) / 2
        least, most = self.solve(dear), self.solve(cheap)
        found, waiting = [least, most], [(least, most)]
        while waiting and limit > 0:
            waiting.sort(key=_gap)
            few, many = waiting.pop()
            if _gap((few, many)) <= 0:
                break
            price = (few.cost - many.cost) / (many.nbytes - few.nbytes)
            limit -= 1
            between = self.solve(price)
            worth = few.cost + price * few.nbytes
            if between.cost + price * between.nbytes < worth * (1 - 1e-6):
                found.append(between)
                waiting += [(few, between), (between, many)]
        return pareto(found)

    def subsets(self, corners: Sequence[Choice]) -> list[Choice]:
        """Choices that save any of the largest values that corners save.

        Most lie above the frontier, and no price leads to them. But where one choice is
        made for all turns of a loop, nothing else comes between two corners.
        """
        saved = {v for c in corners for v in c.saved if 0 < self.nbytes[v] < math.inf}
        by_size = sorted(saved, key=lambda v: (-self.nbytes[v], v))
        large = by_size[:_LARGE]
        rest = by_size[_LARGE:]
        small = {v for v in rest if self.nbytes[v] < _SMALL * self.nbytes[large[0]]}
        return [
            self.saving(small.union(some))
            for number in range(len(large) + 1)
            for some in itertools.combinations(large, number)
        ]


def _gap(pair: tuple[Choice, Choice]) -> float:
    """How much there may be between two corners: the triangle's area."""
    few, many = pair
    return max(many.nbytes - few.nbytes, 0) * max(few.cost - many.cost, 0)


def pareto(choices: Sequence[Choice]) -> list[Choice]:
    """Those that no other beats in bytes and cost, the fewest bytes first."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.nbytes, c.cost)):
        if not kept or choice.cost < kept[-1].cost:
            kept.append(choice)
    return kept


class _Graph:
    """The graph of a problem, in which only the price changes.

    Node 0 is the source, 1 the sink; then come the values, then the tasks.
    """

    def __init__(self, problem: Problem):
        value = {v: 2 + i for i, v in enumerate(problem.values)}
        first = 2 + len(value)
        self.places = {t: first + i for i, t in enumerate(problem.tasks)}
        self.size = first + len(self.places)
        # From, to, bytes that are paid for, seconds.
        edges = [(0, value[v], 0.0, math.inf) for v in problem.needed]
        for v in problem.values:
            maker = self.places[problem.made_by[v]]
            edges.append((value[v], maker, problem.nbytes[v], 0.0))
        for t, task in problem.tasks.items():
            edges.append((self.places[t], 1, 0.0, task.cost))
            edges += [(self.places[t], value[v], 0.0, math.inf) for v in task.inputs]
        table = np.array(sorted(edges), dtype=float)
        self.ends = table[:, 1].astype(np.int32)
        self.nbytes, self.seconds = table[:, 2], table[:, 3]
        starts = table[:, 0].astype(int)
        self.begins = np.searchsorted(starts, range(self.size + 1)).astype(np.int32)

    def source_side(self, price: float) -> set[int]:
        """The nodes on the source's side of a minimum cut."""
        from scipy import sparse
        from scipy.sparse import csgraph

        capacity = np.where(self.nbytes > 0, price * self.nbytes, 0.0) + self.seconds
        is_finite = np.isfinite(capacity)
        total = float(capacity[is_finite].sum())
        # SciPy's flow has capacities of 32 bits. A flow never exceeds the sum of the
        # finite ones, so what is larger than that is infinite.
        scale = 2**30 / total if total else 1.0
        rounded = np.full(len(capacity), 2**31 - 1, np.int32)
        rounded[is_finite] = np.rint(capacity[is_finite] * scale)
        graph = sparse.csr_array(
            (rounded, self.ends, self.begins), (self.size, self.size)
        )
        left = graph - csgraph.maximum_flow(graph, 0, 1).flow
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        reached = csgraph.breadth_first_order(left, 0, return_predecessors=False)
        return {int(i) for i in reached}
