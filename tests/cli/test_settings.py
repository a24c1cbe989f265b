"""The questions that the options of a run raise before anything starts."""

import jax
import optax
import pytest

from gradacc_jax.cli.settings import (
    DEFAULTS,
    CommandError,
    Settings,
    learning_rates,
    resolve_batch,
    resolve_optimizer,
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (16, 4, 4)),
        ({"global_batch": 24, "micro_batch": 8}, (24, 8, 3)),
        ({"global_batch": 24, "num_microbatches": 3}, (24, 8, 3)),
        ({"micro_batch": 8, "num_microbatches": 3}, (24, 8, 3)),
        ({"global_batch": 24, "micro_batch": 8, "num_microbatches": 3}, (24, 8, 3)),
        ({"micro_batch": 7}, (28, 7, 4)),
        ({"num_microbatches": 5}, (20, 4, 5)),
        ({"global_batch": 9}, (9, 3, 3)),
        ({"global_batch": 7}, (7, 1, 7)),
        ({"global_batch": 1}, (1, 1, 1)),
        ({"devices": 8}, (128, 4, 4)),
        ({"micro_batch": 2, "num_microbatches": 3, "devices": 8}, (48, 2, 3)),
        ({"global_batch": 48, "micro_batch": 3, "devices": 8}, (48, 3, 2)),
        ({"global_batch": 48, "num_microbatches": 2, "devices": 8}, (48, 3, 2)),
        ({"global_batch": 48, "devices": 6}, (48, 4, 2)),
        ({"global_batch": 48, "devices": 8, "largest": 2}, (48, 2, 3)),
    ],
)
def test_two_numbers_give_the_third_and_one_keeps_the_defaults(given, expected):
    assert resolve_batch(**given) == expected


def test_the_defaults_of_the_settings_are_those_of_the_resolution():
    batch = (DEFAULTS.global_batch, DEFAULTS.micro_batch, DEFAULTS.num_microbatches)
    assert resolve_batch() == batch


def test_three_numbers_that_disagree_are_all_named():
    with pytest.raises(CommandError) as error:
        resolve_batch(32, 8, 5)
    assert str(error.value) == (
        "--global-batch=32, --micro-batch=8 and --num-microbatches=5 disagree: 8 x 5 = "
        "40; give two of them, or --global-batch 40"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"global_batch": 32, "micro_batch": 12},
            "--micro-batch=12 does not divide --global-batch=32; choose 8 or 16",
        ),
        (
            {"global_batch": 6, "num_microbatches": 4},
            "--num-microbatches=4 does not divide --global-batch=6; choose 3 or 6",
        ),
        (
            {"global_batch": 6, "micro_batch": 9},
            "--micro-batch=9 does not divide --global-batch=6; choose 6",
        ),
        (
            {"global_batch": 48, "micro_batch": 4, "devices": 8},
            "--micro-batch=4 on each of 8 devices does not divide --global-batch=48; "
            "choose 3 or 6, or another --global-batch",
        ),
        (
            {"global_batch": 12, "devices": 8},
            "--global-batch=12 does not divide over 8 devices; choose 8 or 16, or "
            "another number of --devices",
        ),
        (
            {"global_batch": 4, "devices": 8},
            "--global-batch=4 does not divide over 8 devices; choose 8, or",
        ),
        (
            {
                "global_batch": 48,
                "micro_batch": 3,
                "num_microbatches": 3,
                "devices": 8,
            },
            "disagree: 3 x 3 x 8 devices = 72; give two of them, or --global-batch 72",
        ),
    ],
)
def test_a_number_that_does_not_divide_the_global_batch_is_told_which_do(
    given, message
):
    with pytest.raises(CommandError, match=message):
        resolve_batch(**given)


def test_heads_that_do_not_part_the_channels_evenly_are_refused():
    with pytest.raises(CommandError, match="choose a multiple of 8"):
        Settings(embed_dim=20, num_heads=4)


def test_devices_that_share_layers_divide_heads_and_devices():
    assert Settings(devices=8, model_parallel=2).data_parallel == 4
    with pytest.raises(CommandError, match=r"does not divide --devices=8; choose 2 or"):
        Settings(devices=8, model_parallel=3)
    with pytest.raises(CommandError, match=r"--model-parallel=8 .* --num-heads=4; cho"):
        Settings(devices=8, model_parallel=8)


def test_an_unknown_optimizer_is_told_its_near_matches():
    with pytest.raises(CommandError, match=r"--optimizer=adamww is no .* adamw, adam,"):
        resolve_optimizer(Settings(optimizer="adamww"))


@pytest.mark.parametrize("name", ["chain", "scale_by_learning_rate", "MultiSteps"])
def test_what_optax_exports_beside_optimizers_is_no_optimizer(name):
    with pytest.raises(CommandError, match=f"--optimizer={name} is no optimizer"):
        resolve_optimizer(Settings(optimizer=name))


def test_an_optimizer_that_takes_no_schedule_says_how_to_go_without():
    with pytest.raises(CommandError, match="--schedule constant --warmup-steps 0"):
        resolve_optimizer(Settings(optimizer="rprop"))
    constant = Settings(optimizer="rprop", schedule="constant", warmup_steps=0)
    # rprop promotes dtypes itself.
    with jax.numpy_dtype_promotion("standard"):
        assert isinstance(resolve_optimizer(constant), optax.GradientTransformation)


def test_an_optimizer_that_needs_more_than_gradients_says_what_it_misses():
    # optax promotes dtypes inside its optimizers.
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(CommandError, match=r"lbfgs cannot be used here.*value_fn"),
    ):
        resolve_optimizer(Settings(optimizer="lbfgs"))


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon", "lamb", "adafactor"])
def test_optimizers_of_optax_and_its_contributions_are_found_by_name(name):
    # optax promotes dtypes inside its optimizers.
    with jax.numpy_dtype_promotion("standard"):
        optimizer = resolve_optimizer(Settings(optimizer=name))
    assert isinstance(optimizer, optax.GradientTransformation)


def test_the_learning_rate_rises_to_its_peak_and_falls_to_a_tenth():
    settings = Settings(learning_rate=0.5, warmup_steps=10, steps=100)
    rates = [float(learning_rates(settings)(step)) for step in (0, 5, 10, 100)]
    assert rates == pytest.approx([0.0, 0.25, 0.5, 0.05])


def test_a_constant_learning_rate_without_warmup_is_a_number():
    settings = Settings(learning_rate=0.5, warmup_steps=0, schedule="constant")
    assert learning_rates(settings) == 0.5


def test_a_warmup_longer_than_the_run_still_makes_a_schedule():
    settings = Settings(learning_rate=0.5, warmup_steps=10, steps=4)
    assert float(learning_rates(settings)(2)) == pytest.approx(0.1)
