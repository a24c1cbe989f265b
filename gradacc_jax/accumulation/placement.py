"""Where a state's arrays are: specs, shardings, and another number of devices.

An optimizer's state holds things like the parameters (moments, sums), which belong
where the parameters are, and things that are the same everywhere (counters). optax
knows which is which (``optax.tree.map_params``). With ``accumulate(axis_name=...)`` the
sums differ from device to device as well: they have a leading axis of devices.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import (
    AbstractMesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)
import optax

from gradacc_jax import precision, reduction
from gradacc_jax.accumulation.state import (
    AccumulateState,
    accumulators,
    has_device_axis,
    is_accumulator,
)

PyTree = Any


def state_specs(
    tx: optax.GradientTransformation,
    params: PyTree,
    param_specs: PyTree = None,
    *,
    axis_name: Any = None,
) -> PyTree:
    """The ``PartitionSpec`` of every array in the state of ``tx``, for ``shard_map``.

    Args:
      tx: any optax transformation, with or without :func:`accumulate` in it.
      params: the parameters, as arrays or ``jax.ShapeDtypeStruct``.
      param_specs: their specs, a tree of them or one for all; None is ``P()``.
      axis_name: that of ``accumulate(axis_name=...)``, where it is wrapped in something
        else; a bare one tells it itself.

    Returns:
      A tree like ``tx.init(params)``: the sums of an accumulator with ``axis_name``
      have a leading axis of devices; what is like the parameters has their specs; the
      rest ``P()``, the same everywhere.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jax.sharding import PartitionSpec as P
      >>> from gradacc_jax import accumulate, state_specs
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = accumulate(optax.sgd(0.5), 2, axis_name="data")
      >>> params = jnp.zeros(3)
      >>> specs = state_specs(tx, params)
      >>> print(tuple(specs.acc_grads), tuple(specs.mini_step))
      ('data',) ()
      >>> init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
      >>> print(jax.jit(init)(params).acc_grads.shape)
      (1, 3)
    """
    axes = _axes_of(tx, axis_name)
    if param_specs is None or isinstance(param_specs, PartitionSpec):
        one = param_specs or PartitionSpec()
        param_specs = jax.tree.map(lambda _: one, params)
    found: list[PyTree] = []

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

    def zeros(x: jax.ShapeDtypeStruct) -> Any:
        extended = jnp.issubdtype(x.dtype, jax.dtypes.extended)
        return x if extended else jnp.zeros(x.shape, x.dtype)

    def look() -> PyTree:
        # Arrays, if never made: some optimizers cannot begin with shapes.
        state = tx.init(jax.tree.map(zeros, shapes))
        specs = _like_params(tx, state, params, param_specs, PartitionSpec())
        found.append(_with_device_axes(state, specs, shapes, axes))
        return state

    with use_abstract_mesh(AbstractMesh((), ())):  # whatever mesh is set
        jax.eval_shape(_bound(look, axes))
    return found[0]


def state_shardings(
    tx: optax.GradientTransformation, params: PyTree, *, shard_over: str | None = None
) -> PyTree:
    """Where the state of ``tx`` belongs, for ``jax.jit(tx.init, out_shardings=...)``.

    Without it XLA puts moments and sums of sharded parameters where it likes, and that
    may be one device. With ``shard_over`` they are spread over that mesh axis too,
    where the parameters are not: a device then holds 1 / D of them (ZeRO-2), for which
    every micro-batch's gradients are reduced at once, into shards.

    Args:
      tx: any optax transformation.
      params: the parameters, as arrays (or ``jax.ShapeDtypeStruct``) with a
        ``NamedSharding``.
      shard_over: a mesh axis, or None for the parameters' own shardings. An array that
        has no free dimension which it divides stays as the parameter is.

    Returns:
      A tree of shardings like ``tx.init(params)``.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> from gradacc_jax import accumulate, state_shardings
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> params = jax.device_put(jnp.zeros(4), NamedSharding(mesh, P("data")))
      >>> tx = accumulate(optax.adam(0.1), 2)
      >>> where = state_shardings(tx, params)
      >>> print(tuple(where.acc_grads.spec), tuple(where.mini_step.spec))
      ('data',) ()
      >>> state = jax.jit(tx.init, out_shardings=where)(params)
    """
    meshes = set()
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        where = getattr(x, "sharding", None)
        if not isinstance(where, NamedSharding):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has sharding={where}; put the "
                "parameters on a mesh first: jax.device_put(params, "
                "NamedSharding(mesh, P()))"
            )
        meshes.add(where.mesh)
    if len(meshes) != 1:
        raise ValueError(
            f"the parameters are on {len(meshes)} meshes; put them all on one"
        )
    (mesh,) = meshes
    if shard_over is not None and shard_over not in mesh.shape:
        raise ValueError(
            f"shard_over={shard_over!r} is no axis of the mesh {dict(mesh.shape)}; "
            f"choose one of {tuple(mesh.shape)}"
        )
    where = jax.tree.map(lambda x: _spread(x, shard_over), params)
    state = jax.eval_shape(tx.init, params)
    other = NamedSharding(mesh, PartitionSpec())
    return _like_params(tx, state, params, where, other)


def init_on_mesh(
    tx: optax.GradientTransformation,
    params: PyTree,
    mesh: jax.sharding.Mesh,
    *,
    axis_name: Any = None,
) -> PyTree:
    """``tx.init(params)`` on the devices of a mesh, for ``accumulate(axis_name=...)``.

    Args:
      tx: any optax transformation, with or without :func:`accumulate` in it.
      params: the parameters, the same on all devices along ``axis_name``.
      mesh: the mesh.
      axis_name: as for :func:`state_specs`.

    Returns:
      The state, with the sums of each device on that device and the rest on all.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from gradacc_jax import accumulate, init_on_mesh
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> tx = accumulate(optax.sgd(0.5), 2, axis_name="data")
      >>> print(init_on_mesh(tx, jnp.zeros(3), mesh).acc_grads.shape)
      (1, 3)
    """
    axes = _axes_of(tx, axis_name)
    if not axes:
        return jax.jit(tx.init)(params)
    reduction.check_mesh(mesh, axes)
    specs = state_specs(tx, params, axis_name=axes)
    init = jax.shard_map(
        tx.init,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=specs,
        axis_names=set(axes),
    )
    return jax.jit(init)(params)


def device_specs(state: PyTree, axes: reduction.Axes) -> PyTree:
    """The specs of a state that is there, for ``shard_map`` over ``axes`` alone."""
    whole, parted = PartitionSpec(), PartitionSpec(axes)

    def one(held: Any) -> PyTree:
        if not is_accumulator(held):
            return whole
        specs = jax.tree.map(lambda _: whole, held)
        if not has_device_axis(held):
            return specs
        sums = held.acc_grads, held.acc_weight, held.acc_extra_args
        acc_grads, acc_weight, acc_extra_args = jax.tree.map(lambda _: parted, sums)
        return specs._replace(
            acc_grads=acc_grads, acc_weight=acc_weight, acc_extra_args=acc_extra_args
        )

    return jax.tree.map(one, state, is_leaf=is_accumulator)


def for_num_devices(state: PyTree, params: PyTree, num_devices: int) -> PyTree:
    """A state of ``accumulate(axis_name=...)`` for another number of devices.

    In the middle of a window the sums of D devices become those of another number: the
    window goes on, with the same sum over all of them.

    Args:
      state: an optimizer's state as it is outside ``jax.shard_map``: the sums have a
        leading axis of D devices.
      params: the parameters, for their shapes.
      num_devices: how many devices there are now.

    Returns:
      The state with a leading axis of ``num_devices``, on the default device: put it
      where it belongs with ``jax.device_put`` and the specs of :func:`state_specs`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from gradacc_jax import accumulate, for_num_devices
      >>> tx = accumulate(optax.sgd(0.5), 2, axis_name="data")
      >>> params = jnp.zeros(3)
      >>> state = jax.vmap(lambda _: tx.init(params), axis_name="data")(jnp.arange(8))
      >>> state = jax.tree.map(lambda x: x[0], state)
      >>> print(for_num_devices(state, params, 4).acc_grads.shape)
      (4, 3)
    """
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices}; choose at least 1")

    def scalars(x: jax.Array) -> jax.Array:
        return _first(jnp.sum(x, axis=0), num_devices)

    def one(held: Any) -> Any:
        if not is_accumulator(held) or not has_device_axis(held):
            return held
        before = held.acc_weight.shape[0]
        if before == num_devices:
            return held
        at = dict(_leaves(params))
        # A vector on one device looks the same, sharded or not: others tell.
        sharded = any(
            total.shape != (before, *jnp.shape(at[path]))
            for path, total in _leaves(held.acc_grads)
        )

        def sums(path: Any, total: jax.Array) -> jax.Array:
            shape = jnp.shape(at[path])
            if not sharded:
                return scalars(total)
            size = math.prod(shape)
            if total.shape != (before, -(-size // before)):
                raise ValueError(
                    f"state.acc_grads{jax.tree_util.keystr(path)} has shape "
                    f"{total.shape}, which does not fit a parameter of shape {shape} "
                    f"on {before} devices; pass the parameters that tx.init was given"
                )
            flat = jnp.pad(jnp.ravel(total)[:size], (0, -size % num_devices))
            return jnp.reshape(flat, (num_devices, -1))

        return held._replace(
            acc_grads=jax.tree_util.tree_map_with_path(sums, held.acc_grads),
            acc_weight=scalars(held.acc_weight),
            acc_extra_args=jax.tree.map(scalars, held.acc_extra_args),
        )

    return jax.tree.map(one, state, is_leaf=is_accumulator)


def saveable_state(state: PyTree) -> PyTree:
    """The state with its unreduced sums as arrays that can be read and saved.

    What is unreduced on an explicit mesh is a part of a sum on every device, and not an
    array that could be written to a file. Here it gets a leading axis of devices. A
    state of ``jax.shard_map`` has that axis already, and is returned as it is.

    Args:
      state: an optimizer's state, outside of ``jit``.

    Returns:
      The state, in which every number stays on the device where it is.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jax.sharding import AxisType
      >>> from gradacc_jax import accumulate, restored_state, saveable_state
      >>> tx = accumulate(optax.sgd(0.5), 2, axis_name="data")
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
      >>> with jax.set_mesh(mesh):
      ...     state = jax.jit(tx.init)(jnp.zeros(3))
      >>> saved = saveable_state(state)
      >>> print(saved.acc_grads.shape, restored_state(saved, state).acc_grads.shape)
      (1, 3) (3,)
    """

    def leaf(x: Any) -> Any:
        axes = reduction.unreduced_axes(x)
        if not axes:
            return x
        spec = PartitionSpec(axes, *x.sharding.spec.partitions)
        shape = (math.prod(x.sharding.mesh.shape[name] for name in axes), *x.shape)
        return jax.make_array_from_single_device_arrays(
            shape,
            NamedSharding(x.sharding.mesh, spec),
            [shard.data[None] for shard in x.addressable_shards],
        )

    with jax.set_mesh(None):  # each shard is on a device of its own
        return jax.tree.map(leaf, state)


def restored_state(saved: PyTree, like: PyTree) -> PyTree:
    """The state of which :func:`saveable_state` made ``saved``, on the same mesh.

    Args:
      saved: what it returned, or what was read from a checkpoint of that.
      like: a state with the right types, such as that of ``jax.jit(tx.init)(params)``.

    Returns:
      The state, to the bit.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from gradacc_jax import accumulate, restored_state, saveable_state
      >>> state = accumulate(optax.sgd(0.5), 2).init(jnp.zeros(3))
      >>> print(restored_state(saveable_state(state), state).acc_grads)
      [0. 0. 0.]
    """

    def leaf(x: Any, one: Any) -> Any:
        if not reduction.unreduced_axes(one):
            return x
        return jax.make_array_from_single_device_arrays(
            one.shape,
            one.sharding,
            [jnp.squeeze(shard.data, 0) for shard in x.addressable_shards],
        )

    with jax.set_mesh(None):
        return jax.tree.map(leaf, saved, like)


def _first(x: jax.Array, num_devices: int) -> jax.Array:
    """What one device holds, and zeros for the others."""
    return jnp.concatenate([x[None], jnp.zeros((num_devices - 1, *x.shape), x.dtype)])


def _axes_of(tx: optax.GradientTransformation, axis_name: Any) -> reduction.Axes:
    given = reduction.checked_axes(axis_name)
    own = getattr(getattr(tx, "options", None), "axes", given)
    if given and own != given:
        raise ValueError(
            f"axis_name={axis_name!r} but tx = accumulate(..., axis_name="
            f"{own or None!r}); pass the same to both"
        )
    return own


def _bound(look: Callable[[], PyTree], axes: reduction.Axes) -> Callable[[], PyTree]:
    """``look`` where the axes are bound, each to one device."""
    for name in axes:
        look = functools.partial(
            jax.vmap(lambda _, look=look: look(), axis_name=name, axis_size=1),
            jnp.zeros(1),
        )
    return look


def _like_params(
    tx: optax.GradientTransformation,
    state: PyTree,
    params: PyTree,
    of_params: PyTree,
    other: Any,
) -> PyTree:
    """``of_params`` where the state has arrays like the parameters, else ``other``."""

    def one(x: Any, param: Any, of_param: Any) -> Any:
        # Factored moments (adafactor) have a parameter each, and shapes of their own.
        shape, like = getattr(x, "shape", ()), jnp.shape(param)
        return of_param if like in (shape, shape[1:]) else other

    return optax.tree.map_params(
        tx,
        one,
        state,
        params,
        of_params,
        transform_non_params=lambda _: other,
        is_leaf=precision.is_masked,
    )


def _with_device_axes(
    state: PyTree, specs: PyTree, params: PyTree, axes: reduction.Axes
) -> PyTree:
    """The specs of the sums, with an axis of devices before those of the parameters."""
    found = iter(accumulators(state))
    first = axes[0] if len(axes) == 1 else axes

    def one(node: Any) -> Any:
        if not is_accumulator(node):
            return node
        held: AccumulateState = next(found)
        if not has_device_axis(held):
            return node
        shapes = {path: jnp.shape(x) for path, x in _leaves(params)}

        def sums(path: Any, total: Any, spec: PartitionSpec) -> Any:
            if precision.is_masked(total):
                return total
            whole = total.shape[1:] == shapes[path]
            if not whole and jax.tree.leaves(spec.partitions):
                raise ValueError(
                    f"params{jax.tree_util.keystr(path)} is sharded as {spec}, and "
                    "shard_accumulators=True spreads its sums flat; leave one out"
                )
            return PartitionSpec(first, *spec) if whole else PartitionSpec(first)

        alone = PartitionSpec(first)
        return node._replace(
            acc_grads=jax.tree_util.tree_map_with_path(
                sums, held.acc_grads, node.acc_grads, is_leaf=precision.is_masked
            ),
            acc_weight=alone,
            acc_extra_args=jax.tree.map(lambda _: alone, held.acc_extra_args),
        )

    return jax.tree.map(one, specs, is_leaf=is_accumulator)


def _leaves(tree: PyTree) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _spread(x: Any, axis: str | None) -> NamedSharding:
    """The sharding of an array, with one more axis in it where there is room."""
    where: NamedSharding = x.sharding
    spec = [*where.spec, *[None] * (len(x.shape) - len(where.spec))]
    if axis is None or axis in jax.tree.leaves(spec):  # a part may be a tuple
        return where
    for i, length in enumerate(x.shape):
        if spec[i] is None and length and length % where.mesh.shape[axis] == 0:
            spec[i] = axis
            break
    return NamedSharding(where.mesh, PartitionSpec(*spec))
