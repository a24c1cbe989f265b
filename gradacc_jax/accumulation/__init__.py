"""Accumulation across calls: one micro-step a call, gradients kept in optimizer state.

The rooms, from the bottom: ``checks`` (what is refused), ``state`` (the accumulator's
state and what can be asked of it), ``silence`` (updates that change nothing),
``micro_step`` (what an update does), ``transformation`` (``accumulate``),
``application`` (``apply_gradients``: a micro-step at the least cost), ``placement``
(where a state's arrays are, on many devices).
"""

from gradacc_jax.accumulation.application import apply_gradients
from gradacc_jax.accumulation.placement import (
    for_num_devices,
    init_on_mesh,
    restored_state,
    saveable_state,
    state_shardings,
    state_specs,
)
from gradacc_jax.accumulation.state import (
    AccumulateState,
    SkipCounts,
    accumulation_metrics,
    from_multi_steps_state,
    has_updated,
    raise_if_skipping,
)
from gradacc_jax.accumulation.transformation import (
    AccumulateTransformation,
    accumulate,
    process,
)

__all__ = [
    "AccumulateState",
    "AccumulateTransformation",
    "SkipCounts",
    "accumulate",
    "accumulation_metrics",
    "apply_gradients",
    "for_num_devices",
    "from_multi_steps_state",
    "has_updated",
    "init_on_mesh",
    "process",
    "raise_if_skipping",
    "restored_state",
    "saveable_state",
    "state_shardings",
    "state_specs",
]
