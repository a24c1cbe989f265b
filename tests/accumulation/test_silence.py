"""A micro-step that does not emit: nothing moves, nothing runs, nothing is copied."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradacc_jax import accumulate, apply_gradients
from tests.accumulation.driving import (
    SGD,
    WAYS,
    assert_same_bits,
    drive,
    jitted,
)
from tests.lenient import lenient

both_ways = pytest.mark.parametrize("way", WAYS)

# Every kind of number: adding 0.0 changes the first, multiplying by a mask others.
NUMBERS = [-0.0, 0.0, 1.5, -np.inf, np.inf, np.nan, 1.2e-38, 3e38]
ODD = {
    "f32": np.float32(NUMBERS),
    "bf16": np.array(NUMBERS, jnp.bfloat16),
    "f16": np.array([-0.0, 0.0, 6e-5, np.nan], np.float16),
    "c64": np.array(
        [complex(-0.0, -0.0), complex(0.0, -0.0), 1j, np.nan], np.complex64
    ),
    "n": np.int32(2**24 + 1),
    "none": None,
}
ODD_GRADIENTS = jax.tree.map(
    lambda p: (
        np.resize(np.array([np.nan, 1, np.inf, -0.0]), p.shape).astype(p.dtype)
        if np.ndim(p)
        else np.zeros_like(p)
    ),
    ODD,
)


@pytest.mark.parametrize(
    ("skip_nonfinite", "given"),
    [
        (None, {}),
        ("micro_batch", {"traced_emit": [np.bool_(False)] * 3}),
        (None, {"weight": [np.float32(w) for w in (1, 0, 3)]}),
        ("window", {"emit": [False] * 3, "weight": [np.float32(1)] * 3}),
    ],
)
@both_ways
def test_parameters_stay_the_same_to_the_bit(way, skip_nonfinite, given):
    tx = accumulate(lenient(SGD), 4, skip_nonfinite=skip_nonfinite)
    for step in drive(tx, [ODD_GRADIENTS] * 3, params=ODD, way=way, **given):
        assert_same_bits(step.params, ODD)


def test_apply_gradients_keeps_numbers_that_are_too_small_to_be_added():
    # XLA adds with denormal numbers flushed to 0; here nothing is added.
    params = np.float32([1e-45, -1e-40])
    (step,) = drive(accumulate(SGD, 2), [params], params=params)
    assert_same_bits(step.params, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_zero_updates_are_negative_zeros(dtype):
    params = np.zeros(3, dtype)
    tx = accumulate(SGD, 2)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    zeros = np.asarray(updates)
    assert zeros.dtype == dtype
    for part in (zeros.real, zeros.imag) if dtype == "complex64" else (zeros,):
        assert np.all(part == 0)
        assert np.all(np.signbit(part))


def test_the_zero_updates_of_dropped_and_empty_windows_are_negative_too():
    tx = accumulate(SGD, 1, skip_nonfinite="micro_batch")
    updates, state = tx.update(jnp.float32(np.nan), tx.init(0.0), 0.0)
    assert state.emitted
    assert np.signbit(updates)


def noticeable():
    """An inner optimizer that would be noticed: it counts, and spoils what it sees."""
    calls = []

    def init(params):
        return {
            "count": jnp.zeros((), jnp.int32),
            "first": jax.tree.map(jnp.zeros_like, params),
        }

    def update(updates, state, params=None):
        jax.debug.callback(lambda: calls.append(1))
        state = {
            "count": state["count"] + 1,
            "first": jax.tree.map(jnp.add, state["first"], updates),
        }
        return jax.tree.map(lambda u: u / jnp.zeros_like(u), updates), state

    return calls, optax.GradientTransformation(init, update)


@both_ways
def test_the_inner_optimizer_does_not_run_and_its_state_is_not_touched(way):
    params = np.float32([1, -0.0])
    calls, inner = noticeable()
    tx = accumulate(inner, 4)
    start = tx.init(params)
    steps = drive(tx, [np.float32([0, 1])] * 4, params=params, way=way)
    jax.effects_barrier()
    assert calls == [1]
    for step in steps[:3]:
        assert_same_bits(step.params, params)
        assert_same_bits(step.state.inner_state, start.inner_state)
    assert steps[3].state.inner_state["count"] == 1
    assert not np.all(np.isfinite(steps[3].params))


@both_ways
def test_with_a_static_false_the_inner_optimizer_is_not_in_the_program(way):
    tx = accumulate(lenient(optax.adamw(0.1)), 4)
    params = jnp.ones(1000)
    args = (params, tx.init(params), params)
    silent, emitting = (
        jitted(tx, way).lower(*args, emit=emit).compile() for emit in (False, True)
    )
    assert "sqrt" not in silent.as_text()
    assert "sqrt" in emitting.as_text()
    # One addition and one choice a number (and the counters).
    assert silent.cost_analysis()["flops"] <= 2 * 1000 + 20


@pytest.mark.parametrize("where", ["bare", "chain", "partition"])
def test_apply_gradients_copies_nothing_and_needs_no_temporaries(where):
    inner = accumulate(lenient(optax.adamw(0.1)), 4)
    tx = {
        "bare": inner,
        "chain": optax.chain(optax.clip(1.0), inner, optax.scale(0.5)),
        "partition": optax.partition({0: inner, 1: SGD}, {"w": 0, "b": 0}),
    }[where]
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(4096)}
    step = jax.jit(partial(apply_gradients, tx), donate_argnums=(0, 1))
    compiled = step.lower(params, tx.init(params), params).compile()
    leaf = 4096 * 4
    copies = [
        line
        for line in compiled.as_text().splitlines()
        if " copy(" in line and ("f32[64,64]" in line or "f32[4096]" in line)
    ]
    assert copies == []
    assert compiled.memory_analysis().temp_size_in_bytes < leaf


def test_the_next_window_is_written_over_the_last_one_not_reset():
    tx = accumulate(SGD, 2)
    steps = drive(tx, [1.0, 3.0, 7.0])
    assert [float(s.state.acc_grads) for s in steps] == [1, 4, 7]
    assert [float(s.state.acc_weight) for s in steps] == [1, 2, 1]
