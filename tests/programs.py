"""What a compiled program holds: counts that repeat exactly, unlike times."""

import dataclasses
import math
import re

import jax

_INSTRUCTION = re.compile(r"%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"[a-z]\w*\[([\d,]*)\]")
_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-to-all|all-gather|reduce-scatter|collective-permute)"
    r"(?:-start)?\("
)
# What moves no data.
_FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant"}


@dataclasses.dataclass(frozen=True)
class Program:
    """Figures of one compiled program.

    Attributes:
      temporaries: bytes that live neither in arguments nor in results.
      aliased: bytes of results that are written into donated arguments.
      flops: by XLA's count, of all branches of its conditionals together.
      accessed: bytes read and written, by XLA's count.
      text: the optimised HLO.
    """

    temporaries: int
    aliased: int
    flops: float
    accessed: float
    text: str

    @property
    def conditionals(self):
        return sum(name == "conditional" for name, _ in _instructions(self.text))

    def copies(self, size):
        """How many instructions copy an array of ``size`` elements or more."""
        return sum(
            name.startswith("copy") and elements >= size
            for name, elements in _instructions(self.text)
        )

    def outermost(self, size):
        """What makes arrays of ``size`` elements or more in no branch and no loop."""
        _, entry = self.text.split("\nENTRY ")
        return [
            name
            for name, elements in _instructions(entry)
            if elements >= size and name not in _FREE
        ]

    def collectives(self, size=1):
        """The collectives over arrays of ``size`` numbers or more in all, by name."""
        return collectives_in(self.text, size)


def collectives_in(text, size=1):
    """See :meth:`Program.collectives`."""
    found = []
    for line in text.splitlines():
        one = _COLLECTIVE.search(line)
        if one and sum(map(_elements, _SHAPE.findall(one[1]))) >= size:
            found.append(one[2])
    return sorted(found)


def _instructions(text):
    for line in text.splitlines():
        found = _INSTRUCTION.search(line)
        if found:
            shapes = _SHAPE.findall(found[1])
            yield found[2], max(map(_elements, shapes), default=0)


def _elements(dimensions):
    return math.prod(int(d) for d in dimensions.split(",") if d)


def compiled(function, *args, donate=(), **kwargs):
    """``function``, jitted on ``args``, as a :class:`Program`."""
    function = jax.jit(function, donate_argnums=donate)
    return program(function.lower(*args, **kwargs))


def program(lowered):
    """A lowered program, compiled, as a :class:`Program`."""
    executable = lowered.compile()
    memory, cost = executable.memory_analysis(), executable.cost_analysis()
    return Program(
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        flops=cost["flops"],
        accessed=cost["bytes accessed"],
        text=executable.as_text(),
    )


def num_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
