"""Small operations on plain arguments, for CrossHair: leading asserts are what is assumed, later ones what is claimed.

CrossHair executes the code with symbols of its own and its own search over paths, so it shares nothing with the
executor of spec/check/symbolic.py but the production code and the laws.  `broken_` functions carry a planted fault.
"""

from __future__ import annotations

from typing import Any

from engine.scheduler import PreemptionMode, Scheduler, SequenceGroup
from proofs import faults_symbolic as faults
from proofs.steps import lawful, schedule, step_laws
from proofs.worlds import Shape, World, build


class Given(dict[str, Any]):
    """A source of the numbers given to a function."""

    def integer(self, name: str) -> Any:
        return self[name]

    def boolean(self, name: str) -> Any:
        return self[name]


def group_piece(forked: bool, live: int, deficit: int, budget: int) -> int:
    """A piece is within the budget, and all that is lacking or little enough to leave every branch a token."""
    assert live >= 1
    assert deficit >= (live if forked else 1)
    assert budget >= live
    group = SequenceGroup("a", 1)
    group.forked, group.live, group.deficit = forked, live, deficit
    piece = group.piece(budget)
    assert 1 <= piece <= budget
    assert piece == deficit or piece <= deficit - (live if forked else 0)
    return piece


class _TakesTheLast(SequenceGroup):
    """A piece may take the token that a branch must keep for the common sample."""

    def piece(self, budget: int) -> int:
        return min(budget, self.deficit)


def broken_piece(live: int, deficit: int, budget: int) -> int:
    """The claim of `group_piece` for a faulty group."""
    assert live >= 1
    assert deficit >= live
    assert budget >= live
    group = _TakesTheLast("a", 1)
    group.forked, group.live, group.deficit = True, live, deficit
    piece = group.piece(budget)
    assert piece == deficit or piece <= deficit - live
    return piece


def _config(gpu: int, cpu: int, tokens: int, seqs: int) -> dict[str, Any]:
    return {
        "gpu_blocks": gpu,
        "cpu_blocks": cpu,
        "max_model_len": 100,
        "max_num_batched_tokens": tokens,
        "max_num_seqs": seqs,
        "watermark": 0,
    }


def _decode(name: str, generated: int, held: int, cover: int) -> dict[str, Any]:
    """A decode of one branch."""
    numbers = {
        "prompt_len": 4,
        "shared_blocks": 0,
        "shared_tokens": 0,
        "max_tokens": 50,
        "generated": generated,
        "deficit": 1,
        "held": held,
        "n": 1,
        "live": 1,
        "tails": 4 + generated,
        "tail_shared": False,
        "cover": cover,
        "filled": held,
        "peak": cover,
    }
    return {f"{name}.{what}": value for what, value in numbers.items()}


def _waits(name: str, prompt: int, cover: int) -> dict[str, Any]:
    """A prompt that waits."""
    numbers = {
        "prompt_len": prompt,
        "shared_blocks": 0,
        "shared_tokens": 0,
        "max_tokens": 9,
        "deficit": prompt,
        "held": 0,
        "n": 1,
        "cover": cover,
        "filled": 0,
        "peak": cover,
    }
    return {f"{name}.{what}": value for what, value in numbers.items()}


def _keeps_the_laws(world: World) -> bool:
    """schedule() in this world."""
    for claim in step_laws(schedule(world)).values():
        assert claim
    return True


def _one_decode(gpu: int, free: int, held: int, cover: int, tokens: int) -> World:
    given = _config(gpu, 0, tokens, 1) | {"gpu_free": free, "cpu_free": 0} | _decode("a", 3, held, cover)
    return build(Shape(1, 0, 0, forked=1), Given(given))


def one_decode_keeps_every_law(gpu: int, free: int, held: int, cover: int, tokens: int) -> bool:
    """schedule() with one running decode."""
    assert all(lawful(_one_decode(gpu, free, held, cover, tokens)))
    return _keeps_the_laws(_one_decode(gpu, free, held, cover, tokens))


def _one_prompt(gpu: int, prompt: int, cover: int, tokens: int) -> World:
    given = _config(gpu, 0, tokens, 1) | {"gpu_free": gpu, "cpu_free": 0} | _waits("a", prompt, cover)
    return build(Shape(0, 0, 1), Given(given))


def one_prompt_keeps_every_law(gpu: int, prompt: int, cover: int, tokens: int) -> bool:
    """schedule() with one waiting prompt."""
    assert all(lawful(_one_prompt(gpu, prompt, cover, tokens)))
    return _keeps_the_laws(_one_prompt(gpu, prompt, cover, tokens))


def _two_decodes(cpu: int, free: int, a: int, b: int, need: int, policy: type[Scheduler] = Scheduler) -> World:
    """The older of the two may need more than there is."""
    given = _config(free + a + b, cpu, 8, 4) | {"gpu_free": free, "cpu_free": cpu}
    given |= _decode("a", 3, a, a + need) | _decode("b", 3, b, b)
    given |= {"a.peak": a + need, "b.peak": b}
    return build(Shape(2, 0, 0, mode=PreemptionMode.SWAP, forked=2), Given(given), policy)


def two_decodes_keep_every_law(cpu: int, free: int, a: int, b: int, need: int) -> bool:
    """schedule() with two running decodes."""
    assert all(lawful(_two_decodes(cpu, free, a, b, need)))
    return _keeps_the_laws(_two_decodes(cpu, free, a, b, need))


def broken_two_decodes(cpu: int, free: int, a: int, b: int, need: int) -> bool:
    """The same with a swap-out that does not look for room."""
    assert all(lawful(_two_decodes(cpu, free, a, b, need)))
    return _keeps_the_laws(_two_decodes(cpu, free, a, b, need, faults.SwapsOutIntoNothing))


def broken_growth(cpu: int, free: int, a: int, b: int, need: int) -> bool:
    """The same with growth that asks for one block too many."""
    assert all(lawful(_two_decodes(cpu, free, a, b, need)))
    return _keeps_the_laws(_two_decodes(cpu, free, a, b, need, faults.GrowsOneBlockTooEarly))
