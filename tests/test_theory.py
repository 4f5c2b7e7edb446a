"""Leviathan, Kalman, Matias (ICML 2023, arXiv 2211.17192): their tables, and what the formulas must fulfil."""

import math
import subprocess
import sys
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from bozza import ConfigError
from bozza.theory import best_gamma, expected_tokens, operations_factor, walltime_factor

TABLE_1 = [  # alpha, gamma, operations, speed; c and c-hat are 0
    (0.6, 2, "1.53", "1.96"),
    (0.7, 3, "1.58", "2.53"),
    (0.8, 2, "1.23", "2.44"),
    (0.8, 5, "1.63", "3.69"),
    (0.9, 2, "1.11", "2.71"),
    (0.9, 10, "1.60", "6.86"),
]
TABLES_2_AND_4 = [  # T5-XXL with small, base and large T5 as drafters: gamma, alpha, c, "Exp"
    ("EnDe small T=0", 7, 0.75, 0.02, 3.2),
    ("EnDe base T=0", 7, 0.80, 0.04, 3.3),
    ("EnDe large T=0", 7, 0.82, 0.11, 2.5),
    ("EnDe small T=1", 7, 0.62, 0.02, 2.3),
    ("EnDe base T=1", 5, 0.68, 0.04, 2.4),
    ("EnDe large T=1", 3, 0.71, 0.11, 2.0),
    ("CNNDM small T=0", 5, 0.65, 0.02, 2.4),
    ("CNNDM base T=0", 5, 0.73, 0.04, 2.6),
    ("CNNDM large T=0", 3, 0.74, 0.11, 2.0),
    ("CNNDM small T=1", 5, 0.53, 0.02, 1.9),
    ("CNNDM base T=1", 3, 0.55, 0.04, 1.8),
    ("CNNDM large T=1", 3, 0.56, 0.11, 1.6),
]
# What the printed alpha and c give where that does not round to the printed "Exp".
OFF_BY_A_DIGIT = {"EnDe base T=1": 2.35, "EnDe large T=1": 1.93, "CNNDM large T=1": 1.54}

alphas = st.floats(0.0, 1.0)
gammas = st.integers(0, 64)
costs = st.floats(0.0, 10.0)


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), TABLE_1)
def test_table_1_to_the_printed_digits(alpha, gamma, operations, speed):
    assert f"{operations_factor(alpha, gamma, 0.0):.2f}" == operations
    assert f"{walltime_factor(alpha, gamma, 0.0):.2f}" == speed


@pytest.mark.parametrize(("row", "gamma", "alpha", "cost", "printed"), TABLES_2_AND_4)
def test_tables_2_and_4_within_the_rounding_of_what_is_printed(row, gamma, alpha, cost, printed):
    factor = walltime_factor(alpha, gamma, cost)
    if row in OFF_BY_A_DIGIT:
        assert f"{factor:.2f}" == f"{OFF_BY_A_DIGIT[row]:.2f}"
    else:
        assert f"{factor:.1f}" == f"{printed:.1f}"
    # All twelve are some alpha and c that print as those two numbers do.
    low, high = (walltime_factor(alpha + d, gamma, cost - d) for d in (-0.005, 0.005))
    assert low <= printed + 0.05
    assert printed - 0.05 <= high


@pytest.mark.parametrize("alpha", [Fraction(0), Fraction(1, 7), Fraction(1, 2), Fraction(9, 10), Fraction(1)])
@pytest.mark.parametrize("gamma", [0, 1, 2, 5, 8])
def test_expected_tokens_is_the_mean_over_every_outcome(alpha, gamma):
    """Each of gamma tokens is accepted or not; a pass commits those before the first miss, and one more."""
    mass, mean = Fraction(0), Fraction(0)
    for accepted in product((True, False), repeat=gamma):
        chance = math.prod((alpha if hit else 1 - alpha for hit in accepted), start=Fraction(1))
        mass += chance
        mean += chance * ([*accepted, False].index(False) + 1)
    assert mass == 1
    assert expected_tokens(float(alpha), gamma) == pytest.approx(float(mean), rel=1e-14)


@given(alphas, gammas)
@example(1.0, 64)
@example(1.0 - 2**-53, 64)  # the quotient loses most of its digits here
@example(5e-324, 3)
@settings(deadline=None)  # exact fractions of a tiny number are long
def test_expected_tokens_is_a_sum_of_powers_and_the_quotient(alpha, gamma):
    a = Fraction(alpha)
    total = sum(a**i for i in range(gamma + 1))
    if a < 1:
        assert total == (1 - a ** (gamma + 1)) / (1 - a)
    assert expected_tokens(alpha, gamma) == pytest.approx(float(total), rel=1e-14)


@given(alphas, alphas, gammas, costs, costs)
def test_factors_move_the_right_way(alpha, other, gamma, cost, dearer):
    low, high = sorted((alpha, other))
    cheap, dear = sorted((cost, dearer))
    assert 1.0 <= expected_tokens(low, gamma) <= expected_tokens(high, gamma) <= gamma + 1
    assert expected_tokens(low, gamma) <= expected_tokens(low, gamma + 1)
    assert walltime_factor(low, gamma, dear) <= walltime_factor(low, gamma, cheap)
    assert walltime_factor(low, gamma, cheap) <= walltime_factor(high, gamma, cheap)
    assert operations_factor(low, gamma, cheap) <= operations_factor(low, gamma, dear)
    assert operations_factor(high, gamma, cheap) <= operations_factor(low, gamma, cheap)
    assert operations_factor(low, gamma, cheap) >= 1.0, "speculation never saves operations"
    assert walltime_factor(alpha, 0, cost) == operations_factor(alpha, 0, cost) == 1.0


@given(alphas, costs, st.integers(0, 64))
def test_best_gamma_is_the_argmax(alpha, cost, most):
    factors = [walltime_factor(alpha, gamma, cost) for gamma in range(most + 1)]
    best = best_gamma(alpha, cost, most)
    assert factors[best] == max(factors)
    assert all(factor < factors[best] for factor in factors[:best])


@given(alphas, st.floats(0.0, 1.0))
def test_corollary_3_9(alpha, cost):
    assume(abs(alpha - cost) > 1e-9)
    best = best_gamma(alpha, cost)
    if alpha > cost:
        assert best >= 1
        assert walltime_factor(alpha, best, cost) >= (1 + alpha) / (1 + cost) * (1 - 1e-14)
    else:
        assert best == 0


@pytest.mark.parametrize(
    ("alpha", "cost", "most", "best"),
    [(0.8, 0.05, 64, 8), (1.0, 0.5, 64, 64), (1.0, 0.0, 7, 7), (0.0, 0.0, 64, 0), (0.5, 0.5, 64, 0), (0.9, 0.1, 0, 0)],
)
def test_best_gamma_at_known_places(alpha, cost, most, best):
    """The first is the notes' own: 3.09 at gamma 8."""
    assert best_gamma(alpha, cost, most) == best


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: expected_tokens(1.01, 3), "alpha is 1.01: use a probability"),
        (lambda: expected_tokens(-0.1, 3), "alpha is -0.1"),
        (lambda: expected_tokens(math.nan, 3), "alpha is nan"),
        (lambda: expected_tokens(0.5, -1), "gamma is -1: use a whole number"),
        (lambda: expected_tokens(0.5, 2.0), "gamma is 2.0"),
        (lambda: walltime_factor(0.5, 2, -0.1), "cost is -0.1: use a finite number"),
        (lambda: walltime_factor(0.5, 2, math.inf), "cost is inf"),
        (lambda: operations_factor(0.5, 2, math.nan), "cost is nan"),
        (lambda: best_gamma(0.5, 0.1, -1), "gamma is -1"),
        (lambda: best_gamma(2.0, 0.1), "alpha is 2.0"),
    ],
)
def test_numbers_out_of_range_are_refused_in_a_line(call, says):
    with pytest.raises(ConfigError, match=says) as caught:
        call()
    assert len(str(caught.value).splitlines()) == 1


def test_the_formulas_need_no_torch():
    code = "import sys, bozza.theory; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
