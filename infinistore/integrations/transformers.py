"""Keep the `DynamicCache` of Hugging Face transformers in a store, and get it back by the longest prefix that is there.

    from infinistore import blocking
    from infinistore.integrations.transformers import load_cache, save_cache

    with blocking.open_store("infinistore://127.0.0.1:22345") as store:
        cache, matched = load_cache(store, model, token_ids)
        output = model(torch.tensor([token_ids[matched:]]), past_key_values=cache, use_cache=True)
        save_cache(store, model, token_ids, output.past_key_values)

One value holds one block of tokens: for each layer its keys, then its values, each as [heads, tokens, head size]. Keys
and values come back exactly as they were, bit by bit. Its name says model, dtype, layout and all tokens up to its end.

A store that is lost, slow or full is a miss: `load_cache` returns an empty cache, `save_cache` stores less, and it is
logged, under `infinistore.integrations.transformers`. What cannot be right (a cache of another model, a batch of
several sequences) is a `ValueError`.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from infinistore.blocking import BlockingStore, PrefixMatch
from infinistore.errors import InfiniStoreException
from infinistore.integrations.prefix_keys import PrefixChain, fingerprint, fingerprint_of_config

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel

__all__ = ["load_cache", "save_cache"]

_log = logging.getLogger(__name__)
_BATCH_BYTES = 64 * 1024 * 1024
"""How much is moved at a time, through memory of its own beside the cache."""
_HOLD_S = 60.0
_MEDIA_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")

Tokens: TypeAlias = "Sequence[int] | torch.Tensor"


def save_cache(
    store: BlockingStore,
    model: "PreTrainedModel",
    token_ids: Tokens,
    cache: "DynamicCache",
    *,
    name: str = "",
    salt: str = "",
    block_tokens: int = 64,
) -> int:
    """Store the full blocks of a sequence's cache. Returns how many leading tokens are in the store now.

    Args:
        store: an open store of `infinistore.blocking`.
        model: the model that filled the cache; a plain one, on one device.
        token_ids: the tokens of the sequence: [tokens] or [1, tokens]. The cache may cover fewer or more of them.
        cache: what the model returned as `past_key_values`, of a batch of one.
        name: what to call the model in the store; `model.name_or_path` unless given. Other weights need
            another name.
        salt: what else the cache depends on: an adapter, images, a tenant. Only equal salts find each other.
        block_tokens: how many tokens are stored under one key.

    Raises:
        ValueError: the cache cannot be stored so that it comes back right; the message says why.
    """
    layout = _CacheLayout.of(model, name, block_tokens)
    tokens = _token_list(model, token_ids, salt)
    tensors = layout.tensors(cache)
    blocks = min(len(tokens), cache.get_seq_length()) // block_tokens
    keys = layout.keys(tokens[: blocks * block_tokens], salt)
    stored = 0
    try:
        stored = int(store.match_prefix(keys))
        for first, end in _batches(stored, blocks, layout.block_bytes):
            staging = layout.staging(end - first)
            span = slice(first * block_tokens, end * block_tokens)
            for source, target in zip(tensors, layout.views(staging), strict=True):
                target.copy_(layout.split(source[:, :, span].detach()))
            store.put_many(zip(keys[first:end], staging.unbind(), strict=True), replace=False)
            stored = end
    except InfiniStoreException as error:
        _log.warning("the KV cache was not stored in full: %s", error)
    return stored * block_tokens


def load_cache(
    store: BlockingStore,
    model: "PreTrainedModel",
    token_ids: Tokens,
    *,
    name: str = "",
    salt: str = "",
    block_tokens: int = 64,
) -> "tuple[DynamicCache, int]":
    """Return a cache of the longest stored prefix of a sequence, and how many tokens it covers.

    It never covers the last token: a model must compute at least one to predict the next. Arguments and errors are
    those of `save_cache`; the cache is on the model's device.
    """
    from transformers import DynamicCache

    layout = _CacheLayout.of(model, name, block_tokens)
    tokens = _token_list(model, token_ids, salt)
    cache = DynamicCache(config=model.config)
    layout.tensors(cache)  # there are none yet, but for this kind of cache there must be two of each layer
    keys = layout.keys(tokens[: max(len(tokens) - 1, 0)], salt)
    try:
        loaded = _read(store, layout, keys)
    except InfiniStoreException as error:
        _log.warning("the KV cache was not read, and is computed again: %s", error)
        loaded = []
    loaded.reverse()
    for number in range(len(loaded) // 2):
        cache.update(loaded.pop(), loaded.pop(), number)  # which copies; what is copied is let go
    return cache, cache.get_seq_length()


def _read(store: BlockingStore, layout: "_CacheLayout", keys: list[str]) -> "list[torch.Tensor]":
    """Return keys and values of one layer after the other, [1, heads, tokens, head size], for the leading blocks that
    are there."""
    match = store.match_prefix(keys, hold_s=_HOLD_S) if keys else PrefixMatch(0)
    if not match:
        return []
    tensors = layout.empty(match)
    found = 0
    try:
        for first, end in _batches(0, match, layout.block_bytes):
            staging = layout.staging(end - first)
            lengths = store.get_many_into(zip(keys[first:end], staging.unbind(), strict=True))
            span = slice(first * layout.block_tokens, end * layout.block_tokens)
            for source, target in zip(layout.views(staging), tensors, strict=True):
                layout.split(target[:, :, span]).copy_(source)
            good = next((i for i, length in enumerate(lengths) if length != layout.block_bytes), len(lengths))
            found += good
            if good < end - first:
                break
    finally:
        _release(store, match.hold)
    return [tensor[:, :, : found * layout.block_tokens] for tensor in tensors] if found else []


def _release(store: BlockingStore, hold: str) -> None:
    try:
        store.release_hold(hold)
    except InfiniStoreException as error:  # it ends by itself
        _log.debug("a hold was not released: %s", error)


@attrs.frozen
class _CacheLayout:
    """How a model's cache lies in the store, as its configuration tells."""

    namespace: str
    layers: int
    heads: int
    head_size: int
    block_tokens: int
    dtype: "torch.dtype"
    device: "torch.device"

    @classmethod
    def of(cls, model: "PreTrainedModel", name: str, block_tokens: int) -> "_CacheLayout":
        name = name or model.name_or_path or ""
        if not name:
            raise ValueError("this model has no name to tell its cache from another's; pass name=")
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            raise ValueError("this model is spread over several devices; load it on one (without device_map)")
        config = model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers: int = config.num_hidden_layers
        facts = {
            "model": name,
            "revision": getattr(model.config, "_commit_hash", None),
            "config": fingerprint_of_config(model.config.to_dict()),
            "dtype": model.dtype,
            "layout": ["layer", "key then value", "head", "token", "head size"],
            "shape": [layers, 2, heads, block_tokens, head_size],
        }
        namespace = f"transformers/{name.rstrip('/').rpartition('/')[2][:100]}/{fingerprint(facts)}"
        return cls(namespace, layers, heads, head_size, block_tokens, model.dtype, model.device)

    @property
    def block_bytes(self) -> int:
        return self.layers * 2 * self.heads * self.block_tokens * self.head_size * self.dtype.itemsize

    def keys(self, tokens: Sequence[int], salt: str) -> list[str]:
        chain = PrefixChain(self.block_tokens, salt)
        return [f"{self.namespace}/{block}" for block in chain.extend(tokens)]

    def tensors(self, cache: "DynamicCache") -> "list[torch.Tensor]":
        """Return keys and values of one layer after the other, [1, heads, tokens, head size]; none of an empty cache.

        Raises:
            ValueError: a layer does not keep keys and values of all tokens, or not in the shape that is stored.
        """
        from transformers.cache_utils import DynamicLayer

        found: list[torch.Tensor] = []
        for number, layer in enumerate(cache.layers):
            if type(layer) is not DynamicLayer:
                raise ValueError(
                    f"layer {number} is a {type(layer).__name__}, which does not keep keys and values of every token as"
                    " they are; only models with full attention in each layer can be stored by prefix"
                )
            found += [tensor for tensor in (layer.keys, layer.values) if tensor is not None]
        for tensor in found:
            shape = tuple(tensor.shape[i] for i in (0, 1, 3)) if tensor.ndim == 4 else ()
            if (shape, tensor.dtype) != ((1, self.heads, self.head_size), self.dtype):
                raise ValueError(
                    f"a layer holds {list(tensor.shape)} of {tensor.dtype}; of this model and one sequence it should be"
                    f" [1, {self.heads}, tokens, {self.head_size}] of {self.dtype}"
                )
        if len(cache.layers) != self.layers or len(found) not in (0, 2 * self.layers):
            raise ValueError(f"the cache has {len(cache.layers)} layers and the model {self.layers}, or some are empty")
        return found

    def empty(self, blocks: int) -> "list[torch.Tensor]":
        """Return room on the model's device: keys and values of each layer, [1, heads, tokens, head size]."""
        import torch

        shape = (1, self.heads, blocks * self.block_tokens, self.head_size)
        return [torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2 * self.layers)]

    def staging(self, blocks: int) -> "torch.Tensor":
        """Return room for blocks in this machine's memory, one value each: [blocks, 2 * layers, heads, tokens, head
        size]."""
        import torch

        return torch.empty((blocks, 2 * self.layers, self.heads, self.block_tokens, self.head_size), dtype=self.dtype)

    def views(self, staging: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
        """Return the parts for keys and values of each layer: [blocks, heads, tokens, head size]."""
        return staging.unbind(1)

    def split(self, part: "torch.Tensor") -> "torch.Tensor":
        """See [1, heads, tokens, head size] as [blocks, heads, tokens, head size], in place."""
        blocks = part.shape[2] // self.block_tokens
        return part.view(self.heads, blocks, self.block_tokens, self.head_size).transpose(0, 1)


def _batches(first: int, end: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, _BATCH_BYTES // block_bytes)
    for start in range(first, end, step):
        yield start, min(start + step, end)


def _token_list(model: "PreTrainedModel", token_ids: Tokens, salt: str) -> list[int]:
    tokens: Any = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
    if len(tokens) == 1 and isinstance(tokens[0], list):
        tokens = tokens[0]
    if any(isinstance(token, list) for token in tokens):
        raise ValueError("give the tokens of one sequence, [tokens] or [1, tokens]; a batch is stored one by one")
    media = {getattr(model.config, setting, None) for setting in _MEDIA_TOKENS} - {None}
    if not salt and not media.isdisjoint(tokens):
        raise ValueError("these tokens stand for images, video or sound, which they do not tell apart; pass salt=")
    return [int(token) for token in tokens]
