"""From predicted to compiled bytes: which plans to compile, and which to take.

Only the compiler knows what a program needs. Predictions are off by what is alike in
all plans of a program (gradients, the optimizer, the batch), and by what the compiler
fuses or moves. So the bytes that programs were found to need correct the prediction
for the plans near them, and the next plan to be compiled is always the cheapest of
those that now seem to fit.
"""

from collections.abc import Callable
import dataclasses
import math

from gradacc_jax.checkpointing.budget.plans import Plan, Plans
from gradacc_jax.checkpointing.sizes import size_text

# Of a budget: what is enough to be content with; and what to keep clear of as long as
# there are only predictions.
_ENOUGH, _CLEAR = 0.985, 0.997
# Of the time that all takes: what must be spared for another compilation, if the budget
# is used as it is, or the plan does not even seem to fit.
_WORTH, _LITTLE, _MUCH = 0.01, 0.001, 0.05
# What seems to need so much more may fit all the same; and how many of these to try.
_NEAR, _MISSES = 1.05, 3
# Plans of two cuts that differ by less are taken for the same.
_ALIKE = 1e-2
# What needs so much more, or less, tells nothing of a plan.
_FAR = 1.25
# Plans of least bytes to compile before a budget is given up, and of how many kinds.
_LEAST, _KINDS = 6, 5
# After so many that do not fit the least is compiled: predictions that are too high by
# far would lead from one plan to the next, and never there.
_BLIND = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A plan that was compiled.

    Attributes:
      plan: the plan.
      nbytes: temporaries of the compiled program; infinite if it does not compile.
    """

    plan: Plan
    nbytes: float


class Search:
    """The plans of one program, and what is known of them.

    Args:
      plans: the plans.
      seconds: what the program takes as it is, forward and backward.
    """

    def __init__(self, plans: Plans, seconds: float):
        self.plans, self.seconds = plans, seconds
        self.candidates = [
            p for cut in plans.cuts for p in cut if p.cost or p is plans.frontier[-1]
        ]
        self.trials: list[Trial] = []

    @property
    def plain(self) -> Trial:
        """The program as it is."""
        return next(t for t in self.trials if t.plan is self.plans.frontier[-1])

    def fit(
        self,
        measure: Callable[[Plan], float],
        budget: int,
        max_compiles: int,
        progress: Callable[[str], None],
    ) -> tuple[Trial | None, int]:
        """The cheapest plan that fits, as far as is known after so many compilations.

        Args:
          measure: compiles a plan and returns its temporaries.
          budget: bytes.
          max_compiles: how many programs to compile at most.
          progress: told what was found.

        Returns:
          The trial, or None if nothing fits; and the number of compilations.
        """
        compiles = 0
        while True:
            best = self._best(budget)
            plan = self._next(budget, best)
            if plan is None or compiles == max_compiles:
                return best, compiles
            trial = Trial(plan, measure(plan))
            self.trials.append(trial)
            compiles += 1
            progress(
                f"compiled {compiles} of at most {max_compiles}: "
                f"{_text(trial.nbytes)} for {size_text(budget)}, predicted "
                f"{size_text(plan.peak)}"
            )

    def estimate(self, plan: Plan) -> float:
        """The bytes of a plan: as predicted, corrected by what was compiled near it."""
        trials = [t for t in self.trials if t.nbytes < math.inf]
        trials.sort(key=lambda t: t.plan.peak)
        same = [t for t in trials if t.plan.kind == plan.kind]

        def nearest(is_beside: Callable[[Trial], bool]) -> list[Trial]:
            return list(filter(is_beside, same)) or list(filter(is_beside, trials))

        below = nearest(lambda t: t.plan.peak <= plan.peak)
        above = nearest(lambda t: t.plan.peak >= plan.peak)
        if not below and not above:
            return plan.peak
        if not below or not above:
            near = (below or above)[-1 if below else 0]
            if near.nbytes < near.plan.peak:  # fused, or a part of it on each device
                return plan.peak * near.nbytes / near.plan.peak
            return plan.peak + near.nbytes - near.plan.peak
        a, b = below[-1], above[0]
        way = b.plan.peak - a.plan.peak
        part = (plan.peak - a.plan.peak) / way if way else 0.0
        offset = (1 - part) * (a.nbytes - a.plan.peak)
        return plan.peak + offset + part * (b.nbytes - b.plan.peak)

    def _best(self, budget: int) -> Trial | None:
        fitting = [t for t in self.trials if t.nbytes <= budget]
        return min(fitting, key=lambda t: (t.plan.cost, t.nbytes), default=None)

    def _next(self, budget: int, best: Trial | None) -> Plan | None:
        """What to compile next; None if nothing promises to be better."""
        tried = {id(t.plan) for t in self.trials}
        smallest, plain = self.plans.frontier[0], self.plans.frontier[-1]
        if id(plain) not in tried:
            return plain
        left = [p for p in self.candidates if id(p) not in tried]
        left = [p for p in left if not any(_are_alike(p, t.plan) for t in self.trials)]
        failed = [t for t in self.trials if t.plan.cost and t.nbytes > budget]
        if best is None and len(failed) >= _BLIND and id(smallest) not in tried:
            return smallest
        seems = {id(p): self.estimate(p) for p in left}
        if best is None:
            cheaper = left
        else:
            is_content = best.nbytes >= _ENOUGH * budget
            worth = _WORTH * self.seconds if is_content else 0.0
            cheaper = [p for p in left if p.cost < best.plan.cost - worth]
        fitting = [p for p in cheaper if seems[id(p)] <= _CLEAR * budget]
        if fitting:
            return min(fitting, key=lambda p: p.cost)
        if best is not None:
            return self._near_miss(budget, best, cheaper, seems)
        # Nothing fits yet. The least bytes may be those of another kind than it seems.
        least = min((t.nbytes for t in failed), default=math.inf)
        if len(failed) >= _LEAST:
            return None
        kinds = {t.plan.kind for t in failed}
        others = [cut[0] for cut in self.plans.cuts if cut[0].kind not in kinds]
        if len(kinds) < _KINDS and others and others[0].peak < least:
            return others[0]
        hopeful = [p for p in left if min(p.peak, seems[id(p)]) < least]
        return min(hopeful, key=lambda p: seems[id(p)], default=None)

    def _near_miss(
        self, budget: int, best: Trial, cheaper: list[Plan], seems: dict[int, float]
    ) -> Plan | None:
        """A cheaper plan that nearly seems to fit, since predictions are rough.

        They are roughest for kinds of which nothing was compiled. So these come first,
        and alone where the budget is used as it is; the more seconds they promise to
        spare, the more may be wrong.
        """
        missed = [
            t
            for t in self.trials
            if t.plan.cost < best.plan.cost and budget < t.nbytes <= _FAR * budget
        ]
        if len(missed) >= _MISSES:
            return None

        def near(part: float, nbytes: Callable[[Plan], float]) -> list[Plan]:
            most = best.plan.cost - part * self.seconds
            found = (p for p in cheaper if p.cost < most)
            return [p for p in found if nbytes(p) <= _NEAR * budget]

        def seem(p: Plan) -> float:
            return seems[id(p)]

        def at_best(p: Plan) -> float:
            return min(seem(p), p.peak + least)

        def is_known(p: Plan) -> bool:
            of_kind = (t.plan.peak for t in self.trials if t.plan.kind == p.kind)
            return any(p.peak / _FAR <= peak <= p.peak * _FAR for peak in of_kind)

        around = [t for t in self.trials if t.nbytes <= _FAR * budget]
        least = min((t.nbytes - t.plan.peak for t in around), default=0.0)
        found = [*near(_WORTH, at_best), *near(_MUCH, lambda p: p.peak)]
        found = [p for p in found if not is_known(p)]
        if not found and best.nbytes < _ENOUGH * budget:
            found = near(_LITTLE, seem)
        return min(found, key=seem, default=None)


def _are_alike(a: Plan, b: Plan) -> bool:
    """Whether plans of two cuts most probably are the same program."""
    return (
        a.pieces is not b.pieces
        and math.isclose(a.peak, b.peak, rel_tol=_ALIKE)
        and math.isclose(a.cost, b.cost, rel_tol=_ALIKE)
    )


def _text(nbytes: float) -> str:
    return size_text(nbytes) if nbytes < math.inf else "does not compile"
