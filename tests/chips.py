"""Programs for chips that this machine does not have."""

import importlib.util
import os

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
import pytest

# An RTX 4090, by NVIDIA's data sheet and the occupancy figures of compute capability
# 8.9 in the CUDA programming guide.
RTX_4090 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 102400
  shared_memory_per_block_optin: 101376
  threads_per_core_limit: 1536
  core_count: 128
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 1008000000000
  l2_cache_size: 75497472
  clock_rate_ghz: 2.52
  device_memory_size: 25757220864
  cuda_compute_capability { major: 8 minor: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA GeForce RTX 4090"
"""
NEEDED = "jax-cuda13-plugin nvidia-cuda-nvcc nvidia-nvvm"


def absent_gpu():
    """A sharding on an RTX 4090 that is not there; skips where it has no compiler."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip(f"no compiler for GPUs is installed: pip install {NEEDED}")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    topology = topologies.get_topology_desc(
        "any", "cuda", target_config=RTX_4090, topology="1x1x1"
    )
    return SingleDeviceSharding(topology.devices[0])


def absent_tpu():
    """A sharding on a TPU v5e that is not there; skips where it has no compiler."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("no compiler for TPUs is installed: pip install libtpu")
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-1"
    topology = topologies.get_topology_desc("v5e:1x1x1", "tpu")
    return SingleDeviceSharding(topology.devices[0])


def on(sharding, tree):
    """The shapes of ``tree``, placed."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )
