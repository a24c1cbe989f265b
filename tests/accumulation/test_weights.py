"""Weights: a micro-batch stands for as many loss terms as it has."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradacc_jax import accumulate, accumulation_metrics
from tests.accumulation.driving import (
    SGD,
    WAYS,
    ZERO,
    assert_same_bits,
    drive,
    jitted,
    moves,
)
from tests.lenient import lenient

NAN, INF = float("nan"), float("inf")
EPS = np.finfo(np.float32).eps

both_ways = pytest.mark.parametrize("way", WAYS)


def floats(*numbers):
    return [np.float32(x) for x in numbers]


@both_ways
def test_a_masked_mean_loss_has_the_full_batchs_gradient(way):  # T1
    def loss(w, x, m):
        return jnp.sum(w * x * m) / jnp.sum(m)

    x, m = np.float32([1, 1, 1, 10]), np.float32([1, 0, 1, 1])
    grad = jax.grad(loss)
    gradients = [grad(ZERO, x[:2], m[:2]), grad(ZERO, x[2:], m[2:])]
    weights = [m[:2].sum(), m[2:].sum()]
    steps = drive(accumulate(SGD, 2), gradients, weight=weights, way=way)
    assert moves(steps) == [0, -4]
    assert -steps[-1].params == grad(ZERO, x, m)


@both_ways
@pytest.mark.parametrize("kind", [int, float, np.int32, np.float16, jnp.bfloat16])
def test_gradients_of_token_means_are_weighed_by_their_tokens(way, kind):  # T2
    tokens, gradients = [512, 8, 64, 300], [1.0, 5.0, 2.0, 1.2]
    weights = [kind(n) for n in tokens]
    steps = drive(accumulate(SGD, 4), gradients, weight=weights, way=way)
    expected = -np.dot(tokens, np.float64(np.float32(gradients))) / np.sum(tokens)
    if kind is jnp.bfloat16:  # keeps 8 bits, of which 300 has 7: exact
        assert [float(w) for w in weights] == tokens
    # Four products, three additions, a reciprocal, a product: each may round once.
    np.testing.assert_allclose(steps[-1].params, expected, rtol=9 * EPS)
    np.testing.assert_allclose(expected, -1040 / 884, rtol=1e-7)


@both_ways
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_micro_batch_of_weight_0_contributes_nothing_at_all(way, place, bad):  # T3
    gradients, weights = [2.0, 4.0], floats(1, 1)
    gradients.insert(place, bad)
    weights.insert(place, np.float32(0))
    steps = drive(accumulate(SGD, 3), gradients, weight=weights, way=way)
    assert moves(steps) == [0, 0, -3]
    # It is left out, but it was a micro-batch.
    assert [int(s.state.mini_step) for s in steps] == [1, 2, 0]


@both_ways
def test_a_total_weight_below_1_is_divided_by(way):  # T4
    steps = drive(accumulate(SGD, 2), [3.0, 5.0], weight=floats(0.25, 0.25), way=way)
    assert moves(steps) == [0, -4]


def test_tiny_and_huge_weights_are_no_special_case():
    for scale in (1e-20, 1e20):
        weights = floats(1 * scale, 3 * scale)
        steps = drive(accumulate(SGD, 2), [1.0, 5.0], weight=weights)
        np.testing.assert_allclose(moves(steps), [0, -4], rtol=8 * EPS)


@both_ways
def test_weights_of_1_give_the_bits_of_no_weights(way):
    tx = accumulate(lenient(optax.adam(0.1)), 3)
    gradients = [np.float32([x, -x / 3]) for x in (0.1, 0.7, 1.3, 2.9, 1e-3, 1e3)]
    params = np.float32([1, -2])
    without = drive(tx, gradients, params=params, way=way)
    ones = drive(tx, gradients, params=params, way=way, weight=floats(*[1] * 6))
    for a, b in zip(without, ones):
        assert_same_bits(a, b)


@both_ways
def test_gradients_of_sums_are_added_as_they_are_and_divided_once(way):
    tx = accumulate(SGD, 2, loss_reduction="sum")
    steps = drive(tx, [6.0, 10.0], weight=floats(3, 5), way=way)
    assert moves(steps) == [0, -2]


@both_ways
def test_means_and_sums_agree(way):
    means, weights = floats(1.5, -2.25, 4), floats(2, 4, 0.5)
    sums = [m * w for m, w in zip(means, weights)]
    by_means = drive(accumulate(SGD, 3), means, weight=weights, way=way)
    tx = accumulate(SGD, 3, loss_reduction="sum")
    by_sums = drive(tx, sums, weight=weights, way=way)
    assert_same_bits(by_means[-1].params, by_sums[-1].params)


@both_ways
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_a_sum_of_weight_0_is_left_out_too(way, loss_reduction):
    tx = accumulate(SGD, 2, loss_reduction=loss_reduction)
    steps = drive(tx, [NAN, 4.0], weight=floats(0, 1), way=way)
    assert moves(steps) == [0, -4]


@both_ways
def test_without_the_mean_the_weighted_sum_is_given(way):
    tx = accumulate(SGD, 2, use_grad_mean=False)
    steps = drive(tx, [1.0, 5.0], weight=floats(3, 0.5), way=way)
    assert moves(steps) == [0, -5.5]
    tx = accumulate(SGD, 2, use_grad_mean=False, loss_reduction="sum")
    steps = drive(tx, [1.0, 5.0], weight=floats(3, 0.5), way=way)
    assert moves(steps) == [0, -6]


def test_a_dropped_micro_batch_takes_its_weight_with_it():
    tx = accumulate(SGD, 3, skip_nonfinite="micro_batch")
    steps = drive(tx, [1.0, NAN, 5.0], weight=floats(3, 100, 1))
    assert moves(steps) == [0, 0, -2]
    assert steps[-1].state.acc_weight == 4


def test_a_negative_traced_weight_never_makes_a_window_count():
    # It cannot be refused while tracing; a window of weight <= 0 changes nothing.
    steps = drive(accumulate(SGD, 2), [1.0, 5.0], weight=floats(1, -3))
    assert moves(steps) == [0, 0]


def test_counts_beyond_a_float_of_16_bits_are_not_rounded():
    # In bfloat16 1040 is 1040 but 1041 is 1040; in float16 70000 is inf.
    params = np.zeros((), jnp.bfloat16)
    gradients = [jnp.bfloat16(1), jnp.bfloat16(3)]
    weights = [np.int32(70_001), np.int32(210_003)]
    steps = drive(accumulate(SGD, 2), gradients, params=params, weight=weights)
    assert steps[-1].params == -2.5
    assert steps[-1].state.acc_weight == 280_004


# --- extra arguments -----------------------------------------------------------------


def remembering(name="value"):
    """An inner transformation whose state is the extra argument it was given last."""

    def update(updates, state, params=None, **extra_args):
        return updates, jnp.asarray(extra_args.get(name, -9), jnp.float32)

    return optax.GradientTransformationExtraArgs(
        lambda _: jnp.full((), -1.0, jnp.float32), update
    )


@both_ways
def test_value_arrives_as_the_weighted_mean_of_the_window(way):
    tx = accumulate(remembering(), 2)
    steps = drive(
        tx, [1.0] * 4, value=floats(1, 5, 10, 30), weight=floats(3, 1, 1, 1), way=way
    )
    assert [float(s.state.inner_state) for s in steps] == [-1, 2, 2, 20]


@both_ways
def test_an_argument_given_only_in_some_micro_steps_has_its_own_weights(way):
    tx = accumulate(remembering(), 4)
    steps = drive(
        tx,
        [1.0] * 4,
        value=[np.float32(4), None, None, np.float32(8)],
        weight=floats(1, 5, 7, 3),
        way=way,
    )
    assert steps[-1].state.inner_state == 7  # (4 * 1 + 8 * 3) / (1 + 3)
    assert accumulation_metrics(steps[-1].state)["value"] == 7
    assert accumulation_metrics(steps[-1].state)["weight"] == 16


def test_an_argument_that_the_emitting_call_is_not_given_the_inner_one_is_not_either():
    # Whether it was given before is known only to the data, not while tracing.
    tx = accumulate(remembering(), 2)
    steps = drive(tx, [1.0] * 2, value=[np.float32(4), None])
    assert steps[-1].state.inner_state == -9
    assert accumulation_metrics(steps[-1].state)["value"] == 4


def test_an_argument_of_an_earlier_window_is_forgotten():
    tx = accumulate(optax.identity(), 2)
    values = [np.float32(4), np.float32(8), None, None, None, np.float32(6)]
    steps = drive(tx, [1.0] * 6, value=values)
    found = [float(accumulation_metrics(s.state)["value"]) for s in steps]
    np.testing.assert_array_equal(found, [4, 6, NAN, NAN, NAN, 6])


@both_ways
def test_the_value_of_a_dropped_or_weightless_micro_batch_is_left_out(way):
    tx = accumulate(remembering(), 3, skip_nonfinite="micro_batch")
    steps = drive(
        tx,
        [1.0, NAN, 1.0],
        value=floats(2, NAN, 4),
        weight=floats(1, 1, 1),
        way=way,
    )
    assert steps[-1].state.inner_state == 3
    steps = drive(
        accumulate(remembering(), 2),
        [1.0, NAN],
        value=floats(2, NAN),
        weight=floats(1, 0),
        way=way,
    )
    assert steps[-1].state.inner_state == 2


def test_values_of_sums_are_divided_once():
    tx = accumulate(remembering(), 2, loss_reduction="sum")
    steps = drive(tx, [1.0, 1.0], value=floats(6, 10), weight=floats(3, 5))
    assert steps[-1].state.inner_state == 2


def test_value_is_a_mean_also_where_the_gradient_is_a_sum():
    tx = accumulate(remembering(), 2, use_grad_mean=False)
    steps = drive(tx, [1.0, 1.0], value=floats(6, 10))
    assert steps[-1].state.inner_state == 8


@both_ways
def test_other_arguments_arrive_as_they_were_given_last(way):
    tx = accumulate(remembering("temperature"), 2)
    steps = drive(tx, [1.0] * 2, temperature=floats(3, 7), way=way)
    assert steps[-1].state.inner_state == 7


def test_which_arguments_are_averaged_can_be_chosen():
    tx = accumulate(remembering("temperature"), 2, average_extra_args=("temperature",))
    steps = drive(tx, [1.0] * 2, temperature=floats(3, 7), value=floats(1, 2))
    assert steps[-1].state.inner_state == 5
    assert "value" not in accumulation_metrics(steps[-1].state)
    tx = accumulate(remembering(), 2, average_extra_args=())
    steps = drive(tx, [1.0] * 2, value=floats(3, 7))
    assert steps[-1].state.inner_state == 7


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_an_averaged_argument_keeps_its_dtype_and_is_summed_in_a_wide_one(dtype):
    seen = []

    def update(updates, state, params=None, *, value, **extra_args):
        seen.append(value.dtype)
        return updates, value.astype(jnp.float32)

    inner = optax.GradientTransformationExtraArgs(lambda _: jnp.zeros(()), update)
    step = jitted(accumulate(inner, 256))
    values = [dtype(1)] * 256
    steps = drive(accumulate(inner, 256), [1.0] * 256, step=step, value=values)
    assert set(seen) == {jnp.dtype(dtype)}
    assert steps[-1].state.inner_state == 1
    assert steps[-1].state.acc_extra_args["value"].total == 256


def test_an_integer_argument_is_averaged_as_a_float():
    tx = accumulate(remembering(), 2)
    steps = drive(tx, [1.0] * 2, value=[np.int32(1), np.int32(2)])
    assert steps[-1].state.inner_state == 1.5
