"""Memory of accumulation and rematerialisation on chips that are not here.

Programs are compiled for them and never run. Skipped where their compilers, which are
large, are not installed.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax
import pytest

from gradacc_jax import (
    accumulate,
    references,
    remat,
    remat_sequence,
    state_specs,
    train_step,
    value_and_grad,
)
from tests import chips
from tests.programs import collectives_in

pytestmark = pytest.mark.absent_chips

LAYERS = jax.ShapeDtypeStruct((8, 1448, 1448), jnp.float32)  # 64 MiB


def layered(w, x):
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)
    return jnp.mean(x**2)


def temporaries(sharding, k):
    batch = jax.ShapeDtypeStruct((256 * k, 1448), jnp.float32)
    f = jax.jit(value_and_grad(layered, num_microbatches=k))
    program = f.lower(*chips.on(sharding, (LAYERS, batch))).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_on_a_gpu_scanned_layers_hold_no_gradient_tree_beside_the_sums(monkeypatch):
    gpu = chips.absent_gpu()
    in_place = temporaries(gpu, 4)
    # Flat in the number of micro-batches.
    assert temporaries(gpu, 16) == pytest.approx(in_place, rel=0.01)
    monkeypatch.setattr(references, "serve", lambda *args: False)
    assert in_place <= 0.6 * temporaries(gpu, 4)


@pytest.mark.parametrize("chip", [chips.absent_gpu, chips.absent_tpu])
def test_rematerialised_layers_hold_what_their_policy_says(chip):
    sharding = chip()
    # Large enough not to fit into a TPU's fast memory, where it counts as nothing.
    width, inner, tokens, num = 512, 2048, 4096, 6
    params = {
        "a": jax.ShapeDtypeStruct((num, width, inner), jnp.float32),
        "b": jax.ShapeDtypeStruct((num, inner, width), jnp.float32),
    }
    batch = jax.ShapeDtypeStruct((tokens, width), jnp.float32)

    def temporaries(policy):
        @remat(policy=policy)
        def layer(x, p):
            return x + jnp.sin(jnp.tanh(x @ p["a"])) @ p["b"]

        def loss(params, x):
            x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params)
            return jnp.mean(x**2)

        step = jax.jit(jax.grad(loss))
        program = step.lower(*chips.on(sharding, (params, batch))).compile()
        return program.memory_analysis().temp_size_in_bytes

    none, dots, full = map(temporaries, ("none", "dots", "full"))
    hidden = num * tokens * inner * 4
    # Everything: two hidden layers at least. Products: one. Nothing: none, but inputs.
    assert none - full > 1.5 * hidden
    assert none - dots > 0.5 * hidden
    assert full < dots


def test_on_a_gpu_segments_hold_less_than_single_layers():
    gpu = chips.absent_gpu()
    params = jax.ShapeDtypeStruct((256, 64, 64), jnp.float32)
    batch = jax.ShapeDtypeStruct((512, 64), jnp.float32)

    def temporaries(segments):
        def loss(w, x):
            x = remat_sequence(
                lambda x, w: jnp.tanh(x @ w), x, stacked=w, segments=segments
            )
            return jnp.mean(x**2)

        step = jax.jit(jax.grad(loss))
        program = step.lower(*chips.on(gpu, (params, batch))).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporaries("sqrt") < 0.4 * temporaries(256)


@pytest.mark.parametrize("name", ["h200", "v5e"])
def test_four_chips_reduce_once_a_window_and_a_silent_micro_step_nothing(name):
    mesh = chips.absent_mesh(name, 4)

    def placed(tree, specs):
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
            ),
            tree,
            specs,
        )

    tx = accumulate(optax.sgd(0.1), 4, axis_name="data")
    shapes = jax.ShapeDtypeStruct((8, 128, 128), jnp.float32)
    specs = state_specs(tx, shapes)
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
    params = placed(shapes, P())
    state = placed(jax.eval_shape(init, shapes), specs)
    batch = placed(jax.ShapeDtypeStruct((16, 128), jnp.float32), P("data"))
    step = train_step(layered, tx, mesh=mesh, axis_name="data")
    silent, emitting = (
        text_of(step.lower(params, state, batch, emit=emit)) for emit in (False, True)
    )
    assert collectives_in(silent) == []
    assert collectives_in(emitting, 128) == ["all-reduce"]
    whole = placed(jax.ShapeDtypeStruct((64, 128), jnp.float32), P("data"))
    step = train_step(
        layered, optax.sgd(0.1), num_microbatches=4, mesh=mesh, axis_name="data"
    )
    in_one_call = text_of(step.lower(params, (optax.EmptyState(),) * 2, whole))
    assert collectives_in(in_one_call, 128) == ["all-reduce"]


def text_of(lowered):
    return lowered.compile().as_text()
