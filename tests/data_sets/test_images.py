"""Images of every kind in RGB, and fingerprints that notice when a data set changes."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torchvision
from PIL import Image

from kernelwarehouse.data import ArrayImages, DataSet, FileImages
from kernelwarehouse.data import images as images_module
from kernelwarehouse.data.images import TorchvisionImages
from kernelwarehouse.errors import DataError, UnreadableImageError
from kernelwarehouse.training.predict import read_pictures

COLOUR = (200, 100, 50)
GREY_16 = np.array([[0, 255, 256, 0x80FF, 0xFFFF]], dtype=np.uint16)


def load(path: Path) -> np.ndarray:
    """The pixels, by both ways to read a file."""
    [picture] = read_pictures([str(path)])
    found = np.asarray(FileImages([path], [0]).load(0))
    np.testing.assert_array_equal(found, np.asarray(picture))
    return found


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_sixteen_bit_grey_keeps_its_upper_eight_bits(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"grey.{suffix}"
    Image.fromarray(GREY_16).save(path)
    assert load(path)[0].tolist() == [[0] * 3, [0] * 3, [1] * 3, [0x80] * 3, [255] * 3]


def test_sixteen_bit_grey_of_either_byte_order(tmp_path: Path) -> None:
    Image.new("I;16B", (1, 1), 0x8001).save(tmp_path / "big.tif")
    assert Image.open(tmp_path / "big.tif").mode == "I;16B"
    assert load(tmp_path / "big.tif").tolist() == [[[0x80] * 3]]


@pytest.mark.parametrize(
    ("pixels", "kind"),
    [(np.array([[0.0, 0.5]], np.float32), "floating point"), (np.array([[0, 70_000]], np.int32), "32-bit")],
)
def test_values_of_unknown_range_are_refused_by_name(pixels: np.ndarray, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.tif"
    Image.fromarray(pixels).save(path)
    for read in (lambda: FileImages([path], [0]).load(0), lambda: read_pictures([str(path)])):
        with pytest.raises(
            UnreadableImageError, match=rf"odd\.tif: pixels are {kind}.*8 or 16 bits a channel are wanted"
        ):
            read()


@pytest.mark.parametrize(("bits", "photometric", "what"), [(12, 1, "12 bits"), (16, 0, "white at 0")])
def test_grey_tiffs_of_another_range_are_refused(bits: int, photometric: int, what: str, tmp_path: Path) -> None:
    """Two by one pixels, uncompressed: a header, the pixels, and one directory of tags."""
    pixels = b"\xff" * (2 * bits // 8)
    pixels += b"\0" * (4 - len(pixels))
    tags = {256: 2, 257: 1, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 1, 279: 2 * bits // 8}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    path = tmp_path / "odd.tif"
    path.write_bytes(b"II*\0" + struct.pack("<I", 12) + pixels + struct.pack("<H", len(tags)) + entries + bytes(4))
    assert Image.open(path).mode == "I;16"
    with pytest.raises(UnreadableImageError, match=rf"odd\.tif.*{what}"):
        load(path)


@pytest.mark.parametrize(
    ("mode", "suffix", "expected"),
    [
        ("RGB", "png", COLOUR),
        ("RGBA", "png", COLOUR),
        ("P", "png", (204, 102, 51)),  # the nearest of the web's colours
        ("CMYK", "tif", COLOUR),
        ("LAB", "tif", COLOUR),
        ("YCbCr", "tif", COLOUR),
        ("L", "png", (124, 124, 124)),
        ("LA", "png", (124, 124, 124)),
        ("1", "png", (255, 255, 255)),
    ],
)
def test_other_kinds_of_files_keep_their_colours(
    mode: str, suffix: str, expected: tuple[int, int, int], tmp_path: Path
) -> None:
    picture = Image.new("RGB", (2, 2), COLOUR)
    picture = picture.convert("L").point(lambda value: 255).convert("1") if mode == "1" else picture.convert(mode)
    path = tmp_path / f"picture.{suffix}"
    picture.save(path)
    assert Image.open(path).mode == mode
    np.testing.assert_allclose(load(path)[0, 0], expected, atol=1)


def test_transparency_is_dropped_and_the_colour_beneath_stays(tmp_path: Path) -> None:
    Image.new("RGBA", (1, 1), (*COLOUR, 0)).save(tmp_path / "clear.png")
    Image.new("RGB", (1, 1), COLOUR).quantize(2).save(tmp_path / "palette.png", transparency=0)
    assert load(tmp_path / "clear.png").tolist() == load(tmp_path / "palette.png").tolist() == [[list(COLOUR)]]


def test_damage_of_any_kind_is_an_unreadable_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise struct.error("unpack requires a buffer of 4 bytes")

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(UnreadableImageError, match=r"x\.tif: unpack requires"):
        FileImages([tmp_path / "x.tif"], [0]).load(0)


def test_sixteen_bit_arrays_are_refused_with_what_would_be_right() -> None:
    with pytest.raises(DataError, match=r"images are uint16.*expected uint8.*\(images >> 8\)\.astype\('uint8'\)"):
        ArrayImages(np.zeros((2, 4, 4), dtype=np.uint16), np.zeros(2, dtype=int), "x.npz")


def test_fingerprint_of_arrays_sees_pixels_labels_and_counts(striped: DataSet) -> None:
    train = striped.train
    assert isinstance(train, ArrayImages)

    def changed(pixels: np.ndarray, labels: np.ndarray) -> set[str]:
        """Which parts of the fingerprint differ."""
        before = striped.fingerprint()
        after = DataSet("striped", striped.classes, ArrayImages(pixels, labels, "x"), striped.validation).fingerprint()
        assert before["validation"] == after["validation"]
        return {name for name, value in before["training"].items() if after["training"][name] != value}

    other_pixels, other_labels = train.pixels.copy(), train.labels.copy()
    other_pixels[5, 3, 3, 0] ^= 1
    other_labels[[0, 1]] = other_labels[[1, 0]]
    assert changed(train.pixels.copy(), train.labels.astype(np.int32)) == set()
    assert changed(np.asfortranarray(train.pixels), train.labels) == set()
    assert changed(other_pixels, train.labels) == {"content"}
    assert changed(train.pixels, other_labels) == {"labels"}
    assert changed(train.pixels[:60], train.labels[:60]) == {"images", "labels", "content"}


def pictures(root: Path, names: tuple[str, ...]) -> FileImages:
    root.mkdir()
    for number, name in enumerate(names):
        (root / name).write_bytes(b"x" * (10 + number))
    return FileImages([root / name for name in names], range(len(names)))


def test_fingerprint_of_files_sees_names_and_sizes_but_not_place_and_time(tmp_path: Path) -> None:
    names = ("a.png", "b.png", "c.png")
    one, moved = pictures(tmp_path / "one", names), pictures(tmp_path / "moved", names)
    renamed = pictures(tmp_path / "renamed", ("a.png", "b.png", "d.png"))
    os.utime(tmp_path / "moved" / "a.png", (0, 0))
    assert one.content_hash() == moved.content_hash()
    assert one.content_hash() != renamed.content_hash()
    (tmp_path / "moved" / "b.png").write_bytes(b"longer than before")
    assert one.content_hash() != moved.content_hash()
    (tmp_path / "one" / "c.png").unlink()
    assert FileImages([tmp_path / "one" / "c.png"], [0]).content_hash()


def test_fingerprint_asks_for_the_sizes_of_some_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "SIZES_IN_FINGERPRINT", 3)
    files = pictures(tmp_path / "many", tuple(f"{number:02d}.png" for number in range(21)))
    before = files.content_hash()
    (tmp_path / "many" / "05.png").write_bytes(b"")
    assert files.content_hash() == before
    (tmp_path / "many" / "10.png").write_bytes(b"")
    assert files.content_hash() != before


def test_fingerprint_of_torchvision_sets_sees_pixels_in_memory() -> None:
    def fake(seed: int) -> TorchvisionImages:
        dataset = torchvision.datasets.CIFAR10.__new__(torchvision.datasets.CIFAR10)
        dataset.data = np.random.default_rng(seed).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
        dataset.targets = [0, 1, 0, 1]
        return TorchvisionImages(dataset, "CIFAR10:train")

    assert fake(0).content_hash() == fake(0).content_hash() != fake(1).content_hash()
    listed = TorchvisionImages([(Image.new("RGB", (2, 2)), 1)], "listed")
    assert listed.content_hash() == ""
    assert listed.labels.tolist() == [1]
