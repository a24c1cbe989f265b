"""k micro-steps are one step of the bare optimizer on the window's (weighted) mean.

For everything that optax and optax.contrib export and that takes plain gradients. A new
optax with a new optimizer fails here, until that stands in one of the lists below.

A full cross of k in 1, 2, 5, float32 and bfloat16, jitted and not, ``update`` and
``apply_gradients``, alone and in ``chain``, ``partition`` and ``masked`` is 96 programs
for each of 50 optimizers. Each optimizer runs in each of these, though not in each
combination: jitted, for each k, float32 in all four places and bfloat16 in two of them,
in both ways; once with a static k of 1; and once without jit, where every micro-step is
compiled anew, with k = 2. What is not crossed takes turns down the list. Building
blocks (``scale_by_adam``), of which optimizers are made, are tested jitted and alone.
"""

from functools import partial
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib
import pytest

from gradacc_jax import accumulate, apply_gradients, precision
from gradacc_jax.accumulation.state import accumulators
from tests.lenient import lenient

pytestmark = [
    # As long as optax exports these, they are tested.
    pytest.mark.filterwarnings(
        "ignore:.?(optimistic_adam|inject_stateful_hyperparams).? is deprecated"
        ":DeprecationWarning"
    ),
    # lbfgs writes float32 products into its bfloat16 memory.
    pytest.mark.filterwarnings("ignore:scatter inputs have incompatible:FutureWarning"),
]

LR = 0.0625  # exact in bfloat16

# Only what has no default is given, and what a tree as small as ours needs.
OPTIMIZERS = {
    "adabelief": lambda: optax.adabelief(LR),
    "adadelta": lambda: optax.adadelta(LR),
    "adafactor": lambda: optax.adafactor(LR, min_dim_size_to_factor=2),
    "adagrad": lambda: optax.adagrad(LR),
    "adam": lambda: optax.adam(LR),
    "adamax": lambda: optax.adamax(LR),
    "adamaxw": lambda: optax.adamaxw(LR),
    "adamw": lambda: optax.adamw(LR),
    "adan": lambda: optax.adan(LR),
    "amsgrad": lambda: optax.amsgrad(LR),
    "fromage": lambda: optax.fromage(LR),
    "lamb": lambda: optax.lamb(LR),
    "lars": lambda: optax.lars(LR),
    "lbfgs": lambda: optax.lbfgs(LR, linesearch=None),
    "lion": lambda: optax.lion(LR),
    "nadam": lambda: optax.nadam(LR),
    "nadamw": lambda: optax.nadamw(LR),
    "noisy_sgd": lambda: optax.noisy_sgd(LR, key=0),
    "novograd": lambda: optax.novograd(LR),
    "optimistic_adam": lambda: optax.optimistic_adam(LR),
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(LR),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(LR),
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "radam": lambda: optax.radam(LR),
    "rmsprop": lambda: optax.rmsprop(LR),
    "rprop": lambda: optax.rprop(LR),
    "sgd": lambda: optax.sgd(LR, momentum=0.9),
    "sign_sgd": lambda: optax.sign_sgd(LR),
    "signum": lambda: optax.signum(LR),
    "sm3": lambda: optax.sm3(LR),
    "yogi": lambda: optax.yogi(LR),
    "acprop": lambda: contrib.acprop(LR),
    "ademamix": lambda: contrib.ademamix(LR),
    "adopt": lambda: contrib.adopt(LR),
    "cocob": lambda: contrib.cocob(),
    "dadapt_adamw": lambda: contrib.dadapt_adamw(),
    "dog": lambda: contrib.dog(),
    "dowg": lambda: contrib.dowg(),
    "galore": lambda: contrib.galore(LR, rank=2),
    "madgrad": lambda: contrib.madgrad(LR),
    "mechanize": lambda: contrib.mechanize(optax.sgd(LR)),
    "momo": lambda: contrib.momo(LR),
    "momo_adam": lambda: contrib.momo_adam(LR),
    "muon": lambda: contrib.muon(LR),
    "prodigy": lambda: contrib.prodigy(),
    # Says that it takes extra arguments, and does not.
    "sam": lambda: optax.GradientTransformation(
        *contrib.sam(optax.sgd(LR), optax.sgd(LR), sync_period=2)
    ),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(LR), LR),
    "schedule_free_adamw": lambda: contrib.schedule_free_adamw(LR),
    "schedule_free_sgd": lambda: contrib.schedule_free_sgd(LR),
    "simplified_ademamix": lambda: contrib.simplified_ademamix(LR),
}

BLOCKS = {
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.125),
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.125),
    "add_noise": lambda: optax.add_noise(eta=0.125, gamma=0.5, key=0),
    "apply_every": lambda: optax.apply_every(2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(LR), 2),
    "centralize": lambda: optax.centralize(),
    "clip": lambda: optax.clip(0.5),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.5),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.5),
    "conditionally_mask": lambda: optax.conditionally_mask(
        optax.sgd(LR), lambda step: step == 1
    ),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.sgd(LR), lambda step: step == 1
    ),
    "ema": lambda: optax.ema(0.875),
    "flatten": lambda: optax.flatten(optax.sgd(LR, momentum=0.9)),
    "freeze": lambda: optax.freeze({"b": True, "w": False}),
    "identity": lambda: optax.identity(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(LR, 0.0, 4)
    ),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(
        optax.adam
    )(optax.linear_schedule(LR, 0.0, 4)),
    "keep_params_nonnegative": lambda: optax.keep_params_nonnegative(),
    "multi_transform": lambda: optax.multi_transform(
        {"x": optax.adam(LR), "y": optax.sgd(LR)}, {"b": "x", "w": "y"}
    ),
    "named_chain": lambda: optax.named_chain(("adam", optax.adam(LR))),
    "normalize_by_update_norm": lambda: optax.normalize_by_update_norm(),
    "scale": lambda: optax.scale(0.5),
    "scale_by_adadelta": lambda: optax.scale_by_adadelta(),
    "scale_by_adam": lambda: optax.scale_by_adam(),
    "scale_by_adamax": lambda: optax.scale_by_adamax(),
    "scale_by_adan": lambda: optax.scale_by_adan(),
    "scale_by_amsgrad": lambda: optax.scale_by_amsgrad(),
    "scale_by_belief": lambda: optax.scale_by_belief(),
    "scale_by_distance_over_gradients": (
        lambda: optax.scale_by_distance_over_gradients()
    ),
    "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(
        min_dim_size_to_factor=2
    ),
    "scale_by_lbfgs": lambda: optax.scale_by_lbfgs(),
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(LR),
    "scale_by_lion": lambda: optax.scale_by_lion(),
    "scale_by_novograd": lambda: optax.scale_by_novograd(),
    "scale_by_optimistic_gradient": lambda: optax.scale_by_optimistic_gradient(),
    "scale_by_param_block_norm": lambda: optax.scale_by_param_block_norm(),
    "scale_by_param_block_rms": lambda: optax.scale_by_param_block_rms(),
    "scale_by_polyak": lambda: optax.scale_by_polyak(),
    "scale_by_radam": lambda: optax.scale_by_radam(),
    "scale_by_rms": lambda: optax.scale_by_rms(),
    "scale_by_rprop": lambda: optax.scale_by_rprop(LR),
    "scale_by_rss": lambda: optax.scale_by_rss(),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda step: 1.0 / (1 + step)),
    "scale_by_sign": lambda: optax.scale_by_sign(),
    "scale_by_sm3": lambda: optax.scale_by_sm3(),
    "scale_by_stddev": lambda: optax.scale_by_stddev(),
    "scale_by_trust_ratio": lambda: optax.scale_by_trust_ratio(),
    "scale_by_yogi": lambda: optax.scale_by_yogi(),
    "selective_transform": lambda: optax.selective_transform(
        optax.sgd(LR), freeze_mask={"b": True, "w": False}
    ),
    "set_to_zero": lambda: optax.set_to_zero(),
    "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
    "stateless": lambda: optax.stateless(
        lambda updates, params: jax.tree.map(jnp.negative, updates)
    ),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(
        lambda update, param: -update
    ),
    "trace": lambda: optax.trace(0.875),
    "with_extra_args_support": lambda: optax.with_extra_args_support(optax.sgd(LR)),
    "zero_nans": lambda: optax.zero_nans(),
    "normalize": lambda: contrib.normalize(),
    "reduce_on_plateau": lambda: contrib.reduce_on_plateau(patience=0),
    "scale_by_acprop": lambda: contrib.scale_by_acprop(),
    "scale_by_ademamix": lambda: contrib.scale_by_ademamix(),
    "scale_by_adopt": lambda: contrib.scale_by_adopt(),
    "scale_by_cocob": lambda: contrib.scale_by_cocob(),
    "scale_by_galore": lambda: contrib.scale_by_galore(rank=2),
    "scale_by_madgrad": lambda: contrib.scale_by_madgrad(LR),
    # Takes matrices only.
    "scale_by_muon": lambda: optax.masked(
        contrib.scale_by_muon(
            weight_dimension_numbers=lambda params: jax.tree.map(
                lambda _: contrib.MuonDimensionNumbers(), params
            )
        ),
        {"b": False, "w": True},
    ),
    "scale_by_simplified_ademamix": lambda: contrib.scale_by_simplified_ademamix(),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(
        optax.sgd(LR, momentum=0.9)
    ),
}

EXCLUDED = {
    "measure_with_ema": "one of the measures that are given to monitor",
    "monitor": "its state gets other fields at the first update: no lax.cond passes it",
    "differentially_private_aggregate": "takes gradients per example",
    "dpsgd": "takes gradients per example",
    "lookahead": "its parameters are pairs, LookaheadParams",
    "scale_by_backtracking_linesearch": "evaluates the objective, value_fn",
    "scale_by_zoom_linesearch": "evaluates the objective, value_fn",
    "sophia": "differentiates the objective, obj_fn",
    "hutchinson_estimator_diag_hessian": "differentiates the objective, obj_fn",
    "chain": "one of the wrappers that every optimizer is tested in",
    "masked": "one of the wrappers that every optimizer is tested in",
    "partition": "one of the wrappers that every optimizer is tested in",
    "bias_correction": "no transformation: arithmetic on moments",
    "update_infinity_moment": "no transformation: arithmetic on moments",
    "update_moment": "no transformation: arithmetic on moments",
    "update_moment_per_elem_norm": "no transformation: arithmetic on moments",
    "matrix_inverse_pth_root": "no transformation: linear algebra",
    "schedule_free_eval_params": "no transformation: reads a state",
    "sigmoid_binary_cross_entropy": "no transformation: a loss",
}

DTYPES = ("float32", "bfloat16")
PLACES = ("alone", "chain", "partition", "masked")
WAYS = ("update", "apply_gradients")

# Per k, the weights of a window's micro-batches, whose sum is a power of two, and
# numbers whose mean under these weights is 0. Added to multiples of 1/16 of at most 8
# bits, they give micro-gradients that are exact in bfloat16, and whose weighted mean is
# exact in every dtype: the inner optimizer gets what the bare one gets, to the bit.
WEIGHTS = {1: (2,), 2: (1, 3), 5: (1, 2, 1, 3, 1)}
SPREAD = {1: (0,), 2: (3, -1), 5: (1, -1, 2, 0, -1)}
PLAIN_SPREAD = {2: (1, -1)}
NUM_WINDOWS = 3

# Of the largest number in a leaf. What can differ is how XLA fuses one optimizer in two
# programs. Compiled as below it makes no two operations one rounding, and all cases
# were equal to the bit; 4 eps leave room for another order in a sum of 12 numbers.
JITTED = {"float32": 4 * 2.0**-23, "bfloat16": 4 * 2.0**-7}
# Without jit the bare optimizer runs operation by operation, and the one inside a
# conditional is compiled, optimised: a fused multiplication and addition saves a
# rounding, in bfloat16 a fused chain of operations saves all but the last. In float32
# that was up to 52 eps, in the small differences of large sums of dadapt_adamw.
UNJITTED = {"float32": 64 * 2.0**-23, "bfloat16": 4 * 2.0**-7}


def compiled(function):
    # Unoptimised, and rounded wherever the program says so: several hundred programs
    # are compiled here for one run each, and compared with one another.
    return jax.jit(
        function,
        compiler_options={
            "xla_backend_optimization_level": 0,
            "xla_allow_excess_precision": False,
        },
    )


class Problem:
    """Parameters, and for each window a mean gradient and a mean loss."""

    def __init__(self, dtype):
        rng = np.random.default_rng(0)

        def tree(largest):
            def leaf(*shape):
                x = rng.integers(1, largest + 1, shape) * rng.choice([-1, 1], shape)
                return (x / 16).astype(dtype)

            return {"b": leaf(3), "w": leaf(4, 3)}

        self.dtype = np.dtype(dtype)
        params = tree(32)
        params["b"][0] = -0.0  # which a silent step must not turn into 0.0
        self.params = jax.tree.map(jnp.asarray, params)
        self.means = [tree(16) for _ in range(NUM_WINDOWS)]
        self.parts = [tree(4) for _ in range(NUM_WINDOWS)]
        self.values = [2.0, 3.0, 2.5]

    def micro_steps(self, window, spread, scale):
        def leaf(mean, part, d):
            return ((mean + np.asarray(d, mean.dtype) * part) * scale).astype(
                mean.dtype
            )

        for d in spread:
            grads = jax.tree.map(
                lambda *leaves, d=d: leaf(*leaves, d),
                self.means[window],
                self.parts[window],
            )
            yield grads, np.float32(self.values[window] + d / 4)


def bare_step(opt, params, state, grads, value):
    """The bare optimizer, whose state keeps the dtypes that it began with."""
    updates, new_state = opt.update(grads, state, params, value=value)
    with jax.numpy_dtype_promotion("standard"):
        params = optax.apply_updates(params, updates)
    return params, precision.cast_like(new_state, state)


def bare_run(opt, problem, jit=lambda function: function):
    opt = lenient(opt)
    step = jit(partial(bare_step, opt))
    params = problem.params
    state = precision.owned(opt.init(params), params)
    run = []
    for mean, value in zip(problem.means, problem.values):
        mean = jax.tree.map(jnp.asarray, mean)
        params, state = step(params, state, mean, jnp.float32(value))
        run.append((params, state))
    return run


def placed(opt, k, place):
    """``accumulate(opt, k)`` somewhere; what is called "frozen" is not to move."""
    tx = accumulate(lenient(opt), k)
    if place == "alone":
        return tx
    if place == "chain":
        return optax.chain(optax.scale(2.0), tx)
    trained = {"b": True, "frozen": False, "w": True}
    if place == "partition":
        labels = jax.tree.map(lambda t: "train" if t else "freeze", trained)
        return optax.partition({"train": tx, "freeze": optax.set_to_zero()}, labels)
    frozen = jax.tree.map(lambda t: not t, trained)
    return optax.chain(
        optax.masked(tx, trained), optax.masked(optax.set_to_zero(), frozen)
    )


def micro_step(opt, place, way, k, params, state, grads, value, weight):
    tx = placed(opt, k, place)
    extra_args = {"value": value, "weight": weight}
    if way == "apply_gradients":
        return apply_gradients(tx, params, state, grads, **extra_args)
    updates, state = tx.update(grads, state, params, **extra_args)
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates), state


def check_run(step, tx, problem, k, place, expected, weights, spread, tolerances):
    """All windows by micro-steps; parameters and inner state compared after each."""
    frozen = {}
    if place in ("partition", "masked"):
        frozen = {"frozen": jnp.asarray([2.0, 3.0], problem.dtype)}
    params = problem.params | frozen
    state = tx.init(params)
    tolerance = tolerances[problem.dtype.name]
    form = jax.tree.map(jax.typeof, state)
    for window, (bare_params, bare_state) in enumerate(expected):
        # What stands before the accumulator in the chain doubles the gradients.
        micro_steps = problem.micro_steps(
            window, spread, 0.5 if place == "chain" else 1
        )
        for i, ((grads, value), weight) in enumerate(zip(micro_steps, weights)):
            where = f"k={k}, {place}, window {window}, micro-step {i}"
            before = jax.tree.map(np.asarray, params)
            params, state = step(params, state, grads | frozen, value, weight)
            assert jax.tree.map(jax.typeof, state) == form, where
            if i < k - 1:
                for name, p in params.items():
                    assert p.tobytes() == before[name].tobytes(), where
        assert params.keys() == (bare_params | frozen).keys()
        (held,) = accumulators(state)
        check_close(params, bare_params | frozen, tolerance, where)
        check_close(held.inner_state, bare_state, tolerance, where)


def check_close(found, expected, tolerance, where):
    found = jax.tree_util.tree_leaves_with_path(found)
    for (path, a), b in zip(found, jax.tree.leaves(expected), strict=True):
        what = f"{where}: {jax.tree_util.keystr(path)}"
        assert (a.dtype, a.shape) == (b.dtype, b.shape), what
        if jnp.issubdtype(a.dtype, jax.dtypes.extended):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        atol = 0
        if jnp.issubdtype(b.dtype, jnp.inexact):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            atol = tolerance * np.max(np.abs(b), initial=0, where=np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=what)


def turn_of(name):
    return [*OPTIMIZERS, *BLOCKS].index(name)


def check_traced_k(opt, dtype, places_and_ways):
    problem = Problem(dtype)
    expected = bare_run(opt, problem, compiled)
    for place, way in places_and_ways:
        program = compiled(partial(micro_step, opt, place, way))
        tx = placed(opt, 2, place)
        for k in (1, 2, 5):
            step = partial(program, jnp.int32(k))
            weights = tuple(map(np.float32, WEIGHTS[k]))
            check_run(step, tx, problem, k, place, expected, weights, SPREAD[k], JITTED)


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_k_micro_steps_are_one_step_on_the_weighted_mean(name, dtype):
    turn = turn_of(name)
    if dtype == "float32":
        cases = [(place, WAYS[(turn + i) % 2]) for i, place in enumerate(PLACES)]
    else:
        cases = [(PLACES[turn % 4], WAYS[0]), (PLACES[(turn + 2) % 4], WAYS[1])]
    check_traced_k(OPTIMIZERS[name](), dtype, cases)


@pytest.mark.slow  # all of them together
@pytest.mark.parametrize("name", BLOCKS)
def test_k_micro_steps_of_a_building_block_are_one_step(name):
    turn = turn_of(name)
    dtype, way = DTYPES[turn % 2], WAYS[turn // 2 % 2]
    check_traced_k(BLOCKS[name](), dtype, [("alone", way)])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_micro_step_is_one_step(name):
    opt, turn = OPTIMIZERS[name](), turn_of(name)
    place, way = PLACES[turn % 4], WAYS[turn // 4 % 2]
    problem = Problem(DTYPES[turn // 8 % 2])
    step = compiled(partial(micro_step, opt, place, way, 1))
    expected = bare_run(opt, problem, compiled)
    # With a static k of 1 the mean is the gradient, whatever its weight.
    weights = (np.float32(3),)
    tx = placed(opt, 1, place)
    check_run(step, tx, problem, 1, place, expected, weights, SPREAD[1], JITTED)


@pytest.mark.slow  # all of them together
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_micro_steps_without_jit_are_one_step_on_the_plain_mean(name):
    opt, turn = OPTIMIZERS[name](), turn_of(name)
    place, way = PLACES[turn % 4], WAYS[turn // 4 % 2]
    # lbfgs keeps differences of parameters: in bfloat16 these are rounding alone.
    problem = Problem("float32" if name == "lbfgs" else DTYPES[turn // 8 % 2])
    step = partial(micro_step, opt, place, way, 2)
    expected = bare_run(opt, problem)[:2]
    tx, weights, spread = placed(opt, 2, place), (None, None), PLAIN_SPREAD[2]
    check_run(step, tx, problem, 2, place, expected, weights, spread, UNJITTED)


def exported_transformations():
    """Names of what returns a transformation, or does not say what it returns."""
    for module in (optax, contrib):
        for name, value in vars(module).items():
            # functools: some optimizers are partials of others.
            origin = getattr(value, "__module__", "")
            is_function = callable(value) and not inspect.isclass(value)
            if name.startswith("_") or not is_function:
                continue
            if not origin.startswith(("optax.", "functools")):
                continue
            returns = inspect.signature(value).return_annotation
            if returns is inspect.Signature.empty or "Transformation" in str(returns):
                yield name


def test_every_exported_transformation_is_tested_or_excluded_for_a_reason():
    listed = [*OPTIMIZERS, *BLOCKS, *EXCLUDED]
    assert len(set(listed)) == len(listed)
    assert set(exported_transformations()) == set(listed)
