r"""The second form: does my own micro-step make the step of the whole batch?

The micro-step is driven through two windows (and a partial one and a third, if it can
close one early), and beside it the plain optimizer makes one step per window, on the
gradient of all the window's examples. If their parameters differ, suspects are
*re-enacted*: the plain optimizer is run again with one fault put into it on purpose
(``suspects.py``), until a run moves as the micro-step does, in every window and to the
last digits of float64. So a constant factor shows behind Adam too, by its epsilon.

Some faults need no re-enactment. They leave traces on silent micro-steps:

- parameters that move there, or stand still where a window ends;
- an average of parameters that goes on: it takes the same part of the way towards them
  at each micro-step, whatever the micro-batch holds;
- random numbers that are the same for all micro-batches: their order then makes no
  difference, although the loss is random.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradacc_jax.equivalence import conditions, report
from gradacc_jax.equivalence.diagnosis import diagnose
from gradacc_jax.equivalence.experiments import Experiments, Question, total
from gradacc_jax.equivalence.report import Difference, EquivalenceReport
from gradacc_jax.equivalence.suspects import scales, suspects, times
from gradacc_jax.equivalence.trial import Loop, Suspect, Trace, Trial, is_count

PyTree = Any
_NEARER = 10  # times nearer is far nearer


def check(q: Question, loop: Loop) -> EquivalenceReport:
    """The report on a micro-step; see :func:`gradacc_jax.check_equivalence`."""
    given = Trial(q, loop)
    found = given.run()
    narrow = given.far(given.at_ends(found), given.enact(Suspect()))
    dtype = report.dtype_of(q.params)
    with conditions.double():
        trial = Trial(q.in_double(), loop)
        try:
            trace = trial.run()
        except (TypeError, ValueError) as error:
            note = report.not_double("micro-step", error)
        else:
            return _judged(trial, trace, narrow, dtype, ())
    return _judged(given, found, narrow, dtype, (note,))


def _judged(
    trial: Trial,
    trace: Trace,
    narrow: np.ndarray,
    dtype: str,
    notes: tuple[str, ...],
) -> EquivalenceReport:
    q = trial.q
    trial.accept(trace.states[0])
    found, expected = trial.at_ends(trace), trial.enact(Suspect())
    rows = [
        Difference(
            what="parameters" + jax.tree_util.keystr(path),
            double=float(far),
            given=float(given),
            equal=bool(far <= trial.accepted.relative),
        )
        for (path, _), far, given in zip(
            jax.tree_util.tree_leaves_with_path(q.params),
            np.max(trial.far(found, expected), axis=0),
            np.max(narrow, axis=0),
            strict=True,
        )
    ]
    equal = all(row.equal for row in rows)
    causes = {} if equal else _suspected(trial, found, expected)
    # After the suspects: whoever reaches a minimum too early stands still there.
    causes = causes or dict(_movements(trial, trace, expected))
    if not (equal or causes):
        causes = _otherwise(trial, trace)
    causes |= dict(_counters(trial, trace)) | dict(_averages(trial, trace))
    causes |= _one_key(q, trial.loop)
    k = q.num_microbatches
    if equal and trial.same(_in_k_times(trial), expected):
        found_out, note = _hidden_scale(trial, found, expected)
        causes |= found_out
        notes += note
    windows = "3 windows, and a half one," if len(trial.spans) > 2 else "2 windows"
    return EquivalenceReport(
        equal=equal and not causes,
        causes=causes,
        differences=tuple(rows),
        compared=f"{windows} of {k} micro-steps, and the plain optimizer",
        dtype=dtype,
        notes=notes + report.limits(trial.narrowest, trial.accepted),
    )


def _in_k_times(trial: Trial) -> list[PyTree]:
    k = trial.q.num_microbatches
    return trial.enact(Suspect(gradient=lambda seen: times(seen.whole, k)))


def _hidden_scale(
    trial: Trial, found: list[PyTree], expected: list[PyTree]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """A wrong factor that the optimizer hides from the verdict, by what is nearer.

    Adam divides it out, but for its epsilon; float32 sums hide that in their rounding.
    Of explanations that are all within float32's rounding, one that is far nearer in
    float64 is right.
    """

    def far(path: list[PyTree]) -> float:
        return float(np.max(trial.far(found, path)))

    right = far(expected)
    wrong = [(far(trial.enact(s)), s) for s in scales(trial.q.num_microbatches)]
    nearest, suspect = min(wrong, key=lambda pair: pair[0])
    noise = 1e6 * float(jnp.finfo(jax.tree.leaves(found)[0].dtype).eps)
    if _NEARER * nearest < right and noise < right:
        return {suspect.cause: suspect.text}, ()
    if _NEARER * right < nearest:
        return {}, ()
    return {}, (
        "this optimizer moves alike when all gradients are multiplied by one factor, so"
        " that a division too many would not show: check with optax.sgd in both, too",
    )


def _suspected(
    trial: Trial, found: list[PyTree], expected: list[PyTree]
) -> dict[str, str]:
    """The causes that the first suspect stands for who moves as the micro-step does."""
    for suspect in suspects(trial, found, expected):
        if trial.same(trial.enact(suspect), found):
            causes = {suspect.cause: suspect.text} if suspect.cause else {}
            if suspect.averages:
                k = trial.q.num_microbatches
                causes |= _of_the_loss(trial, np.full(k, 1 / k))
            if causes:
                return causes
    return {}


def _otherwise(trial: Trial, trace: Trace) -> dict[str, str]:
    """The causes of a movement that no suspect makes."""
    found = trial.at_ends(trace)
    k = trial.q.num_microbatches
    factors = _factors(trial, found)
    if factors is None:
        causes = _of_the_loss(trial, np.full(k, 1 / k))
        causes.pop(report.WEIGHTS, None)  # for the weights used are not known
    else:
        counted = np.abs(factors) > 1e-6 * np.max(np.abs(factors))
        if np.sum(counted) == 1:
            number = int(np.argmax(counted)) + 1
            return {
                report.ONE: f"only the micro-batch {number} of each window counts: is "
                "the sum overwritten?"
            }
        causes = _of_the_loss(trial, factors)
    if causes:
        return causes
    for path, x in jax.tree_util.tree_leaves_with_path(trace.states[-1]):
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
            return {
                report.NARROW: f"state{jax.tree_util.keystr(path)} is {x.dtype}, whose "
                "sums lose what is small beside them. Accumulate in float32"
            }
    return {
        report.UNKNOWN: "no fault that was put into the plain optimizer moves the "
        "parameters as the micro-step does. Try optax.sgd(1.0) in both, and check the "
        "loss alone, without micro_step"
    }


def _of_the_loss(trial: Trial, factors: np.ndarray) -> dict[str, str]:
    """What the first form says of the loss, for micro-batches added with factors."""
    examine = Experiments(trial.q, trial.accepted)
    used = np.stack([factors] * len(examine.names))
    return diagnose(examine, trial.draws, used)


def _factors(trial: Trial, found: list[PyTree]) -> np.ndarray | None:
    """How much of each micro-batch is in the first step, if the optimizer is linear."""

    def flat(tree: PyTree) -> np.ndarray:
        return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])

    start = trial.start()
    state = trial.loop.optimizer.init(start)
    steps = []
    for i in range(trial.q.num_microbatches):
        value, grads = trial.differentiate(start, trial.take([i]))
        steps.append(flat(trial.update(grads, state, start, value=value)[0]))
    each = np.array(steps)
    moved = flat(found[1]) - flat(found[0])
    factors = np.linalg.lstsq(each.T, moved, rcond=None)[0]
    off = report.largest(factors @ each - moved)
    exact = off <= 10 * trial.accepted.relative * report.largest(moved)
    return factors if exact and len(moved) > len(factors) else None


def _movements(
    trial: Trial, trace: Trace, expected: list[PyTree]
) -> Iterator[tuple[str, str]]:
    """When parameters move, against when they should."""
    k, ends = trial.q.num_microbatches, trial.ends
    moved = [
        number
        for number, (a, b) in enumerate(zip(trace.params, trace.params[1:]), 1)
        if not _alike(a, b)
    ]
    should = [
        end for end, a, b in zip(ends, expected, expected[1:]) if not _alike(a, b)
    ]
    silent = [number for number in moved if number not in ends]
    missing = [number for number in should if number not in moved]
    seen = (
        f"parameters moved after the micro-steps {report.listed(moved) or 'none'}, and "
        f"windows end after {report.listed(ends)}. "
    )
    # Every so many micro-steps, but not at each of them.
    regular = bool(moved) and moved[0] > 1 and all(n % moved[0] == 0 for n in moved)
    early = ends[2:3]
    if silent and early and missing[:1] == early:
        yield (
            report.BLEED,
            f"{seen}A window that was to be closed early stayed open, and its micro-"
            "batches went into the next one. Pass emit=True with the last of them",
        )
    elif any(end <= 2 * k for end in missing) or (silent and regular):
        yield report.LENGTH, f"{seen}Is k {k} in the micro-step too?"
    elif silent:
        yield (
            report.SILENT,
            f"{seen}Weight decay, momentum and schedules belong inside the accumulator,"
            " which runs them once per window: accumulate(chain(...), k)",
        )


def _counters(trial: Trial, trace: Trace) -> Iterator[tuple[str, str]]:
    """Numbers called ``step`` that count micro-steps."""
    k = trial.q.num_microbatches
    for name, values in _through_time(trace.states):
        if name.endswith((".step", "['step']")) and is_count(values[0]):
            counts = [int(value) - int(values[0]) for value in values[: 2 * k + 1]]
            if counts == list(range(2 * k + 1)):
                yield (
                    report.COUNTER,
                    f"state{name} counts micro-steps: what reads it, schedules and "
                    f"logs, goes {k} times too fast. gradacc_jax.flax has a TrainState "
                    "and an Optimizer whose step counts optimizer steps",
                )


def _averages(trial: Trial, trace: Trace) -> Iterator[tuple[str, str]]:
    """Averages of parameters that move on silent micro-steps of the second window."""
    k = trial.q.num_microbatches
    params = jax.tree.leaves(trace.params[k])
    moving = {}
    for name, values in _through_time(trace.states):
        rates = [
            [r for p in params if (r := _part_of_the_way(a, b, p)) is not None]
            for a, b in zip(values[k:], values[k + 1 : 2 * k])
        ]
        if all(rates) and np.ptp([r[0] for r in rates]) <= 1e-4 * rates[0][0]:
            moving[name] = values[k + 1]
    if not moving:
        return
    # With another micro-batch an average does the same, and an accumulator does not.
    other = dict(_through_time(trial.run(reverse=True).states))
    for name, value in moving.items():
        if np.allclose(other[name][k + 1], value, rtol=1e-5, atol=0):
            yield (
                report.COUNTER,
                f"state{name} is an average of the parameters that moves on silent "
                f"micro-steps too: it forgets {k} times too fast. Put parameter_ema "
                "last in the chain that accumulate() wraps",
            )
            return


def _part_of_the_way(a: np.ndarray, b: np.ndarray, p: np.ndarray) -> float | None:
    """What part of the way from a to p leads to b; None if b is not on it."""
    if np.shape(a) != np.shape(p) or not jnp.issubdtype(a.dtype, jnp.floating):
        return None
    way, gone = (np.ravel(x.astype(np.float64) - a) for x in (p, b))
    size = float(way @ way)
    if size == 0 or not np.any(gone):
        return None
    part = float(way @ gone) / size
    on_it = report.largest(gone - part * way) <= 1e-5 * report.largest(gone)
    return part if on_it and 0 < part < 1 else None


def _one_key(q: Question, loop: Loop) -> dict[str, str]:
    """Whether a random loss draws the same numbers for every micro-batch."""
    if loop.key is None:
        return {}
    trial = Trial(q, loop, still=False)
    batch = trial.take([0])

    @jax.jit
    def value(key: jax.Array) -> jax.Array:
        return total(q.loss(q.params, batch, key, None)[0])

    key = loop.key(0) if callable(loop.key) else loop.key
    if float(value(key)) == float(value(jax.random.fold_in(key, 1))):
        return {}
    first = [0, q.num_microbatches]
    one, other = (trial.run(reverse).params for reverse in (False, True))
    if not trial.same([one[i] for i in first], [other[i] for i in first]):
        return {}
    return {
        report.KEY: "the loss is random, and the order of the micro-batches makes no "
        "difference: they all draw the same numbers, or none. Fold the number of the "
        "micro-step into the key"
    }


def _through_time(states: list[PyTree]) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Each array of the state, by its path."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(states[0])]
    for path, values in zip(paths, zip(*map(jax.tree.leaves, states))):
        yield jax.tree_util.keystr(path), list(values)


def _alike(a: PyTree, b: PyTree) -> bool:
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
    )
