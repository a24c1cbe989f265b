"""`gradacc train`: the story of a run, from top to bottom.

The text, the model and the optimizer are made from the settings. Two programs are
compiled: the step that the run is made of, on one micro-batch or on several, and, to
compare, one step on the full batch in one pass. Then calls follow one another. Which
window a micro-step is in and what
text it sees are functions of its number alone, so that this number, the parameters and
the optimizer's state are all that a checkpoint has to hold.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from pathlib import Path
import shlex
import textwrap
from typing import Any

import jax
import numpy as np

from gradacc_jax import StepMetrics, raise_if_skipping, train_step
from gradacc_jax.cli import devices, model, output, report
from gradacc_jax.cli.memory import Rescue
from gradacc_jax.cli.settings import (
    CommandError,
    Settings,
    accumulated,
    first_line,
    resolve_batch,
    resolve_optimizer,
    resolve_remat,
)
from gradacc_jax.cli.signals import Stop
from gradacc_jax.cli.text import Batch, Corpus, load_corpus
from gradacc_jax.cli.verify import verify_against_full_batch

HELD_OUT_BATCHES = 32
SAMPLE_BYTES = 200
REMAT_SHOWN = ("none", "dots", "sqrt", "full")
SKIPPED_WINDOWS_LIMIT = 10
BATCH = ("global_batch", "micro_batch", "num_microbatches")

PyTree = Any


def train(
    given: dict[str, Any],
    folder: Path,
    *,
    resume: bool = False,
    verify: bool = False,
) -> int:
    """Trains, or goes on training.

    Args:
        given: the settings that the user gave; the others have their defaults or, on
            resuming, their former values.
        folder: where everything is written.
        resume: whether to go on with the run in `folder`.
        verify: whether to train on full batches too, and compare.

    Returns:
        The exit code: 0; 1 if `verify` found a difference; 128 + the signal's number
        if a signal stopped the run.

    Raises:
        CommandError: the run cannot begin, or cannot go on.
    """
    first = jax.process_index() == 0  # which writes for all
    stored = output.read_config(folder) if resume else None
    settings = _resumed(given, folder, stored) if stored else _new(given)
    optimizer = resolve_optimizer(settings)
    corpus = load_corpus(settings.text, settings.seq_len)
    config = output.describe(settings, corpus)
    placement = devices.place(settings)
    if stored:
        output.check_text(folder, stored, config)
    else:
        output.check_free(folder)
    devices.meet("all have looked into the folder")
    if jax.process_index() == 0:
        output.make(folder)

    resolve_remat(settings.remat, settings.num_layers, model.NAMES)
    forward = model.forward(settings)
    loss_fn = functools.partial(model.next_byte_loss, forward)
    accumulating = functools.partial(accumulated, optimizer, placement.axis_name)
    tx = accumulating(settings)
    params = placement.params(settings)
    state = placement.state(tx, params)
    print(report.introduction(settings, corpus, params), flush=True)

    # Compiled ahead of time, so that nothing can compile again behind our back.
    def step_of(loss_fn: Callable[..., Any], budget: str | None = None) -> Any:
        return train_step(
            loss_fn,
            tx,
            weight_fn=model.weight,
            num_microbatches=settings.microbatches_in_call,
            max_temp_bytes=budget,
            **placement.of_step,
        )

    def compile_step(loss_fn: Callable[..., Any]) -> jax.stages.Compiled:
        batch = placement.put(corpus.call_batch(settings, 0))
        return placement.compile(step_of(loss_fn), params, state, batch)

    if settings.activation_memory == "none":
        step = compile_step(loss_fn)
    else:
        fitted = step_of(loss_fn, settings.activation_memory)
        batch = placement.put(corpus.call_batch(settings, 0))
        try:
            step = fitted.lower(params, state, batch).compile()
        except ValueError as error:
            raise CommandError(
                f"--activation-memory={settings.activation_memory}: {first_line(error)}"
            ) from error
        print(report.activation_memory(fitted.reports[-1]), flush=True)
    if settings.remat != "none":
        others = {settings.remat: step}
        for remat in REMAT_SHOWN:
            if remat not in others:
                other = model.forward(dataclasses.replace(settings, remat=remat))
                other_loss = functools.partial(model.next_byte_loss, other)
                others[remat] = compile_step(other_loss)
        print(report.rematerialisation(settings.remat, others), flush=True)
    try:
        # Here the reduction over devices is XLA's, whatever it is in the run.
        full_step = placement.compile(
            train_step(loss_fn, optimizer, weight_fn=model.weight),
            params,
            placement.like_state(optimizer, settings),
            placement.put(corpus.global_batch(settings, 0)),
        )
    except jax.errors.JaxRuntimeError as error:
        # Some compilers refuse what does not fit. That is why one accumulates.
        if verify:
            raise CommandError(
                f"--verify needs the full batch in one pass: {first_line(error)}"
            ) from error
        full_step = None
    print(report.savings(settings, step, full_step, params), flush=True)

    with output.Checkpoints(folder, settings) as checkpoints:
        found = checkpoints.restore(
            lambda stored: (
                placement.like_params(settings),
                placement.like_state(accumulating(stored), stored),
            )
        )
        micro_step = 0
        if found is not None:
            sequences, was, params, old = found
            micro_step = _micro_step(settings, sequences)
            if _cut(was) == _cut(settings):
                state = old
            else:
                mini_step = micro_step % settings.num_microbatches
                state = placement.carried_over(old, state, params, mini_step)

        def save_last_step() -> None:
            # In an open window no parameter has moved: it begins anew.
            within, held = micro_step % settings.num_microbatches, state
            if within:
                held = held._replace(mini_step=jax.numpy.zeros_like(held.mini_step))
            checkpoints.save(micro_step - within, params, held)

        if first:
            output.write_config(folder, config)
        if resume:
            print(f"resumed after {report.position(settings, micro_step)}", flush=True)
        with (
            output.Metrics(
                folder if first else None, micro_step // settings.num_microbatches
            ) as log,
            report.Reporter(settings, micro_step) as reporter,
            Stop() as stop,
            Rescue(settings, lambda: save_last_step()),
        ):
            running = stopped = None
            while micro_step < settings.micro_steps and stopped is None:
                batch = placement.put(corpus.call_batch(settings, micro_step))
                params, state, metrics = step(params, state, batch)
                micro_step += settings.microbatches_in_call
                # One call runs and one waits. The device is never idle, and the
                # progress bar, or a signal, never far from what it does.
                jax.block_until_ready(running)
                running = metrics
                reporter.micro_step(micro_step)
                within = micro_step % settings.num_microbatches
                stopped = stop.agreed(between_steps=not within)
                if within:
                    continue
                number = micro_step // settings.num_microbatches
                record = {"step": number, **_read(metrics)}
                _check_finite(settings, record, state)
                record["tokens_per_second"] = reporter.tokens_per_second()
                log.append(record)
                reporter.step(record)
                if number % settings.checkpoint_every == 0:
                    checkpoints.save(micro_step, params, state)
            checkpoints.save(micro_step, params, state)

    devices.meet("all is written")
    records = output.read_metrics(folder)
    if stopped is not None and micro_step < settings.micro_steps:
        if first:
            report.plot(folder / output.PLOT, records)
        print(
            f"stopped after {report.position(settings, micro_step)}\n"
            f"to go on: gradacc train --resume --out {shlex.quote(str(folder))}"
        )
        return 128 + stopped

    held_out = _held_out_loss(loss_fn, params, settings, placement, corpus)
    if first:
        report.plot(folder / output.PLOT, records, held_out)
    print(report.conclusion(folder, records, held_out))
    print(_sample(forward, params, settings, placement, corpus), flush=True)
    if verify and full_step is not None:
        losses = [record["loss"] for record in records]
        equal = verify_against_full_batch(
            full_step, optimizer, settings, placement, corpus, params, losses
        )
        return 0 if equal else 1
    return 0


def _new(given: dict[str, Any]) -> Settings:
    given = {"devices": jax.device_count()} | given
    groups = Settings(**given).data_parallel
    whole, micro, count = map(given.get, BATCH)
    batch = resolve_batch(whole, micro, count, devices=groups)
    return Settings(**given | dict(zip(BATCH, batch)))


def _resumed(given: dict[str, Any], folder: Path, stored: dict[str, Any]) -> Settings:
    """The settings of a run that goes on: the global batch stays, its parts may not.

    On other devices micro-batches are as large as they were, or the next smaller size
    that divides: what fitted into a device's memory does so again.
    """
    was = stored["settings"]
    settings = dataclasses.replace(was, **given)
    output.check_same(folder, was, settings)
    if _cut(was) != _cut(settings):
        batch = resolve_batch(
            settings.global_batch,
            given.get("micro_batch"),
            given.get("num_microbatches"),
            devices=settings.data_parallel,
            largest=was.micro_batch,
        )
        settings = dataclasses.replace(settings, **dict(zip(BATCH, batch)))
    return settings


def _cut(settings: Settings) -> tuple[int, int, int]:
    """Into what the global batch is cut."""
    batch = settings.micro_batch, settings.num_microbatches
    return *batch, settings.data_parallel


def _micro_step(settings: Settings, sequences: int) -> int:
    """How many micro-steps of these settings a checkpoint has made.

    Raises:
        CommandError: it is in the middle of one.
    """
    size, groups = settings.sequences_in_micro_step, settings.data_parallel
    micro_step, rest = divmod(sequences, size)
    if rest:
        open_window = sequences % settings.global_batch
        common = math.gcd(open_window, settings.global_batch)
        way_out = "go on as it was until the step has ended"
        if common % groups == 0:
            way_out = f"choose --micro-batch {common // groups}"
        raise CommandError(
            f"the run was stopped within a step, after {open_window} of "
            f"{settings.global_batch} sequences, which are no number of micro-steps of "
            f"{size} (--micro-batch={settings.micro_batch} on {groups} devices); "
            f"{way_out}"
        )
    return micro_step


def _read(metrics: StepMetrics) -> dict[str, Any]:
    """The numbers of a step, once the device has them."""
    return {
        "loss": float(metrics.loss),
        "grad_norm": float(metrics.grad_norm),
        "weight": float(metrics.weight),
        "skipped": int(metrics.skipped),
    }


def _check_finite(settings: Settings, record: dict[str, Any], state: PyTree) -> None:
    """Ends a run that can only go on in vain. The last checkpoint is from before."""
    step, loss = record["step"], record["loss"]
    if settings.skip_nonfinite == "none":
        if not math.isfinite(loss):
            raise CommandError(
                f"loss={loss} at step {step}; choose a lower --learning-rate than "
                f"{settings.learning_rate}, or --skip-nonfinite micro_batch",
                code=1,
            )
        return
    limit = SKIPPED_WINDOWS_LIMIT
    if settings.skip_nonfinite == "micro_batch":
        limit *= settings.num_microbatches
    try:
        raise_if_skipping(state, limit)
    except RuntimeError as error:
        raise CommandError(f"step {step}: {error}", code=1) from error


def _held_out_loss(
    loss_fn: Callable[[PyTree, Batch], jax.Array],
    params: PyTree,
    settings: Settings,
    placement: devices.Placement,
    corpus: Corpus,
) -> float | None:
    """The mean loss over the held-out text, or a part of it; None if there is none."""
    total = weight = 0.0
    loss_fn = jax.jit(loss_fn, out_shardings=placement.whole)
    for batch in corpus.held_out_batches(settings, HELD_OUT_BATCHES):
        loss = float(loss_fn(params, placement.put(batch)))
        total += loss * float(batch.lengths.sum())
        weight += float(batch.lengths.sum())
    return total / weight if weight else None


def _sample(
    forward: model.Forward,
    params: PyTree,
    settings: Settings,
    placement: devices.Placement,
    corpus: Corpus,
) -> str:
    """What the model writes, after text that it was not trained on if there is some."""
    unseen = corpus.held_out.starts(settings.seq_len)
    text = corpus.held_out if unseen else corpus.train
    prompt = text.data[: settings.seq_len]

    def draw(params: PyTree) -> jax.Array:
        key = jax.random.key(settings.seed)
        return model.sample(forward, params, prompt, key, SAMPLE_BYTES)

    drawn = jax.jit(draw, out_shardings=placement.whole)(params)
    written = np.asarray(drawn).tobytes().decode(errors="replace")
    # What is not text could be a command to the terminal.
    shown = "".join(c if c.isprintable() or c == "\n" else "·" for c in written)
    return "a sample of what it writes:\n" + textwrap.indent(shown, "  | ", bool)
