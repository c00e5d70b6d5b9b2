"""transformers' continuous batching: the manager behind `generate_batch`, kept between workloads, as a server would."""

from session import Session, Watch

SILENCE_SECONDS = 1.0
CPU_MEMORY_SHARE = 0.2  # of what is free, for the KV cache; by default it fills most of the machine


class ContinuousEngine:
    def __init__(self, job: dict):
        import torch
        import transformers

        torch.set_num_threads(job["threads"])
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16).to(device).eval()
        settings = transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=job["max_model_len"]
        )
        memory = None if device == "cuda" else CPU_MEMORY_SHARE
        batching = transformers.ContinuousBatchingConfig(max_memory_percent=memory)
        self.manager = model.init_continuous_batching(generation_config=settings, continuous_batching_config=batching)
        self.manager.start()
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self.next_id = 0

    def settle(self) -> None:
        """Nothing is left: the manager warms up before it starts."""

    def complete(self, requests: list[dict], watch: Watch, shared_prefix: int) -> None:
        first_id, self.next_id = self.next_id, self.next_id + len(requests)
        for index, request in enumerate(requests):
            self.manager.add_request(
                request["prompt_token_ids"],
                request_id=str(first_id + index),
                max_new_tokens=request["max_tokens"],
                record_timestamps=True,
            )
        finished = 0
        while finished < len(requests):
            result = self.manager.get_result(timeout=SILENCE_SECONDS)
            if result is None and not self.manager.is_running():
                raise RuntimeError("the manager's thread ended. Its error is in the log.")
            if result is None or not result.is_finished():
                continue
            if result.error is not None:
                raise RuntimeError(str(result.error))
            finished += 1
            for token, at in zip(result.generated_tokens, result.timestamps):
                watch.add(int(result.request_id) - first_id, [token], at)


def main() -> None:
    session = Session()
    engine = ContinuousEngine(session.job)
    session.run(engine)
    engine.manager.stop(block=True, timeout=5)


if __name__ == "__main__":
    main()
