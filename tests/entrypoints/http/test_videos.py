"""Videos over HTTP: frames as vLLM's clients send them, what the engine gets, what clients are told.

The processes that decode are real; the engine behind has no model.
"""

from types import SimpleNamespace

import pytest

from jaxpaged.config.multimodal import MultiModalConfig
from jaxpaged.engine.input.pictures import PictureIntake
from jaxpaged.multimodal.videos import JPEGS
from tests.entrypoints.http.test_pictures import TEXT, data_url, features_of, file_of, in_base64
from tests.models.video_folder import CHAT, WITH_VIDEOS, make_config, make_tokenizer

FRAMES = [in_base64(file_of("jpeg", seed=seed, width=40, height=24)) for seed in range(3)]
URL = JPEGS + ",".join(FRAMES)


@pytest.fixture(scope="module")
def intake():
    config = MultiModalConfig(mm_bytes_in_flight_gb=1.0, num_media_processes=1, limit_mm_per_prompt={"video": 2})
    made = PictureIntake(make_tokenizer(), config, "model", make_config("qwen3_vl"), WITH_VIDEOS)
    yield made
    made.close()


@pytest.fixture
def sees(serving, intake):
    def ask(*bodies, **options):
        async def scenario(server):
            answers = [await server.client.post("/v1/chat/completions", body) for body in bodies]
            return SimpleNamespace(answers=answers, engine=server.engine, answer=answers[-1])

        settings = {"tokenizer": make_tokenizer(), "chat": CHAT, "max_model_len": 512, "pictures": intake}
        return serving(scenario, options=options, **settings)

    return ask


def chat(*parts, **fields):
    return {"messages": [{"role": "user", "content": [*parts, TEXT]}], "max_tokens": 2, **fields}


def video_url(url=URL, **fields):
    return {"type": "video_url", "video_url": {"url": url}, **fields}


def test_a_video_and_a_picture_in_a_chat(sees):
    picture = {"type": "image_url", "image_url": {"url": data_url(width=40, height=24)}}
    found = sees(chat(video_url(), picture))
    assert found.answer.status == 200, found.answer.body
    (features,) = features_of(found)
    assert [each.modality for each in features] == ["video", "video", "image"]
    details = found.answer.json["usage"]["prompt_tokens_details"]
    assert details == {"multimodal_tokens": {"video": 30, "image": 15}}
    assert "<0.5 seconds><|vision_start|>" in found.engine.seen[0][0]["prompt"]


def test_times_come_with_the_request_where_such_options_are_allowed(sees):
    timed = chat(video_url(), media_io_kwargs={"video": {"fps": 10, "num_frames": 2}})
    assert sees(timed).answer.status == 400
    found = sees(timed, trust_request_mm_kwargs=True)
    assert found.answer.status == 200, found.answer.body
    assert "<0.1 seconds>" in found.engine.seen[0][0]["prompt"]
    assert [len(each) for each in features_of(found)] == [1]


@pytest.mark.parametrize(
    ("part", "field", "words"),
    [
        (video_url("data:video/mp4;base64,AAAA"), "video_url.url", "'video/mp4', and files of videos are not decoded"),
        (video_url("https://example.org/a.mp4"), "video_url.url", "files of videos are not decoded here"),
        (video_url(JPEGS), "video_url.url[0]", "no picture that can be read"),
        (video_url(URL + ",,"), "video_url.url[3]", "no picture that can be read"),
        (video_url(URL.replace("/9j/", "%%%%")), "video_url.url[0]", "not valid base64"),
        (video_url(5), "video_url.url", "it must be a URL"),
        ({"type": "video_url"}, "video_url", "is empty"),
        ({"type": "video", "video": []}, "video", "without frames"),
        ({"type": "video", "video": {"a": 1}}, "video", "of type dict"),
        ({"type": "video", "video": [{}]}, "video[0]", "no picture"),
    ],
)
def test_what_is_no_video_is_a_400_with_its_field(sees, part, field, words):
    answer = sees(chat(part)).answer
    assert answer.status == 400, answer.body
    error = answer.json["error"]
    assert words in error["message"] and error["param"] == f"messages[0].content[0].{field}"


def test_too_many_videos_and_frames(sees):
    too_many = sees(chat(*[video_url()] * 3)).answer
    assert too_many.status == 400 and "has 3 videos, and may have 2" in too_many.json["error"]["message"]
    long = sees(chat(video_url(JPEGS + ",".join([FRAMES[0]] * 800)))).answer
    assert long.status == 400 and "800 frames, and 768 at most are taken" in long.json["error"]["message"]
