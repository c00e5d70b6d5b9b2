"""Pictures for scripts of callers, under vLLM's names: from URLs to Pillow's images, and back.

What a server fetches for its clients is another matter (`fetching.py`): here whoever runs the script names the URL.
"""

import base64
import io
from typing import TYPE_CHECKING

from jaxpaged.multimodal.decoding import PictureLimits, decode_picture
from jaxpaged.multimodal.fetching import FetchLimits, MediaFetcher
from jaxpaged.multimodal.pictures import data_url_bytes

if TYPE_CHECKING:
    from PIL import Image

SECONDS = 60.0


def fetch_image(image_url: str) -> "Image.Image":
    """The picture that an http:, https: or data: URL names, in RGB. Hosts must have public addresses.

    Raises RequestError for a URL that is none of these and for what is no picture, FetchError for what cannot be
    fetched.
    """
    from PIL import Image

    limits = PictureLimits()
    if image_url[:5].lower() == "data:":
        data = data_url_bytes(image_url, "image_url", limits)
    else:
        data = MediaFetcher(("*",), limits=FetchLimits(limits.max_bytes, SECONDS)).fetch(image_url, "image_url")
    return Image.fromarray(decode_picture(data, "image_url", limits))


def encode_image_url(image: "Image.Image", *, format: str = "PNG") -> str:
    """An image as a data URL, in a format of Pillow's that requests may have: PNG, JPEG, WEBP or GIF."""
    image.save(file := io.BytesIO(), format)
    return f"data:image/{format.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
