"""Moves cached keys to other positions, by a rule that the model itself has shown.

    turn = Turn.of(model)
    turn.apply(number, layer.keys, layer.values, by=-512)

Rotary embeddings turn each key by its position, so a cached key can be turned on to
another one. How, differs from model to model, and a wrong guess is not noticed until
answers get worse. `Turn.of` runs a few tokens through the model at several positions
and compares what they leave in the cache: it finds the rule for each layer, or refuses.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["Turn"]

_TOKENS = 16
_DISTANCES = (1, 37, 1000)
_CHUNK_BYTES = 512 * 1024
"""So much is turned at a time, so that it stays in the processor's cache."""
_WITHIN = 1e-4
"""How far off a number in float32 may be, in parts of the largest one."""
_ANGLE = 2.0**-22
"""The same for each position of distance: models round the angle to float32."""
_NORM_WITHIN = 0.05
"""How far off tensors of fewer bits may be, in parts of their norm: single numbers
differ by as much as a wrong rule makes of small angles."""

Style: TypeAlias = Literal["halves", "interleaved"]


@attrs.frozen
class _Rule:
    """Which columns of a tensor turn, and which of them turn together."""

    first: int
    width: int
    style: Style

    def apply(self, tensor: "torch.Tensor", cos: "torch.Tensor", sin: "torch.Tensor") -> None:
        """Turn [..., tokens, head size] in place; cos and sin: [width / 2]."""
        half = self.width // 2
        for part in _chunks(tensor[..., self.first : self.first + self.width]):
            if self.style == "halves":
                one, other = part[..., :half], part[..., half:]
            else:
                one, other = part[..., ::2], part[..., 1::2]
            x, y = one.float(), other.float()  # in float32, `one` and `other` themselves
            turned = x * cos - y * sin
            other.copy_(y * cos + x * sin)
            one.copy_(turned)


@attrs.frozen
class Turn:
    """How to move what a model has cached to other positions; made by `of`."""

    longest: int
    """The model has shown it for positions below this one."""
    _model: "PreTrainedModel" = attrs.field(repr=False)
    _rules: tuple[tuple[_Rule | None, _Rule | None], ...]
    """Of the keys and the values of each layer; None: positions do not change them."""

    @classmethod
    def of(cls, model: "PreTrainedModel", *, longest: int | None = None) -> "Turn":
        """Find the rule by running 16 tokens at positions 0, 1, 37, 1000 and the last.

        Takes the time of five or six such forward passes, and changes nothing.

        Args:
            model: a model of transformers with a rotary embedding, or with none.
            longest: number of tokens of the longest sequence whose cache is to be
                moved; default: the model's `max_position_embeddings`.

        Raises:
            ValueError: no rule was found. The message names the layer and the distance,
                or says what this model does that cannot be moved.
        """
        import torch

        config = model.config.get_text_config(decoder=True)
        longest = longest or getattr(config, "max_position_embeddings", None) or _DISTANCES[-1] + _TOKENS
        parameters = getattr(config, "rope_parameters", None) or {}
        if "mrope_section" in parameters or "mrope_section" in (getattr(config, "rope_scaling", None) or {}):
            raise ValueError("this model counts positions in three directions (M-RoPE); a distance has no one number")
        last = max(longest - _TOKENS, _DISTANCES[1])
        distances = sorted({distance for distance in (*_DISTANCES, last) if distance <= last})
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(min(10, config.vocab_size - 1), config.vocab_size, (1, 3 * _TOKENS), generator=generator)
        with torch.no_grad():
            return cls(longest, model, _rules_of(model, tokens.to(model.device), distances))

    def apply(self, layer: int, keys: "torch.Tensor", values: "torch.Tensor", *, by: int) -> None:
        """Move the keys and values of a layer in place.

        Args:
            layer: the number of the layer.
            keys: its keys, [..., tokens, head size], of any dtype of floating point;
                they are turned in float32.
            values: its values, of the same shape; with multi-head latent attention,
                these have the part that turns.
            by: number of positions, negative towards the beginning.
        """
        if not self._rules[layer][0] and not self._rules[layer][1]:
            return
        tables = _tables(self._model, abs(by), layer)
        assert tables is not None, "there were some when the rule was found"
        for rule, tensor in zip(self._rules[layer], (keys, values), strict=True):
            if rule is not None:
                cos, sin = (table.to(tensor.device) for table in tables)
                rule.apply(tensor, cos, sin if by >= 0 else -sin)

    def is_of(self, model: "PreTrainedModel") -> bool:
        """Return whether this model has shown it."""
        return self._model is model


def _rules_of(
    model: "PreTrainedModel", tokens: "torch.Tensor", distances: list[int]
) -> tuple[tuple[_Rule | None, _Rule | None], ...]:
    """Return the simplest rules that explain what the cache holds at all distances."""
    here = tokens[:, :_TOKENS]
    start = _cached(model, here, 0)
    candidates = [[_candidates(model, number, tensor) for tensor in layer] for number, layer in enumerate(start)]
    for distance in distances:
        moved = _cached(model, here, distance)
        for number in range(len(start)):
            tables = _tables(model, distance, number)
            for kind, name in enumerate(("keys", "values")):
                was, now = start[number][kind], moved[number][kind]
                left = [rule for rule in candidates[number][kind] if _explains(rule, tables, was, now, distance)]
                if not left:
                    raise ValueError(_refusal(model, number, name, distance))
                candidates[number][kind] = left
    rules = [(keys[0], values[0]) for keys, values in candidates]
    # A model that ignores the positions it is given would seem to have none: the first
    # layer, which sees nothing but a token and its position, has to agree without them.
    before = 2 * _TOKENS
    natural = [tensor[..., before:, :] for tensor in _cached(model, tokens.roll(before, 1), None)[0]]
    tables = _tables(model, before, 0)
    for rule, was, now in zip(rules[0], start[0], natural, strict=True):
        if not _explains(rule, tables, was, now, before):
            raise ValueError("this model does not take the positions that it is given (position_ids)")
    return tuple(rules)


def _refusal(model: "PreTrainedModel", layer: int, name: str, distance: int) -> str:
    why = "" if _tables(model, 1, layer) is not None else "; the model has no rotary_emb that tells angles"
    if distance != _DISTANCES[0]:
        why = f"; up to it they are: longest={distance} finds a rule for shorter sequences"
    return (
        f"the cache of this model cannot be moved: at a distance of {distance}, the {name} of layer {layer} are not the"
        f" same ones turned{why}"
    )


def _candidates(model: "PreTrainedModel", layer: int, tensor: "torch.Tensor") -> list[_Rule | None]:
    """Return all rules that a tensor could follow, the simplest first."""
    tables = _tables(model, 1, layer)
    width, size = 0 if tables is None else 2 * len(tables[0]), tensor.shape[-1]
    styles: tuple[Style, ...] = ("halves", "interleaved")
    places = sorted({0, size - width}) if 0 < width <= size else ()
    return [None, *(_Rule(first, width, style) for first in places for style in styles)]


def _explains(
    rule: _Rule | None,
    tables: "tuple[torch.Tensor, torch.Tensor] | None",
    was: "torch.Tensor",
    now: "torch.Tensor",
    distance: int,
) -> bool:
    turned = was.clone()
    if rule is not None:
        if tables is None:
            return False
        rule.apply(turned, *tables)
    off = turned.float() - now.float()
    if was.element_size() >= 4:
        return bool(off.abs().max() <= (_WITHIN + distance * _ANGLE) * now.abs().max())
    return bool(off.norm() <= _NORM_WITHIN * now.float().norm())


def _cached(
    model: "PreTrainedModel", tokens: "torch.Tensor", first: int | None
) -> "list[tuple[torch.Tensor, torch.Tensor]]":
    """Return each layer's keys and values of tokens from a position on, alone."""
    import torch

    where = {} if first is None else {"position_ids": torch.arange(first, first + tokens.shape[1])[None].to(tokens)}
    called: Any = model
    output = called(tokens, use_cache=True, **where)
    cache = getattr(output, "cache", None) or output.past_key_values
    layers: list[Any] = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    for number, (keys, values) in enumerate(layers):
        if keys is None or values is None or not keys.is_floating_point() or keys.shape[-2] < tokens.shape[1]:
            raise ValueError(f"layer {number} does not keep keys and values of every token as they are")
    return layers


def _tables(model: "PreTrainedModel", distance: int, layer: int) -> "tuple[torch.Tensor, torch.Tensor] | None":
    """Return the cosine and sine by which the model turns what is so far away.

    By its own module, without its scaling of attention; float32, [width / 2]. None: it
    has none that tells.
    """
    import torch

    config = model.config.get_text_config(decoder=True)
    whole: Any = model
    decoder = whole.get_decoder() or whole
    modules = (part for name, part in decoder.named_modules() if name.rpartition(".")[2] == "rotary_emb")
    module = getattr(decoder, "rotary_emb", None) or next(modules, None)
    if module is None:
        return None
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds and len(set(kinds)) > 1 else None
    scale = getattr(module, f"{kind}_attention_scaling", None) or getattr(module, "attention_scaling", 1.0)
    inputs = torch.zeros(1, 1, 2, device=model.device), torch.tensor([[distance]], device=model.device)
    try:
        cos, sin = module(*inputs, kind) if f"{kind}_inv_freq" in dict(module.named_buffers()) else module(*inputs)
    except (TypeError, ValueError):  # another signature, or one complex tensor
        return None
    cos, sin = cos.reshape(-1).float() / scale, sin.reshape(-1).float() / scale
    half = len(cos) // 2
    if torch.equal(sin[:half], sin[half:]):
        return cos[:half], sin[:half]
    if torch.equal(sin[::2], sin[1::2]):
        return cos[::2], sin[::2]
    return None


def _chunks(tensor: "torch.Tensor") -> "Iterator[torch.Tensor]":
    """Split [..., tokens, columns] into parts of a few tokens."""
    tokens = tensor.shape[-2]
    step = max(1, tokens * _CHUNK_BYTES // max(4 * tensor.numel(), 1))
    for first in range(0, tokens, step):
        yield tensor[..., first : first + step, :]
