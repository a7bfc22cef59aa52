"""Draw one token for each row of logits: temperature, top-k, top-p, min-p and a seeded draw, all on the device.

    score[i] = logits[r, i] / temperature[r]          in float64, like all that follows
    kept = the top_k[r] largest scores; of these the fewest largest whose share of their probability is top_p[r];
           of these the ones with score >= max + log(min_p[r]).  Among equal scores the lower ids stay.
    token[r] = argmax over kept i of  score[i] - log(-log(u_i)),       u_i = uniform(mix64(keys[r] + (i + 1) * GOLDEN))

which is a draw from softmax(score) over what is kept (Gumbel 1954; Maddison, Tarlow and Minka 2014).  A temperature of
0 takes the largest logit, the first of equals.  mix64 is the finalizer of SplitMix64 (Steele, Lea and Flood 2014) and
uniform takes its upper 52 bits and a half, so that the same key draws the same token wherever the row is computed.

logits (rows, vocab) float32; temperature, top_p, min_p (rows,) float64; top_k (rows,) int64 from 1 to vocab;
keys (rows,) int64; out (rows,) int64

How the kernel does it.  The row is read once for the largest of every lane: the k-th largest of those is a floor that
at least k tokens pass, and few more.  A second reading collects what passes into a list of candidates; selection and
draw work on the list, which lies in the cache.  Only where the list is too long, or holds too little of the
probability, are the whole row's logits the candidates.  No reading where nothing is cut: then the draw is the second.
Whichever list it is, the least token that stays is found by bisection over the 32 bits of its logit, so it is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import next_power_of_2, refuse_unless, same_device, tl, triton, uses_triton

LANES = (
    4096  # 8 numbers for each thread of 16 warps, and four times as many lane maxima as a nucleus usually has tokens
)
NUCLEUS = 1024  # candidates looked for where only top-p or min-p cuts
CANDIDATES = 16384  # room in the list

GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number
FIRST = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
SECOND = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


def mix64_reference(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64, elementwise on int64, wrapping.  The masks make arithmetic shifts logical ones."""
    x = (x ^ ((x >> 30) & 0x3_FFFF_FFFF)) * FIRST
    x = (x ^ ((x >> 27) & 0x1F_FFFF_FFFF)) * SECOND
    return x ^ ((x >> 31) & 0x1_FFFF_FFFF)


def sample_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    """The meaning, also the CPU path: row by row, sorted."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    ids = torch.arange(logits.shape[1], device=logits.device)
    for r, row in enumerate(logits):
        if float(temperature[r]) == 0:
            out[r] = row.argmax()
            continue
        scores = row.double() / temperature[r]
        order = scores.sort(descending=True, stable=True).indices[: int(top_k[r])]
        mass = (scores[order] - scores[order[0]]).exp().cumsum(0)
        if float(top_p[r]) < 1:
            order = order[: int((mass < top_p[r] * mass[-1]).sum()) + 1]
        kept = torch.full_like(scores, -torch.inf)
        kept[order] = scores[order]
        kept[kept < scores.max() + torch.log(min_p[r])] = -torch.inf
        bits = mix64_reference(keys[r] + (ids + 1) * GOLDEN)
        u = (((bits >> 12) & 0xF_FFFF_FFFF_FFFF).double() + 0.5) * 2.0**-52
        out[r] = (kept - torch.log(-torch.log(u))).argmax()
    return out


@triton.jit
def order_of(x):
    """An int32 that orders as the float32 does; -0.0 counts as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The float32 that `order_of` took."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def gumbel(key, ids, GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """-log(-log(u)) for the id-th output of a SplitMix64 at `key`."""
    x = key + (ids + 1) * GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * SECOND
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    u = (((x >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(u))


@triton.jit
def sample_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    keys,
    list_logits,
    list_ids,
    out,
    logits_row,
    vocab,
    LANES: tl.constexpr,
    NUCLEUS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    GOLDEN: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    """One program for each row: its passes follow each other, and the rows fill the device."""
    r = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + r)
    k = tl.load(top_k + r)
    p = tl.load(top_p + r)
    least = tl.load(min_p + r)
    key = tl.load(keys + r)
    lane = tl.arange(0, LANES)
    row = logits + r * logits_row
    greedy = heat == 0.0
    heat = tl.where(greedy, 1.0, heat)
    cut = (k < vocab) | (p < 1.0)
    whole = (k >= vocab) & (p < 1.0)  # the nucleus is a share of all tokens

    # First reading: the largest logit of each lane, and where the nucleus asks for it the mass of all tokens.
    most = tl.full((LANES,), float("-inf"), tl.float32)
    mass = tl.zeros((LANES,), tl.float64)
    for start in range(0, vocab, LANES):
        i = start + lane
        x = tl.load(row + i, mask=i < vocab, other=float("-inf"))
        more = tl.maximum(most, x)
        if whole:
            mass = mass * tl.where(most < more, tl.exp((most.to(tl.float64) - more) / heat), 1.0)
            mass = mass + tl.where(x > float("-inf"), tl.exp((x.to(tl.float64) - more) / heat), 0.0)
        most = more
    top = tl.max(most)
    peak = top.to(tl.float64) / heat
    floor_score = peak + tl.log(least)  # -inf for 0
    total = tl.sum(tl.where(most > float("-inf"), mass * tl.exp((most.to(tl.float64) - top) / heat), 0.0))

    low = order_of(tl.min(tl.full((LANES,), float("-inf"), tl.float32)))  # nothing is below it
    last = low  # the order of the least logit that stays
    places = tl.zeros((), tl.int64) + vocab  # of those equal to it, how many stay
    count = tl.zeros((), tl.int64)  # candidates in the list; 0: the row itself
    if cut:
        # A floor: the wanted-th largest lane maximum, by bisection; at least that many tokens reach it.
        wanted = tl.where(k < vocab, k, NUCLEUS)
        orders = order_of(most)
        lo = low.to(tl.int64)
        hi = order_of(top).to(tl.int64)
        if wanted > LANES:
            hi = lo
        for _ in range(0, 32):
            middle = (lo + hi + 1) >> 1
            enough = tl.sum((orders >= middle).to(tl.int32)) >= wanted
            lo = tl.where(enough, middle, lo)
            hi = tl.where(enough, hi, middle - 1)
        # Second reading: the list of what reaches the floor, in order of ids.
        held = tl.zeros((LANES,), tl.float64)
        for start in range(0, vocab, LANES):
            i = start + lane
            x = tl.load(row + i, mask=i < vocab, other=float("-inf"))
            good = (order_of(x) >= lo) & (i < vocab)
            place = count + tl.cumsum(good.to(tl.int64)) - 1
            fits = good & (place >= 0) & (place < CANDIDATES)
            tl.store(list_logits + r * CANDIDATES + place, x, mask=fits)
            tl.store(list_ids + r * CANDIDATES + place, i, mask=fits)
            if whole:
                held = held + tl.where(good, tl.exp((x.to(tl.float64) - top) / heat), 0.0)
            count = count + tl.sum(good.to(tl.int64))
        if (count > CANDIDATES) | (whole & (tl.sum(held) < p * total)):
            count = count * 0
        tl.debug_barrier()  # the list was written by other threads of this program than those that read it
    use_list = count > 0
    size = tl.where(use_list, count, vocab)

    if k < vocab:
        # The largest logit that at least k candidates reach.
        lo = low.to(tl.int64)
        hi = order_of(top).to(tl.int64)
        for _ in range(0, 32):
            middle = (lo + hi + 1) >> 1
            reach = tl.zeros((LANES,), tl.int32)
            for at in range(0, size, LANES):
                i = at + lane
                x = tl.load(list_logits + r * CANDIDATES + i, mask=use_list & (i < size), other=float("-inf"))
                y = tl.load(row + i, mask=(count == 0) & (i < size), other=float("-inf"))
                x = tl.maximum(x, y)
                reach += ((order_of(x) >= middle) & (i < size)).to(tl.int32)
            enough = tl.sum(reach) >= k
            lo = tl.where(enough, middle, lo)
            hi = tl.where(enough, hi, middle - 1)
        last = lo.to(tl.int32)
        over = tl.zeros((LANES,), tl.int32)
        held = tl.zeros((LANES,), tl.float64)
        for at in range(0, size, LANES):
            i = at + lane
            x = tl.load(list_logits + r * CANDIDATES + i, mask=use_list & (i < size), other=float("-inf"))
            y = tl.load(row + i, mask=(count == 0) & (i < size), other=float("-inf"))
            x = tl.maximum(x, y)
            above = (order_of(x) > last) & (i < size)
            over += above.to(tl.int32)
            held += tl.where(above, tl.exp((x.to(tl.float64) - top) / heat), 0.0)
        places = k - tl.sum(over)
        one = tl.exp((value_of(last).to(tl.float64) - top) / heat)
        total = tl.sum(held) + places.to(tl.float64) * one
    if p < 1.0:
        # The largest logit at which the tokens that reach it hold the nucleus' share.
        lo = last.to(tl.int64)
        hi = order_of(top).to(tl.int64)
        for _ in range(0, 32):
            middle = (lo + hi + 1) >> 1
            held = tl.zeros((LANES,), tl.float64)
            for at in range(0, size, LANES):
                i = at + lane
                x = tl.load(list_logits + r * CANDIDATES + i, mask=use_list & (i < size), other=float("-inf"))
                y = tl.load(row + i, mask=(count == 0) & (i < size), other=float("-inf"))
                x = tl.maximum(x, y)
                good = (order_of(x) >= middle) & (i < size)
                held += tl.where(good, tl.exp((x.to(tl.float64) - top) / heat), 0.0)
            enough = tl.sum(held) >= p * total
            lo = tl.where(enough, middle, lo)
            hi = tl.where(enough, hi, middle - 1)
        held = tl.zeros((LANES,), tl.float64)
        for at in range(0, size, LANES):
            i = at + lane
            x = tl.load(list_logits + r * CANDIDATES + i, mask=use_list & (i < size), other=float("-inf"))
            y = tl.load(row + i, mask=(count == 0) & (i < size), other=float("-inf"))
            x = tl.maximum(x, y)
            above = (order_of(x) > lo) & (i < size)
            held += tl.where(above, tl.exp((x.to(tl.float64) - top) / heat), 0.0)
        one = tl.exp((value_of(lo.to(tl.int32)).to(tl.float64) - top) / heat)
        needed = tl.maximum(tl.ceil((p * total - tl.sum(held)) / one), 1.0).to(tl.int64)
        places = tl.where(lo > last, needed, tl.minimum(places, needed))
        last = lo.to(tl.int32)

    # The race.  A reading of the row where nothing was cut, of the list otherwise.
    best = tl.full((), float("-inf"), tl.float64)
    token = tl.zeros((), tl.int64)
    equal_before = tl.zeros((), tl.int64)
    for at in range(0, size, LANES):
        i = at + lane
        x = tl.load(list_logits + r * CANDIDATES + i, mask=use_list & (i < size), other=float("-inf"))
        y = tl.load(row + i, mask=(count == 0) & (i < size), other=float("-inf"))
        x = tl.maximum(x, y)
        ids = tl.load(list_ids + r * CANDIDATES + i, mask=use_list & (i < size), other=0).to(tl.int64)
        ids = tl.where(use_list, ids, i.to(tl.int64))
        order = order_of(x)
        equal = (order == last) & (i < size)
        nth = tl.cumsum(equal.to(tl.int32))  # of this tile
        left = places - equal_before
        equal_before += tl.sum(equal.to(tl.int32))
        score = x.to(tl.float64) / heat
        stays = (i < size) & ((order > last) | (equal & (nth <= left))) & (score >= floor_score)
        # No noise passes 36.8 (u is at most 1 - 2^-53): a tile that cannot win is not hashed.
        ahead = tl.max(tl.where(stays, score, float("-inf")))
        if ahead + tl.where(greedy, 0.0, 36.8) > best:
            if greedy:
                race = tl.where(stays, score, float("-inf"))
            else:
                race = tl.where(stays, score + gumbel(key, ids, GOLDEN, FIRST, SECOND), float("-inf"))
            winner = tl.max(race)
            if winner > best:
                best = winner
                token = tl.min(tl.where((race == winner) & stays, ids, vocab))
    tl.store(out + r, token)


def launch_sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    """Start the kernel on checked arguments."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    room = min(CANDIDATES, next_power_of_2(vocab))
    sample_kernel[(rows,)](
        logits=logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        keys=keys,
        list_logits=torch.empty((rows, room), dtype=torch.float32, device=logits.device),
        list_ids=torch.empty((rows, room), dtype=torch.int32, device=logits.device),
        out=out,
        logits_row=logits.stride(0),
        vocab=vocab,
        LANES=min(LANES, next_power_of_2(vocab)),
        NUCLEUS=NUCLEUS,
        CANDIDATES=room,
        GOLDEN=GOLDEN,
        FIRST=FIRST,
        SECOND=SECOND,
        num_warps=16 if vocab >= LANES else 4,
    )
    return out


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor) -> Tensor:
    """Token ids (rows,) int64.  See the head of this file for shapes.  A row of NaN or of -inf draws some token.

    Raises ValueError where shapes or types do not fit.  Nothing waits for the device.
    """
    per_row = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    same_device("sample", logits=logits, top_k=top_k, keys=keys, **per_row)
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.shape[1] < 1:
        raise ValueError(f"sample: logits must be float32 (rows, vocab), not {logits.dtype} {tuple(logits.shape)}")
    refuse_unless(logits.stride(1) == 1, lambda: f"sample: logits have strides {logits.stride()}")
    for name, tensor in {**per_row, "top_k": top_k, "keys": keys}.items():
        kind = torch.float64 if name in per_row else torch.int64
        if tensor.shape != logits.shape[:1] or tensor.dtype != kind or not tensor.is_contiguous():
            raise ValueError(
                f"sample: {name} must be contiguous {kind} ({logits.shape[0]},), not {tensor.dtype} "
                f"{tuple(tensor.shape)} of stride {tensor.stride()}"
            )
    form = launch_sample if uses_triton(logits) else sample_reference
    return form(logits, temperature, top_k, top_p, min_p, keys)
