"""Groups as they come out of one plan, each looked at once.

The outcomes of a plan are many, but a group comes out of it in a few ways: what stands for it in the key of a state,
and what the laws about each group alone say of it, depend on its own fields, on the plan and on what the log says of
it.  So these are kept with the fields, list by list, and found again by comparing all of them.
"""

from __future__ import annotations

from typing import Any

from spec.check.codec import Codec, UnfaithfulError
from spec.check.image import full
from spec.laws_ids import filed_as_due


class Form:
    """A group as it was once: all its fields, and what stands for it in a key.

    fair: it is as a group between two steps must be.  told: what the log said of it whenever it was found right.
    """

    __slots__ = ("arrival", "counts", "fair", "head", "name", "order", "references", "status", "told", "values")

    def __init__(self, codec: Codec, g: Any, values: tuple[Any, ...]) -> None:
        """values: of the group as it is now; nobody else may touch their lists."""
        self.values = values
        self.name, self.arrival, self.status = g.request_id, g.arrival, g.status
        self.told: list[Any] = []
        self.fair = not g.tokens and not (g.status is codec.statuses[2] and any(g.tables))
        if g.status in codec.statuses and self.fair:
            self.head, self.order, self.references, self.counts = codec.head(g)


Forms = list[list[Form]]  # for each group, the forms it was met in


def find(
    codec: Codec, everyone: list[Any], forms: Forms, before: list[tuple[Any, ...]]
) -> tuple[list[Form], list[int]]:
    """The form that each group has now, and which are not as before.  A group that is not must be put back with lists
    of its own before it is touched again: these are kept."""
    found, changed = [], []
    for place, values in enumerate(map(full, everyone)):
        was = before[place]
        for form in forms[place]:
            if form.values == values:
                if form.values is not was:
                    changed.append(place)
                break
        else:
            if values == was:
                form = Form(codec, everyone[place], was)
            else:
                form = Form(codec, everyone[place], values)
                changed.append(place)
            forms[place].append(form)
        found.append(form)
    return found, changed


def parts(
    codec: Codec, s: Any, everyone: list[Any], found: list[Form]
) -> tuple[bytes, tuple[bytes, ...], list[tuple[Any, Form]]]:
    """The key as `Codec.parts` says it, from the forms of the groups, which come too, in order of the queues.

    UnfaithfulError also where the groups are not those, or not in that order: then ask the codec.
    """
    running, swapped, waiting = s.running, s.swapped, s.waiting
    queued = [*running, *swapped, *waiting]
    groups = s.groups
    if s._plan is not None or s._aborting or [*groups.values()] != queued or not filed_as_due(s):
        raise UnfaithfulError
    here = []
    place = 0
    try:
        for g in queued:
            while everyone[place] is not g:
                place += 1
            here.append(found[place])
            place += 1
    except IndexError:
        raise UnfaithfulError from None
    if [*groups] != [form.name for form in here]:
        raise UnfaithfulError
    core = [bytes((len(running), len(swapped), s.decodes_owed, *[getattr(s, name) for name in codec.extra]))]
    at, arrival = 0, -1
    for queue, status, pool in (
        (running, codec.statuses[0], s.blocks.gpu),
        (swapped, codec.statuses[1], s.blocks.cpu),
    ):
        refs, free = pool.refs, pool.free
        named = bytes(free)
        for form in here[at : at + len(queue)]:
            if form.status is not status or not form.fair or form.arrival <= arrival:
                raise UnfaithfulError
            arrival = form.arrival
            if form.references(refs) != form.counts:
                raise UnfaithfulError
            named += form.order
            core.append(form.head)
        at += len(queue)
        if len(named) != pool.capacity or len({*named}) != len(named) or refs.count(0) != len(free):
            raise UnfaithfulError
    kinds = []
    status = codec.statuses[2]
    for form in here[at:]:
        if form.status is not status or not form.fair or form.arrival <= arrival:
            raise UnfaithfulError
        arrival = form.arrival
        kinds.append(form.head)
    return b"".join(core), tuple(kinds), list(zip(queued, here, strict=True))
