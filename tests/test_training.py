"""train_step: one micro-step a call, whatever engine makes the gradients."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradacc_jax import accumulate, references, train_step, value_and_grad
from tests.lenient import lenient

EPS = float(jnp.finfo(jnp.float32).eps)


def masked_mean(params, batch):
    """The mean of a squared error over the tokens that count."""
    error = (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2
    return jnp.sum(error * batch["mask"]) / jnp.sum(batch["mask"])


def tokens(batch):
    return jnp.sum(batch["mask"])


def batch_of(rng, n, *, counted=None):
    mask = np.ones(n, np.float32)
    mask[counted if counted is not None else n :] = 0
    return {
        "x": rng.normal(size=(n, 3)).astype(np.float32),
        "y": rng.normal(size=n).astype(np.float32),
        "mask": mask,
    }


def parameters():
    return {"w": jnp.array([0.5, -1.0, 2.0]), "b": jnp.float32(0.25)}


def concatenated(batches):
    return jax.tree.map(lambda *xs: np.concatenate(xs), *batches)


def oracle(params, batch):
    """Loss and gradient norm in float64, by hand."""
    batch = jax.tree.map(lambda x: np.asarray(x, np.float64), batch)
    w, b = np.asarray(params["w"], np.float64), float(params["b"])
    error = batch["x"] @ w + b - batch["y"]
    count = batch["mask"].sum()
    slope = 2 * error * batch["mask"] / count
    grads = np.append(batch["x"].T @ slope, slope.sum())
    return (error**2 * batch["mask"]).sum() / count, np.linalg.norm(grads)


# The first adds gradients straight into the accumulator, the second afterwards.
ENGINES = {"in place": lambda tx: tx, "after": lambda tx: optax.chain(tx)}


@pytest.fixture(params=ENGINES)
def engine(request):
    return ENGINES[request.param]


@pytest.mark.parametrize("counted", [(4, 4, 4), (4, 1, 3), (2, 4, 4), (1, 1, 4)])
def test_the_windows_loss_and_gradient_norm_are_the_full_batchs(engine, counted):
    rng = np.random.default_rng(0)
    batches = [batch_of(rng, 4, counted=c) for c in counted]
    tx = engine(accumulate(optax.sgd(0.1), 3))
    params = parameters()
    loss, norm = oracle(params, concatenated(batches))
    step = train_step(masked_mean, tx, weight_fn=tokens)
    state = tx.init(params)
    for batch in batches:
        params, state, metrics = step(params, state, batch)
    assert metrics.emitted
    assert metrics.weight == sum(counted)
    # Sums of a dozen terms of order one.
    np.testing.assert_allclose(metrics.loss, loss, rtol=20 * EPS)
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=20 * EPS)


def test_a_window_of_unequal_micro_batches_steps_like_the_full_batch(engine):
    rng = np.random.default_rng(1)
    batches = [batch_of(rng, 4, counted=c) for c in (4, 1, 2)]
    tx, plain = engine(accumulate(optax.sgd(0.1), 3)), optax.sgd(0.1)
    params, whole = parameters(), parameters()
    step = train_step(masked_mean, tx, weight_fn=tokens)
    state = tx.init(params)
    for batch in batches:
        params, state, _ = step(params, state, batch)
    full = train_step(masked_mean, plain)
    whole, _, metrics = full(whole, plain.init(whole), concatenated(batches))
    assert metrics.emitted
    chex.assert_trees_all_close(params, whole, rtol=20 * EPS)


def test_a_micro_batch_without_loss_tokens_contributes_nothing(engine):
    rng = np.random.default_rng(2)
    counted, empty = batch_of(rng, 4, counted=3), batch_of(rng, 4, counted=0)
    for order in ([counted, empty], [empty, counted]):
        tx = engine(accumulate(optax.sgd(0.1), 2))
        params = parameters()
        expected_loss, expected_norm = oracle(params, counted)
        step = train_step(masked_mean, tx, weight_fn=tokens)
        state = tx.init(params)
        for batch in order:
            params, state, metrics = step(params, state, batch)
        np.testing.assert_allclose(metrics.loss, expected_loss, rtol=20 * EPS)
        np.testing.assert_allclose(metrics.grad_norm, expected_norm, rtol=20 * EPS)
        chex.assert_tree_all_finite(params)


def test_a_window_without_any_loss_token_changes_nothing_but_counters(engine):
    tx = engine(accumulate(lenient(optax.adam(0.1)), 2))
    params = parameters()
    before = jax.device_get(params)
    inner = jax.device_get(tx.init(params))
    step = train_step(masked_mean, tx, weight_fn=tokens)
    state = tx.init(params)
    for _ in range(2):
        batch = batch_of(np.random.default_rng(3), 4, counted=0)
        params, state, metrics = step(params, state, batch)
    assert metrics.emitted
    assert metrics.weight == 0
    assert metrics.grad_norm == 0
    chex.assert_trees_all_equal(params, before)
    assert optax.tree.get(state, "count") == 0
    chex.assert_trees_all_equal(
        optax.tree.get(state, "mu"), optax.tree.get(inner, "mu")
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_grad_mean": False},
        {"loss_reduction": "sum"},
        {"loss_reduction": "sum", "use_grad_mean": False},
        {"skip_nonfinite": "window"},
        {"accumulator_dtype": None},
        {"inner_dtype": jnp.float32},
    ],
    ids=str,
)
@pytest.mark.parametrize("weight_fn", [None, tokens], ids=["unweighted", "weighted"])
def test_both_engines_give_the_same_numbers(options, weight_fn):
    rng = np.random.default_rng(4)
    batches = [batch_of(rng, 4, counted=c) for c in (4, 1, 2, 3)]
    results = []
    for engine in ENGINES.values():
        tx = engine(accumulate(lenient(optax.adam(0.1)), 2, **options))
        params = parameters()
        step = train_step(masked_mean, tx, weight_fn=weight_fn)
        state = tx.init(params)
        for batch in batches:
            params, state, metrics = step(params, state, batch)
        results.append((params, metrics))
    chex.assert_trees_all_close(*results, rtol=50 * EPS)


def test_the_in_place_engine_is_the_one_that_runs(monkeypatch):
    calls = []
    add = references.add
    monkeypatch.setattr(references, "add", lambda *args: calls.append(1) or add(*args))
    tx = accumulate(optax.sgd(0.1), 2)
    params = parameters()
    step = train_step(masked_mean, tx, weight_fn=tokens)
    step(params, tx.init(params), batch_of(np.random.default_rng(0), 4))
    assert calls == [1]


def test_bfloat16_parameters_are_accumulated_in_float32():
    # 512 gradients of 1: a bfloat16 sum would stay at 256.
    def loss(w, batch):
        return jnp.sum(w) * batch

    tx = accumulate(optax.sgd(1.0), 512, use_grad_mean=False, inner_dtype=jnp.float32)
    w = jnp.zeros(2, jnp.bfloat16)
    state = tx.init(w)
    step = train_step(loss, tx)
    for _ in range(512):
        w, state, _ = step(w, state, jnp.ones((), jnp.bfloat16))
    assert w.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(w, np.float32), [-512, -512])


def test_a_loss_in_bfloat16_does_not_round_the_weights():
    # 1039 and 1041 are no bfloat16 numbers; the mean gradient is 1040 / 2080 exactly.
    def loss(w, batch):
        return (w * batch["g"]).astype(jnp.bfloat16)

    tx = accumulate(optax.sgd(1.0), 2)
    w = jnp.array(0.0)
    state = tx.init(w)
    step = train_step(loss, tx, weight_fn=lambda batch: batch["n"])
    for n, g in ((1039, 0.0), (1041, 1.0)):
        batch = {"n": jnp.float32(n), "g": jnp.float32(g)}
        w, state, _ = step(w, state, batch)
    np.testing.assert_allclose(w, -1041 / 2080, rtol=2 * EPS)


def test_each_micro_batch_draws_its_own_random_numbers_from_one_key(engine):
    def loss(w, batch, key):
        noise = jax.random.normal(key)
        return w * noise, noise

    key = jax.random.key(7)
    tx = engine(accumulate(optax.sgd(1.0), 3))
    w = jnp.array(0.0)
    state = tx.init(w)
    step = train_step(loss, tx, has_aux=True)
    drawn = []
    for _ in range(6):
        w, state, metrics = step(w, state, None, key)
        drawn.append(float(metrics.aux))
    expected = [float(jax.random.normal(jax.random.fold_in(key, i))) for i in range(3)]
    assert drawn == expected * 2
    np.testing.assert_allclose(w, -2 * np.mean(expected), rtol=10 * EPS)


def test_emit_closes_the_last_window_of_an_epoch(engine):
    # 10 micro-batches of gradient 1, k=4: the last window holds 2, and divides by 2.
    tx = engine(accumulate(optax.sgd(1.0), 4))
    w = jnp.array(0.0)
    state = tx.init(w)
    step = train_step(lambda w, batch: w * batch, tx)
    emitted = []
    for i in range(10):
        last = True if i == 9 else None
        w, state, metrics = step(w, state, jnp.array(1.0), emit=last)
        emitted.append(bool(metrics.emitted))
    assert emitted == [False] * 3 + [True] + [False] * 3 + [True, False, True]
    assert w == -3


def test_nonfinite_micro_batches_are_skipped_or_give_their_window_up():
    gradients = (1.0, np.nan, 3.0, 5.0)
    for mode, expected, skipped in (("micro_batch", -5, 1), ("window", -4, 1)):
        tx = accumulate(optax.sgd(1.0), 2, skip_nonfinite=mode)
        w = jnp.array(0.0)
        state = tx.init(w)
        step = train_step(lambda w, g: w * g, tx)
        for g in gradients:
            w, state, metrics = step(w, state, jnp.array(g))
        assert w == expected
        assert metrics.skipped == skipped


def test_a_plain_optimizer_takes_the_whole_batch_as_one_step():
    rng = np.random.default_rng(5)
    batch = batch_of(rng, 8, counted=5)
    params = parameters()
    loss, norm = oracle(params, batch)
    tx = optax.sgd(0.1)
    step = train_step(masked_mean, tx, weight_fn=tokens)
    params, _, metrics = step(params, tx.init(params), batch)
    np.testing.assert_allclose(metrics.loss, loss, rtol=20 * EPS)
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=20 * EPS)
    assert metrics.emitted
    assert metrics.weight == 5
    assert metrics.skipped == 0


def test_k_of_one_reports_what_the_plain_optimizer_reports():
    batch = batch_of(np.random.default_rng(6), 8, counted=5)
    results = []
    for tx in (optax.sgd(0.1), accumulate(optax.sgd(0.1), 1)):
        params = parameters()
        step = train_step(masked_mean, tx, weight_fn=tokens)
        params, _, metrics = step(params, tx.init(params), batch)
        results.append((params, metrics))
    chex.assert_trees_all_equal(*results)


def test_the_optimizer_sees_the_windows_mean_loss():
    seen = []

    def update(updates, state, params=None, *, value, **extra_args):
        jax.debug.callback(lambda v: seen.append(float(v)), value)
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    tx = accumulate(optax.chain(spy, optax.sgd(0.0)), 2)
    w = jnp.array(1.0)
    state = tx.init(w)
    step = train_step(lambda w, b: w * b["v"], tx, weight_fn=lambda b: b["n"])
    for v, n in ((1.0, 3), (100.0, 1), (2.0, 1), (4.0, 1)):
        batch = {"v": jnp.array(v), "n": jnp.array(n)}
        w, state, _ = step(w, state, batch)
    jax.effects_barrier()
    assert seen == [(3 * 1 + 100) / 4, 3]


def test_integer_and_complex_parameters_go_through(engine):
    params = {"z": jnp.array([1 + 2j, 3 - 1j]), "n": jnp.arange(2), "w": jnp.ones(2)}

    def loss(p, batch):
        scaled = p["z"] * p["n"].astype(p["z"].dtype)
        return jnp.sum(jnp.abs(scaled) ** 2) + batch * jnp.sum(p["w"])

    mask = {"z": True, "n": False, "w": True}
    tx = engine(accumulate(optax.masked(optax.sgd(0.1), mask), 2))
    before = jax.device_get(params)
    state = tx.init(params)
    step = train_step(loss, tx)
    for batch in (1.0, 3.0):
        params, state, _ = step(params, state, jnp.array(batch))
    chex.assert_trees_all_equal(params["n"], before["n"])
    np.testing.assert_allclose(params["w"], 1 - 0.1 * 2, rtol=2 * EPS)
    gradient = 2 * before["z"].conj() * before["n"] ** 2
    np.testing.assert_allclose(params["z"], before["z"] - 0.1 * gradient, rtol=4 * EPS)


def test_one_compilation_serves_a_whole_run():
    tx = accumulate(lenient(optax.adamw(0.1)), lambda step: jnp.where(step < 1, 1, 2))
    params = parameters()
    state = tx.init(params)
    step = train_step(masked_mean, tx, weight_fn=tokens)
    rng = np.random.default_rng(8)
    emitted = []
    for _ in range(5):
        params, state, metrics = step(params, state, batch_of(rng, 4))
        emitted.append(bool(metrics.emitted))
    assert emitted == [True, False, True, False, True]
    assert step._cache_size() == 1


def test_donation_gives_the_arguments_up_and_can_be_turned_off():
    tx = accumulate(optax.sgd(0.1), 2)
    batch = batch_of(np.random.default_rng(0), 4)
    for donate in (True, False):
        params = parameters()
        state = tx.init(params)
        train_step(masked_mean, tx, donate=donate)(params, state, batch)
        assert params["w"].is_deleted() == donate
        assert state.acc_grads["w"].is_deleted() == donate


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda w, b: w * jnp.ones(4), r"loss of shape \(4,\).*take the mean"),
        (lambda w, b: jnp.array(1), r"loss of dtype int32.*real floating scalar"),
        (lambda w, b: (w, 1.0), r"returned tuple for a loss.*has_aux=True"),
    ],
)
def test_a_loss_that_is_no_real_scalar_is_refused(loss, message):
    tx = accumulate(optax.sgd(0.1), 2)
    w = jnp.array(1.0)
    with pytest.raises(ValueError, match=message):
        train_step(loss, tx)(w, tx.init(w), None)


def test_a_loss_without_the_aux_that_was_promised_is_refused():
    tx = accumulate(optax.sgd(0.1), 2)
    w = jnp.array(1.0)
    with pytest.raises(ValueError, match=r"expected the pair \(loss, aux\)"):
        train_step(lambda w, b: w, tx, has_aux=True)(w, tx.init(w), None)


def test_two_accumulators_in_one_optimizer_are_refused():
    tx = optax.chain(accumulate(optax.sgd(1.0), 2), accumulate(optax.sgd(1.0), 2))
    w = jnp.array(1.0)
    with pytest.raises(ValueError, match=r"holds 2 accumulators.*put one accumulate"):
        train_step(lambda w, b: w, tx)(w, tx.init(w), None)


def test_emit_without_an_accumulator_is_refused():
    tx = optax.sgd(1.0)
    w = jnp.array(1.0)
    with pytest.raises(ValueError, match=r"emit=True.*wrap the optimizer"):
        train_step(lambda w, b: w, tx)(w, tx.init(w), None, emit=True)


def test_the_step_runs_inside_a_scan():
    tx = accumulate(optax.sgd(1.0), 2)
    w = jnp.array(0.0)
    step = train_step(lambda w, g: w * g, tx, donate=False)

    def body(carry, g):
        w, state, metrics = step(*carry, g)
        return (w, state), metrics.emitted

    (w, _), emitted = jax.jit(partial(jax.lax.scan, body))(
        (w, tx.init(w)), jnp.array([1.0, 3.0, 5.0, 7.0])
    )
    assert emitted.tolist() == [False, True, False, True]
    assert w == -2 - 6


@pytest.mark.optax_promotes
def test_a_multi_steps_left_in_place_is_refused():
    tx = optax.MultiSteps(optax.sgd(1.0), 2)
    w = jnp.array(1.0)
    with pytest.raises(ValueError, match=r"holds an optax.MultiSteps.*accumulate\(\)"):
        train_step(lambda w, b: w, tx)(w, tx.init(w), None)


@pytest.mark.parametrize(
    ("weight", "message"),
    [(-1, r"weight=-1.0"), (np.nan, r"weight=nan"), (jnp.ones(4), r"shape \(4,\)")],
)
def test_a_weight_that_is_none_is_refused(engine, weight, message):
    tx = engine(accumulate(optax.sgd(1.0), 2))
    w = jnp.array(1.0)
    step = train_step(lambda w, b: w, tx, weight_fn=lambda b: weight)
    with pytest.raises(ValueError, match=message):
        step(w, tx.init(w), None)


def test_the_state_of_another_optimizer_is_refused():
    tx = accumulate(optax.sgd(1.0), 2)
    w = jnp.array(1.0)
    with pytest.raises(ValueError, match="is not an AccumulateState"):
        train_step(lambda w, b: w, tx)(w, optax.sgd(1.0).init(w), None)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1.0, 1.0),))


def twice(function):
    """A loss in which one parameter goes into ``function`` as two arguments."""
    return lambda w, b: jnp.sum(function(w, w)) * b


DELICATE = {
    "in jit twice": twice(jax.jit(lambda a, c: a * c)),
    "in cond twice": twice(
        lambda a, c: jax.lax.cond(a[0] > 0, jnp.multiply, jnp.add, a, c)
    ),
    "scanned twice": twice(
        lambda a, c: jax.lax.scan(lambda x, r: (x + r[0] * r[1], None), 0.0, (a, c))[0]
    ),
    "scanned and closed over": lambda w, b: jax.lax.scan(
        lambda x, r: (x + r * w.sum() * b, None), 0.0, w
    )[0],
    "mapped and closed over": lambda w, b: jnp.sum(jax.lax.map(lambda r: w * r, w)) * b,
    "in jit twice inside jit": lambda w, b: jax.jit(twice(jax.jit(lambda a, c: a * c)))(
        w, b
    ),
    "in jit twice inside a scan": lambda w, b: jax.lax.scan(
        lambda x, _: (x + twice(jax.jit(lambda a, c: a * c))(w, b), None),
        0.0,
        None,
        length=2,
    )[0],
    "a gradient clipped inside": lambda w, b: 3 * jnp.sum(clipped(w) * b),
    "float16 inside": lambda w, b: (
        100
        * jnp.sum(30 * w.astype(jnp.float16) * b.astype(jnp.float16)).astype(
            jnp.float32
        )
    ),
}


@pytest.mark.parametrize("weight", [None, 4096], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("name", DELICATE)
def test_what_references_get_wrong_is_left_to_the_addition_after(name, weight):
    """Each of these was wrong in place, in some version of JAX or with some weight."""
    loss = DELICATE[name]
    batches = [jnp.float32(1.0), jnp.float32(3.0)]
    w = jnp.array([1.0, 2.0])
    gradients = [jax.grad(loss)(w, b) for b in batches]
    expected = np.asarray(w - (gradients[0] + gradients[1]) / 2)
    weight_fn = None if weight is None else lambda b: jnp.float32(weight)

    tx = accumulate(optax.sgd(1.0), 2)
    moved, state = jnp.copy(w), tx.init(w)
    step = train_step(loss, tx, weight_fn=weight_fn)
    for batch in batches:
        moved, state, _ = step(moved, state, batch)
    np.testing.assert_allclose(moved, expected, rtol=10 * EPS, atol=10 * EPS)

    inside = value_and_grad(
        lambda w, b: loss(w, b[0]), num_microbatches=2, weight_fn=weight_fn
    )
    _, grad = jax.jit(inside)(w, jnp.stack(batches))
    np.testing.assert_allclose(w - grad, expected, rtol=10 * EPS, atol=10 * EPS)
