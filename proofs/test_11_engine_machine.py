"""The whole engine, driven at random: requests of a real trace's lengths arrive, are aborted, and steps fail, any time.

What is claimed of every run: all laws hold at every step (its trace is audited to the end), no invariant of the tests
breaks, and whoever finishes gets exactly what it would get alone with memory for everything (E1).
"""

from __future__ import annotations

import csv
import functools
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import RefusedError
from engine.scheduler.trace import TraceWriter
from spec.check.trace import audit
from tests.oracle import World

TRACE = Path(__file__).parent.parent / "tests" / "data" / "azure2023_conv_400.csv"
PROMPT_SCALE, OUTPUT_SCALE = 32, 6  # a token here stands for so many of the trace; outputs grow while others wait
MOST_REQUESTS = 24
EOS = 7


@functools.cache
def lengths() -> tuple[tuple[int, int], ...]:
    """(prompt, output) tokens of the trace's requests in their order, scaled."""
    with TRACE.open() as rows:
        return tuple(
            (
                max(1, int(row["prompt_tokens"]) // PROMPT_SCALE),
                max(1, int(row["output_tokens"]) // OUTPUT_SCALE),
            )
            for row in csv.DictReader(rows)
        )


class Engine(RuleBasedStateMachine):
    """The engine loop over the KV oracle under memory pressure."""

    @initialize(
        chunked=st.booleans(),
        mode=st.sampled_from([None, "swap", "recompute"]),
        size=st.sampled_from([4, 8, 16]),
        gpu=st.integers(120, 480),
        swap=st.sampled_from([0, 1, 8, 64]),
        budget=st.sampled_from([16, 48, 256]),
        seed=st.integers(0, 2**31),
        first=st.integers(0, 300),
    )
    def begin(
        self, chunked: bool, mode: str | None, size: int, gpu: int, swap: int, budget: int, seed: int, first: int
    ) -> None:
        blocks = gpu // size
        self.world = World(
            gpu=blocks,
            cpu=swap * blocks // 16,
            bs=size,
            t=budget if chunked else 512,
            s=min(budget, 24),
            length=512,
            eos=(EOS,),
            seed=seed,
            enable_chunked_prefill=chunked,
            preemption_mode=mode,
            watermark_blocks=blocks // 50,
        )
        self.folder = tempfile.TemporaryDirectory()
        self.trace = TraceWriter(self.world.scheduler, Path(self.folder.name) / "trace")
        self.next = first
        self.added = 0

    @rule(burst=st.integers(1, 6), n=st.sampled_from([1, 1, 2, 4]), greedy=st.booleans(), stops=st.booleans())
    def arrive(self, burst: int, n: int, greedy: bool, stops: bool) -> None:
        """The trace's next requests."""
        for _ in range(min(burst, MOST_REQUESTS - self.added)):
            p, m = lengths()[self.next % len(lengths())]
            self.next += 1
            name = f"r{self.next}"
            try:
                self.world.add(name, p, n, m, temperature=0.0 if greedy else 1.0, ignore_eos=not stops)
            except RefusedError:
                self.world.asked.pop(name, None)
            else:
                self.added += 1

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.world.core.has_unfinished_requests():
                self.world.step()

    def unfinished(self) -> list[str]:
        return list(self.world.scheduler.groups)

    @precondition(lambda self: self.unfinished())
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        names = self.unfinished()
        assert self.world.abort(names[which % len(names)])

    @precondition(lambda self: self.unfinished())
    @rule(which=st.integers(0, 100))
    def abort_in_the_midst_of_a_step(self, which: int) -> None:
        names = self.unfinished()
        self.world.between = lambda plan: self.world.core.abort_request(names[which % len(names)])
        self.world.step()
        self.world.between = None

    @precondition(lambda self: self.unfinished())
    @rule()
    def fail(self) -> None:
        """The device fails: who ran in the step ends with an error, everyone else is computed again."""

        def raises(plan: Any) -> None:
            raise RuntimeError("device lost")

        self.world.before = raises
        outputs = self.world.step()
        self.world.before = None
        served = {group.request_id for group, _ in self.world.plans[-1].groups}
        assert {output.request_id for output in outputs if output.error} == served

    @invariant()
    def nobody_is_lost(self) -> None:
        """Whoever was accepted is in the queues, has ended, or its last output is about to be handed out."""
        waiting = {output.request_id for output in self.world.core._gone}
        assert set(self.world.asked) == set(self.world.scheduler.groups) | set(self.world.ended) | waiting

    def teardown(self) -> None:
        if not hasattr(self, "trace"):
            return
        with self.folder:
            self.world.drain()
            self.trace.close()
            self.seen = seen = audit(self.trace.path)
            assert seen.lawful, list(map(str, seen.findings))
            assert seen.groups == len(self.world.asked)
        for name, output in self.world.ended.items():
            whole = not output.error and all(one.finish_reason != "abort" for one in output.outputs)
            assert not whole or self.world.same_as_alone(name)


TestEveryRunOfTheEngineIsLawfulAndEveryResultIsThatOfARunAlone = Engine.TestCase
TestEveryRunOfTheEngineIsLawfulAndEveryResultIsThatOfARunAlone.settings = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_sometimes_groups_are_swapped_recomputed_and_demoted() -> None:
    """The machine is no idle one: a fixed run of it, with everything that memory pressure brings."""
    machine = Engine()
    machine.begin(chunked=True, mode="swap", size=4, gpu=300, swap=2, budget=64, seed=1, first=0)
    for _ in range(6):
        machine.arrive(burst=6, n=4, greedy=False, stops=False)
        machine.step(12)
    machine.fail()
    machine.abort(1)
    machine.abort_in_the_midst_of_a_step(0)
    machine.teardown()
    verbs = machine.seen.verbs
    for verb in ("preempt", "swap_out", "swap_in", "demote", "grow", "fork", "finish", "abort", "fail"):
        assert verbs[verb], verb
