"""What `gradacc plan` can be asked about: GPTs by their size, and functions of yours.

A target becomes the arguments of `gradacc_jax.plan`, as shapes: no parameter is made.
"""

from collections.abc import Mapping
import functools
import importlib
import os
import sys
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from gradacc_jax.cli import model
from gradacc_jax.cli.settings import (
    CommandError,
    Settings,
    first_line,
    resolve_optimizer,
)
from gradacc_jax.cli.text import Batch

# Layers, channels and heads, by the sizes that GPT-2 and GPT-3 made known.
GPTS = {
    "124M": (12, 768, 12),
    "350M": (24, 1024, 16),
    "774M": (36, 1280, 20),
    "1.3B": (24, 2048, 16),
    "1.5B": (48, 1600, 25),
    "2.7B": (32, 2560, 32),
    "6.7B": (32, 4096, 32),
    "13B": (40, 5120, 40),
}
HEAD = 64  # channels of a head, where only layers and channels are told
# GPT-2's 50257 tokens, padded to a multiple of 128.
NUM_TOKENS = 50304

PyTree = Any


def gpt(
    name: str, *, seq_len: int, optimizer: str, dtype: str, trainable: str | None
) -> dict[str, Any]:
    """The arguments of `plan` for a GPT.

    It is the model of `gradacc train` with GPT-2's tokens in the place of bytes.

    Args:
        name: a size such as "124M", or "LAYERSxCHANNELS".
        seq_len: tokens in a sequence.
        optimizer: its name in optax.
        dtype: "bf16" computes in bfloat16 with float32 parameters; or "f32".
        trainable: parts of names, with commas between; other parameters are frozen.

    Raises:
        CommandError: there is no such size, optimizer or parameter.
    """
    layers, channels, heads = _gpt_size(name)
    settings = Settings(
        num_layers=layers,
        embed_dim=channels,
        num_heads=heads,
        seq_len=seq_len,
        optimizer=optimizer,
        bf16=dtype == "bf16",
    )

    def make(remat: str) -> model.Transformer:
        return model.Transformer(
            layers,
            channels,
            heads,
            num_tokens=NUM_TOKENS,
            remat=remat,
            dtype=jnp.bfloat16 if settings.bf16 else jnp.float32,
            rngs=nnx.Rngs(0),
        )

    @functools.cache
    def forward(remat: str) -> model.Forward:
        graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(remat)))
        return lambda params, tokens: nnx.merge(graphdef, params)(tokens)

    def loss_fn(params: PyTree, batch: Batch, *, policy: Any = "none") -> jax.Array:
        return model.next_byte_loss(forward(str(policy)), params, batch)

    params = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(make("none"))))
    return {
        "loss_fn": loss_fn,
        "params": params,
        "optimizer": resolve_optimizer(settings),
        "batch": Batch(
            jax.ShapeDtypeStruct((1, seq_len + 1), jnp.int32),  # type: ignore[arg-type]
            jax.ShapeDtypeStruct((1,), jnp.int32),  # type: ignore[arg-type]
        ),
        "weight_fn": model.weight,
        "trainable": None if trainable is None else _trainable(params, trainable),
    }


def _gpt_size(name: str) -> tuple[int, int, int]:
    if name in GPTS:
        return GPTS[name]
    layers, _, channels = name.partition("x")
    if not (layers.isdigit() and channels.isdigit() and int(channels) % HEAD == 0):
        raise CommandError(
            f"gpt:{name} is not known; choose gpt:{', gpt:'.join(GPTS)}, or layers and "
            f"channels such as gpt:12x768, channels a multiple of {HEAD}"
        )
    return int(layers), int(channels), int(channels) // HEAD


def _trainable(params: PyTree, names: str) -> PyTree:
    """Which parameters' paths hold one of the names."""
    wanted = [name.strip() for name in names.split(",")]
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(params)]
    for name in wanted:
        if not any(name in path for path in paths):
            raise CommandError(
                f"--trainable={names}: no parameter has {name!r} in its name; there "
                f"are {', '.join(paths)}"
            )
    return jax.tree.map_with_path(
        lambda path, _: any(n in jax.tree_util.keystr(path) for n in wanted), params
    )


def of_user(target: str) -> dict[str, Any]:
    """The arguments of `plan`, or of `plan_step`, that a user's function returns.

    Args:
        target: "module:function", found from the current folder too.

    Raises:
        CommandError: there is no such function, or it returns something else.
    """
    module, _, name = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CommandError(
            f"{target}: {first_line(error)}; name a function as module:function, or "
            f"one of gpt:{', gpt:'.join(GPTS)}"
        ) from error
    given = function()
    if not isinstance(given, Mapping) or not {"loss_fn", "step_for"} & {*given}:
        raise CommandError(
            f"{target} returned {type(given).__name__}; return a dict of arguments of "
            "gradacc_jax.plan (loss_fn, params, optimizer, batch, ...) or of plan_step "
            "(step_for, ...)"
        )
    return dict(given)
