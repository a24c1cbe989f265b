"""What it costs to compute something again, in seconds: a roofline.

An operation takes as long as its arithmetic, at the rate of the unit that does it, or
as long as its arrays take to be moved, whichever is longer. Elementwise operations are
fused into their neighbours and move nothing of their own. The figures are of the order
of magnitude that a chip's data sheet says; only their ratios matter, since they decide
*what* is computed again, and the compiled program's bytes decide *how much*.
"""

import dataclasses
import math
from typing import Any

from jax.extend import core

from gradacc_jax.checkpointing.budget.programs import MOVES, Operation, Program
from gradacc_jax.checkpointing.policies import is_decision


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a chip does in a second.

    Attributes:
      matrix: floating-point operations of matrix products and convolutions.
      elementwise: of all others.
      bandwidth: bytes read or written.
    """

    matrix: float
    elementwise: float
    bandwidth: float

    def seconds(self, program: Program, i: int) -> float:
        """What operation ``i`` of a program takes."""
        operation, work = program.operations[i], program.work[i]
        computing = work.matrix / self.matrix + work.elementwise / self.elementwise
        if is_fused(operation):
            return computing
        moved = sum(program.nbytes[v] for v in {*operation.values, *operation.outputs})
        if list(core.jaxprs_in_params(operation.eqn.params)):
            return computing
        return max(computing, moved / self.bandwidth)


# By the word in the name that JAX has for a device, the first that fits. float32 for
# CPUs and GPUs, whose matrix units are for narrower types; bfloat16 for TPUs.
_RATES = {
    "cpu": Rates(5e10, 5e10, 2e10),
    "tpu v5 lite": Rates(197e12, 6e12, 819e9),
    "tpu v6": Rates(918e12, 14e12, 1640e9),
    "tpu v5": Rates(459e12, 11e12, 2765e9),
    "tpu": Rates(275e12, 8e12, 1228e9),
    "h200": Rates(400e12, 67e12, 4800e9),
    "h100": Rates(400e12, 67e12, 3350e9),
    "a100": Rates(156e12, 19.5e12, 1555e9),
    "4090": Rates(82e12, 82e12, 1008e9),
}
_UNKNOWN = Rates(100e12, 25e12, 1000e9)


def rates_of(device: Any) -> Rates:
    """The rates of a device, by its kind."""
    kind = f"{device.platform} {device.device_kind}".lower()
    return next((rates for name, rates in _RATES.items() if name in kind), _UNKNOWN)


# Results that are sums over, or picks out of, other places than their own.
_NOT_FUSED = ("arg", "cum", "dot", "conv_general", "gather", "reduce", "scatter")


def is_fused(operation: Operation) -> bool:
    """Whether an operation goes element by element, so that XLA fuses it."""
    name = operation.name
    if name in MOVES or name in ("reduce_precision", "optimization_barrier"):
        return True
    if name.startswith(_NOT_FUSED) or list(core.jaxprs_in_params(operation.eqn.params)):
        return False
    shape = operation.eqn.outvars[0].aval.shape if operation.eqn.outvars else ()
    return all(
        getattr(atom.aval, "shape", ()) in ((), shape) for atom in operation.eqn.invars
    )


def again(program: Program, i: int, rates: Rates) -> float:
    """The cost of running an operation a second time; infinite for decisions.

    Args:
      program: the program.
      i: the operation's place in it.
      rates: the chip's.
    """
    operation = program.operations[i]
    avals = tuple(atom.aval for atom in operation.eqn.invars)
    if is_decision(operation.eqn.primitive, avals):
        return math.inf
    return rates.seconds(program, i)
