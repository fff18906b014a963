"""Requests with images that vLLM has no hash of, which are neither read nor saved."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from infinistore import blocking
from infinistore.integrations.internal.prefix_keys import PrefixChain
from tests.bad_days.servers import ServerProcess

from .marks import NEEDS_VLLM

if TYPE_CHECKING:
    from .made_engine import MadeEngine

pytestmark = NEEDS_VLLM

BLOCK = 16
TOKENS = [5] * 4 + [1999] * 40 + list(range(100, 121))
HASH = "0f" * 32


def name_of_the_first_image(*, caching: bool = False, cache_gb: float = 0) -> str | None:
    """What vLLM's part for requests calls the first image after its start; None if it
    takes its hash.
    """
    import numpy as np
    from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
    from vllm.renderers.base import BaseRenderer

    images: list[Any] = [np.zeros((8, 8, 3), np.uint8)]
    part: Any = SimpleNamespace(
        config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=caching)),
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb)),
        _validate_mm_uuids=lambda *given: None,
    )
    items = MultiModalDataItems({"image": ImageProcessorItems(images)})
    names = BaseRenderer._process_mm_uuids(part, {"image": images}, items, {}, "renderer0-mm-1")
    named = names.get("image")
    return None if named is None else named[0]


def request_with(identifier: str | None, number: int = 1) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    images = []
    if identifier is not None:
        place = PlaceholderRange(offset=4, length=40)
        images = [
            MultiModalFeatureSpec(
                data=None, modality="image", identifier=identifier, mm_position=place, mm_hash=identifier
            )
        ]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    return Request(
        request_id=f"image{number}",
        prompt_token_ids=TOKENS,
        sampling_params=params,
        pooling_params=None,
        mm_features=images,
    )


def config_of(*, caching: bool, cache_gb: float | None) -> Any:
    inputs = None if cache_gb is None else SimpleNamespace(mm_processor_cache_gb=cache_gb)
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=inputs),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )


@pytest.mark.process  # vLLM starts one when its models are imported
@pytest.mark.parametrize(
    ("caching", "cache_gb", "identifier", "unhashed"),
    [
        (False, 0, HASH, True),  # the request's own name for it, which may be any
        (False, 0, None, False),
        (True, 0, HASH, False),
        (False, 4, HASH, False),
        (False, None, HASH, False),
        (True, 4, "renderer0-mm-1-image-0", True),
        (True, 4, "adapter:renderer12-mm-345-video-1", True),
    ],
)
def test_inputs_are_unhashed_if_vllm_needs_no_hash_or_if_they_are_named_so(
    told: list[str], caching: bool, cache_gb: float | None, identifier: str | None, unhashed: bool
) -> None:
    from infinistore.integrations.vllm.layout import UnhashedInputs

    inputs = UnhashedInputs(config_of(caching=caching, cache_gb=cache_gb))

    assert [inputs.are_in(request_with(identifier)) for _ in range(2)] == [unhashed] * 2
    assert len(told) == unhashed
    if unhashed:
        assert "--enable-prefix-caching" in told[0] and "--mm-processor-cache-gb" in told[0]


def test_vllm_names_images_as_is_expected_here() -> None:
    assert name_of_the_first_image() == "renderer0-mm-1-image-0"
    assert name_of_the_first_image(caching=True) is None
    assert name_of_the_first_image(cache_gb=4) is None


@pytest.fixture
def engine(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["MadeEngine"]:
    from .made_engine import open_engine

    with open_engine(server.url, tmp_path, monkeypatch, caching=False) as engine:
        yield engine


@pytest.fixture
def stored(engine: "MadeEngine", server: ServerProcess) -> Iterator[blocking.BlockingStore]:
    """A store that another engine has put the blocks into, for other images of these
    names.
    """
    from infinistore.integrations.vllm.connector import extra_keys
    from infinistore.integrations.vllm.layout import Layout
    from infinistore.integrations.vllm.settings import ConnectorSettings

    config = engine.scheduler.vllm_config
    transfer = config.kv_transfer_config
    assert transfer is not None
    settings = ConnectorSettings.from_extra_config(transfer.kv_connector_extra_config)
    names = Layout.of(config, engine.scheduler.kv_cache_config, settings).names
    with blocking.open_store(server.url) as store:
        for identifier in ("renderer0-mm-1-image-0", HASH):
            chain = PrefixChain(BLOCK, extra=partial(extra_keys, request_with(identifier)))
            store.put_many(dict.fromkeys(names.all_keys(chain.extend(TOKENS)), b"other"))
        yield store


def steps_of(engine: "MadeEngine", request: Any) -> tuple[int | None, list[Any]]:
    """What is to be read for a request, and what is saved of it."""
    connector: Any = engine.scheduler.connector
    loadable = None
    while loadable is None:  # a step that computes does not wait for a look-up, and the next one asks again
        loadable, _ = connector.get_num_new_matched_tokens(request, 0)
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 5],))
    connector.update_state_after_alloc(request, blocks, 0)
    state = SimpleNamespace(resolve_block_ids=lambda _: ([1, 2, 3, 4, 5],), boundary_state_offloads={})
    scheduled = SimpleNamespace(
        num_scheduled_tokens={request.request_id: len(TOKENS)}, preempted_req_ids=(), kv_connector_block_state=state
    )
    step = connector.build_connector_meta(scheduled).step
    assert connector.request_finished(request, [])[0] is False
    return loadable, step.saves


def test_a_request_with_an_unhashed_image_reads_nothing_of_others_and_leaves_nothing(
    engine: "MadeEngine", stored: blocking.BlockingStore, told: list[str]
) -> None:
    assert steps_of(engine, request_with("renderer0-mm-1-image-0")) == (0, [])
    assert steps_of(engine, request_with("renderer0-mm-2-image-0", 2)) == (0, [])
    assert len(told) == 1


def test_one_with_a_hashed_image_reads_and_one_without_saves(
    engine: "MadeEngine", stored: blocking.BlockingStore, told: list[str]
) -> None:
    assert steps_of(engine, request_with(HASH)) == (64, [])
    loadable, saves = steps_of(engine, request_with(None, 2))
    assert (loadable, len(saves)) == (0, 1)
    assert told == []
