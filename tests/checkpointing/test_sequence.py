"""Layers in segments: the same numbers, and memory of the square root."""

import functools
import math

from flax import linen as nn
from flax import nnx
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

from gradacc_jax import policies, remat_sequence, residual_report
from gradacc_jax.checkpointing.sequence import best_segments
from tests.programs import compiled

B, D = 64, 16
X = jnp.linspace(-1.0, 1.0, B * D).reshape(B, D)


def layer(x, w):
    return jnp.tanh(x @ w)


def weights(num):
    return jax.random.normal(jax.random.key(0), (num, D, D)) / D**0.5


def plain(stacked, x=X):
    return jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, stacked)[0] ** 2)


def in_a_loop(layers, x):
    for one in layers:
        x = one(x)
    return x


def scanned(stacked, x=X, **options):
    return jnp.sum(remat_sequence(layer, x, stacked=stacked, **options) ** 2)


def listed(stacked, x=X, **options):
    layers = [functools.partial(layer, w=w) for w in stacked]
    return jnp.sum(remat_sequence(layers, x, **options) ** 2)


def close(a, b, eps=64):
    """Equal but for the order of sums: a gradient has passed some dozen products."""
    # Some gradients cancel to nothing but rounding, of numbers of order 1.
    scale = float(np.max(np.abs(b), initial=0.1))
    np.testing.assert_allclose(a, b, rtol=0, atol=eps * 2**-23 * scale)


def operations(fun, *args, name):
    """How often an operation stands in the traced program, loops taken apart."""

    def count(jaxpr, times):
        total = 0
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            turns = times * eqn.params.get("length", 1)
            total += times * (eqn.primitive.name == name)
            inner = jax.extend.core.jaxprs_in_params(eqn.params)
            total += sum(count(body, turns) for body in inner)
        return total

    return count(jax.make_jaxpr(fun)(*args), 1)


# --- the same numbers ----------------------------------------------------------------


@functools.cache
def expected(num):
    return jax.jit(jax.value_and_grad(plain, (0, 1)))(weights(num), X)


@pytest.mark.parametrize("sequence", [scanned, listed])
@pytest.mark.parametrize(
    ("num", "segments"), [(1, "sqrt"), (5, 2), (6, 3), (6, 1), (13, "sqrt"), (5, 100)]
)
def test_value_and_gradients_are_those_of_the_plain_loop(sequence, num, segments):
    mine = functools.partial(sequence, segments=segments)
    results = jax.jit(jax.value_and_grad(mine, (0, 1)))(weights(num), X)
    jax.tree.map(close, results, expected(num))


def test_gradients_are_those_of_finite_differences():
    with jax.enable_x64(True):
        w, x = (jnp.asarray(np.asarray(a, np.float64)) for a in (weights(5), X[:2]))
        loss = jax.jit(functools.partial(scanned, x=x, segments=2))
        grads, direction = jax.grad(loss)(w), jnp.cos(w)
        step = 1e-6
        slope = (loss(w + step * direction) - loss(w - step * direction)) / (2 * step)
        # The error of central differences is step**2, that of rounding 2e-16 / step.
        np.testing.assert_allclose(jnp.vdot(grads, direction), slope, rtol=1e-8)


@pytest.mark.parametrize("num", [0, 5])
def test_the_carry_may_be_any_pytree(num):
    def body(carry, w):
        key, count = carry["extra"]
        keep = jax.random.bernoulli(key, 0.9, X.shape)
        h = jnp.where(keep, layer(carry["h"], w), 0.0)
        return {"h": h, "extra": (jax.random.fold_in(key, count), count + 1)}

    start = {"h": X, "extra": (jax.random.key(1), jnp.int32(0))}

    def by_hand(w):
        return lax.scan(lambda c, w: (body(c, w), None), start, w)[0]

    def in_segments(w):
        return remat_sequence(body, start, stacked=w, segments=3)

    def in_a_list(w):
        layers = [functools.partial(body, w=p) for p in w]
        return remat_sequence(layers, start, segments=3)

    def results(how):
        def loss(w):
            out = how(w)
            return jnp.sum(out["h"] ** 2), (out["h"], out["extra"][1])

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(weights(num))

    for how in (in_segments, in_a_list):
        (_, (_, count)), _ = mine = results(how)
        assert count == num
        jax.tree.map(close, mine, results(by_hand))


def test_layers_of_a_list_may_differ_and_close_over_what_is_differentiated():
    def grads(run):
        def loss(w):
            return jnp.sum(run([lambda x: x @ w, jnp.sin, lambda x: x * w[0, 0]] * 2))

        return jax.jit(jax.grad(loss))(weights(1)[0])

    for segments in ("sqrt", 2, 6):
        run = functools.partial(remat_sequence, x=X, segments=segments)
        close(grads(run), grads(lambda layers: in_a_loop(layers, X)))


def test_it_works_under_vmap_and_in_forward_mode():
    w = weights(5)
    xs = jnp.stack([X, -X, 2 * X])

    def both(loss):
        grads = jax.vmap(jax.grad(loss, 1), (None, 0))(w, xs)
        return grads, jax.jvp(functools.partial(loss, w), (X,), (X,))

    mine = functools.partial(scanned, segments=3)
    jax.tree.map(
        close,
        jax.jit(both, static_argnums=0)(mine),
        jax.jit(both, static_argnums=0)(plain),
    )


# --- memory and time -----------------------------------------------------------------


def temporaries(loss, num, **options):
    w = jax.ShapeDtypeStruct((num, D, D), jnp.float32)
    x = jax.ShapeDtypeStruct((4096, D), jnp.float32)
    return compiled(jax.grad(functools.partial(loss, **options)), w, x).temporaries


@pytest.mark.parametrize("num", [12, 13, 31, 32])
def test_memory_of_a_scan_falls_to_the_square_root_for_primes_too(num):
    one = 4096 * D * 4  # bytes of x, of which a layer keeps one or two
    everything = temporaries(plain, num)
    per_layer = temporaries(scanned, num, segments=num)
    sqrt = temporaries(scanned, num)
    assert everything > num * one
    # A layer keeps two times x, or three in older JAX: 2 sqrt(3 N), and some at work.
    assert sqrt < (2 * math.sqrt(3 * num) + 6) * one
    assert sqrt <= per_layer
    assert sqrt < 0.6 * everything


def test_parameters_are_not_copied_where_the_segments_are_uneven():
    # Parameters outweigh everything else: 13 layers of 256 KiB, x of 4 KiB.
    def grads(segments):
        def loss(w, x):
            return jnp.sum(remat_sequence(layer, x, stacked=w, segments=segments))

        w = jax.ShapeDtypeStruct((13, 256, 256), jnp.float32)
        x = jax.ShapeDtypeStruct((4, 256), jnp.float32)
        return compiled(jax.grad(loss), w, x).temporaries

    one = 256 * 256 * 4
    # Parameters and gradients of one segment of 2, the tail's 1, and one layer at work.
    assert grads(7) < 7 * one


def kept(fun, *args):
    return jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(fun, *a)[1], *args))


@pytest.mark.parametrize("num", [12, 13])
def test_a_list_keeps_the_inputs_of_its_segments_and_nothing_else(num):
    for segments in (1, 3, 4, num):
        fun = functools.partial(listed, segments=segments)
        of_x = [r for r in kept(fun, weights(num), X) if r.shape == X.shape]
        actual = math.ceil(num / math.ceil(num / segments))
        # Also the loss's own residual, 2 x.
        assert len(of_x) <= actual + 1


@pytest.mark.parametrize("sequence", [scanned, listed])
@pytest.mark.parametrize("num", [12, 13])
def test_the_forward_pass_runs_once_more_and_not_twice(sequence, num):
    for segments in (1, 3, num):
        fun = functools.partial(sequence, segments=segments)
        count = operations(jax.grad(fun, (0, 1)), weights(num), X, name="tanh")
        assert num < count <= 2 * num
        # Its products: once forward, once again, and two in the backward pass. (What
        # a layer's last product makes is not always needed again.)
        count = operations(jax.grad(fun, (0, 1)), weights(num), X, name="dot_general")
        assert count <= 4 * num


def test_the_number_of_segments_weighs_what_a_layer_keeps():
    assert best_segments(64, 1.0, 1.0) == 8
    # A layer that keeps 20 times its input: 12 of them are best kept one by one.
    assert best_segments(12, 1.0, 20.0) == 12
    assert 64 <= best_segments(512, 1.0, 20.0) <= 128
    # And one that keeps little, all at once.
    assert best_segments(12, 1.0, 0.01) == 1
    for num in (13, 31, 97):
        assert math.sqrt(num) / 2 < best_segments(num, 1.0, 1.0) < 2 * math.sqrt(num)


@pytest.mark.slow
def test_sqrt_is_within_a_quarter_of_the_best_number_of_segments():
    # Layers that keep much: the literal root of 24 would be five segments.
    def wide(x, w):
        return x + jnp.tanh(jax.nn.gelu(x @ w) @ w.T)

    def temps(segments):
        def loss(w, x):
            return jnp.sum(remat_sequence(wide, x, stacked=w, segments=segments) ** 2)

        w = jax.ShapeDtypeStruct((24, D, 4 * D), jnp.float32)
        x = jax.ShapeDtypeStruct((512, D), jnp.float32)
        return compiled(jax.grad(loss), w, x).temporaries

    assert temps("sqrt") <= 1.25 * min(temps(s) for s in (5, 12, 24))
    assert temps("sqrt") < 0.8 * temps(5)


# --- policies ------------------------------------------------------------------------


def test_policy_none_is_the_plain_loop():
    w = weights(7)
    for sequence in (scanned, listed):
        text = str(jax.make_jaxpr(functools.partial(sequence, policy="none"))(w, X))
        assert "checkpoint" not in text
        assert "remat" not in text


@pytest.mark.parametrize(
    "policy", ["dots", policies.dots, jax.checkpoint_policies.dots_saveable]
)
def test_a_policy_keeps_more_between_the_passes(policy):
    w = weights(6)
    for sequence in (scanned, listed):
        loss = functools.partial(sequence, segments=3, policy=policy)
        # Products come once forward, and twice in the backward pass of each layer.
        count = operations(jax.grad(loss, (0, 1)), w, X, name="dot_general")
        assert count == 3 * 6
        assert operations(jax.grad(loss, (0, 1)), w, X, name="tanh") == 2 * 6
        close(jax.grad(loss)(w, X), jax.grad(plain)(w, X))


@pytest.mark.parametrize("sequence", [scanned, listed])
def test_a_policy_may_keep_all_but_what_it_names(sequence):
    def named(x, w):
        h = checkpoint_name(x @ w, "square root")
        return jnp.tanh(h * h)

    def loss(w, policy):
        if sequence is scanned:
            y = remat_sequence(named, X, stacked=w, segments=2, policy=policy)
        else:
            layers = [functools.partial(named, w=p) for p in w]
            y = remat_sequence(layers, X, segments=2, policy=policy)
        return jnp.sum(y**2)

    def activations(policy):
        report = residual_report(functools.partial(loss, policy=policy), weights(6))
        rows = [r for r in report.residuals if r.shape[-2:] == X.shape]
        return sum(r.nbytes for r in rows) / X.nbytes

    # The plain loop needs no inputs of segments.
    saved = activations("none") + 2 - activations(policies.save_all_but("square root"))
    assert saved >= 6


# --- linen ---------------------------------------------------------------------------


class Block(nn.Module):
    """Has all that a second pass could spoil."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(D)(x)
        h = nn.BatchNorm(use_running_average=False)(h)
        h = nn.Dropout(0.5, deterministic=False)(h)
        self.sow("intermediates", "mean", h.mean())
        return x + nn.tanh(h)


class Compact(nn.Module):
    run: object

    @nn.compact
    def __call__(self, x):
        return self.run([Block() for _ in range(3)], x)


class Setup(nn.Module):
    run: object

    def setup(self):
        self.blocks = [Block() for _ in range(3)]
        self.scale = self.param("scale", nn.initializers.ones, ())

    def __call__(self, x):
        return self.run([*self.blocks, lambda x: x * 2, self.blocks[0]], x)


@pytest.mark.parametrize(("model", "segments"), [(Compact, "sqrt"), (Setup, 2)])
def test_a_linen_model_is_the_same_with_its_names_masks_and_statistics(model, segments):
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    results = []
    for run in (in_a_loop, functools.partial(remat_sequence, segments=segments)):
        variables = jax.jit(model(run).init)(keys, X)

        def loss(params, run=run, variables=variables):
            y, state = model(run).apply(
                {**variables, "params": params},
                X,
                rngs={"dropout": jax.random.key(2)},
                mutable=["batch_stats", "intermediates"],
            )
            return jnp.mean(y**2), state

        params = variables["params"]
        (value, state), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        results.append((variables, value, state, grads))
        traced = str(jax.make_jaxpr(loss)(params))
        assert ("remat" in traced) == (run is not in_a_loop)
    (initial, *expected), (mine_initial, *mine) = results
    jax.tree.map(np.testing.assert_array_equal, mine_initial, initial)
    assert jax.tree.structure(mine) == jax.tree.structure(expected)
    jax.tree.map(close, mine, expected)


def test_bound_linen_modules_and_functions_of_their_parameters_work():
    dense = nn.Dense(D)
    variables = dense.init(jax.random.key(0), X)
    expected = in_a_loop([lambda x: dense.apply(variables, x)] * 4, X)
    for one in (dense.bind(variables), lambda x: dense.apply(variables, x)):
        close(remat_sequence([one] * 4, X, segments=2), expected)
        close(remat_sequence([one] * 4, X), expected)


def test_stacked_linen_parameters_are_scanned():
    dense = nn.Dense(D)
    keys = jax.random.split(jax.random.key(0), 7)
    stacked = jax.vmap(lambda key: dense.init(key, X))(keys)
    each = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(7)]
    expected = in_a_loop([functools.partial(dense.apply, v) for v in each], X)
    mine = remat_sequence(lambda x, v: dense.apply(v, x), X, stacked=stacked)
    close(mine, expected)


def test_a_linen_module_without_parameters_is_refused():
    with pytest.raises(ValueError, match=r"layers\[1\] is a linen module without"):
        remat_sequence([jnp.sin, nn.Dense(D)], X)


def test_a_function_that_hides_a_linen_module_is_told_what_to_do():
    class Hiding(nn.Module):
        @nn.compact
        def __call__(self, x):
            block = Block()
            return remat_sequence([lambda x: block(x)] * 4, x, segments=2)

    with pytest.raises(jax.errors.UnexpectedTracerError) as raised:
        Hiding().init({"params": jax.random.key(0), "dropout": jax.random.key(0)}, X)
    assert any("put the module itself" in note for note in raised.value.__notes__)


# --- nnx -----------------------------------------------------------------------------


class Module(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(D, D, rngs=rngs)
        self.norm = nnx.BatchNorm(D, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)  # one stream for all layers

    def __call__(self, x):
        return x + jnp.tanh(self.dropout(self.norm(self.dense(x))))


class Model(nnx.Module):
    def __init__(self, run, rngs):
        self.run = run
        self.blocks = nnx.List([Module(rngs) for _ in range(3)])

    def __call__(self, x):
        return self.run([*self.blocks, jnp.sin, self.blocks[0]], x)


@pytest.mark.parametrize("segments", ["sqrt", 2])
def test_an_nnx_model_is_the_same_with_its_masks_and_statistics(segments):
    results = []
    for run in (in_a_loop, functools.partial(remat_sequence, segments=segments)):
        model = Model(run, nnx.Rngs(0, dropout=1))
        step = nnx.jit(nnx.value_and_grad(lambda model: jnp.mean(model(X) ** 2)))
        values = [step(model) for _ in range(2)]  # the second with other masks
        counts = nnx.state(model, nnx.RngCount)
        results.append(
            jax.tree.leaves((values, nnx.state(model, nnx.BatchStat), counts))
        )
    expected, mine = results
    jax.tree.map(close, mine, expected)


def test_a_stacked_nnx_module_is_scanned():
    @nnx.vmap
    def stack(key):
        return nnx.Linear(D, D, rngs=nnx.Rngs(key))

    stacked = stack(jax.random.split(jax.random.key(0), 5))
    each = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(5)]
    mine = remat_sequence(lambda x, one: one(x), X, stacked=stacked, segments=2)
    close(mine, in_a_loop(each, X))


# --- errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "options", "error", "message"),
    [
        (layer, {}, TypeError, "layers=function; expected a list of layers"),
        ({"a": layer}, {}, TypeError, "layers=dict"),
        ([layer, 3], {}, TypeError, r"layers\[1\] is a int"),
        ([layer], {"segments": 0}, ValueError, "segments=0 is no number of segments"),
        ([layer], {"segments": 1.5}, ValueError, "segments=1.5"),
        ([layer], {"segments": True}, ValueError, "segments=True"),
        ([layer], {"segments": "log"}, ValueError, 'choose "sqrt" or a number'),
        ([layer], {"policy": None}, ValueError, "policy=None"),
        ([layer], {"stacked": jnp.ones((2, D, D))}, TypeError, "expected one function"),
        (layer, {"stacked": {"a": X, "b": X[1:]}}, ValueError, r"\['b'\]: 63"),
        (layer, {"stacked": {"a": X, "b": 1.0}}, ValueError, "a scalar"),
        (layer, {"stacked": {}}, ValueError, "there are none"),
    ],
)
def test_bad_arguments_are_refused(layers, options, error, message):
    with pytest.raises(error, match=message):
        remat_sequence(layers, X, **options)


def test_no_layers_return_the_input():
    assert remat_sequence([], X) is X
    np.testing.assert_array_equal(remat_sequence(layer, X, stacked=weights(0)), X)
