r"""Many devices: what stays on each of them, and the one reduction of a window.

Inside ``jax.shard_map`` every device has examples of its own, and a window is a sum
over devices too. Adding commutes with adding, so the sum over devices can wait until
the window closes: one all-reduce of sums and weights a window, whatever k is. For that
the parameters must be *varying* over the axis before they are differentiated. Of
parameters that are the same everywhere JAX returns gradients that are the same
everywhere: it reduces them in the backward pass of every micro-batch, and a second
reduction would count each of them D times.

On a mesh whose axes are explicit the same can be said with other types: of parameters
that are marked *reduced* the gradients are *unreduced*, sums still to be made over
devices. They can be added, and multiplied by what is marked reduced, and nothing else;
and so far JAX lets a marked parameter into matrix products only. The accumulator takes
them. What differentiates here enters ``jax.shard_map`` instead, where every model goes.

JAX keeps in the type of every array over which mesh axes it varies, and this file reads
it there. Where types do not tell (``check_vma=False``, ``jax.vmap`` with a name for its
axis) nothing is refused on their account.
"""

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from gradacc_jax import precision

PyTree = Any
Axes = tuple[str, ...]


def checked_axes(axis_name: Any) -> Axes:
    """``axis_name`` as a tuple of names: none for None."""
    if axis_name is None:
        return ()
    names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"axis_name={axis_name!r} is not the name of a mesh axis; pass a string "
            'such as "data", a tuple of them, or None'
        )
    if len(set(names)) < len(names):
        raise ValueError(f"axis_name={axis_name!r} names an axis twice; name it once")
    return tuple(names)


def check_mesh(mesh: Any, axes: Axes) -> None:
    """Raises unless the mesh has these axes."""
    for name in axes:
        if name not in mesh.shape:
            raise ValueError(
                f"axis_name={name!r} is no axis of the mesh {dict(mesh.shape)}; choose "
                f"one of {tuple(mesh.shape)}"
            )


def is_explicit(axes: Axes) -> bool:
    """Whether the axes are explicit ones of the mesh that is set: one global view."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return bool(axes) and all(kinds.get(x) == AxisType.Explicit for x in axes)


def num_devices(axes: Axes) -> int:
    """How many devices call this, each for itself; an error for an unbound axis."""
    if is_explicit(axes):
        return 1
    try:
        return math.prod(lax.axis_size(name) for name in axes)
    except NameError:
        bound = jax.sharding.get_abstract_mesh().manual_axes
        here = f"bound here: {', '.join(bound)}" if bound else "none is bound here"
        raise ValueError(
            f"axis_name={_shown(axes)} is not bound ({here}); call this inside "
            "jax.shard_map over a mesh with that axis, or set a mesh on which it is "
            "explicit (under jit with other shardings leave axis_name out). For an "
            "accumulator in a chain, init_on_mesh and state_specs take axis_name= too"
        ) from None


def device_index(axes: Axes) -> jax.Array | int:
    """This device's number among those that the axes go over."""
    return lax.axis_index(axes) if axes and not is_explicit(axes) else 0


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which an array differs from device to device, by its type."""
    kind = getattr(_type(x), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def tracked(axes: Axes) -> bool:
    """Whether types tell over which of these axes an array varies."""
    if is_explicit(axes):
        return False
    return all(name in varying_axes(lax.axis_index(name)) for name in axes)


def vary(tree: PyTree, axes: Axes) -> PyTree:
    """The same values, as arrays that may differ from device to device."""
    if not (axes and tracked(axes)):
        return tree
    return jax.tree.map(functools.partial(_vary, axes=frozenset(axes)), tree)


def gathered(tree: PyTree, axes: Axes) -> PyTree:
    """Arrays of an explicit mesh, sharded over its other axes only."""

    def leaf(x: Any) -> Any:
        return jax.reshard(x, _spec(x, axes)) if isinstance(x, jax.Array) else x

    return jax.tree.map(leaf, tree)


def spread_over(batch: PyTree, specs: PyTree, mesh: Any, axes: Axes) -> PyTree:
    """A batch where ``shard_map`` wants it, which on explicit axes is asked for."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if not all(kinds[name] == AxisType.Explicit for name in axes):
        return batch

    def leaf(x: Any, spec: PartitionSpec) -> Any:
        if isinstance(mesh, jax.sharding.Mesh):
            return jax.reshard(x, jax.sharding.NamedSharding(mesh, spec))
        return jax.reshard(x, spec)

    return jax.tree.map(leaf, batch, specs)


def check_replicated(params: PyTree, axes: Axes) -> None:
    """Raises where parameters are sharded over explicit axes, as in FSDP."""
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        parts = jax.typeof(x).sharding.spec.partitions
        if here := set(jax.tree.leaves(parts)) & set(axes):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is sharded over {sorted(here)}, "
                f"and axis_name={_shown(axes)} wants it the same on all devices; leave "
                "axis_name out (XLA then gathers in every micro-batch), or call "
                "value_and_grad(axis_name=...), which gathers once a window"
            )


def size_of(axes: Axes) -> int:
    """How many devices there are along axes of the mesh that is set."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in axes)


def empty_sums(zeros: PyTree, params: PyTree, axes: Axes) -> PyTree:
    """``zeros`` as sums, on an explicit mesh, of unreduced gradients of ``params``."""

    def unreduced(x: jax.Array, like: Any) -> jax.Array:
        spec = _spec(like, axes, unreduced=set(axes))
        return jnp.zeros(x.shape, x.dtype, out_sharding=spec)

    return jax.tree.map(unreduced, zeros, params)


def factor(x: jax.Array, of: Any) -> jax.Array:
    """The scalar ``x``, ready to be multiplied by ``of``, which may be unreduced."""
    axes = unreduced_axes(of)
    return jax.reshard(x, PartitionSpec(reduced=set(axes))) if axes else x


def placed_like(x: jax.Array, like: Any) -> jax.Array:
    """An array that is the same everywhere, sharded as ``like`` on an explicit mesh."""
    spec = getattr(getattr(like, "sharding", None), "spec", None)
    mesh = jax.sharding.get_abstract_mesh()
    if spec is None or AxisType.Explicit not in mesh.axis_types:
        return x
    return jax.reshard(x, spec)


def vary_like(tree: PyTree, like: PyTree) -> PyTree:
    """``tree``, varying over all axes that ``like`` varies over, leaf by leaf."""
    if not _in_shard_map():
        return tree
    return jax.tree.map(lambda x, y: _vary(x, varying_axes(y)), tree, like)


def cond(
    holds: Any, true: Callable[..., Any], false: Callable[..., Any], *args: Any
) -> Any:
    """``lax.cond``, with branches whose results vary over different axes."""
    if not _in_shard_map():
        return lax.cond(holds, true, false, *args)
    shapes = jax.eval_shape(true, *args), jax.eval_shape(false, *args)

    def joint(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: vary_like(vary_like(branch(*args), shapes[0]), shapes[1])

    return lax.cond(holds, joint(true), joint(false), *args)


def settled(body: Callable[..., tuple[PyTree, Any]], init: PyTree, x: Any) -> PyTree:
    """``init``, varying over the axes that a loop over ``body`` makes it vary over."""
    while _in_shard_map():
        after, _ = jax.eval_shape(body, init, x)
        before, init = init, vary_like(init, after)
        same = jax.tree.map(
            lambda x, y: varying_axes(x) == varying_axes(y), before, init
        )
        if all(jax.tree.leaves(same)):
            break
    return init


def all_reduce(tree: PyTree, axes: Axes) -> PyTree:
    """The sums over all devices, which every device gets: one collective, in one call.

    On an explicit mesh, what is not unreduced is such a sum already.

    Cost: each device sends and receives about ``2 (D - 1) / D`` times the bytes.
    """
    if is_explicit(axes):
        return jax.tree.map(
            lambda x: jax.reshard(x, _spec(x, axes)) if unreduced_axes(x) else x, tree
        )
    return lax.psum(tree, axes) if axes and jax.tree.leaves(tree) else tree


def global_norm(grads: PyTree) -> jax.Array:
    """The norm of gradients, of which other mesh axes may each have a part."""
    dtype = precision.scalar_dtype()

    def square(x: jax.Array) -> jax.Array:
        wide = jnp.abs(x.astype(precision.working_dtype(x.dtype)))
        total = jnp.sum(jnp.square(wide)).astype(dtype)
        others = tuple(sorted(varying_axes(total)))
        return lax.psum(total, others) if others else total

    leaves = [x for x in jax.tree.leaves(grads) if precision.has_gradient(x)]
    return jnp.sqrt(sum(map(square, leaves), start=jnp.zeros((), dtype)))


def back(tree: PyTree, params: PyTree) -> PyTree:
    """Gradients where their parameters are, on an explicit mesh that gathered them."""
    return jax.tree.map(lambda x, p: placed_like(x, jax.typeof(p)), tree, params)


def reduce_scatter(tree: PyTree, axes: Axes) -> PyTree:
    """The sums over all devices, of which every device gets an equal part.

    Cost: each device sends and receives about ``(D - 1) / D`` times the bytes.

    Returns:
      For each leaf a vector of ``ceil(size / D)`` numbers.
    """
    parts = num_devices(axes)

    def leaf(x: jax.Array) -> jax.Array:
        spec = jax.typeof(x).sharding.spec.partitions
        if jax.tree.leaves(spec):
            raise ValueError(
                f"shard_accumulators=True, and a gradient is sharded as {spec} over an "
                "explicit mesh axis already; leave shard_accumulators out"
            )
        flat = jnp.pad(jnp.ravel(x), (0, -x.size % parts))
        return lax.psum_scatter(flat, axes, tiled=True)

    return jax.tree.map(leaf, tree)


def all_gather(parts: PyTree, like: PyTree, axes: Axes) -> PyTree:
    """What :func:`reduce_scatter` spread, whole again, in the shapes of ``like``.

    It is a sum of parts that stand at their places among zeros: that way JAX knows that
    every device gets the same.
    """
    index, number = device_index(axes), num_devices(axes)

    def leaf(part: jax.Array, whole: Any) -> jax.Array:
        flat = jnp.zeros(part.size * number, part.dtype)
        flat = lax.dynamic_update_slice(vary(flat, axes), part, (index * part.size,))
        return jnp.reshape(lax.psum(flat, axes)[: whole.size], whole.shape)

    return jax.tree.map(leaf, parts, like)


def check_batch(batch: PyTree, wrt: PyTree, axes: Axes) -> None:
    """Raises where the batch's mesh axes and ``axis_name`` do not go together."""
    if not _in_shard_map():
        return
    spread = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(batch)))
    if tracked(axes) and (same := frozenset(axes) - spread):
        raise ValueError(
            f"axis_name={_shown(axes)}, but the batch is the same on all devices of "
            f"{_shown(same)}: each would count D times; shard it with "
            f"in_specs=P({sorted(same)[0]!r})"
        )
    for path, x in jax.tree_util.tree_leaves_with_path(wrt):
        if missing := spread - varying_axes(x):
            raise ValueError(
                f"the batch varies over the mesh axis {_shown(missing)}, the parameter"
                f"{jax.tree_util.keystr(path)} does not, and axis_name="
                f"{_shown(axes) if axes else None}: gradients would be reduced in "
                f"every micro-batch; pass axis_name={_shown(missing)}"
            )


def check_same(what: str, x: Any, axes: Axes) -> None:
    """Raises where ``x`` differs from device to device, and they must go together."""
    if here := varying_axes(x) & set(axes):
        raise ValueError(
            f"{what} differs from device to device of {sorted(here)}, and they would "
            "wait for each other for ever; pass the same on all of them"
        )


def check_alike(params: PyTree, state: PyTree, axes: Axes) -> None:
    """Raises where new parameters, or counters, would differ from device to device."""
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if here := varying_axes(x) & set(axes):
            raise ValueError(
                f"the update of params{jax.tree_util.keystr(path)} differs from device "
                f"to device of {sorted(here)}: a transformation in tx that stands "
                "outside of accumulate(axis_name=...) passes this device's gradients "
                "on; put it inside: accumulate(optax.partition(...), k, axis_name=...)"
            )


def check_loss(loss: PyTree, axes: Axes) -> None:
    """Raises where a loss is not that of a device's own examples, but of all."""
    for x in jax.tree.leaves(loss):
        remedy = "return the loss of the device's own examples"
        check_not_reduced("the loss", x, axes, remedy)


def check_not_reduced(what: str, x: Any, axes: Axes, remedy: str) -> None:
    """Raises where ``x``, named ``what``, is the same on all devices already."""
    if is_explicit(axes) and not {*axes} <= {*unreduced_axes(x)}:
        raise ValueError(
            f"{what} is not unreduced over the explicit mesh axis {_shown(axes)}: it "
            "was reduced already; differentiate with respect to parameters that are "
            "marked, jax.reshard(params, P(reduced={...}))"
        )
    if tracked(axes) and (same := frozenset(axes) - varying_axes(x)):
        raise ValueError(
            f"{what} is the same on all devices of axis_name={_shown(same)}: it was "
            f"reduced already, and a second reduction would count it D times; {remedy}"
        )


class Talk(NamedTuple):
    """Whether devices talk to each other in a loss, over some of the axes.

    Attributes:
      at_all: then none of them may leave a pass out, or others would wait for ever.
      backward: in the backward pass. What one device differentiates then goes into the
        gradients of others, and a weight must be there before, as the cotangent.
    """

    at_all: bool = False
    backward: bool = False


def talk(loss: Callable[[PyTree], Any], params: PyTree, axes: Axes) -> Talk:
    """How devices talk to each other in ``loss(params) -> (loss, anything)``."""
    if not axes:
        return Talk()

    def backward(params: PyTree) -> PyTree:
        value, vjp, _ = jax.vjp(loss, params, has_aux=True)
        return vjp(vary_like(jax.tree.map(jnp.ones_like, value), value))

    forward = _collectives(jax.make_jaxpr(loss)(params).jaxpr, axes)
    both = _collectives(jax.make_jaxpr(backward)(params).jaxpr, axes)
    return Talk(both > 0 or forward > 0, both > forward)


def check_weighable(talk: Talk) -> None:
    """Raises where an accumulator could not weigh a micro-batch's gradients."""
    if talk.backward:
        raise ValueError(
            "weight_fn is given, and in the backward pass of the loss devices talk to "
            "each other (lax.pmean, lax.psum, ...): an accumulator would weigh what is "
            "mixed already; give train_step a plain optimizer and num_microbatches=k "
            "instead, or stop the gradient there (lax.stop_gradient)"
        )


def _collectives(jaxpr: Any, axes: Axes) -> int:
    count = 0
    for equation in jaxpr.eqns:
        local = equation.primitive.name in ("pvary", "pcast", "axis_index")
        for name in ("axes", "axis_name"):
            names = equation.params.get(name, ())
            names = names if isinstance(names, (tuple, list, frozenset)) else (names,)
            count += not local and any(axis in names for axis in axes)
        for inner in core.jaxprs_in_params(equation.params):
            count += _collectives(inner, axes)
    return count


def _spec(x: Any, axes: Axes, **marks: Any) -> PartitionSpec:
    """The spec of an array on an explicit mesh without these axes, marked anew."""
    parts = []
    for part in jax.typeof(x).sharding.spec.partitions:
        names = part if isinstance(part, tuple) else (part,)
        left = tuple(name for name in names if name is not None and name not in axes)
        parts.append(left if len(left) > 1 else left[0] if left else None)
    return PartitionSpec(*parts, **marks)


def unreduced_axes(x: Any) -> Axes:
    """The explicit mesh axes over which an array is still to be summed."""
    spec = getattr(getattr(_type(x), "sharding", None), "spec", None)
    return tuple(sorted(getattr(spec, "unreduced", None) or ()))


def _type(x: Any) -> Any:
    """The type of an array; of a shape, which jax.typeof may refuse, itself."""
    return x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)


def _vary(x: Any, axes: frozenset[str]) -> Any:
    missing = axes - varying_axes(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def _in_shard_map() -> bool:
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _shown(axes: Any) -> str:
    names = list(axes) if isinstance(axes, tuple) else sorted(axes)
    return repr(names[0] if len(names) == 1 else tuple(names))
