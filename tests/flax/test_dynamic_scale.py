"""float16 with a dynamic scale of the loss, across calls and inside one."""

from functools import partial

import chex
from flax.training import dynamic_scale
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradacc_jax import accumulate, apply_gradients
from gradacc_jax.flax import DynamicScale

EPS16 = float(jnp.finfo(jnp.float16).eps)
TINY = 2.0**-12  # its square is near the least of float16


def loss_fn(w, batch):
    """A loss in float16 whose backward pass underflows without a scale."""
    x, m = jnp.asarray(batch["x"]).astype(jnp.float16), batch["m"]
    error = (w.astype(jnp.float16) @ x.T) * jnp.float16(TINY)
    return jnp.sum(error.astype(jnp.float32) * m * TINY) / jnp.sum(m)


def count(batch):
    return jnp.sum(batch["m"])


def batch_of(n):
    rng = np.random.default_rng(0)
    m = (np.arange(n) % 3 > 0).astype(np.float32)
    return {"x": rng.integers(1, 9, (n, 3)).astype(np.float32), "m": m}


def exact(batch):
    m = batch["m"].astype(np.float64)
    return (batch["x"] * m[:, None]).sum(0) * TINY**2 / m.sum()


W = jnp.array([1.0, 2.0, 3.0])


@pytest.mark.parametrize("k", [1, 2, 4])
def test_scaled_gradients_in_one_call_are_the_whole_batchs(k):
    batch = batch_of(8)
    scale = DynamicScale(scale=2.0**15)
    both = scale.value_and_grad(loss_fn, num_microbatches=k, weight_fn=count)
    scale, finite, value, grads = jax.jit(both)(W, batch)
    assert finite
    assert (scale.scale, scale.fin_steps) == (2.0**15, 1)
    # Every product is rounded to float16 once, forwards and backwards.
    np.testing.assert_allclose(grads, exact(batch), rtol=8 * EPS16)
    np.testing.assert_allclose(value, exact(batch) @ np.asarray(W), rtol=8 * EPS16)
    # Without a scale nothing of it is left.
    assert not jnp.any(jax.grad(loss_fn)(W, batch))


def test_an_overflow_lowers_the_scale_and_is_told():
    def loss(w, x):
        return jnp.mean(w.astype(jnp.float16) * x).astype(jnp.float32)

    scale = DynamicScale(scale=2.0**17)
    both = scale.value_and_grad(loss, num_microbatches=2)
    scale, finite, _, grads = both(jnp.float32(1), jnp.ones(4, jnp.float16))
    assert not finite
    assert not jnp.isfinite(grads)
    assert (scale.scale, scale.fin_steps) == (2.0**16, 0)


def test_the_scale_moves_as_flaxs_does():
    def loss(w, x):
        return jnp.mean(w * x)

    ours = DynamicScale(growth_interval=2, scale=4.0)
    flaxs = dynamic_scale.DynamicScale(growth_interval=2, scale=4.0)
    for x in (1.0, 1.0, 1.0, np.inf, 1.0, np.nan, 1.0, 1.0, 1.0):
        batch = jnp.array([1.0, x])
        found = ours.value_and_grad(loss, num_microbatches=2)(1.0, batch)
        expected = flaxs.value_and_grad(loss)(1.0, batch)
        ours, flaxs = found.dynamic_scale, expected.dynamic_scale
        assert found.finite == expected.finite
        assert (ours.scale, ours.fin_steps) == (flaxs.scale, flaxs.fin_steps)
        chex.assert_trees_all_equal(found.grad, expected.grad)


def test_aux_and_carried_state_pass_through():
    def loss(w, x, mean):
        new = 0.5 * mean + 0.5 * jnp.mean(x)
        return jnp.mean(w * x), (new, {"largest": jnp.max(x)})

    both = DynamicScale().value_and_grad(
        loss,
        has_aux=True,
        microbatch_size=2,
        state_argnums=2,
        aux_reduction="last",
    )
    _, _, (value, (mean, aux)), grad = both(2.0, jnp.array([0.0, 2, 4, 6]), 8.0)
    assert (value, grad) == (6, 3)
    assert mean == ((8 + 2) / 2 + 4) / 2
    assert aux == {"largest": 6}


def test_a_loss_that_is_a_python_number_has_no_gradient():
    found = DynamicScale().value_and_grad(lambda w, x: 2.0, num_microbatches=2)
    _, finite, value, grads = found(jnp.float32(1), jnp.ones(4))
    assert (finite, value, grads) == (True, 2, 0)


def test_without_options_it_is_flaxs():
    found = DynamicScale().value_and_grad(lambda w: w**2)(3.0)
    assert (found.aux, found.grad) == (9, 6)
    with pytest.raises(ValueError, match="axis_name='d' is for Flax's own form"):
        DynamicScale().value_and_grad(loss_fn, axis_name="d", num_microbatches=2)


@pytest.mark.parametrize("how", ["weight", "skip_nonfinite"])
def test_across_calls_a_micro_batch_that_overflowed_is_left_out(how):
    batch = batch_of(8)
    skip = "micro_batch" if how == "skip_nonfinite" else None
    tx = accumulate(optax.sgd(1.0), 3, skip_nonfinite=skip)
    step = jax.jit(partial(apply_gradients, tx))
    params, state = W, tx.init(W)
    scale = dynamic_scale.DynamicScale(scale=2.0**15)
    bad = {**batch, "x": np.full_like(batch["x"], 1e5)}  # more than float16 holds
    for part in (batch_of(4), bad, {n: x[4:] for n, x in batch.items()}):
        scale, finite, _, grads = scale.value_and_grad(loss_fn)(params, part)
        weight = count(part)
        if how == "weight":
            weight = jnp.where(finite, weight, 0)
        params, state = step(params, state, grads, weight=weight)
    assert state.emitted
    assert scale.scale == 2.0**14
    four = batch_of(4)
    both = {n: np.concatenate([four[n], batch[n][4:]]) for n in batch}
    # The update is near the rounding of the parameters: look at the sums instead.
    mean = state.acc_grads / state.acc_weight
    np.testing.assert_allclose(mean, exact(both), rtol=8 * EPS16)
