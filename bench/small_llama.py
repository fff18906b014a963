"""A small Llama with random weights, made here and now: nothing is downloaded.

    python bench/small_llama.py FOLDER [--layers 8] [--hidden 768] [--windows]

Its answers mean nothing, but they are answers: the same tokens for the same prompt, and
others for another one. The tokenizer knows the words w2, w3, ..., so that the folder
can be served, too. With `--windows`, it is a small Gemma 3 instead.
"""

import argparse
from pathlib import Path
from typing import Any

__all__ = ["VOCABULARY", "WINDOW", "make_small_llama"]

VOCABULARY = 2048
WINDOW = 512
"""Tokens that a layer with a sliding window attends to, as in Gemma 3."""


def make_small_llama(folder: Path, *, layers: int = 8, hidden: int = 768, seed: int = 0, windows: bool = False) -> None:
    """Write a model of `layers` layers, with keys and values for a third of its heads
    of 64 numbers each; with `windows`, one of Gemma 3's kind, where only every sixth
    layer, or else the last, attends to all tokens.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    heads = hidden // 64
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 3),
        "max_position_embeddings": 16384,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "initializer_range": 4 / hidden**0.5,  # enough that an answer depends on the whole prompt, not its end
    }
    config: Any
    if windows:
        full = {number for number in range(layers) if number % 6 == 5} or {layers - 1}
        kinds = ["full_attention" if number in full else "sliding_attention" for number in range(layers)]
        own: dict[str, Any] = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": WINDOW, "pad_token_id": 0}
        config = Gemma3TextConfig(**sizes, **own, layer_types=kinds)
    else:
        config = LlamaConfig(**sizes)
    model: Any = AutoModelForCausalLM
    model.from_config(config).save_pretrained(folder)
    # Special tokens are found within words, too: none may begin like one.
    begin, end = "<s>", "</s>"
    known = {begin: 0, end: 1, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    words = Tokenizer(WordLevel(known, unk_token=begin))
    words.pre_tokenizer = Whitespace()
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words, bos_token=begin, eos_token=end).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a small Llama with random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--windows", action="store_true", help="a Gemma 3, whose layers have sliding windows")
    given = parser.parse_args()
    make_small_llama(given.folder, layers=given.layers, hidden=given.hidden, windows=given.windows)
    print(f"made {given.folder}")
