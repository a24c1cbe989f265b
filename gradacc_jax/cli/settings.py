"""What a run is: its options, and the questions they raise before anything starts.

Whatever cannot work is a `CommandError` that names the option, its value and the way
out.
"""

from collections.abc import Callable, Collection
import dataclasses
import difflib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from gradacc_jax import accumulate, policies
from gradacc_jax.checkpointing.policies import Policy
from gradacc_jax.checkpointing.sizes import parse_size


class CommandError(Exception):
    """What the user reads: one line, without a traceback.

    Attributes:
        code: the exit code; 2 says that the command could not begin.
    """

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


def first_line(error: Exception) -> str:
    """The part of a library's error that fits into ours."""
    return str(error).partition("\n")[0] or type(error).__name__


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that a run is made from, and its defaults.

    Attributes:
        text: files and folders; none for the standard library.
        global_batch: sequences in an optimizer step.
        micro_batch: sequences in a forward and backward pass of one device (of one
            group of them, with `model_parallel`).
        num_microbatches: micro-batches in an optimizer step.
        in_step: whether an optimizer step is one call on the global batch, which is
            split inside the program; else it is a call for each micro-batch.
        devices: how many devices take part, in all processes.
        sharding: "data" for parameters on every device, "fsdp" for a part of them, and
            of the optimizer's state, on each.
        model_parallel: how many devices share the matrices of a layer.
        steps: optimizer steps.
        seq_len: bytes in a sequence.
        num_layers: transformer blocks.
        embed_dim: channels of the residual stream.
        num_heads: attention heads.
        optimizer: its name in optax or optax.contrib.
        learning_rate: at its highest.
        schedule: "cosine" or "constant", after the warm-up.
        warmup_steps: steps over which the learning rate rises from 0.
        remat: what a layer keeps for the backward pass: a policy's name, names of
            values with commas between, or "sqrt" for segments of layers.
        activation_memory: a budget for the temporaries of a step, such as "200MiB";
            what is computed again is then chosen by `remat_to_fit`. "none" for none.
        bf16: computes in bfloat16; parameters and sums stay float32.
        seed: of the parameters, of the choice of text and of the sample.
        skip_nonfinite: what a non-finite gradient costs: "micro_batch", "window", or
            "none", with which the first non-finite loss ends the run.
        checkpoint_every: optimizer steps from one checkpoint to the next.
    """

    text: tuple[str, ...] = ()
    global_batch: int = 16
    micro_batch: int = 4
    num_microbatches: int = 4
    in_step: bool = False
    devices: int = 1
    sharding: str = "data"
    model_parallel: int = 1
    steps: int = 240
    seq_len: int = 128
    num_layers: int = 4
    embed_dim: int = 64
    num_heads: int = 4
    optimizer: str = "adamw"
    learning_rate: float = 6e-3
    schedule: str = "cosine"
    warmup_steps: int = 10
    remat: str = "none"
    activation_memory: str = "none"
    bf16: bool = False
    seed: int = 0
    skip_nonfinite: str = "none"
    checkpoint_every: int = 20

    def __post_init__(self) -> None:
        if self.embed_dim % (2 * self.num_heads):
            raise CommandError(
                f"--embed-dim={self.embed_dim} does not part into --num-heads="
                f"{self.num_heads} heads of an even number of channels; choose a "
                f"multiple of {2 * self.num_heads}"
            )
        if self.activation_memory != "none":
            try:
                parse_size("--activation-memory", self.activation_memory)
            except ValueError as error:
                raise CommandError(first_line(error)) from error
            if self.remat != "none":
                raise CommandError(
                    f"--remat={self.remat} and --activation-memory="
                    f"{self.activation_memory} both say what is computed again; choose "
                    "one"
                )
            if self.devices > 1:
                raise CommandError(
                    f"--activation-memory={self.activation_memory} is for one device; "
                    f"choose a policy by --remat, or leave out --devices={self.devices}"
                )
        shared = {"--devices": self.devices, "--num-heads": self.num_heads}
        for option, value in shared.items():
            if value % self.model_parallel:
                raise CommandError(
                    f"--model-parallel={self.model_parallel} does not divide {option}="
                    f"{value}; choose {_near_divisors(self.model_parallel, value)}, or "
                    f"another {option}"
                )
        if self.in_step and self.skip_nonfinite == "micro_batch":
            raise CommandError(
                "--skip-nonfinite=micro_batch looks at micro-batches one by one, and "
                "--in-step adds them up in one call; choose --skip-nonfinite window"
            )

    @property
    def data_parallel(self) -> int:
        """How many devices, or groups of them, have micro-batches of their own."""
        return self.devices // self.model_parallel

    @property
    def sequences_in_micro_step(self) -> int:
        """Sequences in a micro-step, on all devices."""
        return self.micro_batch * self.data_parallel

    @property
    def microbatches_in_call(self) -> int:
        """How many micro-batches one call of the training step takes."""
        return self.num_microbatches if self.in_step else 1

    @property
    def micro_steps(self) -> int:
        """Micro-steps of the whole run."""
        return self.steps * self.num_microbatches


DEFAULTS = Settings()


def resolve_batch(
    global_batch: int | None = None,
    micro_batch: int | None = None,
    num_microbatches: int | None = None,
    *,
    devices: int = 1,
    largest: int | None = None,
) -> tuple[int, int, int]:
    """Finds the numbers not given: global = micro x num_microbatches x devices.

    Two give the third. A micro-batch or a number of them alone keeps the default of
    the other, so that the global batch follows. A global batch alone is cut into the
    largest micro-batches that divide it and are no larger than `largest`, which is the
    default's size where it is None.

    Returns:
        `(global_batch, micro_batch, num_microbatches)`.

    Raises:
        CommandError: three numbers disagree, or one does not divide the global batch.

    Examples:
        >>> resolve_batch(global_batch=32, num_microbatches=4)
        (32, 8, 4)
        >>> resolve_batch(micro_batch=6)
        (24, 6, 4)
        >>> resolve_batch(micro_batch=6, devices=8)
        (192, 6, 4)
    """
    whole, micro, count = global_batch, micro_batch, num_microbatches
    if whole is None:
        micro = DEFAULTS.micro_batch if micro is None else micro
        count = DEFAULTS.num_microbatches if count is None else count
        return micro * count * devices, micro, count
    if whole % devices:
        lower, upper = whole - whole % devices, whole + -whole % devices
        near = f"{lower} or {upper}" if lower else f"{upper}"
        raise CommandError(
            f"--global-batch={whole} does not divide over {devices} devices; choose "
            f"{near}, or another number of --devices"
        )
    share = whole // devices
    if micro is None and count is None:
        largest = largest or DEFAULTS.micro_batch
        micro = max(m for m in _divisors(share) if m <= largest)
    if micro is None and count is not None:
        _check_divides("--num-microbatches", count, whole, devices)
        micro = share // count
    if count is None and micro is not None:
        _check_divides("--micro-batch", micro, whole, devices)
        count = share // micro
    assert micro is not None
    assert count is not None
    if micro * count != share:
        on = f" x {devices} devices" if devices > 1 else ""
        product = micro * count * devices
        raise CommandError(
            f"--global-batch={whole}, --micro-batch={micro} and --num-microbatches="
            f"{count} disagree: {micro} x {count}{on} = {product}; give two of them, "
            f"or --global-batch {product}"
        )
    return whole, micro, count


def _check_divides(option: str, value: int, global_batch: int, devices: int) -> None:
    share = global_batch // devices
    if share % value:
        on = f" on each of {devices} devices" if devices > 1 else ""
        raise CommandError(
            f"{option}={value}{on} does not divide --global-batch={global_batch}; "
            f"choose {_near_divisors(value, share)}, or another --global-batch"
        )


def _near_divisors(value: int, number: int) -> str:
    """The divisors of a number that are nearest to a value which is none."""
    divisors = _divisors(number)
    near = [max(d for d in divisors if d < value)]
    near += [d for d in divisors if d > value][:1]
    return " or ".join(map(str, near))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def resolve_remat(
    remat: str, num_layers: int, names: Collection[str]
) -> tuple[int | str, Policy]:
    """What `--remat` means, as `remat_sequence` takes it.

    Args:
        remat: the option.
        num_layers: the model's.
        names: those that the model puts on values.

    Returns:
        `(segments, policy)`.

    Raises:
        CommandError: there is no such policy, and no value has such a name.

    Examples:
        >>> resolve_remat("dots", 4, ["mlp"])
        (4, dots)
        >>> resolve_remat("mlp", 4, ["mlp"])
        (4, save_names('mlp'))
    """
    if remat == "sqrt":
        return "sqrt", policies.full
    given = [name.strip() for name in remat.split(",")]
    if all(name in names for name in given):
        return num_layers, policies.save_names(*given)
    try:
        return num_layers, policies.resolve(remat)
    except ValueError as error:
        near = difflib.get_close_matches(
            given[-1], ["none", "full", "dots", "sqrt", *names], n=1
        )
        meant = f" ({near[0]}?)" if near else ""
        raise CommandError(
            f"--remat={remat} is not known{meant}; choose none, full, dots, sqrt, "
            f"another policy of gradacc_jax, or some of {','.join(names)}"
        ) from error


def learning_rates(settings: Settings) -> Callable[[Any], Any] | float:
    """The learning rate of each optimizer step: a schedule, or a constant."""
    peak, warmup = settings.learning_rate, settings.warmup_steps
    if settings.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0 if warmup else peak,
            peak_value=peak,
            warmup_steps=warmup,
            decay_steps=max(settings.steps, warmup + 1),
            end_value=peak / 10,
        )
    return optax.warmup_constant_schedule(0.0, peak, warmup) if warmup else peak


def resolve_optimizer(settings: Settings) -> optax.GradientTransformation:
    """Builds the optimizer that `--optimizer` names.

    Raises:
        CommandError: optax has no such optimizer, or it needs more than a learning
            rate, gradients, parameters and the loss.
    """
    name, known = settings.optimizer, _optimizers()
    if name not in known:
        near = difflib.get_close_matches(name, known) or ["adamw", "lion", "sgd"]
        raise CommandError(
            f"--optimizer={name} is no optimizer of optax or optax.contrib that a "
            f"learning rate is enough for; choose for instance {', '.join(near)}"
        )
    try:
        optimizer = known[name](learning_rate=learning_rates(settings))
        _try(optimizer)
    except Exception as error:
        rate = settings.learning_rate
        try:
            _try(known[name](learning_rate=rate))
        except Exception:
            raise CommandError(
                f"--optimizer={name} cannot be used here; choose another: "
                f"{first_line(error)}"
            ) from error
        raise CommandError(
            f"--optimizer={name} takes no schedule of learning rates; add "
            "--schedule constant --warmup-steps 0"
        ) from error
    return optimizer


def _optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Functions of optax that make an optimizer from a learning rate alone."""
    found: dict[str, Callable[..., optax.GradientTransformation]] = {}
    for module in (optax.contrib, optax):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            parameters = inspect.signature(function).parameters
            missing = [
                p
                for p in parameters.values()
                if p.default is p.empty and p.name != "learning_rate"
            ]
            is_part = name.startswith("scale_by")  # of an optimizer
            if "learning_rate" in parameters and not missing and not is_part:
                found[name] = function
    return found


def _try(optimizer: optax.GradientTransformation) -> None:
    """Traces one step on a small tree; raises what the optimizer raises."""
    params = {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2)}
    tx = optax.with_extra_args_support(optimizer)

    def step(params: Any) -> Any:
        return tx.update(params, tx.init(params), params, value=jnp.ones(()))

    jax.eval_shape(step, params)


def accumulated(
    optimizer: optax.GradientTransformation, axis_name: str | None, settings: Settings
) -> optax.GradientTransformation:
    """What the step of these settings is made with, of its plain optimizer."""
    skip = None if settings.skip_nonfinite == "none" else settings.skip_nonfinite
    if settings.in_step and not skip:
        return optimizer
    calls = settings.num_microbatches // settings.microbatches_in_call
    return accumulate(optimizer, calls, skip_nonfinite=skip, axis_name=axis_name)
