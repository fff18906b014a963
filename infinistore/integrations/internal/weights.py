"""What a model's weights are: an identity made of their bytes, not of their name.

A path, a name or a tag says where weights are. What is there can change, and a store
keeps blocks for longer than that. So a key contains an identity of the weights: equal
ones mean equal weights, wherever they lie and whatever they are called.

Up to 64 MiB of files are read in full, as of most adapters. Of more, the identity is
made of sizes, of the headers of safetensors, and of samples: up to 16 of each tensor,
the first and the last bytes among them. Training or merging changes all of a tensor, or
a good part of it, which samples show. They may miss a change of a few rows of one
tensor. Times do not count, nor the hashes that name files in the cache of the Hugging
Face Hub, because a copy has others or none.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

if TYPE_CHECKING:
    import torch

_WEIGHTS: Final = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".npz"}
_SETTINGS: Final = {".json", ".py"}
"""The model's configuration, its own code, how images are processed."""
_OTHERS: Final = re.compile(
    r"(tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|generation_config|optimizer|scheduler|scaler"
    r"|rng_state|training_args|trainer_state|README|\.)"
)
"""What begins like this does not change the keys and values of given tokens."""
_OTHER_FOLDERS: Final = re.compile(r"(checkpoint-|original$|runs$|\.|__)")
_OTHER_HUBS: Final = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")
_UNREADABLE: Final = (OSError, RuntimeError, OverflowError, ValueError)
"""Also for the home of an unknown user, and for headers that are nested too deeply, or
have infinite numbers."""
_WHOLE_BYTES: Final = 64 * 1024 * 1024
_HEADER_BYTES: Final = 100 * 1024 * 1024
"""The longest header that safetensors allow."""
_SAMPLE_BYTES: Final = 1024
_SAMPLES: Final = 16 * 1024
"""Of all files together, unless they have more tensors."""
_OF_A_TENSOR: Final = 16
_GRID: Final = 8
"""Of a tensor in memory, so many places along each dimension."""


@attrs.frozen
class _File:
    name: str
    path: str
    size: int
    stamp: tuple[int, ...]
    """Changes if anybody writes to the file or replaces it."""


@attrs.frozen
class WeightFiles:
    """The files that a model, or an adapter, consists of, as they are at this moment.

    They equal those of another moment if nothing was changed meanwhile.
    """

    files: tuple[_File, ...]
    place: Path = attrs.field(eq=False)
    main: Path | None = attrs.field(eq=False)
    """Of a model that was found by its name on the Hugging Face Hub, the file that
    says which revision is the main one."""

    def now(self) -> "WeightFiles | None":
        """Return the files that are in their place at this moment. None if there are
        no weights, or if the Hub's cache has another main revision by now.
        """
        try:
            if self.main is not None and self.main.read_text().strip() != self.place.name:
                return None
            return _found_in(self.place, self.main)
        except _UNREADABLE:
            return None

    def identity(self) -> str:
        """Return 32 hexadecimal digits for their content; empty if it is unreadable."""
        try:
            return _identity(self.files)
        except _UNREADABLE:
            return ""


def weight_files(
    where: str, *, revision: str | None = None, cache: str | None = None, only: bool = False
) -> WeightFiles | None:
    """Return the files at a path, or of a repository of the Hugging Face Hub that was
    downloaded (to the folder `cache`, or the usual one). None if there are no weights.

    With `only`, it is not known which revision is meant: it must be the only one there.
    """
    try:
        place = _place(where, revision, cache, only)
        is_path = place == Path(where).expanduser()
        return _found_in(place, None if is_path else place.parents[1] / "refs" / "main")
    except _UNREADABLE:
        return None


def identity_of_files(where: str, *, revision: str | None = None, cache: str | None = None, only: bool = False) -> str:
    """Return the identity of the `weight_files`; nothing if there are none."""
    files = weight_files(where, revision=revision, cache=cache, only=only)
    return "" if files is None else files.identity()


def _place(where: str, revision: str | None, cache: str | None, only: bool) -> Path:
    place = Path(where).expanduser()
    if place.exists():
        return place
    if any(os.environ.get(name, "").lower() in ("1", "true") for name in _OTHER_HUBS):
        raise FileNotFoundError(where)
    try:
        from huggingface_hub import snapshot_download

        place = Path(snapshot_download(where, revision=revision, cache_dir=cache, local_files_only=True))
    except (ImportError, ValueError) as error:  # what the Hub raises are OSErrors, or these
        raise FileNotFoundError(where) from error
    if only and len(os.listdir(place.parent)) > 1:
        raise FileNotFoundError(where)
    return place


def _found_in(place: Path, main: Path | None) -> WeightFiles | None:
    found = _files(place)
    return WeightFiles(found, place, main) if any(Path(file.name).suffix in _WEIGHTS for file in found) else None


def _files(place: Path) -> tuple[_File, ...]:
    if place.is_file():
        return (_file(place.name, place),)
    found = []
    for folder in (place, *sorted(one for one in place.iterdir() if one.is_dir())):
        if folder == place or not _OTHER_FOLDERS.match(folder.name):
            found += [path for path in folder.iterdir() if path.suffix in _WEIGHTS | _SETTINGS and path.is_file()]
    return tuple(_file(str(path.relative_to(place)), path) for path in sorted(found) if not _OTHERS.match(path.name))


def _file(name: str, path: Path) -> _File:
    known = path.stat()
    return _File(
        name, os.path.realpath(path), known.st_size, (known.st_dev, known.st_ino, known.st_mtime_ns, known.st_ctime_ns)
    )


@lru_cache(maxsize=256)
def _identity(files: tuple[_File, ...]) -> str:
    whole = sum(file.size for file in files) <= _WHOLE_BYTES
    result = hashlib.blake2b(digest_size=16)
    sampled: list[tuple[_File, list[tuple[int, int]]]] = []
    for file in files:
        result.update(json.dumps([file.name, file.size]).encode())
        if whole or Path(file.name).suffix in _SETTINGS:
            with open(file.path, "rb") as content:
                result.update(hashlib.file_digest(content, "blake2b").digest())
        else:
            header, tensors = _tensors(file)
            result.update(header)
            sampled.append((file, tensors))
    parts = sum(len(tensors) for _, tensors in sampled)
    each = max(1, min(_OF_A_TENSOR, _SAMPLES // max(1, parts)))
    for file, tensors in sampled:
        # Of a file whose tensors are not known, it is one for all.
        count = each if len(tensors) > 1 else max(1, _SAMPLES // len(sampled))
        _read(file, [place for first, end in tensors for place in _places(first, end, count)], result)
    return result.hexdigest()


def _tensors(file: _File) -> tuple[bytes, list[tuple[int, int]]]:
    """Return a file's header, and where each of its tensors lies."""
    if file.name.endswith(".safetensors"):
        with open(file.path, "rb") as content:
            length = int.from_bytes(content.read(8), "little")
            header = content.read(length) if length <= _HEADER_BYTES else b""
        try:
            told = json.loads(header)
            offsets = sorted(one["data_offsets"] for name, one in told.items() if name != "__metadata__")
            places = [(8 + length + int(first), 8 + length + int(end)) for first, end in offsets]
        except (ValueError, TypeError, KeyError, AttributeError):
            places = []
        if places and all(8 + length <= first <= end <= file.size for first, end in places):
            return header, places
    return b"", [(0, file.size)]


def _places(first: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of so many samples, the last ones at the end."""
    room = end - first - _SAMPLE_BYTES
    if room <= 0 or count == 1:
        yield first + max(0, room) // 2, min(_SAMPLE_BYTES, end - first)
        return
    count = min(count, room // _SAMPLE_BYTES + 2)
    for number in range(count):
        yield first + room * number // (count - 1), _SAMPLE_BYTES


def _read(file: _File, places: Iterable[tuple[int, int]], result: hashlib.blake2b) -> None:
    places = list(places)
    descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if sys.platform == "linux":  # the device has all of them to do at once
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            for offset, length in places:
                os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)
        for offset, length in places:
            result.update(os.pread(descriptor, length, offset))
    finally:
        os.close(descriptor)


def identity_of_tensors(tensors: "Mapping[str, torch.Tensor]") -> str:
    """Return what stands for the weights of a model that is in memory, by their names:
    32 hexadecimal characters.

    It is made of samples of each tensor, at places all over it.

    Raises:
        ValueError: one of them has no data, or none that can be read.
    """
    import torch

    result = hashlib.blake2b(digest_size=16)
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for name, tensor in _inner(tensors.items()):
        if tensor.is_meta:
            raise ValueError(f"the weight {name} is not in memory; load the model on one device, without offloading")
        result.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        for sample in _samples(tensor.detach()):
            samples.setdefault(tensor.device, []).append(sample.contiguous().reshape(-1).view(torch.uint8))
    for parts in samples.values():  # one copy from each device
        result.update(torch.cat(parts).cpu().numpy().tobytes())
    return result.hexdigest()


def _samples(tensor: "torch.Tensor") -> "Iterator[torch.Tensor]":
    """Yield views of elements: a grid all over the tensor, and of its last row."""
    if not tensor.numel():
        return
    if not tensor.ndim:
        yield tensor
        return
    steps = [max(1, size // _GRID) for size in tensor.shape]
    yield tensor[tuple(slice(step // 2, None, step) for step in steps)]
    yield tensor[-1][tuple(slice(None, None, step) for step in steps[1:])]


def _inner(tensors: "Iterable[tuple[str, Any]]") -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield the tensors that these consist of: a quantized one has several."""
    import torch

    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        if not isinstance(tensor, torch.Tensor):
            continue
        parts = type(tensor).__tensor_flatten__(tensor)[0] if hasattr(tensor, "__tensor_flatten__") else ()
        if parts:
            yield from _inner([(f"{name}.{part}", getattr(tensor, part)) for part in parts])
        else:
            yield name, tensor
