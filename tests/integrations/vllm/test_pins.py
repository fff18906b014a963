"""What the connector pins in the store: system prompts from a file, and prompts of
requests with a high priority.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore import blocking
from infinistore.errors import ConfigError
from infinistore.integrations.internal.prefix_keys import PrefixChain
from infinistore.integrations.vllm.blocks import BlockNames, LayerGroup
from infinistore.integrations.vllm.scheduler import Pins, read_prompts

from .halves import BLOCK_TOKENS, FULL, ByHand, MadeRequest, make_names, make_record, make_scheduler

SYSTEM = list(range(100, 110))  # two full blocks and two tokens
PROMPT = [*SYSTEM, *range(200, 206)]  # four full blocks
VALUE = bytes(1000)
POOL_BYTES = 64 * 1024


@pytest.fixture
def store() -> Iterator[blocking.BlockingStore]:
    with blocking.open_store(pool_bytes=POOL_BYTES, minimal_allocate_bytes=1024) as store:
        yield store


def hashes_of(tokens: Sequence[int]) -> list[str]:
    return PrefixChain(BLOCK_TOKENS).extend(tokens)


def keys_of(tokens: Sequence[int]) -> list[str]:
    return make_names().all_keys(hashes_of(tokens))


def fill(store: blocking.BlockingStore) -> None:
    """Put so much that what is not pinned is evicted."""
    for number in range(3 * POOL_BYTES // 1024):
        store.put(f"other {number}", VALUE)


@attrs.define
class Pinning:
    pins: Pins
    background: ByHand

    def run(self, later_s: float = 0.0) -> None:
        """Do all that is to be done so many seconds later."""
        self.background.run(later_s)
        self.pins.go_on()
        self.background.run()


Make = Callable[..., Pinning]


@pytest.fixture
def make(store: blocking.BlockingStore) -> Make:
    def make(groups: Sequence[LayerGroup] = (FULL,), names: BlockNames | None = None, **options: Any) -> Pinning:
        background = ByHand()
        given = {"background": background, "clock": lambda: background.now, **options}
        return Pinning(Pins(store, names or make_names(), groups, make_record(), **given), background)

    return make


def test_the_part_of_a_prompt_that_is_in_the_list_is_pinned_and_no_more(
    store: blocking.BlockingStore, make: Make
) -> None:
    pinning = make(prompts=[SYSTEM])
    store.put_many(dict.fromkeys(keys_of(PROMPT), VALUE))
    assert pinning.pins.worth(PROMPT, len(PROMPT), 0) == 8
    pinning.pins.use(hashes_of(PROMPT), 8)
    pinning.run()
    fill(store)
    assert store.exists_many(keys_of(PROMPT)) == [True] * 6 + [False] * 6


def test_pins_of_an_engine_that_has_ended_end_by_themselves(
    store: blocking.BlockingStore, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    retention = store.embedded.core.retention  # type: ignore[attr-defined]
    now = [retention.clock()]
    monkeypatch.setattr(retention, "clock", lambda: now[0])
    pinning = make(prompts=[SYSTEM], pin_s=600.0)
    store.put_many(dict.fromkeys(keys_of(PROMPT), VALUE))
    pinning.pins.use(hashes_of(PROMPT), 8)
    pinning.run()
    now[0] += 600.0
    assert store.stats().store.protected_keys == 6
    pinning.run(later_s=60.0)
    now[0] += 600.0
    assert store.stats().store.protected_keys == 6, "it was renewed"
    now[0] += 120.0
    assert store.stats().store.protected_keys == 0


def test_a_request_may_ask_for_pins_and_for_how_long(store: blocking.BlockingStore, make: Make) -> None:
    pinning = make(pin_s=60.0)
    scheduler = make_scheduler(store, pins=pinning.pins)
    request = MadeRequest.of(PROMPT)
    request.kv_transfer_params = {"infinistore": {"pin_s": 600}}
    store.put_many(dict.fromkeys(keys_of(PROMPT), VALUE))
    assert scheduler.loadable_tokens(request, 0) == len(PROMPT)
    assert scheduler.loadable_tokens(MadeRequest.of([1, *PROMPT], "other"), 0) == 0
    pinning.pins.use(hashes_of(SYSTEM), 8)  # for less long: that takes nothing away
    pinning.run()
    assert store.stats().store.protected_keys == 12
    pinning.run(later_s=590.0)
    assert store.stats().store.protected_keys == 12
    pinning.run(later_s=80.0)
    assert store.stats().store.protected_keys == 0


def test_prompts_that_begin_otherwise_are_worth_nothing(make: Make) -> None:
    pins = make(prompts=[SYSTEM, [1, 2, 3], SYSTEM[:5]]).pins
    assert pins.worth([0, *PROMPT], 17, 0) == 0
    assert pins.worth(SYSTEM[:7], 7, 0) == 4, "the shorter one of the list"
    assert pins.worth([1, 2, 3, 4, 5], 5, 0) == 0, "less than a block"
    assert pins.worth([*SYSTEM[:-1], 999, 5], 11, 0) == 8, "the last token of a text may change with what follows"
    assert make().pins.worth(PROMPT, 16, 0) == 0


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=4),
    st.lists(st.integers(0, 2), max_size=14),
)
def test_what_is_worth_a_pin_is_the_longest_common_beginning_in_blocks(
    prompts: list[list[int]], tokens: list[int]
) -> None:
    with blocking.open_store(pool_bytes=POOL_BYTES) as store:
        pins = Pins(store, make_names(), (FULL,), make_record(), prompts=prompts, background=ByHand(), clock=float)
        whole = [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts if prompt]
        listed = [prompt for prompt in prompts if prompt]
        fitting = [end for prompt, end in zip(listed, whole, strict=True) if tokens[:end] == prompt[:end]]
        assert pins.worth(tokens, len(tokens), 0) == max(fitting, default=0)


@pytest.mark.parametrize(("priority", "worth"), [(-5, 16), (-1, 16), (0, 0), (3, 0)])
def test_prompts_of_requests_that_come_early_enough_are_pinned(make: Make, priority: int, worth: int) -> None:
    assert make(priority=-1).pins.worth([*PROMPT, 1], 17, priority) == worth


def test_blocks_that_are_being_written_are_pinned_once_they_are_there(
    store: blocking.BlockingStore, make: Make
) -> None:
    keys = keys_of(SYSTEM)
    pinning = make(prompts=[SYSTEM])
    pinning.pins.use(hashes_of(PROMPT), 8)
    pinning.run()
    store.put_many(dict.fromkeys(keys, VALUE))
    pinning.background.run(1.0)
    fill(store)
    assert all(store.exists_many(keys))


def test_pins_that_a_server_has_forgotten_are_made_again(store: blocking.BlockingStore, make: Make) -> None:
    keys = keys_of(SYSTEM)
    store.put_many(dict.fromkeys(keys, VALUE))
    pinning = make(prompts=[SYSTEM])
    pinning.pins.use(hashes_of(PROMPT), 8)
    pinning.run()
    assert store.unpin(keys) == len(keys)  # as after a restart
    pinning.run(30)
    assert store.unpin(keys) == 0
    pinning.run(30)
    assert store.unpin(keys) == len(keys)


def test_what_nobody_uses_any_more_is_unpinned_and_what_is_used_again_is_pinned(
    store: blocking.BlockingStore, make: Make
) -> None:
    keys = keys_of(PROMPT)
    store.put_many(dict.fromkeys(keys, VALUE))
    pinning = make(priority=0, pin_s=100)
    pinning.pins.use(hashes_of(PROMPT), 16)
    pinning.run()
    pinning.run(90)
    pinning.pins.use(hashes_of(PROMPT), 8)
    pinning.run(90)
    assert store.unpin(keys[6:]) == 0
    assert store.unpin(keys[:6]) == 6
    pinning.run(200)
    pinning.pins.use(hashes_of(PROMPT), 16)
    pinning.run()
    assert store.unpin(keys) == len(keys)


def test_no_more_blocks_than_the_bound_are_pinned(store: blocking.BlockingStore, make: Make) -> None:
    keys = keys_of(PROMPT)
    store.put_many(dict.fromkeys(keys, VALUE))
    pinning = make(priority=0, most=3)
    pinning.pins.use(hashes_of(PROMPT), 16)
    pinning.run()
    assert [store.unpin(keys[first : first + 3]) for first in range(0, 12, 3)] == [0, 3, 3, 3]


def test_what_the_store_refuses_is_told_once_and_the_rest_stays_pinned(
    store: blocking.BlockingStore, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """All together may take a quarter of the pool: five blocks of three keys."""
    tokens = list(range(40))
    pinning = make(priority=0)
    store.put_many(dict.fromkeys(keys_of(tokens), VALUE))
    with caplog.at_level(logging.WARNING, logger="vllm.infinistore"):
        for count in (16, 20, 40):
            pinning.pins.use(hashes_of(tokens), count)
            pinning.run()
        pinning.run(60)
        pinning.run(60)
    (line,) = caplog.messages
    assert "pin failed, and the engine goes on without: LimitExceeded" in line
    assert "--max-protected-ratio" in line
    assert "`infinistore unpin --prefix vllm/` ends all pins of vLLM" in line
    fill(store)
    there = store.exists_many(keys_of(tokens))
    assert there == [True] * 15 + [False] * 15


def test_pins_of_an_engine_that_has_ended_leave_no_room_until_the_command_of_the_warning_ends_them(
    store: blocking.BlockingStore, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = list(range(20))
    store.put_many(dict.fromkeys(keys_of(tokens), VALUE))
    ended = make(priority=0)
    ended.pins.use(hashes_of(tokens), 20)
    ended.run()
    names = make_names(config="of another model")
    keys = names.all_keys(hashes_of(SYSTEM))
    store.put_many(dict.fromkeys(keys, VALUE))
    new = make(priority=0, names=names)
    new.pins.use(hashes_of(SYSTEM), 8)
    with caplog.at_level(logging.WARNING, logger="vllm.infinistore"):
        new.run()
    (line,) = caplog.messages
    (command,) = re.findall("`infinistore (.*?)`", line)
    assert command == "unpin --prefix vllm/"

    assert store.unpin(store.keys("vllm/")) == 15
    new.run(60)
    assert store.unpin(keys) == 6


def test_a_store_that_is_gone_is_told_once_and_pinned_again_when_it_is_back(
    store: blocking.BlockingStore, make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(SYSTEM)
    store.put_many(dict.fromkeys(keys, VALUE))
    pinning = make(prompts=[SYSTEM])
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, logger="vllm.infinistore"):
        patched.setattr(type(store), "pin", lost)
        pinning.pins.use(hashes_of(PROMPT), 8)
        pinning.run()
        pinning.run(60)
        (line,) = caplog.messages
        assert "StoreUnavailable: it is gone" in line
    pinning.run(60)
    assert store.unpin(keys) == len(keys)


def lost(*_: object, **__: object) -> int:
    from infinistore.errors import StoreUnavailable

    raise StoreUnavailable("it is gone")


def test_the_scheduler_pins_what_its_requests_begin_with(store: blocking.BlockingStore, make: Make) -> None:
    pinning = make(prompts=[SYSTEM])
    scheduler = make_scheduler(store, pins=pinning.pins)
    store.put_many(dict.fromkeys(keys_of(PROMPT), VALUE))
    assert scheduler.loadable_tokens(MadeRequest.of([1, 2, 3, 4, 5], "other"), 0) == 0
    assert scheduler.loadable_tokens(MadeRequest.of(PROMPT), 0) == 16
    scheduler.plan({}, (), lambda _: ())
    pinning.run()
    assert store.unpin(keys_of(PROMPT)) == 6


def test_of_other_groups_only_what_a_request_needs_there_is_pinned(store: blocking.BlockingStore, make: Make) -> None:
    window = LayerGroup(("3",), BLOCK_TOKENS, 1, window=5)
    store.put_many(dict.fromkeys((*keys_of(PROMPT), *make_names().all_keys(hashes_of(PROMPT), ["3"])), VALUE))
    pinning = make(groups=(FULL, window), priority=0)
    pinning.pins.use(hashes_of(PROMPT), 16)
    pinning.run()
    assert store.unpin(make_names().all_keys(hashes_of(PROMPT), ["3"])) == 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file or directory; give a file that vLLM's scheduler can read"),
        ("{", "it is no JSON"),
        ('{"a": 1}', "write a list of at most 1000 prompts"),
        (json.dumps(["a"] * 1001), "write a list of at most 1000 prompts"),
        ('["a", 3]', "entry 1 is neither a text nor a list of tokens"),
        ('["a", [1, true]]', "entry 1 is neither a text nor a list of tokens"),
        ('[""]', "entry 0 is neither"),
        (b"\xff", "it is no JSON"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_error(tmp_path: Path, content: str | bytes | None, problem: str) -> None:
    path = tmp_path / "prompts.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as raised:
        read_prompts(str(path), lambda text: [len(text)])
    assert str(raised.value).startswith(f"kv_connector_extra_config: pin_prompts_file {path}: ")
    assert problem in str(raised.value)


def test_texts_become_tokens_and_tokens_stay(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text('["ab", [7, 8]]')
    assert read_prompts(str(path), lambda text: [ord(letter) for letter in text]) == [[97, 98], [7, 8]]
