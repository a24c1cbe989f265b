"""The devices of a run, and where its arrays are on them.

A mesh has two axes. Along ``data`` every device has examples of its own, and along
``model`` devices share the matrices of each layer (the heads of attention, the inner
channels of the multilayer perceptron). What is on a device:

    --sharding data   all parameters (of its part of ``model``). The devices compute
                      alone, and sum their gradients once a window, in one all-reduce.
    --sharding fsdp   a part of parameters, moments and sums. XLA gathers a layer when
                      it is its turn, and sums gradients in each micro-batch.

There may be several processes, on several machines, that run this program side by side.
Each makes the calls that all make, and has its devices' part of every array.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import os
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
import numpy as np
import optax

from gradacc_jax import for_num_devices, init_on_mesh, state_shardings, state_specs
from gradacc_jax.accumulation import AccumulateState
from gradacc_jax.cli import model
from gradacc_jax.cli.settings import CommandError, Settings, first_line
from gradacc_jax.cli.text import Batch

DATA, MODEL = "data", "model"

PyTree = Any


def join(coordinator: str | None, processes: int | None, index: int | None) -> None:
    """Joins the other processes of the run, and waits until all are there.

    Args:
        coordinator: the address of process 0, HOST:PORT. All three are None where JAX
            finds them itself: under Slurm, Open MPI, Kubernetes or on TPUs.
        processes: how many there are.
        index: which of them this is, from 0.

    Raises:
        CommandError: they cannot be found.
    """
    try:
        jax.distributed.initialize(coordinator, processes, index)
    except (RuntimeError, ValueError) as error:
        raise CommandError(
            f"--distributed: {first_line(error).rstrip('.')}; give --coordinator "
            "HOST:PORT, --num-processes N and --process-id I"
        ) from error


@contextlib.contextmanager
def one_of_several() -> Iterator[None]:
    """Lets the first process alone print, and each tell its errors.

    Raises:
        CommandError: another process is gone, and with it the arrays of its devices.
    """
    if jax.process_count() == 1:
        yield
        return
    try:
        with contextlib.ExitStack() as silence:
            if jax.process_index():
                nowhere = silence.enter_context(open(os.devnull, "w"))
                silence.enter_context(contextlib.redirect_stdout(nowhere))
            yield
    except jax.errors.JaxRuntimeError as error:
        raise CommandError(
            f"process {jax.process_index()} of {jax.process_count()}: "
            f"{first_line(error)}; if another process was lost, start all of them "
            "again with --resume",
            code=1,
        ) from error


def meet(where: str) -> None:
    """Waits for the other processes, if there are any."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the arrays of a run are.

    Attributes:
        mesh: the devices, along the axes "data" and "model".
        fsdp: whether parameters and the optimizer's state are spread over "data".
    """

    mesh: jax.sharding.Mesh
    fsdp: bool

    @property
    def axis_name(self) -> str | None:
        """The axis over which `accumulate` reduces; None leaves that to XLA."""
        return None if self.fsdp else DATA

    @property
    def of_step(self) -> dict[str, Any]:
        """What `train_step` is to know of it."""
        return {} if self.fsdp else {"mesh": self.mesh, "axis_name": DATA}

    @property
    def whole(self) -> NamedSharding:
        """The same on all devices."""
        return NamedSharding(self.mesh, PartitionSpec())

    def params(self, settings: Settings) -> model.Params:
        """The parameters that a run begins with, each on its devices."""
        make = functools.partial(model.init, settings)
        where = jax.tree.map(lambda x: x.sharding, self.like_params(settings))
        params: model.Params = jax.jit(make, out_shardings=where)()
        return params

    def state(self, tx: optax.GradientTransformation, params: PyTree) -> PyTree:
        """`tx.init(params)`, each array on its devices."""
        make = functools.partial(init_on_mesh, tx, mesh=self.mesh)
        return jax.jit(make, out_shardings=self._of_state(tx, params))(params)

    def put(self, batch: Batch) -> Batch:
        """A batch spread over the devices; every process hands over its own part."""
        where = NamedSharding(self.mesh, PartitionSpec(DATA))
        rows = _rows_here(where, len(batch.lengths))
        return Batch(
            *(
                jax.make_array_from_process_local_data(where, x[rows], x.shape)
                for x in batch
            )
        )

    def compile(
        self, step: Any, params: PyTree, state: PyTree, batch: Batch
    ) -> jax.stages.Compiled:
        """Compiles a step ahead of time, so that nothing moves from call to call.

        Args:
            step: what `train_step` returned.
            params: the parameters, or their shapes with shardings.
            state: likewise.
            batch: a batch as it will be given.
        """
        here = jax.tree.map(lambda x: x.sharding, (params, state))
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*here, self.whole))
        compiled: jax.stages.Compiled = jitted.lower(params, state, batch).compile()
        return compiled

    def like_params(self, settings: Settings) -> PyTree:
        """Shapes of the parameters, with shardings."""
        shapes = jax.eval_shape(functools.partial(model.init, settings))

        def leaf(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            spec: list[str | None] = [None] * len(x.shape)
            for name, axis in model.SHARED_AXES.items():
                if jax.tree_util.DictKey(name) in path:
                    spec[axis] = MODEL
            return self._placed(x, spec, spread=self.fsdp)

        return jax.tree_util.tree_map_with_path(leaf, shapes)

    def like_state(
        self, tx: optax.GradientTransformation, settings: Settings
    ) -> PyTree:
        """Shapes of the optimizer's state, with shardings.

        Args:
            tx: the optimizer.
            settings: of which only the number of devices may differ from those here.
        """
        params = self.like_params(settings)
        mesh: Any = AbstractMesh(
            (settings.data_parallel,), (DATA,), axis_types=(AxisType.Auto,)
        )
        there = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        state = jax.eval_shape(functools.partial(init_on_mesh, tx, mesh=mesh), there)
        if settings.data_parallel == self.mesh.shape[DATA]:
            return jax.tree.map(_struct, state, self._of_state(tx, params))
        # The sums of other devices: read in parts, to be added up.
        return jax.tree.map(
            lambda x: self._placed(x, [None] * len(x.shape), spread=True), state
        )

    def carried_over(
        self,
        old: PyTree,
        new: PyTree,
        params: PyTree,
        mini_step: int,
    ) -> PyTree:
        """A state of a run with other micro-batches, or on other devices, continued.

        Args:
            old: that state.
            new: one as the run has it now, which is overwritten.
            params: the parameters.
            mini_step: how many micro-steps of the open window are in the old state, as
                they are counted now.
        """
        if not isinstance(new, AccumulateState):
            return old  # There are no sums between calls.

        def carry(old: AccumulateState, new: AccumulateState) -> AccumulateState:
            if mini_step:
                count = jnp.full_like(new.mini_step, mini_step)
                moved = for_num_devices(old, params, self.mesh.shape[DATA])
                return moved._replace(mini_step=count)
            names = ("gradient_step", "inner_state", "emitted", "skip_state", "skips")
            return new._replace(**{name: getattr(old, name) for name in names})

        where = jax.tree.map(lambda x: x.sharding, new)
        state: AccumulateState = jax.jit(carry, out_shardings=where)(old, new)
        return state

    def _of_state(self, tx: optax.GradientTransformation, params: PyTree) -> PyTree:
        """The shardings of `tx.init(params)`."""
        if self.fsdp:
            return state_shardings(tx, params)
        specs = jax.tree.map(lambda x: x.sharding.spec, params)
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), state_specs(tx, params, specs)
        )

    def _placed(
        self, x: jax.ShapeDtypeStruct, spec: list[str | None], *, spread: bool
    ) -> jax.ShapeDtypeStruct:
        """A shape with its sharding; spread over "data" by its largest free axis."""
        parts = self.mesh.shape[DATA]
        free = [
            (length, -i)
            for i, length in enumerate(x.shape)
            if spec[i] is None and length and length % parts == 0
        ]
        if spread and free:
            spec[-max(free)[1]] = DATA
        return _struct(x, NamedSharding(self.mesh, PartitionSpec(*spec)))


def place(settings: Settings) -> Placement:
    """The placement that `--devices`, `--sharding` and `--model-parallel` ask for.

    Raises:
        CommandError: there are not as many devices.
    """
    there, asked = jax.devices(), settings.devices
    if asked > len(there):
        more = f", or set JAX_NUM_CPU_DEVICES={asked}" * (there[0].platform == "cpu")
        raise CommandError(
            f"--devices={asked}, and there are {len(there)} of kind "
            f"{there[0].device_kind}; choose --devices {len(there)}{more}"
        )
    if asked < len(there) and jax.process_count() > 1:
        raise CommandError(
            f"--devices={asked}, and the {jax.process_count()} processes have "
            f"{len(there)}, which all take part; choose --devices {len(there)}"
        )
    mesh = jax.make_mesh(
        (settings.data_parallel, settings.model_parallel),
        (DATA, MODEL),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=there[:asked],
    )
    # A budget of activation memory is for one device, and planned under plain `jit`.
    left_to_xla = settings.sharding == "fsdp" or settings.activation_memory != "none"
    return Placement(mesh, left_to_xla)


def _struct(x: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def _rows_here(where: NamedSharding, number: int) -> np.ndarray:
    """Which rows of a batch the devices of this process have, in order."""
    parts = where.addressable_devices_indices_map((number,)).values()
    bounds = {part[0].indices(number)[:2] for part in parts if part is not None}
    return np.concatenate([np.arange(*bound) for bound in sorted(bounds)])
