"""A small Llama with random weights, made here and now: nothing is downloaded.

    python bench/small_llama.py FOLDER [--layers 8] [--hidden 768]

Its answers mean nothing, but they are answers: the same tokens for the same prompt, and
others for another one. The tokenizer knows the words w0, w1, w2, ..., so that the
folder can be served, too.
"""

import argparse
from pathlib import Path
from typing import Any

__all__ = ["VOCABULARY", "make_small_llama"]

VOCABULARY = 2048


def make_small_llama(folder: Path, *, layers: int = 8, hidden: int = 768, seed: int = 0) -> None:
    """Write a model of `layers` layers, with keys and values for a third of its heads
    of 64 numbers each.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    heads = hidden // 64
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 3),
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=4 / hidden**0.5,  # enough that an answer depends on the whole prompt, not on its last token
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words, bos_token="w0", eos_token="w1").save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a small Llama with random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768)
    given = parser.parse_args()
    make_small_llama(given.folder, layers=given.layers, hidden=given.hidden)
    print(f"made {given.folder}")
