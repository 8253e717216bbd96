"""One message of every kind, each field away from its default: what the golden vectors hold."""

from __future__ import annotations

from typing import Any

from caldrix_protocol import messages as m
from caldrix_protocol.codec import encode

TABLES: dict[str, dict[str, type[Any]]] = {
    "requests": m.REQUESTS,
    "events": m.EVENTS,
    "to_worker": m.TO_WORKER,
    "from_worker": m.FROM_WORKER,
    "from_fetcher": m.FROM_FETCHER,
}

_TURNS: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": ({"type": "text", "text": "Answer in one word."},)},
    {"role": "user", "content": ({"type": "text", "text": "¿Où est Paris? 🗼"}, {"type": "text", "blob": 3})},
    {"role": "assistant", "content": ()},
)

SAMPLES: tuple[m.Message, ...] = (
    m.Hello((1, 1), "0.1.0", 4321, ("blobs",)),
    m.Welcome((1, 1), "0.1.0", 1234, ("blobs",)),
    m.Open(
        "/models/smollm2",
        {"HOME": "/home/ada", "HF_HUB_OFFLINE": "1"},
        "cpu",
        4096,
        "bf16",
        2,
        1,
        "x86-64-v3",
        "c",
    ),
    m.Generate(7, _TURNS, None, 2**40, 0.75, 40, 0.95, 0.05, 1.125, 2**64 - 1, ("\n\n", "é"), False),
    m.Blob(3, bytes(range(256))),
    m.Cancel(),
    m.Ps(),
    m.Stop(None, True, True),
    m.Doctor(),
    m.Pull("qwen3-0.6b", {"HF_HOME": "/data/hf"}),
    m.Plan("Qwen/Qwen3-8B@main", {"HOME": "/home/ada"}, "cpu", 4096, "bf16", 2, 1, "x86-64-v3", "c"),
    m.Models({"HOME": "/home/ada"}),
    m.Remove("smollm2", {"HOME": "/home/ada"}, True),
    m.Pin({"HF_TOKEN": "secret"}),
    m.Status("status/loading", "loading demo (270 MB)", {"model": "demo", "size": 270}),
    m.Notice("notice/dropped-turns", "the conversation outgrew the context", {"count": 2}),
    m.Progress("demo.gguf", 1 << 33, 1 << 34, "bytes"),
    m.Opened(7, "demo", "cpu", "2 threads, avx2", 2048, True, 0.75),
    m.Delta("é🗼\n", (0, 127, 49151, 2**31 - 1)),
    m.Loaded("/models/smollm2", "cpu", "busy", 5678, 269_000_000, 2, 0.0, "x86-64-v3"),
    m.Lane("cpu", True, ("a reason",), ("x86-64-v3",), True, True),
    m.Verdict(
        "demo",
        "cpu",
        2048,
        8192,
        1 << 29,
        8,
        1 << 30,
        1 << 34,
        1 << 28,
        14_745_600,
        269_060_552,
        56_623_104,
        94_371_840,
        5_242_880,
        1 << 20,
        1 << 35,
    ),
    m.Known("smollm2", "HuggingFaceTB/SmolLM2-135M", "main", "Apache-2.0", 269_060_552, "whole"),
    m.Removal("/cache/models--a--b", 269_060_552),
    m.Done(
        "stop",
        (2, 50_000),
        (1, 3, 70_000),
        2,
        m.Timings(0.75, 3, 1, 0.125, 2, 0.5, 0.0625),
        2**63,
    ),
    m.Refusal(
        "message/too-long",
        "message",
        "the prompt has 9 tokens",
        {"tokens": 9, "ctx": 8, "free": 1.5, "model": "demo"},
    ),
    m.Load("demo", "/models/smollm2", "cpu", "x86-64-v3", "numba"),
    m.Attach(9, 3, b"\x00\xff"),
    m.Begin(9, encode(m.Generate(7, None, ({"type": "text", "text": "Once"},), 8)), 2048, "f32", 2, 1),
    m.Abort(9),
    m.Ready("2 threads, avx2", 8192, True, 269_000_000),
    m.Planned("/cache/snapshots/0", 269_060_552, 1 << 20),
    m.Relay(9, encode(m.Delta("Paris", (12_095,)))),
)


def table_of(message: m.Message) -> dict[str, type[Any]]:
    """The first table that holds this kind of message."""
    return next(table for table in TABLES.values() if type(message) in table.values())
