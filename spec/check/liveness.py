"""Liveness on an explored graph: no lasso, and the most steps that any group ever takes to leave (law L3).

One group is marked at a time and followed by its place in the queues, so no symmetry is taken over it.  Nodes are
(state, place); components come from an iterative Tarjan.  A component with a step inside is a run that goes round for
ever while the marked group stays: without one, the longest path is the worst case, over everything the environment
may do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from spec.check.explore import Graph

FOREVER = -1


@dataclass(frozen=True, slots=True)
class Worst:
    """What an analysis found.  lasso: a state and place from which a group may stay for ever, or None.

    steps: for each node (state, place), in order, the most steps until the group there leaves.
    """

    nodes: int
    lasso: tuple[int, int] | None
    steps: list[int]
    base: list[int]

    def at(self, state: int, place: int) -> int:
        """The most steps until the group at this place leaves."""
        return self.steps[self.base[state] + place]


def analyse(graph: Graph) -> Worst:
    """Components and longest paths of the graph with one group marked."""
    base, nodes = [], 0
    for count in graph.groups:
        base.append(nodes)
        nodes += count
    states = [state for state, count in enumerate(graph.groups) for _ in range(count)]
    number = [0] * nodes  # order of discovery, from 1
    low = [0] * nodes
    worst = [0] * nodes
    on_stack = bytearray(nodes)
    stack: list[int] = []
    counter = 0
    successors: dict[int, list[tuple[int, bool]]] = {}

    def expand(node: int) -> list[tuple[int, bool]]:
        state = states[node]
        place = node - base[state]
        out = set()
        for there, is_step, _, ranks in graph.edges[state]:
            now = ranks[place]
            out.add((base[there] + now if now >= 0 else FOREVER, is_step))
        return list(out)

    for root in range(nodes):
        if number[root]:
            continue
        counter += 1
        number[root] = low[root] = counter
        stack.append(root)
        on_stack[root] = 1
        successors[root] = expand(root)
        work = [(root, iter(successors[root]))]
        while work:
            node, rest = work[-1]
            deeper = False
            for there, _ in rest:
                if there == FOREVER:
                    continue
                if not number[there]:
                    counter += 1
                    number[there] = low[there] = counter
                    stack.append(there)
                    on_stack[there] = 1
                    successors[there] = expand(there)
                    work.append((there, iter(successors[there])))
                    deeper = True
                    break
                if on_stack[there]:
                    low[node] = min(low[node], number[there])
            if deeper:
                continue
            work.pop()
            if work:
                parent = work[-1][0]
                low[parent] = min(low[parent], low[node])
            if low[node] == number[node]:
                component = set()
                while True:
                    member = stack.pop()
                    on_stack[member] = 0
                    component.add(member)
                    if member == node:
                        break
                longest = 0
                for member in component:
                    for there, is_step in successors.pop(member):
                        if there in component:
                            if is_step:
                                state = states[member]
                                return Worst(nodes, (state, member - base[state]), [], base)
                            continue
                        after = 0 if there == FOREVER else worst[there]
                        longest = max(longest, after + is_step)
                for member in component:
                    worst[member] = longest
    return Worst(nodes, None, worst, base)


def starved(graph: Graph) -> tuple[int, int] | None:
    """A state and place from which a group may go round for ever without being served, or None.

    The weaker question: transitions in which the marked group is given tokens are left out.
    """
    base, nodes = [], 0
    for count in graph.groups:
        base.append(nodes)
        nodes += count
    flat = Graph(groups=[1] * nodes)  # its states are the nodes, each with one group
    owner = []
    for state, count in enumerate(graph.groups):
        for place in range(count):
            owner.append((state, place))
            flat.edges.append(
                [
                    (base[there] + ranks[place], is_step, 0, (0,))
                    for there, is_step, served, ranks in graph.edges[state]
                    if not served >> place & 1 and ranks[place] >= 0
                ]
            )
    lasso = analyse(flat).lasso
    return None if lasso is None else owner[lasso[0]]


def arrivals(graph: Graph) -> list[tuple[int, int]]:
    """(state, place) of every group that has just arrived in the graph."""
    found: dict[tuple[int, int], None] = {}
    for state, edges in enumerate(graph.edges):
        for there, is_step, _, ranks in edges:
            if not is_step and graph.groups[there] == graph.groups[state] + 1 and all(r >= 0 for r in ranks):
                found[there, graph.groups[there] - 1] = None
    return list(found)


def lap(graph: Graph, state: int, place: int) -> list[tuple[int, bool]]:
    """A shortest way from a state back to it, with a step in it, on which the group at this place stays.

    (state, whether by a step) of each move; empty if there is no way.
    """
    start = state, place, False
    came: dict[tuple[int, int, bool], tuple[tuple[int, int, bool], bool] | None] = {start: None}
    queue = deque([start])
    while queue:
        here = queue.popleft()
        if here[:2] == (state, place) and here[2]:
            moves = []
            while (before := came[here]) is not None:
                moves.append((here[0], before[1]))
                here = before[0]
            return moves[::-1]
        for there, is_step, _, ranks in graph.edges[here[0]]:
            now = ranks[here[1]]
            node = there, now, here[2] or is_step
            if now >= 0 and node not in came:
                came[node] = here, is_step
                queue.append(node)
    return []
