"""A batch in micro-batches: which examples belong to which, and back again.

The split is strided: of 6 examples in 2 micro-batches the first has examples 0, 2, 4. A
batch that is sharded over devices, each with a contiguous part, then stays where it is:
every device takes its share of every micro-batch from its own examples.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

PyTree = Any
_WHOLE = PartitionSpec()
# Stands for None, which in a pytree would be nothing at all.
_NONE = "none"


@dataclasses.dataclass(frozen=True)
class Part:
    """Micro-batches of one size, which one loop can go through.

    Attributes:
      start: the first example.
      count: how many micro-batches.
      size: how many examples in each.
      first: the number of the first of these micro-batches in the whole batch.
    """

    start: int
    count: int
    size: int
    first: int


def parts(
    num_examples: int, num_microbatches: int | None, microbatch_size: int | None
) -> list[Part]:
    """How a batch is split: at most two sizes of micro-batches, the larger ones first.

    Args:
      num_examples: in the batch.
      num_microbatches: how many, in sizes that differ by at most one; or None.
      microbatch_size: the size of all but a smaller last one; or None.

    Returns:
      One or two parts that cover the batch.
    """
    n, k, m = num_examples, num_microbatches, microbatch_size
    if m is not None:
        if m > n:
            raise ValueError(
                f"microbatch_size={m} does not fit batch_size={n}; choose at most {n}"
            )
        if k is not None and k != -(-n // m):
            raise ValueError(
                f"num_microbatches={k} and microbatch_size={m} do not make "
                f"batch_size={n}; leave one of them out"
            )
        sizes = [(n // m, m), (1, n % m)]
    else:
        assert k is not None
        if k > n:
            raise ValueError(
                f"num_microbatches={k} is more than batch_size={n}; choose at most {n}"
            )
        sizes = [(n % k, n // k + 1), (k - n % k, n // k)]
    found, start, first = [], 0, 0
    for count, size in sizes:
        if count and size:
            found.append(Part(start, count, size, first))
            start, first = start + count * size, first + count
    return found


def batch_axes(batch: PyTree, axis: PyTree) -> PyTree:
    """For each leaf of ``batch`` the axis of its examples; -1 where it has none.

    Args:
      batch: the batch.
      axis: a pytree prefix of it, of integers and None.
    """

    def spread(axis: int | None, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda _: _NONE if axis is None else axis, tree)

    try:
        axes = jax.tree.map(spread, axis, batch, is_leaf=lambda x: x is None)
    except ValueError as error:
        raise ValueError(
            f"batch_axis={axis} is no pytree prefix of the batch "
            f"{jax.tree.structure(batch)}; pass one integer, or a tree that begins "
            "alike"
        ) from error
    return jax.tree.map(_checked_axis, axes, batch)


def num_examples(batch: PyTree, axes: PyTree) -> int:
    """The length of the examples' axis, which all leaves must agree on."""
    lengths = {
        jax.tree_util.keystr(path): x.shape[axis]
        for (path, x), axis in zip(
            jax.tree_util.tree_leaves_with_path(batch), jax.tree.leaves(axes)
        )
        if axis >= 0
    }
    if not lengths:
        raise ValueError("the batch has no batched array; look at batch_axis")
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"the batch's arrays have different numbers of examples, {lengths}; mark "
            "what is not batched with None in batch_axis"
        )
    return next(iter(lengths.values()))


def micro_batch(batch: PyTree, axes: PyTree, part: Part, i: Any) -> PyTree:
    """Micro-batch ``i`` of a part: its examples are ``count`` apart."""

    def leaf(x: Any, axis: int) -> Any:
        if axis < 0:
            return x
        stop = part.start + part.count * part.size
        if (part.start, stop) != (0, x.shape[axis]):
            _check_not_sharded(x, axis)
            x = lax.slice_in_dim(x, part.start, stop, axis=axis)
        shape = (*x.shape[:axis], part.size, part.count, *x.shape[axis + 1 :])
        return lax.dynamic_index_in_dim(
            jnp.reshape(x, shape), i, axis + 1, keepdims=False
        )

    return jax.tree.map(leaf, batch, axes)


def device_specs(
    batch: PyTree, axes: PyTree, names: tuple[str, ...], devices: int
) -> PyTree:
    """The specs of a batch whose examples are spread over devices.

    Args:
      batch: the batch.
      axes: as from :func:`batch_axes`.
      names: the mesh axes that the devices are on.
      devices: how many there are.
    """
    size = num_examples(batch, axes)
    if size % devices:
        shown = repr(names[0] if len(names) == 1 else names)
        raise ValueError(
            f"batch_size={size} does not divide over the {devices} devices of "
            f"axis_name={shown}; choose a multiple of {devices}, or pad it with "
            "examples of weight 0"
        )
    return jax.tree.map(
        lambda axis: PartitionSpec(*[None] * axis, names) if axis >= 0 else _WHOLE, axes
    )


def joined(outs: Sequence[jax.Array]) -> jax.Array:
    """Per-example results in the order of the batch.

    Args:
      outs: for each part an array of shape ``(count, size, ...)``.
    """
    return jnp.concatenate(
        [jnp.reshape(jnp.swapaxes(x, 0, 1), (-1, *x.shape[2:])) for x in outs]
    )


def _check_not_sharded(x: Any, axis: int) -> None:
    """Raises where a batch of two sizes of micro-batches is sharded explicitly."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    spec = tuple(getattr(sharding, "spec", None) or ())
    if sharding is None or axis >= len(spec) or spec[axis] is None:
        return
    raise ValueError(
        f"batch_size={x.shape[axis]} does not divide into equal micro-batches, and its "
        f"axis {axis} is sharded over {spec[axis]!r}; choose a number of micro-batches "
        "that divides it, or pad it with examples of weight 0"
    )


def _checked_axis(axis: Any, x: Any) -> int:
    if axis == _NONE:
        return -1
    ndim = jnp.ndim(x)
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"batch_axis={axis} does not exist in an array of shape {jnp.shape(x)}; "
            "mark what is not batched with None"
        )
    return axis % ndim
