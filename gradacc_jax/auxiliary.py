"""What a loss returns beside its value, reduced over the micro-batches of a window.

A pytree prefix says what becomes of each leaf. Means and sums are carried through the
loop, and so is the last micro-batch's value; what is kept of each micro-batch (stacked,
or concatenated in the order of the batch) leaves the loop as its output.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradacc_jax import precision, splitting
from gradacc_jax import window as windows
from gradacc_jax.window import Window

PyTree = Any
REDUCTIONS = ("mean", "sum", "last", "stack", "concat")


def check_reduction(reduction: PyTree) -> None:
    """Raises unless every leaf of ``reduction`` is one of ``REDUCTIONS``."""
    for how in jax.tree.leaves(reduction):
        if how not in REDUCTIONS:
            raise ValueError(
                f"aux_reduction={how!r} is not known; choose one of {REDUCTIONS}"
            )


def device_specs(reduction: PyTree, names: tuple[str, ...]) -> PyTree:
    """The specs of reduced aux outside ``jax.shard_map``, a pytree prefix of it."""

    def one(how: str) -> PartitionSpec:
        if how in ("mean", "sum"):
            return PartitionSpec()
        if how == "concat":
            return PartitionSpec(names)
        raise ValueError(
            f'aux_reduction={how!r} differs from device to device; choose "mean", '
            '"sum" or "concat", or call this inside a jax.shard_map of your own'
        )

    return jax.tree.map(one, reduction)


class Held(NamedTuple):
    """What the loop carries, each a list of leaves.

    Attributes:
      means: the window of those that are averaged.
      sums: the sums so far.
      last: those of the last micro-batch.
    """

    means: Window
    sums: list[jax.Array]
    last: list[jax.Array]


class Reducer:
    """The aux of one micro-batch, leaf by leaf, with the reduction each one gets."""

    def __init__(self, aux: PyTree, reduction: PyTree, size: int, named: bool):
        """Checks shapes and dtypes.

        Args:
          aux: the shapes of a micro-batch's aux.
          reduction: a pytree prefix of it.
          size: how many examples the micro-batch has.
          named: whether it has several weights, so that no mean is defined.
        """
        self.shapes = jax.tree.leaves(aux)
        self.tree = jax.tree.structure(aux)
        try:
            spread = jax.tree.map(
                lambda how, tree: jax.tree.map(lambda _: how, tree), reduction, aux
            )
        except ValueError as error:
            raise ValueError(
                f"aux_reduction={reduction!r} is no pytree prefix of the aux "
                f"{self.tree}; pass one reduction, or a tree that begins alike"
            ) from error
        self.hows = jax.tree.leaves(spread)
        for (path, x), how in zip(
            jax.tree_util.tree_leaves_with_path(aux), self.hows, strict=True
        ):
            _check(f"aux{jax.tree_util.keystr(path)}", x, how, size, named)

    def empty(self) -> Held:
        """Before the first micro-batch."""
        return Held(
            means=windows.empty(self._pick(self.shapes, "mean"), jnp.float32),
            sums=[_wide_zeros(x) for x in self._pick(self.shapes, "sum")],
            last=[jnp.zeros(x.shape, x.dtype) for x in self._pick(self.shapes, "last")],
        )

    def add(
        self, held: Held, aux: PyTree, weight: jax.Array | None
    ) -> tuple[Held, list[jax.Array]]:
        """One micro-batch's aux added; and what of it leaves the loop."""
        leaves = jax.tree.leaves(aux)
        sums = [
            total + x.astype(total.dtype)
            for total, x in zip(held.sums, self._pick(leaves, "sum"), strict=True)
        ]
        last = self._pick(leaves, "last")
        if weight is not None:
            # By selection, as in a window: what is left out may be nan.
            sums = _where(weight != 0, sums, held.sums)
            last = _where(weight != 0, last, held.last)
        means = self._pick(leaves, "mean")
        added = Held(
            means=windows.add(held.means, means, weight, first=False),
            sums=sums,
            last=last,
        )
        return added, self._pick(leaves, "stack", "concat")

    def result(self, held: Held, outs: Sequence[Sequence[jax.Array]]) -> PyTree:
        """The aux of the whole batch.

        Args:
          held: what the loops carried.
          outs: for each loop what left it, with a leading axis of micro-batches.
        """
        found = {
            "mean": iter(windows.average(held.means)),
            "sum": iter(held.sums),
            "last": iter(held.last),
        }
        kept = iter(zip(*outs, strict=True))
        leaves = []
        for how, shape in zip(self.hows, self.shapes, strict=True):
            if how == "stack":
                x = jnp.concatenate(next(kept))
            elif how == "concat":
                x = splitting.joined(next(kept))
            else:
                x = next(found[how])
            leaves.append(x.astype(shape.dtype))
        return jax.tree.unflatten(self.tree, leaves)

    def _pick(self, leaves: Sequence[Any], *which: str) -> list[Any]:
        return [x for x, how in zip(leaves, self.hows, strict=True) if how in which]


def _where(
    holds: jax.Array, new: list[jax.Array], old: list[jax.Array]
) -> list[jax.Array]:
    return [jnp.where(holds, a, b) for a, b in zip(new, old, strict=True)]


def _check(name: str, x: Any, how: str, size: int, named: bool) -> None:
    if how == "mean" and not jnp.issubdtype(x.dtype, jnp.inexact):
        raise ValueError(
            f"{name} has dtype {x.dtype}, which has no mean; choose the "
            'aux_reduction "sum", "last", "stack" or "concat", or cast it'
        )
    if how == "mean" and named:
        raise ValueError(
            f'aux_reduction="mean" for {name}: weight_fn gives several '
            'weights, and it is not known which one; choose "sum" and divide'
        )
    if how == "sum" and not jnp.issubdtype(x.dtype, jnp.number):
        raise ValueError(
            f"{name} has dtype {x.dtype}, which has no sum; cast it to integers"
        )
    if how == "concat" and (x.ndim == 0 or x.shape[0] != size):
        raise ValueError(
            f'{name} has shape {x.shape}; for the aux_reduction "concat" its '
            f"first axis must be that of the {size} examples"
        )


def _wide_zeros(x: Any) -> jax.Array:
    wide = precision.working_dtype(x.dtype) if precision.has_gradient(x) else x.dtype
    return jnp.zeros(x.shape, wide)
