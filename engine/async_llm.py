"""`AsyncLLM`: generation behind an event loop; the engine steps in a thread of its own.

Guarantees: every accepted request ends: with its result, an abort, or an error that says why, also when the engine's
thread dies or stops moving.  Neither side waits for the other: requests and aborts are handed in between steps, from a
bounded queue; outputs are gathered where slow readers find them later (`engine.stream`).

All methods belong to the event loop in which `start` was called.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from engine.config import EngineArgs
from engine.core import EngineCore
from engine.engine_thread import EngineThread, said
from engine.errors import (
    ConfigError,
    EngineDeadError,
    EngineStalledError,
    InvalidPromptError,
    QueueFullError,
    ShutdownError,
    UnavailableError,
    reason_of,
)
from engine.llm import Message, Prompt, build_core, check_messages, prompt_of
from engine.outputs import CompletionOutput, RequestOutput
from engine.sampling import SamplingParams
from engine.stream import Delta, RequestStream
from engine.tokenizer import Tokenizer

logger = logging.getLogger("lawful")

T = TypeVar("T")

INLINE = 4096  # characters that are turned into tokens at once; longer texts go to a thread, so that nobody waits


class AsyncLLM:
    """A model ready to generate for many callers at once.

    model, engine_args: as for `LLM`.
    max_queued_requests: requests that may wait for their first step; one more raises QueueFullError.
    stall_timeout: seconds without the end of a step, while there is work, after which the engine counts as stalled:
        what is unfinished then ends with EngineStalledError.
    max_failed_steps: that many failed steps in a row, and the engine gives up: its device is taken to be broken.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        max_queued_requests: int = 1024,
        stall_timeout: float = 60.0,
        max_failed_steps: int = 5,
        **engine_args: Any,
    ) -> None:
        unknown = sorted(set(engine_args) - set(EngineArgs.names()))
        if unknown:
            raise ConfigError(f"unknown engine argument {unknown[0]!r}; known are {', '.join(EngineArgs.names())}")
        core = build_core(EngineArgs(model=model, **engine_args))
        self._prepare(core, max_queued_requests, stall_timeout, max_failed_steps)

    @classmethod
    def from_core(
        cls,
        core: EngineCore,
        *,
        max_queued_requests: int = 1024,
        stall_timeout: float = 60.0,
        max_failed_steps: int = 5,
    ) -> AsyncLLM:
        """An AsyncLLM over an engine that was put together by hand; nobody else may use that engine any more."""
        llm = cls.__new__(cls)
        llm._prepare(core, max_queued_requests, stall_timeout, max_failed_steps)
        return llm

    def _prepare(self, core: EngineCore, queued: int, stall_timeout: float, max_failed_steps: int) -> None:
        for name, value, low in (
            ("max_queued_requests", queued, 1),
            ("stall_timeout", stall_timeout, 0),
            ("max_failed_steps", max_failed_steps, 1),
        ):
            if not value >= low:
                raise ConfigError(f"{name} is {value!r}; it must be at least {low}")
        self.core = core
        self.engine = EngineThread(core, max_failed_steps)
        self.max_queued_requests = queued
        self.stall_timeout = stall_timeout
        self.refused: Counter[str] = Counter()  # before they reached the engine, by reason
        self.draining = False
        self._when_closing: list[Callable[[], None]] = []
        self._stopped = False
        self._stalled = False
        self._names = itertools.count()
        self._watchdog: asyncio.Task[None] | None = None

    # for callers

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.  Raises InvalidPromptError when it was not loaded."""
        if self.core.tokenizer is None:
            raise InvalidPromptError("this engine has no tokenizer (skip_tokenizer_init); give token ids")
        return self.core.tokenizer

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """The state of one request whenever it has grown, until it is finished.  Leaving the loop aborts it.

        prompt: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        request_id: unique among unfinished requests; made up if not given.
        Raises what `LLM.generate` raises, DuplicateError, RequestFailedError, and UnavailableError of all kinds.
        """
        try:
            self.check_available(1)
            given, shown = prompt_of(prompt)
            if isinstance(given, str):
                shown = given
                if given and self.core.tokenizer is not None:
                    given = await self.encode(given)
            params = sampling_params or SamplingParams()
            stream = self.submit(
                given, params, request_id, prompt_text=shown, priority=priority, deltas=params.width == params.n
            )
        except (ValueError, TypeError, UnavailableError) as error:
            self.refuse(error)
            raise
        state = RequestOutput(stream.request_id, shown, stream.prompt_token_ids)
        state.outputs = [CompletionOutput(index, "", []) for index in range(params.n)]
        try:
            async for deltas in stream:
                _grow(state.outputs, deltas, params)
                if not stream.ended:
                    yield RequestOutput(
                        stream.request_id, shown, stream.prompt_token_ids, [_copy(c) for c in state.outputs]
                    )
            yield await stream.result()
        finally:
            stream.abort()

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one conversation through the model's chat template; otherwise as `generate`."""
        try:
            self.check_available(1)
            check_messages(messages)
            text = self.tokenizer.apply_chat_template(
                messages, chat_template=chat_template, add_generation_prompt=add_generation_prompt
            )
            prompt = {"prompt": text, "prompt_token_ids": await self.encode(text, add_special_tokens=False)}
        except (ValueError, TypeError, UnavailableError) as error:
            self.refuse(error)
            raise
        generator = self.generate(prompt, sampling_params, request_id)
        try:
            async for output in generator:
                yield output
        finally:
            await generator.aclose()  # type: ignore[attr-defined]

    async def abort(self, request_id: str) -> bool:
        """End a request wherever it is; False if there is none unfinished.  Its stream ends with reason "abort"."""
        stream = self.engine.find(request_id)
        if stream is None:
            return False
        stream.abort()
        return True

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        prompt_text: str | None = None,
        priority: int = 0,
        deltas: bool = True,
        ready: asyncio.Event | None = None,
        arrival_time: float | None = None,
    ) -> RequestStream:
        """Check a request and hand it to the engine; its stream.

        deltas: the stream will be read piece by piece.  ready: an event to share with other streams.
        What it raises is not counted: whoever speaks to the caller does that, once, with `refuse`.
        """
        arrival = time.monotonic() if arrival_time is None else arrival_time
        self.check_available(1)
        token_ids = self.core.check_request(prompt, params, priority=priority)
        name = f"request-{next(self._names)}" if request_id is None else request_id
        return self._accept(name, prompt, prompt_text, token_ids, params, deltas, ready, arrival)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt: of a long one in a thread, of a hopelessly long one not at all (RefusedError)."""
        tokenizer = self.tokenizer
        self.core.check_text(text)
        if len(text) < INLINE:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)

    def refuse(self, error: Exception | str) -> None:
        """Count a request that was not accepted, by its reason."""
        self.refused[error if isinstance(error, str) else reason_of(error)] += 1

    def refusals(self) -> dict[str, int]:
        """Requests that were not accepted so far, by reason: the one sum that everything shows."""
        return dict(self.refused + Counter(self.engine.snapshot.refused))

    def _accept(
        self,
        name: str,
        prompt: str | Sequence[int],
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        deltas: bool,
        ready: asyncio.Event | None,
        arrival: float,
    ) -> RequestStream:
        stream = RequestStream(
            name,
            token_ids,
            params.width,
            deltas=deltas,
            ready=ready or asyncio.Event(),
            lock=self.engine.lock,
            abort=self.engine.abort,
        )
        shown = prompt if isinstance(prompt, str) else text

        def add() -> None:
            try:
                self.core.add_request(name, token_ids, params, prompt_text=shown, arrival_time=arrival)
            except Exception as error:  # what could be checked was: a tokenizer with no bytes for the prompt's end
                logger.exception("request %s was checked and then refused by the engine", name)
                self.engine.end([(stream, None, error)])

        self.engine.add(stream, add)
        return stream

    def check_available(self, requests: int) -> None:
        """Raise UnavailableError unless so many requests may be handed in now."""
        error = self._unavailable(requests)
        if error is not None:
            raise error

    def _unavailable(self, requests: int) -> UnavailableError | None:
        if self.engine.dead is not None:
            return EngineDeadError(f"the engine has stopped: {said(self.engine.dead)}")
        if self.closing:
            return ShutdownError("the server is shutting down and takes no new requests")
        if not self.engine.started:
            return EngineDeadError("the engine was not started: await start() first")
        if self.stalled_for() is not None:
            return EngineStalledError(self._stall_message())
        queued = self.engine.num_waiting(self.max_queued_requests - requests + 1)
        if queued + requests > self.max_queued_requests:
            return QueueFullError(
                f"{queued} requests wait and {requests} more would pass the limit of {self.max_queued_requests}; "
                "try again later"
            )
        return None

    # health

    def stalled_for(self) -> float | None:
        """Seconds since the last step ended, if there is work and that is too long; None while all is well."""
        seconds = time.monotonic() - self.engine.progress
        return seconds if self.engine.busy and seconds > self.stall_timeout else None

    def _stall_message(self) -> str:
        return (
            f"no step has ended for {time.monotonic() - self.engine.progress:.1f} s although there is work "
            f"(limit {self.stall_timeout:g} s)"
        )

    def health(self) -> str | None:
        """None when the engine is well, else what is wrong with it."""
        if self.engine.dead is not None:
            return f"the engine has stopped: {said(self.engine.dead)}"
        if self.draining:
            return "shutting down"
        if not self.engine.started:
            return "not started"
        return None if self.stalled_for() is None else self._stall_message()

    async def _watch(self) -> None:
        """End what is pending when the engine stalls: a client must not wait for an engine that does not move."""
        while True:
            await asyncio.sleep(min(1.0, self.stall_timeout / 4 + 0.01))
            stalled = self.stalled_for() is not None
            if stalled:
                message = self._stall_message()
                if not self._stalled:
                    logger.error("%s: %d requests are ended", message, len(self.engine.streams))
                self.engine.fail_all(EngineStalledError(message))
            elif self._stalled:
                logger.warning("the engine moves again")
            self._stalled = stalled

    # life

    async def start(self) -> AsyncLLM:
        """Start the engine's thread.  Once; it belongs to the running event loop."""
        self.engine.start()
        self._watchdog = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aenter__(self) -> AsyncLLM:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    @property
    def closing(self) -> bool:
        """No new requests are taken any more."""
        return self.draining or self._stopped

    def when_closing(self, callback: Callable[[], None]) -> None:
        """Call back, in the event loop, when no new requests are taken any more, and once more at the very end."""
        self._when_closing.append(callback)

    def _tell_closing(self) -> None:
        for callback in self._when_closing:
            callback()

    async def drain(self, timeout: float) -> bool:
        """Take no new requests and wait for those there are; whether all ended within `timeout` seconds.

        What is left then ends with ShutdownError.
        """
        self.draining = True
        self._tell_closing()
        until = time.monotonic() + timeout
        while self.engine.streams and time.monotonic() < until and self.engine.dead is None and not self._stopped:
            await asyncio.sleep(0.02)
        left = len(self.engine.streams)
        if left:
            self.engine.fail_all(ShutdownError(f"the server is shutting down; {timeout:g} s were not enough"))
        return not left

    async def shutdown(self, timeout: float = 2.0) -> bool:
        """End what is unfinished and stop the thread; False if it did not stop within `timeout` seconds."""
        self._stopped = True
        self._tell_closing()
        self.engine.fail_all(ShutdownError("the engine is shut down"))
        self.engine.stop()
        if self._watchdog is not None:
            self._watchdog.cancel()
        until = time.monotonic() + timeout
        while self.engine.alive and time.monotonic() < until:
            await asyncio.sleep(0.01)
        return not self.engine.alive

    async def call(self, function: Callable[[EngineCore], T], timeout: float) -> T:
        """Run a function on the engine between two steps.  Raises TimeoutError when none ends in time.

        The function must be short and change nothing.
        """
        if not self.engine.alive:
            return function(self.core)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                value = function(self.core)
            except Exception as error:
                loop.call_soon_threadsafe(_settle, answer, None, error)
            else:
                loop.call_soon_threadsafe(_settle, answer, value, None)

        self.engine.post(run)
        return await asyncio.wait_for(answer, timeout)


def _settle(answer: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if answer.done():  # nobody waits any more
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(value)


def _grow(outputs: list[CompletionOutput], deltas: list[Delta], params: SamplingParams) -> None:
    for delta in deltas:
        completion = outputs[delta.index]
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        if params.logprobs is not None:
            completion.logprobs = [*(completion.logprobs or []), *delta.logprobs]
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason


def _copy(completion: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(
        completion.index,
        completion.text,
        list(completion.token_ids),
        logprobs=None if completion.logprobs is None else list(completion.logprobs),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )
