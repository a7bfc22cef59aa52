"""`LLM`: offline generation with a model, as a Python call."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from engine.config import EngineArgs, free_memory
from engine.core import EngineCore
from engine.errors import ConfigError, InvalidPromptError
from engine.logs import refusals, speak_by_default
from engine.outputs import RequestOutput
from engine.sampling import SamplingParams
from engine.tokenizer import Tokenizer

logger = logging.getLogger("lawful")

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


def build_core(args: EngineArgs) -> EngineCore:
    """Load model and tokenizer, size the cache and put the engine together.

    Raises ConfigError, ModelLoadError or TokenizerError, naming what was wrong and what is allowed.
    """
    from engine.cache import KVCache, bytes_per_block, cache_type
    from engine.gpu_runner import GpuRunner, activation_memory
    from engine.models.load import load_config, load_model, locate_model, resolve_dtype
    from engine.runner import ModelRunner, Runner
    from engine.sampler import Sampler
    from engine.tokenizer import get_tokenizer
    from kernels.dispatch import uses_triton

    speak_by_default()
    device = args.resolve_device()
    model_config = load_config(args.model)
    dtype = resolve_dtype(args.dtype, model_config, device)
    kept = cache_type(args.kv_cache_dtype, dtype, device)
    block_bytes = bytes_per_block(model_config, args.block_size, kept)
    args.scheduler_config(model_config, block_bytes, device)  # wrong arguments are refused before weights are read
    tokenizer: Tokenizer | None = None
    if not args.skip_tokenizer_init:
        tokenizer = get_tokenizer(args.tokenizer or locate_model(args.model).path)
    model = load_model(args.model, dtype, device, args.load_format, args.seed or 0, args.quantization)
    eos = set(model_config.eos_token_ids) | set(tokenizer.eos_token_ids if tokenizer else ())
    sampler = Sampler(model_config.vocab_size, frozenset(eos))
    memory = None
    if device == "cuda" and args.num_gpu_blocks_override is None:
        bare = args.scheduler_config(model_config, block_bytes, device)
        peak = activation_memory(
            model, model_config, args.block_size, bare.tokens, bare.seqs, bare.max_model_len, kept, device
        )
        memory = free_memory(device) - peak
        logger.info("the largest step takes %.2f GiB beside weights and cache", peak / 2**30)
    config = args.scheduler_config(model_config, block_bytes, device, memory)
    longest = model_config.check_max_model_len(args.max_model_len)
    if config.max_model_len < longest:
        logger.info(
            "max_model_len is lowered from the model's %d to the %d tokens that the KV cache pool holds",
            longest,
            config.max_model_len,
        )
    try:
        cache = KVCache(model_config, config.num_gpu_blocks, config.num_cpu_blocks, args.block_size, kept, device)
    except (RuntimeError, MemoryError, TypeError, OverflowError) as error:  # torch's own words help nobody here
        wanted = (config.num_gpu_blocks + config.num_cpu_blocks) * block_bytes
        raise ConfigError(
            f"the KV cache of {config.num_gpu_blocks} GPU and {config.num_cpu_blocks} CPU blocks takes {wanted} bytes, "
            "which could not be had; lower num_gpu_blocks_override, swap_space or num_cpu_blocks_override"
        ) from error
    runner: Runner
    if uses_triton(cache.device_pool):
        runner = GpuRunner(model, model_config, cache, device, sampler, config.seqs, config.max_model_len)
    else:
        runner = ModelRunner(model, model_config, cache, device, sampler)
    logger.info(
        "%s (%s%s) on %s: %d GPU blocks and %d CPU blocks of %d tokens, "
        "max_model_len %d, a step has at most %d tokens and %d sequences",
        args.model,
        str(dtype).removeprefix("torch."),
        "" if kept == dtype else ", KV cache in " + str(kept).removeprefix("torch."),
        device,
        config.num_gpu_blocks,
        config.num_cpu_blocks,
        config.block_size,
        config.max_model_len,
        config.tokens,
        config.seqs,
    )
    return EngineCore(
        config,
        runner,
        tokenizer,
        vocab_size=model_config.vocab_size,
        eos_token_ids=eos,
        seed=args.seed,
        log_stats=not args.disable_log_stats,
        record_trace=args.record_trace,
    )


class LLM:
    """A model ready to generate.

    model: a Hugging Face directory, a .gguf file, or "smollm2-135m" (the embedded model).
    engine_args: the fields of `EngineArgs`.

    Raises ConfigError for an argument that is unknown or out of range, ModelLoadError for a model that cannot be read.
    """

    def __init__(self, model: str = "smollm2-135m", **engine_args: Any) -> None:
        unknown = sorted(set(engine_args) - set(EngineArgs.names()))
        if unknown:
            raise ConfigError(f"unknown engine argument {unknown[0]!r}; known are {', '.join(EngineArgs.names())}")
        self._start(build_core(EngineArgs(model=model, **engine_args)))

    @classmethod
    def from_core(cls, core: EngineCore) -> LLM:
        """An LLM over an engine that was put together by hand (another runner, a test model)."""
        llm = cls.__new__(cls)
        llm._start(core)
        return llm

    def _start(self, core: EngineCore) -> None:
        self.core = core
        self._busy = threading.Lock()

    def close(self) -> None:
        """End the trace, if one is recorded: without it the trace ends when the process does."""
        self.core.close()

    @property
    def stats(self) -> dict[str, object]:
        """Counts since the start: steps, tokens, preemptions, swapped blocks, requests."""
        return self.core.stats.to_dict()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.  Raises InvalidPromptError when it was not loaded."""
        if self.core.tokenizer is None:
            raise InvalidPromptError("this engine has no tokenizer (skip_tokenizer_init); give token ids")
        return self.core.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt; results come in the order of the prompts.

        prompts: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of these.
        sampling_params: one for all, or one for each prompt; default SamplingParams().
        prompt_token_ids: token ids in place of prompts.
        priority: one for each prompt; only 0 is supported so far.

        A prompt that cannot be served does not stop the others: its result has no outputs and says why in `error`.
        When none of them can be served the first reason is raised.  An interrupt aborts what is unfinished.
        """
        items = _as_list(prompts, prompt_token_ids)
        params = _one_each(sampling_params, len(items))
        if priority is not None and len(priority) != len(items):
            raise ValueError(f"priority has {len(priority)} entries for {len(items)} prompts; give one for each")
        return self._run(items, params, use_tqdm, list(priority or [0] * len(items)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        messages: [{"role": "user", "content": "..."}, ...].
        Raises TokenizerError when the model has no template and none is given.
        """
        tokenizer = self.get_tokenizer()
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
            raise InvalidPromptError(
                "messages must be a list of {'role': ..., 'content': ...}, or a list of such lists"
            )
        chats: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
        items: list[Prompt | Exception] = []
        for chat in chats:
            try:
                check_messages(chat)
                text = tokenizer.apply_chat_template(
                    chat, chat_template=chat_template, add_generation_prompt=add_generation_prompt
                )
                ids = tokenizer.encode(text, add_special_tokens=False)
                items.append({"prompt": text, "prompt_token_ids": ids})
            except (ValueError, TypeError) as error:  # of this conversation alone
                items.append(error)
        return self._run(items, _one_each(sampling_params, len(items)), use_tqdm, [0] * len(items))

    def _run(
        self,
        items: Sequence[Prompt | Exception],
        params: list[SamplingParams],
        use_tqdm: bool,
        priority: list[int],
    ) -> list[RequestOutput]:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this LLM is generating in another thread; give each thread its own, or use AsyncLLM")
        try:
            if self.core.has_unfinished_requests():
                raise RuntimeError("the engine has unfinished requests of another caller; step it until they end")
            return self._run_alone(items, params, use_tqdm, priority)
        finally:
            self._busy.release()

    def _run_alone(
        self,
        items: Sequence[Prompt | Exception],
        params: list[SamplingParams],
        use_tqdm: bool,
        priority: list[int],
    ) -> list[RequestOutput]:
        results: dict[str, RequestOutput] = {}
        names: list[str] = []
        errors: list[Exception] = []
        try:
            for item, param, prio in zip(items, params, priority, strict=True):
                name = self.core.new_id()
                names.append(name)
                try:
                    if isinstance(item, Exception):
                        raise item
                    prompt, text = prompt_of(item)
                    self.core.add_request(name, prompt, param, prompt_text=text, priority=prio)
                except (ValueError, TypeError) as error:
                    errors.append(error)
                    refusals.warning("request %s is refused: %s", name, error)
                    results[name] = RequestOutput(
                        request_id=name,
                        prompt=item if isinstance(item, str) else None,
                        prompt_token_ids=[],
                        finished=True,
                        error=str(error),
                    )
            if errors and len(errors) == len(items):
                raise errors[0]
            self._finish(set(names) - set(results), results, use_tqdm)
        except BaseException:
            if self.core.torn:
                self.core.begin_anew()
            for name in names:
                self.core.abort_request(name)
            while self.core.has_unfinished_requests() and not self.core.scheduler.has_unfinished():
                self.core.step()  # hands out, and so forgets, the outputs of what was aborted
            raise
        return [results[name] for name in names]

    def _finish(self, names: set[str], results: dict[str, RequestOutput], use_tqdm: bool) -> None:
        tokens_before = self.core.stats.generation_tokens
        root = logging.getLogger()
        speaker = root if root.handlers else logger
        lines = logging_redirect_tqdm([speaker]) if use_tqdm else contextlib.nullcontext()  # above the bar, not in it
        with (
            lines,
            tqdm(
                total=len(names), desc="Processed prompts", unit="req", disable=not use_tqdm, dynamic_ncols=True
            ) as bar,
        ):
            while not names <= results.keys():
                if not self.core.has_unfinished_requests():
                    raise RuntimeError(f"requests {sorted(names - results.keys())} left without an output")
                for output in self.core.step(finished_only=True):
                    results[output.request_id] = output
                    bar.update(output.request_id in names)
                elapsed = bar.format_dict["elapsed"] or 0
                if use_tqdm and elapsed:
                    speed = (self.core.stats.generation_tokens - tokens_before) / elapsed
                    bar.set_postfix_str(f"{speed:.1f} tokens/s", refresh=False)


def _as_list(prompts: Any, prompt_token_ids: Any) -> list[Prompt]:
    if prompts is None and prompt_token_ids is None:
        raise InvalidPromptError("give prompts or prompt_token_ids")
    if prompts is not None and prompt_token_ids is not None:
        raise InvalidPromptError("give prompts or prompt_token_ids, not both")
    given = prompts if prompts is not None else prompt_token_ids
    if isinstance(given, str | Mapping):
        return [given]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise InvalidPromptError(f"prompts is a {type(given).__name__}; it must be text, token ids or a list of these")
    if given and all(isinstance(item, int) and not isinstance(item, bool) for item in given):
        return [list(given)]
    return list(given)


def prompt_of(item: Prompt) -> tuple[str | Sequence[int], str | None]:
    """Text or token ids, and the text that the ids stand for."""
    if not isinstance(item, Mapping):
        return item, None
    if "prompt_token_ids" in item:
        return item["prompt_token_ids"], item.get("prompt")
    if "prompt" in item:
        return item["prompt"], None
    raise InvalidPromptError(f"the prompt has the keys {sorted(item)}; it needs 'prompt' or 'prompt_token_ids'")


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise TypeError(f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}")
    if len(params) != count:
        raise ValueError(f"sampling_params has {len(params)} entries for {count} prompts; give one, or one for each")
    return list(params)


def check_messages(chat: Any) -> None:
    if not isinstance(chat, Sequence) or isinstance(chat, str | bytes) or not chat:
        raise InvalidPromptError("a conversation must be a list of at least one message")
    for message in chat:
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise InvalidPromptError(f"a message must have 'role' and 'content', got {message!r:.80}")
