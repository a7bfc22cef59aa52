"""Engines for tests: core, KV oracle, sampler and all invariants after every step, made in one line.

    world = World(gpu=8, cpu=2)
    world.add("A", p=4, n=2, m=12)
    world.drain()
    assert world.same_as_alone("A")

Requests are sampled with a seed of their own, so that the branches of a group differ and a mix-up of branches shows.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.core import EngineCore
from engine.llm import LLM
from engine.models.oracle import Favourites, OracleRunner
from engine.outputs import RequestOutput
from engine.request import RequestState, StepOutput
from engine.sampler import Sampler
from engine.sampling import SamplingParams
from engine.scheduler import Plan, Scheduler, SchedulerConfig, SequenceGroup, Status
from engine.tokenizer import Tokenizer
from tests import worlds

AMPLE = 4096  # blocks


class CheckedRunner(OracleRunner):
    """The KV oracle; checks every plan before it is carried out and remembers all of them.

    between: called with the plan after it was carried out and before the scheduler is told.
    before: called with the plan before it is carried out; it may raise.
    """

    world: World

    def execute(self, plan: Plan, requests: Mapping[str, RequestState]) -> StepOutput:
        world = self.world
        worlds.check_plan(world.scheduler, plan)
        world.plans.append(plan)
        world.dicts.append(plan.to_dict())
        for group, tokens in plan.groups:
            world.sizes[group.request_id] += tokens
        world.shadow.execute(plan)
        if world.before:
            world.before(plan)
        output = super().execute(plan, requests)
        if world.between:
            world.between(plan)
        return output


class World:
    """An engine over the KV oracle.

    gpu, cpu: blocks.  bs: block size.  t: token budget.  s: sequences.  length: max_model_len.
    favourites: as OracleRunner's.  more: the other fields of SchedulerConfig.
    """

    def __init__(
        self,
        gpu: int,
        cpu: int = 0,
        bs: int = 4,
        *,
        t: int | None = None,
        s: int | None = None,
        length: int = 4096,
        vocab: int = 64,
        tokenizer: Tokenizer | None = None,
        eos: Sequence[int] = (),
        favourites: Favourites | None = None,
        seed: int | None = 0,
        **more: Any,
    ) -> None:
        config = SchedulerConfig(
            num_gpu_blocks=gpu,
            num_cpu_blocks=cpu,
            block_size=bs,
            max_num_batched_tokens=t,
            max_num_seqs=s,
            max_model_len=length,
            **more,
        )
        self.vocab = tokenizer.vocab_size if tokenizer else vocab
        self.tokenizer, self.eos, self.favourites = tokenizer, tuple(eos), favourites
        sampler = Sampler(self.vocab, frozenset(eos))
        self.runner = CheckedRunner(self.vocab, gpu, cpu, bs, sampler, num_layers=2, favourites=favourites)
        self.runner.world = self
        self.core = EngineCore(config, self.runner, tokenizer, vocab_size=self.vocab, eos_token_ids=eos, seed=seed)
        self.shadow = worlds.Shadow(bs)
        self.before: Callable[[Plan], None] | None = None
        self.between: Callable[[Plan], None] | None = None
        self.plans: list[Plan] = []
        self.dicts: list[dict[str, Any]] = []  # of the plans, as they were when they were made
        self.sizes: Counter[str] = Counter()  # tokens computed for each request
        self.outputs: dict[str, RequestOutput] = {}  # the last one of each request
        self.ended: dict[str, RequestOutput] = {}
        self.asked: dict[str, tuple[Any, SamplingParams]] = {}
        self.empty_steps = 0

    @property
    def scheduler(self) -> Scheduler:
        """The engine's: another one after it had to begin anew."""
        return self.core.scheduler

    # requests

    def add(self, name: str, p: int = 4, n: int = 1, m: int | None = None, *, prompt: Any = None, **params: Any) -> str:
        """Queue a request with a prompt of `p` tokens that its name decides, or with this prompt."""
        prompt = prompt_of(name, p, self.vocab) if prompt is None else prompt
        params = {"temperature": 1.0, "seed": zlib.crc32(name.encode()), "ignore_eos": True, **params}
        asked = SamplingParams(n=n, max_tokens=m, **params)
        self.core.add_request(name, prompt, asked)
        self.asked[name] = (prompt, asked)
        self.ended.pop(name, None)
        return name

    def group(self, name: str) -> SequenceGroup:
        return self.scheduler.groups[name]

    def abort(self, name: str) -> bool:
        gone = self.core.abort_request(name)
        self.check()
        return gone

    # steps

    def step(self, finished_only: bool = False) -> list[RequestOutput]:
        """One step of the engine with every invariant checked after it."""
        steps, had, told = len(self.plans), self.scheduler.has_unfinished(), self.core.has_unfinished_requests()
        outputs = self.core.step(finished_only=finished_only)
        for output in outputs:
            assert output.request_id not in self.ended, "an output after the last one"
            self.outputs[output.request_id] = output
            if output.finished:
                self.ended[output.request_id] = output
        assert len(self.plans) == steps + told
        if told:
            assert self.plans[-1].is_empty != had, "empty while work is unfinished, or not empty without any"
        self.check()
        return outputs

    def check(self) -> None:
        """INV of the case list, and of tests/worlds.py, which counts with formulas of its own."""
        s, core = self.scheduler, self.core
        blocks = s.blocks
        worlds.check(s)
        for pool in (blocks.gpu, blocks.cpu):
            assert len(pool.free) + sum(1 for refs in pool.refs if refs) == pool.capacity
        places = Counter(id(g) for queue in (s.running, s.swapped, s.waiting) for g in queue)
        assert all(places[id(g)] == 1 for g in s.groups.values())
        assert len(places) == len(s.groups)
        for group in [*s.running, *s.swapped]:
            lengths = worlds.computed(group)
            for branch, computed in lengths.items():
                assert computed <= group.known
                assert len(group.tables[branch]) >= -(-computed // s.config.block_size)
            self.shadow.check(group, lengths)
        assert set(core._requests) == set(core._states) == set(s.groups)
        assert set(core.stats._begun) <= set(s.groups)
        for name, group in s.groups.items():
            state = core._states[name]
            assert all(len(state.outputs[b]) == group.generated for b in group.branches)
            assert max(len(tokens) for tokens in state.outputs) == group.generated
        if not core.has_unfinished_requests():
            self.check_drained()

    def check_drained(self) -> None:
        """Nothing is left of anything: queues, blocks, and every dictionary of the engine."""
        worlds.assert_empty(self.scheduler)
        for part in (self.core, self.scheduler, self.core.stats, self.runner):
            for name, value in vars(part).items():
                if isinstance(value, dict) and not isinstance(value, Counter):
                    assert not value, f"{type(part).__name__}.{name} still has {value}"
        assert not self.core._gone

    def drain(self, limit: int = 20_000) -> World:
        while self.core.has_unfinished_requests():
            self.step()
            limit -= 1
            assert limit > 0, "no end in sight"
        self.check_drained()
        return self

    def until(self, happened: Callable[[], Any], limit: int = 2_000) -> World:
        """Step until something has happened; it must not be the end."""
        while not happened():
            assert self.core.has_unfinished_requests(), "it ended before that happened"
            self.step()
            limit -= 1
            assert limit > 0, "that never happened"
        return self

    # what happened

    @property
    def verbs(self) -> Counter[str]:
        return self.core.stats.actions

    def log(self, *verbs: str) -> list[tuple[int, str, str]]:
        """(step, verb, request) of these actions, all if none is named."""
        return [(p.step, a.verb, a.request_id) for p in self.plans for a in p.log if not verbs or a.verb in verbs]

    def names(self, plan: Plan) -> list[str]:
        return [group.request_id for group, _ in plan.groups]

    def tokens(self, name: str) -> list[list[int]]:
        return [completion.token_ids for completion in self.outputs[name].outputs]

    def texts(self, name: str) -> list[str]:
        return [completion.text for completion in self.outputs[name].outputs]

    def alone(self, name: str) -> RequestOutput:
        """The reference: the same request alone, with memory for everything."""
        prompt, params = self.asked[name]
        config = self.scheduler.config
        ample = World(
            AMPLE,
            bs=config.block_size,
            length=config.max_model_len,
            t=max(AMPLE, config.max_model_len),
            vocab=self.vocab,
            tokenizer=self.tokenizer,
            eos=self.eos,
            favourites=self.favourites,
        )
        ample.core.add_request(name, prompt, params)
        ample.drain()
        assert not ample.core.stats.preemptions
        return ample.ended[name]

    def same_as_alone(self, name: str) -> bool:
        """Whether its result, to the last number, is what it gets alone with memory for everything."""
        assert result(self.ended[name]) == result(self.alone(name)), f"{name} differs from its reference"
        return True

    def all_same_as_alone(self) -> bool:
        return all(self.same_as_alone(name) for name in self.asked)

    def llm(self) -> LLM:
        return LLM.from_core(self.core)


def result(output: RequestOutput) -> tuple[Any, ...]:
    """All that a user gets, times and numbers of preemptions apart."""
    return (
        output.request_id,
        output.prompt,
        output.prompt_token_ids,
        output.finished,
        output.error,
        [
            (c.index, c.text, c.token_ids, c.cumulative_logprob, c.logprobs, c.finish_reason, c.stop_reason)
            for c in output.outputs
        ],
    )


def prompt_of(name: str, p: int, vocab: int) -> list[int]:
    rng = random.Random(f"{name}/{p}")
    return [rng.randrange(vocab) for _ in range(p)]


def script(*tokens: int | None, request: str | None = None) -> Favourites:
    """Favourites that make greedy requests (or the one named) generate these tokens in order, in every branch."""

    def favourite(state: RequestState, branch: int, position: int) -> int | None:
        done = position - len(state.prompt_token_ids)
        return tokens[done] if done < len(tokens) and request in (None, state.request_id) else None

    return favourite


__all__ = ["AMPLE", "CheckedRunner", "Status", "World", "prompt_of", "result", "script"]
