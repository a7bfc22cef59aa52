"""Each policy by its name: what it does in a simulation, and which laws it breaks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import engine.check
from engine.check import check
from engine.scheduler import Scheduler, SchedulerConfig
from engine.scheduler.contracts import lifted
from engine.simulate import policies
from engine.simulate.command import Options, simulate
from engine.simulate.cost import CostModel, work_of
from engine.simulate.policies import POLICIES, policy_of
from engine.simulate.simulation import Simulation
from engine.simulate.workload import Request
from spec.check.worlds import SKETCHES
from tests.simulate.test_simulation import Charged, load

ROOT = Path(__file__).resolve().parents[2]
COST = CostModel(step=0.01, prefill_token=1e-4)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    rows = [f"{request.arrival},{request.prompt_tokens},{request.output_tokens}" for request in load(2, 80)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    return str(path)


def seen(trace: str, policy: str, **options: Any) -> dict[str, Any]:
    small = {"gpu_blocks": 40, "swap": 20, "block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 24, "n": 3}
    return simulate(Options(trace=trace, policy=policy, cost_model=COST, **{**small, **options}))[0]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_runs_by_its_name(name: str, trace: str) -> None:
    result = seen(trace, name, swap=1000)
    assert result["outcome"] == {"kind": "finished", "step": None, "error": ""}
    assert result["requests"]["finished"] == 80
    assert (result["preemptions"]["swap"] == 0) == (name == "recompute")
    assert sum(result["preemptions"].values()) > 0
    assert result["config"]["preemption_mode"] == ("recompute" if name == "recompute" else None)
    assert (result["scheduler"] == "engine.scheduler.scheduler:Scheduler") == (name in ("strict", "recompute"))


@pytest.mark.parametrize("name", ["old", "pull-request"])
def test_a_full_swap_area_is_an_outcome_and_names_its_step(name: str, trace: str) -> None:
    result = seen(trace, name)
    assert result["outcome"]["kind"] == "aborted"
    assert result["outcome"]["error"] == "RuntimeError: Aborted due to the lack of CPU swap space"
    assert result["outcome"]["step"] == result["steps"] > 0
    assert result["requests"]["unfinished"] > 0
    assert result["requests"]["arrived"] == result["requests"]["finished"] + result["requests"]["unfinished"]


@pytest.mark.parametrize("name", ["strict", "recompute", "below-half"])
def test_the_others_finish_with_little_swap_and_with_none(name: str, trace: str) -> None:
    for swap in (6, 0):
        assert seen(trace, name, swap=swap)["requests"]["finished"] == 80


def test_the_pull_requests_rule_hangs_behind_half_a_prompt() -> None:
    """The second prompt is thrown out with 6 of its 8 tokens to go; a step has 3, and it would come back only whole."""
    kind, _ = policy_of("pull-request")
    config = SchedulerConfig(
        num_gpu_blocks=10,
        num_cpu_blocks=10,
        block_size=1,
        max_num_batched_tokens=3,
        max_num_seqs=3,
        preemption_mode="swap",
    )
    requests = [Request(0.0, 1, 6), Request(1.0, 8, 2), Request(9.0, 1, 2)]
    with lifted():
        hung = Simulation(kind(config), CostModel(step=1.0)).run(requests)
        strict = Simulation(Scheduler(config), CostModel(step=1.0)).run(requests)
    assert (hung.outcome, hung.finished, hung.arrived) == ("stuck", 1, 3)
    assert hung.outcome_step is not None
    assert (strict.outcome, strict.finished) == ("finished", 3)


@pytest.mark.parametrize("name", POLICIES)
def test_counts_are_those_of_the_plans_whatever_the_policy(name: str) -> None:
    """Queues out of order, several half prompts: what is counted from changes is still what the plan says."""
    kind, mode = policy_of(name)
    expected = []

    class Watched(kind):  # type: ignore[misc,valid-type]
        def schedule(self) -> Any:
            plan = super().schedule()
            expected.append(work_of(plan, self.config.block_size))
            return plan

    config = SchedulerConfig(
        num_gpu_blocks=40,
        num_cpu_blocks=1000,
        block_size=4,
        max_num_batched_tokens=32,
        max_num_seqs=24,
        preemption_mode=mode,
    )
    cost = Charged()
    with lifted():
        Simulation(Watched(config), cost, n=3).run(load(2, 80))  # type: ignore[arg-type]
    assert cost.work == expected
    assert Counter(work.swapped_tokens > 0 for work in expected)[True] > 0 or name == "recompute"


def test_a_softer_rule_serves_newcomers_past_those_who_are_away(trace: str) -> None:
    """With below-half the queues differ from the strict ones, and nobody is lost."""
    soft, strict = seen(trace, "below-half", swap=60), seen(trace, "strict", swap=60)
    assert soft["requests"] == strict["requests"]
    assert soft["queues"]["swapped"]["mean"] > strict["queues"]["swapped"]["mean"]


def test_the_softer_rule_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It breaks S1, and with it the order of the queues (Q2) and the limit that rests on it (S5s); it never aborts."""
    name = "long prompts"
    monkeypatch.setattr(engine.check, "worlds", lambda config: {name: SKETCHES[name].world(config)})
    monkeypatch.setattr(engine.check, "prove_shapes", lambda policy, note: (engine.check.SymbolicReport(), {}))
    kind, _ = policy_of("below-half")
    report = check(kind)
    assert {"S1", "Q2", "S5s"} <= report.broken.keys()
    assert "S8" not in report.broken
    assert ">> step 4" in report.broken["S1"].timeline


def test_a_policy_of_ones_own_is_taken_as_for_check(trace: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("from engine.scheduler import Scheduler\n\nclass Mine(Scheduler):\n    pass\n")
    result = seen(trace, f"{mine}:Mine")
    assert result["scheduler"] == "mine:Mine"
    assert json.dumps(result["latency_s"]) == json.dumps(seen(trace, "strict")["latency_s"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lenient", "must be one of strict, recompute, pull-request, old, below-half, or module:Class"),
        ("no.such:Class", "no.such cannot be imported"),
        ("json:JSONDecoder", "is no scheduler"),
    ],
)
def test_what_is_no_policy_is_explained(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_of(name)


def test_without_the_examples_their_names_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(policies, "EXAMPLES", tmp_path)
    with pytest.raises(ValueError, match="is not there: run from a checkout"):
        policy_of("old")
    assert policy_of("strict") == (Scheduler, None)


def test_the_examples_are_all_named() -> None:
    files = {path.name for path in (ROOT / "examples" / "policies").glob("*.py")} - {"__init__.py"}
    assert {policy.example.partition(":")[0] for policy in POLICIES.values() if policy.example} == files
