"""When the frames of a video were, as far as callers say it; and what is no video, nor a picture."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.config.video_options import VideoOptions
from jaxpaged.errors import RequestError
from jaxpaged.multimodal.sources import source_of_part, sources_of_data
from jaxpaged.multimodal.videos import Frames, clip_of, frames_of, videos_in
from tests.multimodal.test_embeddings import Tensor


@pytest.mark.parametrize(
    ("said", "asked", "indices", "fps"),
    [
        (VideoOptions(), VideoOptions(), [0, 1, 2, 3], 1.0),
        (VideoOptions(), VideoOptions(fps=2.0), [0, 0.5, 1, 1.5], 2.0),
        (VideoOptions(fps=4.0), VideoOptions(fps=2.0), [0, 0.25, 0.5, 0.75], 4.0),
        (VideoOptions(fps=4.0, total=8), VideoOptions(), [0, 0.25, 0.5, 0.75], 2.0),
        (VideoOptions(fps=2.0, indices=(1, 3, 5, 7)), VideoOptions(total=99), [0.5, 1.5, 2.5, 3.5], 1.0),
        (VideoOptions(), VideoOptions(num_frames=2), [0, 3], 0.5),
        (VideoOptions(), VideoOptions(num_frames=9), [0, 1, 2, 3], 1.0),
    ],
)
def test_when_frames_were(said, asked, indices, fps):
    clip = clip_of(Frames(tuple("abcd"), said), asked, "video")
    assert list(clip.seconds) == indices and clip.fps == fps
    assert len(clip.frames) == len(indices)


def test_a_list_of_pictures_is_one_video_and_a_list_of_videos_is_several():
    pair, url = (["a"], {"fps": 1}), "data:video/jpeg;base64,AAAA"
    assert videos_in(["a.png", b"b"]) == [["a.png", b"b"]]
    assert videos_in([["a"], pair, url]) == [["a"], pair, url]
    assert videos_in(pair) == [pair] and videos_in(url) == [url]
    assert videos_in([]) == [] == videos_in(None)


@pytest.mark.parametrize("of_numpy", [jnp.asarray, lambda array: Tensor(array, str(array.dtype)), lambda array: array])
def test_arrays_of_any_library_are_videos(of_numpy):
    two_videos = np.arange(2 * 3 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 3, 4, 5, 3)
    np.testing.assert_array_equal(videos_in(of_numpy(two_videos)), two_videos)
    (video,) = videos_in(of_numpy(two_videos[1]))
    frames = frames_of(video, "video", lambda frame, field: frame).frames
    np.testing.assert_array_equal(frames, two_videos[1])
    with pytest.raises(RequestError, match=r"video is an array of float32 with shape \[1, 4, 5, 3\], no video"):
        frames_of(of_numpy(np.zeros((1, 4, 5, 3), np.float32)), "video", lambda frame, field: frame)


@pytest.mark.parametrize("kind", ["input_video", "input_audio", "audio_url"])
def test_a_part_that_is_another_medium(kind):
    with pytest.raises(RequestError, match=f"part of type '{kind}'; texts, pictures and videos are taken") as error:
        source_of_part({"type": kind, kind: "https://a.org/b.mp4"}, "messages[0].content[0]")
    assert error.value.parameter == "messages[0].content[0].type"


def test_other_media_of_multi_modal_data():
    with pytest.raises(RequestError, match="'audio'; only 'image' and 'video' are taken. Leave it out"):
        sources_of_data({"audio": [b"x"]})
    assert sources_of_data({"audio": [], "video": []}) == []
