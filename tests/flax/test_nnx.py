"""The nnx Optimizer and training step: in place, fused, and counting windows."""

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradacc_jax import (
    accumulate,
    accumulation_metrics,
    has_updated,
    parameter_ema,
)
from gradacc_jax.flax import Optimizer, nnx_train_step
from tests import programs
from tests.lenient import lenient

EPS = float(jnp.finfo(jnp.float32).eps)


class Network(nnx.Module):
    def __init__(self, width=4):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(self.norm(jnp.tanh(self.first(x)))))


def loss_fn(model, batch):
    x, y = batch
    return jnp.mean((model(x) - y) ** 2)


def batches(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (
            rng.normal(size=(n, 3)).astype(np.float32),
            rng.normal(size=(n, 1)).astype(np.float32),
        )
        for n in sizes
    ]


def linear():
    return nnx.Linear(3, 1, rngs=nnx.Rngs(0))


def params_of(model):
    return jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def test_weights_reach_the_accumulator_and_the_step_counts_windows():
    model, whole = linear(), linear()
    optimizer = Optimizer(model, accumulate(optax.sgd(0.1), 2), wrt=nnx.Param)
    reference = nnx.Optimizer(whole, optax.sgd(0.1), wrt=nnx.Param)
    parts = batches((3, 1, 2, 6))
    steps = []
    for part in parts:
        grads = nnx.grad(loss_fn)(model, part)
        assert optimizer.update(model, grads, weight=len(part[0])) is None
        steps.append(int(optimizer.step[...]))
    for pair in (parts[:2], parts[2:]):
        full = tuple(np.concatenate(xs) for xs in zip(*pair))
        reference.update(whole, nnx.grad(loss_fn)(whole, full))
    assert steps == [0, 1, 1, 2]
    chex.assert_trees_all_close(params_of(model), params_of(whole), rtol=50 * EPS)


def test_with_a_plain_optimizer_it_is_the_optimizer_of_flax():
    ours, theirs = linear(), linear()
    tx = lenient(optax.adam(0.1))
    optimizer = Optimizer(ours, tx, wrt=nnx.Param)
    reference = nnx.Optimizer(theirs, tx, wrt=nnx.Param)
    for part in batches((4, 4)):
        optimizer.update(ours, nnx.grad(loss_fn)(ours, part))
        reference.update(theirs, nnx.grad(loss_fn)(theirs, part))
    chex.assert_trees_all_equal(params_of(ours), params_of(theirs))
    assert optimizer.step[...] == reference.step[...] == 2


def test_the_train_step_equals_the_full_batch():
    model, whole = linear(), linear()
    tx = accumulate(optax.sgd(0.1), 2)
    optimizer = Optimizer(model, tx, wrt=nnx.Param)
    reference = Optimizer(whole, optax.sgd(0.1), wrt=nnx.Param)
    step = nnx_train_step(loss_fn)
    parts = batches((4, 4))
    for part in parts:
        metrics = step(model, optimizer, part)
    full = tuple(np.concatenate(xs) for xs in zip(*parts))
    nnx_train_step(loss_fn)(whole, reference, full)
    assert metrics.emitted
    assert optimizer.step[...] == reference.step[...] == 1
    chex.assert_trees_all_close(params_of(model), params_of(whole), rtol=20 * EPS)


def test_statistics_and_random_streams_are_carried_from_call_to_call():
    parts = batches((8, 8, 8, 8))
    model = Network()
    optimizer = Optimizer(model, accumulate(optax.sgd(0.1), 2), wrt=nnx.Param)
    step = nnx_train_step(loss_fn)
    # The same by hand: nnx.grad changes statistics and streams in place.
    other = Network()
    by_hand = Optimizer(other, accumulate(optax.sgd(0.1), 2), wrt=nnx.Param)

    @nnx.jit
    def reference(model, optimizer, part):
        loss, grads = nnx.value_and_grad(loss_fn)(model, part)
        optimizer.update(model, grads)
        return loss

    losses = []
    for part in parts:
        metrics = step(model, optimizer, part)
        losses.append(float(reference(other, by_hand, part)))
    np.testing.assert_allclose(metrics.loss, np.mean(losses[2:]), rtol=50 * EPS)
    chex.assert_trees_all_close(
        jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))),
        jax.device_get(nnx.to_pure_dict(nnx.state(other, nnx.BatchStat))),
        rtol=50 * EPS,
    )
    assert model.dropout.rngs.count[...] == other.dropout.rngs.count[...] == 4
    chex.assert_trees_all_close(
        params_of(model), params_of(other), rtol=100 * EPS, atol=10 * EPS
    )


def test_emit_and_aux_and_keys_pass_through_the_train_step():
    def noisy(model, batch, key):
        return loss_fn(model, batch), jax.random.uniform(key)

    model = linear()
    optimizer = Optimizer(model, accumulate(optax.sgd(0.1), 4), wrt=nnx.Param)
    step = nnx_train_step(noisy, has_aux=True)
    (part,) = batches((4,))
    key = jax.random.key(1)
    metrics = step(model, optimizer, part, key)
    assert metrics.aux == jax.random.uniform(jax.random.fold_in(key, 0))
    assert not metrics.emitted
    metrics = step(model, optimizer, part, key, emit=True)
    assert metrics.emitted
    assert optimizer.step[...] == 1


def test_frozen_parameters_have_no_accumulator_and_do_not_move():
    model = Network()
    frozen = nnx.All(nnx.Param, nnx.PathContains("first"))
    trained = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("first")))
    before = params_of(model)["first"]
    optimizer = Optimizer(model, accumulate(optax.sgd(0.1), 2), wrt=trained)
    step = nnx_train_step(loss_fn)
    for part in batches((8, 8)):
        step(model, optimizer, part)
    chex.assert_trees_all_equal(params_of(model)["first"], before)
    held = nnx.as_pure(optimizer.opt_state).acc_grads
    sizes = [x.size for x in jax.tree.leaves(held)]
    every = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert sum(sizes) == every - sum(
        x.size for x in jax.tree.leaves(nnx.state(model, frozen))
    )


def test_a_parameter_average_counts_optimizer_steps():
    model = linear()
    tx = accumulate(optax.chain(optax.sgd(0.1), parameter_ema(0.5)), 2)
    optimizer = Optimizer(model, tx, wrt=nnx.Param)
    step = nnx_train_step(loss_fn)
    expected = params_of(model)["kernel"]
    for i, part in enumerate(batches((4, 4, 4, 4))):
        step(model, optimizer, part)
        if i % 2:
            expected = 0.5 * expected + 0.5 * params_of(model)["kernel"]
    average = optax.tree.get(nnx.as_pure(optimizer.opt_state), "parameter_ema")
    kernel = nnx.to_pure_dict(average)["kernel"]
    np.testing.assert_allclose(kernel, expected, rtol=10 * EPS)


@pytest.mark.parametrize("what", ["update", "step"])
def test_a_silent_micro_step_copies_no_parameter(what):
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    tx = accumulate(lenient(optax.adamw(0.1)), 2)
    optimizer = Optimizer(model, tx, wrt=nnx.Param)
    if what == "update":

        @nnx.jit(donate_argnums=(0, 1))
        def step(model, optimizer, grads):
            optimizer.update(model, grads)

        lowered = step.lower(model, optimizer, nnx.state(model, nnx.Param))
        residuals = 0
    else:
        step = nnx_train_step(lambda m, x: jnp.mean(jnp.tanh(x * m.kernel[...])))
        lowered = step.lower(model, optimizer, jnp.array(1.0))
        residuals = 4 * 64 * 64  # the tanh
    made = programs.program(lowered)
    assert made.copies(64 * 64) == 0
    assert made.temporaries < residuals + 64 * 64


def test_what_one_asks_of_the_state_are_arrays():
    model = linear()
    optimizer = Optimizer(model, accumulate(optax.sgd(0.1), 2), wrt=nnx.Param)
    for emitted in (False, True):
        grads = nnx.grad(loss_fn)(model, batches((4,))[0])
        optimizer.update(model, grads, weight=3, value=1.5)
        assert bool(has_updated(optimizer.opt_state)) is emitted
    metrics = accumulation_metrics(optimizer.opt_state)
    assert f"{metrics['weight']:.1f} {metrics['value']:.1f}" == "6.0 1.5"


def test_model_and_optimizer_in_the_wrong_order_are_refused():
    model = linear()
    optimizer = Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(TypeError, match=r"step\(model, optimizer, batch\)"):
        nnx_train_step(loss_fn)(optimizer, model, batches((4,))[0])


# The newer way, nnx.capture, replaces what a model calls, from outside.
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_what_the_model_sows_is_found_after_the_step():
    class Sowing(nnx.Module):
        def __init__(self):
            self.inner = linear()

        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            return self.inner(x)

    model = Sowing()
    optimizer = Optimizer(model, accumulate(optax.sgd(0.1), 2), wrt=nnx.Param)
    step = nnx_train_step(loss_fn)
    for part in batches((4, 4)):
        step(model, optimizer, part)
        (seen,) = jax.tree.leaves(nnx.pop(model, nnx.Intermediate))
        np.testing.assert_array_equal(seen, part[0])
