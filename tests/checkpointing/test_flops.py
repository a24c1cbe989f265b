"""Operations of traced programs: loops as often as they turn, nothing that is dead."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from gradacc_jax.checkpointing.flops import Work, flops_of
from tests import programs


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def test_a_scan_counts_its_body_as_often_as_it_turns():
    def once(x, w):
        return x @ w

    def loop(x, w):
        return lax.scan(lambda x, w: (once(x, w), None), x, w)[0]

    body = flops_of(once, shape(2, 3), shape(3, 3))
    assert body == Work(2 * 2 * 3 * 3, 0)
    assert flops_of(loop, shape(2, 3), shape(7, 3, 3)) == body.times(7)


def test_a_gradient_of_products_is_twice_their_forward_pass():
    def loss(w, x):
        return jnp.sum(x @ w)

    args = shape(4, 5), shape(3, 4)
    forward = flops_of(loss, *args).matrix
    both = flops_of(jax.value_and_grad(loss, (0, 1)), *args).matrix
    assert both == 3 * forward


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolutions_gradients_cost_what_it_costs_itself(stride):
    def loss(kernel, x):
        made = lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            [(1, 1), (1, 1)],
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.sum(made**2)

    args = shape(3, 3, 4, 8), shape(2, 16, 16, 4)
    forward = flops_of(loss, *args).matrix
    assert forward == 2 * (2 * (16 // stride) ** 2 * 8) * (9 * 4)
    both = flops_of(jax.grad(loss, (0, 1)), *args).matrix
    assert both == pytest.approx(3 * forward, rel=0.3)  # borders


def test_what_nothing_depends_on_is_not_counted():
    def f(x):
        jnp.exp(x @ x)
        return x + 1

    assert flops_of(f, shape(8, 8)) == Work(0, 64)


def test_a_conditional_counts_as_its_dearer_branch():
    def f(x):
        return lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)

    assert flops_of(f, shape(8, 8)).matrix == 2 * 8**3


def test_the_count_is_near_the_compilers_where_that_counts_all():
    def f(w, x):
        return jnp.sum(jnp.square(x @ w))

    w, x = jnp.ones((64, 32)), jnp.ones((128, 64))
    counted = programs.compiled(jax.grad(f), w, x).flops
    np.testing.assert_allclose(flops_of(jax.grad(f), w, x).total, counted, rtol=0.05)
