"""parameter_ema counts optimizer steps when it stands inside accumulate."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradacc_jax import accumulate, apply_gradients, parameter_ema

EPS = float(jnp.finfo(jnp.float32).eps)


def average(state):
    return optax.tree.get(state, "parameter_ema")


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_average_moves_once_per_window(k):
    tx = accumulate(optax.chain(optax.sgd(1.0), parameter_ema(0.9)), k)
    w = jnp.array([8.0, -1.0])
    state = tx.init(w)
    step = jax.jit(lambda w, s, g: apply_gradients(tx, w, s, g))
    p = e = np.array([8.0, -1.0])
    for _ in range(3):
        for i in range(k):
            assert np.asarray(average(state)) == pytest.approx(e, rel=4 * EPS)
            w, state = step(w, state, jnp.array([1.0 + i, 2.0]))
        p = p - np.array([1 + (k - 1) / 2, 2.0])
        e = 0.9 * e + 0.1 * p
    np.testing.assert_allclose(average(state), e, rtol=8 * EPS)


def test_bfloat16_parameters_are_averaged_in_float32():
    tx = accumulate(optax.chain(optax.sgd(1.0), parameter_ema(0.999)), 2)
    w = {"a": jnp.ones(3, jnp.bfloat16)}
    state = tx.init(w)
    for _ in range(4):
        w, state = apply_gradients(tx, w, state, {"a": jnp.ones(3, jnp.bfloat16)})
    assert average(state)["a"].dtype == jnp.float32
    # 1 -> 0 -> -1: after two steps 1 - 0.001 * (1 + 2) to first order.
    expected = 0.999 * (0.999 * 1 + 0.001 * 0) + 0.001 * -1
    np.testing.assert_allclose(average(state)["a"], expected, rtol=4 * EPS)


def test_the_updates_pass_through_unchanged():
    tx = parameter_ema(0.5)
    params = {"a": jnp.array(1.0)}
    updates = {"a": jnp.array(0.25)}
    new, _ = tx.update(updates, tx.init(params), params)
    chex.assert_trees_all_equal(new, updates)


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_outside_its_range_is_refused(decay):
    with pytest.raises(ValueError, match=r"decay=.*\[0, 1\)"):
        parameter_ema(decay)


def test_an_update_without_parameters_is_refused():
    tx = parameter_ema(0.5)
    w = jnp.array(1.0)
    with pytest.raises(ValueError, match="params=None"):
        tx.update(w, tx.init(w))
