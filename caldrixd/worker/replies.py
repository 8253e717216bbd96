"""One reply of a worker: from its request to a prompt, from tokens to text."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from caldrix_protocol.codec import decode
from caldrix_protocol.connection import as_notice, as_refusal
from caldrix_protocol.messages import (
    REQUESTS,
    Attach,
    Begin,
    Delta,
    Done,
    Generate,
    Message,
    Notice,
    Timings,
)
from caldrix_protocol.refusals import Refused
from caldrixd.engine.engine import Engine, Request, TokenEvent, Usage
from caldrixd.engine.sampling import GREEDY, Sampling
from caldrixd.text import prompt
from caldrixd.text.detokenize import Detokenizer, Stops
from caldrixd.worker.loading import Model

# Of a seed that is made here: JSON readers that keep all numbers as float64 give it back as it is.
SEED_BITS = 53


class Reply:
    """`submit` and `cancel` may come from different threads; every other method from one at a time."""

    def __init__(self, begin: Begin, attachments: Sequence[Attach]) -> None:
        self.number = begin.stream
        self._begin = begin
        self._attachments = attachments
        self._prompt_ids: tuple[int, ...] = ()
        self._dropped_turns = 0
        self._begun = ""  # what the template wrote of the reply, until it is shown
        self._max_tokens: int | None = None
        self._sampling = GREEDY
        self._detokenizer: Detokenizer | None = None
        self._stops = Stops(())
        self._ids: list[int] = []
        self._untold: list[int] = []
        self._lock = threading.Lock()  # guards the two below
        self._submitted = False
        self._cancelled = False

    def build_prompt(self, model: Model) -> list[Notice]:
        """Make the prompt; what the user should know about it. Refused "message/..." and others."""
        request: Generate = decode(self._begin.request, REQUESTS)
        blobs = joined(self._attachments)
        turns = (
            None
            if request.turns is None
            else [{**turn, "content": with_texts(turn["content"], blobs)} for turn in request.turns]
        )
        try:
            built = prompt.build(
                model.tokenizer,
                model.template,
                turns=turns,
                raw=None if request.raw is None else with_texts(request.raw, blobs),
                ctx=self._begin.ctx,
                max_tokens=request.max_tokens,
                thinking=request.thinking,
            )
        except Refused as refused:
            if refused.code == "message/too-long" and self._begin.ctx >= model.spec.max_context:
                raise Refused("message/over-model", **refused.fields) from None
            raise
        self._prompt_ids, self._dropped_turns = built.ids, built.dropped_turns
        self._begun = built.begun
        self._max_tokens = request.max_tokens
        self._sampling = sampling_of(request)
        self._stops = Stops(request.stop)
        self._detokenizer = Detokenizer(model.tokenizer)
        return [as_notice(notice.code, **notice.fields) for notice in built.notices]

    def submit(self, model: Model) -> None:
        """Give the prompt to the engine, unless the reply was cancelled meanwhile."""
        request = Request(
            id=self.number,
            prompt=self._prompt_ids,
            ctx=self._begin.ctx,
            max_tokens=self._max_tokens,
            stop_ids=model.tokenizer.eos_ids,
            dtype=self._begin.dtype,
            threads=self._begin.threads,
            max_batch=self._begin.max_batch,
            sampling=self._sampling,
        )
        with self._lock:
            if not self._cancelled:
                model.engine.submit(request)
                self._submitted = True

    def cancel(self, engine: Engine) -> bool:
        """Stop the reply. Whether the engine has it, and will send its last event."""
        with self._lock:
            self._cancelled = True
            submitted = self._submitted
        if submitted:
            engine.cancel(self.number)
        return submitted

    def cancelled(self) -> Done:
        """The end of a reply that was cancelled before the engine had it."""
        return Done("cancelled", prompt_ids=self._prompt_ids, dropped_turns=self._dropped_turns)

    def advance(self, event: TokenEvent) -> list[Message]:
        """What the client is to see of an engine's event; the last message of a reply is Done or Refusal.

        A stop text ends the reply while the engine still has it.
        """
        messages: list[Message] = []
        assert self._detokenizer is not None
        text = ""
        if event.token is not None:
            self._ids.append(event.token)
            self._untold.append(event.token)
            if event.finish != "stop":
                text = self._stops.add(self._detokenizer.add(event.token))
        if event.finish is not None:
            text += self._stops.add(self._detokenizer.finish()) + self._stops.finish()
        if text:
            messages.append(Delta(self._begun + text, tuple(self._untold)))
            self._begun = ""
            self._untold = []
        if event.refused is not None:
            messages.append(as_refusal(event.refused))
        elif self._stops.found:
            messages.append(self._done("stop", event.usage))
        elif event.finish is not None:
            messages.append(self._done(event.finish, event.usage))
        return messages

    def _done(self, reason: str, usage: Usage) -> Done:
        timings = Timings(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            prefill_seconds=usage.prefill_seconds,
            reply_tokens=usage.reply_tokens,
            decode_seconds=usage.decode_seconds,
            first_token_seconds=usage.first_token_seconds,
        )
        seed = self._sampling.seed if self._sampling.draws and self._ids else None
        return Done(reason, tuple(self._ids), self._prompt_ids, self._dropped_turns, timings, seed)


def sampling_of(request: Generate) -> Sampling:
    """The knobs of a request; without a seed, one of fresh entropy."""
    return Sampling(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        seed=secrets.randbits(SEED_BITS) if request.seed is None else request.seed,
    )


def joined(attachments: Sequence[Attach]) -> dict[int, bytes]:
    """The blobs of a request: the frames of each id in the order in which they came."""
    pieces: dict[int, list[bytes]] = {}
    for attachment in attachments:
        pieces.setdefault(attachment.id, []).append(attachment.data)
    return {name: b"".join(data) for name, data in pieces.items()}


def with_texts(content: Sequence[Mapping[str, Any]], blobs: Mapping[int, bytes]) -> list[Mapping[str, Any]]:
    """Content parts with every text in place. Refused "daemon/bad-request" for a blob that is no text."""
    return [
        part if "text" in part else {"type": "text", "text": _blob_text(part["blob"], blobs)}
        for part in content
    ]


def _blob_text(name: int, blobs: Mapping[int, bytes]) -> str:
    if name not in blobs:
        raise Refused("daemon/bad-request", reason=f"the blob {name} was not sent")
    try:
        return blobs[name].decode()
    except UnicodeDecodeError:
        raise Refused("daemon/bad-request", reason=f"the blob {name} is not valid UTF-8") from None
