"""value_and_grad: the whole batch's value and gradient, a micro-batch at a time."""

import functools

import chex
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import gradacc_jax
from gradacc_jax import accumulate, references, value_and_grad
from tests import programs

EPS = float(jnp.finfo(jnp.float32).eps)


@pytest.fixture(params=["in place", "after"])
def engine(request, monkeypatch):
    """Both ways to add gradients."""
    if request.param == "after":
        monkeypatch.setattr(references, "serve", lambda *args: False)
    return request.param


def squared(w, batch):
    """The mean over tokens that count; its gradient is easy by hand."""
    error = (batch["x"] @ w - batch["y"]) ** 2 * batch["m"]
    return jnp.sum(error) / jnp.sum(batch["m"])


def count(batch):
    return jnp.sum(batch["m"])


def batch_of(n, seed=0, zeros=()):
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 2, n).astype(np.float32)
    mask[0] = 1
    for i in zeros:
        mask[i] = 0
    return {
        "x": rng.normal(size=(n, 3)).astype(np.float32),
        "y": rng.normal(size=n).astype(np.float32),
        "m": mask,
    }


def oracle(w, batch):
    b = {name: np.asarray(x, np.float64) for name, x in batch.items()}
    error = b["x"] @ np.asarray(w, np.float64) - b["y"]
    total = b["m"].sum()
    value = (error**2 * b["m"]).sum() / total
    return value, b["x"].T @ (2 * error * b["m"]) / total


W = np.array([0.5, -1.0, 2.0], np.float32)


@pytest.mark.parametrize(
    "split",
    [
        {"num_microbatches": 1},
        {"num_microbatches": 4},
        {"num_microbatches": 12},
        {"num_microbatches": 5},
        {"microbatch_size": 4},
        {"microbatch_size": 5},
        {"microbatch_size": 12},
        {"microbatch_size": 3, "num_microbatches": 4},
        {"microbatch_size": 2, "unroll": 3},
    ],
    ids=str,
)
def test_value_and_gradient_are_the_full_batchs_for_every_split(engine, split):
    batch = batch_of(12)
    value, grad = jax.jit(value_and_grad(squared, weight_fn=count, **split))(W, batch)
    expected_value, expected_grad = oracle(W, batch)
    # Means of twelve terms of order one.
    np.testing.assert_allclose(value, expected_value, rtol=20 * EPS)
    np.testing.assert_allclose(grad, expected_grad, rtol=20 * EPS, atol=20 * EPS)


def test_a_batch_that_does_not_divide_is_split_exactly(engine):
    sizes = []

    def loss(w, x):
        sizes.append(x.shape[0])
        return jnp.mean(w * x)

    value, grad = value_and_grad(loss, microbatch_size=4)(1.0, jnp.arange(10.0))
    assert set(sizes) == {4, 2}
    assert value == grad == 4.5
    sizes.clear()
    value, grad = value_and_grad(loss, num_microbatches=3)(1.0, jnp.arange(8.0))
    assert set(sizes) == {3, 2}
    assert value == grad == 3.5


def test_a_micro_batch_without_loss_terms_contributes_nothing(engine):
    # Strided: micro-batch 1 of 3 has examples 1, 4, 7; all masked, its loss is 0 / 0.
    batch = batch_of(9, zeros=(1, 4, 7))
    f = jax.jit(value_and_grad(squared, num_microbatches=3, weight_fn=count))
    value, grad = f(W, batch)
    expected_value, expected_grad = oracle(W, batch)
    np.testing.assert_allclose(value, expected_value, rtol=20 * EPS)
    np.testing.assert_allclose(grad, expected_grad, rtol=20 * EPS)


def test_a_sum_stays_a_sum_and_is_divided_by_the_weights_that_are_given(engine):
    def total(w, x):
        return jnp.sum(w * x)

    x = jnp.arange(10.0)
    f = value_and_grad(total, microbatch_size=4, reduction="sum")
    assert f(2.0, x) == (90, 45)
    f = value_and_grad(
        total, microbatch_size=4, reduction="sum", weight_fn=lambda x: x.size
    )
    value, grad = f(2.0, x)
    np.testing.assert_allclose([value, grad], [9, 4.5], rtol=2 * EPS)


def test_each_term_has_its_own_denominator(engine):
    def terms(w, batch):
        tokens = jnp.maximum(jnp.sum(batch["m"]), 1)
        error = (batch["x"] @ w - batch["y"]) ** 2 * batch["m"]
        penalty = jnp.mean(jnp.abs(batch["x"] @ w))
        return {"tokens": jnp.sum(error) / tokens, "examples": 0.1 * penalty}

    def weights(batch):
        return {"tokens": jnp.sum(batch["m"]), "examples": batch["y"].size}

    batch = batch_of(10, zeros=(1, 4, 7))
    whole = jax.value_and_grad(lambda w, b: sum(terms(w, b).values()))(W, batch)
    for split in ({"microbatch_size": 4}, {"num_microbatches": 3}):
        found = jax.jit(value_and_grad(terms, weight_fn=weights, **split))(W, batch)
        chex.assert_trees_all_close(found, whole, rtol=20 * EPS, atol=20 * EPS)


def test_aux_is_reduced_as_asked_and_in_the_order_of_the_batch():
    def loss(w, x):
        aux = {
            "metrics": {"mean": jnp.mean(x), "count": jnp.asarray(x.size)},
            "last": x[-1],
            "each": jnp.max(x),
            "scores": x * w,
        }
        return jnp.mean(w * x), aux

    reductions = {
        "metrics": {"mean": "mean", "count": "sum"},
        "last": "last",
        "each": "stack",
        "scores": "concat",
    }
    x = jnp.arange(10.0)
    f = jax.jit(
        value_and_grad(loss, has_aux=True, microbatch_size=4, aux_reduction=reductions)
    )
    (value, aux), grad = f(jnp.float32(2.0), x)
    assert (value, grad) == (9, 4.5)
    assert aux["metrics"]["mean"] == 4.5
    assert aux["metrics"]["count"] == 10
    assert aux["metrics"]["count"].dtype == jnp.int32
    np.testing.assert_array_equal(aux["scores"], 2 * np.arange(10))
    # Parts: examples 0, 2, 4, 6 and 1, 3, 5, 7, then 8 and 9.
    np.testing.assert_array_equal(aux["each"], [6, 7, 9])
    assert aux["last"] == 9


def test_each_micro_batch_draws_from_its_own_key():
    def loss(w, x, key):
        return w * jax.random.normal(key), jax.random.normal(key)

    key = jax.random.key(3)
    f = value_and_grad(
        loss, has_aux=True, num_microbatches=4, key_argnums=2, aux_reduction="stack"
    )
    (_, drawn), grad = f(1.0, jnp.zeros(8), key)
    expected = [jax.random.normal(jax.random.fold_in(key, i)) for i in range(4)]
    np.testing.assert_array_equal(drawn, expected)
    np.testing.assert_allclose(grad, np.mean(expected), rtol=10 * EPS)


def test_state_is_carried_in_order_through_the_micro_batches(engine):
    def loss(w, x, state):
        new = {"mean": 0.5 * state["mean"] + 0.5 * jnp.mean(x), "n": state["n"] + 1}
        return jnp.mean(w * x), new

    x = jnp.arange(6.0)
    state = {"mean": jnp.float32(0), "n": jnp.int32(0)}
    f = jax.jit(value_and_grad(loss, num_microbatches=3, state_argnums=2))
    (value, new), grad = f(jnp.float32(1.0), x, state)
    assert (value, grad) == (2.5, 2.5)
    assert new["n"] == 3
    mean = 0.0
    for part in (x[0::3], x[1::3], x[2::3]):
        mean = 0.5 * mean + 0.5 * part.mean()
    assert new["mean"] == mean
    chex.assert_trees_all_equal_shapes_and_dtypes(new, state)


def test_only_the_real_micro_batches_count():
    # Of four ones the first two are real; the rest is padding that would be nan.
    def loss(w, x):
        return jnp.mean(w * x)

    x = jnp.array([1.0, 1.0, jnp.nan, jnp.nan])

    @jax.jit
    def f(real):
        return value_and_grad(loss, num_microbatches=real, microbatch_size=1)(2.0, x)

    assert f(2) == (2, 1)
    assert f(1) == (2, 1)
    assert f._cache_size() == 1


def test_several_batches_with_axes_of_their_own_and_parts_that_are_not_batched():
    def loss(w, inputs, targets, scale):
        return jnp.mean((inputs["x"].T @ w * inputs["mask"] - targets) ** 2) * scale

    rng = np.random.default_rng(0)
    inputs = {
        "x": rng.normal(size=(3, 10)).astype(np.float32),
        "mask": np.float32(0.5),
    }
    targets = rng.normal(size=10).astype(np.float32)
    f = value_and_grad(
        loss,
        microbatch_size=4,
        batch_argnums=(1, 2),
        batch_axis=({"x": -1, "mask": None}, 0),
    )
    found = f(W, inputs, targets, 2.0)
    expected = jax.value_and_grad(loss)(W, inputs, targets, 2.0)
    chex.assert_trees_all_close(found, expected, rtol=20 * EPS)


def test_several_arguments_are_differentiated_and_keywords_passed_on():
    def loss(a, x, b, *, power):
        return jnp.mean((a["w"] * x + b) ** power)

    f = value_and_grad(loss, argnums=(0, 2), num_microbatches=2)
    args = ({"w": jnp.float32(2.0)}, jnp.arange(4.0), jnp.float32(1.0))
    found = f(*args, power=2)
    expected = jax.value_and_grad(loss, argnums=(0, 2))(*args, power=2)
    chex.assert_trees_all_close(found, expected, rtol=10 * EPS)


def test_grad_returns_the_gradients_and_the_aux():
    def loss(w, x):
        return jnp.mean(w * x), jnp.sum(x)

    x = jnp.arange(4.0)
    f = gradacc_jax.grad(loss, has_aux=True, num_microbatches=2, aux_reduction="sum")
    assert f(2.0, x) == (1.5, 6)


def test_gradients_of_bfloat16_parameters_are_summed_in_float32():
    # 512 gradients of 1: a bfloat16 sum stays at 256.
    def loss(w, x):
        return jnp.sum(w * x)

    x = jnp.ones(512, jnp.bfloat16)
    f = jax.jit(gradacc_jax.grad(loss, microbatch_size=1, reduction="sum"))
    grad = f(jnp.ones((), jnp.bfloat16), x)
    assert grad.dtype == jnp.bfloat16
    assert grad == 512


def test_a_loss_in_bfloat16_does_not_round_the_weights(engine):
    def loss(w, batch):
        return (w * batch["g"][0]).astype(jnp.bfloat16)

    batch = {"g": jnp.array([0.0, 1.0]), "n": jnp.array([1039.0, 1041.0])}
    f = gradacc_jax.grad(loss, microbatch_size=1, weight_fn=lambda b: b["n"][0])
    np.testing.assert_allclose(f(1.0, batch), 1041 / 2080, rtol=2 * EPS)


def test_it_agrees_with_accumulation_across_calls(engine):
    def loss(w, x):
        return jnp.mean((x @ w) ** 2)

    x = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
    _, grad = jax.jit(value_and_grad(loss, num_microbatches=4))(W, x)
    tx = accumulate(optax.sgd(1.0), 4)
    state = tx.init(W)
    for i in range(4):
        updates, state = tx.update(jax.grad(loss)(W, x[i::4]), state, W)
    np.testing.assert_allclose(-updates, grad, rtol=8 * EPS)


@hypothesis.given(
    n=st.integers(1, 9),
    k=st.integers(1, 9),
    seed=st.integers(0, 2**16),
    by_size=st.booleans(),
)
def test_any_batch_in_any_split_equals_the_full_batch(n, k, seed, by_size):
    k = min(n, k)
    batch = batch_of(n, seed)
    split = {"microbatch_size": k} if by_size else {"num_microbatches": k}
    value, grad = value_and_grad(squared, weight_fn=count, **split)(W, batch)
    expected_value, expected_grad = oracle(W, batch)
    np.testing.assert_allclose(value, expected_value, rtol=50 * EPS, atol=50 * EPS)
    np.testing.assert_allclose(grad, expected_grad, rtol=50 * EPS, atol=50 * EPS)


# --- the compiled program ----------------------------------------------------------


def layered(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)
    return jnp.mean(x * x)


LAYERS = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32)


def program_of(k):
    x = jax.ShapeDtypeStruct((4 * k, 64), jnp.float32)
    f = jax.jit(value_and_grad(layered, num_microbatches=k))
    return programs.program(f.lower(LAYERS, x))


def test_a_state_that_is_no_tuple_where_several_are_carried_is_refused():
    def loss(w, x, mean):
        return jnp.mean(w * x), mean

    f = value_and_grad(loss, num_microbatches=2, state_argnums=(2,))
    with pytest.raises(ValueError, match="the carried state changes"):
        f(1.0, jnp.ones(4), 8.0)


def test_memory_is_flat_in_the_number_of_micro_batches(engine):
    few, many = program_of(4), program_of(64)
    assert many.temporaries == pytest.approx(few.temporaries, rel=0.01)


def test_scanned_layers_hold_no_gradient_tree_beside_the_sums(monkeypatch):
    in_place = program_of(8).temporaries
    monkeypatch.setattr(references, "serve", lambda *args: False)
    assert in_place <= 0.6 * program_of(8).temporaries


def test_a_sharded_batch_stays_where_it_is():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct(
        (64, 64), jnp.float32, sharding=NamedSharding(mesh, P("data"))
    )
    f = jax.jit(value_and_grad(layered, num_microbatches=4))
    made = programs.program(f.lower(LAYERS, x))
    assert "all-to-all" not in made.text
    assert "collective-permute" not in made.text
    assert "all-gather" not in made.text


# --- what is refused ---------------------------------------------------------------


def mean(w, x):
    return jnp.mean(w * x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"num_microbatches=None and microbatch_size=None"),
        ({"num_microbatches": 0}, r"num_microbatches=0 is less than 1"),
        ({"microbatch_size": 2.5}, r"microbatch_size=2.5 is not an integer"),
        ({"num_microbatches": True}, r"num_microbatches=True is not an integer"),
        ({"num_microbatches": 2, "reduction": "max"}, r"reduction='max' is not known"),
        ({"num_microbatches": 2, "aux_reduction": "max"}, r"aux_reduction='max'"),
        ({"num_microbatches": 2, "batch_argnums": 0}, r"argument 0 is in argnums and"),
        ({"num_microbatches": 2, "argnums": -1}, r"argnums=-1.*counted from 0"),
        ({"num_microbatches": 2, "accumulator_dtype": int}, r"accumulator_dtype=int"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        value_and_grad(mean, **options)


@pytest.mark.parametrize(
    ("options", "args", "message"),
    [
        ({"microbatch_size": 15}, (1.0, np.ones(8)), r"microbatch_size=15 .*at most 8"),
        ({"num_microbatches": 9}, (1.0, np.ones(8)), r"num_microbatches=9 .*at most 8"),
        (
            {"num_microbatches": 3, "microbatch_size": 4},
            (1.0, np.ones(8)),
            r"num_microbatches=3 and microbatch_size=4 do not make batch_size=8",
        ),
        (
            {"num_microbatches": 2},
            (1.0, {"a": np.ones(8), "b": np.ones(6)}),
            r"different numbers of examples.*8.*6",
        ),
        ({"num_microbatches": 2}, (1.0, np.float32(1)), r"batch_axis=0 does not exist"),
        (
            {"num_microbatches": 2, "batch_axis": None},
            (1.0, np.ones(8)),
            r"no batched array",
        ),
        (
            {"num_microbatches": 2, "batch_axis": {"a": 0}},
            (1.0, {"b": np.ones(4)}),
            r"no pytree prefix of the batch",
        ),
        ({"num_microbatches": 2}, (1.0,), r"argument 1 has a role, but there are 1"),
        (
            {"num_microbatches": 2, "key_argnums": 2},
            (1.0, np.ones(4), 7),
            r"argument 2 is int.*not one PRNG key",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(options, args, message):
    with pytest.raises(ValueError, match=message):
        value_and_grad(mean, **options)(*args)


@pytest.mark.parametrize(
    ("fun", "options", "message"),
    [
        (lambda w, x: w * x, {}, r"loss of shape \(4,\)"),
        (lambda w, x: jnp.sum(x > w), {}, r"loss of dtype int32"),
        (lambda w, x: (w * x[0], 1), {}, r"returned tuple for a loss"),
        (lambda w, x: w * x[0], {"has_aux": True}, r"expected the pair \(loss, aux\)"),
        (
            lambda w, x: (w * x[0], jnp.int32(1)),
            {"has_aux": True},
            r"aux has dtype int32, which has no mean",
        ),
        (
            lambda w, x: (w * x[0], x[0] > 0),
            {"has_aux": True, "aux_reduction": "sum"},
            r"aux has dtype bool, which has no sum",
        ),
        (
            lambda w, x: (w * x[0], w),
            {"has_aux": True, "aux_reduction": "concat"},
            r'aux has shape \(\); for the aux_reduction "concat"',
        ),
        (
            lambda w, x: (w * x[0], {"a": w}),
            {"has_aux": True, "aux_reduction": {"b": "sum"}},
            r"no pytree prefix of the aux",
        ),
        (
            lambda w, x: w * x[0],
            {"weight_fn": lambda x: x},
            r"weight_fn returned shape \(4,\)",
        ),
        (
            lambda w, x: w * x[0],
            {"weight_fn": lambda x: {"a": 1}},
            r"each term of the loss needs its weight",
        ),
    ],
)
def test_results_that_cannot_be_reduced_are_refused(fun, options, message):
    with pytest.raises(ValueError, match=message):
        value_and_grad(fun, num_microbatches=2, **options)(
            jnp.float32(1.0), np.ones(8, np.float32)
        )


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (lambda s: {"n": s["n"] + 1, "m": s["n"]}, r"\['m'\]: None -> float32\[\]"),
        (lambda s: {"n": s["n"].astype(jnp.int32)}, r"float32\[\] -> int32\[\]"),
        (lambda s: {"n": jnp.ones(2)}, r"float32\[\] -> float32\[2\]"),
    ],
)
def test_a_state_that_changes_its_structure_is_refused(new, message):
    f = value_and_grad(
        lambda w, x, s: (jnp.mean(w * x), new(s)), num_microbatches=2, state_argnums=2
    )
    with pytest.raises(ValueError, match=message):
        f(jnp.float32(1.0), np.ones(4, np.float32), {"n": jnp.float32(0)})


def test_integers_have_no_gradient():
    with pytest.raises(TypeError, match=r"dtype int32, which has none"):
        value_and_grad(mean, num_microbatches=2)(1, np.ones(4, np.float32))


# --- real losses, in float64 -------------------------------------------------------


def transformer(params, batch):
    """One block with tied embeddings, and a loss over the tokens that count."""
    x = params["embed"][batch["tokens"][:, :-1]]
    q, k, v = (x @ params[name] for name in ("q", "k", "v"))
    scores = jnp.einsum("bqc,bkc->bqk", q, k)
    seen = jnp.tril(jnp.ones((scores.shape[1],) * 2, bool))[None]
    x = x + jnp.einsum("bqk,bkc->bqc", jax.nn.softmax(jnp.where(seen, scores, -1e9)), v)
    logits = x @ params["embed"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["tokens"][:, 1:]
    )
    return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])


def convolutional(params, batch):
    x = jax.lax.conv(batch["image"], params["kernel"], (1, 1), "SAME")
    x = jnp.mean(jax.nn.relu(x), axis=(2, 3)) @ params["head"]
    return jnp.mean((x[:, 0] - batch["y"]) ** 2)


def recurrent(params, batch):
    def cell(carry, x):
        h, c = carry
        gates = x @ params["in"] + h @ params["hidden"]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), None

    zeros = jnp.zeros((batch["x"].shape[0], params["hidden"].shape[0]))
    (h, _), _ = jax.lax.scan(cell, (zeros, zeros), jnp.swapaxes(batch["x"], 0, 1))
    return jnp.mean((jnp.sum(h, -1) - batch["y"]) ** 2)


def experts(params, batch):
    """Top-1 routing; the auxiliary loss is a mean over examples of its own."""
    scores = jax.nn.softmax(batch["x"] @ params["router"])
    chosen = jnp.argmax(scores, -1)
    out = jnp.einsum("bc,bcd->bd", batch["x"], params["experts"][chosen])
    out = out * jnp.max(scores, -1, keepdims=True)
    error = jnp.sum((out - batch["y"][:, None]) ** 2, -1)
    return {
        "main": jnp.sum(error * batch["mask"]) / jnp.sum(batch["mask"]),
        "aux": 0.1 * jnp.mean(jnp.sum(scores**2, -1)),
    }


def made(seed, **shapes):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.3, shape) for name, shape in shapes.items()}


CASES = {
    "transformer": (
        transformer,
        made(0, embed=(11, 4), q=(4, 4), k=(4, 4), v=(4, 4)),
        {
            "tokens": np.random.default_rng(1).integers(0, 11, (10, 6)),
            "mask": np.tril(np.ones((10, 5))),
        },
        lambda b: jnp.sum(b["mask"]),
    ),
    "convolutional": (
        convolutional,
        made(2, kernel=(3, 2, 3, 3), head=(3, 1)),
        made(3, image=(10, 2, 5, 5), y=(10,)),
        None,
    ),
    "recurrent": (
        recurrent,
        made(4, **{"in": (3, 16), "hidden": (4, 16)}),
        made(5, x=(10, 7, 3), y=(10,)),
        None,
    ),
    "experts": (
        experts,
        made(6, router=(4, 3), experts=(3, 4, 4)),
        made(7, x=(10, 4), y=(10,)) | {"mask": np.arange(10.0) % 3},
        lambda b: {"main": jnp.sum(b["mask"]), "aux": b["y"].size},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_of_real_networks_equal_the_full_batchs_in_float64(engine, name):
    loss, params, batch, weight_fn = CASES[name]
    with jax.enable_x64(True):
        whole = loss

        if name == "experts":

            def whole(params, batch):
                return functools.reduce(jnp.add, loss(params, batch).values())

        params, batch = jax.tree.map(jnp.asarray, (params, batch))
        expected = jax.jit(jax.value_and_grad(whole))(params, batch)
        for split in ({"microbatch_size": 4}, {"num_microbatches": 5}):
            f = value_and_grad(
                loss, weight_fn=weight_fn, accumulator_dtype=jnp.float64, **split
            )
            found = jax.jit(f)(params, batch)
            chex.assert_trees_all_close(found, expected, rtol=1e-12, atol=1e-14)
