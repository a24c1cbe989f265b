"""`gradacc plan` and `gradacc chips`: what is asked, and what is answered.

A GPT is planned in this process. A function of the user's is planned in one of its own:
should it crash, or a compiler abort in it, what is lost is the answer. That process
ends when this one does, however it does.
"""

import argparse
from collections.abc import Callable
import dataclasses
import importlib.util
import multiprocessing
from multiprocessing.connection import Connection, wait
import os
from pathlib import Path
import sys
import threading
from typing import Any

from gradacc_jax.cli.settings import CommandError, first_line

PLAN = """\
Choose micro-batch, number of micro-batches and rematerialisation policy for a memory
budget, by compiling for the chip, which need not be here. Nothing is run.
"""

PLAN_EXAMPLES = """\
targets:
  gpt:124M           a GPT of that size; also gpt:12x768, layers and channels
  module:function    a function without arguments that returns a dict of arguments for
                     gradacc_jax.plan, or for plan_step

examples:
  gradacc plan gpt:124M --chip rtx-4090 --global-batch 256 --seq-len 2048
  gradacc plan gpt:1.3B --chip v5e --trainable norm
  gradacc plan train:setup --memory 10GiB --json plan.json --plot plan.png
"""


def add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds both commands to those of `gradacc`."""
    parser = commands.add_parser(
        "plan",
        help="choose micro-batch, k and policy for a memory budget",
        description=PLAN,
        epilog=PLAN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=plan)
    parser.add_argument("target", metavar="TARGET", help="what to plan for; see below")
    parser.add_argument(
        "--chip", help="such as rtx-4090 or v5e (default: this machine's device)"
    )
    parser.add_argument(
        "--memory", help="such as 24GiB (default: what JAX leaves usable of the chip)"
    )
    for name, what in (
        ("--global-batch", "examples in an optimizer step"),
        ("--micro-batch", "examples in a forward and backward pass"),
        ("--num-microbatches", "micro-batches in an optimizer step"),
    ):
        parser.add_argument(name, type=int, metavar="N", help=what)
    parser.add_argument(
        "--policies",
        default="none,dots,full",
        help="those to choose from; fit finds by itself what to compute again "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--margin",
        type=float,
        metavar="X",
        help="part of the memory to leave free (default: 0.05)",
    )
    parser.add_argument(
        "--time-budget", type=float, metavar="SECONDS", help="to search for so long"
    )
    group = parser.add_argument_group("for a GPT")
    group.add_argument(
        "--seq-len", type=int, default=1024, metavar="N", help="default: %(default)s"
    )
    group.add_argument("--optimizer", default="adamw", help="default: %(default)s")
    group.add_argument(
        "--dtype",
        choices=("bf16", "f32"),
        default="bf16",
        help="to compute in; parameters are float32 (default: %(default)s)",
    )
    group.add_argument(
        "--trainable",
        metavar="NAMES",
        help="parts of parameters' names, such as norm: all others are frozen",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="the plan as JSON")
    output.add_argument("--plot", type=Path, metavar="FILE", help="the plan as PNG")

    parser = commands.add_parser(
        "chips", help="list the chips that can be planned for", allow_abbrev=False
    )
    parser.set_defaults(command=chips)


def chips() -> int:
    """Prints the chips, and what installs the compilers that are missing."""
    import gradacc_jax

    table = gradacc_jax.chips()
    print(table)
    for source in sorted({chip.source for chip in table.values()}):
        names = ", ".join(c.name for c in table.values() if c.source == source)
        print(f"{names}: {source}")
    return 0


def plan(
    *, target: str, json: Path | None = None, plot: Path | None = None, **options: Any
) -> int:
    """Plans, prints the plan, and writes it where asked."""
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandError(
            "--plot needs matplotlib; install what the command needs: "
            "pip install 'gradacc_jax[cli]'"
        )
    if options.get("chip") is not None:
        # JAX would report at length that a compiler alone cannot run on a GPU.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if target.startswith("gpt:"):
        found = plan_here(target, options)
    elif ":" in target:
        found = _plan_elsewhere(target, options)
    else:
        raise CommandError(f"{target} is no target; name gpt:124M or module:function")
    print(found)
    if json is not None:
        json.write_text(found.to_json() + "\n")
    if plot is not None:
        found.plot().savefig(plot, format="png", dpi=150)
    return 0


def plan_here(target: str, options: dict[str, Any]) -> Any:
    """The plan of a target, made in this process.

    Raises:
        CommandError: there is none; it says why.
    """
    import gradacc_jax
    from gradacc_jax.cli import targets

    of_gpt = {n: options.pop(n) for n in ("seq_len", "optimizer", "dtype", "trainable")}
    renamed = {"global_batch": "global_batch_size", "micro_batch": "microbatch_size"}
    asked = {
        renamed.get(name, name): value
        for name, value in options.items()
        if value is not None
    }
    asked["policies"] = tuple(asked["policies"].split(","))
    if target.startswith("gpt:"):
        arguments = targets.gpt(target.removeprefix("gpt:"), **of_gpt)
        asked.setdefault("global_batch_size", None)
    else:
        arguments = targets.of_user(target)
    by_step = "step_for" in arguments
    call = gradacc_jax.plan_step if by_step else gradacc_jax.plan
    first = ("step_for",) if by_step else ("loss_fn", "params", "optimizer", "batch")
    try:
        given = [arguments.pop(name) for name in first]
        return call(
            *given,
            **arguments | asked,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except (ImportError, KeyError, TimeoutError, TypeError, ValueError) as error:
        raise CommandError(f"{target}: {first_line(error)}") from error


def _plan_elsewhere(target: str, options: dict[str, Any]) -> Any:
    """The plan of a target, made in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    worker = context.Process(
        target=_work, args=(there, target, options), name="gradacc plan", daemon=True
    )
    worker.start()
    there.close()
    try:
        kind, answer = here.recv()
    except EOFError:
        worker.join()
        raise CommandError(
            f"{target}: the process that planned it ended with code {worker.exitcode} "
            "and without an answer; its last words are above"
        ) from None
    finally:
        worker.kill()
        worker.join()
    if kind == "error":
        raise CommandError(answer)
    return answer


def _work(there: Connection, target: str, options: dict[str, Any]) -> None:
    """What the other process does."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    _end_with(parent.sentinel)
    answer: tuple[str, Any]
    try:
        found = plan_here(target, options)
        answer = "plan", dataclasses.replace(found, train_step=_no_step, tx=None)
    except CommandError as error:
        answer = "error", str(error)
    there.send(answer)


def _no_step(*_: Any) -> None:
    raise RuntimeError("a plan made in another process brings no step")


def _end_with(sentinel: int, end: Callable[[int], Any] = os._exit) -> None:
    """Ends this process when the other one is gone, even if it was killed."""

    def watch() -> None:
        wait([sentinel])
        end(1)

    threading.Thread(target=watch, daemon=True).start()
