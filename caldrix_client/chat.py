"""The chat: what is entered is answered or obeyed, until the input ends."""

from __future__ import annotations

from collections.abc import Callable

from caldrix_client import slash
from caldrix_client.answer import Speaker
from caldrix_client.channel import Declined
from caldrix_client.conversation import Conversation, Exchange
from caldrix_client.sampling import OFF
from caldrix_client.system_message import system_message
from caldrix_protocol.refusals import RUN, Refused, sentence


class Chat:
    """One conversation with an open model; `again` opens it with another daemon when that one has gone."""

    def __init__(self, speaker: Speaker, conversation: Conversation, again: Callable[[], Speaker]) -> None:
        self._speaker = speaker
        self._again = again
        self._terminal = speaker.terminal
        self._conversation = conversation
        self._sampling = speaker.command.sampling

    def run(self) -> int:
        """Status 0; 1 when something that was not typed by a person could not be answered or obeyed.

        A person can go on after whatever went wrong with an answer. Raises Refused for what ends a chat, and
        KeyboardInterrupt after Ctrl-C where nobody types.
        """
        refused_any = False
        while True:
            try:
                self._take(self._entered())
            except EOFError:
                return 1 if refused_any and not self._terminal.interactive else 0
            except Refused as refused:
                if refused.kind == RUN:
                    self._recover(refused)
                self._terminal.say(refused.text)
                refused_any = True

    def _recover(self, refused: Refused) -> None:
        if not self._terminal.interactive or refused.code.startswith("client/"):
            raise refused
        if type(refused) is not Declined:
            self._speaker.channel.close()

    def _entered(self) -> str:
        """EOFError when the user leaves: at the end of input, or with Ctrl-C at the prompt."""
        try:
            return self._terminal.ask()
        except KeyboardInterrupt:
            if not self._terminal.interactive:
                raise
            raise EOFError from None

    def _take(self, entered: str) -> None:
        """Answer a message or obey a command; an empty line is nothing."""
        match slash.parse(entered):
            case slash.Say(text) if text.strip():
                self._say(text)
            case slash.Order(name, argument):
                self._obey(name, argument)

    def _say(self, text: str) -> bool:
        """Send a message and remember it with its answer; False if nothing is left to remember."""
        if self._speaker.channel.is_over and not self._reopened():
            return False
        answer = self._speaker.answer(text, self._conversation, self._sampling)
        self._conversation.drop(answer.done.dropped_turns)
        timings = answer.done.timings
        used = max(0, timings.prompt_tokens + timings.reply_tokens - answer.thought)
        dropped = self._conversation.keep(Exchange(text, answer.said, used))
        if dropped:
            self._terminal.say(sentence("notice/forgotten-turns", count=dropped))
        if answer.interrupted and not self._terminal.interactive:
            raise KeyboardInterrupt
        return bool(answer.said)

    def _reopened(self) -> bool:
        """Open the model with another daemon; False if a person stopped that with Ctrl-C."""
        self._speaker.channel.close()
        try:
            self._speaker = self._again()
        except KeyboardInterrupt:
            if not self._terminal.interactive:
                raise
            self._terminal.leave()
            return False
        return True

    def _obey(self, name: str, argument: str | None) -> None:
        if name in KNOBS:
            if argument is not None:
                self._sampling = self._sampling.set(name[1:], argument)
            value = self._sampling.shown(name[1:])
            self._terminal.say(sentence("status/chat-knob", name=name[1:], value=value))
        else:
            ACTIONS[name](self, argument)

    def reset(self, _: str | None) -> None:
        self._conversation.clear()
        self._terminal.say(sentence("status/chat-reset"))

    def undo(self, _: str | None) -> None:
        self._conversation.take_back()
        self._terminal.say(sentence("status/chat-undo", count=len(self._conversation)))

    def regen(self, _: str | None) -> None:
        """The answer that was there stays if no other comes in its place."""
        last = self._conversation.take_back()
        answered = False
        try:
            answered = self._say(last.message)
        finally:
            if not answered:
                self._conversation.keep(last)

    def system(self, argument: str | None) -> None:
        if argument is not None:
            self._speaker.require_system()
            try:
                self._conversation.system = None if argument == OFF else system_message(argument, "/system")
            except KeyboardInterrupt:  # a pipe may be waited for
                if not self._terminal.interactive:
                    raise
                self._terminal.leave()
                return
        self._terminal.say(sentence("status/chat-system", text=self._conversation.system or OFF))

    def context(self, _: str | None) -> None:
        used = 0 if self._speaker.plain_text else self._conversation.tokens
        ctx, reserved = self._speaker.opened.ctx, self._speaker.reserved
        free = max(0, ctx - used - reserved)
        self._terminal.say(sentence("status/chat-context", ctx=ctx, used=used, reserved=reserved, free=free))

    def sampling(self, _: str | None) -> None:
        self._terminal.say(self._sampling.line())

    def help(self, _: str | None) -> None:
        self._terminal.say(slash.help_text())

    def quit(self, _: str | None) -> None:
        raise EOFError


KNOBS = ("/temperature", "/top-k", "/top-p", "/min-p", "/repetition-penalty", "/seed")
ACTIONS: dict[str, Callable[[Chat, str | None], None]] = {
    "/reset": Chat.reset,
    "/undo": Chat.undo,
    "/regen": Chat.regen,
    "/system": Chat.system,
    "/context": Chat.context,
    "/sampling": Chat.sampling,
    "/help": Chat.help,
    "/quit": Chat.quit,
}
