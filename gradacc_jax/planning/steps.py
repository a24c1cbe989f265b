"""The training steps that a plan chooses from, for a loss and an optimizer.

Everything that a real step holds is in them: the optimizer's state, the sums in the
accumulator's dtype, frozen parameters, carried state and keys. Frozen parameters travel
beside the batch: they get no gradient, no sum and no optimizer state.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
import optax

from gradacc_jax import splitting
from gradacc_jax.accumulation import AccumulateTransformation, accumulate
from gradacc_jax.checkpointing import policies as known
from gradacc_jax.planning.compile import as_shape
from gradacc_jax.planning.fitted import FIT, Unfitted, is_fit
from gradacc_jax.planning.report import ACROSS_CALLS, ONE_CALL
from gradacc_jax.planning.search import Fitting, Made, Variant
from gradacc_jax.stepping import (
    StepOptions,
    micro_step,
    stateless,
    takes_policy,
    with_policy,
)

PyTree = Any


def applicable(loss_fn: Callable[..., Any], policies: Sequence[Any]) -> tuple[Any, ...]:
    """Those of the policies that can be applied to this loss, as they were given.

    A loss that takes a keyword ``policy`` applies it to its own blocks. In any other
    ``remat_to_fit`` finds what to compute again, instead of all policies but "none".
    """
    if takes_policy(loss_fn):
        return tuple(policies)
    kept = [p for p in policies if _is_none(p)]
    return tuple(kept) if len(kept) == len(policies) else (*kept, FIT)


def _is_none(policy: Any) -> bool:
    return not is_fit(policy) and known.resolve(policy) == known.none


@dataclasses.dataclass(frozen=True)
class Training:
    """All that a training step is made of, with shapes for arrays.

    Attributes:
      loss_fn: as for :func:`gradacc_jax.plan`.
      optimizer: the plain optimizer.
      params: all parameters.
      batch: examples, of any number.
      batch_axis: where the examples are.
      key: a key, or None.
      carried: state that the loss carries, or None for a loss without.
      trainable: a pytree prefix of the parameters, of booleans.
      has_aux: whether the loss returns ``(loss, aux)``.
      weight_fn: from a batch to its weight, or None.
      loss_reduction: "mean" or "sum".
    """

    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    params: PyTree
    batch: PyTree
    batch_axis: PyTree = 0
    key: Any = None
    carried: PyTree = None
    trainable: PyTree = None
    has_aux: bool = False
    weight_fn: Callable[..., Any] | None = None
    loss_reduction: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, AccumulateTransformation):
            raise ValueError(
                "optimizer is an accumulator already, and the plan is to choose its k; "
                "pass the optimizer inside it"
            )

    @functools.cached_property
    def axes(self) -> PyTree:
        """For each array of the batch, the axis of its examples."""
        return splitting.batch_axes(self.batch, self.batch_axis)

    @property
    def num_examples(self) -> int:
        """How many examples the given batch has."""
        return splitting.num_examples(self.batch, self.axes)

    @property
    def num_devices(self) -> int:
        """Over how many devices the examples are spread."""
        counts = {1}
        for x, axis in zip(jax.tree.leaves(self.batch), jax.tree.leaves(self.axes)):
            sharding = getattr(x, "sharding", None)
            if isinstance(sharding, NamedSharding) and 0 <= axis < len(sharding.spec):
                names = sharding.spec[axis]
                names = names if isinstance(names, tuple) else (names,)
                counts.add(math.prod(sharding.mesh.shape[n] for n in names if n))
        return max(counts)

    @property
    def sums_bytes(self) -> int:
        """The bytes of the sums of gradients: at least float32 each."""
        trained, _ = self._split(self.params)
        return sum(
            x.size * max(x.dtype.itemsize, 4)
            for x in map(as_shape, jax.tree.leaves(trained))
        )

    def variants(self, policies: Sequence[Any]) -> list[Variant]:
        """Each policy in both forms, but for the one that is made for a limit."""
        given = applicable(self.loss_fn, policies)
        usable = [p for p in given if not is_fit(p)]
        if self.num_devices > 1 and not usable:
            raise ValueError(
                f"policies={tuple(policies)!r}: without a keyword `policy` of the loss "
                f'all but "none" are "fit", which is planned on one device, and the '
                f'batch is spread over {self.num_devices}; add "none"'
            )
        if len(usable) < len(given) and not any(map(_is_none, usable)):
            usable.append("none")  # which fit is, where it fits
        forms = [(ONE_CALL, self.in_one_call, False)]
        # Across calls sums are divided by weights, and these are 1 if nobody says more.
        if self.loss_reduction != "sum" or self.weight_fn is not None:
            forms.append((ACROSS_CALLS, self.across_calls, True))
        return [
            Variant(policy, form, functools.partial(make, policy), emits=emits)
            for form, make, emits in forms
            for policy in usable
        ]

    def fitting(self, policies: Sequence[Any]) -> Fitting | None:
        """The policy that is made for a limit, if it may be tried."""
        if self.num_devices > 1 or not any(
            map(is_fit, applicable(self.loss_fn, policies))
        ):
            return None
        plain = functools.partial(self.in_one_call, "none")
        make = functools.partial(self._in_one_call, "none")
        return Fitting(Variant("none", ONE_CALL, plain), make)

    def in_one_call(self, policy: Any, size: int, count: int) -> Made:
        """A step on the global batch, which is split inside the program."""
        return _as_it_is(self._in_one_call(policy, size, count))

    def _in_one_call(self, policy: Any, size: int, count: int) -> Unfitted:
        total = min(size * count, self.global_examples) * self.num_devices
        return self._unfitted(policy, self.optimizer, total, count)

    def across_calls(self, policy: Any, size: int, count: int) -> Made:
        """A micro-step on one micro-batch, ``count`` of which make a step."""
        tx = self.tx_of(ACROSS_CALLS, count)
        total = size * self.num_devices
        return _as_it_is(self._unfitted(policy, tx, total, 1))

    # Of one device; what is cut unequally has fewer than size x count.
    global_examples: int = 2**62

    def tx_of(self, form: str, count: int) -> optax.GradientTransformation:
        """The optimizer that a form's state is made with."""
        if form == ONE_CALL:
            return self.optimizer
        reduction = self.loss_reduction or "mean"
        return accumulate(self.optimizer, count, loss_reduction=reduction)

    def _unfitted(
        self, policy: Any, tx: optax.GradientTransformation, total: int, count: int
    ) -> Unfitted:
        trained, frozen = self._split(self.params)
        loss_fn = with_policy(self.loss_fn, policy)
        if self.carried is None:
            of_user = stateless(loss_fn, self.has_aux)
        else:
            of_user = functools.partial(_with_state, loss_fn, self.has_aux)

        def loss(params: PyTree, carried: PyTree, batch: PyTree, *key: Any) -> Any:
            frozen, examples = batch
            return of_user(_merged(params, frozen), carried, examples, *key)

        weight_fn = self.weight_fn
        options = StepOptions(
            num_microbatches=count,
            batch_axis=(None, self.batch_axis),
            has_aux=True,
            weight_fn=None if weight_fn is None else lambda batch: weight_fn(batch[1]),
            loss_reduction=self.loss_reduction,
        )

        donated = (0, 1, 2)

        def step_of(loss: Callable[..., Any]) -> Any:
            def step(
                params: PyTree,
                state: PyTree,
                carried: PyTree,
                batch: PyTree,
                key: Any = None,
                *,
                emit: bool | None = None,
            ) -> Any:
                given = params, state, carried, batch, key
                return micro_step(loss, tx, *given, options=options, emit=emit)

            return jax.jit(step, static_argnames=("emit",), donate_argnums=donated)

        def resized(x: Any, axis: int) -> Any:
            if axis < 0:
                return x
            shape = (*x.shape[:axis], total, *x.shape[axis + 1 :])
            sharding = getattr(x, "sharding", None)
            named = sharding if isinstance(sharding, NamedSharding) else None
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=named)

        batch = jax.tree.map(resized, self.batch, self.axes)
        carried = () if self.carried is None else self.carried
        key = () if self.key is None else (self.key,)
        args = (trained, _state(tx, trained), carried, (frozen, batch), *key)
        return Unfitted(step_of, loss, args, donated)

    def _split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """The parameters that are trained, and the others; None where the other is."""
        if self.trainable is None:
            return params, None
        return split(params, self.trainable)

    def face(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """The step as its user calls it.

        Args:
          program: what was made of the step, jitted or compiled.

        Returns:
          ``step(params, state, batch[, key]) -> (params, state, metrics)``; with
          carried state ``step(params, state, carried, batch[, key])``.
        """

        def step(params: PyTree, state: PyTree, *rest: Any, **kwargs: Any) -> Any:
            carried, *others = rest if self.carried is not None else ((), *rest)
            batch, *key = others
            trained, frozen = self._split(params)
            trained, state, carried, metrics = program(
                trained, state, carried, (frozen, batch), *key, **kwargs
            )
            params = _merged(trained, frozen)
            if self.carried is None:
                return params, state, metrics
            return params, state, carried, metrics

        return step


def _as_it_is(step: Unfitted) -> Made:
    """A step, its loss as the user gave it."""
    return Made(step.step_of(step.loss_fn), step.args, step.donate_argnums)


def split(params: PyTree, trainable: PyTree) -> tuple[PyTree, PyTree]:
    """Two trees like the parameters: the trained ones, and the frozen ones.

    Args:
      params: the parameters.
      trainable: a pytree prefix of them, of booleans.

    Raises:
      ValueError: it is none.
    """
    try:
        which = jax.tree.map(
            lambda yes, tree: jax.tree.map(lambda _: bool(yes), tree),
            trainable,
            params,
        )
    except ValueError as error:
        raise ValueError(
            f"trainable={trainable} is no pytree prefix of the parameters "
            f"{jax.tree.structure(params)}; pass booleans in a tree that begins alike"
        ) from error
    if not any(jax.tree.leaves(which)):
        raise ValueError("trainable: no parameter is; mark some with True")
    return (
        jax.tree.map(lambda yes, x: x if yes else None, which, params),
        jax.tree.map(lambda yes, x: None if yes else x, which, params),
    )


def _merged(trained: PyTree, frozen: PyTree) -> PyTree:
    if frozen is None:
        return trained
    return jax.tree.map(
        lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None
    )


def _with_state(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    params: PyTree,
    carried: PyTree,
    *args: Any,
) -> tuple[Any, PyTree]:
    """A loss that carries state, in the form that the step takes."""
    value, rest = loss_fn(params, carried, *args)
    return value, (rest if has_aux else (rest, None))


def _state(tx: optax.GradientTransformation, params: PyTree) -> PyTree:
    """The shapes of the optimizer's state, with moments where the parameters are."""
    shapes = jax.tree.map(as_shape, params)
    state = jax.eval_shape(tx.init, shapes)
    meshes = [
        x.sharding.mesh
        for x in jax.tree.leaves(params)
        if isinstance(getattr(x, "sharding", None), NamedSharding)
    ]
    if not meshes:
        return state
    everywhere = NamedSharding(meshes[0], PartitionSpec())
    return optax.tree.map_params(
        tx,
        lambda s, p: as_shape(s, getattr(p, "sharding", None)),
        state,
        params,
        transform_non_params=lambda s: as_shape(s, everywhere),
    )
