"""AsyncLLM without a server: outputs, aborts, slow readers, ends of every kind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from engine.async_llm import AsyncLLM
from engine.errors import (
    ConfigError,
    DuplicateError,
    EngineDeadError,
    EngineStalledError,
    InvalidParameterError,
    InvalidPromptError,
    QueueFullError,
    RefusedError,
    RequestFailedError,
    ShutdownError,
)
from engine.outputs import RequestOutput
from engine.sampling import SamplingParams
from engine.tokenizer import ByteTokenizer
from tests.oracle import World, prompt_of, result

pytestmark = pytest.mark.timeout(60)


def run(world: World, test: Callable[[AsyncLLM], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with AsyncLLM.from_core(world.core, **options) as llm:
            return await test(llm)

    return asyncio.run(main())


def params(m: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": m, "ignore_eos": True, "seed": 7, **more})


async def last(llm: AsyncLLM, *args: Any, **more: Any) -> RequestOutput:
    return [output async for output in llm.generate(*args, **more)][-1]


class Held:
    """Holds the engine's thread inside a step until it is released."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.reached = threading.Event()
        self.go = threading.Event()
        world.before = self._wait

    def _wait(self, plan: Any) -> None:
        self.reached.set()
        assert self.go.wait(30)

    async def __aenter__(self) -> Held:
        while not self.reached.is_set():
            await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self.world.before = None
        self.go.set()


def test_many_requests_at_once_get_what_each_gets_alone() -> None:
    """Under memory pressure, to the last number; and every stream grows to it without taking anything back."""
    world = World(gpu=20, cpu=8, tokenizer=ByteTokenizer(), s=12)
    asked = {
        f"r{i}": (prompt_of(str(i), 3 + i % 6, 256), params(4 + i, n=1 + i % 3, logprobs=i % 2)) for i in range(20)
    }
    world.asked = dict(asked)

    async def test(llm: AsyncLLM) -> None:
        async def one(name: str) -> None:
            prompt, sampling = asked[name]
            shown = [""] * sampling.n
            async for output in llm.generate(prompt, sampling, name):
                for completion in output.outputs:
                    assert completion.text.startswith(shown[completion.index])
                    shown[completion.index] = completion.text
            assert output.finished
            world.ended[name] = output

        await asyncio.gather(*(one(name) for name in asked))

    run(world, test)
    assert world.core.stats.preemptions > 0
    assert world.all_same_as_alone()
    world.check_drained()


def test_results_are_those_of_the_synchronous_class() -> None:
    prompts = [[1, 2, 3], {"prompt_token_ids": [4, 5], "prompt": "shown"}]
    asynchronous = World(gpu=64)

    async def test(llm: AsyncLLM) -> list[RequestOutput]:
        return [await last(llm, prompt, params(n=2), str(i)) for i, prompt in enumerate(prompts)]

    expected = World(gpu=64).llm().generate(prompts, params(n=2), use_tqdm=False)
    assert [result(output) for output in run(asynchronous, test)] == [result(output) for output in expected]


def test_a_chat_goes_through_the_template() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    world = World(gpu=64, tokenizer=ByteTokenizer(chat_template=template))

    async def test(llm: AsyncLLM) -> None:
        outputs = [output async for output in llm.chat([{"role": "user", "content": "hi"}], params())]
        output = outputs[-1]
        assert output.prompt == "user:hi;"
        assert output.prompt_token_ids == list(b"user:hi;")
        with pytest.raises(InvalidPromptError):
            await anext(llm.chat([], params()))

    run(world, test)


def test_best_of_yields_only_its_result() -> None:
    world = World(gpu=64)

    async def test(llm: AsyncLLM) -> None:
        seen = [output async for output in llm.generate([1, 2], params(n=2, best_of=4))]
        assert len(seen) == 1
        assert len(seen[0].outputs) == 2

    run(world, test)


def test_leaving_a_loop_aborts_and_abort_is_total() -> None:
    """Cases 25 and 26 through AsyncLLM."""
    world = World(gpu=400, cpu=0, length=2000)

    async def test(llm: AsyncLLM) -> None:
        generator = llm.generate([1, 2, 3], params(700, n=2), "left")
        await anext(generator)
        await generator.aclose()
        assert not await llm.abort("nope")
        stream = llm.submit([1, 2], params(700), "aborted")
        assert await llm.abort("aborted")
        await llm.abort("aborted")
        output = await stream.result()
        assert output.outputs[0].finish_reason == "abort"
        assert not await llm.abort("aborted")
        for i in range(20):
            await last(llm, [i], params(2, n=2))
        assert not llm.engine.streams

    run(world, test)
    world.check_drained()
    assert dict(world.core.stats.finished_by) == {"abort": 2, "length": 20}


def test_a_slow_reader_gets_fewer_and_larger_pieces_and_nothing_is_lost() -> None:
    world = World(gpu=64, tokenizer=ByteTokenizer(), length=512)

    async def test(llm: AsyncLLM) -> None:
        stream = llm.submit([1, 2], params(60, n=2), "slow")
        await (await_end := asyncio.create_task(stream.result()))
        pieces = [deltas async for deltas in stream]
        assert len(pieces) == 1, "the engine was done long ago"
        assert [len(delta.token_ids) for delta in pieces[0]] == [60, 60]
        output = await_end.result()
        assert [delta.text for delta in pieces[0]] == [completion.text for completion in output.outputs]
        assert [delta.finish_reason for delta in pieces[0]] == ["length", "length"]

    run(world, test)


def test_a_request_id_in_use_is_refused() -> None:
    world = World(gpu=64)

    async def test(llm: AsyncLLM) -> None:
        stream = llm.submit([1], params(), "x")
        async with Held(world) as held:
            with pytest.raises(DuplicateError):
                llm.submit([1], params(), "x")
            held.release()
            await stream.result()
        await last(llm, [2], params(), "x")

    run(world, test)


def test_what_is_wrong_is_raised_at_once_and_nothing_is_left() -> None:
    world = World(gpu=8, length=32)

    async def test(llm: AsyncLLM) -> None:
        for prompt, sampling, kind in (
            ([1] * 40, params(), RefusedError),
            ([99], params(), InvalidParameterError),
            ([], params(), InvalidPromptError),
            ("text", params(), InvalidPromptError),
            ([1], params(stop_token_ids=[64]), InvalidParameterError),
        ):
            with pytest.raises(kind):
                llm.submit(prompt, sampling)
        assert not llm.engine.streams

    run(world, test)
    world.check_drained()


def test_a_full_queue_is_said() -> None:
    world = World(gpu=64, s=1)

    async def test(llm: AsyncLLM) -> None:
        streams = [llm.submit([1], params(), "runs")]
        async with Held(world):
            streams += [llm.submit([1], params(2)) for _ in range(3)]
            with pytest.raises(QueueFullError, match="3 requests wait and 1 more would pass the limit of 3"):
                llm.submit([1], params())
            with pytest.raises(QueueFullError):
                llm.check_available(1)
            for _ in range(2):
                with pytest.raises(QueueFullError):
                    await anext(llm.generate([1], params()))
        for stream in streams:
            await stream.result()
        assert llm.refusals() == {"queue_full": 2}, "what submit refuses is its caller's to count"

    run(world, test, max_queued_requests=3)


def test_a_request_whose_step_fails_gets_the_error() -> None:
    world = World(gpu=64)

    def fault(plan: Any) -> None:
        raise RuntimeError("CUDA error")

    async def test(llm: AsyncLLM) -> None:
        world.before = fault
        stream = llm.submit([1], params())
        with pytest.raises(RequestFailedError, match="the step failed: RuntimeError: CUDA error"):
            await stream.result()
        world.before = None
        await last(llm, [1], params())

    run(world, test)


def test_a_dead_engine_ends_everything_at_once() -> None:
    world = World(gpu=64)
    deaths: list[BaseException] = []

    async def test(llm: AsyncLLM) -> None:
        llm.engine.on_death = deaths.append
        stream = llm.submit([1], params(100))
        await anext(aiter(stream))

        def broken() -> Any:
            raise SystemError("a bug")

        world.scheduler.schedule = broken  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError, match="the engine has stopped: SystemError: a bug"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError):
            llm.submit([1], params())
        assert "SystemError" in (llm.health() or "")
        await asyncio.sleep(0.05)
        assert len(deaths) == 1

    run(world, test)


def test_failing_steps_in_a_row_are_a_broken_device() -> None:
    world = World(gpu=64, s=1)

    def fault(plan: Any) -> None:
        raise RuntimeError("CUDA error")

    async def test(llm: AsyncLLM) -> None:
        world.before = fault
        streams = [llm.submit([1], params()) for _ in range(5)]
        kinds = []
        for stream in streams:
            try:
                await stream.result()
            except (RequestFailedError, EngineDeadError) as error:
                kinds.append(type(error))
        assert kinds == [RequestFailedError] * 3 + [EngineDeadError] * 2

    run(world, test, max_failed_steps=3)


def test_an_engine_that_stands_still_ends_its_requests_and_may_recover() -> None:
    """Case 62 (a), (c)."""
    world = World(gpu=64)

    async def test(llm: AsyncLLM) -> None:
        assert llm.health() is None
        stream = llm.submit([1], params())
        async with Held(world):
            with pytest.raises(EngineStalledError, match="no step has ended for"):
                await stream.result()
            assert "no step has ended" in (llm.health() or "")
            with pytest.raises(EngineStalledError):
                llm.submit([1], params())
        while llm.health() is not None:
            await asyncio.sleep(0.01)
        assert (await last(llm, [1], params())).finished

    run(world, test, stall_timeout=2.0)
    world.check_drained()


def test_draining_finishes_what_it_can_and_tells_the_rest() -> None:
    world = World(gpu=64, length=4000)

    async def test(llm: AsyncLLM) -> None:
        stream = llm.submit([1], params(20))
        assert await llm.drain(20)
        assert (await stream.result()).finished
        with pytest.raises(ShutdownError):
            llm.submit([1], params())
        llm.draining = False
        long = llm.submit([1], params(200))
        async with Held(world):
            assert not await llm.drain(0.05)
            with pytest.raises(ShutdownError, match="shutting down"):
                await long.result()

    run(world, test)
    world.check_drained()


def test_options_out_of_range_are_refused() -> None:
    for option in ("max_queued_requests", "stall_timeout", "max_failed_steps"):
        with pytest.raises(ConfigError, match=option):
            AsyncLLM.from_core(World(gpu=8).core, **{option: -1})
    with pytest.raises(ConfigError, match="unknown engine argument 'colour'"):
        AsyncLLM(colour="red")


def test_a_call_runs_between_steps_and_times_out_when_none_ends() -> None:
    world = World(gpu=64)

    async def test(llm: AsyncLLM) -> None:
        assert await llm.call(lambda core: core.vocab_size, 5) == 64
        with pytest.raises(ZeroDivisionError):
            await llm.call(lambda core: 1 / 0, 5)
        stream = llm.submit([1], params())
        async with Held(world):
            with pytest.raises(TimeoutError):
                await llm.call(lambda core: core.vocab_size, 0.05)
        await stream.result()

    run(world, test)
