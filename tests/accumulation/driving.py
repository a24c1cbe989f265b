"""Drives a transformation through micro-steps, in the two ways that users have."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from gradacc_jax import apply_gradients

# Gradients of parameters 0 move them to minus their running sum: a factor shows.
SGD = optax.sgd(1.0)
ZERO = np.zeros((), np.float32)
WAYS = ("update", "apply_gradients")


class Step(NamedTuple):
    """What one micro-step left behind."""

    params: Any
    state: Any


def jitted(tx, way="apply_gradients"):
    """``step(params, state, grads, **extra_args)``; ``emit`` is static there."""

    def step(params, state, grads, emit=None, traced_emit=None, **extra_args):
        if emit is not None or traced_emit is not None:
            extra_args["emit"] = emit if traced_emit is None else traced_emit
        if way == "apply_gradients":
            return apply_gradients(tx, params, state, grads, **extra_args)
        updates, state = optax.with_extra_args_support(tx).update(
            grads, state, params, **extra_args
        )
        # optax adds float32 updates to bfloat16 parameters.
        with jax.numpy_dtype_promotion("standard"):
            return optax.apply_updates(params, updates), state

    return jax.jit(step, static_argnames="emit")


def drive(tx, grads, *, params=ZERO, way="apply_gradients", step=None, **series):
    """Every micro-step of ``tx`` on ``grads``; ``series`` are extra arguments.

    ``emit=[...]`` are Python booleans or None, ``traced_emit=[...]`` are arrays.
    """
    step = jitted(tx, way) if step is None else step
    state = tx.init(params)
    steps = []
    for i, g in enumerate(grads):
        given = {name: values[i] for name, values in series.items()}
        given = {name: value for name, value in given.items() if value is not None}
        params, state = step(params, state, as_arrays(g), **given)
        steps.append(Step(params, state))
    return steps


def as_arrays(tree):
    """Python numbers in a tree as float32 arrays."""
    return jax.tree.map(lambda x: np.float32(x) if type(x) is float else x, tree)


def moves(steps, start=0.0):
    """By how much each micro-step moved a scalar parameter."""
    return np.diff([start, *(float(step.params) for step in steps)]).tolist()


def counters(steps):
    """What must never depend on data."""
    return [
        (int(s.state.mini_step), int(s.state.gradient_step), bool(s.state.emitted))
        for s in steps
    ]


def signature(tree):
    """Structure, shapes, dtypes and weak types: what a compiled program depends on."""
    shapes = jax.tree.map(jax.typeof, tree)
    return jax.tree.structure(shapes), [
        (x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(shapes)
    ]


def assert_same_bits(actual, expected):
    """-0.0 is not 0.0 here, and nan is nan."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected))
    for (path, a), b in pairs:
        a, b = np.asarray(a), np.asarray(b)
        where = jax.tree_util.keystr(path)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert a.tobytes() == b.tobytes(), f"{where}: {a} is not {b}"
