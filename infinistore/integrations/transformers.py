"""Keeps the `DynamicCache` of Hugging Face transformers in a store, by prefix.

    from infinistore import blocking
    from infinistore.integrations.transformers import load_cache, save_cache

    with blocking.open_store("infinistore://127.0.0.1:22345") as store:
        cache, matched = load_cache(store, model, token_ids)
        output = model(torch.tensor([token_ids[matched:]]), cache=cache, use_cache=True)
        save_cache(store, model, token_ids, output.cache)

A value is one block of tokens: for each layer its keys, then its values, each as
[heads, tokens, head size]. Keys and values are restored bit for bit. The key covers
the model's weights and adapters, as they are in memory at each call, its configuration,
dtype, layout and all tokens up to the block's end.

A store that is lost, slow or full is a miss: `load_cache` returns an empty cache,
`save_cache` stores less, and the logger `infinistore.integrations.transformers` emits a
warning. Invalid input (a cache of another model, a batch of several sequences) raises
`ValueError`.

`load_approximate_cache` leaves a part of the sequence out, which no stored cache is
exact for. It is the only call whose result is not what the model would compute.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from infinistore.blocking import BlockingStore, PrefixMatch
from infinistore.errors import InfiniStoreException
from infinistore.integrations.internal.prefix_keys import PrefixChain, fingerprint, fingerprint_of_config
from infinistore.integrations.internal.weights import identity_of_tensors
from infinistore.integrations.rotary import Turn

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel

__all__ = ["Approximation", "load_approximate_cache", "load_cache", "save_cache"]

_log = logging.getLogger(__name__)
_BATCH_BYTES = 64 * 1024 * 1024
"""Size of the buffer through which blocks move."""
_HOLD_S = 60.0
_MEDIA_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")

_START_TOKENS = 4
"""Most of what heads attend to when nothing concerns them; see bench/approximate.py."""
_APPROXIMATION = "infinistore_approximation"
"""The attribute of a cache that is approximate: copies of it have it, too."""

Tokens: TypeAlias = "Sequence[int] | torch.Tensor"


@attrs.frozen
class Approximation:
    """What is in a cache of `load_approximate_cache`: numbers of tokens."""

    exact: int
    """Leading tokens as the model would compute them."""
    approximate: int
    """Tokens behind these, which were computed with the dropped ones before them."""
    dropped: int
    """Tokens that were left out."""
    salt: str
    """Under which the exact tokens were stored."""

    @property
    def reused(self) -> int:
        """How many leading tokens the model need not compute."""
        return self.exact + self.approximate


def save_cache(
    store: BlockingStore,
    model: "PreTrainedModel",
    token_ids: Tokens,
    cache: "DynamicCache",
    *,
    name: str = "",
    salt: str = "",
    block_tokens: int = 64,
    group_tokens: int = 1024,
    ttl_s: float | None = None,
) -> int:
    """Store the full blocks of a sequence's cache.

    Returns the number of leading tokens that are in the store now.

    Args:
        store: an open store of `infinistore.blocking`.
        model: the model that filled the cache; a plain one, on one device.
        token_ids: the tokens of the sequence: [tokens] or [1, tokens]. The cache may
            cover fewer or more of them.
        cache: the model's, of a batch of one.
        name: the name of the model in the store; default: `model.name_or_path`. Only
            caches with equal names share blocks.
        salt: everything else that the cache depends on: images, a tenant. Only caches
            with equal salts share blocks.
        block_tokens: number of tokens under one key.
        group_tokens: in a cluster, so many tokens in a row are on one node.
        ttl_s: how many seconds after it was stored a block ends; None: not at all.

    Raises:
        ValueError: the cache could not be restored correctly, or is approximate; the
            message says why.
    """
    approximation: Approximation | None = getattr(cache, _APPROXIMATION, None)
    if approximation is not None and salt in ("", approximation.salt):
        raise ValueError(
            "this cache is approximate (load_approximate_cache), and would be taken for an exact one; pass a salt= of"
            " its own, or compute the sequence anew"
        )
    layout = _CacheLayout.of(model, name, block_tokens, group_tokens if store.is_cluster else 0)
    tokens = _token_list(model, token_ids, salt)
    tensors = layout.tensors(cache)
    blocks = min(len(tokens), cache.get_seq_length()) // block_tokens
    if layout.longest is not None and cache.get_seq_length() > layout.longest:
        blocks = 0
    keys = layout.keys(tokens[: blocks * block_tokens], salt)
    stored = 0
    try:
        stored = int(store.match_prefix(keys))
        for first, end in _batches(stored, blocks, layout.block_bytes):
            gathered = layout.buffer(end - first)
            span = slice(first * block_tokens, end * block_tokens)
            for source, target in zip(tensors, layout.views(gathered), strict=True):
                target.copy_(layout.split(source[:, :, span].detach()))
            staging = layout.to_host(gathered)
            store.put_many(zip(keys[first:end], staging.unbind(), strict=True), replace=False, ttl_s=ttl_s)
            stored = end
    except InfiniStoreException as error:
        _log.warning("the KV cache was not stored in full: %s", str(error))
    return stored * block_tokens


def load_cache(
    store: BlockingStore,
    model: "PreTrainedModel",
    token_ids: Tokens,
    *,
    name: str = "",
    salt: str = "",
    block_tokens: int = 64,
    group_tokens: int = 1024,
) -> "tuple[DynamicCache, int]":
    """Return a cache of a sequence's longest stored prefix, and its number of tokens.

    It never includes the last token, because a model must compute at least one token to
    predict the next. The cache is on the model's device. Arguments and errors are those
    of `save_cache`.
    """
    layout = _CacheLayout.of(model, name, block_tokens, group_tokens if store.is_cluster else 0)
    tokens = _token_list(model, token_ids, salt)
    cache = layout.new_cache(model)
    loaded = _read(store, layout, layout.loadable(tokens, len(tokens), salt))
    loaded.reverse()
    for number in range(len(loaded) // 2):
        cache.update(loaded.pop(), loaded.pop(), number)  # which copies; what is copied is let go
    return cache, cache.get_seq_length()


def load_approximate_cache(
    store: BlockingStore,
    model: "PreTrainedModel",
    token_ids: Tokens,
    *,
    drop: tuple[int, int],
    turn: Turn | None = None,
    name: str = "",
    salt: str = "",
    block_tokens: int = 64,
    group_tokens: int = 1024,
) -> "tuple[DynamicCache, list[int], Approximation]":
    """Return a cache of a sequence without its middle, from the blocks of the whole one.

    The keys behind the hole are turned to their new positions. They and their values
    still know what was dropped, so the answer is close to what the model would say
    without the middle, and not the same. Nothing is approximate if nothing behind the
    hole is stored.

    Returns the cache, the sequence without its middle, and how much of it the cache
    has: `model(torch.tensor([tokens[report.reused:]]), cache=cache)` goes on.

    Args:
        token_ids: the tokens of the whole sequence, with which `save_cache` stored it.
        drop: the first of the tokens that are dropped, and the first behind them. At
            least 4 tokens before the hole stay.
        turn: how this model's keys turn, if several loads are to find it out once;
            default: `Turn.of(model, longest=len(token_ids))`.

    All other arguments are those of `save_cache`.

    Raises:
        ValueError: as `save_cache`; or the model's keys cannot be turned.
    """
    first, end = drop
    layout = _CacheLayout.of(model, name, block_tokens, group_tokens if store.is_cluster else 0)
    tokens = _token_list(model, token_ids, salt)
    left = tokens[:first] + tokens[end:]
    if not _START_TOKENS <= first < end < len(tokens):
        raise ValueError(
            f"drop={drop} has to lie within {len(tokens)} tokens, behind the first {_START_TOKENS} (to which models"
            " attend whatever they say: without them no answer is close) and before the last"
        )
    longest = min(len(tokens), layout.longest or len(tokens))
    if turn is None:
        turn = Turn.of(model, longest=longest)
    elif not turn.is_of(model) or turn.longest < longest:
        raise ValueError(f"this turn is of another model or of shorter sequences; Turn.of(model, longest={longest})")
    cache = layout.new_cache(model)
    loaded = _read(store, layout, layout.loadable(tokens, len(left), salt), first, end)
    exact = min(first, loaded[0].shape[2]) if loaded else 0
    behind = -(-first // block_tokens) * block_tokens + end % block_tokens  # where the token at `end` was read to
    loaded.reverse()
    for number in range(len(loaded) // 2):
        keys, values = loaded.pop(), loaded.pop()
        cache.update(keys[:, :, :exact], values[:, :, :exact], number)
        keys, values = keys[:, :, behind:], values[:, :, behind:]
        if keys.shape[2]:
            turn.apply(number, keys, values, by=first - end)
            cache.update(keys, values, number)
    report = Approximation(exact, cache.get_seq_length() - exact, end - first, salt)
    if report.approximate:
        setattr(cache, _APPROXIMATION, report)
    return cache, left, report


def _read(
    store: BlockingStore, layout: "_CacheLayout", keys: list[str], first: int = 0, end: int = 0
) -> "list[torch.Tensor]":
    """Return the keys and values of each layer, for the leading blocks that exist, but
    for those with nothing else than tokens from `first` to `end`.

    An empty list if there are none, or the store cannot be read. Shape: [1, heads,
    tokens, head size].
    """
    try:
        match = store.match_prefix(keys, hold_s=_HOLD_S) if keys else PrefixMatch(0)
        before = min(-(-first // layout.block_tokens), match)
        kept = [*keys[:before], *keys[end // layout.block_tokens : match]]
        return _read_blocks(store, layout, kept, match) if kept else []
    except InfiniStoreException as error:
        _log.warning("the KV cache was not read, and is computed again: %s", str(error))
        return []


def _read_blocks(
    store: BlockingStore, layout: "_CacheLayout", keys: list[str], match: PrefixMatch
) -> "list[torch.Tensor]":
    tensors = layout.empty(len(keys))
    found = 0
    try:
        if match.in_memory < match:  # so that no batch waits for a disk while the one before it is copied
            store.prefetch(keys)
        for first, end in _batches(0, len(keys), layout.block_bytes):
            staging = layout.staging(end - first)
            lengths = store.get_many_into(zip(keys[first:end], staging.unbind(), strict=True))
            span = slice(first * layout.block_tokens, end * layout.block_tokens)
            for source, target in zip(layout.views(layout.to_device(staging)), tensors, strict=True):
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
    except InfiniStoreException as error:  # it expires
        _log.debug("a hold was not released: %s", str(error))


@attrs.frozen
class _CacheLayout:
    """The layout of a model's cache in the store, from its configuration."""

    namespace: str
    layers: int
    heads: int
    head_size: int
    block_tokens: int
    group_blocks: int
    longest: int | None
    """A cache of more tokens cannot be shared, because each key depends on how many there
    are; None: it never does."""
    dtype: "torch.dtype"
    device: "torch.device"

    @classmethod
    def of(cls, model: "PreTrainedModel", name: str, block_tokens: int, group_tokens: int) -> "_CacheLayout":
        name = name or model.name_or_path or ""
        if not name:
            raise ValueError("this model has no name to tell its cache from another's; pass name=")
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            raise ValueError("this model is spread over several devices; load it on one (without device_map)")
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError("this adapter puts tokens of its own before a prompt, which the cache has, too")
        config = model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers: int = config.num_hidden_layers
        facts = {
            "model": name,
            "weights": identity_of_tensors(model.state_dict()),
            "adapters": _adapters(model),
            "config": fingerprint_of_config(model.config.to_dict()),
            "dtype": model.dtype,
            "layout": ["layer", "key then value", "head", "token", "head size"],
            "shape": [layers, 2, heads, block_tokens, head_size],
        }
        group_blocks = max(1, group_tokens // block_tokens) if group_tokens else 0
        if group_blocks:
            facts["group blocks"] = group_blocks
        namespace = f"transformers/{name.rstrip('/').rpartition('/')[2][:100]}/{fingerprint(facts)}"
        return cls(
            *(namespace, layers, heads, head_size, block_tokens, group_blocks, _longest(config)),
            *(model.dtype, model.device),
        )

    @property
    def block_bytes(self) -> int:
        return self.layers * 2 * self.heads * self.block_tokens * self.head_size * self.dtype.itemsize

    def keys(self, tokens: Sequence[int], salt: str) -> list[str]:
        chain = PrefixChain(self.block_tokens, salt, group_blocks=self.group_blocks)
        return [f"{self.namespace}/{block}" for block in chain.extend(tokens)]

    def loadable(self, tokens: Sequence[int], length: int, salt: str) -> list[str]:
        """Return the keys of the blocks before the last token, for a sequence that is to
        have so many tokens.
        """
        return self.keys(tokens[:-1], salt) if self.longest is None or length <= self.longest else []

    def new_cache(self, model: "PreTrainedModel") -> "DynamicCache":
        """Return an empty cache.

        Raises:
            ValueError: it has a layer of a kind that is not stored.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        self.tensors(cache)
        return cache

    def tensors(self, cache: "DynamicCache") -> "list[torch.Tensor]":
        """Return the keys and values of each layer; an empty list for an empty cache.

        Shape: [1, heads, tokens, head size].

        Raises:
            ValueError: a layer does not keep keys and values of all tokens, or has
                another shape.
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
        """Return empty keys and values of each layer, on the model's device.

        Shape: [1, heads, tokens, head size].
        """
        import torch

        shape = (1, self.heads, blocks * self.block_tokens, self.head_size)
        return [torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2 * self.layers)]

    def buffer(self, blocks: int) -> "torch.Tensor":
        """Return a buffer for blocks on the model's device.

        Shape: [blocks, 2 * layers, heads, tokens, head size].
        """
        import torch

        return torch.empty(self._shape(blocks), dtype=self.dtype, device=self.device)

    def staging(self, blocks: int) -> "torch.Tensor":
        """Return a buffer for blocks in host memory, pinned for a GPU. Shape: as
        `buffer`.
        """
        import torch

        return torch.empty(self._shape(blocks), dtype=self.dtype, pin_memory=self._is_cuda)

    def to_host(self, buffer: "torch.Tensor") -> "torch.Tensor":
        """Return the blocks of a buffer in host memory: by one copy, or in place."""
        return buffer if self.device.type == "cpu" else self.staging(len(buffer)).copy_(buffer)

    def to_device(self, staging: "torch.Tensor") -> "torch.Tensor":
        """Return blocks of host memory on the device, for what is computed there next:
        by one copy, or in place. PyTorch keeps pinned memory for as long as it is read.
        """
        return staging.to(self.device, non_blocking=self._is_cuda)

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def _shape(self, blocks: int) -> tuple[int, ...]:
        return blocks, 2 * self.layers, self.heads, self.block_tokens, self.head_size

    def views(self, staging: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
        """Return keys and values of each layer: [blocks, heads, tokens, head size]."""
        return staging.unbind(1)

    def split(self, part: "torch.Tensor") -> "torch.Tensor":
        """View [1, heads, tokens, head size] as [blocks, heads, tokens, head size]."""
        blocks = part.shape[2] // self.block_tokens
        return part.view(self.heads, blocks, self.block_tokens, self.head_size).transpose(0, 1)


def _adapters(model: "PreTrainedModel") -> list[object]:
    """Return which adapters of PEFT are in use in each layer, and how much of each."""
    return [
        (name, bool(layer.disable_adapters), layer.active_adapters, getattr(layer, "scaling", None))
        for name, layer in model.named_modules()
        if hasattr(layer, "active_adapters") and isinstance(getattr(layer, "disable_adapters", None), bool)
    ]


def _longest(config: Any) -> int | None:
    """Return up to which length rotary embeddings ignore the sequence's length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters] if "rope_type" in parameters else [one for one in parameters.values() if isinstance(one, dict)]
    found = []
    for kind in kinds:
        rope_type = kind.get("rope_type") or ""
        if "dynamic" in rope_type:
            found.append(config.max_position_embeddings - 1)  # of so many and more, it is what came before
        elif rope_type == "longrope":
            found.append(kind.get("original_max_position_embeddings") or config.original_max_position_embeddings)
    return min(found, default=None)


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
