"""The scheduler's configuration: every accepted one guarantees that each accepted request can finish."""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduler.errors import ConfigError
from engine.scheduler.plan import PreemptionMode


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Capacities and policy switches.  Counts are blocks, tokens or sequences; names are vLLM's.

    block_size: tokens a block holds.
    num_gpu_blocks, num_cpu_blocks: sizes of the pool and of the swap area.
    max_model_len: most tokens a sequence may have, prompt and output together.
    max_num_batched_tokens: most tokens a step may compute.  Default: 2048 chunked, else at least max_model_len.
    max_num_seqs: most live sequences in running and swapped together.  Default: min(256, max_num_batched_tokens).
    enable_chunked_prefill: True for decodes first with prompts in pieces; False for whole prompts first.
    preemption_mode: "swap", "recompute" or None (recompute one live branch, swap several).
    watermark_blocks: blocks that an admission leaves free while others run.

    Raises ConfigError when a value is out of range, or when a step could be empty for ever.
    """

    num_gpu_blocks: int
    num_cpu_blocks: int = 0
    block_size: int = 16
    max_model_len: int = 2048
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    enable_chunked_prefill: bool = True
    preemption_mode: PreemptionMode | str | None = None
    watermark_blocks: int = 0

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name, least_allowed in (
            ("num_gpu_blocks", 1),
            ("num_cpu_blocks", 0),
            ("block_size", 1),
            ("max_model_len", 2),
            ("max_num_batched_tokens", 1),
            ("max_num_seqs", 1),
            ("watermark_blocks", 0),
        ):
            value = getattr(self, name)
            if value is None and name in ("max_num_batched_tokens", "max_num_seqs"):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}; it must be an int")
            if value < least_allowed:
                raise ConfigError(f"{name} is {value}; it must be at least {least_allowed}")
        if not isinstance(self.enable_chunked_prefill, bool):
            raise ConfigError(f"enable_chunked_prefill is {self.enable_chunked_prefill!r}; it must be True or False")
        if self.preemption_mode is not None:
            try:  # an enum takes its members and their values, and nothing else
                put(self, "preemption_mode", PreemptionMode(self.preemption_mode))
            except ValueError:
                raise ConfigError(
                    f"preemption_mode is {self.preemption_mode!r}; allowed are 'swap', 'recompute' and None"
                ) from None
        if self.max_num_batched_tokens is None:
            put(self, "max_num_batched_tokens", 2048 if self.enable_chunked_prefill else max(2048, self.max_model_len))
        if self.max_num_seqs is None:
            put(self, "max_num_seqs", min(256, self.tokens))
        if self.seqs > self.tokens:
            raise ConfigError(
                f"max_num_seqs ({self.seqs}) exceeds max_num_batched_tokens ({self.tokens}): "
                "a step could not give every running sequence its token; lower the one or raise the other"
            )
        if not self.enable_chunked_prefill and self.tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens ({self.tokens}) is below max_model_len ({self.max_model_len}) with chunked "
                "prefill off: a longer prompt could never run; raise it, lower max_model_len or enable chunked prefill"
            )

    @property
    def tokens(self) -> int:
        """max_num_batched_tokens, resolved."""
        assert self.max_num_batched_tokens is not None
        return self.max_num_batched_tokens

    @property
    def seqs(self) -> int:
        """max_num_seqs, resolved."""
        assert self.max_num_seqs is not None
        return self.max_num_seqs

    @property
    def mode(self) -> PreemptionMode | None:
        """preemption_mode, resolved: None lets each group's width decide."""
        assert not isinstance(self.preemption_mode, str)
        return self.preemption_mode
