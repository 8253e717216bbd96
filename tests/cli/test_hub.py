"""Models from the hub, from the command line to the hub's record of requests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import hub
from tests.support.changed import Change, changed, contents
from tests.support.cli import Home, Result, finish
from tests.support.hostile import HOSTILE_NAMES
from tests.support.hub_cli import (
    INDEX,
    MODEL,
    NAME,
    NOTHING_ELSE,
    ONE_TOKEN,
    PIN,
    WEIGHTS,
    below,
    indexed,
    model,
    nothing_outside,
    pull,
    refused,
    run,
    start,
)
from tests.support.hub_sockets import Sockets
from tests.support.models import reference


def test_a_repo_is_fetched_once_and_answers_as_its_directory(shared: Home, tmp_path: Path) -> None:
    prompt = reference("tiny-llama")["prompts"][0]
    arguments = ("-p", prompt["prompt"], "--raw", "--json", "--max-tokens", "4")
    with hub.serve({NAME: model()}) as server:
        first = finish(start(shared, tmp_path, server, "run", NAME, *arguments))
        assert first.status == 0, first.err
        assert json.loads(first.out)["ids"] == prompt["generated_ids"][:4]
        assert set(server.files()) == set(contents(MODEL, {}))
        assert server.files("cdn") == ["model.safetensors"]
        assert server.sent("model.safetensors") == len(WEIGHTS)
        asked = len(server.requests)
        second = finish(start(shared, tmp_path, server, "run", NAME, *arguments, HF_HUB_OFFLINE="1"))
        assert (second.status, json.loads(second.out)["ids"]) == (0, prompt["generated_ids"][:4])
        assert len(server.requests) == asked
    said = [line for line in first.err.splitlines() if "download" in line]
    assert said[0].startswith(f"caldrix: {NAME}: downloading ")
    assert all(name in said[0] for name in contents(MODEL, {}))
    assert {line.split()[2] for line in said[1:]} == set(contents(MODEL, {}))
    assert said[-1] == "caldrix: downloaded model.safetensors (240 kB)"
    assert "downloading" not in second.err
    assert "%" not in first.err  # a bar is for a terminal
    snapshots = list((tmp_path / "hf/hub/models--tiny--llama/snapshots").iterdir())
    assert [path.name for path in snapshots] == [model().commit]
    for name, data in contents(MODEL, {}).items():
        assert (snapshots[0] / name).is_symlink()
        assert (snapshots[0] / name).read_bytes() == data


def test_an_alias_is_fetched_at_its_pin(shared: Home, tmp_path: Path) -> None:
    with hub.serve({"HuggingFaceTB/SmolLM2-135M": model(commit=PIN)}) as server:
        result = run(shared, tmp_path, server, "smollm2")
        assert result.status == 0, result.err
        moved = model({"config.json": {"architectures": ["Other"]}})
        server.move("HuggingFaceTB/SmolLM2-135M", moved)
        assert run(shared, tmp_path, server, "smollm2").status == 0
    assert not [request for request in server.requests if "main" in request.target]


def test_a_file_that_is_not_needed_is_not_fetched(shared: Home, tmp_path: Path) -> None:
    extra = dict.fromkeys(("pytorch_model.bin", "model.onnx", "README.md", "onnx/model.safetensors"), b"x")
    with hub.serve({NAME: model(extra)}) as server:
        assert pull(shared, tmp_path, server).status == 0
        assert not set(server.files()) & set(extra)


# --- who may have it ------------------------------------------------------------------------------

NO_ACCESS = "the hub refused the request; the repo does not exist, or it is"


@pytest.mark.parametrize(
    ("more", "token", "words"),
    [
        ({"gated": True}, None, (NO_ACCESS, "gated", "HF_TOKEN")),
        ({"gated": True}, hub.OUTSIDER, ("gated", f"/{NAME}")),
        ({"private": True}, None, (NO_ACCESS, "HF_TOKEN")),
        ({"private": True}, hub.OUTSIDER, (": no such repo or revision on the hub",)),
        ({}, "hf_wrong", ("HF_TOKEN",)),
    ],
)
def test_who_may_not_have_it(
    shared: Home, tmp_path: Path, more: dict[str, Any], token: str | None, words: tuple[str, ...]
) -> None:
    given = {"HF_TOKEN": token} if token else {}
    with hub.serve({NAME: model(**more)}) as server:
        result = run(shared, tmp_path, server, **given)
    refused(result, NAME, *words)
    assert not [request for request in server.requests if request.host != "hub"]
    if token:
        assert token not in result.err


def test_the_reasons_differ(shared: Home, tmp_path: Path) -> None:
    """401 without a token, 401 with a bad one, 403, a missing repo and a missing revision: five sentences."""
    repos = {"tiny/model": model(gated=True), "tiny/other": model()}
    with hub.serve(repos) as server:
        said = [
            run(shared, tmp_path, server, "tiny/model"),
            run(shared, tmp_path, server, "tiny/model", HF_TOKEN="hf_wrong"),
            run(shared, tmp_path, server, "tiny/model", HF_TOKEN=hub.OUTSIDER),
            run(shared, tmp_path, server, "none/model", HF_TOKEN=hub.OUTSIDER),
            run(shared, tmp_path, server, "tiny/other@nowhere"),
        ]
    for result in said:
        refused(result)
    texts = [result.err.splitlines()[-1] for result in said]
    assert ": no such repo or revision on the hub" in texts[3]
    assert "tiny/other@nowhere" in texts[4]
    assert ": no such repo or revision on the hub" in texts[4]
    plain = {
        text.replace("none/model", "").replace("tiny/model", "").replace("tiny/other", "") for text in texts
    }
    assert len(plain) == 5


def test_the_token_goes_to_the_endpoint_alone_and_into_no_log(shared: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: model(gated=True)}) as server:
        server.fail("elsewhere", "tokenizer.json", host="hub")
        server.fail("elsewhere", "model.safetensors", host="cdn")
        result = run(shared, tmp_path, server, HF_TOKEN=hub.MEMBER)
    tokens = {(request.host, request.token) for request in server.requests}
    assert ("hub", hub.MEMBER) in tokens
    assert {token for host, token in tokens if host != "hub"} <= {None}
    assert not [request for request in server.requests if hub.MEMBER in request.target]
    assert hub.MEMBER not in result.err + shared.log.read_text()
    assert not [path for path in below(tmp_path) if hub.MEMBER.encode() in path.read_bytes()]


# --- offline --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "CALDRIX_OFFLINE"])
def test_offline_in_the_client_alone_makes_no_connection(shared: Home, tmp_path: Path, variable: str) -> None:
    with hub.serve({NAME: model()}) as server:
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), server.endpoint)
        for name in (NAME, "smollm2", f"{NAME}@{PIN}"):
            result = run(shared, tmp_path, server, name, **proxies, **{variable: "1", "NO_PROXY": ""})
            refused(result, variable, "is not complete in the Hugging Face cache")
        assert server.connections == 0
        assert run(shared, tmp_path, server, **{variable: "0"}).status == 0


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "CALDRIX_OFFLINE"])
def test_offline_in_the_client_alone_no_process_tries_a_socket(
    home: Home, tmp_path: Path, variable: str
) -> None:
    """Of client, daemon and worker; one that leads nowhere would count too. The daemon lacks the variable."""
    sockets, offline = Sockets(tmp_path), {variable: "1"}
    commands = [("run", NAME, *ONE_TOKEN), ("run", "smollm2", *ONE_TOKEN), ("pull", f"{NAME}@{PIN}")]
    commands += [("models", "plan", NAME), ("models", "pin")]
    with hub.serve({NAME: model()}) as server:

        def command(*arguments: str, **more: str) -> Result:
            return finish(start(home, tmp_path, server, *arguments, **sockets.environment, **more))

        assert command("models", "list").status == 0
        assert sockets.watched("caldrixd")
        for arguments in commands:
            refused(command(*arguments, **offline), variable)
        assert sockets.tried() == []
        assert command("pull", NAME).status == 0
        tried = sockets.tried()
        assert tried
        assert {True} == {"caldrixd.fetcher" in one.command for one in tried}
        assert command("run", NAME, *ONE_TOKEN, **offline).status == 0
        assert command("models", "list", **offline).status == 0
        assert sockets.tried() == tried
    assert all(map(sockets.watched, ("caldrix_client", "caldrixd", "caldrixd.fetcher", "caldrixd.worker")))


def test_offline_a_file_that_is_missing_is_named(shared: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: model()}) as server:
        assert pull(shared, tmp_path, server).status == 0
        asked = server.connections
        (snapshot,) = (tmp_path / "hf/hub/models--tiny--llama/snapshots").iterdir()
        (snapshot / "model.safetensors").unlink()
        result = pull(shared, tmp_path, server, HF_HUB_OFFLINE="1")
        refused(result, "HF_HUB_OFFLINE", "is not complete in the Hugging Face cache", "model.safetensors")
        assert server.connections == asked


# --- the repo is looked at before it is fetched -----------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "unsupported architectures entry GPT2LMHeadModel"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "exactly one is required"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "attention_bias": True},
            "attention_bias true is not implemented for this architecture",
        ),
        ({"transformers_weights": "x.safetensors"}, "transformers_weights names a weights file"),
        ({"auto_map": {"AutoConfig": "configuration.Config"}}, "auto_map names code of the repo"),
        ({"hidden_size": -1}, "hidden_size must be"),
    ],
)
def test_a_bad_config_is_the_only_file_fetched(
    shared: Home, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with hub.serve({NAME: model({"config.json": changes})}) as server:
        refused(run(shared, tmp_path, server), words, NOTHING_ELSE)
        assert server.files() == ["config.json"]
        assert server.files("cdn") == []


@pytest.mark.parametrize(
    ("changes", "words", "files"),
    [
        ({"config.json": None}, "inferno needs config.json, a supported tokenizer and *.safetensors", []),
        (
            {"tokenizer.json": None},
            "inferno needs config.json, a supported tokenizer and *.safetensors",
            None,
        ),
        (
            {"model.safetensors": None, "pytorch_model.bin": b"x"},
            "the repo has no *.safetensors; inferno reads safetensors only",
            None,
        ),
        ({"model.safetensors": None, "model.Q8_0.gguf": b"x"}, "the repo has no *.safetensors", None),
    ],
)
def test_a_repo_that_lacks_files(
    shared: Home, tmp_path: Path, changes: dict[str, Change], words: str, files: list[str] | None
) -> None:
    with hub.serve({NAME: model(changes)}) as server:
        refused(run(shared, tmp_path, server), words)
        assert set(server.files()) <= {"config.json"}
        assert files is None or server.files() == files


@pytest.mark.parametrize(
    ("weight_map", "more", "words"),
    [
        ({}, {}, "names no weight file"),
        ([], {}, ""),
        ({"a": 1}, {}, ""),
        ({"a": "b/part.safetensors"}, {}, "which is not a bare file name"),
        ({"a": "part.bin"}, {}, "which is not a bare file name"),
        ({"a": INDEX}, {}, "which is not a bare file name"),
        ({"a": "part.safetensors", "b": "none.safetensors"}, {}, "weight file(s) that are not present"),
        ({str(i): f"{i}.safetensors" for i in range(4097)}, {}, "4096"),
        ({}, {INDEX: b" " * ((16 << 20) + 1)}, "16777216"),
        ({}, {INDEX: b"[" * 100_000}, ""),
        ({}, {INDEX: b"\xff\xfe"}, ""),
    ],
)
def test_an_index_that_is_refused(
    shared: Home, tmp_path: Path, weight_map: Any, more: dict[str, Change], words: str
) -> None:
    with hub.serve({NAME: indexed(weight_map, more)}) as server:
        refused(run(shared, tmp_path, server), INDEX, words)
        assert not [name for name in server.files() if name.endswith(".safetensors")]


def test_weights_in_the_file_an_index_names(shared: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: indexed({"a": "part.safetensors"}, {"more.safetensors": WEIGHTS})}) as server:
        assert pull(shared, tmp_path, server).status == 0
        assert server.files("cdn") == ["part.safetensors"]


def test_weights_in_every_file_without_an_index(shared: Home, tmp_path: Path) -> None:
    changes = {"model.safetensors": None, "weights.safetensors": WEIGHTS, "sub/other.safetensors": WEIGHTS}
    with hub.serve({NAME: model(changes)}) as server:
        assert pull(shared, tmp_path, server).status == 0
        assert server.files("cdn") == ["weights.safetensors"]


# --- hostile names ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_hostile_name_in_the_index(shared: Home, tmp_path: Path, name: str) -> None:
    with hub.serve({NAME: indexed({"a": name}, {name: WEIGHTS} if name != INDEX else {})}) as server:
        result = run(shared, tmp_path, server)
        refused(result, INDEX, "which is not a bare file name")
        assert result.err.isascii()
        assert "\x1b" not in result.err
        assert server.files("cdn") == []
    nothing_outside(tmp_path)


def test_hostile_names_in_the_listing(shared: Home, tmp_path: Path) -> None:
    """Beside good weights such files are not asked for; alone they are no weights."""
    names = {name: WEIGHTS for name in HOSTILE_NAMES if name != INDEX}
    with hub.serve({NAME: model(names)}) as server:
        assert pull(shared, tmp_path, server).status == 0
        assert server.files("cdn") == ["model.safetensors"]
    with hub.serve({NAME: model({"model.safetensors": None, **names})}) as server:
        refused(
            pull(shared, tmp_path, server), "the repo has no *.safetensors; inferno reads safetensors only"
        )
        assert server.files("cdn") == []
    nothing_outside(tmp_path)


def test_twins_but_for_their_case(shared: Home, tmp_path: Path) -> None:
    twins = ("PART.safetensors", "part.safetensors")
    repo = indexed(dict(zip("ab", twins, strict=True)), dict.fromkeys(twins, WEIGHTS))
    with hub.serve({NAME: repo}) as server:
        refused(run(shared, tmp_path, server), INDEX, *twins)
        assert server.files("cdn") == []


@pytest.mark.parametrize("there", [False, True])
def test_links_in_the_cache_that_lead_outside(shared: Home, tmp_path: Path, there: bool) -> None:
    """Nothing is written, changed or removed where they lead, whether or not a file is there."""
    outside = tmp_path / "outside"
    outside.mkdir()
    names = ("config.json", "tokenizer.json", "model.safetensors")
    snapshot = tmp_path / "hf/hub/models--tiny--llama/snapshots" / model().commit
    snapshot.mkdir(parents=True)
    for name in names:
        (snapshot / name).symlink_to(outside / name)
        if there:
            (outside / name).write_text("the user's own")
    with hub.serve({NAME: model()}) as server:
        result = pull(shared, tmp_path, server)
    assert result.status in (0, 1)
    assert {path.name: path.read_text() for path in below(outside)} == (
        dict.fromkeys(names, "the user's own") if there else {}
    )


# --- what does not fit ------------------------------------------------------------------------------


def test_a_model_too_large_for_memory(shared: Home, tmp_path: Path) -> None:
    """A config of 160 GiB of weights is enough to say so, with both numbers."""
    huge = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 33, "vocab_size": 128256}
    with hub.serve({NAME: model({"config.json": huge}, sizes={"model.safetensors": 1 << 30})}) as server:
        result = run(shared, tmp_path, server)
        refused(result, NAME, "MB of memory", "MB are free")
        assert server.files("cdn") == []
    (needed,) = re.findall(r"needs (\d+) MB", result.err)
    assert int(needed) > (160 << 30) // 10**6


def test_files_too_large_for_the_disk(shared: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: model(sizes={"model.safetensors": 1 << 50})}) as server:
        needed = (1 << 50) // 10**6 + 1
        refused(run(shared, tmp_path, server), NAME, f"need {needed} MB of disk at ", "MB are free")
        assert server.files("cdn") == []


# --- tokenizers -------------------------------------------------------------------------------------

_TOKENIZER = json.loads((MODEL / "tokenizer.json").read_bytes())["model"]
VOCABULARY = json.dumps(_TOKENIZER["vocab"]).encode()
MERGES = "".join(f"{' '.join(pair)}\n" for pair in [["#version:", "0.2"], *_TOKENIZER["merges"]]).encode()


def untold(**config: Any) -> dict[str, Change]:
    """The tiny tokenizer as vocab.json and merges.txt, and what tokenizer_config.json says of it."""
    said = {"chat_template": None, "unk_token": "<|endoftext|>", **config}
    return {
        "tokenizer.json": None,
        "vocab.json": VOCABULARY,
        "merges.txt": MERGES,
        "tokenizer_config.json": said,
    }


REFUSED_TOKENIZERS: dict[str, tuple[dict[str, Change], str]] = {
    "sentencepiece": ({"tokenizer.json": None, "tokenizer.model": b"x"}, "which inferno does not convert"),
    "wordpiece": ({"tokenizer.json": None, "vocab.txt": b"x"}, "which inferno does not convert"),
    "class": (untold(tokenizer_class="BertTokenizer"), "whose vocab.json and merges.txt inferno"),
    "option": (
        untold(tokenizer_class="Qwen2Tokenizer", errors="strict"),
        "which inferno cannot reproduce exactly",
    ),
    "merges": (
        untold(tokenizer_class="Qwen2Tokenizer") | {"merges.txt": MERGES + b"zzzz yyyy\n"},
        "which is not in vocab.json",
    ),
    "no class": (
        untold(tokenizer_class=None),
        "inferno does not guess which the model was trained with",
    ),
}


@pytest.mark.parametrize("case", REFUSED_TOKENIZERS)
def test_a_tokenizer_that_is_refused(shared: Home, tmp_path: Path, case: str) -> None:
    changes, words = REFUSED_TOKENIZERS[case]
    with hub.serve({NAME: model(changes)}) as server:
        result = run(shared, tmp_path, server)
        refused(result, "the repo has no tokenizer.json, and ", words)
        assert not [name for name in server.files() if name.endswith(".safetensors")]
        if case in ("sentencepiece", "wordpiece"):
            assert NOTHING_ELSE in result.err
            assert server.files() == ["config.json"]
    directory = changed(MODEL, tmp_path / "model", changes)
    local = shared.caldrix("run", str(directory), *ONE_TOKEN)
    storage = tmp_path / "other/hub/models--tiny--llama"
    (storage / "refs").mkdir(parents=True)
    (storage / "refs/main").write_text(PIN)
    (storage / "snapshots").mkdir()
    changed(MODEL, storage / "snapshots" / PIN, changes)
    home = str(tmp_path / "other")
    offline = shared.caldrix("run", NAME, *ONE_TOKEN, HF_HUB_OFFLINE="1", HF_HOME=home)
    for result in (local, offline):
        refused(result, "the model has no tokenizer.json, and ", words)
        assert "downloaded" not in result.err


# --- adapters ---------------------------------------------------------------------------------------


def test_an_adapter_with_its_base_models_weights(shared: Home, tmp_path: Path) -> None:
    adapter: dict[str, Change] = {"adapter_config.json": {"base_model_name_or_path": "tiny/base"}}
    with hub.serve({NAME: model(adapter), "tiny/base": model()}) as server:
        refused(
            pull(shared, tmp_path, server), "inferno does not apply an adapter to a repo that", "tiny/base"
        )
        assert server.files("cdn") == []
    weights = bytes([WEIGHTS[-1] ^ 1])
    merged: dict[str, Change] = {**adapter, "model.safetensors": WEIGHTS[:-1] + weights}
    with hub.serve({NAME: model(merged), "tiny/base": model()}) as server:
        assert pull(shared, tmp_path, server).status == 0
