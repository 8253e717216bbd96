"""The oracle against transformers, and against itself: the same rows give the same bits in any company."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from caldrix_kernels.formats import narrow_bf16
from caldrix_kernels.linear.reference import linear
from caldrixd.architectures.blocks import decoder
from caldrixd.lanes.lane import Rows, StepCancelled
from caldrixd.models import gate
from caldrixd.plan import oracle
from caldrixd.plan.oracle import Program
from tests.support.models import TINY, opened, oracle_program, reference, tiny

Float32 = npt.NDArray[np.float32]

CTX = 320
TOKENS = reference("tiny-llama")["prompts"][3]["prompt_ids"]
# Windows, experts and recurrent state beside plain attention.
KINDS = ("tiny-llama", "tiny-mistral-window", "tiny-qwen2-window", "tiny-qwen3-moe", "tiny-qwen3_5")


@pytest.fixture(scope="module", params=KINDS)
def program(request: pytest.FixtureRequest) -> Program:
    return oracle_program(tiny(request.param))


@pytest.fixture(scope="module")
def llama() -> Program:
    return oracle_program(tiny("tiny-llama"))


@pytest.fixture(scope="module")
def recurrent() -> Program:
    return oracle_program(tiny("tiny-qwen3_5"))


def run(program: Program, slot: int, tokens: list[int], *, chunk: int = 512, dtype: str = "f32") -> Float32:
    """Append tokens to a slot, `chunk` a step; the last token's logits."""
    last = np.empty(0, np.float32)
    while tokens:
        part, tokens = tokens[:chunk], tokens[chunk:]
        start = program.length(slot)
        positions = range(start, start + len(part))
        rows = Rows([slot] * len(part), positions, part, [len(part) - 1])
        last = program.step(rows, dtype=dtype).values[0].copy()
        program.commit(slot, start + len(part))
    return last


@pytest.mark.parametrize("name", TINY)
def test_the_oracle_gives_what_transformers_gives(name: str) -> None:
    program = oracle_program(tiny(name))
    for prompt in reference(name)["prompts"]:
        slot = program.allocate(CTX)
        tokens = list(prompt["prompt_ids"])
        for step, expected in enumerate(prompt["generated_ids"]):
            logits = run(program, slot, tokens).astype(np.float64)
            order = np.argsort(-logits, kind="stable")
            if prompt["margins"][step] > 2e-4:
                assert order[0] == expected
            for token, logit in prompt["top5"][step] if step < len(prompt["top5"]) else []:
                assert abs(logits[token] - logit) <= 1e-4
            assert abs(logits[order[0]] - logits[order[1]] - prompt["margins"][step]) <= 2e-4
            logprob = logits[expected] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            assert abs(logprob - prompt["logprobs"][step]) <= 2e-4
            tokens = [expected]
        program.release(slot)


def test_the_references_decide_nearly_everywhere() -> None:
    margins = [m for name in TINY for prompt in reference(name)["prompts"] for m in prompt["margins"]]
    assert sum(margin <= 2e-4 for margin in margins) <= len(margins) // 1000


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_give_the_same_bits(program: Program, chunk: int) -> None:
    whole, chunked = program.allocate(CTX), program.allocate(CTX)
    expected = run(program, whole, TOKENS)
    assert run(program, chunked, TOKENS, chunk=chunk).tobytes() == expected.tobytes()


def test_two_slots_in_one_step_give_the_bits_of_two_single_runs(program: Program) -> None:
    first, second = TOKENS[:20], TOKENS[20:33]
    alone = [run(program, program.allocate(CTX), tokens) for tokens in (first, second)]
    a, b = program.allocate(CTX), program.allocate(CTX)
    # The rows of the two slots alternate as long as both have some.
    order = sorted([(i, a, t) for i, t in enumerate(first)] + [(i, b, t) for i, t in enumerate(second)])
    last = [order.index((19, a, first[19])), order.index((12, b, second[12]))]
    rows = Rows([s for _, s, _ in order], [p for p, _, _ in order], [t for _, _, t in order], last)
    together = program.step(rows).values
    assert together[0].tobytes() == alone[0].tobytes()
    assert together[1].tobytes() == alone[1].tobytes()


def test_a_rewound_slot_goes_on_as_if_nothing_had_been_there(program: Program) -> None:
    length = 10 if program.plan.rewindable else 0
    slot, clean = program.allocate(CTX), program.allocate(CTX)
    expected = run(program, clean, [*TOKENS[:length], 7])
    run(program, slot, TOKENS[:30])
    program.rewind(slot, length)
    assert program.length(slot) == length
    assert run(program, slot, [7]).tobytes() == expected.tobytes()


def test_recurrent_state_goes_back_to_the_start_only(recurrent: Program) -> None:
    slot = recurrent.allocate(CTX)
    run(recurrent, slot, TOKENS[:30])
    with pytest.raises(ValueError, match="rewind to 10"):
        recurrent.rewind(slot, 10)
    expected = run(recurrent, slot, [7])
    other = recurrent.allocate(CTX)
    run(recurrent, other, TOKENS[:30])
    recurrent.step(Rows([other], [30], [8], []))
    recurrent.rewind(other, 30)  # what was written and not committed is gone
    with pytest.raises(ValueError, match="commit to 31"):
        recurrent.commit(other, 31)
    assert run(recurrent, other, [7]).tobytes() == expected.tobytes()


def test_recurrent_state_is_committed_whole_and_in_order(recurrent: Program) -> None:
    slot = recurrent.allocate(CTX)
    recurrent.step(Rows([slot] * 3, range(3), TOKENS[:3], []))
    for length in (1, 2):
        with pytest.raises(ValueError, match="recurrent state is at 3"):
            recurrent.commit(slot, length)
    recurrent.commit(slot, 3)
    for first in (0, 2):
        with pytest.raises(ValueError, match="recurrent state is at 3"):
            recurrent.step(Rows([slot], [first], [5], []))


def test_a_snapshot_of_recurrent_state_is_a_copy(recurrent: Program) -> None:
    slot = recurrent.allocate(CTX)
    run(recurrent, slot, TOKENS[:10])
    snapshot = recurrent.snapshot(slot)
    assert snapshot.recurrent is not None
    assert snapshot.nbytes == recurrent.plan.recurrent_bytes
    expected = run(recurrent, slot, [7, 8])
    for _ in range(2):  # what is restored may be changed and restored again
        recurrent.restore(slot, snapshot)
        assert run(recurrent, slot, [7, 8]).tobytes() == expected.tobytes()
    recurrent.rewind(slot, 0)
    with pytest.raises(ValueError, match="restore to 10"):
        recurrent.restore(slot, snapshot)


def windowed(window: int) -> Program:
    """tiny-mistral with a window it was not made with: 0 is none."""
    spec = gate.read_spec(tiny("tiny-mistral"))
    kind = "sliding_attention" if window else "full_attention"
    plan = decoder(replace(spec, layer_types=(kind,) * spec.layers, sliding_window=window))
    return oracle.load(plan, opened(tiny("tiny-mistral"))[1])


def test_a_window_of_the_whole_sequence_is_none() -> None:
    tokens = TOKENS[:20]
    bits = {}
    for window in (0, 1, 19, 20, 21):
        program = windowed(window)
        bits[window] = run(program, program.allocate(CTX), tokens).tobytes()
        # A window is not forgotten when one token is decoded alone.
        assert run(program, program.allocate(CTX), tokens, chunk=1).tobytes() == bits[window]
    assert bits[20] == bits[21] == bits[0]
    assert len({bits[1], bits[19], bits[0]}) == 3


def test_a_snapshot_brings_a_length_back(program: Program) -> None:
    slot = program.allocate(CTX)
    run(program, slot, TOKENS[:10])
    snapshot = program.snapshot(slot)
    expected = run(program, slot, [7])
    program.restore(slot, snapshot)
    assert program.length(slot) == 10
    assert run(program, slot, [7]).tobytes() == expected.tobytes()


def test_a_step_that_is_not_committed_may_be_run_again(program: Program) -> None:
    slot = program.allocate(CTX)
    rows = Rows([slot] * 3, range(3), TOKENS[:3], [2])
    first = program.step(rows).values.copy()
    assert program.length(slot) == 0
    assert program.step(rows).values.tobytes() == first.tobytes()


def test_a_given_embedding_takes_the_place_of_the_tokens(llama: Program) -> None:
    plan, tensors = opened(tiny("tiny-llama"))
    table = tensors[plan.ops[0].weights[0]].data.view(np.uint16).reshape(plan.vocab_size, -1)
    row = (table[TOKENS[1]].astype(np.uint32) << 16).view(np.float32)
    slot = llama.allocate(CTX)
    plain = llama.step(Rows([slot] * 3, range(3), TOKENS[:3], [2])).values.copy()
    other = [TOKENS[0], 0, TOKENS[2]]
    assert llama.step(Rows([slot] * 3, range(3), other, [2])).values.tobytes() != plain.tobytes()
    replaced = llama.step(Rows([slot] * 3, range(3), other, [2], {1: row})).values
    assert replaced.tobytes() == plain.tobytes()


def test_no_wanted_rows_give_no_logits(program: Program) -> None:
    slot = program.allocate(CTX)
    assert program.step(Rows([slot], [0], [5], [])).values.shape == (0, program.plan.vocab_size)


def test_bf16_rounds_the_inputs_of_matrix_products(llama: Program) -> None:
    exact = run(llama, llama.allocate(CTX), TOKENS[:20])
    rounded = run(llama, llama.allocate(CTX), TOKENS[:20], dtype="bf16")
    assert rounded.tobytes() != exact.tobytes()
    np.testing.assert_allclose(rounded, exact, atol=0.15)
    # A lone rounding to bf16 is of this size: the difference above is not a fault of another kind.
    assert np.abs(exact - (narrow_bf16(exact).astype(np.uint32) << 16).view(np.float32)).max() > 0.001


def test_a_cancelled_step_raises_and_the_next_one_runs(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = program.allocate(CTX)
    rows = Rows([slot], [0], [5], [0])
    expected = program.step(rows).values.copy()
    program.cancel()  # without a step: nothing happens
    assert program.step(rows).values.tobytes() == expected.tobytes()

    def cancelling(*arguments: Float32) -> Float32:
        program.cancel()
        return linear(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(oracle, "linear", cancelling)
        with pytest.raises(StepCancelled):
            program.step(rows)
    assert program.length(slot) == 0
    assert program.step(rows).values.tobytes() == expected.tobytes()


def test_rows_that_no_lane_can_run_are_errors(llama: Program) -> None:
    slot = llama.allocate(4)
    with pytest.raises(ValueError, match="vocabulary"):
        llama.step(Rows([slot], [0], [512], [0]))
    with pytest.raises(ValueError, match="positions"):
        llama.step(Rows([slot], [1], [5], [0]))
    with pytest.raises(ValueError, match="positions"):
        llama.step(Rows([slot, slot], [0, 2], [5, 5], [0]))
    with pytest.raises(ValueError, match="positions"):
        llama.step(Rows([slot] * 5, range(5), [5] * 5, [0]))
    with pytest.raises(ValueError, match="0 rows"):
        llama.step(Rows([], [], [], []))
    with pytest.raises(ValueError, match="commit to 1"):
        llama.commit(slot, 1)
    with pytest.raises(ValueError, match="rewind to 1"):
        llama.rewind(slot, 1)
    run(llama, slot, [5, 6])
    llama.rewind(slot, 1)
    with pytest.raises(ValueError, match="commit to 2"):
        llama.commit(slot, 2)


def test_a_tensor_that_is_absent_is_named() -> None:
    plan, tensors = opened(tiny("tiny-llama"))
    with pytest.raises(KeyError, match=r"model\.norm\.weight"):
        oracle.load(plan, {name: t for name, t in tensors.items() if name != "model.norm.weight"})
