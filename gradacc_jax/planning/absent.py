"""Devices that are not here, as their compilers make them up.

A GPU that is absent is described to its compiler by a text of figures, a TPU by the
name of its topology. Both need a compiler from PyPI, and neither a driver.
"""

from collections.abc import Iterator, Mapping
import contextlib
import functools
import importlib
import os
import pkgutil
from typing import Any

from gradacc_jax.planning.chips import Chip, missing_compiler

# What the compiler asks of a streaming multiprocessor, by compute capability: shared
# memory in all and for one block, threads, float32 units. From the occupancy table of
# the CUDA programming guide.
_CAPABILITIES = {
    (7, 5): (65536, 65536, 1024, 64),
    (8, 0): (167936, 166912, 2048, 64),
    (8, 6): (102400, 101376, 1536, 128),
    (8, 9): (102400, 101376, 1536, 128),
    (9, 0): (233472, 232448, 2048, 128),
    (10, 0): (233472, 232448, 2048, 128),
    (12, 0): (102400, 101376, 1536, 128),
}


@functools.cache
def devices(chip: Chip, count: int = 1) -> tuple[Any, ...]:
    """Devices of a chip that is not here, as its compiler knows them.

    Raises:
      ImportError: its compiler is not installed; it says what installs it.
      ValueError: there is no such number of them.
    """
    from jax.experimental import topologies

    missing = missing_compiler(chip)
    if missing:
        raise ImportError(
            f"chip={chip.name!r}: no compiler for it is installed; {missing}"
        )
    if chip.platform == "gpu":
        with _environment({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}):
            of_gpus = functools.partial(
                topologies.get_topology_desc,
                "any",
                "cuda",
                target_config=target_text(chip),
                topology=f"1x1x{count}",
            )
            try:
                return tuple(of_gpus().devices)
            except NotImplementedError:
                # JAX looked for devices before, and turned the compiler away because
                # there is no cuDNN: planning runs nothing that would need it.
                _cuda_plugin().initialize()
                return tuple(of_gpus().devices)
    slices = chip.target["slices"]
    if count not in slices:
        raise ValueError(
            f"chip={chip.name!r} is planned for {', '.join(map(str, slices))} devices, "
            f"not for {count}"
        )
    with _environment(
        {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-1",
            # Two processes may compile at once: there is no chip to quarrel about.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
    ):
        return tuple(
            topologies.get_topology_desc(
                f"{chip.name}:{slices[count]}", "tpu", **chip.target["options"]
            ).devices
        )


def _cuda_plugin() -> Any:
    plugins = importlib.import_module("jax_plugins")
    names = [module.name for module in pkgutil.iter_modules(plugins.__path__)]
    newest = max(name for name in names if name.startswith("xla_cuda"))
    return importlib.import_module(f"jax_plugins.{newest}")


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables that a compiler reads while it is loaded, and nobody else."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def target_text(chip: Chip) -> str:
    """What XLA is told of a GPU: a ``GpuTargetConfigProto`` as text.

    Only fields that jaxlib 0.10 knows too.
    """
    given = chip.target
    major, minor = given["capability"]
    shared, shared_in_block, threads, units = _CAPABILITIES[major, minor]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared_in_block}
  threads_per_core_limit: {threads}
  core_count: {given["cores"]}
  fpus_per_core: {units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.bandwidth)}
  l2_cache_size: {given["l2_bytes"]}
  clock_rate_ghz: {given["clock_ghz"]}
  device_memory_size: {chip.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{chip.title}"
"""
