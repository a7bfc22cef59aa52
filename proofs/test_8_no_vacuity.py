"""No theorem is empty: every law can fail, and is false where some planted fault of the production code leads.

That hypotheses are satisfiable and every phase is reached is shown beside the theorems that need it (test_1, test_3).
"""

from __future__ import annotations

import pytest

from engine.core import EngineCore
from engine.models.oracle import OracleRunner
from engine.sampler import Sampler
from engine.sampling import SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup
from engine.scheduler.blocks import BlockManager
from engine.scheduler.phases import Step
from proofs import caught, killers
from proofs.mutants import ForgetsCopies, NeverSwapsIn
from spec.check.explore import explore
from spec.check.liveness import analyse
from spec.laws import LAWS, Kind, steps_bound

BY_RUNS = {"E1", "L3", "L5"}  # said of whole runs; the tests below


@pytest.mark.parametrize("law", [law for law in LAWS if law.id not in BY_RUNS], ids=str)
def test_a_law_is_false_where_a_planted_fault_leads(law: object) -> None:
    """The table's rows are run again one by one in test_8_mutants."""
    assert any(row.law == law.id and row.method == "search" for row in caught.read())  # type: ignore[attr-defined]


def test_only_laws_about_runs_are_shown_to_fail_here() -> None:
    assert {law.id for law in LAWS if law.id in BY_RUNS} == BY_RUNS
    assert all(law.kind is Kind.TEMPORAL for law in LAWS if law.id in BY_RUNS)


class WorksEveryThirdStep(Scheduler):
    """two steps of three are idle"""

    def _decodes_first(self, step: Step) -> None:
        if self.num_steps % 3 == 0:
            super()._decodes_first(step)


def steps_taken(policy: type[Scheduler]) -> tuple[int, int]:
    """How long a group alone takes, and its bound."""
    s = policy(SchedulerConfig(num_gpu_blocks=8, block_size=2, max_num_batched_tokens=1, max_model_len=16))
    group = s.add(SequenceGroup("a", 5, 1, 4))
    bound, steps = steps_bound(group, []), 0
    while s.has_unfinished():
        s.update(s.schedule())
        steps += 1
    return steps, bound


def test_l3_is_tight_for_the_production_scheduler_and_broken_by_one_that_idles() -> None:
    steps, bound = steps_taken(Scheduler)
    assert steps == bound
    steps, bound = steps_taken(WorksEveryThirdStep)
    assert steps > bound


def test_l5_is_broken_by_a_scheduler_that_never_swaps_in() -> None:
    world = killers.worlds()["swap"]
    for policy, lasso in ((Scheduler, False), (NeverSwapsIn, True)):
        found = explore(world, lambda policy=policy: policy(world.config), SequenceGroup, laws=["L5"], graph=True)
        assert found.graph is not None
        assert (analyse(found.graph).lasso is not None) == lasso


def outputs(blocks: type[BlockManager]) -> list[list[int]]:
    """What the branches of a request say, with the KV of each read where its table points."""
    config = SchedulerConfig(num_gpu_blocks=16, block_size=4, max_model_len=64)
    runner = OracleRunner(64, 16, 0, 4, Sampler(64, frozenset()), num_layers=2)
    core = EngineCore(config, runner, None, vocab_size=64, eos_token_ids=(), seed=0)
    core.scheduler.blocks = blocks(4, 16, 0)
    core.add_request("a", [3, 1, 4, 1, 5], SamplingParams(n=3, max_tokens=6, temperature=1.0, seed=7, ignore_eos=True))
    last = None
    while core.has_unfinished_requests():
        for output in core.step():
            last = output
    assert last is not None
    return [completion.token_ids for completion in last.outputs]


def test_e1_is_broken_by_an_allocator_that_forgets_copies() -> None:
    """The outputs of a request alone, with memory for everything, are the reference; a lost copy changes them."""
    assert outputs(BlockManager) == outputs(BlockManager)
    assert outputs(ForgetsCopies) != outputs(BlockManager)
