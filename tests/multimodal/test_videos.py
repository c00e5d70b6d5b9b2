"""Videos are refused by name, with what to send in their place."""

import pytest

from jaxpaged.errors import RequestError
from jaxpaged.multimodal.sources import source_of_part, sources_of_data

FRAMES = "Give some of its frames as pictures, one after the other."


@pytest.mark.parametrize("kind", ["video", "video_url", "input_video"])
def test_a_part_that_is_a_video(kind):
    with pytest.raises(RequestError, match=f"'{kind}'.* {FRAMES}") as error:
        source_of_part({"type": kind, kind: {"url": "https://here/x.mp4"}}, "messages[0].content[1]")
    assert error.value.parameter == "messages[0].content[1].type"


def test_a_video_of_multi_modal_data():
    with pytest.raises(RequestError, match=f"'video'.* {FRAMES}"):
        sources_of_data({"video": [[1, 2]]})
    with pytest.raises(RequestError, match="'audio'; only 'image' is taken. Leave it out"):
        sources_of_data({"audio": [b"x"]})
