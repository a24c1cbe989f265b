"""What a compiled program needs, told without running it."""

import warnings

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from gradacc_jax import estimate_memory
from gradacc_jax.planning import compile as room
from gradacc_jax.planning.chips import GPU_CONVOLUTION_WORKSPACE, GPU_WORKSPACE, find
from gradacc_jax.planning.compile import Target, Traced
from gradacc_jax.planning.costs import Cost

SHAPE = jax.ShapeDtypeStruct((512, 512), jnp.float32)


def step(w, x):
    return w - jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w)))(w)


@pytest.mark.parametrize("donated", [(), (0,)])
def test_the_bytes_are_those_of_the_compiled_program(donated):
    found = estimate_memory(step, SHAPE, SHAPE, donate_argnums=donated)
    program = jax.jit(step, donate_argnums=donated).lower(SHAPE, SHAPE).compile()
    memory = program.memory_analysis()
    assert found.arguments == memory.argument_size_in_bytes == 2 * SHAPE.size * 4
    assert found.outputs == memory.output_size_in_bytes == SHAPE.size * 4
    assert found.aliased == memory.alias_size_in_bytes == len(donated) * SHAPE.size * 4
    assert found.temporaries == memory.temp_size_in_bytes > 0
    assert found.peak == (
        found.arguments + found.outputs - found.aliased + found.temporaries
    )
    assert found.flops == 5 * 2 * 512**3
    assert "MiB" in str(found)


def test_a_function_that_is_jitted_already_keeps_its_own_donation():
    jitted = jax.jit(step, donate_argnums=0)
    assert estimate_memory(jitted, SHAPE, SHAPE).aliased == SHAPE.size * 4


def test_nothing_is_put_on_a_device():
    jax.block_until_ready(jnp.ones(()))
    before = {id(x) for x in jax.live_arrays()}
    estimate_memory(step, SHAPE, SHAPE)
    estimate_memory(lambda x, y: x + y, 1.0, np.ones(3, np.float32))
    assert {id(x) for x in jax.live_arrays()} <= before


def test_of_several_devices_the_bytes_are_those_of_one():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    for kind in (mesh, AbstractMesh((4,), ("data",))):
        rows = NamedSharding(kind, PartitionSpec("data"))
        x = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=rows)
        found = estimate_memory(lambda w, x: jnp.sum(x @ w), SHAPE, x)
        # All of the weights, and a quarter of the examples.
        assert found.arguments == SHAPE.size * 4 * 5 // 4
        assert found.flops == 2 * 512**3 / 4


def test_a_program_that_asks_what_machine_it_is_on_is_warned_about(monkeypatch):
    def asks(x):
        return x * 2 if jax.default_backend() == "gpu" else x

    absent = Target(find("4090"), is_here=False)
    monkeypatch.setattr(Target, "place", lambda self, tree: tree)
    before = jax.default_backend
    with pytest.warns(
        UserWarning, match=r"test_estimates.py:\d+ asks jax.default_back"
    ):
        absent.trace(asks, (SHAPE,))
    assert jax.default_backend is before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        absent.trace(step, (SHAPE, SHAPE))  # does not ask
        Target.of(None).trace(lambda x: asks(x), (SHAPE,))  # asks the right machine


def test_a_trace_that_fails_leaves_jax_as_it_was(monkeypatch):
    absent = Target(find("4090"), is_here=False)
    monkeypatch.setattr(Target, "place", lambda self, tree: tree)
    before = jax.devices
    with pytest.raises(ZeroDivisionError):
        absent.trace(lambda x: x * (1 / 0), (SHAPE,))
    assert jax.devices is before


class Refuses:
    """A traced program whose compiler says what compilers say."""

    def __init__(self, said):
        self.said = said
        traced = jax.jit(step).trace(SHAPE, SHAPE)
        self.in_avals, self.out_info = traced.in_avals, traced.out_info

    def lower(self):
        return self

    def compile(self, **_):
        raise jax.errors.JaxRuntimeError(self.said)


def test_a_compiler_that_refuses_a_large_program_gives_an_answer():
    said = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the "
        "total memory required for HLO temporaries (146.75G) exceeds available HBM "
        "(15.75G). HLO module: jit_step.\nSee the documentation."
    )
    target = Target(find("v5e"), is_here=False)
    found = target.compile(Traced(Refuses(said), Cost(), 1))
    assert found.program is None
    assert found.memory.refused == said.partition("\n")[0]
    assert found.memory.temporaries == int(146.75 * 2**30)
    assert found.memory.peak == found.memory.temporaries + 2 * SHAPE.size * 4
    said = "RESOURCE_EXHAUSTED: Used 20.5G of 15.75G hbm. Exceeded hbm capacity."
    found = target.compile(Traced(Refuses(said), Cost(), 1))
    assert found.memory.peak == int(20.5 * 2**30)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        target.compile(Traced(Refuses("INTERNAL: a fault"), Cost(), 1))


def test_an_absent_gpu_is_allowed_workspace_that_its_compiler_cannot_know():
    gpu, tpu = (Target(find(n), is_here=False) for n in ("4090", "v5e"))
    assert gpu._workspace(Cost()) == GPU_WORKSPACE
    convolutions = gpu._workspace(Cost(convolutions=3))
    assert convolutions == GPU_WORKSPACE + GPU_CONVOLUTION_WORKSPACE
    assert tpu._workspace(Cost(convolutions=3)) == 0
    assert Target.of(None)._workspace(Cost(convolutions=3)) == 0


def test_what_runs_out_of_memory_is_told_from_other_errors():
    error = jax.errors.JaxRuntimeError
    assert room.is_out_of_memory(error("RESOURCE_EXHAUSTED: Out of memory while"))
    assert not room.is_out_of_memory(error("INTERNAL: something else"))
    assert not room.is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))
