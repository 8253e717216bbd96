"""The knobs as a chat changes them."""

from __future__ import annotations

import pytest

from caldrix_client.parse import Run, is_bounded, parse
from caldrix_client.sampling import Sampling
from caldrix_protocol.messages import Generate
from caldrix_protocol.refusals import USAGE, Refused


def test_the_knobs_are_fields_of_generate_with_its_defaults() -> None:
    for name, value in Sampling()._asdict().items():
        assert Generate._field_defaults[name] == value


def test_flags_are_where_a_run_begins() -> None:
    flags = "--temperature=.7 --top-k 40 --top-p .9 --min-p .05 --repetition-penalty 1.1 --seed 9"
    command = parse(["run", "m", *flags.split(), "--stop", "a", "--stop=b"])
    assert type(command) is Run
    assert command.sampling == Sampling(0.7, 40, 0.9, 0.05, 1.1, 9)
    assert command.stop == ("a", "b")
    plain = parse(["run", "m"])
    assert type(plain) is Run
    assert plain.sampling == Sampling()


@pytest.mark.parametrize(
    ("flags", "bounded"),
    [
        ("", False),
        ("--ctx 64", False),
        ("--max-context 64", True),
        ("--max-context 2048", False),
        ("--max-context 64 --ctx 128", True),
        ("--max-context 64 --ctx 32", False),
        ("--max-context 4096 --ctx 8192", True),
    ],
)
def test_a_context_may_be_bounded(flags: str, bounded: bool) -> None:
    command = parse(["run", "m", *flags.split()])
    assert type(command) is Run
    assert is_bounded(command) is bounded


def test_a_knob_is_set_shown_and_set_back() -> None:
    sampling = Sampling().set("temperature", "0.50").set("top-k", "40").set("seed", "0")
    assert sampling == Sampling(temperature=0.5, top_k=40, seed=0)
    assert sampling.line() == ("temperature 0.5, top-k 40, top-p 1, min-p 0, repetition-penalty 1, seed 0")
    assert sampling.set("seed", "off").shown("seed") == "off"
    assert sampling.set("seed", "off").set("top-k", "off").set("temperature", "off") == Sampling()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("temperature", "hot", "/temperature must be a finite number of at least 0, got hot"),
        ("top-k", "-1", "/top-k must be an integer from 0 to 2147483647, got -1"),
        ("top-p", "0", "/top-p must be a number over 0 and at most 1, got 0"),
        ("min-p", "2", "/min-p must be a number from 0 to 1, got 2"),
        ("repetition-penalty", "", '/repetition-penalty must be a finite number over 0, got ""'),
        ("seed", "OFF", "/seed must be an integer from 0 to 18446744073709551615, got OFF"),
    ],
)
def test_nonsense_is_refused_in_the_name_of_the_command(name: str, text: str, words: str) -> None:
    with pytest.raises(Refused) as caught:
        Sampling().set(name, text)
    assert caught.value.text == words
    assert caught.value.kind == USAGE
