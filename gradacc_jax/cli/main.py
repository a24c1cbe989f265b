"""The command `gradacc`: reads the command line and hands over.

Settings that were not given stay out of the namespace, so that `--resume` can tell what
the user said from what nobody did. Their defaults stand in `Settings`.
"""

import argparse
from collections.abc import Callable, Sequence
import importlib.util
import math
from pathlib import Path
import sys
import time
from typing import Any

import gradacc_jax
from gradacc_jax.cli import plan
from gradacc_jax.cli.settings import DEFAULTS, CommandError

# Of the extra `cli`: what is imported, and by what name it is installed.
EXTRA = {"matplotlib": "matplotlib", "orbax": "orbax-checkpoint", "rich": "rich"}

LARGEST = 2**31 - 1  # what fits into JAX's integers, a seed's among them

TRAIN = """\
Train a byte-level transformer on text. Each optimizer step is made of the gradients of
several micro-batches, accumulated. Without options: about a minute on two CPU cores.
"""

TRAIN_EXAMPLES = """\
examples:
  gradacc train                                     on Python's own library
  gradacc train --text book.txt notes/              on a file and a folder
  gradacc train --global-batch 64 --micro-batch 8   with 8 micro-batches in each step
  gradacc train --steps 20 --verify                 is it equal to full batches?
  gradacc train --resume --out runs/mine            go on from the last checkpoint
  gradacc train --devices 4 --sharding fsdp         on 4 devices, parameters in parts

the same in two processes, one command for each:
  gradacc train --distributed --coordinator host:1234 --num-processes 2 --process-id 0
  gradacc train --distributed --coordinator host:1234 --num-processes 2 --process-id 1
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: what follows the command's name; by default what the process was given.

    Returns:
        The exit code.
    """
    parser = _parser()
    options = vars(parser.parse_args(argv))
    command = options.pop("command", None)
    if command is None:
        parser.print_help()
        return 0
    try:
        code: int = command(**options)
    except CommandError as error:
        print(f"gradacc: error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradacc", description="Train the batch you want in the memory you have."
    )
    parser.add_argument(
        "--version", action="version", version=f"gradacc_jax {gradacc_jax.__version__}"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_train(
        commands.add_parser(
            "train",
            help="train a byte-level transformer on text",
            description=TRAIN,
            epilog=TRAIN_EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
        )
    )
    plan.add_commands(commands)
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_train)

    text = parser.add_argument_group("text")
    text.add_argument(
        "--text",
        nargs="+",
        type=_path,
        metavar="PATH",
        help="files and folders to train on (default: source and documentation of the "
        "Python that runs this)",
    )
    _add_number(text, "--seq-len", help="bytes in a sequence")

    batch = parser.add_argument_group(
        "batch (two numbers give the third: global = micro x number x devices)"
    )
    batch.add_argument(
        "--global-batch",
        type=_at_least(1),
        metavar="N",
        help="sequences in an optimizer step, on all devices",
    )
    _add_number(
        batch,
        "--micro-batch",
        help="sequences in a forward and backward pass of one device",
    )
    _add_number(
        batch,
        "--num-microbatches",
        "--gradient-accumulation-steps",
        help="micro-batches in an optimizer step",
    )
    batch.add_argument(
        "--in-step",
        action="store_true",
        help="make an optimizer step in one call, with its micro-batches in a loop "
        "inside the program; the same losses, but for rounding",
    )

    batch.add_argument(
        "--memory",
        metavar="SIZE",
        help="plan micro-batch and --remat for so much memory, such as 24GiB, or for "
        "what the device has (auto), at the same global batch; and again, with a "
        "smaller micro-batch, should the device run out of memory",
    )

    _add_devices(parser.add_argument_group("devices"))

    model = parser.add_argument_group("model")
    _add_number(model, "--num-layers", help="transformer blocks")
    _add_number(model, "--embed-dim", help="channels between blocks")
    _add_number(model, "--num-heads", help="attention heads in a block")
    model.add_argument(
        "--bf16",
        action="store_true",
        help="compute in bfloat16; parameters and sums stay float32",
    )

    model.add_argument(
        "--remat",
        metavar="POLICY",
        help="what a layer keeps for the backward pass, which computes the rest again: "
        "none (keep all), full (keep its input), dots (matrix products), sqrt (the "
        "inputs of some layers), another policy of gradacc_jax, or names such as "
        f"attention,mlp_in; prints what each saves (default: {DEFAULTS.remat})",
    )

    model.add_argument(
        "--activation-memory",
        metavar="SIZE",
        help="a budget for the temporaries of a step, such as 200MiB: what is computed "
        "again is chosen so that the compiled step keeps to it (experimental)",
    )

    training = parser.add_argument_group("training")
    _add_number(training, "--steps", help="optimizer steps")
    training.add_argument(
        "--optimizer",
        metavar="NAME",
        help=f"of optax or optax.contrib (default: {DEFAULTS.optimizer})",
    )
    _add_number(training, "--learning-rate", help="at its highest, after the warm-up")
    training.add_argument(
        "--schedule",
        choices=("cosine", "constant"),
        help="the learning rate after the warm-up; cosine falls to a tenth (default: "
        f"{DEFAULTS.schedule})",
    )
    _add_number(
        training,
        "--warmup-steps",
        least=0,
        help="steps in which the learning rate rises from 0",
    )
    training.add_argument(
        "--skip-nonfinite",
        choices=("none", "micro_batch", "window"),
        help="what is left out when a gradient is not finite; with none, a loss that "
        f"is not finite ends the run (default: {DEFAULTS.skip_nonfinite})",
    )
    _add_number(training, "--seed", least=0, help="of parameters, text and sample")
    training.add_argument(
        "--verify",
        action="store_true",
        default=False,
        help="make the same steps again, each on its full batch in one pass, and fail "
        "where losses or parameters differ",
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        dest="folder",
        type=_path,
        metavar="FOLDER",
        help="for config.json, metrics.jsonl, loss.png and checkpoints (default: a new "
        "one in runs)",
    )
    _add_number(
        output,
        "--checkpoint-every",
        help="steps from one checkpoint to the next; Ctrl-C and SIGTERM write one too",
    )
    output.add_argument(
        "--resume",
        action="store_true",
        default=False,
        help="go on with the run in --out, from exactly where it was stopped",
    )


def _add_devices(devices: "argparse._ArgumentGroup") -> None:
    devices.add_argument(
        "--devices",
        type=_at_least(1),
        metavar="N",
        help="how many share the work (default: all there are)",
    )
    devices.add_argument(
        "--sharding",
        choices=("data", "fsdp"),
        help="data: parameters on each device, gradients summed once a step; fsdp: a "
        "part of parameters and optimizer state on each, gathered in each micro-batch "
        f"(default: {DEFAULTS.sharding})",
    )
    _add_number(
        devices,
        "--model-parallel",
        help="devices that share the matrices of each layer, and a micro-batch; "
        "divides --devices and --num-heads",
    )
    devices.add_argument(
        "--distributed",
        action="store_true",
        default=False,
        help="share the work with other processes that run the same command, over "
        "jax.distributed; --out must be one folder for all, and the first one reports",
    )
    devices.add_argument(
        "--coordinator",
        type=_address,
        metavar="HOST:PORT",
        default=None,
        help="where process 0 is; these three are found by JAX under Slurm, Open MPI, "
        "Kubernetes and on TPUs",
    )
    devices.add_argument(
        "--num-processes", type=_at_least(1), metavar="N", default=None
    )
    devices.add_argument("--process-id", type=_at_least(0), metavar="I", default=None)


def _train(
    *,
    verify: bool,
    resume: bool,
    distributed: bool,
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    folder: Path | None = None,
    memory: str | None = None,
    **given: Any,
) -> int:
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"{', '.join(EXTRA[name] for name in missing)} not found; install what the "
            "command needs: pip install 'gradacc_jax[cli]'"
        )
    if resume and folder is None:
        raise CommandError("--resume needs --out FOLDER, the folder of the run")

    others = (coordinator, num_processes, process_id)
    if distributed and folder is None:
        raise CommandError(
            "--distributed needs --out FOLDER, the same in all processes"
        )
    if not distributed and others != (None, None, None):
        raise CommandError(
            "--coordinator, --num-processes and --process-id are for several "
            "processes; add --distributed"
        )

    from gradacc_jax.cli import devices
    from gradacc_jax.cli.train import train

    if distributed:
        devices.join(*others)
    if "text" in given:  # The run may be resumed from elsewhere.
        given["text"] = tuple(str(path.absolute()) for path in given["text"])

    folder = folder or Path("runs", time.strftime("%Y-%m-%d-%H%M%S"))
    with devices.one_of_several():
        if memory is not None:
            from gradacc_jax.cli import memory as planned

            return planned.train(
                given, folder, memory=memory, resume=resume, verify=verify
            )
        return train(given, folder, resume=resume, verify=verify)


def _add_number(
    group: "argparse._ArgumentGroup", *names: str, help: str, least: int = 1
) -> None:
    """Adds a setting that is a number of its default's type."""
    default = getattr(DEFAULTS, names[0].removeprefix("--").replace("-", "_"))
    group.add_argument(
        *names,
        type=_at_least(least) if isinstance(default, int) else _positive,
        metavar="N" if isinstance(default, int) else "X",
        help=f"{help} (default: {default})",
    )


def _at_least(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= LARGEST:
            bound = f"most {LARGEST}" if value > LARGEST else f"least {least}"
            raise argparse.ArgumentTypeError(
                f"expected an integer, at {bound}, not {text!r}"
            )
        return value

    return integer


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, not {text!r}")
    return text


def _path(text: str) -> Path:
    if not text:  # To Path, that is the current folder.
        raise argparse.ArgumentTypeError("expected a path, not an empty string")
    return Path(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, not {text!r}")
    return value
