"""The accumulator inside and around what optax and JAX have."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradacc_jax import accumulate, accumulation_metrics, apply_gradients, has_updated
from tests.accumulation.driving import (
    SGD,
    WAYS,
    ZERO,
    assert_same_bits,
    counters,
    drive,
    jitted,
    moves,
    signature,
)
from tests.lenient import lenient

NAN = float("nan")
EPS = np.finfo(np.float32).eps

both_ways = pytest.mark.parametrize("way", WAYS)

PARAMS = {"w": np.float32([[1, -2, 0.5], [3, -0.0, 7]]), "b": np.float32([0.25, -1])}
ADAMW = lenient(optax.adamw(0.1, weight_decay=0.25))
K = 3


def gradients(n, seed=0):
    rng = np.random.default_rng(seed)

    def draw(p):
        return rng.normal(size=p.shape).astype(np.float32)

    return [jax.tree.map(draw, PARAMS) for _ in range(n)]


def labels(params):
    return {"w": "train", "b": "other"}


def counting(calls, name="call"):
    """A transformation that does nothing but note that it runs."""

    def update(updates, state, params=None):
        jax.debug.callback(lambda: calls.append(name))
        return updates, state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def jitted_update(opt):
    opt = optax.with_extra_args_support(opt)
    return optax.GradientTransformationExtraArgs(opt.init, jax.jit(opt.update))


def dropping_extra_args(opt):
    return optax.GradientTransformation(
        opt.init, lambda grads, state, params=None: opt.update(grads, state, params)
    )


def acc(opt=ADAMW, k=K, **options):
    return accumulate(opt, k, **options)


COMPOSITIONS = {
    "bare": acc(),
    "chain": optax.chain(optax.clip(1.5), acc(), optax.scale(0.5)),
    "named_chain": optax.named_chain(("clip", optax.clip(1.5)), ("acc", acc())),
    "partition": optax.partition({"train": acc(), "other": SGD}, labels),
    "partition with a frozen part": optax.partition(
        {"train": acc(), "other": optax.set_to_zero()}, labels
    ),
    "masked": optax.chain(
        optax.masked(acc(), {"w": True, "b": False}),
        optax.masked(optax.set_to_zero(), {"w": False, "b": True}),
    ),
    "inside of it: partition": acc(
        optax.partition({"train": ADAMW, "other": SGD}, labels)
    ),
    "apply_if_finite": optax.apply_if_finite(acc(), 5),
    "inside of it: apply_if_finite": acc(optax.apply_if_finite(ADAMW, 5)),
    "inside of it: inject_hyperparams": acc(
        lenient(optax.inject_hyperparams(optax.adamw)(0.1))
    ),
    "around a state of its own": optax.chain(lenient(optax.trace(0.5)), acc()),
    "before a state of its own": optax.chain(acc(), lenient(optax.trace(0.5))),
    "deep": optax.chain(
        optax.partition(
            {"train": optax.named_chain(("clip", optax.clip(2.0)), ("acc", acc()))}
            | {"other": optax.set_to_zero()},
            labels,
        )
    ),
    "flatten": optax.flatten(acc()),
    "nested": acc(acc(ADAMW, 2), 2),
    "two with different counters": optax.partition(
        {"train": acc(k=2), "other": acc(k=3)}, labels
    ),
    "a jitted inner update": acc(jitted_update(ADAMW)),
    "a jitted update around": optax.chain(jitted_update(acc()), optax.scale(0.5)),
    "skipping micro-batches": optax.chain(acc(skip_nonfinite="micro_batch")),
    "skipping windows": acc(skip_nonfinite="window"),
    "skipping as MultiSteps does": acc(
        should_skip_update_fn=lambda g, n, p: (jnp.max(g["b"]) > 1.5, ())
    ),
    "k by schedule": acc(k=lambda n: n % 2 + 2),
    "k = 1": acc(k=1),
    "sums": acc(loss_reduction="sum", use_grad_mean=True),
    "conditionally_transform": optax.conditionally_transform(
        acc(), lambda step, **_: step % 4 != 1
    ),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_apply_gradients_is_update_and_apply_updates(name):
    tx, grads = COMPOSITIONS[name], gradients(8)
    given = {
        "value": [np.float32(i) for i in range(8)],
        "weight": [np.float32(w) for w in (1, 2, 0.5, 3, 1, 0, 0, 0)],
        "traced_emit": [np.bool_(i == 4) for i in range(8)],
    }
    fused = drive(tx, grads, params=PARAMS, **given)
    plain = drive(tx, grads, params=PARAMS, way="update", **given)
    start = signature(tx.init(PARAMS))
    before_a = before_b = PARAMS
    for a, b in zip(fused, plain):
        assert_same_bits(a.state, b.state)
        assert signature(a.state) == start
        # In one program the learning rate and the addition to the parameter become one
        # operation (a fused multiply-add), in the other two: an ulp of the parameter.
        chex.assert_trees_all_close(a.params, b.params, rtol=2 * EPS, atol=2 * EPS)
        # What is not moved is the same to the bit in both.
        assert unmoved(a.params, before_a) == unmoved(b.params, before_b)
        before_a, before_b = a.params, b.params


def unmoved(tree, before):
    return jax.tree.map(
        lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), tree, before
    )


@pytest.mark.optax_promotes
def test_a_multisteps_around_it_counts_windows_times_its_own_k():
    tx = optax.MultiSteps(accumulate(SGD, 2), 2).gradient_transformation()
    for way in WAYS:
        steps = drive(tx, [float(i) for i in range(8)], way=way)
        # MultiSteps throws away what its inner transformation returns in between.
        assert len([m for m in moves(steps) if m]) == 2


# --- extra arguments -----------------------------------------------------------------


def plateau(**options):
    return lenient(optax.contrib.reduce_on_plateau(**options))


@both_ways
def test_a_plateau_scheduler_inside_two_chains_gets_its_value(way):  # C1
    tx = optax.chain(accumulate(optax.chain(SGD, plateau()), 2))
    steps = drive(tx, [1.0, 3.0], value=[np.float32(1), np.float32(3)], way=way)
    assert moves(steps) == [0, -2]


@both_ways
def test_a_plateau_scheduler_sees_the_windows_mean_value(way):  # C2
    tx = accumulate(optax.chain(SGD, plateau()), 2)
    values = [np.float32(v) for v in (1, 100, 1, 100)]
    for weights, mean in (([1, 1, 1, 1], 50.5), ([9, 1, 9, 1], 10.9)):
        weight = [np.float32(w) for w in weights]
        steps = drive(tx, [1.0] * 4, value=values, weight=weight, way=way)
        best = optax.tree.get(steps[-1].state, "best_value")
        np.testing.assert_allclose(best, mean, rtol=4 * EPS)


@both_ways
def test_without_a_value_the_plateau_scheduler_complains_as_without_us(way):
    tx = accumulate(optax.chain(SGD, plateau()), 2)
    with pytest.raises(TypeError, match="value"):
        drive(tx, [1.0], way=way)


def test_weight_and_emit_of_apply_gradients_need_an_accumulator():
    with pytest.raises(ValueError, match=r"weight=3.*wrap the optimizer in accumulate"):
        apply_gradients(SGD, ZERO, SGD.init(ZERO), ZERO, weight=3)
    with pytest.raises(ValueError, match=r"emit=True.*wrap the optimizer in accumul"):
        apply_gradients(SGD, ZERO, SGD.init(ZERO), ZERO, emit=True)
    params, _ = apply_gradients(SGD, jnp.ones(()), SGD.init(ZERO), jnp.ones(()))
    assert params == 0


def test_a_wrapper_that_drops_extra_arguments_still_works_without_any():
    tx = dropping_extra_args(accumulate(SGD, 2))
    assert moves(drive(tx, [1.0, 3.0, 5.0, 7.0])) == [0, -2, 0, -6]


@pytest.mark.parametrize("given", [{"weight": [np.float32(3)]}, {"emit": [True]}])
def test_a_wrapper_that_drops_a_weight_or_emit_does_not_go_unnoticed(given):
    tx = optax.chain(dropping_extra_args(accumulate(SGD, 2)))
    with pytest.raises(ValueError, match="a wrapper in tx drops extra arguments"):
        drive(tx, [1.0], **given)


# --- what runs, and how often --------------------------------------------------------


@both_ways
@pytest.mark.parametrize("static", [True, False])
def test_the_inner_optimizer_runs_once_a_window(way, static):  # C3
    calls = []
    tx = accumulate(optax.chain(counting(calls), SGD), 4)
    given = {"emit": [i % 4 == 3 for i in range(8)]} if static else {}
    steps = drive(tx, [1.0] * 8, way=way, **given)
    jax.effects_barrier()
    assert len(calls) == 2
    assert steps[-1].params == -2


@pytest.mark.optax_promotes
@both_ways
def test_a_line_search_runs_once_a_window(way):  # C3
    calls = []

    def value_fn(p):
        jax.debug.callback(lambda: calls.append("evaluated"))
        return (p - 3.0) ** 2

    inner = optax.chain(SGD, optax.scale_by_backtracking_linesearch(5))
    tx = accumulate(inner, 3)

    @jax.jit
    def step(params, state, grads):
        value, grads = (params - 3.0) ** 2, 2 * (params - 3.0)
        extra = {"value": value, "grad": grads, "value_fn": value_fn}
        if way == "apply_gradients":
            return apply_gradients(tx, params, state, grads, **extra)
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    params, state = jnp.zeros(()), tx.init(ZERO)
    for silent in (True, True, False, True):
        calls.clear()
        before = params
        params, state = step(params, state, None)
        jax.effects_barrier()
        assert (not calls) is silent
        assert (params == before) == silent
    # The step of 6, shortened once to 0.8 of it, decreases (p - 3)**2 enough.
    np.testing.assert_allclose(params, 4.8, rtol=4 * EPS)


@pytest.mark.parametrize("place", ["before", "after", "before, deep", "jitted"])
@both_ways
def test_a_callback_around_the_accumulator_fires_once_a_micro_step(way, place):
    calls = []
    callback, inner = counting(calls), accumulate(SGD, 3)
    tx = {
        "before": optax.chain(callback, inner),
        "after": optax.chain(inner, callback),
        "before, deep": optax.chain(
            optax.partition({0: optax.chain(callback, inner)}, 0)
        ),
        "jitted": optax.chain(jitted_update(callback), inner),
    }[place]
    steps = drive(tx, [1.0] * 6, way=way, weight=[np.float32(1)] * 6)
    jax.effects_barrier()
    assert len(calls) == 6
    assert steps[-1].params == -2


def emitted_steps(opt, grads, way):
    """Parameters after each window of three, and as ``opt`` moves them by the means."""
    steps = drive(accumulate(opt, 3), grads, params=PARAMS, way=way)
    means = [
        jax.tree.map(
            lambda *g: np.mean(np.float64(g), 0).astype(np.float32), *grads[i:][:3]
        )
        for i in range(0, len(grads), 3)
    ]
    bare = drive(opt, means, params=PARAMS, way="update")
    return [s.params for s in steps[2::3]], [s.params for s in bare]


@both_ways
@pytest.mark.parametrize(
    "opt",
    [
        optax.sgd(optax.piecewise_constant_schedule(1.0, {1: 0.1, 2: 0.1})),
        optax.adam(optax.linear_schedule(0.1, 0.01, 3)),
        optax.adamw(0.1, weight_decay=0.25),
        optax.chain(optax.ema(0.9), optax.scale(-1.0)),
    ],
    ids=["a schedule", "bias correction", "weight decay", "an average"],
)
def test_what_counts_counts_emitted_steps(way, opt):  # C6
    ours, bare = emitted_steps(lenient(opt), gradients(9), way)
    for a, b in zip(ours, bare, strict=True):
        # Three roundings of the mean, some ten in the optimizer, carried over 3 steps;
        # adam divides by the root of the second moment, which doubles none of them.
        chex.assert_trees_all_close(a, b, rtol=64 * EPS, atol=16 * EPS)


@both_ways
def test_hyperparameters_are_found_and_set_through_the_accumulator(way):  # C7
    inner = optax.inject_hyperparams(optax.sgd)(
        optax.piecewise_constant_schedule(1.0, {1: 0.5})
    )
    tx = optax.chain(optax.clip(9.0), accumulate(lenient(inner), 2))
    steps = drive(tx, [1.0] * 6, way=way)
    # A schedule has a state of the same name; optax wants to know which is meant.
    rate = partial(optax.tree.get, filtering=lambda _, x: isinstance(x, jax.Array))
    rates = [float(rate(s.state, "learning_rate")) for s in steps]
    # What the step before used: the schedule counts emitted steps.
    assert rates == [1, 1, 1, 0.5, 0.5, 0.5]
    assert moves(steps) == [0, -1, 0, -0.5, 0, -0.5]

    fixed = accumulate(lenient(optax.inject_hyperparams(optax.sgd)(1.0)), 2)
    state = optax.tree.set(fixed.init(ZERO), learning_rate=np.float32(0.25))
    step = jitted(fixed, way)
    params, state = step(ZERO, state, ZERO + 1)
    params, state = step(params, state, ZERO + 1)
    assert params == -0.25


def test_inject_hyperparams_around_it_is_refused():
    # Its schedules would count micro-steps.
    tx = optax.inject_hyperparams(accumulate)(SGD, 2)
    with pytest.raises(ValueError, match="inject_hyperparams belongs inside"):
        tx.init(ZERO)
    tx = optax.inject_hyperparams(lambda rate: accumulate(optax.sgd(rate), 2))
    steps = drive(
        lenient(tx(optax.piecewise_constant_schedule(1.0, {1: 0.5}))), [1.0] * 2
    )
    # Nobody can see it in there. It counts micro-steps: the second has the rate 0.5.
    assert moves(steps) == [0, -0.5]


def test_tree_map_params_finds_what_is_like_the_parameters():
    tx = accumulate(optax.adam(0.1), 2)
    state = optax.tree.map_params(tx, lambda x: "sharded", tx.init(PARAMS))
    assert state.acc_grads == {"w": "sharded", "b": "sharded"}
    assert optax.tree.get(state, "mu") == {"w": "sharded", "b": "sharded"}
    assert state.mini_step == 0


# --- memory --------------------------------------------------------------------------


def bytes_of(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("way_of_freezing", ["partition", "masked", "None"])
def test_a_frozen_leaf_has_no_accumulator(way_of_freezing):  # C5
    params = {"frozen": jnp.zeros((64, 64)), "lora": jnp.zeros((64, 2))}
    is_trained = {"frozen": False, "lora": True}
    opt = accumulate(SGD, 2)
    if way_of_freezing == "partition":
        kinds = {"frozen": "frozen", "lora": "trained"}
        tx = optax.partition({"trained": opt, "frozen": optax.set_to_zero()}, kinds)
    elif way_of_freezing == "masked":
        tx = optax.masked(opt, is_trained)
    else:
        tx, params = opt, params | {"frozen": None}
    state = tx.init(params)
    sums = optax.tree.get(state, "acc_grads")
    assert bytes_of(sums) == 64 * 2 * 4
    # And all the rest is scalars.
    assert bytes_of(state) - bytes_of(sums) <= 64
    ones = jax.tree.map(jnp.ones_like, params)
    last = drive(tx, [ones, ones], params=params)[-1]
    np.testing.assert_array_equal(last.params["lora"], -1)


# --- several of them -----------------------------------------------------------------


@both_ways
def test_nested_windows_multiply(way):
    tx = accumulate(accumulate(SGD, 2), 3)
    steps = drive(tx, [float(i) for i in range(12)], way=way)
    assert moves(steps) == [0] * 5 + [-2.5] + [0] * 5 + [-8.5]


@both_ways
def test_accumulators_with_different_counters_each_keep_their_own(way):
    tx = optax.partition({"train": acc(SGD, 2), "other": acc(SGD, 3)}, labels)
    ones = jax.tree.map(np.ones_like, PARAMS)
    steps = drive(tx, [ones] * 6, params=jax.tree.map(np.zeros_like, PARAMS), way=way)
    assert [float(s.params["w"][0, 0]) for s in steps] == [0, -1, -1, -2, -2, -3]
    assert [float(s.params["b"][0]) for s in steps] == [0, 0, -1, -1, -1, -2]


def test_what_is_asked_of_one_accumulator_is_refused_for_two_or_none():
    tx = optax.partition({"train": acc(SGD, 2), "other": acc(SGD, 3)}, labels)
    for ask in (has_updated, accumulation_metrics):
        with pytest.raises(ValueError, match="holds 2 AccumulateStates, expected 1"):
            ask(tx.init(PARAMS))
        with pytest.raises(ValueError, match="holds 0 AccumulateStates, expected 1"):
            ask(SGD.init(PARAMS))


def test_has_updated_finds_the_accumulator_wherever_it_sits():
    for name in ("bare", "named_chain", "deep"):
        steps = drive(COMPOSITIONS[name], gradients(3), params=PARAMS)
        assert [bool(has_updated(s.state)) for s in steps] == [False, False, True]
    tx = COMPOSITIONS["bare"]
    assert tx.has_updated(tx.init(PARAMS)) == False  # noqa: E712  # an array
    assert tx.gradient_transformation() is tx
    assert isinstance(tx, optax.GradientTransformationExtraArgs)


# --- wrappers that depend on the data ------------------------------------------------


@pytest.mark.optax_promotes
@both_ways
def test_apply_if_finite_around_it_holds_the_window_open_for_a_bad_micro_batch(way):
    # It leaves the micro-batch out before it arrives: the window becomes longer, as by
    # should_skip_update_fn.
    tx = optax.apply_if_finite(accumulate(SGD, 2), 5)
    steps = drive(tx, [1.0, NAN, 3.0, 5.0, 7.0], way=way)
    assert moves(steps) == [0, 0, -2, 0, -6]


@pytest.mark.optax_promotes
@both_ways
def test_apply_if_finite_inside_gives_up_the_window(way):
    tx = accumulate(optax.apply_if_finite(SGD, 5), 2)
    steps = drive(tx, [1.0, NAN, 3.0, 5.0, 7.0], way=way)
    assert moves(steps) == [0, 0, 0, -4, 0]


@both_ways
def test_a_conditional_wrapper_that_leaves_a_micro_step_out_leaves_it_out(way):
    # On micro-step 2 it passes the gradient on, as such wrappers do.
    tx = optax.conditionally_transform(accumulate(SGD, 2), lambda step: step != 2)
    steps = drive(tx, [1.0, 3.0, 100.0, 5.0, 7.0], way=way)
    assert moves(steps) == [0, -2, 100, 0, -6]


# --- JAX -----------------------------------------------------------------------------


@both_ways
def test_vmap_with_counters_of_its_own_in_every_lane(way):
    unit = optax.stateless(lambda u, _: -u / jnp.linalg.norm(u))
    tx = accumulate(unit, 3, skip_nonfinite="micro_batch")
    step = jitted(tx, way)
    lanes = [
        # gradients, weights, emit
        ([1.0, 2.0, 3.0, 4.0], [1, 2, 3, 4], [0, 0, 0, 0]),
        ([0.0, 2.0, NAN, 4.0], [1, 1, 1, 1], [0, 1, 0, 0]),
        ([NAN, NAN, 3.0, NAN], [0, 0, 0, 0], [1, 0, 0, 1]),
    ]
    shape = np.float32([-0.0, 1])
    apart = [
        drive(
            tx,
            [np.float32([g, 2]) for g in grads],
            params=shape,
            step=step,
            weight=list(np.float32(weights)),
            traced_emit=[np.bool_(e) for e in emit],
        )
        for grads, weights, emit in lanes
    ]
    together = jax.jit(
        jax.vmap(lambda p, s, g, w, e: step(p, s, g, weight=w, traced_emit=e))
    )
    params = jnp.stack([shape] * 3)
    state = jax.vmap(tx.init)(params)
    for i in range(4):
        g, w, e = ([lane[column][i] for lane in lanes] for column in range(3))
        params, state = together(
            params,
            state,
            np.float32([[x, 2] for x in g]),
            np.float32(w),
            np.bool_(e),
        )
        for lane, steps in enumerate(apart):
            here = jax.tree.map(lambda x, lane=lane: x[lane], (params, state))
            assert counters([type(steps[i])(*here)]) == counters([steps[i]])
            # A norm of two numbers and a division, in two programs.
            chex.assert_trees_all_close(here, tuple(steps[i]), rtol=4 * EPS)
            if not steps[i].state.emitted:
                before = steps[i - 1].params if i else shape
                assert_same_bits(here[0], before)


@both_ways
def test_a_scan_over_micro_steps_is_the_loop(way):
    tx = acc(k=3)
    step = jitted(tx, way)
    grads = gradients(7)
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *grads)
    weights = jnp.arange(1, 8).astype(jnp.float32)

    @jax.jit
    def scan(params, state):
        def body(carry, xs):
            return step(*carry, xs[0], weight=xs[1]), None

        return jax.lax.scan(body, (params, state), (stacked, weights))[0]

    params = jax.tree.map(jnp.asarray, PARAMS)
    scanned = scan(params, tx.init(params))
    last = drive(tx, grads, params=PARAMS, step=step, weight=list(weights))[-1]
    assert signature(scanned) == signature(tuple(last))
    chex.assert_trees_all_close(scanned, tuple(last), rtol=8 * EPS, atol=4 * EPS)


@both_ways
def test_in_shard_map_with_reduced_gradients_every_device_does_the_same(way):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    tx = accumulate(lenient(optax.adam(0.1)), 2, skip_nonfinite="micro_batch")
    step = jitted(tx, way)

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P(), P())
    )
    def sharded(params, state, batch):
        def loss(params):
            return jax.lax.pmean(jnp.mean((batch - params) ** 2), "data")

        value, grads = jax.value_and_grad(loss)(params)
        return step(params, state, grads, weight=jnp.float32(8), value=value)

    batches = [np.arange(8, dtype=np.float32), np.arange(8, 16, dtype=np.float32)]
    params, state = jnp.zeros(()), tx.init(ZERO)
    grads, values = [], []
    for batch in batches:
        params, state = sharded(params, state, batch)
        grads.append(np.float32(2 * np.mean(0 - batch)))
        values.append(np.float32(np.mean(batch**2)))
    one = drive(tx, grads, step=step, weight=[np.float32(8)] * 2, value=values)[-1]
    # Sums of small integers are exact on any number of devices.
    chex.assert_trees_all_close((params, state), tuple(one), rtol=4 * EPS)


def test_under_grad_of_what_comes_after_an_emit_nothing_is_differentiated_wrongly():
    # d/dg of the parameters after one window of 2 is -1/2 for each of its gradients.
    tx = accumulate(SGD, 2)

    def last(gs):
        params, state = jnp.zeros(()), tx.init(ZERO)
        for g in gs:
            params, state = apply_gradients(tx, params, state, g)
        return params

    np.testing.assert_array_equal(jax.grad(last)(jnp.ones(2)), [-0.5, -0.5])


def test_it_runs_without_jit_and_with_numpy_and_python_numbers():
    tx = accumulate(SGD, 2)
    state = tx.init(0.0)
    updates, state = tx.update(1.0, state, 0.0, weight=3, value=2)
    assert updates == 0
    updates, state = tx.update(np.float32(5), state, 0.0, weight=np.int8(1), value=6.0)
    assert updates == -2
    assert accumulation_metrics(state)["value"] == 3
    params, state = apply_gradients(tx, 0.0, tx.init(0.0), 1.0, emit=True)
    assert params == -1


LEAVES = {
    "a scalar": np.float32(1),
    "empty arrays": {"a": np.zeros((0, 3), np.float32), "b": np.zeros(0, np.float32)},
    "None": {"a": None, "b": np.ones(2, np.float32)},
    "only None": {"a": None},
    "an empty tree": {},
    "an empty tuple": (),
    "MaskedNode": {"a": optax.MaskedNode(), "b": np.ones(2, np.float32)},
    "complex": np.ones(2, np.complex64),
    "a list in a tuple": ([np.ones(2, np.float32)], {"x": np.float32(1)}),
    "bfloat16": np.ones(2, jnp.bfloat16),
    "integers": {"n": np.int32(1), "w": np.float32(1)},
}


@pytest.mark.parametrize("params", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize(
    ("way", "skip_nonfinite"),
    [("update", "window"), ("apply_gradients", "micro_batch")],
)
def test_every_kind_of_leaf(way, skip_nonfinite, params):
    tx = accumulate(lenient(SGD), 2, skip_nonfinite=skip_nonfinite)
    grads = jax.tree.map(np.ones_like, params)
    weight = [np.float32(1)] * 4
    steps = drive(tx, [grads] * 4, params=params, way=way, weight=weight)

    def expected(p):
        return p if np.issubdtype(p.dtype, np.integer) else (p - 2).astype(p.dtype)

    assert_same_bits(steps[-1].params, jax.tree.map(expected, params))
    assert_same_bits(steps[0].params, params)
    assert counters(steps) == [(1, 0, False), (0, 1, True), (1, 1, False), (0, 2, True)]
