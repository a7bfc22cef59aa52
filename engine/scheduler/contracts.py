"""The laws as contracts on the production functions, behind one switch.

LAWFUL_CONTRACTS, read once at import:
    off    (default) every decorated function is the plain function itself: nothing to pay
    on     laws on counts around every public transition; pre- and postconditions of phases and blocks
    full   also the laws on block ids, slots and ghost contents, which walk every table

A broken contract raises LawBrokenError, which names the law, its statement and the values, after writing the state of
a few steps ago and all that was done since to a JSON file in LAWFUL_DUMP_DIR (default `.lawful` in the working
directory), from which `engine.scheduler.replay` runs it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from icontract import ensure, require, snapshot

from engine.scheduler.recorder import LawBrokenError, describe, dump, recorder
from spec import views

MODE = os.environ.get("LAWFUL_CONTRACTS", "off")
if MODE not in ("off", "on", "full"):
    raise ValueError(f"LAWFUL_CONTRACTS is {MODE!r}; allowed are off, on and full")
ON, FULL = MODE != "off", MODE == "full"

F = TypeVar("F", bound=Callable[..., Any])


# how a broken condition becomes an error


class _Verdict:
    """The laws that the condition just evaluated found broken, for the error that icontract then asks for."""

    laws: list[Any] = []  # noqa: RUF012
    view: Any = None


def _obeys(check: Callable[[Any], list[Any]], view: Any) -> bool:
    _Verdict.laws, _Verdict.view = check(view), view
    return not _Verdict.laws


def _law_error(self: Any) -> LawBrokenError:
    law = _Verdict.laws[0]
    message = f"{law}\n{describe(_Verdict.view)}"
    if law.id == "Q10":
        from spec.check.report import calendar  # the explorer comes along: not where nothing is broken

        message = "\n".join([message, *calendar(self)])
    return LawBrokenError(law.id, message, dump(self, law.id, message))


def _named(name: str, statement: str) -> Callable[..., LawBrokenError]:
    """The error of an operation's own condition."""

    def error(self: Any) -> LawBrokenError:
        message = f"{name}: {statement}"
        has_queues = hasattr(self, "running")
        if has_queues:
            message += f"\n{describe(views.snapshot(self))}"
        return LawBrokenError(name, message, dump(self, name, message) if has_queues else None)

    return error


def _stack(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def _must(condition: Callable[..., Any], name: str, statement: str) -> Callable[[F], F]:
    return require(condition, error=_named(name, statement), enabled=ON)


def _will(condition: Callable[..., Any], name: str, statement: str) -> Callable[[F], F]:
    return ensure(condition, error=_named(name, statement), enabled=ON)


def _old(capture: Callable[..., Any], name: str) -> Callable[[F], F]:
    return snapshot(capture, name=name, enabled=ON)


# the public transitions


def _begin_step(self: Any) -> views.State:
    """Remember the state before schedule(), for the laws and for a dump."""
    own = recorder(self)
    if self._plan is None:
        own.begin(self)
    return views.snapshot(self)


def _step_is_lawful(self: Any, result: Any, OLD: Any) -> bool:
    from spec import plain

    own = recorder(self)
    mid = views.snapshot(self)
    own.steps[-1]["plan"] = result.to_dict()
    try:
        own.step = step = views.observe(OLD.before, result, mid)
    except KeyError:
        from spec.laws import BY_ID

        _Verdict.laws, _Verdict.view = [BY_ID["S19"]], mid
        return False
    if not (_obeys(plain.check_step, step) and _obeys(plain.check_mid, step) and _obeys(plain.check_state_in_mid, mid)):
        return False
    return not FULL or (_obeys(plain.check_ids_step, step) and _obeys(plain.check_ids_in_mid, self))


def _state_is_lawful(self: Any) -> bool:
    from spec import plain

    if self._plan is not None:
        return _obeys(plain.check_state_in_mid, views.snapshot(self))
    return _obeys(plain.check_state, views.snapshot(self)) and (not FULL or _obeys(plain.check_ids, self))


def _begin_update(self: Any, plan: Any, stopped: Any, failed: Any) -> Any:
    """Remember the outcome; with full contracts, what the pools hold once the plan is carried out."""
    recorder(self).note(self, "update", stopped=sorted(map(list, stopped)), failed=sorted(failed))
    if not FULL or self._plan is not plan:
        return None
    from spec.check.shadow import Shadow

    own = recorder(self)
    return Shadow.of(own.step.before) if own.step is not None else None


def _round_is_lawful(self: Any, plan: Any, OLD: Any) -> bool:
    from spec import plain

    own = recorder(self)
    if own.step is None or own.step.plan is not plan:
        return True  # scheduled before the contracts could see it
    turn = views.conclude(own.step, views.snapshot(self))
    own.step = None
    if not _obeys(plain.check_round, turn):
        return False
    if OLD.shadow is not None:
        OLD.shadow.execute(plan)
        if not OLD.shadow.agrees(self):
            from spec.laws import BY_ID

            _Verdict.laws, _Verdict.view = [BY_ID["B7"]], turn
            return False
    return True


def _note_add(self: Any, group: Any) -> None:
    recorder(self).note(self, "add", request_id=group.request_id, p=group.prompt_len, n=group.n, m=group.max_tokens)


def _note_abort(self: Any, request_id: str) -> None:
    recorder(self).note(self, "abort", request_id=request_id)


def _note_fail(self: Any, request_ids: Any) -> None:
    named = sorted(request_ids) if isinstance(request_ids, Collection) else None  # an iterator can be read only once
    recorder(self).note(self, "fail", request_ids=named)


def _arrival_is_lawful(self: Any) -> bool:
    """A group that arrives between schedule() and update() is part of the state that the rest of the round is about."""
    own = recorder(self)
    if self._plan is not None and own.step is not None:
        mid = views.snapshot(self)
        own.step = own.step._replace(mid=mid, now={**own.step.now, mid.waiting[-1].request_id: mid.waiting[-1]})
    return _state_is_lawful(self)


_lawful_after = ensure(_state_is_lawful, error=_law_error, enabled=ON)

schedule = _stack(_old(_begin_step, "before"), ensure(_step_is_lawful, error=_law_error, enabled=ON))
update = _stack(_old(_begin_update, "shadow"), _lawful_after, ensure(_round_is_lawful, error=_law_error, enabled=ON))
add = _stack(_old(_note_add, "noted"), ensure(_arrival_is_lawful, error=_law_error, enabled=ON))
abort = _stack(_old(_note_abort, "noted"), _lawful_after)
fail = _stack(_old(_note_fail, "noted"), _lawful_after)


# the small operations of a step


def _free(self: Any) -> tuple[int, int]:
    return self.blocks.gpu_free, self.blocks.cpu_free


def _lengths(self: Any) -> tuple[int, int, int]:
    return len(self.running), len(self.swapped), len(self.waiting)


def _head_held(self: Any) -> int:
    return self.swapped[0].held if self.swapped else 0


def _victim_held(victim: Any) -> int:
    return int(victim.held)


def _unserved(victim: Any) -> bool:
    return bool(victim.tokens == 0)


def _victim_landed(self: Any, victim: Any, OLD: Any) -> bool:
    """Its GPU blocks are free, and it is the head of swapped or of waiting."""
    first = self.swapped[0] if self.swapped else self.waiting[0]
    return bool(self.blocks.gpu_free == OLD.free[0] + OLD.held and victim is first)


def _has_cpu_room(self: Any, victim: Any) -> bool:
    return bool(self.blocks.swap_size(victim) <= self.blocks.cpu_free)


def _moved_out(self: Any, victim: Any, OLD: Any) -> bool:
    gpu, cpu = OLD.free
    return bool(
        self.swapped[0] is victim
        and self.blocks.gpu_free == gpu + OLD.held
        and self.blocks.cpu_free == cpu - victim.held
    )


def _nothing_swapped(self: Any) -> bool:
    return not self.swapped


def _something_swapped(self: Any) -> bool:
    return bool(self.swapped)


def _forgotten(self: Any, victim: Any, OLD: Any) -> bool:
    return bool(
        self.waiting[0] is victim
        and victim.held == 0
        and victim.deficit == victim.whole
        and self.blocks.gpu_free == OLD.free[0] + OLD.held
    )


def _last_held(self: Any) -> int:
    return self.swapped[-1].held if self.swapped else 0


def _demoted(self: Any, OLD: Any) -> bool:
    first = self.waiting[0]
    return bool(
        self.blocks.cpu_free == OLD.free[1] + OLD.held
        and self.blocks.gpu_free == OLD.free[0]
        and first.held == 0
        and first.deficit == first.whole
    )


def _room_made(self: Any, size: Any, result: bool) -> bool:
    return bool(result == (size <= self.blocks.cpu_free) and (result or not self.swapped))


def _swapped_in(self: Any, result: bool, OLD: Any) -> bool:
    running, swapped, waiting = OLD.lengths
    gpu, cpu = OLD.free
    if not result:
        return bool(_free(self) == OLD.free and _lengths(self) == OLD.lengths)
    return bool(
        _lengths(self) == (running + 1, swapped - 1, waiting)
        and self.blocks.gpu_free == gpu - self.running[-1].held
        and self.blocks.cpu_free == cpu + OLD.held
        and self.running[-1].tokens > 0
    )


def _admitted(self: Any, result: bool, OLD: Any) -> bool:
    running, swapped, waiting = OLD.lengths
    gpu, cpu = OLD.free
    if not result:
        return bool(_free(self) == OLD.free and _lengths(self) == OLD.lengths)
    return bool(
        _lengths(self) == (running + 1, swapped, waiting - 1)
        and _free(self) == (gpu - self.running[-1].held, cpu)
        and self.running[-1].tokens > 0
        and (running == 0 or self.blocks.gpu_free >= self.config.watermark_blocks)
    )


def _decode_served(self: Any, step: Any, result: bool) -> bool:
    return not result or bool(self.running[-1].tokens == self.running[-1].live)


def _all_served(self: Any, step: Any, result: bool, OLD: Any) -> bool:
    if not result:
        return bool(_free(self) == OLD.free and not step.plan.decodes)
    decodes = [group for group in self.running if group.is_decode]
    return bool(
        _lengths(self) == OLD.lengths
        and step.plan.decodes == decodes
        and all(group.tokens == group.live and self.blocks.need(group) == 0 for group in decodes)
    )


def _within_budget(step: Any) -> bool:
    return bool(step.tokens >= 0)


_count_free, _count_groups = _old(_free, "free"), _old(_lengths, "lengths")
_budget = _will(_within_budget, "S5", "scheduled tokens are at most max_num_batched_tokens")

all_grow = _stack(
    _count_free,
    _count_groups,
    _will(_all_served, "S4", "every decode gets one token a live branch, or nothing changes"),
    _budget,
)
decode_head = _stack(_will(_decode_served, "S4", "a decode gets one token a live branch"), _budget)
catch_up = _stack(_budget)
swap_in_head = _stack(
    _must(_something_swapped, "swap_in", "something is swapped"),
    _count_free,
    _count_groups,
    _old(_head_held, "held"),
    _will(_swapped_in, "B1", "swap-in moves the head of swapped with all its blocks, or changes nothing"),
    _budget,
)
admit_head = _stack(
    _must(_nothing_swapped, "S1", "no new prefill while any swapped group remains"),
    _count_free,
    _count_groups,
    _will(
        _admitted, "B1", "admission takes what the head of waiting covers, and leaves the watermark, or changes nothing"
    ),
    _budget,
)
preempt = _stack(
    _must(_unserved, "S6", "nothing scheduled is ever taken back"),
    _count_free,
    _old(_victim_held, "held"),
    _will(_victim_landed, "B1", "a victim gives back all its GPU blocks and is first of those outside"),
)
swap_out = _stack(
    _must(_has_cpu_room, "B2", "CPU blocks never exceed capacity"),
    _count_free,
    _old(_victim_held, "held"),
    _will(_moved_out, "B1", "swap-out frees all GPU blocks and takes those of computed tokens"),
)
recompute = _stack(
    _must(_nothing_swapped, "Q2", "running ++ swapped ++ waiting is sorted by seniority"),
    _count_free,
    _old(_victim_held, "held"),
    _will(_forgotten, "Q7", "a waiting group lacks all it knows and holds nothing"),
)
make_room = _stack(_will(_room_made, "S14", "groups are demoted until it fits or nothing is swapped"))
demote = _stack(
    _must(_something_swapped, "demote", "something is swapped"),
    _count_free,
    _old(_last_held, "held"),
    _will(_demoted, "B1", "a demoted group gives back all its CPU blocks"),
)


# the allocator


def _pools(self: Any) -> tuple[int, int]:
    return self.gpu_free, self.cpu_free


def _announced_need(self: Any, group: Any) -> int:
    return int(self.need(group))


def _announced_cover(self: Any, group: Any) -> int:
    return int(self.cover(group))


def _announced_size(self: Any, group: Any) -> int:
    return int(self.swap_size(group))


def _group_held(group: Any) -> int:
    return int(group.held)


def _took_need(self: Any, group: Any, OLD: Any) -> bool:
    gpu, cpu = OLD.pools
    return _pools(self) == (gpu - OLD.need, cpu) and group.held == OLD.held + OLD.need


def _took_cover(self: Any, group: Any, OLD: Any) -> bool:
    gpu, cpu = OLD.pools
    return _pools(self) == (gpu - OLD.cover, cpu) and group.held == OLD.cover


def _went_out(self: Any, group: Any, OLD: Any) -> bool:
    gpu, cpu = OLD.pools
    return _pools(self) == (gpu + OLD.held, cpu - OLD.size) and group.held == OLD.size


def _came_in(self: Any, group: Any, OLD: Any) -> bool:
    gpu, cpu = OLD.pools
    return _pools(self) == (gpu - OLD.cover, cpu + OLD.held) and group.held == OLD.cover


def _gpu_given_back(self: Any, group: Any, OLD: Any) -> bool:
    gpu, cpu = OLD.pools
    return _pools(self) == (gpu + OLD.held, cpu) and group.held == 0


def _cpu_given_back(self: Any, group: Any, OLD: Any) -> bool:
    gpu, cpu = OLD.pools
    return _pools(self) == (gpu, cpu + OLD.held) and group.held == 0


def _pools_unchanged(self: Any, OLD: Any) -> bool:
    return bool(_pools(self) == OLD.pools)


def _held_follows(self: Any, group: Any, OLD: Any) -> bool:
    gpu, cpu = OLD.pools
    return bool(self.gpu_free + group.held == gpu + OLD.held and self.cpu_free == cpu)


def _holds_nothing(group: Any) -> bool:
    return bool(group.held == 0 and not any(group.tables))


def _fits(self: Any, group: Any) -> bool:
    return bool(self.need(group) <= self.gpu_free)


_count_pools, _count_held = _old(_pools, "pools"), _old(_group_held, "held")

blocks_admit = _stack(
    _must(_holds_nothing, "B5", "a waiting group holds no block"),
    _count_pools,
    _old(_announced_cover, "cover"),
    _will(_took_cover, "B1", "admission takes what was announced"),
)
blocks_grow = _stack(
    _must(_fits, "B2g", "GPU blocks never exceed capacity"),
    _count_pools,
    _count_held,
    _old(_announced_need, "need"),
    _will(_took_need, "B1", "growing takes what was announced"),
)
blocks_swap_out = _stack(
    _count_pools,
    _count_held,
    _old(_announced_size, "size"),
    _will(_went_out, "B1", "swap-out moves what was announced"),
)
blocks_swap_in = _stack(
    _count_pools,
    _count_held,
    _old(_announced_cover, "cover"),
    _will(_came_in, "B1", "swap-in takes what was announced and gives the CPU blocks back"),
)
blocks_drop_gpu = _stack(
    _count_pools, _count_held, _will(_gpu_given_back, "B1", "dropping frees all blocks that the group holds")
)
blocks_drop_cpu = _stack(
    _count_pools, _count_held, _will(_cpu_given_back, "B1", "dropping frees all blocks that the group holds")
)
blocks_fork = _stack(_count_pools, _will(_pools_unchanged, "B1", "a fork shares blocks and takes none"))
blocks_finish_branch = _stack(
    _count_pools, _count_held, _will(_held_follows, "B1", "what a branch gives back the group no longer holds")
)


@contextmanager
def lifted() -> Iterator[None]:
    """Within it the plain functions serve, though contracts are on: for checkers that check the laws themselves."""
    from engine.scheduler.blocks import BlockManager
    from engine.scheduler.phases import Phases
    from engine.scheduler.scheduler import Scheduler

    checked = [
        (kind, name, function)
        for kind in (Scheduler, Phases, BlockManager)
        for name, function in vars(kind).items()
        if hasattr(function, "__wrapped__") and hasattr(function, "__postconditions__")
    ]
    for kind, name, function in checked:
        setattr(kind, name, function.__wrapped__)
    try:
        yield
    finally:
        for kind, name, function in checked:
            setattr(kind, name, function)
