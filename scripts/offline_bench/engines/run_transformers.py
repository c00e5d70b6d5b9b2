"""transformers' `generate`: static batches, padded on the left.

Requests are sorted by length and batched while the padded tokens stay within a limit, as a careful user would do it:
without that, one long prompt would pad all others to its length. A batch runs until its longest output is done.
"""

import time

from session import Session, Watch

MOST_ROWS = 32
MOST_PADDED_TOKENS = 24_576


def batches(requests: list[dict]) -> list[list[int]]:
    """Indices of requests that run together, longest last."""
    found: list[list[int]] = []
    order = sorted(range(len(requests)), key=lambda index: len(requests[index]["prompt_token_ids"]))
    for index in order:
        length = len(requests[index]["prompt_token_ids"])
        if found and len(found[-1]) < MOST_ROWS and length * (len(found[-1]) + 1) <= MOST_PADDED_TOKENS:
            found[-1].append(index)
        else:
            found.append([index])
    return found


class TransformersEngine:
    def __init__(self, job: dict):
        import torch
        import transformers

        torch.set_num_threads(job["threads"])
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)
        self.model = model.to(self.device).eval()
        self.model.generation_config.eos_token_id = None  # nothing ends early
        self.model.generation_config.pad_token_id = 0
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def settle(self) -> None:
        """Nothing runs in the background."""

    def complete(self, requests: list[dict], watch: Watch, shared_prefix: int) -> None:
        for batch in batches(requests):
            self._complete_batch([requests[index] for index in batch], batch, watch)

    def _complete_batch(self, requests: list[dict], indices: list[int], watch: Watch) -> None:
        import torch

        prompts = [request["prompt_token_ids"] for request in requests]
        longest = max(map(len, prompts))
        token_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        step_times: list[float] = []

        def note_time(token_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            step_times.append(time.perf_counter())
            return torch.zeros(len(token_ids), dtype=torch.bool, device=token_ids.device)

        with torch.inference_mode():
            output = self.model.generate(
                input_ids=token_ids.to(self.device),
                attention_mask=mask.to(self.device),
                do_sample=False,
                max_new_tokens=max(request["max_tokens"] for request in requests),
                stopping_criteria=[note_time],
            )
        for index, request, row in zip(indices, requests, output[:, longest:].tolist()):
            for token, at in zip(row[: request["max_tokens"]], step_times):
                watch.add(index, [token], at)


def main() -> None:
    session = Session()
    session.run(TransformersEngine(session.job))


if __name__ == "__main__":
    main()
