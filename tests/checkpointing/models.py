"""One small residual block in three forms: a function, a linen and an nnx module."""

import functools

from flax import linen as nn
from flax import nnx
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

WIDTH, BATCH, LAYERS = 8, 4, 2


def function_block(params, x, key, *, rate=0.5, activation="tanh"):
    """Returns the new x, and the mask of its dropout as what is sown elsewhere."""
    h = checkpoint_name(getattr(jnp, activation)(x @ params["up"]), "hidden")
    mask = jax.random.bernoulli(key, 1 - rate, h.shape)
    h = jnp.where(mask, h / (1 - rate), 0).astype(x.dtype)
    return x + h @ params["down"], mask


class LinenBlock(nn.Module):
    """Parameters, batch statistics, a mask that is sown, keyword arguments."""

    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, train=False, *, activation="relu"):
        dense = functools.partial(
            nn.Dense, WIDTH, dtype=self.dtype, param_dtype=self.dtype
        )
        h = checkpoint_name(getattr(nn, activation)(dense()(x)), "hidden")
        norm = nn.BatchNorm(
            use_running_average=not train, dtype=self.dtype, param_dtype=self.dtype
        )
        h = nn.Dropout(0.5, deterministic=not train)(norm(h))
        self.sow("intermediates", "mask", h != 0)
        return x + dense()(h)


class NnxBlock(nnx.Module):
    """The same, as an object."""

    def __init__(self, rngs, dtype=jnp.float32):
        types = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.up = nnx.Linear(WIDTH, WIDTH, **types)
        self.norm = nnx.BatchNorm(WIDTH, **types)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, **types)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, *, activation="relu"):
        h = checkpoint_name(getattr(nnx, activation)(self.up(x)), "hidden")
        h = self.dropout(self.norm(h))
        self.calls[...] += 1
        return x + self.down(h)

    def twice(self, x, scale=1.0):
        return self(self(x)) * jnp.asarray(scale, x.dtype)


class LinenModel(nn.Module):
    """Blocks that name themselves, one after the other or in a scan."""

    block: type = LinenBlock
    dtype: jnp.dtype = jnp.float32
    scan: bool = False

    @nn.compact
    def __call__(self, x, train):
        if not self.scan:
            for _ in range(LAYERS):
                x = self.block(self.dtype)(x, train=train, activation="gelu")
            return x

        def body(block, x, _):
            return block(x, train=train, activation="gelu"), None

        scanned = nn.scan(
            body,
            variable_axes={"params": 0, "batch_stats": 0, "intermediates": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
        )
        return scanned(self.block(self.dtype), x, None)[0]


class NnxModel(nnx.Module):
    """Blocks that share one stream of keys for dropout."""

    def __init__(self, rngs, dtype=jnp.float32, block=NnxBlock):
        self.blocks = nnx.List([block(rngs, dtype) for _ in range(LAYERS)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x, activation="gelu")
        return x


def inputs(dtype=jnp.float32):
    return jax.random.normal(jax.random.key(7), (BATCH, WIDTH), dtype)


def function_program(wrap, dtype, scan):
    """``loss(params) -> (loss, state)`` and parameters; the block is wrapped."""
    block = wrap(function_block)
    shape = (LAYERS, WIDTH, WIDTH)
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        name: jax.random.normal(key, shape, dtype) / 4
        for name, key in zip(("up", "down"), keys)
    }
    layer_keys = jax.random.split(jax.random.key(1), LAYERS)

    def loss(params):
        def body(x, layer):
            params, key = layer
            return block(params, x, key, activation="sin")

        x, masks = inputs(dtype), []
        if scan:
            x, masks = lax.scan(body, x, (params, layer_keys))
        else:
            for i in range(LAYERS):
                layer = {name: p[i] for name, p in params.items()}
                x, mask = body(x, (layer, layer_keys[i]))
                masks.append(mask)
        return mean_square(x), masks

    return loss, params


def linen_program(wrap, dtype, scan):
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    model = LinenModel(wrap(LinenBlock), dtype, scan)
    variables = model.init(rngs, inputs(dtype), False)

    def loss(params):
        out, state = model.apply(
            {**variables, "params": params},
            inputs(dtype),
            True,
            rngs={"dropout": jax.random.key(2)},
            mutable=["batch_stats", "intermediates"],
        )
        return mean_square(out), state

    return loss, variables["params"]


def nnx_program(wrap, dtype, scan):
    model = NnxModel(nnx.Rngs(0), dtype, wrap(NnxBlock))
    if scan:
        return scanned_nnx_program(model, dtype)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        model = nnx.merge(graph, params, rest, copy=True)
        value = mean_square(model(inputs(dtype)))
        return value, plain(nnx.state(model, nnx.Not(nnx.Param)))

    return loss, params


def scanned_nnx_program(model, dtype):
    # Blocks of one scan have keys of their own.
    states = []
    for i, block in enumerate(model.blocks):
        block.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(i))
        graph, params, rest = nnx.split(block, nnx.Param, ...)
        states.append((params, rest))
    params, rest = jax.tree.map(lambda *xs: jnp.stack(xs), *states)

    def loss(params):
        def body(x, state):
            block = nnx.merge(graph, *state, copy=True)
            x = block(x, activation="gelu")
            return x, plain(nnx.state(block, nnx.Not(nnx.Param)))

        x, state = lax.scan(body, inputs(dtype), (params, rest))
        return mean_square(x), state

    return loss, params


PROGRAMS = {
    "function": function_program,
    "linen": linen_program,
    "nnx": nnx_program,
}


def mean_square(x):
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def plain(state):
    """A state of nnx as a dict of arrays, keys as the integers they hold."""

    def leaf(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key_data(x)
        return x

    return jax.tree.map(leaf, nnx.to_pure_dict(state))


def quick(fun, *args):
    """Runs ``fun`` compiled, without time spent on making it fast; traced, as it is."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
        return fun(*args)
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(fun, compiler_options=options)(*args)


def residuals(fun, *args):
    """The shapes of what the forward pass keeps, arguments included."""
    kept = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args)
    return sorted((x.shape, x.dtype.name) for x in jax.tree.leaves(kept))


def residual_bytes(fun, *args):
    kept = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args)
    return sum(
        x.size * x.dtype.itemsize
        for x in jax.tree.leaves(kept)
        if not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    )


# The linen model at work.
with jax.default_prng_impl("unsafe_rbg"):  # as in the tests
    RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        np.testing.assert_array_equal(x, y)


def outputs(model, variables, **options):
    def apply(variables):
        return model.apply(
            variables,
            inputs(),
            True,
            rngs={"dropout": jax.random.key(2)},
            mutable=["batch_stats", "intermediates"],
            **options,
        )

    return quick(apply, variables)


def init(model):
    return quick(lambda: model.init(RNGS, inputs(), False))
