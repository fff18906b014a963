"""The identity of weights: another one for other bytes, whatever they are called, and
the same one for a copy.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from infinistore.integrations.internal.weights import weight_files

TENSORS, TENSOR_BYTES = 6, 16 * 1024 * 1024
"""Together more than is read in full."""


def make_model(folder: Path, *, tensors: int = TENSORS, size: int = TENSOR_BYTES, suffix: str = ".safetensors") -> Path:
    """A folder with sparse weights, a configuration, and what does not matter."""
    folder.mkdir(parents=True)
    offsets = [[number * size, (number + 1) * size] for number in range(tensors)]
    header = json.dumps(
        {f"layer.{n}": {"dtype": "F32", "shape": [size // 4], "data_offsets": offsets[n]} for n in range(tensors)}
    ).encode()
    with (folder / f"model{suffix}").open("wb") as file:
        if suffix == ".safetensors":
            file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + tensors * size)
    for name in ("config.json", "preprocessor_config.json", "modeling_own.py", "tokenizer.json", "optimizer.pt"):
        (folder / name).write_text("{}")
    return folder


def identity(folder: Path | str) -> str:
    files = weight_files(str(folder))
    assert files is not None
    return files.identity()


def change_tensor(file: Path, number: int, *, tensors: int = TENSORS, every: int = 8) -> None:
    """Change one value of so many of a tensor, as training in a low precision does."""
    values = np.memmap(file, dtype=np.uint8, mode="r+", offset=file.stat().st_size - tensors * TENSOR_BYTES)
    values[number * TENSOR_BYTES : (number + 1) * TENSOR_BYTES : every] += 1


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".gguf", ".pt"])
@pytest.mark.parametrize("number", [0, 3, TENSORS - 1])
def test_weights_that_were_trained_again_are_others_even_with_the_same_size_and_times(
    tmp_path: Path, number: int, suffix: str
) -> None:
    folder = make_model(tmp_path / "model", suffix=suffix)
    before = identity(folder)
    file = folder / f"model{suffix}"
    times = file.stat()

    change_tensor(file, number)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert identity(folder) != before


def test_the_last_rows_of_a_tensor_count_as_those_of_new_tokens_are_there(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    before = identity(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-TENSOR_BYTES - 64, os.SEEK_END)
        file.write(b"\1")

    assert identity(folder) != before


def test_a_small_adapter_is_read_in_full(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "adapter", tensors=2, size=1 << 20)
    before = identity(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(777_777)
        file.write(b"\1")

    assert identity(folder) != before


def rewrite(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text("{ }")


@pytest.mark.parametrize(
    "change",
    [
        *map(rewrite, ["config.json", "preprocessor_config.json", "modeling_own.py", "quantize_config.json"]),
        lambda folder: os.truncate(folder / "model.safetensors", 1 << 20),
        lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
        lambda folder: make_model(folder / "speech", tensors=1),
    ],
)
def test_every_file_counts_that_changes_what_a_model_computes(tmp_path: Path, change: Callable[[Path], object]) -> None:
    folder = make_model(tmp_path / "model")
    before = identity(folder)
    change(folder)

    assert identity(folder) != before


@pytest.mark.parametrize("name", ["tokenizer.json", "README.md", "optimizer.pt", "checkpoint-500/model.safetensors"])
def test_what_does_not_matter_does_not_count(tmp_path: Path, name: str) -> None:
    folder = make_model(tmp_path / "model")
    before = identity(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("something else")

    assert identity(folder) == before


def test_a_copy_is_the_same_wherever_it_is_and_a_link_is_what_it_leads_to(tmp_path: Path) -> None:
    first, second = make_model(tmp_path / "one"), make_model(tmp_path / "two", tensors=TENSORS + 1)
    copy = shutil.copytree(first, tmp_path / "elsewhere" / "copy")
    current = tmp_path / "current"
    current.symlink_to(first)
    assert identity(copy) == identity(current) == identity(first) != identity(second)

    current.unlink()
    current.symlink_to(second)

    assert identity(current) == identity(second)


def make_snapshot(cache: Path, commit: str, content: str, *, is_main: bool) -> Path:
    """What the Hugging Face Hub's client leaves of a download, with a large file."""
    repository = cache / "models--some--model"
    blob = repository / "blobs" / (content * 64)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with blob.open("wb") as file:
        file.write(content.encode() * 64)
        file.truncate(TENSORS * TENSOR_BYTES)
    snapshot = repository / "snapshots" / (commit * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blob)
    if is_main:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit * 40)
    return snapshot


def test_a_revision_of_the_hub_is_what_was_downloaded_of_it(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")

    def of(revision: str | None) -> str:
        files = weight_files("some/model", revision=revision, cache=str(tmp_path))
        assert files is not None
        return files.identity()

    make_snapshot(tmp_path, "a", "1", is_main=True)
    first = of(None)
    make_snapshot(tmp_path, "b", "2", is_main=True)
    make_snapshot(tmp_path, "c", "1", is_main=False)

    assert of(None) == of("main") == of("b" * 40) != first
    assert of("a" * 40) == of("c" * 40) == first


def test_a_revision_that_is_given_by_its_path_stays_what_it_is_whatever_is_downloaded(tmp_path: Path) -> None:
    files = weight_files(str(make_snapshot(tmp_path, "a", "1", is_main=True)))
    make_snapshot(tmp_path, "b", "2", is_main=True)

    assert files is not None
    assert files.now() == files


def test_a_copy_of_what_the_hub_keeps_under_the_hash_of_its_content_is_the_same(tmp_path: Path) -> None:
    snapshot = make_snapshot(tmp_path, "a", "1", is_main=True)
    copy = tmp_path / "copy"
    copy.mkdir()
    os.link((snapshot / "model.safetensors").resolve(), copy / "model.safetensors")

    assert identity(copy) == identity(snapshot)


def test_what_has_no_weights_has_no_identity(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    (tmp_path / "config.json").write_text("{}")

    for where in (str(tmp_path), str(tmp_path / "gone"), "not/downloaded", "s3://bucket/model", "~nobody-here/x", "\0"):
        assert weight_files(where, cache=str(tmp_path)) is None


@pytest.mark.parametrize("header", ['{"a": {"data_offsets": [1e999, 1]}}', "[" * 100_000], ids=["endless", "nested"])
def test_what_has_a_header_that_cannot_be_read_has_no_identity(tmp_path: Path, header: str) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(TENSORS * TENSOR_BYTES)

    assert identity(tmp_path) == ""


def test_weights_that_are_replaced_while_a_process_runs_are_not_what_they_were(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", tensors=1, size=1024)
    before = weight_files(str(folder))
    assert before is not None
    assert before == weight_files(str(folder)) == before.now()
    new = make_model(tmp_path / "new", tensors=1, size=1024) / "model.safetensors"
    shutil.copystat(folder / "model.safetensors", new)
    new.replace(folder / "model.safetensors")

    assert weight_files(str(folder)) == before.now() != before
    shutil.rmtree(folder)
    assert before.now() is None
