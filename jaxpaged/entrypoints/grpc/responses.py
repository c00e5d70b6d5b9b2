"""Results of the engine as messages of `jaxpaged.proto`, in bytes.

This module knows neither requests nor transport.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.entrypoints.for_trainers import npy_of
from jaxpaged.entrypoints.grpc.wire_format import nested, packed, varint
from jaxpaged.messages import CompletionOutput, Logprob, RequestOutput
from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.serving.adapters import ServedAdapter
from jaxpaged.serving.output_reader import OutputReader, UsageCounter
from jaxpaged.serving.service import Service


class Responses:
    """The responses to one request. `new_reader` makes what reads a sequence of a chat; None: all text is content."""

    def __init__(
        self,
        request_id: str,
        new_reader: Callable[[], OutputReader] | None,
        tokenizer: Tokenizer,
        *,
        with_prompt: bool,
        with_cached_tokens: bool,
        media_tokens: Mapping[str, int] = MappingProxyType({}),
    ):
        self._request_id = request_id
        self._head = nested(1, request_id.encode())
        self._new_reader = new_reader
        self._tokenizer = tokenizer
        self._readers: dict[int, OutputReader] = {}
        self._with_prompt = with_prompt
        self._usage = UsageCounter(with_cached_tokens, media_tokens)
        self._begun = False

    def of(self, output: RequestOutput) -> bytes:
        """The response to a result: a `GenerateResponse`; empty when it says nothing that a client sees."""
        self._usage.add(0, output)
        if self._is_plain(output):
            sequences = b"".join([sequence_delta(each) for each in output.outputs])
            return self._head + sequences if sequences else b""
        response = pb.GenerateResponse()
        return response.SerializeToString() if self._write(output, response) else b""

    def _is_plain(self, output: RequestOutput) -> bool:
        """Whether a result brings nothing but more tokens, all of whose text is content. This is the way of most."""
        if output.finished or self._new_reader is not None or not self._begun or output.prompt_logprobs is not None:
            return False
        others = [
            each for each in output.outputs if each.finish_reason is not None or each.logprobs or each.sampling_mask
        ]
        return not others

    def _write(self, output: RequestOutput, response: pb.GenerateResponse) -> bool:
        """Write what a result says into an empty response; False when that is nothing that a client sees."""
        for completion in output.outputs:
            self._add(response, completion)
        if not self._begun and self._with_prompt:
            response.prompt_token_ids.ids.extend(output.prompt_token_ids)
        if output.prompt_logprobs is not None:
            response.prompt_logprobs.extend(self._candidates(each) for each in output.prompt_logprobs)
        if output.finished:
            response.usage.CopyFrom(usage_message(self._usage))
            if output.kv_transfer_params:
                response.kv_transfer_params.update(output.kv_transfer_params)
        elif not response.sequences and (self._begun or not self._with_prompt):
            return False
        response.request_id = self._request_id
        self._begun = True
        return True

    def _add(self, response: pb.GenerateResponse, completion: CompletionOutput) -> None:
        text, finish_reason, stop_reason = completion.text, completion.finish_reason, completion.stop_reason
        if self._new_reader is None:
            if not (text or completion.token_ids or finish_reason):
                return
            sequence = response.sequences.add()
            sequence.text = text
        else:
            reader = self._readers.get(completion.index)
            if reader is None:
                reader = self._readers[completion.index] = self._new_reader()
            part = reader.read(completion)
            finish_reason = part.finish_reason
            if not (part.deltas or completion.token_ids or finish_reason):
                return
            sequence = response.sequences.add()
            sequence.text = "".join(delta.content or "" for delta in part.deltas)
            sequence.reasoning = "".join(delta.reasoning or "" for delta in part.deltas)
            for call in filter(None, (delta.tool_call for delta in part.deltas)):
                sequence.tool_calls.add(
                    index=call.index, id=call.id or "", name=call.name or "", arguments=call.arguments
                )
        sequence.index = completion.index
        sequence.token_ids.extend(completion.token_ids)
        if completion.logprobs:
            sequence.logprobs.extend(self._candidates(each) for each in completion.logprobs)
        if completion.sampling_mask is not None:
            sequence.sampling_mask.extend(pb.TokenIds(ids=each) for each in completion.sampling_mask.token_ids)
        if completion.routed_experts is not None:
            sequence.routed_experts = npy_of(completion.routed_experts)
        if finish_reason is not None:
            sequence.finish_reason = finish_reason
            if isinstance(stop_reason, str):
                sequence.stop_text = stop_reason
            elif stop_reason is not None:
                sequence.stop_token_id = stop_reason

    def _candidates(self, of_position: dict[int, Logprob] | None) -> pb.TokenLogprobs:
        """The candidates of a position, in the engine's order; none for the first token of a prompt."""
        message = pb.TokenLogprobs()
        for token_id, each in (of_position or {}).items():
            text = each.decoded_token or ""
            own = self._tokenizer.bytes_of(token_id, text) if each.decoded_token is not None else b""
            message.candidates.add(
                token_id=token_id,
                logprob=each.logprob,
                rank=each.rank or 0,
                token=text,
                token_bytes=own if own != text.encode() else b"",
            )
        return message


def sequence_delta(completion: CompletionOutput) -> bytes:
    """More text and tokens as a field `sequences`; empty where there are none."""
    text, token_ids = completion.text, completion.token_ids
    if not (text or token_ids):
        return b""
    delta = b"\x08" + varint(completion.index) if completion.index else b""
    if text:
        delta += nested(2, text.encode())
    if token_ids:
        delta += packed(3, token_ids)
    return nested(2, delta)


def usage_message(counter: UsageCounter) -> pb.Usage:
    message = pb.Usage(prompt_tokens=counter.num_prompt_tokens, completion_tokens=counter.num_completion_tokens)
    message.image_tokens = counter.media_tokens.get("image", 0)
    if (cached := counter.num_cached_tokens) is not None:
        message.cached_tokens = cached
    return message


def vectors(numbers: Iterable[Sequence[float]]) -> list[pb.Vector]:
    return [pb.Vector(values=each) for each in numbers]


def lora_adapter(service: Service, served: ServedAdapter) -> pb.LoraAdapter:
    info, base = served.info, served.base_model_name or service.model.names[0]
    return pb.LoraAdapter(name=info.lora_name, path=info.lora_path, base_model_name=base, rank=info.rank)
