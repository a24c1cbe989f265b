"""Memory, FLOPs and time of N layers: plain, rematerialised one by one, in segments.

    python benchmarks/remat_sequence.py            two to four minutes on two cores
    python benchmarks/remat_sequence.py --quick    12, 13 and 64 layers only

For loss and gradients of N layers with stacked parameters, and for two kinds of layer,
measures four ways: `none` (a plain scan), `per layer` (`jax.checkpoint` around the
body), `sqrt` (`remat_sequence`), and `literal` (`remat_sequence` with √N segments,
whatever a layer keeps).

- temp: temporaries of the compiled program. Exact; it repeats.
- FLOPs: of all matrix products of the traced program, with loops counted as often as
  they turn (XLA counts a loop's body once); over those of `none`.
- time: over `none`, the median of the ratios in one round. In each round every way runs
  once, and each round begins with another one.
"""

import argparse
from collections.abc import Callable
import dataclasses
import functools
import json
import math
import os
from pathlib import Path
import platform
import statistics
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from gradacc_jax import remat_sequence

NUMBERS = (12, 13, 32, 64, 128, 256, 512)
WAYS = ("none", "per layer", "sqrt", "literal")


def thin(x: jax.Array, w: jax.Array) -> jax.Array:
    """Keeps about as much as its input."""
    return jnp.tanh(x @ w)


def block(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    """Keeps about twenty times its input, like a transformer's."""
    mean = x.mean(-1, keepdims=True)
    scale = lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    h = (x - mean) * scale
    return x + jax.nn.gelu(h @ p["up"]) @ p["down"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of layer, with its input and the parameters of N layers."""

    name: str
    layer: Callable[[jax.Array, Any], jax.Array]
    x: tuple[int, int]
    params: dict[str, tuple[int, int]]

    def arguments(self, num: int) -> tuple[Any, jax.Array]:
        shapes = self.params.items()
        key = jax.random.key(0)
        params = {
            k: jax.random.normal(key, (num, *s)) / (10 * math.sqrt(s[0]))
            for k, s in shapes
        }
        tree = params if len(params) > 1 else params["w"]
        return tree, jax.random.normal(key, self.x)


KINDS = (
    Kind("a layer that keeps little: tanh(x w)", thin, (2048, 16), {"w": (16, 16)}),
    Kind(
        "a transformer's MLP: x + gelu(norm(x) up) down",
        block,
        (512, 32),
        {"up": (32, 128), "down": (128, 32)},
    ),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to run one kind of layer N times."""

    kind: str
    layers: int
    way: str
    temporary_bytes: int
    flops_ratio: float
    time_ratio: float


def loss(kind: Kind, way: str, num: int, params: Any, x: jax.Array) -> jax.Array:
    if way == "none":
        options = {"policy": "none"}
    else:
        segments = {"per layer": num, "sqrt": "sqrt", "literal": round(math.sqrt(num))}
        options = {"segments": segments[way]}
    return jnp.mean(remat_sequence(kind.layer, x, stacked=params, **options) ** 2)


def flops(jaxpr: Any) -> int:
    """Of the matrix products of a traced program."""
    total = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            inner = math.prod(shape[i] for i in contracted)
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * inner
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            total += eqn.params.get("length", 1) * flops(inner)
    return total


def measure(kind: Kind, num: int, rounds: int) -> list[Row]:
    args = kind.arguments(num)
    programs, counts, times = [], [], [[] for _ in WAYS]
    for way in WAYS:
        step = jax.value_and_grad(functools.partial(loss, kind, way, num))
        counts.append(flops(jax.make_jaxpr(step)(*args)))
        programs.append(jax.jit(step).lower(*args).compile())
    for program in programs:
        jax.block_until_ready(program(*args))
    for i in range(rounds):
        order = [(i + j) % len(WAYS) for j in range(len(WAYS))]
        for j in order:
            start = time.perf_counter()
            jax.block_until_ready(programs[j](*args))
            times[j].append(time.perf_counter() - start)
    return [
        Row(
            kind=kind.name,
            layers=num,
            way=way,
            temporary_bytes=program.memory_analysis().temp_size_in_bytes,
            flops_ratio=count / counts[0],
            time_ratio=statistics.median(a / b for a, b in zip(took, times[0])),
        )
        for way, program, count, took in zip(WAYS, programs, counts, times)
    ]


def markdown(rows: list[Row]) -> str:
    lines = []
    for kind in dict.fromkeys(row.kind for row in rows):
        header = ["layers", *(f"{w}, MiB" for w in WAYS)]
        header += [f"{w}, FLOPs" for w in WAYS[1:]] + [f"{w}, time" for w in WAYS[1:]]
        lines += [f"**{kind}**", "", "| " + " | ".join(header) + " |"]
        lines += ["|" + "---:|" * len(header)]
        for num in dict.fromkeys(row.layers for row in rows if row.kind == kind):
            found = [r for r in rows if (r.kind, r.layers) == (kind, num)]
            cells = [str(num), *(f"{r.temporary_bytes / 2**20:.2f}" for r in found)]
            cells += [f"{r.flops_ratio:.2f}" for r in found[1:]]
            cells += [f"{r.time_ratio:.2f}" for r in found[1:]]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(row.kind for row in rows))
    colors = {"none": "0.6", "per layer": "C1", "sqrt": "C0", "literal": "C2"}
    figure, axes = plt.subplots(
        2, len(kinds), figsize=(5.2 * len(kinds), 6.4), squeeze=False, sharex=True
    )
    for (top, bottom), kind in zip(axes.T, kinds):
        for way in WAYS:
            found = [r for r in rows if (r.kind, r.way) == (kind, way)]
            numbers = [r.layers for r in found]
            style = {"color": colors[way], "marker": "o", "markersize": 3, "label": way}
            if way == "literal":
                style["linestyle"] = ":"
            top.plot(numbers, [r.temporary_bytes / 2**20 for r in found], **style)
            if way != "none":
                bottom.plot(numbers, [r.time_ratio for r in found], **style)
                style |= {"linestyle": "--", "marker": "", "label": f"{way}, FLOPs"}
                bottom.plot(numbers, [r.flops_ratio for r in found], **style)
        top.set_title(kind, fontsize=10)
        top.set_xscale("log", base=2)
        top.set_yscale("log", base=2)
        for axis in (top.xaxis, top.yaxis):
            axis.set_major_formatter("{x:g}")
        top.set_ylabel("temporaries, MiB")
        bottom.set_ylabel("over no rematerialisation")
        bottom.set_ylim(0, 2)
        bottom.axhline(1, color="0.6", linewidth=1)
        bottom.set_xlabel("layers")
        for ax in (top, bottom):
            ax.legend(fontsize=8)
            ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="12, 13 and 64 layers")
    parser.add_argument("--rounds", type=int, default=7, help="default 7")
    parser.add_argument("--plot", type=Path, help="write a PNG", metavar="FILE")
    parser.add_argument("--json", type=Path, help="write all numbers", metavar="FILE")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} measures nothing; choose at least 1")

    machine = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "rounds": options.rounds,
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()), "\n")
    numbers = (12, 13, 64) if options.quick else NUMBERS
    rows = []
    for kind in KINDS:
        for num in numbers:
            rows += measure(kind, num, options.rounds)
    print(markdown(rows))
    if options.plot:
        plot(rows, options.plot)
    if options.json:
        found = [dataclasses.asdict(row) for row in rows]
        options.json.write_text(json.dumps({"run": machine, "rows": found}, indent=2))


if __name__ == "__main__":
    main()
