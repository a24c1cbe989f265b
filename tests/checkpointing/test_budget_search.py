"""Which plans are compiled, and which one is taken."""

import pytest

from gradacc_jax.checkpointing.budget.combining import frontier
from gradacc_jax.checkpointing.budget.plans import Plan, Plans
from gradacc_jax.checkpointing.budget.programs import Program
from gradacc_jax.checkpointing.budget.search import Search

PROGRAM = Program((), (), 0, ())


def plan(kind, peak, cost):
    return Plan(PROGRAM, kind, (), (), float(peak), 0.0, float(cost))


def plans_of(*cuts):
    """Plans of several cuts, each of pairs of predicted bytes and seconds."""
    made = [[plan(i, *p) for p in cut] for i, cut in enumerate(cuts)]
    return Plans(frontier([p for cut in made for p in cut], turns=1), made, {})


def fit(plans, budget, needs, max_compiles=10):
    """The best trial; ``needs`` says the bytes of a plan. Also what was compiled."""
    compiled = []

    def measure(p):
        compiled.append(p)
        return needs(p)

    best, compiles = Search(plans, seconds=100.0).fit(
        measure, budget, max_compiles, lambda _: None
    )
    assert compiles == len(compiled)
    return best, compiled


LINE = [(100 + 50 * i, 40 - 2 * i) for i in range(21)]  # 100 for 40 s ... 1100 for 0 s


def test_exact_predictions_need_two_compilations():
    best, compiled = fit(plans_of(LINE), 605, lambda p: p.peak)
    assert (best.plan.peak, len(compiled)) == (600, 2)


def test_what_fits_as_it_is_needs_one():
    best, compiled = fit(plans_of(LINE), 1100, lambda p: p.peak)
    assert (best.plan.cost, len(compiled)) == (0, 1)


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.25, 2.0])
@pytest.mark.parametrize("offset", [-50, 0, 300])
def test_predictions_are_corrected_by_what_was_compiled(factor, offset):
    def needs(p):
        return factor * p.peak + offset

    budget = (needs(plan(0, 100, 0)) + needs(plan(0, 1100, 0))) / 2
    best, compiled = fit(plans_of(LINE), budget, needs)
    assert best.plan.peak >= 550
    assert len(compiled) <= 6


def test_a_cut_that_needs_less_than_it_seems_is_found_where_it_spares_time():
    line = [(100 + 10 * i, 40 - 0.4 * i) for i in range(101)]
    other = [(peak + 12, cost) for peak, cost in line]

    def needs(p):
        return p.peak - 150 * p.kind

    best, compiled = fit(plans_of(line, other), 900, needs)
    # By predictions alone 900 bytes would do for the plan of 8 s.
    assert (best.plan.kind, best.nbytes) == (1, 892)
    assert best.plan.cost == pytest.approx(2.8)
    assert len(compiled) <= 8


def test_no_more_is_compiled_where_there_is_too_little_to_spare():
    near = [(peak + 5, cost - 0.5) for peak, cost in LINE[:-1]]
    plans = plans_of(LINE, [*near, (1105, 0)])
    best, compiled = fit(plans, 602, lambda p: p.peak)
    assert (best.plan.cost, len(compiled)) == (20, 2)


def test_the_smallest_of_several_cuts_are_compiled_before_a_budget_is_given_up():
    cuts = [[(peak, 40), (1000, 0)] for peak in (100, 110, 120, 130)]
    small = {100: 400, 110: 410, 120: 300, 130: 150}

    def needs(p):
        return small.get(p.peak, p.peak)

    best, compiled = fit(plans_of(*cuts), 200, needs)
    assert (best.plan.peak, best.nbytes) == (130, 150)
    best, compiled = fit(plans_of(*cuts), 100, needs)
    assert best is None
    assert len(compiled) <= 7


def test_it_stops_at_the_number_of_compilations():
    best, compiled = fit(plans_of(LINE), 620, lambda p: 3 * p.peak, max_compiles=1)
    assert best is None
    assert len(compiled) == 1


def test_another_budget_begins_with_what_is_known():
    search = Search(plans_of(LINE), seconds=100.0)
    counts = []
    for budget in (900, 620, 900, 620):
        best, compiles = search.fit(lambda p: p.peak, budget, 10, lambda _: None)
        counts.append(compiles)
        assert best.nbytes <= budget
    assert counts[2:] == [0, 0]


def test_a_program_that_does_not_compile_needs_more_than_any_budget():
    def needs(p):
        return float("inf") if p.peak > 500 else p.peak

    best, _ = fit(plans_of(LINE), 700, needs)
    assert best.nbytes == best.plan.peak == 500
