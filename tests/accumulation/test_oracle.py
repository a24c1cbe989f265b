"""Random runs against a plain loop in float64 that does what the contract says."""

import functools
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradacc_jax import accumulate, accumulation_metrics
from tests.accumulation.driving import WAYS, drive, jitted

EPS = np.finfo(np.float32).eps
LENGTH = 12
FLUSHED = 1e-30  # XLA takes numbers below 1e-38 for 0, and divides by weights > 1e-3


class MicroStep(NamedTuple):
    """What one micro-step brings."""

    gradient: float
    weight: float
    emit: bool
    value: float


class Oracle:
    """The state machine, with SGD of rate 1, and how far float32 may be from it."""

    def __init__(self, ks, mode, mean, reduction):
        self.ks, self.mode, self.mean, self.reduction = ks, mode, mean, reduction
        self.params, self.error = 0.0, FLUSHED
        self.mini_step = self.gradient_step = 0
        self.consecutive = self.total = 0
        self.window: list[Any] = []

    def step(self, micro):
        bad = not np.isfinite(micro.gradient)
        weight, counts = micro.weight, True
        if self.mode in ("micro_batch", "function"):
            self.count_skip(bad)
            weight = 0.0 if bad else weight
            counts = not (bad and self.mode == "function")
        if weight:
            self.window.append((micro.gradient, weight, micro.value))
        self.mini_step += counts
        k = self.ks[min(self.gradient_step, len(self.ks) - 1)]
        self.emitted = micro.emit or (counts and self.mini_step >= k)
        # What the state holds, also after it was emitted.
        self.weight = sum(w for _, w, _ in self.window)
        self.value = self.average([v for _, _, v in self.window])
        if self.emitted:
            self.close()

    def close(self):
        gradients = [g for g, _, _ in self.window]
        given_up = self.mode == "window" and not np.all(np.isfinite(gradients))
        if self.mode == "window":
            self.count_skip(given_up)
        if given_up:
            self.weight, self.value = 0.0, None
        elif self.window:
            update = self.average(gradients)
            size = self.average(np.abs(gradients))
            if not self.mean:
                update, size = update * self.weight, size * self.weight
            self.params -= update
            # Each of n products and n additions rounds, and the sum of weights does so
            # too; then there are a reciprocal, a product and the parameter's addition.
            rounds = 3 * len(self.window) + 3
            self.error += EPS * (rounds * size + abs(self.params))
        self.window = []
        self.mini_step, self.gradient_step = 0, self.gradient_step + 1

    def average(self, terms):
        weights = [w for _, w, _ in self.window]
        if not weights:
            return None
        by = np.ones(len(weights)) if self.reduction == "sum" else weights
        return np.dot(by, terms) / np.sum(weights)

    def count_skip(self, skipped):
        self.consecutive = self.consecutive + 1 if skipped else 0
        self.total += skipped


def transformation(ks, mode, mean, reduction):
    def skip(grads, gradient_step, params):
        return ~jnp.isfinite(grads), ()

    return accumulate(
        optax.sgd(1.0),
        lambda step: ks[jnp.minimum(step, ks.shape[0] - 1)],
        use_grad_mean=mean,
        should_skip_update_fn=skip if mode == "function" else None,
        skip_nonfinite=None if mode == "function" else mode,
        loss_reduction=reduction,
    )


@functools.cache
def compiled_step(way, *options):
    """One compiled step for all examples of these options."""

    def step(ks, params, state, grads, **extra):
        tx = transformation(ks, *options)
        return jitted(tx, way)(params, state, grads, **extra)

    return jax.jit(step)


# Weights have few bits, so that float32 holds them: counts, fractions, and often 0.
weights = st.one_of(
    st.just(0.0),
    st.integers(1, 2**20).map(float),
    st.integers(1, 2**12).map(lambda n: n / 2**10),
)
numbers = st.floats(-100, 100, width=32).map(lambda x: float(np.float32(x)))
micro_steps = st.builds(
    MicroStep,
    gradient=numbers,
    weight=weights,
    emit=st.sampled_from([False, False, False, True]),
    value=numbers,
)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", [None, "micro_batch", "window", "function"])
@settings(max_examples=15)
@given(data=st.data())
def test_any_run_is_that_of_the_oracle(mode, reduction, data):
    ks = data.draw(st.lists(st.integers(1, 5), min_size=3, max_size=3), label="k")
    mean = data.draw(st.booleans(), label="use_grad_mean")
    way = data.draw(st.sampled_from(WAYS), label="way")
    run = data.draw(st.lists(micro_steps, min_size=LENGTH, max_size=LENGTH))
    if mode is not None:
        places = data.draw(st.sets(st.integers(0, LENGTH - 1), max_size=4), label="bad")
        for i in places:
            kind = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
            run[i] = run[i]._replace(gradient=float(kind))

    step = compiled_step(way, mode, mean, reduction)
    oracle = Oracle(ks, mode, mean, reduction)
    array = jnp.array(ks, jnp.int32)
    states = drive(
        transformation(array, mode, mean, reduction),
        [micro.gradient for micro in run],
        step=lambda *args, **extra: step(array, *args, **extra),
        weight=[np.float32(micro.weight) for micro in run],
        value=[np.float32(micro.value) for micro in run],
        traced_emit=[np.bool_(micro.emit) for micro in run],
    )
    for micro, (params, state) in zip(run, states):
        oracle.step(micro)
        assert int(state.mini_step) == oracle.mini_step
        assert int(state.gradient_step) == oracle.gradient_step
        assert bool(state.emitted) == oracle.emitted
        if mode is not None:
            skips = (int(state.skips.consecutive), int(state.skips.total))
            assert skips == (oracle.consecutive, oracle.total)
        # At most 12 additions of numbers that are not negative.
        np.testing.assert_allclose(state.acc_weight, oracle.weight, rtol=LENGTH * EPS)
        assert abs(float(params) - oracle.params) <= oracle.error
        if oracle.window and not oracle.emitted:
            values = oracle.average(np.abs([v for _, _, v in oracle.window]))
            found = float(accumulation_metrics(state)["value"])
            bound = (3 * LENGTH + 3) * EPS * values + FLUSHED
            assert abs(found - oracle.value) <= bound
