"""Why the explorer may leave out what it leaves out: each short way finds what the plain one finds.

The tail of a step is what waits behind the most senior group that the step left waiting and never named.  A step whose
code does not look at it is run once for all tails; a group that comes out of a plan as it did before, with the same
word in the log, is looked at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from engine.scheduler import Scheduler
from proofs.mutants import MUTANTS, Mutant
from proofs.scopes import QUIET, SMALL, explored, new_group, scope
from spec import plain, views
from spec.check import sealed
from spec.check.codec import GROUP_FIELDS
from spec.check.explore import EACH_ALONE, Event, explore
from spec.check.image import Image, frozen
from spec.law import Kind, Tier

# long queues of a small menu: most steps have a tail
CROWDED = {
    "chunked": scope(-1, -1, gpu=6, cpu=3, size=1, tokens=4, seqs=4, menu=((1, 2, 3), (2, 1, 3)), groups=6, **QUIET),
    "prefill-first": scope(
        -1, -1, gpu=6, cpu=2, size=2, tokens=6, seqs=4, menu=((1, 2, 3), (3, 1, 4)), groups=6, chunked=False, **QUIET
    ),
    "chunked-stops": scope(
        -1, -1, gpu=5, cpu=2, size=2, tokens=4, seqs=3, menu=((1, 2, 3), (3, 1, 4)), groups=5, fails=True
    ),
}


@pytest.mark.parametrize("name", CROWDED)
def test_the_short_way_finds_the_same_graph(name: str) -> None:
    """Every state, in the same order, every transition, and everything that happened, as when all is evaluated."""
    world = CROWDED[name].world
    short = explored(world, graph=True, limit=2500)
    full = explored(world, graph=True, limit=2500, in_full=True)
    assert (short.states, short.edges, short.violation) == (full.states, full.edges, None)
    assert short.sometimes == full.sometimes
    assert short.graph == full.graph


@pytest.mark.parametrize(
    "name",
    ["chunked-n1-watermark", "prefill-first-n1-watermark", "chunked-one-token-a-step", "chunked-n2-cpu3-failures"],
)
def test_the_short_way_finds_the_same_graph_with_aborts(name: str) -> None:
    short = explored(SMALL[name].world, graph=True)
    full = explored(SMALL[name].world, graph=True, in_full=True)
    assert short.graph == full.graph
    assert short.sometimes == full.sometimes


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_the_short_way_finds_the_same_violation(mutant: Mutant) -> None:
    """The same law, by the same shortest run."""
    for one in CROWDED.values():
        world = one.world
        both = [
            explore(world, lambda w=world: mutant.build(w.config), mutant.new_group, limit=400, in_full=in_full)
            for in_full in (False, True)
        ]
        assert both[0].violation == both[1].violation
        assert (both[0].states, both[0].edges) == (both[1].states, both[1].edges)


# code that does look


class LooksAt(Scheduler):
    """Admits nobody, and keeps no watermark of decodes, when what it looks at says so."""

    look: Callable[[Any], bool]

    def _admit(self, step: Any) -> None:
        if not (self.running and self.waiting and type(self).look(self)):
            super()._admit(step)


LOOKS: dict[str, Callable[[Any], bool]] = {
    "how many wait": lambda s: len(s.waiting) > 3,
    "who waits last": lambda s: s.waiting[-1].n == 2 and s.waiting[0].n == 1,
    "who waits third": lambda s: [g.n for g in islice(s.waiting, 3)] == [1, 1, 2],
    "all who wait": lambda s: sum(g.prompt_len for g in s.waiting) > 6,
    "a copy of those who wait": lambda s: len(list(s.waiting)) > 3,
    "who waits, from the end": lambda s: next(reversed(s.waiting)).n == 1 and s.waiting[0].n == 2,
    "how many are in the books": lambda s: len(s.groups) > 4,
    "somebody by name": lambda s: "e" in s.groups,
    "somebody by name, if there": lambda s: s.groups.get("e") is not None,
    "all in the books": lambda s: sum(g.n for g in s.groups.values()) > 6,
    "how many came": lambda s: s.num_arrivals > 4,
    "whether many came, quietly": lambda s: quietly(lambda: s.num_arrivals > 4),
    "how many wait, quietly": lambda s: quietly(lambda: len(s.waiting) > 3),
}


def quietly(look: Callable[[], bool]) -> bool:
    try:
        return look()
    except Exception:
        return False


@pytest.mark.parametrize("what", LOOKS)
def test_a_fault_that_shows_only_with_certain_tails_is_found_in_the_same_run(what: str) -> None:
    """What a step run once for all tails would miss, if it were not seen that its code looks at the tail."""
    faulty = type("Faulty", (LooksAt,), {"look": staticmethod(LOOKS[what])})
    world = CROWDED["chunked"].world
    both = [explore(world, lambda: faulty(world.config), new_group, in_full=in_full) for in_full in (False, True)]
    assert both[0].violation is not None
    assert both[0].violation.law.id == "S11w"
    assert both[0].violation == both[1].violation
    assert (both[0].states, both[0].edges) == (both[1].states, both[1].edges)


class UpdatesByTail(Scheduler):
    """Forgets that a group drew a token when many are unfinished."""

    def _sample(self, group: Any, stopped: Any) -> None:
        if len(self.waiting) > 3 and group.forked:
            group.deficit = group.live
        else:
            super()._sample(group, stopped)


class AddsByState(Scheduler):
    """A group that comes while many wait, or somebody is swapped, begins with a token."""

    def add(self, group: Any) -> Any:
        if len(self.waiting) > 3 or (len(self.swapped) == 1 and len(self.waiting) == 2):
            group.known += 1
        return super().add(group)


class AddsByBlocks(Scheduler):
    """A group that comes while the pool is nearly full begins with a token."""

    def add(self, group: Any) -> Any:
        if self.blocks.gpu_free == 1 and group.n == 2:
            group.deficit += 1
        return super().add(group)


@pytest.mark.parametrize("faulty", [UpdatesByTail, AddsByState, AddsByBlocks])
def test_a_fault_of_update_or_add_that_depends_on_others_is_found_in_the_same_run(faulty: Any) -> None:
    world = CROWDED["chunked"].world
    both = [explore(world, lambda: faulty(world.config), new_group, in_full=in_full) for in_full in (False, True)]
    assert both[0].violation is not None
    assert both[0].violation == both[1].violation
    assert (both[0].states, both[0].edges) == (both[1].states, both[1].edges)


MORE_WAIT = {
    deque: lambda: sealed.Queue(["head"]),
    dict: lambda: sealed.Books({"head": 1}),
    int: sealed.Nothing,
}
SHOWN = {  # what may be done with the elements that are shown; each is tried below with one that is not
    deque: {"__bool__", "__getitem__", "popleft", "appendleft", "append"},
    dict: {"__bool__", "__contains__", "__getitem__", "get", "__setitem__", "__delitem__"},
    int: set(),
}
MAKING = {
    *("__class__", "__class_getitem__", "__delattr__", "__doc__", "__getattribute__", "__setattr__", "__new__"),
    *("__init__", "__init_subclass__", "__subclasshook__"),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in MORE_WAIT for name in sorted(set(dir(kind)) - MAKING - SHOWN[kind])],  # type: ignore[arg-type]
)
def test_nothing_can_be_asked_of_what_is_sealed(kind: type, name: str) -> None:
    """Every method that the real container has, these too that a later Python adds."""
    thing = MORE_WAIT[kind]()  # type: ignore[index]
    assert not thing.looked
    with pytest.raises(sealed.LookedError):
        getattr(type(thing), name)(thing)
    assert thing.looked


@pytest.mark.parametrize(
    "ask",
    [
        lambda queue, _: queue[1],
        lambda queue, _: queue[-1],
        lambda queue, _: queue.append(1),
        lambda queue, _: len(queue),
        lambda queue, _: list(queue),
        lambda queue, _: [*queue],
        lambda queue, _: deque(queue),
        lambda queue, _: queue == deque(["head"]),
        lambda queue, _: deque(["head"]) == queue,
        lambda queue, _: (queue.popleft(), bool(queue)),
        lambda queue, _: (queue.popleft(), queue.popleft()),
        lambda queue, _: (queue.popleft(), queue[0]),
        lambda _, books: books["tail"],
        lambda _, books: books.get("tail"),
        lambda _, books: "tail" in books,
        lambda _, books: len(books),
        lambda _, books: dict(books),
        lambda _, books: {**books},
        lambda _, books: books == {"head": 1},
        lambda _, books: (books.__delitem__("head"), bool(books)),
        lambda _, books: books.__setitem__("tail", 1),
    ],
)
def test_only_what_is_shown_can_be_taken(ask: Callable[[Any, Any], Any]) -> None:
    queue, books = sealed.Queue(["head"]), sealed.Books({"head": 1})
    assert queue
    assert queue[0] == "head"
    assert books
    assert books["head"] == 1
    with pytest.raises(sealed.LookedError):
        ask(queue, books)
    assert queue.looked or books.looked


# outcomes of one plan


class LogsOneEnd(Scheduler):
    """Of the groups that lose a branch in one step only the first is logged."""

    def _note(self, verb: str, group: Any, blocks: int = 0, detail: str = "") -> None:
        if verb == "finish_branch" and any(
            one.verb == verb and one.request_id != group.request_id for one in self._log
        ):
            return
        super()._note(verb, group, blocks, detail)


class CountsTogether(Scheduler):
    """When two groups sample in one step and the first has lost a branch before, the second lacks one token too few."""

    def _sample(self, group: Any, stopped: Any) -> None:
        super()._sample(group, stopped)
        if group.live == 2 and len(self.running) > 1 and self.running[0] is not group and self.running[0].live == 1:
            group.deficit = 1


@pytest.mark.parametrize(("faulty", "law"), [(LogsOneEnd, "N3"), (CountsTogether, "S12")])
def test_a_fault_that_shows_only_when_two_groups_meet_in_one_outcome_is_found(faulty: Any, law: str) -> None:
    """What looking once at each group that comes out of a plan would miss, if less was compared."""
    world = SMALL["chunked-n2-cpu4"].world
    both = [explore(world, lambda: faulty(world.config), new_group, in_full=in_full) for in_full in (False, True)]
    assert both[0].violation is not None
    assert both[0].violation.law.id == law
    assert both[0].violation == both[1].violation
    assert (both[0].states, both[0].edges) == (both[1].states, both[1].edges)


@pytest.mark.parametrize("name", ["chunked-stops", "chunked"])
@pytest.mark.parametrize("mutant", [None, *MUTANTS[::4]], ids=lambda mutant: getattr(mutant, "id", "production"))
def test_a_law_about_each_group_alone_says_the_same_of_one_as_among_others(name: str, mutant: Mutant | None) -> None:
    compared = 0

    def compare(step: views.Step, turn: views.Round, event: Event) -> None:
        nonlocal compared
        nobody = turn.after._replace(running=(), swapped=(), waiting=(), groups=())
        ones = [
            nobody._replace(**{queue: (g,)})
            for queue in ("running", "swapped", "waiting")
            for g in getattr(turn.after, queue)
        ]
        for law in EACH_ALONE:
            compared += 1
            assert holds(law, turn) == all(holds(law, turn._replace(after=one)) for one in ones), f"{law} {event}"

    world = CROWDED[name].world
    fault = mutant
    make = (lambda: Scheduler(world.config)) if fault is None else (lambda: fault.build(world.config))
    try:
        explore(world, make, fault.new_group if fault else new_group, laws=["L3"], step_hook=compare, limit=200)
    except (IndexError, KeyError, ValueError):
        assert mutant is not None  # a fault that no view can show
        return
    assert compared > 20 or mutant is not None


def without(s: views.State, tail: frozenset[str]) -> views.State:
    return s._replace(
        waiting=tuple(g for g in s.waiting if g.request_id not in tail),
        groups=tuple(name for name in s.groups if name not in tail),
    )


def tail_of(turn: views.Round) -> frozenset[str]:
    """Who waits behind the most senior group that was left alone, if these groups were left as they were."""
    step = turn.step
    named = {entry[1] for entry in step.plan.log} | set(step.given)
    place = max((i + 1 for i, g in enumerate(step.before.waiting) if g.request_id in named), default=0)
    tail = step.before.waiting[place + 1 :]
    if any(s.waiting[len(s.waiting) - len(tail) :] != tail for s in (step.mid, turn.after)):
        return frozenset()
    return frozenset(g.request_id for g in tail)


@pytest.mark.parametrize("name", CROWDED)
@pytest.mark.parametrize("mutant", [None, *MUTANTS[::4]], ids=lambda mutant: getattr(mutant, "id", "production"))
def test_every_law_says_the_same_without_the_tail(name: str, mutant: Mutant | None) -> None:
    """One by one, of lawful and of unlawful steps: only the state before must be lawful, as every explored state is."""
    compared = 0
    laws = [
        one
        for kind in (Kind.STATE, Kind.MID, Kind.STEP, Kind.ROUND)
        for tier in (Tier.COUNTS, Tier.IDS)
        for one in plain.of(kind, tier)
        if not (kind is Kind.STATE and tier is Tier.IDS)  # they read pools, where the tail has nothing
    ]

    def compare(step: views.Step, turn: views.Round, event: Event) -> None:
        nonlocal compared
        tail = tail_of(turn)
        if not tail or plain.check_state(step.before):
            return
        cut_step = step._replace(
            before=without(step.before, tail),
            mid=without(step.mid, tail),
            was={name: g for name, g in step.was.items() if name not in tail},
            now={name: g for name, g in step.now.items() if name not in tail},
        )
        cut = views.Round(cut_step, without(turn.after, tail), turn.departed)
        compared += 1
        for law in laws:
            whole: Any = turn.after if law.kind is Kind.STATE else turn if law.kind is Kind.ROUND else step
            part: Any = cut.after if law.kind is Kind.STATE else cut if law.kind is Kind.ROUND else cut_step
            assert holds(law.id, whole) == holds(law.id, part), f"{law} {event}"

    world = CROWDED[name].world
    fault = mutant
    make = (lambda: Scheduler(world.config)) if fault is None else (lambda: fault.build(world.config))
    try:
        explore(world, make, fault.new_group if fault else new_group, laws=["L3"], step_hook=compare, limit=300)
    except (IndexError, KeyError, ValueError):
        assert mutant is not None  # a fault that no view can show
        return
    assert compared > 20 or mutant is not None


def holds(id: str, view: Any) -> bool:
    try:
        return bool(plain.PLAIN[id](view))
    except Exception:
        return False


# what is compared


def busy() -> tuple[Any, list[Any]]:
    """A scheduler between schedule() and update(), with somebody in every queue."""
    s = Scheduler(SMALL["chunked-n2-swap"].world.config)
    for name in "abcdef":
        s.add(new_group(name, 1, 1, 4))
    for _ in range(20):
        if s.running and s.swapped and s.waiting:
            break
        s.update(s.schedule())
    s.schedule()
    return s, [*s.running, *s.swapped, *s.waiting]


@pytest.mark.parametrize("field", sorted(GROUP_FIELDS))
def test_an_image_tells_every_field_of_a_group(field: str) -> None:
    s, groups = busy()
    for g in groups:
        image = Image(s, groups, ("decodes_owed",))
        assert image.same(s, [], [])
        old = getattr(g, field)
        other = [*old, [9]] if isinstance(old, list) else "z" if isinstance(old, str) else not old
        setattr(g, field, other if isinstance(old, list | str | bool) else 77)
        assert not image.same(s, [], [])
        image.load(s, [])
        assert getattr(g, field) == old
        assert image.same(s, [], [])


@pytest.mark.parametrize("field", ["running", "swapped", "waiting", "decodes_owed"])
def test_an_image_tells_the_queues(field: str) -> None:
    s, groups = busy()
    image = Image(s, groups, ("decodes_owed",))
    old = getattr(s, field)
    setattr(s, field, not old if isinstance(old, bool) else type(old)([*old][1:]))
    assert not image.same(s, [], [])
    image.load(s, [])
    assert getattr(s, field) == old


@pytest.mark.parametrize("pool", ["gpu", "cpu"])
@pytest.mark.parametrize("field", ["free", "refs"])
def test_an_image_tells_the_pools(pool: str, field: str) -> None:
    s, groups = busy()
    image = Image(s, groups, ("decodes_owed",))
    getattr(getattr(s.blocks, pool), field).append(0)
    assert not image.same(s, [], [])
    image.load(s, [])
    assert image.same(s, [], [])


def test_plans_that_differ_in_one_place_are_told_apart() -> None:
    s, _ = busy()
    plan = s._plan
    twin = frozen(plan)
    assert plan == twin
    for field in (
        "scheduled",
        "blocks_to_swap_out",
        "blocks_to_swap_in",
        "blocks_to_copy",
        "log",
        "groups",
        "preempted",
    ):
        getattr(plan, field).append(None)
        assert plan != twin
        getattr(plan, field).pop()
    plan.scheduled[0].block_table.append(5)
    assert plan != twin
    plan.scheduled[0].block_table.pop()
    plan.scheduled[-1].slots[0] += 1
    assert plan != twin
