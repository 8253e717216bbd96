from __future__ import annotations

import pytest

from caldrix_client.terminal import safe


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("\x1b]52;c;QQ==\x07", "\\x1b]52;c;QQ==\\x07"),
        ("\x1b]8;;http://a\x1b\\link", "\\x1b]8;;http://a\\x1b\\link"),
        ("\x9b31mred", "\\x9b31mred"),
        ("over\rwritten\x08\x7f", "over\\x0dwritten\\x08\\x7f"),
        ("a\u202eb\u2066c\u2069", "a\\u202eb\\u2066c\\u2069"),
        ("tab\tand\nnewline", "tab\tand\nnewline"),
        ("é 漢 👩\u200d👩\u200d👧", "é 漢 👩\u200d👩\u200d👧"),
    ],
)
def test_what_could_steer_a_terminal_becomes_visible(said: str, shown: str) -> None:
    assert safe(said) == shown
