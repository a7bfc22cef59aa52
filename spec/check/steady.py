"""The decodes of a trace that go on as they did: each is looked at once, and from then on counted together with others.

Most of what a trace says is that decodes went on: the same blocks, a token more for each branch.  A group of which all
laws have been seen to hold becomes a *lane*, for as long as the block that its branches write to has room and a token
is left to generate.  In a line in which nothing else is said of it than what a lane does, it needs no look of its own:

- What its rows compute, slot by slot, and its new length are compared with what they must be: S10, S10r, S12, S12r.
- Nothing else of it changes, so every law about it alone (B4, B4t, B5, Q3, Q5 to Q9, M1 to M5, S20, N3) says what it
  said when it was looked at, as long as its length stays within `last`: up to there it holds exactly what it covers
  while it runs (M1), which is what is filled when it has (B4, B4t), and has not generated all its tokens (Q6).
- Nobody else can name its blocks without B5t noticing, so it writes alone (B6), and each position gets its own token
  (B7): those are written into the shadow pools when the lane ends, before anything can move them.
- Laws that add up (B1, B2g, S5, S5s, S11, S21) and laws about neighbours and order (Q1, Q2, Q4, L1, L2, L4, S4, S6) are
  evaluated with one group in place of all lanes, the *ghost*: it holds their blocks, has their branches, runs where the
  last of them runs.  All that is asked of the lanes before it follows: they are decodes, run, are served, and lose
  nothing.  That stands as long as they keep their places, which `Lanes.look` sees to; where it is in doubt, or a law
  seems broken, all groups are looked at one by one.

If a line says nothing else at all, and the line before did not either, the laws are given what they were given then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from spec.check.shadow import _BRANCH, _GROUP
from spec.views import Group
from spec.words import Measure, remaining_work

GHOST = "\0"  # the id of the ghost; a trace with a group of this name has no lanes
_made: Any = tuple.__new__


class Lane(NamedTuple):
    """A decode that goes on.  known, slots: its length and its next slots, less the beat; they grow with it.

    last: the last beat at which its blocks have room and tokens are left.  born: the beat at which it was looked at.
    """

    known: int
    last: int
    slots: list[int]
    live: int
    held: int
    born: int


class _Many:
    """The branches of the ghost: counted, not listed."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(())


class _Measure(Measure):
    """Block counts: of the ghost what it holds; what groups fill is computed once for equal counts."""

    __slots__ = ("known",)

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.known: dict[Any, Any] = {}

    def cover(self, g: Any) -> Any:
        return g.held if g.request_id == GHOST else Measure.cover(self, g)

    def filled(self, g: Any) -> Any:
        if g.request_id == GHOST:
            return g.held
        key = g.prompt_len, g.shared_tokens, g.shared_blocks, g.live, g.known, g.deficit, g.forked, g.tail_shared
        if key not in self.known:
            if len(self.known) > 10_000:
                self.known.clear()
            self.known[key] = Measure.filled(self, g)
        return self.known[key]

    def peak(self, g: Any) -> Any:
        return 0 if g.request_id == GHOST else Measure.peak(self, g)


class Lanes:
    """The lanes of the books of an audit, and the beat: how many lines have been accepted.

    settled: the line before said nothing but that the lanes go on.
    """

    def __init__(self, books: Any) -> None:
        self.books = books
        self.size: int = books.config.block_size
        self.beat = 0
        self.by_name: dict[str, Lane] = {}
        self.live = 0
        self.held = 0
        self.place = 0  # decodes of the line that are no lanes and run before the last lane
        self.settled = False
        self.measure = _Measure(self.size)

    # begin and end

    def begin(self, name: str) -> None:
        """Make a lane of a group that has been looked at, if it is a decode that can go on."""
        books, size = self.books, self.size
        g = books.groups.get(name)
        if g is None or not g.forked or g.tail_shared is not False or g.deficit != g.live or g.tokens:
            return
        tables = [g.tables[branch] for branch in g.branches]
        length, block = len(tables[0]), (g.known - 1) // size
        roof = min(length * size, g.prompt_len + g.max_tokens - 2)
        if block != length - 1 or g.known > roof or any(len(table) != length for table in tables):
            return
        if len(tables) != g.live or g.held != g.shared_blocks + g.live * (length - g.shared_blocks):
            return
        if books.home.get(name) != "running" or name not in books.members or GHOST in books.groups:
            return
        refs, offset = books.pools[0].refs, (g.known - 1) % size - self.beat
        if any(refs[table[block]] != 1 for table in tables) or list(g.branches) != sorted(set(g.branches)):
            return
        slots = [table[block] * size + offset for table in tables]
        known = g.known - self.beat
        self.by_name[name] = _made(Lane, (known, roof - known, slots, g.live, g.held, self.beat))
        self.live += g.live
        self.held += g.held

    def end(self, name: str) -> None:
        """The group is to be looked at again: the books say what it has become."""
        lane = self.by_name.pop(name)
        self.live -= lane.live
        self.held -= lane.held
        steps = self.beat - lane.born
        if not steps:
            return
        books, first = self.books, lane.known + lane.born - 1
        g = books.groups[name]
        books.groups[name] = g = _made(Group, (*g[:8], lane.known + self.beat, *g[9:]))
        books.works[name] = remaining_work(g)
        known, own = books.verified[name], (g.arrival + 1) * _GROUP + first
        for branch, slot in zip(g.branches, lane.slots, strict=True):
            token, slot = own + (branch + 1) * _BRANCH, slot + lane.born
            books.shadow.gpu[slot : slot + steps] = range(token, token + steps)
            known[branch] = first + steps

    def end_all(self) -> None:
        """All groups are to be looked at."""
        for name in list(self.by_name):
            self.end(name)

    def advance(self) -> None:
        """A line is over in which all lanes went on."""
        self.beat += 1

    # a line

    def look(self, line: dict[str, Any]) -> None:
        """End the lanes of which the line says anything but that they go on; all of them where that is in doubt."""
        if not self.by_name:
            return
        try:
            sure = line["outcome"] == "update" and self._keep_places(line) and self._go_on(line)
        except Exception:
            sure = False  # the line makes no sense: whoever reads it in full will say so
        if not sure:
            self.end_all()

    def _keep_places(self, line: dict[str, Any]) -> bool:
        """End the lanes that anything is said of; whether the others keep their places in the queue and in the plan.

        Nobody comes in before the last of them, and nobody gets another seniority.
        """
        books, lanes = self.books, self.by_name
        queue = books.queues["running"]
        named = {entry[1] for part in ("events", "log", "logged") for entry in line.get(part, ())}
        named.update([name for name, _ in line["run"]])
        if GHOST in named:
            return False
        first = len(queue)
        for part in ("before", "mid", "after"):
            change = line.get(part, {})
            for name, stated in change.get("groups", {}).items():
                if "arrival" in stated and name in books.groups:
                    return False
                named.add(name)
            named.update([name for name, _ in change.get("left", ())])
            named.update(change.get("joined", ()))
            for other in ("swapped", "waiting"):
                for _, _, inserted in splices(change.get(other, ())):
                    named.update(inserted)
            if "running" in change:
                parts = list(splices(change["running"]))
                after = list(queue)
                for at, removed, inserted in reversed(parts):
                    if inserted and part != "mid":
                        return False
                    named.update(queue[at : at + removed])
                    named.update(inserted)
                    after[at : at + removed] = inserted
                if part == "mid" and parts:
                    first = parts[0][0]
                    for name in named & lanes.keys():
                        self.end(name)
                    if any(name in lanes for name in queue[first:]):
                        return False
                queue = after
        for name in named & lanes.keys():
            self.end(name)
        return True

    def _go_on(self, line: dict[str, Any]) -> bool:
        """End the lanes that do not go on just as they must; whether the columns are of one length."""
        lanes, beat, groups = self.by_name, self.beat, self.books.groups
        names, ends, slots, known = line["decodes"], line["ends"], line["slots"], line["after"]["known"]
        if not len(names) == len(ends) == len(known) == len(set(names)):
            return False
        mid = line["mid"]
        stated = mid.get("groups", {})
        brought = {name for _, _, inserted in splices(mid.get("running", ())) for name in inserted}
        at = count = others = self.place = 0
        entered = False
        for name, end, length in zip(names, ends, known, strict=True):
            lane = lanes.get(name)
            if lane is None:
                others += 1
                at += len(stated[name].get("branches", ()) if name in stated else ()) or len(groups[name].branches)
                entered = entered or name in brought
                continue
            live, right = lane.live, lane.slots
            if live == 1:
                same = slots[at] - beat == right[0]
            else:
                same = [slot - beat for slot in slots[at : at + live]] == right
            at += live
            if same and end - beat == lane.known and length == end + 1 and beat <= lane.last:
                if entered:
                    return False
                count += 1
                self.place = others
            else:
                others += 1
                self.end(name)
        if count != len(lanes):
            served = set(names)
            for name in [name for name in lanes if name not in served]:
                self.end(name)
        return at == len(slots)

    # what stands for the lanes

    def ghost(self) -> Group | None:
        """The group that stands for all lanes, before a step; None if there are none.

        Its own numbers are the least that a decode can have: `went_on` has one token more.
        """
        if not self.by_name:
            return None
        whole = self.size == 1
        queue = self.books.queues["running"]
        arrival = next(self.books.groups[name].arrival for name in reversed(queue) if name in self.by_name)
        many: Any = _Many(self.live)
        return Group(
            GHOST, arrival, 1, self.live, 3, int(whole), int(whole), self.live, 2, self.live, True, False, self.held, 0,
            many, (), self.books.groups[next(iter(self.by_name))].status,
        )  # fmt: skip

    def group(self, name: str, more: int, tokens: bool) -> Group:
        """A lane as a group of its own.  more: tokens beyond those before the line.  tokens: in mid-step."""
        lane, g = self.by_name[name], self.books.groups[name]
        return g._replace(known=lane.known + self.beat + more, tokens=lane.live if tokens else 0)  # type: ignore[no-any-return]


def splices(stated: Any) -> Iterator[tuple[int, int, list[str]]]:
    """What a line says of a queue: at this index of the old one so many are replaced by these; from front to back."""
    return zip(stated[::3], stated[1::3], stated[2::3], strict=True)
