"""In which dtypes sums are kept and handed on, and how far they are exact."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradacc_jax import accumulate, apply_gradients
from tests.accumulation.driving import (
    SGD,
    WAYS,
    assert_same_bits,
    drive,
    signature,
)
from tests.lenient import lenient

both_ways = pytest.mark.parametrize("way", WAYS)
BF16_ZERO = np.zeros((), jnp.bfloat16)


def bf16(*numbers):
    return [jnp.bfloat16(x) for x in numbers]


def seeing(dtypes):
    """An inner transformation that notes the dtype of the gradients it is given."""

    def update(updates, state, params=None):
        dtypes.append(jax.tree.map(lambda g: g.dtype.name, updates))
        return updates, state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


@both_ways
def test_512_bfloat16_ones_add_up_to_512(way):  # N1
    tx = accumulate(SGD, 512, use_grad_mean=False)
    steps = drive(tx, bf16(*[1] * 512), params=BF16_ZERO, way=way)
    assert steps[-1].state.acc_grads == 512
    assert steps[-1].params == -512


def test_a_bfloat16_accumulator_stops_at_256_where_one_asks_for_it():  # N1
    tx = accumulate(SGD, 512, use_grad_mean=False, accumulator_dtype=jnp.bfloat16)
    steps = drive(tx, bf16(*[1] * 512), params=BF16_ZERO)
    assert steps[-1].params == -256


@both_ways
def test_the_inner_optimizer_sees_the_gradients_dtype_or_inner_dtype(way):  # N2
    # The mean of 1, 1 and 1 + 2**-7 needs more than bfloat16's 8 bits.
    gradients = bf16(1, 1, 1 + 2**-7)
    for inner_dtype, name in ((None, "bfloat16"), (jnp.float32, "float32")):
        seen = []
        tx = accumulate(seeing(seen), 3, inner_dtype=inner_dtype)
        step = drive(tx, gradients, params=BF16_ZERO, way=way)[-1]
        assert set(seen) == {name}
        assert step.params.dtype == jnp.bfloat16
    updates = updates_of(
        accumulate(optax.identity(), 3, inner_dtype="float32"), gradients
    )
    np.testing.assert_allclose(
        np.float64(updates), 1 + 2**-7 / 3, rtol=2 * np.finfo(np.float32).eps
    )
    assert updates_of(accumulate(optax.identity(), 3), gradients) == 1


def updates_of(tx, gradients, params=BF16_ZERO):
    """The updates of the last micro-step, before they are rounded into parameters."""
    state = tx.init(params)
    for g in gradients:
        updates, state = tx.update(g, state, params)
    return updates


@pytest.mark.parametrize("inner_dtype", [None, jnp.float32])
def test_silent_updates_have_the_dtype_of_the_emitted_ones(inner_dtype):
    tx = accumulate(SGD, 2, inner_dtype=inner_dtype)
    state = tx.init(BF16_ZERO)
    silent, state = tx.update(jnp.bfloat16(1), state, BF16_ZERO)
    emitted, state = tx.update(jnp.bfloat16(1), state, BF16_ZERO)
    assert silent.dtype == emitted.dtype == (inner_dtype or jnp.bfloat16)


@pytest.mark.parametrize("opt", [optax.adam(0.1), optax.sgd(0.1, momentum=0.9)])
def test_with_inner_dtype_the_inner_state_keeps_its_stored_dtypes(opt):
    tx = accumulate(lenient(opt), 1 + 1, inner_dtype=jnp.float32)
    start = tx.init(BF16_ZERO)
    last = drive(tx, bf16(1, 2, 3, 4), params=BF16_ZERO)[-1]
    assert signature(last.state) == signature(start)


def test_float64_gradients_are_added_in_float64():  # N3
    with jax.enable_x64(True):
        zero = np.zeros((), np.float64)
        gradients = [np.float64(g) for g in (1, 1 + 3e-9, 1 + 3e-9)]
        tx = accumulate(SGD, 3)
        assert tx.init(zero).acc_grads.dtype == np.float64
        last = drive(tx, gradients, params=zero)[-1]
        eps = np.finfo(np.float64).eps
        np.testing.assert_allclose(last.params, -(1 + 2e-9), rtol=4 * eps)
        weights = [np.float64(w) for w in (1, 1, 2)]
        last = drive(tx, gradients, params=zero, weight=weights)[-1]
        np.testing.assert_allclose(last.params, -(1 + 2.25e-9), rtol=6 * eps)


@both_ways
def test_without_an_accumulator_dtype_the_gradients_is_taken(way):  # N4
    tx = accumulate(SGD, 2, accumulator_dtype=None)
    steps = drive(tx, bf16(1, 3), params=BF16_ZERO, way=way)
    assert steps[-1].state.acc_grads.dtype == jnp.bfloat16
    assert steps[-1].params == -2


@pytest.mark.parametrize(
    ("least", "own", "kept"),
    [
        ("float32", "float16", "float32"),
        ("float32", "float32", "float32"),
        ("float32", "complex64", "complex64"),
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "float16", "float32"),  # the least that holds both
        ("float16", "complex64", "complex64"),
        (None, "bfloat16", "bfloat16"),
        (None, "float16", "float16"),
    ],
)
def test_accumulator_dtype_is_a_least_dtype(least, own, kept):
    state = accumulate(SGD, 2, accumulator_dtype=least).init(np.zeros(2, own))
    assert state.acc_grads.dtype == kept


def test_x64_weights_and_sums_of_narrow_parameters_keep_the_contracts_dtypes():
    with jax.enable_x64(True):
        params = np.zeros((), np.float32)
        start = accumulate(SGD, 2).init(params)
        assert start.acc_grads.dtype == np.float32
        assert start.acc_weight.dtype == np.float64
        for tx in (accumulate(SGD, 2), accumulate(SGD, lambda n: np.int64(2))):
            last = drive(tx, [1.0, 3.0], params=params, weight=[3, np.float64(1)])[-1]
            assert last.params == -1.5
            assert signature(last.state) == signature(start)


@both_ways
@pytest.mark.parametrize("weight", [None, [jnp.float32(2), jnp.float32(6)]])
def test_a_narrower_accumulator_from_a_checkpoint_is_widened(way, weight):  # N5
    weight = {} if weight is None else {"weight": weight}
    narrow = accumulate(SGD, 2, accumulator_dtype=None)
    wide = accumulate(SGD, 2)
    first = drive(
        narrow, bf16(1), params=BF16_ZERO, **{k: v[:1] for k, v in weight.items()}
    )
    (step,) = first
    assert step.state.acc_grads.dtype == jnp.bfloat16

    class Restored:
        init = staticmethod(lambda params: step.state)
        update = staticmethod(wide.update)

    restored = drive(
        optax.GradientTransformationExtraArgs(Restored.init, Restored.update),
        bf16(3),
        params=step.params,
        way=way,
        **{k: v[1:] for k, v in weight.items()},
    )[-1]
    straight = drive(wide, bf16(1, 3), params=BF16_ZERO, way=way, **weight)[-1]
    # The sum of one bfloat16 gradient is exact in bfloat16, so nothing was lost.
    assert_same_bits(restored, straight)


def test_a_wider_accumulator_from_a_checkpoint_stays_wide():
    wide = accumulate(SGD, 2).init(BF16_ZERO)
    narrow = accumulate(SGD, 2, accumulator_dtype=None)
    _, state = narrow.update(jnp.bfloat16(1), wide, BF16_ZERO)
    assert state.acc_grads.dtype == np.float32


def test_every_leaf_is_summed_in_a_dtype_of_its_own():
    params = {
        "bf16": np.zeros(2, jnp.bfloat16),
        "f32": np.zeros((), np.float32),
        "c64": np.zeros(2, np.complex64),
        "int": np.int32(7),
        "bool": np.bool_(True),
        "none": None,
        "empty": np.zeros((0, 3), np.float32),
    }
    tx = accumulate(SGD, 2)
    sums = tx.init(params).acc_grads
    kept = {
        n: "none" if s is None else getattr(s, "dtype", "") for n, s in sums.items()
    }
    assert kept == {
        "bf16": "float32",
        "f32": "float32",
        "c64": "complex64",
        "int": "",  # MaskedNode: no memory
        "bool": "",
        "none": "none",
        "empty": "float32",
    }
    assert sums["int"] == sums["bool"] == optax.MaskedNode()


@both_ways
def test_complex_gradients_are_averaged_part_by_part(way):
    params = np.zeros(2, np.complex64)
    gradients = [np.complex64([1 + 2j, 3]), np.complex64([3 - 4j, 1j])]
    weights = [np.float32(3), np.float32(1)]
    last = drive(accumulate(SGD, 2), gradients, params=params, weight=weights, way=way)
    np.testing.assert_array_equal(last[-1].params, [-1.5 - 0.5j, -2.25 - 0.25j])


def test_an_infinite_part_of_a_complex_gradient_leaves_the_other_alone():
    params = np.zeros((), np.complex64)
    gradients = [np.complex64(complex(np.inf, 1)), np.complex64(3j)]
    weights = [np.float32(1), np.float32(1)]
    tx = accumulate(optax.identity(), 2)
    last = drive(tx, gradients, params=params, weight=weights)[-1].params
    assert (np.real(last), np.imag(last)) == (np.inf, 2)


def test_a_window_of_many_micro_steps_does_not_drift():
    # 1000 numbers of [1, 2]: the sum of a plain loop in float32 is off by at most
    # 1000 roundings of half an eps, and by chance by some sqrt(1000) = 32 of them.
    rng = np.random.default_rng(0)
    numbers = rng.uniform(1, 2, 1000).astype(np.float32)
    last = drive(accumulate(SGD, 1000), list(numbers))[-1]
    eps = np.finfo(np.float32).eps
    np.testing.assert_allclose(
        last.params, -np.mean(np.float64(numbers)), rtol=50 * eps
    )


@both_ways
def test_integer_and_bool_parameters_do_not_move_at_all(way):
    # 2**24 + 1 is no float32: a float update, even of 0, would round it.
    params = {"w": np.float32(1), "n": np.int32(2**24 + 1), "b": np.bool_(True)}
    grads = {"w": np.float32(1), "n": np.int32(3), "b": np.bool_(False)}
    for opt in (SGD, optax.adamw(0.1, weight_decay=0.5)):
        steps = drive(accumulate(lenient(opt), 2), [grads] * 4, params=params, way=way)
        for step in steps:
            assert step.params["n"] == 2**24 + 1
            assert step.params["b"]
        assert steps[-1].params["w"] != 1


@both_ways
@pytest.mark.parametrize("opt", [SGD, optax.adamw(0.1)])
def test_float0_gradients_pass_through(way, opt):
    params = {"w": np.float32(1), "n": np.int32(2**24 + 1)}
    tx = accumulate(lenient(opt), 2, skip_nonfinite="micro_batch")
    grads = jax.grad(lambda p: 2 * p["w"], allow_int=True)(params)
    assert grads["n"].dtype == jax.dtypes.float0
    _, state = tx.update(grads, tx.init(params), params)
    assert state.acc_grads["n"] == optax.MaskedNode()

    def step(params, state, grads):
        del grads
        grads = jax.grad(lambda p: 2 * p["w"], allow_int=True)(params)
        if way == "update":
            updates, state = tx.update(grads, state, params)
            assert updates["n"].dtype == jax.dtypes.float0
            return params | {"w": params["w"] + updates["w"]}, state
        return apply_gradients(tx, params, state, grads)

    first, second = drive(tx, [None, None], params=params, step=jax.jit(step))
    assert first.params["w"] == 1
    assert second.params["w"] < 1
    assert second.params["n"] == 2**24 + 1


def test_keys_among_the_parameters_are_left_alone():
    params = {"w": jnp.zeros(()), "key": jax.random.key(3)}
    tx = accumulate(optax.masked(SGD, {"w": True, "key": False}), 2)
    grads = jax.grad(lambda p: 2 * p["w"], allow_int=True)(params)
    state = tx.init(params)
    assert state.acc_grads["key"] == optax.MaskedNode()
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
    assert updates["w"] == -2
