"""A micro-step driven through windows, and the plain optimizer beside it."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradacc_jax import precision, splitting
from gradacc_jax.equivalence import conditions, report
from gradacc_jax.equivalence.experiments import Question, taken, total

PyTree = Any
MicroStep = Callable[..., tuple[Any, ...]]


class Loop(NamedTuple):
    """What is asked: a micro-step, where it starts, and the optimizer that is meant."""

    micro_step: MicroStep
    init: Callable[[PyTree], PyTree]
    optimizer: optax.GradientTransformation
    closing_step: MicroStep | None
    key: jax.Array | Callable[[int], jax.Array] | None


class Span(NamedTuple):
    """A window: the numbers of its micro-batches, and whether it is closed early."""

    micro_batches: list[int]
    partial: bool


class Trace(NamedTuple):
    """Parameters and state before the first micro-step and after each, on the host."""

    params: list[PyTree]
    states: list[PyTree]


class Seen(NamedTuple):
    """The gradients that a re-enactment may use.

    Attributes:
      whole: the gradient of all the window's examples.
      micros: a function that gives the gradient of each micro-batch.
      earlier: ``whole`` of the windows before, each with its number of micro-batches.
      size: how many micro-batches the window has.
      partial: whether it is closed early.
    """

    whole: PyTree
    micros: Callable[[], list[PyTree]]
    earlier: list[tuple[int, PyTree]]
    size: int
    partial: bool


def _right(seen: Seen) -> PyTree | None:
    return seen.whole


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A fault that the plain optimizer can be run with. The default is none.

    Attributes:
      cause: its name.
      text: what was seen and what to do.
      gradient: what it makes of a window's gradient; None, and no step is made.
      counters: the optimizer's numbers that it sets to the number of micro-steps.
      averages: whether it gives all micro-batches the same weight. Whether that is a
        fault, the loss decides.
    """

    cause: str = ""
    text: str = ""
    gradient: Callable[[Seen], PyTree | None] = _right
    counters: tuple[str, ...] = ()
    averages: bool = False


class Trial:
    """The micro-step and the plain optimizer, in one choice of dtypes."""

    def __init__(self, q: Question, loop: Loop, *, still: bool = True):
        q.terms()  # raises for a loss that is none
        self.q = q
        self.loop = loop
        self.still = still
        self.axes = splitting.batch_axes(q.batch, q.batch_axis)
        size = splitting.num_examples(q.batch, self.axes)
        k = q.num_microbatches
        if size % k:
            raise ValueError(
                f"num_microbatches={k} does not divide batch_size={size}, and a micro-"
                f"step takes micro-batches of one size; leave out {size % k} examples"
            )
        self.micro_batches = [np.arange(size)[i::k] for i in range(k)]
        window = Span(list(range(k)), False)
        self.spans = [window, window]
        if loop.closing_step is not None:
            self.spans += [Span(list(range(k // 2)), True), window]
        self.ends = [
            int(n) for n in np.cumsum([len(span.micro_batches) for span in self.spans])
        ]
        self.update = jax.jit(optax.with_extra_args_support(loop.optimizer).update)
        differentiate = jax.value_and_grad(self.loss)
        self.differentiate = jax.jit(differentiate)
        self.narrowest, self.draws = conditions.look(differentiate, q.params, q.batch)
        self.accepted = conditions.tolerance(self.narrowest)

    def loss(self, params: PyTree, batch: PyTree) -> jax.Array:
        return total(self.q.loss(params, batch, self.q.still(), None)[0])

    def take(self, micro_batches: Sequence[int]) -> PyTree:
        examples = np.concatenate([self.micro_batches[i] for i in micro_batches])
        return taken(self.q.batch, self.axes, examples)

    def start(self) -> PyTree:
        """The parameters, in buffers that may be donated."""
        return jax.tree.map(jnp.array, self.q.params)

    # --- the micro-step ---------------------------------------------------------------

    def run(self, reverse: bool = False) -> Trace:
        """Drives the micro-step through all windows, or through them in reverse."""
        params = self.start()
        state = self.loop.init(params)
        if self.still:
            state = conditions.stilled(state)
        trace = Trace([kept(params)], [kept(state)])
        for span in self.spans:
            order = span.micro_batches[::-1] if reverse else span.micro_batches
            for micro_batch in order:
                step = self.loop.micro_step
                if span.partial and micro_batch == order[-1]:
                    assert self.loop.closing_step is not None
                    step = self.loop.closing_step
                key = self._key(len(trace.params) - 1)
                out: Any = step(params, state, self.take([micro_batch]), *key)
                if not isinstance(out, tuple) or len(out) < 2:
                    raise ValueError(
                        f"micro_step returned {type(out).__name__}, expected a tuple "
                        "(params, state, ...)"
                    )
                params, state = out[:2]
                trace.params.append(kept(params))
                trace.states.append(kept(state))
        return trace

    def _key(self, number: int) -> list[jax.Array]:
        key = self.loop.key
        if key is None:
            return []
        if self.still:
            return [conditions.still_key()]
        return [key(number) if callable(key) else key]

    def accept(self, state: PyTree) -> None:
        """Allows for the rounding of sums that the state keeps in float32 by choice.

        Not for narrower ones: those lose gradients, which is a fault.
        """
        shapes = {np.shape(p) for p in jax.tree.leaves(self.q.params)}
        sums = [x for x in jax.tree.leaves(state) if x.shape in shapes]
        if self.narrowest == np.float64 and any(x.dtype == np.float32 for x in sums):
            self.narrowest = np.dtype(np.float32)
            self.accepted = conditions.tolerance(self.narrowest)

    # --- the optimizer ----------------------------------------------------------------

    def enact(self, suspect: Suspect) -> list[PyTree]:
        """Where the optimizer leads with a fault, at the ends of windows."""
        params = self.start()
        state = self.loop.optimizer.init(params)
        reached = [kept(params)]
        earlier: list[tuple[int, PyTree]] = []
        for span, end in zip(self.spans, self.ends, strict=True):
            value, whole = self.differentiate(params, self.take(span.micro_batches))

            def micros(params: PyTree = params, span: Span = span) -> list[PyTree]:
                return [self.micro(params, i) for i in span.micro_batches]

            count = len(span.micro_batches)
            seen = Seen(whole, micros, earlier, count, span.partial)
            grads = suspect.gradient(seen)
            earlier = [*earlier, (count, whole)]
            if grads is not None:
                state = _with_counters(state, suspect.counters, end - 1)
                updates, state = self.update(grads, state, params, value=value)
                params = optax.apply_updates(params, updates)
            reached.append(kept(params))
        return reached

    def micro(self, params: PyTree, micro_batch: int) -> PyTree:
        return self.differentiate(params, self.take([micro_batch]))[1]

    def counters(self) -> list[str]:
        """The numbers in the optimizer's state that count its steps."""
        params = self.start()
        state = self.loop.optimizer.init(params)
        value, grads = self.differentiate(params, self.q.batch)
        _, after = self.update(grads, state, params, value=value)
        return [
            jax.tree_util.keystr(path)
            for (path, x), y in zip(
                jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(after)
            )
            if is_count(x) and int(y) == int(x) + 1
        ]

    # --- the two compared -------------------------------------------------------------

    def far(self, found: list[PyTree], expected: list[PyTree]) -> np.ndarray:
        """The differences relative to what a window moves, of shape (windows, leaves).

        Args:
          found: parameters, before the first window and after each.
          expected: the same.
        """
        rows = []
        for start, a, b in zip(expected, found[1:], expected[1:]):
            moved = jax.tree.map(np.subtract, b, start)
            scale = report.largest(moved)
            row = []
            for s, x, y in zip(*map(jax.tree.leaves, (start, a, moved)), strict=True):
                rounding = 4 * float(jnp.finfo(s.dtype).eps) * report.largest(s)
                row.append(
                    report.difference(x - s, y, scale, self.accepted.floor, rounding)
                )
            rows.append(row)
        return np.array(rows)

    def same(self, found: list[PyTree], expected: list[PyTree]) -> bool:
        return bool(np.max(self.far(found, expected)) <= self.accepted.relative)

    def at_ends(self, trace: Trace) -> list[PyTree]:
        """The parameters before the first window and after each."""
        return [trace.params[i] for i in (0, *self.ends)]


def kept(tree: PyTree) -> PyTree:
    """A copy on the host, which outlives a donation; keys are left out."""
    return jax.tree.map(
        lambda x: np.zeros(0) if conditions.is_key(x) else np.array(x), tree
    )


def is_count(x: Any) -> bool:
    integer = jnp.issubdtype(precision.dtype_of(x), jnp.integer)
    return bool(integer and np.shape(x) == ())


def _with_counters(state: PyTree, names: tuple[str, ...], number: int) -> PyTree:
    def leaf(path: Any, x: Any) -> Any:
        counts = jax.tree_util.keystr(path) in names
        return jnp.asarray(number, x.dtype) if counts else x

    return jax.tree_util.tree_map_with_path(leaf, state)
