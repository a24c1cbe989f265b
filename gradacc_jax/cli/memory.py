"""`gradacc train --memory`: the plan before a run, and another should memory run out.

Before the run, micro-batch, number of micro-batches and rematerialisation are planned
at the global batch that was asked for. Should the device run out of memory all the
same, the run is planned again with smaller micro-batches at the same global batch, and
goes on as any run that is resumed with other micro-batches: from a checkpoint of the
last step where parameters and state are still there, else from the last one written.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
from pathlib import Path
import types
from typing import Any

import jax
import jax.numpy as jnp

from gradacc_jax import Plan, plan_step, train_step
from gradacc_jax.cli import model
from gradacc_jax.cli.settings import (
    CommandError,
    Settings,
    accumulated,
    first_line,
    resolve_batch,
    resolve_optimizer,
)
from gradacc_jax.cli.text import Batch
from gradacc_jax.planning.compile import is_out_of_memory

POLICIES = ("none", "dots", "sqrt", "full")
BATCH = ("global_batch", "micro_batch", "num_microbatches")

PyTree = Any


class OutOfMemoryError(Exception):
    """A run ended because its device had not enough memory.

    Attributes:
        settings: those of the run.
    """

    def __init__(self, settings: Settings):
        super().__init__(f"micro_batch={settings.micro_batch}")
        self.settings = settings


class Rescue:
    """Saves what a run holds when its device runs out of memory.

    A context manager around the run's loop. Other errors pass.
    """

    def __init__(self, settings: Settings, save: Callable[[], None]):
        """Takes the settings, and what writes a checkpoint."""
        self._settings, self._save = settings, save

    def __enter__(self) -> "Rescue":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: types.TracebackType | None,
    ) -> None:
        if error is None or not is_out_of_memory(error):
            return
        # Where they were given away to the call that failed they are lost.
        with contextlib.suppress(RuntimeError, ValueError):
            self._save()
        raise OutOfMemoryError(self._settings) from error


def train(
    given: dict[str, Any],
    folder: Path,
    *,
    memory: str,
    resume: bool = False,
    verify: bool = False,
) -> int:
    """Plans, and trains; should memory run out, plans again and goes on.

    Args:
        given: the settings that the user gave.
        folder: of the run.
        memory: the budget, such as "24GiB"; "auto" for what the device has.
        resume: whether to go on with the run in `folder`, as it was planned.
        verify: as for `gradacc_jax.cli.train.train`.

    Raises:
        CommandError: nothing fits, or the run cannot begin.
    """
    from gradacc_jax.cli import train as training

    if not resume:
        given = given | _planned(given, memory)
    while True:
        try:
            return training.train(given, folder, resume=resume, verify=verify)
        except OutOfMemoryError as error:
            settings = error.settings
        # Outside of the handler nothing holds what filled the device.
        given, resume = _smaller(settings, memory), True


def plan(
    settings: Settings, memory: str, policies: tuple[str, ...], **batch: Any
) -> Plan:
    """The plan of a run.

    Args:
        settings: of the run, but for its batch and policy.
        memory: the budget, or "auto".
        policies: what `--remat` may be.
        **batch: as for `gradacc_jax.plan_step`.
    """
    optimizer = resolve_optimizer(settings)
    params = jax.eval_shape(functools.partial(model.init, settings))

    def step_for(size: int, count: int, policy: str) -> tuple[Any, ...]:
        made = dataclasses.replace(
            settings,
            global_batch=size * count,
            devices=1,
            micro_batch=size,
            num_microbatches=count,
            remat=policy,
        )
        in_call = made.microbatches_in_call
        loss = functools.partial(model.next_byte_loss, model.forward(made))
        tx = accumulated(optimizer, None, made)
        step = train_step(loss, tx, weight_fn=model.weight, num_microbatches=in_call)
        batch = Batch(
            jax.ShapeDtypeStruct(  # type: ignore[arg-type]
                (size * in_call, settings.seq_len + 1), jnp.uint8
            ),
            jax.ShapeDtypeStruct((size * in_call,), jnp.int32),  # type: ignore[arg-type]
        )
        return step, (params, jax.eval_shape(tx.init, params), batch)

    return plan_step(
        step_for,
        **batch,
        memory=None if memory == "auto" else memory,
        policies=policies,
        across_calls=not settings.in_step,
    )


def _planned(given: dict[str, Any], memory: str) -> dict[str, Any]:
    """The settings that a plan adds to those that were given; shows the plan.

    What is planned is one device's share: over "data" each has all parameters.
    """
    others = {n: v for n, v in given.items() if n not in BATCH}
    settings = Settings(**{"devices": jax.device_count()} | others)
    if settings.sharding != "data" or settings.model_parallel != 1:
        raise CommandError(
            f"--memory={memory} plans for devices that hold all parameters; leave out "
            "--sharding fsdp and --model-parallel, or --memory"
        )
    devices = settings.data_parallel
    whole, micro, count = map(given.get, BATCH)
    if micro is not None or count is not None:
        whole, micro, count = resolve_batch(whole, micro, count, devices=devices)
    elif whole is None:
        whole = Settings.global_batch * devices
    else:
        resolve_batch(whole, devices=devices)  # or an error
    policies = (given["remat"],) if "remat" in given else POLICIES
    try:
        found = plan(
            settings,
            memory,
            policies,
            global_batch_size=whole // devices,
            microbatch_size=micro,
            num_microbatches=count,
        )
    except ValueError as error:
        raise CommandError(f"--memory={memory}: {first_line(error)}") from error
    print(found, flush=True)
    if devices > 1:
        print(f"  on each of {devices} devices, its share", flush=True)
    return _chosen(found, devices)


def _chosen(found: Plan, devices: int) -> dict[str, Any]:
    return {
        "global_batch": found.global_batch_size * devices,
        "micro_batch": found.microbatch_size,
        "num_microbatches": found.num_microbatches,
        "remat": found.policy,
    }


def _smaller(settings: Settings, memory: str) -> dict[str, Any]:
    """What to change: to the largest smaller micro-batch that fits by its plan."""
    total = settings.global_batch // settings.data_parallel
    size = settings.micro_batch
    policies = tuple(dict.fromkeys((settings.remat, *POLICIES)))
    why = f"the device has not enough memory for micro-batches of {size}"
    for smaller in (d for d in range(size - 1, 0, -1) if total % d == 0):
        try:
            found = plan(
                settings,
                memory,
                policies,
                global_batch_size=total,
                microbatch_size=smaller,
            )
        except ValueError as error:
            why = first_line(error)
            continue
        print(
            f"out of memory with micro-batches of {size}; planned again, at the same "
            f"global batch\n{found}",
            flush=True,
        )
        return _chosen(found, settings.data_parallel)
    raise CommandError(
        f"--memory={memory}: {why}, and there are no smaller ones; choose another "
        "--remat, or a smaller model",
        code=1,
    )
