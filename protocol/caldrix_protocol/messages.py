"""Every message of the protocol: its fields, their checks, and which way it travels.

A message is a named tuple whose fields carry their check in the annotation (a frozen dataclass would
be the house style, but its import and class creation cost a warm run 30 ms of 80). On the wire it is
one map with the key "type". Requests refuse unknown fields; events ignore them, so that a newer daemon can
add fields. A field without a default must be present.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from caldrix_protocol.schema import (
    BadValue,
    Described,
    above_zero,
    any_of,
    binary,
    flag,
    integer,
    list_of,
    map_of,
    one_of,
    optional,
    real,
    record,
    text,
)

LIMIT_32 = 2**31 - 1
LIMIT_63 = 2**63 - 1
LIMIT_64 = 2**64 - 1
MAX_FLOAT = 1.7976931348623157e308
MAX_STOPS = 16
MAX_STOP = 1024
MAX_TEXT = 1 << 20
MAX_BLOB = 8 << 20
MAX_SENTENCE = 64 << 10


_ID = integer(0, LIMIT_63)
_COUNT = integer(0, LIMIT_63)
_TOKENS = list_of(integer(0, LIMIT_32), 1 << 20)
_SEED = optional(integer(0, LIMIT_64))
_SECONDS = real(0.0, 1e12)
_VERSION = list_of(integer(0, 65535), 2, least=2)
_NAME = text(512)
_PATH = text(4096)
_SENTENCE = text(MAX_SENTENCE)
_VALUE = any_of(
    "text, integer or number",
    {str: _SENTENCE, int: integer(-(2**63), 2**64 - 1), float: real(-1e300, 1e300)},
)
_FIELDS = map_of(_VALUE, 64)
_ENVIRONMENT = map_of(text(32 << 10), 32)
_BATCH = integer(1, 8)
_ISA = one_of("native", "x86-64-v2", "x86-64-v3", "x86-64-v4")
_KERNELS = one_of("auto", "numba", "c")


_TEXT_PART = record({"type": one_of("text"), "text": text(MAX_TEXT)}, strict=True)
_BLOB_PART = record({"type": one_of("text"), "blob": _ID}, strict=True)


def _content_part(value: Any) -> Any:
    """{"type": "text", "text": ...} or, for text over 1 MiB, {"type": "text", "blob": id}."""
    return (_BLOB_PART if type(value) is dict and "blob" in value else _TEXT_PART)(value)


_CONTENT = list_of(Described("text part: {type: text, text} or {type: text, blob: id}", _content_part), 64)
_TURN = record({"role": one_of("system", "user", "assistant"), "content": _CONTENT}, strict=True)


# --- opening a connection ---------------------------------------------------------------------


class Hello(NamedTuple):
    """First frame of a client. `protocol` is (major, minor)."""

    protocol: Annotated[tuple[int, ...], _VERSION]
    version: Annotated[str, _NAME]
    pid: Annotated[int, _ID]
    features: Annotated[tuple[str, ...], list_of(_NAME, 64)] = ()


class Welcome(NamedTuple):
    """The daemon's answer to `hello`; the connection is ready for requests after it."""

    protocol: Annotated[tuple[int, ...], _VERSION]
    version: Annotated[str, _NAME]
    pid: Annotated[int, _ID]
    features: Annotated[tuple[str, ...], list_of(_NAME, 64)] = ()


# --- requests ---------------------------------------------------------------------------------


class Open(NamedTuple):
    """Resolve and load a model. Events, then `opened` and `done`, or `refused`.

    `model` is an absolute directory path (starts with "/"), an alias or a repo id. `environment`
    holds the client's own values of the variables that decide caches, hub and proxies.
    `threads` 0 means the lane's default. `ctx` is in tokens; nil means the default, which a model made for
    fewer makes smaller. At most `max_batch` sequences share a step. `cpu_isa` and `cpu_kernels` say which
    code the CPU lane runs.
    """

    model: Annotated[str, _PATH]
    environment: Annotated[dict[str, str], _ENVIRONMENT]
    backend: Annotated[str, one_of("auto", "hip", "metal", "cpu")] = "auto"
    ctx: Annotated[int | None, optional(integer(1, LIMIT_32))] = None
    dtype: Annotated[str, one_of("f32", "bf16")] = "f32"
    threads: Annotated[int, integer(0, 4096)] = 0
    max_batch: Annotated[int, _BATCH] = 8
    cpu_isa: Annotated[str, _ISA] = "native"
    cpu_kernels: Annotated[str, _KERNELS] = "auto"


class Generate(NamedTuple):
    """Answer a conversation (`turns`) or continue plain text (`raw`); exactly one is given.

    Special tokens written in `raw` are parsed as such, and the tokenizer's own BOS rule applies.
    `max_tokens` nil means until the end token or a full context. `temperature` 0 takes the most likely token
    of those that the other knobs leave; without a `seed` each reply draws from fresh entropy. The reply ends
    before the first of the `stop` texts. `thinking` asks the chat template for a reply with or without it.
    """

    handle: Annotated[int, _ID]
    turns: Annotated[tuple[dict[str, Any], ...] | None, optional(list_of(_TURN, 4096))] = None
    raw: Annotated[tuple[dict[str, Any], ...] | None, optional(_CONTENT)] = None
    max_tokens: Annotated[int | None, optional(integer(1, LIMIT_63))] = None
    temperature: Annotated[float, real(0.0, MAX_FLOAT)] = 0.0
    top_k: Annotated[int, integer(0, LIMIT_32)] = 0
    top_p: Annotated[float, above_zero(1.0)] = 1.0
    min_p: Annotated[float, real(0.0, 1.0)] = 0.0
    repetition_penalty: Annotated[float, above_zero(MAX_FLOAT)] = 1.0
    seed: Annotated[int | None, _SEED] = None
    stop: Annotated[tuple[str, ...], list_of(text(MAX_STOP, least=1), MAX_STOPS)] = ()
    thinking: Annotated[bool | None, optional(flag())] = None


class Blob(NamedTuple):
    """Bytes for the next request, up to 8 MiB a frame; frames of one id are joined in order."""

    id: Annotated[int, _ID]
    data: Annotated[bytes, binary(MAX_BLOB)]


class Cancel(NamedTuple):
    """Stop the active request; it still ends with `done` (finish_reason "cancelled") or `refused`."""


class Ps(NamedTuple):
    """List loaded models: one `loaded` event each, then `done`."""


class Stop(NamedTuple):
    """Unload one model (named as `ps` names it), all of them (nil), or end the daemon.

    With `if_idle` the daemon ends only when nobody uses it.
    """

    model: Annotated[str | None, optional(_PATH)] = None
    daemon: Annotated[bool, flag()] = False
    if_idle: Annotated[bool, flag()] = False


class Doctor(NamedTuple):
    """Probe every lane: one `lane` event each, then `done`."""


class Pull(NamedTuple):
    """Fetch a model, or convert it, without loading it. Events as for `open`, then `done` or `refused`."""

    model: Annotated[str, _PATH]
    environment: Annotated[dict[str, str], _ENVIRONMENT]


class Plan(NamedTuple):
    """Say what `open` with these fields would say of memory and disk: `verdict`, then `done` or `refused`.

    Of a model that is not in the cache all but the weights is fetched.
    """

    model: Annotated[str, _PATH]
    environment: Annotated[dict[str, str], _ENVIRONMENT]
    backend: Annotated[str, one_of("auto", "hip", "metal", "cpu")] = "auto"
    ctx: Annotated[int | None, optional(integer(1, LIMIT_32))] = None
    dtype: Annotated[str, one_of("f32", "bf16")] = "f32"
    threads: Annotated[int, integer(0, 4096)] = 0
    max_batch: Annotated[int, _BATCH] = 8
    cpu_isa: Annotated[str, _ISA] = "native"
    cpu_kernels: Annotated[str, _KERNELS] = "auto"


class Models(NamedTuple):
    """List the aliases and what else the caches hold: one `known` each, then `done`."""

    environment: Annotated[dict[str, str], _ENVIRONMENT]


class Remove(NamedTuple):
    """Remove a model from the cache: `removal`, then `done` or `refused`. Unless `really`, only say what."""

    model: Annotated[str, _PATH]
    environment: Annotated[dict[str, str], _ENVIRONMENT]
    really: Annotated[bool, flag()] = False


class Pin(NamedTuple):
    """Ask the hub which commit each alias's repo is at: one `known` each, then `done` or `refused`."""

    environment: Annotated[dict[str, str], _ENVIRONMENT]


# --- events -----------------------------------------------------------------------------------


class Status(NamedTuple):
    """A status line; `code` names its row in the refusal table, `text` is the finished sentence."""

    code: Annotated[str, _NAME]
    text: Annotated[str, _SENTENCE]
    fields: Annotated[dict[str, Any], _FIELDS]


class Notice(NamedTuple):
    """Something the user should know once; the request goes on."""

    code: Annotated[str, _NAME]
    text: Annotated[str, _SENTENCE]
    fields: Annotated[dict[str, Any], _FIELDS]


class Progress(NamedTuple):
    """How far a long step is: `done` of `total` units ("bytes", "tokens", "tensors"); total 0 = unknown."""

    what: Annotated[str, _NAME]
    done: Annotated[int, _COUNT]
    total: Annotated[int, _COUNT]
    unit: Annotated[str, _NAME] = "bytes"


class Opened(NamedTuple):
    """The model is loaded; `handle` is good on this connection until it closes."""

    handle: Annotated[int, _ID]
    model: Annotated[str, _PATH]
    lane: Annotated[str, _NAME]
    settings: Annotated[str, _SENTENCE]
    ctx: Annotated[int, _COUNT]
    chat_template: Annotated[bool, flag()]
    load_seconds: Annotated[float, _SECONDS] = 0.0


class Delta(NamedTuple):
    """More of the reply: whole characters of text, and the ids that completed them."""

    text: Annotated[str, text(MAX_TEXT)]
    ids: Annotated[tuple[int, ...], _TOKENS] = ()


class Loaded(NamedTuple):
    """One loaded model, for `ps`. `variant` names the lane's code where it is not the usual one."""

    model: Annotated[str, _PATH]
    lane: Annotated[str, _NAME]
    state: Annotated[str, _NAME]
    pid: Annotated[int, _ID]
    size: Annotated[int, _COUNT]
    leases: Annotated[int, _COUNT]
    idle_seconds: Annotated[float, _SECONDS]
    variant: Annotated[str, _NAME] = ""


class Lane(NamedTuple):
    """One lane, for `doctor`: usable, or every reason why not."""

    name: Annotated[str, _NAME]
    usable: Annotated[bool, flag()]
    reasons: Annotated[tuple[str, ...], list_of(_SENTENCE, 64)] = ()
    details: Annotated[tuple[str, ...], list_of(_SENTENCE, 64)] = ()
    images: Annotated[bool, flag()] = False
    speculation: Annotated[bool, flag()] = False


class Verdict(NamedTuple):
    """What a model needs, in bytes, and what there is.

    `needed` is the most memory at once: `process`, `vocabulary`, `weights` as they are held, and the larger
    of `passing`, while they are loaded, and `state` with `activations`. `together` is the same with the
    `state` of `max_batch` conversations. `largest_ctx` 0: no context fits.
    """

    model: Annotated[str, _PATH]
    lane: Annotated[str, _NAME]
    ctx: Annotated[int, _COUNT]
    largest_ctx: Annotated[int, _COUNT]
    needed: Annotated[int, _COUNT]
    max_batch: Annotated[int, _BATCH]
    together: Annotated[int, _COUNT]
    free: Annotated[int, _COUNT]
    process: Annotated[int, _COUNT]
    vocabulary: Annotated[int, _COUNT]
    weights: Annotated[int, _COUNT]
    passing: Annotated[int, _COUNT]
    state: Annotated[int, _COUNT]
    activations: Annotated[int, _COUNT]
    disk: Annotated[int, _COUNT]
    free_disk: Annotated[int, _COUNT]


class Known(NamedTuple):
    """A model with a name. `size` is what the cache has of its repo, in bytes, `state` "", "part" or "whole".

    `alias` is "" for a repo that has none; `revision` "" where the cache knows none, or for the demo model.
    """

    alias: Annotated[str, _NAME]
    repo: Annotated[str, _NAME]
    revision: Annotated[str, _NAME]
    licence: Annotated[str, _NAME]
    size: Annotated[int, _COUNT]
    state: Annotated[str, one_of("", "part", "whole")]


class Removal(NamedTuple):
    """What `remove` removes: a directory of the cache with so many bytes of files."""

    path: Annotated[str, _PATH]
    size: Annotated[int, _COUNT]


class Timings(NamedTuple):
    """Seconds and token counts of one reply. `cached_tokens` of the prompt needed no prefill."""

    load_seconds: Annotated[float, _SECONDS] = 0.0
    prompt_tokens: Annotated[int, _COUNT] = 0
    cached_tokens: Annotated[int, _COUNT] = 0
    prefill_seconds: Annotated[float, _SECONDS] = 0.0
    reply_tokens: Annotated[int, _COUNT] = 0
    decode_seconds: Annotated[float, _SECONDS] = 0.0
    first_token_seconds: Annotated[float, _SECONDS] = 0.0


def checks(message: type[Any]) -> dict[str, Described]:
    """Field name -> check of one message class."""
    return {name: note.__metadata__[0] for name, note in message.__annotations__.items()}


_TIMINGS = record(checks(Timings), strict=False, defaults=Timings._field_defaults)


def _timings(value: Any) -> Timings:
    return Timings(**_TIMINGS(value))


class Done(NamedTuple):
    """The request ended well. Only `generate` fills the fields.

    `finish_reason`: "stop" (end token or stop text), "length" (max_tokens or full context), "cancelled", ""
    otherwise. `seed` is the one that was drawn with; nil when nothing was.
    """

    finish_reason: Annotated[str, one_of("", "stop", "length", "cancelled")] = ""
    ids: Annotated[tuple[int, ...], _TOKENS] = ()
    prompt_ids: Annotated[tuple[int, ...], _TOKENS] = ()
    dropped_turns: Annotated[int, _COUNT] = 0
    timings: Annotated[Timings, Described("map, see Timings", _timings)] = Timings()
    seed: Annotated[int | None, _SEED] = None


class Refusal(NamedTuple):
    """The request ended without its result. `kind` decides the exit status (refusals.EXIT_STATUS)."""

    code: Annotated[str, _NAME]
    kind: Annotated[str, one_of("usage", "run", "message", "image")]
    text: Annotated[str, _SENTENCE]
    fields: Annotated[dict[str, Any], _FIELDS]


# --- between the daemon and a worker ------------------------------------------------------------


class Load(NamedTuple):
    """First frame to a worker: load this directory. Answered by events, then `ready` or `refused`.

    `model` is what people read of it, as `ps` has it.
    """

    model: Annotated[str, _PATH]
    directory: Annotated[str, _PATH]
    lane: Annotated[str, one_of("cpu", "hip", "metal")]
    isa: Annotated[str, _ISA] = "native"
    kernels: Annotated[str, _KERNELS] = "auto"


class Ready(NamedTuple):
    """The worker holds the model."""

    settings: Annotated[str, _SENTENCE]
    max_ctx: Annotated[int, _COUNT]
    chat_template: Annotated[bool, flag()]
    size: Annotated[int, _COUNT]


class Begin(NamedTuple):
    """Start answering `request` as stream `stream`, with the settings of the handle it came by.

    `request` is the encoded `generate`, as the client sent it. No stream number is used twice.
    """

    stream: Annotated[int, _ID]
    request: Annotated[bytes, binary(MAX_TEXT)]
    ctx: Annotated[int, integer(1, LIMIT_32)]
    dtype: Annotated[str, one_of("f32", "bf16")]
    threads: Annotated[int, integer(0, 4096)]
    max_batch: Annotated[int, _BATCH] = 8


class Attach(NamedTuple):
    """One blob frame of the request that `begin` will start as `stream`; same rules as `blob`."""

    stream: Annotated[int, _ID]
    id: Annotated[int, _ID]
    data: Annotated[bytes, binary(MAX_BLOB)]


class Abort(NamedTuple):
    """Cancel one stream."""

    stream: Annotated[int, _ID]


class Relay(NamedTuple):
    """An event of one stream, as the client is to see it: one encoded message."""

    stream: Annotated[int, _ID]
    event: Annotated[bytes, binary(MAX_BLOB)]


# --- between the daemon and a fetcher -----------------------------------------------------------


class Planned(NamedTuple):
    """All but the weights of a model is in `directory`; the fetcher waits to be told to go on.

    `weight_bytes` are those of all its weight files, `missing_bytes` what is still to come of them.
    """

    directory: Annotated[str, _PATH]
    weight_bytes: Annotated[int, _COUNT]
    missing_bytes: Annotated[int, _COUNT]


Message = Any  # one of the named tuples of this module


def _generate_rule(message: Generate) -> None:
    if (message.turns is None) == (message.raw is None):
        raise BadValue("needs exactly one of turns and raw")


def _stop_rule(message: Stop) -> None:
    if message.daemon and message.model is not None:
        raise BadValue("takes a model or daemon, not both")
    if message.if_idle and not message.daemon:
        raise BadValue("takes if_idle with daemon only")


# Fields that came after version 1.0: message -> field -> the minor version that has it.
SINCE: dict[type[Any], dict[str, int]] = {
    Open: {"max_batch": 1, "cpu_isa": 1, "cpu_kernels": 1},
    Generate: {
        "temperature": 1,
        "top_k": 1,
        "top_p": 1,
        "min_p": 1,
        "repetition_penalty": 1,
        "seed": 1,
        "stop": 1,
        "thinking": 1,
    },
    Stop: {"if_idle": 1},
    Done: {"seed": 1},
    Pull: {"model": 1},
    Plan: {"model": 1},
    Models: {"environment": 1},
    Remove: {"model": 1},
    Pin: {"environment": 1},
}

# What a field's own check cannot see: rules over whole messages.
RULES: dict[type[Any], Callable[[Any], None]] = {Generate: _generate_rule, Stop: _stop_rule}

REQUESTS: dict[str, type[Any]] = {
    "hello": Hello,
    "open": Open,
    "generate": Generate,
    "blob": Blob,
    "cancel": Cancel,
    "ps": Ps,
    "stop": Stop,
    "doctor": Doctor,
    "pull": Pull,
    "plan": Plan,
    "models": Models,
    "remove": Remove,
    "pin": Pin,
}
EVENTS: dict[str, type[Any]] = {
    "welcome": Welcome,
    "status": Status,
    "notice": Notice,
    "progress": Progress,
    "opened": Opened,
    "delta": Delta,
    "loaded": Loaded,
    "lane": Lane,
    "verdict": Verdict,
    "known": Known,
    "removal": Removal,
    "done": Done,
    "refused": Refusal,
}
TO_WORKER: dict[str, type[Any]] = {"load": Load, "attach": Attach, "begin": Begin, "abort": Abort}
FROM_WORKER: dict[str, type[Any]] = {
    "status": Status,
    "notice": Notice,
    "progress": Progress,
    "ready": Ready,
    "refused": Refusal,
    "relay": Relay,
}
FROM_FETCHER: dict[str, type[Any]] = {
    "status": Status,
    "notice": Notice,
    "progress": Progress,
    "planned": Planned,
    "known": Known,
    "done": Done,
    "refused": Refusal,
}
