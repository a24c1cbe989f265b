"""A batch in micro-batches inside one program: what it costs beside its passes.

In each round every method differentiates the same batch, and each round begins with
another method. The floor is k single passes, one compiled program called k times whose
gradients are not even added. Ratios are medians of the ratios in one round: read these,
they carry over to other machines. Temporaries are the compiler's, and repeat exactly.

    python benchmarks/in_one_call.py            under two minutes on two cores
    python benchmarks/in_one_call.py --quick    a few seconds, small layers
"""

import argparse
from collections.abc import Callable
import dataclasses
import json
import os
from pathlib import Path
import platform
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.microbatching import AccumulationType

from gradacc_jax import value_and_grad

FLOOR = "k single passes"
OURS = "value_and_grad"
PyTree = Any


@dataclasses.dataclass
class Row:
    """What was measured of one method."""

    method: str
    milliseconds: float
    ratio: float
    temporary_bytes: int


def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
    """Residual layers in a scan, whose gradient is a stack as large as they are."""

    def layer(x: jax.Array, p: PyTree) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ p["w"] + p["b"]), None

    x, _ = jax.lax.scan(layer, batch["x"], params)
    return jnp.mean((x - batch["y"]) ** 2)


def split(batch: PyTree, k: int) -> PyTree:
    """The batch with a leading axis of k micro-batches."""
    return jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)


def methods(k: int, size: int) -> dict[str, Callable[[PyTree, PyTree], Any]]:
    """Each differentiates a batch; those compiled as a whole have ``lower``."""
    passed = jax.value_and_grad(loss_fn)

    def hand_written_scan(params: PyTree, batch: PyTree) -> PyTree:
        def body(total: PyTree, part: PyTree) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, total, passed(params, part)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params))
        total, _ = jax.lax.scan(body, zeros, split(batch, k))
        return jax.tree.map(lambda x: x / k, total)

    one_pass = jax.jit(passed)
    add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
    divide = jax.jit(lambda a: jax.tree.map(lambda x: x / k, a), donate_argnums=0)

    def parts(batch: PyTree) -> list[PyTree]:
        return [{n: x[i::k] for n, x in batch.items()} for i in range(k)]

    def single_passes(params: PyTree, batch: list[PyTree]) -> PyTree:
        return [jax.block_until_ready(one_pass(params, part)) for part in batch][-1]

    def python_loop(params: PyTree, batch: list[PyTree]) -> PyTree:
        total = None
        for part in batch:
            found = one_pass(params, part)
            total = found if total is None else add(total, found)
        return divide(total)

    single_passes.parts = python_loop.parts = parts  # type: ignore[attr-defined]
    single_passes.one_pass = python_loop.one_pass = one_pass  # type: ignore
    return {
        FLOOR: single_passes,
        OURS: jax.jit(value_and_grad(loss_fn, num_microbatches=k)),
        "optax.microbatch": jax.jit(
            optax.microbatch(passed, 1, size, AccumulationType.MEAN)
        ),
        "hand-written scan": jax.jit(hand_written_scan),
        "Python loop": python_loop,
        "one pass, whole batch": jax.jit(passed),
    }


def measure(k: int, size: int, width: int, layers: int, rounds: int) -> list[Row]:
    rng = np.random.default_rng(0)
    scale = width**-0.5
    params = {
        "w": jnp.asarray(rng.normal(size=(layers, width, width)) * scale, jnp.float32),
        "b": jnp.zeros((layers, width)),
    }
    batch = {
        n: jnp.asarray(rng.normal(size=(k * size, width)), jnp.float32) for n in "xy"
    }

    runs, expected = [], None
    for name, method in methods(k, size).items():
        if hasattr(method, "lower"):
            program, given = method.lower(params, batch).compile(), batch
            memory = program.memory_analysis()
        else:
            program, given = method, method.parts(batch)
            memory = method.one_pass.lower(params, given[0]).compile().memory_analysis()
        found = jax.block_until_ready(program(params, given))
        if name == OURS:
            expected = found
        elif name != FLOOR:
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6),
                found,
                expected,
            )
        runs.append((name, program, given, memory.temp_size_in_bytes, []))

    for i in range(rounds):
        for _, program, given, _, times in [
            *runs[i % len(runs) :],
            *runs[: i % len(runs)],
        ]:
            start = time.perf_counter()
            jax.block_until_ready(program(params, given))
            times.append((time.perf_counter() - start) * 1e3)

    floor = runs[0][4]
    return [
        Row(
            name,
            statistics.median(times),
            statistics.median(t / f for t, f in zip(times, floor)),
            temporaries,
        )
        for name, _, _, temporaries, times in runs
    ]


def table(rows: list[Row]) -> str:
    lines = [
        "| method | ms | x floor | temporaries, MiB |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row.method} | {row.milliseconds:.1f} | {row.ratio:.3f} | "
        f"{row.temporary_bytes / 2**20:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, help="default 30")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds {options.rounds} measures nothing; choose at least 1")
    rounds = options.rounds or (5 if options.quick else 30)
    width, size = (128, 32) if options.quick else (512, 64)

    machine = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "optax": optax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "rounds": rounds,
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    found = {}
    for k in (4, 16):
        rows = measure(k, size, width, layers=8, rounds=rounds)
        found[k] = [dataclasses.asdict(row) for row in rows]
        print(f"\n8 layers of {width} x {width}, k = {k} micro-batches of {size}\n")
        print(table(rows), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"run": machine, "k": found}, indent=2))


if __name__ == "__main__":
    main()
