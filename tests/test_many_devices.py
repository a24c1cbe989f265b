"""One reduction a window: ``axis_name`` in both drivers, on 1 to 8 devices."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import gradacc_jax
from gradacc_jax import (
    accumulate,
    accumulation_metrics,
    apply_gradients,
    for_num_devices,
    init_on_mesh,
    restored_state,
    saveable_state,
    state_shardings,
    state_specs,
    train_step,
    value_and_grad,
)
from tests.lenient import lenient
from tests.programs import compiled, program

K = 4
EPS = np.finfo(np.float32).eps
LARGE = 64  # numbers: more than all scalars of a window, fewer than the gradients


def mesh_of(devices, kind=AxisType.Auto):
    return jax.make_mesh(
        (devices,), ("data",), devices=jax.devices()[:devices], axis_types=(kind,)
    )


def parameters():
    rng = np.random.default_rng(0)
    return {
        "kernel": jnp.asarray(rng.normal(size=(2, 8, 8)) / 3, jnp.float32),
        "scale": jnp.asarray(2.0, jnp.float32),
    }


def batch_of(size, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(rng.normal(size=(size, 8)), jnp.float32),
        "mask": jnp.asarray(rng.integers(0, 2, size), jnp.float32),
    }


def per_example(params, x):
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["kernel"])
    return jnp.mean(x**2, axis=1) * params["scale"]


def tokens(batch):
    return jnp.sum(batch["mask"])


def loss(params, batch):
    """A mean over the examples that are not masked: micro-batches weigh unequally."""
    terms = jnp.sum(per_example(params, batch["x"]) * batch["mask"])
    return terms / jnp.maximum(tokens(batch), 1)


def on_devices(fun, devices, in_specs, out_specs, kind=AxisType.Auto):
    return jax.jit(
        jax.shard_map(
            fun, mesh=mesh_of(devices, kind), in_specs=in_specs, out_specs=out_specs
        )
    )


def assert_close(found, expected, eps=20):
    """Within some eps of the largest number of each leaf: sums in another order."""

    def leaf(a, b):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=eps * EPS * np.abs(b).max())

    jax.tree.map(leaf, found, expected)


# --- inside one call -----------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_gradient_of_many_devices_is_that_of_the_whole_batch(devices):
    params, batch = parameters(), batch_of(32)
    fun = value_and_grad(loss, num_microbatches=K, weight_fn=tokens, axis_name="data")
    run = on_devices(fun, devices, (P(), P("data")), P())
    assert_close(run(params, batch), jax.value_and_grad(loss)(params, batch))


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("devices", [4, 8])
def test_a_call_reduces_once_whatever_k_is(devices, k):
    fun = value_and_grad(loss, num_microbatches=k, weight_fn=tokens, axis_name="data")
    run = on_devices(fun, devices, (P(), P("data")), P())
    # Value, weights and gradients go together.
    assert program(run.lower(parameters(), batch_of(32))).collectives() == [
        "all-reduce"
    ]


def test_tokens_are_counted_over_devices_and_not_averaged_by_them():
    # T6: 3 and 5 tokens whose gradients are 1 and 3: 18 / 8, not (1 + 3) / 2.
    gradients = jnp.array([1.0, 3.0])
    counts = jnp.array([3.0, 5.0])
    fun = value_and_grad(
        lambda w, batch: w * jnp.mean(batch[0]),
        microbatch_size=1,
        weight_fn=lambda batch: jnp.sum(batch[1]),
        axis_name="data",
    )
    run = on_devices(fun, 2, (P(), P("data")), P())
    assert run(jnp.array(1.0), (gradients, counts)) == (18 / 8, 18 / 8)


def test_no_two_micro_batches_of_all_devices_draw_the_same_numbers():
    def noisy(w, x, key):
        return w * jnp.mean(x) + 0.0, jax.random.uniform(key)

    fun = value_and_grad(
        noisy,
        has_aux=True,
        num_microbatches=3,
        key_argnums=2,
        aux_reduction="stack",
        axis_name="data",
    )
    key = jax.random.key(7)
    run = on_devices(fun, 4, (P(), P("data"), P()), ((P(), P("data")), P()))
    (_, drawn), _ = run(jnp.array(1.0), jnp.arange(12.0), key)
    # Micro-batch i of device d is number 4 i + d of the window.
    expected = [
        jax.random.uniform(jax.random.fold_in(key, 4 * i + d))
        for d in range(4)
        for i in range(3)
    ]
    assert drawn.tolist() == [float(x) for x in expected]


def test_aux_are_reduced_over_devices_or_stay_in_the_batchs_order():
    def with_aux(params, batch):
        terms = per_example(params, batch["x"])
        return loss(params, batch), {
            "mean": jnp.sum(terms * batch["mask"]) / jnp.maximum(tokens(batch), 1),
            "sum": tokens(batch),
            "each": terms,
        }

    how = {"mean": "mean", "sum": "sum", "each": "concat"}
    fun = value_and_grad(
        with_aux,
        has_aux=True,
        num_microbatches=2,
        weight_fn=tokens,
        aux_reduction=how,
        axis_name="data",
    )
    specs = ((P(), {"mean": P(), "sum": P(), "each": P("data")}), P())
    params, batch = parameters(), batch_of(32)
    (value, aux), _ = on_devices(fun, 4, (P(), P("data")), specs)(params, batch)
    assert_close(aux["mean"], value)
    assert aux["sum"] == tokens(batch)
    assert_close(aux["each"], per_example(params, batch["x"]))


def test_each_term_has_its_own_denominator_on_all_devices_together():
    def terms(params, batch):
        values = per_example(params, batch["x"])
        return {"tokens": loss(params, batch), "examples": jnp.mean(values)}

    def weights(batch):
        return {"tokens": tokens(batch), "examples": jnp.asarray(8.0)}

    fun = value_and_grad(terms, num_microbatches=2, weight_fn=weights, axis_name="data")
    params, batch = parameters(), batch_of(64)
    found = on_devices(fun, 4, (P(), P("data")), P())(params, batch)
    expected = jax.value_and_grad(
        lambda p: loss(p, batch) + jnp.mean(per_example(p, batch["x"]))
    )(params)
    assert_close(found, expected)


def test_sums_are_sums_over_devices_too():
    def total(params, batch):
        return jnp.sum(per_example(params, batch["x"]))

    fun = value_and_grad(total, microbatch_size=3, reduction="sum", axis_name="data")
    params, batch = parameters(), batch_of(32)
    found = on_devices(fun, 4, (P(), P("data")), P())(params, batch)
    assert_close(found, jax.value_and_grad(total)(params, batch))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("device", range(4))
def test_a_device_without_loss_terms_does_no_harm(device, bad):
    batch = batch_of(16)
    batch["mask"] = jnp.ones(16).at[4 * device : 4 * device + 4].set(0)
    batch["x"] = batch["x"].at[4 * device : 4 * device + 4].set(bad)

    def mean(params, batch):  # 0 / 0 where there is nothing
        kept = jnp.sum(per_example(params, batch["x"]) * batch["mask"])
        return kept / tokens(batch)

    fun = value_and_grad(mean, num_microbatches=2, weight_fn=tokens, axis_name="data")
    found = on_devices(fun, 4, (P(), P("data")), P())(parameters(), batch)
    kept = jax.tree.map(
        lambda x: jnp.delete(x, np.arange(4 * device, 4 * device + 4), axis=0), batch
    )
    assert_close(found, jax.value_and_grad(mean)(parameters(), kept))


def test_a_traced_number_of_micro_batches_may_be_given():
    def run(params, batch, count):
        return value_and_grad(
            loss,
            num_microbatches=count,
            microbatch_size=2,
            weight_fn=tokens,
            axis_name="data",
        )(params, batch)

    params, batch = parameters(), batch_of(32)
    found = on_devices(run, 4, (P(), P("data"), P()), P())(
        params, batch, jnp.asarray(2)
    )
    # Of each device's 8 examples in 4 strided micro-batches the first two.
    kept = [8 * d + i + 4 * j for d in range(4) for i in range(2) for j in range(2)]
    part = jax.tree.map(lambda x: x[jnp.array(kept)], batch)
    assert_close(found, jax.value_and_grad(loss)(params, part))


@pytest.mark.parametrize("accumulates", [False, True])
def test_devices_that_talk_to_each_other_in_the_loss_never_wait_in_vain(accumulates):
    # A device that leaves its backward pass out would hang all others.
    def coupled(params, batch):
        scale = lax.pmean(lax.stop_gradient(jnp.mean(batch["x"] ** 2)), "data")
        return loss(params, batch) * scale

    params, batch = parameters(), batch_of(16)
    batch["mask"] = jnp.ones(16).at[4:8].set(0)  # nothing on device 1

    if accumulates:
        tx = accumulate(optax.sgd(1.0), 2, axis_name="data")
        step = train_step(
            coupled, tx, weight_fn=tokens, mesh=mesh_of(4), axis_name="data"
        )
        state = init_on_mesh(tx, params, mesh_of(4))
        before = jax.tree.map(np.asarray, params)
        new, _, metrics = step(params, state, batch, emit=True)
        found = metrics.loss, jax.tree.map(lambda a, b: a - b, before, new)
        params = before
    else:
        fun = value_and_grad(
            coupled, num_microbatches=1, weight_fn=tokens, axis_name="data"
        )
        found = on_devices(fun, 4, (P(), P("data")), P())(params, batch)

    def whole(params):
        return loss(params, batch) * jnp.mean(batch["x"] ** 2)

    assert_close(found, jax.value_and_grad(whole)(params), eps=40)


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("empty", [0, 1])
def test_statistics_over_devices_carry_gradients_with_the_right_weights(in_step, empty):
    # What a device differentiates goes into the gradients of the others: the weight
    # must be in the cotangent, also that of a device without loss terms.
    def centred(params, batch):
        h = per_example(params, batch["x"])
        shifted = h - lax.pmean(jnp.mean(h), "data") - 1
        total = jnp.sum(shifted**2 * batch["mask"])
        return total / jnp.maximum(tokens(batch), 1)

    def whole(params, batch):
        h = per_example(params, batch["x"])
        return jnp.sum((h - jnp.mean(h) - 1) ** 2 * batch["mask"]) / tokens(batch)

    params, batch, mesh = parameters(), batch_of(16), mesh_of(4)
    batch["mask"] = batch["mask"].at[: 4 * empty].set(0)
    expected = jax.value_and_grad(whole)(params, batch)
    before = jax.tree.map(np.asarray, params)
    inner = optax.sgd(1.0)
    tx = inner if in_step else accumulate(inner, 2, axis_name="data")
    step = train_step(centred, tx, weight_fn=tokens, mesh=mesh, axis_name="data")
    state = init_on_mesh(tx, params, mesh, axis_name=None)
    new, _, metrics = step(params, state, batch, emit=None if in_step else True)
    found = metrics.loss, jax.tree.map(lambda a, b: a - b, before, new)
    assert_close(found, expected, eps=40)


@pytest.mark.filterwarnings("ignore:num_microbatches=2")
def test_gradients_that_are_mixed_before_they_are_weighed_are_an_error():
    def centred(params, batch):
        h = per_example(params, batch["x"])
        return jnp.mean((h - lax.pmean(jnp.mean(h), "data")) ** 2 * batch["mask"])

    params, mesh = parameters(), mesh_of(4)
    for options in ({"skip_nonfinite": "micro_batch"}, {}):
        tx = accumulate(optax.sgd(1.0), 2, axis_name="data", **options)
        more = {} if options else {"num_microbatches": 2}
        step = train_step(
            centred, tx, weight_fn=tokens, mesh=mesh, axis_name="data", **more
        )
        state = init_on_mesh(tx, params, mesh)
        with pytest.raises(ValueError, match="would weigh what is mixed already"):
            step(params, state, batch_of(16), emit=True)


def test_devices_that_talk_take_the_same_number_of_micro_batches():
    def coupled(w, x):
        return w * lax.pmean(jnp.mean(x), "data")

    def run(w, x):
        count = 1 + lax.axis_index("data")
        fun = value_and_grad(
            lambda w, x: coupled(w, x) + jnp.mean(x),
            num_microbatches=count,
            microbatch_size=1,
            axis_name="data",
        )
        return fun(w, x)

    with pytest.raises(ValueError, match="num_microbatches differs from device"):
        on_devices(run, 2, (P(), P("data")), P())(jnp.ones(()), jnp.ones(4))


def test_finite_sums_that_overflow_together_are_a_bad_window():
    tx = accumulate(
        optax.sgd(1.0),
        2,
        axis_name="data",
        skip_nonfinite="window",
        accumulator_dtype=None,
    )
    w, mesh = jnp.ones(2, jnp.float16), mesh_of(4)
    specs = state_specs(tx, w)
    state = init_on_mesh(tx, w, mesh)

    def micro_step(w, state, grads):
        return apply_gradients(tx, w, state, grads[0])

    step = on_devices(micro_step, 4, (P(), specs, P("data")), (P(), specs))
    for _ in range(2):
        w, state = step(w, state, jnp.full((4, 2), 2e4, jnp.float16))
    assert w.tolist() == [1, 1]
    assert (state.skips.total, state.gradient_step) == (1, 1)


@pytest.mark.optax_promotes
@pytest.mark.parametrize(
    "inner",
    [
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.5),
        optax.partition(
            {"t": optax.sgd(0.5), "f": optax.set_to_zero()},
            {"kernel": "t", "scale": "f", "count": "f"},
        ),
    ],
    ids=["inject_hyperparams", "partition"],
)
def test_optimizers_that_need_arrays_and_integer_leaves_work(inner):
    params = parameters() | {"count": jnp.arange(3)}
    tx, mesh = accumulate(inner, 2, axis_name="data"), mesh_of(4)
    step = train_step(loss, tx, weight_fn=tokens, mesh=mesh, axis_name="data")
    state = init_on_mesh(tx, params, mesh)
    expected, one = parameters()["kernel"], batch_of(32)
    grads = jax.grad(loss)(parameters(), one)
    for i in range(2):
        part = jax.tree.map(lambda x, i=i: x[i::2], one)
        params, state, _ = step(params, state, part)
    assert_close(params["kernel"], expected - 0.5 * grads["kernel"])
    assert params["count"].tolist() == [0, 1, 2]


def test_updates_that_pass_by_the_accumulator_are_an_error():
    params, mesh = parameters(), mesh_of(4)
    tx = optax.partition(
        {
            "t": accumulate(optax.sgd(0.1), 2, axis_name="data"),
            "f": optax.set_to_zero(),
        },
        {"kernel": "t", "scale": "f"},
    )
    step = train_step(loss, tx, mesh=mesh, axis_name="data")
    state = init_on_mesh(tx, params, mesh, axis_name="data")
    with pytest.raises(ValueError, match=r"params\['scale'\] differs .* put it inside"):
        step(params, state, batch_of(16))


def test_parameters_that_another_axis_has_parts_of_keep_their_parts():
    mesh = jax.make_mesh(
        (2, 2),
        ("data", "model"),
        devices=jax.devices()[:4],
        axis_types=(AxisType.Auto,) * 2,
    )
    specs = {"w": P(None, "model"), "s": P()}

    def split(params, x):
        columns = jnp.sum((x @ params["w"]) ** 2, axis=1) * params["s"]
        return lax.psum(jnp.mean(columns), "model")

    tx = accumulate(optax.sgd(0.1), 2, axis_name="data")
    params = {"w": jnp.ones((8, 4)) / 3, "s": jnp.asarray(2.0)}
    of_state = state_specs(tx, params, specs)

    def init(params):
        return tx.init(params)

    def micro_step(params, state, x):
        varying = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        return apply_gradients(
            tx, params, state, jax.grad(split)(varying, x), emit=True
        )

    state = jax.shard_map(init, mesh=mesh, in_specs=(specs,), out_specs=of_state)(
        params
    )
    run = jax.shard_map(
        micro_step,
        mesh=mesh,
        in_specs=(specs, of_state, P("data")),
        out_specs=(specs, of_state),
    )
    x = batch_of(8)["x"]
    grads = jax.grad(lambda p: jnp.mean(jnp.sum((x @ p["w"]) ** 2, axis=1) * p["s"]))(
        params
    )
    new, state = jax.jit(run)(params, state, x)
    assert_close(new, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
    assert_close(state.grad_norm, optax.tree.norm(grads))


def test_sharded_sums_of_one_device_become_those_of_four():
    tx = accumulate(optax.sgd(1.0), 2, axis_name="data", shard_accumulators=True)
    params = {"w": jnp.ones(3), "k": jnp.ones((2, 2))}
    state = init_on_mesh(tx, params, mesh_of(1))
    moved = for_num_devices(state, params, 4)
    assert moved.acc_grads["w"].shape == moved.acc_grads["k"].shape == (4, 1)


def test_flags_of_a_loss_stay_flags_on_an_explicit_mesh():
    def flagged(w, x, mode, *, double=False):
        assert mode == "mean"
        return jnp.mean(x @ w) * (2 if double else 1)

    fun = value_and_grad(flagged, num_microbatches=2, axis_name="data")
    with jax.set_mesh(explicit()):
        w = jax.device_put(np.ones(8, np.float32), P())
        x = jax.device_put(np.ones((8, 8), np.float32), P("data"))
        value, _ = fun(w, x, "mean", double=True)
    assert value == 16


def test_another_mesh_axis_may_be_left_to_the_loss():
    # Columns of the last kernel are spread over "model": the loss adds its parts up.
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def columns(w, x):
        return lax.psum(jnp.mean(jnp.sum((x @ w) ** 2, axis=1)), "model")

    fun = value_and_grad(columns, num_microbatches=2, axis_name="data")
    run = jax.jit(
        jax.shard_map(
            fun,
            mesh=mesh,
            in_specs=(P(None, "model"), P("data")),
            out_specs=(P(), P(None, "model")),
        )
    )
    w, x = jnp.ones((8, 4)) / 3, batch_of(16)["x"]
    expected = jax.value_and_grad(lambda w: jnp.mean(jnp.sum((x @ w) ** 2, 1)))(w)
    assert_close(run(w, x), expected)


# --- what is refused -----------------------------------------------------------------


def refused(fun, of_batch="data"):
    run = on_devices(fun, 4, (P(), P(of_batch)), P())
    return run(parameters(), batch_of(16))


def test_an_axis_that_is_not_bound_is_an_error_that_names_what_is():
    with pytest.raises(ValueError, match=r"axis_name='model' is not bound .*data"):
        refused(value_and_grad(loss, num_microbatches=2, axis_name="model"))
    with pytest.raises(ValueError, match="none is bound here"):
        value_and_grad(loss, num_microbatches=2, axis_name="data")(
            parameters(), batch_of(16)
        )
    with pytest.raises(ValueError, match="is not bound"):
        accumulate(optax.sgd(1.0), 2, axis_name="data").init(parameters())


@pytest.mark.parametrize("name", [3, (), ("data", 1)])
def test_an_axis_name_that_is_none_is_an_error(name):
    with pytest.raises(ValueError, match="is not the name of a mesh axis"):
        value_and_grad(loss, num_microbatches=2, axis_name=name)


def test_a_loss_that_is_reduced_already_is_an_error():
    def reduced(params, batch):
        return lax.pmean(loss(params, batch), "data")

    with pytest.raises(ValueError, match="the loss is the same on all devices"):
        refused(value_and_grad(reduced, num_microbatches=2, axis_name="data"))


def test_a_batch_that_is_the_same_everywhere_is_an_error():
    fun = value_and_grad(loss, num_microbatches=2, axis_name="data")
    with pytest.raises(ValueError, match="the batch is the same on all devices"):
        refused(fun, of_batch=None)


def test_a_batch_that_varies_without_an_axis_name_is_an_error():
    with pytest.raises(ValueError, match="pass axis_name='data'"):
        refused(value_and_grad(loss, num_microbatches=2))


def test_gradients_that_are_reduced_already_are_an_error():
    tx = accumulate(optax.sgd(1.0), 2, axis_name="data")

    def step(params, batch):
        # Of parameters that do not vary: JAX reduces in the backward pass.
        grads = jax.grad(loss)(params, batch)
        return tx.update(grads, tx.init(params), params)[0]

    with pytest.raises(ValueError, match=r"grads\['kernel'\] is the same on all"):
        refused(step)


def test_an_emit_that_differs_from_device_to_device_is_an_error():
    tx = accumulate(optax.sgd(1.0), 2, axis_name="data")

    def step(params, batch):
        varying = jax.tree.map(lambda x: lax.pcast(x, "data", to="varying"), params)
        grads = jax.grad(loss)(varying, batch)
        emit = batch["mask"][0] > 0
        return tx.update(grads, tx.init(params), params, emit=emit)[0]

    with pytest.raises(ValueError, match="emit differs from device to device"):
        refused(step)


def test_a_batch_that_does_not_divide_over_the_devices_is_an_error():
    step = train_step(
        loss, optax.sgd(1.0), num_microbatches=2, mesh=mesh_of(4), axis_name="data"
    )
    params = parameters()
    with pytest.raises(ValueError, match="batch_size=18 does not divide over the 4"):
        step(params, optax.sgd(1.0).init(params), batch_of(18))


def test_a_mesh_without_the_axis_is_an_error():
    with pytest.raises(ValueError, match=r"axis_name='rows' is no axis of the mesh"):
        train_step(loss, optax.sgd(1.0), mesh=mesh_of(4), axis_name="rows")
    with pytest.raises(ValueError, match="name the axis"):
        train_step(loss, optax.sgd(1.0), mesh=mesh_of(4))


def test_an_accumulator_and_a_step_must_agree_on_the_axis():
    params = parameters()
    tx = accumulate(optax.sgd(1.0), 2)
    step = train_step(loss, tx, mesh=mesh_of(4), axis_name="data")
    with pytest.raises(ValueError, match="the accumulator in tx was given none"):
        step(params, tx.init(params), batch_of(16))


def test_options_that_make_no_sense_on_many_devices_are_errors():
    skip = functools.partial(optax.skip_large_updates, max_squared_norm=1.0)
    with pytest.raises(ValueError, match="choose skip_nonfinite"):
        accumulate(optax.sgd(1.0), 2, should_skip_update_fn=skip, axis_name="data")
    with pytest.raises(ValueError, match="shard_accumulators=True needs axis_name"):
        accumulate(optax.sgd(1.0), 2, shard_accumulators=True)


def test_a_state_with_the_wrong_specs_is_an_error():
    tx = accumulate(optax.sgd(1.0), 2, axis_name="data")
    params = parameters()
    state = init_on_mesh(tx, params, mesh_of(4))

    def step(state, batch):
        varying = jax.tree.map(lambda x: lax.pcast(x, "data", to="varying"), params)
        return tx.update(jax.grad(loss)(varying, batch), state, params)[0]

    run = on_devices(step, 4, (P(), P("data")), P())
    with pytest.raises(ValueError, match=r"acc_weight has shape \(4,\)"):
        run(state, batch_of(16))


# --- across calls --------------------------------------------------------------------


def trained(tx, devices, batches, **options):
    """Parameters, state and metrics after a micro-step for each batch."""
    mesh = mesh_of(devices)
    params = parameters()
    step = train_step(
        loss, tx, weight_fn=tokens, mesh=mesh, axis_name="data", **options
    )
    state = init_on_mesh(tx, params, mesh)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    seen = []
    for batch in batches:
        params, state, metrics = step(params, state, batch)
        seen.append(jax.device_get(metrics))
    return params, state, seen


def full_batches(inner, batches, k=K):
    """The same with one device and each window in one pass."""
    params = parameters()
    state = inner.init(params)
    step = train_step(loss, inner, weight_fn=tokens)
    seen = []
    for i in range(0, len(batches), k):
        whole = jax.tree.map(lambda *x: jnp.concatenate(x), *batches[i : i + k])
        params, state, metrics = step(params, state, whole)
        seen.append(jax.device_get(metrics))
    return params, seen


BATCHES = [batch_of(16, seed) for seed in range(2 * K)]


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_windows_on_many_devices_are_those_of_one(devices, shard):
    inner = lenient(optax.adamw(1e-2))
    tx = accumulate(inner, K, axis_name="data", shard_accumulators=shard)
    params, _, seen = trained(tx, devices, BATCHES)
    expected, full = full_batches(inner, BATCHES)
    assert_close(params, expected, eps=40)
    for metrics, one in zip(seen[K - 1 :: K], full, strict=True):
        assert_close(metrics.loss, one.loss)
        assert_close(metrics.grad_norm, one.grad_norm)
        assert metrics.weight == one.weight
        assert metrics.emitted


def test_the_sums_are_on_their_devices_and_all_else_on_all_of_them():
    tx = accumulate(optax.sgd(0.1), K, axis_name="data")
    _, state, _ = trained(tx, 8, BATCHES[:2])
    assert state.acc_grads["kernel"].shape == (8, 2, 8, 8)
    assert state.acc_grads["kernel"].sharding.spec == P("data")
    assert state.mini_step.sharding.is_fully_replicated
    metrics = accumulation_metrics(state)
    assert metrics["weight"] == sum(tokens(batch) for batch in BATCHES[:2])


def test_sharded_sums_are_an_eighth_on_each_device():
    tx = accumulate(optax.sgd(0.1), K, axis_name="data", shard_accumulators=True)
    _, state, _ = trained(tx, 8, BATCHES[:1])
    assert state.acc_grads["kernel"].shape == (8, 16)
    assert state.acc_grads["scale"].shape == (8, 1)


def step_program(devices=8, emit=None, kind=AxisType.Auto, **options):
    tx = accumulate(optax.sgd(0.1), K, axis_name="data", **options)
    mesh = mesh_of(devices, kind)
    step = train_step(loss, tx, weight_fn=tokens, mesh=mesh, axis_name="data")
    state = init_on_mesh(tx, parameters(), mesh)
    return program(step.lower(parameters(), state, batch_of(16), emit=emit))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_window_reduces_gradients_once_and_a_silent_micro_step_nothing(kind):
    assert step_program(emit=False, kind=kind).collectives() == []
    # The loss that is shown goes by itself, three numbers.
    assert step_program(emit=True, kind=kind).collectives(LARGE) == ["all-reduce"]
    either = step_program(kind=kind)
    assert either.collectives(LARGE) == ["all-reduce"]
    # In a conditional, for micro-steps that do not close the window.
    entry = either.text.split("\nENTRY ")[1]
    assert "all-reduce" not in entry


def test_a_sharded_accumulator_reduces_each_micro_batch():
    silent = step_program(emit=False, shard_accumulators=True)
    assert set(silent.collectives()) == {"reduce-scatter"}


def test_a_silent_micro_step_holds_no_gradient_tree_on_a_device_either():
    # 4 MiB of parameters in a stack: the backward pass adds to the sums in place.
    def deep(params, x):
        out, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)
        return jnp.mean(out**2)

    params = jnp.zeros((16, 256, 256))
    tx = accumulate(optax.sgd(0.1), K, axis_name="data")
    mesh = mesh_of(2)
    step = train_step(deep, tx, mesh=mesh, axis_name="data")
    state = init_on_mesh(tx, params, mesh)
    silent = program(step.lower(params, state, jnp.ones((4, 256)), emit=False))
    assert silent.temporaries < params.nbytes / 4
    assert silent.copies(params.size) == 0


@pytest.mark.parametrize("decide", [None, "micro_batch", "window"])
def test_windows_that_are_cut_short_or_empty_end_on_all_devices(decide):
    inner = optax.sgd(1.0)
    tx = accumulate(inner, K, axis_name="data", skip_nonfinite=decide)
    mesh, params = mesh_of(4), parameters()
    step = train_step(
        loss, tx, weight_fn=tokens, mesh=mesh, axis_name="data", donate=False
    )
    state = init_on_mesh(tx, params, mesh)
    empty = batch_of(16) | {"mask": jnp.zeros(16)}
    new, state, metrics = step(params, state, empty, emit=True)
    jax.tree.map(np.testing.assert_array_equal, new, params)
    assert metrics.emitted
    assert metrics.grad_norm == 0
    assert state.gradient_step == 1
    new, state, _ = step(params, state, batch_of(16))
    jax.tree.map(np.testing.assert_array_equal, new, params)
    new, state, _ = step(params, state, batch_of(16, 1), emit=True)
    expected, _ = full_batches(inner, [batch_of(16), batch_of(16, 1)], 2)
    assert_close(new, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("device", [0, 3])
@pytest.mark.parametrize("shard", [False, True])
def test_a_bad_micro_batch_is_left_out_by_all_devices(device, bad, shard):
    inner = optax.sgd(1.0)
    tx = accumulate(
        inner,
        2,
        axis_name="data",
        skip_nonfinite="micro_batch",
        shard_accumulators=shard,
    )
    broken = batch_of(16)
    broken["x"] = broken["x"].at[4 * device].set(bad)
    broken["mask"] = jnp.ones(16)
    params, state, seen = trained(tx, 4, [broken, batch_of(16, 1), broken, broken])
    expected, _ = full_batches(inner, [batch_of(16, 1)], 1)
    assert_close(params, expected)
    assert [int(metrics.skipped) for metrics in seen] == [1, 1, 2, 3]
    assert state.gradient_step == 2


@pytest.mark.parametrize("shard", [False, True])
def test_a_bad_window_is_given_up_by_all_devices(shard):
    inner = optax.sgd(1.0)
    tx = accumulate(
        inner, 2, axis_name="data", skip_nonfinite="window", shard_accumulators=shard
    )
    broken = batch_of(16) | {"mask": jnp.ones(16)}
    broken["x"] = broken["x"].at[5].set(np.nan)
    good = [batch_of(16, 1), batch_of(16, 2)]
    params, _, seen = trained(tx, 4, [good[0], broken, *good])
    expected, _ = full_batches(inner, good, 2)
    assert_close(params, expected)
    assert [int(metrics.skipped) for metrics in seen] == [0, 1, 1, 1]


def test_dropout_of_many_devices_is_that_of_one_in_the_order_of_the_window():
    def noisy(params, batch, key):
        kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        x = jnp.where(kept, batch["x"], 0)
        return loss(params, batch | {"x": x})

    inner, key, params = optax.sgd(1.0), jax.random.key(3), parameters()
    tx = accumulate(inner, 2, axis_name="data")
    mesh = mesh_of(4)
    step = train_step(noisy, tx, weight_fn=tokens, mesh=mesh, axis_name="data")
    state = init_on_mesh(tx, params, mesh)
    for batch in BATCHES[:2]:
        params, state, _ = step(params, state, batch, key)

    one = accumulate(inner, 8)
    expected = parameters()
    state = one.init(expected)
    step = train_step(noisy, one, weight_fn=tokens)
    for batch in BATCHES[:2]:
        for device in range(4):
            part = jax.tree.map(lambda x, d=device: x[4 * d : 4 * d + 4], batch)
            expected, state, _ = step(expected, state, part, key)
    assert_close(params, expected)


@pytest.mark.parametrize("k", [1, lambda step: step + 1])
def test_windows_of_one_and_of_growing_length_work(k):
    inner = optax.sgd(1.0)
    tx = accumulate(inner, k, axis_name="data")
    params, state, _ = trained(tx, 4, BATCHES[:3])
    windows = [[b] for b in BATCHES[:3]] if k == 1 else [BATCHES[:1], BATCHES[1:3]]
    expected = parameters()
    step = train_step(loss, inner, weight_fn=tokens)
    for window in windows:
        whole = jax.tree.map(lambda *x: jnp.concatenate(x), *window)
        expected, _, _ = step(expected, inner.init(expected), whole)
    assert_close(params, expected)
    assert state.gradient_step == len(windows)


def test_the_step_inside_a_chain_reduces_once_too():
    inner = lenient(optax.adam(1e-2))
    tx = optax.chain(optax.identity(), accumulate(inner, K, axis_name="data"))
    mesh, params = mesh_of(4), parameters()
    state = init_on_mesh(tx, params, mesh, axis_name="data")
    step = train_step(loss, tx, weight_fn=tokens, mesh=mesh, axis_name="data")
    text = program(step.lower(params, state, BATCHES[0]))
    assert text.collectives(LARGE) == ["all-reduce"]
    for batch in BATCHES:
        params, state, _ = step(params, state, batch)
    expected, _ = full_batches(inner, BATCHES)
    assert_close(params, expected, eps=40)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("in_step", [False, True])
def test_a_model_axis_is_left_to_the_shardings_of_the_parameters(in_step, kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    inner = optax.sgd(0.5)
    params = parameters()["kernel"]

    def last(kernel, batch):
        x = jnp.tanh(batch["x"] @ kernel[0])
        return jnp.sum((x @ kernel[1]) ** 2 * batch["mask"][:, None]) / tokens(batch)

    batch = batch_of(32)
    expected = params - 0.5 * jax.grad(last)(params, batch)
    where = NamedSharding(mesh, P(None, None, None))
    if kind == AxisType.Auto:
        where = NamedSharding(mesh, P(None, None, "model"))
    params = jax.device_put(params, where)
    if in_step:
        tx = inner
        state = tx.init(params)
        options = {"num_microbatches": 2}
        batches = [batch]
    else:
        tx = accumulate(inner, 2, axis_name="data")
        state = init_on_mesh(tx, params, mesh)
        options = {}
        batches = [jax.tree.map(lambda x, i=i: x[i::2], batch) for i in range(2)]
    step = train_step(
        last, tx, weight_fn=tokens, mesh=mesh, axis_name="data", **options
    )
    for one in batches:
        params, state, _ = step(params, state, one)
    assert_close(params, expected)


# --- where the state is --------------------------------------------------------------


def test_the_specs_of_a_state_tell_sums_moments_and_counters_apart():
    tx = optax.chain(
        optax.clip(1.0),
        accumulate(optax.adam(1e-3), 2, axis_name="data"),
    )
    params = parameters()
    of_params = {"kernel": P(None, None, "model"), "scale": P()}
    specs = state_specs(tx, params, of_params, axis_name="data")
    held = specs[1]
    assert held.acc_grads == {
        "kernel": P("data", None, None, "model"),
        "scale": P("data"),
    }
    assert held.acc_weight == P("data")
    assert held.inner_state[0].mu == of_params
    assert held.inner_state[0].count == held.mini_step == P()


def test_frozen_and_integer_leaves_have_no_sums_and_no_specs():
    params = parameters() | {"steps": jnp.zeros(3, jnp.int32)}
    tx = accumulate(optax.sgd(1.0), 2, axis_name="data")
    specs = state_specs(tx, params)
    assert specs.acc_grads["steps"] == optax.MaskedNode()
    state = init_on_mesh(tx, params, mesh_of(4))
    assert state.acc_grads["steps"] == optax.MaskedNode()
    assert for_num_devices(state, params, 2).acc_grads["kernel"].shape[0] == 2


@pytest.mark.parametrize("shard_over", [None, "data"])
def test_init_under_jit_puts_sums_and_moments_where_they_belong(shard_over):
    # C9: elsewhere they all end on one device.
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    place = {
        "kernel": NamedSharding(mesh, P(None, None, "model")),
        "scale": NamedSharding(mesh, P()),
    }
    params = jax.device_put(parameters(), place)
    tx = accumulate(optax.adam(1e-3), 2)
    where = state_shardings(tx, params, shard_over=shard_over)
    state = jax.jit(tx.init, out_shardings=where)(params)
    spec = P(None, None, "model") if shard_over is None else P(None, "data", "model")
    for tree in (state.acc_grads, state.inner_state[0].mu, state.inner_state[0].nu):
        assert tree["kernel"].sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    assert state.mini_step.sharding.is_equivalent_to(NamedSharding(mesh, P()), 0)


def test_shardings_of_parameters_that_are_on_no_mesh_are_an_error():
    with pytest.raises(ValueError, match="put the parameters on a mesh first"):
        state_shardings(optax.sgd(1.0), parameters())
    on_mesh = jax.device_put(parameters(), NamedSharding(mesh_of(2), P()))
    with pytest.raises(ValueError, match="shard_over='model' is no axis"):
        state_shardings(optax.sgd(1.0), on_mesh, shard_over="model")


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_window_goes_on_with_another_number_of_devices(after, shard):
    inner = lenient(optax.adam(1e-2))
    tx = accumulate(inner, K, axis_name="data", shard_accumulators=shard)
    params, state, _ = trained(tx, 8, BATCHES[:2])
    params, state = jax.device_get((params, state))
    state = for_num_devices(state, params, after)
    mesh = mesh_of(after)
    specs = state_specs(tx, params)
    state = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), state, specs
    )
    params = jax.device_put(params, NamedSharding(mesh, P()))
    step = train_step(loss, tx, weight_fn=tokens, mesh=mesh, axis_name="data")
    for batch in BATCHES[2:]:
        params, state, _ = step(params, state, batch)
    expected, _ = full_batches(inner, BATCHES)
    assert_close(params, expected, eps=40)


def test_a_number_of_devices_that_does_not_exist_is_an_error():
    tx = accumulate(optax.sgd(1.0), 2, axis_name="data")
    state = init_on_mesh(tx, parameters(), mesh_of(4))
    with pytest.raises(ValueError, match="num_devices=0"):
        for_num_devices(state, parameters(), 0)
    with pytest.raises(ValueError, match="does not fit a parameter"):
        for_num_devices(state, {"kernel": jnp.ones(3), "scale": jnp.ones(())}, 2)


def test_a_state_saved_in_mid_window_continues_to_the_bit(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
    tx = accumulate(lenient(optax.adam(1e-2)), K, axis_name="data")
    mesh = mesh_of(8)
    step = train_step(loss, tx, weight_fn=tokens, mesh=mesh, axis_name="data")
    params, state, _ = trained(tx, 8, BATCHES[:2])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "there", (params, state))
        checkpointer.wait_until_finished()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, (params, state))
        again = checkpointer.restore(tmp_path / "there", target)
    ends = []
    for held in ((params, state), again):
        for batch in BATCHES[2:]:
            held = step(*held, batch)[:2]
        ends.append(jax.device_get(held))
    jax.tree.map(np.testing.assert_array_equal, *ends)


# --- explicit meshes -----------------------------------------------------------------


def explicit():
    return mesh_of(4, AxisType.Explicit)


def test_on_an_explicit_mesh_there_is_one_reduction_a_window_for_any_model():
    params, batch = parameters(), batch_of(32)
    expected = jax.value_and_grad(loss)(params, batch)
    fun = value_and_grad(loss, num_microbatches=K, weight_fn=tokens, axis_name="data")
    with jax.set_mesh(explicit()):
        params = jax.device_put(params, P())
        batch = jax.device_put(batch, P("data"))
        assert compiled(fun, params, batch).collectives() == ["all-reduce"]
        assert_close(jax.jit(fun)(params, batch), expected)


def test_on_an_explicit_mesh_sharded_parameters_are_gathered_once_a_window():
    params, batch = parameters(), batch_of(32)
    expected = jax.value_and_grad(loss)(params, batch)
    fun = value_and_grad(loss, num_microbatches=K, weight_fn=tokens, axis_name="data")
    with jax.set_mesh(explicit()):
        place = {"kernel": P(None, "data"), "scale": P()}
        params = jax.device_put(params, place)
        batch = jax.device_put(batch, P("data"))
        found = jax.jit(fun)(params, batch)
        assert found[1]["kernel"].sharding.spec == P(None, "data", None)
        text = compiled(fun, params, batch)
        assert text.collectives(LARGE) == ["all-gather", "all-reduce"]
        # Neither is in the loop.
        assert text.text.split("\nENTRY ")[1].count(" all-gather(") == 1
    assert_close(found, expected)


@pytest.mark.parametrize("in_step", [False, True])
def test_a_step_on_an_explicit_mesh_that_is_set_is_that_of_one_device(in_step):
    inner = lenient(optax.adam(1e-2))
    expected, _ = full_batches(inner, BATCHES)
    mesh = explicit()
    with jax.set_mesh(mesh):
        params = jax.device_put(parameters(), P())
        if in_step:
            tx, options = inner, {"num_microbatches": K}
            state = jax.device_put(tx.init(parameters()), P())
            batches = [
                jax.tree.map(lambda *x: jnp.concatenate(x), *BATCHES[i : i + K])
                for i in range(0, 2 * K, K)
            ]
        else:
            tx, options = accumulate(inner, K, axis_name="data"), {}
            state = init_on_mesh(tx, params, mesh)
            batches = BATCHES
        step = train_step(loss, tx, weight_fn=tokens, axis_name="data", **options)
        for batch in batches:
            batch = jax.device_put(jax.tree.map(np.asarray, batch), P("data"))
            params, state, _ = step(params, state, batch)
    assert_close(params, expected, eps=40)


def test_parameters_sharded_over_the_examples_axis_are_an_error_in_a_step():
    with jax.set_mesh(explicit()):
        params = jax.device_put(jnp.ones(8), P("data"))
        step = train_step(
            lambda w, x: jnp.mean(x @ w),
            optax.sgd(1.0),
            num_microbatches=2,
            axis_name="data",
        )
        batch = jax.device_put(jnp.ones((8, 8)), P("data"))
        with pytest.raises(ValueError, match="leave axis_name out"):
            step(params, optax.EmptyState(), batch)


def product(w, batch):
    return jnp.mean((batch["x"] @ w) ** 2)


def unreduced_step(tx):
    @jax.jit
    def step(params, state, batch):
        marked = jax.reshard(params, P(None, None, reduced={"data"}))
        grads = jax.grad(product)(marked, batch)
        return apply_gradients(tx, params, state, grads, weight=3)

    return step


def test_unreduced_gradients_are_added_up_and_reduced_once_a_window():
    # C10. Reading or saving what is unreduced is another matter: see below.
    kernel = np.asarray(parameters()["kernel"][0])
    expected = kernel - 0.5 * np.mean(
        [jax.grad(product)(jnp.asarray(kernel), batch) for batch in BATCHES[:2]], axis=0
    )
    tx = accumulate(optax.sgd(0.5), 2, axis_name="data")
    step = unreduced_step(tx)
    with jax.set_mesh(explicit()):
        params = jax.device_put(kernel, P())
        state = jax.jit(tx.init)(params)
        batches = [jax.device_put(jax.device_get(b), P("data")) for b in BATCHES[:2]]
        text = program(step.lower(params, state, batches[0]))
        assert text.collectives() == ["all-reduce"]
        assert "all-reduce" not in text.text.split("\nENTRY ")[1]
        for batch in batches:
            params, state = step(params, state, batch)
    assert_close(params, expected)


def test_unreduced_sums_go_through_a_checkpoint_to_the_bit():
    tx = accumulate(optax.sgd(0.5), 2, axis_name="data")
    step = unreduced_step(tx)
    with jax.set_mesh(explicit()):
        params = jax.device_put(jax.device_get(parameters()["kernel"][0]), P())
        like = jax.jit(tx.init)(params)
        batches = [jax.device_put(jax.device_get(b), P("data")) for b in BATCHES[:2]]
        params, state = step(params, like, batches[0])
        saved = saveable_state(state)
        assert saved.acc_grads.shape == (4, 8, 8)
        parts = np.asarray(saved.acc_grads)
        assert len({part.tobytes() for part in parts}) == 4
        again = restored_state(
            jax.device_put(
                jax.device_get(saved), jax.tree.map(lambda x: x.sharding, saved)
            ),
            like,
        )
        ends = [jax.device_get(step(params, s, batches[1])[0]) for s in (state, again)]
    np.testing.assert_array_equal(*ends)


def test_what_an_explicit_mesh_cannot_do_is_an_error():
    for options, words in (
        ({"skip_nonfinite": "window"}, "must look at gradients"),
        ({"shard_accumulators": True}, "shard the state instead"),
    ):
        tx = accumulate(optax.sgd(0.5), 2, axis_name="data", **options)
        with jax.set_mesh(explicit()):
            params = jax.device_put(jnp.ones((8, 8)), P())
            batch = jax.device_put(jax.device_get(BATCHES[0]), P("data"))
            plain = accumulate(optax.sgd(0.5), 2, axis_name="data")
            state = jax.jit(plain.init)(params)
            with pytest.raises(ValueError, match=words):
                unreduced_step(tx)(params, state, batch)
    plain = accumulate(optax.sgd(0.5), 2, axis_name="data")
    with jax.set_mesh(explicit()):
        params = jax.device_put(jnp.ones((8, 8)), P())
        state = jax.jit(plain.init)(params)
        with pytest.raises(ValueError, match="is not unreduced over the explicit"):
            jax.jit(plain.update)(params, state, params)


# --- plain jit -----------------------------------------------------------------------


def sharded_step(params_spec, **options):
    """A training step under plain ``jit``, with sharded arguments."""
    mesh = mesh_of(4)
    params = jax.device_put(
        parameters(),
        {"kernel": NamedSharding(mesh, params_spec), "scale": NamedSharding(mesh, P())},
    )
    tx = accumulate(optax.sgd(0.1), K)
    batch = jax.device_put(batch_of(16), NamedSharding(mesh, P("data")))
    if options:
        tx = optax.sgd(0.1)
    where = state_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=where)(params)
    step = train_step(loss, tx, weight_fn=tokens, **options)
    return step, params, state, batch


def test_under_plain_jit_each_micro_batch_is_reduced_and_the_numbers_are_the_same():
    # What XLA does of itself, told in the documentation: not once a window.
    step, params, state, batch = sharded_step(P())
    silent = program(step.lower(params, state, batch, emit=False))
    assert silent.collectives(LARGE) == ["all-reduce"]
    for batch in BATCHES:
        params, state, _ = step(params, state, batch)
    expected, _ = full_batches(optax.sgd(0.1), BATCHES)
    assert_close(params, expected)


def test_moments_and_sums_may_be_sharded_where_parameters_are_not():
    # ZeRO-2: XLA would shard the parameters as well after the first step.
    mesh, inner = mesh_of(4), lenient(optax.adam(1e-2))
    params = jax.device_put(parameters(), NamedSharding(mesh, P()))
    tx = accumulate(inner, K)
    of_params = jax.tree.map(lambda x: x.sharding, params)
    of_state = state_shardings(tx, params, shard_over="data")
    state = jax.jit(tx.init, out_shardings=of_state)(params)
    step = train_step(loss, tx, weight_fn=tokens, out_shardings=(of_params, of_state))
    for batch in BATCHES:
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        params, state, _ = step(params, state, batch)
    assert params["kernel"].sharding.is_fully_replicated
    assert state.acc_grads["kernel"].addressable_shards[0].data.size == 32
    expected, _ = full_batches(inner, BATCHES)
    assert_close(params, expected, eps=40)


@pytest.mark.parametrize("in_step", [False, True])
def test_parameters_sharded_as_in_fsdp_stay_sharded_and_the_numbers_are_the_same(
    in_step,
):
    options = {"num_microbatches": 2} if in_step else {}
    step, params, state, batch = sharded_step(P(None, "data"), **options)
    text = program(step.lower(params, state, batch))
    assert "all-to-all" not in text.collectives()
    batches = BATCHES[:K] if not in_step else [BATCHES[0]]
    for batch in batches:
        batch = jax.device_put(batch, NamedSharding(mesh_of(4), P("data")))
        params, state, _ = step(params, state, batch)
    assert params["kernel"].sharding.is_equivalent_to(
        NamedSharding(mesh_of(4), P(None, "data")), 3
    )
    expected, _ = full_batches(optax.sgd(0.1), batches, len(batches))
    assert_close(params, expected)


@pytest.mark.parametrize("policy", ["full", "none"])
def test_gathered_parameters_are_not_residuals_of_layers_in_a_loop(policy):
    # FSDP: what is kept for the backward pass are the shards, which are arguments; a
    # gathered layer lives as long as its turn of the loop.
    layers, width, mesh = 16, 256, mesh_of(4)
    params = jax.ShapeDtypeStruct(
        (layers, width, width),
        jnp.float32,
        sharding=NamedSharding(mesh, P(None, "data")),
    )
    batch = jax.ShapeDtypeStruct(
        (8, width), jnp.float32, sharding=NamedSharding(mesh, P("data"))
    )

    def deep(params, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        body = gradacc_jax.remat(layer, policy=policy) if policy != "none" else layer
        out, _ = lax.scan(body, x, params)
        return jnp.mean(out**2)

    step = train_step(deep, optax.sgd(0.1), num_microbatches=2)
    shard = layers * width * width  # bytes: a quarter of float32
    program_ = program(step.lower(params, (optax.EmptyState(),) * 2, batch))
    # One shard of sums, some layers, and no gathered stack, which is 4 shards.
    assert program_.temporaries < 3 * shard
