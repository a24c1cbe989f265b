"""`gradacc train --verify`: is it the same as training on the full batch?

The same steps are made again, from the same parameters and with the same optimizer, but
without accumulation: each on all micro-batches of its window at once, in one pass.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from gradacc_jax.cli import model
from gradacc_jax.cli.settings import Settings
from gradacc_jax.cli.text import Corpus

# Rounding alone leaves 1e-6 in float32 and 5e-3 in bfloat16 after 60 steps of AdamW;
# weighing micro-batches wrongly, more than 1e-3 and 1e-2 within ten.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}

PyTree = Any


def verify_against_full_batch(
    full_step: jax.stages.Compiled,
    optimizer: optax.GradientTransformation,
    settings: Settings,
    corpus: Corpus,
    params: PyTree,
    losses: Sequence[float],
) -> bool:
    """Trains on full batches and prints how far from that accumulation ended.

    Args:
        full_step: one optimizer step on a full batch.
        optimizer: what `full_step` was made with.
        settings: those of the run.
        corpus: its text.
        params: the parameters that it ended with.
        losses: its loss at every step.

    Returns:
        Whether all differences are within the tolerance.
    """
    _, full_params = model.create(settings)
    state = jax.jit(optimizer.init)(full_params)
    loss_difference = 0.0
    for step, loss in enumerate(losses):
        batch = corpus.global_batch(settings, step)
        full_params, state, metrics = full_step(full_params, state, batch)
        difference = abs(float(metrics.loss) - loss)
        # np.maximum hands a nan on.
        loss_difference = float(np.maximum(loss_difference, difference))
    param_difference = max(
        float(np.max(np.abs(np.asarray(a) - np.asarray(b))))
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(full_params))
    )
    dtype = "bfloat16" if settings.bf16 else "float32"
    tolerance = TOLERANCE[dtype]
    equal = loss_difference <= tolerance and param_difference <= tolerance
    print(
        f"verify: {'equal to' if equal else 'DIFFERS FROM'} {len(losses)} steps on "
        f"full batches; largest difference of losses {loss_difference:.1e}, of "
        f"parameters {param_difference:.1e} (tolerance in {dtype}: {tolerance:.0e})"
    )
    return equal
