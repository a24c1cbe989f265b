"""chunked_encode: a loss that couples the whole batch, a chunk of it at a time."""

import functools

import chex
from flax import linen, nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import gradacc_jax
from gradacc_jax import chunked_encode
from tests import programs

EPS = float(jnp.finfo(jnp.float32).eps)
B = 32


def tower(params, x):
    z = jnp.tanh(x @ params["in"]) @ params["out"]
    return z / jnp.linalg.norm(z, axis=1, keepdims=True)


def contrast(u, v, temperature):
    """The symmetric loss of CLIP: each example must find its own in the other tower."""
    logits = u @ v.T * jnp.exp(temperature)
    rows, columns = (jax.nn.log_softmax(logits, axis) for axis in (1, 0))
    return -jnp.mean(jnp.diag(rows) + jnp.diag(columns)) / 2


def clip(params, images, texts, encode=tower):
    return contrast(
        encode(params["image"], images),
        encode(params["text"], texts),
        params["temperature"],
    )


def case(dtype=np.float32, n=B):
    """Parameters, and pairs of related views."""
    rng = np.random.default_rng(0)

    def weights():
        return {
            "in": rng.normal(size=(6, 16)).astype(dtype),
            "out": rng.normal(size=(16, 5)).astype(dtype),
        }

    params = {"image": weights(), "text": weights(), "temperature": dtype(1.0)}
    images = rng.normal(size=(n, 6))
    texts = images + 0.5 * rng.normal(size=(n, 6))
    return params, images.astype(dtype), texts.astype(dtype)


FULL = jax.jit(jax.value_and_grad(clip))


def chunked(loss, *sizes, encode=tower, **options):
    return functools.partial(loss, encode=chunked_encode(encode, *sizes, **options))


def distance(a, b):
    """The norm of the difference of two trees, relative to that of ``b``."""
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def in_order(chunks, sizes):
    """What chunks with strided examples give, put in the order of the batch."""
    found, start = {}, 0
    for count, size in sizes:
        for i in range(count):
            rows = range(start + i, start + count * size, count)
            found.update(zip(rows, chunks.pop(0), strict=True))
        start += count * size
    return jnp.stack([found[row] for row in range(start)])


# --- equal to the full batch -------------------------------------------------------


@pytest.mark.parametrize("size", [8, 5, 32, 100])
def test_a_loss_of_two_towers_is_the_full_batchs_for_every_chunk_size(size):
    args = case()
    found = jax.jit(jax.value_and_grad(chunked(clip, size)))(*args)
    # Sums over 32 examples of numbers of order one.
    chex.assert_trees_all_close(found, FULL(*args), atol=10 * EPS, rtol=1e-6)


def test_in_float64_it_is_the_full_batchs_to_twelve_digits():
    with jax.enable_x64(True):
        args = case(np.float64)
        found = jax.jit(jax.value_and_grad(chunked(clip, 8)))(*args)
        expected = jax.jit(jax.value_and_grad(clip))(*args)
        chex.assert_trees_all_equal_dtypes(found, expected)
        chex.assert_trees_all_close(found, expected, atol=1e-12, rtol=1e-12)
    # And in float32 it is what float32 can tell of this.
    narrow = jax.jit(jax.value_and_grad(chunked(clip, 8)))(*case())
    assert distance(narrow, jax.device_get(expected)) < 10 * EPS


@pytest.mark.slow
def test_accumulating_the_same_micro_batches_is_another_loss():
    params, *batch = case()
    _, expected = FULL(params, *batch)
    naive = gradacc_jax.grad(clip, num_microbatches=4, batch_argnums=(1, 2))
    assert distance(jax.jit(naive)(params, *batch), expected) > 0.1
    found = jax.jit(jax.grad(chunked(clip, 8)))(params, *batch)
    assert distance(found, expected) < 10 * EPS


@pytest.mark.slow
def test_a_temperature_outside_the_towers_is_counted_once():
    # Without matrix products the representations, and so the ratio, are exact.
    def scaled(w, x):
        return w * x

    def loss(temperature, w, x, encode=scaled):
        return contrast(encode(w, x), encode(w, x[::-1]), temperature)

    x = case()[1]
    for size in (8, 5):
        found = jax.jit(jax.grad(chunked(loss, size, encode=scaled)))(0.5, 1.5, x)
        assert found / jax.jit(jax.grad(loss))(0.5, 1.5, x) == 1


@pytest.mark.slow
def test_tied_towers_get_the_gradients_of_both():
    def loss(params, x, y, encode=tower):
        shared = params["image"]
        return contrast(encode(shared, x), encode(shared, y), params["temperature"])

    args = case()
    found = jax.jit(jax.grad(chunked(loss, 5)))(*args)
    chex.assert_trees_all_close(found, jax.jit(jax.grad(loss))(*args), atol=10 * EPS)


@pytest.mark.slow
def test_the_batch_and_several_arguments_can_be_differentiated():
    args = case()
    found = jax.jit(jax.grad(chunked(clip, 5), (0, 1, 2)))(*args)
    expected = jax.jit(jax.grad(clip, (0, 1, 2)))(*args)
    chex.assert_trees_all_close(found, expected, atol=10 * EPS)


@pytest.mark.slow
def test_forward_mode_and_second_derivatives_work():
    params, *batch = case(n=12)
    ones = jax.tree.map(jnp.ones_like, params)

    @functools.partial(jax.jit, static_argnums=0)
    def along(loss, params):
        def directional(params):
            return jax.jvp(lambda p: loss(p, *batch), (params,), (ones,))[1]

        return jax.value_and_grad(directional)(params)

    # Second derivatives are up to a hundred times larger than first ones.
    chex.assert_trees_all_close(
        along(chunked(clip, 5), params), along(clip, params), atol=1000 * EPS
    )


@pytest.mark.slow
def test_a_batch_of_batches_goes_through_vmap():
    params, *batch = case(n=12)
    stacked = [np.stack([x, x[::-1]]) for x in batch]
    found, expected = (
        jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))(params, *stacked)
        for loss in (chunked(clip, 5), clip)
    )
    chex.assert_trees_all_close(found, expected, atol=10 * EPS)


# --- what encoders take and give ---------------------------------------------------


def test_token_ids_masks_and_trees_of_representations():
    def encode(params, batch, scale, *, power):
        x = params["embed"][batch["ids"]] * batch["mask"].T[..., None] * scale
        counts = jnp.sum(batch["mask"], 0).astype(jnp.int32)
        return {"mean": jnp.mean(x, 1) ** power, "parts": (x, counts)}

    def loss(params, batch, encode=encode):
        z = encode(params, batch, np.float32(2), power=2)
        x, counts = z["parts"]
        assert counts.dtype == jnp.int32
        words = jnp.sum(x, 1) / counts[:, None].astype(jnp.float32)
        return contrast(z["mean"], words, 0.0)

    rng = np.random.default_rng(0)
    params = {"embed": rng.normal(size=(7, 2)).astype(np.float32)}
    mask = rng.integers(0, 2, (4, 10)).astype(np.float32)
    mask[0] = 1
    batch = {"ids": rng.integers(0, 7, (10, 4)), "mask": mask}
    in_chunks = chunked(loss, 4, encode=encode, batch_axis={"ids": 0, "mask": 1})
    found = jax.jit(jax.value_and_grad(in_chunks))(params, batch)
    chex.assert_trees_all_close(
        found,
        jax.jit(jax.value_and_grad(loss))(params, batch),
        rtol=20 * EPS,
        atol=20 * EPS,
    )


def test_several_batch_arguments_and_what_is_not_batched():
    def encode(x, w, batch):
        return x * w + batch["y"] * batch["half"]

    f = chunked_encode(
        encode, 3, batch_argnums=(0, 2), batch_axis=(0, {"y": 0, "half": None})
    )
    x = jnp.arange(8.0)
    args = (x, 2.0, {"y": 10 * x, "half": jnp.float32(0.5)})
    np.testing.assert_array_equal(jax.jit(f)(*args), 7 * x)
    # The half is read by every chunk, and gets the sum of what they give.
    weights = x + 1
    grad = jax.grad(lambda *args: weights @ f(*args), 2)(*args)
    np.testing.assert_array_equal(grad["y"], 0.5 * weights)
    assert grad["half"] == weights @ (10 * x)


def test_each_chunk_draws_from_its_own_key_in_both_passes():
    def dropped(params, x, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return tower(params, 1 + jnp.where(keep, 2 * x, 0))

    def whole(params, x, key):
        """The full batch, with the chunks' masks: 5 and 5 examples, then 2."""
        parts = [x[0:10:2], x[1:10:2], x[10:]]
        keys = [jax.random.fold_in(key, i) for i in range(3)]
        chunks = [dropped(params, x, k) for x, k in zip(parts, keys, strict=True)]
        return in_order(chunks, [(2, 5), (1, 2)])

    def loss(params, x, y, key, encode=whole):
        return contrast(encode(params["image"], x, key), y[:, :5], 0.0)

    args = (*case(n=12), jax.random.key(7))
    in_chunks = chunked(loss, 5, encode=dropped, key_argnums=2)
    found, expected = (jax.jit(jax.value_and_grad(f))(*args) for f in (in_chunks, loss))
    chex.assert_tree_all_finite(expected)
    chex.assert_trees_all_close(found, expected, rtol=20 * EPS, atol=20 * EPS)


def test_state_is_carried_through_the_chunks_once_and_gets_no_gradient():
    def encode(w, x, state):
        new = {"mean": 0.5 * state["mean"] + 0.5 * jnp.mean(w * x), "n": state["n"] + 1}
        return w * x, new

    f = chunked_encode(encode, 2, state_argnums=2)

    def loss(w, x):
        z, state = f(w, x, {"mean": jnp.float32(0), "n": jnp.int32(0)})
        return jnp.sum(z) + state["mean"], state

    x = jnp.arange(6.0)
    (_, state), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(1.0, x)
    mean = 0.0
    for part in (x[0::3], x[1::3], x[2::3]):
        mean = 0.5 * mean + 0.5 * part.mean()
    assert (state["mean"], state["n"], grad) == (mean, 3, 15)


class Net(linen.Module):
    """A tower with what is hard to run twice: dropout and batch statistics."""

    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=False, momentum=0.5)(linen.Dense(8)(x))
        return linen.Dense(4)(linen.Dropout(0.5, deterministic=False)(x))


def test_a_linen_model_with_batch_statistics_and_dropout():
    model = Net()
    x = case(n=8)[1]
    key = jax.random.key(0)
    variables = jax.jit(model.init)({"params": key, "dropout": key}, x)

    def encode(params, x, stats, key):
        return model.apply(
            {"params": params, "batch_stats": stats},
            x,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )

    def whole(params, x, variables, key):
        """Chunk after chunk, by hand, with everything kept."""
        chunks = []
        for i in range(2):
            k = jax.random.fold_in(key, i)
            z, variables = encode(params, x[i::2], variables["batch_stats"], k)
            chunks.append(z)
        return in_order(chunks, [(2, 4)]), variables

    def in_chunks(params, x, variables, key):
        def with_state(params, x, variables, key):
            return encode(params, x, variables["batch_stats"], key)

        return chunked_encode(with_state, 4, state_argnums=2, key_argnums=3)(
            params, x, variables, key
        )

    def loss(params, encode):
        stats = {"batch_stats": variables["batch_stats"]}
        z, stats = encode(params, x, stats, key)
        return contrast(z, z[::-1], 0.0), stats

    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, encode=f), has_aux=True))(
            variables["params"]
        )
        for f in (in_chunks, whole)
    )
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=100 * EPS)
    before, (_, after) = variables["batch_stats"], found[0]
    assert distance(after["batch_stats"], before) > 0.1


def test_an_nnx_model_is_encoded_as_it_is():
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    x = case()[1]

    def loss(model, encode):
        z = encode(model, x)
        return contrast(z, z[::-1], 0.0)

    def encode(model, x):
        return model(x)

    found, expected = (
        nnx.jit(nnx.value_and_grad(functools.partial(loss, encode=f)))(model)
        for f in (chunked_encode(encode, 5), encode)
    )
    chex.assert_trees_all_close(found, expected, rtol=20 * EPS, atol=20 * EPS)


# --- dtypes ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_narrow_parameters_are_summed_in_float32(dtype):
    # 4096 gradients of 1: a bfloat16 sum stays at 256, one in float16 at 2048.
    f = chunked_encode(lambda w, x: w * x, 1)

    def loss(w, x):
        return jnp.sum(f(w, x), dtype=jnp.float32)

    w, x = jnp.ones((), dtype), jnp.ones(4096, dtype)
    grad = jax.jit(jax.grad(loss))(w, x)
    assert grad.dtype == dtype
    assert grad == 4096
    assert jax.jit(f)(w, x).dtype == dtype
    # In forward mode too.
    value, tangent = jax.jvp(lambda w: loss(w, x), (w,), (w,))
    assert (value, tangent) == (4096, 4096)


def test_narrow_parameters_have_second_derivatives_too():
    f = chunked_encode(lambda w, x: (w * x) ** 2, 2)
    w, x = jnp.ones((), jnp.bfloat16), jnp.ones(6, jnp.bfloat16)
    second = jax.grad(jax.grad(lambda w: jnp.sum(f(w, x))))
    assert jax.jit(second)(w) == 12


def test_the_encoder_sees_parameters_in_their_own_dtypes():
    seen = []

    def encode(params, x):
        seen.append(jax.tree.map(lambda p: p.dtype.name, params))
        return x * params["half"].astype(x.dtype) * params["single"]

    params = {"half": jnp.ones((), jnp.bfloat16), "single": jnp.ones(()), "ids": 3}
    params["ids"] = jnp.arange(2)
    chunked_encode(encode, 2)(params, jnp.ones(4))
    assert seen[0] == {"half": "bfloat16", "single": "float32", "ids": "int32"}


# --- the compiled program ----------------------------------------------------------


def layered(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)
    return jnp.mean(x, 1)[:, :4]


def spread(params, x, encode=layered):
    """Couples the batch, with nothing that is larger than the representations."""
    z = encode(params, x)
    return jnp.mean((z - jnp.mean(z, 0, keepdims=True)) ** 2)


LAYERS = jax.ShapeDtypeStruct((8, 32, 32), jnp.float32)


def temporaries(loss, n):
    x = jax.ShapeDtypeStruct((n, 64, 32), jnp.float32)
    lowered = jax.jit(jax.value_and_grad(loss)).lower(LAYERS, x)
    return programs.program(lowered).temporaries


def test_memory_is_one_chunks_however_many_there_are():
    few, many = (temporaries(chunked(spread, 8, encode=layered), n) for n in (32, 256))
    # 256 representations of 4 numbers, with their cotangents.
    assert many == pytest.approx(few, rel=0.02)
    assert many <= 1.1 * temporaries(spread, 8)
    assert 20 * many <= temporaries(spread, 256)


def test_a_ragged_last_chunk_costs_no_more_than_a_chunk():
    size = {n: temporaries(chunked(spread, 8, encode=layered), n) for n in (64, 68)}
    assert size[68] <= 1.6 * size[64]
    assert 4 * size[68] <= temporaries(spread, 68)


def test_a_policy_says_what_of_a_chunk_is_kept():
    @functools.cache
    def of(policy):
        return temporaries(chunked(spread, 8, encode=layered, policy=policy), 64)

    dots = jax.checkpoint_policies.dots_saveable
    assert 4 * of("full") < of("none")
    assert of("full") < of(dots) <= of("none")
    # jax 0.10 keeps a quarter less than it does without chunks.
    assert of("none") > 0.6 * temporaries(spread, 64)
    args = case()
    found = jax.jit(jax.value_and_grad(chunked(clip, 8, policy=dots)))(*args)
    chex.assert_trees_all_close(found, FULL(*args), atol=10 * EPS)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12),
    reason="the CPU compiler of jax 0.10 makes float32 copies of all bfloat16 factors",
)
def test_parameters_of_bfloat16_cost_their_sums_and_no_copies():
    def encode(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    def loss(params, x):
        z = chunked_encode(encode, 4)(params, x)
        return jnp.var(z.astype(jnp.float32))

    params = [jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)] * 4
    x = jax.ShapeDtypeStruct((16, 256), jnp.bfloat16)
    made = programs.program(jax.jit(jax.grad(loss)).lower(params, x))
    sums = 4 * 256 * 256 * 4
    assert made.temporaries < 1.7 * sums


def sharded(devices, *arrays, spec=("data",)):
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    return mesh, jax.device_put(arrays, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("devices", [4, 8])
def test_a_batch_that_is_sharded_stays_where_it_is(devices):
    params, *batch = case()
    expected = FULL(params, *batch)
    _, batch = sharded(devices, *batch)
    _, (params,) = sharded(devices, params, spec=())
    f = jax.jit(jax.value_and_grad(chunked(clip, 8)))
    made = programs.program(f.lower(params, *batch))
    assert "all-to-all" not in made.text
    assert "collective-permute" not in made.text
    # Nor are the examples sent to all: only representations are, with 5 numbers each.
    assert not any(
        "all-gather(" in line and ",6]" in line for line in made.text.splitlines()
    )
    found = jax.device_get(f(params, *batch))
    chex.assert_trees_all_close(found, expected, rtol=20 * EPS, atol=20 * EPS)


@pytest.mark.parametrize("devices", [4, 8])
def test_in_shard_map_gradients_are_reduced_after_the_loop_and_not_in_it(devices):
    def loss(params, images, texts):
        u = chunked_encode(tower, 2)(params["image"], images)
        v = chunked_encode(tower, 2)(params["text"], texts)
        u, v = (jax.lax.all_gather(z, "data", tiled=True) for z in (u, v))
        # Every device has the whole loss; its mean over devices is the loss.
        return jax.lax.pmean(contrast(u, v, params["temperature"]), "data")

    params, *batch = case()
    mesh, _ = sharded(devices)
    f = jax.jit(
        jax.shard_map(
            jax.value_and_grad(loss),
            mesh=mesh,
            in_specs=(P(), P("data"), P("data")),
            out_specs=P(),
        )
    )
    expected = FULL(params, *batch)
    found = jax.device_get(f(params, *batch))
    chex.assert_trees_all_close(found, expected, rtol=20 * EPS, atol=20 * EPS)
    made = programs.program(f.lower(params, *batch))
    inside, entry = made.text.split("\nENTRY ")
    for collective in ("all-reduce(", "reduce-scatter(", "all-gather(", "all-to-all("):
        assert collective not in inside
    assert entry.count("all-reduce(") == 1


def test_on_an_explicit_mesh_the_batch_keeps_its_sharding():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    params, images, _ = case()
    with jax.set_mesh(mesh):
        x = jax.device_put(images, NamedSharding(mesh, P("data")))
        z = jax.jit(chunked_encode(tower, 8))(params["image"], x)
        assert z.sharding.spec == P("data", None)
    np.testing.assert_allclose(z, tower(params["image"], images), atol=10 * EPS)


# --- what is refused ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (0, {}, r"chunk_size=0 is less than 1"),
        (-2, {}, r"chunk_size=-2 is less than 1"),
        (2.5, {}, r"chunk_size=2.5 is not an integer"),
        (None, {}, r"chunk_size=None .*Python integer"),
        (2, {"policy": None}, r'policy=None .*"full".*"none"'),
        (2, {"policy": "dits"}, r"policy='dits' is not known"),
        (2, {"batch_argnums": -1}, r"batch_argnums=-1.*counted from 0"),
        (2, {"key_argnums": 1}, r"argument 1 is in batch_argnums and in key_argnums"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_construction(size, options, message):
    with pytest.raises(ValueError, match=message):
        chunked_encode(tower, size, **options)


def test_a_chunk_size_that_is_known_at_run_time_only_is_refused():
    with pytest.raises(ValueError, match=r"chunk_size=.* is not known while tracing"):
        jax.jit(lambda size: chunked_encode(tower, size))(2)


ONES = np.ones((6, 2), np.float32)


@pytest.mark.parametrize(
    ("options", "args", "message"),
    [
        ({}, (2.0,), r"argument 1 has a role, but there are 1 positional"),
        ({}, (2.0, ONES[:0]), r"batch_size=0"),
        ({}, (2.0, np.float32(1)), r"batch_axis=0 does not exist"),
        ({"batch_axis": None}, (2.0, ONES), r"no batched array"),
        ({}, (2.0, {"a": ONES, "b": ONES[1:]}), r"different numbers of examples.*6.*5"),
        (
            {"batch_argnums": (1, 2)},
            (2.0, ONES, ONES[1:]),
            r"different numbers of examples.*6.*5",
        ),
        ({"key_argnums": 2}, (2.0, ONES, 7), r"argument 2 is int.*not one PRNG key"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(options, args, message):
    with pytest.raises(ValueError, match=message):
        chunked_encode(lambda w, x, *_: x, 4, **options)(*args)


@pytest.mark.parametrize(
    ("encode", "options", "message"),
    [
        (lambda w, x: jnp.sum(x), {}, r"an array of shape \(\) for a chunk of 4"),
        (lambda w, x: x.T, {}, r"an array of shape \(2, 4\) for a chunk of 4 examples"),
        (lambda w, x: {"z": x, "n": x[0]}, {}, r"\['n'\] of shape \(2,\)"),
        (lambda w, x: x, {"state_argnums": 0}, r"expected the pair"),
        (
            lambda w, x: (x, {"n": jnp.float32(1)}),
            {"state_argnums": 0},
            r"carried state changes.*int32\[\] -> float32\[\]",
        ),
    ],
)
def test_results_that_are_no_representations_are_refused(encode, options, message):
    with pytest.raises(ValueError, match=message):
        chunked_encode(encode, 4, **options)({"n": jnp.int32(0)}, ONES)
