"""A region: a function of arrays whose inside is computed again in the backward pass.

All that :mod:`gradacc_jax.checkpointing` rematerialises, functions, linen and nnx
modules and segments of sequences, becomes such a function in the end. It is traced once
here, so that what would otherwise go wrong in silence can be said, and then handed to
``jax.checkpoint``.
"""

from collections.abc import Callable, Collection, Sequence
import re
from typing import Any
import warnings

import jax
from jax.extend import core
import numpy as np

from gradacc_jax.checkpointing import withholding
from gradacc_jax.checkpointing.policies import Policy, near, none
from gradacc_jax.checkpointing.withholding import ClosedJaxpr

PyTree = Any


def region(
    fun: Callable[..., PyTree], policy: Policy, *, prevent_cse: bool, where: str
) -> Callable[..., PyTree]:
    """``fun``, with its inside kept or computed again as the policy says.

    Args:
      fun: takes pytrees and returns a pytree. Arrays among the leaves are traced; all
        other leaves go in and out as they are.
      policy: what to keep.
      prevent_cse: as for ``jax.checkpoint``.
      where: what warnings call it.

    Returns:
      A function of the same arguments with the same results.
    """
    if policy == none:
        return fun

    def run(*args: PyTree) -> PyTree:
        given = Split(args, is_array)
        leaves = given.arrays
        results: list[Split] = []

        def flat(*leaves: Any) -> list[Any]:
            results.append(Split(fun(*given.joined(leaves)), _is_jax_array))
            return results[-1].arrays

        closed = jax.make_jaxpr(flat)(*leaves)
        plain = core.jaxpr_as_fun(closed)
        here = _differentiated([*leaves, *closed.consts])
        seen = _names(closed, plain, leaves, policy)
        _warn_of_names(policy, seen, where)
        _warn_of_prints(closed, where)
        body, decide = plain, policy
        if any(policy.withholds(name) for name in seen):
            body = withholding.marked(closed, policy)
            decide = withholding.Withholding(policy)  # type: ignore[assignment]
        again = jax.checkpoint(
            body,
            policy=decide,
            prevent_cse=prevent_cse or (here and _overridden(where)),
        )
        if here:
            _warn_of_a_whole_loss(plain, again, leaves, closed, where)
        return results[-1].joined(_forwarded(closed, leaves, again(*leaves)))

    return run


def is_array(x: Any) -> bool:
    """Whether an argument is traced: an array of numbers, truth values or keys."""
    if isinstance(x, np.ndarray):
        return x.dtype.kind not in "OSUMm"
    return isinstance(x, jax.Array)


def _is_jax_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


def residual_bytes(fun: Callable[..., Any], *args: Any) -> int:
    """The bytes that the forward pass of ``fun`` keeps, arguments it needs included."""
    kept = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args)
    return num_bytes(jax.tree.leaves(kept))


def num_bytes(arrays: Sequence[Any]) -> int:
    """The bytes of arrays, or of their shapes. Keys count as the integers they hold."""
    return sum(
        x.size * getattr(x.dtype, "itemsize", 0)
        for x in arrays
        if hasattr(x, "dtype") and hasattr(x, "size")
    )


class Split:
    """A pytree in two: its arrays, and all the rest."""

    def __init__(self, pytree: PyTree, is_array: Callable[[Any], bool]):
        self.tree: Any
        leaves, self.tree = jax.tree.flatten(pytree)
        self.traced = [is_array(x) for x in leaves]
        self.arrays = [x for x, t in zip(leaves, self.traced) if t]
        self.rest = [None if t else x for x, t in zip(leaves, self.traced)]

    def joined(self, arrays: Sequence[Any]) -> PyTree:
        """The pytree with these arrays in it."""
        left = iter(arrays)
        return self.tree.unflatten(
            [next(left) if t else x for x, t in zip(self.rest, self.traced)]
        )


def _forwarded(
    closed: ClosedJaxpr, leaves: Sequence[Any], results: Sequence[Any]
) -> list[Any]:
    """The results, with arguments that came back unchanged as the arguments they are.

    Modules give all their variables back. They need not go through the region.
    """
    given = dict(zip(closed.jaxpr.invars, leaves, strict=True))
    return [
        result if isinstance(var, core.Literal) else given.get(var, result)
        for var, result in zip(closed.jaxpr.outvars, results, strict=True)
    ]


def _names(
    closed: ClosedJaxpr, plain: Callable[..., Any], leaves: Any, policy: Policy
) -> set[str]:
    """The names in a traced function; in the rules of its derivatives if need be."""
    eqns = list(withholding.operations(closed.jaxpr))
    seen = {name for eqn in eqns if (name := withholding.named(eqn)) is not None}
    wanted = policy.patterns() or policy.names() - seen
    if wanted and any(e.primitive.name.startswith("custom_vjp") for e in eqns):
        rules = jax.make_jaxpr(lambda *args: jax.vjp(plain, *args))(*leaves)
        for eqn in withholding.operations(rules.jaxpr):
            if (name := withholding.named(eqn)) is not None:
                seen.add(name)
    return seen


def _warn_of_names(policy: Policy, seen: Collection[str], where: str) -> None:
    """Warns of names of the policy that no value carries, and of idle patterns.

    Args:
      policy: the policy.
      seen: the names that were seen while tracing.
      where: the function they were looked for in.
    """
    here = ", ".join(repr(name) for name in sorted(seen)) or "none"
    unseen = [
        f"no value carries the name {name!r}{near(name, seen)}"
        for name in sorted(policy.names() - set(seen))
    ] + [
        f"no name matches the pattern {pattern!r}"
        for pattern in sorted(policy.patterns())
        if not any(re.fullmatch(pattern, name) for name in seen)
    ]
    for fault in unseen:
        warnings.warn(
            f"policy={policy!r} on {where}: {fault}. Names seen there: {here}",
            stacklevel=2,
        )


def _differentiated(values: Sequence[Any]) -> bool:
    """Whether forward and backward pass are traced right here, into one program.

    In the body of a scan over layers they are not: the body is traced first, and gets a
    loop for each of the passes. The classes have no public names.
    """
    for x in values:
        while type(x).__name__ == "BatchTracer":
            x = x.val
        if type(x).__name__ in ("JVPTracer", "LinearizeTracer"):
            return True
    return False


def _overridden(where: str) -> bool:
    warnings.warn(
        f"prevent_cse=False on {where}: forward and backward pass are in one program, "
        "or in one body of a loop, where the compiler would merge the second "
        "computation with the first and keep everything; prevent_cse=True is used. "
        "False is for the body of a scan over layers",
        stacklevel=2,
    )
    return True


def _warn_of_prints(closed: ClosedJaxpr, where: str) -> None:
    # debug_print from jax 0.8 on; debug_callback also serves jax.debug.callback.
    prints = ("debug_print", "debug_callback")
    if any(
        eqn.primitive.name in prints for eqn in withholding.operations(closed.jaxpr)
    ):
        warnings.warn(
            f"jax.debug.print or callback inside {where}, which is computed twice: "
            "under a gradient it fires twice",
            stacklevel=2,
        )


def _warn_of_a_whole_loss(
    plain: Callable[..., Any],
    again: Callable[..., Any],
    leaves: Sequence[Any],
    closed: ClosedJaxpr,
    where: str,
) -> None:
    shapes = [(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.outvars]
    scalar = len(shapes) == 1 and shapes[0][0] == ()
    if not scalar or all(np.ndim(x) == 0 for x in leaves):
        return
    arguments = num_bytes([*leaves, *closed.consts])
    if residual_bytes(again, *leaves) > arguments:
        return  # the policy keeps something, so that the rest comes piece by piece
    inside = residual_bytes(plain, *leaves) - arguments
    if inside > 0:
        warnings.warn(
            f"remat around {where} saves nothing: it returns one scalar, so the "
            "backward pass begins by computing all of it again, and then holds the "
            f"{inside / 2**20:.3g} MiB that were not kept; wrap its blocks instead",
            stacklevel=2,
        )
