"""Trains the eyes of the demo model: the tower and the projector through which it sees pictures.

The pictures are drawn here. First the tower learns to tell what covers each part of a picture; then it learns to
answer through the text model, which is frozen: what that says without pictures stays as it was. An interrupted run
goes on from its last checkpoint; `--export-only` writes the current one.
"""

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo_model import looking, seeing
from demo_model.card_eyes import card_of_eyes
from demo_model.corpus import stream
from demo_model.export_eyes import export_eyes, export_whole
from demo_model.network import Params, Shape
from demo_model.tokenizer import with_picture_marks
from demo_model.tower import Eye, init_eye

ASSETS = Path(__file__).resolve().parent.parent / "jaxpaged" / "assets"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--demo", type=Path, default=ASSETS / "demo", help="the text model")
    parser.add_argument("--output", type=Path, default=ASSETS / "demo-vision", help="beside the text model")
    parser.add_argument("--whole", type=Path, metavar="FOLDER", help="write all weights there too, for transformers")
    parser.add_argument("--questions", type=int, default=192, help="per task, in the final table")
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "jaxpaged-demo-eyes")
    parser.add_argument("--look-steps", type=int, default=1500, help="of the tower alone")
    parser.add_argument("--steps", type=int, default=1200, help="through the text model")
    parser.add_argument("--look-pictures", type=int, default=32, help="a step")
    parser.add_argument("--rows", type=int, default=16, help="a step")
    parser.add_argument("--look-share", type=float, default=0.3)
    parser.add_argument("--matrix-rate", type=float, default=0.02)
    parser.add_argument("--other-rate", type=float, default=0.003)
    parser.add_argument("--decay", type=float, default=0.4, help="share of the steps in which the rate falls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-minutes", type=float, default=3.0)
    parser.add_argument("--report-minutes", type=float, default=8.0)
    parser.add_argument("--export-only", action="store_true")
    return parser.parse_args()


def save(path: Path, step: int, params: Params, state) -> None:
    arrays = {f"params/{name}": np.asarray(value) for name, value in params.items()}
    arrays |= {f"state/{i}": np.asarray(value) for i, value in enumerate(jax.tree.leaves(state))}
    arrays["step"] = np.array([step])
    partial = path.with_suffix(".partial")
    save_file(arrays, partial)
    partial.rename(path)


def load(path: Path) -> tuple[int, Params, list]:
    arrays = load_file(path)
    params = {name.removeprefix("params/"): jnp.asarray(v) for name, v in arrays.items() if name.startswith("params/")}
    leaves = [jnp.asarray(arrays[f"state/{i}"]) for i in range(sum(name.startswith("state/") for name in arrays))]
    return int(arrays["step"][0]), params, leaves


def text_params(folder: Path) -> Params:
    return {
        name: jnp.asarray(value, jnp.float32)
        for name, value in load_file(folder / "model.safetensors").items()
        if name.startswith("model.")
    }


class Trainer:
    """Steps of one stage, counted, reported and saved."""

    def __init__(self, path: Path, minutes: float, params: Params, optimizer):
        self.path, self.seconds = path, 60 * minutes
        self.params, self.state, self.step = params, optimizer.init(params), 0
        if path.exists():
            self.step, self.params, leaves = load(path)
            self.state = jax.tree.unflatten(jax.tree.structure(self.state), leaves)
        self.saved = time.monotonic()
        self.stopped: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: self.stopped.append(number))

    def after_step(self, last: bool) -> bool:
        """Whether a checkpoint was written."""
        self.step += 1
        if not (self.stopped or last or time.monotonic() - self.saved > self.seconds):
            return False
        save(self.path, self.step, self.params, self.state)
        if self.stopped:
            raise SystemExit("stopped; the next run goes on from here")
        self.saved = time.monotonic()
        return True


def shares(counts: list[dict]) -> str:
    summed = {name: np.sum([np.asarray(each[name]) for each in counts], 0) for name in counts[0]}
    return " ".join(f"{name} {100 * right / max(1, asked):.0f}%" for name, (right, asked) in summed.items())


def look(arguments: argparse.Namespace, eye: Eye, text: Params, tokenizer: Tokenizer) -> Params:
    """The first lesson."""
    optimizer = looking.make_optimizer(arguments.matrix_rate, arguments.other_rate)
    params = init_eye(eye, arguments.seed) | looking.init_heads(eye)
    trainer = Trainer(arguments.work_dir / "look.safetensors", arguments.checkpoint_minutes, params, optimizer)
    names = looking.name_embeddings(np.asarray(text["model.embed_tokens.weight"]), tokenizer)
    run_step = looking.make_look_step(eye, optimizer, tuple(map(jnp.asarray, names)))
    rng = stream(arguments.seed, f"look from {trainer.step}")
    losses, counts, began = [], [], time.process_time()
    while trainer.step < arguments.look_steps:
        batch = looking.labelled(looking.draw_scenes(rng, arguments.look_pictures))
        rate = min(1.0, (trainer.step + 1) / 40)
        trainer.params, trainer.state, loss, count = run_step(trainer.params, trainer.state, batch, rate)
        losses.append(loss)
        counts.append(count)
        if len(losses) == 50:
            used = time.process_time() - began
            print(f"look {trainer.step + 1} loss {np.mean(losses):.3f} cpu {used:.0f}", shares(counts), flush=True)
            losses, counts = [], []
        trainer.after_step(trainer.step + 1 == arguments.look_steps)
    return trainer.params


def answer(arguments: argparse.Namespace, eye: Eye, text: Params, tokenizer: Tokenizer, params: Params) -> Params:
    """The second lesson."""
    shape = Shape()
    optimizer = looking.make_optimizer(arguments.matrix_rate, arguments.other_rate)
    trainer = Trainer(arguments.work_dir / "answer.safetensors", arguments.checkpoint_minutes, params, optimizer)
    run_step = seeing.make_answer_step(shape, eye, optimizer, arguments.look_share)
    rng = stream(arguments.seed, f"answers from {trainer.step}")
    losses, counts, began, reported = [], [], time.process_time(), time.monotonic()
    while trainer.step < arguments.steps:
        rows = seeing.draw_rows(rng, tokenizer, arguments.rows)
        falling = (arguments.steps - trainer.step) / (arguments.steps * arguments.decay)
        rate = min(1.0, (trainer.step + 1) / 40, falling)
        trainer.params, trainer.state, loss, count = run_step(trainer.params, trainer.state, text, rows, rate)
        losses.append(loss)
        counts.append(count)
        if len(losses) == 25:
            used = time.process_time() - began
            print(f"answer {trainer.step + 1} loss {np.mean(losses):.3f} cpu {used:.0f}", shares(counts), flush=True)
            losses, counts = [], []
        saved = trainer.after_step(trainer.step + 1 == arguments.steps)
        if saved and time.monotonic() - reported > 60 * arguments.report_minutes:
            print(seeing.table(seeing.evaluate(trainer.params, text, tokenizer, shape, eye, 32)), flush=True)
            reported = time.monotonic()
    return trainer.params


def main() -> None:
    arguments = parse_arguments()
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = with_picture_marks(Tokenizer.from_file(str(arguments.demo / "tokenizer.json")))
    text, eye, shape = text_params(arguments.demo), Eye(), Shape()
    if arguments.export_only:
        _, params, _ = load(arguments.work_dir / "answer.safetensors")
    else:
        params = look(arguments, eye, text, tokenizer)
        params = answer(arguments, eye, text, tokenizer, params)
    found = seeing.evaluate(params, text, tokenizer, shape, eye, arguments.questions)
    card = card_of_eyes(params, found)
    export_eyes(arguments.output, arguments.demo, params, tokenizer, shape, eye, card)
    if arguments.whole:
        export_whole(arguments.whole, arguments.demo, params, tokenizer, shape, eye)
    print(card)


if __name__ == "__main__":
    main()
