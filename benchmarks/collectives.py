"""What devices tell each other in a window: collectives and bytes, from the programs.

Nothing runs: programs are compiled for 8 CPU devices and, where their compilers are
installed, for 4 TPU v5e and 4 H200 that are not here. A collective in a loop counts as
often as the loop turns, and across calls a window is k - 1 silent programs and one that
emits. Bytes are those that one device sends: of an all-reduce of B bytes over D devices
2 (D - 1) / D B, of a reduce-scatter or all-gather half of that.

    python benchmarks/collectives.py                8 CPU devices, a minute
    python benchmarks/collectives.py --chips all    absent chips too, some minutes
"""

import argparse
from collections import Counter
from collections.abc import Callable
import json
import math
import os
from pathlib import Path
import re
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from gradacc_jax import accumulate, state_specs, train_step
from gradacc_jax.planning import absent, chips

LAYERS, WIDTH, PER_DEVICE = 8, 128, 4
KS = (1, 8, 64)
COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-to-all|all-gather|reduce-scatter|collective-permute)"
    r"(?:-start)?\("
)
SHAPE = re.compile(r"([a-z]+\d+)\[([\d,]*)\]")
SIZES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "f16": 2}
PyTree = Any


class Moved(NamedTuple):
    """What a window takes.

    Attributes:
      calls: how often each collective runs, of those over gradients or parameters.
      bytes: what one device sends, scalars included.
    """

    calls: Counter[str]
    bytes: float


def parameters() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)


def loss_fn(params: PyTree, batch: jax.Array) -> jax.Array:
    # Without a loop over layers: the only loop is that over micro-batches.
    for layer in range(LAYERS):
        batch = jnp.tanh(batch @ params[layer])
    return jnp.mean(batch**2)


# --- the methods: each gives (program, how often it runs in a window) ----------------


def placed(mesh: Mesh, tree: PyTree, specs: PyTree) -> PyTree:
    if isinstance(specs, P):
        specs = jax.tree.map(lambda _: specs, tree)
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        ),
        tree,
        specs,
    )


def batch_for(mesh: Mesh, micro_batches: int) -> jax.ShapeDtypeStruct:
    rows = PER_DEVICE * mesh.size * micro_batches
    return placed(mesh, jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32), P("data"))


def ours_across_calls(mesh: Mesh, k: int, shard: bool = False) -> list[Any]:
    tx = accumulate(optax.sgd(0.1), k, axis_name="data", shard_accumulators=shard)
    params = placed(mesh, parameters(), P())
    specs = state_specs(tx, parameters())
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
    state = placed(mesh, jax.eval_shape(init, parameters()), specs)
    step = train_step(loss_fn, tx, mesh=mesh, axis_name="data")
    batch = batch_for(mesh, 1)
    emitting = step.lower(params, state, batch, emit=True), 1
    if k == 1:
        return [emitting]
    return [emitting, (step.lower(params, state, batch, emit=False), k - 1)]


def ours_sharded_sums(mesh: Mesh, k: int) -> list[Any]:
    return ours_across_calls(mesh, k, shard=True)


def ours_in_one_call(mesh: Mesh, k: int) -> list[Any]:
    tx = optax.sgd(0.1)
    step = train_step(loss_fn, tx, num_microbatches=k, mesh=mesh, axis_name="data")
    params = placed(mesh, parameters(), P())
    state = jax.eval_shape(tx.init, parameters())
    return [(step.lower(params, state, batch_for(mesh, k)), 1)]


def ours_under_jit(mesh: Mesh, k: int) -> list[Any]:
    """What XLA makes of a batch that is sharded, and no word about devices."""
    tx = optax.sgd(0.1)
    step = train_step(loss_fn, tx, num_microbatches=k)
    params = placed(mesh, parameters(), P())
    state = jax.eval_shape(tx.init, parameters())
    return [(step.lower(params, state, batch_for(mesh, k)), 1)]


def multi_steps(mesh: Mesh, k: int) -> list[Any]:
    """``optax.MultiSteps`` under ``jit``, with the batch sharded."""
    tx = optax.MultiSteps(optax.sgd(0.1), k)

    @jax.jit
    def step(params: PyTree, state: PyTree, batch: jax.Array) -> Any:
        grads = jax.grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = placed(mesh, parameters(), P())
    state = placed(mesh, jax.eval_shape(tx.init, parameters()), P())
    return [(step.lower(params, state, batch_for(mesh, 1)), k)]


def plain_scan(mesh: Mesh, k: int) -> list[Any]:
    """A loop that adds gradients up, under ``jit``, with the batch sharded."""

    @jax.jit
    def step(params: PyTree, batch: jax.Array) -> PyTree:
        parts = batch.reshape(-1, k, WIDTH).swapaxes(0, 1)

        def add(total: PyTree, part: jax.Array) -> tuple[PyTree, None]:
            return total + jax.grad(loss_fn)(params, part), None

        total, _ = lax.scan(add, jnp.zeros_like(params), parts)
        return params - 0.1 * total / k

    params = placed(mesh, parameters(), P())
    return [(step.lower(params, batch_for(mesh, k)), 1)]


def by_hand(mesh: Mesh, k: int) -> list[Any]:
    """A loop in ``shard_map`` as one writes it at first: parameters do not vary."""

    def step(params: PyTree, batch: jax.Array) -> PyTree:
        parts = batch.reshape(-1, k, WIDTH).swapaxes(0, 1)

        def add(total: PyTree, part: jax.Array) -> tuple[PyTree, None]:
            return total + jax.grad(loss_fn)(params, part), None

        total, _ = lax.scan(add, jnp.zeros_like(params), parts)
        return params - 0.1 * total / (k * mesh.size)

    params = placed(mesh, parameters(), P())
    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    return [(jax.jit(run).lower(params, batch_for(mesh, k)), 1)]


METHODS: dict[str, Callable[[Mesh, int], list[Any]]] = {
    "accumulate(axis_name), across calls": ours_across_calls,
    "the same, shard_accumulators": ours_sharded_sums,
    "num_microbatches=k, in one call": ours_in_one_call,
    "num_microbatches=k under jit": ours_under_jit,
    "optax.MultiSteps under jit": multi_steps,
    "a scan that adds, under jit": plain_scan,
    "a scan in shard_map, by hand": by_hand,
}


# --- reading the programs ------------------------------------------------------------


def moved(programs: list[Any], mesh: Mesh, k: int) -> Moved:
    calls: Counter[str] = Counter()
    sent = 0.0
    for lowered, times in programs:
        text = lowered.compile().as_text()
        runs = turns_of(text, k)
        for computation, line in lines_of(text):
            found = COLLECTIVE.search(line)
            if not found:
                continue
            sizes = [
                SIZES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n)
                for kind, dims in SHAPE.findall(found[1])
            ]
            size = float(sum(sizes))
            share = (mesh.size - 1) / mesh.size
            if found[2] in ("reduce-scatter", "all-gather") and "-start(" in line:
                # An asynchronous one shows its operands beside its results.
                size *= mesh.size / (mesh.size + 1)
            elif found[2] == "reduce-scatter":
                size *= mesh.size
            turns = times * runs[computation]
            if size > 1024:
                calls[found[2]] += turns
            sent += turns * size * share * (2 if found[2] == "all-reduce" else 1)
    return Moved(calls, sent)


def lines_of(text: str) -> list[tuple[str, str]]:
    """Every instruction with the name of its computation."""
    found, name = [], ""
    for line in text.splitlines():
        if line and not line[0].isspace() and line.rstrip().endswith("{"):
            name = line.removeprefix("ENTRY ").split(" ")[0].lstrip("%")
        found.append((name, line))
    return found


def turns_of(text: str, k: int) -> dict[str, int]:
    """How often each computation runs: a loop's body k times, or as XLA knows."""
    callers: dict[str, list[tuple[str, int]]] = {}
    for name, line in lines_of(text):
        trips = re.search(r'known_trip_count"?:\{"n":"(\d+)"', line)
        for how, one in re.findall(
            r"(calls|to_apply|body|condition|true_computation|false_computation)"
            r"=%?([\w.\-]+)",
            line,
        ):
            turns_here = int(trips[1]) if trips else k
            times = turns_here if how == "body" else 1
            callers.setdefault(one, []).append((name, times))

    def turns(name: str) -> int:
        return sum(turns(by) * times for by, times in callers.get(name, ())) or 1

    return {name: turns(name) for name, _ in lines_of(text)}


# --- chips ---------------------------------------------------------------------------


def meshes(which: str) -> dict[str, Mesh]:
    found = {
        "8 CPU devices": jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    }
    for name in ("v5e", "h200") if which == "all" else ():
        try:
            devices = absent.devices(chips.find(name), 4)
        except ImportError as error:
            print(error)
            continue
        kinds = (AxisType.Auto,)
        found[f"4 {name}"] = Mesh(np.array(devices), ("data",), axis_types=kinds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chips", choices=("cpu", "all"), default="cpu")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    given = parser.parse_args()
    rows = []
    params = parameters().size * 4
    print(f"gradients of {params / 2**20:.1f} MiB; jax {jax.__version__}")
    for chip, mesh in meshes(given.chips).items():
        print(f"\n{chip}\n{'':38s}" + "".join(f"{f'k={k}':>42s}" for k in KS))
        for name, method in METHODS.items():
            cells = []
            for k in KS:
                one = moved(method(mesh, k), mesh, k)
                told = ", ".join(f"{n} {what}" for what, n in sorted(one.calls.items()))
                cells.append(f"{told or 'none'}; {one.bytes / params:.2f} P")
                rows.append(
                    {"chip": chip, "method": name, "k": k, "bytes": one.bytes}
                    | {"calls": dict(one.calls)}
                )
            print(f"{name:38s}" + "".join(f"{cell:>42s}" for cell in cells), flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
