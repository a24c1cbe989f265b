"""Is the memory of a plan what a GPU then uses? For a machine that has one.

A training step of a transformer is planned for the device that is here, for a part of
its memory. The plan's program is run three times, and the device's own peak
(``memory_stats``) is compared with the plan. The step is also planned as if the same
chip were absent, where it is in the table and its compiler is installed: what differs
is what the compiler can try out only on a chip that is there.

    python benchmarks/planned_memory.py            under five minutes
    python benchmarks/planned_memory.py --memory 6GiB --json result.json
"""

import argparse
import datetime
import functools
import json
from pathlib import Path
import platform
import sys
import time
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax

from gradacc_jax import chips, plan
from gradacc_jax.cli import targets

GIB = 2**30
STEPS = 3


def zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpt", default="124M", help="default: %(default)s")
    parser.add_argument("--memory", default="10GiB", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    device = jax.devices()[0]
    if not (device.memory_stats() or {}).get("peak_bytes_in_use"):
        print(f"{device.device_kind} does not tell its peak memory; run this on a GPU")
        return 2
    start = time.perf_counter()
    arguments = targets.gpt(
        options.gpt, seq_len=512, optimizer="adamw", dtype="bf16", trainable=None
    )
    make_plan = functools.partial(
        plan, **arguments, global_batch_size=32, memory=options.memory
    )
    found = make_plan()
    print(found, flush=True)

    params = zeros(arguments["params"])
    state = jax.jit(found.tx.init)(params)
    count = 32 if found.form == "one call" else found.microbatch_size
    batch = zeros(
        jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype),
            arguments["batch"],
        )
    )
    for _ in range(STEPS):
        params, state, metrics = found.train_step(params, state, batch)
    jax.block_until_ready(metrics)
    measured = device.memory_stats()["peak_bytes_in_use"]
    result = {
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "optax": optax.__version__,
        "flax": flax.__version__,
        "planned": found.peak_bytes,
        "measured": measured,
        "ratio": measured / found.peak_bytes,
    }
    try:
        known = next(c for c in chips().values() if c.title == device.device_kind)
        split = {"microbatch_size": found.microbatch_size, "policies": (found.policy,)}
        result["planned as absent"] = make_plan(chip=known.name, **split).peak_bytes
    except (StopIteration, ImportError) as error:
        print(f"not planned as absent: {error!r}")
    result["seconds"] = time.perf_counter() - start
    for name, value in result.items():
        print(f"{name:18} {value}")
    off = abs(result["ratio"] - 1)
    print(f"the measured peak is {off:.1%} off the plan; at most 5 % is promised")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if off <= 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
