"""Choose the next token of every row of logits.  What a row gets depends on that row alone.

A draw is a function of (seed, branch, position) and the row's distribution, whatever else is in the batch: no generator
has a state.  For every token i a 64-bit counter hash gives a uniform u_i, and the token drawn is

    argmax over i of   x_i / temperature + g_i,     g_i = -log(-log(u_i))

which has exactly the distribution softmax(x / temperature) (the Gumbel-max trick: Gumbel 1954; Maddison, Tarlow and
Minka 2014, "A* Sampling").  Truncation only takes tokens out of the race.  There is no sum over the vocabulary in the
race, so the result does not depend on the order in which a batch is added up; and noise of size e in the scores changes
a draw only where the best two are closer than 2e, which has a probability of the order of e.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.request import Sampled
from engine.sampling import check_token_ids
from kernels.dispatch import uses_triton
from kernels.penalize import penalize
from kernels.sample import sample

if TYPE_CHECKING:
    from engine.request import RequestState
    from engine.sampling import SamplingParams

    Draw = tuple[RequestState, int]

_CHUNK = 1 << 19  # logits drawn at a time: memory stays bounded, and calls are few
_NUCLEUS = 1024  # most likely tokens sorted before the whole row is: a nucleus is rarely larger
_WINDOWS = (64, _NUCLEUS)  # the same for a draw, which needs no more of the row; 64 are sorted in a pass over it


class SamplingError(RuntimeError):
    """No token can be drawn for this row: its logits are broken, or the request's own parameters made them so."""


GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number: SplitMix64's step


def mix64(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014; constants by Stafford), elementwise on int64, wrapping.

    x ^= x >>> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >>> 27;  x *= 0x94D049BB133111EB;  x ^= x >>> 31
    """
    shifted = (x >> 30).bitwise_and_(0x3_FFFF_FFFF)  # the mask makes the arithmetic shift a logical one
    x = x ^ shifted
    x *= -0x40A7B892E31B1A47  # the constants above as signed numbers
    x ^= torch.bitwise_right_shift(x, 27, out=shifted).bitwise_and_(0x1F_FFFF_FFFF)
    x *= -0x6B2FB644ECCEEE15
    x ^= torch.bitwise_right_shift(x, 31, out=shifted).bitwise_and_(0x1_FFFF_FFFF)
    return x


def draw_keys(seeds: Tensor, branches: Tensor, positions: Tensor) -> Tensor:
    """One 64-bit key for each draw.  All arguments and the result are (R,) int64."""
    key = mix64(seeds + GOLDEN)
    key = mix64(key + (branches + 1) * GOLDEN)
    return mix64(key + (positions + 1) * GOLDEN)


def uniforms(keys: Tensor, token_ids: Tensor) -> Tensor:
    """u (R, K) float64 in (0, 1) for keys (R, 1) and token ids (K,) or (R, K): the id-th output of a SplitMix64.

    52 bits and a half: neither 0 nor 1 can occur, so that both logarithms of the Gumbel variate are finite.
    """
    bits = mix64(keys + (token_ids + 1) * GOLDEN)
    return (bits >> 12).bitwise_and_(0xF_FFFF_FFFF_FFFF).double().add_(0.5).mul_(2.0**-52)


def draw(scores: Tensor, keys: Tensor) -> Tensor:
    """Token ids (R,) drawn from softmax(scores) for scores (R, V) float64 and keys (R,).  -inf is never drawn."""
    token_ids = torch.arange(scores.shape[1], device=scores.device)
    return gumbel(keys[:, None], token_ids).add_(scores).argmax(dim=-1)


def race(logits: Tensor, temperature: Tensor, keys: Tensor, favourites: Tensor) -> Tensor:
    """What `draw(logits / temperature, keys)` draws, at about half the cost.

    logits: (R, V) float32.  temperature, keys, favourites: (R,) float64, int64, int64; a favourite is any token of its
    row, best the most likely one.

    A token beats the favourite's x + g = b only if g_i > b - x_i, that is -log u_i < exp(x_i - b); and 1 - u_i is never
    above -log u_i.  So one exponential in float32, b lowered by more than its error, tells the few that have to run.
    """
    vocab_size = logits.shape[1]
    bits = mix64(keys[:, None] + torch.arange(1, vocab_size + 1, device=logits.device) * GOLDEN)
    bits = (bits >> 12).bitwise_and_(0xF_FFFF_FFFF_FFFF).bitwise_or_(0x3FF0_0000_0000_0000)
    loss = (2 - 2.0**-53) - bits.view(torch.float64)  # exactly 1 - u: these bits are those of a number from 1 to 2
    heat = temperature[:, None]
    first = favourites[:, None]
    beaten = logits.gather(1, first).double() / heat
    beaten += gumbel(keys[:, None], first)
    top = logits.amax(dim=-1, keepdim=True).double() / heat
    slack = (top.abs() + beaten.abs() + 80) * 2.0**-18
    reach = (logits / heat.float()).sub_((beaten - slack).float()).exp_()
    row, token = (loss.float() <= reach).nonzero().unbind(1)
    scores = logits[row, token].double() / temperature[row] + gumbel(keys[row], token)
    winners, best = favourites.tolist(), beaten[:, 0].tolist()
    for r, i, score in zip(row.tolist(), token.tolist(), scores.tolist(), strict=True):
        if score > best[r] or (score == best[r] and i < winners[r]):
            winners[r], best[r] = i, score
    return torch.tensor(winners, device=logits.device)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """-log(-log(u)) of the same shape as `uniforms(keys, token_ids)`."""
    return uniforms(keys, token_ids).log_().neg_().log_().neg_()


def keep_most_likely(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`scores` (R, V) float64 with -inf for all but the `top_k` most likely and, of these, the `top_p` nucleus.

    top_k: (R,) int64 from 1 to V.  top_p: (R,) float64 in (0, 1]; the nucleus is the smallest set of most likely tokens
    whose share of the probability of the top_k is at least top_p (Holtzman et al. 2020, section 3.1).  Among equal
    scores the lower ids stay.
    """
    vocab_size = scores.shape[1]
    top = scores.max(dim=-1, keepdim=True).values
    wide = top_k >= vocab_size
    total = torch.full_like(top_p, math.inf)
    if wide.any():
        total[wide] = (scores[wide] - top[wide]).exp_().cumsum(dim=-1)[:, -1]  # cumsum adds each row on its own
    most = min(vocab_size, max(_NUCLEUS, int(torch.where(wide, 1, top_k).max())))
    for size in (most, vocab_size):
        best = scores.topk(size, dim=-1).values
        mass = (best - top).exp_().cumsum(dim=-1)
        if (~wide | (mass[:, -1] >= top_p * total)).all():
            break
    whole = torch.where(wide, total, mass.gather(1, top_k.clamp(max=size)[:, None] - 1)[:, 0])
    nucleus = (mass < (top_p * whole)[:, None]).sum(dim=-1) + 1
    count = torch.where(top_p < 1, torch.minimum(nucleus, top_k), top_k)
    inside = count < vocab_size
    last = best.gather(1, count.clamp(max=size)[:, None] - 1)  # the score of the least likely token that stays
    above = scores > last
    equal = scores == last
    places = count[:, None] - above.sum(dim=-1, keepdim=True)
    keep = above | (equal & (equal.cumsum(dim=-1) <= places)) | ~inside[:, None]
    return scores.masked_fill(~keep, -math.inf)


class Sampler:
    """Draws for the rows of one batch.

    vocab_size: V, the number of logits in a row.
    eos_token_ids: the model's end-of-sequence tokens, masked below `min_tokens`.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int] | frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        check_token_ids("eos_token_ids", self.eos_token_ids, vocab_size)

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> list[Sampled | Exception]:
        """One draw, or the error of this row alone, for each row.

        logits: (R, V) floating point, one row for each draw; left unchanged.
        draws: (request, branch) of each row.  The position of a draw is the number of tokens its branch has generated.

        The steps, in this order: logits processors, allowed ids, logit bias; min_tokens mask; repetition, presence and
        frequency penalty; temperature; top_k, top_p, min_p; draw.  Logprobs are those of `logits` as they came.
        """
        if logits.shape != (len(draws), self.vocab_size):
            raise ValueError(f"logits have shape {tuple(logits.shape)}, expected {(len(draws), self.vocab_size)}")
        if not draws:
            return []
        logits = logits.float()
        form = self._sample_on_device if uses_triton(logits) else self._sample_together
        try:
            return form(logits, draws)
        except Exception as error:
            if len(draws) == 1:
                return [_own(error)]
            # Nobody knows whose it was: each row once more, alone.  Processors may so be called twice for a token.
            return [self.sample(logits[r : r + 1], [draws[r]])[0] for r in range(len(draws))]

    def _sample_together(self, logits: Tensor, draws: Sequence[Draw]) -> list[Sampled | Exception]:
        """All rows at once, by torch."""
        params = [request.params for request, _ in draws]
        raw = torch.log_softmax(logits, dim=-1)
        work, errors = self._edited(logits, draws)
        tokens = work.argmax(dim=-1)  # the first of equals
        best = work.gather(1, tokens[:, None])[:, 0]  # NaN if there is one, -inf if there is nothing else
        random = [r for r, p in enumerate(params) if not p.is_greedy and r not in errors]
        for chunk in _chunks(random, max(1, _CHUNK // self.vocab_size)):
            rows = torch.tensor(chunk, device=work.device)
            tokens[rows] = self._drawn(_picked(work, rows), [draws[r] for r in chunk], tokens[rows])
        logprobs = raw.gather(1, tokens[:, None])[:, 0]
        results: list[Sampled | Exception] = []
        columns = zip(tokens.tolist(), logprobs.tolist(), best.tolist(), params, strict=True)
        for r, (token_id, logprob, top, p) in enumerate(columns):
            if r in errors:
                results.append(errors[r])
            elif math.isnan(logprob):
                results.append(SamplingError("the model's logits are not finite"))
            elif not math.isfinite(top):
                results.append(SamplingError("no token can be drawn: every logit is -inf, or one is NaN or +inf"))
            elif p.logprobs is None:
                results.append(Sampled(token_id, logprob))
            else:
                results.append(_with_top(raw[r], token_id, logprob, p.logprobs))
        return results

    def _sample_on_device(self, logits: Tensor, draws: Sequence[Draw]) -> list[Sampled | Exception]:
        """The same draws by kernels, all rows in one launch; the host waits once, for the tokens."""
        params = [request.params for request, _ in draws]
        work, errors = self._edited(logits, draws, penalties=False)
        work = _penalized(work, logits, draws)
        real = [
            [0.0 if p.is_greedy else p.temperature for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
        ]
        cut = [p.top_k if 0 < p.top_k < self.vocab_size and not p.is_greedy else self.vocab_size for p in params]
        whole = [cut, [q.seed for q, _ in draws], [b for _, b in draws], [len(q.outputs[b]) for q, b in draws]]
        temperature, top_p, min_p = _upload(real, torch.float64, logits.device)
        top_k, seeds, branches, positions = _upload(whole, torch.int64, logits.device)
        top_p = torch.where(temperature == 0, 1.0, top_p)
        tokens = sample(work, temperature, top_k, top_p, min_p, draw_keys(seeds, branches, positions))
        logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)
        best = work.amax(dim=-1)
        columns = torch.stack((tokens.double(), logprobs.double(), best.double())).tolist()  # the one wait
        results: list[Sampled | Exception] = []
        for r, (token, logprob, top, p) in enumerate(zip(*columns, params, strict=True)):
            if r in errors:
                results.append(errors[r])
            elif math.isnan(logprob):
                results.append(SamplingError("the model's logits are not finite"))
            elif not math.isfinite(top):
                results.append(SamplingError("no token can be drawn: every logit is -inf, or one is NaN or +inf"))
            elif p.logprobs is None:
                results.append(Sampled(int(token), logprob))
            else:
                raw = torch.log_softmax(logits[r], dim=-1)
                results.append(_with_top(raw, int(token), float(raw[int(token)]), p.logprobs))
        return results

    def _edited(
        self, logits: Tensor, draws: Sequence[Draw], penalties: bool = True
    ) -> tuple[Tensor, dict[int, Exception]]:
        """Logits after everything that comes before temperature, penalties or not, and the errors by row."""
        errors: dict[int, Exception] = {}
        work = logits
        for r, (request, branch) in enumerate(draws):
            params = request.params
            output = request.outputs[branch]
            masked = len(output) < params.min_tokens
            if not (masked or params.edits_logits):
                continue
            if work is logits:
                work = logits.clone()
            try:
                self._edit(work[r], logits[r], request, output)
                if masked:
                    work[r, [*self.eos_token_ids, *(params.stop_token_ids or ())]] = -math.inf
                if penalties:
                    _penalize(work[r], params, request.prompt_token_ids, output)
            except Exception as error:  # whatever it is, it is this request's own
                errors[r] = _own(error)
        return work, errors

    def _edit(self, row: Tensor, original: Tensor, request: RequestState, output: list[int]) -> None:
        """Logits processors, allowed ids and bias, in place on `row` (V,)."""
        params = request.params
        if params.logits_processors:
            row.copy_(self._processed(original.clone(), params, output))
        if params.allowed_token_ids is not None:
            allowed = torch.tensor(params.allowed_token_ids, device=row.device)
            kept = row[allowed]
            row.fill_(-math.inf)[allowed] = kept
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=row.device)
            row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)

    def _processed(self, row: Tensor, params: SamplingParams, output: list[int]) -> Tensor:
        for i, processor in enumerate(params.logits_processors or ()):
            try:
                row = processor(list(output), row)
            except Exception as error:
                message = f"logits processor {i} raised {type(error).__name__}: {error}"
                raise SamplingError(message) from error
            if not isinstance(row, Tensor) or row.shape != (self.vocab_size,):
                shown = f"shape {tuple(row.shape)}" if isinstance(row, Tensor) else type(row).__name__
                raise SamplingError(f"logits processor {i} returned {shown}, not a tensor ({self.vocab_size},)")
        return row

    def _drawn(self, logits: Tensor, draws: Sequence[Draw], best: Tensor) -> Tensor:
        """Token ids (R,) drawn from logits (R, V) under temperature and truncation.  best: the most likely tokens."""
        device = logits.device
        rows = _Rows.of(draws, self.vocab_size, device)
        tokens = best.clone()
        plain = rows.plain.nonzero()[:, 0]
        if len(plain):
            some = rows.pick(plain)
            tokens[plain] = race(_picked(logits, plain), some.temperature, some.keys, best[plain])
        left = (~rows.plain).nonzero()[:, 0]
        for size in _WINDOWS:
            if len(left) and size < self.vocab_size:
                drawn = _drawn_from_window(_picked(logits, left), rows.pick(left), size)
                done = drawn >= 0
                tokens[left[done]] = drawn[done]
                left = left[~done]
        if len(left):
            some = rows.pick(left)
            scores = _picked(logits, left).double() / some.temperature[:, None]
            scores = keep_most_likely(scores, some.top_k, some.top_p)
            scores.masked_fill_(scores < scores.max(dim=-1, keepdim=True).values + some.least[:, None], -math.inf)
            tokens[left] = draw(scores, some.keys)
        return tokens


def _picked(logits: Tensor, rows: Tensor) -> Tensor:
    """These rows (R,), in ascending order, of logits; `logits` itself if they are all."""
    return logits if len(rows) == len(logits) else logits.index_select(0, rows)


class _Rows(NamedTuple):
    """What is asked of each row, (R,) each."""

    plain: Tensor  # bool: no truncation
    temperature: Tensor  # float64
    top_k: Tensor  # int64, 1 to V
    top_p: Tensor  # float64
    least: Tensor  # float64: the logarithm of min_p, or -inf
    keys: Tensor  # int64

    @classmethod
    def of(cls, draws: Sequence[Draw], vocab_size: int, device: torch.device) -> _Rows:
        params = [request.params for request, _ in draws]
        top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        plain = [p.top_p == 1 and k == vocab_size and p.min_p == 0 for p, k in zip(params, top_k, strict=True)]
        least = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        real = torch.tensor([[p.temperature for p in params], [p.top_p for p in params], least], dtype=torch.float64)
        whole = torch.tensor([[q.seed, b, len(q.outputs[b])] for q, b in draws]).T
        temperature, top_p, floor = real.to(device)
        return cls(
            torch.tensor(plain, device=device),
            temperature,
            torch.tensor(top_k, device=device),
            top_p,
            floor,
            draw_keys(*whole.to(device)),
        )

    def pick(self, rows: Tensor) -> _Rows:
        return _Rows(*(column[rows] for column in self))


def _drawn_from_window(logits: Tensor, rows: _Rows, size: int) -> Tensor:
    """Tokens (R,) drawn from logits (R, V) of which the `size` most likely are sorted; -1 where more may be kept.

    What is kept, and so what is drawn, is what `keep_most_likely` keeps.
    """
    vocab_size = logits.shape[1]
    heat = rows.temperature[:, None]
    ids = logits.topk(size, dim=-1).indices.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)  # equals: lower ids first
    ids = ids.gather(1, order)
    scores = values.double() / heat
    top = scores[:, :1]
    mass = (scores - top).exp_().cumsum(dim=-1)
    wide = rows.top_k >= vocab_size
    whole = mass.gather(1, rows.top_k.clamp(max=size)[:, None] - 1)[:, 0]
    nucleus = wide & (rows.top_p < 1)
    if nucleus.any():
        some = nucleus.nonzero()[:, 0]
        shares = (_picked(logits, some).double().div_(heat[some]) - top[some]).exp_()
        whole[some] = shares.cumsum(dim=-1)[:, -1]  # which adds each row on its own
    count = torch.where(rows.top_p < 1, (mass < (rows.top_p * whole)[:, None]).sum(dim=-1) + 1, vocab_size)
    count = torch.minimum(count, rows.top_k)
    kept = torch.arange(size, device=logits.device) < count[:, None]
    kept &= scores >= top + rows.least[:, None]
    # Of all that equal the least likely that is kept, the window must hold every one, to know the lower ids.
    inside = (count < size) & (values[:, -1] < values.gather(1, count.clamp(max=size)[:, None] - 1)[:, 0])
    inside |= ~kept[:, -1] & (count >= size)  # min_p ends before the window does
    inside &= (wide | (rows.top_k <= size) | (rows.top_p == 1)) & scores.isfinite()[:, 0]
    noise = gumbel(rows.keys[:, None], ids).add_(scores).masked_fill_(~kept, -math.inf)
    return torch.where(inside, ids.gather(1, noise.argmax(dim=-1, keepdim=True))[:, 0], -1)


def _own(error: Exception) -> SamplingError:
    """Any error as one of the row's own."""
    if isinstance(error, SamplingError):
        return error
    own = SamplingError(f"sampling failed: {error!r}")
    own.__cause__ = error
    return own


def _penalize(row: Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> None:
    """Penalties in place on `row` (V,): repetition over prompt and output, the others over the output alone."""
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *output}), device=row.device)
        values = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        seen, counts = torch.unique(torch.tensor(output, device=row.device), return_counts=True)
        row[seen] -= params.frequency_penalty * counts + params.presence_penalty


def _penalized(work: Tensor, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """`work` with every row's penalties, in place unless it is `logits` itself."""
    ids: list[int] = []
    counts: list[int] = []
    starts = [0]
    for request, branch in draws:
        p, output = request.params, request.outputs[branch]
        seen: Counter[int] = Counter()
        if p.repetition_penalty != 1:
            seen.update(dict.fromkeys(request.prompt_token_ids, 0))
        if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty:
            seen.update(output)
        ids += seen.keys()
        counts += seen.values()
        starts.append(len(ids))
    if not ids:
        return work
    if work is logits:
        work = logits.clone()
    params = [request.params for request, _ in draws]
    factors = [[p.repetition_penalty for p in params], [p.presence_penalty for p in params]]
    repetition, presence, frequency = _upload(
        [*factors, [p.frequency_penalty for p in params]], torch.float32, work.device
    )
    entries, times = _upload([ids, counts], torch.int64, work.device)
    (row_starts,) = _upload([starts], torch.int64, work.device)
    penalize(work, entries, times, row_starts, repetition, presence, frequency)
    return work


def _upload(columns: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Columns of numbers as one tensor on the device, in one copy that the host does not wait for."""
    made = torch.tensor(columns, dtype=dtype)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)


def _with_top(row: Tensor, token_id: int, logprob: float, count: int) -> Sampled:
    """The draw with its rank and the `count` most likely tokens of `row` (V,): log-probabilities."""
    rank = int((row > logprob).sum()) + 1
    top: list[tuple[int, float]] = []
    if count:
        count = min(count, row.numel())
        least = row.topk(count).values[-1]
        ids = (row >= least).nonzero()[:, 0]
        pairs = zip(ids.tolist(), row[ids].tolist(), strict=True)
        top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]
    return Sampled(token_id, logprob, top, rank)


def _chunks(items: list[int], size: int) -> list[list[int]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
