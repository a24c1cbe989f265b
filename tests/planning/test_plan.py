"""Plans for a loss: right, compiled, and with all in them that a step holds."""

import json

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
import numpy as np
import optax
import pytest

from gradacc_jax import accumulate, plan, plan_step, policies, remat, train_step
from gradacc_jax.planning.public import resolve
from gradacc_jax.planning.report import ACROSS_CALLS, ONE_CALL

LAYERS, WIDTH, BATCH = 6, 64, 48
PARAMS = jax.ShapeDtypeStruct((LAYERS, 2, WIDTH, WIDTH), jnp.float32)
EXAMPLES = jax.ShapeDtypeStruct((5, 16, WIDTH), jnp.float32)
MATRIX = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)


def loss_fn(params, batch, *, policy="none"):
    @remat(policy=policy)
    def layer(x, w):
        return x + jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])

    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), batch, params)
    return jnp.mean(x**2)


def plain(w, batch):
    """Two products: quick to compile, and without a policy."""
    return jnp.mean(jnp.tanh(jnp.tanh(batch @ w) @ w) ** 2)


def planned(memory, **options):
    options = {"global_batch_size": BATCH, "policies": ("none",), **options}
    return plan(plain, MATRIX, optax.sgd(0.1), EXAMPLES, memory=memory, **options)


@pytest.fixture(scope="module")
def found():
    """A plan of layers with policies, in which some ways fit."""
    with jax.numpy_dtype_promotion("strict"):
        return plan(
            loss_fn,
            PARAMS,
            optax.sgd(0.1),
            EXAMPLES,
            global_batch_size=BATCH,
            memory=1_250_000,
        )


def test_every_returned_plan_was_compiled_and_makes_the_global_batch(found):
    for it in (found, *map(planned, ("50MB", 500_000, "100KiB"))):
        assert it.microbatch_size * it.num_microbatches == BATCH
        assert it.peak_bytes <= it.limit_bytes == int(it.budget_bytes * 0.95)
        chosen, *others = it.candidates
        assert chosen.verdict == "chosen"
        assert chosen.memory.peak == it.peak_bytes
        assert (chosen.microbatch_size, chosen.num_microbatches, chosen.policy) == (
            it.microbatch_size,
            it.num_microbatches,
            it.policy,
        )
        assert all(c.verdict != "chosen" for c in others)
        assert it.compiles <= 8


def test_the_margin_is_an_option():
    tight, loose = planned(600_000, margin=0), planned(600_000, margin=0.3)
    assert tight.limit_bytes == 600_000
    assert loose.limit_bytes == 420_000
    assert loose.peak_bytes <= 420_000 < tight.peak_bytes <= 600_000
    with pytest.raises(ValueError, match="margin=1: expected a part"):
        planned(600_000, margin=1)


def test_the_bytes_of_each_row_are_those_of_a_step_made_by_hand(found):
    rows = [c for c in found.candidates if c.memory is not None]
    assert len(rows) >= 2
    for row in rows:
        k, inside = row.num_microbatches, row.form == ONE_CALL
        tx = optax.sgd(0.1) if inside else accumulate(optax.sgd(0.1), k)
        step = train_step(
            loss_fn, tx, policy=row.policy, num_microbatches=k if inside else 1
        )
        size = BATCH if inside else row.microbatch_size
        batch = jax.ShapeDtypeStruct((size, *EXAMPLES.shape[1:]), jnp.float32)
        state = jax.eval_shape(tx.init, PARAMS)
        memory = step.lower(PARAMS, state, batch).compile().memory_analysis()
        assert row.memory.arguments == memory.argument_size_in_bytes
        assert row.memory.outputs == memory.output_size_in_bytes
        assert row.memory.temporaries == pytest.approx(memory.temp_size_in_bytes)
        assert row.memory.peak == (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )


def test_a_budget_below_the_smallest_need_names_it_in_bytes():
    with pytest.raises(ValueError, match="the smallest need") as error:
        planned("40KiB")
    least = int(str(error.value).partition(", is ")[2].split()[0])
    # It is true: with so much memory, something fits.
    assert planned(least, margin=0).peak_bytes == least


def test_two_of_three_sizes_give_the_third():
    assert resolve(48, 4, None) == resolve(48, None, 12) == resolve(None, 4, 12)
    assert resolve(48, 4, 12)[1] == [(4, 12)]
    assert resolve(48, 4, None, num_devices=2)[1] == [(4, 6)]
    it = planned("50MB", global_batch_size=None, microbatch_size=4, num_microbatches=3)
    assert it.global_batch_size == 12


def test_three_sizes_that_disagree_are_an_error_that_names_all_three():
    message = (
        r"global_batch_size=48, microbatch_size=5 and num_microbatches=12 disagree: "
        r"5 x 12 x 1 = 60; give two of them"
    )
    with pytest.raises(ValueError, match=message):
        planned("50MB", microbatch_size=5, num_microbatches=12)
    with pytest.raises(ValueError, match=r"microbatch_size=7 does not divide .*6 or 8"):
        resolve(48, 7, None)
    with pytest.raises(ValueError, match=r"num_microbatches=0 is less than 1"):
        resolve(48, None, 0)
    with pytest.raises(ValueError, match="do not say how large a step is"):
        resolve(None, 4, None)
    with pytest.raises(ValueError, match=r"global_batch_size=9 does not divide on num"):
        resolve(9, None, None, num_devices=2)


def test_planning_puts_nothing_on_a_device_and_touches_no_array():
    w, batch = jnp.full(MATRIX.shape, 0.1), jnp.ones(EXAMPLES.shape)
    planned(500_000, microbatch_size=4)  # the library tries itself out once
    before = {id(x) for x in jax.live_arrays()}
    plan(plain, w, optax.sgd(0.1), batch, global_batch_size=BATCH, memory=500_000)
    assert {id(x) for x in jax.live_arrays()} <= before
    assert not w.is_deleted()
    assert not batch.is_deleted()


def test_the_chosen_program_is_what_runs_and_equals_the_full_batch(found):
    rng = np.random.default_rng(0)
    values = rng.normal(size=PARAMS.shape, scale=0.1).astype(np.float32)
    batch = rng.normal(size=(BATCH, *EXAMPLES.shape[1:])).astype(np.float32)
    assert found.form == ONE_CALL
    params = jnp.asarray(values)
    new, _, metrics = found.train_step(params, found.tx.init(params), batch)
    assert params.is_deleted()  # donated
    step = train_step(loss_fn, optax.sgd(0.1), donate=False)
    expected, _, told = step(values, optax.sgd(0.1).init(values), batch)
    # Sums in another order, in float32.
    np.testing.assert_allclose(new, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics.loss, told.loss, rtol=1e-5)


def test_a_program_that_was_compiled_is_not_compiled_for_another_batch(found):
    params = jnp.zeros(PARAMS.shape)
    with pytest.raises(TypeError, match="compiled"):
        found.train_step(params, found.tx.init(params), jnp.zeros((2, 16, WIDTH)))


def test_the_whole_batch_in_one_pass_says_that_accumulation_is_not_worth_it():
    it = planned("50MB")
    assert (it.microbatch_size, it.num_microbatches) == (BATCH, 1)
    assert it.policy == "none"
    assert it.recompute_flops == 0
    assert "accumulation is not worth it" in str(it)


def test_what_is_computed_again_is_told():
    it = plan(
        loss_fn,
        PARAMS,
        optax.sgd(0.1),
        EXAMPLES,
        global_batch_size=BATCH,
        microbatch_size=16,
        memory=1_500_000,
        policies=("none", "full"),
    )
    assert it.policy == "full"
    # Both products of each layer: JAX leaves it to the compiler to drop the second.
    assert it.recompute_flops == 2 * LAYERS * 2 * BATCH * 16 * WIDTH * WIDTH


def test_frozen_parameters_have_no_gradient_sum_or_state():
    params = {"a": MATRIX, "b": MATRIX}

    def loss(params, batch):
        return plain(params["b"], jnp.tanh(batch @ params["a"]))

    def of(trainable):
        return plan(
            loss,
            params,
            optax.sgd(0.1, momentum=0.9),
            EXAMPLES,
            global_batch_size=BATCH,
            microbatch_size=4,
            memory="1GB",
            trainable=trainable,
        )

    size = MATRIX.size * 4
    every, one = of(None), of({"a": False, "b": True})
    # Its momentum in the arguments; the sum of its gradients in the temporaries.
    (all_of, *_), (of_one, *_) = every.candidates, one.candidates
    assert all_of.memory.arguments - of_one.memory.arguments == size
    assert all_of.memory.temporaries - of_one.memory.temporaries >= size
    assert all_of.flops > of_one.flops

    values = {"a": jnp.eye(WIDTH), "b": jnp.eye(WIDTH)}
    state = one.tx.init({"a": None, "b": values["b"]})
    batch = jnp.ones((BATCH, *EXAMPLES.shape[1:]))
    new, _, _ = one.train_step(values, state, batch)
    assert new["a"] is values["a"]
    assert float(jnp.max(jnp.abs(new["b"] - jnp.eye(WIDTH)))) > 0
    with pytest.raises(ValueError, match=r"trainable=.* is no pytree prefix"):
        of({"c": True})
    with pytest.raises(ValueError, match="no parameter is"):
        of(False)


def test_carried_state_keys_weights_and_aux_are_in_the_step():
    def loss(params, state, batch, key):
        x, mask = batch["x"], batch["mask"]
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        y = jnp.where(kept, x, 0.0) @ params
        mean = 0.9 * state["mean"] + 0.1 * jnp.mean(y, 0)
        total = jnp.maximum(jnp.sum(mask), 1.0)
        return jnp.sum(y**2 * mask[:, None]) / total, ({"mean": mean}, jnp.max(y))

    params = jnp.ones((8, 4))
    batch = {"x": jnp.ones((12, 8)), "mask": jnp.ones(12), "table": jnp.ones(3)}
    state = {"mean": jnp.zeros(4)}
    it = plan(
        loss,
        params,
        optax.sgd(0.1),
        batch,
        microbatch_size=3,
        memory="10MB",
        batch_axis={"x": 0, "mask": 0, "table": None},
        key=jax.random.key(0),
        state=state,
        has_aux=True,
        weight_fn=lambda batch: jnp.sum(batch["mask"]),
    )
    assert (it.global_batch_size, it.num_microbatches) == (12, 4)
    new, _, carried, metrics = it.train_step(
        params, it.tx.init(params), state, batch, jax.random.key(1)
    )
    assert metrics.weight == 12
    assert new.shape == (8, 4)
    assert float(carried["mean"][0]) != 0


def summed(w, batch):
    return jnp.sum(jnp.tanh(batch @ w) ** 2)


def test_a_sum_with_weights_is_divided_by_them_across_calls_too():
    optimizer = optax.sgd(1e-1)
    it = plan(
        summed,
        MATRIX,
        optimizer,
        EXAMPLES,
        global_batch_size=BATCH,
        memory="100KiB",
        policies=("none",),
        weight_fn=lambda batch: jnp.asarray(len(batch), jnp.float32),
        loss_reduction="sum",
    )
    assert it.form == ACROSS_CALLS
    w = jnp.eye(WIDTH) / 2
    batch = jnp.linspace(-1, 1, BATCH * 16 * WIDTH).reshape(BATCH, 16, WIDTH)
    wanted = w - 1e-1 * jax.grad(summed)(w, batch) / BATCH
    params, state = jnp.copy(w), it.tx.init(w)
    for part in batch.reshape(-1, it.microbatch_size, 16, WIDTH):
        params, state, _ = it.train_step(params, state, part)
    # Sums of 768 terms in another order: some tens of eps of float32.
    np.testing.assert_allclose(params, wanted, rtol=1e-5, atol=1e-5)


def test_a_sum_without_weights_is_planned_in_one_call_where_it_stays_a_sum():
    it = plan(
        summed,
        MATRIX,
        optax.sgd(0.1),
        EXAMPLES,
        global_batch_size=BATCH,
        memory=500_000,
        policies=("none",),
        loss_reduction="sum",
    )
    assert it.num_microbatches > 1
    assert {c.form for c in it.candidates} == {ONE_CALL}


def test_a_policy_may_be_a_value_and_there_must_be_one():
    it = planned("50MB", policies=(policies.none,))
    assert it.policy == policies.none
    with pytest.raises(ValueError, match="leaves nothing to try"):
        planned("50MB", policies=())


def test_an_optimizer_that_accumulates_already_is_refused():
    with pytest.raises(ValueError, match="accumulator already"):
        plan(loss_fn, PARAMS, accumulate(optax.sgd(0.1), 4), EXAMPLES)


def test_micro_batches_that_do_not_divide_are_cut_unequally():
    it = planned(500_000, global_batch_size=47)
    k = it.num_microbatches
    assert 1 < k < 47
    assert it.microbatch_size == -(-47 // k)
    assert it.form == ONE_CALL
    w, batch = jnp.eye(WIDTH), jnp.linspace(0, 1, 47 * 16 * WIDTH)
    batch = batch.reshape(47, 16, WIDTH)
    _, _, metrics = it.train_step(w, it.tx.init(w), batch)
    np.testing.assert_allclose(metrics.loss, plain(jnp.eye(WIDTH), batch), rtol=1e-5)


def test_on_a_mesh_each_device_has_its_own_micro_batch():
    rows = NamedSharding(AbstractMesh((4,), ("data",)), PartitionSpec("data"))
    batch = jax.ShapeDtypeStruct((8, 16, WIDTH), jnp.float32, sharding=rows)
    it = plan(
        plain,
        MATRIX,
        optax.sgd(0.1, momentum=0.9),
        batch,
        global_batch_size=BATCH,
        memory="50MB",
        num_microbatches=3,
    )
    assert it.num_devices == 4
    assert it.microbatch_size * it.num_microbatches * it.num_devices == BATCH
    share = BATCH // 4 * 16 * WIDTH * 4
    # Parameters and momentum, all on each device, and its share of the batch.
    assert it.candidates[0].memory.arguments == 2 * MATRIX.size * 4 + share
    assert "x 4 devices" in str(it)


def test_a_step_of_ones_own_is_planned_by_the_function_that_makes_it():
    asked = []

    def step_for(size, k, policy):
        asked.append((size, k, policy))
        tx = accumulate(optax.sgd(0.1), k)
        batch = jax.ShapeDtypeStruct((size, *EXAMPLES.shape[1:]), jnp.float32)
        return train_step(plain, tx), (MATRIX, jax.eval_shape(tx.init, MATRIX), batch)

    it = plan_step(
        step_for,
        global_batch_size=BATCH,
        memory=300_000,
        policies=("mine",),
        across_calls=True,
    )
    assert it.form == ACROSS_CALLS
    assert it.policy == "mine"
    assert 1 < it.microbatch_size < it.microbatch_size * it.num_microbatches == BATCH
    assert all(size * k == BATCH for size, k, _ in asked)
    w, tx = jnp.eye(WIDTH), accumulate(optax.sgd(0.1), it.num_microbatches)
    batch = jnp.ones((it.microbatch_size, *EXAMPLES.shape[1:]))
    _, state, _ = it.train_step(w, tx.init(w), batch)
    assert state.mini_step == 1


def test_a_plan_prints_as_a_table_and_says_why_the_others_lost(found):
    lines = str(found).splitlines()
    assert lines[0].startswith("plan for ")
    for title in ("micro-batch", "arguments", "temporaries", "peak", "left", "step >="):
        assert title in str(found)
    assert len([line for line in lines if line.endswith("chosen")]) == 1
    assert any("does not fit:" in line for line in lines)


def test_a_plan_is_json_and_a_picture(found, tmp_path):
    told = json.loads(found.to_json())
    assert told["microbatch_size"] == found.microbatch_size
    assert told["peak_bytes"] == found.peak_bytes
    assert told["candidates"][0]["memory"]["peak"] == found.peak_bytes
    assert len(told["candidates"]) == len(found.candidates)
    path = tmp_path / "plan.png"
    figure = found.plot()
    figure.savefig(path)
    assert path.stat().st_size > 5000
    bars = len([c for c in found.candidates if c.memory is not None])
    assert len(figure.axes[0].patches) == 2 * bars
