"""Gradient accumulation and rematerialisation for JAX."""

from gradacc_jax import policies
from gradacc_jax.accumulation import (
    AccumulateState,
    AccumulateTransformation,
    SkipCounts,
    accumulate,
    accumulation_metrics,
    apply_gradients,
    for_num_devices,
    from_multi_steps_state,
    has_updated,
    init_on_mesh,
    process,
    raise_if_skipping,
    restored_state,
    saveable_state,
    state_shardings,
    state_specs,
)
from gradacc_jax.averaging import ParameterEmaState, parameter_ema
from gradacc_jax.checkpointing.budget import (
    RematPoint,
    RematReport,
    RematSegment,
    remat_to_fit,
)
from gradacc_jax.checkpointing.modules import remat_modules
from gradacc_jax.checkpointing.remat import remat
from gradacc_jax.checkpointing.residuals import (
    Residual,
    ResidualReport,
    residual_report,
)
from gradacc_jax.checkpointing.sequence import remat_sequence
from gradacc_jax.contrastive import chunked_encode
from gradacc_jax.equivalence import (
    Difference,
    EquivalenceReport,
    assert_equivalence,
    check_equivalence,
)
from gradacc_jax.microbatching import grad, value_and_grad
from gradacc_jax.monitoring import StepMetrics
from gradacc_jax.planning.chips import Chip, chips
from gradacc_jax.planning.compile import MemoryEstimate, estimate_memory
from gradacc_jax.planning.public import plan, plan_step
from gradacc_jax.planning.report import Candidate, Plan
from gradacc_jax.statistics import rescale_momentum
from gradacc_jax.training import train_step

__version__ = "0.1.0"

__all__ = [
    "AccumulateState",
    "AccumulateTransformation",
    "Candidate",
    "Chip",
    "Difference",
    "EquivalenceReport",
    "MemoryEstimate",
    "ParameterEmaState",
    "Plan",
    "RematPoint",
    "RematReport",
    "RematSegment",
    "Residual",
    "ResidualReport",
    "SkipCounts",
    "StepMetrics",
    "accumulate",
    "accumulation_metrics",
    "apply_gradients",
    "assert_equivalence",
    "check_equivalence",
    "chips",
    "chunked_encode",
    "estimate_memory",
    "for_num_devices",
    "from_multi_steps_state",
    "grad",
    "has_updated",
    "init_on_mesh",
    "parameter_ema",
    "plan",
    "plan_step",
    "policies",
    "process",
    "raise_if_skipping",
    "remat",
    "remat_modules",
    "remat_sequence",
    "remat_to_fit",
    "rescale_momentum",
    "residual_report",
    "restored_state",
    "saveable_state",
    "state_shardings",
    "state_specs",
    "train_step",
    "value_and_grad",
]
