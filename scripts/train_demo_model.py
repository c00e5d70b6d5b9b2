"""Trains the small model that ships inside the package as its demo.

Everything is made here: the texts, the tokenizer, and the weights, on two CPU
cores and without any outside data.  An interrupted run goes on from its last
checkpoint; ``--export-only`` writes the current one as a model folder.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo_model import corpus
from demo_model.card import model_card
from demo_model.evaluate import evaluate, table
from demo_model.export import export
from demo_model.network import Params, Shape, init_params
from demo_model.tokenizer import train_tokenizer
from demo_model.training import Plan, load_params, train

REPOSITORY = Path(__file__).resolve().parent.parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "jaxpaged" / "assets" / "demo")
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path(tempfile.gettempdir()) / "jaxpaged-demo-model",
        help="where checkpoints are kept; a run resumes from the last one",
    )
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--matrix-rate", type=float, default=Plan.matrix_rate)
    parser.add_argument("--other-rate", type=float, default=Plan.other_rate)
    parser.add_argument("--export-only", action="store_true", help="evaluate and export, do not train")
    parser.add_argument("--questions", type=int, default=200, help="per task, in the final table")
    parser.add_argument(
        "--weight",
        action="append",
        default=[],
        metavar="TASK=NUMBER",
        help="change how often a task is drawn, e.g. --weight addition=30",
    )
    return parser.parse_args()


def make_plan(arguments: argparse.Namespace) -> Plan:
    mix = dict(corpus.DEFAULT_MIX)
    for change in arguments.weight:
        task, number = change.split("=")
        if task not in mix:
            raise SystemExit(f"no task {task!r}; tasks are {', '.join(mix)}")
        mix[task] = float(number)
    return Plan(
        seed=arguments.seed,
        steps=arguments.steps,
        matrix_rate=arguments.matrix_rate,
        other_rate=arguments.other_rate,
        mix=mix,
    )


def get_tokenizer(folder: Path, shape: Shape) -> Tokenizer:
    """The tokenizer of an earlier start of this run, or a new one."""
    path = folder / "tokenizer.json"
    if not path.exists():
        texts = corpus.tokenizer_texts(seed=0, count=20_000)
        train_tokenizer(texts, shape.vocab_size).save(str(path))
    return Tokenizer.from_file(str(path))


def main() -> None:
    arguments = parse_arguments()
    shape, plan = Shape(), make_plan(arguments)
    folder: Path = arguments.work_dir
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = get_tokenizer(folder, shape)

    def report(params: Params, step: int, seconds: float) -> None:
        began = time.monotonic()
        far = 4 if step > plan.long_from * plan.steps else 0
        scores = evaluate(params, shape, tokenizer, count=24, long_count=far)
        print(f"after step {step}, {seconds:.0f} s of training:")
        took = time.monotonic() - began
        print(table(scores), f"\n(evaluated in {took:.0f} s)", flush=True)

    if arguments.export_only:
        params, steps, seconds = load_params(folder)
    else:
        params = init_params(shape, plan.seed)
        steps = plan.steps
        params, seconds = train(params, shape, tokenizer, plan, folder, report)
    exact = evaluate(params, shape, tokenizer, arguments.questions, 50)
    rounded = evaluate(params, shape, tokenizer, arguments.questions // 6, 10, jnp.bfloat16)
    card = model_card(params, exact, rounded, steps, seconds)
    export(arguments.output, params, shape, tokenizer, card)
    print(card)


if __name__ == "__main__":
    main()
