"""The tables of the documentation that are made from the records of flags."""

from __future__ import annotations

from caldrix_protocol.flag_tables import documentation, refused_documentation
from caldrix_protocol.options import is_accepted, options_of


def test_documentation_has_a_row_for_every_flag_but_the_refused() -> None:
    rows = documentation("run").split("\n")
    answered = "answer this prompt and exit; - reads it from standard input"
    assert rows[0] == f"| `-p PROMPT`, `--prompt PROMPT` | {answered} | chat |"
    assert "| `--threads N` | threads of the CPU lane | one for each core |" in rows
    assert any(row.startswith("| `--backend auto\\|hip\\|metal\\|cpu` |") for row in rows)
    assert "| `--top-k N` | keep only the N most likely tokens (0 keeps all) | 0 |" in rows
    later = "the most requests that wait for one model (not available yet)"
    assert f"| `--queue-depth N` | {later} | no bound |" in rows
    refused = [option for option in options_of("run") if option.refused not in (None, "usage/not-available")]
    assert len(rows) == len(options_of("run")) - len(refused) > 30
    assert sum("not available yet" in row for row in rows) == 1 + sum(
        not is_accepted(option) for option in options_of("run") if option not in refused
    )
    assert documentation("ps") == ""
    assert documentation("caldrixd").startswith("| `--idle-unload SECONDS` |")


def test_refused_flags_are_documented_with_their_words() -> None:
    assert refused_documentation("run").split("\n") == [
        "| `--backend host` | --backend host is inferno-serve's off-hardware stand-in for its tests; "
        "caldrix does not expose it |",
        *(
            f"| `{flag}` | {flag}: caldrix run serves no HTTP; use caldrix serve |"
            for flag in ("--port", "--host", "--admin", "--admin-port")
        ),
        "| `--model-dir` | --model-dir: give the model as the first argument |",
    ]
    assert refused_documentation("stop") == ""
