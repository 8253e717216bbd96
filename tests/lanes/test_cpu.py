"""The CPU lane: the oracle's numbers, and the same bits whatever the split."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from caldrix_kernels.argmax.reference import argmax
from caldrix_kernels.step import layout as at
from caldrixd.architectures.blocks import decoder
from caldrixd.lanes import cpu
from caldrixd.lanes.cpu import CpuProgram
from caldrixd.lanes.lane import Rows, StepCancelled
from caldrixd.plan import oracle
from caldrixd.plan.plan import Plan, Tensor
from caldrixd.spec import DeltaNet, Experts, ModelSpec, Rope
from tests.support import models

Float32 = npt.NDArray[np.float32]


def silent(code: str, fields: dict[str, object]) -> None:
    """Takes status lines and drops them."""


def program(plan: Plan, tensors: Mapping[str, Tensor], threads: int = 2) -> CpuProgram:
    return cpu.load(plan, tensors, threads=threads, report=silent)


SLIDING = ("full_attention", "sliding_attention")
MIXED = ("linear_attention", "full_attention", "linear_attention")


def awkward_spec(**changes: object) -> ModelSpec:
    """Sizes that are multiples of nothing: padding everywhere."""
    fields: dict[str, object] = {
        "architecture": "Qwen2ForCausalLM",
        "vocab_size": 77,
        "hidden_size": 39,
        "intermediate_size": 53,
        "layer_types": ("full_attention",) * 2,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "rms_norm_eps": 1e-5,
        "rope": Rope("default", 10000.0, 10),
        "max_context": 4096,
        "tied": False,
        "qkv_bias": True,
    }
    return ModelSpec(**{**fields, **changes})  # type: ignore[arg-type]


def random_tensors(plan: Plan, dtypes: Sequence[str] = ("BF16",), seed: int = 0) -> dict[str, Tensor]:
    """Weights of the given stored formats in turn."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for number, weight in enumerate(plan.weights):
        dtype = dtypes[number % len(dtypes)]
        values = rng.standard_normal(weight.shape, np.float32) * np.float32(0.3)
        if dtype == "BF16":
            data = (values.view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint8)
        else:
            data = values.astype(np.float16 if dtype == "F16" else np.float32).reshape(-1).view(np.uint8)
        tensors[weight.name] = Tensor(dtype, weight.shape, data)
    return tensors


def logits(
    run: CpuProgram | oracle.Program,
    ids: Sequence[int],
    chunk: int,
    threads: int = 2,
    dtype: str = "f32",
    every: int = 1,
) -> Float32:
    """The logits after each `every`-th token, prefilled in chunks."""
    slot = run.allocate(len(ids) + 8)
    parts = []
    for start in range(0, len(ids), chunk):
        part = list(ids[start : start + chunk])
        wanted = [row for row in range(len(part)) if (start + row) % every == 0]
        rows = Rows([slot] * len(part), range(start, start + len(part)), part, wanted)
        given = run.step(rows, threads=threads, dtype=dtype)
        assert given.likeliest.tolist() == argmax(given.values).tolist()
        parts.append(given.values.copy())
        run.commit(slot, start + len(part))
    run.release(slot)
    return np.concatenate(parts)


def same_bits(a: Float32, b: Float32) -> bool:
    return a.shape == b.shape and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


@pytest.fixture(scope="module")
def llama() -> Iterator[CpuProgram]:
    loaded = program(*models.opened(models.tiny("tiny-llama")))
    yield loaded
    loaded.close()


@pytest.mark.parametrize(
    ("spec", "dtypes"),
    [
        (awkward_spec(), ("BF16",)),
        (awkward_spec(), ("F16",)),
        (awkward_spec(), ("F32",)),
        (awkward_spec(tied=True), ("F16", "F32", "BF16", "BF16")),
        (awkward_spec(tied=True), ("BF16",)),
        (
            awkward_spec(heads=1, kv_heads=1, head_dim=2, rope=Rope("default", 1e4, 2), qkv_bias=False),
            ("BF16",),
        ),
        (awkward_spec(heads=8, kv_heads=1, head_dim=80, rope=Rope("linear", 1e4, 80, factor=4.0)), ("BF16",)),
        (awkward_spec(heads=14, kv_heads=14, head_dim=32, rope=Rope("default", 1e4, 32)), ("BF16", "F32")),
        *((awkward_spec(layer_types=SLIDING, sliding_window=w), ("BF16",)) for w in (1, 3, 127, 128, 150)),
        (awkward_spec(qk_norm=True, norm_offset=1.0), ("BF16",)),
        (awkward_spec(attention_gate=True, qkv_bias=False), ("F32",)),
        (
            awkward_spec(
                attention_gate=True, head_dim=48, qkv_bias=False, qk_norm=True, rope=Rope("default", 1e4, 12)
            ),
            ("BF16",),
        ),
        (awkward_spec(experts=Experts(20, 3, 24, True, (0, 1))), ("BF16",)),
        (awkward_spec(experts=Experts(5, 5, 17, False, (1,))), ("F16", "F32")),
        (awkward_spec(experts=Experts(3, 1, 33, False, (0,))), ("BF16",)),
        (awkward_spec(layer_types=MIXED, delta_net=DeltaNet(4, 2, 6, 32, 48)), ("BF16",)),
        (awkward_spec(layer_types=MIXED[::-1], delta_net=DeltaNet(2, 1, 1, 16, 64)), ("BF16", "F32")),
        (awkward_spec(layer_types=MIXED, delta_net=DeltaNet(3, 3, 3, 48, 16)), ("F32",)),
    ],
)
def test_awkward_shapes_equal_the_oracle(spec: ModelSpec, dtypes: tuple[str, ...]) -> None:
    plan = decoder(spec)
    tensors = random_tensors(plan, dtypes)
    ids = [int(i) for i in np.random.default_rng(1).integers(0, spec.vocab_size, 150)]
    run = program(plan, tensors)
    expected = logits(oracle.load(plan, tensors), ids, 50)
    for chunk in (150, 7, 1):
        np.testing.assert_allclose(logits(run, ids, chunk), expected, rtol=0, atol=2e-3)
    run.close()


@pytest.mark.parametrize("token", [0, 40, 76])
def test_a_row_that_is_not_finite_has_no_likeliest_token(token: int) -> None:
    """The last of 77 tokens stands alone in its panel."""
    plan = decoder(awkward_spec())
    tensors = random_tensors(plan, ("F32",))
    head = tensors["lm_head.weight"].data.view(np.float32).reshape(77, 39)
    head[token] = np.inf
    run = program(plan, tensors)
    slot = run.allocate(8)
    given = run.step(Rows([slot] * 3, range(3), [5, 6, 7], range(3)), threads=2)
    assert np.isfinite(np.delete(given.values, token, axis=1)).all()
    assert given.likeliest.tolist() == [-1] * 3
    run.close()


def test_bits_do_not_depend_on_threads_or_chunks(llama: CpuProgram) -> None:
    ids = [int(i) for i in np.random.default_rng(2).integers(0, 512, 600)]
    expected = logits(llama, ids, 512, threads=1)
    for threads in (1, 2, 3, 5):
        for chunk in (1, 7, 16, 64, 512):
            assert same_bits(logits(llama, ids, chunk, threads), expected), (threads, chunk)


def test_a_system_that_gives_no_more_threads(llama: CpuProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ids = [int(i) for i in np.random.default_rng(2).integers(0, 512, 100)]
    expected = logits(llama, ids, 64, threads=1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert same_bits(logits(llama, ids, 64, threads=9), expected)


@pytest.mark.parametrize(
    "splits",
    [
        pytest.param([(2, 16), (3, 64), (2, 512)], id="some"),
        pytest.param(list(product((1, 2, 3), (16, 64, 512))), id="all", marks=pytest.mark.slow),
    ],
)
def test_bits_of_the_real_model(splits: list[tuple[int, int]]) -> None:
    run = program(*models.opened(models.smollm2()))
    ids = [int(i) for i in np.random.default_rng(8).integers(0, 49152, 300)]
    expected = logits(run, ids, 512, threads=1, every=30)
    for threads, chunk in splits:
        assert same_bits(logits(run, ids, chunk, threads, every=30), expected), (threads, chunk)
    for threads in {threads for threads, _ in splits}:
        assert same_bits(logits(run, ids[:90], 1, threads, every=30), expected[:3]), threads
    run.close()


def test_rows_of_other_slots_change_nothing(llama: CpuProgram) -> None:
    """Two to nine sequences in one step give the bits of single runs, at staggered positions."""
    rng = np.random.default_rng(3)
    prompts = [[int(i) for i in rng.integers(0, 512, 70 + 13 * n)] for n in range(9)]
    alone = [logits(llama, ids, 512) for ids in prompts]
    for count in (2, 3, 8, 9):
        slots = [llama.allocate(256) for _ in range(count)]
        for position in range(60):
            tokens = [prompts[n][position] for n in range(count)]
            rows = Rows(slots, [position] * count, tokens, range(count))
            got = llama.step(rows, threads=2).values
            for n in range(count):
                assert same_bits(got[n], alone[n][position])
        mixed = Rows(
            [slots[0], *[slots[1]] * 20],
            [60, *range(60, 80)],
            [prompts[0][60], *prompts[1][60:80]],
            [0, 20],
        )
        got = llama.step(mixed, threads=2).values
        assert same_bits(got[0], alone[0][60])
        assert same_bits(got[1], alone[1][79])
        for slot in slots:
            llama.release(slot)


def test_embedding_rows_stand_for_tokens(llama: CpuProgram) -> None:
    ids = [5, 300, 17]
    expected = logits(llama, ids, 3)
    table = models.oracle_program(models.tiny("tiny-llama"))._weights["model.embed_tokens.weight"]
    slot = llama.allocate(8)
    rows = Rows([slot] * 3, range(3), [5, -1, 17], range(3), embeddings={1: table[300]})
    assert same_bits(llama.step(rows, threads=2).values, expected)
    llama.release(slot)


def test_a_cancelled_step_leaves_the_state_as_it_was(llama: CpuProgram) -> None:
    """The cancel word stops the step at the first stage after it is seen; running it again is a clean run."""
    ids = [int(i) for i in np.random.default_rng(4).integers(0, 512, 90)]
    expected = logits(llama, ids, 90)
    slot = llama.allocate(128)
    first, rest = ids[:40], ids[40:]
    llama.step(Rows([slot] * 40, range(40), first, []), threads=2)
    llama.commit(slot, 40)
    rows = Rows([slot] * 50, range(40, 90), rest, range(50))
    stages = len(llama._program)
    for stage in range(stages):
        # Run the stages before, then start the step again with the cancel word set for the rest of it.
        llama.step(rows, threads=2, ops=(0, stage))
        with pytest.raises(StepCancelled):
            cancelled_step(llama, rows, stage)
    assert llama.length(slot) == 40
    assert same_bits(llama.step(rows, threads=2).values, expected[40:])
    llama.release(slot)


def cancelled_step(run: CpuProgram, rows: Rows, stage: int) -> None:
    """A step over [stage, end) whose cancel word is set while it is being published."""
    pool = run._pool
    publish = pool._publish_and_run

    def cancel_first(staged: int, published: int) -> None:
        run.cancel()
        publish(staged, published)

    pool._publish_and_run = cancel_first
    try:
        run.step(rows, threads=2, ops=(stage, len(run._program)))
    finally:
        pool._publish_and_run = publish


def test_cancel_from_another_thread(llama: CpuProgram) -> None:
    """Cancelled at whatever moment, the next step is a clean run."""
    ids = [int(i) for i in np.random.default_rng(5).integers(0, 512, 512)]
    expected = logits(llama, ids, 512)
    slot = llama.allocate(512)
    rows = Rows([slot] * 512, range(512), ids, range(512))
    for _ in range(20):
        canceller = threading.Thread(target=llama.cancel)
        canceller.start()
        with suppress(StepCancelled):
            llama.step(rows, threads=2)
        canceller.join()
    with suppress(StepCancelled):
        llama.step(rows, threads=2)  # where a late cancel goes
    assert same_bits(llama.step(rows, threads=2).values, expected)
    llama.release(slot)


def test_a_thread_that_wakes_after_two_cancelled_steps_takes_nothing_of_the_next(llama: CpuProgram) -> None:
    """It has copied the block of the first; the second has overwritten which step was stopped, and where."""
    ids = [int(i) for i in np.random.default_rng(6).integers(0, 512, 90)]
    expected = logits(llama, ids, 90)
    slot = llama.allocate(128)
    rows = Rows([slot] * 90, range(90), ids, range(90))
    first = int(llama._pool.block[at.BASE])
    for _ in range(2):
        with pytest.raises(StepCancelled):
            cancelled_step(llama, rows, 0)
    late = llama._pool.block.copy()
    late[at.BASE] = first
    run_step = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(int(llama._kernels.table[at.RUN_STEP]))
    run_step(late.ctypes.data, 1)
    assert same_bits(llama.step(rows, threads=2).values, expected)
    llama.release(slot)


def test_a_late_cancel_stops_the_next_step_once(llama: CpuProgram) -> None:
    slot = llama.allocate(64)
    rows = Rows([slot] * 20, range(20), [7] * 20, [19])
    llama.cancel()
    with pytest.raises(StepCancelled):
        llama.step(rows, threads=2)
    assert np.isfinite(llama.step(rows, threads=2).values).all()
    llama.release(slot)


def test_a_program_that_is_dropped_ends_its_threads() -> None:
    """Its memory may not go before the threads that read it."""
    run = program(*models.opened(models.tiny("tiny-llama")), threads=3)
    logits(run, [1, 2, 3], 3, threads=3)
    threads = list(run._pool._threads)
    assert [thread.is_alive() for thread in threads] == [True, True]
    del run
    gc.collect()
    assert [thread.is_alive() for thread in threads] == [False, False]


def test_rewind_and_restore(llama: CpuProgram) -> None:
    ids = [int(i) for i in np.random.default_rng(6).integers(0, 512, 80)]
    expected = logits(llama, ids, 80)
    slot = llama.allocate(128)
    llama.step(Rows([slot] * 40, range(40), ids[:40], []), threads=2)
    llama.commit(slot, 40)
    snapshot = llama.snapshot(slot)
    llama.step(Rows([slot] * 30, range(40, 70), [7] * 30, []), threads=2)
    llama.commit(slot, 70)
    llama.restore(slot, snapshot)
    assert llama.length(slot) == 40
    got = llama.step(Rows([slot] * 40, range(40, 80), ids[40:], range(40)), threads=2).values
    assert same_bits(np.array(got), expected[40:])
    with pytest.raises(ValueError, match="cannot rewind"):
        llama.rewind(slot, 41)
    llama.release(slot)


def test_bf16_activations_stay_near_and_do_not_disturb_f32() -> None:
    """Switching the activation form clears what the other left in the padding."""
    plan = decoder(awkward_spec())
    tensors = random_tensors(plan)
    run = program(plan, tensors)
    ids = [int(i) for i in np.random.default_rng(7).integers(0, 77, 150)]
    exact = logits(run, ids, 40)
    expected = logits(oracle.load(plan, tensors), ids, 40, dtype="bf16")
    for chunk in (40, 1, 150):
        rounded = logits(run, ids, chunk, dtype="bf16")
        assert 0 < np.abs(rounded - exact).max() < 0.2
        # Sums in another order round some inputs to a neighbour.
        np.testing.assert_allclose(rounded, expected, rtol=0, atol=0.05)
        assert same_bits(logits(run, ids, 40), exact)
    run.close()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_what_stood_in_memory_before_has_no_part(llama: CpuProgram, dtype: str) -> None:
    """In bf16 arithmetic values are read in pairs of positions, of which the second may not be there yet."""
    ids = [int(i) for i in np.random.default_rng(9).integers(0, 512, 140)]
    answers = set()
    for old in (0.0, np.nan, np.inf):
        slot = llama.allocate(256)
        llama._slots[slot].state.bytes.view(np.float32)[:] = old
        given = []
        for start, end in ((0, 1), (1, 129), (129, 132), (132, 133)):
            rows = Rows([slot] * (end - start), range(start, end), ids[start:end], [end - start - 1])
            given.append(llama.step(rows, threads=2, dtype=dtype).values.tobytes())
            llama.commit(slot, end)
        answers.add(tuple(given))
        llama.release(slot)
    assert len(answers) == 1


def test_outsized_requests_are_refused_before_the_kernels_see_them(llama: CpuProgram) -> None:
    slot = llama.allocate(16)
    for rows in (
        Rows([slot], [0], [512], [0]),
        Rows([slot], [0], [-1], [0]),
        Rows([slot], [16], [1], [0]),
        Rows([slot], [-1], [1], [0]),
        Rows([slot], [0], [1], [1]),
        Rows([], [], [], []),
    ):
        with pytest.raises(ValueError):
            llama.step(rows, threads=1)
    with pytest.raises(KeyError):
        llama.step(Rows([slot + 1], [0], [1], [0]), threads=1)
    llama.release(slot)
