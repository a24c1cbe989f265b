"""Operations by the jaxpr, where no compiler counts them."""

import jax
import jax.numpy as jnp
import pytest

from gradacc_jax import chips, remat
from gradacc_jax.planning.costs import cost

CHIP = chips()["rtx-4090"]


def of(function, *args):
    return cost(jax.make_jaxpr(function)(*args), CHIP)


def test_a_product_is_two_operations_for_each_pair():
    a, b = jnp.ones((3, 5)), jnp.ones((5, 7))
    assert of(jnp.matmul, a, b).flops == 2 * 3 * 5 * 7
    a, b = jnp.ones((4, 3, 5)), jnp.ones((4, 5, 7))
    assert of(lambda a, b: jnp.einsum("bij,bjk->bki", a, b), a, b).flops == 840


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_is_counted_as_the_compiler_counts_it(groups):
    x, w = jnp.ones((2, 9, 9, 4)), jnp.ones((3, 3, 4 // groups, 6))

    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    found = of(convolve, x, w)
    compiled = jax.jit(convolve).lower(x, w).compile()
    assert found.flops == compiled.cost_analysis()["flops"]
    assert found.convolutions == 1


def test_a_loop_counts_as_often_as_it_runs():
    x, w = jnp.ones((8, 8)), jnp.ones((5, 8, 8))

    def layers(x, w):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    once = 2 * 8**3
    assert of(layers, x, w).flops == 5 * once
    # Forward, and two products for each in the backward pass.
    assert of(jax.grad(lambda x, w: layers(x, w).sum(), (0, 1)), x, w).flops == (
        3 * 5 * once
    )
    assert of(layers, x, w).seconds == pytest.approx(5 * of(jnp.matmul, x, x).seconds)


def test_what_a_backward_pass_computes_again_is_counted():
    x, w = jnp.ones((8, 8)), jnp.ones((5, 8, 8))

    def loss(x, w, policy):
        layer = remat(lambda x, w: jnp.sin(jnp.sin(x @ w)), policy=policy)
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0].sum()

    def flops(policy):
        return of(jax.grad(lambda x, w: loss(x, w, policy), (0, 1)), x, w).flops

    assert flops("dots") == flops("none")
    assert flops("full") == flops("none") + 5 * 2 * 8**3


def test_a_conditional_costs_its_dearest_branch():
    x = jnp.ones((8, 8))

    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert of(branch, x).flops == 2 * 2 * 8**3


def test_what_cannot_be_counted_is_noted():
    def loop(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x)

    found = of(loop, jnp.ones((8, 8)))
    assert found.flops == 2 * 8**3
    assert "a loop whose length is not known" in next(iter(found.notes))


def test_what_a_custom_derivative_does_is_counted_once():
    @jax.custom_vjp
    def f(x):
        return x @ x

    f.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x + x @ g,))
    x = jnp.ones((8, 8))
    assert of(f, x).flops == 2 * 8**3
    assert of(jax.grad(lambda x: f(x).sum()), x).flops == 3 * 2 * 8**3


def test_small_operations_take_their_launch_and_large_ones_their_arithmetic():
    small, large = jnp.ones((8, 8)), jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    assert of(jnp.matmul, small, small).seconds == 4e-6
    assert of(jnp.matmul, large, large).seconds == pytest.approx(
        2 * 8192**3 / CHIP.float32_flops
    )
    narrow = jax.ShapeDtypeStruct(large.shape, jnp.bfloat16)
    assert of(jnp.matmul, narrow, narrow).seconds == pytest.approx(
        2 * 8192**3 / CHIP.bfloat16_flops
    )
    # A vector times a matrix is memory traffic.
    vector = jax.ShapeDtypeStruct((1, 8192), jnp.float32)
    assert of(jnp.matmul, vector, large).seconds == pytest.approx(
        4 * (8192**2 + 2 * 8192) / CHIP.bandwidth
    )
