"""Trains the eyes of the demo model: the tower and the projector through which it sees pictures.

The pictures are drawn here. First the tower learns to tell what covers each part of a picture; then it learns to
answer through the text model, which is frozen: what that says without pictures stays as it was. Both lessons take
shares of the minutes given, on a CPU or a GPU. The folder of work gets two checkpoints: `latest`, with which a run that
was interrupted goes on and which is exported, and `steady`, from before the rate falls: `--resume` it for more minutes.

    python scripts/train_demo_eyes.py --minutes 60
    python scripts/train_demo_eyes.py --minutes 3 --train-only --work-dir FOLDER    # where a GPU is
    python scripts/train_demo_eyes.py --export-only --work-dir FOLDER
"""

import argparse
import collections
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo_model import looking, seeing
from demo_model.card_eyes import card_of_eyes
from demo_model.export_eyes import export_eyes, export_whole
from demo_model.muon import Moments, Rates, init_moments
from demo_model.network import Params, Shape
from demo_model.painting import CHUNK_ROWS
from demo_model.pool import Painters, Pool
from demo_model.tokenizer import with_picture_marks
from demo_model.tower import Eye, init_eye

STARTED = time.monotonic()
REPORT_SECONDS = 5.0
ASSETS = Path(__file__).resolve().parent.parent / "jaxpaged" / "assets"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--demo", type=Path, default=ASSETS / "demo", help="the text model")
    parser.add_argument("--output", type=Path, default=ASSETS / "demo-vision", help="beside the text model")
    parser.add_argument("--whole", type=Path, metavar="FOLDER", help="write all weights there too, for transformers")
    parser.add_argument("--questions", type=int, default=192, help="per task, in the final table")
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "jaxpaged-demo-eyes")
    parser.add_argument("--minutes", type=float, default=60, help="from the start to the last checkpoint")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from; the latest of the folder of work")
    parser.add_argument("--look-time", type=float, default=0.2, help="share of the minutes for the tower alone")
    parser.add_argument("--look-chunks", type=int, default=4, help=f"a step, of {CHUNK_ROWS} rows")
    parser.add_argument("--chunks", type=int, default=2, help="a step through the text model")
    parser.add_argument("--pool", type=int, default=0, help="chunks on the device; by its kind")
    parser.add_argument("--painters", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--text-dtype", choices=["float32", "bfloat16"], help="by the kind of device")
    parser.add_argument("--look-share", type=float, default=0.3, help="of the first lesson's loss, in the second")
    parser.add_argument("--matrix-rate", type=float, default=0.015)
    parser.add_argument("--other-rate", type=float, default=0.002)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--falling", type=float, default=0.5, help="share of the second lesson in which the rate falls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-minutes", type=float, default=3.0)
    parser.add_argument("--train-only", action="store_true", help="no table, no export")
    parser.add_argument("--export-only", action="store_true")
    return parser.parse_args()


def save(path: Path, steps: list[int], params: Params, moments: Moments) -> None:
    arrays = {f"params/{name}": np.asarray(value) for name, value in params.items()}
    arrays |= {f"moments/{i}": np.asarray(value) for i, value in enumerate(jax.tree.leaves(moments))}
    arrays["steps"] = np.array(steps)
    partial = path.with_suffix(".partial")
    save_file(arrays, partial)
    partial.rename(path)


def load(path: Path) -> tuple[list[int], Params, list]:
    """Steps of both lessons, weights, and the leaves of the moments."""
    arrays = load_file(path)
    params = {name.removeprefix("params/"): jnp.asarray(v) for name, v in arrays.items() if name.startswith("params/")}
    leaves = [jnp.asarray(arrays[f"moments/{i}"]) for i in range(sum(name.startswith("moments/") for name in arrays))]
    return arrays["steps"].tolist(), params, leaves


def text_params(folder: Path) -> Params:
    return {
        name: jnp.asarray(value, jnp.float32)
        for name, value in load_file(folder / "model.safetensors").items()
        if name.startswith("model.")
    }


def shares(counts: list[dict]) -> str:
    summed = {name: np.sum([np.asarray(each[name]) for each in counts], 0) for name in counts[0]}
    return " ".join(f"{name} {100 * right / max(1, asked):.0f}%" for name, (right, asked) in summed.items())


def tell(what: str) -> None:
    print(f"{time.monotonic() - STARTED:.0f} s: {what}", flush=True)


class Step(NamedTuple):
    program: Callable
    num_chunks: int
    of: Callable[[Pool], tuple]  # what of the pool, and what else, goes into it


class Trainer:
    """Steps of both lessons: run, reported and saved."""

    def __init__(self, arguments: argparse.Namespace, eye: Eye):
        self.work_dir, self.ends = arguments.work_dir, STARTED + 60 * arguments.minutes - 4
        self.pause, self.saved = 60 * arguments.checkpoint_minutes, time.monotonic()
        self.params = init_eye(eye, arguments.seed) | looking.init_heads(eye)
        self.moments, self.steps = init_moments(self.params, looking.is_matrix), [0, 0]
        resumed = arguments.resume or self.work_dir / "latest.safetensors"
        if arguments.resume or resumed.exists():
            self.steps, self.params, leaves = load(resumed)
            self.moments = jax.tree.unflatten(jax.tree.structure(self.moments), leaves)
        self.stopped: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: self.stopped.append(number))

    def save(self, name: str) -> None:
        save(self.work_dir / f"{name}.safetensors", self.steps, self.params, self.moments)
        self.saved = time.monotonic()

    def run(self, lesson: int, pool: Pool, step: Step, rate: Callable[[], float], over: Callable[[], bool]) -> None:
        """Steps until the lesson is over. The device is never more than a few steps behind."""
        behind: collections.deque = collections.deque()
        losses: list = []
        counts: list = []
        reported, first = time.monotonic(), self.steps[lesson]
        while not over():
            pool.fill(step.num_chunks * 4)
            factor = np.float32(min(rate(), (self.steps[lesson] + 1) / 50))
            chunks = pool.pick(step.num_chunks)
            given = step.of(pool)
            self.params, self.moments, loss, count = step.program(self.params, self.moments, *given, chunks, factor)
            self.steps[lesson] += 1
            behind.append(loss)
            if len(behind) > 6:
                behind.popleft().block_until_ready()
            if self.steps[lesson] % 8 == 0 or not losses:
                losses.append(loss)
                counts.append(count)
            now = time.monotonic()
            if now - reported > REPORT_SECONDS:
                per_second = (self.steps[lesson] - first) / (now - reported)
                told = f"steps {self.steps}, {per_second:.1f} a second, {pool.drawn} chunks drawn, rate {factor:.3f}"
                tell(f"{told}, loss {np.mean(losses):.3f}: {shares(counts)}")
                losses, counts, reported, first = [], [], now, self.steps[lesson]
            if self.stopped or now - self.saved > self.pause:
                self.save("latest")
            if self.stopped:
                raise SystemExit("stopped; the next run goes on from here")


def compiling(threads: Executor, function: Callable, num_chunks: int, *given) -> Future:
    """A step's program, from arguments such as those given. The device goes on meanwhile."""
    arguments = *given, np.zeros(num_chunks, np.int32), np.float32(0)
    shapes = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), arguments)
    return threads.submit(lambda: function.lower(*shapes).compile())


def train(arguments: argparse.Namespace, eye: Eye, tokenizer: Tokenizer) -> Params:
    on_gpu = jax.default_backend() == "gpu"
    trainer = Trainer(arguments, eye)
    painters = Painters(arguments.painters, tokenizer, f"seed {arguments.seed}, from {trainer.steps}")
    try:
        pool = Pool(painters, arguments.pool or (1024 if on_gpu else 64), arguments.seed)
        text = text_params(arguments.demo)
        names = looking.name_embeddings(np.asarray(text["model.embed_tokens.weight"]), tokenizer)
        dtype = arguments.text_dtype or ("bfloat16" if on_gpu else "float32")
        text = {name: value.astype(dtype) for name, value in text.items()}
        lessons(arguments, eye, trainer, pool, text, tuple(map(jnp.asarray, names)))
    finally:
        painters.stop()
    return trainer.params


def lessons(arguments: argparse.Namespace, eye: Eye, trainer: Trainer, pool: Pool, text: Params, names: tuple) -> None:
    rates = Rates(arguments.matrix_rate, arguments.other_rate, arguments.weight_decay)
    answer = seeing.make_answer_step(Shape(), eye, rates, arguments.look_share)
    learned = trainer.params, trainer.moments
    with ThreadPoolExecutor(2) as threads:
        answering = compiling(threads, answer, arguments.chunks, *learned, text, pool.rows)
        if trainer.steps[1] == 0:
            look = looking.make_look_step(eye, rates)
            looks = compiling(threads, look, arguments.look_chunks, *learned, names, pool.rows.look).result()
            tell("the first lesson begins")
            until = STARTED + 60 * arguments.minutes * arguments.look_time
            step = Step(looks, arguments.look_chunks, lambda pool: (names, pool.rows.look))
            trainer.run(0, pool, step, lambda: 1.0, lambda: time.monotonic() > until and answering.done())
        step = Step(answering.result(), arguments.chunks, lambda pool: (text, pool.rows))
    began = time.monotonic()
    tell("the second lesson begins")
    falls = began + (trainer.ends - began) * (1 - arguments.falling)
    trainer.run(1, pool, step, lambda: 1.0, lambda: time.monotonic() > falls)
    trainer.save("steady")
    rate = lambda: max(0.0, (trainer.ends - time.monotonic()) / (trainer.ends - falls))
    trainer.run(1, pool, step, rate, lambda: time.monotonic() > trainer.ends)
    trainer.save("latest")
    tell(f"trained for {trainer.steps} steps")


def main() -> None:
    arguments = parse_arguments()
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = with_picture_marks(Tokenizer.from_file(str(arguments.demo / "tokenizer.json")))
    eye, shape = Eye(), Shape()
    if arguments.export_only:
        _, params, _ = load(arguments.work_dir / "latest.safetensors")
    else:
        params = train(arguments, eye, tokenizer)
    if arguments.train_only:
        return
    text = text_params(arguments.demo)
    found = seeing.evaluate(params, text, tokenizer, shape, eye, arguments.questions)
    card = card_of_eyes(params, found)
    export_eyes(arguments.output, arguments.demo, params, tokenizer, shape, eye, card)
    if arguments.whole:
        export_whole(arguments.whole, arguments.demo, params, tokenizer, shape, eye)
    print(card)


if __name__ == "__main__":
    main()
