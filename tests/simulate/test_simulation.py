"""The simulated clock: tiny traces reckoned by hand, and counts checked against the plans' logs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.scheduler import Plan, Scheduler, SchedulerConfig
from engine.scheduler.contracts import lifted
from engine.scheduler.trace import TraceWriter
from engine.simulate.cost import CostModel, Work, work_of
from engine.simulate.simulation import Simulation
from engine.simulate.tally import Tally, quantile
from engine.simulate.timeline import BUCKETS, Timeline
from engine.simulate.workload import Request
from engine.stats import EngineStats
from spec.check.trace import audit

SECOND = CostModel(step=1.0)  # every step takes one


def run(requests: list[tuple[float, int, int]], cost: CostModel = SECOND, n: int = 1, **config: Any) -> Tally:
    scheduler = Scheduler(SchedulerConfig(**{"num_gpu_blocks": 64, "block_size": 4, **config}))
    return Simulation(scheduler, cost, n=n).run([Request(*request) for request in requests])


def times(tally: Tally, *names: str) -> list[list[float]]:
    return [list(getattr(tally, name)) for name in names]


# by hand.  Costs are powers of two, so the sums are exact.


def test_one_request_alone() -> None:
    """Arrives at 2: its prompt takes the step to 3, and two more tokens one step each."""
    seen = run([(2.0, 8, 3)])
    assert times(seen, "ttft", "tpot", "e2e", "queue") == [[1.0], [1.0], [3.0], [0.0]]
    assert (seen.steps, seen.seconds, seen.prompt_tokens, seen.generated_tokens) == (3, 3.0, 8, 3)
    assert seen.outcome == "finished"


def test_every_cost_is_charged_for_its_own_work() -> None:
    """Prompt of 8 and 3 tokens: the decodes read 9 and 10 tokens of KV; the prompt makes 8 * 9 / 2 = 36 pairs."""
    requests = [(0.0, 8, 3)]
    for cost, first, last in (
        (CostModel(prefill_token=1.0), 8.0, 8.0),
        (CostModel(decode_token=1.0), 0.0, 2.0),
        (CostModel(prefill_pair=1.0), 36.0, 36.0),
        (CostModel(decode_kv=1.0), 0.0, 19.0),
    ):
        assert times(run(requests, cost), "ttft", "e2e") == [[first], [last]]


def test_a_prompt_in_pieces() -> None:
    """Ten tokens in steps of at most four: the first token comes with the third.  Pairs are those of the whole."""
    seen = run([(0.0, 10, 1)], max_num_batched_tokens=4)
    assert times(seen, "ttft", "e2e", "tpot") == [[3.0], [3.0], []]
    assert times(run([(0.0, 10, 1)], CostModel(prefill_pair=1.0), max_num_batched_tokens=4), "e2e") == [[55.0]]


def test_a_request_that_comes_during_a_step_waits_for_its_end() -> None:
    """The second comes at 0.5, is computed from 1 to 2 beside the first one's decode, and ends at 3."""
    seen = run([(0.0, 4, 4), (0.5, 4, 2)])
    assert times(seen, "ttft", "queue") == [[1.0, 1.5], [0.0, 0.5]]
    assert sorted(seen.e2e) == [2.5, 4.0]
    assert seen.steps == 4


def test_time_goes_on_while_there_is_nothing_to_do() -> None:
    seen = run([(0.0, 4, 1), (100.0, 4, 1)])
    assert times(seen, "ttft", "e2e") == [[1.0, 1.0], [1.0, 1.0]]
    assert seen.seconds == 101.0
    assert seen.timeline.busy == 2.0


def test_a_preemption_by_recompute() -> None:
    """Four blocks of four, two prompts of eight, eight tokens each.

    Step 1 computes both prompts.  In step 2 the first needs a third block: the second loses its own, and is computed
    again (9 tokens, of which 8 were) in step 9, when the first has left with step 8.  It draws its tokens 2 to 8 in
    steps 9 to 15.
    """
    seen = run([(0.0, 8, 8), (0.0, 8, 8)], num_gpu_blocks=4)
    assert times(seen, "ttft", "e2e", "stall", "queue") == [[1.0, 1.0], [8.0, 15.0], [8.0], [0.0, 0.0]]
    assert list(seen.tpot) == [1.0, 2.0]
    assert (seen.steps, seen.recomputed_tokens, seen.prompt_tokens, seen.generated_tokens) == (15, 8, 16, 16)
    assert (seen.actions["preempt:recompute"], seen.actions["preempt:swap"]) == (1, 0)


def test_a_preemption_by_swap() -> None:
    """The same by swap: two blocks go out in step 2 and come back in step 9; nothing is computed again."""
    config = {"num_gpu_blocks": 4, "num_cpu_blocks": 2, "preemption_mode": "swap"}
    seen = run([(0.0, 8, 8), (0.0, 8, 8)], **config)
    assert times(seen, "e2e", "stall") == [[8.0, 15.0], [8.0]]
    assert (seen.steps, seen.recomputed_tokens, seen.blocks_swapped_out, seen.blocks_swapped_in) == (15, 0, 2, 2)
    assert seen.timeline.peak("cpu_blocks_used") == 2
    moved = run([(0.0, 8, 8), (0.0, 8, 8)], CostModel(step=1.0, swapped_token=0.25), **config)
    assert times(moved, "e2e") == [[10.0, 19.0]]  # eight tokens each way, two seconds each
    reads = run([(0.0, 8, 8), (0.0, 8, 8)], CostModel(decode_kv=1.0), **config)
    alone = sum(range(9, 16))
    assert times(reads, "e2e") == [[alone, 2 * alone]]  # each decodes alone


def test_branches_are_counted_each() -> None:
    """Two branches: one prompt, then two tokens a step, which read 2 * 5 and 2 * 6 tokens of KV."""
    seen = run([(0.0, 4, 3)], n=2)
    assert (seen.steps, seen.prompt_tokens, seen.generated_tokens, seen.decode_tokens) == (3, 4, 6, 4)
    assert times(run([(0.0, 4, 3)], CostModel(decode_kv=1.0), n=2), "e2e") == [[22.0]]
    assert seen.actions["fork"] == 1


def test_whole_prompts_first() -> None:
    """A newcomer's prompt takes a step of its own, in which nobody streams."""
    seen = run([(0.0, 4, 4), (0.5, 4, 2)], enable_chunked_prefill=False, max_model_len=64)
    assert times(seen, "ttft") == [[1.0, 1.5]]
    assert sorted(seen.e2e) == [2.5, 5.0]
    reads = run(
        [(0.0, 4, 4), (0.5, 4, 2)],
        CostModel(step=1.0, decode_kv=1.0),
        enable_chunked_prefill=False,
        max_model_len=64,
    )
    assert reads.seconds == 5 + (5 + 5) + 6 + 7  # both read 5 in the third step


def test_refused_requests_are_counted_by_reason_and_the_others_run() -> None:
    seen = run(
        [(0.0, 8, 2), (0.0, 0, 5), (0.0, 5, 0), (0.0, 64, 5), (0.0, 30, 60), (1.0, 8, 2)],
        num_gpu_blocks=8,
        max_model_len=50,
    )
    assert seen.refused == {"empty_prompt": 1, "max_tokens": 1, "max_model_len": 1, "num_gpu_blocks": 1}
    assert (seen.arrived, seen.finished, seen.outcome) == (6, 2, "finished")
    assert seen.summary()["requests"]["unfinished"] == 0
    short = run([(0.0, 8, 100)], max_model_len=20)
    assert (short.shortened, short.generated_tokens) == (1, 12)


def test_no_requests_at_all() -> None:
    seen = run([])
    summary = seen.summary()
    assert summary["latency_s"]["ttft"] == {
        "count": 0,
        "mean": None,
        "p50": None,
        "p90": None,
        "p99": None,
        "max": None,
    }
    assert (summary["steps"], summary["seconds"], summary["busy"]) == (0, 0.0, 0.0)


# policies that come to no good end


class Idle(Scheduler):
    """Admits nobody after the first step."""

    def _admit(self, step: Any) -> None:
        if self.num_steps == 0:
            super()._admit(step)


def test_a_policy_that_does_nothing_for_ever_is_stuck() -> None:
    with lifted():
        requests = [Request(0.0, 4, 2), Request(0.5, 4, 2), Request(1e9, 4, 2)]
        seen = Simulation(Idle(SchedulerConfig(num_gpu_blocks=8)), SECOND).run(requests)
    assert (seen.outcome, seen.outcome_step, seen.finished) == ("stuck", 2, 1)
    assert seen.summary()["requests"]["unfinished"] == 1


class Broken(Scheduler):
    """Raises in its third step."""

    def schedule(self) -> Plan:
        if self.num_steps == 2:
            raise RuntimeError("no more")
        return super().schedule()


def test_a_policy_that_raises_ends_the_run_and_not_the_program() -> None:
    seen = Simulation(Broken(SchedulerConfig(num_gpu_blocks=8)), SECOND).run([Request(0.0, 4, 9)])
    assert (seen.outcome, seen.outcome_step, seen.error) == ("aborted", 2, "RuntimeError: no more")
    assert (seen.steps, seen.seconds) == (2, 2.0)


def test_a_run_is_cut_off_at_its_most_steps() -> None:
    scheduler = Scheduler(SchedulerConfig(num_gpu_blocks=8))
    seen = Simulation(scheduler, SECOND, max_steps=3).run([Request(0.0, 4, 9)])
    assert (seen.outcome, seen.outcome_step, seen.steps) == ("cut off", 3, 3)


# counts against the plans themselves


class Watched(Scheduler):
    """Keeps the work and the statistics of all its plans, counted group by group."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.work: list[Work] = []
        self.stats = EngineStats(config)
        self.verbs: Counter[str] = Counter()

    def schedule(self) -> Plan:
        plan = super().schedule()
        self.work.append(work_of(plan, self.config.block_size))
        self.stats.on_plan(plan)
        return plan

    def update(self, plan: Plan, *rest: Any) -> Any:
        departed = super().update(plan, *rest)
        self.stats.on_update(plan, 0)
        self.verbs.update(action.verb for action in plan.log)
        return departed


class Charged:
    """A cost model that remembers what it was asked."""

    def __init__(self) -> None:
        self.work: list[Work] = []

    def seconds(self, work: Work) -> float:
        self.work.append(work)
        return 1e-3 * (1 + work.prefill_tokens + work.decode_tokens)


SMALL = SchedulerConfig(num_gpu_blocks=40, num_cpu_blocks=20, block_size=4, max_num_batched_tokens=32, max_num_seqs=24)
CONFIGS = {
    "default": SMALL,
    "swap": replace(SMALL, preemption_mode="swap"),
    "recompute": replace(SMALL, preemption_mode="recompute"),
    "little swap": replace(SMALL, preemption_mode="swap", num_cpu_blocks=6),
    "watermark": replace(SMALL, watermark_blocks=4),
    "whole prompts first": replace(
        SMALL, enable_chunked_prefill=False, max_num_batched_tokens=64, max_model_len=64, preemption_mode="swap"
    ),
}


def load(seed: int = 0, count: int = 60) -> list[Request]:
    rng = random.Random(seed)
    moments = sorted(rng.uniform(0, 2) for _ in range(count))
    return [Request(moment, rng.randint(1, 40), rng.randint(1, 20)) for moment in moments]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_counts_are_those_of_the_plans(name: str, n: int) -> None:
    scheduler, cost = Watched(CONFIGS[name]), Charged()
    seen = Simulation(scheduler, cost, n=n).run(load())  # type: ignore[arg-type]
    assert seen.outcome == "finished"
    assert cost.work == scheduler.work, "what is counted from changes is what the plan says"
    stats = scheduler.stats
    assert seen.steps == stats.steps
    assert seen.prompt_tokens == stats.prompt_tokens
    assert seen.recomputed_tokens == stats.recomputed_tokens
    assert (seen.blocks_swapped_out, seen.blocks_swapped_in) == (stats.blocks_swapped_out, stats.blocks_swapped_in)
    assert seen.blocks_copied == stats.blocks_copied
    assert dict(seen.actions) == dict(stats.actions)
    assert seen.actions["finish"] == seen.finished == len(seen.e2e)
    assert seen.generated_tokens == n * sum(request.output_tokens for request in load())
    assert seen.preemptions > 0
    assert len(seen.stall) <= seen.preemptions


@pytest.mark.parametrize("name", CONFIGS)
def test_a_simulated_run_is_lawful_and_says_the_same(name: str, tmp_path: Path) -> None:
    scheduler = Scheduler(CONFIGS[name])
    record = TraceWriter(scheduler, tmp_path / "trace")
    seen = Simulation(scheduler, SECOND, n=2).run(load(1, 30))
    record.close()
    audited = audit(tmp_path / "trace")
    assert audited.lawful, audited.findings
    assert (audited.steps, audited.groups) == (seen.steps, seen.arrived)
    verbs = Counter({verb: count for verb, count in seen.actions.items() if not verb.startswith("preempt:")})
    verbs["preempt"] = seen.preemptions
    assert {verb: count for verb, count in audited.verbs.items() if count} == {v: c for v, c in verbs.items() if c}


def test_equal_inputs_give_equal_results() -> None:
    def once() -> dict[str, Any]:
        return Simulation(Scheduler(SMALL), CostModel(step=0.01, decode_kv=1e-5), n=2).run(load()).summary()

    assert once() == once()


# the parts


def test_quantiles_are_those_of_numpy() -> None:
    import numpy as np

    rng = random.Random(0)
    values = sorted(rng.random() for _ in range(101))
    for part in (0, 0.5, 0.9, 0.99, 1):
        assert quantile(values, part) == pytest.approx(np.quantile(values, part))
    assert quantile([3.0], 0.99) == 3.0


def test_the_timeline_keeps_its_sums_when_it_widens() -> None:
    from engine.scheduler import QueueCounts

    timeline = Timeline(width=0.5)
    timeline.begin(10.0)
    for step in range(5000):
        timeline.add(10.0 + 2 * step, 1.0, QueueCounts(step % 3, 0, 1, 4, 0))
    points = timeline.points()
    assert len(points) <= BUCKETS
    assert timeline.busy == 5000
    assert timeline.mean("waiting") == 1
    assert timeline.peak("running") == 2
    total = sum(point.values[2] for point in points) * timeline.width
    assert total == pytest.approx(5000)
    assert points[0].at == 10.0
    assert points[3].values[3] == pytest.approx(2.0)  # half of the time idle
