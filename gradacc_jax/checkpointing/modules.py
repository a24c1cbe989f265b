"""``remat_modules``: rematerialisation for a model that someone else wrote."""

from collections.abc import Iterable, Sequence
import dataclasses
import difflib
import fnmatch
import re
from typing import Any

from gradacc_jax.checkpointing import policies
from gradacc_jax.checkpointing.arguments import framework
from gradacc_jax.checkpointing.policies import Policy
from gradacc_jax.checkpointing.remat import Options

Path = tuple[str, ...]


def remat_modules(model: Any, policy: Any = "full", match: Any = None) -> Any:
    """A model like this one, with its blocks rematerialised; its source is not touched.

    Parameters, their names and values, random numbers, statistics and sown values are
    the model's own. The model that was given stays as it is, and so do programs that
    were compiled from it; use the new one in what is traced from now on.

    Args:
      model: a model of linen without variables (the one whose ``init`` and ``apply``
        are called), or a model of nnx.
      policy: what to keep in each block; see :func:`gradacc_jax.policies.resolve`.
      match: which modules. None: repeated blocks, that is modules which contain others,
        and which stand side by side with the same class and names that differ in a
        number (``layers_0``, ``layers_1``; ``blocks[0]``, ``blocks[1]``), and blocks
        within ``nn.scan``; the outermost of them. A path, such as ``"layers/*"``, in
        which ``*`` stands for anything within one name and ``**`` for any number of
        names. A class. Several of these in a list; or a dict of them to policies, of
        which the first that matches counts.

    Returns:
      A new model, of linen an instance of a subclass of the same name, of nnx a copy
      that shares no variables with ``model``. Its attribute ``rematerialised`` says
      what matched, as a dict of paths to policies (of linen: in the calls so far).
      Memory: the inputs of each block, what the policy keeps, and the inside of one
      block at a time.

    Raises:
      TypeError: for what is no model of Flax.
      ValueError: if nothing matches (linen: when the model is called), or for a linen
        model that is bound to variables.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from gradacc_jax import remat_modules
      >>> class Block(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.linear = nnx.Linear(4, 4, rngs=rngs)
      ...     def __call__(self, x):
      ...         return x + jnp.tanh(self.linear(x))
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.blocks = nnx.List([Block(rngs) for _ in range(3)])
      ...     def __call__(self, x):
      ...         for block in self.blocks:
      ...             x = block(x)
      ...         return x
      >>> model = remat_modules(Model(nnx.Rngs(0)), policy="dots")
      >>> model.rematerialised
      {'blocks/0': dots, 'blocks/1': dots, 'blocks/2': dots}
    """
    kind = None if isinstance(model, type) else framework(model)
    rules = Rules.of(policy, match)
    if kind == "linen":
        from gradacc_jax.checkpointing import linen

        return linen.intercepted(model, rules)
    if kind == "nnx":
        from gradacc_jax.checkpointing import nnx

        return nnx.turned(model, rules)
    raise TypeError(
        f"remat_modules of {model!r}: expected a model of flax.linen or flax.nnx; for "
        "a class or a function use remat"
    )


@dataclasses.dataclass(frozen=True)
class Seen:
    """A module that was found in a model: where, of which class, and how often."""

    path: Path
    cls: type
    repeated: bool = False


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which modules are rematerialised, and how.

    Attributes:
      policy: for repeated blocks, where there are no rules of a user.
      given: pairs of what to match, a path or a class, and a policy.
    """

    policy: Policy
    given: tuple[tuple[str | type, Policy], ...] | None

    @classmethod
    def of(cls, policy: Any, match: Any) -> "Rules":
        own = policies.resolve(policy)
        if match is None:
            return cls(own, None)
        if isinstance(match, dict):
            pairs = [(what, policies.resolve(p)) for what, p in match.items()]
        elif isinstance(match, str | type):
            pairs = [(match, own)]
        else:
            pairs = [(what, own) for what in match]
        for what, _ in pairs:
            if not isinstance(what, str | type):
                raise TypeError(
                    f"match={what!r} is a {type(what).__name__}; expected a path such "
                    'as "layers/*", a class, a list of these, or a dict to policies'
                )
        if not pairs:
            raise ValueError(f"match={match!r} is empty; None matches repeated blocks")
        return cls(own, tuple(pairs))

    def options(self, path: Path, cls: type) -> Options | None:
        """How to rematerialise a module by the rules of the user; None for not."""
        for what, policy in self.given or ():
            if (
                issubclass(cls, what)
                if isinstance(what, type)
                else _matches(tuple(what.split("/")), path)
            ):
                return Options(policy, None, True)
        return None

    def options_of_blocks(self) -> Options:
        """How to rematerialise a repeated block."""
        return Options(self.policy, None, True)

    def check(self, matched: Iterable[Path], seen: Sequence[Seen], model: str) -> None:
        """Raises unless something matched."""
        if tuple(matched):
            return
        paths = ["/".join(s.path) for s in seen if s.path]
        shown = ", ".join(paths[:12]) + (", ..." if len(paths) > 12 else "")
        what = "no repeated blocks"
        near = ""
        if self.given is not None:
            what = f"nothing matches {[what for what, _ in self.given]}"
            written = [what for what, _ in self.given if isinstance(what, str)]
            close = [m for w in written for m in difflib.get_close_matches(w, paths)]
            near = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"remat_modules: {what} in {model}{near}. Its modules: {shown or 'none'}; "
            "give match= a path, with * in it for several, or a class"
        )


def repeated_blocks(seen: Sequence[Seen]) -> list[Path]:
    """The outermost modules that are repeated and contain others.

    Args:
      seen: the modules of a model.

    Returns:
      Their paths, in the order in which they were seen.
    """
    compound = {s.path[:n] for s in seen for n in range(len(s.path))}
    groups: dict[Any, set[Path]] = {}
    for s in seen:
        groups.setdefault(_group(s), set()).add(s.path)
    blocks = [
        s.path
        for s in seen
        if s.path in compound and (s.repeated or len(groups[_group(s)]) > 1)
    ]
    return [
        path
        for path in dict.fromkeys(blocks)
        if not any(path[:n] in blocks for n in range(len(path)))
    ]


def _group(s: Seen) -> Any:
    *parent, name = s.path or ("",)
    numbered = re.sub(r"\d+", "#", name)
    # A name without a number stands for itself.
    return tuple(parent), numbered, s.cls


def _matches(pattern: Path, path: Path) -> bool:
    if not pattern or not path:
        return path == () and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _matches(pattern[1:], path) or _matches(pattern, path[1:])
    return fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(pattern[1:], path[1:])
