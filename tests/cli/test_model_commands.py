"""`pull` and `models` through the real command, against the hub of tests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from caldrixd.models import aliases
from tests.support import hub
from tests.support.changed import Change, changed, contents
from tests.support.cli import COMMAND, Home, Result, finish
from tests.support.hub_cli import MODEL, NAME, ONE_TOKEN, PIN, WEIGHTS, model, run, start
from tests.support.models import tiny

STORAGE = "hf/hub/models--tiny--llama"


def ask(home: Home, directory: Path, server: hub.Server, *arguments: str, **more: str) -> Result:
    return finish(start(home, directory, server, *arguments, **more))


def rows(result: Result) -> dict[str, list[str]]:
    """The cells of a table by the first one."""
    assert result.status == 0, result.err
    table = [re.split(r"  +", line.strip()) for line in result.out.splitlines()]
    return {row[0]: row[1:] for row in table}


# --- pull -------------------------------------------------------------------------------------------


def test_what_was_pulled_needs_no_hub(shared: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: model()}) as server:
        result = ask(shared, tmp_path, server, "pull", NAME)
        assert (result.status, result.out) == (0, ""), result.err
        lines = result.err.splitlines()
        assert f"caldrix: {NAME}: complete; caldrix run {NAME} loads it" == lines[-1]
        assert "caldrix: downloaded model.safetensors (240 kB)" in lines
        assert not [line for line in lines if "loading" in line.split(": ")[1]]
        assert run(shared, tmp_path, server, HF_HUB_OFFLINE="1").status == 0
        quiet = ask(shared, tmp_path, server, "pull", NAME, "--quiet")
        assert quiet == (0, "", "")


def test_what_cannot_run_is_not_pulled(shared: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: model({"config.json": {"architectures": ["Other"]}})}) as server:
        result = ask(shared, tmp_path, server, "pull", NAME)
        assert result.status == 1
        assert "unsupported architectures entry Other; inferno runs LlamaForCausalLM, " in result.err
        assert result.err.endswith("; nothing else was downloaded\n")
        assert server.files() == ["config.json"]


ADAPTER: dict[str, Change] = {
    "adapter_config.json": {"base_model_name_or_path": "owner/base"},
    "adapter_model.safetensors": WEIGHTS,
    "model.safetensors": None,
}
ONLY = "does not apply an adapter: run owner/base, or a repo of the two merged"


@pytest.mark.parametrize(
    ("changes", "words", "files"),
    [
        (ADAPTER, ONLY, ["adapter_config.json"]),
        ({**ADAPTER, "config.json": None}, ONLY, ["adapter_config.json"]),
        ({**ADAPTER, "adapter_config.json": b"[1]"}, "run its base model", ["adapter_config.json"]),
        (
            {"config.json": None, "model.safetensors": None, "x.Q4_0.gguf": WEIGHTS},
            "reads safetensors only, and x.Q4_0.gguf is a GGUF file",
            [],
        ),
        (
            {"model.safetensors": None, "pytorch_model.bin": WEIGHTS},
            "has no *.safetensors; inferno reads safetensors only, and pytorch_model.bin is a pickled file",
            ["config.json"],
        ),
    ],
)
def test_other_weights_are_refused_before_any_is_fetched(
    shared: Home, tmp_path: Path, changes: dict[str, Change], words: str, files: list[str]
) -> None:
    with hub.serve({NAME: model(changes)}) as server:
        for command in (("pull",), ("models", "plan"), ("run",)):
            result = ask(shared, tmp_path, server, *command, NAME)
            assert (result.status, result.out) == (1, "")
            assert words in result.err
        assert set(server.files()) <= set(files)
        assert server.files("cdn") == []


@pytest.mark.parametrize("size", [0, 7])
def test_weights_of_no_bytes_in_the_listing(shared: Home, tmp_path: Path, size: int) -> None:
    with hub.serve({NAME: model(sizes={"model.safetensors": size})}) as server:
        result = ask(shared, tmp_path, server, "pull", NAME)
        said = f"the hub lists model.safetensors with {size} bytes, which is no file of weights"
        assert (result.status, said in result.err, "run the command again" in result.err) == (1, True, False)


def test_an_adapter_is_found_out_though_another_program_fetched_it(shared: Home, tmp_path: Path) -> None:
    """All its files are in the cache, and its weights are the base model's."""
    repo = model({"adapter_config.json": {"base_model_name_or_path": "tiny/base"}})
    snapshot = tmp_path / STORAGE / "snapshots" / repo.commit
    snapshot.mkdir(parents=True)
    for name, data in contents(MODEL, {}).items():
        (snapshot / name).write_bytes(data)
    with hub.serve({NAME: repo, "tiny/base": model()}) as server:
        result = ask(shared, tmp_path, server, "pull", NAME)
    assert (result.status, "does not apply an adapter to a repo that" in result.err) == (1, True)


def test_a_directory_is_looked_at(shared: Home, tmp_path: Path) -> None:
    assert shared.caldrix("pull", str(MODEL)).status == 0
    changes: dict[str, tuple[Change, str]] = {
        "model.safetensors": (WEIGHTS[:-1], "model.safetensors is truncated: "),
        "tokenizer.json": (b"version https://git-lfs", "run git lfs pull"),
        "config.json": ({"hidden_size": 32}, "has shape [512, 64]; config.json says [512, 32]"),
    }
    for number, (name, (change, words)) in enumerate(changes.items()):
        bad = changed(MODEL, tmp_path / str(number), {name: change})
        for command in (("pull", str(bad)), ("models", "plan", str(bad)), ("run", str(bad), *ONE_TOKEN)):
            result = shared.caldrix(*command)
            assert (result.status, words in result.err.splitlines()[-1]) == (1, True), result.err
    result = shared.caldrix("pull", str(tmp_path))
    assert (result.status, "needs config.json" in result.err) == (1, True)


# --- models plan ------------------------------------------------------------------------------------


def test_a_plan_downloads_no_weights_and_says_what_a_run_would(shared: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: model()}) as server:
        result = ask(shared, tmp_path, server, "models", "plan", NAME, "--ctx", "256")
        said = [line for line in result.err.splitlines() if "caldrixd" not in line]
        assert [line.startswith(f"caldrix: {NAME}: not in the cache yet: config.json ") for line in said] == [
            True
        ]
        assert ", model.safetensors 240 kB (" in said[0]
        planned = rows(result)
        assert "model.safetensors" not in server.files()
        assert not list((tmp_path / STORAGE / "blobs").glob("*partial*"))
    assert planned["verdict"] == ["fits", "on the cpu lane"]
    assert planned["context"][0] == "256 tokens"
    assert planned["disk"][0] == "240 kB"
    local = rows(shared.caldrix("models", "plan", str(MODEL), "--ctx", "256"))
    assert (local["memory"][0], local["disk"][0]) == (planned["memory"][0], "0 B")


def test_a_plan_of_what_does_not_fit_ends_as_the_run_does(shared: Home, tmp_path: Path) -> None:
    directory = tmp_path / "huge"
    shutil.copytree(MODEL, directory)
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"vocab_size": 2097152, "hidden_size": 1 << 16, "num_hidden_layers": 64}
    (directory / "config.json").write_text(json.dumps(config))
    planned = shared.caldrix("models", "plan", str(directory))
    assert planned.status == 1
    assert planned.out.startswith("verdict       does not fit")
    ran = shared.caldrix("run", str(directory), "-p", "hi")
    sentences = [result.err.splitlines()[-1] for result in (planned, ran)]
    needed = [re.findall(r"needs (\d+) MB of memory for its weights alone", text) for text in sentences]
    assert needed[0] == needed[1] != []


def test_the_refusal_names_the_largest_context_that_would_fit(shared: Home, tmp_path: Path) -> None:
    """Weights of 50 MB, and a quarter of a MB of state for each token."""
    config = {"num_hidden_layers": 1024, "max_position_embeddings": 1 << 20}
    directory = changed(MODEL, tmp_path / "deep", {"config.json": config})
    planned = shared.caldrix("models", "plan", str(directory), "--ctx", str(1 << 20))
    assert (planned.status, planned.out.split()[:4]) == (1, ["verdict", "does", "not", "fit"])
    pattern = r"deep needs \d+ MB of memory and \d+ MB are free; the largest --ctx that would fit is (\d+)\n$"
    ran = shared.caldrix("run", str(directory), "--ctx", str(1 << 20), *ONE_TOKEN)
    assert (ran.status, ran.out) == (1, "")
    for result in (planned, ran):
        found = re.search(pattern, result.err)
        assert found, result.err
        less = shared.caldrix("models", "plan", str(directory), "--ctx", str(int(found[1]) // 2))
        assert less.out.split()[:2] == ["verdict", "fits"]


def test_a_context_that_the_model_was_not_made_for(shared: Home) -> None:
    result = shared.caldrix("models", "plan", str(MODEL), "--ctx", "1000000")
    assert (result.status, result.out) == (1, "")
    assert "tokens this model was made for" in result.err


def test_a_plan_says_how_long_a_context_would_fit(shared: Home) -> None:
    planned = rows(
        shared.caldrix("models", "plan", str(tiny("tiny-qwen3")), "--dtype", "bf16", "--threads", "1")
    )
    assert planned["context"][1].startswith("the largest that would fit is ")


def test_a_plan_takes_the_flags_of_a_run(shared: Home) -> None:
    one, eight, c = (
        rows(shared.caldrix("models", "plan", str(MODEL), "--backend", "cpu", *flags))
        for flags in (("--max-batch", "1"), ("--max-context", "64"), ("--cpu-kernels", "c"))
    )
    assert one["at once"] == [one["memory"][0], "for 1 conversation"]
    assert eight["at once"][1] == "for 8 conversations, each with a full context"
    assert (eight["context"][0], c["context"][0]) == ("64 tokens", "2048 tokens")
    for flags, words in (
        (("--backend", "hip", "--threads", "2"), "--threads is only meaningful with --backend cpu"),
        (("--max-batch", "3"), "--max-batch 3: must be 1 or 8 (the batched plan is compiled at B = 8)"),
    ):
        result = shared.caldrix("models", "plan", str(MODEL), *flags)
        assert (result.status, result.out) == (1, ""), result.err
        assert result.err.startswith(f"caldrix: {words}")


def test_a_plan_of_kernels_that_cannot_be_made_here_is_refused(home: Home) -> None:
    planned, ran = (
        home.caldrix(*command, str(MODEL), "--cpu-kernels", "c", PATH="/nowhere")
        for command in (("models", "plan"), ("run",))
    )
    assert (planned.status, planned.out) == (1, "")
    assert planned.err.splitlines()[-1].startswith("caldrix: no C compiler: ")
    assert planned.err.splitlines()[-1:] == ran.err.splitlines()[-1:]


def test_of_the_demo_model_nothing_is_known_before(home: Home, tmp_path: Path) -> None:
    empty = home.caldrix("models", "plan", "demo", XDG_CACHE_HOME=str(tmp_path))
    assert (empty.status, empty.out) == (1, "")
    assert "caldrix pull demo fetches it (92.9 MB to download, 271 MB on disk)" in empty.err


def test_a_load_has_the_name_that_ps_and_stop_know(home: Home, tmp_path: Path) -> None:
    with hub.serve({"HuggingFaceTB/SmolLM2-135M": model(commit=PIN)}) as server:
        for name in ("smollm2", str(MODEL)):
            result = ask(home, tmp_path, server, "run", name, *ONE_TOKEN)
            assert f"caldrix: loading {name} (0 MB)" in result.err.splitlines()
            assert name in home.caldrix("ps").out
            assert home.caldrix("stop", name).status == 0


# --- models list and rm -------------------------------------------------------------------------------


def test_the_list_has_the_aliases_and_what_the_cache_holds(shared: Home, tmp_path: Path) -> None:
    repos = {NAME: model(), "HuggingFaceTB/SmolLM2-135M": model(commit=PIN)}
    with hub.serve(repos) as server:
        before = rows(ask(shared, tmp_path, server, "models", "list"))
        assert before["smollm2"] == ["HuggingFaceTB/SmolLM2-135M", PIN[:12], "-", "Apache-2.0"]
        revision = aliases.HUB["decider-0.8b"].revision
        assert before["decider-0.8b"][1] == ("main (unpinned)" if revision == "main" else revision[:12])
        assert "-" not in before
        for name in repos:
            assert ask(shared, tmp_path, server, "pull", name).status == 0
        asked = len(server.requests)
        after = rows(ask(shared, tmp_path, server, "models", "list"))
        assert len(server.requests) == asked
    assert after["-"] == [NAME, "main", "0 MB", "-"]
    (tmp_path / STORAGE / "blobs").joinpath("x").write_bytes(bytes(3_000_000))
    for path in (tmp_path / STORAGE / "snapshots").glob("*/model.safetensors"):
        path.unlink()
    assert rows(ask(shared, tmp_path, server, "models", "list"))["-"] == [
        NAME,
        "main",
        "3 MB (incomplete)",
        "-",
    ]


def test_what_is_no_repo_in_the_cache_is_not_listed(shared: Home, tmp_path: Path) -> None:
    cache = tmp_path / "hf/hub"
    for name in ("a--b", "", "x", "a--b--c", "\x1b]0;x\x07--y"):
        (cache / f"models--{name}").mkdir(parents=True)
    (cache / "other").mkdir()
    (cache / "models--c--d").write_text("a file")
    (cache / "models--e--f").symlink_to(cache / "other")
    result = shared.caldrix("models", "list", HF_HOME=str(tmp_path / "hf"))
    assert result.status == 0
    assert [line.split() for line in result.out.splitlines()[10:]] == [["-", "a/b", "main", "-", "-"]]


def test_rm_asks_and_removes_nothing_but_the_repo(shared: Home, tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "file").write_text("kept")
    with hub.serve({NAME: model()}) as server:
        assert ask(shared, tmp_path, server, "pull", NAME).status == 0
        (tmp_path / STORAGE / "blobs/link").symlink_to(outside)
        piped = ask(shared, tmp_path, server, "models", "rm", NAME)
        assert (piped.status, piped.out) == (2, "")
        assert "give --yes" in piped.err
        assert (tmp_path / STORAGE).is_dir()
        removed = ask(shared, tmp_path, server, "models", "rm", NAME, "--yes")
        assert (removed.status, removed.out) == (0, ""), removed.err
        assert removed.err.startswith(f"caldrix: {NAME}: removed; ")
        assert not (tmp_path / STORAGE).exists()
        assert (outside / "file").read_text() == "kept"
        again = ask(shared, tmp_path, server, "models", "rm", NAME, "--yes")
        assert (again.status, "is not in the cache" in again.err) == (1, True)


def test_what_a_killed_removal_left_is_removed_by_the_next(shared: Home, tmp_path: Path) -> None:
    left = tmp_path / "hf/hub/.caldrix-removed-0123456789abcdef/blobs"
    left.mkdir(parents=True)
    (left / "weights").write_bytes(WEIGHTS)
    listed = shared.caldrix("models", "list", HF_HOME=str(tmp_path / "hf"))
    assert "removed" not in listed.out
    result = shared.caldrix("models", "rm", NAME, "--yes", HF_HOME=str(tmp_path / "hf"))
    assert (result.status, "is not in the cache" in result.err) == (1, True)
    assert list((tmp_path / "hf/hub").iterdir()) == []


def test_a_link_in_the_cache_is_not_followed(shared: Home, tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    outside.mkdir()
    (tmp_path / "hf/hub").mkdir(parents=True)
    (tmp_path / STORAGE).symlink_to(outside)
    result = shared.caldrix("models", "rm", NAME, "--yes", HF_HOME=str(tmp_path / "hf"))
    assert (result.status, "is not in the cache" in result.err) == (1, True)
    assert outside.is_dir()


def test_a_loaded_model_is_not_removed(shared: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: model()}) as server:
        assert run(shared, tmp_path, server).status == 0
        refused = ask(shared, tmp_path, server, "models", "rm", NAME, "--yes")
        assert refused.status == 1
        assert f"unload it first: caldrix stop {NAME}" in refused.err
        assert (tmp_path / STORAGE).is_dir()
        assert shared.caldrix("stop", NAME).status == 0
        assert ask(shared, tmp_path, server, "models", "rm", NAME, "-y").status == 0


def test_a_model_is_stopped_by_any_of_its_names(shared: Home, tmp_path: Path) -> None:
    repo = model(commit=PIN)
    snapshot = str(tmp_path / STORAGE / "snapshots" / PIN)
    (tmp_path / "link").symlink_to(snapshot)
    with hub.serve({NAME: repo}) as server:
        for run_as, stop_as in (
            (NAME, NAME),
            (NAME, f"{NAME}@{PIN}"),
            (f"{NAME}@{PIN}", f"{NAME}@main"),
            (NAME, snapshot),
            (NAME, f"{snapshot}/"),
            (NAME, str(tmp_path / "link")),
            (str(tmp_path / "link"), NAME),
        ):
            assert run(shared, tmp_path, server, run_as).status == 0
            for other in ("tiny/other", f"{NAME}@v1", "smollm2", "demo", "./model", str(tmp_path)):
                assert shared.caldrix("stop", other).status == 1
            stopped = shared.caldrix("stop", stop_as)
            assert (stopped.status, stopped.err) == (0, ""), (run_as, stop_as)
            assert NAME not in shared.caldrix("ps").out


def test_a_directory_is_stopped_as_it_was_run(shared: Home, tmp_path: Path) -> None:
    place = tmp_path / "place"
    shutil.copytree(MODEL, place / "smollm2")
    (place / "other").symlink_to("smollm2")

    def ask_in(*arguments: str) -> Result:
        pipe = subprocess.PIPE
        return finish(
            subprocess.Popen(
                (*COMMAND, *arguments),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=shared.environment,
                cwd=place,
            )
        )

    for stop_as in ("smollm2", "./smollm2", "smollm2/", "other", "../place/smollm2"):
        assert ask_in("run", "smollm2", *ONE_TOKEN).status == 0
        assert ask_in("stop", stop_as).status == 0, stop_as
    assert ask_in("run", "./other", *ONE_TOKEN).status == 0
    shutil.rmtree(place / "smollm2")
    assert ask_in("stop", "./other").status == 0


def test_a_model_that_is_being_downloaded_is_not_removed(shared: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: model()}) as server:
        server.fail("stall", "model.safetensors", at=1000)
        pulling = start(shared, tmp_path, server, "pull", NAME)
        server.wait(lambda: server.sent("model.safetensors") >= 1000)
        refused = ask(shared, tmp_path, server, "models", "rm", NAME, "--yes")
        assert (refused.status, "is being downloaded" in refused.err) == (1, True)
        server.heal()
        assert finish(pulling).status == 0
        assert ask(shared, tmp_path, server, "models", "rm", NAME, "--yes").status == 0


def test_a_directory_of_the_users_is_never_removed(shared: Home, tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "mine")
    result = shared.caldrix("models", "rm", str(tmp_path / "mine"), "--yes")
    assert (result.status, "is a directory of yours" in result.err) == (1, True)
    assert (tmp_path / "mine/model.safetensors").read_bytes() == WEIGHTS


# --- the command line -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pull"], "the model is required: caldrix pull <model>"),
        (["stop", ""], "the model is required: caldrix stop <model>"),
        (["pull", "a/b", "c/d"], "pull takes one model, got also c/d"),
        (["pull", "a/b", "--ctx", "5"], "unknown flag --ctx"),
        (["models", "drop"], "models takes list, plan, rm or pin, got drop"),
        (["models", "plan"], "the model is required: caldrix models plan <model>"),
        (["models", "list", "x"], "models list takes no arguments, got x"),
        (["models", "rm", "--ctx", "5"], "unknown flag --ctx"),
        (["models", "plan", "demo", "--yes"], "unknown flag --yes"),
    ],
)
def test_a_mistake_in_the_command_line(shared: Home, arguments: list[str], words: str) -> None:
    result = shared.caldrix(*arguments)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"caldrix: {words}")
