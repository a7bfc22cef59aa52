"""What a mutant of the scheduler has to survive, cheapest first.  Each stage raises when something is wrong.

    soak    random worlds for a moment, with the tests' own checks after every step
    books   test_books.py, test_door.py and test_plans.py of tests/scheduler: the small print, to the exact number
    laws    every reachable state of small worlds, all laws, every round replayed in the spec
    tests   other behaviour tests of the scheduler and of the case list
    deep    larger worlds, a long soak, and the symbolic proofs of schedule(), update(), add, abort and fail

A stage is run in a process of its own that has the mutated module in place of the production one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup
from spec.check.explore import Found, World, explore
from spec.check.refine import replay


class CaughtError(AssertionError):
    """The mutant is killed; the text says by what."""


def small(
    gpu: int, cpu: int, bs: int, t: int, s: int, length: int, menu: tuple[tuple[int, int, int], ...], **more: Any
) -> World:
    """A world in one line: pools, block size, token budget, sequences, max_model_len, and what arrives."""
    has = {name: more.pop(name) for name in ("groups", "stops", "aborts", "mid_aborts", "fails") if name in more}
    config = SchedulerConfig(
        num_gpu_blocks=gpu,
        num_cpu_blocks=cpu,
        block_size=bs,
        max_num_batched_tokens=t,
        max_num_seqs=s,
        max_model_len=length,
        **more,
    )
    return World(config=config, menu=menu, **{"groups": 2, "stops": False, "aborts": False, **has})


def worlds() -> dict[str, World]:
    """Small worlds that between them do everything: both orders and each mode, no swap and ample, all block sizes."""
    late: dict[str, Any] = {"enable_chunked_prefill": False}
    return {
        "ends": small(5, 3, 2, 3, 3, 8, ((3, 2, 3), (1, 1, 4)), stops=True, aborts=True),
        "ends, prefill first": small(5, 3, 2, 8, 3, 8, ((3, 2, 3), (1, 1, 4)), stops=True, aborts=True, **late),
        "trouble": small(4, 2, 2, 2, 2, 6, ((3, 2, 2), (2, 1, 3)), aborts=True, mid_aborts=True, fails=True),
        "three": small(6, 3, 2, 4, 4, 8, ((3, 2, 3), (2, 1, 4)), groups=3),
        "three, prefill first": small(6, 3, 2, 8, 4, 8, ((3, 2, 3), (2, 1, 4)), groups=3, **late),
        "recompute": small(4, 2, 1, 3, 3, 6, ((2, 1, 3), (1, 2, 2)), groups=3, preemption_mode="recompute",
                           watermark_blocks=1),
        "swap": small(4, 2, 1, 3, 3, 6, ((2, 1, 3), (1, 2, 2)), groups=3, preemption_mode="swap"),
        "no swap": small(6, 0, 2, 4, 4, 9, ((3, 2, 4), (1, 3, 3)), groups=2, stops=True),
        "little swap": small(7, 2, 2, 5, 5, 9, ((3, 2, 5), (4, 1, 5)), groups=3, preemption_mode="swap"),
        "watermark": small(7, 4, 2, 4, 4, 9, ((5, 1, 4), (2, 2, 4)), groups=3, watermark_blocks=2),
        "prefill first": small(7, 2, 2, 9, 5, 9, ((3, 2, 5), (4, 1, 5)), groups=3, preemption_mode="swap", **late),
        "half a prompt": small(5, 4, 1, 2, 2, 6, ((1, 1, 4), (4, 1, 2)), groups=3, preemption_mode="swap"),
        "demotions": small(5, 2, 1, 4, 4, 6, ((1, 1, 5),), groups=4, preemption_mode="swap"),
        "two tails": small(5, 4, 2, 10, 8, 10, ((1, 2, 4),), groups=4, preemption_mode="swap"),
        "lost branches": small(5, 0, 1, 3, 3, 6, ((1, 3, 2), (1, 1, 4)), groups=3, stops=True),
        "rebuilds, prefill first": small(7, 0, 2, 8, 4, 8, ((3, 2, 5), (2, 1, 5)), groups=3, aborts=True, **late),
        "whole prompts": small(12, 0, 2, 6, 4, 6, ((4, 1, 2), (5, 2, 1)), groups=3, **late),
        "any mode": small(7, 3, 1, 4, 4, 8, ((1, 2, 3), (1, 1, 4)), groups=3),
        "budget": small(9, 5, 4, 3, 3, 12, ((6, 3, 4), (3, 1, 6)), groups=2, stops=True),
    }  # fmt: skip


def larger_worlds() -> dict[str, World]:
    """The same, with more of everything."""
    late: dict[str, Any] = {"enable_chunked_prefill": False}
    menu = ((5, 2, 4), (3, 1, 6), (2, 3, 3))
    return {
        "four": small(8, 4, 2, 5, 5, 10, menu, groups=4),
        "four, prefill first": small(8, 4, 2, 10, 6, 10, menu, groups=4, **late),
        "four, swap": small(9, 3, 2, 4, 4, 10, ((3, 1, 6), (1, 2, 4)), groups=4, preemption_mode="swap"),
        "three, all ends": small(7, 3, 2, 4, 4, 9, ((3, 2, 4), (3, 1, 4)), groups=3, stops=True, aborts=True),
        "three, all trouble": small(6, 3, 2, 8, 5, 8, ((3, 2, 4), (2, 1, 4)), groups=3, stops=True, aborts=True,
                                    mid_aborts=True, fails=True, **late),
        "blocks of three": small(8, 5, 3, 5, 5, 13, ((4, 3, 5), (5, 1, 6)), groups=3, stops=True),
    }  # fmt: skip


def search(world: World, make: Callable[[], Any], new_group: Callable[..., Any], limit: int = 100_000_000) -> Found:
    """Every reachable state, all laws, and every round replayed in the spec; raises at the first that is wrong."""

    def refines(step: Any, turn: Any, event: Any) -> None:
        mismatch = replay(turn)
        if mismatch is not None:
            raise CaughtError(f"replay: {mismatch.at}: {mismatch.text}")

    found = explore(world, make, new_group, step_hook=refines, limit=limit)
    if found.violation is not None:
        raise CaughtError(f"law {found.violation.law.id} {found.violation.detail}")
    return found


def _search_all(these: dict[str, World], limit: int = 100_000_000) -> None:
    for name, world in these.items():
        try:
            search(world, lambda: Scheduler(world.config), SequenceGroup, limit)  # noqa: B023
        except CaughtError as caught:
            raise CaughtError(f"{caught}, world {name!r}") from None


def soak(seed: int, count: int, arrivals: int) -> Counter[str]:
    from tests.test_soak import soak_world

    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    for _ in range(count):
        seen += soak_world(rng, arrivals)
    return seen


def digest(seed: int, count: int) -> str:
    """Of all plans of random runs: survivors that change it change what the scheduler does."""
    import hashlib

    from tests.scheduler.test_determinism import trace

    return hashlib.sha256(repr([trace(seed + i) for i in range(count)]).encode()).hexdigest()


def _pytest(*args: str) -> None:
    import pytest

    class Report:
        failed = ""

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed and not self.failed:
                self.failed = report.nodeid

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed and not self.failed:
                self.failed = report.nodeid

    report = Report()
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", *args], plugins=[report])
    if code != 0:
        raise CaughtError(report.failed or f"pytest ends with {code}")


# a process started by a test would run the module on the disk, which has no fault
_OWN_PROCESS = "not hash_seed and not without_torch"


def stage_soak() -> None:
    soak(1, 3, 6)
    soak(2, 20, 12)


def stage_laws() -> None:
    _search_all(worlds())


def stage_books() -> None:
    _pytest("tests/scheduler/test_books.py", "tests/scheduler/test_door.py", "tests/scheduler/test_plans.py")


def stage_tests() -> None:
    _pytest("-k", _OWN_PROCESS, "tests/scheduler/test_determinism.py", "tests/cases")


def stage_deep() -> None:
    soak(3, 150, 20)
    _search_all(larger_worlds(), 40_000)
    _pytest(
        "proofs/test_1_inductive.py",
        "-k",
        "not planted and not satisfiable and ("
        "0-1-1-any or 1-0-1-any or 2-0-0-any or 2-1-0-any or 3-0-0-any or 2-1-1-any or group_by_group or formulas or "
        "whole_step or abort or add_keeps or fail or rows or piece or protocol)",
    )
