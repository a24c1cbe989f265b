r"""The second form: does my own micro-step make the step of the whole batch?

The micro-step is driven through two windows (and a partial one, where it can close one),
and beside it the plain optimizer makes one step per window, on the gradient of all the
window's examples. If parameters differ, suspects are *re-enacted*: the plain optimizer
is run again with one fault put into it on purpose (the gradient k times too large, the
mean of the micro-batches' means, a schedule that was told the number of micro-steps, a
sum that no one resets), until a run moves as the micro-step does, in every window and
in every digit of float64. So a fault shows behind Adam too, which hides a constant
factor from everything but its epsilon.

Some faults show without a re-enactment, because they leave traces on silent micro-steps:

- parameters that move there, or stay where a window ends;
- an average of parameters that does: it takes the same step towards them whatever the
  micro-batch holds;
- random numbers that are the same for all micro-batches: then their order does not
  matter, although the loss is random.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradacc_jax import precision, splitting
from gradacc_jax.equivalence import conditions, loss, report
from gradacc_jax.equivalence.conditions import Tolerance
from gradacc_jax.equivalence.loss import Experiments, Question
from gradacc_jax.equivalence.report import EquivalenceReport

PyTree = Any
MicroStep = Callable[..., tuple[Any, ...]]
KeyOf = Callable[[int], jax.Array]


class Loop(NamedTuple):
    """What is asked: a micro-step, where it starts, and the optimizer that is meant."""

    micro_step: MicroStep
    init: Callable[[PyTree], PyTree]
    optimizer: optax.GradientTransformation
    closing_step: MicroStep | None
    key: jax.Array | KeyOf | None


class Span(NamedTuple):
    """A window: the numbers of its micro-batches, and whether it is closed early."""

    micro_batches: list[int]
    partial: bool


class Trace(NamedTuple):
    """Parameters and state after each micro-step, on the host."""

    params: list[PyTree]
    states: list[PyTree]


class Seen(NamedTuple):
    """What a re-enactment has for its gradient.

    Attributes:
      whole: the gradient of all the window's examples.
      micros: a function that gives each micro-batch's.
      earlier: ``whole`` of the windows before.
      partial: how many of a window's micro-batches a window holds that was closed
        early; None in others.
    """

    whole: PyTree
    micros: Callable[[], list[PyTree]]
    earlier: list[PyTree]
    partial: int | None


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A fault, as what it makes of a window's gradient and of the counters."""

    cause: str
    text: str
    gradient: Callable[[Seen], PyTree | None] = lambda seen: seen.whole
    counters: tuple[str, ...] = ()
    averages: bool = (
        False  # micro-batches with equal weights: the loss decides if wrong
    )


def check(q: Question, loop: Loop) -> EquivalenceReport:
    """The report on a micro-step; see :func:`gradacc_jax.check_equivalence`."""
    given = Trial(q, loop, wide=False)
    found, expected = given.run(), given.enact(Suspect("", ""))
    first = given.ends(found)
    notes: tuple[str, ...] = ()
    with conditions.double():
        trial = Trial(q.in_double(), loop, wide=True)
        try:
            trace = trial.run()
        except (TypeError, ValueError) as error:
            notes = (
                f"the micro-step does not run in float64 ({str(error).splitlines()[0]})"
                ", and was looked at in the dtypes it was given",
            )
            trial = None
        if trial is not None:
            return _judged(trial, trace, (first, expected), q, notes)
    return _judged(given, found, (first, expected), q, notes)


def _judged(
    trial: "Trial", trace: Trace, given: Any, q: Question, notes: tuple[str, ...]
) -> EquivalenceReport:
    trial.accept(trace.states[0])
    expected = trial.enact(Suspect("", ""))
    rows = trial.rows(trial.ends(trace), expected, given)
    equal = all(row.equal for row in rows)
    causes = dict(_traces(trial, trace, expected))
    if not (equal or causes):
        causes = trial.explain(trace, expected)
    causes |= _one_key(q, trial.loop)
    k = q.num_microbatches
    if equal and trial.same(
        expected, trial.enact(Suspect("", "", lambda seen: _times(seen.whole, k)))
    ):
        notes += (
            "this optimizer moves alike when all gradients are multiplied by one "
            "factor: a division too many would not show. Check with optax.sgd in both",
        )
    windows = "3 windows and a partial one" if trial.partial else "2 windows"
    return EquivalenceReport(
        equal=equal and not causes,
        causes=causes,
        differences=tuple(rows),
        compared=f"{windows} of {k} micro-steps, and the plain optimizer",
        dtype=loss.given_dtype(q.params),
        notes=notes + loss.notes(trial.narrowest, trial.accepted),
    )


class Trial:
    """The micro-step, and the optimizer beside it, in one choice of dtypes."""

    def __init__(self, q: Question, loop: Loop, *, wide: bool, still: bool = True):
        self.q = q
        self.loop = loop
        self.still = still
        self.axes = splitting.batch_axes(q.batch, q.batch_axis)
        self.size = splitting.num_examples(q.batch, self.axes)
        k = q.num_microbatches
        if self.size % k:
            raise ValueError(
                f"num_microbatches={k} does not divide batch_size={self.size}, and a "
                "micro-step takes micro-batches of one size; leave out "
                f"{self.size % k} examples"
            )
        self.micro_batches = [np.arange(self.size)[i::k] for i in range(k)]
        window = Span(list(range(k)), False)
        self.spans = [window, window]
        self.partial = loop.closing_step is not None and k > 1
        if self.partial:
            self.spans += [Span(list(range(max(1, k // 2))), True), window]
        self.update = jax.jit(optax.with_extra_args_support(loop.optimizer).update)
        self.differentiate = jax.jit(jax.value_and_grad(self._loss))
        program = jax.value_and_grad(self._loss)
        self.narrowest, _ = conditions.look(program, q.params, q.batch)
        if not wide:
            self.narrowest = min(
                (*map(precision.dtype_of, jax.tree.leaves(q.params)), self.narrowest),
                key=lambda dtype: dtype.itemsize,
            )
        self.accepted = conditions.tolerance(self.narrowest)

    def accept(self, state: PyTree) -> None:
        """Allows for the rounding of sums that are float32 by choice, in ``state``.

        Narrower ones are no choice: they lose small gradients.
        """
        shapes = {np.shape(p) for p in jax.tree.leaves(self.q.params)}
        for x in jax.tree.leaves(state):
            if x.dtype == np.float32 and x.shape in shapes:
                if self.narrowest.itemsize > 4:
                    self.narrowest = np.dtype(np.float32)
                    self.accepted = conditions.tolerance(self.narrowest)

    def _loss(self, params: PyTree, batch: PyTree) -> jax.Array:
        return loss.total(self.q.loss(params, batch, self.q.still(), None)[0])

    def take(self, numbers: Sequence[int]) -> PyTree:
        examples = np.concatenate([self.micro_batches[i] for i in numbers])

        def leaf(x: Any, axis: int) -> Any:
            return x if axis < 0 else jnp.take(x, examples, axis=axis)

        return jax.tree.map(leaf, self.q.batch, self.axes)

    # --- the micro-step ---------------------------------------------------------------

    def run(self, reverse: bool = False) -> Trace:
        """Drives the micro-step through all windows; ``reverse`` from the second on."""
        params = jax.tree.map(jnp.array, self.q.params)
        state = self.loop.init(params)
        if self.still:
            state = conditions.stilled(state)
        trace = Trace([_kept(params)], [_kept(state)])
        number = 0
        for w, span in enumerate(self.spans):
            order = span.micro_batches[::-1] if reverse else span.micro_batches
            for i, micro_batch in enumerate(order):
                step = self.loop.micro_step
                if span.partial and i == len(order) - 1:
                    assert self.loop.closing_step is not None
                    step = self.loop.closing_step
                more = self._key(number)
                out = step(params, state, self.take([micro_batch]), *more)
                if not (isinstance(out, tuple) and len(out) >= 2):
                    raise ValueError(
                        f"micro_step returned {type(out).__name__}, expected a tuple "
                        "(params, state, ...)"
                    )
                params, state = out[:2]
                trace.params.append(_kept(params))
                trace.states.append(_kept(state))
                number += 1
        return trace

    def _key(self, number: int) -> list[jax.Array]:
        if self.loop.key is None:
            return []
        if self.still:
            return [conditions.still_key()]
        key = self.loop.key
        return [key(number) if callable(key) else key]

    def ends(self, trace: Trace) -> list[PyTree]:
        """The parameters where the windows end."""
        ends = np.cumsum([len(span.micro_batches) for span in self.spans])
        return [trace.params[0], *(trace.params[i] for i in ends)]

    # --- the optimizer ----------------------------------------------------------------

    def enact(self, suspect: Suspect) -> list[PyTree]:
        """The parameters where the windows end, with a fault put in on purpose."""
        params = jax.tree.map(jnp.array, self.q.params)
        state = self.loop.optimizer.init(params)
        ends, earlier, micro_steps = [_kept(params)], [], 0
        for span in self.spans:
            micro_steps += len(span.micro_batches)
            value, whole = self.differentiate(params, self.take(span.micro_batches))

            def micros(params: PyTree = params, span: Span = span) -> list[PyTree]:
                return [self._gradient(params, i) for i in span.micro_batches]

            partial = len(span.micro_batches) if span.partial else None
            grads = suspect.gradient(Seen(whole, micros, earlier, partial))
            earlier = [*earlier, whole]
            if grads is not None:
                state = _with_counters(state, suspect.counters, micro_steps - 1)
                updates, state = self.update(grads, state, params, value=value)
                params = optax.apply_updates(params, updates)
            ends.append(_kept(params))
        return ends

    def _gradient(self, params: PyTree, micro_batch: int) -> PyTree:
        return self.differentiate(params, self.take([micro_batch]))[1]

    def counters(self) -> list[str]:
        """The optimizer's numbers that count its steps."""
        params = jax.tree.map(jnp.array, self.q.params)
        state = self.loop.optimizer.init(params)
        _, after = self.update(
            self.differentiate(params, self.q.batch)[1],
            state,
            params,
            value=jnp.zeros(()),
        )
        return [
            jax.tree_util.keystr(path)
            for (path, x), y in zip(
                jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(after)
            )
            if _is_count(x) and int(y) == int(x) + 1
        ]

    # --- the two compared -------------------------------------------------------------

    def far(
        self, found: list[PyTree], expected: list[PyTree], accepted: Tolerance
    ) -> list[list[float]]:
        """For each window and parameter the difference, in movements of a window."""
        result = []
        start = expected[0]
        for a, b in zip(found[1:], expected[1:], strict=True):
            moved = jax.tree.map(lambda x, y: x - y, b, start)
            scale = report.largest(moved)
            rounding = 4 * report.largest(b) * float(jnp.finfo(_real(b)).eps)
            result.append(
                [
                    report.difference(
                        np.asarray(x - s), m, scale, accepted.floor, rounding
                    )
                    for x, s, m in zip(*map(jax.tree.leaves, (a, start, moved)))
                ]
            )
            start = b
        return result

    def same(self, found: list[PyTree], expected: list[PyTree]) -> bool:
        far = self.far(found, expected, self.accepted)
        return max(map(max, far)) <= self.accepted.relative

    def rows(
        self, found: list[PyTree], expected: list[PyTree], given: Any
    ) -> list[report.Difference]:
        far = np.max(self.far(found, expected, self.accepted), axis=0)
        narrow = np.max(self.far(*given, self.accepted), axis=0)
        paths = jax.tree_util.tree_leaves_with_path(self.q.params)
        return [
            report.Difference(
                "parameters" + jax.tree_util.keystr(path),
                float(a),
                float(b),
                bool(a <= self.accepted.relative),
            )
            for (path, _), a, b in zip(paths, far, narrow, strict=True)
        ]

    def explain(self, trace: Trace, expected: list[PyTree]) -> dict[str, str]:
        """The first suspect that moves as the micro-step does."""
        found = self.ends(trace)
        for suspect in self.suspects(found, expected):
            if self.same(found, self.enact(suspect)):
                causes = {suspect.cause: suspect.text} if suspect.cause else {}
                if suspect.averages:
                    causes |= self.of_the_loss(None)
                if causes:
                    return causes
        factors = self.factors(found)
        if factors is not None:
            counted = np.abs(factors) > 1e-6 * np.max(np.abs(factors))
            if np.sum(counted) == 1:
                return {
                    report.ONE: "only the micro-batch "
                    f"{int(np.argmax(counted)) + 1} of each window counts: is the sum "
                    "overwritten?"
                }
        causes = self.of_the_loss(factors)
        if causes:
            return causes
        for path, x in jax.tree_util.tree_leaves_with_path(trace.states[-1]):
            floating = jnp.issubdtype(precision.dtype_of(x), jnp.floating)
            if floating and precision.dtype_of(x).itemsize < 4:
                return {
                    report.NARROW: f"state{jax.tree_util.keystr(path)} is {x.dtype}, "
                    "which adds up to a few hundred at most without loss; accumulate "
                    "in float32"
                }
        return {
            report.UNKNOWN: "no fault that was put into the plain optimizer moves the "
            "parameters as the micro-step does; try optimizer=optax.sgd(1.0) in both, "
            "with no clipping"
        }

    def of_the_loss(self, factors: np.ndarray | None) -> dict[str, str]:
        """What the first form says of the loss, for micro-batches added so."""
        examine = Experiments(self.q, self.accepted)
        _, draws = conditions.look(self._loss, self.q.params, self.q.batch)
        k = self.q.num_microbatches
        used = np.full(k, 1 / k) if factors is None else factors
        return loss.diagnose(examine, draws, np.stack([used] * len(examine.names)))

    def factors(self, found: list[PyTree]) -> np.ndarray | None:
        """How much of each micro-batch is in the first step, for a linear optimizer."""
        start = jax.tree.map(jnp.array, self.q.params)
        state = self.loop.optimizer.init(start)
        each = []
        for i in range(self.q.num_microbatches):
            value, grads = self.differentiate(start, self.take([i]))
            updates, _ = self.update(grads, state, start, value=value)
            each.append(_flat(updates))
        moved = _flat(found[1]) - _flat(found[0])
        factors = np.linalg.lstsq(np.array(each).T, moved, rcond=None)[0]
        far = report.largest(factors @ np.array(each) - moved)
        exact = far <= 10 * self.accepted.relative * report.largest(moved)
        return factors if exact and len(moved) > len(factors) else None

    def suspects(
        self, found: list[PyTree], expected: list[PyTree]
    ) -> Iterator[Suspect]:
        k = self.q.num_microbatches
        yield Suspect(
            report.PARTIAL,
            "a window that was closed early was divided by k, not by the micro-batches "
            "it held; divide by the sum of weights: accumulate() does",
            lambda seen: _times(seen.whole, (seen.partial or k) / k),
        )
        yield Suspect(
            report.LOST,
            "closing a window early did not run the optimizer, and its micro-batches "
            "were lost; pass emit=True with the last of them",
            lambda seen: None if seen.partial else seen.whole,
        )
        yield Suspect(
            report.BLEED,
            "the sum is never reset: each step has all earlier windows in it",
            lambda seen: _mean([*seen.earlier, seen.whole], 1.0),
        )
        yield Suspect(
            report.BLEED,
            "the mean is never reset: each step has all earlier windows in it",
            lambda seen: _mean([*seen.earlier, seen.whole]),
        )
        for index in (-1, 0):
            yield Suspect(
                report.ONE,
                f"only the {'last' if index else 'first'} micro-batch of each window "
                "counts: is the sum overwritten?",
                lambda seen, index=index: seen.micros()[index],
            )
        many = (
            f"the gradient is {k} times too large: micro-gradients are added up and "
            f"not divided. Divide the loss or the sum by {k}, in one place"
        )
        few = (
            f"the gradient is {k} times too small: it is divided by {k} twice, once in "
            "the loss and once by the accumulator, say. Divide in one place"
        )
        for factor, text in ((float(k), many), (1 / k, few)):
            yield Suspect(
                report.SCALE, text, lambda seen, f=factor: _times(seen.whole, f)
            )
        yield Suspect("", "", lambda seen: _mean(seen.micros()), averages=True)
        for factor, text in ((float(k), many), (1 / k, few)):
            yield Suspect(
                report.SCALE,
                text,
                lambda seen, f=factor: _times(_mean(seen.micros()), f),
                averages=True,
            )
        names = self.counters()
        for some in [*((name,) for name in names), tuple(names)]:
            which = ", ".join(f"state{name}" for name in some)
            text = (
                f"the optimizer's {which} counts micro-steps: it goes {k} times too "
                "fast. Put what counts inside the accumulator, which runs it once per "
                "window"
            )
            yield Suspect(report.COUNTER, text, counters=some)
            yield Suspect(
                report.COUNTER,
                text,
                lambda seen: _mean(seen.micros()),
                counters=some,
                averages=True,
            )
        factors = self.scales(found, expected)
        if factors is not None:
            leaves, tree = jax.tree.flatten(factors)
            paths = jax.tree_util.tree_leaves_with_path(factors)
            off = [
                f"{jax.tree_util.keystr(path) or 'the gradient'} by {_factor(c, k)}"
                for path, c in paths
                if abs(c - 1) > 1e-6
            ]
            alike = max(leaves) - min(leaves) < 1e-6 * max(map(abs, leaves))
            where = (
                f"the gradient by {_factor(leaves[0], k)}"
                if alike
                else "; ".join(off[:6])
            )
            yield Suspect(
                report.SCALE,
                f"gradients are off by a factor: {where}. Each is to be the mean over "
                "the window, divided once",
                lambda seen: jax.tree.map(
                    lambda g, c: _times(g, c), seen.whole, factors
                ),
            )

    def scales(self, found: list[PyTree], expected: list[PyTree]) -> PyTree | None:
        """Each parameter's first movement over the expected one, if it is a factor."""

        def leaf(a: np.ndarray, b: np.ndarray, start: np.ndarray) -> float:
            moved, right = np.ravel(a - start), np.ravel(b - start)
            size = float(np.real(np.vdot(right, right)))
            if size == 0:
                return 1.0
            factor = float(np.real(np.vdot(right, moved))) / size
            off = report.largest(moved - factor * right)
            exact = off <= 1e3 * self.accepted.relative * report.largest(moved)
            return factor if exact else float("nan")

        scales = jax.tree.map(leaf, found[1], expected[1], expected[0])
        return None if np.isnan(jax.tree.leaves(scales)).any() else scales


def _traces(
    trial: Trial, trace: Trace, expected: list[PyTree]
) -> Iterator[tuple[str, str]]:
    """The faults that show on silent micro-steps."""
    k = trial.q.num_microbatches
    ends = {int(n) for n in np.cumsum([len(s.micro_batches) for s in trial.spans])}
    moved = {
        number
        for number in range(1, len(trace.params))
        if not _alike(trace.params[number - 1], trace.params[number])
    }
    should = {
        end
        for end, a, b in zip(sorted(ends), expected, expected[1:])
        if not _alike(a, b)
    }
    seen = (
        f"parameters moved after the micro-steps {_listed(sorted(moved)) or 'none'}, "
        f"and windows end after {_listed(sorted(ends))}. "
    )
    silent, missing = moved - ends, should - moved
    early = {2 * k + len(trial.spans[2].micro_batches)} if trial.partial else set()
    if missing and missing <= early and silent:
        yield (
            report.BLEED,
            f"{seen}A window that was to be closed early stayed open, and its micro-"
            "batches went into the next one; pass emit=True with the last of them",
        )
    elif missing - early or (silent and _regular(moved, k)):
        yield report.LENGTH, f"{seen}Is k {k} in the micro-step too?"
    elif silent:
        yield (
            report.SILENT,
            f"{seen}Weight decay, momentum and schedules belong inside the accumulator,"
            " which runs them once per window: accumulate(chain(...), k)",
        )
    for path, values in _by_path(trace.states):
        name = jax.tree_util.keystr(path)
        if name.endswith((".step", "['step']")) and _is_count(values[0]):
            counts = [int(v) - int(values[0]) for v in values[: 2 * k + 1]]
            if k > 1 and counts == list(range(2 * k + 1)):
                yield (
                    report.COUNTER,
                    f"state{name} counts micro-steps; schedules and logs that read it "
                    f"go {k} times too fast. gradacc_jax.flax has a TrainState and an "
                    "Optimizer whose step counts optimizer steps",
                )
    if k > 1:
        yield from _averages(trial, trace)


def _regular(moved: set[int], k: int) -> bool:
    """Whether parameters move every so many micro-steps, but not at each of them."""
    first = min(moved)
    return 1 < first < k and {n for n in moved if n <= 2 * k} == {
        *range(first, 2 * k + 1, first)
    }


def _averages(trial: Trial, trace: Trace) -> Iterator[tuple[str, str]]:
    """Averages of parameters that move on silent micro-steps of the second window.

    There parameters stand still. An average e goes towards them, by the same part of
    the way at each micro-step, whatever the micro-batch.
    """
    k = trial.q.num_microbatches
    params = jax.tree.leaves(trace.params[k])
    suspects = []
    for path, values in _by_path(trace.states):
        steps = list(zip(values[k:], values[k + 1 : 2 * k]))
        parts = [
            {_part(a, b, p) for p in params if np.shape(p) == np.shape(a)}
            for a, b in steps
        ]
        if steps and all(any(parts) for parts in parts):
            rates = [next(r for r in part if r) for part in parts]
            if max(rates) - min(rates) <= 1e-4 * max(rates):
                suspects.append((path, values[k + 1]))
    if not suspects:
        return
    other = dict(
        (jax.tree_util.keystr(path), values)
        for path, values in _by_path(trial.run(reverse=True).states)
    )
    names = []
    for path, after in suspects:
        name = jax.tree_util.keystr(path)
        # In reverse order the window's sum is the same up to rounding.
        if np.allclose(other[name][k + 1], after, rtol=1e-5, atol=0):
            names.append(name)
    if names:
        yield (
            report.COUNTER,
            f"state{names[0]} is an average of the parameters that also moves on "
            f"silent micro-steps: it forgets {k} times too fast. Put parameter_ema "
            "last in the chain that accumulate() wraps",
        )


def _part(a: np.ndarray, b: np.ndarray, p: np.ndarray) -> float | None:
    """What part of the way from a to p leads to b; None if b is not on it."""
    if not jnp.issubdtype(np.asarray(a).dtype, jnp.floating):
        return None
    way, gone = (np.ravel(np.asarray(x, np.float64) - a) for x in (p, b))
    size = float(way @ way)
    if size == 0 or not np.any(gone):
        return None
    part = float(way @ gone) / size
    on_it = report.largest(gone - part * way) <= 1e-5 * report.largest(gone)
    return part if on_it and 0 < part < 1 else None


def _one_key(q: Question, loop: Loop) -> dict[str, str]:
    """Whether a random loss draws the same numbers for every micro-batch."""
    if loop.key is None or q.num_microbatches == 1:
        return {}
    key = loop.key(0) if callable(loop.key) else loop.key
    trial = Trial(q, loop, wide=False, still=False)

    def value(key: jax.Array) -> Any:
        batch = trial.take([0])
        return jax.jit(lambda k: loss.total(q.loss(q.params, batch, k, None)[0]))(key)

    if float(value(key)) == float(value(jax.random.fold_in(key, 1))):
        return {}
    k = q.num_microbatches
    one, other = trial.run().params, trial.run(reverse=True).params
    if not trial.same([one[0], one[k]], [other[0], other[k]]):
        return {}
    return {
        report.KEY: "the loss is random, and the order of the micro-batches makes no "
        "difference: all of them draw the same numbers (or none). Fold the number of "
        "the micro-step into the key"
    }


def _with_counters(state: PyTree, names: tuple[str, ...], number: int) -> PyTree:
    def leaf(path: Any, x: Any) -> Any:
        if jax.tree_util.keystr(path) not in names:
            return x
        return jnp.asarray(number, x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, state)


def _is_count(x: Any) -> bool:
    return bool(
        np.shape(x) == () and jnp.issubdtype(precision.dtype_of(x), jnp.integer)
    )


def _kept(tree: PyTree) -> PyTree:
    """A copy on the host, which outlives a donation; keys are left out."""

    def leaf(x: Any) -> Any:
        dtype = getattr(x, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return np.zeros(0)
        return np.array(x)

    return jax.tree.map(leaf, tree)


def _by_path(states: list[PyTree]) -> Iterator[tuple[Any, list[Any]]]:
    """Each array of the state, through time."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(states[0])]
    columns = zip(*map(jax.tree.leaves, states))
    yield from zip(paths, map(list, columns))


def _alike(a: PyTree, b: PyTree) -> bool:
    return all(
        np.array_equal(x, y, equal_nan=np.issubdtype(x.dtype, np.inexact))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
    )


def _flat(tree: PyTree) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def _times(tree: PyTree, factor: Any) -> PyTree:
    return jax.tree.map(lambda x: x * jnp.asarray(factor, x.dtype), tree)


def _mean(trees: list[PyTree], divisor: float | None = None) -> PyTree:
    total = trees[0]
    for tree in trees[1:]:
        total = jax.tree.map(jnp.add, total, tree)
    return _times(total, 1 / (len(trees) if divisor is None else divisor))


def _real(tree: PyTree) -> np.dtype:
    return min(
        (np.zeros(0, x.dtype).real.dtype for x in jax.tree.leaves(tree)),
        key=lambda dtype: dtype.itemsize,
    )


def _factor(factor: float, k: int) -> str:
    near = {
        float(k): " (k)",
        1 / k: " (1/k)",
        1 / k**2: " (1/k²)",
        float(k**2): " (k²)",
    }
    for value, name in near.items():
        if abs(factor - value) <= 1e-4 * value:
            return f"{factor:.4g}{name}"
    return f"{factor:.4g}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
