"""The transformer, and the loss and weight of its micro-batches."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradacc_jax.cli import model
from gradacc_jax.cli.settings import Settings
from gradacc_jax.cli.text import SEPARATOR, Batch

SETTINGS = Settings(num_layers=3, embed_dim=16, num_heads=2, seq_len=12)
EPS = float(jnp.finfo(jnp.float32).eps)


@pytest.fixture(scope="module")
def created():
    forward, params = model.create(SETTINGS)
    return jax.jit(forward), params


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    sequences = rng.integers(0, 256, (3, SETTINGS.seq_len + 1), np.uint8)
    return Batch(sequences, np.array([12, 5, 0], np.int32))


def test_layers_are_stacked_and_everything_is_float32(created):
    _, params = created
    assert {leaf.shape[0] for leaf in jax.tree.leaves(params["blocks"])} == {3}
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    kernels = params["blocks"]["mlp_in"]["kernel"]
    assert not np.array_equal(kernels[0], kernels[1])


def test_the_same_seed_makes_the_same_parameters(created):
    again = model.create(SETTINGS)[1]
    assert jax.tree.all(jax.tree.map(np.array_equal, created[1], again))


def test_no_position_sees_a_later_byte(created, batch):
    forward, params = created
    tokens = jnp.asarray(batch.sequences)
    before = forward(params, tokens)
    after = forward(params, tokens.at[:, 7].add(1))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(axis=-1).all()


def test_attention_depends_on_distance_and_not_on_place():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    turned_q, turned_k = (model.rotary(jnp.tile(x, (1, 9, 1, 1))) for x in (q, k))
    scores = jnp.einsum("bqhc,bkhc->qk", turned_q, turned_k)
    for distance in range(5):
        along = jnp.diagonal(scores, distance)
        # Sums of 8 products of angles of up to 8 radians, each rounded.
        np.testing.assert_allclose(along, along[0], atol=64 * EPS)


def test_an_untrained_model_is_no_wiser_than_chance(created, batch):
    forward, params = created
    loss = model.next_byte_loss(forward, params, batch)
    assert float(loss) == pytest.approx(np.log(256), rel=0.02)


def test_the_loss_is_the_mean_over_targets_that_bear_one(created, batch):
    forward, params = created
    logits = np.asarray(forward(params, jnp.asarray(batch.sequences[:, :-1])), float)
    losses = [
        np.log(np.exp(logits[i, j]).sum()) - logits[i, j, batch.sequences[i, j + 1]]
        for i, length in enumerate(batch.lengths)
        for j in range(length)
    ]
    loss = model.next_byte_loss(forward, params, batch)
    # A logsumexp over 256 and a mean over 17, in float32.
    np.testing.assert_allclose(float(loss), np.mean(losses), rtol=16 * EPS)
    assert float(model.weight(batch)) == len(losses) == 17


def test_a_micro_batch_without_targets_has_no_loss_and_no_gradient(created, batch):
    forward, params = created
    empty = batch._replace(lengths=np.zeros(3, np.int32))
    loss_fn = functools.partial(model.next_byte_loss, forward)
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params, empty)
    assert float(loss) == float(model.weight(empty)) == 0.0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(grads))


@pytest.mark.slow
def test_bf16_computes_in_bfloat16_with_float32_parameters_and_loss(created, batch):
    # Flax's RMSNorm promotes bfloat16 to float32 itself.
    with jax.numpy_dtype_promotion("standard"):
        forward, params = model.create(dataclasses.replace(SETTINGS, bf16=True))
        forward = jax.jit(forward)
        loss = model.next_byte_loss(forward, params, batch)
        exact = model.next_byte_loss(created[0], params, batch)
        program = jax.make_jaxpr(forward)(params, jnp.asarray(batch.sequences))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert loss.dtype == jnp.float32
    assert re.search(r"bf16\[.*\] = dot_general", str(program))
    # The logits are about 0.1, and bfloat16 keeps 8 of their bits.
    np.testing.assert_allclose(float(loss), float(exact), rtol=2**-8)
    assert float(loss) != float(exact)


def test_a_sample_is_bytes_without_separators(created):
    forward, params = created
    prompt = np.arange(1, 13, dtype=np.uint8)
    drawn = model.sample(forward, params, prompt, jax.random.key(0), 40)
    assert (drawn.shape, drawn.dtype) == ((40,), jnp.uint8)
    assert SEPARATOR not in np.asarray(drawn)
