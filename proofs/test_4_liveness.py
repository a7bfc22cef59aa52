"""Liveness of the production scheduler at small scope: everybody who is accepted leaves, and within a stated bound.

L1 and L2 are checked on every transition by the exploration itself (test_3).  Here the graphs are looked at as a whole:
arrivals never end, so a run could go round for ever; one group is marked and followed, without symmetry.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest

from engine.scheduler import Scheduler
from proofs.mutants import MUTANTS
from proofs.scopes import SMALL, explored, new_group
from spec.check.codec import Codec
from spec.check.explore import explore
from spec.check.liveness import Worst, analyse, arrivals, starved
from spec.laws import steps_bound


class Bound(NamedTuple):
    """Arrivals of a scope: how long the group takes at most, and the bound of law L3."""

    worst: int
    bound: int


@functools.cache
def analysed(name: str) -> tuple[Worst, tuple[Bound, ...]]:
    world = SMALL[name].world
    found = explored(world, graph=True)
    assert found.complete
    assert found.graph is not None
    worst = analyse(found.graph)
    codec = Codec(lambda: Scheduler(world.config), new_group)
    bounds = []
    for state, place in arrivals(found.graph) if worst.lasso is None else ():
        s = codec.restore(found.graph.keys[state])
        groups = [*s.running, *s.swapped, *s.waiting]
        bound = steps_bound(groups[place], groups[:place], world.config.enable_chunked_prefill)
        bounds.append(Bound(worst.at(state, place), bound))
    return worst, tuple(bounds)


@pytest.mark.parametrize("name", SMALL)
def test_no_run_goes_round_for_ever_while_a_group_stays(name: str) -> None:
    worst, _ = analysed(name)
    assert worst.nodes > 0
    assert worst.lasso is None


@pytest.mark.parametrize("name", ["chunked-n2-cpu4", "chunked-n2-swap", "prefill-first-n2-swap"])
def test_no_group_starves(name: str) -> None:
    """The weaker statement, by its own search: no run goes round for ever without serving the marked group."""
    graph = explored(SMALL[name].world, graph=True).graph
    assert graph is not None
    assert starved(graph) is None


@pytest.mark.parametrize("name", SMALL)
def test_every_group_leaves_within_the_bound_of_its_seniors_work(name: str) -> None:
    _, bounds = analysed(name)
    assert bounds
    assert all(one.worst <= one.bound for one in bounds)


def test_the_bound_is_reached_when_a_step_computes_one_token() -> None:
    """Chunked: L3's bound is tight, for one group and for groups behind others."""
    _, bounds = analysed("chunked-one-token-a-step")
    assert any(one.worst == one.bound for one in bounds)
    assert max(one.bound for one in bounds if one.worst == one.bound) >= 9


def test_the_bound_of_prefill_first_is_not_reached_at_these_scopes() -> None:
    """Twice the work is a bound, and not known to be tight: the worst seen is within nine tenths of it."""
    found = [one for name in SMALL if name.startswith("prefill-first") for one in analysed(name)[1]]
    assert 0.5 <= max(one.worst / one.bound for one in found) < 0.9


@pytest.mark.parametrize("mutant", ["NeverSwapsIn", "DecodesNeverOwed", "SmallestFirst", "AdmitsNobody"])
def test_a_planted_fault_that_starves_is_found_as_a_lasso(mutant: str) -> None:
    fault = next(one for one in MUTANTS if one.id == mutant)
    lassos = []
    for name in ("chunked-n2-cpu4", "prefill-first-n2-swap"):
        world = SMALL[name].world
        found = explore(world, lambda w=world: fault.build(w.config), fault.new_group, laws=["L5"], graph=True)
        assert found.complete
        assert found.graph is not None
        lassos.append(starved(found.graph))
    assert any(lassos)
