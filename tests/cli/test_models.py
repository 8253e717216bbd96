"""The model argument in its documented order, and what is refused of a directory."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.changed import Change, changed
from tests.support.cli import COMMAND, Home, Result, finish
from tests.support.models import tiny

MODEL = tiny("tiny-llama")
NOT_A_MODEL = " is not a directory, an alias ("
NO_DIRECTORY = ": no such directory"
ONE_TOKEN = ("-p", "hi", "--max-tokens", "1")
ALIASES = (
    "smollm2, smollm2-instruct, llama-8b, qwen3-0.6b, qwen3-8b, qwen3-30b-a3b, decider-0.8b, "
    "smolvlm-256m, demo"
)
ADAPTER: dict[str, Change] = {
    "adapter_config.json": {"base_model_name_or_path": "owner/base"},
    "adapter_model.safetensors": b"",
}
# No alias or repo id may reach a network here.
OFFLINE = {"HF_HUB_OFFLINE": "1"}


def run_in(directory: Path, home: Home, *arguments: str, prefix: tuple[str, ...] = ()) -> Result:
    """The command in a working directory of the test's choice, without its line on a daemon it started."""
    process = subprocess.Popen(
        (*prefix, *COMMAND, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**home.environment, **OFFLINE, "HF_HOME": str(directory / "hf"), "HOME": str(directory)},
        cwd=directory,
    )
    result = finish(process)
    said = result.err.splitlines(keepends=True)
    return result._replace(err="".join(line for line in said if "started caldrixd" not in line))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories that are named like anything else the argument can be, with nothing in them."""
    place = tmp_path_factory.mktemp("place")
    for name in ("smollm2", "owner/name", "owner/name@main", "~", "~name", "plain"):
        (place / name).mkdir(parents=True)
    (place / "linked").symlink_to(place / "plain")
    (place / "around").symlink_to(place / "around")
    (place / "qwen3-8b").write_text("a file named as an alias")
    (place / "owner" / "file").write_text("a file named as a repo id")
    (place / "file").write_text("a file")
    (place / "files").mkdir()
    for name in ("model.gguf", "files/model.gguf", "files/model.bin", "weights.safetensors"):
        (place / name).write_text("weights in one file")
    return place


@pytest.mark.parametrize(
    ("argument", "directory"),
    [
        ("smollm2", "smollm2"),
        ("owner/name", "owner/name"),
        ("owner/name/", "owner/name"),
        ("owner//name", "owner/name"),
        ("owner/", "owner"),
        ("owner/name@main", "owner/name@main"),
        ("./smollm2", "smollm2"),
        ("./smollm2/", "smollm2"),
        ("plain", "plain"),
        ("plain/", "plain"),
        ("plain//", "plain"),
        ("plain/../plain", "plain"),
        ("linked", "linked"),
        ("~", "~"),
        ("~/", "~"),
        ("~name", "~name"),
    ],
)
def test_an_existing_directory_always_wins(shared: Home, place: Path, argument: str, directory: str) -> None:
    result = run_in(place, shared, "run", argument, *ONE_TOKEN)
    assert result == taken(place / directory)


def taken(directory: Path) -> Result:
    """What is said of an empty directory, once it is the one that was meant."""
    said = (
        f"reading the directory {directory}",
        f"{directory}: inferno needs config.json, a supported tokenizer and *.safetensors",
    )
    return Result(1, "", "".join(f"caldrix: {line}\n" for line in said))


def test_absolute_and_parent_directories(shared: Home, place: Path) -> None:
    for argument in (str(place / "plain"), f"{place}/plain/", f"../{place.name}/plain"):
        assert run_in(place, shared, "run", argument, *ONE_TOKEN) == taken(place / "plain")


@pytest.mark.parametrize(
    "argument",
    [
        *("./none", "./smollm2-instruct", "./owner/none", "../none", "../file"),
        *("/none/there", "/dev/null"),
        *("~/plain", "~/none", "~root", "~none/x", "./around"),
    ],
)
def test_what_looks_like_a_path_and_is_none(shared: Home, place: Path, argument: str) -> None:
    result = run_in(place, shared, "run", argument, *ONE_TOKEN)
    assert result == Result(1, "", f"caldrix: {argument}{NO_DIRECTORY}\n")


@pytest.mark.parametrize(
    ("argument", "kind"),
    [
        *(("./file", "a file"), ("./qwen3-8b", "a file"), ("model.gguf", "a GGUF file")),
        *(("./model.gguf", "a GGUF file"), ("files/model.gguf", "a GGUF file")),
        *(("weights.safetensors", "a file"), ("files/model.bin", "a pickled file of PyTorch")),
    ],
)
def test_a_file_is_no_model(shared: Home, place: Path, argument: str, kind: str) -> None:
    result = run_in(place, shared, "run", argument, *ONE_TOKEN)
    said = (
        f"{argument}{NO_DIRECTORY}; it is {kind}, and inferno reads directories of config.json, a tokenizer"
    )
    assert result == Result(1, "", f"caldrix: {said} and *.safetensors\n")


@pytest.mark.parametrize(
    ("argument", "directory"),
    [
        ("./tiny/config.json", "./tiny"),
        ("tiny/tokenizer.json", "tiny"),
        ("tiny/../tiny/model.safetensors", "tiny/../tiny"),
    ],
)
def test_a_file_of_a_model_leads_to_its_directory(
    shared: Home, tmp_path: Path, argument: str, directory: str
) -> None:
    said = f"{NO_DIRECTORY}; it is a file of a model: give its directory, "
    shutil.copytree(MODEL, tmp_path / "tiny")
    for command in ("run", "pull", "models plan"):
        result = run_in(tmp_path, shared, *command.split(), argument)
        assert result == Result(1, "", f"caldrix: {argument}{said}{directory}\n")
    inside = run_in(tmp_path / "tiny", shared, "run", "config.json", *ONE_TOKEN)
    assert inside == Result(1, "", f"caldrix: config.json{said}.\n")
    (tmp_path / "notes.json").write_text("{}")
    assert NOT_A_MODEL in run_in(tmp_path, shared, "run", "notes.json", *ONE_TOKEN).err


def test_near_misses_are_told_what_may_be_meant(shared: Home, place: Path) -> None:
    for argument, nearest in (("smolm2", "smollm2"), ("https://huggingface.co/a/b", "a/b")):
        result = run_in(place, shared, "run", argument, *ONE_TOKEN)
        said = f"{argument}{NOT_A_MODEL}{ALIASES}) or a Hugging Face repo id; did you mean {nearest}?"
        assert result == Result(1, "", f"caldrix: {said}\n")


@pytest.mark.parametrize(
    "argument",
    [
        *("file", "none", "SMOLLM2", "smollm", "smollm2@main", "around", "..x", ".hidden"),
        *("none/", "none//name", "owner/name/more", "none/name/", "none/name@", "@main", "none@main"),
        *("none/na me", "none/name@a b", "none/name?", "none/nаme", "none\\name", "none/name\n"),
        *("hf.co/none/name", "https://huggingface.co/none/name", "none/..", "none/.", "a" * 97 + "/name"),
    ],
)
def test_what_is_no_name_at_all(shared: Home, place: Path, argument: str) -> None:
    result = run_in(place, shared, "run", argument, *ONE_TOKEN)
    assert NOT_A_MODEL + ALIASES + ")" in result.err
    assert (result.status, result.out) == (1, "")
    assert result.err.count("caldrix: ") == 1


@pytest.mark.parametrize(
    "argument",
    [
        "smollm2-instruct",
        "qwen3-8b",  # a file of that name is no directory
        "decider-0.8b",
        "owner/file",
        "none/name",
        "none/name@v1.0",
        "none/name@refs/pr/1",
    ],
)
def test_an_alias_or_a_repo_is_looked_for_in_the_cache(shared: Home, place: Path, argument: str) -> None:
    result = run_in(place, shared, "run", argument, *ONE_TOKEN)
    said = f"caldrix: HF_HUB_OFFLINE is set, and {argument} is not complete in the Hugging Face cache"
    assert result.err.startswith(said)
    assert (result.status, result.out) == (1, "")


def test_a_directory_that_cannot_be_read(home: Home, tmp_path: Path) -> None:
    """Root reads everything but for its capabilities, which the command and its daemon go without here."""
    secret = tmp_path / "secret"
    secret.mkdir(0)
    prefix = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
    result = run_in(tmp_path, home, "run", "./secret", *ONE_TOKEN, prefix=prefix)
    secret.chmod(0o700)
    assert result == Result(1, "", f"caldrix: caldrixd cannot read {secret}: Permission denied\n")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config.json": None}, "inferno needs config.json, a supported tokenizer and *.safetensors"),
        ({"tokenizer.json": None}, "inferno needs config.json, a supported tokenizer and *.safetensors"),
        ({"model.safetensors": None}, "has no *.safetensors; inferno reads safetensors only"),
        (
            {"model.safetensors": None, "model.gguf": b""},
            "has no *.safetensors; inferno reads safetensors only, and model.gguf is a GGUF file",
        ),
        (
            {"model.safetensors": None, "config.json": None, "model.gguf": b""},
            "has no *.safetensors; inferno reads safetensors only, and model.gguf is a GGUF file",
        ),
        (
            {"model.safetensors": None, "pytorch_model.bin": b"", "README.md": b""},
            "safetensors only, and pytorch_model.bin is a pickled file of PyTorch",
        ),
        (
            {"model.safetensors": None, **ADAPTER},
            "has no weights but those of an adapter, adapter_model.safetensors; inferno does not apply an "
            "adapter: run owner/base, or the two merged into one model",
        ),
        ({"model.safetensors": None, "config.json": None, **ADAPTER}, "not apply an adapter: run owner/base"),
        (
            {"model.safetensors": None, **ADAPTER, "adapter_config.json": b"[]"},
            "does not apply an adapter: run its base model, or",
        ),
        (
            {"config.json": {"architectures": ["GPT2LMHeadModel"]}},
            "unsupported architectures entry GPT2LMHeadModel; inferno runs LlamaForCausalLM, Mistral",
        ),
        ({"config.json": {"architectures": ["A", "LlamaForCausalLM"]}}, "exactly one is required"),
        ({"config.json": {"architectures": []}}, "exactly one is required"),
        (
            {"config.json": {"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}},
            "attention_bias true is not implemented for this architecture",
        ),
        (
            {"config.json": {"transformers_weights": "other.safetensors"}},
            "transformers_weights names a weights file",
        ),
        ({"config.json": {"auto_map": {"AutoModel": "modeling.Model"}}}, "auto_map names code of the repo"),
    ],
)
def test_a_directory_that_is_no_model(
    shared: Home, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    directory = changed(MODEL, tmp_path / "model", changes)
    result = shared.caldrix("run", str(directory), *ONE_TOKEN)
    assert words in result.err
    assert "downloaded" not in result.err
    assert (result.status, result.out) == (1, "")
