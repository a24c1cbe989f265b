"""Linen modules, rematerialised under the names they have.

``nn.remat(MLP)`` makes a class ``CheckpointMLP``, so that a module that names itself
becomes ``CheckpointMLP_0`` and finds no parameters under its old name. Here the
subclass has the name of the original, and random numbers, which go by path, agree.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import linen as nn
from flax.core import lift
from flax.linen import transforms
import jax

from gradacc_jax.checkpointing.arguments import Arguments, Static, is_bound, same_name
from gradacc_jax.checkpointing.modules import Path, Rules, Seen, repeated_blocks
from gradacc_jax.checkpointing.regions import region


def call(
    module: nn.Module,
    fun: Callable[..., Any],
    given: Arguments,
    options: Any,
    where: str,
) -> Any:
    """Calls ``fun(module, ...)`` as a region of the module's variables and arguments.

    Args:
      module: a module with its variables.
      fun: a method of it, or a function of it.
      given: the other arguments.
      options: of ``remat``.
      where: what errors call ``fun``.

    Returns:
      What ``fun`` returns. The variables it changed are changed in ``module``.
    """

    # Flax calls this as a method of a copy of the module. Its own name keeps what goes
    # by a method's name, such as capture_intermediates, from taking the call for two.
    @functools.wraps(fun)
    def rematerialised(module: nn.Module, packed: Any, nodes: Any) -> Any:
        return given.call(functools.partial(fun, module), packed, nodes, where)

    rematerialised.__name__ = "rematerialised"
    del rematerialised.__wrapped__
    if getattr(fun, "method_handler_wrapped", False):
        rematerialised = nn.nowrap(rematerialised)

    def lifted(
        method: Callable[..., Any], scopes: Any, arguments: Any, nodes: Any
    ) -> Any:
        def packed_scopes(
            unpack: Callable[..., Any],
            repack: Callable[..., Any],
            variables: Any,
            rngs: Any,
        ) -> Any:
            def pure(variables: Any, rngs: Any, arguments: Any) -> Any:
                scopes = unpack(variables, rngs)
                result = method(scopes, arguments, nodes)
                return result, repack(scopes)

            inside = region(
                pure, options.policy, prevent_cse=options.prevent_cse, where=where
            )
            return inside(variables, rngs, arguments)

        everything = (True,)
        return lift.pack(packed_scopes, everything, everything, everything)(scopes)

    return transforms.lift_direct_transform(
        lifted, (rematerialised,), module, given.packed, given.nodes
    )


@functools.cache
def subclass(cls: type[nn.Module], options: Any) -> type[nn.Module]:
    """The class with a rematerialised ``__call__``; one for each class and options."""
    if not any("__call__" in vars(base) for base in cls.__mro__):
        raise TypeError(
            f"{cls.__name__} has no __call__; decorate the methods that are called "
            "with @remat"
        )
    original = cls.__call__
    static = Static.of(original, options.static)

    @functools.wraps(original)
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = Arguments(args, kwargs, static, is_bound)
        return call(self, original, given, options, cls.__name__)

    return same_name(cls, {"__call__": nn.nowrap(called)})


def instance(module: nn.Module, options: Any) -> Any:
    """A module with a rematerialised ``__call__``.

    One that has no parent yet becomes another module of the subclass; one that is part
    of another is called where it is.
    """
    if module.scope is None and module.parent is None:
        cls: Any = type(module)
        return copied(module, subclass(cls, options))

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = Arguments(args, kwargs, static, is_bound)
        return call(module, method, given, options, type(module).__name__)

    method = type(module).__call__
    static = Static.of(method, options.static)
    return functools.partial(called, module)


def copied(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """An unbound module with the fields of another, of this class."""
    fields = {
        name: getattr(module, name)
        for name, field in module.__dataclass_fields__.items()
        if field.init and name != "parent" and hasattr(module, name)
    }
    return cls(**fields, parent=None)


def intercepted(model: nn.Module, rules: Rules) -> nn.Module:
    """A model of a subclass of the same name, which calls some modules as regions.

    Its methods run under ``nn.intercept_methods``: the modules that a linen model is
    made of come into being while it is called.
    """
    if model.scope is not None:
        raise ValueError(
            f"remat_modules of {type(model).__name__}, which is bound to variables; "
            "give the model whose init and apply are called"
        )
    cls: Any = type(model)
    matched: dict[str, Any] = {}
    active: list[_Session] = []

    def under_rules(name: str) -> Callable[..., Any]:
        original = getattr(cls, name)

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if active:  # from apply to __call__
                return original(self, *args, **kwargs)
            if rules.given is None and name == "__call__":
                # The blocks are looked for in a trace of the whole model beforehand.
                raise ValueError(
                    f"remat_modules of {cls.__name__} without match= finds repeated "
                    "blocks when its init or apply is called; for a model that is "
                    'bound, or a part of another one, say which: match="Block_*"'
                )
            session = _Session(rules, self.path if self.scope is not None else ())
            active.append(session)
            try:
                if rules.given is None:
                    session.look(functools.partial(original, self, *args, **kwargs))
                with nn.intercept_methods(session.call), session.context():
                    result = original(self, *args, **kwargs)
            finally:
                active.pop()
            rules.check(session.matched, session.seen, cls.__name__)
            for path, options in session.matched.items():
                matched["/".join(path)] = options.policy
            return result

        return nn.nowrap(method)

    entries = ["apply", "init_with_output", "__call__"]
    namespace: dict[str, Any] = {name: under_rules(name) for name in entries}
    namespace["rematerialised"] = property(lambda self: dict(matched))
    return copied(model, same_name(cls, namespace))


class _Session:
    """One call of the model."""

    def __init__(self, rules: Rules, root: Path):
        self.rules = rules
        self.root = root
        self.blocks: list[Path] = []
        self.seen: list[Seen] = []
        self.matched: dict[Path, Any] = {}
        self.entered: list[Path] = []

    def look(self, run: Callable[[], Any]) -> None:
        """Runs the model for its shapes, to see which of its modules are repeated."""

        def shapes() -> None:
            with nn.intercept_methods(self.call):
                run()

        jax.eval_shape(shapes)
        self.blocks = repeated_blocks(self.seen)

    def context(self) -> Any:
        """Gives programs that are cached within, by nn.jit, another key."""
        return _rules_in_use((self.rules, tuple(self.blocks)))

    def call(self, fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if context.method_name != "__call__":
            return fun(*args, **kwargs)
        path = module.path[len(self.root) :]
        options = self.options(path, type(module))
        self.entered.append(path)
        try:
            if options is None:
                return fun(*args, **kwargs)
            self.matched[path] = options
            given = Arguments(args, kwargs, Static(), is_bound)
            method = context.orig_method.func
            return call(module, method, given, options, "/".join(path))
        finally:
            self.entered.pop()

    def options(self, path: Path, cls: type) -> Any:
        """How to rematerialise a module that is called now; None for not."""
        name = path[-1] if path else ""
        # nn.scan(Block) is a ScanBlock by name, and in its loop a Block is called.
        seen = Seen(path, cls, f"Scan{cls.__name__}" in name)
        if seen not in self.seen:
            self.seen.append(seen)
        # Done already: by nn.remat, or by a method that calls that of its base class.
        if not path or path in self.entered or f"Checkpoint{cls.__name__}" in name:
            return None
        if self.rules.given is None:
            return self.rules.options_of_blocks() if path in self.blocks else None
        return self.rules.options(path, cls)


_rules_in_use = jax.make_user_context(default_value=None)
