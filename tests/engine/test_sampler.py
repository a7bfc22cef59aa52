"""The sampler: exact steps, exact distributions, and no influence of one row on another."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.request import RequestState, Sampled
from engine.sampler import Sampler, SamplingError, draw, draw_keys, keep_most_likely, race, uniforms
from engine.sampling import SamplingParams

V = 100
EOS = (2, 7)
SAMPLER = Sampler(V, EOS)


def request(
    output: list[int] | None = None, *, prompt: list[int] | None = None, seed: int = 0, width: int = 1, **given: object
) -> RequestState:
    params = SamplingParams(**{"max_tokens": None, **given})  # type: ignore[arg-type]
    outputs = [list(output or []) for _ in range(width)]
    return RequestState("r", [0, 1] if prompt is None else prompt, params, seed, outputs)


def one(logits: Tensor, state: RequestState, branch: int = 0) -> Sampled:
    answer = SAMPLER.sample(logits[None], [(state, branch)])[0]
    assert isinstance(answer, Sampled), answer
    return answer


def logits_of(seed: int, rows: int, vocab_size: int = V) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


# The hash and the draw.


def test_the_counter_hash_is_splitmix64() -> None:
    """The first outputs of the reference SplitMix64 for state 1234567."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    expected = [((x >> 12) + 0.5) * 2.0**-52 for x in known]
    assert uniforms(torch.tensor([[1234567]]), torch.arange(3))[0].tolist() == expected


def test_keys_differ_for_every_seed_branch_and_position() -> None:
    grid = torch.cartesian_prod(torch.arange(-5, 15), torch.arange(8), torch.arange(50))
    assert draw_keys(*grid.T).unique().numel() == len(grid)


def test_uniforms_are_never_zero_or_one() -> None:
    u = uniforms(torch.arange(-50, 50)[:, None], torch.arange(1000))
    assert u.min() > 0
    assert u.max() < 1
    assert abs(float(u.mean()) - 0.5) < 4 / math.sqrt(12 * u.numel())


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """In standard deviations from its mean: above 5 has a probability below 1e-5."""
    freedom = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("vary", ["seed", "branch", "position"])
def test_draws_follow_the_distribution_whatever_varies(vary: str) -> None:
    draws = 20_000
    probabilities = torch.softmax(torch.arange(20).double() * 0.3, dim=0)
    columns = {name: torch.full((draws,), 3) for name in ("seed", "branch", "position")}
    columns[vary] = torch.arange(draws)
    keys = draw_keys(columns["seed"], columns["branch"], columns["position"])
    counts = torch.bincount(draw(probabilities.log().expand(draws, -1), keys), minlength=20)
    assert chi_square(counts, probabilities * draws) < 5
    # The check can fail: a distribution that is off by a tenth does.
    off = torch.softmax(torch.arange(20).double() * 0.33, dim=0)
    assert chi_square(counts, off * draws) > 5


def test_the_whole_sampler_draws_from_the_truncated_and_tempered_distribution() -> None:
    logits = torch.full((V,), -20.0)
    logits[:6] = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -3.0])
    rows = 5000
    states = [request(seed=i, temperature=0.7, top_k=5, top_p=0.95, min_p=0.05) for i in range(rows)]
    answers = SAMPLER.sample(logits.expand(rows, -1), [(state, 0) for state in states])
    counts = torch.bincount(torch.tensor([a.token_id for a in answers]), minlength=V)  # type: ignore[union-attr]
    top = torch.softmax(logits[:5].double() / 0.7, dim=0)
    kept = top[:4] / top[:4].sum()  # the fifth is outside the nucleus: the first four have 0.9695 of the mass
    assert counts[4:].sum() == 0
    assert chi_square(counts[:4], kept * rows) < 5


def test_consecutive_draws_of_one_branch_are_independent() -> None:
    keys = draw_keys(torch.zeros(20_000, dtype=torch.int64), torch.tensor(0), torch.arange(20_000))
    tokens = draw(torch.zeros(20_000, 4, dtype=torch.float64), keys)
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert chi_square(pairs, torch.full((16,), 19_999 / 16)) < 5


def test_a_little_noise_in_the_logits_rarely_changes_a_draw() -> None:
    logits = logits_of(1, 1, 2000).double().expand(2000, -1)
    noise = torch.randn(2000, 2000, generator=torch.Generator().manual_seed(2)).double() * 1e-5
    keys = draw_keys(torch.arange(2000), torch.tensor(0), torch.tensor(0))
    assert (draw(logits, keys) != draw(logits + noise, keys)).sum() <= 1


# One row and its neighbours.

PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([-1, 0, 1, 5, 99, 100, 500]),
        "top_p": st.sampled_from([0.01, 0.5, 0.9, 0.999]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.5]),
        "frequency_penalty": st.sampled_from([-1.0, 0.5]),
        "repetition_penalty": st.sampled_from([0.5, 1.3]),
        "min_tokens": st.sampled_from([0, 3]),
        "logit_bias": st.just({5: 3.0, 6: -3.0}),
        "allowed_token_ids": st.just([4, 5, 6, 50]),
        "logprobs": st.sampled_from([0, 1, 4]),
    },
)
ROW = st.tuples(PARAMS, st.integers(-(2**63), 2**63 - 1), st.lists(st.integers(0, V - 1), max_size=5))


@settings(max_examples=60, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=12), st.integers(0, 1000))
def test_a_row_gets_exactly_the_same_alone_and_in_any_batch(rows: list, seed: int) -> None:
    logits = logits_of(seed, len(rows))
    draws = [(request(output, seed=s, width=2, **params), i % 2) for i, (params, s, output) in enumerate(rows)]
    together = SAMPLER.sample(logits, draws)
    assert [SAMPLER.sample(logits[i : i + 1], [d])[0] for i, d in enumerate(draws)] == together
    assert SAMPLER.sample(logits.flip(0), draws[::-1]) == together[::-1]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_p": 0.9, "temperature": 0.2}, {"top_k": 40}])
def test_rows_of_a_large_vocabulary_do_not_depend_on_the_batch_either(params: dict) -> None:
    size = 50_021  # odd: rows begin at every place of a vector register, and several chunks are needed
    sampler = Sampler(size, ())
    logits = logits_of(3, 7, size)
    draws = [(request(seed=i, **params), 0) for i in range(7)]
    together = sampler.sample(logits, draws)
    assert [sampler.sample(logits[i : i + 1], [d])[0] for i, d in enumerate(draws)] == together


def test_a_seeded_request_gets_the_same_draws_wherever_it_stands() -> None:
    logits = logits_of(4, 16)

    def run(front: int, stop_at: int = 16) -> list[int]:
        state = request(seed=42, temperature=0.8)
        others = [(request(seed=1000 + i, temperature=1.3), 0) for i in range(front)]
        for position in range(16):
            if position == stop_at:  # a recompute: the state is rebuilt from the tokens, nothing else survives
                state = RequestState("r", state.prompt_token_ids, state.params.clone(), 42, [list(state.outputs[0])])
            batch = torch.cat([logits_of(9, front), logits[position][None]])
            answer = SAMPLER.sample(batch, [*others, (state, 0)])[-1]
            assert isinstance(answer, Sampled)
            state.outputs[0].append(answer.token_id)
        return state.outputs[0]

    alone = run(0)
    assert run(1) == run(2) == run(0, stop_at=7) == run(3, stop_at=7) == alone
    assert len(set(alone)) > 4


def test_branches_and_positions_draw_differently_but_reproducibly() -> None:
    logits = torch.zeros(V)
    tokens = [[one(logits, request([0] * p, width=4), b).token_id for p in range(8)] for b in range(4)]
    again = [[one(logits, request([1] * p, width=4), b).token_id for p in range(8)] for b in range(4)]
    assert tokens == again
    assert len({tuple(t) for t in tokens}) == 4


def test_the_logits_given_are_not_changed() -> None:
    logits = logits_of(5, 2)
    before = logits.clone()
    state = request([3], logit_bias={1: 5.0}, presence_penalty=1.0, min_tokens=5, top_k=3)
    SAMPLER.sample(logits, [(state, 0), (request(logits_processors=[lambda _, row: row.zero_()]), 0)])
    assert torch.equal(logits, before)


# Each step.


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(V)
    logits[[9, 40, 41]] = 1.0
    assert one(logits, request(temperature=0)).token_id == 9
    assert one(logits, request(temperature=1e-6, top_k=50, top_p=0.1)).token_id == 9


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}])
def test_the_smallest_truncation_is_greedy_ties_included(params: dict) -> None:
    logits = torch.zeros(V)
    logits[[9, 40, 41]] = 1.0
    assert {one(logits, request(seed=s, **params)).token_id for s in range(20)} == {9}


def reference_keep(scores: list[float], top_k: int, top_p: float) -> set[int]:
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:top_k]
    masses = [math.exp(scores[i]) for i in order]
    if top_p >= 1:
        return set(order)
    total, kept = 0.0, set()
    for i, mass in zip(order, masses, strict=True):
        if total >= top_p * sum(masses):
            break
        total += mass
        kept.add(i)
    return kept


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(-4, 4), min_size=1, max_size=30),
    st.integers(1, 30),
    st.sampled_from([0.001, 0.31, 0.5, 0.77, 0.9, 0.999, 1.0]),
)
def test_truncation_keeps_the_tokens_of_its_definition(values: list[int], top_k: int, top_p: float) -> None:
    top_k = min(top_k, len(values))
    scores = [value * 0.637 for value in values]
    kept = keep_most_likely(
        torch.tensor([scores], dtype=torch.float64), torch.tensor([top_k]), torch.tensor([top_p]).double()
    )
    assert set(kept[0].isfinite().nonzero()[:, 0].tolist()) == reference_keep(scores, top_k, top_p)


def test_a_nucleus_larger_than_the_first_guess_is_found_whole() -> None:
    scores = torch.zeros(2, 5000, dtype=torch.float64)
    scores[1, 17] = 10.0
    kept = keep_most_likely(scores, torch.tensor([5000, 5000]), torch.tensor([0.5, 0.5]).double())
    assert kept.isfinite().sum(dim=-1).tolist() == [2500, 1]


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 300.0])
def test_the_short_race_draws_what_the_whole_race_draws(scale: float) -> None:
    """Flat and peaked rows, ties among them, hot and cold, and rows with tokens that cannot be drawn."""
    rows = 60
    logits = (torch.randn(rows, 700, generator=torch.Generator().manual_seed(1)) * 4).round() / 4 * scale
    logits[::7, 3:] = -math.inf
    temperature = torch.tensor([0.01, 0.5, 1.0, 7.0, 100.0, 1e-4]).double().repeat(10)
    keys = draw_keys(*torch.tensor([[i, i % 3, i % 5] for i in range(rows)]).T)
    drawn = race(logits, temperature, keys, logits.argmax(dim=-1))
    assert torch.equal(drawn, draw(logits.double() / temperature[:, None], keys))


TRUNCATIONS = [(0, 0.9, 0.0), (5, 1.0, 0.0), (64, 0.7, 0.0), (90, 0.95, 0.0), (0, 0.5, 0.3), (0, 1.0, 0.05)]
TRUNCATIONS += [(1500, 0.999, 0.0), (3000, 1.0, 0.0), (1, 0.1, 1.0), (0, 1e-9, 0.0), (700, 0.99, 0.2), (64, 1.0, 0.0)]


@pytest.mark.parametrize("levels", [2, 30, 10**6])
@pytest.mark.parametrize("scale", [0.05, 1.5, 6.0])
def test_a_draw_from_the_most_likely_is_a_draw_from_the_whole_row(levels: int, scale: float) -> None:
    """Of all truncations, on rows flat and peaked, with many ties or none; and in any company."""
    logits = torch.randn(len(TRUNCATIONS), 4000, generator=torch.Generator().manual_seed(levels))
    logits = (logits * levels).round() / levels * scale
    sampler = Sampler(4000, ())
    for seed in range(4):
        states = [request([1] * seed, seed=seed, top_k=k, top_p=p, min_p=m, temperature=0.8) for k, p, m in TRUNCATIONS]
        draws = [(state, 0) for state in states]
        tokens = sampler._drawn(logits, draws, logits.argmax(dim=-1)).tolist()
        for i, (k, p, m) in enumerate(TRUNCATIONS):
            scores = logits[i : i + 1].double() / 0.8
            kept = keep_most_likely(scores, torch.tensor([k or 4000]), torch.tensor([p]).double())
            if m > 0:
                kept.masked_fill_(scores < scores.max() + math.log(m), -math.inf)
            assert tokens[i] == int(draw(kept, draw_keys(*torch.tensor([[seed], [0], [seed]]))))
            assert tokens[i] == int(sampler._drawn(logits[i : i + 1], draws[i : i + 1], logits[i : i + 1].argmax(-1)))


def test_min_p_keeps_what_has_a_fraction_of_the_best() -> None:
    logits = torch.full((V,), -50.0)
    logits[:3] = torch.tensor([0.0, math.log(0.21), math.log(0.19)])
    seen = {one(logits, request(seed=s, min_p=0.2)).token_id for s in range(300)}
    assert seen == {0, 1}


def edited(logits: Tensor, state: RequestState) -> Tensor:
    work, errors = SAMPLER._edited(logits[None], [(state, 0)])
    assert not errors
    return work[0]


def test_penalties_follow_their_formulas() -> None:
    logits = torch.zeros(V)
    logits[[1, 5, 6]] = torch.tensor([2.0, -2.0, 3.0])
    state = request([5, 5, 6], prompt=[1, 1, 5], repetition_penalty=1.25)
    row = edited(logits, state)
    assert row[[1, 5, 6]].tolist() == pytest.approx([1.6, -2.5, 2.4])
    state = request([5, 5, 6], prompt=[1, 1, 5], presence_penalty=0.5, frequency_penalty=0.25)
    row = edited(logits, state)
    assert row[[1, 5, 6]].tolist() == pytest.approx([2.0, -3.0, 2.25])  # the prompt does not count here


def test_penalties_see_the_same_split_after_a_recompute() -> None:
    """What is prompt and what is output is one cut, what is computed another."""
    logits = logits_of(6, 1)[0]
    given: dict = {"presence_penalty": 1.5, "repetition_penalty": 1.5, "min_tokens": 6}
    state = request([9, 9, 8, 3], prompt=[3, 4, 5, 6, 9, 1], **given)
    rebuilt = RequestState("r", list(state.prompt_token_ids), state.params.clone(), 0, [list(state.outputs[0])])
    assert torch.equal(edited(logits, state), edited(logits, rebuilt))
    folded = request([], prompt=[3, 4, 5, 6, 9, 1, 9, 9, 8, 3], **given)
    assert not torch.equal(edited(logits, state), edited(logits, folded))


def test_processors_come_first_then_allowed_ids_then_bias_then_the_mask() -> None:
    state = request(
        [50],
        logits_processors=[lambda ids, row: row + len(ids), lambda _, row: row * 2],
        allowed_token_ids=[2, 4, 5],
        logit_bias={4: 1.0, 9: 100.0},
        min_tokens=2,
        stop_token_ids=[5],
    )
    row = edited(torch.ones(V), state)
    assert row[4] == 5.0
    assert row.isfinite().sum() == 1


def test_logprobs_are_those_of_the_model_before_any_change() -> None:
    logits = logits_of(7, 1)[0]
    expected = torch.log_softmax(logits, dim=-1)
    state = request(logit_bias={33: 100.0}, temperature=0.3, top_k=2, logprobs=3)
    answer = one(logits, state)
    assert answer.token_id == 33
    assert answer.logprob == pytest.approx(float(expected[33]))
    assert answer.rank == int((expected > expected[33]).sum()) + 1
    best = expected.topk(3)
    assert [i for i, _ in answer.top or []] == best.indices.tolist()
    assert [p for _, p in answer.top or []] == pytest.approx(best.values.tolist())


def test_top_logprobs_list_the_lower_id_first_among_equals_and_may_be_none_at_all() -> None:
    logits = torch.zeros(V)
    logits[40] = 1.0
    assert [i for i, _ in one(logits, request(logprobs=4)).top or []] == [40, 0, 1, 2]
    assert one(logits, request(logprobs=0)).top == []
    assert one(logits, request()).top is None


# min_tokens (forced favourites: end tokens would win at once).


@pytest.mark.parametrize("params", [{}, {"ignore_eos": True}, {"temperature": 0.0}, {"stop_token_ids": [7, 9]}])
def test_no_end_or_stop_token_is_drawn_below_min_tokens(params: dict) -> None:
    logits = torch.zeros(V)
    logits[[2, 7, 9]] = 50.0
    state = request(min_tokens=5, **params)
    for _ in range(8):
        state.outputs[0].append(one(logits, state).token_id)
    forbidden = {2, 7, *params.get("stop_token_ids", ())}
    assert not forbidden & set(state.outputs[0][:5])
    assert state.outputs[0][5] in {2, 7, 9}


def test_a_recompute_does_not_restart_the_count_of_min_tokens() -> None:
    logits = torch.zeros(V)
    logits[7] = 50.0
    assert one(logits, request([1, 1, 1, 1], min_tokens=5, temperature=0)).token_id != 7
    assert one(logits, request([1, 1, 1, 1, 1], min_tokens=5, temperature=0)).token_id == 7


# Errors stay in their row.


def raises(_: list[int], __: Tensor) -> Tensor:
    raise ZeroDivisionError("no")


@pytest.mark.parametrize(
    ("params", "spoil", "message"),
    [
        ({"logits_processors": [raises]}, None, "logits processor 0 raised ZeroDivisionError: no"),
        ({"logits_processors": [lambda _, row: row[:5]]}, None, "shape"),
        ({"logits_processors": [lambda _, row: None]}, None, "NoneType"),
        ({"logits_processors": [lambda _, row: row * math.nan]}, None, "NaN"),
        ({"logits_processors": [lambda _, row: row - math.inf], "top_p": 0.5}, None, "-inf"),
        ({"allowed_token_ids": [2, 7], "min_tokens": 1}, None, "every logit is -inf"),
        ({"stop_token_ids": [V], "min_tokens": 1}, None, "sampling failed: IndexError"),
        ({"temperature": 0.0}, math.nan, "not finite"),
        ({"top_p": 0.5, "min_p": 0.1}, math.nan, "not finite"),
        ({"allowed_token_ids": [50]}, math.nan, "not finite"),
        ({}, math.inf, "not finite"),
        ({}, -math.inf, "not finite"),
    ],
)
def test_a_row_that_cannot_be_drawn_errs_alone(params: dict, spoil: float | None, message: str) -> None:
    logits = logits_of(8, 3)
    if spoil is not None:
        logits[1, 10 if spoil != -math.inf else slice(None)] = spoil
    neighbour = request(seed=5, top_p=0.9)
    draws = [(neighbour, 0), (request(**params), 0), (neighbour, 0)]
    first, middle, last = SAMPLER.sample(logits, draws)
    assert isinstance(middle, SamplingError)
    assert message in str(middle)
    assert first == one(logits[0], neighbour)
    assert last == one(logits[2], neighbour)


@pytest.mark.parametrize("params", [{"top_k": 2**63, "top_p": 0.9}, {"top_k": 10**400}, {"top_k": V + 1, "min_p": 0.1}])
def test_a_top_k_beyond_the_vocabulary_is_the_whole_vocabulary(params: dict) -> None:
    logits = logits_of(3, 1)[0]
    assert one(logits, request(**params)) == one(logits, request(**{**params, "top_k": -1}))


def test_an_error_of_the_whole_batch_stays_with_the_row_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, neighbour, drawn = logits_of(8, 4), request(seed=5, top_p=0.9), Sampler._drawn

    def fails(self: Sampler, logits: Tensor, draws: list, best: Tensor) -> Tensor:
        if any(state.seed == 13 for state, _ in draws):
            raise OverflowError("unlucky")
        return drawn(self, logits, draws, best)

    expected = [one(row, neighbour) for row in logits]
    monkeypatch.setattr(Sampler, "_drawn", fails)
    answers = SAMPLER.sample(logits, [(neighbour, 0), (neighbour, 0), (request(seed=13), 0), (neighbour, 0)])
    assert isinstance(answers[2], SamplingError)
    assert "sampling failed: OverflowError('unlucky')" in str(answers[2])
    assert [a for i, a in enumerate(answers) if i != 2] == [a for i, a in enumerate(expected) if i != 2]


def test_a_processor_cannot_reach_the_tokens_of_its_request() -> None:
    def meddle(ids: list[int], row: Tensor) -> Tensor:
        ids.clear()
        return row

    state = request([4, 5], logits_processors=[meddle])
    one(logits_of(1, 1)[0], state)
    assert state.outputs == [[4, 5]]


def test_no_draws_give_no_answers_and_a_wrong_shape_is_refused() -> None:
    assert SAMPLER.sample(torch.zeros(0, V), []) == []
    with pytest.raises(ValueError, match="expected"):
        SAMPLER.sample(torch.zeros(1, V + 1), [(request(), 0)])
    with pytest.raises(ValueError, match="eos_token_ids"):
        Sampler(10, [10])
