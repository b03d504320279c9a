"""`make bench` reports: a benchmark that fails is a row of its own and stops no other."""

from __future__ import annotations

import pytest

from bench import __main__ as page
from bench import start
from bench.rows import Row


def test_a_benchmark_that_fails_is_a_row(monkeypatch, capsys):
    def broken() -> list[Row]:
        raise RuntimeError("no port was free")

    monkeypatch.setattr(start, "measure", broken)
    assert page.main(["start"]) == 0
    assert "RuntimeError: no port was free" in capsys.readouterr().out


def test_an_unknown_name_is_told(capsys):
    assert page.main(["nothing"]) == 2 and "fairfal" in capsys.readouterr().out


@pytest.mark.parametrize("row", [Row("a", "s", (2.0, 4.0), "b", (1.0, 1.0)), Row("a", "s", ())])
def test_the_ratio_is_that_of_pairs_and_empty_without_a_peer(row):
    assert row.ratio == ("3.00" if row.peer else "")
