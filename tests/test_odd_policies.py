"""`lawful check` on policies that hang, raise, cheat or are none: each is told what is wrong, in words and by its run.

The status is 1 where a law is broken, and 2 where there is nothing that could be checked.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import engine.check
import spec.check.patience
from engine.check import PolicyError, check
from engine.cli import main
from engine.scheduler import Scheduler, SchedulerConfig
from spec.check import explore as explorer
from spec.check.symbolic import Report
from spec.check.worlds import SKETCHES

HEAD = "import random\nimport time\nfrom engine.scheduler import Scheduler\n\n\n"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One world, no symbols, and little patience."""
    name = "one branch, watermark"
    monkeypatch.setattr(engine.check, "worlds", lambda config: {name: SKETCHES[name].world(config)})
    monkeypatch.setattr(engine.check, "prove_shapes", lambda policy, note: (Report(), {}))
    monkeypatch.setattr(spec.check.patience, "GRANTED", 0.3)


class Told:
    """What the command says of a policy that is written down here."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.capsys = tmp_path / "mine.py", capsys

    def __call__(self, body: str, *argv: str) -> tuple[int, str, str]:
        self.path.write_text(HEAD + body)
        status = main(["check", "-q", *argv, "--policy", f"{self.path}:Mine"])
        said = self.capsys.readouterr()
        return status, said.out, said.err


@pytest.fixture
def told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    return Told(tmp_path, capsys)


def method(name: str, arguments: str, *lines: str) -> str:
    return f"class Mine(Scheduler):\n    def {name}(self{arguments}):\n" + "".join(
        f"        {line}\n" for line in lines
    )


def init(*lines: str) -> str:
    return method("__init__", ", config", "super().__init__(config)", *lines)


# calls without end


@pytest.mark.parametrize(
    ("body", "at"),
    [
        (method("_admit_head", ", step", "return True"), ">> step 1"),
        (method("_catch_up", ", step", "while self.running:", "    pass"), ">> step 2"),
        (method("add", ", group", "while True:", "    pass"), ">> add a"),
        (
            method("abort", ", name", "while self.running:", "    pass", "return super().abort(name)"),
            ">> abort a",
        ),
        (
            method(
                "update",
                ", plan, stopped=(), failed=()",
                "while stopped:",
                "    try:",
                "        time.process_time()",
                "    except Exception:",
                "        pass",
                "return super().update(plan, stopped, failed)",
            ),
            ">> step 1",
        ),
    ],
    ids=["forgets_to_take_it_out", "schedule", "add", "abort", "update"],
)
def test_a_call_that_never_returns_breaks_s8_and_is_shown_where_it_was(told: Told, body: str, at: str) -> None:
    status, out, _ = told(body)
    assert status == 1
    assert "1 law is broken: S8" in out
    assert "the check ends there" in out
    (marked,) = [line for line in out.splitlines() if line.startswith(">>")]
    assert marked.startswith(at)
    assert "does not return" in out[out.index(marked) :]
    (detail,) = [line for line in out.splitlines() if "has not returned after 0.3 s of work" in line]
    assert "mine.py:" in detail
    assert "Q2    seniority" not in out, "what was not tried to its end is not said to hold"


def test_a_call_that_never_returns_is_said_in_json_too(told: Told) -> None:
    status, out, _ = told(method("_admit_head", ", step", "return True"), "--json")
    seen = json.loads(out)
    assert status == 1
    assert seen["endless"] == "one branch, watermark"
    assert {line["verdict"] for line in seen["laws"]} == {"BROKEN", "not reached", "not checked"}


def test_a_constructor_that_never_returns_is_no_policy(told: Told) -> None:
    status, _, err = told(method("__init__", ", config", "while True:", "    pass"))
    assert status == 2
    assert "no scheduler can be made: a call has not returned" in err


def test_a_slow_policy_is_no_endless_one(told: Told) -> None:
    """Each step takes a while, none as long as is granted."""
    status, out, _ = told(
        method("_catch_up", ", step", "end = time.process_time() + 0.001", "while time.process_time() < end: pass")
        + "        super()._catch_up(step)\n"
    )
    assert "does not return" not in out
    assert status == 1  # no shape was proved: see the fixture
    assert "every law holds" in out


def test_whoever_measures_with_the_same_timer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    old = signal.signal(signal.SIGPROF, lambda number, frame: None)
    try:
        with spec.check.patience.patience(lambda: None):
            assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGPROF, old)
    with spec.check.patience.patience(lambda: None):
        assert signal.getitimer(signal.ITIMER_PROF)[1] > 0
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) is signal.SIG_DFL


# what is no policy


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (init("self.mine = 'x'"), "Mine.mine is 'x', of type str; a field that a policy adds must be a bool or an int"),
        (init("self.mine = {}"), "Mine.mine is {}, of type dict; "),
        (init("self.mine = {1}"), "Mine.mine is {1}, of type set; "),
        (init("self.mine = object()"), "of type object; "),
        (init("self.mine = None"), "Mine.mine is None; "),
        (init("self.mine = 0.5"), "Mine.mine is 0.5, of type float; "),
        (
            init("self.mine = 256"),
            "Mine.mine is 256; a field that a policy adds must be a bool or an int from 0 to 255",
        ),
        (init("self.mine = -1"), "Mine.mine is -1; "),
        (init("raise RuntimeError('no chance')"), "Mine(config) raises RuntimeError: no chance"),
        (method("__init__", ", config, knob", "pass"), "missing 1 required positional argument: 'knob'"),
        (
            method("__init__", ", config", "self.config = config"),
            "an __init__ of its own calls super().__init__(config)",
        ),
        (
            "import abc\n\n\nclass Mine(Scheduler, abc.ABC):\n    @abc.abstractmethod\n    def score(self): ...\n",
            "is abstract: it does not say score",
        ),
        ("Mine = {}['a']\n", "cannot be imported: KeyError: 'a' (in its line 6)"),
        ("raise SystemExit(0)\n", "cannot be imported: SystemExit: 0 (in its line 6)"),
        ("class Other: pass\n", "has no class 'Mine'; its classes are Other"),
        (method("add", ", group", "raise ValueError('full')"), "refuses every request of every world"),
        ("class Mine(Scheduler):\n    __slots__ = ('own',)\n" + init("self.own = 1")[23:], "Mine.own is in __slots__"),
    ],
)
def test_what_cannot_be_checked_is_explained(told: Told, body: str, message: str) -> None:
    status, out, err = told(body)
    assert status == 2
    assert not out
    assert err.startswith("lawful: error: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (method("_admit", ", step", "self.seen = 1", "super()._admit(step)"), "Mine.seen is new after "),
        (init("self.mine = 0") + "    def _admit(self, step):\n        self.mine += 100\n", "Mine.mine is 300; "),
        (
            init("self.mine = 0")
            + "    def _preempt(self, victim, step):\n        self.mine = victim.request_id\n"
            + "        super()._preempt(victim, step)\n",
            "Mine.mine is 'b', of type str; ",
        ),
    ],
    ids=["new", "too_large", "a_name"],
)
def test_a_field_that_a_step_spoils_is_shown_with_its_run(told: Told, body: str, message: str) -> None:
    status, _, err = told(body)
    assert status == 2
    assert message in err
    assert "Seen in the world 'one branch, watermark', at the end of this run:" in err
    assert "\n>> " in err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (method("schedule", "", "super().schedule()"), "schedule() returned None; it must return a Plan"),
        (method("schedule", "", "return [super().schedule()]"), "schedule() returned a list without log"),
        (
            method("schedule", "", "plan = super().schedule()", "plan.log.append('hello')", "return plan"),
            "what came of it cannot be followed: ValueError: too many values to unpack",
        ),
        (
            method("schedule", "", "plan = super().schedule()", "del self.swapped", "return plan"),
            "what came of it cannot be followed: AttributeError",
        ),
        (
            method("update", ", plan, stopped=(), failed=()", "raise KeyError('what')"),
            "KeyError: 'what' (update mine.py:8)",
        ),
        (method("add", ", group", "raise KeyError('what')"), "add() raised KeyError: 'what' (add mine.py:8)"),
        (method("abort", ", name", "raise KeyError('what')"), "abort() raised KeyError: 'what' (abort mine.py:8)"),
        (method("_admit", ", step", "raise SystemExit(0)"), "SystemExit: 0 (_decodes_first scheduler.py:"),
    ],
    ids=["none", "no_plan", "odd_log", "no_queue", "update", "add", "abort", "exit"],
)
def test_what_it_returns_or_raises_is_a_broken_law_with_its_place(told: Told, body: str, message: str) -> None:
    status, out, err = told(body)
    assert status == 1, err
    assert "S8 is broken in the world" in out
    assert message in out
    assert "Traceback" not in out + err


def test_a_field_that_grows_from_a_bool_to_a_number_is_kept_as_one(told: Told) -> None:
    """It counts the aborts up to 5: were 2 taken for True, fewer states would be told apart."""
    counts = init("self.mine = {}") + "    def abort(self, name):\n        self.mine = min(self.mine + 1, 5)\n"
    counts += "        return super().abort(name)\n"
    found = []
    for first in ("False", "0"):
        _, out, _ = told(counts.format(first), "--json")
        found.append(json.loads(out)["worlds"]["one branch, watermark"]["states"])
    assert found[0] == found[1]


# what is no function of the state


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            method("_admit", ", step", "if not self.running or random.random() < 0.5:", "    super()._admit(step)"),
            "Mine decides differently from the same state",
        ),
        (
            "class Mine(Scheduler):\n    calls = 0\n\n"
            + method(
                "_admit",
                ", step",
                "Mine.calls += 1",
                "if not self.running or Mine.calls % 7:",
                "    super()._admit(step)",
            )[23:],
            "Mine decides differently from the same state",
        ),
        (
            method("_admit", ", step", "if not self.running or self.num_steps % 3:", "    super()._admit(step)"),
            "Mine decides by num_steps, which is no part of a state",
        ),
        (
            method("_admit", ", step", "if not self.running or self.waiting[0].request_id < 'c':")
            + "            super()._admit(step)\n",
            "Mine decides by request_id, which is no part of a state",
        ),
        (
            method("_swap_in", ", step", "if self.swapped and self.swapped[0].num_preemptions < 2:")
            + "            super()._swap_in(step)\n",
            "Mine decides by num_preemptions, which is no part of a state",
        ),
    ],
    ids=["random", "class_variable", "num_steps", "request_id", "num_preemptions"],
)
def test_a_policy_that_reads_more_than_its_state_is_found_out(
    told: Told, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    if "preemptions" in message:
        name = "long prompts"
        monkeypatch.setattr(engine.check, "worlds", lambda config: {name: SKETCHES[name].world(config)})
    status, out, err = told(body)
    assert status == 2
    assert not out
    assert message in err
    assert err.count("once it does: ") == 2
    assert "\n>> step " in err


def test_a_run_that_does_not_repeat_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no step was made twice, the broken run is carried out again, and is not the same."""
    monkeypatch.setattr(explorer, "FIRST", 0)
    monkeypatch.setattr(explorer, "THEN_EACH", 1 << 30)
    calls = []

    class Tires(Scheduler):
        def _admit(self, step: object) -> None:
            calls.append(1)
            if self.running or len(calls) < 60:  # on the way to the broken law it admitted somebody
                super()._admit(step)  # type: ignore[arg-type]

    with pytest.raises(PolicyError, match=r"does not repeat itself: it broke .* on a fresh scheduler"):
        check(Tires)


def test_how_often_a_step_was_made_twice_is_said(told: Told) -> None:
    _, out, _ = told("class Mine(Scheduler):\n    pass\n")
    (line,) = [line for line in out.splitlines() if "steps were made twice" in line]
    assert int(line.split()[0]) > explorer.FIRST


def test_what_the_policy_refuses_is_said(told: Told) -> None:
    _, out, _ = told(
        method("add", ", group", "if group.prompt_len > 1:", "    raise ValueError('long')")
        + "        return super().add(group)\n"
    )
    assert "not searched, since the policy refuses it in 'one branch, watermark': prompt 2, n 1, max_tokens 3" in out


def test_the_production_scheduler_goes_on_alike_everywhere() -> None:
    """Also in the states that are not looked at by default."""
    for sketch in (SKETCHES["long prompts"], SKETCHES["prefill-first, no swap"]):
        world = sketch.world(SchedulerConfig)
        found = explorer.explore(world, lambda w=world: Scheduler(w.config), engine.check.new_group, twice=True)  # type: ignore[misc]
        assert found.complete
        assert found.twice > 64


# what is shown of a broken law


def test_a_decode_filed_under_a_wrong_beat_is_shown_with_its_due_one(told: Told) -> None:
    late = method(
        "_grow",
        ", group, need, step",
        "super()._grow(group, need, step)",
        "self.calendar.file(group, self.blocks.beats(group) + 1)",
    )
    status, out, _ = told(late)
    assert status == 1
    assert "1. Q10 is broken in the world" in out
    assert "   the calendar, at beat 2:\n" in out
    assert "   >> a is filed under beat 3 with 1 branches; it needs blocks at beat 2 and has 1\n" in out


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            method(
                "_grow",
                ", group, need, step",
                "step.plan.blocks_to_copy += self.blocks.grow(group)",
                "step.note('grow', group, need)",
            ),
            ">> a is filed under beat 1 with 1 branches, though listed under None; it needs blocks at beat 2 and has 1",
        ),
        (
            method("_recompute", ", victim, step", "super()._recompute(victim, step)", "self.calendar.file(victim, 9)"),
            "and is no running decode (waiting)",
        ),
        (
            method("_grow", ", group, need, step", "super()._grow(group, need, step)", "self.calendar.branches += 1"),
            "branches; the running decodes have ",
        ),
        (
            method("_grow", ", group, need, step", "super()._grow(group, need, step)", "self.calendar.strike(group)"),
            "decodes and is not filed; it needs blocks at beat ",
        ),
    ],
    ids=["forgotten", "not_running", "sum", "not_filed"],
)
def test_whatever_is_wrong_in_the_calendar_is_marked(told: Told, body: str, said: str) -> None:
    _, out, _ = told(body)
    (line,) = [line for line in out.splitlines() if said in line]
    assert line.startswith("   >> ")


def test_laws_that_one_run_breaks_are_told_together(told: Told) -> None:
    _, out, _ = told(method("_admit", ", step", "pass"))
    (head,) = [line for line in out.splitlines() if "broken in the world" in line]
    assert " and " in head
    assert "S18" in head
    assert "L1" in head
    assert out.count(">> step") == 1


def test_a_log_that_does_not_replay_is_shown_with_its_run(told: Told) -> None:
    boasts = method(
        "_admit_head",
        ", step",
        "admitted = super()._admit_head(step)",
        "if admitted:",
        "    step.plan.log[-1] = step.plan.log[-1]._replace(blocks=9)",
        "return admitted",
    )
    status, out, _ = told(boasts)
    assert status == 1
    assert "a plan's log does not replay in the spec, in the world 'one branch, watermark'; the shortest run:" in out
    assert ">> step 1" in out
    assert "admit a [9] is not allowed in the spec" in out
    assert "; but the log of a plan does not replay in the spec" in out


def test_two_queues_of_a_starving_policy_are_shown_with_the_way_round() -> None:
    """The way round is a run of the graph: from a state back to it, with a step in it."""
    from spec.check.explore import Graph
    from spec.check.liveness import analyse, lap

    graph = Graph(
        edges=[[(1, False, 0, ())], [(2, True, 0, (0,)), (0, True, 1, (-1,))], [(1, False, 0, (0,))]],
        groups=[0, 1, 1],
    )
    lasso = analyse(graph).lasso
    assert lasso is not None
    state, place = lasso
    way = lap(graph, state, place)
    assert [there for there, _ in way] in ([2, 1], [1, 2])
    assert sorted(is_step for _, is_step in way) == [False, True]
