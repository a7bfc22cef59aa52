"""What a step costs: a linear model of its work, as a preset, a JSON file or key=value pairs.

    seconds = step + prefill_token * prefill tokens      + decode_token * decode tokens
                   + prefill_pair * query-key pairs      + decode_kv * KV tokens read
                   + swapped_token * KV tokens moved     + copied_token * KV tokens copied

A decode reads the KV of every token that its branch knows; a piece of a prompt makes a query-key pair for each of its
tokens with each token up to that one.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from engine.scheduler import Plan, SequenceGroup

PRESETS = "data/cost_models.json"
DEFAULT = "llama2-7b-a100"


class Work(NamedTuple):
    """The work of one step, in the words of the model above.  All counts are tokens, or pairs of them."""

    prefill_tokens: int
    decode_tokens: int
    prefill_pairs: int
    decode_kv: int
    swapped_tokens: int
    copied_tokens: int


def work_of(plan: Plan, block_size: int) -> Work:
    """The work of a plan that was made and not updated yet, counted group by group.

    `Simulation` knows the same numbers from what changed since the plan before.
    """
    prefills = [(group, tokens) for group, tokens in plan.groups if not group.is_decode]
    return Work(
        plan.num_prefill_tokens,
        plan.num_decode_tokens,
        sum(query_key_pairs(group, tokens) for group, tokens in prefills),
        sum(group.live * group.known for group, _ in plan.groups if group.is_decode),
        (len(plan.blocks_to_swap_out) + len(plan.blocks_to_swap_in)) * block_size,
        len(plan.blocks_to_copy) * block_size,
    )


def query_key_pairs(group: SequenceGroup, tokens: int) -> int:
    """Pairs that the next `tokens` of a group that is behind make: token t attends to t + 1 tokens."""
    return sum((end - start) * (start + end + 1) // 2 for _, start, end in group.rows(tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds for each unit of work.  name, source: where the figures come from, for reports.

    Raises ValueError when a cost is not a finite number of at least 0, or when all are 0.
    """

    step: float = 0.0
    prefill_token: float = 0.0
    decode_token: float = 0.0
    prefill_pair: float = 0.0
    decode_kv: float = 0.0
    swapped_token: float = 0.0
    copied_token: float = 0.0
    name: str = "given"
    source: str = ""

    def __post_init__(self) -> None:
        for name in COSTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"the cost {name} is {value!r}; it must be a number of seconds of at least 0")
        if not any(getattr(self, name) for name in COSTS):
            raise ValueError(f"every cost is 0, so time would stand still; set one of {', '.join(COSTS)}")

    def seconds(self, work: Work) -> float:
        """How long a step with this work takes."""
        return (
            self.step
            + self.prefill_token * work.prefill_tokens
            + self.decode_token * work.decode_tokens
            + self.prefill_pair * work.prefill_pairs
            + self.decode_kv * work.decode_kv
            + self.swapped_token * work.swapped_tokens
            + self.copied_token * work.copied_tokens
        )

    def to_dict(self) -> dict[str, Any]:
        """A copy made of plain values, as `load_cost` reads them."""
        return asdict(self)

    @classmethod
    def of(cls, values: Any, place: str) -> CostModel:
        """From what a JSON file holds.  Raises ValueError for an unknown key or a value that is no cost."""
        if not isinstance(values, dict):
            raise ValueError(f"{place} is no cost model: it must be an object with keys among {', '.join(COSTS)}")
        known = {item.name for item in fields(cls)} | {"fitted"}  # what a fit adds about itself
        unknown = [name for name in values if name not in known]
        if unknown:
            raise ValueError(f"{place}: {unknown[0]!r} is no cost; allowed are {', '.join(COSTS)}")
        for name in ("name", "source"):
            if not isinstance(values.get(name, ""), str):
                raise ValueError(f"{place}: {name} is {values[name]!r}; it must be text")
        try:
            return cls(**{name: value for name, value in values.items() if name != "fitted"})
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None


COSTS = tuple(item.name for item in fields(CostModel) if item.name not in ("name", "source"))


def presets() -> dict[str, CostModel]:
    """The cost models that come with lawful, by name; each says where its figures come from."""
    text = resources.files("engine").joinpath(PRESETS).read_text(encoding="utf-8")
    return {name: CostModel.of({"name": name, **values}, PRESETS) for name, values in json.loads(text).items()}


def load_cost(spec: str) -> CostModel:
    """A preset's name, a .json file, or `step=0.01,prefill_token=1e-4`.

    Raises ValueError, saying what is allowed, for anything else; OSError when the file cannot be read.
    """
    if "=" in spec and not spec.endswith(".json"):
        values: dict[str, Any] = {}
        for part in spec.split(","):
            name, _, value = part.partition("=")
            try:
                values[name.strip()] = float(value)
            except ValueError:
                raise ValueError(f"--cost-model: {part!r} is no cost; it must be NAME=SECONDS") from None
        return CostModel.of(values, "--cost-model")
    if spec.endswith(".json"):
        try:
            values = json.loads(Path(spec).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{spec} is no JSON: {error}") from None
        return CostModel.of({"name": Path(spec).stem, **values} if isinstance(values, dict) else values, spec)
    known = presets()
    if spec not in known:
        raise ValueError(
            f"--cost-model is {spec!r}; it must be one of {', '.join(known)}, a .json file, or NAME=SECONDS,..."
        )
    return known[spec]
