"""What ``optax.microbatch`` and a loop of means do where ``value_and_grad`` is exact.

The values are those of optax 0.2.8. When one of these tests fails, optax has changed:
look whether the page *Inside one call* still tells the truth. Each test says first what
the other way gives, and then what is right.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.microbatching import AccumulationType
import pytest

from gradacc_jax import grad, value_and_grad

pytestmark = pytest.mark.optax_promotes

EPS = float(jnp.finfo(jnp.float32).eps)


def optax_grad(loss, *, size, how=AccumulationType.MEAN, **options):
    """The gradient of a batch, by ``optax.microbatch``."""
    return optax.microbatch(jax.grad(loss), 1, size, how, **options)


def loop_grad(loss, *, size):
    """What people write by hand: the mean of the micro-batches' gradients."""

    def run(w, batch, *rest):
        n = jax.tree.leaves(batch)[0].shape[0]
        parts = [
            jax.tree.map(lambda x, i=i: x[i : i + size], batch)
            for i in range(0, n, size)
        ]
        grads = [jax.grad(loss)(w, part, *rest) for part in parts]
        return jax.tree.map(lambda *g: sum(g) / len(g), *grads)

    return run


OTHERS = pytest.mark.parametrize("other", [optax_grad, loop_grad])


def masked_mean(w, batch):
    return jnp.sum(w * batch["x"] * batch["m"]) / jnp.sum(batch["m"])


def count(batch):
    return jnp.sum(batch["m"])


def test_a_loop_of_means_gives_the_mean_of_means():  # T1
    batch = {"x": jnp.array([1.0, 1, 1, 10]), "m": jnp.array([1.0, 0, 1, 1])}
    assert loop_grad(masked_mean, size=2)(1.0, batch) == 3.25
    exact = grad(masked_mean, microbatch_size=2, weight_fn=count)
    np.testing.assert_allclose(exact(1.0, batch), 4, rtol=4 * EPS)


def test_optax_gives_the_mean_of_means():  # T1, of other micro-batches: it is strided
    batch = {"x": jnp.array([1.0, 1, 1, 10]), "m": jnp.array([1.0, 1, 0, 1])}
    assert optax_grad(masked_mean, size=2)(1.0, batch) == 3.25
    exact = grad(masked_mean, microbatch_size=2, weight_fn=count)
    np.testing.assert_allclose(exact(1.0, batch), 4, rtol=4 * EPS)


@OTHERS
def test_a_micro_batch_without_loss_terms_poisons_the_rest(other):  # T3
    # Without terms are 2 and 3 in order, and 0 and 2 of every second one.
    batch = {"x": jnp.array([1.0, 3, 5, 7]), "m": jnp.array([1.0, 1, 0, 0])}
    if other is optax_grad:
        batch["m"] = jnp.array([0.0, 1, 0, 1])
    assert np.isnan(other(masked_mean, size=2)(1.0, batch))
    exact = grad(masked_mean, microbatch_size=2, weight_fn=count)(1.0, batch)
    full = jnp.sum(batch["x"] * batch["m"]) / 2
    np.testing.assert_allclose(exact, full, rtol=4 * EPS)


@OTHERS
def test_an_auxiliary_term_with_a_denominator_of_its_own_is_not_the_batchs(other):  # T5
    batch = {
        "x": jnp.array([1.0, 2, 3, 4, 5, 6]),
        "m": jnp.array([1.0, 0, 0, 1, 1, 1]),
    }

    def terms(w, batch):
        return {
            "token": masked_mean(w, batch),
            "example": 0.1 * jnp.mean(batch["x"]) * w,
        }

    def weights(batch):
        return {"token": count(batch), "example": batch["m"].size}

    def loss(w, batch):
        return sum(jax.tree.leaves(terms(w, batch)))

    full = jax.grad(loss)(1.0, batch)
    assert abs(other(loss, size=2)(1.0, batch) - full) > 0.1
    exact = grad(terms, microbatch_size=2, weight_fn=weights)(1.0, batch)
    np.testing.assert_allclose(exact, full, rtol=8 * EPS)


def test_optax_refuses_a_batch_that_does_not_divide():  # T8
    def loss(w, x):
        return jnp.mean(w * x)

    x = jnp.arange(10.0)
    with pytest.raises(ValueError, match="must be divisible"):
        optax_grad(loss, size=4)(1.0, x)
    np.testing.assert_allclose(grad(loss, microbatch_size=4)(1.0, x), 4.5)


def test_a_loop_gives_a_smaller_last_micro_batch_the_weight_of_a_whole_one():  # T8
    def loss(w, x):
        return jnp.mean(w * x)

    x = jnp.arange(10.0)
    np.testing.assert_allclose(loop_grad(loss, size=4)(1.0, x), (1.5 + 5.5 + 8.5) / 3)
    np.testing.assert_allclose(grad(loss, microbatch_size=4)(1.0, x), 4.5)


def test_optax_sums_bfloat16_gradients_in_bfloat16():  # N1
    def loss(w, x):
        return jnp.sum(w * x)

    w, x = jnp.bfloat16(1), jnp.ones(512, jnp.bfloat16)
    found = optax_grad(loss, size=1, how=AccumulationType.SUM)(w, x)
    assert found == 256
    assert grad(loss, microbatch_size=1, reduction="sum")(w, x) == 512


def test_a_loop_sums_bfloat16_gradients_in_bfloat16():  # N1
    def loss(w, x):
        return jnp.mean(w * x)

    w, x = jnp.bfloat16(1), jnp.ones(512, jnp.bfloat16)
    assert loop_grad(loss, size=1)(w, x) == 256 / 512
    assert grad(loss, microbatch_size=1)(w, x) == 1


def test_a_scan_over_bfloat16_parameters_sums_their_gradients_in_bfloat16():  # G6
    def total(w, x):
        return jax.lax.scan(lambda c, x: (c + w * x, None), jnp.bfloat16(0), x)[0]

    w, x = jnp.bfloat16(1), jnp.ones(512, jnp.bfloat16)
    assert jax.grad(total)(w, x) == 256


@OTHERS
def test_one_key_gives_every_micro_batch_the_same_random_numbers(other):  # G1
    def loss(w, x, key):
        return jnp.mean(w * x * jax.random.bernoulli(key, 0.5, x.shape))

    x, key = jnp.ones(8), jax.random.key(0)
    mask = jax.random.bernoulli(key, 0.5, (2,)).mean()
    np.testing.assert_allclose(other(loss, size=2)(1.0, x, key), mask)
    masks = [
        jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, (2,)).mean()
        for i in range(4)
    ]
    assert len(set(map(float, masks))) > 1
    exact = grad(loss, microbatch_size=2, key_argnums=2)(1.0, x, key)
    np.testing.assert_allclose(exact, np.mean(masks))


def test_optax_divides_by_the_micro_batches_that_were_left_out():  # G4
    def loss(w, x):
        return jnp.mean(w * x)

    x = jnp.ones(4)
    assert optax_grad(loss, size=1, num_real_microbatches=2)(1.0, x) == 0.5

    @jax.jit
    def exact(w, x, real):
        return grad(loss, num_microbatches=real, microbatch_size=1)(w, x)

    assert exact(1.0, x, 2) == 1


def test_optax_cannot_carry_state_from_micro_batch_to_micro_batch():  # G5
    def loss(w, x, mean):
        new = 0.5 * mean + 0.5 * jnp.mean(x)
        return jnp.mean(w * x), new

    x = jnp.array([0.0, 2, 4, 6])  # strided: 0 and 4, then 2 and 6
    both = optax.microbatch(
        jax.value_and_grad(loss, has_aux=True), 1, 2, AccumulationType.MEAN
    )
    (_, mean), _ = both(1.0, x, 8.0)
    assert mean == 5.5  # each began with 8, and the mean of the two was taken
    exact = value_and_grad(loss, microbatch_size=2, state_argnums=2)
    (_, mean), _ = exact(1.0, x, 8.0)
    assert mean == ((8 + 2) / 2 + 4) / 2
