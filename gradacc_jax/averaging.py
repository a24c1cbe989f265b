"""A running average of the parameters that counts optimizer steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradacc_jax import precision

PyTree = Any


class ParameterEmaState(NamedTuple):
    """State of :func:`parameter_ema`.

    Attributes:
      parameter_ema: the average, a tree like the parameters.
    """

    parameter_ema: PyTree


def parameter_ema(
    decay: float, dtype: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps an exponential moving average of the parameters in the optimizer's state.

    After a step to parameters :math:`p_t`,

    .. math:: e_t = d \, e_{t-1} + (1 - d) \, p_t, \qquad e_0 = p_0.

    It stands last in the chain that :func:`accumulate` wraps, where it sees each
    optimizer step once. Beside the accumulator, in a training loop, an average would
    also count the silent micro-steps, and decay k times too fast.

    Args:
      decay: :math:`d`, in [0, 1).
      dtype: least dtype of the average: ``promote_types`` of it and the parameter's.

    Returns:
      A transformation that leaves the updates as they are. Its average is
      ``optax.tree.get(state, "parameter_ema")``. Memory: one average per parameter.

    Raises:
      ValueError: for a decay outside [0, 1), and for an update without ``params``.

    References:
      Polyak and Juditsky, `Acceleration of stochastic approximation by averaging
      <https://doi.org/10.1137/0330046>`_, 1992.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from gradacc_jax import accumulate, apply_gradients, parameter_ema
      >>> tx = accumulate(optax.chain(optax.sgd(1.0), parameter_ema(0.5)), 2)
      >>> params = jnp.array(8.0)
      >>> state = tx.init(params)
      >>> for _ in range(2):
      ...     params, state = apply_gradients(tx, params, state, jnp.array(4.0))
      >>> print(params, optax.tree.get(state, "parameter_ema"))
      4.0 6.0
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay={decay} is not in [0, 1); choose 0.999, say")
    least = precision.check_dtype("dtype", dtype)

    def wide(x: jax.Array) -> jax.Array:
        own = precision.dtype_of(x)
        to = own if least is None else precision.promote_types(least, own)
        return jnp.asarray(x).astype(to)

    def init(params: PyTree) -> ParameterEmaState:
        # A state of its own: a step that donates both could not run otherwise.
        return ParameterEmaState(precision.owned(jax.tree.map(wide, params), params))

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, ParameterEmaState]:
        del extra_args
        if params is None:
            raise ValueError(
                "params=None, but parameter_ema averages them; call "
                "tx.update(grads, state, params)"
            )
        moved = jax.tree.map(
            lambda p, u: wide(p) + u.astype(wide(p).dtype), params, updates
        )
        average = optax.incremental_update(moved, state.parameter_ema, 1 - decay)
        return updates, ParameterEmaState(average)

    return optax.GradientTransformationExtraArgs(init, update)
