"""train_step on a global batch: split inside the program, one optimizer step a call."""

import operator
import warnings

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from gradacc_jax import accumulate, parameter_ema, train_step, value_and_grad
from tests import programs
from tests.lenient import lenient

EPS = float(jnp.finfo(jnp.float32).eps)


def masked_mean(params, batch):
    error = (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2
    return jnp.sum(error * batch["mask"]) / jnp.sum(batch["mask"])


def masked_sum(params, batch):
    error = (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2
    return jnp.sum(error * batch["mask"])


def tokens(batch):
    return jnp.sum(batch["mask"])


def batch_of(n, seed=0):
    """Examples of which about a third do not count, and the first two of four."""
    rng = np.random.default_rng(seed)
    mask = (rng.random(n) < 0.7).astype(np.float32)
    mask[:4] = [0, 1, 0, 1]
    return {
        "x": rng.normal(size=(n, 3)).astype(np.float32),
        "y": rng.normal(size=n).astype(np.float32),
        "mask": mask,
    }


def parameters():
    return {"w": jnp.array([0.5, -1.0, 2.0]), "b": jnp.float32(0.25)}


def trained(step, tx, calls):
    """The parameters and each call's metrics."""
    params, metrics = parameters(), []
    state = tx.init(params)
    for batch in calls:
        params, state, found = step(params, state, batch)
        metrics.append(jax.device_get(found))
    return params, state, metrics


def strided(batch, k):
    """The micro-batches that a batch is split into inside the program."""
    return [
        jax.tree.map(operator.itemgetter(slice(i, None, k)), batch) for i in range(k)
    ]


@pytest.mark.parametrize(
    "split",
    [{"num_microbatches": 2}, {"num_microbatches": 5}, {"microbatch_size": 4}],
    ids=str,
)
def test_a_call_is_the_step_on_the_whole_batch(split):
    tx = lenient(optax.adam(0.1))
    calls = [batch_of(12, seed) for seed in range(5)]
    whole = train_step(masked_mean, tx, weight_fn=tokens)
    parts = train_step(masked_mean, tx, weight_fn=tokens, **split)
    expected, _, of_whole = trained(whole, tx, calls)
    found, _, of_parts = trained(parts, tx, calls)
    # Adam's first steps are the gradient's sign, where rounding is amplified.
    chex.assert_trees_all_close(found, expected, rtol=1e-5)
    for ours, theirs in zip(of_parts, of_whole):
        chex.assert_trees_all_close(ours, theirs, rtol=64 * EPS)
        assert ours.emitted


def test_in_one_call_and_across_calls_are_the_same_training():
    opt = optax.sgd(0.1)
    calls = [batch_of(12, seed) for seed in range(3)]
    inside = train_step(masked_mean, opt, weight_fn=tokens, num_microbatches=3)
    params, _, metrics = trained(inside, opt, calls)
    tx = accumulate(opt, 3)
    across = train_step(masked_mean, tx, weight_fn=tokens)
    others, _, seen = trained(across, tx, [m for c in calls for m in strided(c, 3)])
    chex.assert_trees_all_close(params, others, rtol=16 * EPS)
    for ours, theirs in zip(metrics, seen[2::3]):
        chex.assert_trees_all_close(
            (ours.loss, ours.grad_norm, ours.weight),
            (theirs.loss, theirs.grad_norm, theirs.weight),
            rtol=16 * EPS,
        )


def test_a_key_draws_the_same_numbers_in_one_call_and_across_calls():
    def loss(w, batch, key):
        noise = jax.random.uniform(key, batch.shape)
        return jnp.mean(w * batch * noise), noise[0]

    w, batch, key = jnp.float32(2), jnp.arange(1.0, 7.0), jax.random.key(3)
    opt = optax.sgd(1.0)
    step = train_step(
        loss, opt, num_microbatches=3, has_aux=True, aux_reduction="stack", donate=False
    )
    inside, _, metrics = step(w, opt.init(w), batch, key)
    tx = accumulate(opt, 3)
    across = train_step(loss, tx, has_aux=True)
    state, drawn = tx.init(w), []
    for micro_batch in strided(batch, 3):
        w, state, found = across(w, state, micro_batch, key)
        drawn.append(found.aux)
    np.testing.assert_array_equal(metrics.aux, drawn)
    assert len(set(map(float, drawn))) == 3
    np.testing.assert_allclose(inside, w, rtol=4 * EPS)


def test_terms_with_denominators_of_their_own_also_in_a_single_pass():
    def loss(w, batch):
        token = jnp.sum(batch["m"] * w * batch["x"]) / jnp.sum(batch["m"])
        return {"token": token, "example": 0.1 * jnp.mean(batch["x"]) * w}

    def weights(batch):
        return {"token": jnp.sum(batch["m"]), "example": batch["m"].size}

    batch = {"x": jnp.array([1.0, 2, 3, 4, 5, 6]), "m": jnp.array([1.0, 0, 0, 1, 1, 1])}
    opt = optax.sgd(1.0)
    expected = 16 / 4 + 0.1 * 3.5
    for k in (1, 2, 3):
        w = jnp.float32(1)
        step = train_step(loss, opt, weight_fn=weights, num_microbatches=k)
        w, _, metrics = step(w, opt.init(w), batch)
        np.testing.assert_allclose(1 - w, expected, rtol=8 * EPS)
        np.testing.assert_allclose(metrics.loss, expected, rtol=8 * EPS)
        assert jax.device_get(metrics.weight) == {"token": 4, "example": 6}


@pytest.mark.parametrize("k", [1, 2])
def test_a_batch_without_any_loss_term_changes_nothing(k):
    opt = lenient(optax.adamw(0.1, weight_decay=0.5))
    step = train_step(masked_mean, opt, weight_fn=tokens, num_microbatches=k)
    batch = batch_of(4)
    params, state, _ = step(parameters(), opt.init(parameters()), batch)
    before = jax.tree.map(np.array, (params, state))
    batch["mask"][:] = 0
    params, state, metrics = step(params, state, batch)
    chex.assert_trees_all_equal((params, state), before)
    assert metrics.weight == 0


def test_a_micro_batch_without_loss_terms_does_no_harm():
    opt = optax.sgd(1.0)
    batch = batch_of(6)
    batch["mask"][:] = [0, 1, 0, 1, 0, 1]  # of two micro-batches the first is empty
    whole = train_step(masked_mean, opt, weight_fn=tokens)
    parts = train_step(masked_mean, opt, weight_fn=tokens, num_microbatches=2)
    expected, _, (of_whole,) = trained(whole, opt, [batch])
    found, _, (of_parts,) = trained(parts, opt, [batch])
    chex.assert_trees_all_close(found, expected, rtol=16 * EPS)
    np.testing.assert_allclose(of_parts.loss, of_whole.loss, rtol=16 * EPS)


@pytest.mark.parametrize("k", [1, 3])
def test_a_loss_that_is_a_sum_is_divided_by_its_weights_once(k):
    batch = batch_of(6)
    opt = optax.sgd(1.0)
    mean = train_step(masked_mean, opt, weight_fn=tokens)
    expected, _, (of_mean,) = trained(mean, opt, [batch])
    total = train_step(
        masked_sum, opt, weight_fn=tokens, num_microbatches=k, loss_reduction="sum"
    )
    found, _, (of_sum,) = trained(total, opt, [batch])
    chex.assert_trees_all_close(found, expected, rtol=16 * EPS)
    np.testing.assert_allclose(of_sum.loss, of_mean.loss, rtol=8 * EPS)


@pytest.mark.parametrize("k", [1, 3])
def test_a_sum_without_weights_stays_a_sum(k):
    batch = batch_of(6)
    opt = optax.sgd(1.0)
    step = train_step(masked_sum, opt, num_microbatches=k, loss_reduction="sum")
    _, _, (metrics,) = trained(step, opt, [batch])
    np.testing.assert_allclose(
        metrics.loss, masked_sum(parameters(), batch), rtol=8 * EPS
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_both_ways_at_once_multiply_and_say_so(reduction):
    loss = {"mean": masked_mean, "sum": masked_sum}[reduction]
    opt = optax.sgd(1.0)
    tx = accumulate(opt, 2, loss_reduction=reduction)
    halves = [batch_of(6, seed) for seed in (1, 2)]
    whole = jax.tree.map(lambda *xs: np.concatenate(xs), *halves)
    mean = train_step(masked_mean, opt, weight_fn=tokens)
    expected, _, (of_whole,) = trained(mean, opt, [whole])
    both = train_step(loss, tx, weight_fn=tokens, num_microbatches=3)
    with pytest.warns(UserWarning, match="2 calls of 6 examples, 12"):
        found, _, metrics = trained(both, tx, halves)
    chex.assert_trees_all_close(found, expected, rtol=16 * EPS, atol=16 * EPS)
    np.testing.assert_allclose(metrics[-1].loss, of_whole.loss, rtol=8 * EPS)
    assert [bool(m.emitted) for m in metrics] == [False, True]
    assert metrics[-1].weight == of_whole.weight


@pytest.mark.filterwarnings("ignore:num_microbatches")
def test_a_window_over_calls_is_closed_early_and_leaves_bad_calls_out():
    tx = accumulate(optax.sgd(1.0), 3, skip_nonfinite="micro_batch")
    step = train_step(masked_mean, tx, weight_fn=tokens, num_microbatches=2)
    good, bad = batch_of(4), batch_of(4, 1)
    bad["x"][1] = np.nan
    params = parameters()
    state = tx.init(params)
    params, state, _ = step(params, state, good)
    params, state, metrics = step(params, state, bad)
    assert not metrics.emitted
    assert metrics.skipped == 1
    params, state, metrics = step(params, state, bad, emit=True)
    assert metrics.emitted
    expected = jax.grad(masked_mean)(parameters(), good)
    chex.assert_trees_all_close(
        params,
        jax.tree.map(lambda p, g: p - g, parameters(), expected),
        rtol=16 * EPS,
    )


def test_parameters_that_have_no_gradient_go_through():
    tx = accumulate(
        lenient(optax.sgd(1.0)), 1
    )  # which keeps integers from the optimizer
    params = {"w": jnp.float32(2), "table": jnp.array([3, 5]), "none": None}

    def loss(params, batch):
        factor = params["table"][1].astype(jnp.float32)
        return jnp.mean(params["w"] * factor * batch)

    step = train_step(loss, tx, num_microbatches=2, donate=False)
    new, _, _ = step(params, tx.init(params), jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(new["w"], 2 - 10.0)
    np.testing.assert_array_equal(new["table"], [3, 5])
    assert new["none"] is None


def test_what_is_not_batched_goes_to_every_micro_batch():
    def loss(w, batch):
        return jnp.mean(w * batch["x"] @ batch["mixing"])

    opt = optax.sgd(1.0)
    batch = {"x": jnp.ones((4, 2)), "mixing": jnp.array([1.0, 2.0])}
    step = train_step(
        loss, opt, num_microbatches=2, batch_axis={"x": 0, "mixing": None}
    )
    w = jnp.float32(1)
    w, _, metrics = step(w, opt.init(w), batch)
    assert w == -2
    assert metrics.loss == 3


def scanned(params, batch):
    """Layers in a scan, for which a gradient tree would be a second stack."""

    def layer(x, w):
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, batch, params)
    return jnp.mean(x**2)


@pytest.mark.parametrize(
    "opt", [optax.sgd(0.1), optax.adamw(1e-3)], ids=["sgd", "adam"]
)
def test_memory_is_flat_in_the_number_of_micro_batches(opt):
    params = jnp.zeros((8, 128, 128))
    opt = lenient(opt)

    def program(k):
        batch = jnp.zeros((8 * k, 128))
        step = train_step(scanned, opt, num_microbatches=k)
        return programs.program(step.lower(params, opt.init(params), batch))

    four, many = program(4), program(64)
    assert many.temporaries <= 1.01 * four.temporaries
    # The sums, and what one micro-batch's backward pass takes of its own.
    activations = 4 * 8 * 8 * 128 * 4
    assert four.temporaries <= programs.num_bytes(params) + 2 * activations + 2**16
    assert four.copies(params.size // 8) == 0


def test_one_micro_batch_is_the_plain_step():
    opt = lenient(optax.adamw(1e-3))
    params = jnp.zeros((8, 64, 64))
    batch = jnp.zeros((8, 64))

    def program(**options):
        step = train_step(scanned, opt, **options)
        return programs.program(step.lower(params, opt.init(params), batch))

    plain, one = program(), program(num_microbatches=1)
    assert (one.flops, one.accessed) == (plain.flops, plain.accessed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches=0 is less than 1"),
        ({"num_microbatches": None}, "num_microbatches=None; choose a Python integer"),
        ({"num_microbatches": 2.5}, "num_microbatches=2.5 is not an integer"),
        ({"num_microbatches": True}, "num_microbatches=True is not an integer"),
        ({"microbatch_size": -1}, "microbatch_size=-1 is less than 1"),
        ({"loss_reduction": "max"}, "loss_reduction='max' is not known"),
        ({"aux_reduction": "max"}, "aux_reduction='max' is not known"),
    ],
    ids=str,
)
def test_a_bad_option_is_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        train_step(masked_mean, optax.sgd(0.1), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_microbatches": 9}, "num_microbatches=9 is more than batch_size=8"),
        ({"microbatch_size": 9}, "microbatch_size=9 does not fit batch_size=8"),
        (
            {"num_microbatches": 3, "microbatch_size": 4},
            "num_microbatches=3 and microbatch_size=4 do not make batch_size=8",
        ),
        (
            {"num_microbatches": 2, "weight_fn": lambda batch: batch["mask"]},
            "expected a scalar",
        ),
    ],
    ids=["too many", "too large", "both", "weights"],
)
def test_a_batch_that_does_not_fit_is_refused_while_tracing(options, message):
    opt = optax.sgd(0.1)
    step = train_step(masked_mean, opt, **options)
    with pytest.raises(ValueError, match=message):
        step(parameters(), opt.init(parameters()), batch_of(8))


def test_an_accumulator_is_refused_a_dict_of_weights_and_another_reduction():
    tx = accumulate(optax.sgd(0.1), 2)
    step = train_step(masked_mean, tx, weight_fn=lambda batch: {"a": tokens(batch)})
    with pytest.raises(ValueError, match="an accumulator has one weight"):
        step(parameters(), tx.init(parameters()), batch_of(4))
    step = train_step(masked_mean, tx, loss_reduction="sum")
    with pytest.raises(ValueError, match="loss_reduction='sum' but tx = accumulate"):
        step(parameters(), tx.init(parameters()), batch_of(4))


def test_one_of_the_two_ways_alone_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tx, k in ((optax.sgd(0.1), 2), (accumulate(optax.sgd(0.1), 2), 1)):
            step = train_step(masked_mean, tx, num_microbatches=k)
            step(parameters(), tx.init(parameters()), batch_of(4))


def test_a_micro_batch_without_loss_terms_moves_no_state_and_no_sum():
    def loss(w, batch, mean):
        value = jnp.sum(w * batch["x"] * batch["m"]) / jnp.sum(batch["m"])
        return value, (0.5 * mean + 0.5 * value, {"sum": value, "last": value})

    # Strided: the second micro-batch has no terms, and its loss is nan.
    batch = {"x": jnp.arange(1.0, 5.0), "m": jnp.array([1.0, 0, 1, 0])}
    (value, (mean, aux)), grads = value_and_grad(
        loss,
        num_microbatches=2,
        weight_fn=lambda batch: jnp.sum(batch["m"]),
        has_aux=True,
        state_argnums=2,
        aux_reduction={"sum": "sum", "last": "last"},
    )(1.0, batch, 8.0)
    assert (value, grads, mean) == (2, 2, 5)
    assert aux == {"sum": 2, "last": 2}


def test_a_loss_that_has_a_policy_of_its_own_keeps_it():
    def of_the_policy(policy, batch):  # the parameters' name
        return jnp.mean(policy * batch)

    def with_its_own(w, batch, policy="full"):
        assert policy == "full"
        return jnp.mean(w * batch)

    opt, w = optax.sgd(1.0), jnp.float32(1)
    for loss in (of_the_policy, with_its_own):
        step = train_step(loss, opt, donate=False)
        new, _, _ = step(w, opt.init(w), jnp.ones(2))
        assert new == 0


def test_an_average_of_the_parameters_can_be_donated():
    tx = optax.chain(optax.sgd(1.0), parameter_ema(0.5))
    w = {"w": jnp.array([1.0, 2.0])}
    step = train_step(lambda w, b: jnp.mean(b @ w["w"]), tx, num_microbatches=2)
    w, state, _ = step(w, tx.init(w), jnp.ones((4, 2)))
    np.testing.assert_allclose(w["w"], [0.0, 1.0])
    np.testing.assert_allclose(optax.tree.get(state, "parameter_ema")["w"], [0.5, 1.5])


@pytest.mark.parametrize("k", [1, 3])
def test_the_norm_of_a_sum_is_that_of_the_mean_with_a_single_step_window_too(k):
    def loss(w, batch):
        return jnp.sum((w - batch) ** 2)

    tx = accumulate(optax.sgd(0.1), 1, loss_reduction="sum")
    step = train_step(
        loss, tx, weight_fn=lambda b: b.size, num_microbatches=k, donate=False
    )
    w = jnp.float32(1)
    _, _, metrics = step(w, tx.init(w), jnp.arange(1.0, 9.0))
    np.testing.assert_allclose(metrics.grad_norm, 7, rtol=8 * EPS)


@pytest.mark.parametrize("k", [1, 2])
def test_a_step_of_weight_zero_has_no_norm(k):
    opt = optax.sgd(1.0)
    step = train_step(
        lambda w, b: jnp.mean(w * b),
        opt,
        weight_fn=lambda b: 0 * jnp.sum(b),
        num_microbatches=k,
    )
    w = jnp.float32(1)
    _, _, metrics = step(w, opt.init(w), jnp.ones(4))
    assert metrics.grad_norm == 0


@pytest.mark.parametrize("weighted", [False, True])
def test_arrays_of_a_mesh_with_explicit_axes_serve(weighted):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    x = jax.random.normal(jax.random.key(0), (16, 8))
    w = jax.random.normal(jax.random.key(1), (8, 3))
    expected = jax.value_and_grad(loss)(w, x)
    placed = (
        jax.device_put(w, NamedSharding(mesh, P())),
        jax.device_put(x, NamedSharding(mesh, P("data"))),
    )
    weight_fn = (lambda x: x.size) if weighted else None
    f = jax.jit(value_and_grad(loss, num_microbatches=2, weight_fn=weight_fn))
    found = f(*placed)
    chex.assert_trees_all_close(
        jax.device_get(found), jax.device_get(expected), rtol=32 * EPS, atol=EPS
    )
    ragged = jax.jit(value_and_grad(loss, num_microbatches=5))
    with pytest.raises(ValueError, match="is sharded over 'data'"):
        ragged(*placed)


def test_weights_that_are_no_scalars_or_nothing_are_refused():
    def terms(w, batch):
        return {"a": jnp.mean(w * batch)}

    for weight_fn, message in (
        (lambda batch: {"a": jnp.ones(1)}, r"shape \(1,\) at \['a'\]"),
        (lambda batch: None, "weight_fn returned None"),
    ):
        f = value_and_grad(terms, num_microbatches=2, weight_fn=weight_fn)
        with pytest.raises(ValueError, match=message):
            f(1.0, jnp.ones(4))
