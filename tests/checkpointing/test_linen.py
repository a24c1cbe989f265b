"""Linen modules under ``remat``: names, parameters, masks and statistics stay."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradacc_jax import policies, remat
from tests.checkpointing.models import (
    RNGS,
    LinenBlock,
    LinenModel,
    equal,
    init,
    inputs,
    outputs,
    residual_bytes,
)

X = inputs()


def test_a_trained_model_finds_its_parameters_and_draws_the_same_masks():
    plain = LinenModel()
    variables = init(plain)
    model = LinenModel(remat(LinenBlock))
    equal(init(model), variables)
    # Sown values, statistics and captured results: each once.
    options = {"capture_intermediates": True}
    expected, found = (outputs(m, variables, **options) for m in (plain, model))
    equal(found, expected)


def test_the_class_keeps_its_name_and_is_one_for_each_policy():
    wrapped = remat(LinenBlock)
    assert wrapped is remat(LinenBlock)
    assert wrapped is not remat(LinenBlock, policy="dots")
    assert issubclass(wrapped, LinenBlock)
    assert wrapped.__name__ == wrapped.__qualname__ == "LinenBlock"
    assert wrapped.__module__ == LinenBlock.__module__


def test_fewer_bytes_are_kept():
    variables = init(LinenModel())

    def kept(policy):
        model = LinenModel(remat(LinenBlock, policy=policy))
        run = lambda p: outputs(model, {**variables, "params": p})[0]  # noqa: E731
        return residual_bytes(run, variables["params"])

    assert kept("full") < kept(policies.save_names("hidden")) < kept("none")


@pytest.mark.parametrize(
    "call",
    [
        lambda block: block(X, True),
        lambda block: block(X, train=True),
        lambda block: block(X, train=True, activation="gelu"),
        lambda block: block(X),
    ],
)
def test_flags_and_strings_go_by_position_by_keyword_and_by_default(call):
    variables = LinenBlock().init(RNGS, X)

    def run(cls):
        return nn.apply(
            lambda block: call(block), cls(), mutable=["batch_stats", "intermediates"]
        )(variables, rngs={"dropout": jax.random.key(2)})

    equal(run(remat(LinenBlock)), run(LinenBlock))


class ByMethod(nn.Module):
    """Decorated methods, setup, a shared submodule, and a module as an argument."""

    wrap: object = staticmethod(lambda f: f)

    def setup(self):
        self.inner = nn.Dense(8)
        self.outer = nn.Dense(8)

    def __call__(self, x):
        x = self.encode(x, scale=2.0)
        x = self.wrap(self.encode)(x, scale=1.0)
        return self.wrap(lambda module, x, other: other(module(x)))(
            self.inner, x, self.outer
        )

    @remat
    def encode(self, x, *, scale):
        assert isinstance(scale, float)
        return nn.tanh(self.inner(x)) * scale


def test_methods_bound_methods_and_functions_of_modules_work():
    plain = ByMethod(lambda f: f)
    variables = plain.init(RNGS, X)
    model = ByMethod(remat)
    equal(model.init(RNGS, X), variables)

    def grads(model):
        return jax.grad(lambda v: jnp.sum(model.apply(v, X) ** 2))(variables)

    for a, b in zip(*(jax.tree.leaves(grads(m)) for m in (plain, model))):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_an_instance_becomes_an_instance_of_the_subclass():
    block = LinenBlock(jnp.float32, name="named")
    wrapped = remat(block)
    assert wrapped.name == "named"
    equal(wrapped.init(RNGS, X), block.init(RNGS, X))


def test_apply_of_a_model_is_a_function_like_any_other():
    model = LinenModel()
    variables = init(model)
    found = remat(model.apply)(variables, X, False)
    np.testing.assert_array_equal(found, model.apply(variables, X, False))


def test_a_class_without_call_is_told_to_decorate_its_methods():
    class Encoder(nn.Module):
        def encode(self, x):
            return x

    with pytest.raises(TypeError, match="no __call__; decorate the methods"):
        remat(Encoder)


def test_a_block_that_writes_into_a_cache_is_an_error():
    class Caching(nn.Module):
        @nn.compact
        def __call__(self, x, cache):
            cache["x"] = nn.Dense(2)(x)
            return cache["x"]

    with pytest.raises(ValueError, match="Caching writes into a list or dict"):
        remat(Caching)().init(RNGS, X, {})
