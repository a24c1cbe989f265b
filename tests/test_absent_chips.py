"""What the memory of the in-place engine is on chips that this machine does not have.

Programs are compiled for them and never run. Skipped where their compilers, which are
large, are not installed.
"""

import jax
import jax.numpy as jnp
import pytest

from gradacc_jax import references, value_and_grad
from tests import chips

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
