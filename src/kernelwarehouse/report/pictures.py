"""Arrays and images as PNG data URIs, so that a page needs no other files."""

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

NEGATIVE = np.array([33, 102, 172], dtype=np.float64)
POSITIVE = np.array([178, 24, 43], dtype=np.float64)
WHITE = np.array([255, 255, 255], dtype=np.float64)


def data_uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def signed_heat_map(values: NDArray[np.floating], limit: float) -> Image.Image:
    """One pixel a value: white at 0, blue at `-limit`, red at `limit`, and beyond as at the limit."""
    share = np.clip(np.asarray(values, dtype=np.float64) / (limit or 1.0), -1, 1)[..., None]
    colours = WHITE + np.where(share > 0, share * (POSITIVE - WHITE), -share * (NEGATIVE - WHITE))
    return Image.fromarray(colours.round().astype(np.uint8))
