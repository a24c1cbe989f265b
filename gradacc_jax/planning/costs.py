"""What a program costs by its jaxpr: operations, and a roofline in seconds.

A compiler for an absent chip counts no operations, and counts the body of a loop once.
The jaxpr knows better: the length of every scan, and the bodies that a backward pass
computes again. What counts is what does not fuse away: matrix products, convolutions,
and what moves memory. Each takes the longest of its launch, its arithmetic at the
chip's peak and its traffic at the chip's bandwidth; a chip reaches neither peak, so the
sum is a lower bound that ranks programs, and no forecast.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

from jax.extend import core

from gradacc_jax.checkpointing.flops import work_of_operation
from gradacc_jax.planning.chips import LAUNCH_SECONDS, Chip

# Of the operations that are no products: those that read or write memory of their own.
_MOVES = {
    "argmax",
    "argmin",
    "cumsum",
    "dynamic_update_slice",
    "gather",
    "reduce_max",
    "reduce_sum",
    "scatter",
    "scatter-add",
    "scatter_add",
    "sort",
    "top_k",
}
# In place: an addition to a reference reads and writes what is added to.
_ADDS = {"addupdate", "swap"}


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a program costs.

    Attributes:
      flops: of its matrix products and convolutions, 2 for a multiplication and an
        addition.
      seconds: by the roofline.
      convolutions: how many it has.
      notes: what could not be counted.
    """

    flops: float = 0.0
    seconds: float = 0.0
    convolutions: int = 0
    notes: frozenset[str] = frozenset()

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.flops + other.flops,
            self.seconds + other.seconds,
            self.convolutions + other.convolutions,
            self.notes | other.notes,
        )

    def times(self, count: float) -> "Cost":
        """As often as a loop runs."""
        return Cost(
            self.flops * count, self.seconds * count, self.convolutions, self.notes
        )


def cost(jaxpr: Any, chip: Chip, num_devices: int = 1) -> Cost:
    """The cost of a closed jaxpr on one of ``num_devices`` chips that share it."""
    return _Walk(chip, num_devices).body(jaxpr.jaxpr)


class _Walk:
    def __init__(self, chip: Chip, num_devices: int):
        self.chip = chip
        self.share = 1 / num_devices
        self.launch = LAUNCH_SECONDS.get(chip.platform, LAUNCH_SECONDS["gpu"])

    def body(self, jaxpr: Any) -> Cost:
        return sum(map(self.equation, jaxpr.eqns), Cost())

    def inner(self, equation: Any) -> list[Cost]:
        return [self.body(one) for one in core.jaxprs_in_params(equation.params)]

    def equation(self, equation: Any) -> Cost:
        name = equation.primitive.name
        if name == "scan":
            return sum(self.inner(equation), Cost()).times(equation.params["length"])
        if name == "cond":
            return max(self.inner(equation), key=lambda c: (c.seconds, c.flops))
        if name == "while":
            note = "a loop whose length is not known is counted once"
            return sum(self.inner(equation), Cost(notes=frozenset([note])))
        if name == "shard_map":  # Its body is one device's already.
            return sum(_Walk(self.chip, 1).inner(equation), Cost())
        if name in ("pallas_call", "tpu_custom_call", "ffi_call", "custom_call"):
            note = f"{name} is not counted: no one knows what it does"
            return Cost(notes=frozenset([note]))
        if name == "dot_general":
            return self.work(equation, work_of_operation(equation).matrix)
        if name == "ragged_dot_general" or name == "ragged_dot":
            left, out = equation.invars[0].aval, equation.outvars[0].aval
            return self.work(equation, 2.0 * out.size * left.shape[-1])
        if name == "conv_general_dilated":
            return dataclasses.replace(
                self.work(equation, work_of_operation(equation).matrix), convolutions=1
            )
        if name in _MOVES or name in _ADDS:
            return self.work(equation, 0.0, twice=name in _ADDS)
        inner = self.inner(equation)
        # Of a custom derivative the rules are jaxprs too, once they are used up.
        return inner[0] if name.startswith("custom_") and inner else sum(inner, Cost())

    def work(self, equation: Any, flops: float, twice: bool = False) -> Cost:
        if twice:
            moved = 3 * _bytes(equation.invars[1:2])
        else:
            moved = _bytes(equation.invars) + _bytes(equation.outvars)
        dtype = equation.invars[0].aval.dtype
        rate = self.chip.flops_of(dtype) if flops else math.inf
        return Cost(
            flops * self.share,
            max(
                self.launch,
                flops * self.share / rate,
                moved * self.share / self.chip.bandwidth,
            ),
        )


def _bytes(values: Sequence[Any]) -> float:
    return sum(
        v.aval.size * v.aval.dtype.itemsize for v in values if hasattr(v.aval, "size")
    )


def traffic(num_bytes: float, chip: Chip) -> Cost:
    """Memory read and written by what fuses, such as an optimizer's update."""
    return Cost(seconds=num_bytes / chip.bandwidth)
