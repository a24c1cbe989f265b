"""`gradacc train --verify`: is it the same as training on full batches?

The same steps are made again, from the same parameters and with the same optimizer, but
without accumulation: each on all micro-batches of its window at once, in one pass.

The two can differ by rounding only. But training amplifies rounding: after some tens of
steps two runs that began one rounding apart have little in common but their loss. So a
third run is made, on full batches too, whose first parameters are off by one rounding
each. How far it strays from the second is the yardstick. In the beginning it is short,
and there wrong accumulation shows.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradacc_jax.cli.devices import Placement
from gradacc_jax.cli.settings import Settings
from gradacc_jax.cli.text import Corpus

# What a loss or a parameter may be off by before anything was amplified. Weighing
# unequal micro-batches equally costs 3e-3 within ten steps: far above this in float32;
# in bfloat16 it takes some more steps to tell it from rounding.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-3}
YARDSTICKS = 10

PyTree = Any


def verify_against_full_batch(
    full_step: jax.stages.Compiled,
    optimizer: optax.GradientTransformation,
    settings: Settings,
    placement: Placement,
    corpus: Corpus,
    params: PyTree,
    losses: Sequence[float],
) -> bool:
    """Trains on full batches and prints how far from that accumulation led.

    Args:
        full_step: one optimizer step on a full batch.
        optimizer: what `full_step` was made with.
        settings: those of the run.
        placement: that of the run.
        corpus: its text.
        params: the parameters that it ended with.
        losses: its loss at every step.

    Returns:
        Whether the losses of all steps, and the parameters at the end, are as close to
        those of full batches as rounding lets them be.
    """
    dtype = "bfloat16" if settings.bf16 else "float32"
    tolerance = TOLERANCE[dtype]
    full = placement.params(settings)
    nudged = _nudge(full, float(jnp.finfo(dtype).eps))
    full_state, nudged_state = (placement.state(optimizer, p) for p in (full, nudged))

    equal, difference, yardstick = True, 0.0, 0.0
    for step, loss in enumerate(losses):
        batch = placement.put(corpus.global_batch(settings, step))
        full, full_state, metrics = full_step(full, full_state, batch)
        nudged, nudged_state, others = full_step(nudged, nudged_state, batch)
        expected = float(metrics.loss)
        yardstick = max(yardstick, abs(float(others.loss) - expected))
        difference = max(difference, abs(loss - expected))
        # A loss that is nan is not equal.
        equal &= abs(loss - expected) <= tolerance + YARDSTICKS * yardstick

    params_difference = _largest_difference(params, full)
    params_yardstick = _largest_difference(nudged, full)
    equal &= params_difference <= tolerance + YARDSTICKS * params_yardstick
    print(
        f"verify: {'equal to' if equal else 'DIFFERS FROM'} {len(losses)} steps on "
        f"full batches. Largest difference of losses {difference:.1e}, of parameters "
        f"{params_difference:.1e}\n"
        f"  begun one {dtype} rounding off, full batches differ from themselves by "
        f"{yardstick:.1e} and {params_yardstick:.1e}\n"
        f"  tolerance, at every step: {YARDSTICKS} times that so far, plus "
        f"{tolerance:.0e}"
    )
    return equal


def _nudge(params: PyTree, eps: float) -> PyTree:
    """Moves every number by one rounding, up or down."""
    rng = np.random.default_rng(0)

    def nudge(leaf: jax.Array) -> jax.Array:
        factors = 1 + eps * rng.choice([-1.0, 1.0], leaf.shape)
        return leaf * factors.astype(leaf.dtype)

    where = jax.tree.map(lambda leaf: leaf.sharding, params)
    nudged: PyTree = jax.jit(
        lambda params: jax.tree.map(nudge, params), out_shardings=where
    )(params)
    return nudged


def _largest_difference(ours: PyTree, theirs: PyTree) -> float:
    @jax.jit
    def largest(ours: PyTree, theirs: PyTree) -> jax.Array:
        differences = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), ours, theirs)
        return jnp.max(jnp.stack(jax.tree.leaves(differences)))

    return float(largest(ours, theirs))
