"""Cost models: presets, files, pairs on the command line, and the fit."""

from __future__ import annotations

import json
import os
import random
from itertools import count
from pathlib import Path

import pytest

from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup
from engine.scheduler.contracts import lifted
from engine.simulate.cost import COSTS, CostModel, Work, load_cost, presets, work_of
from engine.simulate.fit import CLOCKS, COLUMNS, LEAST_STEPS, LOADS, POOL, Step, check_clock, fit, measure

TRUE = CostModel(
    step=0.01, prefill_token=1e-4, decode_token=5e-4, prefill_pair=1e-8, decode_kv=1e-6, swapped_token=2e-6
)


def test_the_sum_is_the_formula() -> None:
    cost = CostModel(
        step=1, prefill_token=2, decode_token=3, prefill_pair=5, decode_kv=7, swapped_token=11, copied_token=13
    )
    assert cost.seconds(Work(1, 10, 100, 1000, 10_000, 100_000)) == 1 + 2 + 30 + 500 + 7000 + 110_000 + 1_300_000


def test_every_preset_says_where_it_comes_from() -> None:
    assert "llama2-7b-a100" in presets()
    for name, cost in presets().items():
        assert cost.source, name
        assert cost.name == name
        assert load_cost(name) == cost


def test_the_data_sheet_preset_is_the_arithmetic_of_its_source() -> None:
    """Llama 2 7B in 16 bits on an A100 80GB SXM: 312 TFLOP/s, 2039 GB/s, PCIe 4.0 x16 at 31.5 GB/s."""
    parameters, layers, width, flops, memory, link = 6.738e9, 32, 4096, 312e12, 2039e9, 31.5e9
    kv = 2 * layers * width * 2  # bytes of a token
    cost = load_cost("llama2-7b-a100")
    assert cost.step == pytest.approx(2 * parameters / memory, rel=0.01)
    assert cost.prefill_token == cost.decode_token == pytest.approx(2 * parameters / flops, rel=0.01)
    assert cost.prefill_pair == pytest.approx(4 * layers * width / flops, rel=0.01)
    assert cost.decode_kv == pytest.approx(kv / memory, rel=0.01)
    assert cost.swapped_token == pytest.approx(kv / link, rel=0.01)
    assert cost.copied_token == pytest.approx(2 * kv / memory, rel=0.01)


def test_a_measured_preset_says_how_well_it_fits() -> None:
    """Beside each preset that was measured: machine, date and errors, in its own file; and the text tells the same."""
    root = Path(__file__).resolve().parents[2]
    entries = json.loads((root / "engine" / "data" / "cost_models.json").read_text())
    texts = [(root / name).read_text() for name in ("docs/performance.md", "engine/data/README.md")]
    measured = {name: entry for name, entry in entries.items() if not entry["source"].startswith("not measured")}
    assert list(measured) == ["smollm2-135m-cpu"]
    for name, entry in measured.items():
        assert "lawful simulate --fit" in entry["source"]
        assert "AMD EPYC" in entry["source"]
        assert "2026-11-30" in entry["source"]
        fitted = entry["fitted"]
        assert fitted["steps"] > 300
        assert fitted["median_error"] < 0.05 < fitted["p90_error"] < 0.15
        assert all(entry[cost] > 0 for cost in COSTS)
        for text in texts:
            assert name in text
            for part in ("median_error", "p90_error"):
                assert f"{int(fitted[part] * 1000) / 10} %" in text


def test_the_measured_preset_is_of_a_small_model_on_a_core() -> None:
    """One decode of 100 tokens of context, and a prompt of 512, in seconds of a slow core."""
    cost = load_cost("smollm2-135m-cpu")
    assert 0.02 < cost.seconds(Work(0, 1, 0, 100, 0, 0)) < 0.2
    assert 0.5 < cost.seconds(Work(512, 0, 512 * 513 // 2, 0, 0, 0)) < 5


def test_pairs_and_files(tmp_path: Path) -> None:
    given = load_cost("step=0.01, decode_kv=1e-6")
    assert (given.step, given.decode_kv, given.prefill_token) == (0.01, 1e-6, 0)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"step": 0.5, "fitted": {"steps": 3}}))
    assert load_cost(str(path)) == CostModel(step=0.5, name="mine")
    path.write_text(json.dumps(TRUE.to_dict()))
    assert load_cost(str(path)) == TRUE


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("h100", "must be one of llama2-7b-a100"),
        ("step", "must be one of"),
        ("step=fast", "'step=fast' is no cost; it must be NAME=SECONDS"),
        ("step=1,token=2", "'token' is no cost; allowed are step, prefill_token"),
        ("step=-1", "the cost step is -1.0; it must be a number of seconds of at least 0"),
        ("step=nan", "the cost step is nan"),
        ("step=0", "every cost is 0, so time would stand still"),
    ],
)
def test_what_is_no_cost_model_is_explained(spec: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_cost(spec)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "is no cost model: it must be an object"),
        ('{"step": "1"}', "the cost step is '1'"),
        ('{"step": true}', "the cost step is True"),
        ('{"step": 1, "name": 3}', "name is 3; it must be text"),
    ],
)
def test_what_is_no_cost_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"cost\.json") as caught:
        load_cost(str(path))
    assert message in str(caught.value)


def steps(noise: float = 0.0) -> list[Step]:
    rng = random.Random(0)
    made = []
    for _ in range(300):
        tokens, decodes = rng.choice([0, 0, rng.randint(1, 512)]), rng.randint(0, 32)
        work = Work(tokens, decodes, tokens * tokens // 2, decodes * rng.randint(1, 900), rng.choice([0, 0, 512]), 0)
        made.append(Step(work, TRUE.seconds(work) * (1 + noise * rng.uniform(-1, 1))))
    return made


def test_a_fit_finds_the_costs_that_made_the_times() -> None:
    found = fit(steps(), "again", "test")
    for name in COSTS:
        assert getattr(found.cost, name) == pytest.approx(getattr(TRUE, name), rel=1e-3)
    assert found.median_error < 1e-3
    assert found.r2 == pytest.approx(1)
    assert found.total == pytest.approx(1)
    assert (found.cost.name, found.cost.source, found.steps) == ("again", "test", 300)
    assert set(COLUMNS) == set(COSTS)


def test_a_fit_of_noisy_times_says_how_noisy_they_are() -> None:
    found = fit(steps(noise=0.2))
    assert 0.05 < found.median_error < 0.15
    assert found.cost.prefill_token == pytest.approx(TRUE.prefill_token, rel=0.3)


def test_a_cost_that_would_be_negative_is_left_out() -> None:
    """Here a step with decodes is faster than one without."""
    made = [Step(step.work, 1.0 - 0.001 * step.work.decode_tokens) for step in steps()]
    found = fit(made)
    assert found.cost.decode_token == 0
    assert min(getattr(found.cost, name) for name in COSTS) >= 0


def test_a_fit_needs_steps() -> None:
    with pytest.raises(ValueError, match="2 steps were measured; a fit needs at least 7"):
        fit(steps()[:2])


def test_the_loads_of_a_fit_hold_every_kind_of_work() -> None:
    """Through the scheduler alone, with the pool that the measurement has."""
    config = SchedulerConfig(
        num_gpu_blocks=POOL["num_gpu_blocks_override"],
        num_cpu_blocks=POOL["num_cpu_blocks_override"],
        max_model_len=POOL["max_model_len"],
        preemption_mode="swap",
    )
    made: list[Work] = []
    with lifted():
        scheduler = Scheduler(config)
        for number, requests in enumerate(LOADS):
            for place, (prompt, n, tokens) in enumerate(requests):
                scheduler.add(SequenceGroup(f"{number}-{place}", prompt, n, tokens))
            while scheduler.has_unfinished():
                plan = scheduler.schedule()
                made.append(work_of(plan, config.block_size))
                scheduler.update(plan)
    for name in Work._fields:
        assert sum(getattr(work, name) > 0 for work in made) >= LEAST_STEPS, name
    assert len(made) < 600, "a fit takes a minute, not an hour"


@pytest.mark.parametrize(
    ("clock", "device", "threads", "message"),
    [
        ("sand", "cpu", 1, "--fit-clock is 'sand'; it must be one of wall, processor"),
        ("processor", "cuda", 1, "what a GPU does takes no processor time"),
        ("processor", "cpu", 2, "adds up the time of all 2 threads; set OMP_NUM_THREADS=1"),
    ],
)
def test_a_clock_that_would_not_tell_a_steps_time_is_refused(
    clock: str, device: str, threads: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    with pytest.raises(ValueError) as caught:
        check_clock(clock, device)
    assert message in str(caught.value)
    assert check_clock("wall", device) == threads
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert check_clock("processor", "cpu") == 1


@pytest.mark.model
def test_the_embedded_model_is_measured_step_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.config import EngineArgs
    from engine.llm import build_core
    from engine.simulate.fit import fit_command

    args = EngineArgs(num_gpu_blocks_override=16, num_cpu_blocks_override=16, max_model_len=128, preemption_mode="swap")
    core = build_core(args)
    seen = measure(core, [[(20, 1, 4)], [(60, 2, 40)] * 3])
    assert [tuple(step.work)[:4] for step in seen[:4]] == [(20, 0, 210, 0), (0, 1, 0, 21), (0, 1, 0, 22), (0, 1, 0, 23)]
    assert sum(step.work.swapped_tokens for step in seen) > 0
    assert all(step.seconds > 0 for step in seen)
    assert type(core.runner).__name__ != "_Watched"
    ticks = count()
    timed = measure(core, [[(20, 1, 4)]], lambda: float(next(ticks)))
    assert [step.seconds for step in timed] == [1.0] * 4, "a step lasts from one reading of the clock to the next"
    path = tmp_path / "here.json"
    short = [[(8, 1, 3)], [(16, 1, 2), (8, 1, 2)], [(4, 1, 3)]]
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert set(CLOCKS) == {"wall", "processor"}
    for clock in CLOCKS:
        assert fit_command(str(path), "smollm2-135m", "cpu", False, short, clock) == 0
        written = json.loads(path.read_text())
        assert written["fitted"]["steps"] == 8
        assert f"1 thread on {os.cpu_count()} cores" in written["source"]
        assert f"{clock} time" in written["source"]
    assert load_cost(str(path)).name == "here"
    assert "error of a step: median" in capsys.readouterr().out
