"""Does the installed compiler keep a second computation apart from the first?

A compiler may see that both compute the same, and merge them: all is kept, and nothing
is won. JAX puts barriers between them; versions of XLA for CPUs remove these early. So
a small program is compiled for the device in question before anything is planned, with
each engine, until one is found that holds.
"""

import concurrent.futures
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

# Large enough that a TPU does not keep all of it in its fast memory, which is not
# counted; nothing of it is run.
_LAYERS, _ROWS, _WIDTH = 4, 2**18, 128
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
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for shape in ((_ROWS, _WIDTH), (_WIDTH, 4 * _WIDTH))
    )

    # What it keeps is four times as wide as what it is given. Were it as wide,
    # compilers that fuse what is elementwise would leave little to win.
    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x @ w) @ w.T

    program = Program.of(jax.make_jaxpr(layer)(x, w))

    def temporaries(engine: Engine | None) -> int:
        def again(x: Any, w: Any) -> Any:
            return (
                layer(x, w) if engine is None else engine(program, frozenset())(x, w)[0]
            )

        def loss(w: Any, x: Any) -> Any:
            for i in range(_LAYERS):
                x = again(x, w * (1.0 + i))
            return jnp.sum(x * x)

        compiled = jax.jit(jax.grad(loss)).lower(w, x).compile()
        stats: Any = compiled.memory_analysis()
        return int(stats.temp_size_in_bytes)

    def first() -> str | None:
        plain = temporaries(None)
        # Where it holds about half is left; where not, nothing goes.
        held = (name for name in ENGINES if temporaries(ENGINES[name]) < 0.75 * plain)
        return next(held, None)

    # A thread of its own has none of the mesh and the settings that are the caller's.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(first).result()
