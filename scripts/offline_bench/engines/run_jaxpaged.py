"""jaxpaged, stepped by hand so that the first token of every request is seen when it comes.

The job's `flags` are the command line's engine options, such as `--quantization int8`, and `--without-kernels`, which
leaves products of few rows and the attention of decodes to XLA, as on a machine without the extra `cpu`.
"""

import argparse
import sys
from typing import Any

from session import Session, Watch


class JaxpagedEngine:
    """`options` are those of the command line; only the compilation cache and `max_model_len` have defaults here."""

    def __init__(self, model: str, options: dict[str, Any]):
        import jax

        import jaxpaged
        from jaxpaged.config import EngineConfig
        from jaxpaged.engine.llm_engine import LLMEngine

        self.engine = LLMEngine.from_config(EngineConfig.from_options(model=model, **options))
        device = jax.devices()[0]
        self.versions = {"jaxpaged": jaxpaged.__version__, "jax": jax.__version__, "device": device.device_kind}
        self.next_id = 0

    def settle(self) -> None:
        self.engine.wait_for_programs()

    def complete(self, requests: list[dict], watch: Watch, shared_prefix: int) -> None:
        from jaxpaged import SamplingParams
        from jaxpaged.sampling_params import RequestOutputKind

        first_id, self.next_id = self.next_id, self.next_id + len(requests)
        for index, request in enumerate(requests):
            params = SamplingParams(
                temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
            self.engine.add_request(str(first_id + index), {"prompt_token_ids": request["prompt_token_ids"]}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.error:
                    raise RuntimeError(str(output.error))
                watch.add(int(output.request_id) - first_id, output.outputs[0].token_ids)


def main() -> None:
    session = Session()
    from jaxpaged.entrypoints.cli.flags import engine_options
    from jaxpaged.entrypoints.option_flags import add_engine_flags

    parser = argparse.ArgumentParser(prog="--jaxpaged")
    add_engine_flags(parser)
    parser.add_argument("--without-kernels", action="store_true")
    flags = parser.parse_args(session.job["flags"])
    if flags.without_kernels:
        sys.modules["llvmlite"] = None  # nobody finds it from now on
    given = engine_options(flags)
    defaults = {
        "max_model_len": session.job["max_model_len"],
        "compilation_cache_dir": session.job["compile_cache"],
    }
    session.run(JaxpagedEngine(session.job["model"], defaults | given))


if __name__ == "__main__":
    main()
