r"""Accumulation inside one call: ``jax.value_and_grad`` of a batch too large at once.

The batch is split into micro-batches (``splitting.py``), and a loop adds up what each
gives, in the sums of ``window.py``: this agrees with accumulation across calls. Where
``references.py`` serves, no gradient tree exists beside the sums. Memory is that of one
micro-batch, however many there are.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from gradacc_jax import (
    arguments,
    auxiliary,
    losses,
    precision,
    reduction,
    references,
    splitting,
)
from gradacc_jax import window as windows
from gradacc_jax.splitting import Part
from gradacc_jax.window import Window

PyTree = Any
ROLES = ("argnums", "batch_argnums", "key_argnums", "state_argnums")


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    num_microbatches: Any = None,
    microbatch_size: int | None = None,
    batch_argnums: int | Sequence[int] = 1,
    batch_axis: PyTree = 0,
    weight_fn: Callable[..., PyTree] | None = None,
    reduction: str = "mean",
    aux_reduction: PyTree = "mean",
    key_argnums: int | Sequence[int] = (),
    state_argnums: int | Sequence[int] = (),
    accumulator_dtype: Any = jnp.float32,
    axis_name: Any = None,
    unroll: int = 1,
) -> Callable[..., Any]:
    r"""``jax.value_and_grad``, with the batch split and summed inside the program.

    For micro-batches :math:`i` with loss :math:`l_i`, a mean over :math:`w_i` terms,

    .. math::
        l = \Big(\sum_i w_i l_i\Big) \cdot \frac{1}{\sum_i w_i}, \qquad
        g = \Big(\sum_i w_i \nabla l_i\Big) \cdot \frac{1}{\sum_i w_i},

    which are the value and the gradient of the whole batch.

    Args:
      fun: the loss, as for ``jax.value_and_grad``: it returns a real scalar, or
        ``(scalar, aux)``.
      argnums: which positional arguments to differentiate.
      has_aux: whether ``fun`` returns ``(loss, aux)``.
      num_microbatches: into how many parts to split the batch; their sizes differ by at
        most one (8 in 3, 3, 2). Together with ``microbatch_size`` it may be a traced
        integer: how many of the micro-batches are real; the others are left out.
      microbatch_size: how many examples a part has; the last has what is left (10 in 4,
        4, 2).
      batch_argnums: which positional arguments are batches.
      batch_axis: the examples' axis: an integer, or a pytree prefix of the batch; None
        marks what is not batched. With several batch arguments, also a tuple of one for
        each.
      weight_fn: ``weight_fn(*batch_arguments)`` gives a micro-batch's number of loss
        terms; without it, its number of examples. It may return a dict, for a loss of
        several means with denominators of their own: ``fun`` then returns a dict of the
        same keys, and the value is the sum of the terms. A micro-batch is left out
        where all of its weights are 0; a term whose weight is 0 beside others that are
        not is multiplied by it, and must be finite: divide by ``jnp.maximum(n, 1)``.
      reduction: "mean" if the loss is a mean over its weight; "sum" if it is a sum:
        then value and gradients are sums, divided by :math:`\sum_i w_i` if there is a
        ``weight_fn``.
      aux_reduction: a pytree prefix of the aux: "mean" (weighted), "sum", "last",
        "stack" (a new leading axis, one entry per micro-batch), or "concat" (outputs
        for each example, in the order of the batch).
      key_argnums: arguments that are PRNG keys; micro-batch i gets ``fold_in(key, i)``.
      state_argnums: arguments that are carried from micro-batch to micro-batch, such as
        batch statistics: ``fun`` then returns ``(loss, new_state)``, or ``(loss,
        (new_state, aux))``, and so does the result. (A tuple of argnums: a tuple.)
      accumulator_dtype: least dtype of the sums; None takes the argument's.
      axis_name: inside ``jax.shard_map``, or where a mesh is set on which it is
        explicit, the mesh axis (or a tuple of them) over which examples are spread.
        Each device sums its own micro-batches, and one all-reduce after the loop makes
        value, gradients, and aux that are averaged or summed the global batch's, the
        same everywhere. ``fun`` returns its own device's loss. Other aux and the
        carried state stay each device's own. Micro-batch i of device d among D gets
        ``fold_in(key, i * D + d)``.
      unroll: how many micro-batches a turn of the loop handles, as in ``lax.scan``.

    Returns:
      A function of the arguments of ``fun`` with the results of ``jax.value_and_grad``.
      Memory: one micro-batch's residuals and one sum per differentiated number. A
      micro-batch of weight 0 costs no backward pass, and its nans do no harm: it moves
      neither the carried state nor aux that are summed, averaged or the last.

    Raises:
      ValueError: at construction for options that make no sense; while tracing for
        batches that do not fit each other or the split, and for results of ``fun`` that
        cannot be reduced as asked.

    Examples:
      >>> import jax.numpy as jnp
      >>> from gradacc_jax import value_and_grad
      >>> def loss(w, x):
      ...     return jnp.mean((w - x) ** 2)
      >>> value, grad = value_and_grad(loss, num_microbatches=3)(2.0, jnp.arange(8.0))
      >>> print(value, grad)
      7.5 -3.0
    """
    options = Options(
        argnums=argnums,
        has_aux=has_aux,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        batch_argnums=batch_argnums,
        batch_axis=batch_axis,
        weight_fn=weight_fn,
        reduction=reduction,
        aux_reduction=aux_reduction,
        key_argnums=key_argnums,
        state_argnums=state_argnums,
        accumulator_dtype=accumulator_dtype,
        axis_name=axis_name,
        unroll=unroll,
    )

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        if options.sees_all_devices():
            return _over_devices(options, run, args, kwargs)
        call = Call(options, functools.partial(fun, **kwargs), args)
        return call.result(call.accumulated())

    return run


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """``jax.grad`` of a batch too large at once; see :func:`value_and_grad`.

    Args:
      fun: the loss.
      argnums: which positional arguments to differentiate.
      has_aux: whether ``fun`` returns ``(loss, aux)``.
      **options: as for :func:`value_and_grad`.

    Returns:
      A function that returns the gradients, or ``(gradients, aux)``.

    Examples:
      >>> import jax.numpy as jnp
      >>> import gradacc_jax
      >>> def loss(w, x):
      ...     return jnp.mean((w - x) ** 2)
      >>> print(gradacc_jax.grad(loss, microbatch_size=2)(2.0, jnp.arange(8.0)))
      -3.0
    """
    both = value_and_grad(fun, argnums, has_aux, **options)
    alone = not has_aux and options.get("state_argnums", ()) == ()

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return grads if alone else (grads, value[1])

    return run


def _over_devices(
    options: "Options", run: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> Any:
    """``run`` inside ``jax.shard_map``, entered from a mesh with explicit axes."""
    o, whole = options, PartitionSpec()
    if o.state_argnums:
        raise ValueError(
            f"state_argnums={o.state_argnums} with axis_name={o.axis_name!r}: each "
            "device carries a state of its own; call this inside a jax.shard_map of "
            "your own, and say there what becomes of them"
        )
    given = [*o.argnums, *o.batch_argnums, *o.key_argnums]
    arguments.check_given(tuple(given), args)
    specs: list[PyTree] = [whole] * len(args)
    batch = tuple(args[number] for number in o.batch_argnums)
    of_batch = splitting.device_specs(
        batch, o.axes_of(batch), o.axes, reduction.size_of(o.axes)
    )
    for number, spec in zip(o.batch_argnums, of_batch, strict=True):
        specs[number] = spec
    mesh = jax.sharding.get_abstract_mesh()
    placed = [
        reduction.spread_over(x, specs[number], mesh, o.axes)
        if number in o.batch_argnums
        else reduction.gathered(x, o.axes)
        for number, x in enumerate(args)
    ]
    value: PyTree = whole
    if o.has_aux:
        value = (whole, auxiliary.device_specs(o.aux_reduction, o.axes))
    # Flags and strings stay what they are.
    leaves, tree = jax.tree.flatten((tuple(placed), reduction.gathered(kwargs, o.axes)))
    all_specs = jax.tree.leaves(
        jax.tree.map(
            lambda spec, x: jax.tree.map(lambda _: spec, x),
            (tuple(specs), whole),
            (tuple(placed), kwargs),
        )
    )
    arrays = [i for i, x in enumerate(leaves) if isinstance(x, (jax.Array, np.ndarray))]

    def inside(given: list[Any]) -> Any:
        merged = list(leaves)
        for i, x in zip(arrays, given, strict=True):
            merged[i] = x
        args, kwargs = jax.tree.unflatten(tree, merged)
        return run(*args, **kwargs)

    found, grads = jax.shard_map(
        inside,
        in_specs=([all_specs[i] for i in arrays],),
        out_specs=(value, whole),
        axis_names=set(o.axes),
    )([leaves[i] for i in arrays])
    wrt = args[o.argnums[0]] if o.single else tuple(args[n] for n in o.argnums)
    return found, reduction.back(grads, wrt)


@dataclasses.dataclass
class Options:
    """The arguments of :func:`value_and_grad`, checked, and each in one form."""

    argnums: Any = 0
    has_aux: bool = False
    num_microbatches: Any = None
    microbatch_size: Any = None
    batch_argnums: Any = 1
    batch_axis: PyTree = 0
    weight_fn: Callable[..., PyTree] | None = None
    reduction: str = "mean"
    aux_reduction: PyTree = "mean"
    key_argnums: Any = ()
    state_argnums: Any = ()
    accumulator_dtype: Any = jnp.float32
    axis_name: Any = None
    # Axes over which somebody else reduces, and the loss may talk.
    loss_axes: Any = ()
    unroll: int = 1

    def __post_init__(self) -> None:
        self.single = isinstance(self.argnums, int)
        self.single_state = isinstance(self.state_argnums, int)
        for name in ("num_microbatches", "microbatch_size"):
            setattr(self, name, arguments.count(name, getattr(self, name)))
        for name in ROLES:
            setattr(self, name, arguments.positions(name, getattr(self, name)))
        self.accumulator_dtype = precision.check_dtype(
            "accumulator_dtype", self.accumulator_dtype
        )
        # How many micro-batches are real, where that is known at run time only.
        traced = isinstance(self.num_microbatches, jax.Array)
        self.num_real = self.num_microbatches if traced else None
        if self.num_microbatches is None and self.microbatch_size is None:
            raise ValueError(
                "num_microbatches=None and microbatch_size=None; give one of them"
            )
        if self.num_real is not None and self.microbatch_size is None:
            raise ValueError(
                "num_microbatches is an array: how many micro-batches are real; give "
                "microbatch_size too, which says how the batch is split"
            )
        if self.reduction not in ("mean", "sum"):
            raise ValueError(
                f'reduction={self.reduction!r} is not known; choose "mean" or "sum"'
            )
        auxiliary.check_reduction(self.aux_reduction)
        self.axes = reduction.checked_axes(self.axis_name)
        arguments.check_roles({name: getattr(self, name) for name in ROLES})

    def sees_all_devices(self) -> bool:
        """Whether the caller is outside ``jax.shard_map``, on an explicit mesh."""
        return reduction.is_explicit(self.axes)

    def axes_of(self, batch: tuple[PyTree, ...]) -> PyTree:
        """The examples' axis in each array of the batch arguments."""
        axis = self.batch_axis
        if len(batch) == 1 or not isinstance(axis, tuple):
            axis = (axis,) * len(batch)
        return splitting.batch_axes(batch, axis)


class Sums(NamedTuple):
    """What the loop over micro-batches carries.

    Attributes:
      grads: the window of the gradients.
      loss: the window of the loss.
      aux: what is reduced of the aux.
      state: the carried arguments.
    """

    grads: Window
    loss: Window
    aux: auxiliary.Held
    state: PyTree


class Accumulated(NamedTuple):
    """What the loop over all micro-batches left.

    Attributes:
      held: what it carried.
      outs: for each size of micro-batches, the aux that are kept of each.
      dtype: the loss's.
      divides: whether the sums are still to be divided by the weights.
    """

    held: Sums
    outs: list[list[jax.Array]]
    dtype: Any
    divides: bool


class Call:
    """One call of the function: its arguments in their roles, and the loop."""

    def __init__(
        self, options: Options, fun: Callable[..., Any], args: tuple[Any, ...]
    ):
        self.options = o = options
        self.fun = fun
        self.args = args
        arguments.check_given(
            (*o.argnums, *o.batch_argnums, *o.key_argnums, *o.state_argnums), args
        )
        self.wrt = jax.tree.map(jnp.asarray, self._args(o.argnums))
        for leaf in jax.tree.leaves(self.wrt):
            if not precision.has_gradient(leaf):
                raise TypeError(
                    f"argnums={o.argnums} asks for a gradient with respect to dtype "
                    f"{precision.dtype_of(leaf)}, which has none; pass floating numbers"
                )
        for number in o.key_argnums:
            arguments.check_key(number, args[number])
        self.batch = self._args(o.batch_argnums)
        self.axes = o.axes_of(self.batch)
        # Differentiated while it varies, a parameter has a gradient of this device.
        self.num_devices = reduction.num_devices(o.axes)
        self.wrt = reduction.vary(self.wrt, o.axes)
        reduction.check_batch(self.batch, self.wrt, o.axes)
        self.parts = splitting.parts(
            splitting.num_examples(self.batch, self.axes),
            None if o.num_real is not None else o.num_microbatches,
            o.microbatch_size,
        )

    def accumulated(self) -> Accumulated:
        """The loop: what all micro-batches together give, not yet divided."""
        o = self.options
        state = self._args(o.state_argnums)

        def first() -> tuple[PyTree, ...]:
            return self.micro_batch(self.parts[0], 0)

        loss, (new_state, aux) = jax.eval_shape(
            lambda: self.evaluate(self.wrt, first(), 0, state)
        )
        weight = jax.eval_shape(lambda: self.weight(self.parts[0], first()))
        named = weight is not None and not losses.is_leaf(weight)
        losses.check_terms(loss, weight, named)
        arguments.check_state(state, new_state)
        reduction.check_loss(loss, o.axes)
        self.aux = auxiliary.Reducer(aux, o.aux_reduction, self.parts[0].size, named)
        # Known beforehand only where terms have denominators of their own.
        self.reciprocals = self.reciprocal_totals() if named else None

        grads = windows.empty(self.wrt, o.accumulator_dtype)
        grads = grads._replace(total=reduction.vary_like(grads.total, self.wrt))

        def first_loss(wrt: PyTree) -> PyTree:
            return self.evaluate(wrt, first(), 0, state)

        talk = reduction.talk(first_loss, self.wrt, o.axes or o.loss_axes)
        if o.loss_axes and weight is not None and o.weight_fn is not None:
            reduction.check_weighable(talk)
        self.together = talk.at_all
        if self.together and o.num_real is not None:
            reduction.check_same("num_microbatches", o.num_real, o.axes or o.loss_axes)
        # The weight becomes the loss's cotangent, and must not be rounded to bfloat16.
        exact = all(x.dtype == precision.scalar_dtype() for x in jax.tree.leaves(loss))
        weighted = o.reduction == "mean" and weight is not None
        self.in_place = (exact or not weighted) and references.serve(
            first_loss, self.wrt, grads.total, weighted
        )
        scalar = jax.ShapeDtypeStruct((), precision.scalar_dtype())
        held = Sums(
            grads=grads,
            loss=windows.empty(scalar, None),
            aux=self.aux.empty(),
            state=jax.tree.map(jnp.asarray, state),
        )
        outs = []
        for part in self.parts:
            held, out = self.loop(part, held)
            outs.append(out)
        held = self.all_reduced(held)
        # Known beforehand, terms with denominators of their own are divided already.
        divides = not named and (o.reduction == "mean" or o.weight_fn is not None)
        return Accumulated(held, outs, jax.tree.leaves(loss)[0].dtype, divides)

    def all_reduced(self, held: Sums) -> Sums:
        """The sums of all devices: the one reduction of the window."""
        kept = held.state, held.aux.last
        grads, loss, means, sums = reduction.all_reduce(
            (held.grads, held.loss, held.aux.means, held.aux.sums), self.options.axes
        )
        return Sums(grads, loss, auxiliary.Held(means, sums, kept[1]), kept[0])

    def loop(self, part: Part, held: Sums) -> tuple[Sums, list[jax.Array]]:
        body = functools.partial(self.step, part)
        if part.count == 1:
            held, out = body(held, jnp.zeros((), jnp.int32))
            return held, [x[None] for x in out]
        unroll = min(self.options.unroll, part.count)
        held = reduction.settled(body, held, jnp.zeros((), jnp.int32))
        return lax.scan(body, held, jnp.arange(part.count), unroll=unroll)

    def step(
        self, part: Part, held: Sums, i: jax.Array
    ) -> tuple[Sums, list[jax.Array]]:
        """One micro-batch added, if it is real."""
        add = functools.partial(self.add, part)
        num_real = self.options.num_real
        if num_real is None:
            return add(held, i)

        def leave_out(held: Sums, i: jax.Array) -> tuple[Sums, list[jax.Array]]:
            _, out = jax.eval_shape(add, held, i)
            return held, [jnp.zeros(x.shape, x.dtype) for x in out]

        return reduction.cond(part.first + i < num_real, add, leave_out, held, i)

    def add(self, part: Part, held: Sums, i: jax.Array) -> tuple[Sums, list[jax.Array]]:
        micro = self.micro_batch(part, i)
        weight = self.weight(part, micro)
        index = part.first + i
        weighted = self.options.reduction == "mean"
        shares = None
        if self.reciprocals is not None:
            shares, weight = _shares(weight, self.reciprocals)
            weighted = False

        def both_passes(total: PyTree) -> tuple[PyTree, PyTree, PyTree, PyTree]:
            loss, vjp, (state, aux) = jax.vjp(
                lambda wrt: self.exact(*self.evaluate(wrt, micro, index, held.state)),
                self.wrt,
                has_aux=True,
            )
            cotangent = jax.tree.map(jnp.ones_like, loss)
            if shares is not None:
                cotangent = precision.cast_like(shares, loss)
            elif weight is not None and weighted and (self.in_place or self.together):
                cotangent = weight.astype(loss.dtype)
            elif weight is not None and self.together:
                cotangent = (weight != 0).astype(loss.dtype)
            cotangent = reduction.vary_like(cotangent, loss)
            if self.in_place:
                return loss, state, aux, references.add(vjp, total, cotangent)
            (grads,) = vjp(cotangent)
            before = Window(total, held.grads.weight)
            # The weight is in the cotangent already where devices talk.
            w = None if self.together else weight
            after = windows.add(before, grads, w, first=False, weighted=weighted)
            return loss, state, aux, after.total

        def forward_pass(total: PyTree) -> tuple[PyTree, PyTree, PyTree, PyTree]:
            loss, (_, aux) = self.evaluate(self.wrt, micro, index, held.state)
            return loss, held.state, aux, total

        if weight is None:
            loss, state, aux, total = both_passes(held.grads.total)
        elif self.together:
            loss, state, aux, total = both_passes(held.grads.total)
            state = jax.tree.map(
                lambda new, old: jnp.where(weight != 0, new, old), state, held.state
            )
        else:
            # 0 times nan is nan: a micro-batch of weight 0 gets no backward pass.
            loss, state, aux, total = reduction.cond(
                weight != 0, both_passes, forward_pass, held.grads.total
            )
        if shares is not None:
            loss = _total(loss, shares)
        held_aux, out = self.aux.add(held.aux, aux, weight)
        added = Sums(
            grads=Window(
                total, windows.weighed(held.grads.weight, weight, first=False)
            ),
            loss=windows.add(held.loss, loss, weight, first=False, weighted=weighted),
            aux=held_aux,
            state=state,
        )
        return added, out

    def result(self, found: Accumulated) -> Any:
        """What :func:`value_and_grad` returns."""
        o, held = self.options, found.held
        grads = windows.close(held.grads, self.wrt, mean=found.divides)
        value = windows.average(held.loss) if found.divides else held.loss.total
        value = value.astype(found.dtype)
        aux = self.aux.result(held.aux, found.outs)
        grads = grads[0] if o.single else grads
        if not o.state_argnums:
            return ((value, aux) if o.has_aux else value), grads
        state = held.state[0] if o.single_state else held.state
        return (value, (state, aux) if o.has_aux else state), grads

    def evaluate(
        self, wrt: PyTree, micro: PyTree, index: Any, state: PyTree
    ) -> tuple[PyTree, tuple[PyTree, PyTree]]:
        """The loss of one micro-batch, and its new state and aux."""
        o = self.options
        args = list(self.args)
        # Of all micro-batches of all devices no two draw the same numbers.
        index = index * self.num_devices + reduction.device_index(o.axes)
        keys = [jax.random.fold_in(args[n], index) for n in o.key_argnums]
        numbers = (*o.argnums, *o.batch_argnums, *o.key_argnums, *o.state_argnums)
        for number, value in zip(numbers, (*wrt, *micro, *keys, *state), strict=True):
            args[number] = value
        out = self.fun(*args)
        if not o.state_argnums:
            loss, aux = losses.pair_of(out, o.has_aux)
            return loss, ((), aux)
        loss, rest = losses.pair_of(out, True, "(loss, new_state)")
        new, aux = losses.pair_of(rest, o.has_aux, "(new_state, aux)")
        return loss, (arguments.states(new, o.single_state), aux)

    def exact(self, loss: PyTree, rest: PyTree) -> tuple[PyTree, PyTree]:
        """The loss in a dtype whose cotangent can be a weight, where it may be one."""
        if self.together:
            wide = precision.scalar_dtype()
            loss = jax.tree.map(lambda x: x.astype(wide), loss)
        return loss, rest

    def micro_batch(self, part: Part, i: Any) -> tuple[PyTree, ...]:
        return splitting.micro_batch(self.batch, self.axes, part, i)

    def weight(self, part: Part, micro: PyTree) -> PyTree | None:
        """A micro-batch's weight; None where all of them weigh the same."""
        if self.options.weight_fn is not None:
            weight = self.options.weight_fn(*micro)
            if weight is None:
                raise ValueError(
                    "weight_fn returned None; return the number of loss terms, or "
                    "leave weight_fn out"
                )
            return jax.tree.map(jnp.asarray, weight)
        return None if len(self.parts) == 1 else jnp.asarray(part.size)

    def reciprocal_totals(self) -> PyTree:
        """For each term 1 / the sum of its weights; 0 where that is 0."""

        def one(part: Part, i: jax.Array) -> PyTree:
            weight = self.weight(part, self.micro_batch(part, i))
            real = True
            if self.options.num_real is not None:
                real = part.first + i < self.options.num_real
            return jax.tree.map(
                lambda w: jnp.where(real, w.astype(precision.scalar_dtype()), 0), weight
            )

        per_part = [
            lax.map(functools.partial(one, part), jnp.arange(part.count))
            for part in self.parts
        ]
        totals = jax.tree.map(lambda *xs: jnp.sum(jnp.concatenate(xs)), *per_part)
        totals = reduction.all_reduce(totals, self.options.axes)
        return jax.tree.map(
            lambda w: jnp.where(w == 0, 0, 1 / jnp.where(w == 0, 1, w)), totals
        )

    def _args(self, numbers: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(self.args[number] for number in numbers)


def _shares(weights: PyTree, reciprocals: PyTree) -> tuple[PyTree, jax.Array]:
    """The share ``w_i / sum(w)`` that each term counts with; 1 or, if all are 0, 0."""
    shares = jax.tree.map(lambda w, r: w.astype(r.dtype) * r, weights, reciprocals)
    some = [share != 0 for share in jax.tree.leaves(shares)]
    return shares, functools.reduce(operator.or_, some).astype(jnp.int32)


def _total(terms: PyTree, shares: PyTree) -> jax.Array:
    """The sum of the terms, each with its share; of a share of 0, nothing at all."""
    counted = jax.tree.map(
        lambda x, s: jnp.where(s == 0, 0, s * x.astype(s.dtype)), terms, shares
    )
    return functools.reduce(operator.add, jax.tree.leaves(counted))
