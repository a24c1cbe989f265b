"""The same training step for Flax: linen's ``TrainState``, and nnx models.

Both count optimizer steps: ``step`` advances when a window is emitted, so a schedule or
a checkpoint name that reads it means what it says.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import dynamic_scale, train_state
import jax
import jax.numpy as jnp

from gradacc_jax import losses, microbatching, precision
from gradacc_jax.accumulation import apply_gradients
from gradacc_jax.accumulation.state import accumulators
from gradacc_jax.checkpointing import policies
from gradacc_jax.checkpointing.modules import remat_modules
from gradacc_jax.monitoring import StepMetrics
from gradacc_jax.stepping import (
    LossFn,
    StepOptions,
    WeightFn,
    micro_step,
    stateless,
    takes_policy,
    with_policy,
)

PyTree = Any

__all__ = [
    "DynamicScale",
    "Optimizer",
    "TrainState",
    "linen_train_step",
    "nnx_train_step",
]


class TrainState(train_state.TrainState):
    """``flax.training.train_state.TrainState`` for a ``tx`` that accumulates.

    ``apply_gradients`` takes ``weight`` and ``emit``, forwards extra arguments of the
    optimizer, and costs one addition on a silent micro-step; ``step`` counts emitted
    steps. With a plain optimizer it is Flax's.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from gradacc_jax import accumulate
      >>> from gradacc_jax.flax import TrainState
      >>> state = TrainState.create(
      ...     apply_fn=None, params={"w": jnp.array(1.0)},
      ...     tx=accumulate(optax.sgd(0.5), 2),
      ... )
      >>> for gradient, tokens in ((1.0, 3), (5.0, 1)):
      ...     grads = {"w": jnp.array(gradient)}
      ...     state = state.apply_gradients(grads=grads, weight=tokens)
      ...     print(state.step, state.params["w"])
      0 1.0
      1 0.0
    """

    def apply_gradients(
        self, *, grads: PyTree, weight: Any = None, emit: Any = None, **kwargs: Any
    ) -> "TrainState":
        """One micro-step.

        Args:
          grads: the micro-batch's gradients, like ``params``.
          weight: see :func:`gradacc_jax.accumulate`.
          emit: see :func:`gradacc_jax.accumulate`.
          **kwargs: names of fields are replaced, as in Flax; all others are extra
            arguments of the optimizer, such as ``value``.

        Returns:
          The new state.
        """
        names = {field.name for field in dataclasses.fields(self)}
        fields = {name: kwargs[name] for name in kwargs if name in names}
        extra_args = {name: kwargs[name] for name in kwargs if name not in names}
        params: Any = self.params
        own_grads = grads
        # Flax's 8-bit layers carry scales as "parameters" whose gradient replaces them.
        overwrites = OVERWRITE_WITH_GRADIENT in grads
        if overwrites:
            params, own_grads = self.params["params"], grads["params"]
        params, opt_state = apply_gradients(
            self.tx,
            params,
            self.opt_state,
            own_grads,
            weight=weight,
            emit=emit,
            **extra_args,
        )
        if overwrites:
            replaced = grads[OVERWRITE_WITH_GRADIENT]
            params = {"params": params, OVERWRITE_WITH_GRADIENT: replaced}
        return self.replace(
            step=_next_step(self.step, opt_state),
            params=params,
            opt_state=opt_state,
            **fields,
        )

    @classmethod
    def create(cls, **kwargs: Any) -> "TrainState":
        """As Flax's, with ``step`` an array from the beginning: jit traces once."""
        state = super().create(**kwargs)
        return state.replace(step=jnp.zeros((), jnp.int32))


def linen_train_step(
    loss_fn: LossFn,
    *,
    carry: str | None = None,
    policy: Any = "none",
    has_aux: bool = False,
    weight_fn: WeightFn | None = None,
    donate: bool = True,
    **options: Any,
) -> Callable[..., tuple[train_state.TrainState, StepMetrics]]:
    """:func:`gradacc_jax.train_step` for a linen ``TrainState``.

    The step is ``step(state, batch, key=None, *, emit=None) -> (state, metrics)``.

    Args:
      loss_fn: ``loss_fn(params, batch)`` or ``loss_fn(params, batch, key)``.
      carry: a field of the state that goes from one micro-batch to the next, in order:
        ``"batch_stats"`` of a ``TrainState`` that has it, say. Then the loss is
        ``loss_fn(params, batch_stats, batch)`` and returns ``(loss, batch_stats)`` or,
        with ``has_aux``, ``(loss, (batch_stats, aux))``.
      policy: as for ``train_step``; for the blocks of a model that takes none use
        :func:`gradacc_jax.remat_modules`.
      has_aux: whether ``loss_fn`` returns aux.
      weight_fn: from the batch to its number of loss terms.
      donate: whether the state is updated in place.
      **options: ``num_microbatches``, ``microbatch_size``, ``batch_axis``,
        ``loss_reduction``, ``aux_reduction`` and ``unroll`` as for ``train_step``.

    Returns:
      The step, a ``jax.jit`` function.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> from gradacc_jax import accumulate
      >>> from gradacc_jax.flax import TrainState, linen_train_step
      >>> model = nn.Dense(1)
      >>> x, y = jnp.ones((4, 3)), jnp.ones((4, 1))
      >>> state = TrainState.create(
      ...     apply_fn=model.apply,
      ...     params=model.init(jax.random.key(0), x)["params"],
      ...     tx=accumulate(optax.adam(1e-3), 2),
      ... )
      >>> def loss_fn(params, batch):
      ...     x, y = batch
      ...     return jnp.mean((model.apply({"params": params}, x) - y) ** 2)
      >>> step = linen_train_step(loss_fn)
      >>> for _ in range(4):
      ...     state, metrics = step(state, (x, y))
      >>> print(state.step)
      2
    """
    settings = StepOptions(has_aux=has_aux, weight_fn=weight_fn, **options)
    rematerialised = with_policy(loss_fn, policy)

    def loss(params: PyTree, carried: PyTree, *args: Any) -> tuple[Any, PyTree]:
        if carry is None:
            return stateless(rematerialised, has_aux)(params, carried, *args)
        what = f"(loss, {carry})"
        value, rest = losses.pair_of(rematerialised(params, carried, *args), True, what)
        new, aux = losses.pair_of(rest, has_aux, f"({carry}, aux)")
        return value, (new, aux)

    def step(
        state: train_state.TrainState,
        batch: PyTree,
        key: jax.Array | None = None,
        *,
        emit: bool | None = None,
    ) -> tuple[train_state.TrainState, StepMetrics]:
        if OVERWRITE_WITH_GRADIENT in state.params:
            raise ValueError(
                f"state.params holds {OVERWRITE_WITH_GRADIENT!r}, scales of 8-bit "
                "layers; take their gradients yourself and call "
                "TrainState.apply_gradients"
            )
        if carry is not None:
            _check_field(state, carry)
        params, opt_state, carried, metrics = micro_step(
            loss,
            state.tx,
            state.params,
            state.opt_state,
            () if carry is None else getattr(state, carry),
            batch,
            key,
            options=settings,
            emit=emit,
        )
        new = {} if carry is None else {carry: carried}
        count = _next_step(state.step, opt_state)
        state = state.replace(step=count, params=params, opt_state=opt_state, **new)
        return state, metrics

    return jax.jit(
        step, static_argnames=("emit",), donate_argnums=(0,) if donate else ()
    )


class Optimizer(nnx.Optimizer[Any]):
    """``nnx.Optimizer`` for a ``tx`` that accumulates.

    ``update`` takes ``weight`` and ``emit`` and costs one addition on a silent
    micro-step; ``step`` counts emitted steps. With a plain optimizer it is Flax's, but
    for returning nothing: a tree of updates is what a silent micro-step saves.

    Examples:
      >>> from flax import nnx
      >>> import jax.numpy as jnp, optax
      >>> from gradacc_jax import accumulate
      >>> from gradacc_jax.flax import Optimizer
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = Optimizer(model, accumulate(optax.sgd(0.1), 2), wrt=nnx.Param)
      >>> def loss_fn(model):
      ...     return jnp.mean(model(jnp.ones((4, 2))) ** 2)
      >>> for _ in range(4):
      ...     optimizer.update(model, nnx.grad(loss_fn)(model), weight=4)
      >>> print(optimizer.step[...])
      2
    """

    def update(  # type: ignore[override]  # returns no updates: see above
        self,
        model: Any,
        grads: PyTree,
        /,
        *,
        weight: Any = None,
        emit: Any = None,
        **extra_args: Any,
    ) -> None:
        """One micro-step, in place.

        Args:
          model: the model that ``grads`` were taken of.
          grads: the micro-batch's gradients, as ``nnx.grad`` gives them.
          weight: see :func:`gradacc_jax.accumulate`.
          emit: see :func:`gradacc_jax.accumulate`.
          **extra_args: for the optimizer, such as ``value``.
        """
        params, opt_state = apply_gradients(
            self.tx,
            nnx.as_pure(nnx.state(model, self.wrt, graph=self.graph)),
            nnx.as_pure(self.opt_state),
            nnx.as_pure(nnx.state(grads, self.wrt, graph=self.graph)),
            weight=weight,
            emit=emit,
            **nnx.as_pure(extra_args),
        )
        nnx.update(model, params)
        _advance(self, opt_state)


def nnx_train_step(
    loss_fn: LossFn,
    *,
    policy: Any = "none",
    has_aux: bool = False,
    weight_fn: WeightFn | None = None,
    donate: bool = True,
    **options: Any,
) -> Callable[..., StepMetrics]:
    """:func:`gradacc_jax.train_step` for an nnx model and optimizer.

    The step is ``step(model, optimizer, batch, key=None, emit=None) -> metrics``; it
    changes the model and the optimizer in place. What the model holds besides the
    optimizer's parameters (random streams, statistics) is carried from micro-batch to
    micro-batch, in order. What it sows in a call of several micro-batches is that of
    the last one.

    Args:
      loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, key)``.
      policy: what the forward pass keeps for the backward pass. ``loss_fn`` is given
        the model with its repeated blocks rematerialised, by
        :func:`gradacc_jax.remat_modules`; or, if it has a keyword ``policy``, the
        policy, and the model as it is.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
      weight_fn: from the batch to its number of loss terms.
      donate: whether the old arrays are given up for the new ones. Then ``nnx.clone``,
        which shares arrays, keeps nothing: copy them to keep a model as it was.
      **options: ``num_microbatches``, ``microbatch_size``, ``batch_axis``,
        ``loss_reduction``, ``aux_reduction`` and ``unroll`` as for ``train_step``.

    Returns:
      The step, an ``nnx.jit`` function.

    Examples:
      >>> from flax import nnx
      >>> import jax.numpy as jnp, optax
      >>> from gradacc_jax import accumulate
      >>> from gradacc_jax.flax import Optimizer, nnx_train_step
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> optimizer = Optimizer(model, accumulate(optax.adam(1e-3), 2), wrt=nnx.Param)
      >>> def loss_fn(model, batch):
      ...     x, y = batch
      ...     return jnp.mean((model(x) - y) ** 2)
      >>> step = nnx_train_step(loss_fn)
      >>> for _ in range(4):
      ...     metrics = step(model, optimizer, (jnp.ones((4, 3)), jnp.ones((4, 1))))
      >>> print(optimizer.step[...])
      2
    """
    policy = policies.resolve(policy)
    given = with_policy(loss_fn, policy) if takes_policy(loss_fn) else loss_fn
    settings = StepOptions(has_aux=has_aux, weight_fn=weight_fn, **options)
    # What is sown has shapes of its own in every model: no reduction but "last" fits.
    settings = dataclasses.replace(
        settings, aux_reduction=("last", settings.aux_reduction)
    )

    def step(
        model: Any,
        optimizer: nnx.Optimizer[Any],
        batch: PyTree,
        key: jax.Array | None = None,
        emit: bool | None = None,
    ) -> StepMetrics:
        if not isinstance(optimizer, nnx.Optimizer):
            raise TypeError(
                f"optimizer={type(optimizer).__name__} is not an nnx.Optimizer; call "
                "step(model, optimizer, batch)"
            )
        # What was sown before would grow from call to call, and be another state.
        nnx.pop(model, nnx.Intermediate)
        graphdef, *states = nnx.split(model, optimizer.wrt, ...)
        params, carried = map(nnx.as_pure, states)
        known = dict(nnx.to_flat_state(carried))

        def loss(params: PyTree, carried: PyTree, *args: Any) -> tuple[Any, PyTree]:
            copy = nnx.merge(graphdef, params, carried)
            if policy != policies.none and not takes_policy(loss_fn):
                copy = _rematerialised(copy, policy)
            value, aux = losses.pair_of(given(copy, *args), has_aux)
            new = dict(nnx.to_flat_state(nnx.state(copy, nnx.Not(optimizer.wrt))))
            sown = {path: new.pop(path) for path in list(new) if path not in known}
            return value, (
                nnx.as_pure(nnx.from_flat_state(new)),
                (nnx.from_flat_state(sown), aux),
            )

        params, opt_state, carried, metrics = micro_step(
            loss,
            optimizer.tx,
            params,
            nnx.as_pure(optimizer.opt_state),
            carried,
            batch,
            key,
            options=settings,
            emit=emit,
        )
        sown, aux = metrics.aux
        nnx.update(model, params, carried, sown)
        _advance(optimizer, opt_state)
        return metrics._replace(aux=aux)

    return nnx.jit(
        step, static_argnames=("emit",), donate_argnums=(0, 1) if donate else ()
    )


class DynamicScale(dynamic_scale.DynamicScale):
    """``flax.training.dynamic_scale.DynamicScale`` for batches in micro-batches.

    In float16 small gradients underflow. The loss is multiplied by a scale, and the
    gradients divided by it once they are in float32; where that made them overflow,
    they are to be dropped and the scale is lowered. Across calls Flax's own serves as
    it is, once per micro-batch: hand on what it found as a weight of 0, or let
    ``accumulate(..., skip_nonfinite="micro_batch")`` see to it.

    Examples:
      >>> import jax.numpy as jnp
      >>> from gradacc_jax.flax import DynamicScale
      >>> def loss_fn(w, x):
      ...     return jnp.mean((w * x).astype(jnp.float16) ** 2).astype(jnp.float32)
      >>> scale = DynamicScale(scale=1024.0)
      >>> scale, is_finite, loss, grad = scale.value_and_grad(
      ...     loss_fn, num_microbatches=2)(jnp.float32(3), jnp.array([1.0, 2.0]))
      >>> print(is_finite, loss, grad, scale.scale)
      True 22.5 15.0 1024.0
    """

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: str | None = None,
        **options: Any,
    ) -> Callable[..., dynamic_scale.DynamicScaleResult]:
        """As Flax's; with options, :func:`gradacc_jax.value_and_grad` of a scaled loss.

        Args:
          fun: the loss, or ``(loss, aux)``.
          argnums: which arguments to differentiate.
          has_aux: whether ``fun`` returns aux.
          axis_name: as in Flax, without options.
          **options: ``num_microbatches``, ``weight_fn``, ... All micro-batches of a
            call have one scale.

        Returns:
          A function that returns ``(dynamic_scale, is_finite, value, grads)``, the
          gradients in float32. Where ``is_finite`` is False keep the parameters.
        """
        flax_form = super().value_and_grad
        if not options:
            return flax_form(fun, argnums, has_aux, axis_name)
        if axis_name is not None:
            raise ValueError(
                f"axis_name={axis_name!r} is for Flax's own form; leave it out beside "
                f"{', '.join(options)}"
            )
        pairs = has_aux or options.get("state_argnums", ()) != ()

        def scaled(*args: Any, **kwargs: Any) -> Any:
            value, rest = losses.pair_of(fun(*args, **kwargs), pairs)
            value = jax.tree.map(
                lambda x: self.scale * jnp.asarray(x).astype(jnp.float32), value
            )
            return (value, rest) if pairs else value

        both = microbatching.value_and_grad(scaled, argnums, has_aux, **options)

        @functools.wraps(fun)
        def run(*args: Any, **kwargs: Any) -> dynamic_scale.DynamicScaleResult:
            out, grads = both(*args, **kwargs)
            value, rest = losses.pair_of(out, pairs)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / self.scale, grads)
            finite = precision.all_finite(grads)

            # Flax's rule for the next scale, from one number that is finite if all are.
            def stand_in(x: jax.Array) -> jax.Array:
                return x * jnp.where(finite, jnp.float32(1), jnp.float32(jnp.nan))

            new = flax_form(stand_in)(jnp.float32(1)).dynamic_scale
            value = value / self.scale
            return dynamic_scale.DynamicScaleResult(
                new, finite, (value, rest) if pairs else value, grads
            )

        return run


def _rematerialised(model: Any, policy: policies.Policy) -> Any:
    try:
        return remat_modules(model, policy=policy)
    except ValueError as error:
        raise ValueError(
            f"policy={policy!r} for {type(model).__name__}: {error}; call "
            "remat_modules(model, policy, match=...) in the loss, and leave policy out"
        ) from error


def _check_field(state: train_state.TrainState, carry: str) -> None:
    names = {field.name for field in dataclasses.fields(state)}
    own = {field.name for field in dataclasses.fields(train_state.TrainState)}
    if carry not in names - own:
        raise ValueError(
            f"carry={carry!r} is no field of {type(state).__name__} that can be "
            f"carried, such as {sorted(names - own) or 'batch_stats'}; subclass "
            "TrainState with that field"
        )
    if getattr(state, carry) is None:
        raise ValueError(
            f"carry={carry!r} is None in the state; fill it when the state is created"
        )


def _next_step(step: Any, opt_state: PyTree) -> jax.Array:
    """The count of optimizer steps after a micro-step that left ``opt_state``."""
    step = jnp.asarray(step)
    found = accumulators(opt_state)
    emitted = jnp.ones((), bool)
    for state in found:
        emitted = emitted & state.emitted
    return step + emitted.astype(step.dtype)


def _advance(optimizer: nnx.Optimizer[Any], opt_state: PyTree) -> None:
    nnx.update(optimizer.opt_state, nnx.state(opt_state, graph=optimizer.graph))
    optimizer.step[...] = _next_step(optimizer.step[...], opt_state)
