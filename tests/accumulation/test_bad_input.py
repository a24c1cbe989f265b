"""What is refused, when, and in which words; and that nothing is lost by it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradacc_jax import accumulate, apply_gradients, from_multi_steps_state
from tests.accumulation.driving import SGD, WAYS, ZERO, drive, jitted, moves

both_ways = pytest.mark.parametrize("way", WAYS)


# --- at construction -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "words"),
    [
        (0, "every_k_schedule=0 is less than 1; choose at least 1"),
        (-3, "every_k_schedule=-3 is less than 1"),
        (np.int32(0), "every_k_schedule=0 is less than 1"),
        (2.5, "every_k_schedule=2.5 is not an integer scalar; pass how many"),
        (2.0, "every_k_schedule=2.0 is not an integer scalar"),
        (np.float32(2), "is not an integer scalar"),
        (True, "every_k_schedule=True is not an integer scalar"),
        ("4", "every_k_schedule='4' is not an integer scalar"),
        (None, "every_k_schedule=None is not an integer scalar"),
        ([4], "is not an integer scalar"),
        (np.array([4]), "is not an integer scalar"),
    ],
)
def test_a_k_that_makes_no_sense(k, words):
    with pytest.raises(ValueError, match=words):
        accumulate(SGD, k)


@pytest.mark.parametrize("k", [jnp.zeros((), jnp.int32), jnp.ones(2, jnp.int32)])
def test_a_jax_k_that_makes_no_sense(k):
    with pytest.raises(ValueError, match="every_k_schedule"):
        accumulate(SGD, k)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"accumulator_dtype": "float33"},
            "accumulator_dtype='float33' is not a dtype",
        ),
        ({"accumulator_dtype": 3}, "accumulator_dtype=3 is not a dtype"),
        ({"accumulator_dtype": jnp.int32}, "accumulator_dtype=int32 cannot hold gradi"),
        ({"accumulator_dtype": jnp.complex64}, "accumulator_dtype=complex64 cannot"),
        ({"accumulator_dtype": "float64"}, "accumulator_dtype=float64 needs 64-bit"),
        ({"inner_dtype": "float33"}, "inner_dtype='float33' is not a dtype"),
        ({"inner_dtype": bool}, "inner_dtype=bool cannot hold gradients"),
        ({"loss_reduction": "avg"}, "loss_reduction='avg' is not known; choose"),
        ({"loss_reduction": None}, "loss_reduction=None is not known"),
        ({"skip_nonfinite": True}, "skip_nonfinite=True is not known; choose None"),
        ({"skip_nonfinite": "batch"}, "skip_nonfinite='batch' is not known"),
        ({"average_extra_args": "value"}, "average_extra_args='value' is not a tuple"),
        ({"average_extra_args": None}, "average_extra_args=None is not a tuple"),
        (
            {
                "skip_nonfinite": "window",
                "should_skip_update_fn": optax.skip_not_finite,
            },
            "skip_nonfinite='window' and should_skip_update_fn are both given; choose",
        ),
    ],
)
def test_an_option_that_makes_no_sense(options, words):
    with pytest.raises(ValueError, match=words):
        accumulate(SGD, 2, **options)


@pytest.mark.parametrize("opt", [optax.sgd, None, 0.1, (), "adam"])
def test_what_is_no_optimizer(opt):
    with pytest.raises(ValueError, match="is not an optax transformation; pass one"):
        accumulate(opt, 2)


# --- a k that is known later ---------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lambda n: 2.0, "has dtype float32 and shape"),
        (lambda n: n / 2, "has dtype float32"),
        (lambda n: jnp.array([2, 2]), r"shape \(2,\); expected an integer scalar"),
        (lambda n: 0, "=0 is less than 1"),
    ],
)
@both_ways
def test_a_schedule_that_returns_no_k(way, schedule, words):
    tx = accumulate(SGD, schedule)
    with pytest.raises(ValueError, match=r"every_k_schedule\(gradient_step\)") as info:
        drive(tx, [1.0], way=way)
    assert info.match(words)


def test_a_traced_k_that_is_no_integer():
    def step(k):
        return accumulate(SGD, k).init(ZERO)

    with pytest.raises(ValueError, match="every_k_schedule has dtype float32"):
        jax.jit(step)(2.0)
    with pytest.raises(ValueError, match=r"shape \(2,\); expected an integer scalar"):
        jax.jit(step)(jnp.array([2, 2]))


# --- gradients -----------------------------------------------------------------------

PARAMS = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}


def with_(**leaves):
    return {**PARAMS, **leaves}


@pytest.mark.parametrize(
    ("grads", "words"),
    [
        ({"w": PARAMS["w"]}, r"grads has nothing for the parameter\['b'\]"),
        (with_(c=PARAMS["b"]), r"there is no parameter for grads\['c'\]"),
        (with_(b=None), r"grads has nothing for the parameter\['b'\]"),
        (with_(b=(PARAMS["b"],)), "there is no parameter for|grads has nothing for"),
        (None, "grads has nothing for the parameter"),
        (with_(w=np.zeros((3, 2), np.float32)), r"\['w'\] has shape \(3, 2\), but"),
        (with_(b=np.zeros((), np.float32)), r"\['b'\] has shape \(\), but its para"),
        (with_(b=np.zeros((1, 3), np.float32)), r"has shape \(1, 3\)"),
        (with_(b=optax.MaskedNode()), r"\['b'\] has shape none \(masked\)"),
        (with_(b=np.zeros(3, np.complex64)), r"complex64, which a sum .* would narrow"),
    ],
)
@both_ways
def test_gradients_that_do_not_fit_the_parameters(way, grads, words):
    tx = accumulate(SGD, 2)
    with pytest.raises(ValueError, match=words) as info:
        drive(tx, [grads], params=PARAMS, way=way)
    assert info.match("; (pass|give) ")  # what to do about it


def test_a_float_gradient_of_an_integer_parameter_is_refused():
    tx = accumulate(SGD, 2)
    with pytest.raises(ValueError, match="its parameter is not differentiable"):
        tx.update(jnp.ones(()), tx.init(jnp.zeros((), jnp.int32)))


def test_a_gradient_wider_than_the_accumulator_is_refused_not_narrowed():
    params = np.zeros((), jnp.bfloat16)
    tx = accumulate(SGD, 2, accumulator_dtype=None)
    with pytest.raises(
        ValueError, match="float32, which a sum of dtype bfloat16 would"
    ):
        tx.update(jnp.float32(1), tx.init(params), params)
    tx = accumulate(SGD, 2)
    updates, _ = tx.update(jnp.float32(1), tx.init(params), params)
    assert updates.dtype == np.float32


# --- weight, emit, extra arguments, state ---------------------------------------------


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (-1, r"weight=-1.0 is not a weight; pass a finite scalar >= 0"),
        (np.float32(-0.5), "weight=-0.5 is not a weight"),
        (float("nan"), "weight=nan is not a weight"),
        (float("inf"), "weight=inf is not a weight"),
        (np.ones(3, np.float32), r"weight has shape \(3,\); expected a scalar"),
        (2j, "weight=2j is complex; pass a real scalar"),
    ],
)
@both_ways
def test_a_weight_that_makes_no_sense_where_that_is_known(way, weight, words):
    tx = accumulate(SGD, 2)
    state = tx.init(ZERO)
    # Not under jit: there it is a number that is not known.
    if way == "update":
        with pytest.raises(ValueError, match=words):
            tx.update(ZERO, state, ZERO, weight=weight)
    else:
        with pytest.raises(ValueError, match=words):
            apply_gradients(tx, ZERO, state, ZERO, weight=weight)


def test_the_shape_of_a_traced_weight_is_known():
    with pytest.raises(ValueError, match="sum your mask first"):
        drive(accumulate(SGD, 2), [1.0], weight=[np.ones(2, np.float32)])


@pytest.mark.parametrize("emit", [1, 0.0, "yes", np.bool_([True, False]), np.int8(1)])
def test_an_emit_that_is_no_bool(emit):
    tx = accumulate(SGD, 2)
    with pytest.raises((ValueError, TypeError), match=r"emit=|yes"):
        tx.update(ZERO, tx.init(ZERO), ZERO, emit=emit)


@both_ways
def test_k_1_has_no_window_to_keep_open(way):
    with pytest.raises(ValueError, match="emit=False needs an accumulator"):
        drive(accumulate(SGD, 1), [1.0], way=way, emit=[False])
    assert moves(drive(accumulate(SGD, 1), [1.0], way=way, emit=[True])) == [-1]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            np.ones(2, np.float32),
            r"value has shape \(2,\), but average_extra_args aver",
        ),
        (np.complex64(1j), "complex; only real scalars are averaged"),
    ],
)
def test_an_averaged_argument_that_is_no_scalar(value, words):
    with pytest.raises(ValueError, match=words):
        drive(accumulate(SGD, 2), [1.0], value=[value])
    # One that is not averaged may be anything.
    drive(accumulate(SGD, 2, average_extra_args=()), [1.0], value=[value])


@pytest.mark.parametrize(
    "skip",
    [
        lambda *_: (jnp.zeros((), jnp.int32), ()),
        lambda *_: (jnp.zeros(2, bool), ()),
        lambda *_: (1.0, ()),
    ],
)
def test_a_skip_function_that_returns_no_bool(skip):
    with pytest.raises(ValueError, match=r"should_skip_update_fn.*expected a bool"):
        drive(accumulate(SGD, 2, should_skip_update_fn=skip), [1.0])


def test_a_python_bool_from_a_skip_function_is_taken():
    tx = accumulate(SGD, 2, should_skip_update_fn=lambda *_: (False, ()))
    assert moves(drive(tx, [1.0, 3.0])) == [0, -2]
    tx = accumulate(SGD, 2, should_skip_update_fn=lambda *_: (True, ()))
    assert moves(drive(tx, [1.0, 3.0])) == [0, 0]


def test_a_state_of_another_kind():
    tx = accumulate(SGD, 2)
    old = optax.MultiSteps(SGD, 2)
    with pytest.raises(ValueError, match="state=MultiStepsState is not an Accumulate"):
        tx.update(ZERO, old.init(ZERO), ZERO)
    with pytest.raises(ValueError, match="is not an AccumulateState; pass what"):
        tx.update(ZERO, SGD.init(ZERO), ZERO)
    with pytest.raises(ValueError, match=r"is not an optax\.MultiStepsState; pass"):
        from_multi_steps_state(tx.init(ZERO))


def test_a_state_of_an_accumulator_with_other_options():
    one, two = accumulate(SGD, 1), accumulate(SGD, 2)
    with pytest.raises(ValueError, match="comes from every_k_schedule=1"):
        two.update(ZERO, one.init(ZERO), ZERO)
    other = accumulate(SGD, 2, average_extra_args=("loss",))
    with pytest.raises(
        ValueError, match=r"average_extra_args=\('loss',\) but the state"
    ):
        other.update(ZERO, two.init(ZERO), ZERO)


@both_ways
def test_a_refused_call_loses_nothing(way):
    tx = accumulate(SGD, 2)
    step = jitted(tx, way)
    params, state = step(ZERO, tx.init(ZERO), np.float32(1))
    for grads, extra in (
        (np.ones(3, np.float32), {}),
        (np.float32(3), {"weight": np.ones(2, np.float32)}),
        (np.float32(3), {"value": np.ones(2, np.float32)}),
    ):
        with pytest.raises(ValueError, match="has shape"):
            step(params, state, grads, **extra)
    params, state = step(params, state, np.float32(3))
    assert params == -2
