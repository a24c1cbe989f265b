"""Flax's training steps on a global batch that is split inside the program."""

import functools
from typing import Any

import chex
from flax import nnx
from flax.core import FrozenDict
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradacc_jax import rescale_momentum
from gradacc_jax.flax import Optimizer, TrainState, linen_train_step, nnx_train_step

EPS = float(jnp.finfo(jnp.float32).eps)


def batch_of(n, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, 3)), rng.normal(size=(n, 1))
    return x.astype(np.float32), y.astype(np.float32)


class TrainStateWithStatistics(TrainState):
    batch_stats: Any


class LinenNetwork(nn.Module):
    momentum: float = 0.5

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(4)(x))
        x = nn.BatchNorm(use_running_average=False, momentum=self.momentum)(x)
        return nn.Dense(1)(x)


def linen_loss(model, params, batch_stats, batch):
    x, y = batch
    variables = {"params": params, "batch_stats": batch_stats}
    out, new = model.apply(variables, x, mutable=["batch_stats"])
    return jnp.mean((out - y) ** 2), new["batch_stats"]


def linen_state(model):
    variables = model.init(jax.random.key(0), jnp.ones((2, 3)))
    return TrainStateWithStatistics.create(
        apply_fn=model.apply, tx=optax.sgd(0.1), **variables
    )


@pytest.mark.slow
def test_linen_statistics_are_carried_in_order_through_the_micro_batches():
    model = LinenNetwork()
    step = linen_train_step(
        functools.partial(linen_loss, model),
        carry="batch_stats",
        num_microbatches=3,
        donate=False,
    )
    state, batch = linen_state(model), batch_of(12)
    after, metrics = step(state, batch)
    stats, grads, values = state.batch_stats, [], []
    for i in range(3):
        micro_batch = tuple(x[i::3] for x in batch)
        (value, stats), grad = jax.value_and_grad(
            functools.partial(linen_loss, model), has_aux=True
        )(state.params, stats, micro_batch)
        grads.append(grad)
        values.append(value)
    mean = jax.tree.map(lambda *g: sum(g) / 3, *grads)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, mean)
    chex.assert_trees_all_close(after.batch_stats, stats, rtol=8 * EPS)
    chex.assert_trees_all_close(after.params, expected, rtol=16 * EPS, atol=16 * EPS)
    np.testing.assert_allclose(metrics.loss, np.mean(values), rtol=8 * EPS)
    assert after.step == 1


def test_with_a_rescaled_momentum_old_statistics_fade_as_on_the_whole_batch():
    batch = batch_of(12)
    faded = []
    for k, momentum in ((1, 0.8), (4, rescale_momentum(0.8, 4))):
        model = LinenNetwork(momentum)
        step = linen_train_step(
            functools.partial(linen_loss, model),
            carry="batch_stats",
            num_microbatches=k,
        )
        state = linen_state(model)
        huge = jax.tree.map(lambda x: x + 1e6, state.batch_stats)
        state, _ = step(state.replace(batch_stats=huge), batch)
        faded.append(state.batch_stats)
    # What the batch itself adds is some units of these millions.
    chex.assert_trees_all_close(*faded, rtol=1e-5)


def test_a_field_that_the_state_does_not_have_is_refused():
    model = LinenNetwork()
    step = linen_train_step(functools.partial(linen_loss, model), carry="statistics")
    with pytest.raises(
        ValueError, match="carry='statistics' is no field of TrainState"
    ):
        step(linen_state(model), batch_of(2))


@pytest.mark.parametrize("carry", ["step", "params", "replace"])
def test_flaxs_own_fields_and_methods_cannot_be_carried(carry):
    step = linen_train_step(functools.partial(linen_loss, LinenNetwork()), carry=carry)
    with pytest.raises(ValueError, match=f"carry='{carry}' is no field .* can be"):
        step(linen_state(LinenNetwork()), batch_of(2))


def test_statistics_that_are_not_there_yet_are_asked_for():
    model = LinenNetwork()
    state = linen_state(model).replace(batch_stats=None)
    step = linen_train_step(functools.partial(linen_loss, model), carry="batch_stats")
    with pytest.raises(ValueError, match="carry='batch_stats' is None in the state"):
        step(state, batch_of(2))


@pytest.mark.parametrize("k", [1, 2])
def test_statistics_that_change_dtype_or_container_are_refused(k):
    model = LinenNetwork()

    def narrowed(params, batch_stats, batch):
        loss, new = linen_loss(model, params, batch_stats, batch)
        return loss, jax.tree.map(lambda x: x.astype(jnp.bfloat16), new)

    def frozen(params, batch_stats, batch):
        loss, new = linen_loss(model, params, batch_stats, batch)
        return loss, FrozenDict(new)

    for loss, message in (
        (narrowed, r"float32\[4\] -> bfloat16"),
        (frozen, "comes in as"),
    ):
        step = linen_train_step(loss, carry="batch_stats", num_microbatches=k)
        with pytest.raises(ValueError, match=message):
            step(linen_state(model), batch_of(4))


@pytest.mark.parametrize("k", [1, 2])
def test_a_batch_without_loss_terms_leaves_statistics_alone(k):
    model = LinenNetwork()
    step = linen_train_step(
        functools.partial(linen_loss, model),
        carry="batch_stats",
        num_microbatches=k,
        weight_fn=lambda batch: 0 * jnp.sum(batch[1]),
        donate=False,
    )
    state = linen_state(model)
    after, _ = step(state, batch_of(4))
    chex.assert_trees_all_equal(after.batch_stats, state.batch_stats)
    chex.assert_trees_all_equal(after.params, state.params)


def test_a_linen_loss_that_returns_no_statistics_is_refused():
    model = LinenNetwork()

    def loss(params, batch_stats, batch):
        return linen_loss(model, params, batch_stats, batch)[0]

    step = linen_train_step(loss, carry="batch_stats", num_microbatches=2)
    with pytest.raises(ValueError, match=r"expected the pair \(loss, batch_stats\)"):
        step(linen_state(model), batch_of(2))


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="num_micro_batches"):
        nnx_train_step(lambda model, batch: 0.0, num_micro_batches=2)


class NnxNetwork(nnx.Module):
    def __init__(self, *, dropout=0.0):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.second = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(self.norm(jnp.tanh(self.first(x)))))


def nnx_loss(model, batch):
    x, y = batch
    return jnp.mean((model(x) - y) ** 2)


def pure(model, kind):
    return jax.device_get(nnx.to_pure_dict(nnx.state(model, kind)))


def test_nnx_statistics_and_random_streams_are_carried_through_the_micro_batches():
    batch = batch_of(12)
    inside, across = NnxNetwork(dropout=0.5), NnxNetwork(dropout=0.5)
    opt = optax.sgd(0.1)
    optimizer = Optimizer(inside, opt, wrt=nnx.Param)
    step = nnx_train_step(nnx_loss, num_microbatches=3)
    metrics = step(inside, optimizer, batch)

    grads, values = [], []
    for i in range(3):
        micro_batch = tuple(x[i::3] for x in batch)
        value, grad = nnx.value_and_grad(nnx_loss)(across, micro_batch)
        grads.append(nnx.to_pure_dict(grad))
        values.append(value)
    np.testing.assert_allclose(metrics.loss, np.mean(values), rtol=8 * EPS)
    for kind in (nnx.BatchStat, nnx.RngCount):
        chex.assert_trees_all_close(
            # Means of numbers of order 1 that cancel.
            pure(inside, kind),
            pure(across, kind),
            rtol=8 * EPS,
            atol=EPS,
        )
    mean = jax.tree.map(lambda *g: sum(g) / 3, *grads)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, pure(across, nnx.Param), mean)
    chex.assert_trees_all_close(
        pure(inside, nnx.Param), expected, rtol=16 * EPS, atol=16 * EPS
    )
    assert optimizer.step[...] == 1


def test_nnx_aux_is_reduced_and_kept_for_each_example():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    x, y = batch_of(5)
    out = jax.device_get(model(x))

    def loss(model, batch):
        x, y = batch
        out = model(x)
        return jnp.mean((out - y) ** 2), {"out": out, "seen": jnp.asarray(len(x))}

    optimizer = Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = nnx_train_step(
        loss,
        has_aux=True,
        microbatch_size=2,
        aux_reduction={"out": "concat", "seen": "sum"},
    )
    metrics = step(model, optimizer, (x, y))
    np.testing.assert_allclose(metrics.aux["out"], out, rtol=8 * EPS, atol=8 * EPS)
    assert metrics.aux["seen"] == 5


# The newer way, nnx.capture, replaces what a model calls, from outside.
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("k", [1, 2])
def test_what_an_nnx_model_sows_is_that_of_the_last_micro_batch_alone(k):
    class Sowing(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            return self.inner(x)

    model = Sowing()
    optimizer = Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = nnx_train_step(nnx_loss, num_microbatches=k)
    for seed in range(3):  # and nobody takes it out in between
        x, y = batch_of(4, seed)
        step(model, optimizer, (x, y))
        (seen,) = jax.tree.leaves(nnx.state(model, nnx.Intermediate))
        np.testing.assert_array_equal(seen, x[k - 1 :: k])
