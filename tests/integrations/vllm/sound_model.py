"""A small model that hears, a Qwen2-Audio with random weights, made here and now.

python sound_model.py FOLDER BENCH
"""

import sys
from pathlib import Path
from typing import Any

__all__ = ["make_model"]

SPECIAL = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
"""The tokens after the vocabulary. vLLM puts as many of the first as a sound needs in
the place of one."""


def make_model(folder: str) -> None:
    """Write a model, with its tokenizer and what cuts sounds into features."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, models

    from small_llama import VOCABULARY

    torch.manual_seed(0)
    library: Any = transformers
    words = {f"w{number}": number for number in range(VOCABULARY)}
    words |= {token: VOCABULARY + number for number, token in enumerate(SPECIAL)}
    tokenizer = library.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w2")),
        bos_token="w0",
        eos_token="w1",
        pad_token="w0",
        unk_token="w2",
        additional_special_tokens=list(SPECIAL),
    )
    text = library.Qwen2Config(
        vocab_size=len(words),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    sound = library.Qwen2AudioEncoderConfig(
        num_mel_bins=16,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=128,
        d_model=64,
        initializer_range=0.3,
    )
    config = library.Qwen2AudioConfig(audio_config=sound, text_config=text, audio_token_index=VOCABULARY)
    library.Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    features = library.WhisperFeatureExtractor(feature_size=sound.num_mel_bins)
    library.Qwen2AudioProcessor(feature_extractor=features, tokenizer=tokenizer).save_pretrained(folder)
    file = Path(folder, "model.safetensors")
    # As published checkpoints name them, and vLLM reads them.
    weights = {
        name.replace("language_model.model.", "language_model.", 1): one for name, one in load_file(file).items()
    }
    save_file(weights, file, {"format": "pt"})


if __name__ == "__main__":
    sys.path.append(sys.argv[2])
    make_model(sys.argv[1])
