import numpy as np
import pytest

from jaxpaged.errors import FetchError, RequestError
from jaxpaged.multimodal import fetching
from jaxpaged.multimodal.image_urls import encode_image_url, fetch_image
from tests.multimodal.drawn import drawn, encoded
from tests.multimodal.local_server import LocalServer, Network
from tests.multimodal.test_fetching import response, sends


@pytest.fixture
def serve(monkeypatch):
    made = []

    def start(body):
        made.append(LocalServer(sends(response(body))))
        network = Network(made[-1])
        monkeypatch.setattr(fetching, "addresses_of", network.resolve)
        monkeypatch.setattr(fetching, "connect_to", network.connect)

    yield start
    for each in made:
        each.close()


def test_a_url_becomes_the_picture_that_it_names(serve):
    image = drawn(40, 30)
    serve(encoded(image))
    found = fetch_image("http://pictures.example/cat.png")
    assert found.mode == "RGB" and np.array_equal(found, image)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "JPEG"])
def test_an_image_becomes_a_data_url_and_comes_back(format):
    image = drawn(40, 30)
    url = encode_image_url(image, format=format)
    found = fetch_image(url)
    assert url.startswith(f"data:image/{format.lower()};base64,") and found.size == (40, 30)
    if format == "PNG":
        assert np.array_equal(found, image)


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("cat.png", RequestError, "image_url"),
        ("file:///etc/passwd", RequestError, "image_url"),
        ("http://127.0.0.1/cat.png", FetchError, "no public address"),
        ("data:image/png;base64,AAAA", RequestError, "is no picture"),
    ],
)
def test_what_is_no_picture_of_a_public_host_is_refused(url, error, said):
    with pytest.raises(RequestError, match=said) as caught:
        fetch_image(url)
    assert type(caught.value) is error


def test_what_a_host_sends_that_is_no_picture_is_refused(serve):
    serve(b"<html>")
    with pytest.raises(RequestError, match="image_url"):
        fetch_image("http://pictures.example/")
