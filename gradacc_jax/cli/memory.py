"""`gradacc train --memory`: the plan before a run, and another should memory run out.

Before the run, micro-batch, number of micro-batches and rematerialisation are planned
at the global batch that was asked for. Should the device run out of memory all the
same, the run is planned again with smaller micro-batches at the same global batch, and
goes on by resuming: a checkpoint of the last step is written under the new settings,
from memory where parameters and state are still there, else from the last checkpoint.
"""

import dataclasses
import functools
from pathlib import Path
import shutil
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradacc_jax import Plan, accumulate, plan_step, train_step
from gradacc_jax.accumulation import AccumulateState
from gradacc_jax.cli import model, output
from gradacc_jax.cli.settings import (
    CommandError,
    Settings,
    first_line,
    resolve_batch,
    resolve_optimizer,
)
from gradacc_jax.cli.text import Batch, load_corpus
from gradacc_jax.planning.compile import is_out_of_memory

POLICIES = ("none", "dots", "sqrt", "full")
BATCH = ("global_batch", "micro_batch", "num_microbatches")

PyTree = Any


class OutOfMemoryError(Exception):
    """A run ended because its device had not enough memory.

    Attributes:
        settings: those of the run.
        arrays: after how many micro-steps, parameters and state on the host; None if
            they are lost.
    """

    def __init__(self, settings: Settings, arrays: tuple[int, PyTree, PyTree] | None):
        super().__init__(f"micro_batch={settings.micro_batch}")
        self.settings = settings
        self.arrays = arrays


class Rescue:
    """Takes what a run holds to the host when its device runs out of memory.

    A context manager around the run's loop. Other errors pass.
    """

    def __init__(self, settings: Settings, held: Any):
        """Takes the settings, and a function for micro-step, parameters and state."""
        self._settings, self._held = settings, held

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
        try:
            micro_step, *trees = self._held()
            params, state = jax.tree.map(np.asarray, trees)
        except (RuntimeError, jax.errors.JaxRuntimeError):
            # Given away to the call that failed.
            raise OutOfMemoryError(self._settings, None) from error
        raise OutOfMemoryError(self._settings, (micro_step, params, state)) from error


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
            settings, arrays = error.settings, error.arrays
        # Outside of the handler nothing holds what filled the device.
        smaller = _smaller(settings, memory)
        _carry_over(folder, settings, smaller, arrays)
        given, resume = {}, True


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
    _, params = jax.eval_shape(lambda: (0, model.create(settings)[1]))

    def step_for(size: int, count: int, policy: str) -> tuple[Any, ...]:
        made = dataclasses.replace(
            settings,
            global_batch=size * count,
            micro_batch=size,
            num_microbatches=count,
            remat=policy,
        )
        in_call = made.microbatches_in_call
        loss = functools.partial(model.next_byte_loss, model.forward(made))
        tx = _tx(made, optimizer)
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
    """The settings that a plan adds to those that were given; shows the plan."""
    asked = {name: given[name] for name in BATCH if name in given}
    if not {*asked} - {"global_batch"}:
        # The micro-batch is to be chosen, at the default global batch if need be.
        asked.setdefault("global_batch", Settings.global_batch)
    else:
        asked = dict(zip(BATCH, resolve_batch(*map(given.get, BATCH))))
    settings = Settings(**{n: v for n, v in given.items() if n not in BATCH})
    policies = (given["remat"],) if "remat" in given else POLICIES
    try:
        found = plan(
            settings,
            memory,
            policies,
            global_batch_size=asked["global_batch"],
            microbatch_size=asked.get("micro_batch"),
            num_microbatches=asked.get("num_microbatches"),
        )
    except ValueError as error:
        raise CommandError(f"--memory={memory}: {first_line(error)}") from error
    print(found, flush=True)
    return _chosen(found)


def _chosen(found: Plan) -> dict[str, Any]:
    return {
        "global_batch": found.global_batch_size,
        "micro_batch": found.microbatch_size,
        "num_microbatches": found.num_microbatches,
        "remat": found.policy,
    }


def _smaller(settings: Settings, memory: str) -> Settings:
    """The settings with the largest smaller micro-batch that fits by its plan."""
    total, size = settings.global_batch, settings.micro_batch
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
        return dataclasses.replace(settings, **_chosen(found))
    raise CommandError(
        f"--memory={memory}: {why}, and there are no smaller ones; choose another "
        "--remat, or a smaller model",
        code=1,
    )


def _carry_over(
    folder: Path,
    before: Settings,
    after: Settings,
    arrays: tuple[int, PyTree, PyTree] | None,
) -> None:
    """Makes the run's folder that of a run with other micro-batches.

    Its newest checkpoint is then the last whole step of the run so far. A window that
    was open begins anew: it had changed no parameter.
    """
    if arrays is None:
        _, params = model.create(before)
        state = _tx(before, resolve_optimizer(before)).init(params)
        with output.Checkpoints(folder, before) as checkpoints:
            arrays = checkpoints.restore(params, state)
    micro_step, params, state = arrays
    steps = micro_step // before.num_microbatches
    corpus = load_corpus(after.text, after.seq_len)
    output.write_config(folder, output.describe(after, corpus))
    state = _with_empty_window(_tx(after, resolve_optimizer(after)), params, state)
    _replace_checkpoints(folder, after, steps, params, state)
    print(f"going on after step {steps} of {after.steps}", flush=True)


def _with_empty_window(tx: Any, params: PyTree, state: PyTree) -> PyTree:
    """The state for another number of micro-batches, between two steps."""
    if not isinstance(state, AccumulateState):
        return state
    fresh = jax.device_get(tx.init(params))
    return fresh._replace(
        inner_state=state.inner_state,
        gradient_step=state.gradient_step,
        skip_state=state.skip_state,
        skips=state.skips,
    )


def _replace_checkpoints(
    folder: Path, settings: Settings, steps: int, params: PyTree, state: PyTree
) -> None:
    """Leaves one checkpoint, under the settings; none where no step was made.

    Others may have higher numbers: micro-steps were counted by another k.
    """
    place = folder / output.CHECKPOINTS
    aside = place.with_name(f".{place.name}.before")
    if place.exists():
        place.rename(aside)
    if steps:
        with output.Checkpoints(folder, settings) as checkpoints:
            checkpoints.save(steps * settings.num_microbatches, params, state)
    shutil.rmtree(aside, ignore_errors=True)


def _tx(settings: Settings, optimizer: Any) -> Any:
    """The optimizer as a run uses it."""
    skip = None if settings.skip_nonfinite == "none" else settings.skip_nonfinite
    if settings.in_step and not skip:
        return optimizer
    calls = settings.num_microbatches // settings.microbatches_in_call
    return accumulate(optimizer, calls, skip_nonfinite=skip)
