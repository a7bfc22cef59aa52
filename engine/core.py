"""The engine loop: requests in, scheduler plans out to the runner, draws back into text.

One step is: schedule -> execute -> append draws to their branches -> update.  Whatever goes wrong with one request ends
that request with an error; the others, and the loop, go on.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.branch import BranchOutput
from engine.dump import dump_step
from engine.errors import InvalidParameterError, InvalidPromptError, RefusedError, reason_of
from engine.outputs import RequestMetrics, RequestOutput, completions
from engine.request import RequestState, StepOutput
from engine.runner import Runner
from engine.sampling import SamplingParams, check_token_ids
from engine.scheduler import Plan, Scheduler, SchedulerConfig, SequenceGroup, Status
from engine.stats import EngineStats
from engine.tokenizer import Tokenizer

logger = logging.getLogger("lawful")


@dataclass(slots=True, eq=False)
class _Request:
    """A request from its arrival to its last output."""

    state: RequestState
    group: SequenceGroup
    prompt: str | None
    branches: list[BranchOutput]
    metrics: RequestMetrics
    aborted: bool = False
    error: str | None = None


class Observer(Protocol):
    """Is told what happens to requests (for spans).  It must not raise, and must not call the engine."""

    def on_add(self, request_id: str, metrics: RequestMetrics, prompt_tokens: int, params: SamplingParams) -> None: ...
    def on_step(self, plan: Plan, started: float, ended: float) -> None: ...
    def on_departure(self, output: RequestOutput) -> None: ...
    def close(self) -> None: ...


class EngineCore:
    """Scheduler, runner and text, driven step by step by one caller at a time.

    vocab_size, eos_token_ids: the model's.  tokenizer: None for token ids in and out.
    seed: of the generator that gives requests without a seed theirs; None for a different one each time.

    record_trace: a file for the trace of the scheduler, which `lawful audit` reads; None for no trace.
    dump_dir: where the state is written when a step fails; None for nowhere.  observer: see there.
    moved: the unfinished requests that drew tokens in the last step, with their branches.
    failures: steps that failed since the last one that did not.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        runner: Runner,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        seed: int | None = 0,
        log_stats: bool = False,
        record_trace: str | Path | None = None,
    ) -> None:
        self.scheduler = Scheduler(scheduler_config)
        self._end_trace: Callable[[], object] | None = None
        if record_trace is not None:
            from engine.scheduler.trace import TraceWriter

            trace = TraceWriter(self.scheduler, record_trace)
            self._end_trace = weakref.finalize(self, trace.close)  # at exit too, if nobody calls close
        self.runner = runner
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.stats = EngineStats(scheduler_config, log_stats=log_stats)
        self._seeds = random.Random(seed)
        self._requests: dict[str, _Request] = {}
        self._states: dict[str, RequestState] = {}
        self._gone: list[RequestOutput] = []  # last outputs of requests that were aborted between steps
        self.dump_dir: Path | None = None
        self.observer: Observer | None = None
        self.moved: list[tuple[str, list[BranchOutput]]] = []
        self.failures = 0
        self.torn = False  # a step is under way, or was broken off
        self._names = itertools.count()

    def new_id(self) -> str:
        """A request id that no other call has returned."""
        return str(next(self._names))

    def close(self) -> None:
        """End the trace, if one is recorded, and let the observer hand on what it still has."""
        self._close_trace()
        if self.observer is not None:
            self.observer.close()

    def _close_trace(self) -> None:
        if self._end_trace is not None:
            self._end_trace()

    # requests

    def check_request(self, prompt: str | Sequence[int], params: SamplingParams, *, priority: int = 0) -> list[int]:
        """The prompt's token ids, if `add_request` would accept it.

        Raises what `add_request` raises, an id in use apart.  Changes nothing, so that any thread may call it.
        """
        token_ids, group, _ = self._check("", prompt, params, None, priority)
        self.scheduler.check(group)
        return token_ids

    def _check(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams, text: str | None, priority: int
    ) -> tuple[list[int], SequenceGroup, str | None]:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {type(params).__name__}")
        if priority != 0:
            raise RefusedError(f"priority is {priority}; only 0 is supported", "priority")
        if params.stop and self.tokenizer is None:
            raise InvalidParameterError("stop", list(params.stop), "empty where no tokenizer makes text")
        seqs = self.scheduler.config.seqs
        if params.width > max(seqs, params.n):  # the scheduler knows one number and calls it n
            raise RefusedError(f"best_of is {params.width} but max_num_seqs is {seqs}", "max_num_seqs")
        token_ids, text = self._tokenize(prompt, text)
        params.check_against_vocabulary(self.vocab_size)
        return token_ids, SequenceGroup(request_id, len(token_ids), n=params.width, max_tokens=params.max_tokens), text

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        prompt_text: str | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request.

        prompt: text, or token ids.  prompt_text: what token ids stand for, to be shown in outputs.
        Raises InvalidPromptError, InvalidParameterError or RefusedError, and then nothing has changed.
        """
        try:
            token_ids, group, text = self._check(request_id, prompt, params, prompt_text, priority)
            self.scheduler.add(group)
        except (ValueError, TypeError) as error:
            self.stats.refused[reason_of(error)] += 1
            raise
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        state = RequestState(request_id, token_ids, params, seed, [[] for _ in range(params.width)])
        try:
            branches = [
                BranchOutput(state, branch, self.tokenizer, self.eos_token_ids, group.max_tokens)
                for branch in range(params.width)
            ]
        except Exception:  # a tokenizer that knows no bytes for the end of this prompt
            self.scheduler.abort(request_id)
            raise
        arrival = time.monotonic() if arrival_time is None else arrival_time
        metrics = RequestMetrics(arrival_time=arrival)
        self.stats.on_receipt(group)
        self._states[request_id] = state
        self._requests[request_id] = _Request(state, group, text, branches, metrics)
        if self.observer is not None:
            self.observer.on_add(request_id, metrics, len(token_ids), params)

    def check_text(self, text: str) -> None:
        """Raise RefusedError for a text so long that it need not be turned into tokens to know that it is too long."""
        limit = self.scheduler.config.max_model_len
        least = 0 if self.tokenizer is None else self.tokenizer.at_least_tokens(text)
        if least >= limit:
            raise RefusedError(
                f"the prompt has {len(text)} characters, which are {least} tokens or more; max_model_len is {limit} "
                f"and at most {limit - 1} tokens are allowed",
                "max_model_len",
            )

    def _tokenize(self, prompt: str | Sequence[int], prompt_text: str | None) -> tuple[list[int], str | None]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidPromptError("the prompt is text but the tokenizer was not loaded; give token ids")
            self.check_text(prompt)
            encoded = self.tokenizer.encode(prompt)
            if not encoded:
                raise InvalidPromptError("the prompt is empty; it must have at least 1 token")
            return encoded, prompt
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise InvalidPromptError(f"the prompt is a {type(prompt).__name__}; it must be text or a list of token ids")
        token_ids: list[int] = list(prompt)  # type: ignore[arg-type]
        if not token_ids:
            raise InvalidPromptError("the prompt is empty; it must have at least 1 token")
        check_token_ids("prompt_token_ids", token_ids, self.vocab_size)
        return token_ids, prompt_text

    def abort_request(self, request_id: str) -> bool:
        """End a request wherever it is; False if there is none unfinished with this id.

        Its last output, with what it had and finish_reason "abort", comes with the next `step`.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        try:
            if not self.scheduler.abort(request_id):
                return False
        except BaseException:
            self.begin_anew()
            raise
        request.aborted = True
        if request.group.status is Status.ABORTED:  # at a boundary it is gone already
            self._gone.append(self._depart(request))
        return True

    def has_unfinished_requests(self) -> bool:
        """A call of `step` has something to do or to tell."""
        return self.scheduler.has_unfinished() or bool(self._gone)

    # the step

    def step(self, *, finished_only: bool = False) -> list[RequestOutput]:
        """Run one step and return the outputs of every request that it moved, or of those that ended in it.

        An interrupt while the model computes leaves every request in its place.  Interrupted in its own books, the
        engine begins anew.  A fault of the scheduler itself is raised with the state as it is, for whoever wants to
        look at it; `torn` is set, and `begin_anew` is the way on.
        """
        self.torn = True
        try:
            return self._step(finished_only)
        except Exception:
            raise
        except BaseException:
            if self.torn:
                self.begin_anew()
            raise

    def begin_anew(self) -> None:
        """The scheduler's books cannot be trusted: an empty one, and an end as aborted for every request."""
        logger.warning("the engine was torn out of a step and begins anew; %d requests end", len(self._requests))
        self._close_trace()  # a trace tells of one scheduler
        self.scheduler = Scheduler(self.scheduler.config)
        self.torn = False
        for request in list(self._requests.values()):
            request.group.status = Status.ABORTED
            self._gone.append(self._depart(request))

    def _step(self, finished_only: bool) -> list[RequestOutput]:
        outputs, self._gone = self._gone, []
        self.moved = []
        if not self.scheduler.has_unfinished() and not outputs:
            self.torn = False
            return outputs  # if all have left, one empty plan still tells the runner so, and the scheduler forgets them
        plan = self.scheduler.schedule()
        self.stats.on_plan(plan)
        now = time.monotonic()
        for group, _ in plan.groups:
            self.stats.on_scheduled(self._requests[group.request_id].metrics, now)
        try:
            result = self.runner.execute(plan, self._states)
        except Exception as error:
            outputs += self._on_failed_step(plan, error)
        except BaseException:  # an interrupt is nobody's fault: all keep their places, and the caller decides
            departed = self._known(self.scheduler.fail(plan, ()))
            self.stats.on_update(plan, 0)
            self._gone = outputs + [self._depart(request) for request in departed]
            self.torn = False
            raise
        else:
            outputs += self._on_result(plan, result, finished_only)
        if self.observer is not None:
            self.observer.on_step(plan, now, time.monotonic())
        self.stats.maybe_log(self.scheduler.counts())
        self.torn = False
        return outputs

    def _on_result(self, plan: Plan, result: StepOutput, finished_only: bool) -> list[RequestOutput]:
        now = time.monotonic()
        stopped: list[tuple[str, int]] = []
        failed: dict[str, Exception] = dict(result.errors)
        moved: dict[str, _Request] = {}
        drawn = 0
        for (request_id, branch), sampled in result.samples.items():
            request = self._requests[request_id]
            if request.aborted or request_id in failed:
                continue
            drawn += 1
            moved[request_id] = request
            try:
                ended = request.branches[branch].append(sampled)
            except Exception as error:  # a tokenizer that cannot decode is this request's trouble alone
                logger.exception("request %s: its output cannot be decoded", request_id)
                failed[request_id] = error
                continue
            if ended:
                stopped.append((request_id, branch))
        for request in moved.values():
            self.stats.on_draw(request.metrics, now)
        departed = self._known(self.scheduler.update(plan, stopped, failed))
        for request in departed:
            if request.group.status is Status.FAILED:
                reason = failed[request.state.request_id]
                request.error = f"{type(reason).__name__}: {reason}"
        self.stats.on_update(plan, drawn)
        self.failures = 0
        outputs = []
        gone = {request.state.request_id for request in departed}
        still = [request for name, request in moved.items() if name not in gone]
        self.moved = [(request.state.request_id, request.branches) for request in still]
        if not finished_only:
            outputs += [self._output(request) for request in still]
        outputs += [self._depart(request) for request in departed]
        return outputs

    def _on_failed_step(self, plan: Plan, error: Exception) -> list[RequestOutput]:
        """The runner raised: the groups of this step end with the error, every other one is computed again."""
        names = [group.request_id for group, _ in plan.groups]
        path = dump_step(self.dump_dir, self.scheduler, plan, error)
        where = f"; the state is in {path}" if path else ""
        logger.error("step %d failed, and with it %s%s", plan.step, ", ".join(names), where, exc_info=error)
        self.failures += 1
        self.stats.failed_steps += 1
        departed = self._known(self.scheduler.fail(plan))
        self.stats.on_update(plan, 0)
        for request in departed:
            if request.group.status is Status.FAILED:
                request.error = f"the step failed: {type(error).__name__}: {error}"
        return [self._depart(request) for request in departed]

    def _known(self, groups: list[SequenceGroup]) -> list[_Request]:
        """The requests of these groups; one whose `add_request` raised in the midst of a step has none."""
        return [self._requests[group.request_id] for group in groups if group.request_id in self._requests]

    # outputs

    def _depart(self, request: _Request) -> RequestOutput:
        """Forget a request whose group has left the scheduler; its last output."""
        name = request.state.request_id
        del self._requests[name], self._states[name]
        request.metrics.finished_time = time.monotonic()
        reason = "abort" if request.group.status is Status.ABORTED else "error"
        if request.group.status is not Status.FINISHED:
            for branch in request.branches:
                branch.finish("abort" if request.group.status is Status.ABORTED else "error")
        else:
            reason = "length" if any(branch.finish_reason == "length" for branch in request.branches) else "stop"
        generated = sum(len(branch.token_ids) for branch in request.branches)
        self.stats.on_departure(request.group, request.metrics, reason, generated)
        output = self._output(request, finished=True)
        if self.observer is not None:
            self.observer.on_departure(output)
        return output

    def _output(self, request: _Request, finished: bool = False) -> RequestOutput:
        request.metrics.num_preemptions = request.group.num_preemptions
        return RequestOutput(
            request_id=request.state.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.state.prompt_token_ids,
            outputs=completions(request.branches, request.state.params.n),
            finished=finished,
            metrics=request.metrics,
            error=request.error,
        )
