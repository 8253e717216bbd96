"""One answer: send a `generate`, show the text as it comes, and say what came of it."""

from __future__ import annotations

from typing import NamedTuple

from caldrix_client.channel import Channel, exchange
from caldrix_client.conversation import Conversation, Packed, pack_raw
from caldrix_client.events import show
from caldrix_client.interrupts import Interrupts
from caldrix_client.parse import Run, is_bounded
from caldrix_client.sampling import Sampling
from caldrix_client.terminal import Terminal
from caldrix_client.thinking import Thinking, said, thought
from caldrix_protocol.messages import Delta, Done, Generate, Notice, Opened, Timings
from caldrix_protocol.refusals import Refused, sentence

BASE_MODEL_TOKENS = 256  # a model without a chat template rarely ends its own reply


class Answer(NamedTuple):
    """Its pieces with their numbers of tokens, the `done` that ended it, and whether it was Ctrl-C."""

    pieces: list[tuple[str, int]]
    done: Done
    interrupted: bool

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def said(self) -> str:
        """The text without the thinking before it: what a conversation keeps."""
        return said(self.text)

    @property
    def thought(self) -> int:
        """The tokens that a conversation does not keep."""
        return thought(self.pieces)


class Speaker(NamedTuple):
    """An open model and how its answers are to be shown."""

    channel: Channel
    opened: Opened
    command: Run
    terminal: Terminal

    @property
    def plain_text(self) -> bool:
        """Whether prompts are sent without a chat template."""
        return self.command.raw or not self.opened.chat_template

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer; None for as many as the context has room for."""
        if self.command.max_tokens is None and not self.opened.chat_template:
            return BASE_MODEL_TOKENS
        return self.command.max_tokens

    @property
    def reserved(self) -> int:
        """Tokens that the daemon keeps for an answer while dropping older turns can make room for it."""
        ctx = self.opened.ctx
        return min(ctx // 4 if self.limit is None else self.limit, ctx // 2)

    @property
    def _at_max_context(self) -> bool:
        """Whether --max-context is what the context would have to be larger than."""
        return is_bounded(self.command) and self.opened.ctx == self.command.max_context

    def require_system(self) -> None:
        """Raise Refused where no system message is sent (usage/system-raw, notice/no-system)."""
        if self.command.raw:
            raise Refused("usage/system-raw", name="/system")
        if not self.opened.chat_template:
            raise Refused("notice/no-system")

    def answer(self, message: str, conversation: Conversation, sampling: Sampling) -> Answer:
        """Show the answer to a message. Raises Refused, unless that crossed a Ctrl-C."""
        packed = pack_raw(message) if self.plain_text else conversation.pack(message)
        request = self._request(packed, sampling)
        pieces = []
        thinking = Thinking()
        done = Done()
        dropping_said = False
        complete = False
        with Interrupts() as interrupts:
            try:
                for event in exchange(self.channel, request, interrupts, packed.blobs):
                    if type(event) is Delta:
                        pieces.append((event.text, len(event.ids)))
                        if not self.command.json:
                            self._show(*thinking.add(event.text))
                    elif type(event) is Done:
                        done = event
                        complete = event.finish_reason != "cancelled"
                    else:
                        dropping_said |= type(event) is Notice and event.code == "notice/dropped-turns"
                        show(event, self.terminal)
            except Refused as refused:
                if interrupts.count:
                    done = Done("cancelled")
                elif refused.code == "message/too-long" and self._at_max_context:
                    raise Refused("message/over-max-context", **refused.fields) from None
                else:
                    raise
            finally:
                self._show("", "" if self.command.json else thinking.finish())
                self.terminal.end_answer(complete=complete and not self.command.json)
        if done.dropped_turns and not dropping_said:
            self.terminal.say(sentence("notice/dropped-turns", count=done.dropped_turns))
        self._say_if_full(done)
        answer = Answer(pieces, done, bool(interrupts.count))
        self._account(answer)
        return answer

    def _request(self, packed: Packed, sampling: Sampling) -> Generate:
        handle, stop = self.opened.handle, self.command.stop
        think, knobs = self.command.think, sampling._asdict()
        return Generate(handle, packed.turns, packed.raw, self.limit, stop=stop, thinking=think, **knobs)

    def _show(self, thinking: str, text: str) -> None:
        self.terminal.answer(thinking, dim=True)
        self.terminal.answer(text)

    def _say_if_full(self, done: Done) -> None:
        """Say that the context, and not --max-tokens, ended the answer."""
        if done.finish_reason == "length" and (self.limit is None or len(done.ids) < self.limit):
            flag = "--max-context" if self._at_max_context else "--ctx"
            self.terminal.say(sentence("notice/context-full", ctx=self.opened.ctx, flag=flag))

    def _account(self, answer: Answer) -> None:
        timings = answer.done.timings._replace(load_seconds=self.opened.load_seconds)
        if self.command.json:
            self.terminal.result(_object(answer, timings))
        if self.command.stats:
            self.terminal.say(_stats(timings))


def _object(answer: Answer, timings: Timings) -> str:
    import json

    done = answer.done
    return json.dumps(
        {
            "text": answer.text,
            "ids": done.ids,
            "prompt_ids": done.prompt_ids,
            "finish_reason": done.finish_reason,
            "dropped_turns": done.dropped_turns,
            "seed": done.seed,
            "timings": timings._asdict(),
        }
    )


def _stats(timings: Timings) -> str:
    return sentence(
        "status/stats",
        load=f"{timings.load_seconds:.2f}",
        prompt=timings.prompt_tokens,
        cached=timings.cached_tokens,
        prefill=_rate(timings.prompt_tokens - timings.cached_tokens, timings.prefill_seconds),
        reply=timings.reply_tokens,
        decode=_rate(timings.reply_tokens - 1, timings.decode_seconds),  # prefill made the first
        first=f"{timings.first_token_seconds:.3f}",
    )


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f}" if seconds > 0 else "-"
