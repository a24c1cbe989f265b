"""The search: the fastest of many ways to make a step that fit into a budget.

A way is a micro-batch size and a variant: a policy, and whether micro-batches follow
one another inside one call or across calls. How long it takes is predicted from its
jaxpr, which costs no compilation; how much memory it needs is compiled. So

1. variants are taken in the order of the least time that any micro-batch could need,
   and the search ends where that is more than the best way found already takes;
2. in a variant, micro-batches beyond the plateau, where larger ones are hardly faster,
   are left out: they would only need memory;
3. memory grows with the micro-batch, nearly in proportion: of those that are left, the
   largest that fits is found by a secant, kept in brackets as in bisection. The whole
   batch in one pass stands aside, since without accumulation there are no sums to keep;
4. where larger micro-batches would be faster if they fitted, the policy that is made
   for a limit tries the smallest of them.

Everything is counted and cached, nothing depends on the clock unless a time budget is
given, and so the same question has the same answer.
"""

import bisect
from collections.abc import Callable, Sequence
import dataclasses
import functools
import time
from typing import Any, NamedTuple

import jax

from gradacc_jax.checkpointing.budget import TooSmallError
from gradacc_jax.planning import chips
from gradacc_jax.planning.compile import (
    QUICK,
    Built,
    MemoryEstimate,
    Target,
    Traced,
    as_shape,
)
from gradacc_jax.planning.costs import Cost, traffic
from gradacc_jax.planning.fitted import FIT, Unfitted
from gradacc_jax.planning.report import ACROSS_CALLS, ONE_CALL, Candidate
from gradacc_jax.planning.sizes import bytes_text

# A micro-batch that takes at most so much longer is as good.
PLATEAU = 1.02
RAGGED_TRIES = 3
# Micro-batches that are planned by ``remat_to_fit``, each with several compilations.
FIT_TRIES = 3


class Made(NamedTuple):
    """A step that can be compiled.

    Attributes:
      fun: the step; jitted already, or to be jitted.
      args: its arguments, or shapes of them.
      donate_argnums: which of them it may reuse.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    donate_argnums: Any = ()


@dataclasses.dataclass(frozen=True)
class Variant:
    """A policy in one of the two forms.

    Attributes:
      policy: what the forward pass keeps.
      form: "one call" or "across calls".
      make: from a micro-batch size and a number of micro-batches to the step.
      emits: whether the step has a keyword ``emit``: then what a micro-step costs that
        does not close its window is known.
    """

    policy: Any
    form: str
    make: Callable[[int, int], Made]
    emits: bool = False


@dataclasses.dataclass(frozen=True)
class Fitting:
    """The policy that is made for a limit.

    Attributes:
      plain: the step as it is, than which none with recomputation is faster.
      make: from a micro-batch size and a number of micro-batches to the step whose loss
        is to be planned.
    """

    plain: Variant
    make: Callable[[int, int], Unfitted]

    @property
    def variant(self) -> Variant:
        """The policy, as one of the variants."""
        return dataclasses.replace(self.plain, policy=FIT)


class Split(NamedTuple):
    """A micro-batch size on one device, and how many make a step."""

    size: int
    k: int


@dataclasses.dataclass
class _Way:
    """What is known of one variant with one split."""

    variant: Variant
    split: Split
    made: Made
    traced: Traced
    cost: Cost
    memory: MemoryEstimate | None = None
    program: Any = None
    options: tuple[tuple[str, Any], ...] = ()
    quick: bool = False


class OutOfTimeError(TimeoutError):
    """The time budget is spent."""


def divisors(number: int) -> list[Split]:
    """All ways to cut so many examples into equal parts, the smallest parts first."""
    return [Split(m, number // m) for m in range(1, number + 1) if number % m == 0]


class Search:
    """The search for one target and one limit.

    Args:
      target: what to compile for.
      limit: the bytes that a program may need.
      splits: those to choose from, the smallest micro-batches first.
      ragged: examples on one device, if they may be cut unequally; else 0.
      sums: at most so many bytes are the sums of gradients of a step; None where that
        is not known: they are then no more than what the step is given.
      progress: told what is done.
      time_budget: seconds; None for as long as it takes.
    """

    def __init__(
        self,
        target: Target,
        limit: int,
        splits: Sequence[Split],
        *,
        ragged: int = 0,
        sums: int | None = None,
        progress: Callable[[str], None] | None = None,
        time_budget: float | None = None,
    ):
        self.target, self.limit = target, limit
        self.splits = list(splits)
        self.ragged = ragged
        self.sums = sums
        self.progress = progress or (lambda _: None)
        self.deadline = None if time_budget is None else time.monotonic() + time_budget
        self.compiles = 0
        self.ways: dict[tuple[Any, str, Split], _Way] = {}
        self.skipped: dict[tuple[Any, str], str] = {}
        self.notes: list[str] = []

    def run(
        self, variants: Sequence[Variant], fitting: Fitting | None = None
    ) -> tuple[_Way, tuple[Candidate, ...]]:
        """The best way, and all candidates.

        Args:
          variants: those to choose from; may be empty if there is ``fitting``.
          fitting: the policy that is made for the limit, if it may be tried.

        Raises:
          ValueError: nothing fits; the error names the smallest need.
          OutOfTimeError: the time is over before anything fitted.
        """
        inside = [v for v in variants if v.form == ONE_CALL] or list(variants)
        across = [v for v in variants if v not in inside]
        best: _Way | None = None
        try:
            if inside:
                best = self._best_of(inside)
                best = self._ragged(best)
                best = self._across(best, across)
            if fitting is not None:
                best = self._to_fit(best, fitting)
            best = self._proved(best)
        except OutOfTimeError:
            self.notes.append("the time budget was spent: the search is not complete")
            best = self._fastest()
            if best is None:
                raise
        if best is None:
            raise ValueError(self._nothing_fits())
        return best, self._candidates(best)

    # --- one way ----------------------------------------------------------------------

    def way(self, variant: Variant, split: Split) -> _Way:
        """A way, traced and priced."""
        key = (variant.policy, variant.form, split)
        if key not in self.ways:
            self.ways[key] = self._priced(variant, split, variant.make(*split))
        return self.ways[key]

    def _priced(self, variant: Variant, split: Split, made: Made) -> _Way:
        target, args = self.target, (made.fun, made.args, made.donate_argnums)
        traced = target.trace(*args)
        cost = traced.cost  # as if its window closed
        calls = split.k if variant.form == ACROSS_CALLS else 1
        if calls > 1:
            silent = cost
            if variant.emits:
                silent = target.trace(*args, emit=False).cost
            cost += silent.times(calls - 1)
        arrays = jax.tree.leaves((made.args, traced.stage.out_info))
        moved = sum(x.size * x.dtype.itemsize for x in map(as_shape, arrays))
        cost += traffic(moved / traced.num_devices, target.chip)
        cost += Cost(seconds=calls * chips.CALL_SECONDS)
        return _Way(variant, split, made, traced, cost)

    def compiled(self, variant: Variant, split: Split, *, quick: bool = True) -> _Way:
        """A way, compiled too."""
        way = self.way(variant, split)
        if way.memory is not None and quick:
            return way
        self._may_compile()
        self._keep(way, self.target.compile(way.traced, quick=quick), quick=quick)
        return way

    def _may_compile(self) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise OutOfTimeError(
                f"nothing that fits was found in {self.compiles} compilations; give "
                "more time"
            )

    def _keep(self, way: _Way, built: Built, *, quick: bool) -> None:
        """Notes of a way what its compiled program is, and tells of it."""
        self.compiles += 1
        way.memory, way.program, way.quick = built.memory, built.program, quick
        way.options = tuple(sorted(built.options.items()))
        (size, k), variant = way.split, way.variant
        self.progress(
            f"micro-batch {size} x {k}, policy {variant.policy}, {variant.form}: "
            f"{bytes_text(built.memory.peak)}, "
            f"{'fits' if self._fits(way) else 'does not fit'}"
        )

    def _fits(self, way: _Way) -> bool:
        memory = way.memory
        return memory is not None and not memory.refused and memory.peak <= self.limit

    # --- one variant ------------------------------------------------------------------

    def _best_of(self, variants: Sequence[Variant]) -> _Way | None:
        """The fastest that fits; one that needs more must be faster by the plateau."""
        whole = self.splits[-1]
        ordered = sorted(variants, key=lambda v: self.way(v, whole).cost.seconds)
        best: _Way | None = None
        for variant in ordered:
            if best is not None and not self._beats(self.way(variant, whole), best):
                self._skip(variant, "no faster at its best")
                continue
            best = self._in_variant(variant, best) or best
        if best is None:
            best = self._least_of(ordered)
        return best

    def _least_of(self, variants: Sequence[Variant]) -> _Way | None:
        """The programs that need least, where nothing seems to fit.

        What a line through other programs ruled out is compiled to be sure, and to know
        the smallest need.
        """
        smallest, whole = self.splits[0], self.splits[-1]
        tried = [self.compiled(v, smallest) for v in variants]
        least = min(w.memory.peak for w in tried if w.memory is not None)
        for variant in variants:
            if whole.k == 1 and self._of_whole(variant, whole) < least:
                tried.append(self.compiled(variant, whole))
        return min(
            filter(self._fits, tried), key=lambda w: w.cost.seconds, default=None
        )

    def _beats(self, way: _Way, best: _Way | None) -> bool:
        return best is None or way.cost.seconds * PLATEAU < best.cost.seconds

    def _is_faster(self, variant: Variant, best: _Way | None, split: Split) -> bool:
        return self._beats(self.way(variant, split), best)

    def _skip(self, variant: Variant, why: str) -> None:
        self.skipped[variant.policy, variant.form] = f"not compiled: {why}"

    def _in_variant(self, variant: Variant, best: _Way | None) -> _Way | None:
        """The way of this variant that fits and is faster than the best so far."""
        whole = self.splits[-1]
        parts = [s for s in self.splits if s.k > 1]
        # Larger micro-batches than the smallest on the plateau are hardly faster.
        least = self.way(variant, whole).cost.seconds
        plateau = _first(
            parts, lambda s: self.way(variant, s).cost.seconds <= PLATEAU * least
        )
        parts = parts[: plateau + 1]
        if best is not None:
            fast = _first(parts, functools.partial(self._is_faster, variant, best))
            parts = parts[fast:]
        found = self._largest(variant, parts, from_below=best is not None)
        if whole.k == 1 and self._may_fit(variant, whole):
            way = self.compiled(variant, whole)
            if self._fits(way) and self._beats(way, best):
                return way
        return found

    def _largest(
        self, variant: Variant, parts: Sequence[Split], *, from_below: bool
    ) -> _Way | None:
        """The largest of some splits that fits, by a secant in brackets.

        Args:
          variant: whose.
          parts: the splits, the smallest micro-batches first.
          from_below: whether to begin with the smallest: no other fits if it does not.
        """
        low, high = -1, len(parts)  # the largest that fits, the smallest that does not
        guess, creeps = 0 if from_below else len(parts) - 1, False
        while high - low > 1:
            before = high - low
            if self._fits(self.compiled(variant, parts[guess])):
                low = guess
            else:
                high = guess
            size = self._size_that_fits(variant)
            if low < 0 and size < parts[0].size and variant.form == ONE_CALL:
                break  # Across calls the arguments, taken for constant here, are not.
            guess = max((i for i, s in enumerate(parts) if s.size <= size), default=0)
            # A secant that creeps is put in the middle, so that bisection bounds it.
            creeps = not creeps and 2 * (high - low) > before
            if creeps and before > 4:
                guess = (low + high) // 2
            guess = min(max(guess, low + 1), high - 1)
        return self.compiled(variant, parts[low]) if low >= 0 else None

    def _size_that_fits(self, variant: Variant) -> float:
        """The micro-batch whose memory should be the limit, by what is known."""
        base, slope = self._line(variant)
        return (self.limit - base) / slope if slope > 0 else float("inf")

    def _line(self, variant: Variant) -> tuple[float, float]:
        """Bytes at micro-batch 0, and bytes an example: a line through two programs.

        They are those nearest to the limit. With one program alone, what it is given
        and returns stands for micro-batch 0. That is too little, so the size that fits
        is then not underestimated, from a program that does not.
        """
        known = [
            (w.split.size, w.memory)
            for w in self.ways.values()
            if w.variant is variant and w.memory is not None and w.split.k > 1
        ]
        known.sort(key=lambda item: abs(item[1].peak - self.limit))
        if not known:
            return 0.0, 0.0
        size, memory = known[0]
        held = memory.arguments + memory.outputs - memory.aliased + memory.workspace
        other, there = known[1] if len(known) > 1 else (0, None)
        peak = held if there is None else there.peak
        slope = (memory.peak - peak) / (size - other)
        return memory.peak - slope * size, slope

    def _may_fit(self, variant: Variant, whole: Split) -> bool:
        """Whether the whole batch in one pass is worth compiling."""
        return self._of_whole(variant, whole) <= self.limit

    def _of_whole(self, variant: Variant, whole: Split) -> float:
        """A bound on the memory of the whole batch in one pass: it needs no sums."""
        known = [
            w
            for w in self.ways.values()
            if w.variant is variant and w.memory is not None
        ]
        if not known:
            return 0.0
        memory = known[0].memory
        assert memory is not None
        base, slope = self._line(variant)
        if len(known) == 1:
            # The sums may be in what seems to grow with the micro-batch.
            slope = max(slope - self._sums(memory) / known[0].split.size, 0.0)
            return base + slope * whole.size
        return base + slope * whole.size - self._sums(memory)

    def _sums(self, memory: MemoryEstimate) -> int:
        return memory.arguments if self.sums is None else self.sums

    # --- beyond equal micro-batches in one call ---------------------------------------

    def _ragged(self, best: _Way | None) -> _Way | None:
        """Micro-batches of two sizes, where twice as many examples would fit.

        Equal ones, whose product with k is the global batch, are worth more than that.
        """
        for _ in range(RAGGED_TRIES if self.ragged else 0):
            if best is None or best.split.k < 3:
                break
            # As many as fit, in the fewest micro-batches, which are then made equal.
            size = min(self._size_that_fits(best.variant), self.ragged)
            if size < 2 * best.split.size:
                break
            k = -(-self.ragged // int(size))
            split = Split(-(-self.ragged // k), k)
            if k == 1 or not self._beats(self.way(best.variant, split), best):
                break
            way = self.compiled(best.variant, split)
            if not self._fits(way):
                break
            best = way
        return best

    def _across(self, best: _Way | None, variants: Sequence[Variant]) -> _Way | None:
        """The other form, where it may allow a larger micro-batch, or any at all."""
        if best is None:
            return self._best_of(variants) if variants else None
        larger = [s for s in self.splits if s.k > 1 and s.size > best.split.size]
        base, slope = self._line(best.variant)
        for variant in [v for v in variants if v.policy == best.variant.policy]:
            fast = _first(larger, functools.partial(self._is_faster, variant, best))
            if larger and fast == len(larger):
                self._skip(variant, "no faster at its best")
            for split in larger[fast:]:
                # The forms differ by the sums at most.
                assert best.memory is not None
                if base + slope * split.size - self._sums(best.memory) > self.limit:
                    self._skip(variant, "no smaller than in one call")
                    break
                way = self.compiled(variant, split)
                if not self._fits(way):
                    break
                best = way
        return best

    def _to_fit(self, best: _Way | None, fitting: Fitting) -> _Way | None:
        """Micro-batches that fit only by recomputation which is chosen for them."""
        plain = fitting.plain
        larger = [
            split
            for split in self.splits
            if self._is_faster(plain, best, split)
            and not self._fits(self.way(plain, split))
        ]
        if not larger:
            bound = self.way(plain, self.splits[-1])
            way = dataclasses.replace(bound, variant=fitting.variant, memory=None)
            self.ways[FIT, plain.form, way.split] = way
            self._skip(fitting.variant, "no faster at its best")
        for split in larger[:FIT_TRIES]:
            way = self._fitted(fitting, split)
            if not self._fits(way) or not self._beats(way, best):
                break
            best = way
        return best

    def _fitted(self, fitting: Fitting, split: Split) -> _Way:
        """A way whose recomputation is chosen so that it fits, or the nearest to it."""
        variant = fitting.variant
        plain = self.way(fitting.plain, split)
        tried: list[_Way] = []

        def compiled(built: Built) -> None:
            # Until it fits, what is known of its time is that of the step as it is.
            tried.append(dataclasses.replace(plain, variant=variant))
            self._keep(tried[-1], built, quick=False)
            self._may_compile()

        key = FIT, variant.form, split
        try:
            fun = fitting.make(*split).fit(self.target, self.limit, compiled)
        except TooSmallError:
            least = min(tried, key=lambda w: w.memory.peak if w.memory else 0)
            self.ways[key] = least
            return least
        self.ways[key] = self._priced(variant, split, plain.made._replace(fun=fun))
        return self.compiled(variant, split, quick=False)

    def _proved(self, best: _Way | None) -> _Way | None:
        """The best, compiled as it will be; the next best where that does not fit."""
        platform = self.target.chip.platform
        if self.target.is_here or platform not in QUICK:
            return best
        while best is not None:
            if best.quick:
                self.compiled(best.variant, best.split, quick=False)
            if self._fits(best):
                return best
            best = self._fastest()
        return None

    def _fastest(self) -> _Way | None:
        """Of all that fit."""
        return min(
            filter(self._fits, self.ways.values()),
            key=lambda w: w.cost.seconds,
            default=None,
        )

    # --- what is told -----------------------------------------------------------------

    def _candidates(self, best: _Way) -> tuple[Candidate, ...]:
        rows = [w for w in self.ways.values() if w.memory is not None]
        # Of what was not compiled, the best of what was passed over as a whole.
        for key in self.skipped:
            ways = [w for (p, form, _), w in self.ways.items() if (p, form) == key]
            if all(w.memory is None for w in ways):
                rows.append(min(ways, key=lambda w: w.cost.seconds))
        rows.sort(key=lambda w: (w is not best, not self._fits(w), w.cost.seconds))
        return tuple(
            Candidate(
                w.split.size,
                w.split.k,
                w.variant.policy,
                w.variant.form,
                w.cost.seconds,
                w.cost.flops,
                w.memory,
                self._verdict(w, best),
                w.options,
            )
            for w in rows
        )

    def _verdict(self, way: _Way, best: _Way) -> str:
        if way is best:
            return "chosen"
        if way.memory is None:
            return self.skipped[way.variant.policy, way.variant.form]
        if way.memory.refused:
            return "does not fit: the compiler refuses it"
        if not self._fits(way):
            return f"does not fit: {bytes_text(way.memory.peak - self.limit)} too much"
        if way.cost.seconds > best.cost.seconds * PLATEAU:
            return f"fits, {way.cost.seconds / best.cost.seconds:.2f} x as long"
        assert best.memory is not None
        if way.memory.peak > best.memory.peak:
            return "fits, needs more and is no faster"
        return "fits, is no faster"

    def _nothing_fits(self) -> str:
        needs = [w for w in self.ways.values() if w.memory is not None]
        least = min(needs, key=lambda w: w.memory.peak if w.memory else 0)
        assert least.memory is not None
        peak = least.memory.peak
        at_least = "at least " if least.memory.refused else ""
        return (
            f"nothing fits into {self.limit} bytes ({bytes_text(self.limit)}): the "
            f"smallest need, of micro-batch {least.split.size} with policy "
            f"{str(least.variant.policy)!r}, is {at_least}{peak} bytes "
            f"({bytes_text(peak)}); give more memory, a smaller margin, a smaller "
            "model, or policies that keep less"
        )


def _first(splits: Sequence[Split], holds: Callable[[Split], bool]) -> int:
    """The index of the first split for which something holds, as for all behind it."""
    return bisect.bisect_left(range(len(splits)), True, key=lambda i: holds(splits[i]))
