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

from gradacc_jax import StepMetrics, accumulate, raise_if_skipping, train_step
from gradacc_jax.cli import model, output, report
from gradacc_jax.cli.settings import (
    CommandError,
    Settings,
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
    stored = output.read_config(folder) if resume else None
    settings = _resumed(given, folder, stored) if stored else _new(given)
    optimizer = resolve_optimizer(settings)
    corpus = load_corpus(settings.text, settings.seq_len)
    config = output.describe(settings, corpus)
    if stored:
        output.check_text(folder, stored, config)
    else:
        output.check_free(folder)
    output.make(folder)

    resolve_remat(settings.remat, settings.num_layers, model.NAMES)
    forward, params = model.create(settings)
    loss_fn = functools.partial(model.next_byte_loss, forward)
    skip = None if settings.skip_nonfinite == "none" else settings.skip_nonfinite
    tx = optimizer
    if skip or not settings.in_step:
        calls = settings.num_microbatches // settings.microbatches_in_call
        tx = accumulate(optimizer, calls, skip_nonfinite=skip)
    state = jax.jit(tx.init)(params)
    print(report.introduction(settings, corpus, params), flush=True)

    # Compiled ahead of time, so that nothing can compile again behind our back.
    def step_of(loss_fn: Callable[..., Any], budget: str | None = None) -> Any:
        return train_step(
            loss_fn,
            tx,
            weight_fn=model.weight,
            num_microbatches=settings.microbatches_in_call,
            max_temp_bytes=budget,
        )

    def compile_step(loss_fn: Callable[..., Any]) -> jax.stages.Compiled:
        batch = corpus.call_batch(settings, 0)
        return _compile(step_of(loss_fn), params, state, batch)

    if settings.activation_memory == "none":
        step = compile_step(loss_fn)
    else:
        fitted = step_of(loss_fn, settings.activation_memory)
        try:
            step = _compile(fitted, params, state, corpus.call_batch(settings, 0))
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
        full_step = _compile(
            train_step(loss_fn, optimizer, weight_fn=model.weight),
            params,
            jax.eval_shape(optimizer.init, params),
            corpus.global_batch(settings, 0),
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
        micro_step, params, state = checkpoints.restore(params, state)
        output.write_config(folder, config)
        if resume:
            print(f"resumed after {report.position(settings, micro_step)}", flush=True)
        with (
            output.Metrics(folder, micro_step // settings.num_microbatches) as log,
            report.Reporter(settings, micro_step) as reporter,
            Stop() as stop,
        ):
            running = None
            while micro_step < settings.micro_steps and stop.signal is None:
                batch = corpus.call_batch(settings, micro_step)
                params, state, metrics = step(params, state, batch)
                micro_step += settings.microbatches_in_call
                # One call runs and one waits. The device is never idle, and the
                # progress bar, or a signal, never far from what it does.
                jax.block_until_ready(running)
                running = metrics
                reporter.micro_step(micro_step)
                if micro_step % settings.num_microbatches:
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

    records = output.read_metrics(folder)
    if stop.signal is not None and micro_step < settings.micro_steps:
        report.plot(folder / output.PLOT, records)
        print(
            f"stopped after {report.position(settings, micro_step)}\n"
            f"to go on: gradacc train --resume --out {shlex.quote(str(folder))}"
        )
        return 128 + stop.signal

    held_out = _held_out_loss(loss_fn, params, settings, corpus)
    report.plot(folder / output.PLOT, records, held_out)
    print(report.conclusion(folder, records, held_out))
    print(_sample(forward, params, settings, corpus), flush=True)
    if verify and full_step is not None:
        losses = [record["loss"] for record in records]
        equal = verify_against_full_batch(
            full_step, optimizer, settings, corpus, params, losses
        )
        return 0 if equal else 1
    return 0


def _new(given: dict[str, Any]) -> Settings:
    names = ("global_batch", "micro_batch", "num_microbatches")
    batch = resolve_batch(*map(given.get, names))
    return Settings(**given | dict(zip(names, batch)))


def _resumed(given: dict[str, Any], folder: Path, stored: dict[str, Any]) -> Settings:
    settings = dataclasses.replace(stored["settings"], **given)
    output.check_same(folder, stored["settings"], settings)
    return settings


def _compile(step: Any, *arguments: PyTree) -> jax.stages.Compiled:
    compiled: jax.stages.Compiled = step.lower(*arguments).compile()
    return compiled


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
    corpus: Corpus,
) -> float | None:
    """The mean loss over the held-out text, or a part of it; None if there is none."""
    total = weight = 0.0
    loss_fn = jax.jit(loss_fn)
    for batch in corpus.held_out_batches(settings, HELD_OUT_BATCHES):
        total += float(loss_fn(params, batch)) * float(batch.lengths.sum())
        weight += float(batch.lengths.sum())
    return total / weight if weight else None


def _sample(
    forward: model.Forward, params: PyTree, settings: Settings, corpus: Corpus
) -> str:
    """What the model writes, after text that it was not trained on if there is some."""
    unseen = corpus.held_out.starts(settings.seq_len)
    text = corpus.held_out if unseen else corpus.train
    prompt = text.data[: settings.seq_len]
    drawn = model.sample(
        forward, params, prompt, jax.random.key(settings.seed), SAMPLE_BYTES
    )
    written = np.asarray(drawn).tobytes().decode(errors="replace")
    # What is not text could be a command to the terminal.
    shown = "".join(c if c.isprintable() or c == "\n" else "·" for c in written)
    return "a sample of what it writes:\n" + textwrap.indent(shown, "  | ", bool)
