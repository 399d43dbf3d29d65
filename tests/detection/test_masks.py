"""Masks as run lengths, beside what other tools make of them."""

import numpy as np
import pytest
from faster_coco_eval import mask as faster_masks
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as coco_masks

from kernelwarehouse.detection.masks import decode_mask, encode_mask, rle_of_runs, runs_of
from kernelwarehouse.errors import DataError


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_run_lengths_are_those_of_the_other_tools(height: int, width: int, seed: int, share: float) -> None:
    mask = (np.random.default_rng(seed).random((height, width)) < share).astype(np.uint8)
    rle = encode_mask(mask)
    assert rle["counts"].encode() == coco_masks.encode(np.asfortranarray(mask))["counts"]
    np.testing.assert_array_equal(decode_mask(rle), mask)
    np.testing.assert_array_equal(faster_masks.decode(rle), mask)
    assert rle_of_runs(runs_of(rle["counts"]), height, width) == rle


@pytest.mark.parametrize("shape", [(480, 640), (1, 3000)])
def test_large_masks_too(shape: tuple[int, int]) -> None:
    """Whose run lengths take several signs, and more than 255 runs."""
    generator = np.random.default_rng(1)
    for share in (0, 0.001, 0.5, 1):
        mask = (generator.random(shape) < share).astype(np.uint8)
        np.testing.assert_array_equal(decode_mask(encode_mask(mask)), mask)
        np.testing.assert_array_equal(faster_masks.decode(encode_mask(mask)), mask)


@pytest.mark.parametrize("counts", ["PPP`", "zzzz", "", "a b", "\u20ac", "0" * 7])
def test_text_that_is_no_mask(counts: str) -> None:
    with pytest.raises(DataError, match=r"counts|runs"):
        decode_mask({"size": [4, 4], "counts": counts})
