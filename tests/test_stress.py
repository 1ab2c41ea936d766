"""``make stress`` at a hundredth of its size, and what it must notice."""

import json

import pytest
import stress

from kvprobe import theory

SMALL = ["--n", "10000", "--workers", "1"]


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_bounds_hold_and_corrections_are_undone(capsys):
    assert stress.main(SMALL) == 0
    found = last_line(capsys)
    assert found["n"] >= 10_000 and found["violations"] == found["nan"] == 0
    assert 0 < found["undone"] <= stress.UNDONE and 0 < found["used"] < 1


def shrunk(function):
    return lambda *given, **more: function(*given, **more) * (1 - 1e-3)


def overflowing(A, m, keep, sink_mass=None):
    R = theory.retained(A, keep, sink_mass)
    return theory.value_mass(A, m, keep) + theory.retained(A, ~keep) / R * theory.value_mass(A, m, ~keep)


@pytest.mark.parametrize("name", ["bound", "centred_bound", "perturbation", "layer_perturbation", "layer_bound"])
def test_a_thousandth_too_little_is_seen(name, monkeypatch, capsys):
    monkeypatch.setattr(theory, name, shrunk(getattr(theory, name)))
    assert stress.main(SMALL) == 1
    found = last_line(capsys)
    assert found["violations"] > 0 and found["nan"] == 0


def test_a_quotient_that_overflows_is_seen(monkeypatch, capsys):
    monkeypatch.setattr(theory, "bound", overflowing)
    assert stress.main(SMALL) == 1
    assert last_line(capsys)["nan"] > 0


def test_a_row_that_is_not_undone_is_seen(monkeypatch, capsys):
    monkeypatch.setattr(theory, "correct", lambda A_masked, retained: A_masked)
    assert stress.main(SMALL) == 1
    assert last_line(capsys)["undone"] > 0.1
