"""What optax.MultiSteps does where ``accumulate`` does something else.

The values are those of optax 0.2.8. When one of these tests fails, optax has changed:
look whether the page *Coming from MultiSteps* still tells the truth.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.accumulation.driving import SGD, ZERO, drive, jitted, moves

pytestmark = pytest.mark.optax_promotes

NAN = float("nan")


def multisteps(*args, **options):
    """A MultiSteps that forwards extra arguments, as its ``update`` does by itself."""
    tx = optax.MultiSteps(*args, **options)
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)


def run(tx, gradients, **series):
    return drive(tx, gradients, way="update", **series)


def test_a_nan_stays_in_the_accumulator_for_ever():  # W1
    tx = multisteps(optax.chain(optax.zero_nans(), SGD), 2)
    assert moves(run(tx, [NAN, 1.0, 1.0, 1.0, 1.0, 1.0])) == [0] * 6


def test_the_inner_optimizer_sees_half_windows_and_its_nan_gets_out():  # W2
    unit = optax.stateless(lambda u, _: u / jnp.linalg.norm(u))
    grads = [np.zeros(2, np.float32), np.ones(2, np.float32)]
    first, _ = run(multisteps(unit, 2), grads, params=np.zeros(2, np.float32))
    assert np.all(np.isnan(first.params))


def test_the_end_of_an_epoch_bleeds_into_the_next():  # W3
    steps = run(multisteps(SGD, 4), [*map(float, range(1, 11)), 2.0, 2.0])
    # The 9 and the 10 wait for two of the next epoch.
    assert moves(steps)[8:] == [0, 0, 0, -5.75]
    # emit is no argument it knows: it is dropped, silently.
    assert moves(run(multisteps(SGD, 4), [1.0], emit=[True])) == [0]


def test_a_k_that_shrinks_within_a_window_does_not_close_it():  # W4
    # It asks whether the count *is* k - 1, and takes the count modulo k.
    def step(k, params, state, grads):
        tx = optax.MultiSteps(SGD, lambda _: k)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step, state, params = jax.jit(step), optax.MultiSteps(SGD, 9).init(ZERO), ZERO
    closed = []
    for k in (9, 9, 9, 2, 2, 2):
        params, state = step(k, params, state, np.float32(1))
        closed.append(bool(params != 0))
    assert closed == [False, False, False, False, False, True]


def test_skipping_lengthens_the_window_and_counts_nothing():  # W5
    tx = multisteps(SGD, 2, should_skip_update_fn=optax.skip_not_finite)
    steps = run(tx, [1.0, NAN, 3.0, 5.0, 7.0])
    assert moves(steps) == [0, 0, -2, 0, -6]
    assert set(steps[-1].state.skip_state) == {"should_skip", "num_not_finite"}


def test_weight_decay_after_it_in_a_chain_decays_every_micro_step():  # W7
    tx = optax.chain(multisteps(SGD, 2), optax.add_decayed_weights(-0.1))
    steps = run(tx, [0.0] * 4, params=np.float32(1))
    np.testing.assert_allclose(steps[-1].params, 0.6561, rtol=1e-6)


def test_k_1_runs_the_full_machinery():  # W8
    def flops(tx):
        step = jitted(tx, "update")
        params = jnp.ones(1000)
        compiled = step.lower(params, tx.init(params), params).compile()
        return compiled.cost_analysis()["flops"]

    assert flops(multisteps(SGD, 1)) > 2 * flops(SGD)


def test_it_takes_the_mean_of_means():  # T1, T2
    tokens, grads = [512, 8, 64, 300], [1.0, 5.0, 2.0, 1.2]
    last = run(multisteps(SGD, 4), grads)[-1]
    np.testing.assert_allclose(-last.params, 2.3, rtol=1e-6)
    # The weight is dropped, silently.
    silent = run(multisteps(SGD, 4), grads, weight=[np.float32(n) for n in tokens])
    assert silent[-1].params == last.params


def test_a_micro_batch_without_loss_terms_poisons_it():  # T3
    steps = run(multisteps(SGD, 2), [NAN, 2.0, 1.0, 1.0])
    assert np.all(np.isnan([s.params for s in steps[1:]]))


def test_silent_updates_are_positive_zeros_and_lose_a_negative_one():
    params = np.float32(-0.0)
    tx = multisteps(optax.identity(), 2)
    (step,) = run(tx, [1.0], params=params)
    assert not np.signbit(step.params)


def test_float64_gradients_are_added_in_float32():  # N3
    with jax.enable_x64(True):
        grads = [np.float64(g) for g in (1, 1 + 3e-9, 1 + 3e-9)]
        state = optax.MultiSteps(SGD, 3).init(np.zeros(()))
        assert state.acc_grads.dtype == np.float32
        last = run(multisteps(SGD, 3), grads, params=np.zeros(()))[-1]
        # It keeps the running mean in float32 until the last micro-step.
        np.testing.assert_allclose(-last.params, 1.000000001, rtol=1e-12)


def test_no_accumulator_dtype_is_a_type_error_for_bfloat16_parameters():  # N4
    tx = multisteps(SGD, 2, accumulator_dtype=None)
    with pytest.raises(TypeError):
        run(tx, [jnp.bfloat16(1)] * 2, params=np.zeros((), jnp.bfloat16))


def test_a_bfloat16_accumulator_from_a_checkpoint_is_a_type_error():  # N5
    tx = optax.MultiSteps(SGD, 2)
    state = tx.init(np.zeros((), jnp.bfloat16))
    state = state._replace(acc_grads=state.acc_grads.astype(jnp.bfloat16))
    with pytest.raises(TypeError):
        tx.update(jnp.bfloat16(1), state, np.zeros((), jnp.bfloat16))


def test_in_a_chain_its_extra_arguments_are_lost():  # C1
    inner = optax.chain(SGD, optax.contrib.reduce_on_plateau())
    tx = optax.chain(optax.MultiSteps(inner, 2).gradient_transformation())
    with pytest.raises(TypeError, match="value"):
        run(tx, [1.0], value=[np.float32(1)])


def test_a_plateau_scheduler_sees_the_last_micro_batchs_value():  # C2
    inner = optax.chain(SGD, optax.contrib.reduce_on_plateau())
    values = [np.float32(v) for v in (1, 100, 1, 100)]
    last = run(multisteps(inner, 2), [1.0] * 4, value=values)[-1]
    assert optax.tree.get(last.state, "best_value") == 100


def test_the_inner_optimizer_runs_at_every_micro_step():  # C3
    calls = []

    def update(updates, state, params=None):
        jax.debug.callback(lambda: calls.append(1))
        return updates, state

    inner = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    run(multisteps(inner, 4), [1.0] * 8)
    jax.effects_barrier()
    assert len(calls) == 8


def test_an_inner_accumulator_for_every_frozen_leaf():  # C5
    params = {"frozen": jnp.zeros((64, 64)), "lora": jnp.zeros((64, 2))}
    kinds = {"frozen": "frozen", "lora": "trained"}
    inner = optax.partition({"trained": SGD, "frozen": optax.set_to_zero()}, kinds)
    sums = optax.MultiSteps(inner, 2).init(params).acc_grads
    assert sums["frozen"].nbytes == 64 * 64 * 4


def test_integer_parameters_get_a_float_accumulator():
    assert optax.MultiSteps(SGD, 2).init(np.int32(1)).acc_grads.dtype == np.float32


def test_a_k_of_0_is_accepted_and_never_emits():
    tx = multisteps(SGD, 0)
    assert moves(run(tx, [1.0] * 4)) == [0] * 4
