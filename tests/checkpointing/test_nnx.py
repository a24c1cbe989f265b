"""Modules of nnx under ``remat``: the same variables under the same paths."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradacc_jax import remat
from tests.checkpointing.models import NnxBlock, NnxModel, inputs, plain, residual_bytes

X = inputs()


def equal(a, b):
    a, b = (plain(nnx.state(m)) if isinstance(m, nnx.Module) else m for m in (a, b))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        np.testing.assert_array_equal(x, y)


def test_a_class_a_module_and_a_bound_method_do_what_they_did():
    expected = NnxBlock(nnx.Rngs(0))
    y = expected(X, activation="gelu")
    by_class = remat(NnxBlock)(nnx.Rngs(0))
    by_module, by_method = NnxBlock(nnx.Rngs(0)), NnxBlock(nnx.Rngs(0))
    equal(by_class(X, activation="gelu"), y)
    equal(remat(by_module)(X, activation="gelu"), y)
    equal(remat(by_method.__call__)(X, activation="gelu"), y)
    # Counts, statistics and keys went on, once, in the modules themselves.
    for module in (by_class, by_module, by_method):
        equal(module, expected)


def test_a_method_other_than_call_takes_keywords_and_defaults():
    for arguments in ((), (2.0,)):
        plainly, again = NnxBlock(nnx.Rngs(0)), NnxBlock(nnx.Rngs(0))
        equal(remat(again.twice)(X, *arguments), plainly.twice(X, *arguments))
        equal(remat(again.twice)(X, scale=2.0), plainly.twice(X, scale=2.0))
        equal(again, plainly)


def test_blocks_that_share_one_stream_of_keys_go_on_sharing_it():
    expected, model = NnxModel(nnx.Rngs(0)), NnxModel(nnx.Rngs(0))
    for i, block in enumerate(model.blocks):
        model.blocks[i] = remat(block)
    assert model.blocks[0].dropout.rngs is not None
    equal(model(X), expected(X))
    equal(model(X), expected(X))  # the second draws go on where the first ended
    equal(model, expected)


def test_a_function_of_modules_and_of_streams_of_keys_works():
    class Noise(nnx.Module):
        def __call__(self, x, rngs, *, kind):
            return x + getattr(rngs, kind).normal(x.shape)

    def run(wrap):
        rngs = nnx.Rngs(0)
        block = Noise()
        total = wrap(lambda x, block, rngs: block(x, rngs, kind="noise"))(
            X, block, rngs
        )
        return total + wrap(block)(X, rngs, kind="noise")

    equal(run(remat), run(lambda f: f))


def test_variables_that_are_made_inside_are_there_afterwards():
    class Recording(nnx.Module):
        def __call__(self, x):
            self.seen = nnx.Intermediate(jnp.sin(x))
            return jnp.sin(jnp.sin(x))

    module = Recording()
    remat(module.__call__)(X)
    np.testing.assert_allclose(module.seen[...], jnp.sin(X), rtol=1e-6)


def test_the_class_keeps_its_name_and_is_one_for_each_policy():
    wrapped = remat(NnxBlock)
    assert wrapped is remat(NnxBlock)
    assert wrapped is not remat(NnxBlock, policy="dots")
    assert wrapped.__name__ == "NnxBlock"
    assert isinstance(remat(NnxBlock(nnx.Rngs(0))), NnxBlock)


def test_gradients_agree_and_fewer_bytes_are_kept():
    def run(wrap):
        model = NnxModel(nnx.Rngs(0), block=wrap(NnxBlock))
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        forward = lambda p: nnx.merge(graph, p, rest, copy=True)(X)  # noqa: E731
        grads = jax.grad(lambda p: jnp.sum(forward(p) ** 2))(params)
        return nnx.to_pure_dict(grads), residual_bytes(forward, params)

    (expected, before), (found, after) = run(lambda c: c), run(remat)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    assert after < 0.7 * before


def test_nnx_grad_and_nnx_jit_see_through_it():
    def run(wrap):
        model = NnxModel(nnx.Rngs(0), block=wrap(NnxBlock))
        value = nnx.jit(nnx.grad(lambda m: jnp.sum(m(X) ** 2)))(model)
        return nnx.to_pure_dict(value), plain(nnx.state(model, nnx.BatchStat))

    found, expected = run(remat), run(lambda c: c)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def test_a_block_that_writes_into_a_cache_is_an_error():
    class Caching(nnx.Module):
        def __call__(self, x, cache):
            cache["x"] = x

    with pytest.raises(ValueError, match="Caching writes into a list or dict"):
        remat(Caching())(X, {})
