"""Conditions: what the kernels rely on follows from the laws as they stand in `spec`, and from the launchers.

The laws' own predicates run here, on every step of small scope (`proofs.kernel_books`), lawful or not.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels.copy_blocks
import kernels.swap_blocks
from kernels.dispatch import choose
from kernels.paged_rows import PagedRows
from proofs import kernel_books as books
from proofs.kernel_replay import planted
from spec import kernels as need
from spec.views import Served


def let_through(*laws: str) -> tuple[int, Counter[str]]:
    """Of every small step that these laws allow: how many there are, and how many break each condition on moves."""
    allowed, broken = 0, Counter[str]()
    for homes, then in books.MOVES:
        for before, after in itertools.product(
            books.states(homes, b3="B3" in laws), books.states(then, b3="B3" in laws)
        ):
            was, now = books.state(before), books.state(after)
            for moves in books.lists(before, after):
                if "S9" not in laws or books.holds("S9", books.step(was, now, moves)):
                    allowed += 1
                    broken.update(need.broken_by(moves, books.GPU, books.CPU, books.SIZE))
    return allowed, broken


def test_the_conditions_on_moves_follow_from_the_laws() -> None:
    """S9 and B3, as they stand in `spec`, let no move through that names a block of no pool, a target twice or a chain.

    On every step of small scope, lawful or not: tables of any ids, and lists with any entry too many.  (Two branches
    that trade blocks would be a chain: S9 forbids a target that is a source.)
    """
    allowed, broken = let_through("B3", "S9")
    assert allowed > 1000
    assert set(broken) == set()


@pytest.mark.parametrize(
    ("law", "breaks"),
    [("S9", "targets_differ"), ("S9", "no_chain"), ("S9", "pair_in_pools"), ("B3", "pair_in_pools")],
)
def test_a_law_is_needed_for_each_condition_on_moves(law: str, breaks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of the two laws alone a step breaks the condition.  Two kinds of step are enough to show it."""
    monkeypatch.setattr(books, "MOVES", books.MOVES[4:5])
    monkeypatch.setattr(books, "IDS", {"gpu": (-1, 0, 3), "cpu": (0, 2), "none": ()})
    books.booked.cache_clear()
    assert breaks not in let_through("B3", "S9")[1]
    assert breaks in let_through("B3" if law == "S9" else "S9")[1]


@pytest.mark.parametrize("dropped", [None, "B3", "B6", "S10r"])
def test_the_conditions_on_rows_follow_from_the_laws_as_they_stand(dropped: str | None) -> None:
    """B3, B6 and S10r on every small step that gives two branches a token; without one of them a condition breaks."""
    allowed, broken = 0, Counter[str]()
    for known in (1, 2, 3):
        for both in books.states(("gpu", "none"), lengths=(1, 2), b3=dropped != "B3"):
            now = books.state(both, known)
            group = now.running[0]
            served = (Served(group, group, 2),)
            for plan in books.rows(group, known):
                view = books.step(now, now, plan, served)
                if all(books.holds(law, view) for law in ("S10r", "B6") if law != dropped):
                    allowed += 1
                    broken.update(need.broken_by(plan, books.GPU, books.CPU, books.SIZE))
    assert allowed > 40
    expected = {
        None: set(),
        "B3": {"entry_in_pool"},
        "B6": {"slots_differ"},
        "S10r": {"table_covers"},
    }
    assert set(broken) == expected[dropped]


def launches_of(module: Any, run: Any) -> list[tuple[bool, list[Any]]]:
    """(within one memory, (source, target) pairs) of every launch of the move kernel, after which nothing is moved."""
    made = []

    def launch(source: torch.Tensor, target: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
        assert all(need.pair_in_pools(a, b, source.shape[2], target.shape[2]) for a, b in pairs)
        made.append((source.data_ptr() == target.data_ptr(), pairs))

    kept, module.launch_move_blocks = module.launch_move_blocks, launch
    try:
        with choose("triton"), contextlib.suppress(IndexError, ValueError):
            run()
    finally:
        module.launch_move_blocks = kept
    return made


def chains(module: Any) -> int:
    """Launches, over every list of up to three moves between four blocks or beyond, that break a condition on moves."""
    pool, wrong = torch.zeros(1, 2, 4, 1, 1, 8), 0
    for count, ids in ((1, range(-1, 5)), (2, range(-1, 5)), (3, range(4))):
        for pairs in itertools.product(itertools.product(ids, repeat=2), repeat=count):
            for within, moved in launches_of(module, functools.partial(module.copy_blocks, pool, pairs)):
                targets = [target for _, target in moved]
                chain = within and any(not need.no_chain(a, b) for a, _ in moved for b in targets)
                wrong += chain or len(set(targets)) < len(targets)
    return wrong


def test_the_launcher_of_copies_starts_no_chain_whatever_the_list(tmp_path: Path) -> None:
    """All lists of up to three moves.  With its check gone it would."""
    assert chains(kernels.copy_blocks) == 0
    check = "if not {source for source, _ in pairs} & {target for _, target in pairs}:"
    assert chains(planted(kernels.copy_blocks, check, "if True:", tmp_path)) > 0


def test_the_launchers_of_swaps_meet_the_conditions_whatever_the_list() -> None:
    """All lists of up to two moves between three blocks and two, through staging memory of one block and of two."""
    device, host = torch.zeros(1, 2, 3, 1, 1, 8), torch.zeros(1, 2, 2, 1, 1, 8)
    seen = 0
    for staging, count in itertools.product((1, 200), (1, 2)):
        for pairs in itertools.product(itertools.product(range(-1, 4), repeat=2), repeat=count):
            for out in (True, False):
                swapper = kernels.swap_blocks.Swapper(device, host, staging)
                run = swapper.swap_out if out else swapper.swap_in
                for within, moved in launches_of(kernels.swap_blocks, functools.partial(run, pairs)):
                    assert not within
                    assert len({target for _, target in moved}) == len(moved)
                    seen += 1
    assert seen > 100


SPANS = [(start, end) for end in range(6) for start in range(end + 1)]


def test_rows_are_laid_out_as_the_address_proofs_take_them() -> None:
    """`proofs.kernel_worlds` assumes how rows and tiles lie; so they do, for all batches of up to three small rows."""
    seen = 0
    for count in (0, 1, 2, 3):
        for spans in itertools.product(SPANS, repeat=count):
            tables = [list(range(-(-end // 2))) for _, end in spans]
            rows = PagedRows([s for s, _ in spans], [e for _, e in spans], tables, 2, partition=2)
            begins, ends, decodes = rows.query_starts.tolist(), rows.ends.tolist(), rows.decode_rows.tolist()
            assert begins[0] == 0
            assert begins[-1] == rows.num_tokens
            assert all(
                b - a == end - start for (a, b), (start, end) in zip(itertools.pairwise(begins), spans, strict=True)
            )
            assert len(set(decodes)) == len(decodes)
            assert all(spans[row][1] - spans[row][0] == 1 for row in decodes)
            assert all(end <= rows.num_splits * rows.partition for end in ends)
            assert all(need.table_covers(rows.block_tables.shape[1], end, 2) for end in ends)
            for tokens, ride in itertools.product((1, 2, 3), (False, True)):
                tiles = list(zip(*(part.tolist() for part in rows.tiles(tokens, ride)), strict=True))
                made = [
                    (row, first + i) for row, first in tiles for i in range(tokens) if first + i < _length(spans[row])
                ]
                least = 1 if ride else 2
                assert sorted(made) == [
                    (r, i) for r, s in enumerate(spans) for i in range(_length(s)) if _length(s) >= least
                ]
                assert all(first % tokens == 0 and first < _length(spans[row]) for row, first in tiles)
                seen += len(tiles)
    assert seen > 10_000


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]
