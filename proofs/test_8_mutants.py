"""Planted faults: each is caught by a law, by search or by symbolic proof, where the table in proofs/mutants.md says.

And the generated mutants of `make mutants`: those listed as equivalent still exist, with a reason each.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proofs import caught, killers, mutate
from proofs.mutations import everything, mutated

ROWS = caught.read()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.fault}-{row.law}".replace(" (symbolic)", "-symbolic"))
def test_a_planted_fault_is_caught_where_the_table_says(row: caught.Catch) -> None:
    if row.method == "search":
        assert caught.by_search(row.fault, row.law, row.where) == row
    else:
        assert caught.by_proof(row.fault, row.law) == row


def test_the_table_shows_every_planted_fault() -> None:
    """Stale: run python -m proofs.caught."""
    assert {row.fault for row in ROWS} == {*caught.FAULTS, *caught.SYMBOLIC}
    searched = {(one.id, law) for one in caught.FAULTS.values() for law in one.breaks}
    assert searched == {(row.fault, row.law) for row in ROWS if row.method == "search"}
    text = (mutate.ROOT / caught.DOCUMENT).read_text(encoding="utf-8")
    assert text == caught.HEAD + "\n".join(map(str, ROWS)) + "\n"


def test_there_are_at_least_sixty_planted_faults() -> None:
    assert len(caught.FAULTS) >= 60
    planted = caught.FAULTS.values()
    for role, production in (("scheduler", "Scheduler"), ("blocks", "BlockManager"), ("group", "SequenceGroup")):
        assert sum(getattr(one, role).__name__ != production for one in planted) >= 5


@pytest.mark.parametrize("stage", [killers.stage_soak, killers.stage_laws], ids=["soak", "laws"])
def test_the_production_scheduler_survives_what_kills_its_mutants(stage: Callable[[], None]) -> None:
    """So a change that one of these stages of `make mutants` notices fails here too; the others are tests already."""
    stage()


def test_every_mutant_listed_as_equivalent_exists_and_has_a_reason() -> None:
    listed = mutate.explained()
    there = {one.id for one in everything()}
    assert set(listed) <= there, f"gone: {sorted(set(listed) - there)}"
    assert all(len(reason) >= 15 for reason in listed.values())


def test_generated_mutants_are_many_different_and_compile() -> None:
    mutants = everything()
    assert len(mutants) > 1500
    assert len({one.id for one in mutants}) == len(mutants)
    for one in mutants[::40]:
        compile(mutated(one), one.module, "exec")
