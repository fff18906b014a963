"""The rule by which a model's cached keys move to other positions is found for each
kind of position embedding of transformers, or the model is refused."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma3TextConfig,
    GlmConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    SmolLM3Config,
)

from infinistore.integrations.rotary import Turn
from tests.integrations.small_llama import VOCABULARY, make_model

LARGEST = 4096
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "max_position_embeddings": LARGEST}
HEADS: dict[str, Any] = {**SIZES, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FEW: dict[str, Any] = {**HEADS, "num_key_value_heads": 2}
GPT: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LARGEST}
LATENT: dict[str, Any] = {
    **HEADS,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "v_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "first_k_dense_replace": 2,
}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}


def llama(largest: int = LARGEST, **rope: Any) -> LlamaConfig:
    return LlamaConfig(**{**FEW, "max_position_embeddings": largest}, rope_parameters={"rope_theta": 1e4, **rope})


DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "factor": 4.0}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MOVED = {
    "default": llama(rope_type="default"),
    "linear": llama(rope_type="linear", factor=4.0),
    "dynamic, below its switch": llama(**DYNAMIC),
    "llama3": llama(**LLAMA3, original_max_position_embeddings=512),
    "yarn": llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024),
    "a quarter": GPTNeoXConfig(**HEADS),
    "half": PhiConfig(**HEADS),
    "interleaved": CohereConfig(**FEW),
    "interleaved, half": GlmConfig(**FEW, head_dim=8, pad_token_id=0),
    "normed keys": Qwen3Config(**FEW, head_dim=8),
    "layers without positions": SmolLM3Config(**{**FEW, "num_hidden_layers": 4}, pad_token_id=0),
    "two bases": Gemma3TextConfig(**{**FEW, "num_hidden_layers": 6}, head_dim=8, sliding_window=LARGEST),
    "latent attention": DeepseekV3Config(**LATENT),
    "ALiBi": BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "ALiBi, by a setting": FalconConfig(**HEADS, alibi=True),
}


def model_of(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    kinds: Any = AutoModelForCausalLM
    model: PreTrainedModel = kinds.from_config(config).to(dtype).eval()
    return model


@torch.no_grad()
def cached(model: Any, first: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens = torch.arange(7, 37)[None]
    output = model(tokens, position_ids=torch.arange(first, first + 30)[None], use_cache=True)
    return [(layer.keys, layer.values) for layer in (getattr(output, "cache", None) or output.past_key_values).layers]


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cache_moves_to_where_the_model_would_have_computed_it(name: str, dtype: torch.dtype) -> None:
    model = model_of(MOVED[name], dtype)
    turn = Turn.of(model)
    for start, by in ((0, 1), (0, 900), (0, 2000), (1000, -613)):
        there = cached(model, start + by)
        for number, layer in enumerate(cached(model, start)):
            turn.apply(number, *layer, by=by)
            for moved, computed in zip(layer, there[number], strict=True):
                off, all_of_it = (moved - computed).float(), computed.float()
                if dtype is torch.float32:
                    assert off.abs().max() <= 1e-4 * all_of_it.abs().max()
                else:
                    assert off.norm() <= 0.02 * all_of_it.norm()


class Deaf(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Counts positions by itself, whatever it is told."""

    def forward(self, *args: Any, position_ids: Any = None, **options: Any) -> Any:
        return super().forward(*args, **options)


M_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


@pytest.mark.parametrize(
    ("config", "longest", "why"),
    [
        (llama(512, **DYNAMIC), 1016, "at a distance of 1000, the keys of layer 0 .* longest=1000 finds a rule"),
        (llama(**LONG), None, "at a distance of 1000"),
        (
            OPTConfig(**SIZES, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4),
            None,
            "distance of 1, .* no rotary",
        ),
        (GPT2Config(**GPT), None, "at a distance of 1, the keys of layer 0"),
        (GPTJConfig(**GPT, rotary_dim=8), None, "no rotary_emb that tells angles"),
        (
            Llama4TextConfig(**FEW, intermediate_size_mlp=48, head_dim=8, num_local_experts=2),
            None,
            "at a distance of 1,",
        ),
        (MistralConfig(**FEW, sliding_window=8), None, "layer 0 does not keep keys and values of every token"),
    ],
    ids=["dynamic, beyond", "longrope, beyond", "learned", "learned, too", "no tables", "complex", "window"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_whose_cache_cannot_be_moved_is_refused(
    config: PreTrainedConfig, longest: int | None, why: str, dtype: torch.dtype
) -> None:
    with pytest.raises(ValueError, match=why):
        Turn.of(model_of(config, dtype), longest=longest)


def test_up_to_its_switch_a_long_rotary_embedding_is_moved() -> None:
    for config, longest in ((llama(512, **DYNAMIC), 512), (llama(**LONG), 512)):
        assert Turn.of(model_of(config), longest=longest).longest == longest


def test_positions_in_three_directions_are_refused() -> None:
    sight = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
    config = Qwen2VLConfig(text_config={**FEW, "rope_parameters": M_ROPE}, vision_config=sight)
    model: Any = Qwen2VLForConditionalGeneration(config)
    with pytest.raises(ValueError, match="M-RoPE"):
        Turn.of(model)


def test_a_model_that_does_not_take_positions_is_not_taken_for_one_without_any() -> None:
    torch.manual_seed(0)
    model: Any = Deaf(LlamaConfig(**FEW))
    with pytest.raises(ValueError, match="position_ids"):
        Turn.of(model)


def test_a_turn_knows_its_model() -> None:
    model = make_model()
    turn = Turn.of(model)
    assert turn.is_of(model)
    assert not turn.is_of(make_model())
    assert turn.longest == model.config.max_position_embeddings
