"""Compiling a program for a chip, here or not, to read what memory it needs.

Arguments are shapes: nothing is put on a device. A program for an absent chip is
compiled for devices that its compiler makes up. The bytes are those of the executable:
what it is given, what it returns, what of that shares memory, and its temporaries.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import re
import sys
from typing import Any
import warnings

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
import numpy as np

from gradacc_jax.planning import absent, chips, costs
from gradacc_jax.planning.chips import Chip
from gradacc_jax.planning.sizes import bytes_text, flops_text

PyTree = Any
# Code that never runs need not be fast: none of this moves a buffer.
_UNOPTIMISED_GPU = {
    "xla_backend_optimization_level": 0,
    "xla_gpu_autotune_level": 0,
    "xla_gpu_disable_gpuasm_optimizations": True,
    "xla_llvm_disable_expensive_passes": True,
}
# For a search: still faster to compile, with memory that is some percent off. On a GPU
# products are left to cuBLAS; on one that is there Triton and cuBLAS are tried, and
# either may be taken. What is chosen is compiled again in full.
QUICK: dict[str, dict[str, Any]] = {
    "gpu": {**_UNOPTIMISED_GPU, "xla_gpu_enable_triton_gemm": False},
    "tpu": {"optimization_level": "O0"},
}
EXACT: dict[str, dict[str, Any]] = {"gpu": _UNOPTIMISED_GPU, "tpu": {}}


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a compiled program, in bytes of one device.

    Attributes:
      arguments: what it is given.
      outputs: what it returns.
      aliased: what of the outputs is written into donated arguments.
      temporaries: what it needs in between.
      peak: ``arguments + outputs - aliased + temporaries + workspace``.
      flops: of its matrix products and convolutions, on one device.
      workspace: what libraries may take besides on a GPU that is not here, where they
        cannot be asked: an allowance.
      refused: what the compiler said where it refused a program as too large; its
        numbers are then what it told, or bounds from below.
      notes: what is not in the numbers.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    flops: float
    workspace: int = 0
    refused: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{name:<12} {bytes_text(count):>12}"
            for name, count in (
                ("arguments", self.arguments),
                ("outputs", self.outputs),
                ("aliased", -self.aliased),
                ("temporaries", self.temporaries),
                ("workspace", self.workspace),
                ("peak", self.peak),
            )
        ]
        lines.append(f"{'operations':<12} {flops_text(self.flops):>14}")
        lines += [f"refused: {self.refused}"] if self.refused else []
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def estimate_memory(
    fun: Callable[..., Any],
    *args: Any,
    chip: str | Chip | None = None,
    donate_argnums: int | Sequence[int] = (),
) -> MemoryEstimate:
    r"""Compiles a function and tells the memory that it needs; runs nothing.

    .. math::
        \text{peak} = \text{arguments} + \text{outputs} - \text{aliased}
        + \text{temporaries} + \text{workspace}

    Args:
      fun: the function, or one that ``jax.jit`` made (whose own donation then counts).
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct``. Those with a
        ``NamedSharding`` are planned on as many chips as its mesh has; an
        ``AbstractMesh`` will do, for chips that are not here.
      chip: a name of :func:`gradacc_jax.chips`, here or not; None for the device of
        this machine.
      donate_argnums: arguments whose memory the function may reuse.

    Returns:
      The bytes of one device. Nothing is allocated on any. A program that the compiler
      refuses as too large is an answer: ``refused`` says why.

    Raises:
      ImportError: the chip's compiler is not installed; it says what installs it.
      ValueError: there is no such chip.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from gradacc_jax import estimate_memory
      >>> x = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
      >>> estimate = estimate_memory(lambda x: x @ x.T, x)
      >>> estimate.arguments, estimate.outputs, estimate.flops
      (1048576, 262144, 134217728.0)
    """
    target = Target.of(chip)
    traced = target.trace(fun, args, donate_argnums)
    return target.compile(traced).memory


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function traced for a target.

    Attributes:
      stage: what JAX made of it.
      cost: what it costs on one device.
      num_devices: how many it is for.
    """

    stage: Any
    cost: costs.Cost
    num_devices: int


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled program, or the compiler's refusal.

    Attributes:
      memory: what it needs.
      program: the executable; None where it was refused.
      options: what the compiler was told.
    """

    memory: MemoryEstimate
    program: Any
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip to compile for.

    Attributes:
      chip: it.
      is_here: whether it is this machine's; programs are then such as run here.
    """

    chip: Chip
    is_here: bool

    @classmethod
    def of(cls, chip: str | Chip | None) -> "Target":
        """The target of a name; None is this machine's device."""
        if chip is None:
            return cls(chips.present(), is_here=True)
        return cls(chip if isinstance(chip, Chip) else chips.find(chip), is_here=False)

    def place(self, tree: PyTree) -> PyTree:
        """The tree as shapes on the target's devices.

        What is sharded over a mesh goes to a mesh like it, the rest to every device.
        """
        meshes = [
            sharding.mesh
            for x in jax.tree.leaves(tree)
            if isinstance(sharding := getattr(x, "sharding", None), NamedSharding)
        ]
        count = max((mesh.size for mesh in meshes), default=1)
        if self.is_here and not any(isinstance(m, AbstractMesh) for m in meshes):
            return jax.tree.map(
                lambda x: as_shape(x, x.sharding if _is_sharded(x) else None), tree
            )
        devices = (
            tuple(jax.devices()[:count])
            if self.is_here
            else absent.devices(self.chip, count)
        )
        everywhere: jax.sharding.Sharding = SingleDeviceSharding(devices[0])
        if count > 1:
            like = next(mesh for mesh in meshes if mesh.size == count)
            everywhere = NamedSharding(
                _mesh(like, devices), jax.sharding.PartitionSpec()
            )

        def placed(x: Any) -> jax.ShapeDtypeStruct:
            if not _is_sharded(x):
                return as_shape(x, everywhere)
            sharding = x.sharding
            return as_shape(
                x, NamedSharding(_mesh(sharding.mesh, devices), sharding.spec)
            )

        return jax.tree.map(placed, tree)

    def trace(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        donate_argnums: int | Sequence[int] = (),
        **kwargs: Any,
    ) -> Traced:
        """Traces a function on shapes."""
        if not hasattr(fun, "trace"):
            fun = jax.jit(fun, donate_argnums=donate_argnums)
        placed = self.place(tuple(args))
        shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(placed)]
        count = max((len(s.device_set) for s in shardings if s is not None), default=1)
        with self._watched():
            stage = fun.trace(*placed, **kwargs)
        return Traced(stage, costs.cost(stage.jaxpr, self.chip, count), count)

    def compile(self, traced: Traced, *, quick: bool = False) -> Built:
        """Compiles, and reads the memory.

        Args:
          traced: the program.
          quick: whether a little too much memory is as good, and time is short.
        """
        options = (
            {} if self.is_here else (QUICK if quick else EXACT)[self.chip.platform]
        )
        workspace = self._workspace(traced.cost)
        notes = tuple(sorted(traced.cost.notes))
        try:
            with warnings.catch_warnings():
                # Where little can be donated JAX says so; the numbers do, too.
                warnings.filterwarnings("ignore", message="Some donated buffers")
                program = traced.stage.lower().compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return Built(_refusal(traced, workspace, notes, error), None, options)
        found = program.memory_analysis()
        if found is None:
            raise NotImplementedError(
                f"chip={self.chip.name!r}: its compiler tells no memory; plan for "
                f"another of {', '.join(chips.chips())}"
            )
        sizes = (
            found.argument_size_in_bytes,
            found.output_size_in_bytes,
            found.alias_size_in_bytes,
            found.temp_size_in_bytes,
        )
        arguments, outputs, aliased, temporaries = sizes
        peak = arguments + outputs - aliased + temporaries + workspace
        return Built(
            MemoryEstimate(
                *sizes, peak, traced.cost.flops, workspace=workspace, notes=notes
            ),
            program,
            options,
        )

    def _workspace(self, cost: costs.Cost) -> int:
        if self.is_here or self.chip.platform != "gpu":
            return 0
        more = chips.GPU_CONVOLUTION_WORKSPACE if cost.convolutions else 0
        return chips.GPU_WORKSPACE + more

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        """Warns where the program that is traced asks what machine it is on."""
        if self.is_here or jax.default_backend() == self.chip.platform:
            return contextlib.nullcontext()
        return _asked_for_backend(self.chip)


def as_shape(x: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """An array, a number or a shape, as a shape."""
    if isinstance(x, int | float | complex | np.generic):
        x = jax.eval_shape(lambda: x)
    return jax.ShapeDtypeStruct(
        x.shape,
        x.dtype,
        sharding=sharding,
        weak_type=getattr(x, "weak_type", False),
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or a compiler for it, had not enough memory."""
    said = str(error)
    return isinstance(error, jax.errors.JaxRuntimeError) and any(
        words in said for words in ("RESOURCE_EXHAUSTED", "Out of memory")
    )


def _is_sharded(x: Any) -> bool:
    return isinstance(getattr(x, "sharding", None), NamedSharding)


def _mesh(like: Any, devices: tuple[Any, ...]) -> Mesh:
    shape = tuple(like.shape.values())
    return Mesh(
        np.array(devices[: like.size]).reshape(shape),
        like.axis_names,
        axis_types=like.axis_types,
    )


_TOLD = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds|Used ([\d.]+)([KMGT]?) of")
_SCALE = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _refusal(
    traced: Traced, workspace: int, notes: tuple[str, ...], error: Exception
) -> MemoryEstimate:
    """What is known of a program that the compiler refused."""
    arguments = _bytes_of(traced.stage.in_avals[0], traced.num_devices)
    outputs = _bytes_of(traced.stage.out_info, traced.num_devices)
    said = str(error)
    found = _TOLD.search(said)
    told = 0
    if found:
        told = int(float(found[1] or found[3]) * _SCALE[found[2] or found[4]])
    # Donated or not: what is told is temporaries, or all of it.
    whole = bool(found and found[3])
    temporaries = max(told - arguments, 0) if whole else told
    return MemoryEstimate(
        arguments,
        outputs,
        outputs,
        temporaries,
        arguments + temporaries + workspace,
        traced.cost.flops,
        workspace=workspace,
        refused=said.partition("\n")[0],
        notes=notes,
    )


def _bytes_of(tree: PyTree, num_devices: int) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) // num_devices


@contextlib.contextmanager
def _asked_for_backend(chip: Chip) -> Iterator[None]:
    """Listens to ``jax.default_backend`` and ``jax.devices`` while something is traced.

    What branches on them takes this machine's branch, and the plan is for another.
    """
    asked: list[str] = []
    names = ("default_backend", "devices", "local_devices")
    before = {name: getattr(jax, name) for name in names}

    def listening(name: str) -> Callable[..., Any]:
        @functools.wraps(before[name])
        def ask(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            asked.append(f"{place} asks jax.{name}()")
            return before[name](*args, **kwargs)

        return ask

    for name in names:
        setattr(jax, name, listening(name))
    try:
        yield
    finally:
        for name in names:
            setattr(jax, name, before[name])
    if asked:
        warnings.warn(
            f"{asked[0]} while it is traced, and gets {jax.default_backend()!r}: the "
            f"plan is for {chip.name}, a {chip.platform}, where another branch may be "
            "taken; use jax.lax.platform_dependent",
            stacklevel=3,
        )
