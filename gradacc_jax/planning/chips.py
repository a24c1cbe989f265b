"""Chips that a program can be compiled for, whether they are here or not.

The memory that is planned with is what JAX leaves a program: on a GPU the part that its
allocator takes, on a TPU what the compiler accepts. How programs are compiled for them
is in ``absent.py``.
"""

from collections.abc import Mapping
import dataclasses
import importlib.util
import math
import os
import re
from typing import Any

import jax

from gradacc_jax.checkpointing.sizes import parse_size
from gradacc_jax.planning.sizes import bytes_text

GIB = 2**30
# What JAX's allocator takes of a GPU unless it is told otherwise.
GPU_FRACTION = 0.75
FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# What an absent GPU's compiler cannot know: libraries choose algorithms on the chip,
# and those bring workspace. cuBLAS takes 4 to 32 MiB a stream, cuDNN by choice more.
GPU_WORKSPACE = 64 * 2**20
GPU_CONVOLUTION_WORKSPACE = 512 * 2**20
# An operation takes at least this long: its launch on a GPU, its start on a TPU.
LAUNCH_SECONDS = {"gpu": 4e-6, "tpu": 1e-6, "cpu": 2e-6}
# A call of a compiled program, from Python.
CALL_SECONDS = 2e-4
# By compiler: the module that is imported, and the extra of ours that installs it.
COMPILERS = {
    "gpu": (("jax_cuda13_plugin", "jax_cuda12_plugin"), "absent-gpu"),
    "tpu": (("libtpu",), "absent-tpu"),
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of chip.

    Attributes:
      name: what it is called here, such as "rtx-4090".
      platform: "gpu", "tpu" or "cpu".
      title: what the chip calls itself, JAX's ``device_kind``.
      memory_bytes: what its driver reports; of a TPU, what its compiler accepts.
      bandwidth: bytes a second, to and from that memory.
      bfloat16_flops: operations a second of matrix products, dense, in bfloat16 (in
        float16 where it has no bfloat16).
      float32_flops: the same in float32 at JAX's default precision: TF32 on GPUs from
        Ampere on, bfloat16 on TPUs.
      source: where the figures are from.
      target: what its compiler is told: a GPU's figures, a TPU's topology.
    """

    name: str
    platform: str
    title: str
    memory_bytes: int
    bandwidth: float
    bfloat16_flops: float
    float32_flops: float
    source: str
    target: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def usable_bytes(self) -> int:
        """The memory that programs can have of it.

        Of a GPU that is the part which JAX's allocator takes, 75 % unless the variable
        ``XLA_CLIENT_MEM_FRACTION`` says otherwise.
        """
        if self.platform != "gpu":
            return self.memory_bytes
        return int(self.memory_bytes * gpu_fraction())

    def flops_of(self, dtype: Any) -> float:
        """Operations a second of products of this dtype."""
        size = jax.dtypes.canonicalize_dtype(dtype).itemsize
        if size <= 2:
            return self.bfloat16_flops
        return self.float32_flops / (32 if size == 8 else 1)


def gpu_fraction() -> float:
    """The part of a GPU's memory that JAX's allocator takes."""
    for variable in FRACTION_VARIABLES:
        if variable in os.environ:
            return float(os.environ[variable])
    return GPU_FRACTION


def _gpu(
    name: str,
    title: str,
    capability: tuple[int, int],
    *,
    memory: float,
    cores: int,
    bandwidth: float,
    l2: float,
    clock: float,
    bf16: float,
    f32: float,
    source: str,
) -> Chip:
    """A GPU, in the units of data sheets: GiB, GB/s, MiB, GHz, TFLOP/s."""
    return Chip(
        name,
        "gpu",
        title,
        memory_bytes=int(memory * GIB),
        bandwidth=bandwidth * 1e9,
        bfloat16_flops=bf16 * 1e12,
        float32_flops=f32 * 1e12,
        source=source,
        target={
            "capability": capability,
            "cores": cores,
            "l2_bytes": int(l2 * 2**20),
            "clock_ghz": clock,
        },
    )


def _tpu(
    name: str,
    title: str,
    *,
    memory: float,
    bandwidth: float,
    bf16: float,
    slices: Mapping[int, str],
    source: str,
    **options: str,
) -> Chip:
    """A TPU; ``slices`` are topologies by their number of chips."""
    return Chip(
        name,
        "tpu",
        title,
        memory_bytes=int(memory * GIB),
        bandwidth=bandwidth * 1e9,
        bfloat16_flops=bf16 * 1e12,
        float32_flops=bf16 * 1e12,
        source=source,
        target={"slices": slices, "options": options},
    )


_CARD = "NVIDIA's architecture whitepaper; memory as CUDA reports it"
_SHEET = "NVIDIA's data sheet; memory as CUDA reports it"
_SPECS = "NVIDIA's data sheet; memory, bandwidth and clock as in XLA's target specs"
_CLOUD = "Google Cloud's documentation; memory as libtpu 0.0.52 accepts it"
_FLAT = {1: "1x1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}
_CUBE = {1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}

TABLE = (
    _gpu(
        "rtx-3060", "NVIDIA GeForce RTX 3060", (8, 6), memory=11.76, cores=28,
        bandwidth=360, l2=3, clock=1.777, bf16=25.5, f32=12.7, source=_CARD,
    ),
    _gpu(
        "rtx-3090", "NVIDIA GeForce RTX 3090", (8, 6), memory=23.69, cores=82,
        bandwidth=936, l2=6, clock=1.695, bf16=71, f32=35.6, source=_CARD,
    ),
    _gpu(
        "rtx-4060", "NVIDIA GeForce RTX 4060", (8, 9), memory=7.63, cores=24,
        bandwidth=272, l2=24, clock=2.46, bf16=30.2, f32=15.1, source=_CARD,
    ),
    _gpu(
        "rtx-4080", "NVIDIA GeForce RTX 4080", (8, 9), memory=15.69, cores=76,
        bandwidth=717, l2=64, clock=2.505, bf16=97.5, f32=48.7, source=_CARD,
    ),
    _gpu(
        "rtx-4090", "NVIDIA GeForce RTX 4090", (8, 9), memory=23.64, cores=128,
        bandwidth=1008, l2=72, clock=2.52, bf16=165, f32=82.6, source=_CARD,
    ),
    _gpu(
        "rtx-5090", "NVIDIA GeForce RTX 5090", (12, 0), memory=31.36, cores=170,
        bandwidth=1792, l2=96, clock=2.407, bf16=209, f32=104.8, source=_CARD,
    ),
    _gpu(
        "t4", "Tesla T4", (7, 5), memory=14.56, cores=40,
        bandwidth=320, l2=4, clock=1.59, bf16=65, f32=8.1, source=_SHEET,
    ),
    _gpu(
        "a10g", "NVIDIA A10G", (8, 6), memory=22.06, cores=80,
        bandwidth=600, l2=6, clock=1.71, bf16=70, f32=35, source=_SHEET,
    ),
    _gpu(
        "l4", "NVIDIA L4", (8, 9), memory=22.03, cores=58,
        bandwidth=300, l2=48, clock=2.04, bf16=121, f32=60, source=_SHEET,
    ),
    _gpu(
        "a100-40", "NVIDIA A100-SXM4-40GB", (8, 0), memory=39.39, cores=108,
        bandwidth=1555, l2=40, clock=1.41, bf16=312, f32=156, source=_SPECS,
    ),
    _gpu(
        "a100-80", "NVIDIA A100-SXM4-80GB", (8, 0), memory=79.25, cores=108,
        bandwidth=2039, l2=40, clock=1.41, bf16=312, f32=156, source=_SPECS,
    ),
    _gpu(
        "h100", "NVIDIA H100 80GB HBM3", (9, 0), memory=79.10, cores=132,
        bandwidth=3352, l2=50, clock=1.98, bf16=989, f32=494, source=_SPECS,
    ),
    _gpu(
        "h200", "NVIDIA H200", (9, 0), memory=139.8, cores=132,
        bandwidth=4800, l2=50, clock=1.98, bf16=989, f32=494, source=_SPECS,
    ),
    _gpu(
        "b200", "NVIDIA B200", (10, 0), memory=178.3, cores=148,
        bandwidth=7672, l2=126.5, clock=1.965, bf16=2250, f32=1125, source=_SPECS,
    ),
    _tpu(
        "v4", "TPU v4", memory=30.75, bandwidth=1228, bf16=275, slices=_CUBE,
        source=_CLOUD, chip_config_name="megacore",
    ),
    _tpu(
        "v5e", "TPU v5 lite", memory=15.75, bandwidth=819, bf16=197, slices=_FLAT,
        source=_CLOUD,
    ),
    _tpu(
        "v5p", "TPU v5", memory=95.73, bandwidth=2765, bf16=459, slices=_CUBE,
        source=_CLOUD,
    ),
    _tpu(
        "v6e", "TPU v6 lite", memory=31.24, bandwidth=1638, bf16=918, slices=_FLAT,
        source=_CLOUD,
    ),
)  # fmt: skip
# What people type, beyond spaces, case, makers' names and sizes; see `_plain`.
ALIASES = {
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "v5": "v5p",
    "v6lite": "v6e",
    "trillium": "v6e",
    "4080super": "rtx-4080",
    "a10": "a10g",
    "h100sxm": "h100",
    "a10040gb": "a100-40",
    "a10080gb": "a100-80",
    "a100sxm440gb": "a100-40",
    "a100sxm480gb": "a100-80",
}


class ChipTable(Mapping[str, Chip]):
    """Chips by name; it prints as a table. See :func:`chips`."""

    def __init__(self, chips: Mapping[str, Chip]):
        self._chips = dict(chips)

    def __getitem__(self, name: str) -> Chip:
        return self._chips[name]

    def __iter__(self) -> Any:
        return iter(self._chips)

    def __len__(self) -> int:
        return len(self._chips)

    def __str__(self) -> str:
        lines = [
            f"{'chip':<9} {'memory':>10} {'usable':>10} {'GB/s':>6} {'bf16':>8} "
            f"{'f32':>8}  can be compiled for here"
        ]
        for chip in self._chips.values():
            missing = missing_compiler(chip)
            lines.append(
                f"{chip.name:<9} {bytes_text(chip.memory_bytes):>10} "
                f"{bytes_text(chip.usable_bytes):>10} {chip.bandwidth / 1e9:6,.0f} "
                f"{chip.bfloat16_flops / 1e12:8,.1f} "
                f"{chip.float32_flops / 1e12:8,.1f}  {missing or 'yes'}"
            )
        lines.append("bf16 and f32 are TFLOP/s of matrix products")
        return "\n".join(lines)

    __repr__ = __str__


def chips() -> Mapping[str, Chip]:
    """The chips that can be planned for, whether this machine has them or not.

    Returns:
      A mapping from names to :class:`Chip`, which prints as a table: memory, what JAX
      leaves usable of it, bandwidth, speed, and whether programs can be compiled for
      the chip here or what installs its compiler. No device is looked at.

    Examples:
      >>> import gradacc_jax
      >>> chip = gradacc_jax.chips()["rtx-4090"]
      >>> chip.platform, chip.bandwidth
      ('gpu', 1008000000000.0)
    """
    return ChipTable({chip.name: chip for chip in TABLE})


def find(name: str) -> Chip:
    """The chip of a name as people type it: "RTX 4090", "4090", "tpu v5e", "a100-80gb".

    Raises:
      ValueError: there is none, or more than one.
    """
    plain = _plain(name)
    known = {_plain(chip.name): chip.name for chip in TABLE}
    known |= {_plain(chip.title): chip.name for chip in TABLE} | ALIASES
    if plain in known:
        return chips()[known[plain]]
    several = sorted({n for k, n in known.items() if plain and k.startswith(plain)})
    if several:
        raise ValueError(f"chip={name!r} may be {' or '.join(several)}; choose one")
    raise ValueError(
        f"chip={name!r} is not known; choose one of {', '.join(chips())}, or leave it "
        "out for the device of this machine"
    )


def _plain(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for word in ("nvidia", "geforce", "tesla", "google", "tpu", "rtx"):
        plain = plain.replace(word, "")
    return re.sub(r"(?<=^h100|^h200|^b200)\d+gb.*|(?<=^\d{4})\d+gb$", "", plain)


def missing_compiler(chip: Chip) -> str | None:
    """The command that installs the chip's compiler; None where it is installed."""
    if chip.platform not in COMPILERS:
        return None
    modules, extra = COMPILERS[chip.platform]
    if any(importlib.util.find_spec(module) for module in modules):
        return None
    return f"pip install 'gradacc_jax[{extra}]'"


def present(device: Any = None) -> Chip:
    """The chip of a device that is here, with the memory that it says it has.

    Args:
      device: a JAX device; by default the first.
    """
    device = jax.devices()[0] if device is None else device
    limit = (device.memory_stats() or {}).get("bytes_limit")
    known = {chip.title: chip for chip in TABLE}.get(device.device_kind)
    if known is not None:
        if limit is None:
            return known
        # Of a GPU, the part that the allocator does not take is off already.
        part = gpu_fraction() if known.platform == "gpu" else 1.0
        return dataclasses.replace(known, memory_bytes=math.ceil(limit / part))
    if limit is None:  # It shares the machine's.
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    is_cpu = device.platform == "cpu"
    return Chip(
        device.device_kind,
        # What it leaves usable is not to be reckoned with the part of a GPU.
        device.platform if device.platform != "gpu" else "unknown gpu",
        device.device_kind,
        memory_bytes=int(limit),
        bandwidth=2e10 if is_cpu else 1e12,
        bfloat16_flops=1e11 if is_cpu else 1e14,
        float32_flops=1e11 if is_cpu else 5e13,
        source="its memory as it reports it; speeds are guessed",
    )


def budget(chip: Chip, memory: int | str | None) -> int:
    """The bytes to plan with: what is asked for, or what the chip leaves usable.

    Raises:
      ValueError: the chip does not have what is asked for.
    """
    if memory is None:
        return chip.usable_bytes
    asked = parse_size("memory", memory)
    # A "24 GB" card has less than 24 GiB: its maker's number is taken for it.
    nominal = math.ceil(chip.memory_bytes * 1.05)
    if chip.platform != "cpu" and asked > nominal:
        raise ValueError(
            f"memory={memory!r} is more than {chip.name} has, "
            f"{bytes_text(chip.memory_bytes)}; choose at most that"
        )
    return min(asked, chip.memory_bytes) if chip.platform != "cpu" else asked
