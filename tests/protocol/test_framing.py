"""Frames cut out of a byte stream."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caldrix_protocol.codec import BadFrame
from caldrix_protocol.framing import MAX_BULK, MAX_CONTROL, FrameReader, frame


def read_all(reader: FrameReader) -> list[bytes]:
    return list(iter(reader.next, None))


def test_a_frame_is_a_big_endian_length_and_its_payload() -> None:
    assert frame(b"abc") == b"\x00\x00\x00\x03abc"
    assert frame(b"x" * 0x01_02_03)[:4] == b"\x00\x01\x02\x03"


@pytest.mark.parametrize("size", [0, MAX_BULK + 1])
def test_a_payload_of_no_or_too_many_bytes_is_not_framed(size: int) -> None:
    with pytest.raises(BadFrame, match=f"has {size} bytes"):
        frame(bytes(size))


def test_the_largest_frame_passes() -> None:
    payload = bytes(MAX_BULK)
    reader = FrameReader()
    reader.feed(frame(payload))
    assert reader.next() == payload


@pytest.mark.parametrize("limit", [MAX_CONTROL, MAX_BULK])
@pytest.mark.parametrize("length", [0, None, 2**31, 2**32 - 1])
def test_a_length_out_of_range_is_refused_from_its_four_bytes(limit: int, length: int | None) -> None:
    reader = FrameReader(limit)
    claimed = limit + 1 if length is None else length
    reader.feed(claimed.to_bytes(4, "big"))
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame, match=f"claims {claimed} bytes"):
            reader.next()
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_a_length_at_the_limit_waits_without_allocating() -> None:
    reader = FrameReader(MAX_CONTROL)
    tracemalloc.start()
    try:
        reader.feed(MAX_CONTROL.to_bytes(4, "big") + b"x")
        assert reader.next() is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_a_reader_does_not_keep_what_it_gave_out() -> None:
    reader = FrameReader()
    tracemalloc.start()
    try:
        for _ in range(200):
            reader.feed(frame(bytes(50_000)))
            assert len(read_all(reader)) == 1
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.data())
def test_any_cut_of_the_stream_gives_the_same_payloads(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(frame, payloads))
    reader, got = FrameReader(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        reader.feed(stream[:size])
        stream = stream[size:]
        if data.draw(st.booleans()):
            got += read_all(reader)
    assert got + read_all(reader) == payloads
