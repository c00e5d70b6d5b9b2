"""Fields of a `quantization_config`, each checked for its type. Those that nobody reads would change what weights mean,
so they are errors, unless they are known to say nothing of them."""

import re
from collections.abc import Container, Mapping
from typing import Any

from jaxpaged.errors import CheckpointError

RECORDS = frozenset(
    """
    quant_method quantization_status quantizer version_info global_compression_ratio meta producer date name_or_path
    damp_percent damp_auto_increment true_sequential static_groups mse model_name_or_path model_file_base_name
    cache_block_outputs use_exllama exllama_config max_input_length use_cuda_fp16 tokenizer dataset batch_size
    pad_token_id disable_exllama module_name_preceding_first_block block_name_to_quantize model_seqlen
    autoround_version iters nsamples seqlen enable_quanted_input lr minmax_lr low_gpu_mem_usage enable_minmax_tuning
    backend do_fuse fuse_max_seq_len modules_to_fuse pack_dtype pack_impl lm_head_name offload_to_disk uri gptaq v2
    failsafe hyb_act mock_quantization act_group_aware fallback foem observer scale_fmt
    """.split()
)
"""Records of how scales were found, and options of other programs."""


class Fields:
    """Of `given`, which lies in `source`; `place` is where in it, such as "quantization_config"."""

    def __init__(self, given: Mapping[str, Any], source: str, place: str):
        self.given, self.source, self.place = given, source, place
        self.read: set[str] = set()

    def value(self, *names: str, default: Any = None) -> Any:
        """The first of the names that is there and not null."""
        self.read.update(names)
        return next((self.given[name] for name in names if self.given.get(name) is not None), default)

    def whole(self, *names: str, default: int | None = None) -> int:
        """A whole number."""
        found = self.value(*names, default=default)
        if type(found) is not int:
            raise self.error(names[0], found, "a whole number")
        return found

    def flag(self, name: str, default: bool) -> bool:
        found = self.value(name, default=default)
        if not isinstance(found, bool):
            raise self.error(name, found, "true or false")
        return found

    def choice(self, name: str, choices: Container[Any], default: Any = None) -> Any:
        """One of `choices`, of which some are strings."""
        found = self.value(name, default=default)
        found = found.lower() if isinstance(found, str) else found
        if isinstance(found, list | dict) or found not in choices:
            raise self.error(name, found, f"one of {', '.join(map(repr, choices))}")  # type: ignore[call-overload]
        return found

    def names(self, *names: str) -> tuple[str, ...]:
        """A list of texts; empty where it is not there."""
        found = self.value(*names, default=[])
        if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
            raise self.error(names[0], found, "a list of names")
        return tuple(found)

    def group(self, name: str, found: Any) -> int | None:
        """How many inputs share a scale, as `found` says; None: all of them, which is spelled -1 as well."""
        if found is not None and (type(found) is not int or found == 0 or found < -1):
            raise self.error(name, found, "a positive whole number, or -1 for all inputs")
        return None if found == -1 else found

    def block(self, name: str, found: Any) -> tuple[int, int]:
        """How many outputs and inputs share a scale, as the list `found` says."""
        if not (isinstance(found, list) and len(found) == 2 and all(type(n) is int and n > 0 for n in found)):
            raise self.error(name, found, "two positive whole numbers")
        return found[0], found[1]

    def pattern(self, name: str, entry: str, pattern: str, wanted: str = "a regular expression") -> str:
        """The regular expression in an entry of a field."""
        try:
            re.compile(pattern)
        except re.error as error:
            raise self.error(name, entry, f"{wanted} ({error})") from None
        return pattern

    def refuse_unread(self, others: Container[str] = ()) -> None:
        """CheckpointError for a field that nobody read, unless it is in `others`, or says nothing."""
        for name, found in self.given.items():
            said = found not in (None, False, [], {}, "")
            if said and name not in self.read and name not in RECORDS and name not in others:
                raise CheckpointError(
                    f"{self.source}: {self.place}.{name} is {short(found)}. Nothing is known of this field, and it may "
                    "change what weights mean. If it does not, take it out; if it does, the model is not supported."
                )

    def error(self, name: str, found: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {self.place}.{name} is {short(found)}; it must be {wanted}.")


def short(value: Any) -> str:
    """`value` as a message shows it: at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
