"""Pictures: what decoding and resizing costs against transformers, and what requests with pictures cost others.

    python scripts/bench_multimodal.py --peer ENV/bin/python [--parts pixels ... memory]

`--peer` is a Python with transformers and Pillow (`pip install transformers==5.23.0 pillow`); without it only jaxpaged
is measured. Pictures are drawn here. All that is compared takes turns in one run, and CPU time counts for pixels, so
that other programs on the machine do not; ratios say more than times.

* pixels: decode and preprocess for Gemma 3 (896 x 896), CPU milliseconds a picture.
* processes: pictures a second by number of decoding processes.
* first-token: of a new picture, of a picture whose embeddings are cached, and of a prompt that is cached whole.
* step: host microseconds of a decode step with 64 requests that have pictures, and with 64 that have none.
* pictures: new pictures a second, whole requests of one token, eight at a time.
* others: what requests of text take at a server, alone and while others send it pictures of 12 megapixels, in turns.
* memory: of all processes of a server, before, while and after it is sent 1,000 pictures of 12 megapixels.

The server of the last two is `picture_load.py`'s: its model takes time, and no processor.
`--model gemma3-4b` is of that model's sizes with random weights, for a GPU or a TPU.
"""

import argparse
import base64
import io
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image
from seeing_folder import PREPROCESSOR, write_seeing_folder

from jaxpaged import LLM, SamplingParams
from jaxpaged.multimodal.decoding import PictureLimits, decode_picture
from jaxpaged.multimodal.processes import PictureProcesses
from jaxpaged.multimodal.processors import processor_of

CONFIG = {"model_type": "gemma3", "mm_tokens_per_image": 256}
SIZES = {"640x480": (640, 480), "1080p": (1920, 1080), "12 megapixels": (4000, 3000)}
OPTIONS = {"max_model_len": 512, "max_num_batched_tokens": 512, "token_buckets": (64, 512), "max_num_seqs": 64}
LARGER = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "token_buckets": (64, 512, 2048)}

PEER = """
import io, json, sys, time
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
size = {"height": 896, "width": 896}
processor = Gemma3ImageProcessorPil(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)
for line in sys.stdin:
    data = open(line.strip(), "rb").read()
    began = time.process_time()
    processor(Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="np")
    print(json.dumps(time.process_time() - began), flush=True)
"""


def drawn(width: int, height: int, seed: int) -> bytes:
    """A JPEG with soft forms and some noise, as photographs have."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(coarse).astype(np.int16) + rng.integers(-6, 7, (height, width, 1), np.int16)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def bench_pixels(peer: Path | None, rounds: int) -> None:
    processor, limits = processor_of(CONFIG, PREPROCESSOR), PictureLimits()
    theirs = None
    if peer:
        theirs = subprocess.Popen(
            [peer, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    print("decode and preprocess, CPU ms a picture: jaxpaged, transformers, ratio")
    with TemporaryDirectory() as folder:
        for name, size in SIZES.items():
            path, data = Path(folder) / "picture.jpg", drawn(*size, 0)
            path.write_bytes(data)
            own, other = [], []
            for _ in range(rounds):
                began = time.process_time()
                processor.process(decode_picture(data, "image", limits), "image")
                own.append(time.process_time() - began)
                if theirs:
                    assert theirs.stdin is not None and theirs.stdout is not None, "they were asked for"
                    theirs.stdin.write(f"{path}\n")
                    theirs.stdin.flush()
                    other.append(json.loads(theirs.stdout.readline()))
            ours = 1e3 * statistics.median(own)
            peers = 1e3 * statistics.median(other) if other else float("nan")
            print(f"  {name:14s} {ours:8.1f} {peers:8.1f} {ours / peers:6.2f}", flush=True)
    if theirs:
        theirs.kill()
        theirs.wait()


def bench_processes(counts: tuple[int, ...], num_pictures: int) -> None:
    data = [drawn(*SIZES["1080p"], seed) for seed in range(4)]
    print("1080p pictures a second by number of processes")
    for count in counts:
        processes = PictureProcesses("bench", CONFIG, PREPROCESSOR, num_processes=count)
        with ThreadPoolExecutor(count) as threads:
            once = partial(processes.process, field="image")
            list(threads.map(once, data[:count]))  # they start
            began = time.perf_counter()
            list(threads.map(once, (data[i % 4] for i in range(num_pictures))))
            print(f"  {count}: {num_pictures / (time.perf_counter() - began):6.1f}", flush=True)
        processes.close()


def message(picture: Image.Image | None, question: str) -> list[dict]:
    parts = [] if picture is None else [{"type": "image", "image": picture}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def picture_of(seed: int, size: tuple[int, int]) -> Image.Image:
    return Image.open(io.BytesIO(drawn(*size, seed))).convert("RGB")


def bench_first_token(llm: LLM, rounds: int) -> None:
    one = SamplingParams(max_tokens=1, temperature=0)

    def seconds(picture: Image.Image | None, question: str) -> float:
        began = time.perf_counter()
        llm.chat(message(picture, question), one, use_tqdm=False)
        return time.perf_counter() - began

    kinds: dict[str, list[float]] = {name: [] for name in ("new", "cached picture", "cached prompt", "text alone")}
    seconds(picture_of(10_000, SIZES["1080p"]), "warm up")
    for seed in range(rounds):
        picture = picture_of(seed, SIZES["1080p"])
        kinds["new"].append(seconds(picture, "What is in the picture?"))
        system = [{"role": "system", "content": f"Number {seed}."}]
        began = time.perf_counter()
        llm.chat(system + message(picture, "What is in the picture?"), one, use_tqdm=False)
        kinds["cached picture"].append(time.perf_counter() - began)
        kinds["cached prompt"].append(seconds(picture, "What is in the picture?"))
        kinds["text alone"].append(seconds(None, f"What is in picture {seed} of these that I have not sent to you?"))
    print("first token, a picture of 1080p as an array, ms (median), and against text alone")
    text = statistics.median(kinds["text alone"])
    for name, found in kinds.items():
        print(f"  {name:16s} {1e3 * statistics.median(found):8.1f} {statistics.median(found) / text:6.2f}")


def bench_pictures(llm: LLM, num_pictures: int) -> None:
    one = SamplingParams(max_tokens=1, temperature=0)
    pictures = [picture_of(20_000 + seed, SIZES["640x480"]) for seed in range(num_pictures + 8)]
    llm.chat([message(picture, "Warm up.") for picture in pictures[:8]], one, use_tqdm=False)
    began = time.perf_counter()
    llm.chat([message(picture, "What is it?") for picture in pictures[8:]], one, use_tqdm=False)
    print(f"new pictures of 640x480 a second: {num_pictures / (time.perf_counter() - began):.1f}", flush=True)


def gemma3_4b(folder: Path) -> str:
    """A folder with config.json of Gemma 3 4B's sizes, and the embedded model's tokenizer and template."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    kinds = [("full" if i % 6 == 5 else "sliding") + "_attention" for i in range(34)]
    text = {**heads, **sizes, "vocab_size": 262_208, "layer_types": kinds, "sliding_window_pattern": 6}
    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    return str(write_seeing_folder(folder, text, vision))


def bench_step(llm: LLM, running: int, steps: int, rounds: int) -> None:
    """CPU time of the thread that schedules, prepares and hands out, without that of XLA's threads."""
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=steps + 40, temperature=0, ignore_eos=True)
    small = (96, 96)

    def measured(make: Callable[[int], dict]) -> float:
        ids = [f"{time.monotonic_ns()}-{i}" for i in range(running)]
        for i, request_id in enumerate(ids):
            engine.add_request(request_id, make(i), params)
        for _ in range(30):
            engine.step()
        spent = []
        for _ in range(steps):
            began = time.thread_time()
            engine.step()
            spent.append(time.thread_time() - began)
        engine.abort_request(ids)
        while engine.has_unfinished_requests():
            engine.step()
        return 1e6 * statistics.median(spent)

    def seeing(i: int) -> dict:
        mark = "<start_of_image>"
        return {"prompt": f"{mark} {i} What is it?", "multi_modal_data": {"image": picture_of(i % 8, small)}}

    found: dict[str, list[float]] = {"pictures": [], "text": []}
    for _ in range(rounds):
        found["pictures"].append(measured(seeing))
        found["text"].append(measured(lambda i: {"prompt_token_ids": [300 + i, *range(300, 345)]}))
    seen, text = (statistics.median(found[name]) for name in ("pictures", "text"))
    print(f"host microseconds of a decode step with {running} requests: pictures, text, ratio")
    print(f"  {seen:.0f} {text:.0f} {seen / text:.2f}")


def open_engine(model: str, folder: Path) -> LLM:
    if model != "gemma3-4b":
        return LLM(model, **OPTIONS)
    return LLM(gemma3_4b(folder), load_format="dummy", **OPTIONS | LARGER)


def large_pictures(count: int) -> list[str]:
    """JPEGs of 12 megapixels in base64, each of a multiple of three bytes."""
    files = [drawn(*SIZES["12 megapixels"], seed) for seed in range(count)]
    return [base64.b64encode(each + bytes(-len(each) % 3)).decode() for each in files]


def bench_server(args: argparse.Namespace) -> None:
    """The parts of which the clients are other processes."""
    from picture_load import bench_memory, bench_others  # with gRPC, an extra

    pictures = large_pictures(4)
    if "others" in args.parts:
        bench_others(pictures, args.rounds, args.rates)
    if "memory" in args.parts:
        bench_memory(pictures, args.pictures, 32, args.gib)


PARTS = ("pixels", "processes", "first-token", "step", "pictures", "others", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer", type=Path, help="a Python with transformers and Pillow")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--model", default="demo-vision")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=(1.0, 4.0), help="pictures a second, for others")
    parser.add_argument("--pictures", type=int, default=1000, help="for memory")
    parser.add_argument("--gib", type=float, default=0.5, help="budget of bytes of pictures, for memory")
    args = parser.parse_args()
    if "pixels" in args.parts:
        bench_pixels(args.peer, args.rounds)
    if "processes" in args.parts:
        bench_processes((1, 2, 4), 40)
    if {"others", "memory"} & set(args.parts):
        bench_server(args)
    if {"first-token", "step", "pictures"} & set(args.parts):
        with TemporaryDirectory() as folder, open_engine(args.model, Path(folder)) as llm:
            if "first-token" in args.parts:
                bench_first_token(llm, args.rounds)
            if "step" in args.parts:
                bench_step(llm, 64, 60, 2)
            if "pictures" in args.parts:
                bench_pictures(llm, 32)


if __name__ == "__main__":
    sys.exit(main())
