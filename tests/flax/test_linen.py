"""The linen TrainState: weights forwarded, optimizer steps counted."""

import chex
import flax.linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradacc_jax import accumulate, parameter_ema
from gradacc_jax.flax import TrainState, linen_train_step
from tests import programs
from tests.lenient import lenient

EPS = float(jnp.finfo(jnp.float32).eps)
MODEL = nn.Dense(2)


def created(tx, cls=TrainState):
    params = MODEL.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    return cls.create(apply_fn=MODEL.apply, params=params, tx=tx)


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((MODEL.apply({"params": params}, x) - y) ** 2)


def batches(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (
            rng.normal(size=(n, 3)).astype(np.float32),
            rng.normal(size=(n, 2)).astype(np.float32),
        )
        for n in sizes
    ]


def test_weights_reach_the_accumulator_and_the_step_counts_windows():
    state = created(accumulate(optax.sgd(0.1), 2))
    whole = created(optax.sgd(0.1), train_state.TrainState)
    steps = []
    parts = batches((3, 1, 2, 6))
    for part in parts:
        grads = jax.grad(loss_fn)(state.params, part)
        state = state.apply_gradients(grads=grads, weight=len(part[0]))
        steps.append(int(state.step))
    for pair in (parts[:2], parts[2:]):
        full = tuple(np.concatenate(xs) for xs in zip(*pair))
        whole = whole.apply_gradients(grads=jax.grad(loss_fn)(whole.params, full))
    assert steps == [0, 1, 1, 2]
    # A mean over at most eight examples, two steps of 0.1.
    chex.assert_trees_all_close(state.params, whole.params, rtol=50 * EPS)


def test_with_a_plain_optimizer_it_is_the_train_state_of_flax():
    ours, theirs = (
        created(lenient(optax.adam(0.1)), cls)
        for cls in (TrainState, train_state.TrainState)
    )
    for part in batches((4, 4)):
        grads = jax.grad(loss_fn)(ours.params, part)
        ours = ours.apply_gradients(grads=grads)
        theirs = theirs.apply_gradients(grads=grads)
    chex.assert_trees_all_equal(ours.params, theirs.params)
    chex.assert_trees_all_equal(ours.opt_state, theirs.opt_state)
    assert int(ours.step) == theirs.step == 2


def test_the_train_step_equals_the_full_batch_and_compiles_once():
    state = created(accumulate(optax.sgd(0.1), 2))
    whole = created(optax.sgd(0.1))
    # Equal shapes, so that one program serves; the weights still differ.
    step = linen_train_step(loss_fn, weight_fn=lambda batch: batch[0][0, 0] ** 2)
    full = linen_train_step(loss_fn)
    parts = batches((4, 4))
    for x, _ in parts:
        x[0, 0] = 1
    for part in parts:
        state, metrics = step(state, part)
    whole, _ = full(whole, tuple(np.concatenate(xs) for xs in zip(*parts)))
    assert metrics.emitted
    assert state.step == whole.step == 1
    assert step._cache_size() == 1
    chex.assert_trees_all_close(state.params, whole.params, rtol=20 * EPS)


def test_emit_and_aux_and_keys_pass_through_the_train_step():
    def noisy(params, batch, key):
        return loss_fn(params, batch), jax.random.uniform(key)

    state = created(accumulate(optax.sgd(0.1), 4))
    step = linen_train_step(noisy, has_aux=True)
    (part,) = batches((4,))
    key = jax.random.key(1)
    state, metrics = step(state, part, key)
    assert metrics.aux == jax.random.uniform(jax.random.fold_in(key, 0))
    assert not metrics.emitted
    state, metrics = step(state, part, key, emit=True)
    assert metrics.aux == jax.random.uniform(jax.random.fold_in(key, 1))
    assert metrics.emitted
    assert state.step == 1


def test_extra_arguments_reach_the_optimizer_and_fields_are_replaced():
    class WithLog(TrainState):
        log: str = ""

    plateau = lenient(
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    )
    params = {"w": jnp.zeros(2)}
    state = WithLog.create(apply_fn=None, params=params, tx=accumulate(plateau, 2))
    grads = {"w": jnp.ones(2)}
    for value in (1.0, 100.0):
        state = state.apply_gradients(grads=grads, value=value, log="seen")
    assert state.log == "seen"
    assert optax.tree.get(state.opt_state, "best_value") == 50.5


def test_schedules_and_averages_count_optimizer_steps():
    schedule = lenient(optax.sgd(optax.piecewise_constant_schedule(1.0, {1: 0.5})))
    state = TrainState.create(
        apply_fn=None,
        params={"w": jnp.array(8.0)},
        tx=accumulate(optax.chain(schedule, parameter_ema(0.5)), 2),
    )
    for _ in range(4):
        state = state.apply_gradients(grads={"w": jnp.array(2.0)})
    assert state.params["w"] == 8 - 1 * 2 - 0.5 * 2
    average = optax.tree.get(state.opt_state, "parameter_ema")
    assert average["w"] == 0.5 * (0.5 * 8 + 0.5 * 6) + 0.5 * 5


def test_scales_of_eight_bit_layers_are_overwritten_by_their_gradient():
    params = {"params": {"w": jnp.array(1.0)}, OVERWRITE_WITH_GRADIENT: jnp.array(3.0)}
    state = TrainState.create(
        apply_fn=None, params=params, tx=accumulate(optax.sgd(1.0), 2)
    )
    for i in range(2):
        grads = {
            "params": {"w": jnp.array(0.5)},
            OVERWRITE_WITH_GRADIENT: jnp.array(10.0 + i),
        }
        state = state.apply_gradients(grads=grads)
        assert state.params[OVERWRITE_WITH_GRADIENT] == 10 + i
    assert state.params["params"]["w"] == 0.5


def test_the_state_keeps_its_structure_and_dtypes_from_the_first_call():
    state = created(accumulate(optax.sgd(0.1), 2))
    (part,) = batches((4,))
    new, _ = linen_train_step(loss_fn, donate=False)(state, part)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, new)
    weak = [x.weak_type for x in jax.tree.leaves(new)]
    assert weak == [x.weak_type for x in jax.tree.leaves(state)]


def test_a_silent_micro_step_of_the_train_state_copies_nothing():
    state = TrainState.create(
        apply_fn=None,
        params={"w": jnp.zeros((64, 64))},
        tx=accumulate(lenient(optax.adamw(0.1)), 2),
    )
    made = programs.compiled(
        lambda state, grads: state.apply_gradients(grads=grads),
        state,
        {"w": jnp.ones((64, 64))},
        donate=(0,),
    )
    assert made.copies(64 * 64) == 0
    assert made.temporaries < 64 * 64


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_a_bad_weight_is_refused(weight):
    state = created(accumulate(optax.sgd(0.1), 2))
    with pytest.raises(ValueError, match=f"weight={weight}"):
        state.apply_gradients(grads=state.params, weight=weight)
