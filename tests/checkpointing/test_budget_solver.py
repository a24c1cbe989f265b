"""Save or recompute: the minimum cut against trying everything."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st
import pytest

from gradacc_jax.checkpointing.budget.solve import Choice, Problem, Task, pareto


@st.composite
def problems(draw):
    """A small graph: tasks, what is needed, bytes. Sums of small integers are exact."""
    tasks, values = [], []
    for _ in range(draw(st.integers(1, 7))):
        inputs = draw(st.lists(st.sampled_from(values), max_size=3)) if values else []
        made = range(len(values), len(values) + draw(st.integers(1, 2)))
        cost = draw(st.one_of(st.integers(0, 20), st.just(math.inf)))
        tasks.append(Task(tuple(set(inputs)), tuple(made), cost))
        values += made
    needed = draw(st.sets(st.sampled_from(values), min_size=1, max_size=4))
    nbytes = draw(
        st.lists(st.integers(0, 20), min_size=len(values), max_size=len(values))
    )
    return Problem(tasks, needed, nbytes.__getitem__)


def everything(problem):
    """Every choice that there is."""
    for flags in itertools.product([False, True], repeat=len(problem.tasks)):
        yield problem.running(t for t, again in zip(problem.tasks, flags) if again)


def worth(choice, price):
    return choice.cost + price * choice.nbytes


@given(problems(), st.sampled_from([0.25, 1, 3]))
def test_the_cut_costs_what_the_best_of_all_choices_costs(problem, price):
    best = min(worth(choice, price) for choice in everything(problem))
    # Capacities are rounded to parts in 2**30 of their sum.
    assert worth(problem.solve(price), price) == pytest.approx(best, rel=1e-6)


@given(problems())
def test_no_choice_lies_below_the_frontier(problem):
    corners = problem.frontier()
    assert corners == pareto(corners)
    for few, many in itertools.pairwise(corners):
        price = (few.cost - many.cost) / (many.nbytes - few.nbytes)
        best = min(worth(choice, price) for choice in everything(problem))
        assert worth(few, price) == pytest.approx(best, rel=1e-5)


@given(problems())
def test_what_is_needed_is_saved_or_made_from_what_is_saved(problem):
    for choice in problem.frontier():
        there = set(choice.saved)
        for t, task in problem.tasks.items():
            if t in choice.again:
                assert there.issuperset(task.inputs)
                assert task.cost < math.inf
                there |= set(task.outputs)
        assert there >= problem.needed


def test_a_chain_saves_its_narrowest_value():
    tasks = [Task((), (0,), 5), Task((0,), (1,), 5), Task((1,), (2,), 5)]
    problem = Problem(tasks, {2}, [8, 1, 8].__getitem__)
    assert problem.solve(1).saved == {1}
    assert problem.solve(0.1).saved == {2}
    assert problem.solve(100).saved == frozenset()


def test_a_fixed_policy_saves_its_own_values_where_they_are_needed():
    tasks = [Task((), (0,), 5), Task((0,), (1,), 5), Task((0,), (2,), 5)]
    problem = Problem(tasks, {1}, lambda v: 1)
    assert problem.saving({0, 2}) == Choice(frozenset({0}), frozenset({1}), 1, 5)
    assert problem.saving({1}) == Choice(frozenset({1}), frozenset(), 1, 0)


def test_choices_above_the_frontier_are_there_for_loops():
    problem = Problem(
        [Task((), (0,), 10), Task((), (1,), 5)], {0, 1}, [10, 6].__getitem__
    )
    corners = problem.frontier()
    assert [(c.nbytes, c.cost) for c in corners] == [(0, 15), (10, 5), (16, 0)]
    found = pareto(problem.subsets(corners))
    assert [(c.nbytes, c.cost) for c in found] == [(0, 15), (6, 10), (10, 5), (16, 0)]


@given(problems())
def test_subsets_are_choices_that_are_allowed(problem):
    for choice in problem.subsets(problem.frontier()):
        there = set(choice.saved)
        for t in sorted(choice.again):
            assert there.issuperset(problem.tasks[t].inputs)
            there |= set(problem.tasks[t].outputs)
        assert there >= problem.needed
