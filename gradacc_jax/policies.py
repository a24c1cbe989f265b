"""The public namespace of rematerialisation policies: ``gradacc_jax.policies``."""

from gradacc_jax.checkpointing.policies import (
    Policy,
    dots,
    dots_with_no_batch_dims,
    full,
    none,
    offload_names,
    regex,
    resolve,
    save_all_but,
    save_names,
)

__all__ = [
    "Policy",
    "dots",
    "dots_with_no_batch_dims",
    "full",
    "none",
    "offload_names",
    "regex",
    "resolve",
    "save_all_but",
    "save_names",
]
