"""The symbolic executor: it finds every path, decides nothing wrongly, and says when it cannot go on."""

from __future__ import annotations

import pytest
import z3

import spec.check.patience
from spec.check.ghost import GhostQueue, Row, in_place, order
from spec.check.symbolic import (
    Blocked,
    Cut,
    DisagreementError,
    Executor,
    Infeasible,
    Lengthy,
    Symbols,
    SymBool,
    SymInt,
    Valuation,
    assume,
    prove,
    value_of,
)
from spec.logic import cdiv, conj, disj, implies, least, most, neg, pick, total

S = Symbols()
a, b, c = S.integer("a"), S.integer("b"), S.integer("c")
p, q = S.boolean("p"), S.boolean("q")


def paths(function, *hypothesis):
    return list(Executor(hypothesis).paths(function))


def sign(x):
    if x > 0:
        return "positive"
    return "zero" if x == 0 else "negative"


def test_every_path_is_found_once_with_values_that_lead_down_it():
    found = paths(lambda: sign(a))
    assert sorted(path.result for path in found) == ["negative", "positive", "zero"]
    for path in found:
        assert sign(path.values.integer("a")) == path.result


def test_what_the_hypothesis_excludes_is_no_path():
    assert [path.result for path in paths(lambda: sign(a), a >= 1)] == ["positive"]


def test_a_repeated_question_does_not_fork_again():
    found = paths(lambda: (bool(a < b), bool(a < b), bool(b > a), bool(a >= b)))
    assert sorted(path.result for path in found) == [(False, False, False, True), (True, True, True, False)]


def test_every_branch_is_logged_and_marked_free_or_forced():
    (path,) = paths(lambda: bool(a > 0), a > 5)
    assert [(branch.taken, branch.free) for branch in path.branches] == [(True, False)]


def test_no_path_under_a_contradiction():
    executor = Executor([a > 0, a < 0])
    assert not executor.satisfiable
    assert list(executor.paths(lambda: sign(a))) == []


def test_connectives_and_choices_do_not_fork():
    def body():
        return pick(a > b, a, b), least(a, b), most(a, b), conj(p, a > 0), disj(p, q), implies(p, neg(q)), total([a, b])

    assert len(paths(body)) == 1


def test_python_on_symbols_agrees_with_python_on_ints():
    def arithmetic(x, y, z):
        return [
            x + y - z,
            3 * x - 2 * (y - 4),
            -x,
            5 - x,
            x // 3,
            (2 * x + 7) // 4,
            (4 * x + y) // 4,
            x % 5,
            cdiv(x, 16),
            cdiv(pick(x > y, x, y) + z, 4),
            pick(conj(x > y, neg(y == z)), x, least(y, z)),
            most(x, y) - least(x, y),
            x != y,
            disj(x == y, y == z, x == z),
        ]

    symbolic = arithmetic(a, b, c)
    for x in range(-9, 10, 3):
        for y in range(-7, 9, 4):
            for z in (-5, 0, 1, 8):
                values = Valuation(a=x, b=y, c=z)
                plain = arithmetic(x, y, z)
                assert value_of(symbolic, values) == plain
    solver = z3.Solver()
    for one, plain in zip(symbolic, arithmetic(-9, 13, 5), strict=True):
        solver.push()
        solver.add(z3.Int("a") == -9, z3.Int("b") == 13, z3.Int("c") == 5, one.term != plain)
        assert solver.check() == z3.unsat, one
        solver.pop()


def test_what_follows_by_arithmetic_alone_is_a_plain_value():
    assert a - a == 0
    assert (a + b - b - a) == 0
    assert (a + 1 > a) is True
    assert (a < a) is False
    assert (4 * a + 3) // 4 - a == 0
    assert pick(p, a, a) is a
    assert 0 * a == 0


def test_equal_bools_are_one_object():
    assert (a < b) is (b > a)
    assert (a < b) is neg(a >= b)
    assert neg(neg(p)) is p


def test_a_counterexample_prints_as_a_person_writes_it():
    assert str(a - b <= 0) == "a <= b"
    assert str(a < b + c) == "a < b + c"
    assert str(neg(p)) == "not (p)"


@pytest.mark.parametrize(
    "what",
    [
        lambda: range(a),
        lambda: [1, 2][a],
        lambda: {a: 1},
        lambda: int(a),
        lambda: float(a),
        lambda: a / 2,
        lambda: a * b,
        lambda: a // b,
        lambda: a % 0,
        lambda: f"{a:>5}",
        lambda: {p},
        lambda: bool(p),
        lambda: bool(a > 0),
    ],
)
def test_what_only_an_int_has_is_blocked(what):
    with pytest.raises(Blocked):
        what()


def test_signals_pass_through_code_that_catches_everything():
    def careless():
        try:
            return range(a)
        except Exception:
            return "eaten"

    with pytest.raises(Blocked):
        paths(careless)


def test_an_error_of_the_code_is_an_outcome():
    def divides(x):
        if x == 7:
            raise ZeroDivisionError
        return x

    raised = [path.raised for path in paths(lambda: divides(a))]
    assert [type(error) for error in raised if error] == [ZeroDivisionError]
    assert len(raised) == 2


def test_a_cut_ends_a_run_where_an_invariant_takes_over():
    def loop():
        if a > 0:
            raise Cut("head")
        return "out"

    results = [path.result for path in paths(loop)]
    assert {r.at if isinstance(r, Cut) else r for r in results} == {"head", "out"}


def test_an_assumption_restricts_the_path_and_an_impossible_one_ends_it():
    def body():
        if a > 0:
            assume(a > 10)
            return bool(a > 5)
        assume(a > 0)
        return None

    assert [path.result for path in paths(body)] == [True]
    with pytest.raises(Infeasible):
        assume(False)


def test_a_function_that_is_not_deterministic_is_found_out():
    calls = iter(range(100))

    def fickle():
        return bool(a > next(calls))

    with pytest.raises(DisagreementError):
        paths(fickle)


def proof(body, claim, hypothesis=lambda state: [state >= 0]):
    return prove(
        lambda source: source.integer("a"), hypothesis, body, lambda out: {"claim": claim(out)}, lambda out: [out]
    )


def test_a_proof_holds_for_every_int():
    report = proof(lambda x: x + 1 if x > 3 else 5, lambda out: out >= 5)
    assert report.proved
    assert report.paths == 2


def test_a_refutation_names_values_that_break_the_claim_on_plain_ints():
    report = proof(lambda x: x + 1 if x > 3 else 4, lambda out: out != 9)
    (failure,) = report.failures
    assert failure.values == {"a": 8}
    assert "claim is broken" in str(failure)
    assert "a = 8" in str(failure)


def test_an_empty_hypothesis_proves_nothing():
    report = proof(lambda x: x, lambda out: True, lambda x: [x > 0, x < 0])
    assert not report.satisfiable
    assert not report.proved


def test_an_error_breaks_the_claim_that_it_returns():
    report = proof(lambda x: [][0] if x == 4 else x, lambda out: True)
    assert report.broken() == {"returns"}


def test_code_that_treats_symbols_and_ints_differently_is_found_out():
    with pytest.raises(DisagreementError):
        proof(lambda x: x + 1 if isinstance(x, int) else x, lambda out: True)


def test_a_refutation_is_told_in_words_where_somebody_can():
    report = prove(
        lambda source: source.integer("a"),
        lambda x: [x >= 0],
        lambda x: x + 1,
        lambda out: {"claim": out != 9},
        lambda out: [out],
        explain=lambda claim, values: [f"{claim}: from {values['a']} to {values['a'] + 1}"],
    )
    (failure,) = report.failures
    assert failure.story == ("claim: from 8 to 9",)
    assert str(failure).splitlines() == ["claim is broken", "    claim: from 8 to 9", "    all numbers: a = 8"]


def test_a_story_that_cannot_be_told_hides_no_failure():
    def explain(claim, values):
        raise KeyError("b")

    report = prove(
        lambda source: source.integer("a"),
        lambda x: [],
        lambda x: x,
        lambda out: {"claim": out != 9},
        lambda out: [out],
        explain=explain,
    )
    assert report.broken() == {"claim"}
    assert "it cannot be told: KeyError('b')" in str(report.failures[0])


def counted(x):
    count = 0
    while x > 0:
        x -= 1
        count += 1
    return count


@pytest.mark.parametrize(("granted", "message"), [((5, 100), "more than 5 paths"), ((100, 5), "more than 5 decisions")])
def test_a_loop_over_a_number_is_given_up_at_what_is_granted(granted, message):
    with pytest.raises(Lengthy, match=message):
        prove(
            lambda source: source.integer("a"),
            lambda x: [x >= 0],
            counted,
            lambda out: {},
            lambda out: [out],
            granted=granted,
        )


def test_a_run_that_does_not_return_on_ints_either_breaks_the_claim_that_it_returns(monkeypatch):
    monkeypatch.setattr(spec.check.patience, "GRANTED", 0.2)

    def stuck(x):
        while x > 7:
            pass
        return x

    report = prove(
        lambda source: source.integer("a"),
        lambda x: [x >= 0],
        stuck,
        lambda out: {},
        lambda out: [out],
        granted=(50, 50),
    )
    assert report.broken() == {"returns"}
    assert report.failures[0].values["a"] > 7
    assert "has not returned after 0.2 s of work" in str(report.failures[0])


# rows


def row(name: str) -> Row:
    class Group:
        def __init__(self, name: str) -> None:
            self.request_id = name
            self.held = S.integer(f"{name}.held")
            self.live = S.integer(f"{name}.live")

    def make(name: str):
        group = Group(name)
        return group, conj(group.held >= 1, group.live >= 1)

    return Row(S, name, make)


def test_a_row_gives_groups_until_it_is_empty_and_keeps_its_sums():
    def drain():
        one = row("row")
        queue = GhostQueue((), one)
        taken = []
        while queue and len(taken) < 5:
            taken.append(queue.pop() if len(taken) % 2 else queue.popleft())
        left = one.held + total(g.held for g in taken) == S.integer("row.held")
        return len(taken), left, [one.count]

    one = row("row")
    results = [path.result for path in paths(drain, one.facts(), one.count <= 3)]
    assert sorted(count for count, _, _ in results) == [0, 1, 2, 3]
    assert all(left is True for _, left, _ in results)


def test_taking_from_the_ends_keeps_everybody_in_place_and_from_the_wrong_end_does_not():
    def move(right: bool):
        first, second = GhostQueue((), row("first")), GhostQueue((), row("second"))
        before = order([first, second])
        group = first.pop() if right else first.popleft()
        second.appendleft(group)
        return in_place(before, order([first, second]))

    one, other = row("first"), row("second")
    some = [one.facts(), other.facts(), one.count >= 2]
    assert [path.result for path in paths(lambda: move(True), *some)] == [True]
    assert False in [path.result for path in paths(lambda: move(False), *some)]


def test_symbols_are_what_they_say():
    assert isinstance(a, SymInt)
    assert isinstance(p, SymBool)
