"""Gradients added into references are the gradients that ``jax.grad`` gives.

On everything whose backward pass is not a plain chain of products: an open report
against JAX speaks of wrong gradients in some case.
"""

import jax
import jax.numpy as jnp
import numpy as np
from optax import MaskedNode
import pytest

from gradacc_jax import references

EPS = np.finfo(np.float32).eps
WIDTH = 4


def params():
    rng = np.random.default_rng(0)

    def leaf(*shape):
        return jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32)

    return {"layers": leaf(3, WIDTH, WIDTH), "table": leaf(5, WIDTH), "v": leaf(WIDTH)}


def layer(x, w):
    return jnp.tanh(x @ w) + x


def layers_in_a_scan(p):
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), p["v"], p["layers"])
    return jnp.sum(x * x)


def layers_unrolled(p):
    x = p["v"]
    for i in range(3):
        x = layer(x, p["layers"][i])
    return jnp.sum(x * x)


def scanned_backwards(p):
    x, ys = jax.lax.scan(
        lambda x, w: (layer(x, w), x), p["v"], p["layers"], reverse=True, unroll=2
    )
    return jnp.sum(x * ys[0])


def scanned_inside_a_scan(p):
    def inner(x, w):
        x, _ = jax.lax.scan(lambda x, v: (layer(x * v, w), None), x, p["table"])
        return x, None

    x, _ = jax.lax.scan(inner, p["v"], p["layers"])
    return jnp.sum(x)


def rematerialised(p):
    return jax.checkpoint(layers_in_a_scan)(p)


def rematerialised_layers(p):
    step = jax.checkpoint(lambda x, w: (layer(x, w), None))
    x, _ = jax.lax.scan(step, p["v"], p["layers"])
    return jnp.sum(x * x)


def rematerialised_with_a_policy(p):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(layers_unrolled, policy=policy)(p)


def tied(p):
    x = layer(p["table"][jnp.array([0, 2, 2])], p["layers"][0])
    return jnp.mean(jax.nn.log_softmax(x @ p["table"].T)[:, 1])


def used_in_every_layer(p):
    def shared(x, w):
        return layer(x * p["v"], w), None

    x, _ = jax.lax.scan(shared, p["v"], p["layers"])
    return jnp.sum(x)


def gathered(p):
    return jnp.sum(p["table"][jnp.array([4, 0, 4, 4])] ** 3)


def gathered_in_a_scan(p):
    def step(total, token):
        return total + jnp.sum(jnp.tanh(p["table"][token])), None

    total, _ = jax.lax.scan(step, jnp.float32(0), jnp.array([1, 1, 3]))
    return total


def sliced(p):
    start = jnp.argmax(p["v"])
    return jnp.sum(jax.lax.dynamic_slice_in_dim(p["table"], start, 2) ** 2)


def scattered(p):
    x = p["table"].at[jnp.array([1, 1])].add(p["v"])
    x = x.at[0].set(p["v"] * 2)
    return jnp.sum(x**3)


def conditional(p):
    return jax.lax.cond(
        p["v"][0] > 0, lambda: jnp.sum(p["table"] ** 2), lambda: jnp.sum(p["v"] ** 3)
    )


def conditional_in_a_scan(p):
    def step(x, w):
        x = jax.lax.cond(x[0] > 0, lambda: layer(x, w), lambda: x * p["v"])
        return x, None

    x, _ = jax.lax.scan(step, p["v"], p["layers"])
    return jnp.sum(x)


def switched(p):
    branches = [lambda i=i: jnp.sum(p["layers"][i] ** 2) for i in range(3)]
    return jax.lax.switch(jnp.argmin(p["v"]), branches)


def fori_loop(p):
    x = jax.lax.fori_loop(0, 3, lambda i, x: layer(x, p["layers"][i]), p["v"])
    return jnp.sum(x)


def with_a_custom_vjp(p):
    @jax.custom_vjp
    def square(x):
        return x * x

    # Ten times the gradient, so that it shows whether this rule is the one that ran.
    square.defvjp(lambda x: (x * x, x), lambda x, g: (20 * x * g,))
    return jnp.sum(square(p["table"])) + jnp.sum(square(p["v"]) * p["v"])


def with_a_custom_vjp_in_a_scan(p):
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(
        lambda x, w: (x @ w, (x, w)),
        lambda saved, g: (3 * g @ saved[1].T, 5 * jnp.outer(saved[0], g)),
    )
    x, _ = jax.lax.scan(lambda x, w: (product(x, w), None), p["v"], p["layers"])
    return jnp.sum(x)


def with_a_custom_jvp(p):
    @jax.custom_jvp
    def cube(x):
        return x**3

    cube.defjvp(lambda x, t: (x[0] ** 3, 30 * x[0] ** 2 * t[0]))
    return jnp.sum(cube(p["table"]) @ p["v"])


def nested_jit(p):
    return jax.jit(lambda q: jax.jit(layers_in_a_scan)(q) + jnp.sum(q["v"]))(p)


def mapped(p):
    return jnp.sum(jax.vmap(lambda row: layer(row, p["layers"][1]))(p["table"]))


def transposed_and_reshaped(p):
    return jnp.sum(p["layers"].reshape(6, 8).T @ jnp.ones(6) * p["table"].ravel()[:8])


def with_a_stopped_gradient(p):
    return jnp.sum(jax.lax.stop_gradient(p["table"]) @ p["v"])


def unused_parameters(p):
    return jnp.sum(p["v"] ** 2)


def constant(p):
    return jnp.float32(1.0)


def identity(p):
    return p["v"][0]


def same_parameter_twice(p):
    return p["v"][0] + p["v"][0] * p["v"][1]


FUNCTIONS = [
    layers_in_a_scan,
    layers_unrolled,
    scanned_backwards,
    scanned_inside_a_scan,
    rematerialised,
    rematerialised_layers,
    rematerialised_with_a_policy,
    tied,
    used_in_every_layer,
    gathered,
    gathered_in_a_scan,
    sliced,
    scattered,
    conditional,
    conditional_in_a_scan,
    switched,
    fori_loop,
    with_a_custom_vjp,
    with_a_custom_vjp_in_a_scan,
    with_a_custom_jvp,
    nested_jit,
    mapped,
    transposed_and_reshaped,
    with_a_stopped_gradient,
    unused_parameters,
    constant,
    identity,
    same_parameter_twice,
]


def both(fun):
    """From parameters and sums: the sums plus a third of the gradient, two ways."""

    def run(p, total):
        _, vjp = jax.vjp(fun, p)
        found = references.add(vjp, total, jnp.float32(1 / 3))
        (third,) = vjp(jnp.float32(1 / 3))
        return found, jax.tree.map(jnp.add, total, third)

    return run


def check_close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        # A sum of some twenty products, into which the old total goes first here and
        # last there: each addition rounds by half an eps of the largest partial sum.
        largest = np.maximum(np.max(np.abs(b)), 1)
        np.testing.assert_allclose(a, b, rtol=0, atol=16 * EPS * largest)


@pytest.mark.parametrize("fun", FUNCTIONS)
def test_what_is_added_is_the_gradient(fun):
    total = jax.tree.map(jnp.ones_like, params())
    check_close(*jax.jit(both(fun))(params(), total))


@pytest.mark.parametrize("fun", [layers_in_a_scan, tied, conditional_in_a_scan])
def test_what_is_added_without_jit_is_the_gradient(fun):
    total = jax.tree.map(jnp.ones_like, params())
    check_close(*both(fun)(params(), total))


def test_sums_over_micro_batches_in_a_scan_are_the_sum_of_the_gradients():
    def loss(p, x):
        return layers_in_a_scan(p | {"v": x * p["v"]})

    def step(total, x):
        _, vjp = jax.vjp(lambda p: loss(p, x), params())
        return references.add(vjp, total, jnp.float32(1)), None

    batch = jnp.asarray(np.random.default_rng(2).normal(size=(4, WIDTH)), jnp.float32)
    zeros = jax.tree.map(jnp.zeros_like, params())
    found, _ = jax.jit(lambda: jax.lax.scan(step, zeros, batch))()
    expected = jax.grad(lambda p: sum(loss(p, x) for x in batch))(params())
    check_close(found, expected)


def test_complex_parameters_get_their_complex_gradients():
    z = jnp.asarray([1 + 2j, 3 - 1j], jnp.complex64)

    def loss(z):
        return jnp.sum(jnp.abs(z) ** 2 * jnp.asarray([1.0, 2.0]))

    value, vjp = jax.vjp(loss, z)
    found = references.add(vjp, jnp.zeros_like(z), jnp.ones_like(value))
    np.testing.assert_allclose(found, jax.grad(loss)(z), rtol=4 * EPS)


def test_references_work_in_this_version_of_jax():
    assert references._work()


def test_references_serve_where_the_sums_have_the_parameters_dtypes():
    def serves(p, total):
        return references.serve(lambda p: 0.0, p, total, False)

    p = params()
    assert serves(p, jax.tree.map(jnp.zeros_like, p))
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), p)
    assert serves(narrow, narrow)
    # Cotangents of bfloat16 parameters are bfloat16: a wider sum adds by a cast.
    assert not serves(narrow, p)
    # No sum at all: a parameter that is not differentiable.
    assert not serves({"n": jnp.arange(3)}, {"n": MaskedNode()})
    assert not serves(p | {"n": jnp.arange(3)}, p | {"n": MaskedNode()})


def test_references_do_not_serve_where_the_self_test_fails(monkeypatch):
    monkeypatch.setattr(references, "_work", lambda: False)
    assert not references.serve(lambda p: 0.0, params(), params(), False)


def test_the_self_test_fails_where_references_are_missing_or_add_wrongly(monkeypatch):
    right = references.add

    def wrong(vjp, total, cotangent):
        return right(vjp, total, cotangent + cotangent)

    self_test = references._work.__wrapped__
    assert self_test()
    with monkeypatch.context() as patched:
        patched.setattr(references, "add", wrong)
        assert not self_test()
    with monkeypatch.context() as patched:
        patched.delattr(jax, "new_ref")
        assert not self_test()
