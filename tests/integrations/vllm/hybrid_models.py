"""Small models with random weights whose layers are of several kinds, made here and
now.

python hybrid_models.py KIND FOLDER
"""

import sys
from typing import Any

__all__ = ["make_model"]

WINDOW = 64


def make_model(kind: str, folder: str) -> None:
    """Write a model: `gemma3` and `gpt-oss` have layers with sliding windows of 64
    tokens among others, `qwen3-next` has layers with a state.
    """
    import torch
    import transformers

    from small_llama import VOCABULARY

    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 192, "max_position_embeddings": 8192, "initializer_range": 0.3}
    common = {**sizes, **heads, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False}
    config: Any
    if kind == "gemma3":
        config = transformers.Gemma3TextConfig(
            **common, intermediate_size=384, num_hidden_layers=6, sliding_window=WINDOW, query_pre_attn_scalar=64
        )
        config.layer_types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    elif kind == "gpt-oss":
        config = transformers.GptOssConfig(
            **common,
            intermediate_size=192,
            num_hidden_layers=4,
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    elif kind == "qwen3-next":
        config = transformers.Qwen3NextConfig(
            **{**common, "hidden_size": 256},
            intermediate_size=384,
            num_hidden_layers=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
        )
    else:
        raise ValueError(f"no model is called {kind!r}")
    model: Any = transformers.AutoModelForCausalLM
    model.from_config(config).save_pretrained(folder)


if __name__ == "__main__":
    sys.path.append(sys.argv[3])
    make_model(sys.argv[1], sys.argv[2])
