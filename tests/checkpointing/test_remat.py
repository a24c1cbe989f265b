"""``remat`` of functions: nothing to count, nothing lost, and faults are told."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import gradacc_jax
from gradacc_jax import policies, remat
from tests.checkpointing.models import residual_bytes, residuals
from tests.programs import compiled

X, W = jnp.ones((4, 3)), jnp.full((3, 3), 0.1)


def layer(x, w, train=False, *, activation="tanh", options=None):
    assert isinstance(train, bool)
    y = getattr(jnp, activation)(x @ w)
    return jnp.where(y > 0, y * 2, y) if train else y


def gradient(f, *args, **kwargs):
    return jax.grad(lambda w: jnp.sum(f(X, w, *args, **kwargs)))(W)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((True,), {}),
        ((), {"train": True}),
        ((), {}),
        ((True,), {"activation": "sin", "options": {"x": X, "name": "y"}}),
    ],
)
def test_arguments_go_by_position_by_keyword_and_by_default(args, kwargs):
    found = gradient(remat(layer), *args, **kwargs)
    np.testing.assert_allclose(found, gradient(layer, *args, **kwargs), rtol=1e-6)


def test_it_decorates_with_options_and_without_and_keeps_the_signature():
    @remat
    def one(x):
        """Says what it does."""
        return jnp.sin(jnp.sin(x))

    @remat(policy="dots", prevent_cse=True)
    def two(x):
        return jnp.sin(jnp.sin(x))

    assert one.__name__ == "one"
    assert one.__doc__ == "Says what it does."
    assert len(residuals(one, X)) == len(residuals(two, X)) == 1


def test_results_that_are_no_arrays_come_back_as_they_are():
    @remat
    def f(x):
        return {"y": jnp.sin(x), "name": "sine", "rate": 0.5, "none": None}

    out = f(X)
    assert out["name"] == "sine"
    assert type(out["rate"]) is float
    assert out["none"] is None


@pytest.mark.parametrize("static", ["table", 1, -1, ("table",)])
def test_an_array_that_shall_be_static_is_named_or_counted_from_either_end(static):
    @functools.partial(remat, static=static)
    def f(x, table):
        return x * sum(float(t) for t in table)  # needs the numbers

    np.testing.assert_array_equal(f(X, np.arange(3.0)), X * 3)
    np.testing.assert_array_equal(f(X, table=np.arange(3.0)), X * 3)


@pytest.mark.parametrize("static", ["tabel", 2, -3])
def test_a_static_argument_that_is_none_is_refused(static):
    with pytest.raises(ValueError, match=f"static={static!r} is no argument"):
        remat(lambda x, table: x, static=static)


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ({"static_argnums": (1,)}, "nothing to count"),
        ({"variables": "params"}, "all collections"),
        ({"rngs": True}, "all streams"),
        ({"methods": ["encode"]}, "decorate other methods"),
        ({"polcy": "dots"}, "no argument 'polcy'$"),
    ],
)
def test_options_of_other_libraries_are_answered(option, advice):
    with pytest.raises(TypeError, match=advice):
        remat(layer, **option)


@pytest.mark.parametrize("target", ["dots", policies.dots])
def test_a_policy_in_the_place_of_the_target_is_refused(target):
    with pytest.raises(TypeError, match="write remat"):
        remat(target)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="expected a function"):
        remat(3)
    with pytest.raises(TypeError, match="expected a function"):
        remat(dict)


def test_a_function_that_writes_into_what_it_was_given_is_an_error():
    @remat
    def f(x, cache):
        cache["h"] = jnp.sin(x)
        return x

    with pytest.raises(ValueError, match="writes into a list or dict"):
        f(X, {})
    with pytest.raises(ValueError, match="writes into a list or dict"):
        f(X, {"h": X})


def test_gradients_of_a_subset_with_integers_beside_it_are_right():
    def f(adapter, frozen, tokens):
        return jnp.sin(frozen[tokens] @ (frozen.T @ adapter))

    tokens = jnp.array([0, 2, 1])
    loss = lambda f: lambda a: jnp.sum(f(a, W, tokens))  # noqa: E731
    found, expected = (jax.grad(loss(g))(W) for g in (remat(f), f))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_without_a_gradient_nothing_changes():
    program = compiled(remat(layer), X, W)
    assert program.flops == compiled(layer, X, W).flops
    before = dict(jax.config.values)
    remat(layer)(X, W)
    assert dict(jax.config.values) == before


def test_it_composes_with_jit_vmap_and_forward_mode():
    f = remat(jax.jit(layer))
    direction = (jnp.ones_like(W),)
    for transformed in (
        lambda f: jax.jvp(lambda w: f(X, w), (W,), direction)[1],
        lambda f: jax.vmap(f, in_axes=(0, None))(X[:, None], W),
        lambda f: jax.hessian(lambda w: jnp.sum(f(X, w)))(W),
        lambda f: jax.grad(lambda w: jnp.sum(jax.vmap(f, (0, None))(X, w)))(W),
    ):
        found, expected = transformed(f), transformed(layer)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_a_closure_over_what_is_differentiated_gets_its_gradient():
    def f(w):
        return jnp.sum(remat(lambda x: jnp.sin(x @ w))(X) ** 2)

    expected = jax.grad(lambda w: jnp.sum(jnp.sin(X @ w) ** 2))(W)
    np.testing.assert_allclose(jax.grad(f)(W), expected, rtol=1e-6)


# --- what is told --------------------------------------------------------------------


def test_a_whole_loss_is_told_how_much_it_does_not_save():
    def loss(w, x):
        for _ in range(3):
            x = jnp.sin(x @ w)
        return jnp.mean(x**2)

    big = jnp.ones((4096, 3))
    with pytest.warns(UserWarning, match=r"saves nothing.*0\.[1-9]\d* MiB"):
        jax.grad(remat(loss))(W, big)
    jax.grad(remat(loss, policy="dots"))(W, big)  # keeps the products: no warning


def test_a_piece_of_a_loss_within_a_scan_is_not_told_off():
    def piece(total, x):
        return total + remat(lambda w, x: jnp.sum(jnp.sin(x @ w)))(W, x), None

    jax.grad(lambda t: lax.scan(piece, t, jnp.ones((3, 4, 3)))[0])(0.0)


def test_merging_is_overridden_where_both_passes_are_in_one_body():
    block = remat(layer, prevent_cse=False)

    def loss(w, x):
        for _ in range(2):
            x = block(x, w)
        return jnp.mean(x)

    grad = gradacc_jax.grad(loss, microbatch_size=2)
    with pytest.warns(UserWarning, match="prevent_cse=True is used"):
        text = jax.jit(grad).lower(W, X).as_text()
    assert "optimization_barrier" in text


def test_merging_is_allowed_in_the_body_of_a_scan_over_layers():
    def loss(ws, prevent_cse):
        block = remat(layer, prevent_cse=prevent_cse)
        return jnp.mean(lax.scan(lambda x, w: (block(x, w), None), X, ws)[0])

    ws = jnp.stack([W] * 3)
    for prevent_cse in (False, True):  # no warning: warnings are errors
        lowered = jax.jit(jax.grad(loss), static_argnums=1).lower(ws, prevent_cse)
        assert ("optimization_barrier" in lowered.as_text()) is prevent_cse


def test_a_print_that_fires_twice_is_told():
    @remat
    def f(x):
        jax.debug.print("x = {x}", x=x)
        return jnp.sin(jnp.sin(x))

    with pytest.warns(UserWarning, match="fires twice"):
        f(X)


# --- memory --------------------------------------------------------------------------


def tower(block):
    def run(ws, x):
        return lax.scan(lambda x, w: (block(x, w, activation="sin"), None), x, ws)[0]

    return run


@pytest.mark.parametrize(
    ("policy", "arrays"),
    # Of each layer: its input; and the product, or its cosine.
    [("full", 1), ("dots", 2), ("none", 2)],
)
def test_residual_bytes_are_what_the_policy_says(policy, arrays):
    layers, x = 8, jnp.ones((64, 16))
    ws = jnp.ones((layers, 16, 16))
    found = residual_bytes(tower(remat(layer, policy=policy)), ws, x)
    held = found - ws.nbytes
    assert held == pytest.approx(arrays * layers * x.nbytes, rel=0.15)


def test_temporaries_fall_with_the_policy_in_a_scan_over_layers():
    # In a scan every supported JAX keeps the second computation on CPU; unrolled,
    # jax 0.10 removes it again.
    x, ws = jnp.ones((256, 16)), jnp.ones((16, 16, 16))

    def deep(x, w, activation):
        for _ in range(4):
            x = jnp.sin(x @ w)
        return x

    def temporaries(policy):
        run = tower(remat(deep, policy=policy))
        return compiled(jax.grad(lambda ws: jnp.sum(run(ws, x))), ws).temporaries

    none, dots, full = (temporaries(p) for p in ("none", "dots", "full"))
    assert full < 0.4 * none
    assert full < dots < none


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_a_mixture_of_experts_routes_once_and_gets_the_same_gradients(policy):
    def block(params, x):
        weights, experts = lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
        chosen = params["experts"][experts]  # (tokens, 2, channels, channels)
        outs = jnp.tanh(jnp.einsum("tc,tkcd->tkd", x, chosen))
        return x + jnp.einsum("tk,tkd->td", weights, outs)

    def loss(block, params, x):
        return jnp.mean(block(params, block(params, x)) ** 2)

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "router": jax.random.normal(keys[0], (8, 4)),
        "experts": 0.3 * jax.random.normal(keys[1], (4, 8, 8)),
    }
    x = jax.random.normal(keys[2], (16, 8))
    plain = jax.grad(functools.partial(loss, block))
    again = jax.grad(functools.partial(loss, remat(block, policy=policy)))
    for a, b in zip(
        jax.tree.leaves(again(params, x)), jax.tree.leaves(plain(params, x))
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    # Two blocks, and no third or fourth choice of experts in the backward pass.
    assert str(jax.make_jaxpr(again)(params, x)).count("top_k[") == 2
    checkpointed = jax.grad(functools.partial(loss, jax.checkpoint(block)))
    assert str(jax.make_jaxpr(checkpointed)(params, x)).count("top_k[") == 4
