"""Plans for chips that are not here, by their own compilers."""

import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
import optax
import pytest

from gradacc_jax import chips, estimate_memory, plan, remat, train_step
from tests import chips as absent

pytestmark = [pytest.mark.absent_chips, pytest.mark.optax_promotes]

LAYERS, WIDTH, TOKENS = 12, 512, 256
PARAMS = {
    "in": jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), jnp.float32),
    "out": jax.ShapeDtypeStruct((LAYERS, 4 * WIDTH, WIDTH), jnp.float32),
}


def loss_fn(params, x, *, policy="none"):
    @remat(policy=policy)
    def layer(x, w):
        return x + jnp.sin(jnp.tanh(x @ w["in"])) @ w["out"]

    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)
    return jnp.mean(x**2)


def examples(count):
    return jax.ShapeDtypeStruct((count, TOKENS, WIDTH), jnp.float32)


@pytest.mark.parametrize(("chip", "memory"), [("rtx-4090", "2GiB"), ("v5e", "2GiB")])
def test_each_row_of_a_plan_is_what_the_compiler_says_of_a_step_made_by_hand(
    chip, memory
):
    sharding = absent.absent(chip)
    optimizer = optax.adamw(1e-3)
    found = plan(
        loss_fn,
        PARAMS,
        optimizer,
        examples(1),
        global_batch_size=64,
        chip=chip,
        memory=memory,
        policies=("none", "full"),
    )
    assert found.peak_bytes <= 0.95 * 2 * 2**30
    assert found.microbatch_size * found.num_microbatches == 64
    rows = [c for c in found.candidates if c.memory and c.form == "one call"]
    for row in rows:
        if row.memory.refused:
            continue
        step = train_step(
            loss_fn,
            optimizer,
            num_microbatches=row.num_microbatches,
            policy=row.policy,
        )
        args = (PARAMS, jax.eval_shape(optimizer.init, PARAMS), examples(64))
        lowered = step.lower(*absent.on(sharding, args))
        memory = lowered.compile(compiler_options=dict(row.options)).memory_analysis()
        total = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )
        assert row.memory.peak == pytest.approx(total + row.memory.workspace, rel=1e-3)


def test_what_makes_a_gpu_program_quick_to_compile_changes_no_byte():
    gpu = absent.absent_gpu()
    step = train_step(loss_fn, optax.adamw(1e-3), num_microbatches=4)
    args = (PARAMS, jax.eval_shape(optax.adamw(1e-3).init, PARAMS), examples(16))
    quick = estimate_memory(step, *args, chip="rtx-4090")
    full = step.lower(*absent.on(gpu, args)).compile().memory_analysis()
    assert quick.temporaries == full.temp_size_in_bytes
    assert quick.aliased == full.alias_size_in_bytes > 0


def test_a_program_too_large_for_a_tpu_is_refused_and_that_is_an_answer():
    absent.absent_tpu()
    x = jax.ShapeDtypeStruct((1024, 1024, 1024, 16), jnp.float32)
    found = estimate_memory(lambda x: jnp.sort(x, 0) + 1, x, chip="v5e")
    assert "RESOURCE_EXHAUSTED" in found.refused
    assert found.peak > chips()["v5e"].memory_bytes


@pytest.mark.parametrize("chip", ["rtx-4090", "v5e"])
def test_on_four_absent_chips_the_bytes_are_those_of_one(chip):
    absent.absent(chip)
    rows = NamedSharding(AbstractMesh((4,), ("data",)), PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32, sharding=rows)
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    found = estimate_memory(lambda w, x: jnp.sum(x @ w), w, x, chip=chip)
    assert found.arguments == 4 * (1024 * 1024 + 4096 * 1024 // 4)
    assert found.flops == 2 * 4096 * 1024 * 1024 / 4


@pytest.mark.parametrize("name", sorted(chips()))
def test_every_chip_of_the_table_can_be_compiled_for(name):
    absent.absent(name)
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    found = estimate_memory(lambda x: jnp.tanh(x @ x), x, chip=name)
    assert found.arguments == 256 * 256 * 2


def test_the_default_backend_is_left_as_it_was():
    absent.absent_gpu()
    estimate_memory(lambda x: x * 2, 1.0, chip="rtx-4090")
    assert jax.default_backend() == "cpu"
    assert jnp.ones(3).sum() == 3


@pytest.mark.parametrize("name", ["rtx-4090", "v5e"])
def test_a_chip_is_planned_for_after_jax_has_looked_for_devices_by_itself(name):
    # Where no platform is named, JAX tries its plugins first, and turns NVIDIA's away
    # for the libraries that only a GPU needs.
    absent.absent(name)
    code = (
        "import jax.numpy as jnp; from gradacc_jax import estimate_memory\n"
        "x = jnp.ones((256, 256)) + 1\n"
        f"print(estimate_memory(lambda x: x @ x, x, chip={name!r}).arguments)"
    )
    free = {n: v for n, v in os.environ.items() if n != "JAX_PLATFORMS"}
    told = subprocess.run(
        [sys.executable, "-c", code], env=free, check=True, capture_output=True
    )
    assert told.stdout.split() == [b"262144"]


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "limit"), [("rtx-4090", 60), ("v5e", 300)])
def test_a_twelve_layer_gpt_is_planned_within_its_time(chip, limit, tmp_path):
    absent.absent(chip)
    command = [sys.executable, "-m", "gradacc_jax", "plan", "gpt:124M", "--chip", chip]
    options = ["--global-batch", "256", "--json", str(tmp_path / "plan.json")]
    start = time.perf_counter()
    subprocess.run([*command, *options], check=True, capture_output=True)
    assert time.perf_counter() - start < limit
    told = json.loads((tmp_path / "plan.json").read_text())
    assert told["microbatch_size"] * told["num_microbatches"] == 256
