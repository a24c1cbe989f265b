"""Does the installed compiler keep a second computation apart from the first?

A compiler may see that both compute the same, and merge them: all is kept, and nothing
is won. JAX puts barriers between them; versions of XLA for CPUs remove these early. So
a small program is compiled for the device in question before anything is planned, with
each engine, until one is found that holds.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from gradacc_jax.checkpointing.budget.apply import (
    Engine,
    barred,
    checkpointed,
    conditional,
)
from gradacc_jax.checkpointing.budget.programs import Program

_LAYERS, _SIZE = 6, 128
ENGINES: dict[str, Engine] = {
    "jax.checkpoint": checkpointed,
    "barrier": barred,
    "branch": conditional,
}


@functools.cache
def engine_for(sharding: Any) -> str | None:
    """The name of an engine whose recomputation stays in place.

    Args:
      sharding: of the arguments; None for the default device.

    Returns:
      The first of ``ENGINES`` that holds, by its name, or None.
    """
    x = jax.ShapeDtypeStruct((_SIZE, _SIZE), jnp.float32, sharding=sharding)

    def layer(x: Any, w: Any) -> Any:
        return jnp.sin(jnp.tanh(jnp.sin(x @ w)))

    program = Program.of(jax.make_jaxpr(layer)(x, x))

    def temporaries(engine: Engine | None) -> int:
        def again(x: Any, w: Any) -> Any:
            return (
                layer(x, w) if engine is None else engine(program, frozenset())(x, w)[0]
            )

        def loss(w: Any) -> Any:
            y = w
            for i in range(_LAYERS):
                y = again(y, w * (1.0 + i))
            return jnp.sum(y * y)

        compiled = jax.jit(jax.grad(loss)).lower(x).compile()
        stats: Any = compiled.memory_analysis()
        return int(stats.temp_size_in_bytes)

    plain = temporaries(None)
    for name, engine in ENGINES.items():
        # A layer keeps three arrays besides its inputs.
        if temporaries(engine) <= plain - _LAYERS * x.size * x.dtype.itemsize:
            return name
    return None
