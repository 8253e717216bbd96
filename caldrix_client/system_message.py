"""The system message as it is written on the command line and in a chat."""

from __future__ import annotations

from caldrix_protocol.refusals import Refused

MAX_FILE = 8 << 20


def system_message(argument: str, name: str = "--system") -> str:
    """The argument, or after `@` what a file holds, whose last newline does not count; `@@` is one `@`.

    `name` is what it was written after. Raises Refused (usage/needs-value, usage/system-file,
    usage/prompt-utf8).
    """
    if not argument.startswith("@"):
        return argument
    if argument.startswith("@@"):
        return argument[1:]
    path = argument[1:]
    if not path:
        raise Refused("usage/needs-value", flag=f"{name} @")
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise Refused("usage/system-file", name=name, path=path, reason=error.strerror) from None
    except ValueError as error:  # a null character in the name
        raise Refused("usage/system-file", name=name, path=path, reason=error) from None
    if len(data) > MAX_FILE:
        raise Refused("usage/system-file", name=name, path=path, reason=f"over {MAX_FILE} bytes")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise Refused("usage/prompt-utf8", what=path) from None
