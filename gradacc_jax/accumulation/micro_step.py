"""What one ``update`` does, in parts: the addition, and the inner optimizer or a rest.

Each ``update`` adds one micro-batch's gradients to the open window (``window.py``) and
returns zero updates; the call that closes the window runs the inner optimizer. What a
silent micro-step costs is decided by where things stand in the compiled program:

- the addition stands *outside* the conditional, so that XLA adds in place;
- the inner state passes *through* the conditional untouched, so that it is not copied;
- the sum is never reset: the next window's first addition overwrites it.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradacc_jax import precision
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

    @property
    def is_single(self) -> bool:
        """Whether every window is one micro-batch, which needs no accumulator."""
        return isinstance(self.k, int) and self.k == 1

    @property
    def is_plain_mean(self) -> bool:
        return self.use_grad_mean and not self.terms_are_sums

    # The mean of a single gradient is that gradient, to the bit.
    @property
    def weighted(self) -> bool:
        return not self.terms_are_sums and not (self.is_single and self.is_plain_mean)

    @property
    def divides(self) -> bool:
        return self.use_grad_mean and not (self.is_single and self.is_plain_mean)

    @property
    def always_runs(self) -> bool:
        """Whether a window without weights can never be empty."""
        return self.skip_nonfinite is None and self.should_skip_update_fn is None

    def init(self, params: PyTree) -> AccumulateState:
        empty = windows.empty(params, self.accumulator_dtype)
        skip_state: Any = ()
        if self.should_skip_update_fn is not None:
            no_updates = optax.tree.zeros_like(params)
            _, skip_state = self.should_skip_update_fn(no_updates, zero_count(), params)
            skip_state = precision.owned(skip_state, params)
        scalar = jax.ShapeDtypeStruct((), precision.scalar_dtype())
        return AccumulateState(
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
        )

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
            total = state.acc_grads

        def run(inner_state: Any) -> tuple[PyTree, Any]:
            gradient = windows.close(
                Window(total, state.acc_weight),
                grads,
                dtype=self.inner_dtype,
                mean=self.divides,
            )
            updates, new_inner_state = self.inner.update(
                gradient, inner_state, params, **self._averaged(state, extra_args)
            )
            checks.check_inner_state(inner_state, new_inner_state)
            updates = jax.tree.map(
                silence.still, grads, updates, is_leaf=precision.is_masked
            )
            return updates, precision.cast_like(new_inner_state, inner_state)

        def rest(inner_state: Any) -> tuple[PyTree, Any]:
            updates, _ = jax.eval_shape(run, inner_state)
            # Without a conditional an addition follows, which XLA drops where it sees
            # the zeros.
            count = None if isinstance(runs, bool) else state.mini_step
            return silence.zero_updates(updates, count), inner_state

        if isinstance(runs, bool):
            updates, inner_state = (run if runs else rest)(state.inner_state)
        else:
            updates, inner_state = jax.lax.cond(runs, run, rest, state.inner_state)
        state = state._replace(inner_state=inner_state)
        return updates, state if part == "add" else _turn(state)

    def runs(self, closes: Any, acc_weight: jax.Array, weight: Any) -> Any:
        """Whether the inner optimizer runs: a bool where that is static.

        A window without weights that skips nothing is never empty.
        """
        if closes is False or (self.always_runs and weight is None):
            return closes
        return closes & (acc_weight > 0)

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
            dropped = ~precision.all_finite(grads)
        scalar = None if weight is None else jnp.asarray(weight)
        if dropped is not None:
            kept = jnp.ones((), jnp.int32) if scalar is None else scalar
            scalar = jnp.where(dropped, jnp.zeros_like(kept), kept)
            skips = _counted(skips, dropped)

        held: Window = (
            windows.empty(grads, self.accumulator_dtype)
            if self.is_single
            else Window(state.acc_grads, state.acc_weight)
        )
        held = windows.add(held, grads, scalar, first=first, weighted=self.weighted)
        state = state._replace(skip_state=skip_state, skips=skips)
        return self.settle(state, held, scalar, emit, extra_args, counts)

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
        share = None if self.is_single and not self.terms_are_sums else weight
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
        if self.skip_nonfinite == "window":
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

    def _averaged(
        self, state: AccumulateState, extra_args: dict[str, Any]
    ) -> dict[str, Any]:
        """The extra arguments that the inner optimizer gets."""
        means = {}
        for name, sums in state.acc_extra_args.items():
            if name in extra_args:
                mean = windows.average(sums)
                if precision.has_gradient(extra_args[name]):
                    mean = mean.astype(precision.dtype_of(extra_args[name]))
                means[name] = mean
        return {**extra_args, **means}

    def checked(
        self, grads: PyTree, state: Any, weight: Any, emit: Any
    ) -> AccumulateState:
        """The state in the dtypes of these options, if all fits: see :meth:`_check`.

        A sum that was saved in a narrower dtype is widened.
        """
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
        check_state(state)
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
            checks.check_gradients(grads, state.acc_grads, self.accumulator_dtype)
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
