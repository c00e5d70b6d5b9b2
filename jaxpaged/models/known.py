"""The models that are supported, by the names that people know: for `jaxpaged models --supported` and the guide.

Data only, so that a list costs no start of jax. Tests hold it to `registry.py` and to the formats of weights.
"""

from dataclasses import dataclass

FORMATS = ("fp8", "gptq", "awq", "compressed-tensors", "modelopt")
"""`quant_method` of quantised checkpoints that every architecture takes, beside float32, bfloat16 and float16."""
TEXT, PICTURES, LANGUAGE_MODEL_ONLY = "text", "text, pictures", "text, with --language-model-only"


@dataclass(frozen=True)
class Known:
    """An architecture of config.json, what it `reads`, and `models` that have it.

    `gguf`: `general.architecture` of files that hold such models, of those that see the language model only.
    `formats`: `quant_method` of checkpoints.
    `pools_only`: an encoder, which generates nothing.
    """

    architecture: str
    models: tuple[str, ...]
    reads: str = TEXT
    gguf: str | None = None
    formats: tuple[str, ...] = FORMATS
    pools_only: bool = False


KNOWN = (
    Known("LlamaForCausalLM", ("Llama 2", "Llama 3", "others with the same layers"), gguf="llama"),
    Known("Llama4ForCausalLM", ("Llama 4 for text",), gguf="llama4"),
    Known("Llama4ForConditionalGeneration", ("Llama 4",), LANGUAGE_MODEL_ONLY),
    Known("MistralForCausalLM", ("Mistral 7B", "Mistral Nemo", "Mistral Small 3"), gguf="llama"),
    Known("MixtralForCausalLM", ("Mixtral",), gguf="llama"),
    Known("Ministral3ForCausalLM", ("Ministral 3 for text",), gguf="mistral3"),
    Known("Mistral4ForCausalLM", ("Mistral Small 4 for text",), gguf="mistral4"),
    Known(
        "Mistral3ForConditionalGeneration",
        ("Mistral Small 3.1 and 3.2", "Ministral 3", "Mistral Small 4 with --language-model-only"),
        PICTURES,
    ),
    Known("LlavaForConditionalGeneration", ("Pixtral 12B",), PICTURES),
    Known("Qwen2ForCausalLM", ("Qwen 2", "Qwen 2.5"), gguf="qwen2"),
    Known("Qwen3ForCausalLM", ("Qwen 3",), gguf="qwen3"),
    Known("Qwen2MoeForCausalLM", ("Qwen 1.5 and 2 with experts",), gguf="qwen2moe"),
    Known("Qwen3MoeForCausalLM", ("Qwen 3 with experts",), gguf="qwen3moe"),
    Known("Qwen2VLForConditionalGeneration", ("Qwen2-VL",), PICTURES, gguf="qwen2vl"),
    Known("Qwen2_5_VLForConditionalGeneration", ("Qwen2.5-VL",), PICTURES, gguf="qwen2vl"),
    Known("Qwen3VLForConditionalGeneration", ("Qwen3-VL",), PICTURES, gguf="qwen3vl"),
    Known("Qwen3VLMoeForConditionalGeneration", ("Qwen3-VL with experts",), PICTURES, gguf="qwen3vlmoe"),
    Known("MiMoForCausalLM", ("MiMo 7B",)),
    Known("MiMoV2FlashForCausalLM", ("MiMo-V2-Flash", "MiMo-V2.5 and V2.5-Pro in GGUF"), gguf="mimo2"),
    Known("Gemma2ForCausalLM", ("Gemma 2",), gguf="gemma2"),
    Known("Gemma3ForCausalLM", ("Gemma 3 for text",), gguf="gemma3"),
    Known("Gemma3ForConditionalGeneration", ("Gemma 3 4B, 12B and 27B",), PICTURES),
    Known("Gemma4ForCausalLM", ("Gemma 4 for text",), gguf="gemma4"),
    Known("Gemma4ForConditionalGeneration", ("Gemma 4",), PICTURES),
    Known("Phi3ForCausalLM", ("Phi-3", "Phi-4-mini"), gguf="phi3"),
    Known("Glm4ForCausalLM", ("GLM-4 (0414)",), gguf="glm4"),
    Known("Glm4MoeForCausalLM", ("GLM-4.5, 4.6 and 4.7",), gguf="glm4moe"),
    Known("Glm4MoeLiteForCausalLM", ("GLM-4.7-Flash",), gguf="deepseek2"),
    Known("DeepseekV2ForCausalLM", ("DeepSeek-V2",), gguf="deepseek2"),
    Known("DeepseekV3ForCausalLM", ("DeepSeek-V3", "DeepSeek-R1", "Kimi-K2"), gguf="deepseek2"),
    Known("KimiK25ForConditionalGeneration", ("Kimi-K2.5",), LANGUAGE_MODEL_ONLY),
    Known("GptOssForCausalLM", ("GPT-OSS",), gguf="gpt-oss", formats=(*FORMATS, "mxfp4")),
    Known("Lfm2ForCausalLM", ("LFM2", "LFM2.5"), gguf="lfm2"),
    Known("Lfm2MoeForCausalLM", ("LFM2 and LFM2.5 with experts",), gguf="lfm2moe"),
    Known("Olmo2ForCausalLM", ("OLMo 2",), gguf="olmo2"),
    Known("Olmo3ForCausalLM", ("OLMo 3",), gguf="olmo2"),
    Known("Exaone4ForCausalLM", ("EXAONE 4",), gguf="exaone4"),
    Known("GraniteForCausalLM", ("Granite 3",), gguf="granite"),
    Known("SmolLM3ForCausalLM", ("SmolLM 3",), gguf="smollm3"),
    Known("SeedOssForCausalLM", ("Seed-OSS",), gguf="seed_oss"),
    Known("CohereForCausalLM", ("Command R",), gguf="command-r"),
    Known("Cohere2ForCausalLM", ("Command R7B", "Command A"), gguf="cohere2"),
    Known("MiniMaxM2ForCausalLM", ("MiniMax-M2, M2.1 and M2.5",), gguf="minimax-m2"),
    Known("HYV3ForCausalLM", ("Hunyuan Hy3",), gguf="hy_v3"),
    Known("Ernie4_5ForCausalLM", ("ERNIE 4.5",), gguf="ernie4_5"),
    Known("Ernie4_5_MoeForCausalLM", ("ERNIE 4.5 with experts",), gguf="ernie4_5-moe"),
    Known("ApertusForCausalLM", ("Apertus",), gguf="apertus"),
    Known("ArceeForCausalLM", ("Arcee's AFM",), gguf="arcee"),
    Known("MuseGlimmerForConditionalGeneration", ("Muse Glimmer",), LANGUAGE_MODEL_ONLY),
    Known("LagunaForCausalLM", ("Laguna XS.2, S and M.1",), gguf="laguna"),
    Known(
        "BertModel",
        ("all-MiniLM", "BGE", "E5", "GTE", "mxbai Embed", "multilingual E5 small"),
        gguf="bert",
        pools_only=True,
    ),
    Known("BertForSequenceClassification", ("MS MARCO's MiniLM rerankers",), pools_only=True),
    Known("RobertaModel", ("all-RoBERTa", "Granite Embedding"), gguf="bert", pools_only=True),
    Known("RobertaForSequenceClassification", ("cross-encoders of RoBERTa",), gguf="bert", pools_only=True),
    Known("XLMRobertaModel", ("BGE-M3", "multilingual E5", "Arctic Embed L 2"), gguf="bert", pools_only=True),
    Known("XLMRobertaForSequenceClassification", ("BGE reranker", "BGE reranker v2 M3"), gguf="bert", pools_only=True),
    Known(
        "ModernBertModel",
        ("GTE ModernBERT", "ModernBERT Embed", "Granite Embedding R2"),
        gguf="modern-bert",
        pools_only=True,
    ),
    Known("ModernBertForSequenceClassification", ("GTE ModernBERT's reranker",), pools_only=True),
)
"""Every architecture of `registry.MODELS` and of `registry.ENCODERS`, by family; `ForMaskedLM` is taken as `Model`."""
