"""Lets optax promote dtypes and ranks inside a test in which nothing else may."""

import jax
import optax


def lenient(opt):
    """``opt``, whose ``init`` and ``update`` run under JAX's standard promotion."""
    opt = optax.with_extra_args_support(opt)

    def init(params):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return opt.init(params)

    def update(grads, state, params=None, **extra_args):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return opt.update(grads, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)
