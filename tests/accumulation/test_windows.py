"""When a window closes, what it holds, and what is left out of it."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradacc_jax import accumulate, accumulation_metrics, apply_gradients, process
from tests.accumulation.driving import (
    SGD,
    WAYS,
    ZERO,
    assert_same_bits,
    counters,
    drive,
    jitted,
    moves,
)
from tests.lenient import lenient

NAN, INF = float("nan"), float("inf")
EPS = np.finfo(np.float32).eps

both_ways = pytest.mark.parametrize("way", WAYS)


def skip_not_finite(grads, gradient_step, params):
    """optax's, without its implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return optax.skip_not_finite(grads, gradient_step, params)


# --- what a window holds -------------------------------------------------------------


@both_ways
def test_a_nan_in_one_window_does_not_reach_the_next(way):  # W1
    inner = optax.chain(optax.zero_nans(), SGD)
    steps = drive(accumulate(inner, 2), [NAN, 1.0, 1.0, 1.0, 1.0, 1.0], way=way)
    assert moves(steps) == [0, 0, 0, -1, 0, -1]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@both_ways
def test_without_skipping_a_bad_window_is_bad_and_the_next_is_clean(way, bad):
    updates = optax.stateless(
        lambda u, _: jnp.nan_to_num(u, nan=-7, posinf=7, neginf=-9)
    )
    expected = {"nan": -7.0, "inf": 7.0, "-inf": -9.0}[str(bad)]
    steps = drive(accumulate(updates, 2), [bad, 1.0, 3.0, 5.0], way=way)
    assert moves(steps) == [0, expected, 0, 4]


@both_ways
def test_an_inner_optimizer_that_divides_by_the_norm_never_sees_half_a_window(
    way,
):  # W2
    unit = optax.stateless(lambda u, _: u / jnp.linalg.norm(u))
    gradients = [np.zeros(2, np.float32), np.ones(2, np.float32)]
    first, second = drive(
        accumulate(unit, 2), gradients, params=np.zeros(2, np.float32), way=way
    )
    np.testing.assert_array_equal(first.params, [0, 0])
    # A norm and a division: two roundings.
    np.testing.assert_allclose(second.params, [0.5**0.5] * 2, rtol=2 * EPS)


@both_ways
@pytest.mark.parametrize("name", ["emit", "traced_emit"])
def test_the_last_micro_batches_of_an_epoch_can_be_emitted_as_a_short_window(
    way, name
):  # W3
    gradients = [float(i) for i in range(1, 11)]
    if name == "emit":
        ends = {"emit": [None] * 9 + [True] + [None] * 4}
    else:
        ends = {"traced_emit": [np.bool_(i == 9) for i in range(14)]}
    next_epoch = [2.0] * 4
    steps = drive(accumulate(SGD, 4), gradients + next_epoch, way=way, **ends)
    # The 9 and the 10, divided by 2; none of it in the next epoch.
    assert moves(steps) == [0, 0, 0, -2.5, 0, 0, 0, -6.5, 0, -9.5, 0, 0, 0, -2]


@both_ways
def test_k_by_schedule_closes_each_window_at_its_own_count(way):  # W4
    tx = accumulate(SGD, lambda n: jnp.array([1, 2, 4])[jnp.minimum(n, 2)])
    chex.clear_trace_counter()
    step = jitted(tx, way)
    traced = jax.jit(chex.assert_max_traces(step.__wrapped__, n=1))
    steps = drive(tx, [float(i) for i in range(11)], step=traced)
    closed = [i for i, s in enumerate(steps) if s.state.emitted]
    assert closed == [0, 2, 6, 10]
    assert [m for m in moves(steps) if m] == [-1.5, -4.5, -8.5]


def test_a_traced_k_compiles_once_for_every_k():  # W4
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(k, params, state, grads):
        return apply_gradients(accumulate(SGD, k), params, state, grads)

    for k in (1, 2, 3, 5):
        params, state = jnp.zeros(()), accumulate(SGD, 99).init(ZERO)
        closed = []
        for _ in range(10):
            params, state = step(k, params, state, jnp.ones(()))
            closed.append(bool(state.emitted))
        assert closed == [i % k == 0 for i in range(1, 11)]
        assert params == -(10 // k)


def test_a_traced_k_that_shrinks_below_the_open_count_closes_the_window():
    step = jax.jit(lambda k, *args: apply_gradients(accumulate(SGD, k), *args))
    params, state = jnp.zeros(()), accumulate(SGD, 9).init(ZERO)
    for k, closes in ((9, False), (9, False), (9, False), (2, True), (2, False)):
        params, state = step(k, params, state, jnp.ones(()))
        assert bool(state.emitted) is closes
    assert params == -1  # the mean of the four


@pytest.mark.parametrize(
    "k",
    [
        2,
        np.int64(2),
        np.array(2, np.uint8),
        lambda n: 2,
        lambda n: np.int16(2),
        lambda n: jnp.uint8(2),
        lambda n: jnp.full_like(n, 2),
    ],
)
def test_every_kind_of_integer_is_a_k(k):
    steps = drive(accumulate(SGD, k), [1.0, 3.0, 5.0, 7.0])
    assert moves(steps) == [0, -2, 0, -6]


def test_a_jax_integer_is_a_k():
    steps = drive(accumulate(SGD, jnp.uint8(2)), [1.0, 3.0])
    assert moves(steps) == [0, -2]


@both_ways
def test_use_grad_mean_false_gives_the_sum(way):
    steps = drive(
        accumulate(SGD, 2, use_grad_mean=False), [1.0, 3.0, 5.0, 7.0], way=way
    )
    assert moves(steps) == [0, -4, 0, -12]


# --- emit ----------------------------------------------------------------------------


@both_ways
def test_a_python_false_keeps_a_window_open_beyond_k(way):
    emit = [False, False, False, True, False, True]
    steps = drive(
        accumulate(SGD, 2), [1.0, 2.0, 3.0, 6.0, 5.0, 7.0], way=way, emit=emit
    )
    assert moves(steps) == [0, 0, 0, -3, 0, -6]
    assert [c[0] for c in counters(steps)] == [1, 2, 3, 0, 1, 0]


@both_ways
def test_a_traced_false_does_not_keep_a_window_open(way):
    never = [np.bool_(False)] * 4
    steps = drive(accumulate(SGD, 2), [1.0, 3.0, 5.0, 7.0], way=way, traced_emit=never)
    assert moves(steps) == [0, -2, 0, -6]


@both_ways
def test_emit_on_the_first_micro_step_closes_a_window_of_one(way):
    for emit in ({"emit": [True] * 2}, {"traced_emit": [np.bool_(True)] * 2}):
        steps = drive(accumulate(SGD, 4), [3.0, 5.0], way=way, **emit)
        assert moves(steps) == [-3, -5]
        assert counters(steps) == [(0, 1, True), (0, 2, True)]


def conditionals(tx, weight, emit):
    """How many conditionals the program of one ``update`` has, traced and compiled."""
    params = jnp.ones(3)
    args = (params, tx.init(params), params, weight)

    def update(grads, state, params, weight):
        return tx.update(grads, state, params, weight=weight, emit=emit)

    jaxpr = str(jax.make_jaxpr(update)(*args))
    compiled = jax.jit(update).lower(*args).compile().as_text()
    return jaxpr.count("cond["), compiled.count(" conditional(")


@pytest.mark.parametrize("emit", [True, False])
def test_a_python_bool_for_emit_compiles_a_program_without_any_conditional(emit):
    tx = accumulate(lenient(optax.adamw(0.1)), 4)
    assert conditionals(tx, None, emit) == (0, 0)
    assert conditionals(tx, None, None) == (1, 1)


def test_with_weights_only_the_emitting_program_has_one_for_a_window_of_weight_0():
    tx = accumulate(lenient(optax.adamw(0.1)), 4)
    assert conditionals(tx, 2.0, False) == (0, 0)
    assert conditionals(tx, 2.0, True) == (1, 1)


def test_a_python_bool_and_a_traced_bool_close_the_same_window():
    tx = accumulate(optax.trace(0.5), 3)
    gradients = [1.0, 2.0, 3.0, 4.0, 5.0]
    closing = [False, True, False, False, True]
    static = drive(tx, gradients, emit=closing)
    traced = drive(tx, gradients, traced_emit=[np.bool_(e) for e in closing])
    for a, b in zip(static, traced):
        assert_same_bits(a, b)


@pytest.mark.parametrize("options", ["micro_batch", "window", "should_skip_update_fn"])
@pytest.mark.parametrize("traced", [True, False])
@both_ways
def test_emit_closes_even_on_a_dropped_micro_batch(way, traced, options):
    if options == "should_skip_update_fn":
        tx = accumulate(SGD, 9, should_skip_update_fn=skip_not_finite)
    else:
        tx = accumulate(SGD, 9, skip_nonfinite=options)
    closing = [False, False, True, True, False, True]
    emit = (
        {"traced_emit": [np.bool_(e) for e in closing]} if traced else {"emit": closing}
    )
    steps = drive(tx, [1.0, 3.0, NAN, NAN, 5.0, 7.0], way=way, **emit)
    first = 0 if options == "window" else -2
    assert moves(steps) == [0, 0, first, 0, 0, -6]
    assert [bool(s.state.emitted) for s in steps] == closing
    assert [int(s.state.gradient_step) for s in steps] == [0, 0, 1, 2, 2, 3]


# --- skipping ------------------------------------------------------------------------


@both_ways
def test_a_dropped_micro_batch_counts_towards_k_with_weight_0(way):  # W5
    tx = accumulate(SGD, 2, skip_nonfinite="micro_batch")
    steps = drive(tx, [1.0, NAN, 3.0, 5.0, 7.0], way=way)
    assert moves(steps) == [0, -1, 0, -4, 0]
    assert [int(s.state.skips.total) for s in steps] == [0, 1, 1, 1, 1]
    assert [int(s.state.skips.consecutive) for s in steps] == [0, 1, 0, 0, 0]


@both_ways
def test_a_window_with_a_bad_micro_batch_can_be_given_up(way):  # W5
    tx = accumulate(SGD, 2, skip_nonfinite="window")
    steps = drive(tx, [1.0, NAN, 3.0, 5.0, 7.0], way=way)
    assert moves(steps) == [0, 0, 0, -4, 0]
    assert [int(s.state.skips.total) for s in steps] == [0, 1, 1, 1, 1]
    assert [int(s.state.skips.consecutive) for s in steps] == [0, 1, 1, 0, 0]


@both_ways
def test_the_skip_function_of_multisteps_lengthens_the_window_as_there(way):  # W5
    tx = accumulate(SGD, 2, should_skip_update_fn=skip_not_finite)
    steps = drive(tx, [1.0, NAN, 3.0, 5.0, 7.0], way=way)
    assert moves(steps) == [0, 0, -2, 0, -6]
    assert [int(s.state.mini_step) for s in steps] == [1, 1, 0, 1, 0]
    assert [int(s.state.skips.total) for s in steps] == [0, 1, 1, 1, 1]
    assert [bool(s.state.skip_state["should_skip"]) for s in steps][:3] == [
        False,
        True,
        False,
    ]


def test_a_skip_function_sees_the_gradient_step_and_the_parameters():
    def skip(grads, gradient_step, params):
        return (grads > 10) & (gradient_step == 1), {"seen": params + grads}

    steps = drive(
        accumulate(SGD, 2, should_skip_update_fn=skip), [11.0, 11.0, 11.0, 1.0, 3.0]
    )
    assert moves(steps) == [0, -11, 0, 0, -2]
    assert [float(s.state.skip_state["seen"]) for s in steps] == [11, 11, 0, -10, -8]


MODES = (None, "micro_batch", "window", "should_skip_update_fn")


def transformation(mode, k=3):
    if mode == "should_skip_update_fn":
        return accumulate(SGD, k, should_skip_update_fn=skip_not_finite)
    return accumulate(SGD, k, skip_nonfinite=mode)


def expected_moves(mode, gradients, k=3):
    """What a plain loop over the gradients does."""
    moved, window, count = [], [], 0
    for g in gradients:
        bad = not np.isfinite(g)
        if mode == "should_skip_update_fn" and bad:
            moved.append(0.0)
            continue
        count += 1
        if mode != "micro_batch" or not bad:
            window.append(g)
        if count < k:
            moved.append(0.0)
            continue
        given_up = mode == "window" and not np.all(np.isfinite(window))
        moved.append(-np.mean(window) if window and not given_up else 0.0)
        window, count = [], 0
    return moved


@pytest.mark.parametrize("mode", MODES[1:])
@both_ways
def test_nan_and_inf_in_every_position_of_two_windows(way, mode):
    tx = transformation(mode)
    step = jitted(tx, way)
    for positions in itertools.chain.from_iterable(
        itertools.combinations(range(6), n) for n in range(3)
    ):
        for bad in (NAN, INF, -INF):
            gradients = [1.0, 2.0, 6.0, 4.0, 8.0, 3.0]
            for i in positions:
                gradients[i] = bad
            steps = drive(tx, gradients, step=step)
            expected = expected_moves(mode, gradients)
            # Sums of small integers are exact; the reciprocal and its product round.
            np.testing.assert_allclose(moves(steps), expected, rtol=8 * EPS, atol=0)


@both_ways
def test_inf_and_minus_inf_in_one_window_are_no_finite_sum(way):
    for mode, expected in (("micro_batch", [0, 0, -2.0]), ("window", [0, 0, 0])):
        steps = drive(transformation(mode), [INF, -INF, 2.0], way=way)
        assert moves(steps) == expected


@pytest.mark.parametrize("mode", ["micro_batch", "window"])
def test_counters_never_depend_on_data(mode):
    tx = transformation(mode)
    step = jitted(tx)
    good = counters(drive(tx, [1.0] * 7, step=step))
    for i in range(7):
        gradients = [1.0] * 7
        gradients[i] = NAN
        assert counters(drive(tx, gradients, step=step)) == good
        weights = [np.float32(g == 1) for g in gradients]
        assert counters(drive(tx, gradients, step=step, weight=weights)) == good
    assert counters(drive(tx, [NAN] * 7, step=step)) == good


def test_one_bad_number_in_one_leaf_drops_the_whole_micro_batch():
    params = {"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float16), "n": None}
    good = jax.tree.map(np.ones_like, params)
    bad = {"a": good["a"], "b": np.array([1, np.inf], np.float16), "n": None}
    tx = accumulate(SGD, 2, skip_nonfinite="micro_batch")
    _, last = drive(tx, [good, bad], params=params)
    np.testing.assert_array_equal(last.params["a"], [-1] * 3)
    np.testing.assert_array_equal(last.params["b"], [-1] * 2)


def test_a_gradient_that_is_bad_where_it_is_not_differentiable_is_not_looked_at():
    params = {"w": np.zeros((), np.float32), "n": np.int32(5)}
    grads = {"w": np.float32(2), "n": np.int32(0)}
    tx = accumulate(lenient(SGD), 2, skip_nonfinite="micro_batch")
    last = drive(tx, [grads, grads], params=params)[-1]
    assert (last.params["w"], last.params["n"]) == (-2, 5)


# --- windows of weight 0 -------------------------------------------------------------

EMPTY = {
    "every weight is 0": (None, [1.0, NAN, 3.0], [0, 0, 0]),
    "every micro-batch is dropped": ("micro_batch", [NAN, INF, NAN], [1, 2, 3]),
    "those that are not dropped weigh 0": ("micro_batch", [NAN, 2.0, INF], [1, 0, 1]),
    "the window is given up": ("window", [1.0, NAN, 2.0], [1, 2, 3]),
}


@pytest.mark.parametrize("case", EMPTY)
@both_ways
def test_a_window_of_weight_0_changes_nothing_but_counters(way, case):  # W6
    mode, gradients, weights = EMPTY[case]
    tx = accumulate(lenient(optax.adamw(0.1, weight_decay=0.5)), 3, skip_nonfinite=mode)
    # A full window first, so that the inner state is not the initial one.
    steps = drive(
        tx,
        [1.0, 2.0, 3.0, *gradients, 1.0, 1.0, 1.0],
        params=np.float32(3),
        way=way,
        weight=[np.float32(w) for w in [1, 1, 1, *weights, 1, 1, 1]],
    )
    before, after, next_window = steps[2], steps[5], steps[8]
    assert_same_bits(after.params, before.params)
    assert_same_bits(after.state.inner_state, before.state.inner_state)
    assert counters([after]) == [(0, 2, True)]
    assert after.state.acc_weight == 0
    assert np.isfinite(next_window.params)
    assert next_window.params != before.params


# --- where things stand --------------------------------------------------------------


@both_ways
def test_weight_decay_after_the_accumulator_decays_once_a_window(way):  # W7
    decay = optax.chain(optax.add_decayed_weights(0.1), SGD)
    tx = process(optax.identity(), lambda opt: accumulate(opt, 2), decay)
    steps = drive(tx, [0.0] * 4, params=np.float32(1), way=way)
    np.testing.assert_allclose(steps[-1].params, 0.81, rtol=3 * EPS)


def test_in_a_plain_chain_what_stands_after_the_accumulator_runs_every_micro_step():
    # W7 the wrong way round. optax.chain cannot know; process() has no such place.
    tx = optax.chain(accumulate(optax.identity(), 2), optax.add_decayed_weights(-0.1))
    steps = drive(tx, [0.0] * 4, params=np.float32(1))
    np.testing.assert_allclose(steps[-1].params, 0.9**4, rtol=5 * EPS)


@pytest.mark.parametrize("way", WAYS)
def test_clipping_has_two_places_with_two_meanings(way):  # C4
    clip, gradients = optax.clip_by_global_norm(1.0), ([3.0, 0.0], [0.0, 0.5])
    gradients = [np.array(g, np.float32) for g in gradients]
    zeros = np.zeros(2, np.float32)

    def k2(opt):
        return accumulate(opt, 2)

    each = drive(process(clip, k2, SGD), gradients, params=zeros, way=way)
    np.testing.assert_allclose(each[-1].params, [-0.5, -0.25], rtol=2 * EPS)
    boundary = process(optax.identity(), k2, optax.chain(clip, SGD))
    once = drive(boundary, gradients, params=zeros, way=way)
    mean = np.array([1.5, 0.25])
    expected = -mean / np.linalg.norm(mean)
    np.testing.assert_allclose(once[-1].params, expected, rtol=4 * EPS)


# --- k = 1 ---------------------------------------------------------------------------


def test_k_1_is_the_program_of_the_bare_optimizer():  # W8
    opt = lenient(optax.adamw(0.1))

    def cost(tx, size):
        params = jnp.ones(size)
        step = jax.jit(
            lambda p, s, g: apply_gradients(tx, p, s, g), donate_argnums=(0, 1)
        )
        compiled = step.lower(params, tx.init(params), params).compile()
        assert " conditional(" not in compiled.as_text()
        analysis = compiled.cost_analysis()
        return np.array([analysis["flops"], analysis["bytes accessed"]])

    more = [cost(accumulate(opt, 1), size) - cost(opt, size) for size in (1000, 8000)]
    # What there is more is the state's scalars (3 operations, 90 bytes with jax 0.12.0,
    # 114 with 0.10.2), and the same for any number of parameters.
    np.testing.assert_array_equal(more[0], more[1])
    assert more[0][0] <= 10
    assert more[0][1] <= 200


@pytest.mark.parametrize("options", [{}, {"use_grad_mean": False}])
@both_ways
def test_k_1_has_no_accumulator_and_gives_the_bare_optimizers_bits(way, options):
    opt = lenient(optax.adamw(0.1))
    gradients = [np.array([1e-3, -2, 1 / 3], np.float32) * i for i in range(3)]
    params = np.ones(3, np.float32)
    tx = accumulate(opt, 1, **options)
    steps = drive(tx, gradients, params=params, way=way)
    bare = drive(opt, gradients, params=params, way=way)
    for a, b in zip(steps, bare):
        assert a.state.acc_grads == ()
        assert_same_bits(a.params, b.params)
        assert_same_bits(a.state.inner_state, b.state)
    assert counters(steps) == [(0, 1, True), (0, 2, True), (0, 3, True)]


@both_ways
def test_the_mean_of_one_weighted_gradient_is_that_gradient_to_the_bit(way):
    # 3 * (1/3) is not 1 in floating point.
    gradients = [np.array([1 / 3, 1e-30, 7], np.float32)] * 2
    params = np.zeros(3, np.float32)
    weights = [np.float32(3), np.float32(0)]
    first, second = drive(
        accumulate(optax.identity(), 1),
        gradients,
        params=params,
        way=way,
        weight=weights,
    )
    assert_same_bits(first.params, gradients[0])
    assert_same_bits(second.params, first.params)


@both_ways
def test_k_1_skips_what_is_not_finite(way):
    for mode in MODES[1:]:
        steps = drive(transformation(mode, k=1), [1.0, NAN, INF, 3.0], way=way)
        assert moves(steps) == [-1, 0, 0, -3]
        assert [int(s.state.skips.consecutive) for s in steps] == [0, 1, 2, 0]


def test_k_1_with_sums_divides_by_the_weight():
    tx = accumulate(SGD, 1, loss_reduction="sum")
    steps = drive(tx, [6.0, 5.0], weight=[np.float32(3), np.float32(2)])
    assert moves(steps) == [-2, -2.5]


def test_the_metrics_of_an_open_window_are_of_what_it_holds():
    tx = accumulate(SGD, 3)
    steps = drive(
        tx,
        [1.0, 2.0, 3.0, 4.0],
        weight=[np.float32(w) for w in (1, 3, 4, 2)],
        value=[np.float32(v) for v in (8, 4, 2, 7)],
    )
    found = [accumulation_metrics(s.state) for s in steps]
    assert [float(m["weight"]) for m in found] == [1, 4, 8, 2]
    assert [float(m["value"]) for m in found] == [8, 5, 3.5, 7]
    assert [bool(m["emitted"]) for m in found] == [False, False, True, False]
