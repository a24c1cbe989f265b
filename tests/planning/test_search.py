"""The search by itself: what it finds, against trying everything."""

import dataclasses
import math
import time

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import pytest

from gradacc_jax import chips
from gradacc_jax.planning.compile import Built, MemoryEstimate, Traced
from gradacc_jax.planning.costs import Cost
from gradacc_jax.planning.report import ACROSS_CALLS, ONE_CALL
from gradacc_jax.planning.search import (
    PLATEAU,
    Made,
    OutOfTimeError,
    Search,
    Split,
    Variant,
    divisors,
)

HELD, SUMS = 1000, 300  # bytes that every step is given; those of the accumulator


class Stage:
    out_info = jax.ShapeDtypeStruct((), jnp.float32)


@dataclasses.dataclass
class Target:
    """A compiler for programs that are their own description."""

    chip = chips()["v4"]  # whose quick programs would be compiled again
    is_here: bool = True
    compiled: list = dataclasses.field(default_factory=list)

    def trace(self, fun, args, donate_argnums=(), emit=None):
        size, k, policy = fun
        work = k * (size + policy["each"]) * policy["slow"]
        work /= k if policy["name"] == "across" else 1  # of one call
        return Traced((fun, Stage), Cost(seconds=work), 1)

    def compile(self, traced, *, quick=False):
        (size, k, policy), _ = traced.stage
        self.compiled.append((size, k, policy["name"]))
        temporaries = policy["base"] + policy["slope"] * size + SUMS * (k > 1)
        memory = MemoryEstimate(
            HELD, HELD, HELD, temporaries, HELD + temporaries, flops=0.0
        )
        return Built(memory, (size, k), {})


class Traces(Target):
    def trace(self, fun, args, donate_argnums=(), emit=None):
        traced = super().trace(fun, args, donate_argnums)
        stage = type("Stage", (), {"out_info": Stage.out_info, "fun": fun})
        return dataclasses.replace(traced, stage=stage)

    def compile(self, traced, *, quick=False):
        return super().compile(
            dataclasses.replace(traced, stage=(traced.stage.fun, None)), quick=quick
        )


def variant(policy, form=ONE_CALL, name=None):
    name = name or policy["name"]
    return Variant(name, form, lambda m, k: Made((m, k, policy), ()))


def policy(name, slope, slow, base=0, each=1.0):
    return {"name": name, "slope": slope, "slow": slow, "base": base, "each": each}


NONE, DOTS, FULL = (
    policy("none", 100, 1.0),
    policy("dots", 50, 1.1),
    policy("full", 10, 1.3),
)


def search(limit, total, policies, **options):
    target = Traces()
    found = Search(target, limit, divisors(total), **options)
    best, candidates = found.run([variant(p) for p in policies])
    return best, candidates, found, target


def seconds(target, p, split):
    return target.trace((split.size, split.k, p), ()).cost.seconds


@given(
    total=st.integers(1, 720),
    room=st.integers(10, 4000),
    slopes=st.tuples(*[st.integers(1, 200)] * 3),
    slow=st.tuples(*[st.floats(1.0, 2.0)] * 3),
    bases=st.tuples(*[st.integers(0, 500)] * 3),
    each=st.floats(0.0, 20.0),
)
def test_what_is_found_fits_and_is_as_fast_as_the_best_of_all(
    total, room, slopes, slow, bases, each
):
    policies = [
        policy(name, a, b, c, each)
        for name, a, b, c in zip(("none", "dots", "full"), slopes, slow, bases)
    ]
    limit = HELD + room
    splits = divisors(total)
    target = Target()

    def need(p, split):
        return HELD + p["base"] + p["slope"] * split.size + SUMS * (split.k > 1)

    fitting = [(p, s) for p in policies for s in splits if need(p, s) <= limit]
    if not fitting:
        least = min(need(p, s) for p in policies for s in (splits[0], splits[-1]))
        with pytest.raises(ValueError, match="nothing fits") as error:
            search(limit, total, policies)
        assert f"is {least} bytes" in str(error.value)
        return
    best, candidates, found, target = search(limit, total, policies)
    assert best.memory.peak <= limit
    assert best.split.size * best.split.k == total
    assert candidates[0].verdict == "chosen"
    assert best.program == tuple(best.split)  # it was itself compiled
    parts = [(p, s) for p, s in fitting if s.k > 1]
    if parts:
        fastest = min(seconds(target, p, s) for p, s in parts)
        # Two plateaus at most: that of the policy, and that of another policy.
        assert best.cost.seconds <= PLATEAU**2 * fastest * (1 + 1e-6) + 1e-3
    # Each program once, and few of them.
    assert len(set(target.compiled)) == len(target.compiled) == found.compiles
    assert found.compiles <= 3 * (3 + math.ceil(math.log2(len(splits) + 1)) * 2)


def test_the_same_question_has_the_same_answer():
    answers = [search(HELD + 1700, 360, (NONE, DOTS, FULL)) for _ in range(2)]
    assert answers[0][1] == answers[1][1]
    assert answers[0][3].compiled == answers[1][3].compiled


def test_a_smaller_micro_batch_on_the_plateau_is_taken_before_the_largest():
    p = policy("none", 10, 1.0, each=0.1)
    best, _, found, _ = search(HELD + SUMS + 330, 64, [p])
    # 0.1 in 8 is 1.25 % more than nothing; 0.1 in 4 is 2.5 %. Micro-batches of 32 fit.
    assert best.split == Split(8, 8)
    assert found.compiles <= 2  # perhaps the whole batch, which does not fit


def test_the_whole_batch_in_one_pass_is_found_where_sums_make_all_parts_too_large():
    p = policy("none", 1, 1.0)
    best, *_ = search(HELD + 100, 8, [p])
    assert best.split == Split(8, 1)


def test_a_policy_that_cannot_be_faster_is_not_compiled():
    _, candidates, _, target = search(10**9, 64, (NONE, DOTS, FULL))
    assert {name for *_, name in target.compiled} == {"none"}
    verdicts = {c.policy: c.verdict for c in candidates if c.memory is None}
    assert verdicts == dict.fromkeys(
        ("dots", "full"), "not compiled: no faster at its best"
    )


def test_a_policy_that_keeps_less_wins_where_larger_micro_batches_pay():
    # Each micro-batch costs as much as 20 examples.
    none, full = policy("none", 100, 1.0, each=20), policy("full", 12, 1.3, each=20)
    best, candidates, *_ = search(HELD + SUMS + 400, 64, (none, full))
    assert (best.variant.policy, best.split) == ("full", Split(32, 2))
    others = [c.verdict for c in candidates if c.policy == "none" and c.memory]
    assert any("x as long" in verdict for verdict in others)


def test_too_little_memory_is_an_error_that_names_the_smallest_need_in_bytes():
    with pytest.raises(ValueError, match=r"nothing fits into 1050 bytes") as error:
        search(HELD + 50, 64, (NONE, DOTS, FULL))
    smallest = HELD + SUMS + 10
    assert f"micro-batch 1 with policy 'full', is {smallest} bytes" in str(error.value)


def test_unequal_micro_batches_are_tried_where_the_next_divisor_is_far():
    p = policy("none", 10, 1.0, each=20)
    limit = HELD + SUMS + 400
    best, *_ = search(limit, 101, [p])  # a prime number of examples
    assert best.split == Split(1, 101)
    best, _, found, _ = search(limit, 101, [p], ragged=101)
    assert best.split == Split(34, 3)  # 34, 34, 33
    assert best.memory.peak <= limit
    assert found.compiles <= 5


def test_the_other_form_is_taken_where_it_allows_larger_micro_batches():
    inside = policy("none", 20, 1.0, each=20)
    across = policy("across", 10, 1.0, each=20)
    target = Traces()
    found = Search(target, HELD + SUMS + 330, divisors(64))
    best, _ = found.run([variant(inside), variant(across, ACROSS_CALLS, "none")])
    assert best.variant.form == ACROSS_CALLS
    assert best.split == Split(32, 2)


def test_a_compiler_that_refuses_a_program_has_answered():
    class Refuses(Traces):
        def compile(self, traced, *, quick=False):
            built = super().compile(traced, quick=quick)
            if built.memory.peak <= HELD + 1500:
                return built
            memory = dataclasses.replace(built.memory, refused="Ran out of memory")
            return dataclasses.replace(built, memory=memory, program=None)

    found = Search(Refuses(), 10**9, divisors(64))
    best, candidates = found.run([variant(NONE)])
    assert best.split == Split(8, 8)
    assert "does not fit: the compiler refuses it" in {c.verdict for c in candidates}


def test_a_quick_program_is_compiled_again_in_full_and_may_then_lose():
    class Worse(Traces):
        def compile(self, traced, *, quick=False):
            built = super().compile(traced, quick=quick)
            if quick:
                return built
            more = built.memory.peak + 500 * (traced.stage.fun[0] == 8)
            return dataclasses.replace(
                built, memory=dataclasses.replace(built.memory, peak=more)
            )

    target = Worse(is_here=False)
    p = policy("none", 100, 1.0)
    best, candidates = Search(target, HELD + SUMS + 900, divisors(64)).run([variant(p)])
    assert best.split != Split(8, 8)
    assert best.memory.peak <= HELD + SUMS + 900
    verdicts = {c.microbatch_size: c.verdict for c in candidates if c.memory}
    assert verdicts[8].startswith("does not fit")


def test_when_the_time_is_over_the_best_so_far_is_taken(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    target = Traces()
    none = policy("none", 100, 1.0, each=20)
    found = Search(target, HELD + SUMS + 900, divisors(64), time_budget=2.5)
    best, _ = found.run([variant(none)])
    assert found.compiles == 2
    assert best.memory.peak <= found.limit
    assert "the time budget was spent" in found.notes[0]
    found = Search(Traces(), HELD + SUMS + 900, divisors(64), time_budget=-1)
    with pytest.raises(OutOfTimeError, match="give more time"):
        found.run([variant(none)])


def test_progress_is_told_after_each_compilation():
    lines = []
    _, _, found, _ = search(HELD + 1700, 64, (NONE, FULL), progress=lines.append)
    assert len(lines) == found.compiles
    assert all("fits" in line or "does not fit" in line for line in lines)
