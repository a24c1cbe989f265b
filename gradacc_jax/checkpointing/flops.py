"""Floating-point operations of a traced program, counted before anything compiles.

XLA counts too, but counts a loop's body once, however often it turns, and on a chip
that is not here it does not count at all. The traced program has all that is needed:
shapes, and how often its loops turn. What nothing depends on is not counted, since the
compiler throws it away.

The counts are those of the mathematics: a product of (m, k) and (k, n) matrices is
2·m·k·n operations, a sum of n numbers n, an elementwise function one per element,
whatever the chip makes of it. Moving numbers (reshapes, slices, gathers) is none.
"""

from collections.abc import Callable, Iterator
import math
from typing import Any, NamedTuple

import jax
from jax.extend import core

PyTree = Any

# The same numbers elsewhere, or numbers that are known beforehand.
_MOVES = {
    "all_gather",
    "all_to_all",
    "bitcast_convert_type",
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "copy_p",
    "device_put",
    "dynamic_slice",
    "dynamic_update_slice",
    "expand_dims",
    "gather",
    "iota",
    "mesh_cast",
    "name",
    "optimization_barrier",
    "pad",
    "ppermute",
    "pvary",
    "random_unwrap",
    "random_wrap",
    "reduce_precision",
    "reshape",
    "reshard",
    "rev",
    "scatter",
    "sharding_constraint",
    "slice",
    "split",
    "squeeze",
    "stop_gradient",
    "transpose",
    "unstack",
}
_RANDOM_BITS = {"random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32"}
# Threefry makes two words in twenty rounds of five operations.
_PER_RANDOM_WORD = 50


class Work(NamedTuple):
    """Operations of a program.

    Attributes:
      matrix: of matrix products and convolutions.
      elementwise: of all others.
    """

    matrix: float
    elementwise: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.matrix + self.elementwise

    def plus(self, other: "Work") -> "Work":
        """The work of both."""
        return Work(self.matrix + other.matrix, self.elementwise + other.elementwise)

    def times(self, number: float) -> "Work":
        """The work, done so often."""
        return Work(self.matrix * number, self.elementwise * number)


def flops_of(fun: Callable[..., PyTree], *args: PyTree) -> Work:
    """The operations of ``fun``, by tracing it.

    Args:
      fun: a function of arrays, such as ``jax.value_and_grad(loss)``.
      *args: its arguments, arrays or ``jax.ShapeDtypeStruct``.

    Returns:
      The :class:`Work`. A loop of unknown length (``while``) counts as one turn, a
      conditional as its most expensive branch, an operation that is not known as one
      per element of its results.

    Examples:
      >>> import jax
      >>> from gradacc_jax.checkpointing.flops import flops_of
      >>> a = jax.ShapeDtypeStruct((3, 4), "float32")
      >>> b = jax.ShapeDtypeStruct((4, 5), "float32")
      >>> flops_of(lambda a, b: abs(a @ b).sum(), a, b)
      Work(matrix=120, elementwise=30)
    """
    return work_of(jax.make_jaxpr(fun)(*args))


def work_of(jaxpr: Any) -> Work:
    """The operations of a traced program on which its results or effects depend."""
    total = Work(0, 0)
    for eqn in live(jaxpr):
        total = total.plus(work_of_operation(eqn))
    return total


def work_of_operation(eqn: Any) -> Work:
    """The operations of one equation of a traced program."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        inner = math.prod(shape[i] for i in contracted)
        return Work(2 * _size(eqn.outvars[0]) * inner, 0)
    if name == "conv_general_dilated":
        return Work(_convolution(eqn), 0)
    if name == "cond":
        branches = [work_of(branch) for branch in params["branches"]]
        return max(branches, key=lambda work: work.total)
    if name == "while":
        return work_of(params["body_jaxpr"]).plus(work_of(params["cond_jaxpr"]))
    if name not in _WITH_SMALL_FUNCTIONS:
        inside = Work(0, 0)
        bodies = list(core.jaxprs_in_params(params))
        for body in bodies:
            inside = inside.plus(work_of(body))
        if bodies:
            return inside.times(params["length"] if name == "scan" else 1)
    return Work(0, _elementwise(eqn))


# Whose jaxprs say how to combine two numbers.
_WITH_SMALL_FUNCTIONS = {
    "reduce",
    "reduce_window",
    "scatter",
    "scatter-add",
    "scatter-mul",
    "scatter-min",
    "scatter-max",
    "scatter_add",
    "scatter_mul",
    "scatter_min",
    "scatter_max",
    "select_and_scatter",
}


def _convolution(eqn: Any) -> float:
    """Each result is a sum over a window and the input channels of its group."""
    dims = eqn.params["dimension_numbers"]
    kernel = eqn.invars[1].aval.shape
    terms = math.prod(kernel) / max(1, kernel[dims.rhs_spec[0]])
    # Of a dilated input all but one in so many are zeros, which no one multiplies.
    holes = math.prod(eqn.params["lhs_dilation"])
    return 2 * _size(eqn.outvars[0]) * terms / holes


def _elementwise(eqn: Any) -> float:
    name = eqn.primitive.name
    made = sum(_size(v) for v in eqn.outvars)
    if name in _MOVES:
        return 0
    if name in _RANDOM_BITS:
        return _PER_RANDOM_WORD * made
    if name.startswith(("scatter", "select_and_scatter")):
        return _size(eqn.invars[-1])
    read = _size(eqn.invars[0]) if eqn.invars else 0
    if name in ("sort", "top_k", "approx_top_k"):
        return read * max(1, math.log2(max(2, read)))
    if name == "reduce_window_sum" or name.startswith("reduce_window"):
        return made * math.prod(eqn.params.get("window_dimensions", (1,)))
    if name.startswith(("reduce", "arg", "cum", "psum", "pmax", "pmin")):
        return max(read, made)
    return made


def live(jaxpr: Any) -> Iterator[Any]:
    """The operations on which a traced program's results or effects depend.

    Args:
      jaxpr: the program, with or without its constants.

    Yields:
      Its equations, the last one first.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    needed = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            needed |= {v for v in eqn.invars if not isinstance(v, core.Literal)}
            yield eqn


def _size(atom: Any) -> int:
    shape = getattr(atom.aval, "shape", ())
    return math.prod(shape) if all(isinstance(n, int) for n in shape) else 1
