"""remat_to_fit against fixed policies: seven models at six budgets.

    python benchmarks/remat_to_fit.py                    all, an hour on two cores
    python benchmarks/remat_to_fit.py lstm moe           these models only
    python benchmarks/remat_to_fit.py --quick            small models: some minutes

For loss and gradients of every model, compiles the fixed policies `none`, `full`,
`dots` and `dots_with_no_batch_dims` around every block, and `sqrt` (segments of
blocks), and asks `remat_to_fit` for six budgets from the least bytes that it can reach
to those of no rematerialisation.

- temp: temporaries of the compiled program. Exact; it repeats.
- FLOPs: of the traced program, loops counted as often as they turn, over `none`.
- over best: FLOPs over those of the best fixed policy that fits the same budget.
- error: the largest difference of a gradient from the plain one's, over the largest
  gradient of its leaf. `--x64` computes in float64.
"""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import json
import math
import os
from pathlib import Path
import platform
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from gradacc_jax import RematReport, remat_sequence, remat_to_fit
from gradacc_jax.checkpointing.flops import flops_of

POLICIES = ("none", "full", "dots", "dots_with_no_batch_dims", "sqrt")
BUDGETS = 6

Block = Callable[[jax.Array], jax.Array]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class Model:
    """A loss, which runs its blocks by ``run``, and its arguments."""

    name: str
    loss: Callable[..., jax.Array]  # loss(params, data, policy)
    args: tuple[Any, ...]


# --- how blocks are run under a fixed policy ------------------------------------------


def wrap(policy: str) -> Wrap:
    if policy in ("none", "sqrt"):
        return lambda block: block
    saved = {
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_saveable,
        "dots_with_no_batch_dims": (
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        ),
    }[policy]
    return lambda block: jax.checkpoint(block, policy=saved)


def chain(policy: str, blocks: Sequence[Block], x: jax.Array) -> jax.Array:
    """Blocks one after the other."""
    if policy == "sqrt":
        return remat_sequence(blocks, x, segments=round(math.sqrt(len(blocks))))
    for block in blocks:
        x = wrap(policy)(block)(x)
    return x


def loop(policy: str, body: Callable[..., Any], carry: Any, xs: Any) -> Any:
    """A scan; for "sqrt" one of scans."""
    if policy != "sqrt":
        return lax.scan(wrap(policy)(body), carry, xs)
    length = jax.tree.leaves(xs)[0].shape[0]
    turns = next(d for d in range(math.isqrt(length), 0, -1) if length % d == 0)
    parts = jax.tree.map(lambda x: x.reshape(-1, turns, *x.shape[1:]), xs)
    inner = jax.checkpoint(lambda carry, xs: lax.scan(body, carry, xs))
    carry, ys = lax.scan(inner, carry, parts)
    return carry, jax.tree.map(lambda y: y.reshape(length, *y.shape[2:]), ys)


# --- models ---------------------------------------------------------------------------


class Init:
    """Random parameters, one after the other."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, *shape: int, fan: int | None = None) -> jax.Array:
        scale = math.sqrt(fan or math.prod(shape[:-1]))
        return jnp.asarray(self.rng.normal(size=shape) / scale, float)


def norm(x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def attention(p: Any, x: jax.Array, heads: int) -> jax.Array:
    batch, length, width = x.shape
    q, k, v = (
        part.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)
        for part in jnp.split(norm(x) @ p["qkv"], 3, -1)
    )
    scores = q @ k.swapaxes(-1, -2) * (width // heads) ** -0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(mask, scores, -1e30)
    mixed = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3)
    return mixed.reshape(batch, length, width) @ p["out"]


def transformer(
    layers: int, width: int, batch: int, length: int, name: str, in_loop: bool = False
) -> Model:
    """Layers in a row, or in a loop over their stacked parameters."""
    init, vocabulary, heads = Init(), 256, 4
    params = {
        "embed": init(vocabulary, width),
        "layers": [
            {
                "qkv": init(width, 3 * width),
                "out": init(width, width),
                "up": init(width, 4 * width),
                "down": init(4 * width, width),
            }
            for _ in range(layers)
        ],
        "head": init(width, vocabulary),
    }
    shape = batch, length + 1
    tokens = jnp.asarray(init.rng.integers(0, vocabulary, shape, dtype=np.int32))

    if in_loop:
        params["layers"] = jax.tree.map(lambda *p: jnp.stack(p), *params["layers"])

    def block(p: Any, x: jax.Array) -> jax.Array:
        x = x + attention(p, x, heads)
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    def through(policy: str, layers: Any, x: jax.Array) -> jax.Array:
        if in_loop:
            return loop(policy, lambda x, p: (block(p, x), None), x, layers)[0]
        return chain(policy, [lambda x, p=p: block(p, x) for p in layers], x)

    def loss(params: Any, tokens: jax.Array, policy: str = "none") -> jax.Array:
        x = params["embed"][tokens[:, :-1]]
        x = through(policy, params["layers"], x)
        logits = jax.nn.log_softmax(norm(x) @ params["head"])
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    return Model(name, loss, (params, tokens))


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def batch_norm(x: jax.Array) -> jax.Array:
    mean = x.mean((0, 1, 2), keepdims=True)
    return (x - mean) * lax.rsqrt(x.var((0, 1, 2), keepdims=True) + 1e-5)


def resnet(stages: Sequence[int], width: int, batch: int, size: int) -> Model:
    """Bottleneck blocks in stages, as in ResNet-50."""
    init = Init()
    params: dict[str, Any] = {"stem": init(3, 3, 3, width), "blocks": []}
    strides, channels = [], width
    for stage, count in enumerate(stages):
        for i in range(count):
            inner = width * 2**stage
            block = {
                "a": init(1, 1, channels, inner),
                "b": init(3, 3, inner, inner),
                "c": init(1, 1, inner, 4 * inner),
            }
            if i == 0:
                block["skip"] = init(1, 1, channels, 4 * inner)
            strides.append(2 if i == 0 and stage else 1)
            params["blocks"].append(block)
            channels = 4 * inner
    params["head"] = init(channels, 10)
    shape = (batch, size, size, 3)
    images = init(*shape, fan=1)

    def block_of(p: Any, stride: int) -> Block:
        def block(x: jax.Array) -> jax.Array:
            h = jax.nn.relu(batch_norm(conv(x, p["a"])))
            h = jax.nn.relu(batch_norm(conv(h, p["b"], stride)))
            h = batch_norm(conv(h, p["c"]))
            skip = batch_norm(conv(x, p["skip"], stride)) if "skip" in p else x
            return jax.nn.relu(h + skip)

        return block

    def loss(params: Any, images: jax.Array, policy: str = "none") -> jax.Array:
        x = jax.nn.relu(batch_norm(conv(images, params["stem"])))
        blocks = [block_of(p, s) for p, s in zip(params["blocks"], strides)]
        x = chain(policy, blocks, x).mean((1, 2)) @ params["head"]
        return -jax.nn.log_softmax(x)[:, 0].mean()

    return Model("resnet", loss, (params, images))


def unet(levels: int, width: int, batch: int, size: int) -> Model:
    """Down and up again, with what was seen on the way down put beside it."""
    init = Init()
    widths = [width * 2**i for i in range(levels)]

    def two(inputs: int, outputs: int) -> dict[str, jax.Array]:
        return {"a": init(3, 3, inputs, outputs), "b": init(3, 3, outputs, outputs)}

    params = {
        "down": [two(3 if i == 0 else widths[i - 1], w) for i, w in enumerate(widths)],
        "up": [
            two(widths[i + 1] + widths[i], widths[i])
            for i in reversed(range(levels - 1))
        ],
        "head": init(1, 1, width, 3),
    }
    shape = (batch, size, size, 3)
    images = init(*shape, fan=1)

    def block(p: Any, x: jax.Array) -> jax.Array:
        x = jax.nn.silu(batch_norm(conv(x, p["a"])))
        return jax.nn.silu(batch_norm(conv(x, p["b"])))

    def loss(params: Any, images: jax.Array, policy: str = "none") -> jax.Array:
        # The blocks are no chain, so there is no sqrt: one by one.
        again = wrap("full" if policy == "sqrt" else policy)(block)
        x, seen = images, []
        for p in params["down"]:
            x = again(p, x)
            seen.append(x)
            x = x.reshape(batch, x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1)
            x = x.mean((2, 4))
        x = seen.pop()
        for p in params["up"]:
            x = x.repeat(2, 1).repeat(2, 2)
            x = again(p, jnp.concatenate([x, seen.pop()], -1))
        return jnp.mean((conv(x, params["head"]) - images) ** 2)

    return Model("unet", loss, (params, images))


def lstm(steps: int, width: int, batch: int) -> Model:
    init = Init()
    params = {
        "in": init(width, 4 * width),
        "hidden": init(width, 4 * width),
        "head": init(width, width),
    }
    shape = (steps, batch, width)
    xs = init(*shape, fan=1)

    def loss(params: Any, xs: jax.Array, policy: str = "none") -> jax.Array:
        def cell(carry: Any, x: jax.Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(x @ params["in"] + h @ params["hidden"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), None

        zero = jnp.zeros((batch, width), xs.dtype)
        (h, _), _ = loop(policy, cell, (zero, zero), xs)
        return jnp.mean((h @ params["head"]) ** 2)

    return Model("lstm", loss, (params, xs))


def moe(layers: int, width: int, batch: int, length: int, experts: int) -> Model:
    """Attention, then each token through the two experts that its router picks."""
    init = Init()
    params = [
        {
            "qkv": init(width, 3 * width),
            "out": init(width, width),
            "router": init(width, experts),
            "up": init(experts, width, 2 * width, fan=width),
            "down": init(experts, 2 * width, width, fan=2 * width),
        }
        for _ in range(layers)
    ]
    shape = (batch, length, width)
    x = init(*shape, fan=1)

    def block(p: Any, x: jax.Array) -> jax.Array:
        x = x + attention(p, x, 4)
        h = norm(x).reshape(-1, width)
        gates, picked = lax.top_k(jax.nn.softmax(h @ p["router"]), 2)
        chosen = jax.nn.one_hot(picked, experts, dtype=x.dtype) * gates[..., None]
        through = jax.nn.gelu(jnp.einsum("td,edf->etf", h, p["up"]))
        through = jnp.einsum("etf,efd,te->td", through, p["down"], chosen.sum(1))
        return x + through.reshape(x.shape)

    def loss(params: Any, x: jax.Array, policy: str = "none") -> jax.Array:
        x = chain(policy, [lambda x, p=p: block(p, x) for p in params], x)
        return jnp.mean(x**2)

    return Model("moe", loss, (params, x))


MODELS: dict[str, Callable[[bool], Model]] = {
    "transformer-12": lambda quick: (
        transformer(4, 64, 4, 64, "transformer-12")
        if quick
        else transformer(12, 128, 8, 128, "transformer-12")
    ),
    "transformer-48": lambda quick: (
        transformer(12, 32, 4, 32, "transformer-48")
        if quick
        else transformer(48, 64, 4, 64, "transformer-48")
    ),
    "transformer-loop": lambda quick: (
        transformer(4, 64, 4, 64, "transformer-loop", in_loop=True)
        if quick
        else transformer(12, 128, 8, 128, "transformer-loop", in_loop=True)
    ),
    "resnet": lambda quick: (
        resnet((1, 2, 2), 8, 4, 16) if quick else resnet((3, 4, 6, 3), 16, 8, 32)
    ),
    "unet": lambda quick: unet(3, 8, 2, 16) if quick else unet(4, 16, 4, 64),
    "lstm": lambda quick: lstm(64, 32, 8) if quick else lstm(256, 64, 32),
    "moe": lambda quick: moe(2, 32, 4, 32, 4) if quick else moe(4, 64, 8, 64, 4),
}


# --- measuring ------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """A model at one budget."""

    model: str
    budget: int
    temp_bytes: int
    flops_ratio: float
    best_policy: str
    over_best: float
    error: float
    compiles: int
    seconds: float


@dataclasses.dataclass
class Fixed:
    """A model under a fixed policy."""

    model: str
    policy: str
    temp_bytes: int
    flops_ratio: float


def measure(model: Model) -> tuple[list[Fixed], list[Row], RematReport]:
    gradients = jax.value_and_grad(model.loss)
    plain = jax.jit(gradients).lower(*model.args).compile()
    reference = plain(*model.args)
    base = flops_of(gradients, *model.args).total
    fixed = []
    for policy in POLICIES:

        def loss(*args: Any, policy: str = policy) -> jax.Array:
            return model.loss(*args, policy)

        step = jax.value_and_grad(loss)
        stats = jax.jit(step).lower(*model.args).compile().memory_analysis()
        ratio = flops_of(step, *model.args).total / base
        fixed.append(Fixed(model.name, policy, stats.temp_size_in_bytes, ratio))
        print(
            f"  {policy:24} {_mib(fixed[-1].temp_bytes)} MiB  {ratio:.3f}", flush=True
        )
    most = fixed[0].temp_bytes
    least = least_bytes(model)
    rows = []
    for budget in np.linspace(1.01 * least, 0.99 * most, BUDGETS).astype(int).tolist():
        start = time.perf_counter()
        fitted, report = remat_to_fit(
            model.loss, *model.args, max_temp_bytes=budget, progress=lambda _: None
        )
        seconds = time.perf_counter() - start
        made = jax.jit(jax.value_and_grad(fitted)).lower(*model.args).compile()
        stats = made.memory_analysis()
        ratio = report.flops / base
        fitting = [f for f in fixed if f.temp_bytes <= budget]
        best = min(fitting, key=lambda f: f.flops_ratio, default=None)
        rows.append(
            Row(
                model=model.name,
                budget=budget,
                temp_bytes=stats.temp_size_in_bytes,
                flops_ratio=ratio,
                best_policy=best.policy if best else "",
                over_best=ratio / best.flops_ratio if best else math.nan,
                error=error(made(*model.args), reference),
                compiles=report.num_compiles,
                seconds=seconds,
            )
        )
        print("  " + "  ".join(cells(rows[-1])[1:]), flush=True)
    return fixed, rows, report


def least_bytes(model: Model) -> int:
    """The least bytes that remat_to_fit finds, from its own error."""
    try:
        remat_to_fit(model.loss, *model.args, max_temp_bytes=1, progress=lambda _: None)
    except ValueError as told:
        return int(str(told).partition("smallest needs ")[2].partition(" ")[0])
    raise AssertionError("one byte is enough")


def error(made: Any, reference: Any) -> float:
    """The largest difference, over the largest value of its leaf."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(reference)):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)))
    return worst


# --- telling --------------------------------------------------------------------------

HEADER = (
    "model",
    "budget, MiB",
    "temp, MiB",
    "used",
    "FLOPs",
    "best fixed that fits",
    "over best",
    "error",
    "compiles",
    "s",
)


def cells(row: Row) -> list[str]:
    return [
        row.model,
        _mib(row.budget),
        _mib(row.temp_bytes),
        f"{row.temp_bytes / row.budget:.1%}",
        f"{row.flops_ratio:.3f}",
        row.best_policy or "none fits",
        "" if math.isnan(row.over_best) else f"{row.over_best:.3f}",
        f"{row.error:.0e}",
        str(row.compiles),
        f"{row.seconds:.0f}",
    ]


def markdown(fixed: list[Fixed], rows: list[Row]) -> str:
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    lines += ["", "| model | " + " | ".join(POLICIES) + " |"]
    lines += ["|" + "---|" * (1 + len(POLICIES))]
    for name in dict.fromkeys(f.model for f in fixed):
        found = {f.policy: f for f in fixed if f.model == name}
        values = [
            f"{_mib(found[p].temp_bytes)} / {found[p].flops_ratio:.3f}"
            for p in POLICIES
        ]
        lines.append(f"| {name} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def plot(fixed: list[Fixed], rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row.model for row in rows))
    columns = min(3, len(names))
    lines = math.ceil(len(names) / columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.2 * columns, 3.2 * lines), squeeze=False
    )
    for ax, name in zip(axes.flat, names):
        found = [row for row in rows if row.model == name]
        ax.plot(
            [row.temp_bytes / 2**20 for row in found],
            [row.flops_ratio for row in found],
            "o-",
            color="C0",
            label="remat_to_fit",
        )
        for i, point in enumerate(f for f in fixed if f.model == name):
            ax.plot(
                [point.temp_bytes / 2**20],
                [point.flops_ratio],
                "s",
                color=f"C{i + 1}",
                label=point.policy,
            )
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("temporaries, MiB")
        ax.set_ylabel("FLOPs over none")
        ax.spines[["top", "right"]].set_visible(False)
    for ax in list(axes.flat)[len(names) :]:
        ax.set_visible(False)
    axes.flat[0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--x64", action="store_true", help="compute in float64")
    parser.add_argument("--json", type=Path, help="write results, or add to them")
    parser.add_argument("--plot", type=Path, help="write the plot of all results")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", options.x64)
    unknown = set(options.models) - {*MODELS}
    if unknown:
        parser.error(
            f"no such model: {', '.join(unknown)}; choose of {', '.join(MODELS)}"
        )
    results: dict[str, Any] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
    print(
        f"jax {jax.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    for name in options.models or MODELS:
        print(name, flush=True)
        fixed, rows, _ = measure(MODELS[name](options.quick))
        results[name] = {
            "fixed": [dataclasses.asdict(f) for f in fixed],
            "rows": [dataclasses.asdict(r) for r in rows],
        }
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    order = [name for name in MODELS if name in results]
    fixed = [Fixed(**f) for name in order for f in results[name]["fixed"]]
    rows = [Row(**r) for name in order for r in results[name]["rows"]]
    print(markdown(fixed, rows))
    if options.plot:
        plot(fixed, rows, options.plot)


if __name__ == "__main__":
    main()
