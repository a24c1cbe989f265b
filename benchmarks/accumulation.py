"""What a micro-step costs, beside the addition that no accumulation can do without.

Runs everything side by side: in each round every method takes one window, so that a
machine that slows down slows all of them. Times are medians over the rounds, and ratios
are medians of the ratios in one round: read these, they carry over to other machines.
Counts come from the compiled programs and repeat exactly.

    python benchmarks/accumulation.py            a few minutes on two cores
    python benchmarks/accumulation.py --quick    under a minute
"""

import argparse
from collections.abc import Callable
import dataclasses
from functools import partial
import json
import math
import os
from pathlib import Path
import platform
import re
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradacc_jax import accumulate, apply_gradients

NUM_LEAVES = 8
OPTIMIZERS = {"sgd": partial(optax.sgd, 1e-3), "adamw": partial(optax.adamw, 1e-3)}
ADDITION = "bare addition"
MULTI_STEPS = "MultiSteps + apply_updates"

Step = Callable[..., tuple[Any, Any]]


@dataclasses.dataclass
class Method:
    """One way to take a micro-step, ``step(params, state, grads)``."""

    name: str
    init: Callable[[Any], Any]
    step: Step
    emits: bool = True


@dataclasses.dataclass
class Row:
    """What was measured of one method; ratios are to the bare addition of a round."""

    optimizer: str
    parameters: int
    method: str
    silent_ms: float
    silent_ratio: float
    emitting_ms: float | None
    temporary_bytes: int
    parameter_copies: int
    flops_per_parameter: float
    bytes_per_parameter: float


def methods(opt: optax.GradientTransformation, k: int) -> list[Method]:
    def fused(name: str, tx: optax.GradientTransformation, emit: Any = None) -> Method:
        step = partial(apply_gradients, tx, emit=emit)
        return Method(f"apply_gradients{name}", tx.init, step, emit is None)

    def two_calls(name: str, tx: Any) -> Method:
        def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return Method(name, tx.init, step)

    def add(params: Any, total: Any, grads: Any) -> tuple[Any, Any]:
        return params, jax.tree.map(jnp.add, total, grads)

    tx = accumulate(opt, k)
    freeze = {"train": tx, "freeze": optax.set_to_zero()}
    return [
        Method(ADDITION, lambda p: jax.tree.map(jnp.zeros_like, p), add, False),
        fused("", tx),
        fused(", in chain", optax.chain(optax.clip(1.0), tx)),
        fused(", in partition", optax.partition(freeze, labels)),
        fused(", emit=False", tx, emit=False),
        two_calls("update + apply_updates", tx),
        two_calls(MULTI_STEPS, optax.MultiSteps(opt, k)),
    ]


def parameters(size: int) -> dict[str, jax.Array]:
    """``size`` numbers in equal matrices, and a few for the partition to freeze."""
    shape = (size // NUM_LEAVES // 1024, 1024)
    tree = {f"w{i}": jnp.full(shape, 0.5) for i in range(NUM_LEAVES)}
    return {"frozen": jnp.zeros(8), **tree}


def labels(params: Any) -> dict[str, str]:
    return {name: "freeze" if name == "frozen" else "train" for name in params}


def measure(name: str, size: int, k: int, rounds: int) -> list[Row]:
    """All methods for one optimizer and one size, a window of each in every round."""
    grads = parameters(size)
    runs = []
    for method in methods(OPTIMIZERS[name](), k):
        params = parameters(size)
        state = method.init(params)
        step = jax.jit(method.step, donate_argnums=(0, 1))
        program = step.lower(params, state, grads).compile()
        for _ in range(k):
            params, state = program(params, state, grads)
        runs.append([method, program, params, state, [], []])

    for i in range(rounds):
        # Each round begins with another method: what runs before leaves its traces.
        for run in [*runs[i % len(runs) :], *runs[: i % len(runs)]]:
            method, program, params, state, silent, emitting = run
            took = []
            for _ in range(k):
                start = time.perf_counter()
                params, state = jax.block_until_ready(program(params, state, grads))
                took.append((time.perf_counter() - start) * 1e3)
            run[2:4] = params, state
            if method.emits:
                emitting.append(took.pop())
            silent.append(statistics.median(took))

    floor = runs[0][4]
    rows = []
    for method, program, _, _, silent, emitting in runs:
        cost = program.cost_analysis()
        rows.append(
            Row(
                optimizer=name,
                parameters=size,
                method=method.name,
                silent_ms=statistics.median(silent),
                silent_ratio=statistics.median(t / f for t, f in zip(silent, floor)),
                emitting_ms=statistics.median(emitting) if emitting else None,
                temporary_bytes=program.memory_analysis().temp_size_in_bytes,
                parameter_copies=copies(program.as_text(), size // NUM_LEAVES),
                flops_per_parameter=cost["flops"] / size,
                bytes_per_parameter=cost["bytes accessed"] / size,
            )
        )
    return rows


def copies(text: str, size: int) -> int:
    """How many instructions of a compiled program copy ``size`` elements or more."""
    shapes = re.findall(r" = \w+\[([\d,]+)\]\S* copy(?:-start)?\(", text)
    return sum(math.prod(map(int, shape.split(","))) >= size for shape in shapes)


HEADER = (
    "method",
    "silent ms",
    "x add",
    "emit ms",
    "temp MiB",
    "copies",
    "FLOPs/p",
    "bytes/p",
)


NOTES = """\
silent ms, emit ms: a micro-step that closes no window, and one that does; medians.
x add: the silent micro-step over the bare addition.  temp: temporaries.
copies: of arrays as large as a parameter.  FLOPs/p, bytes/p: XLA's counts per parameter
of the whole program, in which both branches of a conditional are counted."""


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.method,
        f"{row.silent_ms:.3f}",
        f"{row.silent_ratio:.2f}",
        "" if row.emitting_ms is None else f"{row.emitting_ms:.3f}",
        f"{row.temporary_bytes / 2**20:.2f}",
        str(row.parameter_copies),
        f"{row.flops_per_parameter:.1f}",
        f"{row.bytes_per_parameter:.1f}",
    )


def print_table(title: str, rows: list[Row]) -> None:
    lines = [cells(row) for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(HEADER, *lines)]
        print(f"\n{title}")
        for line in (HEADER, *lines):
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)))
        return
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(HEADER):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console = Console()
    Console(width=max(console.width, 110)).print(table)


def markdown(title: str, rows: list[Row]) -> str:
    lines = [HEADER, ("---", *["---:"] * (len(HEADER) - 1)), *map(cells, rows)]
    return "\n".join([f"**{title}**\n", *(f"| {' | '.join(x)} |" for x in lines), ""])


def plot(groups: dict[str, list[Row]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(groups), figsize=(4.2 * len(groups) + 2, 3.6), squeeze=False, sharey=True
    )
    for ax, (title, rows) in zip(axes[0], groups.items()):
        names = [row.method for row in rows]
        ratios = [row.silent_ratio for row in rows]
        colors = {ADDITION: "0.6", MULTI_STEPS: "C1"}
        bars = ax.barh(names, ratios, color=[colors.get(n, "C0") for n in names])
        ax.bar_label(bars, fmt="%.1f", padding=3)
        ax.axvline(1, color="0.6", linewidth=1)
        ax.set_xscale("log")
        ax.set_xlim(0.5, 3 * max(ratios))
        ax.set_title(title)
        ax.set_xlabel("silent micro-step / bare addition")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="1M parameters, 10 rounds")
    parser.add_argument("--rounds", type=int, help="windows per method (default 30)")
    parser.add_argument("-k", type=int, default=4, help="micro-steps in a window")
    parser.add_argument("--plot", type=Path, help="write a PNG", metavar="FILE")
    parser.add_argument("--json", type=Path, help="write all numbers", metavar="FILE")
    parser.add_argument("--markdown", type=Path, help="write tables", metavar="FILE")
    options = parser.parse_args()
    if options.k < 2:
        parser.error(f"-k {options.k} has no silent micro-steps; choose at least 2")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds {options.rounds} measures nothing; choose at least 1")
    rounds = options.rounds or (10 if options.quick else 30)
    sizes = [2**20] if options.quick else [2**20, 2**24]

    machine = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "optax": optax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "rounds": rounds,
        "k": options.k,
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()))

    groups = {}
    for size in sizes:
        for name in OPTIMIZERS:
            title = f"{name}, {size // 2**20}M float32 parameters"
            groups[title] = measure(name, size, options.k, rounds)
            print_table(title, groups[title])
            sys.stdout.flush()
    print(NOTES)

    if options.plot:
        plot(groups, options.plot)
    if options.markdown:
        options.markdown.write_text("\n".join(markdown(*x) for x in groups.items()))
    if options.json:
        rows = [dataclasses.asdict(r) for rows in groups.values() for r in rows]
        options.json.write_text(json.dumps({"run": machine, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
