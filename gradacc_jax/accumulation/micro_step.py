"""What one ``update`` does, in parts: the addition, and the inner optimizer or a rest.

Each ``update`` adds one micro-batch's gradients to the open window (``window.py``) and
returns zero updates; the call that closes the window runs the inner optimizer. What a
silent micro-step costs is decided by where things stand in the compiled program:

- the addition stands *outside* the conditional, so that XLA adds in place;
- the inner state passes *through* the conditional untouched, so that it is not copied;
- the sum is never reset: the next window's first addition overwrites it.

With ``axis_name`` all of this happens on every device with its own sums, and the one
reduction over devices (``reduction.py``) stands where the inner optimizer runs. The
sums, which differ from device to device, have a leading axis of devices in the state:
of length 1 inside ``jax.shard_map``, of length D outside. Everything else in the state
is the same everywhere; no counter depends on data, or devices would wait for each
other for ever.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradacc_jax import precision, reduction
from gradacc_jax import window as windows
from gradacc_jax.accumulation import checks, silence
from gradacc_jax.accumulation.state import (
    AccumulateState,
    SkipCounts,
    check_state,
    unused,
    zero_count,
)
from gradacc_jax.window import Window

PyTree = Any
# The inner state, the norm of its gradient and the counts of skips, where used.
Kept = tuple[Any, Any, Any]


@jax.tree_util.register_static
class Part:
    """Which part of an ``update`` to do; see the module's docstring.

    As a static pytree node it passes through wrappers that trace, and ``reached`` tells
    whether it arrived: a wrapper that drops extra arguments must not go unnoticed.
    """

    def __init__(self, name: str):
        self.name = name
        self.reached = False


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulation:
    """The options of :func:`accumulate`, and its ``init`` and ``update``."""

    inner: optax.GradientTransformationExtraArgs
    k: Any
    use_grad_mean: bool
    should_skip_update_fn: Callable[..., tuple[Any, Any]] | None
    accumulator_dtype: np.dtype | None
    terms_are_sums: bool
    skip_nonfinite: str | None
    average_extra_args: tuple[str, ...]
    inner_dtype: np.dtype | None
    axes: reduction.Axes
    shard_accumulators: bool

    @property
    def is_single(self) -> bool:
        """Whether every window is one micro-step, which needs no accumulator."""
        return isinstance(self.k, int) and self.k == 1

    @property
    def has_device_axis(self) -> bool:
        """Whether devices have sums of their own that each sees for itself."""
        return bool(self.axes) and not reduction.is_explicit(self.axes)

    @property
    def is_alone(self) -> bool:
        """Whether every window is one micro-batch, whose mean is itself, to the bit."""
        return self.is_single and not self.axes

    @property
    def is_plain_mean(self) -> bool:
        return self.use_grad_mean and not self.terms_are_sums

    @property
    def weighted(self) -> bool:
        return not self.terms_are_sums and not (self.is_alone and self.is_plain_mean)

    @property
    def divides(self) -> bool:
        return self.use_grad_mean and not (self.is_alone and self.is_plain_mean)

    @property
    def always_runs(self) -> bool:
        """Whether a window without weights can never be empty."""
        return self.skip_nonfinite is None and self.should_skip_update_fn is None

    def init(self, params: PyTree) -> AccumulateState:
        empty = windows.empty(params, self.accumulator_dtype)
        if self.shard_accumulators:
            parts = reduction.num_devices(self.axes)
            total = jax.tree.map(
                lambda x: jnp.zeros(-(-x.size // parts), x.dtype), empty.total
            )
            empty = empty._replace(total=total)
        elif reduction.is_explicit(self.axes):
            like = _where_summed(empty.total, params)
            total = reduction.empty_sums(empty.total, like, self.axes)
            empty = empty._replace(total=total)
        skip_state: Any = ()
        if self.should_skip_update_fn is not None:
            no_updates = optax.tree.zeros_like(params)
            _, skip_state = self.should_skip_update_fn(no_updates, zero_count(), params)
            skip_state = precision.owned(skip_state, params)
        scalar = jax.ShapeDtypeStruct((), precision.scalar_dtype())
        state = AccumulateState(
            mini_step=zero_count(),
            gradient_step=zero_count(),
            inner_state=precision.owned(self.inner.init(params), params),
            acc_grads=() if self.is_single else empty.total,
            acc_weight=empty.weight,
            acc_extra_args={
                name: windows.empty(scalar, None) for name in self.average_extra_args
            },
            emitted=jnp.zeros((), bool),
            skip_state=skip_state,
            skips=() if self.always_runs else SkipCounts(zero_count(), zero_count()),
            grad_norm=jnp.zeros((), jnp.float32) if self.axes else (),
        )
        return self.stored(state._replace(acc_grads=self.from_device(state.acc_grads)))

    def local(self, state: AccumulateState) -> AccumulateState:
        """The state with scalar sums without an axis of devices.

        The gradients' sums keep theirs: of another shape, they could not be added to
        in place.
        """
        if not self.has_device_axis:
            return state
        checks.check_device_axis(state, self.axes)
        return _at_scalars(state, lambda x: x[0])

    def stored(self, state: AccumulateState) -> AccumulateState:
        """The state as it is handed out, with an axis of devices if there are some."""
        if not self.has_device_axis:
            return state
        reduction.num_devices(self.axes)  # or an error
        state = _at_scalars(state, lambda x: x[None])
        sums = state.acc_grads, state.acc_weight, state.acc_extra_args
        acc_grads, acc_weight, acc_extra_args = reduction.vary(sums, self.axes)
        return state._replace(
            acc_grads=acc_grads, acc_weight=acc_weight, acc_extra_args=acc_extra_args
        )

    def opened(self, state: AccumulateState) -> PyTree:
        """The sums for an addition in place, in the shapes of the gradients.

        Zeros where the window opens, by selection. Fused with the axis of devices taken
        away, that selection would be written elsewhere, so it is a loop then, of one
        turn or none.
        """
        first = state.mini_step == 0
        if not self.has_device_axis:
            return windows.opened(state.acc_grads, first=first)
        total = jax.tree.map(lambda x: x[0], state.acc_grads)

        def clear(carry: tuple[PyTree, jax.Array]) -> tuple[PyTree, jax.Array]:
            zeros = jax.tree.map(jnp.zeros_like, carry[0])
            return reduction.vary_like(zeros, carry[0]), jnp.zeros((), bool)

        total, _ = jax.lax.while_loop(lambda carry: carry[1], clear, (total, first))
        return total

    def from_device(self, total: PyTree) -> PyTree:
        """Arrays of one device's gradients with an axis of devices, if there is one."""
        return jax.tree.map(lambda x: x[None], total) if self.has_device_axis else total

    def update(
        self,
        grads: PyTree,
        state: AccumulateState,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        emit: Any = None,
        accumulation_part: Part | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, AccumulateState]:
        part = "all" if accumulation_part is None else accumulation_part.name
        if accumulation_part is not None:
            accumulation_part.reached = True
        runs: Any = part == "run"
        if part in ("all", "add"):
            state, closes, total = self._add(
                grads, state, params, weight, emit, extra_args
            )
            if part == "all":
                runs = self.runs(closes, state.acc_weight, weight)
        else:
            state = self.local(state)
            total = state.acc_grads

        def step(
            held: Window, extras: dict[str, Window], kept: Kept
        ) -> tuple[PyTree, Kept]:
            gradient = windows.close(
                held, grads, dtype=self.inner_dtype, mean=self.divides
            )
            inner_state, norm, skips = kept
            if self.axes:
                norm = reduction.global_norm(gradient).astype(norm.dtype)
            updates, new_inner_state = self.inner.update(
                gradient, inner_state, params, **_averaged(extras, extra_args)
            )
            checks.check_inner_state(inner_state, new_inner_state)
            updates = jax.tree.map(
                silence.still, grads, updates, is_leaf=precision.is_masked
            )
            new_inner_state = precision.cast_like(new_inner_state, inner_state)
            return updates, (new_inner_state, norm, skips)

        def run(kept: Kept) -> tuple[PyTree, Kept]:
            held = Window(total, state.acc_weight)
            if not self.axes:
                return step(held, state.acc_extra_args, kept)
            held, extras = self._all_reduced(held, state.acc_extra_args, grads, params)
            if self.skip_nonfinite == "window":
                # Looked at here: finite sums of all devices may overflow together.
                finite = precision.all_finite(held.total)
                held = held._replace(weight=jnp.where(finite, held.weight, 0))
                kept = (*kept[:2], _counted(kept[2], ~finite))
            go = functools.partial(step, held, extras)
            if self.never_empty(weight):
                return go(kept)
            return jax.lax.cond(held.weight > 0, go, rest, kept)

        def rest(kept: Kept) -> tuple[PyTree, Kept]:
            def instead() -> tuple[PyTree, Kept]:
                held, extras = Window(total, state.acc_weight), state.acc_extra_args
                if self.axes:
                    held, extras = self._all_reduced(held, extras, grads, params)
                return step(held, extras, kept)

            updates, _ = jax.eval_shape(instead)
            # Without a conditional an addition follows, which XLA drops where it sees
            # the zeros.
            count = None if isinstance(runs, bool) else state.mini_step
            inner_state, norm, skips = kept
            norm = jnp.zeros_like(norm) if self.axes else norm
            zeros = reduction.vary_like(silence.zero_updates(updates, count), updates)
            return zeros, (inner_state, norm, skips)

        kept = state.inner_state, state.grad_norm, state.skips if self.axes else ()
        if isinstance(runs, bool):
            updates, kept = (run if runs else rest)(kept)
        else:
            updates, kept = jax.lax.cond(runs, run, rest, kept)
        state = state._replace(inner_state=kept[0], grad_norm=kept[1])
        state = self.stored(state._replace(skips=kept[2]) if self.axes else state)
        return updates, state if part == "add" else _turn(state)

    def _all_reduced(
        self,
        held: Window,
        extras: dict[str, Window],
        grads: PyTree,
        params: PyTree | None,
    ) -> tuple[Window, dict[str, Window]]:
        """The sums of all devices: the one reduction of a window."""
        if not self.shard_accumulators:
            held, extras = reduction.all_reduce((held, extras), self.axes)
            if self.has_device_axis:
                held = held._replace(total=jax.tree.map(lambda x: x[0], held.total))
            if params is not None:
                like = _where_summed(held.total, params)
                held = held._replace(total=reduction.back(held.total, like))
            return held, extras
        # The sums are of all devices already; each has a part of them.
        held = held._replace(total=jax.tree.map(lambda x: x[0], held.total))
        like = _where_summed(held.total, grads)
        weight, extras = reduction.all_reduce((held.weight, extras), self.axes)
        return Window(reduction.all_gather(held.total, like, self.axes), weight), extras

    def runs(self, closes: Any, acc_weight: jax.Array, weight: Any) -> Any:
        """Whether the inner optimizer runs: a bool where that is static.

        On many devices that is known after the reduction only; the answer is then
        whether there is to be one.
        """
        if closes is False or self.axes or self.never_empty(weight):
            return closes
        return closes & (acc_weight > 0)

    def never_empty(self, weight: Any) -> bool:
        """Whether a window that is closed has a loss term for sure."""
        return self.always_runs and weight is None

    def _add(
        self,
        grads: PyTree,
        state: AccumulateState,
        params: PyTree | None,
        weight: Any,
        emit: Any,
        extra_args: dict[str, Any],
    ) -> tuple[AccumulateState, Any, PyTree]:
        """The micro-batch added; whether that closes its window; the window's sum.

        The counters of the returned state are those before the window is turned over
        (:func:`_turn`), and ``emitted`` says that it is to be.
        """
        state = self.checked(grads, state, weight, emit)
        first: Any = True if self.is_single else state.mini_step == 0

        counts: Any = True
        dropped = None
        skip_state, skips = state.skip_state, state.skips
        if self.should_skip_update_fn is not None:
            dropped, skip_state = self.should_skip_update_fn(
                grads, state.gradient_step, params
            )
            checks.check_skip(dropped)
            skip_state = precision.cast_like(skip_state, state.skip_state)
            dropped = jnp.asarray(dropped)
            counts = ~dropped
        elif self.skip_nonfinite == "micro_batch":
            dropped = self._anywhere(~precision.all_finite(grads))
        scalar = None if weight is None else jnp.asarray(weight)
        if dropped is not None:
            kept = jnp.ones((), jnp.int32) if scalar is None else scalar
            scalar = jnp.where(dropped, jnp.zeros_like(kept), kept)
            skips = _counted(skips, dropped)

        held: Window = (
            windows.empty(self.from_device(grads), self.accumulator_dtype)
            if self.is_single
            else Window(state.acc_grads, state.acc_weight)
        )
        held = self._with(held, grads, scalar, first)
        state = state._replace(skip_state=skip_state, skips=skips)
        return self.settle(state, held, scalar, emit, extra_args, counts)

    def _with(
        self, held: Window, grads: PyTree, weight: jax.Array | None, first: Any
    ) -> Window:
        """The window with a micro-batch's gradients in it."""
        if not self.shard_accumulators:
            return windows.add(
                held,
                self.from_device(grads),
                weight,
                first=first,
                weighted=self.weighted,
            )
        alone = windows.add(
            windows.empty(grads, self.accumulator_dtype),
            grads,
            weight,
            first=True,
            weighted=self.weighted,
        )
        parts = self.from_device(reduction.reduce_scatter(alone.total, self.axes))
        if self.is_single:
            return Window(parts, alone.weight)
        return Window(
            windows.add(held, parts, None, first=first).total,
            windows.weighed(held.weight, weight, first=first),
        )

    def _anywhere(self, holds: jax.Array) -> jax.Array:
        """Whether something holds on any device: one decision for all of them."""
        if not self.axes:
            return holds
        return reduction.all_reduce(holds.astype(jnp.int32), self.axes) > 0

    def settle(
        self,
        state: AccumulateState,
        held: Window,
        weight: jax.Array | None,
        emit: Any,
        extra_args: dict[str, Any],
        counts: Any = True,
    ) -> tuple[AccumulateState, Any, PyTree]:
        """The state of a window that holds the micro-batch already.

        Args:
          state: the state before the micro-step.
          held: its window with the micro-batch added.
          weight: the micro-batch's weight, None for 1.
          emit: see :func:`accumulate`.
          extra_args: the micro-step's extra arguments.
          counts: whether the micro-step counts towards k.

        Returns:
          As :meth:`_add`.
        """
        first: Any = True if self.is_single else state.mini_step == 0
        # The mean of one value is that value, to the bit.
        share = None if self.is_alone and not self.terms_are_sums else weight
        extras = {
            name: windows.add(
                sums,
                checks.scalar_argument(name, extra_args[name]),
                share,
                first=first,
                weighted=not self.terms_are_sums,
            )
            if name in extra_args
            else windows.carried(sums, first=first)
            for name, sums in state.acc_extra_args.items()
        }

        mini_step = state.mini_step + jnp.asarray(counts, jnp.int32)
        closes = self._closes(mini_step, state.gradient_step, counts, emit)
        if self.skip_nonfinite == "window" and not self.axes:
            # Looked at where the window closes only: a silent micro-step reads nothing.
            finite = _if(closes, lambda: precision.all_finite(held.total))
            held = held._replace(weight=jnp.where(finite, held.weight, 0))
            state = state._replace(skips=_counted(state.skips, ~finite, closes))
        added = state._replace(
            mini_step=mini_step,
            acc_grads=() if self.is_single else held.total,
            acc_weight=held.weight,
            acc_extra_args=extras,
            emitted=jnp.asarray(closes),
        )
        return added, closes, held.total

    def _closes(
        self, mini_step: jax.Array, gradient_step: jax.Array, counts: Any, emit: Any
    ) -> Any:
        """Whether the window closes at this micro-step: a bool where that is static."""
        if isinstance(emit, bool):
            return emit
        if self.is_single:
            full: Any = counts
        else:
            k = self.k
            if callable(k):
                k = k(gradient_step)
                checks.check_traced_k(k, "every_k_schedule(gradient_step)")
            full = (mini_step >= jnp.asarray(k, mini_step.dtype)) & counts
        return full if emit is None else full | jnp.asarray(emit)

    def checked(
        self, grads: PyTree, state: Any, weight: Any, emit: Any
    ) -> AccumulateState:
        """The state in the dtypes of these options, if all fits: see :meth:`_check`.

        It comes without the axis of devices (:meth:`local`). A sum that was saved in a
        narrower dtype is widened.
        """
        check_state(state)
        state = self.local(state)
        self._check(grads, state, weight, emit)
        if self.is_single or self.accumulator_dtype is None:
            return state
        widened = jax.tree.map(
            lambda x: x.astype(
                precision.promote_types(self.accumulator_dtype, x.dtype)
            ),
            state.acc_grads,
        )
        return state._replace(acc_grads=widened)

    def _check(
        self, grads: PyTree, state: AccumulateState, weight: Any, emit: Any
    ) -> None:
        if self.axes:
            checks.check_on_devices(grads, emit, self.axes)
            if reduction.is_explicit(self.axes):
                checks.check_unreduced_options(
                    self.skip_nonfinite, self.shard_accumulators
                )
        if self.is_single:
            if emit is False:
                raise ValueError(
                    "emit=False needs an accumulator, and every_k_schedule=1 has none; "
                    "choose every_k_schedule >= 2"
                )
            if not unused(state.acc_grads):
                raise ValueError(
                    "state.acc_grads holds sums, and every_k_schedule=1 keeps none; "
                    "make the state by tx.init(params) of this transformation"
                )
        elif unused(state.acc_grads) and jax.tree.leaves(grads):
            raise ValueError(
                "state.acc_grads=() comes from every_k_schedule=1; make the state by "
                "tx.init(params) of this transformation"
            )
        else:
            parts = reduction.num_devices(self.axes) if self.shard_accumulators else 0
            sums = state.acc_grads
            if self.has_device_axis:
                sums = jax.eval_shape(lambda x: jax.tree.map(lambda y: y[0], x), sums)
            checks.check_gradients(grads, sums, self.accumulator_dtype, parts)
        if set(state.acc_extra_args) != set(self.average_extra_args):
            raise ValueError(
                f"average_extra_args={self.average_extra_args} but the state holds "
                f"averages of {tuple(state.acc_extra_args)}; make the state by "
                "tx.init(params) of this transformation"
            )
        checks.check_weight(weight)
        if not isinstance(emit, bool) and emit is not None:
            is_bool = jnp.issubdtype(jnp.result_type(emit), jnp.bool_)
            if jnp.shape(emit) != () or not is_bool:
                raise ValueError(
                    f"emit={emit!r} is not a bool scalar; pass None, a bool, or a "
                    "boolean array of shape ()"
                )


def _where_summed(total: PyTree, tree: PyTree) -> PyTree:
    """``tree`` where there are sums, and their placeholders elsewhere."""
    return jax.tree.map(
        lambda t, x: t if precision.is_masked(t) else x,
        total,
        tree,
        is_leaf=precision.is_masked,
    )


def _at_scalars(
    state: AccumulateState, change: Callable[[jax.Array], jax.Array]
) -> AccumulateState:
    """The state with its sums of weights and of extra arguments changed."""
    acc_weight, acc_extra_args = jax.tree.map(
        change, (state.acc_weight, state.acc_extra_args)
    )
    return state._replace(acc_weight=acc_weight, acc_extra_args=acc_extra_args)


def _averaged(extras: dict[str, Window], extra_args: dict[str, Any]) -> dict[str, Any]:
    """The extra arguments that the inner optimizer gets, averaged where asked for."""
    means = {}
    for name, sums in extras.items():
        if name in extra_args:
            mean = windows.average(sums)
            if precision.has_gradient(extra_args[name]):
                mean = mean.astype(precision.dtype_of(extra_args[name]))
            means[name] = mean
    return {**extra_args, **means}


def _turn(state: AccumulateState) -> AccumulateState:
    """Counters turned over where the window was closed."""
    closed = state.emitted
    return state._replace(
        mini_step=jnp.where(closed, 0, state.mini_step),
        gradient_step=jnp.where(
            closed, optax.safe_increment(state.gradient_step), state.gradient_step
        ),
    )


def _counted(skips: Any, skipped: jax.Array, looked: Any = True) -> SkipCounts:
    """The counts after a decision to skip or not, if there was one (``looked``)."""
    if unused(skips):  # restored: of the same options without skipping
        skips = SkipCounts(zero_count(), zero_count())
    more: Any = jax.tree.map(optax.safe_increment, skips)
    return SkipCounts(
        consecutive=jnp.where(
            looked, jnp.where(skipped, more.consecutive, 0), skips.consecutive
        ),
        total=jnp.where(looked & skipped, more.total, skips.total),
    )


def _if(predicate: Any, compute: Callable[[], jax.Array]) -> jax.Array:
    """``compute()`` where the predicate holds, else true."""
    if isinstance(predicate, bool):
        return compute() if predicate else jnp.ones((), bool)
    return jax.lax.cond(predicate, compute, lambda: jnp.ones((), bool))
