"""Training steps with a policy: the same step, and less kept for its backward pass."""

import chex
from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from gradacc_jax import accumulate, policies, remat, train_step
from gradacc_jax.flax import Optimizer, TrainState, linen_train_step, nnx_train_step
from tests import programs

LAYERS = 0.1 * jax.random.normal(jax.random.key(0), (8, 32, 32))
BATCH = jax.random.normal(jax.random.key(1), (64, 32))


def with_blocks(params, batch, policy="none"):
    """A loss that applies a policy itself, to each of its layers."""

    @remat(policy=policy)
    def layer(x, w):
        return x + jnp.tanh(jnp.sin(x @ w) ** 2)

    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), batch, params)
    return jnp.mean(x**2)


@pytest.mark.parametrize("form", ["across calls", "in one call", "plain"])
@pytest.mark.parametrize("policy", ["full", "dots"])
def test_a_loss_that_takes_a_policy_is_given_it(form, policy):
    opt = optax.sgd(0.1)
    tx = accumulate(opt, 2) if form == "across calls" else opt
    options = {"num_microbatches": 2} if form == "in one call" else {}

    def run(policy):
        step = train_step(with_blocks, tx, policy=policy, donate=False, **options)
        made = programs.program(step.lower(LAYERS, tx.init(LAYERS), BATCH))
        params, state, metrics = step(LAYERS, tx.init(LAYERS), BATCH)
        if form == "across calls":
            params, _, metrics = step(params, state, BATCH)
        return made, params, metrics

    plain, params, metrics = run("none")
    less, others, seen = run(policy)
    # Some parameters end near 0, where rounding is that of the numbers they came from.
    chex.assert_trees_all_close((others, seen), (params, metrics), rtol=1e-6, atol=1e-8)
    kept = 8 * BATCH.nbytes // (2 if form == "in one call" else 1)
    assert less.temporaries < plain.temporaries - kept


def test_a_loss_that_takes_no_policy_is_refused_one():
    with pytest.raises(ValueError, match="has no keyword `policy`"):
        train_step(lambda params, batch: 0.0, optax.sgd(0.1), policy="dots")


def test_a_policy_that_is_none_or_unknown_is_refused_at_construction():
    with pytest.raises(ValueError, match="policy=None means full"):
        train_step(with_blocks, optax.sgd(0.1), policy=None)
    with pytest.raises(ValueError, match="policy='dotz' is not known; did you mean"):
        nnx_train_step(lambda model, batch: 0.0, policy="dotz")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.linear(self.norm(x))))


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("k", [1, 2])
def test_an_nnx_models_repeated_blocks_are_rematerialised_in_its_step(k):
    seen = []

    def loss(model, batch):
        seen.append(getattr(model, "rematerialised", {}))
        return jnp.mean(model(batch) ** 2)

    batch = jax.random.normal(jax.random.key(1), (8, 8))
    states = []
    for policy in ("none", "full"):
        model = Model()
        optimizer = Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        step = nnx_train_step(loss, policy=policy, num_microbatches=k)
        for _ in range(2):
            metrics = step(model, optimizer, batch)
        assert type(model) is Model
        state = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey)))
        states.append((state, metrics))
    # Parameters, statistics and the counters of the dropout streams.
    chex.assert_trees_all_close(*states, rtol=1e-5, atol=1e-6)
    assert set(seen[-1]) == {f"blocks/{i}" for i in range(3)}
    assert seen[0] == {}


def test_an_nnx_loss_that_takes_a_policy_is_given_it_and_the_model_as_it_is():
    given = []

    def loss(model, batch, policy="none"):
        given.append((policy, type(model)))
        return jnp.mean(model(batch) ** 2)

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    nnx_train_step(loss, policy="dots")(model, optimizer, jnp.ones((4, 8)))
    assert set(given) == {(policies.dots, nnx.Linear)}


def test_an_nnx_model_without_repeated_blocks_is_told_what_to_do():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = nnx_train_step(lambda m, batch: jnp.mean(m(batch) ** 2), policy="full")
    with pytest.raises(ValueError, match="call remat_modules"):
        step(model, optimizer, jnp.ones((4, 8)))


def test_a_linen_step_hands_its_policy_on():
    model = nn.Dense(8)
    x = jnp.ones((4, 8))
    given = []

    def loss(params, batch, policy):
        given.append(policy)
        return jnp.mean(model.apply({"params": params}, batch) ** 2)

    state = TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), x)["params"],
        tx=optax.sgd(0.1),
    )
    linen_train_step(loss, policy="dots")(state, x)
    assert set(given) == {policies.dots}
