"""What cutting a long conversation saves."""

from history import computed_tokens, conversation


def test_a_cut_to_three_quarters_computes_at_most_a_tenth_of_sliding() -> None:
    for limit, turn in ((24_576, 200), (32_768, 200)):
        lengths = conversation(limit, turn)
        sliding, full = computed_tokens(lengths, limit, 1.0)
        computed, prompt = computed_tokens(lengths, limit, 0.75)
        assert computed <= 0.1 * sliding
        assert 0.85 * full <= prompt <= full <= limit
